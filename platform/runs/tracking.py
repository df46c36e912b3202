"""MLflow: one MLflow run per run of the pipeline; those of a study are children of its own. No other module uses it."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mcis.datasets.errors import UserError
from mcis.platform.runs.workspace import Workspace, read_json, write_json

# Read when MLflow is imported: it is to tell nobody what runs here, nor to ask for git.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

EXPERIMENT = "mcis"
Watch = Callable[[str, list[dict[str, Any]]], None]
"""Is told what a training under way has logged: its network's name, and the records that are new."""
_MOST_METRICS = 1000
_MOST_PARAMETERS = 100


def tracking_uri(workspace: Workspace) -> str:
    """The value of MLFLOW_TRACKING_URI where it is set, else the SQLite store of the workspace."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{workspace.tracking_store}"


@contextlib.contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Turns errors of MLflow and its database into a UserError that names the store."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise UserError(
            f"MLflow's store {uri} cannot be used: {str(error)[:300]}",
            "a reachable MLflow tracking store with space on its disk",
            "free some space, unset MLFLOW_TRACKING_URI to use the workspace's own store, or start the server it names",
        ) from None


def experiment_page(workspace: Workspace) -> str | None:
    """The page of the runs in MLflow's UI, relative to its address; None where the store has no runs yet.

    Raises:
        UserError: the store cannot be used.
    """
    uri = tracking_uri(workspace)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return None  # to ask for it would make it
    from mlflow.tracking import MlflowClient

    with store_errors(uri):
        experiment = MlflowClient(tracking_uri=uri).get_experiment_by_name(EXPERIMENT)
    return f"#/experiments/{experiment.experiment_id}/runs" if experiment else None


def end_run(workspace: Workspace, name: str, status: str, tags: Mapping[str, str]) -> None:
    """Ends the MLflow run of a run whose process was stopped before it could; nothing where there is none.

    Raises:
        UserError: the store cannot be used.
    """
    from mlflow.tracking import MlflowClient

    record = workspace.run(name, create=False).tracking
    if not record.exists():
        return
    kept = read_json(record)
    with store_errors(kept["uri"]):
        client = MlflowClient(tracking_uri=kept["uri"])
        for key, value in tags.items():
            client.set_tag(kept["run_id"], key, value)
        client.set_terminated(kept["run_id"], status=status)


class Tracker:
    """The MLflow run of a run or study; a restart continues it.

    Args:
        name: of the run, in whose folder the MLflow run's id is kept.
        identity: fingerprint of the configuration. Another one starts a new MLflow run, whose parameters are final.
        parent: id of the MLflow run of the study that the run belongs to.
        watch: see `follow`.

    Raises:
        UserError: the store cannot be used; so does every method.
    """

    def __init__(
        self, workspace: Workspace, name: str, *, identity: str, parent: str | None = None, watch: Watch | None = None
    ):
        from mlflow.tracking import MlflowClient

        for logger in ("alembic", "mlflow"):  # after the import, which sets the levels
            logging.getLogger(logger).setLevel(logging.WARNING)
        logging.getLogger("mlflow.store.db").setLevel(logging.CRITICAL)  # what it logs, it raises too

        self.uri, self.watch = tracking_uri(workspace), watch
        self._sent: dict[str, int] = {}
        with store_errors(self.uri):
            self.client = MlflowClient(tracking_uri=self.uri)
            experiment = self.client.get_experiment_by_name(EXPERIMENT)
            if experiment is None:
                # The workspace's own store keeps its artifacts beside it; a server has a location of its own.
                local = self.uri.startswith("sqlite:")
                location = workspace.tracking_artifacts.as_uri() if local else None
                experiment_id = self.client.create_experiment(EXPERIMENT, artifact_location=location)
            else:
                experiment_id = experiment.experiment_id
            record = workspace.run(name).tracking
            earlier = read_json(record) if record.exists() else {}
            if earlier.get("identity") == identity and earlier.get("uri") == self.uri:
                self.run_id = str(earlier["run_id"])
                self.client.update_run(self.run_id, status="RUNNING")
            else:
                tags = {"mlflow.parentRunId": parent} if parent else {}
                run = self.client.create_run(experiment_id, run_name=name, tags=tags)
                self.run_id = run.info.run_id
                write_json(record, {"identity": identity, "uri": self.uri, "run_id": self.run_id})

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Logs parameters as text; a value of more than 500 characters is cut."""
        from mlflow.entities import Param

        params = [Param(key, str(value)[:500]) for key, value in values.items()]
        for start in range(0, len(params), _MOST_PARAMETERS):
            with store_errors(self.uri):
                self.client.log_batch(self.run_id, params=params[start : start + _MOST_PARAMETERS])

    def tags(self, values: Mapping[str, str]) -> None:
        """Sets tags such as setting and recipe."""
        with store_errors(self.uri):
            for key, value in values.items():
                self.client.set_tag(self.run_id, key, value)

    def steps(self, prefix: str, records: list[dict[str, Any]]) -> None:
        """Logs the records of a training's step log, but for those that this tracker has logged before."""
        from mlflow.entities import Metric

        new = self._new(prefix, records)
        metrics = [
            Metric(f"{prefix}.{key}", float(value), int(record["time"] * 1000), record["step"])
            for record in new
            for key, value in record.items()
            if key not in ("step", "time")
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            with store_errors(self.uri):
                self.client.log_batch(self.run_id, metrics=metrics[start : start + _MOST_METRICS])
        if new:
            self._sent[prefix] = new[-1]["step"]

    def follow(self, prefix: str, records: list[dict[str, Any]]) -> None:
        """As `steps`, while the training goes on: whoever watches the run is told what is new."""
        new = self._new(prefix, records)
        self.steps(prefix, records)
        if new and self.watch:
            self.watch(prefix, new)

    def _new(self, prefix: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The records that were not logged yet."""
        return [record for record in records if record["step"] > self._sent.get(prefix, 0)]

    def metrics(self, values: Mapping[str, float]) -> None:
        """Logs final figures."""
        with store_errors(self.uri):
            for key, value in values.items():
                self.client.log_metric(self.run_id, key, value)

    def metric_at(self, key: str, value: float, step: int) -> None:
        """Logs one point of a curve."""
        with store_errors(self.uri):
            self.client.log_metric(self.run_id, key, value, step=step)

    def artifact(self, path: Path) -> None:
        """Stores a file, or a folder under its name, with the run."""
        with store_errors(self.uri):
            if path.is_dir():
                self.client.log_artifacts(self.run_id, str(path), artifact_path=path.name)
            else:
                self.client.log_artifact(self.run_id, str(path))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ends the MLflow run when the block ends: as FINISHED, as KILLED after Ctrl-C, or else as FAILED."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(UserError):  # the error that ended the block is the one to report
                self.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        self.finish("FINISHED")

    def finish(self, status: str) -> None:
        """Ends the MLflow run as FINISHED, FAILED or KILLED."""
        with store_errors(self.uri):
            self.client.set_terminated(self.run_id, status=status)

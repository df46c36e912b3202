"""What MLflow is to have of a run, as the run's folder keeps it, and how that is uploaded: at a run's end, or later."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from mcis.datasets.errors import UserError
from mcis.platform.runs.files import read_json, write_json
from mcis.platform.runs.progress import read_records
from mcis.platform.runs.tracking_store import client_of, experiment_of, store_errors, tracking_uri
from mcis.platform.runs.workspace import RunFolder, Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

LogModel = Callable[["MlflowClient", str, str, RunFolder, str | None], None]
"""Logs the trained network of a run's folder: to the store, the experiment and the MLflow run of these ids; and
registers it where a name is given."""


class Tracked(BaseModel):
    """What MLflow is to have of a run beside its parameters and tags; `mlflow.json` in the run's folder.

    Attributes:
        uri: of the store.
        identity: fingerprint of the configuration.
        status: that the run ended with.
        sent: MLflow has it all.
        points: value and time of figures by key and step, which is 0 of final ones.
        images: tags that say what images the run reads.
        logs: the step logs of trainings by network, relative to the workspace.
        files: names in the run's folder.
        model: the trained network is logged, and registered as `register_as`.
    """

    uri: str
    identity: str
    run_id: str
    status: str = "KILLED"
    sent: bool = False
    points: dict[str, dict[int, tuple[float, float]]] = {}
    images: dict[str, str] = {}
    logs: dict[str, str] = {}
    files: list[str] = []
    model: bool = False
    register_as: str | None = None

    @classmethod
    def read(cls, folder: RunFolder) -> "Tracked | None":
        """That of a run's folder, None where it has none."""
        try:
            return cls.model_validate(read_json(folder.tracking)) if folder.tracking.exists() else None
        except ValidationError:
            found = f"{folder.tracking} is damaged"
            raise UserError(found, "JSON written by mcis", "remove it and repeat the command") from None

    def write(self, folder: RunFolder) -> None:
        """Writes it into a run's folder."""
        write_json(folder.tracking, self.model_dump())

    def is_in(self, client: "MlflowClient", experiment_id: str) -> bool:
        """Whether the experiment has the MLflow run, which may have been removed."""
        found = client.search_runs([experiment_id], filter_string=f"attributes.run_id = '{self.run_id}'")
        return len(found) > 0

    def upload(self, client: "MlflowClient", workspace: Workspace, name: str, log_model: LogModel | None) -> None:
        """Sends everything that MLflow lacks, and ends the MLflow run; to repeat it changes nothing."""
        folder = workspace.run(name)
        self.upload_figures(client, workspace, {})
        for key, value in self.images.items():
            client.set_tag(self.run_id, key, value)
        for path in (folder.path / file for file in self.files):
            if path.is_dir():
                client.log_artifacts(self.run_id, str(path), artifact_path=path.name)
            elif path.exists():
                client.log_artifact(self.run_id, str(path))
        if self.model and log_model:
            log_model(client, experiment_of(client, workspace), self.run_id, folder, self.register_as)
        if client.get_run(self.run_id).info.status != self.status:
            client.set_terminated(self.run_id, status=self.status)
        self.sent = True
        self.write(folder)

    def upload_figures(self, client: "MlflowClient", workspace: Workspace, sent: dict[str, int]) -> None:
        """Sends the figures and the records of the step logs that MLflow lacks.

        A restart logs steps behind its last checkpoint again, at another speed; MLflow keeps what it has. It takes a
        figure of the same time and value once.

        Args:
            sent: the last step that MLflow has, by network; it is asked where this does not say.
        """
        from mlflow.entities import Metric

        for network, log in self.logs.items():
            if network not in sent:
                history = client.get_metric_history(self.run_id, f"{network}.epoch")
                sent[network] = max((logged.step for logged in history), default=-1)
            new = [record for record in read_records(workspace.root / log) if record["step"] > sent[network]]
            metrics = [
                Metric(f"{network}.{key}", float(value), int(1000 * record["time"]), record["step"])
                for record in new
                for key, value in reversed(record.items())  # `epoch` last: with it all of a record is there
                if key not in ("step", "time")
            ]
            client.log_batch(self.run_id, metrics=metrics)
            sent[network] = max([sent[network], *(record["step"] for record in new)])
        points = [
            Metric(key, value, int(1000 * seconds), step)
            for key, steps in self.points.items()
            for step, (value, seconds) in steps.items()
        ]
        client.log_batch(self.run_id, metrics=points)


def sync(workspace: Workspace, name: str, log_model: LogModel | None) -> None:
    """Sends MLflow what it lacks of a run, whose name is held.

    Raises:
        UserError: the store cannot be used, is another one than that of the run, or has lost the MLflow run.
    """
    uri, folder = tracking_uri(workspace), workspace.run(name, create=False)
    tracked = Tracked.read(folder)
    if tracked is None or tracked.uri != uri:
        raise UserError(
            f"run {name} was logged in {tracked.uri if tracked else 'no store'}, and MLflow's store is {uri}",
            "the same store",
            f"set or unset MLFLOW_TRACKING_URI as it was for the run; then `mcis sync {name}`",
        )
    with store_errors(uri):
        client = client_of(uri)
        if not tracked.is_in(client, experiment_of(client, workspace)):
            raise UserError(
                f"MLflow has no run {tracked.run_id} any more, which {folder.tracking} is of",
                "the run as it was logged",
                "restore it in MLflow, or repeat the command of the run, which makes another one",
            )
        tracked.upload(client, workspace, name, log_model)


def end_run(workspace: Workspace, name: str, status: str, tags: Mapping[str, str]) -> None:
    """Ends the MLflow run of a run whose process was stopped before it could; nothing where there is none.

    Raises:
        UserError: the store cannot be used.
    """
    if tracked := Tracked.read(workspace.run(name, create=False)):
        with store_errors(tracked.uri):
            client = client_of(tracked.uri)
            for key, value in tags.items():
                client.set_tag(tracked.run_id, key, value)
            client.set_terminated(tracked.run_id, status=status)

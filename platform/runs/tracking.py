"""MLflow: one MLflow run per run of the pipeline; those of a study are children of its own.

What is logged goes through an outbox, so that nothing here waits for MLflow, or is lost where a server is away. What an
outbox still has when its call ends is kept in the run's folder, in a file of its own, as calls of the tracker. The next
call under the name makes them, or `mcis sync`; whoever has made them removes the file.
"""

import contextlib
import functools
import getpass
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcis.datasets.errors import UserError
from mcis.datasets.storage.copies import is_there, remove
from mcis.platform.runs.data_sets import DataSet
from mcis.platform.runs.logged_models import TrainedModel, log_model
from mcis.platform.runs.outbox import Outbox
from mcis.platform.runs.progress import console
from mcis.platform.runs.tracking_store import EXPERIMENT, is_local, store_error, store_errors, tracking_uri
from mcis.platform.runs.version import code_digest, git_commit, project_version
from mcis.platform.runs.workspace import Workspace, read_json, write_json

if TYPE_CHECKING:
    from mlflow.entities import Run

Watch = Callable[[str, Sequence[Mapping[str, Any]]], None]
"""Is told what a training under way has logged: its network's name, and the records that are new."""
PATIENCE = 60.0
"""Seconds that the end of a run waits for a server that is away."""
_MARK = "mcis.mark"
"""The tag that a run is known by where a kill kept its id from being written down."""
_MOST_METRICS = 1000
_MOST_PARAMETERS = 100
_LONGEST = 6000
"""Characters of a parameter that MLflow takes."""
_AWAY = (
    "UNAUTHENTICATED",
    "CUSTOMER_UNAUTHORIZED",
    "PERMISSION_DENIED",
    "REQUEST_LIMIT_EXCEEDED",
    "RESOURCE_EXHAUSTED",
)
"""Codes of errors that pass without a change of what is logged, beside those of 500 and more."""


def end_run(workspace: Workspace, name: str, status: str, tags: Mapping[str, str]) -> None:
    """Ends the MLflow run of a run whose process was stopped before it could; nothing where there is none.

    Raises:
        UserError: the store cannot be used.
    """
    from mlflow.tracking import MlflowClient

    record = workspace.run(name, create=False).tracking
    kept = read_json(record) if record.exists() else {}
    if "run_id" not in kept:
        return
    with store_errors(kept["uri"]):
        client = MlflowClient(tracking_uri=kept["uri"])
        for key, value in tags.items():
            client.set_tag(kept["run_id"], key, value)
        client.set_terminated(kept["run_id"], status=status)


def send_unsent(workspace: Workspace, name: str, model: Callable[..., TrainedModel]) -> None:
    """Sends what MLflow lacks of the calls of a run, whose name is held. What it does not take stays in its file.

    Args:
        model: makes the trained network of a run's folder, to be registered under `register` or not.

    Raises:
        UserError: the store cannot be used, an MLflow run was removed, or a call was logged in another store; what was
            logged in this one is sent before.
    """
    uri = tracking_uri(workspace)
    kept = {file: read_json(file) for file in workspace.run(name, create=False).unsent()}
    for file, what in kept.items():
        if what["uri"] == uri:
            _send(workspace, name, file, what, model)
    for file, what in kept.items():
        if what["uri"] != uri:
            raise UserError(
                f"run {name} was logged in {what['uri']}, and MLflow's store is {uri}",
                "the same store",
                f"set or unset MLFLOW_TRACKING_URI as it was for the run, or remove {file}; then `mcis sync {name}`",
            )


def send_earlier(workspace: Workspace, name: str, model: Callable[..., TrainedModel]) -> None:
    """As `send_unsent`, before another call replaces the files of the run; what cannot be sent yet is but a note."""
    try:
        send_unsent(workspace, name, model)
    except UserError as error:
        console.print(f"note: an earlier call is not sent to MLflow: {error.found}; {error.remedy}", markup=False)


def _send(
    workspace: Workspace, name: str, file: Path, kept: Mapping[str, Any], model: Callable[..., TrainedModel]
) -> None:
    """Makes the calls of one file. Files and networks of another MLflow run that has the folder by now are left out."""
    folder = workspace.run(name, create=False)
    tracker = Tracker(workspace, name, identity=kept["identity"], unsent=file)
    own = is_there(folder.tracking) and read_json(folder.tracking).get("run_id") == tracker.run_id
    makes: dict[str, Callable[..., None]] = {
        "parameters": tracker.parameters,
        "tags": tracker.tags,
        "data_sets": lambda rows: tracker.data_sets([DataSet(*row) for row in rows]),
        "steps": tracker.steps,
        "metrics": tracker.metrics,
        "metric_at": tracker.metric_at,
        "system_metrics": tracker.system_metrics,
        "artifact": lambda path: tracker.artifact(Path(path)) if own and Path(path).exists() else None,
        "model": lambda register: tracker.model(model(folder, register=register)) if own else None,
        "finish": tracker.finish,
    }
    for call, *arguments in kept["calls"]:
        makes[call](*arguments)


class Tracker:
    """The MLflow run of a run or study; a restart continues it.

    Each method but the first hands over what is to be logged and does not wait for it.

    Args:
        name: of the run, in whose folder the MLflow run's id is kept.
        identity: fingerprint of the configuration. Another one starts a new MLflow run, whose parameters are final.
        parent: id of the MLflow run of the study that the run belongs to.
        afresh: start a new MLflow run in any case.
        watch: see `follow`.
        unsent: the file of what MLflow lacks of an earlier call, which this tracker is to send: its MLflow run is that
            call's, and the run's folder goes on naming the one that it names.

    Raises:
        UserError: the store cannot be used, or has lost the MLflow run of `unsent`; so does every method, where MLflow
            will never take what was logged.
    """

    def __init__(
        self,
        workspace: Workspace,
        name: str,
        *,
        identity: str,
        parent: str | None = None,
        afresh: bool = False,
        watch: Watch | None = None,
        unsent: Path | None = None,
    ):
        from mlflow.tracking import MlflowClient

        for logger in ("alembic", "mlflow"):  # after the import, which sets the levels
            logging.getLogger(logger).setLevel(logging.WARNING)
        logging.getLogger("mlflow.store.db").setLevel(logging.CRITICAL)  # what it logs, it raises too

        self.uri, self.parent, self._folder = tracking_uri(workspace), parent, workspace.run(name)
        self._identity = identity
        self._logged_steps: dict[str, set[int]] = {}
        self._watch, self._told = watch, dict[str, int]()
        self._outbox = Outbox(away=self._away, on_away=self._tell_away)
        with store_errors(self.uri):
            self.client = MlflowClient(tracking_uri=self.uri)
            self.experiment_id = self._experiment(workspace)
            record = self._folder.tracking
            earlier = read_json(unsent or record) if unsent or record.exists() else {}
            run = self._find(earlier) if earlier.get("uri") == self.uri else None
            self._continues = run is not None and earlier.get("identity") == identity and not afresh
            if unsent and not self._continues:
                raise UserError(
                    f"MLflow has no run {earlier['run_id']} any more, which lacks what is in {unsent}",
                    "the run as it was logged",
                    "restore it in MLflow, or remove the file",
                )
            ended = run and (run.info.status != "RUNNING" or self._folder.unsent(run.info.run_id))
            if run and not self._continues and not ended:  # by its call, nor as what MLflow lacks of it says
                self.client.set_terminated(run.info.run_id, status="KILLED")
            if run is None or not self._continues:
                # Written before the run is made: whoever is killed in between finds it again, and makes no second one.
                written = {"identity": identity, "uri": self.uri, "mark": uuid.uuid4().hex}
                write_json(record, written)
                run = self.client.create_run(
                    self.experiment_id, run_name=name, tags=_origin(parent) | {_MARK: written["mark"]}
                )
                write_json(record, {**written, "run_id": run.info.run_id})
            elif run.info.status != "RUNNING":
                self.client.update_run(run.info.run_id, status="RUNNING")
        self.run_id = run.info.run_id
        self._unsent = unsent or self._folder.new_unsent(self.run_id)
        self._began = run.info.start_time / 1000
        self._parameters, self._metrics = dict(run.data.params), dict(run.data.metrics)

    def _experiment(self, workspace: Workspace) -> str:
        """The id of the experiment, which is made where there is none."""
        from mlflow.exceptions import MlflowException

        for attempt in range(2):
            experiment = self.client.get_experiment_by_name(EXPERIMENT)
            if experiment is not None:
                break
            # The workspace's own store keeps its artifacts beside it; a server has a location of its own.
            location = workspace.tracking_artifacts.as_uri() if is_local(self.uri) else None
            try:
                return str(self.client.create_experiment(EXPERIMENT, artifact_location=location))
            except MlflowException as error:
                if attempt or error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run was faster
                    raise
        assert experiment is not None
        return str(experiment.experiment_id)

    def _find(self, earlier: Mapping[str, str]) -> "Run | None":
        """The MLflow run of an earlier call, None where it was removed."""
        from mlflow.exceptions import MlflowException

        if "run_id" not in earlier:
            marked = f"tags.`{_MARK}` = '{earlier['mark']}'"
            found = self.client.search_runs([self.experiment_id], filter_string=marked)
            return found[0] if found else None
        try:
            run = self.client.get_run(earlier["run_id"])
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _away(self, error: Exception) -> bool:
        """Whether a server, or the database of one, will take later what it did not take now."""
        from mlflow.exceptions import MlflowException
        from requests import RequestException
        from sqlalchemy.exc import OperationalError

        if is_local(self.uri):
            return "database is locked" in str(error)
        if isinstance(error, MlflowException):
            return error.get_http_status_code() >= 500 or error.error_code in _AWAY
        return isinstance(error, RequestException | OperationalError | ConnectionError | TimeoutError)

    def _tell_away(self, error: Exception) -> None:
        found = store_error(self.uri, error).found
        console.print(f"note: {found}\n      the run goes on; what is logged is kept and sent later", markup=False)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors of the outbox into a UserError that names the store."""
        with store_errors(self.uri):
            yield

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Logs parameters as text: lists as `a, b`; what is longer than MLflow takes ends in an ellipsis."""
        from mlflow.entities import Param

        def send() -> None:
            new = [Param(key, value) for key, value in texts.items() if key not in self._parameters]
            for start in range(0, len(new), _MOST_PARAMETERS):
                self.client.log_batch(self.run_id, params=new[start : start + _MOST_PARAMETERS])
                self._parameters |= {param.key: param.value for param in new[start : start + _MOST_PARAMETERS]}

        texts = {key: _plain(value) for key, value in values.items()}
        self._put(send, "parameters", texts)

    def tags(self, values: Mapping[str, str]) -> None:
        """Sets tags such as setting and recipe."""
        from mlflow.entities import RunTag

        tags = [RunTag(key, value) for key, value in values.items()]
        self._put(lambda: self.client.log_batch(self.run_id, tags=tags), "tags", dict(values))

    def data_sets(self, data_sets: Sequence[DataSet]) -> None:
        """Logs the images that a run reads as data sets."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(of.name, of.digest, of.source_type, of.source, profile=of.profile),
                [InputTag("mlflow.data.context", of.context)],
            )
            for of in data_sets
        ]
        self._put(lambda: self.client.log_inputs(self.run_id, datasets=inputs), "data_sets", list(data_sets))

    def steps(self, network: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Logs the records of a training's step log, but for those that MLflow has."""
        from mlflow.entities import Metric

        def send() -> None:
            if network not in self._logged_steps:
                key = f"{network}.epoch"  # which every record has
                history = self.client.get_metric_history(self.run_id, key) if self._continues else []
                self._logged_steps[network] = {metric.step for metric in history}
            logged = self._logged_steps[network]
            new = [record for record in records if record["step"] not in logged]
            at_a_time = _MOST_METRICS // max((len(record) for record in new), default=1)
            for start in range(0, len(new), at_a_time):
                batch = new[start : start + at_a_time]
                metrics = [
                    Metric(f"{network}.{key}", float(value), int(record["time"] * 1000), record["step"])
                    for record in batch
                    for key, value in record.items()
                    if key not in ("step", "time")
                ]
                self.client.log_batch(self.run_id, metrics=metrics)
                logged.update(record["step"] for record in batch)

        self._put(send, "steps", network, list(records))

    def follow(self, network: str, records: Sequence[Mapping[str, Any]]) -> None:
        """As `steps`, while the training goes on: whoever watches the run is told what is new."""
        self.steps(network, records)
        new = [record for record in records if record["step"] > self._told.get(network, 0)]
        if new and self._watch:
            self._told[network] = new[-1]["step"]
            self._watch(network, new)

    def metrics(self, values: Mapping[str, float]) -> None:
        """Logs final figures, but for those that MLflow has."""

        def send() -> None:
            new = {key: float(value) for key, value in values.items() if self._metrics.get(key) != float(value)}
            self._log(new, time.time(), 0)
            self._metrics |= new

        self._put(send, "metrics", dict(values))

    def metric_at(self, key: str, value: float, step: int) -> None:
        """Logs one point of a curve, unless MLflow has it."""

        def send() -> None:
            history = self.client.get_metric_history(self.run_id, key) if self._continues else []
            if (step, value) not in [(point.step, point.value) for point in history]:
                self._log({key: value}, time.time(), step)

        self._put(send, "metric_at", key, value, step)

    def system_metrics(self, values: Mapping[str, float], at: float | None = None) -> None:
        """Logs a sample of the machine's use, at the seconds since the MLflow run began.

        Args:
            at: seconds since 1970; None = now.
        """
        taken = time.time() if at is None else at
        system = {f"system/{key}": value for key, value in values.items()}
        log = functools.partial(self._log, system, taken, int(taken - self._began))
        self._put(log, "system_metrics", dict(values), taken)

    def _log(self, values: Mapping[str, float], at: float, step: int) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(key, value, int(at * 1000), step) for key, value in values.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + _MOST_METRICS])

    def artifact(self, path: Path) -> None:
        """Stores a file, or a folder under its name, with the run."""

        def send() -> None:
            if path.is_dir():
                self.client.log_artifacts(self.run_id, str(path), artifact_path=path.name)
            else:
                self.client.log_artifact(self.run_id, str(path))

        self._put(send, "artifact", str(path))

    def model(self, model: TrainedModel) -> None:
        """Logs a trained network as a model that the run has made, and registers it where that is asked for."""
        log = functools.partial(log_model, self.client, self.experiment_id, self.run_id, model, self._folder.path)
        self._put(log, "model", model.register)

    def flush(self) -> None:
        """Waits until everything is logged, or a server is away for long."""
        with self._errors():
            self._outbox.drain(PATIENCE)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ends the MLflow run when the block ends: as FINISHED, as KILLED after Ctrl-C, or else as FAILED."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(UserError):  # the error that ended the block is the one to report
                self.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED", patience=5.0)
            raise
        self.finish("FINISHED")

    def finish(self, status: str, *, patience: float = PATIENCE) -> None:
        """Ends the MLflow run as FINISHED, FAILED or KILLED.

        Where a server has not come back after `patience` seconds, what it lacks is kept, and a note says so.
        """
        self._put(functools.partial(self.client.set_terminated, self.run_id, status=status), "finish", status)
        with self._errors():
            if self._outbox.drain(patience):
                remove(self._unsent)
                return
        kept = {"uri": self.uri, "identity": self._identity, "run_id": self.run_id, "calls": self._outbox.waiting()}
        write_json(self._unsent, kept)
        console.print(
            f"note: MLflow's store {self.uri} is away and lacks the last of this run; its files in the workspace are "
            f"complete, and `mcis sync {self._folder.path.name}` or repeating the command sends what is missing",
            markup=False,
        )

    def _put(self, send: Callable[[], Any], *words: Any) -> None:
        """Hands a call over; `words` are the name of the method that was called, and its arguments for JSON."""
        with self._errors():
            self._outbox.put(send, words)


def _origin(parent: str | None) -> dict[str, str]:
    """The tags by which MLflow shows where a run comes from."""
    commit = git_commit()
    tags = {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": "mcis",
        "mcis.version": project_version(),
        "mcis.code": code_digest(),
    }
    with contextlib.suppress(OSError, KeyError, ImportError):  # a user id without a name
        tags["mlflow.user"] = getpass.getuser()
    if parent:
        tags["mlflow.parentRunId"] = parent
    if commit:
        tags |= {"mlflow.source.git.commit": commit.name, "mlflow.source.git.dirty": str(commit.modified)}
    return tags


def _plain(value: Any) -> str:
    """A value of the configuration as short text; the rest of a longer one is in the run's config.toml."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"

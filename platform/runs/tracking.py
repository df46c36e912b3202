"""MLflow tracking: one MLflow run per run of the pipeline; runs of trials are children of the study's MLflow run.

`mlflow.json` in the folder of a run lists everything to upload. During a run, a thread uploads new metrics; at the end
of the run, the rest is uploaded. If the store cannot be used, the run continues, a note is printed, and the end of the
run or its next call uploads the rest.
"""

import contextlib
import getpass
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from mcis.datasets.errors import UserError
from mcis.platform.runs.files import read_record_of, write_json
from mcis.platform.runs.progress import LogPosition, console, read_new_records
from mcis.platform.runs.tracking_errors import store_errors
from mcis.platform.runs.tracking_store import client_of, experiment_of, tracking_uri
from mcis.platform.runs.version import code_digest, git_commit, project_version
from mcis.platform.runs.workspace import RunFolder, Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

OnRecords = Callable[[str, Sequence[Mapping[str, Any]]], None]
"""Function that is called with the name of a network in training and the new records of its step log."""
LogModel = Callable[["MlflowClient", str, str, RunFolder], None]
"""Function that logs the trained network of a run, given the client, experiment id, MLflow run id and run folder."""
_PARENT = "mlflow.parentRunId"
"""MLflow tag that makes a run the child of another one."""


class SentRecords(NamedTuple):
    """The records of a step log that MLflow has.

    Attributes:
        last_step: Step of the last one; -1 if there is none.
        position: Where the first record that MLflow may lack begins in the log.
    """

    last_step: int
    position: LogPosition = LogPosition()


class TrackingRecord(BaseModel):
    """Everything to upload to MLflow for a run. It is stored as `mlflow.json`.

    Attributes:
        uri: URI of the MLflow store.
        identity: Fingerprint of the configuration.
        run_id: id of the MLflow run; empty as long as the store could not be used.
        origin: MLflow tags that state where the run comes from.
        parameters: Parameters of the MLflow run.
        tags: Tags of the MLflow run, such as the recipe.
        status: Final status of the run.
        sent: Whether everything has been uploaded.
        points: Metrics as (key, value, time in seconds, step); final metrics have step 0.
        images: MLflow tags that identify the images of the run.
        logs: Paths of step logs by network, relative to the workspace.
        files: Names of artifacts in the run's folder.
        model: Whether to log the trained network.
    """

    uri: str
    identity: str
    run_id: str = ""
    origin: dict[str, str] = {}
    parameters: dict[str, str] = {}
    tags: dict[str, str] = {}
    status: str = "KILLED"
    sent: bool = False
    points: list[tuple[str, float, float, int]] = []
    images: dict[str, str] = {}
    logs: dict[str, str] = {}
    files: list[str] = []
    model: bool = False

    @property
    def parent(self) -> str | None:
        """Id of the MLflow run of the study that the run belongs to; None if there is none."""
        return self.origin.get(_PARENT)

    @classmethod
    def read(cls, folder: RunFolder) -> "TrackingRecord | None":
        """Reads `mlflow.json` of a run; None if it does not exist."""
        if not folder.tracking.exists():
            return None
        return read_record_of(folder.tracking, cls, "JSON written by mcis", "remove it and repeat the command")

    def write(self, folder: RunFolder) -> None:
        """Writes `mlflow.json` of a run."""
        write_json(folder.tracking, self.model_dump())

    def exists_in(self, client: "MlflowClient", experiment_id: str) -> bool:
        """Whether the experiment still contains the MLflow run; it may have been deleted."""
        found = client.search_runs([experiment_id], filter_string=f"attributes.run_id = '{self.run_id}'")
        return len(found) > 0

    def upload(self, client: "MlflowClient", workspace: Workspace, name: str, log_model: LogModel | None) -> None:
        """Uploads everything that MLflow lacks and ends the MLflow run. Repeated calls change nothing.

        Args:
            log_model: Logs the trained network, if `model` is set; None leaves it out.
        """
        folder = workspace.run(name)
        self.upload_description(client)
        self.upload_metrics(client, workspace, {})
        for key, value in self.images.items():
            client.set_tag(self.run_id, key, value)

        for file in self.files:
            path = folder.path / file
            if path.is_dir():
                client.log_artifacts(self.run_id, str(path), artifact_path=path.name)
            elif path.exists():
                client.log_artifact(self.run_id, str(path))
        if self.model and log_model:
            log_model(client, experiment_of(client, workspace), self.run_id, folder)

        if client.get_run(self.run_id).info.status != self.status:
            client.set_terminated(self.run_id, status=self.status)
        self.sent = True
        self.write(folder)

    def upload_description(self, client: "MlflowClient") -> None:
        """Uploads parameters and tags. MLflow truncates long values."""
        from mlflow.entities import Param, RunTag

        params = [Param(key, value) for key, value in self.parameters.items()]
        tags = [RunTag(key, value) for key, value in self.tags.items()]
        client.log_batch(self.run_id, params=params, tags=tags)

    def upload_metrics(self, client: "MlflowClient", workspace: Workspace, sent: dict[str, SentRecords]) -> None:
        """Uploads metrics and records of step logs that MLflow lacks.

        A restarted training logs the steps after its last checkpoint again, with other speeds. The values that were
        uploaded first are kept. MLflow stores a metric with the same time and value only once.

        Args:
            sent: What MLflow has, by network; it is updated. For other networks, MLflow is queried.
        """
        from mlflow.entities import Metric

        for network, log in self.logs.items():
            if network not in sent:
                history = client.get_metric_history(self.run_id, f"{network}.epoch")
                sent[network] = SentRecords(max((metric.step for metric in history), default=-1))

            metrics = []
            last_step = sent[network].last_step
            records, position = read_new_records(workspace.root / log, sent[network].position)
            for record in records:
                if record["step"] <= sent[network].last_step:
                    continue
                last_step = max(last_step, record["step"])
                milliseconds = int(1000 * record["time"])
                for key, value in reversed(record.items()):  # `epoch` comes last and marks the record as complete
                    if key not in ("step", "time"):
                        metrics.append(Metric(f"{network}.{key}", float(value), milliseconds, record["step"]))
            client.log_batch(self.run_id, metrics=metrics)
            sent[network] = SentRecords(last_step, position)

        points = [Metric(key, value, int(1000 * seconds), step) for key, value, seconds, step in self.points]
        client.log_batch(self.run_id, metrics=points)


class Tracker:
    """Logs a run or study to its MLflow run, which a restart continues.

    Everything is first written to `mlflow.json` and uploaded during the run or at its end. A store that cannot be used
    causes a note and does not end the run.

    A restart on other images, or whose networks are trained again, starts a new MLflow run, see `images` and `log`.

    Args:
        name: Name of the run.
        identity: Fingerprint of the configuration. If the existing MLflow run has another one, a new MLflow run is
            started, because the parameters of an MLflow run cannot be changed.
        parent: id of the MLflow run of the study that the run belongs to; empty if the study has none yet.
        new_run: Whether to start a new MLflow run in any case.
        on_records: Called with new records of trainings, see `follow`.
        log_model: Logs the trained network at the end, if `model` was called.

    Attributes:
        uri: URI of the MLflow store.
        parent: As above.

    Raises:
        UserError: MLFLOW_TRACKING_URI contains a password.
    """

    def __init__(
        self,
        workspace: Workspace,
        name: str,
        *,
        identity: str,
        parent: str | None = None,
        new_run: bool = False,
        on_records: OnRecords | None = None,
        log_model: LogModel | None = None,
    ):
        self.uri = tracking_uri(workspace)
        self.parent = parent
        self._workspace = workspace
        self._name = name
        self._log_model = log_model
        self._on_records = on_records
        self._last_steps: dict[str, int] = {}  # network -> last step passed to on_records
        self._sent: dict[str, SentRecords] = {}  # see `TrackingRecord.upload_metrics`
        self._sender: threading.Thread | None = None
        self._was_unreachable = False
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._monitor: Any = None
        self._values: dict[tuple[str, int], float] = {}  # (metric, step) -> value, of this call
        self._continued: TrackingRecord | None = None  # of earlier calls, if this call continues their MLflow run

        try:
            with store_errors(self.uri):
                self._connect()
                self._continued = self._continued_run(identity, new_run)
                self._record = self._continued or self._new_run(identity)
        except UserError as error:
            self._client = None
            self._continued = self._untracked_run(identity, new_run)
            self._record = self._continued or TrackingRecord(uri=self.uri, identity=identity, origin=_origin(parent))
            self._note_fault(error)
        self._write(status="KILLED")

    @property
    def client(self) -> "MlflowClient":
        """Client of the store. For errors see `store_errors`."""
        with store_errors(self.uri):
            return self._connect()

    @property
    def experiment_id(self) -> str:
        """Id of the experiment that holds all runs; empty as long as the store could not be used."""
        return self._experiment_id

    @property
    def run_id(self) -> str:
        """Id of the MLflow run; empty as long as the store could not be used."""
        return self._record.run_id

    def _connect(self) -> "MlflowClient":
        """Connects to the store, unless that was done before."""
        if self._client is None:
            with self._workspace.lock("mlflow", "store"):  # two processes must not create its tables at the same time
                client = client_of(self.uri)
                self._experiment_id = experiment_of(client, self._workspace)
            self._client = client
        return self._client

    def _continued_run(self, identity: str, new_run: bool) -> TrackingRecord | None:
        """Returns the existing MLflow run if this call continues it; otherwise finishes its upload and returns None."""
        earlier = TrackingRecord.read(self._workspace.run(self._name))
        if earlier is None:
            return None

        if earlier.uri == self.uri and not earlier.run_id:  # the store could not be used
            earlier.run_id = self._create_run(earlier.origin)
            earlier.write(self._workspace.run(self._name))
        exists = earlier.uri == self.uri and earlier.exists_in(self.client, self.experiment_id)
        if exists and earlier.identity == identity and not new_run:
            self.client.update_run(earlier.run_id, status="RUNNING")
            return earlier
        if exists and not earlier.sent:
            earlier.upload(self.client, self._workspace, self._name, self._log_model)
        elif not earlier.sent:
            console.print(f"note: results of an earlier run of this name were not uploaded: it is not in {self.uri}")
        return None

    def _new_run(self, identity: str) -> TrackingRecord:
        """Creates an MLflow run."""
        origin = _origin(self.parent)
        return TrackingRecord(uri=self.uri, identity=identity, run_id=self._create_run(origin), origin=origin)

    def _untracked_run(self, identity: str, new_run: bool) -> TrackingRecord | None:
        """Returns the existing record of the run if this call continues it, without using the store."""
        earlier = TrackingRecord.read(self._workspace.run(self._name))
        if earlier and earlier.uri == self.uri and earlier.identity == identity and not new_run:
            return earlier
        if earlier and not earlier.sent:
            console.print("note: results of an earlier run of this name were not uploaded, and are overwritten")
        return None

    def _create_run(self, origin: Mapping[str, str]) -> str:
        """Creates an MLflow run with these tags and returns its id."""
        run = self.client.create_run(self.experiment_id, run_name=self._name, tags=dict(origin))
        return str(run.info.run_id)

    def describe(self, parameters: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Logs parameters as text, with lists as `a, b`, and tags such as the recipe. MLflow truncates long values."""
        texts = {}
        for key, value in parameters.items():
            texts[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        self._write(parameters=texts, tags=dict(tags))
        self._upload_description()

    def _upload_description(self) -> None:
        if self._client is None or not self.run_id:
            return

        try:
            with store_errors(self.uri):
                self._record.upload_description(self._client)
        except UserError as error:
            self._note_fault(error)

    def _note_fault(self, error: UserError) -> None:
        """Prints a note that the store cannot be used, once."""
        if not self._was_unreachable:
            console.print(
                f"note: {error.found}. The run continues; its end, or the next call, uploads its results. "
                f"Remedy: {error.remedy}"
            )
        self._was_unreachable = True

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Logs metrics at a step; 0 is for final metrics. Values that were logged before are not logged again."""
        logged = {}
        for key, value, _, point_step in self._record.points:
            logged[key, point_step] = str(value)  # as text, NaN equals NaN
        points = list(self._record.points)
        for key, value in values.items():
            self._values[key, step] = float(value)
            if logged.get((key, step)) != str(float(value)):
                points.append((key, float(value), time.time(), step))
        self._write(points=points)
        self._send_in_thread()

    def log(self, network: str, path: Path) -> None:
        """Logs the step log of a training, which may still be running.

        If the MLflow run has the log of another training of the network, from an earlier call, a new MLflow run is
        started, because metrics cannot be removed.
        """
        log = os.path.relpath(path, self._workspace.root)
        if self._continued and self._continued.logs.get(network, log) != log:
            self._replace_run(self._continued)
        self._write(logs=self._record.logs | {network: log})

    def _replace_run(self, earlier: TrackingRecord) -> None:
        """Ends the MLflow run of the earlier calls, and starts a new one with what this call has logged.

        Args:
            earlier: The record of the earlier calls.
        """
        if self._sender:
            self._sender.join()
        is_monitored = self._monitor is not None
        self._stop_monitor()

        run_id = ""  # `finish` creates the MLflow run if that fails here
        origin = _origin(self.parent)
        if self._client is not None and earlier.run_id:
            try:
                with store_errors(self.uri):
                    if earlier.sent:
                        self._client.update_run(earlier.run_id, status=earlier.status)
                    else:  # without the network, which the run may no longer have
                        earlier.upload(self._client, self._workspace, self._name, log_model=None)
                    run_id = self._create_run(origin)
            except UserError as error:
                self._note_fault(error)
        if not earlier.sent:
            console.print("note: results of an earlier run of this name were not uploaded, and are overwritten")

        self._continued = None
        self._sent = {}
        points = [(key, value, time.time(), step) for (key, step), value in self._values.items()]
        self._record = TrackingRecord(
            uri=self.uri,
            identity=self._record.identity,
            run_id=run_id,
            origin=origin,
            parameters=self._record.parameters,
            tags=self._record.tags,
            points=points,
            images=self._record.images,
        )
        self._write()
        self._upload_description()
        if is_monitored:
            self._start_monitor()

    def images(self, index: str, by_split: Mapping[str, int]) -> None:
        """Logs the identity of the run's index and the number of images per split as MLflow tags.

        If the MLflow run has the identity of another index, from an earlier call, a new MLflow run is started.
        """
        if self._continued and self._continued.images.get("mcis.index", index) != index:
            self._replace_run(self._continued)
        counts = ", ".join(f"{split} {images}" for split, images in by_split.items() if images)
        self._write(images={"mcis.index": index, "mcis.images": counts})

    def artifact(self, path: Path) -> None:
        """Logs a file or folder in the run's folder as an artifact, at the end of the run."""
        self._write(files=sorted({*self._record.files, path.name}))

    def model(self) -> None:
        """Logs the trained network as a model, at the end of the run."""
        self._write(model=True)

    def _write(self, **values: Any) -> None:
        """Updates fields of `mlflow.json`, which marks it as not uploaded."""
        self._record = self._record.model_copy(update={"sent": False, **values})
        self._record.write(self._workspace.run(self._name))

    def follow(self, network: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Uploads the step log of a training in a thread, and passes the records that are new to `on_records`."""
        self._send_in_thread()
        new = [record for record in records if record["step"] > self._last_steps.get(network, 0)]
        if new and self._on_records:
            self._last_steps[network] = new[-1]["step"]
            self._on_records(network, new)

    def _send_in_thread(self) -> None:
        """Uploads metrics in a thread, unless one is running. A later call uploads what failed.

        MLflow's asynchronous logging is not used because a process then waits at its end for an unreachable server.
        """
        client = self._client
        if client is None or not self.run_id:
            return

        def send() -> None:
            try:
                with store_errors(self.uri):
                    self._record.upload_metrics(client, self._workspace, self._sent)
            except UserError as error:
                self._note_fault(error)

        if not (self._sender and self._sender.is_alive()):
            self._sender = threading.Thread(target=send, daemon=True)
            self._sender.start()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ends the MLflow run with the block: as FINISHED, as KILLED after Ctrl-C, or as FAILED after other errors.

        During the block MLflow logs the use of this machine's processors, memory, disk, network and GPUs.
        """
        status = "FAILED"
        try:
            with self._system_metrics():
                yield
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            self.finish(status)

    @contextlib.contextmanager
    def _system_metrics(self) -> Iterator[None]:
        """Logs the use of this machine during the block, if MLflow can be used at its start."""
        self._start_monitor()
        try:
            yield
        finally:
            self._stop_monitor()

    def _start_monitor(self) -> None:
        if self._client is None or not self.run_id:
            return

        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        try:
            with store_errors(self.uri):
                monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
        except UserError as error:
            self._note_fault(error)
            return

        monitor.start()
        self._monitor = monitor

    def _stop_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None

    def finish(self, status: str) -> None:
        """Uploads what MLflow lacks and ends the MLflow run with this status; prints a note if that fails."""
        if self._sender:
            self._sender.join()
        try:
            with store_errors(self.uri):
                self._write(status=status)
                client = self._connect()
                self._experiment_id = experiment_of(client, self._workspace)  # it may have been deleted
                if not self._record.exists_in(client, self._experiment_id):
                    self._write(run_id=self._create_run(self._record.origin))
                self._record.upload(client, self._workspace, self._name, self._log_model)
        except UserError as error:
            console.print(
                f"note: MLflow does not have all results of this run: {error.found}. The files in the workspace are "
                f"complete; repeat the command to upload the rest. Remedy: {error.remedy}"
            )


def _origin(parent: str | None) -> dict[str, str]:
    """MLflow tags that state where a run comes from: user, parent, version, commit and code."""
    tags = {"mlflow.source.type": "LOCAL", "mlflow.source.name": "mcis", "mcis.version": project_version()}
    with contextlib.suppress(OSError, KeyError, ImportError):  # the user id may have no name
        tags["mlflow.user"] = getpass.getuser()
    if parent:
        tags[_PARENT] = parent
    commit = git_commit()
    if commit:
        tags["mlflow.source.git.commit"] = commit.name
        tags["mlflow.source.git.dirty"] = str(commit.modified)
    return tags | {"mcis.code": code_digest()}


def set_tags(workspace: Workspace, name: str, tags: Mapping[str, str]) -> None:
    """Sets tags of the MLflow run, if any, of a run; an empty value removes a tag. For errors see `store_errors`.

    An MLflow run that was deleted keeps its tags.
    """
    record = TrackingRecord.read(workspace.run(name, create=False))
    if record is None or not record.run_id:
        return
    with store_errors(record.uri):
        client = client_of(record.uri)
        experiment_id = experiment_of(client, workspace)
        if not record.exists_in(client, experiment_id):
            console.print(f"note: the MLflow run of {name} was deleted, so only the workspace has the tags")
            return
        present = client.get_run(record.run_id).data.tags
        for key, value in tags.items():
            if value:
                client.set_tag(record.run_id, key, value)
            elif key in present:
                client.delete_tag(record.run_id, key)


def end_run(workspace: Workspace, name: str, status: str, tags: Mapping[str, str]) -> None:
    """Ends the MLflow run, if any, of a run whose process was killed. For errors see `store_errors`.

    Args:
        status: Final status of the MLflow run.
        tags: MLflow tags to set.
    """
    record = TrackingRecord.read(workspace.run(name, create=False))
    if record is None or not record.run_id:
        return
    with store_errors(record.uri):
        client = client_of(record.uri)
        for key, value in tags.items():
            client.set_tag(record.run_id, key, value)
        client.set_terminated(record.run_id, status=status)

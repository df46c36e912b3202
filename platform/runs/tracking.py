"""MLflow: one MLflow run per run of the pipeline; those of a study are children of its own.

`mlflow.json` in a run's folder says what MLflow is to have. While a run goes on, a thread logs its new figures; at its
end all that MLflow lacks is uploaded. Where the server is away a note says so, and the run's next call uploads it: a
run that has begun never ends for its server.
"""

import contextlib
import getpass
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from mcis.datasets.errors import UserError
from mcis.platform.runs.files import read_record_of, write_json
from mcis.platform.runs.progress import console, read_records
from mcis.platform.runs.tracking_store import client_of, experiment_of, store_errors, tracking_uri
from mcis.platform.runs.version import code_digest, git_commit, project_version
from mcis.platform.runs.workspace import RunFolder, Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

Watch = Callable[[str, Sequence[Mapping[str, Any]]], None]
"""Is told what a training under way has logged: its network's name, and the records that are new."""
LogModel = Callable[["MlflowClient", str, str, RunFolder], None]
"""Logs the trained network of a run's folder: to the store, the experiment and the MLflow run of these ids."""


class Tracked(BaseModel):
    """What MLflow is to have of a run beside its parameters and tags; `mlflow.json` in the run's folder.

    Attributes:
        uri: of the store.
        identity: fingerprint of the configuration.
        status: that the run ended with.
        sent: MLflow has it all.
        points: figures: key, value, time and step, which is 0 of final ones.
        images: tags that say what images the run reads.
        logs: the step logs of trainings by network, relative to the workspace.
        files: names in the run's folder.
        model: the trained network is logged.
    """

    uri: str
    identity: str
    run_id: str
    status: str = "KILLED"
    sent: bool = False
    points: list[tuple[str, float, float, int]] = []
    images: dict[str, str] = {}
    logs: dict[str, str] = {}
    files: list[str] = []
    model: bool = False

    @classmethod
    def read(cls, folder: RunFolder) -> "Tracked | None":
        """That of a run's folder, None where it has none."""
        expected, remedy = "JSON written by mcis", "remove it and repeat the command"
        return read_record_of(folder.tracking, cls, expected, remedy) if folder.tracking.exists() else None

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
            log_model(client, experiment_of(client, workspace), self.run_id, folder)
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
        points = [Metric(key, value, int(1000 * seconds), step) for key, value, seconds, step in self.points]
        client.log_batch(self.run_id, metrics=points)


class Tracker:
    """The MLflow run of a run or study; a restart continues it.

    Parameters and tags are logged at once. All else is written down, and sent on the way or at the end.

    Args:
        name: of the run, in whose folder `mlflow.json` names the MLflow run.
        identity: fingerprint of the configuration. Another one starts a new MLflow run, whose parameters are final.
        parent: id of the MLflow run of the study that the run belongs to.
        new_run: start a new MLflow run in any case.
        watch: see `follow`.
        log_model: logs the network that `model` asks for.

    Raises:
        UserError: the store cannot be used.
    """

    def __init__(
        self,
        workspace: Workspace,
        name: str,
        *,
        identity: str,
        parent: str | None = None,
        new_run: bool = False,
        watch: Watch | None = None,
        log_model: LogModel | None = None,
    ):
        self.uri, self.parent = tracking_uri(workspace), parent
        self._workspace, self._name, self._log_model, self._watch = workspace, name, log_model, watch
        self._watched = dict[str, int]()  # the last step of each network
        self._sent = dict[str, int]()  # see `Tracked.upload_figures`
        self._sender: threading.Thread | None = None
        self._was_away = False
        earlier = Tracked.read(workspace.run(name))
        with store_errors(self.uri):
            with workspace.lock("mlflow", "store"):  # of two that make its tables, each would find those of the other
                self.client = client_of(self.uri)
                self.experiment_id = experiment_of(self.client, workspace)
            there = earlier and earlier.uri == self.uri and earlier.is_in(self.client, self.experiment_id)
            if earlier and there and earlier.identity == identity and not new_run:
                self._tracked = earlier
                self.client.update_run(earlier.run_id, status="RUNNING")
            else:
                if earlier and there and not earlier.sent:
                    earlier.upload(self.client, workspace, name, log_model)
                elif earlier and not earlier.sent:
                    console.print(f"note: an earlier run of this name stays incomplete in MLflow: {self.uri} lacks it")
                run = self.client.create_run(self.experiment_id, run_name=name, tags=_origin(parent))
                self._tracked = Tracked(uri=self.uri, identity=identity, run_id=run.info.run_id)
        self.run_id = self._tracked.run_id
        self._write(status="KILLED")

    def describe(self, parameters: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Logs parameters as text, lists as `a, b`, and tags such as sources and recipe. MLflow cuts long ones."""
        from mlflow.entities import Param, RunTag

        texts = {k: ", ".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for k, v in parameters.items()}
        with store_errors(self.uri):
            params = [Param(key, text) for key, text in texts.items()]
            self.client.log_batch(self.run_id, params=params, tags=[RunTag(*tag) for tag in tags.items()])

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Logs final figures, or one point of each curve."""
        logged = {(key, at): str(value) for key, value, _, at in self._tracked.points}  # as texts, NaN is equal
        new = {key: float(value) for key, value in values.items() if logged.get((key, step)) != str(float(value))}
        self._write(points=[*self._tracked.points, *((key, value, time.time(), step) for key, value in new.items())])
        self._send_in_thread()

    def log(self, network: str, path: Path) -> None:
        """Logs the step log of a training, which may still go on."""
        self._write(logs=self._tracked.logs | {network: os.path.relpath(path, self._workspace.root)})

    def images(self, index: str, by_split: Mapping[str, int]) -> None:
        """Logs the digest of the index that a run reads, and the number of images of each split, as tags."""
        counts = ", ".join(f"{split} {images}" for split, images in by_split.items() if images)
        self._write(images={"mcis.index": index, "mcis.images": counts})

    def artifact(self, path: Path) -> None:
        """Stores a file or folder of the run's folder with the run."""
        self._write(files=sorted({*self._tracked.files, path.name}))

    def model(self) -> None:
        """Logs the trained network as a model that the run has made."""
        self._write(model=True)

    def _write(self, **values: Any) -> None:
        """Writes down what MLflow is to have."""
        self._tracked = self._tracked.model_copy(update={"sent": False, **values})
        self._tracked.write(self._workspace.run(self._name))

    def follow(self, network: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Sends what a training has logged, while it goes on; whoever watches the run is told what is new."""
        self._send_in_thread()
        new = [record for record in records if record["step"] > self._watched.get(network, 0)]
        if new and self._watch:
            self._watched[network] = new[-1]["step"]
            self._watch(network, new)

    def _send_in_thread(self) -> None:
        """Sends figures, unless they are being sent; what a server does not take is sent by a later call.

        MLflow's own asynchronous logging would not do: at its end, a process waits for all that a server does not take.
        """

        def send() -> None:
            try:
                with store_errors(self.uri):
                    self._tracked.upload_figures(self.client, self._workspace, self._sent)
            except UserError as error:
                if not self._was_away:
                    console.print(f"note: {error.found}\n      the run goes on; what is logged is sent later")
                self._was_away = True

        if not (self._sender and self._sender.is_alive()):
            self._sender = threading.Thread(target=send, daemon=True)
            self._sender.start()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ends the MLflow run when the block ends: as FINISHED, as KILLED after Ctrl-C, or else as FAILED.

        Meanwhile MLflow logs the use of this machine's processors, memory, disk, network and GPUs.
        """
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        status = "FAILED"
        try:
            monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
            monitor.start()
            try:
                yield
            finally:
                monitor.finish()
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            self.finish(status)

    def finish(self, status: str) -> None:
        """Sends what MLflow lacks, and ends the MLflow run as FINISHED, FAILED or KILLED; where that cannot be done, a
        note says so."""
        if self._sender:
            self._sender.join()
        try:
            with store_errors(self.uri):
                self._write(status=status)
                self._tracked.upload(self.client, self._workspace, self._name, self._log_model)
        except UserError as error:
            console.print(
                f"note: MLflow lacks the last of this run: {error.found}; its files in the workspace are complete, and "
                "repeating the command sends what is missing"
            )


def _origin(parent: str | None) -> dict[str, str]:
    """The tags by which MLflow shows where a run comes from."""
    tags = {"mlflow.source.type": "LOCAL", "mlflow.source.name": "mcis", "mcis.version": project_version()}
    with contextlib.suppress(OSError, KeyError, ImportError):  # a user id without a name
        tags["mlflow.user"] = getpass.getuser()
    if parent:
        tags["mlflow.parentRunId"] = parent
    if commit := git_commit():
        tags |= {"mlflow.source.git.commit": commit.name, "mlflow.source.git.dirty": str(commit.modified)}
    return tags | {"mcis.code": code_digest()}


def end_run(workspace: Workspace, name: str, status: str, tags: Mapping[str, str]) -> None:
    """Ends the MLflow run, if any, of a run whose process was stopped before it could. Errors as of `store_errors`."""
    if tracked := Tracked.read(workspace.run(name, create=False)):
        with store_errors(tracked.uri):
            client = client_of(tracked.uri)
            for key, value in tags.items():
                client.set_tag(tracked.run_id, key, value)
            client.set_terminated(tracked.run_id, status=status)

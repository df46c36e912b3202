"""MLflow: one MLflow run per run of the pipeline; those of a study are children of its own.

While a run goes on, a thread sends its new figures. At its end all that MLflow lacks is sent (`runs/tracked.py`); where
the server is away a note says so, and `mcis sync` sends it later. A run that has begun never ends for its server.
"""

import contextlib
import getpass
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcis.datasets.errors import UserError
from mcis.datasets.storage.files import with_timeout
from mcis.platform.runs.data_sets import DataSet
from mcis.platform.runs.mlflow_run import MlflowRun
from mcis.platform.runs.progress import console
from mcis.platform.runs.tracked import MARK, LogModel, Tracked, sync
from mcis.platform.runs.tracking_store import client_of, experiment_of, store_error, store_errors, tracking_uri
from mcis.platform.runs.version import code_digest, git_commit, project_version
from mcis.platform.runs.workspace import Workspace

Watch = Callable[[str, Sequence[Mapping[str, Any]]], None]
"""Is told what a training under way has logged: its network's name, and the records that are new."""
PATIENCE = 60.0
"""Seconds until figures that a server did not take are sent again."""


class Tracker:
    """The MLflow run of a run or study; a restart continues it.

    Parameters and tags are logged at once. All else is written down, and sent on the way or at the end.

    Args:
        name: of the run, in whose folder `mlflow.json` names the MLflow run.
        identity: fingerprint of the configuration. Another one starts a new MLflow run, whose parameters are final.
        parent: id of the MLflow run of the study that the run belongs to.
        afresh: start a new MLflow run in any case.
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
        afresh: bool = False,
        watch: Watch | None = None,
        log_model: LogModel | None = None,
    ):
        self.uri, self.parent = tracking_uri(workspace), parent
        self._workspace, self._name, self._log_model = workspace, name, log_model
        self._watch, self._told = watch, dict[str, int]()
        self._waiting: list[tuple[str, Mapping[str, Any]]] = []
        self._sender: threading.Thread | None = None
        self._next_try = 0.0
        folder = workspace.run(name)
        with store_errors(self.uri):
            self.client = client_of(self.uri)
            self.experiment_id = experiment_of(self.client, workspace)
            earlier = Tracked.read(folder)
            run = earlier.find(self.client, self.experiment_id) if earlier and earlier.uri == self.uri else None
            if earlier and run and earlier.identity == identity and not afresh:
                self._tracked = earlier
                self.client.update_run(run.info.run_id, status="RUNNING")
            else:
                if earlier and not earlier.sent:
                    self._end_earlier()
                # Written before the run is made: whoever is killed in between finds it again, and makes no second one.
                self._tracked = Tracked(uri=self.uri, identity=identity, mark=uuid.uuid4().hex, sent=False)
                self._tracked.write(folder)
                tags = _origin(parent) | {MARK: self._tracked.mark}
                run = self.client.create_run(self.experiment_id, run_name=name, tags=tags)
        self._run = MlflowRun(self.client, run.info.run_id)
        self.run_id = self._tracked.run_id = run.info.run_id
        self._tracked.sent, self._tracked.status = False, "KILLED"
        self._tracked.write(folder)

    def _end_earlier(self) -> None:
        """Sends what MLflow lacks of the run that had the folder before, and ends it."""
        try:
            sync(self._workspace, self._name, self._log_model)
        except UserError as error:
            console.print(f"note: an earlier run of this name stays incomplete in MLflow: {error.found}", markup=False)

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Logs parameters, see `MlflowRun.parameters`."""
        with store_errors(self.uri):
            self._run.parameters(values)

    def tags(self, values: Mapping[str, str]) -> None:
        """Sets tags such as setting and recipe."""
        with store_errors(self.uri):
            self._run.tags(values)

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Logs final figures, or one point of each curve."""
        points = {key: self._tracked.points.get(key, {}) | {step: float(value)} for key, value in values.items()}
        self._keep(points=self._tracked.points | points)

    def log(self, network: str, path: Path) -> None:
        """Logs the step log of a training that has ended."""
        self._keep(logs=self._tracked.logs | {network: str(path.relative_to(self._workspace.root))})

    def data_sets(self, data_sets: Sequence[DataSet]) -> None:
        """Logs the images that a run reads as data sets."""
        self._keep(data_sets=list(data_sets))

    def artifact(self, path: Path) -> None:
        """Stores a file or folder of the run's folder with the run."""
        self._keep(files=sorted({*self._tracked.files, path.name}))

    def model(self, register_as: str | None) -> None:
        """Logs the trained network as a model that the run has made, and registers it where that is asked for."""
        self._keep(model=True, register_as=register_as)

    def _keep(self, **values: Any) -> None:
        """Writes down what is to be sent, and sends the figures among it."""
        self._tracked = self._tracked.model_copy(update=values)
        self._tracked.write(self._workspace.run(self._name))
        self._start_sending()

    def follow(self, network: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Sends what a training has logged, while it goes on; whoever watches the run is told what is new."""
        self._waiting += [(network, record) for record in records]
        self._start_sending()
        new = [record for record in records if record["step"] > self._told.get(network, 0)]
        if new and self._watch:
            self._told[network] = new[-1]["step"]
            self._watch(network, new)

    def _start_sending(self) -> None:
        """Sends figures in a thread. Those that come meanwhile, or whose server is away, wait for the next call.

        MLflow's own asynchronous logging would not do: at its end, a process waits for all that a server does not take.
        """
        if time.monotonic() > self._next_try and not (self._sender and self._sender.is_alive()):
            self._sender = threading.Thread(target=self._send_figures, daemon=True)
            self._sender.start()

    def _send_figures(self) -> None:
        try:
            self._send_steps()
            self._run.points(self._tracked.points)
        except Exception as error:  # whatever a store raises
            if not self._next_try:
                found = store_error(self.uri, error).found
                console.print(f"note: {found}\n      the run goes on; what is logged is sent later", markup=False)
            self._next_try = time.monotonic() + PATIENCE

    def _send_steps(self) -> None:
        waiting = list(self._waiting)
        for network in {network for network, _ in waiting}:
            self._run.steps(network, [record for of, record in waiting if of == network])
        del self._waiting[: len(waiting)]

    def flush(self) -> None:
        """Sends the steps that wait, or raises what the store raises."""
        if self._sender:
            self._sender.join(PATIENCE)
        self._send_steps()

    @contextlib.contextmanager
    def running(self, *, system_metrics: bool = False) -> Iterator[None]:
        """Ends the MLflow run when the block ends: as FINISHED, as KILLED after Ctrl-C, or else as FAILED.

        Args:
            system_metrics: MLflow logs the machine's use meanwhile.
        """
        try:
            with self._system_metrics() if system_metrics else contextlib.nullcontext():
                yield
        except BaseException as error:
            with contextlib.suppress(UserError):  # the error that ended the block is the one to report
                self.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED", patience=10.0)
            raise
        self.finish("FINISHED")

    @contextlib.contextmanager
    def _system_metrics(self) -> Iterator[None]:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
        monitor.start()
        try:
            yield
        finally:
            with contextlib.suppress(TimeoutError):  # it waits for a server that does not answer
                with_timeout(5.0, monitor.finish)

    def finish(self, status: str, *, patience: float = 3600.0) -> None:
        """Sends what MLflow lacks, and ends the MLflow run as FINISHED, FAILED or KILLED.

        Args:
            patience: seconds that this takes at most.
        """
        self._keep(status=status)

        def send() -> None:
            self.flush()
            self._tracked.send(self._run, self._workspace, self._name, self._log_model)

        try:
            with store_errors(self.uri):
                with_timeout(patience, send)
        except UserError as error:
            console.print(
                f"note: MLflow lacks the last of this run: {error.found}; its files in the workspace are complete, and "
                f"`mcis sync {self._name}` or repeating the command sends what is missing",
                markup=False,
            )


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

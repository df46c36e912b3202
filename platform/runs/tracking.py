"""MLflow: one MLflow run per run of the pipeline; those of a study are children of its own.

While a run goes on, a thread logs its new figures. At its end all that MLflow lacks is uploaded (`runs/sync.py`); where
the server is away a note says so, and `mcis sync` uploads it later. A run that has begun never ends for its server.
"""

import contextlib
import getpass
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcis.datasets.errors import UserError
from mcis.platform.runs.progress import console
from mcis.platform.runs.sync import LogModel, Tracked, sync
from mcis.platform.runs.tracking_store import client_of, experiment_of, store_errors, tracking_uri
from mcis.platform.runs.version import code_digest, git_commit, project_version
from mcis.platform.runs.workspace import Workspace

Watch = Callable[[str, Sequence[Mapping[str, Any]]], None]
"""Is told what a training under way has logged: its network's name, and the records that are new."""
_LONGEST = 6000
"""Characters of a parameter that MLflow takes."""


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
            self.client = client_of(self.uri)
            self.experiment_id = experiment_of(self.client, workspace)
            there = earlier and earlier.uri == self.uri and earlier.is_in(self.client, self.experiment_id)
            if earlier and there and earlier.identity == identity and not new_run:
                self._tracked = earlier
                self.client.update_run(earlier.run_id, status="RUNNING")
            else:
                if earlier and not earlier.sent:
                    self._end_earlier()
                run = self.client.create_run(self.experiment_id, run_name=name, tags=_origin(parent))
                self._tracked = Tracked(uri=self.uri, identity=identity, run_id=run.info.run_id)
        self.run_id = self._tracked.run_id
        self._write(status="KILLED")

    def _end_earlier(self) -> None:
        """Sends what MLflow lacks of the run that had the folder before, and ends it."""
        try:
            sync(self._workspace, self._name, self._log_model)
        except UserError as error:
            console.print(f"note: an earlier run of this name stays incomplete in MLflow: {error.found}", markup=False)

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Logs parameters as text: lists as `a, b`; what is longer than MLflow takes ends in an ellipsis."""
        from mlflow.entities import Param

        with store_errors(self.uri):
            there = self.client.get_run(self.run_id).data.params
            new = [Param(key, _parameter(value)) for key, value in values.items() if key not in there]
            self.client.log_batch(self.run_id, params=new)

    def tags(self, values: Mapping[str, str]) -> None:
        """Sets tags such as setting and recipe."""
        from mlflow.entities import RunTag

        with store_errors(self.uri):
            self.client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in values.items()])

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Logs final figures, or one point of each curve."""
        points = dict(self._tracked.points)
        for key, value in values.items():
            earlier = points.get(key, {})
            if step not in earlier or str(earlier[step][0]) != str(float(value)):  # as texts, NaN is equal
                points[key] = earlier | {step: (float(value), time.time())}
        self._write(points=points)
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

    def model(self, register_as: str | None) -> None:
        """Logs the trained network as a model that the run has made, and registers it where that is asked for."""
        self._write(model=True, register_as=register_as)

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
                    found = f"note: {error.found}\n      the run goes on; what is logged is sent later"
                    console.print(found, markup=False)
                self._was_away = True

        if not (self._sender and self._sender.is_alive()):
            self._sender = threading.Thread(target=send, daemon=True)
            self._sender.start()

    @contextlib.contextmanager
    def running(self, *, system_metrics: bool = False) -> Iterator[None]:
        """Ends the MLflow run when the block ends: as FINISHED, as KILLED after Ctrl-C, or else as FAILED.

        Args:
            system_metrics: MLflow logs the machine's use meanwhile.
        """
        status = "FAILED"
        try:
            with self._system_metrics() if system_metrics else contextlib.nullcontext():
                yield
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            self.finish(status)

    @contextlib.contextmanager
    def _system_metrics(self) -> Iterator[None]:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
        monitor.start()
        try:
            yield
        finally:
            monitor.finish()

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
                f"`mcis sync {self._name}` or repeating the command sends what is missing",
                markup=False,
            )


def _parameter(value: Any) -> str:
    """A value of the configuration as short text; the rest of a longer one is in the run's config.toml."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


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

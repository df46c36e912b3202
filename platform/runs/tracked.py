"""What MLflow is to have of a run, as the run's folder keeps it, and how all that MLflow lacks of it is sent."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from mcis.datasets.errors import UserError
from mcis.platform.runs.data_sets import DataSet
from mcis.platform.runs.mlflow_run import MlflowRun
from mcis.platform.runs.progress import read_records
from mcis.platform.runs.tracking_store import client_of, experiment_of, store_errors, tracking_uri
from mcis.platform.runs.workspace import RunFolder, Workspace, read_json, write_json

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

LogModel = Callable[["MlflowClient", str, str, RunFolder, str | None], None]
"""Logs the trained network of a run's folder: to the store, the experiment and the MLflow run of these ids; and
registers it where a name is given."""
MARK = "mcis.mark"
"""The tag that a run is known by, even where a kill kept its id from being written down."""


class Tracked(BaseModel):
    """What MLflow is to have of a run beside its parameters and tags; `mlflow.json` in the run's folder.

    Attributes:
        uri: of the store.
        identity: fingerprint of the configuration.
        mark: of the MLflow run; it is written before there is a `run_id`.
        status: that the run ended with.
        sent: MLflow has it all.
        points: figures by key and step, which is 0 of final ones.
        logs: the step logs of trainings by network, relative to the workspace.
        files: names in the run's folder.
        model: the trained network is logged, and registered as `register_as`.
    """

    uri: str
    identity: str
    mark: str
    run_id: str | None = None
    status: str = "KILLED"
    sent: bool = True
    points: dict[str, dict[int, float]] = {}
    data_sets: list[DataSet] = []
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

    def find(self, client: "MlflowClient", experiment_id: str) -> "Run | None":
        """Its MLflow run, None where that was removed."""
        found = client.search_runs([experiment_id], filter_string=f"tags.`{MARK}` = '{self.mark}'")
        return found[0] if found else None

    def send(self, to: MlflowRun, workspace: Workspace, name: str, log_model: LogModel | None) -> None:
        """Sends everything that MLflow lacks, and ends the MLflow run."""
        folder = workspace.run(name)
        for network, log in self.logs.items():
            to.steps(network, read_records(workspace.root / log)[0])
        to.points(self.points)
        to.data_sets(self.data_sets)
        for file in self.files:
            to.file(folder.path / file)
        if self.model and log_model:
            log_model(to.client, experiment_of(to.client, workspace), to.run_id, folder, self.register_as)
        to.end(self.status)
        self.run_id, self.sent = to.run_id, True
        self.write(folder)


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
        run = tracked.find(client, experiment_of(client, workspace))
        if run is None:
            raise UserError(
                f"MLflow has no run {tracked.run_id} any more, which {folder.tracking} is of",
                "the run as it was logged",
                "restore it in MLflow, or repeat the command of the run, which makes another one",
            )
        tracked.send(MlflowRun(client, run.info.run_id), workspace, name, log_model)


def end_run(workspace: Workspace, name: str, status: str, tags: Mapping[str, str]) -> None:
    """Ends the MLflow run of a run whose process was stopped before it could; nothing where there is none.

    Raises:
        UserError: the store cannot be used.
    """
    tracked = Tracked.read(workspace.run(name, create=False))
    if tracked and tracked.run_id:
        with store_errors(tracked.uri):
            run = MlflowRun(client_of(tracked.uri), tracked.run_id)
            run.tags(tags)
            run.end(status)

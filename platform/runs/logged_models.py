"""A trained network as MLflow's logged model: a folder of weights and plain text, with a signature, and no pickle."""

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mcis.platform.runs.version import project_version

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.tracking import MlflowClient

_KEY = "mcis.key"
"""The tag of a logged model that holds `TrainedModel.key`."""


class Array(NamedTuple):
    """Type and shape of an array; -1 stands for any length."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A network that is logged.

    Attributes:
        name: in MLflow.
        key: of the stage that trained it; a run logs a network of the same key once.
        loader: module whose `_load_pyfunc` makes of the folder what predicts.
        write: writes the network and what its loader has to know of it into a folder.
        takes, gives: what goes in and what comes out.
        parameters: shown beside the model.
        register: name of the registered model that it becomes a version of; None = of none.
    """

    name: str
    key: str
    loader: str
    write: Callable[[Path], None]
    takes: Array
    gives: Array
    parameters: Mapping[str, str] = field(default_factory=dict)
    register: str | None = None


def log_model(client: "MlflowClient", experiment_id: str, run_id: str, model: TrainedModel, scratch: Path) -> None:
    """Logs a network as an output of a run, and registers it, as far as an earlier call has not done so.

    Args:
        scratch: an existing folder on a disk with space for a copy.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    logged = _logged(client, experiment_id, run_id, model)
    if logged.status != LoggedModelStatus.READY:
        with tempfile.TemporaryDirectory(prefix=".model-", dir=scratch) as temporary:
            _save(model, logged.model_id, run_id, Path(temporary))
            client.log_model_artifacts(logged.model_id, str(Path(temporary, "model")))
        client.finalize_logged_model(logged.model_id, "READY")
    outputs = client.get_run(run_id).outputs
    if logged.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    if model.register:
        _register(client, model.register, run_id, logged)


def _logged(client: "MlflowClient", experiment_id: str, run_id: str, model: TrainedModel) -> "LoggedModel":
    """The run's logged model of this key, which is made where there is none."""
    found = client.search_logged_models([experiment_id], filter_string=f"source_run_id = '{run_id}'")
    same = [logged for logged in found if logged.name == model.name and logged.tags.get(_KEY) == model.key]
    if same:
        return same[0]
    return client.create_logged_model(
        experiment_id, name=model.name, source_run_id=run_id, tags={_KEY: model.key}, params=dict(model.parameters)
    )


def _save(model: TrainedModel, model_id: str, run_id: str, folder: Path) -> None:
    """Writes MLflow's folder of the model, `folder/model`."""
    import mlflow.pyfunc
    import numpy as np
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    data = folder / "network"
    data.mkdir()
    model.write(data)
    takes, gives = (Schema([TensorSpec(np.dtype(of.dtype), of.shape)]) for of in (model.takes, model.gives))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input example")  # the shapes say what an example would
        mlflow.pyfunc.save_model(
            str(folder / "model"),
            loader_module=model.loader,
            data_path=str(data),
            signature=ModelSignature(takes, gives),
            pip_requirements=[f"mcis=={project_version()}"],
            mlflow_model=Model(model_id=model_id, run_id=run_id),
        )


def _register(client: "MlflowClient", name: str, run_id: str, logged: "LoggedModel") -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # By its place: a store without a server looks `models:/ID` up in a store of its own choice.
    place = logged.artifact_location
    if place not in [version.source for version in client.search_model_versions(f"name = '{name}'")]:
        client.create_model_version(name, source=place, run_id=run_id, model_id=logged.model_id)

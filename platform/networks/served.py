"""A trained segmentation network as MLflow's logged model: a folder of weights and plain text, and its loader.

    labels = mlflow.pyfunc.load_model("models:/NAME/1").predict(image)  # (H, W, 3) uint8 -> (H, W) uint8

Weights are read as tensors alone, the rest as text: to load such a folder runs nothing that came with it.
"""

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import fetched
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.checkpoints import WEIGHTS
from mcis.platform.networks.predictor import Predictor, TrainedRun, trained_run
from mcis.platform.runs.files import write_text
from mcis.platform.runs.version import project_version
from mcis.platform.runs.workspace import RunFolder

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.tracking import MlflowClient

_CONFIG, _ABOUT = "config.toml", "about.json"
_NAME = "segmenter"
_KEY = "mcis.key"
"""The tag of a logged model that holds the key of the stage that trained it."""


class _About(BaseModel):
    """What the network's folder says beside its configuration: the K class names, and the longest side of images."""

    model_config = ConfigDict(extra="forbid")

    classes: list[str] = Field(min_length=1, max_length=255)
    max_side: int | None = Field(gt=0)


def log_segmenter(client: "MlflowClient", experiment_id: str, run_id: str, folder: RunFolder) -> None:
    """Logs the segmentation network of a run's folder as an output of its MLflow run, unless an earlier call has.

    Raises:
        UserError: the run has trained none.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    trained = trained_run(folder.path)
    logged = _logged(client, experiment_id, run_id, trained)
    if logged.status != LoggedModelStatus.READY:
        with tempfile.TemporaryDirectory(prefix=".model-", dir=folder.path) as temporary:
            _save(trained, folder, logged.model_id, run_id, Path(temporary))
            client.log_model_artifacts(logged.model_id, str(Path(temporary, "model")))
        client.finalize_logged_model(logged.model_id, "READY")
    outputs = client.get_run(run_id).outputs
    if logged.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])


def _logged(client: "MlflowClient", experiment_id: str, run_id: str, trained: TrainedRun) -> "LoggedModel":
    """The run's logged model of this training, which is made where there is none."""
    key = trained.weights.name
    for logged in client.search_logged_models([experiment_id], filter_string=f"source_run_id = '{run_id}'"):
        if logged.name == _NAME and logged.tags.get(_KEY) == key:
            return logged
    shown = {"backbone": trained.config.segmenter.backbone, "classes": str(len(trained.classes))}
    return client.create_logged_model(experiment_id, _NAME, source_run_id=run_id, tags={_KEY: key}, params=shown)


def _save(trained: TrainedRun, run: RunFolder, model_id: str, run_id: str, folder: Path) -> None:
    """Writes MLflow's folder of the model, `folder/model`."""
    import mlflow.pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    data = folder / "network"
    data.mkdir()
    write_network(trained, run, data)
    takes, gives = (Schema([TensorSpec(np.dtype("uint8"), shape)]) for shape in ((-1, -1, 3), (-1, -1)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input example")  # the shapes say what an example would
        mlflow.pyfunc.save_model(
            str(folder / "model"),
            loader_module=__name__,
            data_path=str(data),
            signature=ModelSignature(takes, gives),
            pip_requirements=[f"mcis=={project_version()}"],
            mlflow_model=Model(model_id=model_id, run_id=run_id),
        )


def write_network(trained: TrainedRun, run: RunFolder, folder: Path) -> None:
    """Writes what `_load_pyfunc` reads; the weights are a link, as MLflow copies what it leads to."""
    write_text(folder / _CONFIG, run.config.read_text(encoding="utf-8"))
    write_text(folder / _ABOUT, _About(classes=list(trained.classes), max_side=trained.max_side).model_dump_json())
    (folder / WEIGHTS).symlink_to(fetched(trained.weights / WEIGHTS))


class ServedNetwork:
    """Labels images as `mcis predict` does, with the run's scales and CRF."""

    def __init__(self, predictor: Predictor):
        self.predictor = predictor

    def predict(self, image: NDArray[np.uint8], params: dict[str, Any] | None = None) -> NDArray[np.uint8]:
        """RGB (H, W, 3) uint8 -> labels (H, W) uint8: 0 is background, k + 1 is class k."""
        return self.predictor(np.ascontiguousarray(image))


def _load_pyfunc(folder: str) -> ServedNetwork:
    """What MLflow calls to load the model.

    Raises:
        UserError: the folder is damaged.
    """
    place = Path(folder)
    try:
        about = _About.model_validate_json((place / _ABOUT).read_bytes())
    except (OSError, ValidationError):
        raise UserError(f"{place} is no network of mcis", "a model that a run has logged", "log it again") from None
    config = resolve(file=place / _CONFIG).config
    return ServedNetwork(Predictor(TrainedRun(config, place, tuple(about.classes), about.max_side)))

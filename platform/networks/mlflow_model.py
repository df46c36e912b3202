"""Logs the trained segmentation network of a run as MLflow's logged model, and serves such a model.

labels = mlflow.pyfunc.load_model("models:/NAME/1").predict(image)  # (H, W, 3) uint8 -> (H, W) uint8
"""

import importlib.metadata
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mcis.platform.networks.hub import write_pretrained
from mcis.platform.networks.predictor import Predictor
from mcis.platform.networks.trained_segmenter import TrainedSegmenter, open_trained_segmenter
from mcis.platform.runs.workspace import RunFolder

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.tracking import MlflowClient

_NAME = "segmenter"
_REQUIREMENTS = ("numpy", "pillow", "pydensecrf2", "timm", "torch", "torchvision")
"""Packages whose versions a logged model names. mcis is not among them, because no package index has it."""
_KEY_TAG = "mcis.key"
"""The tag of a logged model that holds the key of the stage that trained it."""


def log_segmenter(client: "MlflowClient", experiment_id: str, run_id: str, folder: RunFolder) -> None:
    """Logs the segmentation network of a run as an output of its MLflow run, unless that is done.

    Args:
        client: MLflow's client.
        experiment_id: The experiment of the MLflow run.
        run_id: The MLflow run.
        folder: The folder of the run.

    Raises:
        UserError: See `open_trained_segmenter`.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    trained = open_trained_segmenter(folder.path)
    logged = _find_or_create(client, experiment_id, run_id, trained)
    if logged.status != LoggedModelStatus.READY:
        with tempfile.TemporaryDirectory(prefix="mcis-") as temporary:  # below the workspace, it would be uploaded
            _write_model(trained, logged.model_id, run_id, Path(temporary))
            client.log_model_artifacts(logged.model_id, str(Path(temporary, "model")))
        client.finalize_logged_model(logged.model_id, "READY")

    outputs = client.get_run(run_id).outputs
    model_outputs = outputs.model_outputs if outputs else []
    if logged.model_id not in [output.model_id for output in model_outputs]:
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])


def _find_or_create(
    client: "MlflowClient", experiment_id: str, run_id: str, trained: TrainedSegmenter
) -> "LoggedModel":
    """Returns the logged model of this training in the MLflow run; creates it if there is none."""
    key = trained.weights.name
    for logged in client.search_logged_models([experiment_id], filter_string=f"source_run_id = '{run_id}'"):
        if logged.name == _NAME and logged.tags.get(_KEY_TAG) == key:
            return logged

    params = {"backbone": trained.config.segmenter.backbone, "classes": str(len(trained.classes))}
    return client.create_logged_model(experiment_id, _NAME, source_run_id=run_id, tags={_KEY_TAG: key}, params=params)


def _write_model(trained: TrainedSegmenter, model_id: str, run_id: str, folder: Path) -> None:
    """Writes the model in MLflow's layout to `folder/model`."""
    import mlflow.pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    requirements = []
    for package in _REQUIREMENTS:
        version, _, _ = importlib.metadata.version(package).partition("+")  # an index has 2.11.0, not 2.11.0+cpu
        requirements.append(f"{package}=={version}")

    data = folder / "network"
    write_pretrained(trained, data)
    image = Schema([TensorSpec(np.dtype("uint8"), (-1, -1, 3))])
    labels = Schema([TensorSpec(np.dtype("uint8"), (-1, -1))])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input example")  # the signature has the shapes
        mlflow.pyfunc.save_model(
            str(folder / "model"),
            loader_module=__name__,
            data_path=str(data),
            signature=ModelSignature(image, labels),
            pip_requirements=requirements,
            mlflow_model=Model(model_id=model_id, run_id=run_id),
        )


class ServedNetwork:
    """Labels images as `mcis predict` does, with the scales and the CRF of the run."""

    def __init__(self, predictor: Predictor):
        self.predictor = predictor

    def predict(self, image: NDArray[np.uint8], params: dict[str, Any] | None = None) -> NDArray[np.uint8]:
        """Returns the labels (H, W) uint8 of an image, RGB (H, W, 3) uint8: 0 is background, k + 1 is class k."""
        return self.predictor(np.ascontiguousarray(image))


def _load_pyfunc(folder: str) -> ServedNetwork:
    """Loads the model; called by MLflow."""
    return ServedNetwork(Predictor.from_pretrained(folder))

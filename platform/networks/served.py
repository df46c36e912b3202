"""A trained segmentation network as MLflow keeps and serves it: a folder of weights and plain text, and its loader.

    labels = mlflow.pyfunc.load_model("models:/NAME/1").predict(image)  # (H, W, 3) uint8 -> (H, W) uint8

Weights are read as tensors alone, the rest as text: to load such a folder runs nothing that came with it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcis.datasets.errors import UserError
from mcis.datasets.storage.copies import fetched
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.checkpoints import WEIGHTS
from mcis.platform.networks.predictor import Predictor, trained_run
from mcis.platform.runs.logged_models import Array, TrainedModel
from mcis.platform.runs.workspace import RunFolder, write_text

_CONFIG, _ABOUT = "config.toml", "about.json"


class _About(BaseModel):
    """What the network's folder says beside its configuration: the K class names, and the longest side of images."""

    model_config = ConfigDict(extra="forbid")

    classes: list[str] = Field(min_length=1, max_length=255)
    max_side: int = Field(gt=0)


def trained_segmenter(run: RunFolder, *, register: str | None) -> TrainedModel:
    """The segmentation network of a run as MLflow's logged model.

    Raises:
        UserError: the run has trained none.
    """
    trained = trained_run(run.path)

    def write(folder: Path) -> None:
        write_text(folder / _CONFIG, run.config.read_text(encoding="utf-8"))
        write_text(folder / _ABOUT, _About(classes=list(trained.classes), max_side=trained.max_side).model_dump_json())
        (folder / WEIGHTS).symlink_to(fetched(trained.weights / WEIGHTS))  # MLflow copies what it leads to

    return TrainedModel(
        name="segmenter",
        key=trained.weights.name,
        loader=__name__,
        write=write,
        takes=Array("uint8", (-1, -1, 3)),
        gives=Array("uint8", (-1, -1)),
        parameters={"backbone": trained.config.segmenter.backbone, "classes": str(len(trained.classes))},
        register=register,
    )


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
    gpu = torch.cuda.is_available()
    return ServedNetwork(Predictor(config, place, about.classes, gpu=gpu, max_side=about.max_side))

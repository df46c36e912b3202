"""A trained segmentation network in a folder as the Hugging Face hub has them, which is also MLflow's logged model.

    labels = mlflow.pyfunc.load_model("models:/NAME/1").predict(image)  # (H, W, 3) uint8 -> (H, W) uint8

Weights are read as tensors alone, the rest as text: to load such a folder runs nothing that came with it.
"""

import re
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from mcis.datasets.classes import MAX_CLASSES
from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import fetched
from mcis.models.pretrained import read_state
from mcis.platform.config.keys import leaves
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.build import build_segmenter
from mcis.platform.networks.checkpoints import SAFETENSORS, load_weights, weights_in
from mcis.platform.networks.predictor import Predictor, TrainedRun, check_assignments, trained_run
from mcis.platform.outputs.read_index import of_split, open_index
from mcis.platform.runs.files import read_record_of, write_json, write_text, written_aside
from mcis.platform.runs.scores import FULL_SUPERVISION, read_scores
from mcis.platform.runs.version import project_version
from mcis.platform.runs.workspace import RunFolder, Workspace

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.tracking import MlflowClient

_CONFIG, _CARD = "config.json", "README.md"
_KEPT = r"^(segmenter\.|predict\.|data\.(min_side|max_pixels)$)"
"""The keys of the configuration that build the network, and predict."""
_EXPECTED = "a folder that `Predictor.save_pretrained` wrote, or the id of one on the Hugging Face hub"
_REMEDY = "name another one, or write it again by `mcis export pretrained`"
_NAME = "segmenter"
_KEY = "mcis.key"
"""The tag of a logged model that holds the key of the stage that trained it."""


class _About(BaseModel):
    """config.json: the K class names, the longest side of images, and values of the configuration by dotted key."""

    model_config = ConfigDict(extra="forbid")

    classes: tuple[str, ...] = Field(min_length=1, max_length=MAX_CLASSES)
    max_side: int | None = Field(gt=0)
    values: dict[Annotated[str, Field(pattern=_KEPT)], Any]


def log_segmenter(client: "MlflowClient", experiment_id: str, run_id: str, folder: RunFolder) -> None:
    """Logs the segmentation network of a run's folder as an output of its MLflow run, unless an earlier call has;
    errors as of `trained_run`."""
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    trained = trained_run(folder.path)
    logged = _logged(client, experiment_id, run_id, trained)
    if logged.status != LoggedModelStatus.READY:
        with tempfile.TemporaryDirectory(prefix=".model-", dir=folder.path) as temporary:
            _save(trained, logged.model_id, run_id, Path(temporary))
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


def _save(trained: TrainedRun, model_id: str, run_id: str, folder: Path) -> None:
    """Writes MLflow's folder of the model, `folder/model`."""
    import mlflow.pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    data = folder / "network"
    write_pretrained(trained, data)
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


def write_pretrained(trained: TrainedRun, folder: Path) -> None:
    """Writes weights, configuration and model card, see `Predictor.save_pretrained`."""
    card, state = _card(trained), read_state(fetched(weights_in(trained.weights)), _REMEDY)
    whole = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    kept = {key: value for key, value in leaves(trained.config) if re.match(_KEPT, key)}
    kept |= {"segmenter.init": "pretrained", "segmenter.trainable_stages": "all"}  # nothing is trained again
    with written_aside(folder / SAFETENSORS) as aside:
        safetensors.torch.save_file(whole, aside, {"format": "pt"})
    write_text(folder / _CARD, card)
    write_json(folder / _CONFIG, {"classes": trained.classes, "max_side": trained.max_side, "values": kept})


def pretrained(source: Path | str, assignments: Sequence[str] = (), *, revision: str | None = None) -> TrainedRun:
    """What `write_pretrained` wrote; the arguments and errors are those of `Predictor.from_pretrained`."""
    check_assignments(assignments)
    if not (folder := Path(source).expanduser()).is_dir():
        from huggingface_hub import snapshot_download

        names = [_CONFIG, SAFETENSORS, _CARD]
        try:
            folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=names))
        except (OSError, ValueError) as error:  # of the connection and the hub, and of an id
            found = f"{source} is no folder, and cannot be fetched from the hub ({str(error)[:200]})"
            raise UserError(found, _EXPECTED, _REMEDY) from None
    if not ((folder / _CONFIG).is_file() and (folder / SAFETENSORS).is_file()):
        raise UserError(f"{folder} lacks {_CONFIG} or {SAFETENSORS}", _EXPECTED, _REMEDY)
    about = read_record_of(folder / _CONFIG, _About, _EXPECTED, _REMEDY)
    config = resolve("voc", "paper", about.values, assignments).config
    try:
        with torch.device("meta"):  # which takes no memory, whatever sizes are asked for
            network = build_segmenter(config.segmenter, len(about.classes))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{folder / _CONFIG}: no network ({str(error)[:200]})", _EXPECTED, _REMEDY) from None
    load_weights(network, folder / SAFETENSORS, assign=True)  # to check names and shapes
    told = any(text.startswith("data.max_side=") for text in assignments)
    return TrainedRun(config, folder, about.classes, config.data.max_side if told else about.max_side)


def _card(trained: TrainedRun) -> str:
    """The text of the model card; of a network without a run the one that it came with."""
    if trained.run is None:
        card = trained.weights / _CARD
        return card.read_text(encoding="utf-8") if card.is_file() else ""
    workspace, c = Workspace(trained.run.parent.parent, create=False), trained.config
    first = "the classifier's" if c.segmenter.init == "classifier" else Path(c.weights.origin("segmenter")).name
    rows = of_split(open_index(workspace, trained.run.name, ["split", "tags"]).index, "train", tagged=True)
    known = "tags alone: what is in them, not where" if c.supervision == "tags" else FULL_SUPERVISION
    known = "tags, some by corrected masks" if c.data.corrected_masks else known
    scores = [
        f"| {score.title}, {score.name} | {score.miou:.1f} | {', '.join(map(' '.join, score.meaning().items()))} |\n"
        for score in read_scores(workspace.outputs(trained.run.name))
    ]
    return f"""---
library_name: mcis
pipeline_tag: image-segmentation
tags: [weakly-supervised-segmentation]
---

# Segmentation of {", ".join(trained.classes)}

    labels = mcis.platform.api.Predictor.from_pretrained("FOLDER or USER/NAME")("photo.jpg")  # (H, W) uint8

Label 0 is background, the others are the classes above in their order. Photographs are predicted at up to
{trained.max_side} pixels a side. Training data: {len(rows)} images, known by {known}.
Recipe {c.recipe}, seed {c.seed}, {c.segmenter.network} on {c.segmenter.backbone}; weights at first: {first}.

| scores of the run | mean IoU % | of which images, how made |
| --- | --- | --- |
{"".join(scores)}
License: none is stated. Who publishes this adds `license:` above, as the images and the weights at first allow.
"""


class ServedNetwork:
    """Labels images as `mcis predict` does, with the run's scales and CRF."""

    def __init__(self, predictor: Predictor):
        self.predictor = predictor

    def predict(self, image: NDArray[np.uint8], params: dict[str, Any] | None = None) -> NDArray[np.uint8]:
        """RGB (H, W, 3) uint8 -> labels (H, W) uint8: 0 is background, k + 1 is class k."""
        return self.predictor(np.ascontiguousarray(image))


def _load_pyfunc(folder: str) -> ServedNetwork:
    """What MLflow calls to load the model."""
    return ServedNetwork(Predictor.from_pretrained(folder))

"""Writes and reads trained segmentation networks as folders in the layout of the Hugging Face hub.

A folder holds `model.safetensors`, `config.json` and `README.md`, the model card. Weights are read as tensors only and
the rest as text, so loading a folder runs no code that came with it.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field

from mcis.datasets.classes import MAX_CLASSES
from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import fetch_file
from mcis.models.pretrained import read_state_dict
from mcis.platform.config.keys import leaves
from mcis.platform.config.resolve import Overrides, resolve
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_segmenter
from mcis.platform.networks.trained_segmenter import TrainedSegmenter, check_overrides, sets_max_side
from mcis.platform.networks.weights_files import SAFETENSORS, load_weights, weights_in
from mcis.platform.outputs.provenance import license_counts
from mcis.platform.outputs.read_index import open_index, rows_in_split
from mcis.platform.outputs.supervision import trained_on
from mcis.platform.runs.files import atomic_write, read_record_of, write_json, write_text
from mcis.platform.runs.scores import Score, read_scores
from mcis.platform.runs.workspace import Workspace

_CONFIG = "config.json"
_CARD = "README.md"
_WRITTEN_KEYS = r"^(segmenter\.|predict\.|data\.(min_side|max_pixels|value_range)$)"
"""The configuration keys that config.json holds: keys of the network and keys of its predictions."""
_EXPECTED = "a folder that `Predictor.save_pretrained` wrote, or the id of one on the Hugging Face hub"
_REMEDY = "name another one, or write it again by `mcis export pretrained`"


class _Description(BaseModel):
    """The content of config.json: the K class names, the longest side of images, and configuration values by key."""

    model_config = ConfigDict(extra="forbid")

    classes: tuple[str, ...] = Field(min_length=1, max_length=MAX_CLASSES)
    max_side: int | None = Field(gt=0)
    values: dict[Annotated[str, Field(pattern=_WRITTEN_KEYS)], Any]


def write_pretrained(trained: TrainedSegmenter, folder: Path) -> None:
    """Writes weights, configuration and model card; see `Predictor.save_pretrained`."""
    card = _card(trained)
    state = read_state_dict(fetch_file(weights_in(trained.weights)), _REMEDY)
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}

    values = {key: value for key, value in leaves(trained.config) if re.match(_WRITTEN_KEYS, key)}
    # Nothing is trained again, so these values must not ask for a classifier or for frozen stages.
    values["segmenter.init"] = "pretrained"
    values["segmenter.trainable_stages"] = "all"

    with atomic_write(folder / SAFETENSORS) as aside:
        safetensors.torch.save_file(tensors, aside, {"format": "pt"})
    write_text(folder / _CARD, card)
    write_json(folder / _CONFIG, {"classes": trained.classes, "max_side": trained.max_side, "values": values})


def open_pretrained(source: Path | str, overrides: Overrides = (), *, revision: str | None = None) -> TrainedSegmenter:
    """Opens what `write_pretrained` wrote.

    Arguments and errors are those of `Predictor.from_pretrained`.
    """
    check_overrides(overrides)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = _download(str(source), revision)
    if not ((folder / _CONFIG).is_file() and (folder / SAFETENSORS).is_file()):
        raise UserError(f"{folder} lacks {_CONFIG} or {SAFETENSORS}", _EXPECTED, _REMEDY)

    description = read_record_of(folder / _CONFIG, _Description, _EXPECTED, _REMEDY)
    config = resolve("voc", "paper", description.values, overrides).config
    _check_weights(folder, config, len(description.classes))
    max_side = config.data.max_side if sets_max_side(overrides) else description.max_side
    return TrainedSegmenter(config, folder, description.classes, max_side)


def _download(repository: str, revision: str | None) -> Path:
    """Downloads a repository of the hub, or finds it in the hub's cache. Returns its folder."""
    from huggingface_hub import snapshot_download

    names = [_CONFIG, SAFETENSORS, _CARD]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=names))
    except (OSError, ValueError) as error:  # OSError: connection and hub, ValueError: an invalid id
        found = f"{repository} is no folder, and cannot be fetched from the hub ({str(error)[:200]})"
        raise UserError(found, _EXPECTED, _REMEDY) from None


def _check_weights(folder: Path, config: Config, classes: int) -> None:
    """Raises UserError if names or shapes of the weights do not fit the network that config.json describes."""
    try:
        with torch.device("meta"):  # takes no memory, whatever sizes config.json asks for
            network = build_segmenter(config.segmenter, classes)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{folder / _CONFIG}: no network ({str(error)[:200]})", _EXPECTED, _REMEDY) from None
    load_weights(network, folder / SAFETENSORS, assign=True)


def _card(trained: TrainedSegmenter) -> str:
    """Returns the text of the model card. A network without a run keeps the card that it came with."""
    if trained.run is None:
        card = trained.weights / _CARD
        return card.read_text(encoding="utf-8") if card.is_file() else ""

    config = trained.config
    workspace = Workspace(trained.run.parent.parent, create=False)
    opened = open_index(workspace, trained.run.name, ["split", "tags", "is_negative"])
    num_tagged = len(rows_in_split(opened.index, "train", tagged=True))
    num_negatives = len(rows_in_split(opened.index, "train", tagged=True, negatives=True)) - num_tagged
    negatives = f", and {num_negatives} images that show none of the classes" if num_negatives else ""
    outputs = workspace.outputs(trained.run.name)
    scores = "".join(_score_row(score) for score in read_scores(outputs))
    return f"""---
library_name: mcis
pipeline_tag: image-segmentation
tags: [weakly-supervised-segmentation]
---

# Segmentation of {", ".join(trained.classes)}

    labels = mcis.Predictor.from_pretrained("FOLDER or USER/NAME")("photo.jpg")  # (H, W) uint8

Label 0 is background, the others are the classes above in their order. Photographs are predicted at up to
{trained.max_side} pixels a side.

Trained on {num_tagged} images with {_supervision(config, outputs)}{negatives}.
Recipe {config.recipe}, seed {config.seed}, {config.segmenter.network} on {config.segmenter.backbone}; initial weights:
{_initial_weights(config)}.

| scores of the run | mean IoU % | images and method |
| --- | --- | --- |
{scores}{license_table(opened.provenance)}
No license is stated. Before you publish the network, add `license:` above, as far as the licenses of the images and of
the initial weights allow.
"""


def license_table(provenance: pa.Table) -> str:
    """Returns a table of the licenses of the images; empty if no source states them."""
    counts = license_counts(provenance)
    if not counts:
        return ""
    rows = []
    for count in counts:
        cells = (count.license, f"{count.images:,}", ", ".join(count.sites))
        rows.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |\n")
    return "\n| license of images | images | most frequent sites |\n| --- | --- | --- |\n" + "".join(rows)


def _supervision(config: Config, outputs: Mapping[str, Path]) -> str:
    """Returns what the training images were labeled with, in words.

    Args:
        config: Configuration of the run.
        outputs: Folders of its finished outputs, by stage.
    """
    if config.supervision == "full":
        return "ground-truth masks (supervision=full), an upper bound of what tags reach"
    masks = trained_on(config, outputs)
    return f"image-level tags and {masks}" if masks else "image-level tags only"


def _initial_weights(config: Config) -> str:
    """Returns where the weights of the backbone came from, in words."""
    if config.segmenter.init == "classifier":
        return "the classifier's"
    return Path(config.weights.origin("segmenter")).name


def _score_row(score: Score) -> str:
    """Returns the row of a score in the card's table, with the name of a file of weights instead of its path here."""
    score = dataclasses.replace(score, weights=Path(score.weights).name)
    settings = ", ".join(f"{name} {value}" for name, value in score.settings().items())
    return f"| {score.title}, {score.name} | {score.miou:.1f} | {settings} |\n"

"""Opens the trained segmentation network of a run for predictions."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import local_path
from mcis.platform.config.resolve import Overrides, parse_overrides, resolve
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import open_index, rows_in_split
from mcis.platform.runs.workspace import Workspace

DEFAULT_MAX_SIDE = 1024
"""Longest side, pixels, at which photographs are predicted if the run has no `data.max_side`; also that of overlays."""


class TrainedSegmenter(NamedTuple):
    """A trained segmentation network and what its predictions depend on.

    Attributes:
        config: The configuration of its run, with the values that were changed for predictions.
        weights: The folder that holds its weights.
        classes: The K class names. Label 0 is background, label k + 1 is `classes[k]`.
        max_side: Longest side at which photographs are predicted, pixels. By default the median longest side of the
            training images as they were read, because a network recognizes things by their size; `data.max_side` if
            that is set for predictions. None: each photograph at its own size.
        run: The folder of its run, which the model card describes. None: the network has no run here.
    """

    config: Config
    weights: Path
    classes: tuple[str, ...]
    max_side: int | None
    run: Path | None = None


def open_trained_segmenter(run: Path | str, overrides: Overrides = ()) -> TrainedSegmenter:
    """Opens the trained segmentation network of a run.

    Args:
        run: The folder of the run, WORKSPACE/runs/NAME.
        overrides: Values of `predict.*` or `data.max_side` that replace those of the run.

    Raises:
        UserError: There is no such run, it has trained no segmenter, or other keys are set.
    """
    folder = local_path(str(run)).expanduser().resolve()
    check_overrides(overrides)

    workspace = Workspace(folder.parent.parent, create=False)
    weights = workspace.outputs(folder.name).get("train_segmenter")
    if weights is None:
        raise UserError(
            f"{folder} is not a run, or has no trained segmentation network",
            "the folder of a run that has passed the stage train_segmenter, WORKSPACE/runs/NAME",
            "name another run, or repeat its command with --until train_segmenter",
        )

    config = resolve(overrides=overrides, file=workspace.run(folder.name, create=False).config).config
    index = open_index(workspace, folder.name)
    max_side = config.data.max_side
    if not sets_max_side(overrides):
        max_side = _median_side(index.index, config.data.max_side or DEFAULT_MAX_SIDE)

    return TrainedSegmenter(config, weights, index.classes, max_side, folder)


def _median_side(index: pa.Table, limit: int) -> int:
    """Returns the median longest side of the training images, at most `limit`; `limit` if there are none."""
    rows = rows_in_split(index, "train")
    if not len(rows):
        return limit
    sides = np.maximum(rows["height"].to_numpy(), rows["width"].to_numpy())
    return min(limit, int(np.median(sides)))


def sets_max_side(overrides: Overrides) -> bool:
    """Returns whether overrides set `data.max_side`."""
    return "data.max_side" in parse_overrides(overrides)


def check_overrides(overrides: Overrides) -> None:
    """Raises UserError if overrides change anything but predictions."""
    allowed = ("data.max_side", "data.max_pixels", "data.value_range", "data.tags.allow_absolute")
    others = [
        f"{key}={value}"
        for key, value in parse_overrides(overrides).items()
        if key not in allowed and not key.startswith("predict.")
    ]
    if others:
        raise UserError(
            f"{', '.join(others)} for the predictions of a trained network",
            f"keys predict.*, {', '.join(allowed[:-1])} or {allowed[-1]}",
            "leave the others out, or repeat the run with them",
        )

"""What a run takes of the disk: the sizes that matter, asked for before any training.

These are the cache (decoded images, or a frozen backbone's outputs), the features that localization keeps while it
runs, and the tables of maps, masks and predictions. They follow from shapes; only label pictures are estimated.
"""

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import torch

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import image_bytes
from mcis.datasets.tables.backbone_outputs import features_bytes
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.features import features_shape
from mcis.platform.runs.read_index import of_split
from mcis.platform.runs.workspace import Workspace, bytes_in, free_bytes, in_words

COLUMNS = ["split", "tags"]
"""Of an index or a listing, which sizes follow from."""
_LABELS = 8 * 2**10
"""Bytes of the PNG of an image's labels, estimated: large areas of few values."""


class DiskUse(NamedTuple):
    """Bytes by the stage that writes them, and what they are."""

    stage: str
    what: str
    size: int


def disk_use(config: Config, images: pa.Table, classes: int) -> list[DiskUse]:
    """What the stages of a run write that finds nothing finished, but for weights and pictures.

    Args:
        images: `COLUMNS` of an index or a listing.
    """
    train, val = (of_split(images, split, tagged=True) for split in ("train", "val"))
    predicted = len(images) - len(of_split(images, "train")) or len(images)
    tags = int(pc.sum(pc.list_value_length(train["tags"])).as_py() or 0)
    masks = [DiskUse("pseudo_masks", "masks", 2 * _LABELS * len(train))]
    masks += [DiskUse("predict", "predictions", 2 * _LABELS * predicted)]
    if config.supervision != "tags":
        return masks
    cached = min(_cache_wanted(config, len(train), len(val)), _cache_bound(config))
    features, of_map = _localization(config, len(train), classes)
    return [
        DiskUse("train_classifier", "frozen features" if config.classifier.from_features else "decoded images", cached),
        DiskUse("localize", "features", features),
        DiskUse("localize", "maps", 2 * of_map * tags),
        *masks,
    ]


def uncached(config: Config, images: pa.Table) -> Iterator[str]:
    """Yields what the cache does not hold of what the classifier's training reads, in a sentence."""
    train, val = (len(of_split(images, split, tagged=True)) for split in ("train", "val"))
    wanted, bound = _cache_wanted(config, train, val), _cache_bound(config)
    if config.supervision == "tags" and config.weights.classifier is None and wanted > bound:
        yield (
            f"compute.cache_gb={config.compute.cache_gb:g} does not hold the {in_words(wanted)} of all images, so that "
            f"each epoch computes some or all of them again; compute.cache_gb={math.ceil(wanted / 2**30)} holds them"
        )


def check_disk(config: Config, images: pa.Table, classes: int, workspace: Workspace, ahead: Collection[str]) -> None:
    """Asks for the space that stages take which are not finished.

    Args:
        ahead: their names.

    Raises:
        UserError: the disk has less free.
    """
    uses = [use for use in disk_use(config, images, classes) if use.stage in ahead]
    wanted = sum(use.size for use in uses) - bytes_in(workspace.cache)
    free = free_bytes(workspace.root)
    if wanted > free:
        raise UserError(
            f"the run takes {in_words(wanted)} more on the disk of {workspace.root}, which has {in_words(free)} free; "
            f"of it {in_parts(uses)}",
            "space for all stages that are not finished",
            "free some space, or move the workspace (--workspace DIR); or set a lower localize.features_gb or "
            "compute.cache_gb; what is finished is kept",
        )


def in_parts(uses: Collection[DiskUse]) -> str:
    """The parts that take some of the disk, the largest first."""
    largest = sorted((use for use in uses if use.size), key=lambda use: -use.size)
    return ", ".join(f"{use.what} {in_words(use.size)}" for use in largest)


def _cache_bound(config: Config) -> int:
    return int(config.compute.cache_gb * 2**30)


def _cache_wanted(config: Config, train: int, val: int) -> int:
    """Bytes of the cache of all images."""
    c = config.classifier
    if config.weights.classifier is not None:
        return 0
    if c.from_features:
        return (train + val) * features_bytes(features_shape(c))
    return (train + (val if c.val_every else 0)) * image_bytes(c.input_size)


def _localization(config: Config, train: int, classes: int) -> tuple[int, int]:
    """Bytes of the features that are kept at a time, and of a map."""
    with torch.device("meta"):
        model = build_classifier(config.classifier, classes).eval()
        side = config.classifier.input_size
        _, channels, height, width = model.embed(torch.zeros(1, 3, side, side)).shape
    kept = 2 * channels * height * width * train if config.localize.related else 0
    return min(kept, int(config.localize.features_gb * 2**30)), 2 * height * width + 64

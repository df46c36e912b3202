"""What a run takes of the disk: the sizes that matter, asked for before any training.

These are the cache (decoded images, or a frozen backbone's outputs), the features that localization keeps while it
runs, and its maps. They follow from shapes; labels, weights and pictures are small beside them.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import image_bytes
from mcis.datasets.tables.memory_mapped import features_bytes
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import embedding_shape
from mcis.platform.networks.features import features_shape
from mcis.platform.outputs.read_index import of_split
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import byte_text, bytes_in, free_bytes, read_table

COLUMNS = ["split", "tags"]
"""Of an index or a listing, which sizes follow from."""


class DiskUse(NamedTuple):
    """Bytes by the stage that writes them, and what they are."""

    stage: str
    what: str
    size: int


def disk_use(config: Config, images: pa.Table, classes: int) -> list[DiskUse]:
    """What the stages of a run write that finds nothing finished, the largest first.

    Args:
        images: `COLUMNS` of an index or a listing.
    """
    if config.supervision != "tags":
        return []
    train, c = of_split(images, "train", tagged=True), config.classifier
    maps = int(pc.sum(pc.list_value_length(train["tags"])).as_py() or 0)
    channels, height, width = embedding_shape(c, classes)
    kept = len(train) if config.localize.related or config.localize.keep_features else 0
    cached = min(_cache_wanted(config, images), int(config.compute.cache_gb * 2**30))
    uses = [
        DiskUse("train_classifier", "frozen features" if c.from_features else "decoded images", cached),
        DiskUse("localize", "features", 2 * channels * height * width * kept),
        DiskUse("localize", "maps", (2 * height * width + 64) * maps),
    ]
    return sorted((use for use in uses if use.size), key=lambda use: -use.size)


def uncached(config: Config, images: pa.Table) -> list[str]:
    """What the cache does not hold of what the classifier's training reads, in a sentence, if there is anything."""
    wanted, gib = _cache_wanted(config, images), config.compute.cache_gb
    note = (
        f"compute.cache_gb={gib:g} does not hold the {byte_text(wanted)} of all images, so that each epoch computes "
        f"some or all of them again; compute.cache_gb={math.ceil(wanted / 2**30)} holds them"
    )
    return [note] if config.supervision == "tags" and wanted > gib * 2**30 else []


def check_disk(config: Config, context: RunContext, ahead: Collection[str]) -> None:
    """Asks for the space that the stages `ahead` take, once there is an index; UserError where the disk has less."""
    if "index" not in context.inputs:
        return
    images = read_table(context.inputs["index"] / "index.parquet", COLUMNS)
    uses = [use for use in disk_use(config, images, len(context.classes)) if use.stage in ahead]
    wanted, free = sum(use.size for use in uses) - bytes_in(context.workspace.cache), free_bytes(context.workspace.root)
    if wanted > free:
        raise UserError(
            f"the run takes {byte_text(wanted)} more on the disk of {context.workspace.root}, which has "
            f"{byte_text(free)} free; of it {in_parts(uses)}",
            "space for all stages that are not finished",
            "free some space, or move the workspace (--workspace DIR); or set a lower classifier.input_size or "
            "compute.cache_gb, or localize.related=0, which keeps no features; what is finished is kept",
        )


def in_parts(uses: Collection[DiskUse]) -> str:
    """The parts that take some of the disk."""
    return ", ".join(f"{use.what} {byte_text(use.size)}" for use in uses)


def _cache_wanted(config: Config, images: pa.Table) -> int:
    """Bytes of the cache of all images."""
    c, (train, val) = config.classifier, (len(of_split(images, split, tagged=True)) for split in ("train", "val"))
    if config.weights.classifier is not None:
        return 0
    if c.from_features:
        return (train + val) * features_bytes(features_shape(c))
    return (train + (val if c.val_every else 0)) * image_bytes(c.input_size)

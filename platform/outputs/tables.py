"""Tables that stages leave, of localization maps, labels, pseudo masks and predictions: their schemas; maps as rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.tables.shards import Shards
from mcis.models.grids import Grid, Grids

MAPS_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("class", pa.uint16(), nullable=False, metadata={"about": "a tag of the image, index from 0"}),
        pa.field("height", pa.int32(), nullable=False, metadata={"about": "of the map"}),
        pa.field("width", pa.int32(), nullable=False, metadata={"about": "of the map"}),
        pa.field("first", pa.float64(), nullable=False, metadata={"about": "where row and column 0 lie, of the side"}),
        pa.field("step", pa.float64(), nullable=False, metadata={"about": "from one to the next, of the side"}),
        pa.field("map", pa.list_(pa.float16()), nullable=False, metadata={"about": "class activations, row by row"}),
    ]
)
MASKS_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("labels", pa.binary(), nullable=False, metadata={"about": "PNG, the label of every pixel: scored"}),
        pa.field("mask", pa.binary(), nullable=False, metadata={"about": "PNG, 255 = ignore: trained on"}),
        pa.field("ignored", pa.float32(), nullable=False, metadata={"about": "fraction of ignored pixels"}),
        pa.field("foreground", pa.float32(), nullable=False, metadata={"about": "fraction of pixels of a class"}),
        pa.field("cue", pa.string(), nullable=False, metadata={"about": "of the background: saliency, crf, affinity"}),
    ]
)
LABELS_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("mask", pa.binary(), nullable=False, metadata={"about": "PNG, confident labels, 255 elsewhere"}),
        pa.field("confident", pa.float32(), nullable=False, metadata={"about": "fraction of pixels with a label"}),
    ]
)
PREDICTIONS_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("plain", pa.binary(), nullable=False, metadata={"about": "PNG, labels without CRF"}),
        pa.field("crf", pa.binary(), metadata={"about": "PNG, labels after the CRF, or null"}),
        pa.field("absent_tags", pa.list_(pa.uint16()), metadata={"about": "the image's tags that are not predicted"}),
    ]
)
_LARGEST = float(np.finfo(np.float16).max)


class ImageMaps(NamedTuple):
    """The maps of one image.

    Attributes:
        classes: class indices, (T,).
        maps: activations, (T, H, W) float32.
        grids: where their positions lie along the image's height and width.
    """

    classes: NDArray[np.int64]
    maps: NDArray[np.float32]
    grids: Grids


def map_rows(image_ids: Sequence[str], classes: Sequence[int], maps: NDArray[np.floating], grid: Grid) -> pa.Table:
    """Writes T maps as rows of MAPS_SCHEMA.

    Args:
        image_ids, classes: the image and the class of each map.
        maps: (T, H, W); activations beyond the range of float16 become its largest value, with their sign.
        grid: where their rows lie, and their columns; networks see squares, so that both lie alike.

    Raises:
        ValueError: a value is NaN.
    """
    count, height, width = maps.shape
    if np.isnan(maps).any():
        raise ValueError("a localization map holds NaN")
    values = pa.array(maps.clip(-_LARGEST, _LARGEST).astype(np.float16).reshape(-1))
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * (height * width))
    columns = [
        pa.array(image_ids, pa.string()),
        pa.array(classes, pa.uint16()),
        pa.array(np.full(count, height, np.int32)),
        pa.array(np.full(count, width, np.int32)),
        pa.array(np.full(count, grid.first)),
        pa.array(np.full(count, grid.step)),
        pa.ListArray.from_arrays(offsets, values),
    ]
    return pa.table(columns, schema=MAPS_SCHEMA)


def image_maps(shards: Shards, image_id: str) -> ImageMaps:
    """The maps of one image, out of a table with MAPS_SCHEMA; errors as of `Shards.rows`."""
    rows = shards.rows(image_id)
    column = rows["map"].combine_chunks()
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    height, width, first, step = (rows[name][0].as_py() for name in ("height", "width", "first", "step"))
    return ImageMaps(
        classes=rows["class"].to_numpy().astype(np.int64),
        maps=values.reshape(len(rows), height, width),
        grids=Grids(Grid(first, step, height), Grid(first, step, width)),
    )

"""Schemas of the tables that stages write, and conversion of localization maps to and from rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.tables.shards import Shards
from mcis.models.grids import Grid, Grids, pixel_grids


def schema_field(name: str, data_type: pa.DataType, about: str | None = None, *, nullable: bool = False) -> pa.Field:
    """Makes the field of a schema. Its metadata has the description `about`."""
    return pa.field(name, data_type, nullable=nullable, metadata={"about": about} if about else None)


MAPS_SCHEMA = pa.schema(
    [
        schema_field("image_id", pa.string()),
        schema_field("class", pa.uint16(), "a tag of the image, index from 0"),
        schema_field("height", pa.int32(), "rows of the map"),
        schema_field("width", pa.int32(), "columns of the map"),
        schema_field("first", pa.float64(), "center of row 0 and of column 0, as a fraction of the side"),
        schema_field("step", pa.float64(), "distance of two rows or columns, as a fraction of the side"),
        schema_field("map", pa.list_(pa.float16()), "class activations, row by row"),
    ]
)
IMPORTED_MAPS_SCHEMA = pa.schema(
    [
        schema_field("image_id", pa.string()),
        schema_field("class", pa.uint16(), "a tag of the image, index from 0"),
        schema_field("height", pa.int32(), "rows of the map, which divide the image into equal parts"),
        schema_field("width", pa.int32(), "columns of the map, which divide the image into equal parts"),
        schema_field("map", pa.list_(pa.float32()), "scores in [0, 1], row by row"),
        schema_field("is_in_file", pa.bool_(), "false: the file has no map of the class; it is 0 everywhere"),
        schema_field(
            "other_classes", pa.list_(pa.uint16()), "classes in the file that are no tags of the image; left out"
        ),
    ]
)
"""Maps of another program (`localize.maps`). They have any size, and keep their precision."""
MASKS_SCHEMA = pa.schema(
    [
        schema_field("image_id", pa.string()),
        schema_field("labels", pa.binary(), "PNG, the label of every pixel; this is scored"),
        schema_field("mask", pa.binary(), "PNG, 255 = ignore; this is trained on"),
        schema_field("ignored", pa.float32(), "fraction of ignored pixels"),
        schema_field("foreground", pa.float32(), "fraction of pixels with a class"),
        schema_field("cue", pa.string(), "rule that made the mask; or negative, corrected, ground truth or imported"),
    ]
)
DIFFERS_FROM_INDICES = schema_field(
    "differs_from_indices", pa.bool_(), "the labels are those of a palette's colors, and its indices differ from them"
)
"""Field of the tables of masks and predictions of another program."""
IMPORTED_MASKS_SCHEMA = MASKS_SCHEMA.append(
    schema_field("other_classes", pa.list_(pa.uint16()), "classes in the mask that are no tags of the image")
).append(DIFFERS_FROM_INDICES)
"""Pseudo masks of another program (`pseudo_masks.masks`)."""
LABELS_SCHEMA = pa.schema(
    [
        schema_field("image_id", pa.string()),
        schema_field("mask", pa.binary(), "PNG, confident labels, 255 elsewhere"),
        schema_field("confident", pa.float32(), "fraction of pixels with a label"),
    ]
)
PREDICTIONS_SCHEMA = pa.schema(
    [
        schema_field("image_id", pa.string()),
        schema_field("plain", pa.binary(), "PNG, labels without CRF"),
        schema_field("crf", pa.binary(), "PNG, labels after the CRF, or null", nullable=True),
        schema_field("absent_tags", pa.list_(pa.uint16()), "tags of the image that are not predicted", nullable=True),
    ]
)
IMPORTED_PREDICTIONS_SCHEMA = PREDICTIONS_SCHEMA.append(DIFFERS_FROM_INDICES)
"""Predictions of another program (`predict.masks`)."""
MAPS_POSITION = "maps_position"
"""Column of index rows: number of the image among those with maps, the tagged training images."""
_MAX_FLOAT16 = float(np.finfo(np.float16).max)


class ImageMaps(NamedTuple):
    """The localization maps of one image.

    Attributes:
        classes: Class indices, (T,).
        maps: Activations, (T, H, W) float32.
        grids: Positions of their rows and columns along the image's height and width.
        is_imported: Whether they are maps of another program, which are scores in [0, 1].
    """

    classes: NDArray[np.int64]
    maps: NDArray[np.float32]
    grids: Grids
    is_imported: bool = False

    @property
    def export_scale(self) -> str:
        """Scale of exported maps, whatever `maps.scale` is: `given` or `maximum`."""
        return "given" if self.is_imported else "maximum"


def map_rows(image_ids: Sequence[str], classes: Sequence[int], maps: NDArray[np.floating], grid: Grid) -> pa.Table:
    """Converts T maps to rows of MAPS_SCHEMA.

    Args:
        image_ids: The image of each map.
        classes: The class index of each map.
        maps: (T, H, W). Activations beyond the range of float16 become its largest value, with their sign.
        grid: Positions of their rows. Columns have the same positions, because networks see square images.

    Raises:
        ValueError: A value is NaN.
    """
    count, height, width = maps.shape
    if np.isnan(maps).any():
        raise ValueError("a localization map contains NaN")
    values = pa.array(maps.clip(-_MAX_FLOAT16, _MAX_FLOAT16).astype(np.float16).reshape(-1))
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


def with_maps_position(rows: pa.Table) -> pa.Table:
    """Adds the column MAPS_POSITION to rows of an index that contain all tagged training images, in their order.

    It is null for images without tags, which have no maps.
    """
    is_tagged = pc.greater(pc.list_value_length(rows["tags"]), 0).to_numpy()
    position = np.cumsum(is_tagged) - 1
    return rows.append_column(MAPS_POSITION, pa.array(position, pa.int64(), mask=~is_tagged))


def map_bytes(height: int, width: int) -> int:
    """Returns about how many bytes a localization map (H, W) takes in a shard of MAPS_SCHEMA.

    It has two bytes per activation, which hardly compress, and its share of the shard's other columns and headers.
    """
    return 2 * height * width + 256


def labels_bytes(height: float) -> int:
    """Returns about how many bytes the labels of an image of `height` rows take, as a PNG in a shard.

    Labels change a few times in a row of pixels, so the size follows the number of rows, not of pixels.
    """
    return round(100 + 6 * height)


def image_maps(shards: Shards, image_id: str, position: int | None = None) -> ImageMaps:
    """Reads the maps of one image from a table with MAPS_SCHEMA or IMPORTED_MAPS_SCHEMA.

    For arguments and errors see `Shards.rows`.
    """
    rows = shards.rows(image_id, position)
    values = rows["map"].combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    height, width = (rows[name][0].as_py() for name in ("height", "width"))
    grids = pixel_grids(height, width)
    is_imported = "first" not in rows.column_names
    if not is_imported:
        first, step = (rows[name][0].as_py() for name in ("first", "step"))
        grids = Grids(Grid(first, step, height), Grid(first, step, width))
    return ImageMaps(
        classes=rows["class"].to_numpy().astype(np.int64),
        maps=values.reshape(len(rows), height, width),
        grids=grids,
        is_imported=is_imported,
    )

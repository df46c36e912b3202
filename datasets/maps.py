"""Tables of localization maps and masks between the stages, and finding an image's rows in their shards."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

MAPS_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("class", pa.uint16(), nullable=False, metadata={"about": "a tag of the image, index from 0"}),
        pa.field("height", pa.int32(), nullable=False, metadata={"about": "of the map"}),
        pa.field("width", pa.int32(), nullable=False, metadata={"about": "of the map"}),
        pa.field("map", pa.list_(pa.float16()), nullable=False, metadata={"about": "class activations, row by row"}),
    ]
)
MASKS_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("labels", pa.binary(), nullable=False, metadata={"about": "PNG, the label of every pixel: scored"}),
        pa.field("mask", pa.binary(), nullable=False, metadata={"about": "PNG, 255 = ignore: trained on"}),
        pa.field("ignored", pa.float32(), nullable=False, metadata={"about": "share of ignored pixels"}),
    ]
)
PREDICTIONS_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("plain", pa.binary(), nullable=False, metadata={"about": "PNG, labels without CRF"}),
        pa.field("crf", pa.binary(), metadata={"about": "PNG, labels after the CRF, or null"}),
    ]
)


_LARGEST = float(np.finfo(np.float16).max)


class ImageMaps:
    """The maps of one image: `classes` (T,) class indices, `maps` (T, H, W) float32."""

    def __init__(self, classes: NDArray[np.int64], maps: NDArray[np.float32]):
        self.classes, self.maps = classes, maps


def map_rows(image_ids: Sequence[str], classes: Sequence[int], maps: NDArray[np.floating]) -> pa.Table:
    """Maps (T, H, W) as rows of MAPS_SCHEMA; activations beyond float16's range are kept as its largest.

    Raises:
        ValueError: a value is not a number.
    """
    count, height, width = maps.shape
    if np.isnan(maps).any():
        raise ValueError("a localization map holds values that are no numbers")
    values = pa.array(maps.clip(-_LARGEST, _LARGEST).astype(np.float16).reshape(-1))
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * (height * width))
    columns = [
        pa.array(image_ids, pa.string()),
        pa.array(classes, pa.uint16()),
        pa.array(np.full(count, height, np.int32)),
        pa.array(np.full(count, width, np.int32)),
        pa.ListArray.from_arrays(offsets, values),
    ]
    return pa.table(columns, schema=MAPS_SCHEMA)


class Shards:
    """Finds rows by image in a folder of Parquet shards; travels by pickle, opens a shard when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.where: dict[str, str] = {}
        for file in sorted(folder.glob("part-*.parquet")):
            for image_id in pq.read_table(file, columns=["image_id"])["image_id"].to_pylist():
                self.where[image_id] = file.name

    def rows(self, image_id: str) -> pa.Table | None:
        """The rows of one image, or None where the table has none."""
        name = self.where.get(image_id)
        if name is None:
            return None
        table, begin, count = _shard(self.folder / name)
        return table.slice(begin[image_id], count[image_id])

    def maps(self, image_id: str) -> ImageMaps | None:
        """The maps of one image, of a table with MAPS_SCHEMA."""
        rows = self.rows(image_id)
        if rows is None:
            return None
        column = rows["map"].combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
        shape = (len(rows), rows["height"][0].as_py(), rows["width"][0].as_py())
        return ImageMaps(rows["class"].to_numpy().astype(np.int64), values.reshape(shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)


@functools.lru_cache(maxsize=4)
def _shard(path: Path) -> tuple[pa.Table, dict[str, int], dict[str, int]]:
    """A shard, and where in it the rows of an image begin and how many they are; they lie together."""
    table = pq.read_table(path).combine_chunks()
    begin: dict[str, int] = {}
    count: dict[str, int] = {}
    for place, image_id in enumerate(table["image_id"].to_pylist()):
        begin.setdefault(image_id, place)
        count[image_id] = count.get(image_id, 0) + 1
    return table, begin, count

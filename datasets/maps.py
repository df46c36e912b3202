"""Tables of localization maps, labels, pseudo masks and predictions: their schemas, and reading an image's rows."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cachetools
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mcis.datasets.copies import AGAIN, fetch_below, read_file
from mcis.datasets.errors import BadFile
from mcis.datasets.grids import Grid

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
        pa.field("by_maps", pa.float32(), nullable=False, metadata={"about": "fraction of pixels that maps decided"}),
        pa.field(
            "cue", pa.string(), nullable=False, metadata={"about": "of the background: saliency, crf or affinity"}
        ),
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
    ]
)


_T = TypeVar("_T")
SHARD_BYTES = 2**30
"""Bound of the decoded shards that a process keeps in memory, bytes."""

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
    grids: tuple[Grid, Grid]


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


def read_parquet(file: Path, read: Callable[[Path], _T], *, fetch: bool = True) -> _T:
    """What `read` makes of a Parquet file of an output.

    Raises:
        BadFile: it is damaged or absent.
        UserError: it cannot be read at present, see `copies.read_file`.
    """
    expected = "a table as mcis wrote it"
    try:
        return read_file(file, read, expected, fetch=fetch)
    except FileNotFoundError:
        raise BadFile(f"{file} is missing", expected, AGAIN) from None


class Shards:
    """Reads rows by image from a folder of Parquet shards; can be pickled, as it opens a shard only when one is read.

    Decoded shards stay in memory, in each process as many as SHARD_BYTES holds, those least recently read given up
    first. Threads may read at once.

    Args:
        folder: of `part-*.parquet`; the rows of an image lie next to each other in one of them.
        columns: beside `image_id` that rows have; None = all.
    """

    def __init__(self, folder: Path, columns: Sequence[str] | None = None):
        self.folder = folder
        self.columns = None if columns is None else ("image_id", *columns)
        self.shard_of: dict[str, str] = {}
        self.written: dict[str, int] = {}
        for name, at in fetch_below(folder, lambda name, _: fnmatch(name, "part-*.parquet")).items():
            table = read_parquet(folder / name, functools.partial(pq.read_table, columns=["image_id"]), fetch=False)
            self.written[name] = at.changed  # another file of the same name is another shard
            self.shard_of |= dict.fromkeys(table["image_id"].to_pylist(), name)

    def rows(self, image_id: str) -> pa.Table | None:
        """The rows of one image, or None if the table has none."""
        name = self.shard_of.get(image_id)
        if name is None:
            return None
        shard = _read_kept(self.folder / name, self.columns, self.written[name])
        return shard.table.slice(shard.begin[image_id], shard.rows[image_id])

    def maps(self, image_id: str) -> ImageMaps | None:
        """The maps of one image, out of a table with MAPS_SCHEMA, or None if it has none."""
        rows = self.rows(image_id)
        if rows is None:
            return None
        column = rows["map"].combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
        height, width, first, step = (rows[name][0].as_py() for name in ("height", "width", "first", "step"))
        return ImageMaps(
            classes=rows["class"].to_numpy().astype(np.int64),
            maps=values.reshape(len(rows), height, width),
            grids=(Grid(first, step, height), Grid(first, step, width)),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.shard_of)


class _Shard(NamedTuple):
    """A shard's rows, and by image where its rows begin and how many there are."""

    table: pa.Table
    begin: dict[str, int]
    rows: dict[str, int]


def _read_shard(path: Path, columns: tuple[str, ...] | None, written: int) -> _Shard:
    """Reads a shard's file.

    Args:
        columns: that are read; None = all.
        written: when the file was, which tells it from an earlier one of the same name.
    """
    wanted = None if columns is None else list(columns)
    table = read_parquet(path, functools.partial(pq.read_table, columns=wanted)).combine_chunks()
    begin: dict[str, int] = {}
    rows: dict[str, int] = {}
    for number, image_id in enumerate(table["image_id"].to_pylist()):
        begin.setdefault(image_id, number)
        rows[image_id] = rows.get(image_id, 0) + 1
    return _Shard(table, begin, rows)


def keep_shards(bound: int) -> Callable[[Path, tuple[str, ...] | None, int], _Shard]:
    """`_read_shard` for many threads that keeps what it has read, up to so many bytes; a larger shard is not kept."""
    kept = cachetools.LRUCache[Any, _Shard](bound, getsizeof=lambda shard: shard.table.nbytes)
    return cachetools.cached(kept, condition=threading.Condition())(_read_shard)


_read_kept = keep_shards(SHARD_BYTES)

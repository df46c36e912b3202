"""Caches of one array per image, for example features of a frozen backbone, in memory-mapped Arrow shards."""

import bisect
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import names_in, read_file


def cache_table(rows: NDArray[Any]) -> pa.Table:
    """Returns the table of a shard: N arrays (N, ...), flattened, in one column of fixed-size lists."""
    return pa.table({"rows": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows[0].size)})


def _span(shard: Path) -> tuple[int, int]:
    """Returns first and last + 1, the range of positions in a shard, from its name `part-<first>-<last + 1>.arrow`."""
    first, stop = shard.stem.split("-")[1:]
    return int(first), int(stop)


def _read_mapped(path: Path) -> pa.RecordBatch:
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)


class CachedRows:
    """Reads cached rows by their positions in the index. Can be pickled.

    Args:
        folder: folder with shards `part-<first>-<last + 1>.arrow`, see `cache_table`; None = an empty cache.
        shape: shape of a row.
    """

    def __init__(self, folder: Path | None, shape: tuple[int, ...]):
        self.shape = shape
        self.shards: list[Path] = []
        if folder:
            self.shards = [folder / name for name in names_in(folder) if fnmatch(name, "part-*.arrow")]
        self.spans = [_span(path) for path in self.shards]
        self.opened: dict[int, NDArray[Any] | None] = {}

    def row(self, position: int) -> NDArray[Any] | None:
        """Returns the row of an image, of `shape`; None if it is not in the cache, or no longer.

        Raises:
            UserError: the shard is damaged or cannot be read at present.
        """
        shard = bisect.bisect_right(self.spans, (position, 2**63)) - 1
        if shard < 0 or position >= self.spans[shard][1]:
            return None

        if shard not in self.opened:
            self.opened[shard] = self._open(self.shards[shard])
        rows = self.opened[shard]
        if rows is None:
            return None
        return rows[position - self.spans[shard][0]]

    def holds(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether the cache had the rows of N images when this reader was made, (N,)."""
        starts = np.array([first for first, _ in self.spans], np.int64)
        stops = np.array([0, *(stop for _, stop in self.spans)], np.int64)
        return positions < stops[np.searchsorted(starts, positions, side="right")]

    def _open(self, path: Path) -> NDArray[Any] | None:
        """Returns the rows of a shard, memory-mapped; None if the file does not exist."""
        try:
            batch = read_file(path, _read_mapped, "a shard of the cache", "remove its folder and repeat the command")
        except FileNotFoundError:
            return None
        return batch.column(0).flatten().to_numpy(zero_copy_only=True).reshape(-1, *self.shape)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "opened": {}}


def features_bytes(shape: tuple[int, int, int]) -> int:
    """Returns the size of float16 features (C, H, W) of one view (an image or its horizontal flip), bytes."""
    return 2 * int(np.prod(shape))


class Statistics(NamedTuple):
    """Mean and standard deviation of a backbone's channels over all positions of some images, (C,) float32 each."""

    mean: NDArray[np.float32]
    deviation: NDArray[np.float32]


class Features:
    """Reads a backbone's features of images by their positions in the index. Can be pickled.

    Args:
        uris: URIs of the N images, for messages.
        folder: folder of the shards. Each row is (V, C, H, W) float16: the image and, if V is 2, its horizontal flip.
        shape: (C, H, W).
        views: V.
    """

    def __init__(self, uris: Sequence[str], folder: Path, shape: tuple[int, int, int], views: int = 2):
        self.uris = uris
        self.shape = shape
        self.folder = folder
        self.cache = CachedRows(folder, (views, *shape))

    def holds(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether the cache had the features of N images when this reader was made, (N,)."""
        return self.cache.holds(positions)

    def __call__(self, positions: NDArray[np.int64], hflip: NDArray[np.bool_] | None = None) -> NDArray[np.float16]:
        """Returns the features of the images at N positions, (N, C, H, W); 0 for images that are not cached (`holds`).

        Args:
            hflip: (N,), whether to return the features of the flipped image; None = for no image.

        Raises:
            UserError: the cache no longer holds an image, or a shard cannot be read.
        """
        features = np.zeros((len(positions), *self.shape), np.float16)
        views = np.zeros(len(positions), np.int64) if hflip is None else hflip.astype(np.int64)
        is_held = self.holds(positions).tolist()
        for image, position, view, held in zip(features, positions.tolist(), views.tolist(), is_held, strict=True):
            if not held:
                continue
            row = self.cache.row(position)
            if row is None:
                raise UserError(
                    f"{self.folder} no longer holds the features of {self.uris[position]}",
                    "the features with which the training began",
                    "repeat the command, which computes them again",
                )
            image[:] = row[view]
        return features

    def statistics(self, positions: NDArray[np.int64]) -> Statistics:
        """Returns the channel statistics of the images at the given positions, at least one, all of them cached."""
        count = 0
        total = np.zeros(self.shape[0])
        squares = np.zeros(self.shape[0])
        for position in positions:
            channels = self(np.array([position]))[0].reshape(self.shape[0], -1).astype(np.float64)
            count += channels.shape[1]
            total += channels.sum(axis=1)
            squares += (channels**2).sum(axis=1)

        mean = total / count
        deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
        return Statistics(mean.astype(np.float32), deviation.astype(np.float32))

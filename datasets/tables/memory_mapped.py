"""Caches of one array per image, for example features of a frozen backbone, in memory-mapped Arrow shards."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.storage.files import stamp
from mcis.datasets.storage.folders import files_below, names_in, read_file, uri_of
from mcis.datasets.storage.object_lists import Stamp
from mcis.datasets.tables.spans import ShardSpans

MAX_MAPPED = 2**13
"""Maximum number of shards that a `CachedRows` keeps mapped. Linux allows 65,530 mappings per process by default."""


def cache_table(rows: NDArray[Any]) -> pa.Table:
    """Returns the table of a shard: N arrays (N, ...), flattened, in one column of fixed-size lists."""
    return pa.table({"rows": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows[0].size)})


def _read_mapped(path: Path) -> pa.RecordBatch:
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)


def _open_shard(path: Path, shape: tuple[int, ...], listed: Stamp | None) -> NDArray[Any]:
    """Returns the rows of a shard, memory-mapped, (N, *shape).

    Args:
        listed: Stamp of the shard in a listing of its folder in a bucket. A copy with this stamp is read without a
            request. None: the folder is not in a bucket.
    """
    remedy = "remove its folder and repeat the command"
    is_current = listed is not None and stamp(str(path)) == listed
    batch = read_file(path, _read_mapped, "a shard of the cache", remedy, fetch=not is_current)
    return batch.column(0).flatten().to_numpy(zero_copy_only=True).reshape(-1, *shape)


class CachedRows:
    """Reads cached rows by their positions in the index. Can be pickled.

    It keeps MAX_MAPPED shards mapped and drops the least recently used first. Returned rows stay valid.

    Args:
        folder: Folder with shards `part-<first>-<last + 1>.arrow`, see `cache_table` and `ShardSpans`; None: an empty
            cache.
        shape: Shape of a row.
    """

    def __init__(self, folder: Path | None, shape: tuple[int, ...]):
        self.folder = folder
        self.shape = shape
        self.stamps = files_below(folder) if folder and uri_of(folder) else {}
        self.spans = ShardSpans(self.stamps or (names_in(folder) if folder else ()))
        self._open = functools.lru_cache(MAX_MAPPED)(_open_shard)

    def row(self, position: int) -> NDArray[Any] | None:
        """Returns the row of an image, of `shape`; None if it is not in the cache, or no longer.

        Raises:
            UserError: The shard is damaged or cannot be read at present.
        """
        shard = self.spans.shard_of(position)
        if shard is None or self.folder is None:
            return None

        try:
            name = self.spans.name(shard)
            rows = self._open(self.folder / name, self.shape, self.stamps.get(name))
        except FileNotFoundError:
            return None
        return rows[position - self.spans.first[shard]]

    def holds(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether the cache had the rows of N images when this reader was made, (N,)."""
        return self.spans.holds(positions)

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder, "shape": self.shape, "stamps": self.stamps, "spans": self.spans}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open = functools.lru_cache(MAX_MAPPED)(_open_shard)


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
        folder: Folder of the shards. Each row is (V, C, H, W) float16: the image and, if V is 2, its horizontal flip.
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
            hflip: (N,), whether to return the features of the flipped image; None: for no image.

        Raises:
            UserError: The cache no longer holds an image, or a shard cannot be read.
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

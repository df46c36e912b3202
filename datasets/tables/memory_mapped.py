"""Arrays of one shape for each image of an index, as a frozen backbone's outputs, in memory-mapped Arrow shards."""

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
    """A shard's table: N arrays (N, ...) flat, in one column of fixed-size lists."""
    return pa.table({"rows": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows[0].size)})


def _mapped(path: Path) -> pa.RecordBatch:
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)


class CachedRows:
    """Reads rows by their positions in the index; can be pickled.

    Args:
        folder: of shards `part-<first>-<last + 1>.arrow`, see `cache_table`; None = an empty cache.
        shape: of a row.
    """

    def __init__(self, folder: Path | None, shape: tuple[int, ...]):
        self.shape = shape
        self.shards = [folder / name for name in names_in(folder) if fnmatch(name, "part-*.arrow")] if folder else []
        self.spans = [tuple(map(int, path.stem.split("-")[1:])) for path in self.shards]
        self.opened: dict[int, NDArray[Any] | None] = {}

    def row(self, position: int) -> NDArray[Any] | None:
        """The row of an image, of `shape`; None where the cache does not hold it, or holds it no longer. UserError
        where its shard is damaged or cannot be read at present."""
        shard = bisect.bisect_right(self.spans, (position, 2**63)) - 1
        if shard < 0 or position >= self.spans[shard][1]:
            return None
        if shard not in self.opened:
            self.opened[shard] = self._open(self.shards[shard])
        rows = self.opened[shard]
        return None if rows is None else rows[position - self.spans[shard][0]]

    def _open(self, path: Path) -> NDArray[Any] | None:
        try:
            batch = read_file(path, _mapped, "a shard of the cache", "remove its folder and repeat the command")
        except FileNotFoundError:
            return None
        return batch.column(0).flatten().to_numpy(zero_copy_only=True).reshape(-1, *self.shape)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "opened": {}}


def features_bytes(shape: tuple[int, int, int]) -> int:
    """Bytes of the features (C, H, W) of a view, an image or its mirror image: float16."""
    return 2 * int(np.prod(shape))


class Statistics(NamedTuple):
    """Mean and standard deviation of a backbone's channels, (C,) float32 both, over all positions of some images."""

    mean: NDArray[np.float32]
    deviation: NDArray[np.float32]


class Features:
    """Reads the backbone's outputs of images of an index by their positions; can be pickled.

    Args:
        uris: of the N images, for messages.
        folder: of the shards, each row (V, C, H, W) float16: of the image, and where V is 2 of its mirror image.
        shape: (C, H, W).
        views: V.
    """

    def __init__(self, uris: Sequence[str], folder: Path, shape: tuple[int, int, int], views: int = 2):
        self.uris, self.shape, self.folder = uris, shape, folder
        self.cache = CachedRows(folder, (views, *shape))

    def __call__(self, positions: NDArray[np.int64], mirrored: NDArray[np.bool_] | None = None) -> NDArray[np.float16]:
        """The outputs of the images at N positions, (N, C, H, W).

        Args:
            mirrored: (N,), of which the mirror image's is wanted; None = of none.

        Raises:
            UserError: the cache holds an image no longer.
        """
        out = np.empty((len(positions), *self.shape), np.float16)
        which = np.zeros(len(positions), np.int64) if mirrored is None else mirrored.astype(np.int64)
        for image, position, view in zip(out, positions.tolist(), which.tolist(), strict=True):
            row = self.cache.row(position)
            if row is None:
                raise UserError(
                    f"{self.folder} holds no features of {self.uris[position]} any more",
                    "the features that the training began with",
                    "repeat the command, which computes them again",
                )
            image[:] = row[view]
        return out

    def statistics(self, positions: NDArray[np.int64]) -> Statistics:
        """Those of the images at some positions."""
        count, total, squares = 0, np.zeros(self.shape[0]), np.zeros(self.shape[0])
        for position in positions:
            channels = self(np.array([position]))[0].reshape(self.shape[0], -1).astype(np.float64)
            count += channels.shape[1]
            total += channels.sum(axis=1)
            squares += (channels**2).sum(axis=1)
        mean = total / count
        deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
        return Statistics(mean.astype(np.float32), deviation.astype(np.float32))

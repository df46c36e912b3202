"""Arrays of one shape for each image of an index, in memory-mapped Arrow shards that are opened when they are read."""

import bisect
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.storage.folders import names_in, read_file


def cache_table(column: str, rows: NDArray[Any]) -> pa.Table:
    """A shard's table: N arrays (N, ...) flat, in one column of fixed-size lists."""
    return pa.table({column: pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows[0].size)})


def _mapped(path: Path) -> pa.RecordBatch:
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)


class CachedRows:
    """Reads rows by their positions in the index; can be pickled.

    Args:
        folder: of shards `part-<first>-<last + 1>.arrow` with the column, see `cache_table`; None = an empty cache.
        column: name of the column.
        shape: of a row.
    """

    def __init__(self, folder: Path | None, column: str, shape: tuple[int, ...]):
        self.column, self.shape = column, shape
        self.shards = [folder / name for name in names_in(folder) if fnmatch(name, "part-*.arrow")] if folder else []
        self.spans = [tuple(map(int, path.stem.split("-")[1:])) for path in self.shards]
        self.opened: dict[int, NDArray[Any] | None] = {}

    def row(self, position: int) -> NDArray[Any] | None:
        """The row of an image, of `shape`; None where the cache does not hold it, or holds it no longer.

        Raises:
            UserError: its shard is damaged or cannot be read at present.
        """
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
        return batch[self.column].flatten().to_numpy(zero_copy_only=True).reshape(-1, *self.shape)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "opened": {}}

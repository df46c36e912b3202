"""Features of images: a file for each shard of the images, written whole by the task that embeds them.

A task that relates images opens the files of those that it needs, in a bucket's copy once they are fetched.
"""

import bisect
import functools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.storage.folders import names_in, read_file
from mcis.platform.runs.files import written_aside


def write_features(folder: Path, first: int, values: NDArray[Any]) -> None:
    """Writes the rows `first`, `first + 1`, ... of a folder of features as one file.

    They reach the disk before the shard of maps exists that says they are there.
    """
    with written_aside(folder / f"part-{first:010d}.npy") as aside, aside.open("wb") as file:
        np.save(file, np.ascontiguousarray(values))


class FeatureFiles:
    """Reads rows of a folder of features; can be pickled.

    Where a shard was written in parts, because its process died, any of the files that hold a row will do: they agree.

    Args:
        folder: as `write_features` has filled it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = [name for name in names_in(folder) if name.startswith("part-")]
        self.firsts = [int(name[5:15]) for name in self.names]
        self.sent: set[str] = set()

    def rows(self, rows: list[int]) -> NDArray[np.float32]:
        """Rows by their positions, as float32, (N, ...).

        A file is opened in each call: a process that held it open would keep its space on the disk after its removal.
        """
        return np.stack([self._row(row) for row in rows])

    def _row(self, row: int) -> NDArray[np.float32]:
        number = bisect.bisect_right(self.firsts, row) - 1
        name = self.names[number]
        load = functools.partial(np.load, mmap_mode="r")
        held = read_file(self.folder / name, load, "features as mcis wrote them", fetch=name not in self.sent)
        self.sent.add(name)
        return np.asarray(held[row - self.firsts[number]], np.float32)

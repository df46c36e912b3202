"""Tests of caches in memory-mapped shards: the shard of a position, and how many shards are mapped at a time."""

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow.feather
import pytest

from mcis.datasets.tables import memory_mapped
from mcis.datasets.tables.memory_mapped import MAX_MAPPED, CachedRows, cache_table


def write_shard(folder: Path, first: int, rows: int) -> Path:
    """Writes rows that contain their positions."""
    path = folder / f"part-{first:08d}-{first + rows:08d}.arrow"
    values = np.repeat(np.arange(first, first + rows), 3).reshape(rows, 3)
    pyarrow.feather.write_feather(cache_table(values), path, compression="uncompressed", chunksize=rows)
    return path


def num_mapped(folder: Path) -> int:
    """Returns how many mappings this process has of files in a folder."""
    return Path("/proc/self/maps").read_text().count(str(folder))


def test_rows_are_found_by_position_and_gaps_are_missing(tmp_path: Path) -> None:
    for first, rows in ((0, 3), (3, 4), (20, 2)):
        write_shard(tmp_path, first, rows)
    cached = CachedRows(tmp_path, (3,))

    for position in (0, 2, 3, 6, 20, 21):
        row = cached.row(position)
        assert row is not None
        assert row.tolist() == [position] * 3
    assert [cached.row(position) for position in (-1, 7, 19, 22)] == [None] * 4
    assert CachedRows(None, (3,)).row(0) is None


def test_a_removed_shard_is_missing_and_an_unpickled_reader_opens_shards_again(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 0, 2)
    cached = CachedRows(tmp_path, (3,))
    row = cached.row(1)
    path.unlink()
    assert row is not None
    assert row.tolist() == [1, 1, 1], "it is still mapped"

    unpickled = pickle.loads(pickle.dumps(cached))
    assert unpickled.row(1) is None
    write_shard(tmp_path, 0, 2)
    assert unpickled.row(1).tolist() == [1, 1, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_least_recently_used_shards_are_unmapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_mapped, "MAX_MAPPED", 4)
    for first in range(20):
        write_shard(tmp_path, first, 1)
    cached = CachedRows(tmp_path, (3,))
    first_row = cached.row(0)
    for position in range(1, 20):
        cached.row(position)

    assert num_mapped(tmp_path) == 5, "four, and the one that is still in use"
    assert first_row is not None
    assert first_row.tolist() == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_more_shards_than_a_process_may_map(tmp_path: Path) -> None:
    """70,000 shards; Linux allows 65,530 mappings per process by default."""
    shards = 70_000
    for name in ("a", "b", "shards"):
        (tmp_path / name).mkdir()
    sources = [write_shard(tmp_path / name, 0, 1) for name in ("a", "b")]
    folder = tmp_path / "shards"
    for first in range(shards):
        os.link(sources[first % 2], folder / f"part-{first:08d}-{first + 1:08d}.arrow")  # a file has 65,000 names
    cached = CachedRows(folder, (3,))
    for position in range(shards):
        row = cached.row(position)
        assert row is not None
        assert row[0] == 0

    assert num_mapped(folder) <= MAX_MAPPED
    assert len(pickle.dumps(cached)) < 60 * shards

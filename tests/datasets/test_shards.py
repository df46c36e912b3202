"""Tests of tables of maps in float16, and of reading the rows of an image from Parquet shards."""

import os
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cachetools
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mcis.datasets.images.label_masks import decode_labels, encode_labels
from mcis.datasets.tables import shards as shards_module
from mcis.datasets.tables.shards import Shards
from mcis.models.grids import Grid
from mcis.platform.outputs.tables import MAPS_SCHEMA, image_maps, map_rows

GRID = Grid(0.01, 0.1, 3)  # its size is that of the maps


def drawn(seed: int, count: int, height: int = 3, width: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).random((count, height, width)).astype(np.float32)


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    """Two shards with maps of different sizes: `a` has two maps and `b` one; `c` has three and `d` one."""
    first = map_rows(["a", "a", "b"], [4, 7, 0], drawn(0, 3), GRID)
    second = map_rows(["c", "c", "c", "d"], [1, 2, 3, 19], drawn(1, 4, 2, 2), GRID)
    pq.write_table(first, tmp_path / "part-00000000-00000002.parquet")
    pq.write_table(second, tmp_path / "part-00000002-00000004.parquet")
    (tmp_path / ".part-00000004-00000006.parquet.77").write_bytes(b"cut off by a kill")
    return Shards(tmp_path)


@given(st.data())
def test_map_rows_store_maps_in_float16(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)))
    maps = data.draw(arrays(np.float32, shape, elements=st.floats(0, 1, width=32)))
    ids = [f"i{n // 2}" for n in range(shape[0])]
    classes = list(range(shape[0]))
    rows = map_rows(ids, classes, maps, GRID)

    assert rows.schema.equals(MAPS_SCHEMA, check_metadata=True)
    assert rows["image_id"].to_pylist() == ids
    assert rows["class"].to_pylist() == classes

    for name, value in (("height", shape[1]), ("width", shape[2]), ("first", 0.01), ("step", 0.1)):
        assert set(rows[name].to_pylist()) == {value}
    values = np.array([np.array(row, np.float64) for row in rows["map"].to_pylist()]).reshape(shape)
    np.testing.assert_array_equal(values, maps.astype(np.float16).astype(np.float64))
    assert np.abs(values - maps).max() <= 2.0**-12  # half a step of float16 just below 1


def test_rows_that_do_not_match_their_maps_raise() -> None:
    with pytest.raises(pa.ArrowInvalid):
        map_rows(["a"], [1, 2], drawn(0, 2), GRID)


def test_maps_of_an_image_are_read_from_its_shard(shards: Shards) -> None:
    expected = {
        "a": ([4, 7], drawn(0, 3)[:2]),
        "b": ([0], drawn(0, 3)[2:]),
        "c": ([1, 2, 3], drawn(1, 4, 2, 2)[:3]),
        "d": ([19], drawn(1, 4, 2, 2)[3:]),
    }

    assert list(shards) == list(expected)
    for image_id, (classes, maps) in expected.items():
        of_image = image_maps(shards, image_id)
        assert of_image.classes.tolist() == classes
        assert of_image.maps.dtype == np.float32
        np.testing.assert_array_equal(of_image.maps, maps.astype(np.float16))

    with pytest.raises(KeyError, match="e"):
        image_maps(shards, "e")


def test_shards_can_be_pickled(shards: Shards) -> None:
    image_maps(shards, "a")
    data = pickle.dumps(shards)
    assert len(data) < 2000, "the rows stay where they are"
    unpickled = image_maps(pickle.loads(data), "c")
    original = image_maps(shards, "c")
    np.testing.assert_array_equal(unpickled.maps, original.maps)


def test_what_is_pickled_does_not_grow_with_the_images(tmp_path: Path) -> None:
    """Neither after a search by id, for which a process reads all ids."""
    sizes = []
    for count in (100, 10_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        ids = [f"photographs/{number:020d}" for number in range(count)]
        pq.write_table(pa.table({"image_id": ids}), folder / f"part-{0:08d}-{count:08d}.parquet")
        shards = Shards(folder)
        assert ids[-1] in shards
        assert "another" not in shards
        sizes.append(len(pickle.dumps(shards)))

    assert abs(sizes[1] - sizes[0]) < 20, "lengths of names"


def test_an_image_is_found_by_its_position_without_the_other_shards(forty: Path) -> None:
    shards = Shards(forty, ["mask"])
    for path in forty.iterdir():
        if path.name != "part-00000100-00000105.parquet":
            path.write_bytes(b"damaged")

    assert shards.rows("i103", 103)["image_id"].to_pylist() == ["i103"]
    for position in (102, 104):  # the shard is the right one
        assert shards.rows("i103", position)["image_id"].to_pylist() == ["i103"]
    for image_id, position in (("i103", 200), ("i99", 103), ("i103", -1)):
        with pytest.raises(KeyError, match=image_id):
            shards.rows(image_id, position)


@pytest.fixture
def forty(tmp_path: Path) -> Path:
    """A folder of 40 shards of five images. Each mask holds its number; another column is never read."""
    for first in range(0, 200, 5):
        ids = [f"i{number}" for number in range(first, first + 5)]
        masks = [encode_labels(np.full((2, 2), number, np.uint8)) for number in range(first, first + 5)]
        table = pa.table({"image_id": ids, "mask": masks, "labels": [b"unused" * 1000] * 5})
        pq.write_table(table, tmp_path / f"part-{first:08d}-{first + 5:08d}.parquet")
    return tmp_path


class Reads:
    """Replaces `pq.read_table`, and counts the columns and files that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.files: Counter[str] = Counter()
        self.columns: set[tuple[str, ...] | None] = set()
        self.read = pq.read_table
        monkeypatch.setattr(pq, "read_table", self)

    def __call__(self, path: Path, columns: list[str] | None = None) -> pa.Table:
        self.files[path.name] += 1
        self.columns.add(None if columns is None else tuple(columns))
        return self.read(path, columns=columns)


def shuffled(shards: Shards, seed: int) -> list[str]:
    return [f"i{number}" for number in np.random.default_rng(seed).permutation(shards.spans.stop[-1])]


def mask_number(shards: Shards, image_id: str) -> int:
    rows = shards.rows(image_id, int(image_id[1:]))
    assert rows["image_id"].to_pylist() == [image_id]
    return int(decode_labels(rows["mask"][0].as_py())[0, 0])


@pytest.mark.parametrize("threads", [1, 8])
def test_each_shard_is_read_once_in_random_access(forty: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Only the requested columns are read, even if threads read the same shard at once."""
    shards = Shards(forty, ["mask"])
    reads = Reads(monkeypatch)
    with ThreadPoolExecutor(threads) as pool:
        for epoch in range(3):
            order = shuffled(shards, epoch)
            found = list(pool.map(lambda image_id: mask_number(shards, image_id), order))
            assert found == [int(image_id[1:]) for image_id in order]

    assert len(reads.files) == 40
    assert set(reads.files.values()) == {1}
    assert reads.columns == {("image_id", "mask")}


@pytest.mark.parametrize(("kept", "reads_of_first"), [(0.5, 4), (2.5, 2)])
def test_tables_larger_than_the_limit_are_read(
    forty: Path, monkeypatch: pytest.MonkeyPatch, kept: float, reads_of_first: int
) -> None:
    """The limit holds two shards, or less than one."""
    shards = Shards(forty, ["mask"])
    shard_bytes = pq.read_table(forty / "part-00000000-00000005.parquet", columns=["image_id", "mask"]).nbytes
    cache = cachetools.LRUCache[Any, Any](int(kept * shard_bytes), getsizeof=lambda table: table.nbytes)
    bounded = cachetools.cached(cache)(shards_module._read_shard.__wrapped__)
    monkeypatch.setattr(shards_module, "_read_shard", bounded)
    reads = Reads(monkeypatch)
    for image_id in ("i0", "i5", "i1", "i10", "i0", "i5", "i10", "i2"):
        assert mask_number(shards, image_id) == int(image_id[1:])

    assert reads.files["part-00000000-00000005.parquet"] == reads_of_first


def test_a_changed_file_is_read_again(forty: Path) -> None:
    path = forty / "part-00000000-00000005.parquet"
    assert mask_number(Shards(forty), "i0") == 0

    table = pq.read_table(path)
    mask = [encode_labels(np.full((2, 2), 77, np.uint8))] * 5
    pq.write_table(table.set_column(1, "mask", [mask]), path)
    os.utime(path, ns=(0, 0))

    assert mask_number(Shards(forty), "i0") == 77


def test_an_empty_folder_has_no_images(tmp_path: Path) -> None:
    assert list(Shards(tmp_path)) == []


def test_activations_beyond_float16_are_clipped() -> None:
    written = map_rows(["a"], [0], np.array([[[1e9, -1e9, 2.0]]], np.float32), GRID)
    assert written["map"][0].as_py() == [65504.0, -65504.0, 2.0]
    with pytest.raises(ValueError, match="contains NaN"):
        map_rows(["a"], [0], np.array([[[np.nan, 0.0]]], np.float32), GRID)

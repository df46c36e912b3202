"""Tables of maps: float16 there and back through Parquet shards; an image's rows are found, after pickling too."""

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mcis.datasets.decode import encode_labels
from mcis.datasets.grids import Grid
from mcis.datasets.maps import MAPS_SCHEMA, MASKS_SCHEMA, PREDICTIONS_SCHEMA, Shards, map_rows

quick = settings(deadline=None, max_examples=40)


GRID = Grid(0.01, 0.1, 3)  # its count is that of the maps


def drawn(seed: int, count: int, height: int = 3, width: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).random((count, height, width)).astype(np.float32)


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    """Two shards, each with maps of its own size: `a` with two, `b` with one; `c` with three, `d` with one."""
    first = map_rows(["a", "a", "b"], [4, 7, 0], drawn(0, 3), GRID)
    second = map_rows(["c", "c", "c", "d"], [1, 2, 3, 19], drawn(1, 4, 2, 2), GRID)
    pq.write_table(first, tmp_path / "part-00000000-00000002.parquet")
    pq.write_table(second, tmp_path / "part-00000002-00000004.parquet")
    (tmp_path / ".part-00000004-00000006.parquet.77").write_bytes(b"cut off by a kill")
    return Shards(tmp_path)


@quick
@given(st.data())
def test_map_rows_hold_the_maps_in_float16(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)))
    maps = data.draw(arrays(np.float32, shape, elements=st.floats(0, 1, width=32)))
    ids, classes = [f"i{n // 2}" for n in range(shape[0])], list(range(shape[0]))
    rows = map_rows(ids, classes, maps, GRID)
    assert rows.schema.equals(MAPS_SCHEMA, check_metadata=True)
    assert rows["image_id"].to_pylist() == ids
    assert rows["class"].to_pylist() == classes
    assert set(rows["height"].to_pylist()) == {shape[1]}
    assert set(rows["width"].to_pylist()) == {shape[2]}
    assert set(zip(rows["first"].to_pylist(), rows["step"].to_pylist(), strict=True)) == {(0.01, 0.1)}
    values = np.array([np.array(row, np.float64) for row in rows["map"].to_pylist()]).reshape(shape)
    np.testing.assert_array_equal(values, maps.astype(np.float16).astype(np.float64))
    assert np.abs(values - maps).max() <= 2.0**-12  # half a step of float16 just below 1


def test_rows_that_do_not_fit_their_maps_raise() -> None:
    with pytest.raises(pa.ArrowInvalid):
        map_rows(["a"], [1, 2], drawn(0, 2), GRID)


def test_an_images_maps_are_found_in_their_shard(shards: Shards) -> None:
    expected = {
        "a": ([4, 7], drawn(0, 3)[:2]),
        "b": ([0], drawn(0, 3)[2:]),
        "c": ([1, 2, 3], drawn(1, 4, 2, 2)[:3]),
        "d": ([19], drawn(1, 4, 2, 2)[3:]),
    }
    assert list(shards) == list(expected)
    for image_id, (classes, maps) in expected.items():
        of_image = shards.maps(image_id)
        assert of_image is not None
        assert of_image.classes.tolist() == classes
        assert of_image.maps.dtype == np.float32
        np.testing.assert_array_equal(of_image.maps, maps.astype(np.float16))


def test_an_image_without_rows_has_none(shards: Shards) -> None:
    assert shards.rows("e") is None
    assert shards.maps("e") is None


def test_shards_travel_by_pickle(shards: Shards) -> None:
    shards.maps("a")
    data = pickle.dumps(shards)
    assert len(data) < 2000, "the rows stay where they are"
    unpickled, original = pickle.loads(data).maps("c"), shards.maps("c")
    assert original is not None
    np.testing.assert_array_equal(unpickled.maps, original.maps)


def test_more_shards_than_are_kept_open_are_read(tmp_path: Path) -> None:
    for number in range(12):
        pq.write_table(
            map_rows([f"i{number}"], [number], drawn(number, 1), GRID), tmp_path / f"part-{number:08d}.parquet"
        )
    shards = Shards(tmp_path)
    for number in [*range(12), *reversed(range(12))]:
        of_image = shards.maps(f"i{number}")
        assert of_image is not None
        np.testing.assert_array_equal(of_image.maps, drawn(number, 1).astype(np.float16))


def test_rows_of_other_tables_are_found_too(tmp_path: Path) -> None:
    labels = encode_labels(np.arange(6, dtype=np.uint8).reshape(2, 3))
    rows = [{"image_id": i, "labels": labels, "mask": labels, "ignored": 0.5, "cue": "crf"} for i in "ab"]
    pq.write_table(pa.Table.from_pylist(rows, schema=MASKS_SCHEMA), tmp_path / "part-00000000.parquet")
    of_b = Shards(tmp_path).rows("b")
    assert of_b is not None
    assert of_b.to_pylist() == rows[1:]


def test_an_empty_folder_holds_no_image(tmp_path: Path) -> None:
    assert list(Shards(tmp_path)) == []


def test_schemas_are_the_contract() -> None:
    text, number, png = pa.string(), pa.int32(), pa.binary()
    assert {f.name: (f.type, f.nullable) for f in MAPS_SCHEMA} == {
        "image_id": (text, False),
        "class": (pa.uint16(), False),
        "height": (number, False),
        "width": (number, False),
        "first": (pa.float64(), False),
        "step": (pa.float64(), False),
        "map": (pa.list_(pa.float16()), False),
    }
    assert {f.name: (f.type, f.nullable) for f in MASKS_SCHEMA} == {
        "image_id": (text, False),
        "labels": (png, False),
        "mask": (png, False),
        "ignored": (pa.float32(), False),
        "cue": (text, False),
    }
    assert {f.name: (f.type, f.nullable) for f in PREDICTIONS_SCHEMA} == {
        "image_id": (text, False),
        "plain": (png, False),
        "crf": (png, True),
    }
    documented = [f for schema in (MAPS_SCHEMA, MASKS_SCHEMA, PREDICTIONS_SCHEMA) for f in schema]
    assert all(f.metadata[b"about"] for f in documented if f.name != "image_id")


def test_activations_beyond_float16_are_its_largest_and_none_is_no_number() -> None:
    written = map_rows(["a"], [0], np.array([[[1e9, -1e9, 2.0]]], np.float32), GRID)
    assert written["map"][0].as_py() == [65504.0, -65504.0, 2.0]
    with pytest.raises(ValueError, match="holds NaN"):
        map_rows(["a"], [0], np.array([[[np.nan, 0.0]]], np.float32), GRID)

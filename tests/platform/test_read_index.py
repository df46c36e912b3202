"""Reading a part of an index: the rows of a split and some columns of them, whatever the groups of the file."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mcis.datasets.index import INDEX_SCHEMA, REJECTS_SCHEMA
from mcis.datasets.tables import large_tables
from mcis.platform.outputs.read_index import ids_with_other_tags, read_image_ids, rows_in_split, split_rows
from mcis.platform.runs.files import read_parts, write_batches, write_table

ROWS = 23


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of 23 images in groups of 4 rows."""
    monkeypatch.setattr(large_tables.in_shards, "__defaults__", (4,))
    rows = [
        {"image_id": f"i{n}", "uri": f"/{n}.jpg", "split": "val" if n % 3 == 2 else "train", "tags": [*range(n % 4)]}
        | {"domain": "target", "height": 1, "width": 1, "content_hash": "", "is_negative": n % 8 == 0}
        for n in range(ROWS)
    ]
    write_batches(tmp_path / "index.parquet", INDEX_SCHEMA, [pa.Table.from_pylist(rows, INDEX_SCHEMA)])
    assert len(list(read_parts(tmp_path / "index.parquet", ["uri"]))) == 6
    return tmp_path / "index.parquet"


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_the_rows_of_a_split_do_not_depend_on_the_files_groups(file: Path, split: str, tagged: bool) -> None:
    whole = pa.concat_tables(read_parts(file))
    expected = rows_in_split(whole, split, tagged=tagged)
    assert split_rows(file, split, tagged=tagged).equals(expected)
    names = split_rows(file, split, tagged=tagged, columns=["image_id"])
    assert names.equals(expected.select(["image_id"]))
    for only in ([], [0], [3, 0, 2], list(range(len(expected)))[::-1]):
        row_numbers = np.array([row for row in only if row < len(expected)], np.int64)
        found = split_rows(file, split, tagged=tagged, only=row_numbers)
        assert found.equals(expected.take(pa.array(row_numbers)))
        assert found.schema.equals(INDEX_SCHEMA)


def test_negatives_are_returned_with_tagged_images_on_demand(file: Path) -> None:
    with_negatives = split_rows(file, "train", tagged=True, negatives=True)["image_id"].to_pylist()
    tagged = split_rows(file, "train", tagged=True)["image_id"].to_pylist()
    assert [name for name in with_negatives if name not in tagged] == ["i0", "i16"], "i8 is in val, i4 is unlabelled"


def test_the_ids_of_all_listed_images_include_rejected_ones(file: Path) -> None:
    """Files of other programs are matched by names that no listed image shares."""
    rejected = {"image_id": "r0", "uri": "/r0.jpg", "domain": "target", "split": "val", "reason": "damaged: r0"}
    write_table(file.with_name("rejects.parquet"), pa.Table.from_pylist([rejected], REJECTS_SCHEMA))
    assert list(read_image_ids(file)) == [*(f"i{n}" for n in range(ROWS)), "r0"]


def test_tags_are_compared_for_the_images_that_two_indexes_share(file: Path, tmp_path: Path) -> None:
    rows = pa.concat_tables(read_parts(file)).to_pylist()[5:]
    rows[2]["tags"] = [7]
    rows[4]["tags"] = []
    other = {**rows[0], "image_id": "j", "tags": [9]}
    write_table(tmp_path / "other.parquet", pa.Table.from_pylist([*rows, other], INDEX_SCHEMA))

    expected = [rows[2]["image_id"], rows[4]["image_id"]]
    assert ids_with_other_tags(file, tmp_path / "other.parquet").to_pylist() == expected
    assert ids_with_other_tags(tmp_path / "other.parquet", file).to_pylist() == expected
    assert ids_with_other_tags(file, file).to_pylist() == []

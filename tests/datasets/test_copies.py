"""Tests of the search for files with the same content."""

import pyarrow as pa

from mcis.datasets.copies import find_duplicates, find_training_copies


def test_duplicates_are_in_several_splits() -> None:
    rows = [
        ("a", "train", "1"),
        ("b", "train", "2"),
        ("c", "val", "1"),
        ("d", "train", "1"),
        ("e", "val", "3"),
        ("f", "val", "3"),
        ("g", "test", "2"),
        ("h", "train", ""),
        ("i", "val", ""),
    ]
    names = ("image_id", "split", "content_hash")
    table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows])
    found = find_duplicates(lambda columns: [table.slice(0, 4).select(columns), table.slice(4).select(columns)])

    assert found == [["a", "c", "d"], ["b", "g"]]

    val = table.filter(pa.compute.equal(table["split"], "val"))
    assert find_duplicates(lambda columns: [val.select(columns)]) == []


def test_one_copy_stays_in_train() -> None:
    """The one of the first domain stays, then one with tags, then the first; none if there is one in val."""
    rows = [
        ("a", "source", "train", "1", [0]),
        ("b", "target", "train", "1", [1]),  # stays, because it is of the target domain
        ("c", "web", "train", "1", [1]),
        ("d", "target", "train", "2", []),
        ("e", "target", "train", "2", [0]),  # stays, because it has tags
        ("f", "target", "train", "2", [0]),
        ("g", "target", "val", "3", [0]),
        ("h", "web", "train", "3", [0]),
        ("i", "target", "test", "4", [0]),
        ("j", "target", "train", "4", [0]),
        ("k", "target", "train", "", [0]),  # could not be read
        ("l", "target", "train", "", [0]),
        ("m", "target", "val", "5", [0]),
        ("n", "target", "val", "5", [0]),
    ]
    names = ("image_id", "domain", "split", "hash", "tags")
    table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows])
    table = table.append_column("is_negative", pa.array([False] * len(rows)))
    copies = find_training_copies(table, table["hash"])

    reasons = {rows[row][0]: reason for row, reason in zip(copies.rows.tolist(), copies.reasons, strict=True)}
    assert reasons == {
        "a": "copy of a training image: b",
        "c": "copy of a training image: b",
        "d": "copy of a training image: e",
        "f": "copy of a training image: e",
        "h": "copy of a val image: g",
    }
    assert copies.other_tags == 2

    none = find_training_copies(table.slice(8), table.slice(8)["hash"])
    assert (len(none.rows), none.reasons) == (0, [])

"""Copies of a table with another column: other cells are unchanged, whatever the format."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcis.datasets.sources.extended_table import extended_table
from mcis.datasets.sources.tagged import list_tagged


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_keeps_its_cells_and_separator(tmp_path: Path, separator: str) -> None:
    quoted = f'"two{separator} words"'
    rows = [["image", "tags", "number", "note"], ["a.jpg", "cat", "007", quoted], [], ["b.jpg", "", "1e3", ""]]
    text = "".join(separator.join(row) + "\n" for row in rows)
    (tmp_path / "t.csv").write_text(text, encoding="utf-8-sig")

    content = extended_table(tmp_path / "t.csv", "saliency", ["maps/a.png", ""]).decode()

    expected = [[*rows[0], "saliency"], [*rows[1], "maps/a.png"], [*rows[3], ""]]
    assert content == "".join(separator.join(row) + "\n" for row in expected)


def test_csv_of_excel_keeps_its_separator_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("sep=;\nimage;a, b; saliency\na.jpg;007;old.png\n", encoding="utf-8-sig")
    content = extended_table(tmp_path / "t.csv", "saliency", ["maps/a.png"]).decode()
    assert content == "sep=;\nimage;a, b;saliency\na.jpg;007;maps/a.png\n"


def test_csv_above_one_block_may_hold_line_breaks(tmp_path: Path) -> None:
    """Arrow reads blocks of 1 MiB, which may end within a quoted cell."""
    caption = "a cat\n" * 2_000
    rows = "".join(f'{number}.jpg,cat,"{caption}"\n' for number in range(200))
    (tmp_path / "t.csv").write_text(f"image,tags,caption\n{rows}")

    content = extended_table(tmp_path / "t.csv", "saliency", [""] * 200).decode()

    expected = "".join(f'{number}.jpg,cat,"{caption}",\n' for number in range(200))
    assert content == f"image,tags,caption,saliency\n{expected}"
    assert len(list_tagged(tmp_path / "t.csv").table) == 200


def test_jsonl_keeps_its_values(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"image": "ä.jpg", "tags": ["cat"], "n": 12345678901234567890},
        {"image": "b.jpg", "tags": [], "x": "two\u2028lines"},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows))

    content = extended_table(tmp_path / "t.jsonl", "saliency", ["a.png", ""]).decode()

    read = [json.loads(line) for line in content.strip().split("\n")]
    assert read == [rows[0] | {"saliency": "a.png"}, rows[1] | {"saliency": None}]


def test_parquet_keeps_its_columns(tmp_path: Path) -> None:
    table = pa.table({"image": ["a.jpg"], "tags": [["cat"]], "saliency": ["old.png"], "size": pa.array([1], pa.int8())})
    pq.write_table(table, tmp_path / "t.parquet")

    extended = pq.read_table(pa.BufferReader(extended_table(tmp_path / "t.parquet", "saliency", ["new.png"])))

    assert extended.select(["image", "tags", "size"]).equals(table.select(["image", "tags", "size"]))
    assert extended["saliency"].to_pylist() == ["new.png"]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_the_copy_lists_the_same_images(tmp_path: Path, suffix: str) -> None:
    rows = {"image": ["b.jpg", "a.jpg"], "tags": ["dog", "cat"]}
    source = tmp_path / f"t{suffix}"
    if suffix == ".csv":
        source.write_text("image,tags\nb.jpg,dog\na.jpg,cat\n")
    elif suffix == ".jsonl":
        source.write_text('{"image": "b.jpg", "tags": "dog"}\n{"image": "a.jpg", "tags": "cat"}\n')
    else:
        pq.write_table(pa.table(rows), source)
    (tmp_path / "a.png").touch()

    copy = tmp_path / f"copy{suffix}"
    copy.write_bytes(extended_table(source, "saliency", ["", "a.png"]))

    listed = list_tagged(copy).table
    assert listed.drop_columns("saliency_uri").equals(list_tagged(source).table.drop_columns("saliency_uri"))
    assert listed["saliency_uri"].to_pylist() == [None, str(tmp_path / "a.png")]

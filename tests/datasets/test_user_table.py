"""A user's table as a file: unreadable tables, files that it may name, and cells that become URIs."""

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.sources import user_table
from mcis.datasets.sources.tagged import list_tagged

if TYPE_CHECKING:
    from tests.conftest import FaultyS3

INVALID_FILES = [
    ("t.txt", b"image,tags\na,cat\n", r"t\.txt has the suffix \.txt"),
    ("t.csv", b"", r"t\.csv cannot be read: Empty CSV file"),
    ("t.csv", b"image,tags\n", r"t\.csv has no row"),
    ("t.csv", b"image,tags\na\n", r"t\.csv cannot be read: .*Expected 2 columns"),
    ("t.csv", b"image,tags\n\xff,cat\n", r"t\.csv is not UTF-8: .*invalid UTF8"),
    ("t.csv", "image,tags\nHündchen.jpg,cat\n".encode("cp1252"), r"t\.csv is not UTF-8: .*invalid UTF8"),
    ("t.csv", "image,tags,größe\na.jpg,cat,\n".encode("cp1252"), r"t\.csv is not UTF-8: invalid UTF-8 at byte"),
    ("t.csv", "image\ttags\na.jpg\tcat\n".encode("utf-16"), r"t\.csv is not UTF-8: UTF-16\n.*\n.*CSV UTF-8"),
    ("t.csv", b"image,tags,tags\na,cat,dog\n", r"t\.csv has 2 columns 'tags'"),
    ("t.csv", b"image,tags\na\0b,cat\n", r"t\.csv: NUL bytes in column 'image': row 1"),
    ("t.jsonl", b"", r"t\.jsonl cannot be read: Empty JSON file"),
    ("t.jsonl", b'{"image": "a", "tags": "c"}\n{"image": "b", "tags": ["c"]}\n', r"read: .*\(/tags\) changed"),
    ("t.jsonl", b'{"image": "\xff", "tags": "cat"}\n', r"t\.jsonl cannot be read: .*[Ii]nvalid UTF8"),
    ("t.jsonl", b'{"image": "a", "tags": [3]}\n', r"t\.jsonl: column 'tags' holds list<item: int64>"),
    ("t.jsonl", b'{"image": {"path": "a"}, "tags": "cat"}\n', r"column 'image' holds struct"),
    ("t.parquet", b"PAR1 and no more", r"t\.parquet cannot be read"),
    ("t.csv", b"image,tags\nhunter2,hunter2,hunter2\n", r"t\.csv cannot be read"),
    ("t.csv", b"image,tags\n" + b",".join([b"hunter2"] * 12) + b"\n", r"t\.csv cannot be read"),
    ("t.csv", b'image,tags\na,cat\n"hunter2\nhunter2', r"t\.csv cannot be read"),
    ("t.csv", b"image,tags\nhunter2\xff,cat\n", r"t\.csv is not UTF-8"),
    ("t.csv", b"image,tags\nhunter2\0,cat\n", r"t\.csv: NUL bytes"),
    ("t.jsonl", b"hunter2\n", r"t\.jsonl cannot be read"),
    ("t.jsonl", b'{"image": "a", "tags": hunter2}\n', r"t\.jsonl cannot be read"),
    ("t.jsonl", b'{"image": "a", "tags": "cat"}\n{"image": "b", "tags": ["hunter2"]}\n', r"t\.jsonl cannot be read"),
    ("t.parquet", b"PAR1 hunter2", r"t\.parquet cannot be read"),
    ("t.parquet", b"PAR1hunter2" + bytes(99) + b"hunter2PAR1", r"t\.parquet cannot be read"),
]
CELLS = [
    "a.jpg",
    "x/a b.jpg",
    "./a.jpg",
    "x//a.jpg",
    "x/./a.jpg",
    "x/../a.jpg",
    "../a.jpg",
    "a/",
    ".a",
    "..a",
    "...",
    ".",
    "x/..",
    "/a.jpg",
    "//a.jpg",
    "/x/../a.jpg",
    "FOLDER/a.jpg",
    "FOLDER/../a.jpg",
    "FOLDERS/a.jpg",
    "FOLDER",
    "ü/ö.jpg",
    "a?b#c",
    "file:///FOLDER/a.jpg",
    "s3://bucket/a.jpg",
    "s3://bucket/../a.jpg",
    "s3://bucket/a.jpg?region=x",
    "s3://bucket",
    "s3:/a",
    "s3://user:word@bucket/a",
    "s3://bucket:9000/a.jpg",
    "gs://bucket/ü",
    "a[b].jpg",
    "a\nb.jpg",
    "a%20b.jpg",
]
"""Cells of a table; FOLDER stands for its folder."""


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("table", ["/data/set/t.csv", "s3://bucket/set/t.csv", "s3://bucket/set/t.csv?region=x"])
def test_cells_converted_together_equal_cells_converted_one_by_one(table: str, trusted: bool) -> None:
    cells = [cell.replace("FOLDER", "/data/set") for cell in CELLS]
    rows = user_table.UserTable(table, pa.table({"image": cells}), {"image": "image"}, [], [], [], trusted)
    expected = [user_table._uri(table, cell) for cell in cells]
    forbidden = [] if trusted else [uri for uri in expected if not user_table._may_name(table, uri)]

    outside: list[str] = []
    uris = rows._uris(pa.array([*cells, None]), outside).to_pylist()

    assert uris == [*expected, None]
    assert sorted(outside) == sorted(forbidden)


INSIDE = ("b.jpg", "x/b.jpg", "OWN/set/b.jpg")
OUTSIDE = (
    "../b.jpg",
    "/etc/b.jpg",
    "file:///etc/b.jpg",
    "OWN/other/b.jpg",
    "OWN/set/../b.jpg",
    "s3://bucket/set/b.jpg",
    "s3://bucket/set/b.jpg?endpoint_override=evil.org",
    "gs://bucket/set/b.jpg",
)


def remote_table(server: "FaultyS3", cell: str) -> str:
    """Writes a table with one image to a server; OWN stands for its bucket. Returns the table's URI."""
    if cell.startswith("OWN"):
        cell = server.uri(cell.replace("OWN", "/bucket"))
    server.files["/bucket/set/t.csv"] = f"image,tags\n{cell},cat\n".encode()
    return server.uri("/bucket/set/t.csv")


@pytest.mark.parametrize("cell", INSIDE)
def test_remote_table_names_files_of_its_folder_and_server(faulty_s3: "FaultyS3", cell: str) -> None:
    assert len(list_tagged(remote_table(faulty_s3, cell)).table) == 1


@pytest.mark.parametrize("cell", OUTSIDE)
def test_remote_table_names_no_other_files(faulty_s3: "FaultyS3", cell: str) -> None:
    with pytest.raises(UserError, match="are outside of the table's folder or on another server"):
        list_tagged(remote_table(faulty_s3, cell))


@pytest.mark.parametrize("cell", [*INSIDE, *OUTSIDE])
def test_trusted_remote_table_names_any_file(faulty_s3: "FaultyS3", cell: str) -> None:
    assert len(list_tagged(remote_table(faulty_s3, cell), allow_absolute=True).table) == 1


@pytest.mark.parametrize(("name", "content", "message"), INVALID_FILES)
def test_invalid_table_is_an_error_and_not_quoted(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        list_tagged(tmp_path / name)
    assert "hunter2" not in str(caught.value)

"""The source `tags`: CSV, JSONL and Parquet tables, local and on S3, and each way in which a table can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.index import LISTING_SCHEMA
from mcis.datasets.sources.tagged import list_tagged, photograph_tags

Rows = list[dict[str, Any]]
ROWS: Rows = [
    {"image": "images/a.jpg", "tags": ["potted plant", "cat"], "mask": "m/a.png", "split": "train", "id": "1"},
    {"image": "/data/b.jpg", "tags": [], "mask": None, "split": "train", "id": "2020-01-01"},
    {"image": "s3://bucket/k/c.jpg", "tags": ["cat"], "mask": "m/c.png", "split": "val", "id": "c"},
    {"image": "gs://b/d.jpg", "tags": ["dog", "cat", "dog"], "mask": "s3://bucket/d.png", "split": "val", "id": "ü"},
]


def write_csv(path: Path, rows: Rows) -> None:
    cells = [{k: "; ".join(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
    pa.csv.write_csv(pa.Table.from_pylist(cells), path)


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: Rows) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    for name in "ac":
        (tmp_path / f"m/{name}.png").touch()
    return tmp_path


@pytest.mark.parametrize("kind", WRITERS)
def test_a_table_is_listed(folder: Path, kind: str) -> None:
    WRITERS[kind](folder / f"t.{kind}", ROWS)
    found = list_tagged(folder / f"t.{kind}", allow_absolute=True)
    assert found.classes == ("cat", "dog", "potted plant")
    assert found.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    unmasked = "no ground-truth mask for 1 of 2 images of split train: these are not scored"
    assert found.notes == (f"{folder}/t.{kind}: {unmasked}",)
    rows = found.table.to_pylist()
    assert [r["image_id"] for r in rows] == ["1", "2020-01-01", "c", "ü"]
    assert [r["uri"] for r in rows] == [str(folder / "images/a.jpg"), *(row["image"] for row in ROWS[1:])]
    assert [r["tags"] for r in rows] == [[0, 2], [], [0], [0, 1]]
    assert [r["split"] for r in rows] == ["train", "train", "val", "val"]
    masks = [str(folder / "m/a.png"), None, str(folder / "m/c.png"), "s3://bucket/d.png"]
    assert [r["mask_uri"] for r in rows] == masks
    assert {(r["domain"], r["saliency_uri"]) for r in rows} == {("target", None)}


def test_texts_that_look_like_times_stay_texts(folder: Path) -> None:
    write_jsonl(folder / "t.jsonl", [{"image": "2020-01-01", "tags": "2020-01-02", "id": "2020-01-01 00:00:00"}])
    found = list_tagged(folder / "t.jsonl")
    assert found.classes == ("2020-01-02",)
    assert found.table["image_id"].to_pylist() == ["2020-01-01 00:00:00"]


DIVIDED = {"cat;dog": ["cat", "dog"], "cat, dog ,cow": ["cat", "cow", "dog"], " cat | dog;;": ["cat", "dog"]}
DIVIDED |= {"potted plant": ["potted plant"], "cat dog": ["cat dog"]}


@pytest.mark.parametrize(("text", "names"), DIVIDED.items())
def test_tags_are_divided_by_punctuation_and_never_by_spaces(folder: Path, text: str, names: list[str]) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": text}])
    assert list(list_tagged(folder / "t.csv").classes) == names


def test_tags_that_are_no_class_are_left_out_on_request(folder: Path) -> None:
    rows = [{"image": "a", "tags": "sky;cat"}, {"image": "b", "tags": "sea;sky"}, {"image": "c", "tags": "dog"}]
    write_csv(folder / "t.csv", rows)
    (folder / "classes.txt").write_text("dog\ncat\n")
    found = list_tagged(folder / "t.csv", classes=folder / "classes.txt", ignore_others=True)
    assert found.classes == ("dog", "cat")
    assert found.table["tags"].to_pylist() == [[1], [], [0]]
    assert "3 tags of 2 names that are no class were left out: sea, sky; 1 of 3 images have no tag" in found.notes[-1]


def test_tags_divided_by_spaces_are_asked_about(folder: Path) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cat dog"}, {"image": "b", "tags": "cat;dog;potted plant"}])
    with pytest.raises(UserError, match="cat dog in column 'tags': tags with spaces between them"):
        list_tagged(folder / "t.csv")
    (folder / "classes.txt").write_text("cat\ndog\ncat dog\npotted plant\n")
    listed = list_tagged(folder / "t.csv", classes=folder / "classes.txt").table
    assert listed["tags"].to_pylist() == [[2], [0, 1, 3]]


def test_columns_may_have_other_names_and_further_ones_are_noted(folder: Path) -> None:
    (folder / "s.png").touch()
    rows = [{"file": "a", "labels": "cat", "fold": "train", "heat": "s.png", "truth": "m/a.png", "key": 7, "by": "me"}]
    rows.append({"file": "b", "labels": None, "fold": "Validation", "heat": None, "truth": "", "key": 8, "by": "me"})
    write_parquet(folder / "t.parquet", rows)
    found = list_tagged(
        folder / "t.parquet", image="file", tags="labels", split="fold", saliency="heat", mask="truth", id="key"
    )
    first, second = found.table.to_pylist()
    assert (first["image_id"], first["split"]) == ("7", "train")
    assert (first["saliency_uri"], first["mask_uri"]) == (str(folder / "s.png"), str(folder / "m/a.png"))
    assert (second["tags"], second["saliency_uri"], second["mask_uri"]) == ([], None, None)
    assert found.notes == (
        f"{folder}/t.parquet: columns that are not read: by",
        f"{folder}/t.parquet: no saliency map for 1 of 2 images",
        f"{folder}/t.parquet: no ground-truth mask for 1 of 1 images of split val: these are not scored",
    )


@pytest.mark.parametrize("between", [",", ";", "\t"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_table_as_others_write_it_is_understood_and_that_is_said(folder: Path, between: str, mark: str) -> None:
    """Columns of other names, semicolons or tabs between them, Windows line ends, a byte order mark."""
    lines = (("File Name", "LABEL", "width"), ("a", "cat|dog", "640"), ("b", "cat", "480"))
    text = mark + "\r\n".join(between.join(line) for line in lines) + "\r\n"
    (folder / "t.csv").write_bytes(text.encode())
    found = list_tagged(folder / "t.csv")
    assert (found.classes, found.table["tags"].to_pylist()) == (("cat", "dog"), [[0, 1], [0]])
    assert found.table["image_id"].to_pylist() == ["a", "b"]
    assert found.notes[1:] == (
        f"{folder}/t.csv: columns are taken for what they seem to hold: 'File Name' as image, 'LABEL' as tags",
        f"{folder}/t.csv: columns that are not read: width",
    )


@pytest.mark.parametrize(("no", "yes"), [(0, 1), (False, True)])
@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_of_0_and_1_are_classes_where_none_holds_tags(folder: Path, suffix: str, no: int, yes: int) -> None:
    rows: Rows = [{"image": "a", "dog": yes, "cat": yes, "width": 9}, {"image": "b", "dog": no, "cat": no, "width": 9}]
    rows.append({"image": "c", "dog": None, "cat": yes, "width": 9})
    WRITERS[suffix](folder / f"t.{suffix}", rows)
    found = list_tagged(folder / f"t.{suffix}")
    assert (found.classes, found.table["tags"].to_pylist()) == (("cat", "dog"), [[0, 1], [], [0]])
    assert "dog, cat as a class each, 0 or 1" in found.notes[1]
    tags = photograph_tags(str(folder / f"t.{suffix}"), ["dog", "cat"])
    assert list(tags.values()) == [[0, 1], [], [1]]
    write_csv(folder / "named.csv", [row | {"tags": "horse"} for row in rows])
    assert list_tagged(folder / "named.csv").classes == ("horse",)


def test_flags_and_names_that_may_mean_anything_are_not_guessed(folder: Path) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "dog": 1, "width": 9}])
    with pytest.raises(UserError, match="no column 'tags'; it has 'image', 'dog', 'width'"):
        list_tagged(folder / "t.csv")
    write_csv(folder / "t.csv", [{"file": "a", "path": "b", "tags": "cat"}])
    with pytest.raises(UserError, match="no column 'image'; it has 'file', 'path', 'tags'"):
        list_tagged(folder / "t.csv")


def test_a_slip_is_named_beside_what_it_may_mean(folder: Path) -> None:
    rows: Rows = [{"image": f"{n}", "tags": "horse" if n < 40 else "cow"} for n in range(70)]
    write_csv(folder / "t.csv", [*rows, *({"image": tag, "tags": tag} for tag in ("hrose", "Horse", "cwo", "cat"))])
    slips = [note for note in list_tagged(folder / "t.csv").notes if "misspelling" in note]
    for slip, (odd, like) in zip(slips, (("Horse", "horse"), ("cwo", "cow"), ("hrose", "horse")), strict=True):
        assert f"'{odd}' (1 images) may be a misspelling of '{like}' (" in slip
    write_csv(folder / "t.csv", [*rows, {"image": "x", "tags": "['horse', 'cow']"}])
    with pytest.raises(UserError, match=r"tags such as 'cow'\], \['horse'"):
        list_tagged(folder / "t.csv")


def test_a_class_file_orders_and_bounds_the_classes(folder: Path) -> None:
    (folder / "classes.txt").write_text("dog\ncow\ncat\n")
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cat;dog"}])
    found = list_tagged(folder / "t.csv", classes=folder / "classes.txt")
    assert (found.classes, found.table["tags"].to_pylist()) == (("dog", "cow", "cat"), [[0, 2]])
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cta;dog"}])
    with pytest.raises(UserError, match=r"t\.csv: 1 tag\(s\) are no class: cta\n") as caught:
        list_tagged(folder / "t.csv", classes=folder / "classes.txt")
    assert "did you mean cat?" in caught.value.remedy


BAD_ROWS = [
    ([{"photo": "a", "tags": "cat"}], r"has no column 'image'; it has 'photo', 'tags'\n", "data.tags.image=COLUMN"),
    ([{"image": "a", " tags": "cat"}], r"has no column 'tags'; it has 'image', ' tags'\n", "data.tags.tags=COLUMN"),
    ([{"image": image, "tags": "cat"} for image in "a "], r"1 empty cell\(s\) in .*'image': row 2\n", "fill"),
    ([{"image": "a", "tags": "cat"}] * 2, r"1 value\(s\) of column 'image' .* more than once: a\n", "column 'id'"),
    ([{"image": i, "tags": "cat", "id": "x"} for i in "ab"], r"1 value\(s\) of column 'id' .*: x\n", "merge the rows"),
    ([{"image": "a", "tags": "cat", "id": None}], r"1 empty cell\(s\) in column 'id': row 1", "fill"),
    ([{"image": "a", "tags": "cat", "split": "dev"}], r"unknown split dev in column 'split'", "rename"),
    ([{"image": "a", "tags": "cat", "split": "val"}], "has no image of split train", "correct its column 'split'"),
    ([{"image": "a", "tags": "cat", "mask": "no"}], r"1 file\(s\) of column 'mask' are missing: .*/no\n", "empty"),
    ([{"image": "a", "tags": "cat", "saliency": "no"}], r"1 file\(s\) of column 'saliency' are missing", "empty"),
    ([{"image": "a", "tags": " ; "}], "no tag in column 'tags'", "add tags"),
    ([{"image": "a", "tags": "background;cat"}], "names background as a class", "delete"),
    ([{"image": "a", "tags": ";".join(map(str, range(255)))}], "names 255 classes: 0, 1, 10", "in a file"),
    ([{"image": "s3://[bad/a", "tags": "cat"}], r"Invalid IPv6 URL: s3://\[bad/a", "correct the cell"),
    ([{"image": "https://x.org/a", "tags": "cat"}], "unknown scheme: https://x.org/a\n", "correct the cell"),
]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(("rows", "found", "remedy"), BAD_ROWS, ids=[found for _, found, _ in BAD_ROWS])
def test_wrong_rows_are_reported_with_a_remedy(folder: Path, kind: str, rows: Rows, found: str, remedy: str) -> None:
    WRITERS[kind](folder / f"t.{kind}", rows)
    with pytest.raises(UserError, match=found) as caught:
        list_tagged(folder / f"t.{kind}")
    assert remedy in caught.value.remedy
    assert caught.value.expected


OUTSIDE = [
    ("/data/b.jpg", "/data/b.jpg"),
    ("../b.jpg", "b.jpg"),
    ("images/../../b.jpg", "b.jpg"),
    ("file:///data/b.jpg", "file:///data/b.jpg"),
    ("file:///tmp/%2e%2e/data/b.jpg", "file:///tmp/%2e%2e/data/b.jpg"),
    ("s3://bucket/b.jpg?endpoint_override=evil.org", "s3://bucket/b.jpg"),
    ("s3://bucket/b.jpg?region=x&endpoint_override=", "s3://bucket/b.jpg"),
]


@pytest.mark.parametrize("column", ["image", "mask", "saliency"])
@pytest.mark.parametrize(("cell", "named"), OUTSIDE)
def test_a_table_that_is_not_trusted_names_its_own_files(tmp_path: Path, column: str, cell: str, named: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "b.jpg").touch()
    write_csv(tmp_path / "set/t.csv", [{"image": "a.jpg", "tags": "cat"} | {column: cell}])
    with pytest.raises(UserError) as caught:
        list_tagged(tmp_path / "set/t.csv")
    assert f"1 file(s) of column '{column}' lie outside of the table's folder or on another server" in str(caught.value)
    assert caught.value.found.endswith(named)
    assert "data.tags.allow_absolute=true" in caught.value.remedy
    # As the remedy says: with the option, or with the table above the file, the call goes on.
    if column == "image":
        assert len(list_tagged(tmp_path / "set/t.csv", allow_absolute=True).table) == 1
    if cell.startswith(".."):
        write_csv(tmp_path / "t.csv", [{"image": "a.jpg", "tags": "cat"} | {column: "set/../b.jpg"}])
        assert len(list_tagged(tmp_path / "t.csv").table) == 1


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("column", ["image", "mask", "saliency", "id"])
@pytest.mark.parametrize(
    "cell",
    [
        "s3://AKIA:hunter2@bucket/b.jpg",
        "s3://AKIA:hun/ter2@bucket/b.jpg",
        "s3://bucket/b.jpg?X-Amz-Signature=hunter2",
        "abfs://c@acct.dfs.core.windows.net/b.jpg?sv=1&sig=hunter2",
        "https://me:hunter2@example.com/b.jpg",
    ],
)
def test_a_cell_with_credentials_is_named_and_not_shown(tmp_path: Path, column: str, cell: str, trusted: bool) -> None:
    rows = [{"image": "a.jpg", "tags": "cat", "id": "a"}, {"image": "b.jpg", "tags": "cat", "id": "b"} | {column: cell}]
    rows[0].setdefault(column, "")
    write_csv(tmp_path / "t.csv", rows)
    with pytest.raises(UserError, match=rf"signature in column '{column}' of .*t\.csv: row 2") as caught:
        list_tagged(tmp_path / "t.csv", allow_absolute=trusted)
    assert "ter2" not in str(caught.value)
    write_csv(tmp_path / "t.csv", rows[:1])
    assert len(list_tagged(tmp_path / "t.csv").table) == 1


def test_absent_tables_and_columns_are_errors(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no table .*/none\.csv"):
        list_tagged(folder / "none.csv")
    with pytest.raises(UserError, match=r"nowhere://x/t\.csv cannot be read: .*no such file system"):
        list_tagged("nowhere://x/t.csv")
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cat"}])
    with pytest.raises(UserError, match=r"has no column 'fold'; it has 'image', 'tags'") as caught:
        list_tagged(folder / "t.csv", split="fold")
    assert "data.tags.split=COLUMN" in caught.value.remedy


def test_a_table_of_many_chunks_is_the_table_of_one(folder: Path) -> None:
    """Tags, splits and ids do not depend on how a file's rows are grouped; tags are numbered through all groups."""
    rows = [
        {"image": f" {n}.jpg", "tags": f"t{n % 7};t{n % 3}, t{n % 7}|", "split": "val" if n % 5 == 4 else "train"}
        for n in range(40)
    ]
    for name, size in (("one", 40), ("many", 3)):
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=size)
    one, many = (list_tagged(folder / f"{name}.parquet") for name in ("one", "many"))
    assert one.table.equals(many.table)
    assert one.classes == many.classes == tuple(f"t{k}" for k in range(7))
    assert one.table["tags"].to_pylist() == [sorted({n % 7, n % 3}) for n in range(40)]
    assert one.table["image_id"].to_pylist() == [f"{n}.jpg" for n in range(40)]


@pytest.mark.parametrize("kind", ["large_string", "string_view", "large_list", "dictionary", "int"])
def test_every_kind_of_text_is_read(folder: Path, kind: str) -> None:
    images: Any = pa.array([5, 6]) if kind == "int" else pa.array(["5", " 6 "])
    tags: Any = pa.array(["cat", "dog; cat"])
    if kind in ("large_string", "string_view"):
        images, tags = (column.cast(getattr(pa, kind)()) for column in (images, tags))
    if kind == "large_list":
        tags = pa.array([["cat"], ["dog ", None, "", "cat"]], pa.large_list(pa.string()))
    if kind == "dictionary":
        images, tags = images.dictionary_encode(), tags.dictionary_encode()
    pa.parquet.write_table(pa.table({"image": images, "tags": tags}), folder / "t.parquet")
    found = list_tagged(folder / "t.parquet").table
    assert (found["image_id"].to_pylist(), found["tags"].to_pylist()) == (["5", "6"], [[0], [0, 1]])


@pytest.mark.parametrize("suffix", WRITERS)
def test_the_tags_of_photographs_to_be_predicted(folder: Path, suffix: str) -> None:
    """By URI as indices of the network's classes, in whatever order these are; other columns are not looked at."""
    rows: Rows = [{"image": "images/a.jpg", "tags": ["dog", "cat"], "mask": "absent.png"}]
    rows.append({"image": "b.jpg", "tags": [], "mask": None})
    WRITERS[suffix](folder / f"t.{suffix}", rows)
    found = photograph_tags(str(folder / f"t.{suffix}"), ["dog", "cow", "cat"])
    assert found == {str(folder / "images/a.jpg"): [0, 2]}, "what has no tags is not known to be empty"


SLIPS = {"a.jpg,dgo": "1 tag.s. are no class: dgo", "a.jpg,dog\n./a.jpg,cat": "more than once"}
SLIPS |= {"../a.jpg,dog": "outside of the table's folder", ",dog": "empty cell"}


@pytest.mark.parametrize(("rows", "found"), SLIPS.items())
def test_tags_that_cannot_be_given(tmp_path: Path, rows: str, found: str) -> None:
    (tmp_path / "t.csv").write_text(f"image,tags\n{rows}\n")
    with pytest.raises(UserError, match=found) as caught:
        photograph_tags(str(tmp_path / "t.csv"), ["dog", "cat"])
    assert caught.value.remedy

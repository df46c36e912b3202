"""The source `tags`: CSV, JSONL and Parquet tables, and the ways in which a table can be wrong."""

import errno
import json
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.index import LISTING_SCHEMA, Listing
from mcis.datasets.sources.tagged import TagsConfig, join_tags, list_tagged, photograph_tags, split_tags

Rows = list[dict[str, Any]]
ROWS: Rows = [
    {"image": "images/a.jpg", "tags": ["potted plant", "cat"], "mask": "m/a.png", "split": "train", "id": "1"},
    {"image": "/data/b.jpg", "tags": [], "mask": None, "split": "train", "id": "2020-01-01"},
    {"image": "s3://bucket/k/c.jpg", "tags": ["cat"], "mask": "m/c.png", "split": "val", "id": "c"},
    {"image": "gs://b/d.jpg", "tags": ["dog", "cat", "dog"], "mask": "s3://bucket/d.png", "split": "val", "id": "ü"},
]


def csv_cell(value: Any) -> Any:
    return "; ".join(value) if isinstance(value, list) else value


def write_csv(path: Path, rows: Rows) -> None:
    cells = []
    for row in rows:
        cells.append({name: csv_cell(value) for name, value in row.items()})
    pa.csv.write_csv(pa.Table.from_pylist(cells), path)


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: Rows) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}


def tags_of(listing: Listing) -> list[list[int]]:
    return listing.table["tags"].to_pylist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the empty masks m/a.png and m/c.png."""
    (tmp_path / "m").mkdir()
    for name in "ac":
        (tmp_path / f"m/{name}.png").touch()
    return tmp_path


@pytest.mark.parametrize("kind", WRITERS)
def test_table_becomes_rows(folder: Path, kind: str) -> None:
    WRITERS[kind](folder / f"t.{kind}", ROWS)

    listing = list_tagged(folder / f"t.{kind}", allow_absolute=True)

    assert listing.classes == ("cat", "dog", "potted plant")
    assert listing.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    columns = listing.table.to_pydict()
    assert columns["image_id"] == ["1", "2020-01-01", "c", "ü"]
    assert columns["uri"] == [str(folder / "images/a.jpg")] + [row["image"] for row in ROWS[1:]]
    assert columns["tags"] == [[0, 2], [], [0], [0, 1]]
    assert columns["split"] == ["train", "train", "val", "val"]
    assert columns["mask_uri"] == [str(folder / "m/a.png"), None, str(folder / "m/c.png"), "s3://bucket/d.png"]
    assert columns["domain"] == ["target"] * 4
    assert columns["saliency_uri"] == [None] * 4
    # An empty cell of a CSV is unknown; an empty list says that the image shows none of the classes.
    note = "1 of 4 images are negatives, which show none of the classes"
    if kind == "csv":
        note = "no ground-truth mask for 1 of 2 images of split train: these are not scored"
    assert columns["is_negative"] == [False, kind != "csv", False, False]
    assert listing.notes == (f"{folder}/t.{kind}: {note}",)


def test_texts_that_look_like_times_stay_texts(folder: Path) -> None:
    write_jsonl(folder / "t.jsonl", [{"image": "2020-01-01", "tags": "2020-01-02", "id": "2020-01-01 00:00:00"}])
    listing = list_tagged(folder / "t.jsonl")
    assert listing.classes == ("2020-01-02",)
    assert listing.table["image_id"].to_pylist() == ["2020-01-01 00:00:00"]


def test_a_jsonl_file_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    (folder / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"image": "2020-01-01", "tags": "cat"}\r\n')
    listing = list_tagged(folder / "t.jsonl")
    assert listing.classes == ("cat",)
    assert listing.table["image_id"].to_pylist() == ["2020-01-01"]


# --- tags and classes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cat;dog", ["cat", "dog"]),
        ("cat, dog ,cow", ["cat", "cow", "dog"]),
        (" cat | dog;;", ["cat", "dog"]),
        ("potted plant", ["potted plant"]),
        ("cat dog", ["cat dog"]),
        ("猫；狗，鸟", ["狗", "猫", "鸟"]),
        ("cat、dog｜cow", ["cat", "cow", "dog"]),
        ("cat/dog;cat", ["cat", "cat/dog"]),
        ("c++;c", ["c", "c++"]),
        ("potted\u00a0plant;potted plant;\ufeffcat\u200b;cat;\u200b", ["cat", "potted plant"]),
    ],
)
def test_tags_are_separated_by_punctuation_and_never_by_spaces(folder: Path, text: str, names: list[str]) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": text}])
    assert list(list_tagged(folder / "t.csv").classes) == names


def test_tags_that_are_no_class_are_left_out_on_request(folder: Path) -> None:
    rows = [{"image": "a", "tags": "sky;cat"}, {"image": "b", "tags": "sea;sky"}, {"image": "c", "tags": "dog"}]
    write_csv(folder / "t.csv", rows)
    (folder / "classes.txt").write_text("dog\ncat\n")

    listing = list_tagged(folder / "t.csv", classes=folder / "classes.txt", ignore_others=True)

    assert listing.classes == ("dog", "cat")
    assert tags_of(listing) == [[1], [], [0]]
    note = "left out 3 tags, whose 2 names are not among the classes: sea, sky; 1 of 3 images have no tag"
    assert note in listing.notes[-1]


@pytest.mark.parametrize("text", ["cat dog", "cat/dog", "cat & dog", "cat + dog", "cat\u00a0dog"])
def test_tags_with_unclear_separators_are_an_error(folder: Path, text: str) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": text}, {"image": "b", "tags": "cat;dog;potted plant"}])
    with pytest.raises(UserError, match="in column 'tags': tags with a space, '/', '&' or '\\+' between them"):
        list_tagged(folder / "t.csv")


def test_a_tag_with_a_separator_is_joined_as_a_json_list() -> None:
    for separator in ";,|；，、｜":
        tags = [f"tench{separator} Tinca tinca", "cat"]
        assert split_tags(join_tags(tags)) == tags


def test_class_file_allows_names_that_are_made_of_others(folder: Path) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cat dog"}, {"image": "b", "tags": "cat;dog;potted plant"}])
    (folder / "classes.txt").write_text("cat\ndog\ncat dog\npotted plant\n")
    assert tags_of(list_tagged(folder / "t.csv", classes=folder / "classes.txt")) == [[2], [0, 1, 3]]


def test_class_file_orders_the_classes(folder: Path) -> None:
    (folder / "classes.txt").write_text("dog\ncow\ncat\n")
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cat;dog"}])
    listing = list_tagged(folder / "t.csv", classes=folder / "classes.txt")
    assert listing.classes == ("dog", "cow", "cat")
    assert tags_of(listing) == [[0, 2]]


def test_tag_that_is_not_in_the_class_file_is_an_error(folder: Path) -> None:
    (folder / "classes.txt").write_text("dog\ncow\ncat\n")
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cta;dog"}])
    with pytest.raises(UserError, match=r"t\.csv: 1 tag\(s\) are not among the classes: cta\n") as caught:
        list_tagged(folder / "t.csv", classes=folder / "classes.txt")
    assert "did you mean cat?" in caught.value.remedy


ANIMALS: Rows = [{"image": f"{n}", "tags": "horse" if n < 40 else "cow"} for n in range(70)]


def test_likely_misspellings_are_noted(folder: Path) -> None:
    others = [{"image": tag, "tags": tag} for tag in ("hrose", "Horse", "cwo", "cat")]
    write_csv(folder / "t.csv", ANIMALS + others)

    notes = [note for note in list_tagged(folder / "t.csv").notes if "may be a misspelling" in note]

    assert notes == [
        f"{folder}/t.csv: 'Horse' (1 images) may be a misspelling of 'horse' (40 images)",
        f"{folder}/t.csv: 'cwo' (1 images) may be a misspelling of 'cow' (30 images)",
        f"{folder}/t.csv: 'hrose' (1 images) may be a misspelling of 'horse' (40 images)",
    ]


def test_tags_with_brackets_and_quotes_are_an_error(folder: Path) -> None:
    write_csv(folder / "t.csv", [*ANIMALS, {"image": "x", "tags": "['horse', 'cow']"}])
    with pytest.raises(UserError, match=r"tags such as 'cow'\], \['horse'"):
        list_tagged(folder / "t.csv")


# --- columns


def test_columns_may_have_other_names(folder: Path) -> None:
    (folder / "s.png").touch()
    rows = [{"file": "a", "labels": "cat", "fold": "train", "heat": "s.png", "truth": "m/a.png", "key": 7, "by": "me"}]
    rows.append({"file": "b", "labels": None, "fold": "Validation", "heat": None, "truth": "", "key": 8, "by": "me"})
    write_parquet(folder / "t.parquet", rows)

    listing = list_tagged(
        folder / "t.parquet", image="file", tags="labels", split="fold", saliency="heat", mask="truth", id="key"
    )

    columns = listing.table.to_pydict()
    assert columns["image_id"] == ["7", "8"]
    assert columns["split"] == ["train", "val"]
    assert columns["tags"] == [[0], []]
    assert columns["saliency_uri"] == [str(folder / "s.png"), None]
    assert columns["mask_uri"] == [str(folder / "m/a.png"), None]
    assert listing.notes == (
        f"{folder}/t.parquet: columns that are not read: by",
        f"{folder}/t.parquet: no saliency map for 1 of 2 images",
        f"{folder}/t.parquet: no ground-truth mask for 1 of 1 images of split val: these are not scored",
    )


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("byte_order_mark", ["", "\ufeff"])
def test_tables_of_other_programs_are_understood(folder: Path, delimiter: str, byte_order_mark: str) -> None:
    """Columns of other names, separated by semicolons or tabs; Windows line ends, a byte order mark."""
    rows = (("File Name", "LABEL", "width"), ("a", "cat|dog", "640"), ("b", "cat", "480"))
    text = byte_order_mark + "".join(f"{delimiter.join(row)}\r\n" for row in rows)
    (folder / "t.csv").write_bytes(text.encode())

    listing = list_tagged(folder / "t.csv")

    assert listing.classes == ("cat", "dog")
    assert tags_of(listing) == [[0, 1], [0]]
    assert listing.table["image_id"].to_pylist() == ["a", "b"]
    assert listing.notes[1:] == (
        f"{folder}/t.csv: columns recognized by their names or values: 'File Name' as image, 'LABEL' as tags",
        f"{folder}/t.csv: columns that are not read: width",
    )


def flag_rows(no: float, yes: float) -> Rows:
    return [
        {"image": "a", "dog": yes, "cat": yes, "width": 9},
        {"image": "b", "dog": no, "cat": no, "width": 9},
        {"image": "c", "dog": None, "cat": yes, "width": 9},
    ]


@pytest.mark.parametrize("byte_order_mark", ["", "\ufeff"])
def test_the_separator_line_of_excel_is_read(folder: Path, byte_order_mark: str) -> None:
    (folder / "t.csv").write_bytes(f"{byte_order_mark}sep=;\r\nimage;tags;a, b\r\na;cat,dog;1\r\n".encode())
    listing = list_tagged(folder / "t.csv")
    assert listing.classes == ("cat", "dog")
    assert listing.table["image_id"].to_pylist() == ["a"]


def test_blanks_around_names_of_columns_are_dropped(folder: Path) -> None:
    (folder / "t.csv").write_text(' image, tags ,"id ",\tsplit\na.jpg, 1,007,train\n')
    listing = list_tagged(folder / "t.csv")
    assert listing.classes == ("1",)
    assert listing.table["image_id"].to_pylist() == ["007"]


every_flag = pytest.mark.parametrize(("no", "yes"), [(0, 1), (False, True), (0.0, 1.0)])
every_format = pytest.mark.parametrize("suffix", WRITERS)


@every_flag
@every_format
def test_columns_of_0_and_1_are_classes(folder: Path, suffix: str, no: float, yes: float) -> None:
    WRITERS[suffix](folder / f"t.{suffix}", flag_rows(no, yes))
    listing = list_tagged(folder / f"t.{suffix}")
    assert listing.classes == ("cat", "dog")
    assert tags_of(listing) == [[0, 1], [], [0]]
    assert "dog, cat as a class each, 0 or 1" in listing.notes[1]


@every_flag
@every_format
def test_columns_of_0_and_1_are_tags_of_photographs(folder: Path, suffix: str, no: float, yes: float) -> None:
    """A photograph of zeros is known to have no tag."""
    WRITERS[suffix](folder / f"t.{suffix}", flag_rows(no, yes))
    tags = photograph_tags(str(folder / f"t.{suffix}"), ["dog", "cat"])
    assert list(tags.values()) == [[0, 1], [], [1]]


def test_columns_of_0_and_1_are_not_read_if_a_column_holds_tags(folder: Path) -> None:
    write_csv(folder / "t.csv", [row | {"tags": "horse"} for row in flag_rows(0, 1)])
    assert list_tagged(folder / "t.csv").classes == ("horse",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "a", "dog": 1, "width": 9}, "no column 'tags'; it has 'image', 'dog', 'width'"),
        ({"file": "a", "path": "b", "tags": "cat"}, "no column 'image'; it has 'file', 'path', 'tags'"),
    ],
    ids=["one flag", "two images"],
)
def test_ambiguous_columns_are_not_guessed(folder: Path, row: dict[str, Any], message: str) -> None:
    write_csv(folder / "t.csv", [row])
    with pytest.raises(UserError, match=message):
        list_tagged(folder / "t.csv")


def test_columns_of_0_and_1_may_be_integers_and_decimals(folder: Path) -> None:
    """pandas writes the numbers of a column with an empty cell as decimals, and those of other columns as integers."""
    (folder / "t.csv").write_text("image,cat,dog,score\na,1,0.0,7.5\nb,0,1.0,1.0\nc,0,,9.0\n")
    listing = list_tagged(folder / "t.csv")
    assert listing.classes == ("cat", "dog")
    assert tags_of(listing) == [[0], [1], []]
    assert negatives_of(listing) == [False, False, False]
    assert f"{folder}/t.csv: columns that are not read: score" in listing.notes


@pytest.mark.parametrize("cells", [("1", "-1", "0"), ("1.0", "-1.0", ""), ("1", "-1", "-1")])
def test_a_column_of_classes_with_minus_one_is_an_error(folder: Path, cells: tuple[str, str, str]) -> None:
    """CheXpert writes -1 for uncertain, CelebA for absent. Images of edema alone would be negatives of pneumonia."""
    first, second, third = cells
    text = f"image,edema,pneumonia,age\na,{first},0,-1\nb,{second},1,2\nc,{third},0,3\n"
    (folder / "t.csv").write_text(text)
    with pytest.raises(UserError, match=r"1 column\(s\) hold -1 next to 0 or 1: edema\n") as caught:
        list_tagged(folder / "t.csv")
    assert "an empty cell if it is uncertain" in caught.value.remedy


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ("0 1 1? 1", "'dog' (row 3: '1?')"),
        ("0 0.5 0.5 1", "'dog' (row 2: 0.5)"),
        ("0.9 0.2 0.3 0.7", "'dog' (row 1: 0.9)"),
        (" x  x", "'dog' (row 2: 'x')"),
        ("no yes yes no", "'dog' (row 1: 'no')"),
        ("0 2 2 0", "'dog' (row 2: 2)"),
        ("true maybe false false", "'dog' (row 2: 'maybe')"),
    ],
)
def test_a_damaged_column_of_a_class_is_an_error(folder: Path, cells: str, found: str) -> None:
    """Images of dogs alone would be negatives of the classes cat and cow."""
    first, second, third, fourth = cells.split(" ")
    rows = ["image,cat,dog,cow", f"a,1,{first},0", f"b,0,{second},0", f"c,0,{third},0", f"d,0,{fourth},1"]
    (folder / "t.csv").write_text("\n".join(rows))

    with pytest.raises(UserError, match=r"1 column\(s\) may be classes") as caught:
        list_tagged(folder / "t.csv")

    assert caught.value.found.endswith(f"hold other cells than 0 and 1: {found}")
    assert "data.tags.tags=COLUMN" in caught.value.remedy


def test_columns_that_are_clearly_no_classes_are_not_read(folder: Path) -> None:
    names = ["fold", "number", "width", "comment", "zero", "x", "year"]
    rows = [f"image,cat,dog,{','.join(names)}"]
    rows += ["a,1,0,1,0,640,,0,5.5,1999", "b,0,1,2,1,640,dusk,0,0.5,2000", "c,0,0,3,2,480,dawn,,7.0,2000"]
    (folder / "t.csv").write_text("\n".join(rows))
    listing = list_tagged(folder / "t.csv")
    assert listing.classes == ("cat", "dog")
    unread = "columns that are not read: fold, number, width, comment, zero and 2 more"
    assert f"{folder}/t.csv: {unread}" in listing.notes


def test_columns_of_numbers_and_truth_values_are_classes_together(folder: Path) -> None:
    (folder / "t.csv").write_text("image,cat,dog\na,1,true\nb,0,false\nc,0,\n")
    listing = list_tagged(folder / "t.csv")
    assert listing.classes == ("cat", "dog")
    assert tags_of(listing) == [[0, 1], [], []]
    assert negatives_of(listing) == [False, True, False]


def test_columns_that_may_be_counts_give_a_note(folder: Path) -> None:
    rows = ["image,cat,dog,cow,width,score", "a,1,0,2,640,0.5", "b,0,1,0,480,0.0", "c,0,0,3.0,9,2.0", "d,0,0,3,9,2.0"]
    (folder / "t.csv").write_text("\n".join(rows))
    notes = list_tagged(folder / "t.csv").notes
    assert f"{folder}/t.csv: columns that are not read: cow, width, score" in notes
    assert [note.partition(" may count")[0] for note in notes if "may count" in note] == [f"{folder}/t.csv: cow"]


def test_columns_that_number_the_rows_are_no_counts(folder: Path) -> None:
    """pandas writes such a column by default, without a name."""
    (folder / "t.csv").write_text(",image,cat,dog,digest\n0,a,1,0,0\n1,b,0,1,9\n2,c,0,0,4\n")
    assert not any("may count" in note for note in list_tagged(folder / "t.csv").notes)


def test_integers_that_no_float_represents_are_read(folder: Path) -> None:
    (folder / "t.csv").write_text(f"image,cat,dog,digest\na,1,0,0\nb,0,1,7\nc,0,0,7\nd,0,0,{2**60 + 1}\n")
    assert list_tagged(folder / "t.csv").classes == ("cat", "dog")


def test_columns_of_the_same_name_are_no_classes(folder: Path) -> None:
    (folder / "t.csv").write_text("image,cat,dog,fold,fold\na,1,0,0,1\nb,0,1,1,0\n")
    listing = list_tagged(folder / "t.csv")
    assert listing.classes == ("cat", "dog")
    assert f"{folder}/t.csv: columns that are not read: fold, fold" in listing.notes


@pytest.mark.parametrize("names", ["label,category", "class,class_name"])
def test_columns_of_0_and_1_are_not_read_if_two_columns_may_hold_tags(folder: Path, names: str) -> None:
    (folder / "t.csv").write_text(f"image,{names},checked\na,cat,animal,0\nb,dog,animal,1\n")
    with pytest.raises(UserError, match="has no column 'tags'; it has 'image'") as caught:
        list_tagged(folder / "t.csv")
    assert "data.tags.tags=COLUMN" in caught.value.remedy


def test_columns_of_0_and_1_are_not_read_if_a_named_column_is_absent(folder: Path) -> None:
    (folder / "t.csv").write_text("image,names,checked\na,cat,0\nb,dog,1\n")
    with pytest.raises(UserError, match="has no column 'name'; it has 'image', 'names', 'checked'"):
        list_tagged(folder / "t.csv", tags="name")


# --- negatives


def negatives_of(listing: Listing) -> list[bool]:
    return listing.table["is_negative"].to_pylist()


@every_format
@pytest.mark.parametrize("spelling", ["none", "background", "None", " none ", "BACKGROUND"])
def test_a_tag_for_none_of_the_classes_makes_a_negative(folder: Path, suffix: str, spelling: str) -> None:
    rows: Rows = [{"image": "a", "tags": "cat"}, {"image": "b", "tags": spelling}, {"image": "c", "tags": None}]
    WRITERS[suffix](folder / f"t.{suffix}", rows)
    listing = list_tagged(folder / f"t.{suffix}")
    assert listing.classes == ("cat",)
    assert tags_of(listing) == [[0], [], []]
    assert negatives_of(listing) == [False, True, False], "an empty cell is unlabelled"
    note = f"1 of 3 images are negatives, which show none of the classes, by the tag {spelling.strip()}"
    assert listing.notes[-1] == f"{folder}/t.{suffix}: {note}"
    assert list(photograph_tags(str(folder / f"t.{suffix}"), ["cat"]).values()) == [[0], []]


def test_a_text_with_an_empty_list_makes_a_negative(folder: Path) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": '["cat"]'}, {"image": "b", "tags": "[]"}])
    assert negatives_of(list_tagged(folder / "t.csv")) == [False, True]


def test_an_empty_cell_is_negative_on_demand(folder: Path) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cat"}, {"image": "b", "tags": None}])
    assert negatives_of(list_tagged(folder / "t.csv")) == [False, False]
    assert negatives_of(list_tagged(folder / "t.csv", untagged="negative")) == [False, True]


@every_flag
@every_format
def test_a_row_of_zeros_is_negative_unless_a_cell_is_empty(folder: Path, suffix: str, no: float, yes: float) -> None:
    rows = [*flag_rows(no, yes), {"image": "d", "dog": None, "cat": no, "width": 9}]
    WRITERS[suffix](folder / f"t.{suffix}", rows)
    listing = list_tagged(folder / f"t.{suffix}")
    assert tags_of(listing) == [[0, 1], [], [0], []]
    assert negatives_of(listing) == [False, True, False, False]


@every_format
def test_one_column_of_0_and_1_is_the_only_class(folder: Path, suffix: str) -> None:
    WRITERS[suffix](folder / f"t.{suffix}", [{"image": name, "defect": n} for n, name in enumerate("ab")])
    listing = list_tagged(folder / f"t.{suffix}")
    assert listing.classes == ("defect",)
    assert tags_of(listing) == [[], [0]]
    assert negatives_of(listing) == [True, False]


def test_further_tags_for_none_of_the_classes_are_set_and_suggested(folder: Path) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cat"}, {"image": "b", "tags": "ok"}])
    listing = list_tagged(folder / "t.csv")
    assert listing.classes == ("cat", "ok")
    note = "'ok' (1 images) is a class; if it means none of the classes, set data.tags.negative_tags=ok"
    assert any(note in line for line in listing.notes)

    listing = list_tagged(folder / "t.csv", negative_tags="nothing;ok")
    assert listing.classes == ("cat",)
    assert negatives_of(listing) == [False, True]


@pytest.mark.parametrize(("yes", "no"), [("1", "0"), ("True", "False"), ("yes", "no")])
def test_a_column_of_tags_that_answers_a_question_gives_a_note(folder: Path, yes: str, no: str) -> None:
    (folder / "t.csv").write_text(f"image,label\na,{yes}\nb,{no}\n")
    note = f"{no!r} (1 images) is a class; if it means none of the classes, set data.tags.negative_tags={no}"
    assert f"{folder}/t.csv: {note}" in list_tagged(folder / "t.csv").notes

    listing = list_tagged(folder / "t.csv", negative_tags=no)
    assert listing.classes == (yes,)
    assert negatives_of(listing) == [False, True]


@pytest.mark.parametrize("tag", ["nan", "NULL", "N/A"])
def test_a_tag_that_programs_write_for_none_gives_a_note(folder: Path, tag: str) -> None:
    (folder / "t.csv").write_text(f"image,tags\na,cat\nb,{tag}\n")
    note = f"{tag!r} (1 images) is a class; if it means that tags are missing, empty these cells of the table"
    assert f"{folder}/t.csv: {note}" in list_tagged(folder / "t.csv").notes


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (False, "false"), (["ok", "no; none"], '["ok", "no; none"]'), ("a;b", "a;b")]
)
def test_negative_tags_of_the_command_line_are_written_as_in_the_table(value: Any, text: str) -> None:
    """The command line reads `data.tags.negative_tags=0` as a number."""
    assert TagsConfig.model_validate({"negative_tags": value}).negative_tags == text


def test_a_class_file_may_name_a_class_none(folder: Path) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cat"}, {"image": "b", "tags": "none"}])
    (folder / "classes.txt").write_text("cat\nnone\n")
    listing = list_tagged(folder / "t.csv", classes=folder / "classes.txt")
    assert tags_of(listing) == [[0], [1]]
    assert negatives_of(listing) == [False, False]
    with pytest.raises(UserError, match="none is a class, and in"):
        list_tagged(folder / "t.csv", classes=folder / "classes.txt", negative_tags="none")


def test_an_image_of_other_classes_is_no_negative_unless_so_set(folder: Path) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cat"}, {"image": "b", "tags": "sea"}])
    (folder / "classes.txt").write_text("cat\n")
    options: dict[str, Any] = {"classes": folder / "classes.txt", "ignore_others": True}
    assert negatives_of(list_tagged(folder / "t.csv", **options)) == [False, False]
    assert negatives_of(list_tagged(folder / "t.csv", untagged="negative", **options)) == [False, True]


# --- errors

INVALID_ROWS = [
    ([{"photo": "a", "tags": "cat"}], r"has no column 'image'; it has 'photo', 'tags'\n", "data.tags.image=COLUMN"),
    ([{"image": "a", "animal": "cat"}], r"has no column 'tags'; it has 'image', 'animal'\n", "data.tags.tags=COLUMN"),
    ([{"image": image, "tags": "cat"} for image in "a "], r"1 empty cell\(s\) in .*'image': row 2\n", "fill"),
    ([{"image": "a", "tags": "cat"}] * 2, r"1 value\(s\) of column 'image' .* more than once: a\n", "column 'id'"),
    ([{"image": i, "tags": "cat", "id": "x"} for i in "ab"], r"1 value\(s\) of column 'id' .*: x\n", "merge the rows"),
    ([{"image": "a", "tags": "cat", "id": None}], r"1 empty cell\(s\) in column 'id': row 1", "fill"),
    ([{"image": "a", "tags": "cat", "split": "dev"}], r"unknown split dev in column 'split'", "rename"),
    ([{"image": "a", "tags": "cat", "split": "val"}], "has no image of split train", "correct its column 'split'"),
    ([{"image": "a", "tags": "cat", "mask": "no"}], r"1 file\(s\) of column 'mask' are missing: .*/no\n", "empty"),
    ([{"image": "a", "tags": "cat", "saliency": "no"}], r"1 file\(s\) of column 'saliency' are missing", "empty"),
    ([{"image": "a", "tags": " ; "}], "no tag in column 'tags'", "add tags"),
    ([{"image": "a", "tags": "background;cat"}], r"1 image\(s\) have a class and a tag .* \(background\): a", "delete"),
    ([{"image": "a", "tags": "none"}], "no tag in column 'tags'", "add tags"),
    ([{"image": "a", "tags": ";".join(map(str, range(255)))}], "names 255 classes: 0, 1, 10", "in a file"),
    ([{"image": "s3://[bad/a", "tags": "cat"}], r"Invalid IPv6 URL: s3://\[bad/a", "correct the cell"),
    ([{"image": "https://x.org/a", "tags": "cat"}], "unknown scheme: https://x.org/a\n", "correct the cell"),
]


@every_format
@pytest.mark.parametrize(("rows", "message", "remedy"), INVALID_ROWS, ids=[message for _, message, _ in INVALID_ROWS])
def test_invalid_rows_have_a_remedy(folder: Path, suffix: str, rows: Rows, message: str, remedy: str) -> None:
    WRITERS[suffix](folder / f"t.{suffix}", rows)

    with pytest.raises(UserError, match=message) as caught:
        list_tagged(folder / f"t.{suffix}")

    assert remedy in caught.value.remedy
    assert caught.value.expected


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (errno.EACCES, "access to .*a.png is refused: Permission denied"),
        (errno.EIO, "a.png cannot be read, after several attempts: Input/output error"),
    ],
)
def test_mask_that_cannot_be_looked_up_is_not_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_pauses: None, number: int, found: str
) -> None:
    write_csv(folder / "t.csv", [{"image": "a.jpg", "tags": "cat", "mask": "m/a.png"}])
    look = os.stat

    def stat(at: Any, **options: Any) -> os.stat_result:
        if str(at) == str(folder / "m/a.png"):
            raise OSError(number, os.strerror(number))
        return look(at, **options)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(UserError, match=found):
        list_tagged(folder / "t.csv")


# --- files that a table may name

OUTSIDE = [
    ("/data/b.jpg", "/data/b.jpg"),
    ("../b.jpg", "b.jpg"),
    ("images/../../b.jpg", "b.jpg"),
    ("file:///data/b.jpg", "file:///data/b.jpg"),
    ("file:///tmp/%2e%2e/data/b.jpg", "file:///tmp/%2e%2e/data/b.jpg"),
    ("s3://bucket/b.jpg?endpoint_override=evil.org", "s3://bucket/b.jpg"),
    ("s3://bucket/b.jpg?region=x&endpoint_override=", "s3://bucket/b.jpg"),
    ("s3://bucket/b.jpg#?endpoint_override=evil.org", "s3://bucket/b.jpg#"),
    ("abfs://me@evil.org/c/b.jpg", "abfs://evil.org/c/b.jpg"),
    ("abfss://acct.core.windows.net.evil.org/c/b.jpg", "abfss://acct.core.windows.net.evil.org/c/b.jpg"),
    ("abfs://evil:8080/c/b.jpg", "abfs://evil:8080/c/b.jpg"),
    ("hdfs://evil.org:8020/b.jpg", "hdfs://evil.org:8020/b.jpg"),
    ("viewfs://evil/b.jpg", "viewfs://evil/b.jpg"),
]


@pytest.mark.parametrize("column", ["image", "mask", "saliency"])
@pytest.mark.parametrize(("cell", "named"), OUTSIDE)
def test_table_may_not_name_files_outside_of_its_folder(tmp_path: Path, column: str, cell: str, named: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "b.jpg").touch()
    write_csv(tmp_path / "set/t.csv", [{"image": "a.jpg", "tags": "cat"} | {column: cell}])

    with pytest.raises(UserError) as caught:
        list_tagged(tmp_path / "set/t.csv")

    found = caught.value.found
    assert f"1 file(s) of column '{column}' are outside of the table's folder or on another server" in found
    assert found.endswith(named)
    assert "data.tags.allow_absolute=true" in caught.value.remedy


@pytest.mark.parametrize("cell", [cell for cell, _ in OUTSIDE])
def test_trusted_table_may_name_images_outside_of_its_folder(tmp_path: Path, cell: str) -> None:
    write_csv(tmp_path / "t.csv", [{"image": cell, "tags": "cat"}])
    assert len(list_tagged(tmp_path / "t.csv", allow_absolute=True).table) == 1


@pytest.mark.parametrize(
    "cell", ["s3://bucket/b.jpg", "abfs://c/b.jpg", "abfss://c@acct.dfs.core.windows.net/b.jpg", "hdfs:///b.jpg"]
)
def test_table_may_name_files_on_the_servers_of_the_environment(tmp_path: Path, cell: str) -> None:
    write_csv(tmp_path / "t.csv", [{"image": cell, "tags": "cat"}])
    assert len(list_tagged(tmp_path / "t.csv").table) == 1


@pytest.mark.parametrize("column", ["image", "mask", "saliency"])
def test_table_may_name_files_below_its_folder_by_dots(tmp_path: Path, column: str) -> None:
    (tmp_path / "b.jpg").touch()
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
def test_cell_with_credentials_is_named_and_not_shown(tmp_path: Path, column: str, cell: str, trusted: bool) -> None:
    first = {"image": "a.jpg", "tags": "cat", "id": "a"}
    first.setdefault(column, "")
    second = {"image": "b.jpg", "tags": "cat", "id": "b"} | {column: cell}
    write_csv(tmp_path / "t.csv", [first, second])

    with pytest.raises(UserError, match=rf"signature in column '{column}' of .*t\.csv: row 2") as caught:
        list_tagged(tmp_path / "t.csv", allow_absolute=trusted)

    assert "ter2" not in str(caught.value)
    write_csv(tmp_path / "t.csv", [first])
    assert len(list_tagged(tmp_path / "t.csv").table) == 1


# --- files


def test_images_have_the_same_ids_however_the_table_spells_their_paths(tmp_path: Path) -> None:
    spelled = [
        ["a.jpg", "x/b.jpg", str(tmp_path.parent / "c.jpg"), "s3://bucket/d.jpg"],
        ["./a.jpg", "x//b.jpg", "../c.jpg", "s3://bucket/d.jpg"],
        [
            str(tmp_path / "a.jpg"),
            str(tmp_path / "x" / ".." / "x" / "b.jpg"),
            str(tmp_path / "../c.jpg"),
            "s3://bucket/d.jpg",
        ],
    ]
    for names in spelled:
        table = tmp_path / "photos.csv"
        table.write_text("image,tags\n" + "".join(f"{name},cat\n" for name in names))
        ids = list_tagged(table, allow_absolute=True).table["image_id"].to_pylist()
        assert ids == ["a.jpg", "x/b.jpg", str(tmp_path.parent / "c.jpg"), "s3://bucket/d.jpg"]


def test_ids_are_the_same_in_both_unicode_forms(tmp_path: Path) -> None:
    table = tmp_path / "photos.csv"
    for form in ("NFC", "NFD"):
        table.write_text(f"image,tags\n{unicodedata.normalize(form, 'löwe.jpg')},cat\na.jpg,cat\n")
        assert list_tagged(table).table["image_id"].to_pylist() == ["l\u00f6we.jpg", "a.jpg"]


def test_an_image_that_is_named_in_two_spellings_is_an_error(tmp_path: Path) -> None:
    table = tmp_path / "photos.csv"
    table.write_text("image,tags\na.jpg,cat\n./a.jpg,dog\n")
    with pytest.raises(UserError, match=r"occur more than once: a\.jpg"):
        list_tagged(table)


def test_absent_table_is_an_error(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no table .*/none\.csv"):
        list_tagged(folder / "none.csv")


def test_table_of_an_unknown_scheme_is_an_error() -> None:
    with pytest.raises(UserError, match=r"nowhere://x/t\.csv cannot be read: .*no such file system"):
        list_tagged("nowhere://x/t.csv")


def test_absent_column_of_another_name_is_an_error(folder: Path) -> None:
    write_csv(folder / "t.csv", [{"image": "a", "tags": "cat"}])
    with pytest.raises(UserError, match=r"has no column 'fold'; it has 'image', 'tags'") as caught:
        list_tagged(folder / "t.csv", split="fold")
    assert "data.tags.split=COLUMN" in caught.value.remedy


def test_rows_do_not_depend_on_the_chunks_of_a_table(folder: Path) -> None:
    rows = [
        {"image": f" {n}.jpg", "tags": f"t{n % 7};t{n % 3}, t{n % 7}|", "split": "val" if n % 5 == 4 else "train"}
        for n in range(40)
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "one.parquet", row_group_size=40)
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "many.parquet", row_group_size=3)

    one_chunk = list_tagged(folder / "one.parquet")
    many_chunks = list_tagged(folder / "many.parquet")

    assert one_chunk.table.equals(many_chunks.table)
    assert one_chunk.classes == many_chunks.classes == tuple(f"t{k}" for k in range(7))
    assert tags_of(one_chunk) == [sorted({n % 7, n % 3}) for n in range(40)]
    assert one_chunk.table["image_id"].to_pylist() == [f"{n}.jpg" for n in range(40)]


TEXT_IMAGES = pa.array(["5", " 6 "])
TEXT_TAGS = pa.array(["cat", "dog; cat"])


@pytest.mark.parametrize(
    ("images", "tags"),
    [
        (TEXT_IMAGES.cast(pa.large_string()), TEXT_TAGS.cast(pa.large_string())),
        (TEXT_IMAGES.cast(pa.string_view()), TEXT_TAGS.cast(pa.string_view())),
        (TEXT_IMAGES, pa.array([["cat"], ["dog ", None, "", "cat"]], pa.large_list(pa.string()))),
        (TEXT_IMAGES.dictionary_encode(), TEXT_TAGS.dictionary_encode()),
        (pa.array([5, 6]), TEXT_TAGS),
    ],
    ids=["large_string", "string_view", "large_list", "dictionary", "int"],
)
def test_columns_of_any_text_type_are_read(folder: Path, images: pa.Array, tags: pa.Array) -> None:
    pa.parquet.write_table(pa.table({"image": images, "tags": tags}), folder / "t.parquet")
    listing = list_tagged(folder / "t.parquet")
    assert listing.table["image_id"].to_pylist() == ["5", "6"]
    assert tags_of(listing) == [[0], [0, 1]]


# --- photograph_tags


@every_format
def test_tags_of_photographs_are_class_indices_of_the_network(folder: Path, suffix: str) -> None:
    """Other columns are not read. The tags of a photograph with an empty cell are unknown, so it is absent."""
    rows: Rows = [
        {"image": "images/a.jpg", "tags": ["dog", "cat"], "mask": "absent.png"},
        {"image": "b.jpg", "tags": None, "mask": None},
    ]
    WRITERS[suffix](folder / f"t.{suffix}", rows)
    tags = photograph_tags(str(folder / f"t.{suffix}"), ["dog", "cow", "cat"])
    assert tags == {str(folder / "images/a.jpg"): [0, 2]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a.jpg,dgo", "1 tag.s. are not among the classes: dgo"),
        ("a.jpg,dog\n./a.jpg,cat", "more than once"),
        ("../a.jpg,dog", "outside of the table's folder"),
        (",dog", "empty cell"),
    ],
)
def test_invalid_tags_of_photographs_have_a_remedy(tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(f"image,tags\n{rows}\n")
    with pytest.raises(UserError, match=message) as caught:
        photograph_tags(str(tmp_path / "t.csv"), ["dog", "cat"])
    assert caught.value.remedy


def test_a_missing_column_of_photograph_tags_is_to_be_renamed(tmp_path: Path) -> None:
    """`mcis predict` refuses the keys data.tags.*, which name other columns for a run."""
    (tmp_path / "t.csv").write_text("image,breed\na.jpg,dog\n")
    with pytest.raises(UserError, match="no column 'tags'") as caught:
        photograph_tags(str(tmp_path / "t.csv"), ["dog", "cat"])
    assert "rename the column that holds the tags to 'tags'" in caught.value.remedy

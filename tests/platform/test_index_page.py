"""The page of an index: its counts agree with slow counting, also with odd names, files and tables."""

from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mcis.datasets.index import INDEX_SCHEMA, REJECTS_SCHEMA, check_images
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.commands.terminal import show_index
from mcis.platform.reporting.index_facts import index_facts
from mcis.platform.reporting.index_page import browse_page
from mcis.platform.runs.progress import console

CLASSES = ("circle", "square", "star", "never")
HOSTILE = "$\\frac$<script>alert('\"{&amp;</title>\x00\x1b[31m[red]\u202e"
NO_REJECTS = REJECTS_SCHEMA.empty_table()
Parsed = Callable[..., Any]


def table(page: Any, section: str) -> dict[str, list[str]]:
    """The rows of a section by class; a class index may precede the class."""
    rows = [row[1:] if row[0].isdigit() and not row[1].isdigit() else row for row in page.rows[section]]
    return {name: rest for name, *rest in rows}


def index_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """An index of images without files. By default, images are in train and unlabelled."""
    plain = {"domain": "target", "split": "train", "tags": [], "is_negative": False, "height": 60, "width": 80}
    names = ({"image_id": f"i{n}", "uri": f"/nowhere/i{n}.jpg", "content_hash": f"{n:064x}"} for n in range(len(rows)))
    return pa.Table.from_pylist([plain | name | row for name, row in zip(names, rows, strict=True)], INDEX_SCHEMA)


def rejects_of(reasons: Sequence[str]) -> pa.Table:
    rows = [{"image_id": f"r{n}", "uri": f"in/r{n}.jpg", "split": "val", "reason": r} for n, r in enumerate(reasons)]
    return pa.Table.from_pylist(rows, REJECTS_SCHEMA)


def random_index(images: int = 300, classes: int = 4, seed: int = 0) -> pa.Table:
    """An index with random tags, domains, splits and contents; the last class never occurs. Some are negatives."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = [
        {
            "domain": str(rng.choice(["web", "target", "source"])),
            "split": str(rng.choice(["val", "train"], p=[0.2, 0.8])),
            "tags": np.flatnonzero(rng.random(classes - 1) < 0.4).tolist(),
            "content_hash": f"{rng.integers(images)}",
        }
        for _ in range(images)
    ]
    for row in rows:
        row["is_negative"] = not row["tags"] and bool(rng.random() < 0.5)
    return index_of(rows)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[pa.Table, tuple[str, ...]]:
    """The index and the classes of a small synthetic data set."""
    root = tmp_path_factory.mktemp("browse") / "VOC2012"
    synthetic.draw(root, train=16, val=8, size=64, classes=4)
    listing = list_voc(root, classes=root / "classes.txt")
    return check_images(listing.table).select(INDEX_SCHEMA.names), listing.classes


def test_counts_agree_with_counting_row_by_row() -> None:
    index = random_index()
    rows = index.to_pylist()
    facts = index_facts(index, NO_REJECTS, CLASSES)
    assert facts.groups == tuple(f"{d} {s}" for d in ("target", "source", "web") for s in ("train", "val"))
    for g, group in enumerate(facts.groups):
        members = [row for row in rows if f"{row['domain']} {row['split']}" == group]
        assert facts.images[g] == len(members)
        assert facts.negatives[g] == sum(row["is_negative"] for row in members) > 0
        assert facts.unlabelled[g] == sum(not row["tags"] and not row["is_negative"] for row in members) > 0
        assert facts.per_class[:, g].tolist() == [sum(k in row["tags"] for row in members) for k in range(4)]


def test_copies_are_counted_and_those_in_more_than_one_split_listed(parsed: Parsed) -> None:
    contents = [("a", "train"), ("b", "train"), ("b", "train"), ("a", "val"), ("", "train"), ("", "val")]
    index = index_of([{"content_hash": content, "split": split, "tags": [0]} for content, split in contents])
    assert index_facts(index, NO_REJECTS, CLASSES).repeats == 2
    page = parsed(browse_page(index, NO_REJECTS, CLASSES, notes=[], title="t"))
    assert page.rows["copies"][1:] == [["i0, i3"]]


def test_rejects_are_counted_by_the_start_of_their_reason(parsed: Parsed) -> None:
    reasons = ["truncated: a: b", "not an image: x", "truncated: c", "odd"]
    facts = index_facts(random_index(5), rejects_of(reasons), CLASSES)
    assert facts.reject_kinds == {"truncated": 2, "not an image": 1, "odd": 1}
    page = parsed(browse_page(random_index(5), rejects_of(reasons), CLASSES, notes=[], title="t"))
    assert ["truncated", "2"] in page.rows["rejects"]
    assert ["r0", "val", "truncated: a: b", "in/r0.jpg"] in page.rows["rejects"]


def test_of_many_rejects_the_first_are_listed(parsed: Parsed) -> None:
    reasons = ["truncated: a: b", "not an image: x", "truncated: c", "odd"]
    many = parsed(browse_page(random_index(5), rejects_of(reasons * 200), CLASSES, notes=[], title="t"))
    assert sum(len(row) == 4 for row in many.rows["rejects"]) == 1 + 500
    assert "The first 500, and 300 more; all are in rejects.parquet" in many.text
    assert ["truncated", "400"] in many.rows["rejects"]


def test_the_page_has_counts_and_pictures(drawn: tuple[pa.Table, tuple[str, ...]], parsed: Parsed) -> None:
    index, classes = drawn
    facts = index_facts(index, NO_REJECTS, classes)
    text = browse_page(index, NO_REJECTS, classes, notes=["A note."], title="Drawn")
    page = parsed(text)
    assert text == browse_page(index, NO_REJECTS, classes, notes=["A note."], title="Drawn")
    for k, name in enumerate(classes):
        train, val = facts.per_class[k].tolist()
        assert table(page, "classes")[name] == [f"{train}", f"{val}", f"{train + val}"]
    assert "A note." in page.text
    assert "Nothing was rejected." in page.text
    assert "No two files have the same content." in page.text

    pictures = page.pictures
    assert len(pictures) == sum(min(6, n) for n in facts.per_class.sum(axis=1))
    for picture in pictures:
        assert picture.format == "JPEG"
        assert max(picture.size) <= 96


def test_hostile_names_are_shown_and_do_nothing(parsed: Parsed) -> None:
    row = {"image_id": HOSTILE, "uri": HOSTILE, "domain": HOSTILE, "tags": [0, 1], "content_hash": HOSTILE}
    index = index_of([row | {"split": HOSTILE}, row | {"split": "train"}])
    rejects = rejects_of([f"{HOSTILE}: {HOSTILE}"])
    page = parsed(browse_page(index, rejects, (HOSTILE, "b\udcff"), notes=[HOSTILE], title=f"{HOSTILE}\udcff"))
    assert len(page.of("title")) == 1
    shown = HOSTILE.replace("\x00", "\N{REPLACEMENT CHARACTER}").replace("\x1b", "\N{REPLACEMENT CHARACTER}")
    assert page.rows["rejects"][-1][2] == f"{shown}: {shown}"
    assert [f"{shown}, {shown}"] in page.rows["copies"]
    assert f"{shown}\\udcff" in page.text


def test_a_broken_file_is_replaced_by_its_reason(tmp_path: Path, parsed: Parsed) -> None:
    (tmp_path / "text.jpg").write_text("no picture")
    Image.new("RGB", (9, 5), "red").save(tmp_path / "tiny.png")
    files = [str(tmp_path / "text.jpg"), str(tmp_path / "gone.jpg"), "a\x00b", "nosuch://host/x", str(tmp_path)]
    index = index_of([{"uri": uri, "tags": [0]} for uri in [*files, str(tmp_path / "tiny.png")]])
    page = parsed(browse_page(index, NO_REJECTS, CLASSES, notes=[], title="t"))
    assert len(page.pictures) == 1
    assert "not an image: expected JPEG" in page.text
    assert "No such file" in page.text
    assert "For 5, the file could not be read" in page.text


@pytest.mark.parametrize("classes", [1, 2, 200, 254])
def test_pages_with_few_and_with_many_classes_are_complete(classes: int, parsed: Parsed) -> None:
    names = tuple(f"class {k}" for k in range(classes))
    index = index_of([{"tags": sorted({n % classes, (7 * n + 1) % classes})} for n in range(600)])
    page = parsed(browse_page(index, NO_REJECTS, names, notes=[], title="t"))
    assert set(names) <= set(table(page, "classes"))
    assert len(page.of("article")) == classes
    assert "without any 0" in page.text


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["There are no images to show."]),
        ([{"tags": []}], ["Without a tag"]),
        ([{"is_negative": True}], ["None of the classes"]),
    ],
)
def test_a_page_without_tagged_images(rows: list[dict[str, Any]], words: list[str], parsed: Parsed) -> None:
    classes = tuple(f"c{k}" for k in range(30))
    text = parsed(browse_page(index_of(rows), NO_REJECTS, classes, notes=[], title="t")).text
    for word in words:
        assert word in text


def test_the_terminal_has_the_same_counts() -> None:
    index = random_index()
    facts = index_facts(index, rejects_of(["truncated: x"]), CLASSES)
    rejects = rejects_of(["truncated: x"])
    stream = StringIO()
    wide = type(console)(file=stream, width=200)
    show_index(index, rejects, (HOSTILE, *CLASSES[1:]), ["a [red]note"], wide)
    text = stream.getvalue()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    assert ["all images", *map(str, (*facts.images, 300))] in cells
    assert ["square", *map(str, (*facts.per_class[1], facts.per_class[1].sum()))] in cells
    assert ["truncated", "1"] in cells
    assert f"copies of an earlier image: {facts.repeats}" in text
    assert "a [red]note" in text
    assert "\x1b" not in text


def test_the_terminal_shows_an_empty_index() -> None:
    stream = StringIO()
    show_index(INDEX_SCHEMA.empty_table(), NO_REJECTS, CLASSES, [], type(console)(file=stream, width=200))
    assert "rejected: 0" in stream.getvalue()

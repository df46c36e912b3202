"""The source `web`: crawled folders, listed by their names alone."""

import os
from pathlib import Path

import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.index import LISTING_SCHEMA
from mcis.datasets.sources.web import list_web

CLASSES = ("cat", "cow", "dog")


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_a_crawl_is_listed_with_any_suffixes(tmp_path: Path) -> None:
    fill(tmp_path, "dog/b.jpg", "dog/b.gif", "dog/page", "cat/a b.JPG", "cat/x.html")
    found = list_web(tmp_path, CLASSES)
    assert found.classes == CLASSES
    assert found.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    rows = found.table.to_pylist()
    names = ["cat/a b.JPG", "cat/x.html", "dog/b.gif", "dog/b.jpg", "dog/page"]
    assert [r["image_id"] for r in rows] == [f"web/{name}" for name in names]
    assert [r["tags"] for r in rows] == [[0], [0], [2], [2], [2]]
    assert rows[0]["uri"] == str(tmp_path / "cat/a b.JPG")
    assert {(r["domain"], r["split"], r["mask_uri"], r["saliency_uri"]) for r in rows} == {("web", "train", None, None)}
    assert found.notes == (f"web images in {tmp_path}: none of class cow",)


def test_files_that_are_left_out_are_counted(tmp_path: Path) -> None:
    names = ("dog/.b.jpg", "dog/inner/c.jpg", "list.txt")
    fill(tmp_path / "web", *(f"{name}/a.jpg" for name in (*CLASSES, "kitten")), *names)
    fill(tmp_path, "secret")
    (tmp_path / "web/dog/link.jpg").symlink_to(tmp_path / "secret")
    (tmp_path / "web/dog/inside.jpg").symlink_to("a.jpg")
    os.mkfifo(tmp_path / "web/cat/pipe.jpg")
    with (tmp_path / "web/cat" / os.fsdecode(b"\xff.jpg")).open("w"):
        pass
    found = list_web(tmp_path / "web", CLASSES)
    listed = [f"web/{name}.jpg" for name in ("cat/a", "cow/a", "dog/a", "dog/inside")]
    assert found.table["image_id"].to_pylist() == listed
    root = f"web images in {tmp_path / 'web'}"
    assert set(found.notes) == {
        f"{root}: left out 2 file(s) or folder(s) that are no image",
        f"{root}: left out 1 link(s) that lead out of {tmp_path / 'web'}",
        f"{root}: left out 1 pipe(s) or broken link(s)",
        f"{root}: left out 1 name(s) that are no UTF-8",
        f"{root}: left out 1 folder(s) that stand for no class: kitten",
    }


def test_a_saliency_map_is_taken_where_its_stem_is_unique(tmp_path: Path) -> None:
    fill(tmp_path / "web", "dog/b.jpg", "dog/b.gif", "dog/c.jpg", "cat/b.jpg", "cat/d", "cow/e.jpg")
    fill(tmp_path / "maps", "dog/b.png", "dog/c.png", "cat/b.png", "cat/d.png")
    found = list_web(tmp_path / "web", CLASSES, saliency=tmp_path / "maps")
    maps = {r["image_id"]: r["saliency_uri"] for r in found.table.to_pylist()}
    expected = {"web/cat/b.jpg": "cat/b.png", "web/cat/d": "cat/d.png", "web/dog/c.jpg": "dog/c.png"}
    without = dict.fromkeys(("web/cow/e.jpg", "web/dog/b.gif", "web/dog/b.jpg"))
    assert maps == {name: str(tmp_path / "maps" / path) for name, path in expected.items()} | without
    assert any("2 share a stem with another" in note for note in found.notes)
    assert f"web images in {tmp_path / 'web'}: no saliency map for 3 of 6" in found.notes


def test_wrong_folders_are_reported_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*/none"):
        list_web(tmp_path / "none", CLASSES)
    with pytest.raises(UserError, match="holds an image; there are none"):
        list_web(tmp_path, CLASSES)
    fill(tmp_path, "dogs/a.jpg")
    with pytest.raises(UserError, match="holds an image; there are dogs") as caught:
        list_web(tmp_path, CLASSES)
    assert "cat, cow, dog" in caught.value.expected
    assert "rename" in caught.value.remedy
    fill(tmp_path, "dog/.a.jpg")
    with pytest.raises(UserError, match="holds an image; there are dog, dogs"):
        list_web(tmp_path, CLASSES)
    fill(tmp_path, "dog/a.jpg")
    with pytest.raises(UserError, match=r"no folder .*/none"):
        list_web(tmp_path, CLASSES, saliency=tmp_path / "none")

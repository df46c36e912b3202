"""The sources of class folders, `single` and `web`: their classes, and what is left out."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError
from mcis.datasets.index import LISTING_SCHEMA, Listing, merge
from mcis.datasets.sources.class_folders import list_single_label, list_web, voc_folders

CLASSES = ("cat", "cow", "dog")
DOG, CAT, TENCH = "n02099601", "n02123045", "n01440764"  # golden retriever, tabby, a fish


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """Three images of two VOC classes, and two of a fish; no file holds anything."""
    root = tmp_path / "ILSVRC"
    images = root / "Data/CLS-LOC/train"
    names = (f"{DOG}/{DOG}_10", f"{DOG}/{DOG}_2", f"{CAT}/{CAT}_1", f"{TENCH}/a", f"{TENCH}/b")
    fill(images, *(f"{name}.JPEG" for name in names))
    return root


def listed(root: Path, **options: Any) -> Listing:
    return list_single_label(root, VOC_CLASSES, **options)


def test_every_voc_class_has_synsets_and_a_synset_has_one_class() -> None:
    imagenet = {folder: name for folder, name in voc_folders().items() if "." not in folder}
    assert set(imagenet.values()) == set(VOC_CLASSES)
    assert all(re.fullmatch(r"n\d{8}", synset) for synset in imagenet)
    of = {name: [s for s, c in imagenet.items() if c == name] for name in VOC_CLASSES}
    assert len(of["dog"]) == 118 + 1, "ILSVRC's breeds and dog itself"
    assert len(of["bird"]) == 59 + 1
    assert len(imagenet) == 258
    assert not imagenet.keys() & {TENCH, "n02115641", "n02687172", "n03930630"}, "fish, dingo, aircraft carrier, pickup"


@pytest.mark.parametrize("above", [".", "Data", "Data/CLS-LOC", "Data/CLS-LOC/train"])
def test_imagenet_is_listed_from_any_folder_above(imagenet: Path, above: str) -> None:
    found = listed(imagenet / above)
    assert found.classes == VOC_CLASSES
    assert found.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    rows = found.table.to_pylist()
    names = (f"{DOG}/{DOG}_10", f"{DOG}/{DOG}_2", f"{CAT}/{CAT}_1")
    assert [r["image_id"] for r in rows] == [f"single/{name}.JPEG" for name in names]
    assert [r["tags"] for r in rows] == [[11], [11], [7]]
    others = {(r["domain"], r["split"], r["mask_uri"], r["saliency_uri"]) for r in rows}
    assert others == {("source", "train", None, None)}
    assert rows[0]["uri"] == str(imagenet / f"Data/CLS-LOC/train/{DOG}/{DOG}_10.JPEG")
    assert any(f"left out 1 folder(s) that stand for no class: {TENCH}" in note for note in found.notes)
    assert any("none of class aeroplane, " in note and "dog" not in note for note in found.notes)


def test_caltech_is_listed(tmp_path: Path) -> None:
    fill(tmp_path / "256_ObjectCategories", "145.motorbikes-101/145_0001.jpg", "056.dog/056_0001.jpg", "056.dog/greg/x")
    fill(tmp_path / "256_ObjectCategories", "257.clutter/257_0001.jpg")
    names = ["single/056.dog/056_0001.jpg", "single/145.motorbikes-101/145_0001.jpg"]
    for root in (tmp_path, tmp_path / "256_ObjectCategories"):
        found = listed(root)
        assert found.table["image_id"].to_pylist() == names
        assert found.table["tags"].to_pylist() == [[11], [13]]
        assert any("left out 1 folder(s) that stand for no class: 257.clutter" in note for note in found.notes)
        assert any("left out 1 file(s) or folder(s) that are no image" in note for note in found.notes)


# --- plain class folders


def test_folders_named_as_the_classes_are_listed(tmp_path: Path) -> None:
    fill(tmp_path, "dog/b.png", "dog/a.JPG", "cat/x.webp", "cat/.notes", "zebra/z.jpg", "classes.txt")
    found = listed(tmp_path)
    rows = found.table.to_pylist()
    assert [r["image_id"] for r in rows] == ["single/cat/x.webp", "single/dog/a.JPG", "single/dog/b.png"]
    assert [r["tags"] for r in rows] == [[7], [11], [11]]
    assert rows[1]["uri"] == str(tmp_path / "dog/a.JPG")
    assert {(r["domain"], r["split"]) for r in rows} == {("source", "train")}
    assert any("left out 1 folder(s) that stand for no class: zebra" in note for note in found.notes)
    assert any("left out 1 file(s) or folder(s) that are no image" in n for n in found.notes)


def test_a_class_file_gives_folders_of_any_name_a_class(tmp_path: Path) -> None:
    fill(tmp_path / "photos", "chats/1.png", "chiens/2.png", "dog/3.png")
    (tmp_path / "names").write_text("chats cat\nchiens dog\n")
    found = listed(tmp_path / "photos", classes=tmp_path / "names")
    assert found.table["image_id"].to_pylist() == ["single/chats/1.png", "single/chiens/2.png"]
    assert found.table["tags"].to_pylist() == [[7], [11]]
    assert any("left out 1 folder(s) that stand for no class: dog" in note for note in found.notes)


def test_folders_of_several_data_sets_lie_beside_each_other(tmp_path: Path) -> None:
    fill(tmp_path, f"{DOG}/1.JPEG", "056.dog/2.jpg", "cat/3.png")
    found = listed(tmp_path).table["image_id"].to_pylist()
    assert found == ["single/056.dog/2.jpg", "single/cat/3.png", f"single/{DOG}/1.JPEG"]


def test_classes_that_are_named_as_another_layouts_folders_are_plain(tmp_path: Path) -> None:
    fill(tmp_path, f"{DOG}/1.JPEG", f"{CAT}/2.png")
    found = list_single_label(tmp_path, (CAT, DOG))
    assert found.table["image_id"].to_pylist() == [f"single/{DOG}/1.JPEG", f"single/{CAT}/2.png"]
    assert found.table["tags"].to_pylist() == [[1], [0]]


def test_the_class_train_is_a_folder_of_images(tmp_path: Path) -> None:
    """Though ImageNet keeps its class folders in a folder of that name."""
    fill(tmp_path / "plain", "train/locomotive.jpg")
    assert listed(tmp_path / "plain").table["tags"].to_pylist() == [[18]]


def test_a_class_file_replaces_the_table(imagenet: Path, tmp_path: Path) -> None:
    (tmp_path / "wnids").write_text(f"{TENCH} cat\r\n\nn00000001\tdog\n")
    found = listed(imagenet, classes=tmp_path / "wnids")
    assert found.table["image_id"].to_pylist() == [f"single/{TENCH}/a.JPEG", f"single/{TENCH}/b.JPEG"]
    assert found.table["tags"].to_pylist() == [[7], [7]]
    assert any("names 1 folder(s) that are not in" in note and "n00000001" in note for note in found.notes)


BAD_CLASSES = [
    (f"{DOG} dgo", r"names unknown classes: dgo\n", "did you mean dog?"),
    (f"\n{DOG}", f"line 2: no class name for {DOG}", "name its class"),
    (f"{DOG} dog\n{DOG} cat", f"line 2: {DOG} a second time", "delete"),
    ("", "is empty", "leave it empty"),
]


@pytest.mark.parametrize(("text", "found", "remedy"), BAD_CLASSES, ids=[found for _, found, _ in BAD_CLASSES])
def test_a_wrong_class_file_has_a_remedy(imagenet: Path, tmp_path: Path, text: str, found: str, remedy: str) -> None:
    (tmp_path / "classes").write_text(text)
    with pytest.raises(UserError, match=found) as caught:
        listed(imagenet, classes=tmp_path / "classes")
    assert remedy in caught.value.remedy


def test_wrong_folders_are_errors(imagenet: Path, tmp_path: Path) -> None:
    for option, kind in (("saliency", "folder"), ("classes", "file")):
        with pytest.raises(UserError, match=f"no {kind} .*/none"):
            listed(imagenet, **{option: tmp_path / "none"})
    with pytest.raises(UserError, match="no folder"):
        listed(tmp_path / "none")
    (tmp_path / "empty/dog").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no folder with images in .* stands for one of the 20 classes; there are dog"):
        listed(tmp_path / "empty")
    with pytest.raises(UserError, match=rf"of the 1 classes; there are {TENCH}, {DOG}, {CAT}\n.*ImageNet"):
        list_single_label(imagenet / "Data/CLS-LOC/train", ("teapot",))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="binary cannot be read"):
        listed(imagenet, classes=tmp_path / "binary")


def test_listings_are_merged(imagenet: Path, tmp_path: Path) -> None:
    fill(tmp_path / "caltech", "056.dog/a.jpg")
    first, second = listed(imagenet), listed(tmp_path / "caltech")
    both = merge(first, second)
    assert both.table["image_id"].to_pylist()[2:] == [f"single/{CAT}/{CAT}_1.JPEG", "single/056.dog/a.jpg"]
    assert both.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    assert both.notes == first.notes + second.notes
    assert merge(first).table.equals(first.table)
    with pytest.raises(UserError, match=rf"3 image\(s\) in two sources: single/{DOG}/{DOG}_10"):
        merge(first, second, first)


# --- web


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
    fill(tmp_path / "web", *(f"{name}/a.jpg" for name in ("cat", "dog", "kitten")), *names)
    fill(tmp_path, "secret", "other/a.jpg")
    (tmp_path / "web/dog/link.jpg").symlink_to(tmp_path / "secret")
    (tmp_path / "web/dog/gone.jpg").symlink_to("absent")
    (tmp_path / "web/cow").symlink_to(tmp_path / "other")
    (tmp_path / "web/dog/inside.jpg").symlink_to("a.jpg")
    os.mkfifo(tmp_path / "web/cat/pipe.jpg")
    (tmp_path / "web/cat" / os.fsdecode(b"\xff.jpg")).touch()
    found = list_web(tmp_path / "web", CLASSES)
    listed = [f"web/{name}.jpg" for name in ("cat/a", "dog/a", "dog/inside")]
    assert found.table["image_id"].to_pylist() == listed
    root = f"web images in {tmp_path / 'web'}"
    assert set(found.notes) == {
        f"{root}: left out 2 file(s) or folder(s) that are no image",
        f"{root}: left out 2 link(s) that lead out of {tmp_path / 'web'}",
        f"{root}: left out 2 pipe(s) or broken link(s)",
        f"{root}: left out 1 name(s) that are not UTF-8",
        f"{root}: left out 1 folder(s) that stand for no class: kitten",
        f"{root}: none of class cow",
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


def test_wrong_folders_of_a_crawl_are_reported_with_a_remedy(tmp_path: Path) -> None:
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

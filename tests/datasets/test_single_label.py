"""The source `single`: ImageNet's, Caltech-256's and plain class folders, their classes, and what is left out."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError
from mcis.datasets.index import LISTING_SCHEMA, Listing, merge
from mcis.datasets.sources.single_label import list_single_label
from mcis.datasets.sources.synsets import IMAGENET

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
    assert set(IMAGENET.values()) == set(VOC_CLASSES)
    assert all(re.fullmatch(r"n\d{8}", synset) for synset in IMAGENET)
    of = {name: [s for s, c in IMAGENET.items() if c == name] for name in VOC_CLASSES}
    assert len(of["dog"]) == 118 + 1, "ILSVRC's breeds and dog itself"
    assert len(of["bird"]) == 59 + 1
    assert len(IMAGENET) == 258
    assert not IMAGENET.keys() & {TENCH, "n02115641", "n02687172", "n03930630"}, "fish, dingo, aircraft carrier, pickup"


@pytest.mark.parametrize("above", [".", "Data", "Data/CLS-LOC", "Data/CLS-LOC/train"])
def test_imagenet_is_listed_from_any_folder_above(imagenet: Path, above: str) -> None:
    found = listed(imagenet / above)
    assert found.classes == VOC_CLASSES
    assert found.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    rows = found.table.to_pylist()
    assert [r["image_id"] for r in rows] == [f"single/{DOG}/{DOG}_10", f"single/{DOG}/{DOG}_2", f"single/{CAT}/{CAT}_1"]
    assert [r["tags"] for r in rows] == [[11], [11], [7]]
    others = {(r["domain"], r["split"], r["mask_uri"], r["saliency_uri"]) for r in rows}
    assert others == {("source", "train", None, None)}
    assert rows[0]["uri"] == str(imagenet / f"Data/CLS-LOC/train/{DOG}/{DOG}_10.JPEG")
    assert any(f"left out 1 folder(s) that stand for no class: {TENCH}" in note for note in found.notes)
    assert any("none of class aeroplane, " in note and "dog" not in note for note in found.notes)


def test_caltech_is_listed(tmp_path: Path) -> None:
    fill(tmp_path / "256_ObjectCategories", "145.motorbikes-101/145_0001.jpg", "056.dog/056_0001.jpg", "056.dog/greg/x")
    fill(tmp_path / "256_ObjectCategories", "257.clutter/257_0001.jpg")
    for root in (tmp_path, tmp_path / "256_ObjectCategories"):
        found = listed(root)
        assert found.table["image_id"].to_pylist() == ["single/056.dog/056_0001", "single/145.motorbikes-101/145_0001"]
        assert found.table["tags"].to_pylist() == [[11], [13]]
        assert any("left out 1 folder(s) that stand for no class: 257.clutter" in note for note in found.notes)
        assert any("left out 1 file(s) or folder(s) that are no image" in note for note in found.notes)


# --- plain class folders


def test_folders_named_as_the_classes_are_listed(tmp_path: Path) -> None:
    fill(tmp_path, "dog/b.png", "dog/a.JPG", "cat/x.webp", "cat/notes.txt", "zebra/z.jpg", "classes.txt")
    found = listed(tmp_path)
    rows = found.table.to_pylist()
    assert [r["image_id"] for r in rows] == ["single/cat/x", "single/dog/a", "single/dog/b"]
    assert [r["tags"] for r in rows] == [[7], [11], [11]]
    assert rows[1]["uri"] == str(tmp_path / "dog/a.JPG")
    assert {(r["domain"], r["split"]) for r in rows} == {("source", "train")}
    assert any("left out 1 folder(s) that stand for no class: zebra" in note for note in found.notes)
    assert any("left out 1 file(s) or folder(s) that are no image (.jpeg, .jpg, .png" in n for n in found.notes)


def test_a_class_file_gives_folders_of_any_name_a_class(tmp_path: Path) -> None:
    fill(tmp_path / "photos", "chats/1.png", "chiens/2.png", "dog/3.png")
    (tmp_path / "names").write_text("chats cat\nchiens dog\n")
    found = listed(tmp_path / "photos", classes=tmp_path / "names")
    assert found.table["image_id"].to_pylist() == ["single/chats/1", "single/chiens/2"]
    assert found.table["tags"].to_pylist() == [[7], [11]]
    assert any("left out 1 folder(s) that stand for no class: dog" in note for note in found.notes)


def test_folders_of_several_data_sets_lie_beside_each_other(tmp_path: Path) -> None:
    fill(tmp_path, f"{DOG}/1.JPEG", "056.dog/2.jpg", "cat/3.png")
    assert listed(tmp_path).table["image_id"].to_pylist() == ["single/056.dog/2", "single/cat/3", f"single/{DOG}/1"]


def test_classes_that_are_named_as_another_layouts_folders_are_plain(tmp_path: Path) -> None:
    fill(tmp_path, f"{DOG}/1.JPEG", f"{CAT}/2.png")
    found = list_single_label(tmp_path, (CAT, DOG))
    assert found.table["image_id"].to_pylist() == [f"single/{DOG}/1", f"single/{CAT}/2"]
    assert found.table["tags"].to_pylist() == [[1], [0]]


def test_the_class_train_is_a_folder_of_images(tmp_path: Path) -> None:
    """Though ImageNet keeps its class folders in a folder of that name."""
    fill(tmp_path / "plain", "train/locomotive.jpg")
    assert listed(tmp_path / "plain").table["tags"].to_pylist() == [[18]]


def test_a_class_file_replaces_the_table(imagenet: Path, tmp_path: Path) -> None:
    (tmp_path / "wnids").write_text(f"{TENCH} cat\r\n\nn00000001\tdog\n")
    found = listed(imagenet, classes=tmp_path / "wnids")
    assert found.table["image_id"].to_pylist() == [f"single/{TENCH}/a", f"single/{TENCH}/b"]
    assert found.table["tags"].to_pylist() == [[7], [7]]
    assert any("names 1 folder(s) that are not in" in note and "n00000001" in note for note in found.notes)


def test_a_subset_lists_images_in_its_order(imagenet: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{CAT}/{CAT}_1.JPEG\n\n./{DOG}//{DOG}_2.JPEG\n")
    found = listed(imagenet, subset=tmp_path / "list.txt")
    assert found.table["image_id"].to_pylist() == [f"single/{CAT}/{CAT}_1", f"single/{DOG}/{DOG}_2"]
    assert any("2 of 3 are on the list" in note for note in found.notes)


def test_saliency_maps_may_be_absent_for_some_images(imagenet: Path, tmp_path: Path) -> None:
    fill(tmp_path / "maps", f"{DOG}/{DOG}_2.png", f"{TENCH}/a.png")
    found = listed(imagenet, saliency=tmp_path / "maps")
    assert found.table["saliency_uri"].to_pylist() == [None, str(tmp_path / f"maps/{DOG}/{DOG}_2.png"), None]
    assert any("no saliency map for 2 of 3" in note for note in found.notes)


def test_links_out_of_the_folder_and_other_files_are_left_out_and_counted(imagenet: Path, tmp_path: Path) -> None:
    folder = imagenet / f"Data/CLS-LOC/train/{DOG}"
    fill(tmp_path, "secret.JPEG", f"other/{DOG}_7.JPEG")
    (folder / "out.JPEG").symlink_to(tmp_path / "secret.JPEG")
    (folder / "within.JPEG").symlink_to(folder / f"{DOG}_2.JPEG")
    (folder / "gone.JPEG").symlink_to(folder / "absent")
    (folder.parent / "n02085620").symlink_to(tmp_path / "other")
    os.mkfifo(folder / "pipe.JPEG")
    (folder / "notes.txt").touch()
    with (folder / os.fsdecode(b"\xff.JPEG")).open("w"):
        pass
    found = listed(imagenet)
    names = [i.split("/")[-1] for i in found.table["image_id"].to_pylist()]
    assert names == [f"{DOG}_10", f"{DOG}_2", "within", f"{CAT}_1"]
    for note in (
        f"left out 2 link(s) that lead out of {folder.parent}",
        "left out 2 pipe(s) or broken link(s)",
        "left out 1 name(s) that are no UTF-8",
        "left out 1 file(s) or folder(s) that are no image",
    ):
        assert any(note in n for n in found.notes), note


BAD_LISTS = [
    (f"{DOG}/absent.JPEG", rf"names 1 image\(s\) that are not in .*: {DOG}/absent\.JPEG\n", "take them off"),
    (f"{TENCH}/a.JPEG", rf"names 1 image\(s\) of folders that stand for no class: {TENCH}/a\.JPEG\n", "`classes`"),
    (f"../train/{DOG}/{DOG}_2.JPEG", r"line 1: \.\./train/.* lies outside of", "take it off"),
    ("/etc/hostname", r"line 1: /etc/hostname lies outside of", "take it off"),
    (f"{DOG}/a\0b.JPEG", "lies outside of", "take it off"),
    (f"{DOG}/{DOG}_2.JPEG\n{DOG}/./{DOG}_2.JPEG", "line 2: .* a second time", "delete"),
    ("\n \n", "is empty", "none to take all"),
]


@pytest.mark.parametrize(("text", "found", "remedy"), BAD_LISTS, ids=[found for _, found, _ in BAD_LISTS])
def test_a_wrong_subset_is_reported_with_a_remedy(
    imagenet: Path, tmp_path: Path, text: str, found: str, remedy: str
) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(UserError, match=found) as caught:
        listed(imagenet, subset=tmp_path / "list.txt")
    assert remedy in caught.value.remedy


BAD_CLASSES = [
    (f"{DOG} dgo", r"names unknown classes: dgo\n", "did you mean dog?"),
    (f"\n{DOG}", f"line 2: no class name for {DOG}", "name its class"),
    (f"{DOG} dog\n{DOG} cat", f"line 2: {DOG} a second time", "delete"),
    ("", "is empty", "leave it off"),
]


@pytest.mark.parametrize(("text", "found", "remedy"), BAD_CLASSES, ids=[found for _, found, _ in BAD_CLASSES])
def test_a_wrong_class_file_is_reported_with_a_remedy(
    imagenet: Path, tmp_path: Path, text: str, found: str, remedy: str
) -> None:
    (tmp_path / "classes").write_text(text)
    with pytest.raises(UserError, match=found) as caught:
        listed(imagenet, classes=tmp_path / "classes")
    assert remedy in caught.value.remedy


def test_wrong_folders_are_errors(imagenet: Path, tmp_path: Path) -> None:
    for options, found in (
        ({"saliency": tmp_path / "none"}, "no folder .*/none"),
        ({"subset": tmp_path / "none"}, "no file .*/none"),
        ({"classes": tmp_path / "none"}, "no file .*/none"),
    ):
        with pytest.raises(UserError, match=found):
            listed(imagenet, **options)
    with pytest.raises(UserError, match="no folder"):
        listed(tmp_path / "none")
    (tmp_path / "empty/dog").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no folder with images in .* stands for one of the 20 classes; there are dog"):
        listed(tmp_path / "empty")
    with pytest.raises(UserError, match=rf"of the 1 classes; there are {TENCH}, {DOG}, {CAT}\n.*ImageNet"):
        list_single_label(imagenet / "Data/CLS-LOC/train", ("teapot",))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="binary cannot be read"):
        listed(imagenet, subset=tmp_path / "binary")


def test_two_images_of_the_same_stem_are_an_error(imagenet: Path) -> None:
    fill(imagenet, f"Data/CLS-LOC/train/{DOG}/{DOG}_2.jpg")
    with pytest.raises(UserError, match=f"1 images in .* there twice, by different suffixes: {DOG}/{DOG}_2"):
        listed(imagenet)


def test_listings_are_merged(imagenet: Path, tmp_path: Path) -> None:
    fill(tmp_path / "caltech", "056.dog/a.jpg")
    first, second = listed(imagenet), listed(tmp_path / "caltech")
    both = merge(first, second)
    assert both.table["image_id"].to_pylist()[2:] == [f"single/{CAT}/{CAT}_1", "single/056.dog/a"]
    assert both.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    assert both.notes == first.notes + second.notes
    assert merge(first).table.equals(first.table)
    with pytest.raises(UserError, match=rf"3 image\(s\) are in two sources: single/{DOG}/{DOG}_10"):
        merge(first, second, first)

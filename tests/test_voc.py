"""The VOC source: what its lists come to, and each way in which a devkit can be wrong, named with a remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError
from mcis.datasets.index import LISTING_SCHEMA, Listing
from mcis.datasets.synthetic import draw
from mcis.datasets.voc import list_voc

TRAIN = {"t0": [0], "t1": [1, 2], "t2": [2, 0], "t3": []}
VAL = {"v0": [1], "v1": []}


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    """Three classes, four training images, one of them without a tag, two to predict; no file holds anything."""
    root = tmp_path / "VOC2012"
    for folder in ("JPEGImages", "SegmentationClassAug", "SaliencyMaps", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True)
    (root / "classes.txt").write_text("cat\ndog\ncow\n")
    for name, split in (("train_aug", TRAIN), ("val", VAL)):
        write_lists(root, name, split)
        for image_id in split:
            (root / "JPEGImages" / f"{image_id}.jpg").touch()
            (root / "SegmentationClassAug" / f"{image_id}.png").touch()
    for image_id in TRAIN:
        (root / "SaliencyMaps" / f"{image_id}.png").touch()
    return root


def write_lists(root: Path, name: str, tags: dict[str, list[int]]) -> None:
    lists = root / "ImageSets/Segmentation"
    (lists / f"{name}.txt").write_text("".join(f"{image_id}\n" for image_id in tags))
    (lists / f"{name}_cls.txt").write_text("".join(f"{i} {' '.join(map(str, t))}\n" for i, t in tags.items()))


def listed(root: Path, **options: str) -> Listing:
    return list_voc(root, classes=root / "classes.txt", **options)


def append(root: Path, name: str, line: str) -> None:
    with (root / "ImageSets/Segmentation" / name).open("a") as file:
        file.write(line + "\n")


def test_a_devkit_comes_to_its_rows(devkit: Path) -> None:
    found = listed(devkit)
    assert found.classes == ("cat", "dog", "cow")
    assert found.notes == ()
    assert found.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    rows = found.table.to_pylist()
    assert [r["image_id"] for r in rows] == [*TRAIN, *VAL]
    assert [r["split"] for r in rows] == ["train"] * 4 + ["val"] * 2
    assert [r["tags"] for r in rows] == [[0], [1, 2], [0, 2], [], [1], []], "ascending"
    assert {r["domain"] for r in rows} == {"target"}
    assert [r["uri"] for r in rows] == [str(devkit / "JPEGImages" / f"{i}.jpg") for i in [*TRAIN, *VAL]]
    assert [r["mask_uri"] for r in rows] == [str(devkit / "SegmentationClassAug" / f"{i}.png") for i in [*TRAIN, *VAL]]
    salient = [str(devkit / "SaliencyMaps" / f"{i}.png") for i in TRAIN]
    assert [r["saliency_uri"] for r in rows] == [*salient, None, None]


def test_the_embedded_data_set_is_a_devkit(tmp_path: Path) -> None:
    draw(tmp_path / "drawn", train=8, val=4, size=48, classes=4)
    found = list_voc(tmp_path / "drawn", classes=tmp_path / "drawn/classes.txt")
    assert len(found.table) == 12
    assert found.table["saliency_uri"].null_count == 4


def test_classes_are_vocs_where_no_file_names_them(devkit: Path) -> None:
    write_lists(devkit, "train_aug", {"t0": list(range(20)), "t1": [], "t2": [], "t3": [19]})
    assert list_voc(devkit).classes == VOC_CLASSES


def test_absent_masks_and_saliency_are_null_and_masks_are_noted(devkit: Path) -> None:
    found = listed(devkit, masks="none", saliency="none")
    assert found.table["mask_uri"].null_count == found.table["saliency_uri"].null_count == 6
    assert any("none: nothing is scored" in note for note in found.notes)


def test_masks_and_saliency_may_lie_elsewhere(devkit: Path, tmp_path: Path) -> None:
    (devkit / "SaliencyMaps").rename(tmp_path / "elsewhere")
    found = listed(devkit, saliency=str(tmp_path / "elsewhere"))
    assert found.table["saliency_uri"][0].as_py() == str(tmp_path / "elsewhere/t0.png")


def test_other_lists_are_found_by_name(devkit: Path) -> None:
    write_lists(devkit, "mine", {"t0": [0, 1], "t1": [2]})
    found = listed(devkit, train_list="mine")
    assert found.table["image_id"].to_pylist() == ["t0", "t1", "v0", "v1"]


def test_lists_written_by_other_editors_are_read(devkit: Path) -> None:
    """With a byte order mark, Windows' line ends, blank lines and spaces."""
    lists = devkit / "ImageSets/Segmentation"
    (lists / "val.txt").write_bytes(b"\xef\xbb\xbfv0\r\n\r\n  v1  \r\n")
    (lists / "val_cls.txt").write_bytes(b"\xef\xbb\xbfv0\t1\r\n\r\nv1\r\n")
    assert listed(devkit).table.slice(4)["tags"].to_pylist() == [[1], []]


Change = Callable[[Path], object]
LISTS = "ImageSets/Segmentation"


def gone(name: str) -> Change:
    """Moves a file or folder of the devkit away."""
    return lambda root: (root / name).rename(root / "moved away")


def line(name: str, text: str) -> Change:
    """Adds a line to a list, by default its fifth."""
    return lambda root: append(root, name, text)


def only(name: str, text: str) -> Change:
    """Puts a text in a list's place."""
    return lambda root: (root / LISTS / name).write_text(text)


TAGS = "train_aug_cls.txt"
WRONG = [
    (gone("JPEGImages"), r"no folder .*/JPEGImages", "--voc"),
    (gone(LISTS), rf"no folder .*/{LISTS}", "--voc"),
    (gone(f"{LISTS}/train_aug.txt"), r"no list .*/train_aug\.txt", "data.train_list"),
    (gone(f"{LISTS}/val.txt"), r"no list .*/val\.txt", "data.val_list"),
    (gone(f"{LISTS}/val_cls.txt"), r"no list .*/val_cls\.txt", "val_cls.txt"),
    (gone("classes.txt"), r"no file of class names at .*/classes\.txt", "classes.txt"),
    (only("train_aug.txt", "\n \n"), r"train_aug\.txt lists no image", "data.train_list"),
    (only("val.txt", ""), r"val\.txt lists no image", "data.val_list"),
    (gone("JPEGImages/t1.jpg"), r"train_aug\.txt names 1 image\(s\) that are not in .*: t1\n", "add the images"),
    (line(TAGS, "x 3"), r"train_aug_cls\.txt, line 5: class index 3 of image x", "data.classes"),
    (line(TAGS, "x -1"), r"line 5: class index -1 of image x", "data.classes"),
    (line(TAGS, "x 1 cat"), r"line 5: class index cat of image x", "data.classes"),
    (line(TAGS, "x 1.0"), r"line 5: class index 1\.0 of image x", "data.classes"),
    (line(TAGS, "x \N{ARABIC-INDIC DIGIT TWO}"), r"line 5: class index . of image x", "data.classes"),
    (line(TAGS, "x " + "9" * 5000), r"line 5: class index 999", "data.classes"),
    (line("val_cls.txt", "\n\nv9 7"), r"val_cls\.txt, line 5: class index 7 of image v9", "data.classes"),
    (line(TAGS, "t0 1"), r"train_aug_cls\.txt, line 5: t0 a second time", "merge"),
    (only(TAGS, "t0 0\nt1 1 2\n"), r"train_aug_cls\.txt has no line for t2, t3\n", "id alone"),
    (line("val.txt", "t2"), r"val_cls\.txt has no line for t2\n", "add the missing lines"),
    (line("train_aug.txt", "t2"), r"image t2 is listed twice in .*/train_aug\.txt", "delete"),
    (line("train_aug.txt", "t0 -1"), r"train_aug\.txt, line 5: t0, -1", "leave the id alone"),
    (gone("SaliencyMaps/t2.png"), r"no saliency map in .*/SaliencyMaps for 1 of 4 .*: t2\n", "=crf"),
]


@pytest.mark.parametrize(("change", "found", "remedy"), WRONG, ids=[found for _, found, _ in WRONG])
def test_what_is_wrong_is_named_with_a_remedy(devkit: Path, change: Change, found: str, remedy: str) -> None:
    change(devkit)
    with pytest.raises(UserError, match=found) as caught:
        listed(devkit)
    assert remedy in caught.value.remedy
    assert caught.value.expected


def test_an_image_in_both_splits_is_named(devkit: Path) -> None:
    append(devkit, "val.txt", "t2")
    append(devkit, "val_cls.txt", "t2 2")
    with pytest.raises(UserError, match=r"image t2 is listed in .*/val\.txt and in train_aug\.txt"):
        listed(devkit)


@pytest.mark.parametrize("split", ["train_aug", "val"])
def test_a_class_without_a_training_image_is_named(devkit: Path, split: str) -> None:
    """An image of the other split does not help."""
    write_lists(devkit, "train_aug", {"t0": [0], "t1": [2] if split == "train_aug" else [1], "t2": [0], "t3": []})
    with pytest.raises(UserError, match=r"no training image of class (dog|cow) in train_aug\.txt") as caught:
        listed(devkit)
    assert ("dog" if split == "train_aug" else "cow") in caught.value.found
    assert "data.classes" in caught.value.remedy


def test_an_empty_folder_of_saliency_maps_is_no_absent_one(devkit: Path) -> None:
    for path in (devkit / "SaliencyMaps").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"no saliency map in .*/SaliencyMaps for 4 of 4"):
        listed(devkit)


@pytest.mark.parametrize("name", ["../secret", "sub/inner", "/etc/hostname", ".", "..", "a\0b", "T0", "*"])
def test_ids_name_files_of_the_folder_alone(devkit: Path, name: str) -> None:
    (devkit / "secret.jpg").touch()
    (devkit / "JPEGImages/sub").mkdir()
    (devkit / "JPEGImages/sub/inner.jpg").touch()
    append(devkit, "train_aug.txt", name)
    append(devkit, "train_aug_cls.txt", f"{name} 0")
    with pytest.raises(UserError, match=r"train_aug\.txt names 1 image\(s\) that are not in"):
        listed(devkit)


@pytest.mark.parametrize("name", ["train_aug.txt", "train_aug_cls.txt"])
def test_a_list_that_is_no_text_is_named(devkit: Path, name: str) -> None:
    (devkit / "ImageSets/Segmentation" / name).write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match=rf"{name} cannot be read"):
        listed(devkit)

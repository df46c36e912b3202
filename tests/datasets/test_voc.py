"""The source `voc`: the rows of its lists, and the ways in which a devkit can be wrong, each reported with a remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import encode_labels
from mcis.datasets.images.masks import decode_mask
from mcis.datasets.index import LISTING_SCHEMA, Listing
from mcis.datasets.sources.voc import list_voc

TRAIN = {"t0": [0], "t1": [1, 2], "t2": [2, 0], "t3": []}
VAL = {"v0": [1], "v1": []}
LISTS = "ImageSets/Segmentation"


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    """Three classes; empty files for four training images, one of them without a tag, and two val images."""
    root = tmp_path / "VOC2012"
    for folder in ("JPEGImages", "SegmentationClassAug", "SaliencyMaps", LISTS):
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
    """Writes the list of ids and the list of tags."""
    tag_lines = [f"{image_id} {' '.join(map(str, indices))}\n" for image_id, indices in tags.items()]
    (root / LISTS / f"{name}.txt").write_text("".join(f"{image_id}\n" for image_id in tags))
    (root / LISTS / f"{name}_cls.txt").write_text("".join(tag_lines))


def listed(root: Path, **options: Any) -> Listing:
    return list_voc(root, classes=root / "classes.txt", **options)


# --- rows


def test_devkit_becomes_rows(devkit: Path) -> None:
    listing = listed(devkit)

    assert listing.classes == ("cat", "dog", "cow")
    assert listing.notes == ()
    assert listing.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    ids = [*TRAIN, *VAL]
    columns = listing.table.to_pydict()
    assert columns["image_id"] == ids
    assert columns["split"] == ["train"] * 4 + ["val"] * 2
    assert columns["tags"] == [[0], [1, 2], [0, 2], [], [1], []]  # ascending
    assert columns["domain"] == ["target"] * 6
    assert columns["uri"] == [str(devkit / "JPEGImages" / f"{image_id}.jpg") for image_id in ids]
    assert columns["mask_uri"] == [str(devkit / "SegmentationClassAug" / f"{image_id}.png") for image_id in ids]
    saliency = [str(devkit / "SaliencyMaps" / f"{image_id}.png") for image_id in TRAIN]
    assert columns["saliency_uri"] == [*saliency, None, None]


def test_default_classes_are_those_of_voc(devkit: Path) -> None:
    write_lists(devkit, "train_aug", {"t0": list(range(20)), "t1": [], "t2": [], "t3": [19]})
    assert list_voc(devkit).classes == VOC_CLASSES


def test_absent_folder_of_masks_is_noted(devkit: Path) -> None:
    listing = listed(devkit, truth_masks="none")
    assert listing.table["mask_uri"].null_count == 6
    assert listing.notes == ("no folder of ground-truth masks none: nothing is scored",)


def test_absent_folder_of_saliency_maps_is_accepted(devkit: Path) -> None:
    assert listed(devkit, saliency="none").table["saliency_uri"].null_count == 6


def test_saliency_maps_may_be_outside_of_the_devkit(devkit: Path, tmp_path: Path) -> None:
    (devkit / "SaliencyMaps").rename(tmp_path / "elsewhere")
    listing = listed(devkit, saliency=str(tmp_path / "elsewhere"))
    assert listing.table["saliency_uri"][0].as_py() == str(tmp_path / "elsewhere/t0.png")


def test_lists_of_other_editors_are_read(devkit: Path) -> None:
    """With a byte order mark, Windows line ends, blank lines and spaces."""
    (devkit / LISTS / "val.txt").write_bytes(b"\xef\xbb\xbfv0\r\n\r\n  v1  \r\n")
    (devkit / LISTS / "val_cls.txt").write_bytes(b"\xef\xbb\xbfv0\t1\r\n\r\nv1\r\n")
    assert listed(devkit).table.slice(4)["tags"].to_pylist() == [[1], []]


# --- errors

Change = Callable[[Path], object]


def remove(name: str) -> Change:
    """Moves a file or folder of the devkit away."""
    return lambda root: (root / name).rename(root / "moved away")


def append(name: str, text: str) -> Change:
    """Appends a line to a list; it is the fifth of train_aug."""
    return lambda root: (root / LISTS / name).write_text((root / LISTS / name).read_text() + f"{text}\n")


def replace(name: str, text: str) -> Change:
    """Replaces the text of a list."""
    return lambda root: (root / LISTS / name).write_text(text)


def list_image_of_train_in_val(root: Path) -> None:
    append("val.txt", "t2")(root)
    append("val_cls.txt", "t2")(root)


def remove_all_saliency_maps(root: Path) -> None:
    for path in (root / "SaliencyMaps").iterdir():
        path.unlink()


TAGS = "train_aug_cls.txt"
INVALID_DEVKITS: list[tuple[Change, str, str]] = [
    (remove("JPEGImages"), r"no folder .*/JPEGImages", "--voc"),
    (remove(LISTS), rf"no folder .*/{LISTS}", "--voc"),
    (remove(f"{LISTS}/train_aug.txt"), r"no list .*/train_aug\.txt", "data.train_list"),
    (remove(f"{LISTS}/val.txt"), r"no file .*/val\.txt", "data.val_list"),
    (remove(f"{LISTS}/val_cls.txt"), r"no file .*/val_cls\.txt", "val_cls.txt"),
    (remove("classes.txt"), r"no file of class names at .*/classes\.txt", "classes.txt"),
    (replace("train_aug.txt", "\n \n"), r"train_aug\.txt is empty", "data.train_list"),
    (replace("val.txt", ""), r"val\.txt is empty", "data.val_list"),
    (remove("JPEGImages/t1.jpg"), r"train_aug\.txt names 1 image\(s\) that are not in .*: t1\n", "add the images"),
    (append(TAGS, "x 3"), r"train_aug_cls\.txt, line 5: class index 3 of image x", "data.classes"),
    (append(TAGS, "x 1 cat"), r"line 5: class index cat of image x", "data.classes"),
    (append(TAGS, "x \N{ARABIC-INDIC DIGIT TWO}"), r"line 5: class index . of image x", "data.classes"),
    (append("val_cls.txt", "\n\nv9 7"), r"val_cls\.txt, line 5: class index 7 of image v9", "data.classes"),
    (append(TAGS, "t0 1"), r"train_aug_cls\.txt, line 5: t0 is listed twice", "merge"),
    (replace(TAGS, "t0 0\nt1 1 2\n"), r"train_aug_cls\.txt has no line for t2, t3\n", "id alone"),
    (append("val.txt", "t2"), r"val_cls\.txt has no line for t2\n", "add the missing lines"),
    (append("train_aug.txt", "t2"), r"image t2 is listed twice in .*/train_aug\.txt", "delete"),
    (append("train_aug.txt", "t0 -1"), r"train_aug\.txt names 1 image\(s\) that are not in .*: t0 -1\n", "remove them"),
    (list_image_of_train_in_val, r"t2 is listed in .*/val\.txt and in", "delete a line"),
    (remove_all_saliency_maps, "no saliency map .* for 4 of 4", "data.saliency"),
    (remove("SaliencyMaps/t2.png"), r"no saliency map in .*/SaliencyMaps for 1 of 4 .*: t2\n", "data.saliency"),
]


@pytest.mark.parametrize(
    ("change", "message", "remedy"), INVALID_DEVKITS, ids=[message for _, message, _ in INVALID_DEVKITS]
)
def test_invalid_devkits_have_a_remedy(devkit: Path, change: Change, message: str, remedy: str) -> None:
    change(devkit)

    with pytest.raises(UserError, match=message) as caught:
        listed(devkit)

    assert remedy in caught.value.remedy
    assert caught.value.expected


def test_the_command_that_makes_saliency_maps_quotes_a_path_with_spaces(devkit: Path, tmp_path: Path) -> None:
    root = devkit.rename(tmp_path / "my devkit")
    (root / "SaliencyMaps/t2.png").unlink()
    with pytest.raises(UserError, match="no saliency map") as caught:
        listed(root)
    assert f"`mcis saliency voc '{root}' --out '{root}/SaliencyMaps'`" in caught.value.remedy


@pytest.mark.parametrize(("tags_of_t1", "missing"), [([2], "dog"), ([1], "cow")], ids=["dog is only in val", "cow"])
def test_class_without_a_training_image_is_an_error(devkit: Path, tags_of_t1: list[int], missing: str) -> None:
    write_lists(devkit, "train_aug", {"t0": [0], "t1": tags_of_t1, "t2": [0], "t3": []})
    with pytest.raises(UserError, match=rf"no training image of class {missing} in train_aug\.txt") as caught:
        listed(devkit)
    assert "data.classes" in caught.value.remedy


@pytest.mark.parametrize("name", ["../secret", "sub/inner", "/etc/hostname", ".", "..", "a\0b", "T0", "*"])
def test_ids_cannot_name_files_outside_of_the_folder(devkit: Path, name: str) -> None:
    (devkit / "secret.jpg").touch()
    (devkit / "JPEGImages/sub").mkdir()
    (devkit / "JPEGImages/sub/inner.jpg").touch()
    append("train_aug.txt", name)(devkit)
    append("train_aug_cls.txt", f"{name} 0")(devkit)

    with pytest.raises(UserError, match=r"train_aug\.txt names 1 image\(s\) that are not in"):
        listed(devkit)


# --- the test split


@pytest.fixture
def with_test_list(devkit: Path) -> Path:
    (devkit / LISTS / "test.txt").write_text("x0\n")
    (devkit / "JPEGImages/x0.jpg").touch()
    return devkit


def test_images_of_the_test_list_have_neither_tags_nor_masks(with_test_list: Path) -> None:
    *others, last = listed(with_test_list, test_list="test").table.to_pylist()
    assert last["image_id"] == "x0"
    assert last["split"] == "test"
    assert last["tags"] == []
    assert last["mask_uri"] is None
    assert others == listed(with_test_list).table.to_pylist()


def test_image_of_the_test_list_in_another_list_is_an_error(with_test_list: Path) -> None:
    append("test.txt", "v0")(with_test_list)
    with pytest.raises(UserError, match=r"image v0 is listed in .*/test\.txt and in .*/val\.txt"):
        listed(with_test_list, test_list="test")


def test_missing_test_list_is_an_error(devkit: Path) -> None:
    with pytest.raises(UserError, match=r"no file .*/other\.txt") as caught:
        listed(devkit, test_list="other")
    assert "data.test_list" in caught.value.remedy


# --- masks of the devkit and of SBD


@pytest.fixture
def sbd(devkit: Path, tmp_path: Path) -> Path:
    """SBD with masks of t1, t2, t3 and v1; the folder around benchmark_RELEASE.

    Leaves in the devkit what its archive holds: masks of t0, v0 and v1, and no list train_aug.
    """
    for path in (devkit / "SegmentationClassAug").iterdir():
        path.unlink()
    (devkit / "SegmentationClassAug").rmdir()
    (devkit / LISTS / "train_aug.txt").unlink()
    (devkit / LISTS / "train.txt").write_text("t0\n")

    (devkit / "SegmentationClass").mkdir()
    for image_id, label in {"t0": 1, "v0": 2, "v1": 0}.items():
        labels = np.array([[0, label, 255]], np.uint8)
        (devkit / "SegmentationClass" / f"{image_id}.png").write_bytes(encode_labels(labels))

    data_set = tmp_path / "sbd/benchmark_RELEASE/dataset"
    (data_set / "cls").mkdir(parents=True)
    for image_id, row in {"t1": [2, 3], "t2": [1, 3], "t3": [0, 0], "v1": [3, 3]}.items():
        labels = np.array([row], np.uint8)
        scipy.io.savemat(data_set / "cls" / f"{image_id}.mat", {"GTcls": {"Segmentation": labels}})
    (data_set / "train.txt").write_text("t3\nv1\n")
    (data_set / "val.txt").write_text("t1\nt2\n")
    return tmp_path / "sbd"


@pytest.mark.parametrize("inner", ["", "benchmark_RELEASE", "benchmark_RELEASE/dataset"])
def test_train_aug_is_built_from_sbd(devkit: Path, sbd: Path, inner: str) -> None:
    """v1, which SBD trains on, stays in val."""
    listing = listed(devkit, sbd=sbd / inner)
    assert listing.table["image_id"].to_pylist() == ["t0", "t1", "t2", "t3", "v0", "v1"]
    assert any("4 images" in note for note in listing.notes)


def test_sbd_has_the_masks_that_the_devkit_lacks(devkit: Path, sbd: Path) -> None:
    columns = listed(devkit, sbd=sbd).table.to_pydict()
    masks = dict(zip(columns["image_id"], columns["mask_uri"], strict=True))
    own = devkit / "SegmentationClass"
    of_sbd = sbd / "benchmark_RELEASE/dataset/cls"
    assert masks == {
        "t0": str(own / "t0.png"),
        "t1": str(of_sbd / "t1.mat"),
        "t2": str(of_sbd / "t2.mat"),
        "t3": str(of_sbd / "t3.mat"),
        "v0": str(own / "v0.png"),
        "v1": str(own / "v1.png"),
    }
    assert decode_mask(Path(masks["t1"]).read_bytes()).tolist() == [[2, 3]]


def test_images_of_the_val_list_are_not_in_train_aug(devkit: Path, sbd: Path) -> None:
    write_lists(devkit, "other", {"t3": []})
    listing = listed(devkit, sbd=sbd, val_list="other")
    assert listing.table["image_id"].to_pylist() == ["t0", "t1", "t2", "t3"]


@pytest.mark.usefixtures("sbd")
def test_error_without_train_aug_and_sbd_says_how_to_get_them(devkit: Path) -> None:
    with pytest.raises(UserError, match=r"no list .*/train_aug\.txt") as caught:
        listed(devkit)
    assert "benchmark.tgz" in caught.value.remedy
    assert "data.sbd" in caught.value.remedy


def test_folder_that_is_not_sbd_is_an_error(devkit: Path) -> None:
    with pytest.raises(UserError, match="no folder benchmark_RELEASE/dataset/cls in"):
        listed(devkit, sbd=devkit)


@pytest.mark.usefixtures("sbd")
def test_missing_masks_are_noted(devkit: Path) -> None:
    write_lists(devkit, "train_aug", TRAIN)
    listing = listed(devkit)
    missing = [uri is None for uri in listing.table["mask_uri"].to_pylist()]
    assert missing == [False, True, True, True, False, False]
    (note,) = listing.notes
    assert "3 of 4 images of split train" in note


# --- tags from annotations


def annotate(root: Path, tags: dict[str, list[int]], difficult: dict[str, list[int]] | None = None) -> None:
    """Writes annotations with two objects of each tag, and one difficult object for each class index in `difficult`."""
    (root / "Annotations").mkdir(exist_ok=True)
    names = (root / "classes.txt").read_text().split()
    part = "<part><name>head</name><difficult>1</difficult></part>"

    for image_id, indices in tags.items():
        objects = []
        for k in indices:
            objects.append(f"<object><name>{names[k]}</name>{part}</object>")
            objects.append(f"<object><name>{names[k]}</name><difficult>0</difficult>{part}</object>")
        for k in (difficult or {}).get(image_id, []):
            objects.append(f"<object><name>{names[k]}</name><difficult> 1 </difficult>{part}</object>")
        annotation = f"<annotation><name>x</name>{''.join(objects)}</annotation>"
        (root / "Annotations" / f"{image_id}.xml").write_text(annotation)


def test_tags_from_xml_equal_those_of_lists(devkit: Path) -> None:
    annotate(devkit, TRAIN | VAL)
    assert listed(devkit, tags_from="xml").table.equals(listed(devkit, tags_from="lists").table)


def test_annotations_are_used_if_lists_are_absent(devkit: Path) -> None:
    annotate(devkit, TRAIN | VAL)
    expected = listed(devkit).table
    (devkit / LISTS / "train_aug_cls.txt").unlink()

    listing = listed(devkit)

    assert listing.table.equals(expected)
    assert listing.notes == ("tags of train_aug.txt are read from the objects in Annotations",)


def test_absent_lists_are_an_error_if_they_are_asked_for(devkit: Path) -> None:
    annotate(devkit, TRAIN | VAL)
    (devkit / LISTS / "train_aug_cls.txt").unlink()
    with pytest.raises(UserError, match=r"no file .*/train_aug_cls\.txt"):
        listed(devkit, tags_from="lists")


def test_difficult_objects_are_no_tags(devkit: Path) -> None:
    """t0 keeps its tag, because another object has it; t3 and v1 have only difficult objects."""
    annotate(devkit, TRAIN | VAL, difficult={"t0": [0], "t1": [0, 0], "t3": [1, 2, 1], "v1": [2]})
    listing = listed(devkit, tags_from="xml")
    assert listing.table["tags"].to_pylist() == [[0], [1, 2], [0, 2], [], [1], []]
    train_note, val_note = (note for note in listing.notes if "difficult" in note)
    assert train_note == "6 object(s) of train_aug.txt are marked difficult and do not count"
    assert "1 object(s) of val.txt" in val_note


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_annotation_with_expanding_entities_is_refused(devkit: Path, encoding: str) -> None:
    annotate(devkit, TRAIN | VAL)
    entities = "".join(f'<!ENTITY e{level + 1} "{f"&e{level};" * 10}">' for level in range(12))
    header = f'<?xml version="1.0" encoding="{encoding}"?>'
    declaration = f"<!DOCTYPE annotation [<!ENTITY e0 'dog'>{entities}]>"
    bomb = f"{header}{declaration}<annotation><object><name>&e12;</name></object></annotation>"
    (devkit / "Annotations/t2.xml").write_bytes(bomb.encode(encoding))

    with pytest.raises(UserError, match=r"t2\.xml: limit on input amplification"):
        listed(devkit, tags_from="xml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no element found"),
        (b"<annotation><object>", "no element found"),
        (b"<html></html>", "the root element is not"),
        (b'<?xml version="1.0" encoding="none"?><annotation/>', "unknown encoding"),
        (b"<annotation><object><name>unicorn</name></object></annotation>", "an object of class 'unicorn'"),
        (b"<annotation><object/></annotation>", "an object of class ''"),
        (
            b"<annotation><object><name>cat</name><difficult>yes</difficult></object></annotation>",
            "an object with difficult yes",
        ),
        (b"<annotation>" + b" " * 2**20 + b"</annotation>", "more than 1048576 bytes"),
    ],
    ids=["empty", "truncated", "html", "encoding", "class", "no class", "difficult", "large"],
)
def test_invalid_annotation_is_an_error(devkit: Path, content: bytes, message: str) -> None:
    annotate(devkit, TRAIN | VAL)
    (devkit / "Annotations/t2.xml").write_bytes(content)
    with pytest.raises(UserError, match=rf"Annotations/t2\.xml: {message}"):
        listed(devkit, tags_from="xml")


def test_missing_folder_of_annotations_is_an_error(devkit: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*/Annotations"):
        listed(devkit, tags_from="xml")


def test_missing_annotations_are_counted(devkit: Path) -> None:
    annotate(devkit, {"t0": [0], "t1": [0]})
    with pytest.raises(UserError, match=r"for 2 of 4 images of train_aug\.txt: t2, t3\n"):
        listed(devkit, tags_from="xml")

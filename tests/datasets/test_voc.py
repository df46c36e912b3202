"""The source `voc`: the rows of its lists, and each way in which a devkit can be wrong, reported with a remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import encode_labels
from mcis.datasets.images.masks import decode_mask
from mcis.datasets.index import LISTING_SCHEMA, Listing
from mcis.datasets.sources.voc import list_voc

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


def listed(root: Path, **options: Any) -> Listing:
    return list_voc(root, classes=root / "classes.txt", **options)


def test_a_devkit_is_listed(devkit: Path) -> None:
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


def test_the_default_classes_are_those_of_voc(devkit: Path) -> None:
    write_lists(devkit, "train_aug", {"t0": list(range(20)), "t1": [], "t2": [], "t3": [19]})
    assert list_voc(devkit).classes == VOC_CLASSES


def test_absent_masks_and_saliency_are_null_and_masks_are_noted(devkit: Path) -> None:
    found = listed(devkit, truth_masks="none", saliency="none")
    assert found.table["mask_uri"].null_count == found.table["saliency_uri"].null_count == 6
    assert any("none: nothing is scored" in note for note in found.notes)


def test_masks_and_saliency_may_lie_elsewhere(devkit: Path, tmp_path: Path) -> None:
    (devkit / "SaliencyMaps").rename(tmp_path / "elsewhere")
    found = listed(devkit, saliency=str(tmp_path / "elsewhere"))
    assert found.table["saliency_uri"][0].as_py() == str(tmp_path / "elsewhere/t0.png")


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
    return lambda root: (root / LISTS / name).write_text((root / LISTS / name).read_text() + f"{text}\n")


def only(name: str, text: str) -> Change:
    """Replaces the text of a list."""
    return lambda root: (root / LISTS / name).write_text(text)


TAGS = "train_aug_cls.txt"
WRONG: list[tuple[Change, str, str]] = [
    (gone("JPEGImages"), r"no folder .*/JPEGImages", "--voc"),
    (gone(LISTS), rf"no folder .*/{LISTS}", "--voc"),
    (gone(f"{LISTS}/train_aug.txt"), r"no list .*/train_aug\.txt", "data.train_list"),
    (gone(f"{LISTS}/val.txt"), r"no file .*/val\.txt", "data.val_list"),
    (gone(f"{LISTS}/val_cls.txt"), r"no file .*/val_cls\.txt", "val_cls.txt"),
    (gone("classes.txt"), r"no file of class names at .*/classes\.txt", "classes.txt"),
    (only("train_aug.txt", "\n \n"), r"train_aug\.txt is empty", "data.train_list"),
    (only("val.txt", ""), r"val\.txt is empty", "data.val_list"),
    (gone("JPEGImages/t1.jpg"), r"train_aug\.txt names 1 image\(s\) that are not in .*: t1\n", "add the images"),
    (line(TAGS, "x 3"), r"train_aug_cls\.txt, line 5: class index 3 of image x", "data.classes"),
    (line(TAGS, "x 1 cat"), r"line 5: class index cat of image x", "data.classes"),
    (line(TAGS, "x \N{ARABIC-INDIC DIGIT TWO}"), r"line 5: class index . of image x", "data.classes"),
    (line("val_cls.txt", "\n\nv9 7"), r"val_cls\.txt, line 5: class index 7 of image v9", "data.classes"),
    (line(TAGS, "t0 1"), r"train_aug_cls\.txt, line 5: t0 a second time", "merge"),
    (only(TAGS, "t0 0\nt1 1 2\n"), r"train_aug_cls\.txt has no line for t2, t3\n", "id alone"),
    (line("val.txt", "t2"), r"val_cls\.txt has no line for t2\n", "add the missing lines"),
    (line("train_aug.txt", "t2"), r"image t2 is listed twice in .*/train_aug\.txt", "delete"),
    (line("train_aug.txt", "t0 -1"), r"train_aug\.txt names 1 image\(s\) that are not in .*: t0 -1\n", "remove them"),
    (lambda root: [line(f"val{c}.txt", "t2")(root) for c in ("", "_cls")], r"t2 is listed in .*/val\.txt and in", ""),
    (lambda root: list(map(Path.unlink, (root / "SaliencyMaps").iterdir())), "no saliency map .* for 4 of 4", ""),
    (gone("SaliencyMaps/t2.png"), r"no saliency map in .*/SaliencyMaps for 1 of 4 .*: t2\n", "data.saliency"),
]


@pytest.mark.parametrize(("change", "found", "remedy"), WRONG, ids=[found for _, found, _ in WRONG])
def test_errors_name_the_problem_and_a_remedy(devkit: Path, change: Change, found: str, remedy: str) -> None:
    change(devkit)
    with pytest.raises(UserError, match=found) as caught:
        listed(devkit)
    assert remedy in caught.value.remedy
    assert caught.value.expected


@pytest.mark.parametrize("split", ["train_aug", "val"])
def test_a_class_without_a_training_image_is_an_error(devkit: Path, split: str) -> None:
    """An image of the other split does not help."""
    write_lists(devkit, "train_aug", {"t0": [0], "t1": [2] if split == "train_aug" else [1], "t2": [0], "t3": []})
    with pytest.raises(UserError, match=r"no training image of class (dog|cow) in train_aug\.txt") as caught:
        listed(devkit)
    assert ("dog" if split == "train_aug" else "cow") in caught.value.found
    assert "data.classes" in caught.value.remedy


@pytest.mark.parametrize("name", ["../secret", "sub/inner", "/etc/hostname", ".", "..", "a\0b", "T0", "*"])
def test_ids_cannot_name_files_outside_of_the_folder(devkit: Path, name: str) -> None:
    (devkit / "secret.jpg").touch()
    (devkit / "JPEGImages/sub").mkdir()
    (devkit / "JPEGImages/sub/inner.jpg").touch()
    line("train_aug.txt", name)(devkit)
    line("train_aug_cls.txt", f"{name} 0")(devkit)
    with pytest.raises(UserError, match=r"train_aug\.txt names 1 image\(s\) that are not in"):
        listed(devkit)


# --- the test split, the masks of the devkit and of SBD


def devkit_and_sbd(root: Path, tmp_path: Path) -> Path:
    """Leaves what the two archives hold: masks of t0, v0 and v1 in the devkit, of t1..t3 and v1 in SBD."""
    for path in (root / "SegmentationClassAug").iterdir():
        path.unlink()
    (root / "SegmentationClassAug").rmdir()
    (root / LISTS / "train_aug.txt").unlink()
    (root / LISTS / "train.txt").write_text("t0\n")
    sbd = tmp_path / "sbd/benchmark_RELEASE/dataset"
    (root / "SegmentationClass").mkdir()
    (sbd / "cls").mkdir(parents=True)
    for image_id, label in {"t0": 1, "v0": 2, "v1": 0}.items():
        labels = np.array([[0, label, 255]], np.uint8)
        (root / "SegmentationClass" / f"{image_id}.png").write_bytes(encode_labels(labels))
    for image_id, row in {"t1": [2, 3], "t2": [1, 3], "t3": [0, 0], "v1": [3, 3]}.items():
        scipy.io.savemat(sbd / "cls" / f"{image_id}.mat", {"GTcls": {"Segmentation": np.array([row], np.uint8)}})
    (sbd / "train.txt").write_text("t3\nv1\n")
    (sbd / "val.txt").write_text("t1\nt2\n")
    return tmp_path / "sbd"


def test_images_of_the_test_list_have_neither_tags_nor_masks(devkit: Path) -> None:
    (devkit / LISTS / "test.txt").write_text("x0\n")
    (devkit / "JPEGImages/x0.jpg").touch()
    found = listed(devkit, test_list="test").table.to_pylist()
    last = found[-1]
    assert (last["image_id"], last["split"], last["tags"], last["mask_uri"]) == ("x0", "test", [], None)
    assert found[:-1] == listed(devkit).table.to_pylist()
    line("test.txt", "v0")(devkit)
    with pytest.raises(UserError, match=r"image v0 is listed in .*/test\.txt and in .*/val\.txt"):
        listed(devkit, test_list="test")
    with pytest.raises(UserError, match=r"no file .*/other\.txt") as caught:
        listed(devkit, test_list="other")
    assert "data.test_list" in caught.value.remedy


@pytest.mark.parametrize("inner", ["", "benchmark_RELEASE", "benchmark_RELEASE/dataset"])
def test_sbd_gives_the_list_and_the_masks_that_the_devkit_lacks(devkit: Path, tmp_path: Path, inner: str) -> None:
    sbd = devkit_and_sbd(devkit, tmp_path)
    found = listed(devkit, sbd=sbd / inner)
    rows = {r["image_id"]: r for r in found.table.to_pylist()}
    assert list(rows) == ["t0", "t1", "t2", "t3", "v0", "v1"], "v1, which SBD trains on, stays in val"
    own, cls = devkit / "SegmentationClass", sbd / "benchmark_RELEASE/dataset/cls"
    assert {i: r["mask_uri"] for i, r in rows.items()} == {
        **{i: str(own / f"{i}.png") for i in ("t0", "v0", "v1")},
        **{i: str(cls / f"{i}.mat") for i in ("t1", "t2", "t3")},
    }
    assert decode_mask(Path(rows["t1"]["mask_uri"]).read_bytes()).tolist() == [[2, 3]]
    assert any("4 images" in note for note in found.notes)


def test_the_val_list_in_use_is_held_out_of_train_aug(devkit: Path, tmp_path: Path) -> None:
    sbd = devkit_and_sbd(devkit, tmp_path)
    write_lists(devkit, "other", {"t3": []})
    assert listed(devkit, sbd=sbd, val_list="other").table["image_id"].to_pylist() == ["t0", "t1", "t2", "t3"]


def test_without_train_aug_and_sbd_the_error_says_where_to_get_it(devkit: Path, tmp_path: Path) -> None:
    devkit_and_sbd(devkit, tmp_path)
    with pytest.raises(UserError, match=r"no list .*/train_aug\.txt") as caught:
        listed(devkit)
    assert "benchmark.tgz" in caught.value.remedy
    assert "data.sbd" in caught.value.remedy
    with pytest.raises(UserError, match="no folder benchmark_RELEASE/dataset/cls in"):
        listed(devkit, sbd=devkit)


def test_masks_that_a_split_lacks_are_noted(devkit: Path, tmp_path: Path) -> None:
    devkit_and_sbd(devkit, tmp_path)
    write_lists(devkit, "train_aug", TRAIN)
    found = listed(devkit)
    assert [uri is None for uri in found.table["mask_uri"].to_pylist()] == [False, True, True, True, False, False]
    (note,) = found.notes
    assert "3 of 4 images of split train" in note


# --- where tags come from


def annotate(root: Path, tags: dict[str, list[int]], difficult: dict[str, list[int]] | None = None) -> None:
    """Two objects of each tag, and one marked difficult of each class that `difficult` has of an image."""
    (root / "Annotations").mkdir(exist_ok=True)
    names = (root / "classes.txt").read_text().split()
    part = "<part><name>head</name><difficult>1</difficult></part>"
    for image_id, indices in tags.items():
        marked = [(k, mark) for k in indices for mark in ("", "<difficult>0</difficult>")]
        marked += [(k, "<difficult> 1 </difficult>") for k in (difficult or {}).get(image_id, [])]
        objects = "".join(f"<object><name>{names[k]}</name>{mark}{part}</object>" for k, mark in marked)
        (root / "Annotations" / f"{image_id}.xml").write_text(f"<annotation><name>x</name>{objects}</annotation>")


def test_annotations_give_the_tags_where_lists_are_absent(devkit: Path) -> None:
    annotate(devkit, TRAIN | VAL)
    expected = listed(devkit).table.to_pylist()
    assert listed(devkit, tags_from="xml").table.to_pylist() == expected
    (devkit / LISTS / "train_aug_cls.txt").unlink()
    found = listed(devkit)
    assert found.table.to_pylist() == expected
    assert found.notes == ("tags of train_aug.txt are read from the objects in Annotations",)
    with pytest.raises(UserError, match=r"no file .*/train_aug_cls\.txt"):
        listed(devkit, tags_from="lists")


def test_objects_marked_difficult_are_no_tags(devkit: Path) -> None:
    """t0 keeps its tag, since another object has it; t1 loses one of three; t3 has difficult objects alone."""
    annotate(devkit, TRAIN | VAL, difficult={"t0": [0], "t1": [0, 0], "t3": [1, 2, 1], "v1": [2]})
    found = listed(devkit, tags_from="xml")
    assert found.table["tags"].to_pylist() == [[0], [1, 2], [0, 2], [], [1], []]
    of_train, of_val = (note for note in found.notes if "difficult" in note)
    assert of_train == ("6 object(s) of train_aug.txt are marked difficult and do not count")
    assert "1 object(s) of val.txt" in of_val


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_an_annotation_with_entities_is_refused(devkit: Path, encoding: str) -> None:
    annotate(devkit, TRAIN | VAL)
    entities = "".join(f'<!ENTITY e{i + 1} "{f"&e{i};" * 10}">' for i in range(12))
    declared = f"<!DOCTYPE annotation [<!ENTITY e0 'dog'>{entities}]>"
    bomb = f"{declared}<annotation><object><name>&e12;</name></object></annotation>"
    head = f'<?xml version="1.0" encoding="{encoding}"?>'
    (devkit / "Annotations/t2.xml").write_bytes((head + bomb).encode(encoding))
    with pytest.raises(UserError, match=r"t2\.xml: limit on input amplification"):
        listed(devkit, tags_from="xml")


@pytest.mark.parametrize(
    ("content", "found"),
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
)
def test_a_wrong_annotation_is_an_error(devkit: Path, content: bytes, found: str) -> None:
    annotate(devkit, TRAIN | VAL)
    (devkit / "Annotations/t2.xml").write_bytes(content)
    with pytest.raises(UserError, match=rf"Annotations/t2\.xml: {found}"):
        listed(devkit, tags_from="xml")


def test_absent_annotations_are_counted(devkit: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*/Annotations"):
        listed(devkit, tags_from="xml")
    annotate(devkit, {"t0": [0], "t1": [0]})
    with pytest.raises(UserError, match=r"for 2 of 4 images of train_aug\.txt: t2, t3\n"):
        listed(devkit, tags_from="xml")

"""Images of data sets from other machines: separators, suffixes, percent-encoding, and absolute paths."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.formats.image_files import find_files, images_next_to
from mcis.datasets.formats.importing import import_data_set
from mcis.datasets.sources.tagged import list_tagged


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photographs, among them two that are named a.jpg."""
    folder = tmp_path / "photos"
    for name in ("train/a.jpg", "val/a.jpg", "my cat.jpg", "50%25.png", "deep/er/b.JPG", "Löwe.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (90, 120, 30)).save(folder / name)
    return folder


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("train/a.jpg", "train/a.jpg"),
        ("train\\a.jpg", "train/a.jpg"),
        (r"C:\Users\me\photos\val\a.jpg", "val/a.jpg"),
        ("/mnt/photos/val/a.jpg", "val/a.jpg"),
        ("../images/val/a.jpg", "val/a.jpg"),
        ("./train//a.jpg", "train/a.jpg"),
        ("deep/er/b.jpg", "deep/er/b.JPG"),
        ("b.jpg", "deep/er/b.JPG"),
        ("/data/my%20cat.jpg", "my cat.jpg"),
        ("50%25.png", "50%25.png"),
        ("L%C3%B6we.png", "Löwe.png"),
        ("s3://bucket/photos/deep/er/b.JPG", "deep/er/b.JPG"),
    ],
)
def test_a_file_is_found_by_the_longest_common_tail(name: str, file: str, folder: Path) -> None:
    found = find_files(folder, [name])
    assert found.file_of_name == {name: file}
    assert (found.absent, found.ambiguous) == ([], [])


@pytest.mark.parametrize("name", ["/etc/passwd", "b.png", "", "a\0.jpg", "../../photos", "deep/er/"])
def test_other_files_are_absent(name: str, folder: Path) -> None:
    assert find_files(folder, [name]) == ({}, [name], [])


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (errno.EACCES, "access to .*train/a.jpg is refused: Permission denied"),
        (errno.EIO, "train/a.jpg cannot be read, after several attempts: Input/output error"),
    ],
)
def test_a_file_that_cannot_be_looked_up_is_not_absent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_pauses: None, number: int, found: str
) -> None:
    look = os.stat

    def stat(at: Any, **options: Any) -> os.stat_result:
        if str(at) == str(folder / "train/a.jpg"):
            raise OSError(number, os.strerror(number))
        return look(at, **options)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(UserError, match=found):
        find_files(folder, ["train/a.jpg", "val/a.jpg"])


def test_what_several_files_fit_is_ambiguous(folder: Path) -> None:
    assert find_files(folder, ["a.jpg"]) == ({}, [], ["a.jpg"])
    assert find_files(folder, ["test/a.jpg"]) == ({}, [], ["test/a.jpg"])


def test_a_file_belongs_to_one_image(folder: Path) -> None:
    """The file of a name that exists is not given to another name, and one that fits two names to neither."""
    names = ["train/a.jpg", "/old/a.jpg", "x/b.jpg", "y/b.jpg"]
    found = find_files(folder, names)
    assert found.file_of_name == {"train/a.jpg": "train/a.jpg", "/old/a.jpg": "val/a.jpg"}
    assert found.ambiguous == ["x/b.jpg", "y/b.jpg"]


@pytest.mark.parametrize("name", ["train/b.jpg", "train\\b.jpg"])
def test_a_missing_image_is_not_found_in_another_folder(name: str, folder: Path) -> None:
    """The data set names files of train/ as they are, so val/b.jpg is another photograph."""
    Image.new("RGB", (40, 40)).save(folder / "val/b.jpg")
    (folder / "deep/er/b.JPG").unlink()
    assert find_files(folder, ["train/a.jpg", name]) == ({"train/a.jpg": "train/a.jpg"}, [name], [])
    assert find_files(folder, [name]).file_of_name == {name: "val/b.jpg"}

    Image.new("RGB", (40, 40)).save(folder / "train/b.JPG", "JPEG")
    assert find_files(folder, ["train/a.jpg", name]).file_of_name == {"train/a.jpg": "train/a.jpg", name: "train/b.JPG"}


def test_images_of_a_listed_folder_are_not_looked_up_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network disk, millions of look-ups take much longer than listing the folder."""
    paths: list[str] = []
    look = os.stat

    def stat(at: Any, **options: Any) -> os.stat_result:
        paths.append(str(at))
        return look(at, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert images_next_to(folder, ["train/a.jpg", "my cat.jpg"]) == ["50%25.png", "Löwe.png"]
    assert str(folder / "train/a.jpg") not in paths


# --- importers

BOX = '<box label="cat" xtl="1" ytl="1" xbr="9" ybr="9"/>'
NAMES = [r"C:\photos\val\a.jpg", "deep/er/b.jpg", "my%20cat.jpg", "absent.jpg", "x/a.jpg"]
FILES = ["val/a.jpg", "deep/er/b.JPG", "my cat.jpg"]


def coco_content(image_id: Any = str, category_id: Any = str) -> dict[str, Any]:
    """A data set of NAMES whose annotations have ids of another type than its images and categories."""
    images = []
    annotations = []
    for number, name in enumerate(NAMES):
        images.append({"id": number, "file_name": name, "height": 40, "width": 40})
        annotations.append({"image_id": image_id(number), "category_id": category_id(3), "bbox": [0, 0, 9, 9]})
    return {"images": images, "annotations": annotations, "categories": [{"id": 3, "name": "cat"}]}


def write_coco(path: Path, **ids: Any) -> Path:
    path.write_text(json.dumps(coco_content(**ids)))
    return path


def write_cvat(path: Path) -> Path:
    images = [f'<image name="{name}" width="40" height="40">{BOX}</image>' for name in NAMES]
    path.write_text(f"<annotations>{''.join(images)}</annotations>")
    return path


def write_label_studio(path: Path) -> Path:
    choice = {"type": "choices", "value": {"choices": ["cat"]}}
    tasks = [{"data": {"image": name}, "annotations": [{"result": [choice]}]} for name in NAMES]
    path.write_text(json.dumps(tasks))
    return path


def check_import(format: str, source: Path, folder: Path, out: Path) -> list[str]:
    """Imports a data set of NAMES, checks that FILES have its tag, and returns the notes."""
    _, *notes = import_data_set(format, source, out, images=folder)
    table = list_tagged(out / "photos.csv").table
    assert table["image_id"].to_pylist() == [f"images/train/{file}" for file in FILES]
    assert table["tags"].to_pylist() == [[0]] * len(FILES)
    return notes


@pytest.mark.parametrize("write", [write_coco, write_cvat, write_label_studio])
def test_importers_find_names_of_other_systems(write: Any, folder: Path, tmp_path: Path) -> None:
    format = write.__name__.removeprefix("write_").replace("_", "")
    notes = check_import(format, write(tmp_path / "data"), folder, tmp_path / "out")
    assert "image(s) were found under another path or spelling" in notes[0]
    left_out = [note.partition("left out ")[2] for note in notes[1:]]
    assert [text for text in left_out if "image(s)" in text] == [
        f"1 image(s) that are not in {folder}: absent.jpg",
        f"1 image(s) that several files in {folder} fit, or whose file fits several images: x/a.jpg",
    ]


@pytest.mark.parametrize("id_type", [int, str, float])
def test_coco_ids_are_numbers_or_texts(id_type: type, folder: Path, tmp_path: Path) -> None:
    source = write_coco(tmp_path / "data", image_id=id_type, category_id=id_type)
    check_import("coco", source, folder, tmp_path / "out")


def test_yolo_reads_a_list_and_names_of_another_system(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "images").mkdir(parents=True)
    (data / "labels").mkdir()
    Image.new("RGB", (40, 40)).save(data / "images" / "a.JPG")
    Image.new("RGB", (40, 40)).save(data / "images" / "b.jpg")
    for name in ("a.txt", "b.txt"):
        (data / "labels" / name).write_text("1 0.5 0.5 0.1 0.1\n")
    (data / "train.txt").write_text("D:\\set\\images\\a.jpg\nD:\\set\\images\\b.jpg\n")
    (data / "data.yaml").write_text('train: train.txt\nnames: {"0": dog, "1": cat}\n')

    import_data_set("yolo", data, tmp_path / "out", images=data / "images")

    listing = list_tagged(tmp_path / "out" / "photos.csv")
    assert listing.classes == ("cat",)
    assert listing.table["image_id"].to_pylist() == ["images/train/a.JPG", "images/train/b.jpg"]


def test_an_import_that_finds_no_image_says_why(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match=r"no image of .* is found: left out 5 image") as caught:
        import_data_set("coco", write_coco(tmp_path / "data"), tmp_path / "out", images=tmp_path / "photos")
    assert "--images" in caught.value.remedy

"""Data sets of other tools become tables of the source `tags` (test_export reads exports again)."""

import csv
import functools
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.formats.data_set import LabeledImage
from mcis.datasets.formats.exporting import export_data_set
from mcis.datasets.formats.hugging_face import _tags
from mcis.datasets.formats.importing import import_data_set
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.formats.outlines import compressed_run_pixels
from mcis.datasets.images.decode import decode_picture
from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.sources.tagged import list_tagged
from mcis.datasets.storage.files import read_bytes


class Imported(NamedTuple):
    """A photograph of an imported table: its class names, and its mask or None."""

    tags: list[str]
    mask: np.ndarray | None


def read_imported(folder: Path) -> dict[str, Imported]:
    """Reads an imported table by the source `tags`; returns <split>/<image> -> photograph."""
    listing = list_tagged(folder / "photos.csv")
    imported: dict[str, Imported] = {}
    for row in listing.table.to_pylist():
        assert Path(row["uri"]).is_file()
        mask = decode_labels(Path(row["mask_uri"]).read_bytes()) if row["mask_uri"] else None
        name = row["image_id"].removeprefix("images/")
        imported[name] = Imported([listing.classes[k] for k in row["tags"]], mask)
    return imported


def tags_of(folder: Path) -> dict[str, list[str]]:
    return {name: photograph.tags for name, photograph in read_imported(folder).items()}


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """A folder with two photographs of 20x30 pixels, a.png and b.png."""
    for shade, name in enumerate("ab"):
        Image.new("RGB", (30, 20), (shade, 0, 0)).save(tmp_path / f"{name}.png")
    return tmp_path


@pytest.mark.parametrize(
    ("uri", "expected"), [("/photos/why?.jpg", "a.jpg"), ("s3://bucket/b.png?region=x.y", "a.png"), ("/photos/a", "a")]
)
def test_exported_file_name_has_the_suffix_of_the_image(uri: str, expected: str) -> None:
    assert LabeledImage(uri, "", "a", np.zeros((1, 1), np.uint8)).file_name == expected


@pytest.mark.parametrize(
    ("uri", "name", "expected"),
    [
        ("/photos/x/a.jpg", "x/a", True),
        ("/photos/x/a.jpg", "photos/x/a.jpg", True),
        ("s3://bucket/x/a.jpg?region=x.y", "s3/bucket/x/a", True),
        ("/photos/x/a.jpg", "17", False),
        ("/photos/x/117.jpg", "17", False),
    ],
)
def test_exported_image_is_named_by_its_path_or_by_another_id(uri: str, name: str, expected: bool) -> None:
    assert LabeledImage(uri, "", name, np.zeros((1, 1), np.uint8)).is_named_by_path is expected


# --- coco

SQUARE = [[2.0, 2.0, 12.0, 2.0, 12.0, 12.0, 2.0, 12.0]]
CONTENT: dict[str, Any] = {
    "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 9, "name": "[a;b"}],
    "images": [
        {"id": 0, "file_name": "a.png", "height": 20, "width": 30},
        {"id": 1, "file_name": "b.png", "height": 20, "width": 30},
        {"id": 2, "file_name": "c.png", "height": 20, "width": 30},  # is absent
    ],
    "annotations": [
        {"image_id": 0, "category_id": 7, "segmentation": SQUARE},
        {"image_id": 0, "category_id": 3, "segmentation": {"size": [20, 30], "counts": [0, 120, 480]}},
        {"image_id": 0, "category_id": 3, "segmentation": {"size": [20, 30], "counts": [400, 200]}, "iscrowd": 1},
        {"image_id": 1, "category_id": 7, "segmentation": SQUARE},
        {"image_id": 5, "category_id": 7, "segmentation": SQUARE},
    ],
}


@pytest.fixture
def coco(photographs: Path) -> Path:
    path = photographs / "set.json"
    path.write_text(json.dumps(CONTENT))
    return path


def change(path: Path, part: str, number: int, key: str, value: Any) -> None:
    """Writes CONTENT with one value changed."""
    content = json.loads(json.dumps(CONTENT))
    content[part][number][key] = value
    path.write_text(json.dumps(content))


def test_coco_becomes_tags_and_masks(coco: Path, tmp_path: Path) -> None:
    """Classes are in alphabetical order, smaller objects on top, crowds ignored and no tags."""
    import_data_set("coco", coco, tmp_path / "out")
    imported = read_imported(tmp_path / "out")

    mask_a = np.zeros((20, 30))
    mask_a[:, 20:] = 255  # the crowd
    mask_a[:, :6] = 1
    mask_a[2:12, 2:12] = 2
    mask_b = np.zeros((20, 30))
    mask_b[2:12, 2:12] = 2
    assert {name: photograph.tags for name, photograph in imported.items()} == {
        "train/a.png": ["cat", "dog"],
        "train/b.png": ["dog"],
    }
    np.testing.assert_array_equal(imported["train/a.png"].mask, mask_a)
    np.testing.assert_array_equal(imported["train/b.png"].mask, mask_b)


def test_coco_polygon_of_via_is_drawn(coco: Path, tmp_path: Path) -> None:
    """It is a list of numbers, not a list of such lists."""
    change(coco, "annotations", 3, "segmentation", SQUARE[0])
    import_data_set("coco", coco, tmp_path / "out")
    mask = np.zeros((20, 30))
    mask[2:12, 2:12] = 2
    np.testing.assert_array_equal(read_imported(tmp_path / "out")["train/b.png"].mask, mask)


def test_coco_reports_what_is_left_out(coco: Path, tmp_path: Path) -> None:
    _, *notes = import_data_set("coco", coco, tmp_path / "out")
    assert "left out 1 annotation(s) of images that it does not list" in notes[0]
    assert "left out 1 crowd(s), which give no tag" in notes[1]
    assert "left out 1 image(s) that are not in" in notes[2]


@pytest.mark.parametrize(
    ("content", "found", "remedy"),
    [
        (
            [{"image_id": 0, "category_id": 7, "score": 0.5, "bbox": [0, 0, 1, 1]}],
            "a list of COCO's results",
            "instances",
        ),
        ({"info": {"year": 2017}}, "holds no annotations, only info", "instances_train2017.json"),
        ({"images": CONTENT["images"], "categories": CONTENT["categories"]}, "only images, categories", "instances"),
        (CONTENT | {"images": []}, r"holds 5 annotation\(s\) but no images", "`images`"),
        (CONTENT | {"categories": []}, r"holds 5 annotation\(s\) but no categories", "`categories`"),
        (CONTENT | {"annotations": [{"image_id": 0, "caption": "A dog."}]}, "holds 1 captions", "instances_train2017"),
        (
            CONTENT | {"annotations": [{"image_id": 8, "category_id": 7}]},
            "lists none of the images of its 1",
            "image_id",
        ),
    ],
)
def test_coco_without_objects_is_named(coco: Path, content: Any, found: str, remedy: str) -> None:
    coco.write_text(json.dumps(content))

    with pytest.raises(UserError, match=found) as caught:
        import_data_set("coco", coco, coco.parent / "out")

    assert remedy in caught.value.remedy
    assert not (coco.parent / "out").exists()


def test_floating_point_images_get_masks(coco: Path) -> None:
    Image.fromarray(np.zeros((20, 30), np.float32)).save(coco.parent / "a.tif")
    change(coco, "images", 0, "file_name", "a.tif")
    import_data_set("coco", coco, coco.parent / "out")
    assert read_imported(coco.parent / "out")["train/a.tif"].mask is not None


def test_coco_of_boxes_becomes_tags_without_masks(coco: Path) -> None:
    annotations = [{"image_id": 0, "category_id": 7, "bbox": [0, 0, 5, 5]}, {"image_id": 1, "category_id": 3}]
    coco.write_text(json.dumps(CONTENT | {"annotations": annotations}))

    _, *notes = import_data_set("coco", coco, coco.parent / "out")

    assert read_imported(coco.parent / "out") == {
        "train/a.png": Imported(["dog"], None),
        "train/b.png": Imported(["cat"], None),
    }
    assert "left out 2 outline(s) of annotations without `segmentation`, which give tags and no mask" in " ".join(notes)


def test_second_split_keeps_the_classes_of_the_table(coco: Path, tmp_path: Path) -> None:
    """Only cat is wanted, but dog is imported too, because it is a class of the table."""
    import_data_set("coco", coco, tmp_path / "out")
    import_data_set("coco", coco, tmp_path / "out", split="val", classes=["cat"])
    imported = read_imported(tmp_path / "out")

    assert list(imported) == ["train/a.png", "train/b.png", "val/a.png", "val/b.png"]
    for name in ("a.png", "b.png"):
        assert imported[f"val/{name}"].tags == imported[f"train/{name}"].tags
        np.testing.assert_array_equal(imported[f"val/{name}"].mask, imported[f"train/{name}"].mask)


def test_second_split_with_other_classes_is_an_error(coco: Path, tmp_path: Path) -> None:
    import_data_set("coco", coco, tmp_path / "one", classes=["cat"])
    with pytest.raises(UserError, match=r"1 class\(es\) cannot be imported: dog"):
        import_data_set("coco", coco, tmp_path / "one", split="val")


FAULTS: list[tuple[str, str, Any, str]] = [
    ("images", "file_name", None, "file_name is null, which is neither a text nor a number"),
    ("images", "file_name", "b.png", r"file_name occurs twice: b\.png"),
    ("images", "id", 1, "image id occurs twice: 1"),
    ("annotations", "category_id", 8, "category_id 8, which no category has"),
    ("annotations", "category_id", 9, r"1 class\(es\) cannot be imported: \[a;b"),
    ("categories", "name", None, "name is null"),
]


@pytest.mark.parametrize(("part", "key", "value", "message"), FAULTS)
def test_invalid_json_is_reported(coco: Path, part: str, key: str, value: Any, message: str) -> None:
    change(coco, part, 0, key, value)

    with pytest.raises(UserError, match=message) as caught:
        import_data_set("coco", coco, coco.parent / "out")

    assert caught.value.remedy
    assert not (coco.parent / "out" / "photos.csv").exists()


def test_names_of_coco_may_be_numbers(coco: Path) -> None:
    content = json.loads(json.dumps(CONTENT))
    content["categories"][0]["name"] = 7
    content["images"][1]["file_name"] = 8
    coco.write_text(json.dumps(content))
    (coco.parent / "b.png").rename(coco.parent / "8")
    import_data_set("coco", coco, coco.parent / "out")
    assert tags_of(coco.parent / "out") == {"train/a.png": ["7", "cat"], "train/8": ["7"]}


def test_tables_may_begin_with_a_byte_order_mark(coco: Path, tmp_path: Path) -> None:
    """As spreadsheets save them."""
    import_data_set("coco", coco, tmp_path / "out")
    table = tmp_path / "out/photos.csv"
    table.write_text(table.read_text(), encoding="utf-8-sig")
    labels = tmp_path / "labels.csv"
    labels.write_text("label,class\n0,background\n1,cat\n2,dog\n255,ignored\n", encoding="utf-8-sig")

    import_data_set("coco", coco, tmp_path / "out", split="val", labels=labels)
    assert list(tags_of(tmp_path / "out")) == ["train/a.png", "train/b.png", "val/a.png", "val/b.png"]


@pytest.mark.parametrize("name", ["photos.csv", "classes.txt"])
def test_files_of_others_are_not_overwritten(coco: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("image,tags,split,mask\n")
    with pytest.raises(UserError, match=r"holds photos\.csv or classes\.txt that no import wrote"):
        import_data_set("coco", coco, tmp_path)
    assert (tmp_path / name).read_text() == "image,tags,split,mask\n"


def test_coco_objects_without_a_class_name_are_counted_and_ignored(coco: Path) -> None:
    """Their photographs are no negatives: nothing says which classes they show."""
    change(coco, "categories", 0, "name", " ")
    _, *notes = import_data_set("coco", coco, coco.parent / "out")
    assert any("left out 2 empty class name(s); their objects give no tag" in note for note in notes)
    assert tag_cells(coco.parent / "out") == {"a.png": "cat", "b.png": ""}
    mask = np.zeros((20, 30))
    mask[2:12, 2:12] = 255
    np.testing.assert_array_equal(read_imported(coco.parent / "out")["train/b.png"].mask, mask)


# --- outlines

INVALID_RUNS: list[Any] = ["oooooo", "o" * 999, "", "0", [0, 50], [0, 50, 2**40], [700, -100], [2**70]]
INVALID_OUTLINES: list[tuple[str, str, Any, str]] = [
    ("images", "width", "wide", "annotations are of an image of widex20 pixels, but the file has 30x20"),
    ("annotations", "segmentation", {"size": [10, 15], "counts": [150]}, "run lengths are of 15x10 pixels, but"),
    ("annotations", "segmentation", [[0, 0, float("nan"), 1, 1, 1]], "three corners"),
]
for runs in INVALID_RUNS:
    INVALID_OUTLINES.append(("annotations", "segmentation", {"size": [20, 30], "counts": runs}, "do not add up"))
every_invalid_outline = pytest.mark.parametrize(("part", "key", "value", "message"), INVALID_OUTLINES)


@every_invalid_outline
def test_mask_that_cannot_be_drawn_is_left_out(coco: Path, part: str, key: str, value: Any, message: str) -> None:
    change(coco, part, 0, key, value)
    notes = " ".join(import_data_set("coco", coco, coco.parent / "out"))

    assert "left out 1 mask(s)" in notes
    assert message in notes.partition("a.png: ")[2]
    imported = read_imported(coco.parent / "out")
    assert imported["train/a.png"].tags == ["cat", "dog"]
    assert imported["train/a.png"].mask is None
    assert imported["train/b.png"].mask is not None
    assert imported["train/b.png"].mask.max() == 2


def test_image_for_which_memory_runs_out_is_left_out(coco: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(content: bytes, **options: Any) -> Any:
        if content == (coco.parent / "a.png").read_bytes():
            raise MemoryError
        return decode_picture(content, **options)

    monkeypatch.setattr("mcis.datasets.formats.importing.decode_picture", decode)
    notes = " ".join(import_data_set("coco", coco, coco.parent / "out"))
    assert (
        "left out 1 mask(s), because the image is damaged or too large, or its outlines do not fit: a.png: it" in notes
    )
    imported = read_imported(coco.parent / "out")
    assert imported["train/a.png"].mask is None
    assert imported["train/b.png"].mask is not None


def test_corrected_data_set_replaces_the_split(coco: Path) -> None:
    change(coco, "images", 0, "width", "wide")
    import_data_set("coco", coco, coco.parent / "out")
    coco.write_text(json.dumps(CONTENT))
    import_data_set("coco", coco, coco.parent / "out")

    for photograph in read_imported(coco.parent / "out").values():
        assert photograph.mask is not None
        assert photograph.mask.max() > 0


def test_masks_of_an_earlier_import_are_removed(coco: Path) -> None:
    """Its folder may be used as corrected masks, whether the table names a mask or not."""
    masks = coco.parent / "out/masks/train"
    import_data_set("coco", coco, coco.parent / "out")
    (masks / "other.png").write_bytes(b"of somebody else")
    assert {path.name for path in masks.iterdir()} == {"a.png.png", "b.png.png", "other.png"}

    change(coco, "annotations", 3, "segmentation", [])
    import_data_set("coco", coco, coco.parent / "out")
    assert {path.name for path in masks.iterdir()} == {"a.png.png", "other.png"}


def test_an_earlier_import_stays_until_all_masks_are_drawn(coco: Path) -> None:
    out = coco.parent / "out"
    import_data_set("coco", coco, out)
    files = ("photos.csv", "classes.txt", "masks/train/a.png.png", "masks/train/b.png.png")
    before = [(out / name).read_bytes() for name in files]

    def interrupt(names: Sequence[str]) -> Iterator[str]:
        yield names[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_data_set("coco", coco, out, classes=["cat"], track=interrupt)
    for name in ("a", "b"):
        (coco.parent / f"{name}.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"/a\.png: "):
        import_data_set("coco", coco, out)

    assert [(out / name).read_bytes() for name in files] == before
    assert {path.name for path in out.iterdir()} == {"photos.csv", "classes.txt", "images", "masks"}


def test_rows_of_an_earlier_import_without_a_mask_file_are_replaced(coco: Path) -> None:
    """A row lacks its last cell, another one names the folder of the masks."""
    out = coco.parent / "out"
    import_data_set("coco", coco, out)
    rows = ["image,tags,split,mask", "images/train/a.png,cat,train", "images/train/b.png,dog,train,masks/train"]
    (out / "photos.csv").write_text("\n".join(rows))
    import_data_set("coco", coco, out)
    assert all(photograph.mask is not None for photograph in read_imported(out).values())


@every_invalid_outline
def test_data_set_without_any_mask_is_an_error(coco: Path, part: str, key: str, value: Any, message: str) -> None:
    change(coco, part, 0, key, value)
    (coco.parent / "b.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=rf"/a\.png: .*{message}"):
        import_data_set("coco", coco, coco.parent / "out")


@settings(max_examples=100)
@given(arrays(np.bool_, array_shapes(min_dims=2, max_dims=2, max_side=40)))
def test_compressed_runs_are_the_pixels_that_pycocotools_encoded(pixels: np.ndarray) -> None:
    counts = require_module("pycocotools.mask").encode(np.asfortranarray(pixels, np.uint8))["counts"].decode()
    np.testing.assert_array_equal(compressed_run_pixels(counts, *pixels.shape), pixels)


def test_compressed_runs_of_another_size_are_refused() -> None:
    counts = require_module("pycocotools.mask").encode(np.asfortranarray(np.eye(5), np.uint8))["counts"].decode()
    for height in (4, 6):
        with pytest.raises(ValueError, match="do not add up"):
            compressed_run_pixels(counts, height, 5)


# --- files of other formats

LABELME: dict[str, Any] = {
    "version": "5.4",
    "flags": {"indoors": True, "night": False},
    "shapes": [
        {"label": "dog", "points": [[2.0, 2.0], [11.0, 2.0], [11.0, 11.0], [2.0, 11.0]], "shape_type": "polygon"},
        {"label": " cat", "points": [[1, 1], [5, 5]], "shape_type": "rectangle"},
    ],
    "imagePath": "..\\photos\\a.png",
    "imageHeight": 20,
    "imageWidth": 30,
}
VOC = """<annotation><filename>C:\\photos\\a.png</filename><size><width>30</width><height>20</height></size>
<object><name>dog</name><difficult>0</difficult><bndbox/></object>
<object><name>cat </name><bndbox/></object><object><name>cow</name><difficult>1</difficult></object></annotation>"""
VIA_REGION = {"filename": "a.png", "size": 9, "regions": [], "file_attributes": {}}
OTHERS: dict[str, tuple[str, str, str]] = {
    "labelme": (json.dumps(LABELME), "annotations of LabelMe", "mcis import labelme "),
    "via": (json.dumps({"a.png9": VIA_REGION}), "annotations of VIA", "Export Annotations (COCO format)"),
    "via project": (json.dumps({"_via_img_metadata": {"a.png9": VIA_REGION}}), "annotations of VIA", "COCO"),
    "datumaro": (
        json.dumps({"info": {}, "categories": {"label": {}}, "items": [{"id": "a"}]}),
        "a data set of Datumaro",
        "'coco_instances'",
    ),
    "label studio": (json.dumps([{"data": {"image": "a.png"}}]), "tasks of Label Studio", "mcis import labelstudio "),
    "voc": (VOC, "annotations of Pascal VOC", "mcis import vocxml "),
    "cvat": ("<annotations><image/></annotations>", "annotations of CVAT", "mcis import cvat "),
    "coco": (json.dumps(CONTENT), "annotations of COCO", "mcis import coco "),
}
every_other_format = pytest.mark.parametrize("name", OTHERS)


@every_other_format
def test_data_set_of_another_format_is_named(photographs: Path, name: str) -> None:
    content, found, remedy = OTHERS[name]
    path = photographs / f"set.{'xml' if content.startswith('<') else 'json'}"
    path.write_text(content)
    chosen = "labelstudio" if name == "coco" else "coco"

    for source in (path, photographs):
        with pytest.raises(UserError) as caught:
            import_data_set(chosen, source, photographs / "out")
        assert caught.value.found == f"{source} holds {found}"
        assert remedy in caught.value.remedy


@pytest.mark.parametrize("name", ["labelme", "label studio", "voc", "cvat", "coco"])
def test_the_command_for_another_format_quotes_a_path_with_spaces(tmp_path: Path, name: str) -> None:
    content, _, command = OTHERS[name]
    folder = tmp_path / "my set"
    folder.mkdir()
    path = folder / f"set.{'xml' if content.startswith('<') else 'json'}"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        import_data_set("labelstudio" if name == "coco" else "coco", path, tmp_path / "out")

    source = folder if name in ("labelme", "voc") else path
    assert caught.value.remedy.startswith(f"{command}'{source}' --")


def test_labelme_becomes_tags_and_masks(photographs: Path, tmp_path: Path) -> None:
    polygon_only = LABELME | {"flags": {}, "shapes": LABELME["shapes"][:1], "imagePath": "b.png"}
    (photographs / "a.json").write_text(json.dumps(LABELME))
    (photographs / "b.json").write_text(json.dumps(polygon_only))

    _, *notes = import_data_set("labelme", photographs, tmp_path / "out")
    imported = read_imported(tmp_path / "out")

    mask = np.zeros((20, 30))
    mask[2:12, 2:12] = 2
    assert imported["train/a.png"] == Imported(["cat", "dog", "indoors"], None)
    assert imported["train/b.png"].tags == ["dog"]
    np.testing.assert_array_equal(imported["train/b.png"].mask, mask)
    assert "left out 1 outline(s) of shapes of type rectangle, which give tags and no mask" in " ".join(notes)


def test_names_of_labelme_may_be_numbers(photographs: Path, tmp_path: Path) -> None:
    shape = LABELME["shapes"][0] | {"label": 7}
    (photographs / "a.png").rename(photographs / "8")
    (photographs / "a.json").write_text(json.dumps(LABELME | {"shapes": [shape], "flags": {}, "imagePath": 8}))
    import_data_set("labelme", photographs, tmp_path / "out")
    assert tags_of(tmp_path / "out") == {"train/8": ["7"]}


@pytest.mark.parametrize(("format", "kind"), [("labelme", "a JSON"), ("vocxml", "an XML")])
def test_images_without_a_file_of_annotations_are_counted(
    photographs: Path, tmp_path: Path, format: str, kind: str
) -> None:
    """Pictures in other folders, such as drawings of masks, do not count."""
    copy_photographs(photographs, tmp_path / "set", {"a.png": "a", "b.png": "b", "c.JPG": "b", "a_json/label.png": "a"})
    (tmp_path / "set/.d.png").touch()
    (tmp_path / "set/a.json").write_text(json.dumps(LABELME))
    (tmp_path / "set/a.xml").write_text(VOC)

    _, *notes = import_data_set(format, tmp_path / "set", tmp_path / "out")
    assert any(note.endswith(f"left out 2 image(s) without {kind} file, next to annotated ones") for note in notes)

    file = tmp_path / "set" / ("a.json" if format == "labelme" else "a.xml")
    _, *notes = import_data_set(format, file, tmp_path / "out")
    assert "next to annotated ones" not in " ".join(notes)


def test_images_above_the_default_limit_of_pixels_get_masks(photographs: Path, tmp_path: Path) -> None:
    Image.new("L", (7_100, 7_100)).save(photographs / "a.png", "JPEG")
    size = {"imageHeight": 7_100, "imageWidth": 7_100}
    (photographs / "a.json").write_text(json.dumps(LABELME | size | {"flags": {}, "shapes": LABELME["shapes"][:1]}))

    import_data_set("labelme", photographs, tmp_path / "out")

    mask = read_imported(tmp_path / "out")["train/a.png"].mask
    assert mask is not None
    assert mask.shape == (7_100, 7_100)


def test_labelme_polygons_follow_a_resized_image_and_no_turned_one(photographs: Path, tmp_path: Path) -> None:
    """The files are b.png at twice the annotated size, and a.png on its side."""
    Image.new("RGB", (20, 30)).save(photographs / "a.png")
    Image.new("RGB", (60, 40)).save(photographs / "b.png")
    for name in "ab":
        content = LABELME | {"flags": {}, "shapes": LABELME["shapes"][:1], "imagePath": f"{name}.png"}
        (photographs / f"{name}.json").write_text(json.dumps(content))

    notes = " ".join(import_data_set("labelme", photographs, tmp_path / "out")[1:])

    imported = read_imported(tmp_path / "out")
    mask = np.zeros((40, 60))
    mask[4:23, 4:23] = 1
    assert imported["train/a.png"] == Imported(["dog"], None)
    np.testing.assert_array_equal(imported["train/b.png"].mask, mask)
    assert "a.png: annotations are of an image of 30x20 pixels, but the file has 20x30, turned upright" in notes


@pytest.mark.parametrize("source", ["devkit", "devkit/Annotations"])
def test_voc_xml_becomes_tags(photographs: Path, tmp_path: Path, source: str) -> None:
    """The image of the second file was renamed together with it."""
    for folder in ("JPEGImages", "Annotations"):
        (tmp_path / "devkit" / folder).mkdir(parents=True)
    for name in "ab":
        (photographs / f"{name}.png").rename(tmp_path / "devkit/JPEGImages" / f"{name}.png")
    (tmp_path / "devkit/Annotations/a.xml").write_text(VOC)
    (tmp_path / "devkit/Annotations/b.xml").write_text(VOC.replace("a.png", "IMG_0001.png").replace("dog", "cow"))

    _, *notes = import_data_set("vocxml", tmp_path / source, tmp_path / "out")

    assert tags_of(tmp_path / "out") == {"train/a.png": ["cat", "dog"], "train/b.png": ["cat", "cow"]}
    assert "left out 2 object(s) marked as difficult" in " ".join(notes)


def test_voc_xml_next_to_its_images_becomes_tags(photographs: Path, tmp_path: Path) -> None:
    (photographs / "a.xml").write_text(VOC)
    import_data_set("vocxml", photographs, tmp_path / "out")
    assert tags_of(tmp_path / "out") == {"train/a.png": ["cat", "dog"]}


def test_annotations_whose_suffix_is_in_capitals_are_read(photographs: Path, tmp_path: Path) -> None:
    """Programs of Windows write a.XML next to b.xml."""
    (photographs / "a.XML").write_text(VOC)
    (photographs / "b.xml").write_text(VOC.replace("a.png", "b.png"))
    import_data_set("vocxml", photographs, tmp_path / "voc")
    assert tag_cells(tmp_path / "voc") == {"a.png": "cat;dog", "b.png": "cat;dog"}

    (photographs / "a.JSON").write_text(json.dumps(LABELME))
    import_data_set("labelme", photographs, tmp_path / "labelme")
    assert tag_cells(tmp_path / "labelme") == {"a.png": "cat;dog;indoors"}


def test_folders_of_voc_are_no_classes(photographs: Path, tmp_path: Path) -> None:
    for folder, name in (("JPEGImages", "a.png"), ("Annotations", "a.xml")):
        (tmp_path / "devkit" / folder).mkdir(parents=True)
        (tmp_path / "devkit" / folder / name).write_text(VOC)
    with pytest.raises(UserError, match=r"holds annotations of Pascal VOC") as caught:
        import_data_set("folders", tmp_path / "devkit", tmp_path / "out")
    assert f"mcis import vocxml {tmp_path}/devkit " in caught.value.remedy


YOLO_LABELS = "0 0.5 0.5 0.2 0.2"


@pytest.mark.parametrize(
    ("format", "files", "message"),
    [
        ("vocxml", {"a.xml": VOC, "b.xml": ""}, "b.xml: no element found"),
        ("vocxml", {"a.xml": VOC, "b.xml": "<object/>"}, "b.xml: no annotation of Pascal VOC"),
        ("labelme", {"a.json": json.dumps(LABELME), "b.json": "{}"}, "b.json: no imagePath"),
        ("labelme", {"b.json": json.dumps(LABELME | {"imageHeight": None})}, "b.json: no imageHeight, a side of the"),
        (
            "labelme",
            {"b.json": json.dumps(LABELME | {"shapes": [LABELME["shapes"][1] | {"label": None}]})},
            "b.json: label is null",
        ),
        (
            "yolo",
            {"data.yaml": "names: [dog]", "labels/train/a.txt": YOLO_LABELS, "labels/train/b.txt": "0 wide"},
            "b.txt: could not convert string to float",
        ),
    ],
)
def test_invalid_file_among_many_is_named(
    photographs: Path, tmp_path: Path, format: str, files: dict[str, str], message: str
) -> None:
    source = tmp_path / "set"
    copy_photographs(photographs, source, {"a.png": "a", "b.png": "b"})
    copy_photographs(photographs, source / "images/train", {"a.png": "a", "b.png": "b"})
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(content)

    with pytest.raises(UserError, match=message):
        import_data_set(format, source, tmp_path / "out")


# --- negatives


def tag_cells(folder: Path) -> dict[str, str]:
    """The cells of tags of an imported table, by the file name of the image."""
    rows = csv.DictReader((folder / "photos.csv").read_text().splitlines())
    return {Path(row["image"]).name: row["tags"] for row in rows}


def test_coco_image_without_annotations_is_a_negative(coco: Path, tmp_path: Path) -> None:
    content = json.loads(json.dumps(CONTENT))
    content["annotations"] = [item for item in content["annotations"] if item["image_id"] == 0]
    coco.write_text(json.dumps(content))
    summary, *_ = import_data_set("coco", coco, tmp_path / "out")
    assert "2 photographs of split train, 1 with tags, 1 that show none of the classes, 2 with a mask" in summary
    assert tag_cells(tmp_path / "out") == {"a.png": "cat;dog", "b.png": "none"}
    assert list_tagged(tmp_path / "out/photos.csv").table["is_negative"].to_pylist() == [False, True]
    mask = read_imported(tmp_path / "out")["train/b.png"].mask
    assert mask is not None
    assert not mask.any()

    import_data_set("coco", coco, tmp_path / "out", split="val")  # `none` is no class of the other split
    assert (tmp_path / "out/classes.txt").read_text() == "cat\ndog\n"


def test_image_with_unwanted_objects_only_is_no_negative(coco: Path, tmp_path: Path) -> None:
    """Nothing says that it was searched for the wanted class."""
    import_data_set("coco", coco, tmp_path / "out", classes=["cat"])
    assert tag_cells(tmp_path / "out") == {"a.png": "cat", "b.png": ""}


@pytest.mark.parametrize("label_file", [True, False])
def test_yolo_image_without_labels_is_a_negative(yolo: Path, tmp_path: Path, label_file: bool) -> None:
    shutil.copy(yolo.parent / "b.png", yolo / "images/train/b.png")
    if label_file:
        (yolo / "labels/train/b.txt").touch()
    import_data_set("yolo", yolo, tmp_path / "out")
    assert tag_cells(tmp_path / "out") == {"a.png": "dog", "b.png": "none"}


@pytest.mark.parametrize("annotation", [{"result": []}, {"result": [{"type": "choices", "value": {"choices": []}}]}])
def test_empty_choice_of_label_studio_is_a_negative(photographs: Path, tmp_path: Path, annotation: Any) -> None:
    tagged = {"data": LOCAL_IMAGE, "annotations": [choices("dog")]}
    source = write_tasks(tmp_path / "tasks.json", tagged, {"data": UPLOADED_IMAGE, "annotations": [annotation]})
    import_data_set("labelstudio", source, tmp_path / "out", images=photographs)
    assert tag_cells(tmp_path / "out") == {"a.png": "dog", "b.png": "none"}


def test_label_studio_results_that_are_not_read_make_no_negative(photographs: Path, tmp_path: Path) -> None:
    tagged = {"data": LOCAL_IMAGE, "annotations": [choices("dog")]}
    described = {"data": UPLOADED_IMAGE, "annotations": [{"result": [{"type": "textarea", "value": {"text": ["x"]}}]}]}
    source = write_tasks(tmp_path / "tasks.json", tagged, described)
    import_data_set("labelstudio", source, tmp_path / "out", images=photographs)
    assert tag_cells(tmp_path / "out") == {"a.png": "dog", "b.png": ""}


def test_cvat_image_without_shapes_is_a_negative(photographs: Path, tmp_path: Path) -> None:
    path = photographs / "annotations.xml"
    path.write_text(re.sub("<polygon.*?</image>", "</image>", CVAT, flags=re.DOTALL))
    import_data_set("cvat", path, tmp_path / "out")
    assert tag_cells(tmp_path / "out") == {"a.png": "cat;dog", "b.png": "none"}
    assert list_tagged(tmp_path / "out/photos.csv").table["is_negative"].to_pylist() == [False, True]


def test_hugging_face_labels_tell_none_from_unknown() -> None:
    names = SimpleNamespace(int2str=["cat", "dog"].__getitem__)
    assert _tags([], names) == []
    assert _tags([1, 0], names) == ["dog", "cat"]
    assert [_tags(cell, names) for cell in (None, -1, [None])] == [[None]] * 3


def test_voc_xml_without_the_suffix_of_its_image_finds_it(photographs: Path, tmp_path: Path) -> None:
    (photographs / "a.xml").write_text(VOC.replace("a.png", "a"))
    import_data_set("vocxml", photographs, tmp_path / "out")
    assert tag_cells(tmp_path / "out") == {"a.png": "cat;dog"}


def test_voc_xml_objects_without_a_class_name_are_counted(photographs: Path, tmp_path: Path) -> None:
    (photographs / "a.xml").write_text(VOC.replace("<name>dog</name>", "<name> </name>"))
    (photographs / "b.xml").write_text("<annotation><filename>b.png</filename><object><name/></object></annotation>")
    _, *notes = import_data_set("vocxml", photographs, tmp_path / "out")
    assert any("left out 2 empty class name(s); their objects give no tag" in note for note in notes)
    assert tag_cells(tmp_path / "out") == {"a.png": "cat", "b.png": ""}


def test_voc_xml_image_with_difficult_objects_only_is_no_negative(photographs: Path, tmp_path: Path) -> None:
    (photographs / "a.xml").write_text(VOC)
    difficult = "<annotation><filename>b.png</filename><object><name>cow</name><difficult>1</difficult></object>"
    (photographs / "b.xml").write_text(f"{difficult}</annotation>")
    import_data_set("vocxml", photographs, tmp_path / "out")
    assert tag_cells(tmp_path / "out") == {"a.png": "cat;dog", "b.png": ""}

    (photographs / "b.xml").write_text("<annotation><filename>b.png</filename></annotation>")
    import_data_set("vocxml", photographs, tmp_path / "out")
    assert tag_cells(tmp_path / "out") == {"a.png": "cat;dog", "b.png": "none"}


def test_a_folder_that_may_mean_missing_tags_gives_a_note_in_the_index(photographs: Path, tmp_path: Path) -> None:
    copy_photographs(photographs, tmp_path / "set", {"cat/1.png": "a", "unknown/2.png": "b"})
    import_data_set("folders", tmp_path / "set", tmp_path / "out")
    note = "'unknown' (1 images) is a class; if it means that tags are missing, empty these cells of the table"
    assert any(note in line for line in list_tagged(tmp_path / "out/photos.csv").notes)


def test_a_folder_that_may_mean_none_of_the_classes_gives_a_note(photographs: Path, tmp_path: Path) -> None:
    copy_photographs(photographs, tmp_path / "set", {"cat/1.png": "a", "nothing/2.png": "b"})
    _, note = import_data_set("folders", tmp_path / "set", tmp_path / "out")
    assert note.endswith("'nothing' is a class; if it means none of the classes, import again with --negatives nothing")


@pytest.mark.parametrize(("folder", "negatives"), [("none", []), ("Background", []), ("ok", ["ok", "nothing"])])
def test_folder_for_none_of_the_classes_has_negatives(
    photographs: Path, tmp_path: Path, folder: str, negatives: list[str]
) -> None:
    copy_photographs(photographs, tmp_path / "set", {"cat/1.png": "a", f"{folder}/2.png": "b"})
    import_data_set("folders", tmp_path / "set", tmp_path / "out", negatives=negatives)
    assert tag_cells(tmp_path / "out") == {"1.png": "cat", "2.png": "none"}
    assert (tmp_path / "out/classes.txt").read_text() == "cat\n"


# --- folders


def copy_photographs(folder: Path, destination: Path, originals: dict[str, str]) -> None:
    """Copies photographs, destination -> name of the original."""
    for name, original in originals.items():
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / f"{original}.png", destination / name)


@pytest.fixture
def pets(photographs: Path) -> Path:
    """Class folders with a photograph that is in both of them, and two hidden files."""
    originals = {"cat/deep/1.png": "a", "dog/2.png": "a", "dog/3.png": "b"}
    hidden = {"cat/.thumb.png": "a", ".trash/dog/4.png": "b"}
    copy_photographs(photographs, photographs / "pets", originals | hidden)
    return photographs / "pets"


def test_photograph_in_two_class_folders_has_both_tags(pets: Path, tmp_path: Path) -> None:
    _, *notes = import_data_set("folders", pets, tmp_path / "out")
    assert [note.partition("left out ")[2] for note in notes] == ["1 further copies of photographs", "2 hidden file(s)"]
    assert tags_of(tmp_path / "out") == {"train/cat/deep/1.png": ["cat", "dog"], "train/dog/3.png": ["dog"]}


def test_files_that_are_too_large_are_left_out(pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pets / "dog/film.mp4").write_bytes(bytes(2_000))
    read = functools.partial(read_bytes, max_bytes=1_000)
    monkeypatch.setattr("mcis.datasets.formats.class_folders.read_bytes", read)

    _, *notes = import_data_set("folders", pets, tmp_path / "out")

    assert any("left out 1 file(s) of more than 256 MiB" in note for note in notes)
    assert list(tags_of(tmp_path / "out")) == ["train/cat/deep/1.png", "train/dog/3.png"]


def test_files_that_are_no_photographs_are_left_out(pets: Path, tmp_path: Path) -> None:
    for name in ("cat/Thumbs.db", "dog/desktop.ini", "dog/notes.TXT", "__MACOSX/1.png", "dog/@eaDir/2.png/small.jpg"):
        (pets / name).parent.mkdir(parents=True, exist_ok=True)
        (pets / name).write_text(name)
    _, *notes = import_data_set("folders", pets, tmp_path / "out")
    assert any("left out 5 file(s) that are no photographs, such as Thumbs.db" in note for note in notes)
    assert tags_of(tmp_path / "out") == {"train/cat/deep/1.png": ["cat", "dog"], "train/dog/3.png": ["dog"]}


@pytest.mark.parametrize("out", ["pets/mine", "pets", "."])
def test_the_output_of_an_import_is_no_class_of_a_second_one(pets: Path, out: str) -> None:
    """It may be inside of the data set, the same folder, or around it."""
    for split in ("train", "val", "val"):
        _, *notes = import_data_set("folders", pets, pets.parent / out, split=split)
    assert any("where the import writes" in note for note in notes) == (out == "pets/mine")
    assert tags_of(pets.parent / out) == {
        "train/cat/deep/1.png": ["cat", "dog"],
        "train/dog/3.png": ["dog"],
        "val/cat/deep/1.png": ["cat", "dog"],
        "val/dog/3.png": ["dog"],
    }


def test_folder_without_class_folders_is_an_error(pets: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 files are in no class folder"):
        import_data_set("folders", pets / "cat/deep", tmp_path / "out")


@pytest.mark.parametrize("splits", [["valid"], ["Train", "Test"], ["training", "dev", "testing"]])
def test_folders_of_splits_are_an_error(pets: Path, tmp_path: Path, splits: list[str]) -> None:
    """Next to them may be files, such as a description."""
    for split in splits:
        shutil.copytree(pets, tmp_path / "all" / split)
    (tmp_path / "all/README.txt").write_text("Photographs of pets.")
    with pytest.raises(UserError, match="folders of splits, not of classes"):
        import_data_set("folders", tmp_path / "all", tmp_path / "out")


# --- cvat

CVAT = """<?xml version="1.0"?><annotations><version>1.1</version><meta/>
<image id="0" name="a.png" width="30" height="20"><tag label="cat" source="manual"><attribute name="x">1</attribute>
</tag><box label="dog" xtl="1" ytl="2" xbr="9" ybr="9"/></image><image id="1" name="b.png" width="30" height="20">
<polygon label="dog" points="2.0,2.0;11.5,2.0;11.5,11.5;2.0,11.5"/>
<mask label="cat" rle="1,2,3" left="28" top="17" width="2" height="3"/></image></annotations>"""


@pytest.fixture
def cvat(photographs: Path) -> Path:
    path = photographs / "annotations.xml"
    path.write_text(CVAT)
    return path


def test_cvat_becomes_tags_and_masks(cvat: Path, tmp_path: Path) -> None:
    import_data_set("cvat", cvat, tmp_path / "out")
    imported = read_imported(tmp_path / "out")

    expected = np.zeros((20, 30))
    expected[2:12, 2:12] = 2
    expected[17, 29] = 1
    expected[18, 28] = 1
    assert imported["train/a.png"] == Imported(["cat", "dog"], None)
    assert imported["train/b.png"].tags == ["cat", "dog"]
    np.testing.assert_array_equal(imported["train/b.png"].mask, expected)


@pytest.mark.parametrize("points", ['points=""', ""])
def test_cvat_polygon_without_points_is_named(cvat: Path, tmp_path: Path, points: str) -> None:
    cvat.write_text(re.sub('points=".*?"', points, CVAT))
    with pytest.raises(UserError, match=r"b\.png: a polygon without points"):
        import_data_set("cvat", cvat, tmp_path / "out")


def test_cvat_mask_outside_of_its_image_is_named(cvat: Path, tmp_path: Path) -> None:
    cvat.write_text(CVAT.replace('top="17"', 'top="18"'))
    with pytest.raises(UserError, match=r"b\.png: a mask at 28, 18 of 2x3 pixels in an image of 30x20"):
        import_data_set("cvat", cvat, tmp_path / "out")


@pytest.mark.parametrize("size", [(60, 40), (20, 30)], ids=["resized", "turned"])
def test_cvat_mask_of_an_image_of_another_size_is_not_drawn(cvat: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    """The mask has its place in pixels, which would be that of other things in the file."""
    cvat.write_text(CVAT.replace('left="28" top="17"', 'left="2" top="2"'))
    Image.new("RGB", size).save(cvat.parent / "b.png")
    with pytest.raises(UserError, match=rf"annotations are of an image of 30x20 pixels, but .* {size[0]}x{size[1]}"):
        import_data_set("cvat", cvat, tmp_path / "out")


def test_images_of_another_subset_of_cvat_are_left_out(cvat: Path, tmp_path: Path) -> None:
    cvat.write_text(CVAT.replace('id="0"', 'subset="val"'))
    summary, note, *_ = import_data_set("cvat", cvat, tmp_path / "out")
    assert "1 photographs" in summary
    assert f"left out 1 image(s) of subset val, for {tmp_path.name}" in note


def test_the_only_subset_of_cvat_may_have_any_name(cvat: Path, tmp_path: Path) -> None:
    """CVAT names it `default`."""
    cvat.write_text(CVAT.replace("<image", '<image subset="default"'))
    import_data_set("cvat", cvat, tmp_path / "out")
    assert tags_of(tmp_path / "out") == {"train/a.png": ["cat", "dog"], "train/b.png": ["cat", "dog"]}


def test_several_subsets_of_cvat_need_a_folder_of_one_of_them(cvat: Path, tmp_path: Path) -> None:
    cvat.write_text(CVAT.replace('id="0"', 'subset="Train"').replace('id="1"', 'subset="Validation"'))
    with pytest.raises(UserError, match="holds images of the subsets Train, Validation, and none is") as caught:
        import_data_set("cvat", cvat, tmp_path / "out")
    assert "--images DIR/Train" in caught.value.remedy

    copy_photographs(tmp_path, tmp_path / "Train", {"a.png": "a"})
    import_data_set("cvat", cvat, tmp_path / "out", images=tmp_path / "Train")
    assert tags_of(tmp_path / "out") == {"train/a.png": ["cat", "dog"]}


def test_two_images_of_cvat_with_one_name_are_an_error(cvat: Path, tmp_path: Path) -> None:
    cvat.write_text(CVAT.replace("a.png", "b.png"))
    with pytest.raises(UserError, match=r"two images are named b\.png"):
        import_data_set("cvat", cvat, tmp_path / "out")


# --- labelstudio


def choices(*tags: str) -> dict[str, Any]:
    """An annotation of Label Studio."""
    return {"result": [{"type": "choices", "value": {"choices": list(tags)}}]}


def write_tasks(path: Path, *tasks: dict[str, Any]) -> Path:
    path.write_text(json.dumps(tasks))
    return path


LOCAL_IMAGE = {"image": "/data/local-files/?d=set/a.png"}
UPLOADED_IMAGE = {"image": "/data/upload/7/0f3a9b2c-b.png"}


def test_label_studio_finds_images_of_local_storage_and_uploads(photographs: Path, tmp_path: Path) -> None:
    local = {"data": LOCAL_IMAGE, "annotations": [choices("dog")]}
    uploaded = {"data": UPLOADED_IMAGE, "annotations": [choices("cat", "dog")]}
    source = write_tasks(tmp_path / "tasks.json", local, uploaded)

    import_data_set("labelstudio", source, tmp_path / "out", images=photographs)

    assert tags_of(tmp_path / "out") == {"train/a.png": ["dog"], "train/b.png": ["cat", "dog"]}


@pytest.mark.parametrize(
    ("location", "file"),
    [
        ("/data/local-files/?d=photos/20230101-a.png", "y/20230101-a.png"),
        ("https://example.org/photos/20230101-a.png", "y/20230101-a.png"),
        ("/data/upload/7/20230101-a.png", "a.png"),
        ("https://example.org/data/upload/7/20230101-a.png", "a.png"),
        ("upload/7/20230101-a.png", "a.png"),
    ],
)
def test_only_uploads_of_label_studio_have_a_prefix(
    photographs: Path, tmp_path: Path, location: str, file: str
) -> None:
    """A date of 8 digits looks like the prefix of an upload."""
    copy_photographs(photographs, tmp_path / "set", {"a.png": "a", file: "b"})
    source = write_tasks(tmp_path / "tasks.json", {"data": {"image": location}, "annotations": [choices("dog")]})
    import_data_set("labelstudio", source, tmp_path / "out", images=tmp_path / "set")
    assert tags_of(tmp_path / "out") == {f"train/{file}": ["dog"]}


def test_label_studio_ignores_parameters_of_signed_urls(photographs: Path, tmp_path: Path) -> None:
    location = "https://bucket.example.org/a.png?GoogleAccessId=me&Signature=abc%2Fd"
    source = write_tasks(tmp_path / "tasks.json", {"data": {"image": location}, "annotations": [choices("dog")]})
    import_data_set("labelstudio", source, tmp_path / "out", images=photographs)
    assert tags_of(tmp_path / "out") == {"train/a.png": ["dog"]}


def test_label_studio_uses_the_last_annotation_that_was_not_cancelled(photographs: Path, tmp_path: Path) -> None:
    relation = {"type": "relation", "from_id": "x", "to_id": "y"}
    last = {"result": [*choices("cat", "dog")["result"], relation]}
    cancelled = choices("dog") | {"was_cancelled": True}
    annotated = {"data": UPLOADED_IMAGE, "annotations": [choices("dog"), last, cancelled]}
    unannotated = {"data": {"image": "c.png"}, "annotations": [{"was_cancelled": True, "result": []}]}
    source = write_tasks(tmp_path / "tasks.json", annotated, unannotated)

    _, *notes = import_data_set("labelstudio", source, tmp_path / "out", images=photographs)

    assert [note.partition("left out ")[2] for note in notes] == [
        "1 earlier annotation(s) of a photograph",
        "1 result(s) of type relation",
        "1 task(s) that nobody has annotated; predictions are submitted in Label Studio first",
    ]
    assert tags_of(tmp_path / "out") == {"train/b.png": ["cat", "dog"]}


def test_label_studio_polygons_follow_a_resized_image_and_no_turned_one(photographs: Path, tmp_path: Path) -> None:
    """The files are b.png at twice the annotated size, and a.png on its side. Points are percentages."""
    Image.new("RGB", (20, 30)).save(photographs / "a.png")
    Image.new("RGB", (60, 40)).save(photographs / "b.png")
    value = {"points": [[10, 10], [50, 10], [50, 50], [10, 50]], "polygonlabels": ["dog"]}
    size = {"original_width": 30, "original_height": 20}
    annotations = [{"result": [{"type": "polygonlabels", "value": value} | size]}]
    tasks = [{"data": {"image": f"{name}.png"}, "annotations": annotations} for name in "ab"]
    source = write_tasks(tmp_path / "tasks.json", *tasks)

    notes = " ".join(import_data_set("labelstudio", source, tmp_path / "out", images=photographs)[1:])

    imported = read_imported(tmp_path / "out")
    mask = np.zeros((40, 60))
    mask[4:21, 6:31] = 1
    assert imported["train/a.png"] == Imported(["dog"], None)
    np.testing.assert_array_equal(imported["train/b.png"].mask, mask)
    assert "a.png: annotations are of an image of 30x20 pixels, but the file has 20x30, turned upright" in notes


def test_label_studio_finds_the_image_in_the_only_text_of_a_task(photographs: Path, tmp_path: Path) -> None:
    """Its key depends on the labeling interface."""
    task = {"data": {"img": "/data/upload/7/0f3a9b2c-b.png", "number": 3}, "annotations": [choices("dog")]}
    source = write_tasks(tmp_path / "tasks.json", task)
    import_data_set("labelstudio", source, tmp_path / "out", images=photographs)
    assert tags_of(tmp_path / "out") == {"train/b.png": ["dog"]}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"data": {"img": "b.png", "text": "A dog."}}, "no key `image` in the data of a task, .* keys img, text"),
        ({"image": "b.png", "choice": "dog", "id": 7, "annotator": 1}, "tasks.json is an export `JSON-MIN`"),
    ],
)
def test_tasks_of_label_studio_without_an_image_are_an_error(tmp_path: Path, task: Any, message: str) -> None:
    source = write_tasks(tmp_path / "tasks.json", task)
    with pytest.raises(UserError, match=message):
        import_data_set("labelstudio", source, tmp_path / "out")


def test_two_tasks_of_an_image_are_an_error(photographs: Path, tmp_path: Path) -> None:
    task = {"data": LOCAL_IMAGE, "annotations": [choices("dog")]}
    source = write_tasks(tmp_path / "tasks.json", task, task | {"data": {"image": "x/a.png"}})
    with pytest.raises(UserError, match=r"two tasks are of a\.png"):
        import_data_set("labelstudio", source, tmp_path / "out", images=photographs)


def test_tasks_with_predictions_only_are_an_error(photographs: Path, tmp_path: Path) -> None:
    source = write_tasks(tmp_path / "tasks.json", {"data": {"image": "b.png"}, "predictions": [{"result": []}]})
    with pytest.raises(UserError, match=r"left out 1 task\(s\) that nobody has annotated; predictions are submitted"):
        import_data_set("labelstudio", source, tmp_path / "out", images=photographs)


# --- huggingface


def save_hugging_face(folder: Path, images: list[Path], labels: list[Any], label_type: Any) -> None:
    """Saves a data set whose splits train and validation are the same."""
    hf = require_module("datasets")
    features = hf.Features({"image": hf.Image(), "label": label_type})
    data = hf.Dataset.from_dict({"image": [str(image) for image in images], "label": labels}, features)
    hf.DatasetDict({"train": data, "validation": data}).save_to_disk(str(folder))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [([1, 0], [["cat"], ["dog"]]), ([[0, 1], []], [["cat", "dog"], []]), (["cat", "dog"], [["cat"], ["dog"]])],
    ids=["one", "several", "text"],
)
def test_hugging_face_becomes_tags(
    photographs: Path, tmp_path: Path, labels: list[Any], expected: list[list[str]]
) -> None:
    hf = require_module("datasets")
    label_type = hf.Value("string") if isinstance(labels[0], str) else hf.ClassLabel(names=["dog", "cat"])
    if isinstance(labels[0], list):
        label_type = hf.List(label_type)
    save_hugging_face(tmp_path / "saved", [photographs / "a.png", photographs / "b.png"], labels, label_type)

    for split in ("train", "val"):
        import_data_set("huggingface", tmp_path / "saved", tmp_path / "out", split=split)

    assert list(tags_of(tmp_path / "out").values()) == expected + expected


@pytest.mark.parametrize(
    ("labels", "dtype", "expected"),
    [([3, 0], "int64", ["3", "0"]), ([3, -1], "int32", ["3", ""]), ([True, False], "bool", ["True", "False"])],
)
def test_hugging_face_labels_without_names_are_names(
    photographs: Path, tmp_path: Path, labels: list[Any], dtype: str, expected: list[str]
) -> None:
    label_type = require_module("datasets").Value(dtype)
    save_hugging_face(tmp_path / "saved", [photographs / "a.png", photographs / "b.png"], labels, label_type)
    _, note, *_ = import_data_set("huggingface", tmp_path / "saved", tmp_path / "out")
    assert list(tag_cells(tmp_path / "out").values()) == expected
    assert f"column label holds {dtype} without names: the classes are named after its values" in note


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_hugging_face_vectors_of_labels_are_refused(photographs: Path, tmp_path: Path, dtype: str) -> None:
    """Read as lists of class numbers, they would give both classes to each image."""
    hf = require_module("datasets")
    images = [photographs / "a.png", photographs / "b.png", photographs / "b.png"]
    save_hugging_face(tmp_path / "saved", images, [[1, 0], None, [1, 1]], hf.List(hf.Value(dtype)))
    with pytest.raises(UserError, match=r"column label of .* holds a vector of 2 values 0 or 1 for each") as caught:
        import_data_set("huggingface", tmp_path / "saved", tmp_path / "out")
    assert "data.map(lambda row: {'label': [NAMES[k] for k, value in enumerate(row['label'])" in caught.value.remedy


@pytest.mark.parametrize("labels", [[[1, 0], [0, 1]], [[1, 1], [0]], [[1, 2], [2, 2]]])
def test_hugging_face_lists_of_class_numbers_are_no_vectors(
    photographs: Path, tmp_path: Path, labels: list[list[int]]
) -> None:
    hf = require_module("datasets")
    save_hugging_face(
        tmp_path / "saved", [photographs / "a.png", photographs / "b.png"], labels, hf.List(hf.Value("int64"))
    )
    import_data_set("huggingface", tmp_path / "saved", tmp_path / "out")
    expected = [sorted({str(label) for label in numbers}) for numbers in labels]
    assert list(tags_of(tmp_path / "out").values()) == expected


@pytest.mark.parametrize("output_exists", [False, True])
def test_hugging_face_labels_that_are_no_classes_are_refused(
    photographs: Path, tmp_path: Path, output_exists: bool
) -> None:
    """A new output folder is removed again, and an empty one stays."""
    label_type = require_module("datasets").Value("float64")
    save_hugging_face(tmp_path / "saved", [photographs / "a.png"], [0.5], label_type)
    if output_exists:
        (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="a label of type float, which is not the name or number of a class"):
        import_data_set("huggingface", tmp_path / "saved", tmp_path / "out")
    assert (tmp_path / "out").exists() == output_exists


def test_a_failed_import_of_hugging_face_keeps_earlier_copies(photographs: Path, tmp_path: Path) -> None:
    text = require_module("datasets").Value("string")
    save_hugging_face(tmp_path / "first", [photographs / "a.png"], ["cat"], text)
    save_hugging_face(tmp_path / "second", [photographs / "b.png"], ["dog"], text)
    out = tmp_path / "out"
    for split in ("train", "val"):
        import_data_set("huggingface", tmp_path / "first", out, split=split)
    (copy,) = (out / "images/val").iterdir()

    with pytest.raises(UserError, match=r"1 class\(es\) cannot be imported: dog"):
        import_data_set("huggingface", tmp_path / "second", out, split="val")
    assert copy.read_bytes() == (photographs / "a.png").read_bytes()
    assert {path.name for path in out.iterdir()} == {"photos.csv", "classes.txt", "images"}

    save_hugging_face(tmp_path / "third", [photographs / "b.png"], ["cat"], text)
    import_data_set("huggingface", tmp_path / "third", out, split="val")
    assert copy.read_bytes() == (photographs / "b.png").read_bytes()


def test_other_columns_of_hugging_face_are_not_decoded(photographs: Path, tmp_path: Path) -> None:
    hf = require_module("datasets")
    features = hf.Features({"image": hf.Image(), "label": hf.Value("string"), "thumbnail": hf.Image()})
    damaged = {"bytes": b"no picture", "path": None}
    content = {"image": [str(photographs / "a.png")], "label": ["cat"], "thumbnail": [damaged]}
    data = hf.Dataset.from_dict(content, features)
    hf.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "saved"))

    import_data_set("huggingface", tmp_path / "saved", tmp_path / "out")
    assert list(tags_of(tmp_path / "out").values()) == [["cat"]]


@pytest.mark.parametrize("place", ["/etc/*.csv", "../other/*.csv", "http://192.0.2.1/x.csv", "zip://x.csv::y.zip"])
def test_hugging_face_data_outside_of_the_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "set").mkdir()
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {place}\n---\n# Data\n"
    (tmp_path / "set/README.md").write_text(card)
    with pytest.raises(UserError, match="outside of the data set"):
        import_data_set("huggingface", tmp_path / "set", tmp_path / "out")


# --- yolo


@pytest.fixture
def yolo(photographs: Path) -> Path:
    """A data set with one photograph of a box, described by data.yaml and mine.yaml."""
    folder = photographs / "yolo"
    for part in ("images/train", "labels/train", "images/other", "labels/other"):
        (folder / part).mkdir(parents=True)
    shutil.copy(photographs / "a.png", folder / "images/train/a.png")
    (folder / "labels/train/a.txt").write_text("\n0 0.5 0.5 0.2 0.2\n\n")
    (folder / "data.yaml").write_text("names: [dog]")
    (folder / "mine.yaml").write_text("names: [cat]")
    return folder


@pytest.mark.parametrize(("source", "tag"), [("yolo", "dog"), ("yolo/mine.yaml", "cat")])
def test_yolo_is_read_from_its_folder_or_a_named_file(yolo: Path, tmp_path: Path, source: str, tag: str) -> None:
    import_data_set("yolo", yolo.parent / source, tmp_path / "out")
    assert read_imported(tmp_path / "out") == {"train/a.png": Imported([tag], None)}


def test_yolo_files_may_begin_with_a_byte_order_mark_and_end_with_empty_lines(yolo: Path, tmp_path: Path) -> None:
    """As editors of Windows write them."""
    (yolo / "data.yaml").write_text("names: [dog]\ntrain: train.txt")
    (yolo / "train.txt").write_bytes("\ufeff./images/train/a.png\r\n\r\n".encode())
    (yolo / "labels/train/a.txt").write_bytes("\ufeff0 0.5 0.5 0.2 0.2\r\n".encode())
    import_data_set("yolo", yolo, tmp_path / "out")
    assert tags_of(tmp_path / "out") == {"train/a.png": ["dog"]}


def test_files_of_yolo_that_are_no_photographs_are_left_out(yolo: Path, tmp_path: Path) -> None:
    """They would be negatives, because they have no label file."""
    (yolo / "images/train/Thumbs.db").touch()
    _, *notes = import_data_set("yolo", yolo, tmp_path / "out")
    assert [note.partition("left out ")[2] for note in notes] == [
        "1 file(s) that are no photographs, such as Thumbs.db, __MACOSX and texts"
    ]
    assert tag_cells(tmp_path / "out") == {"a.png": "dog"}


def test_label_files_of_yolo_without_an_image_are_counted(yolo: Path, tmp_path: Path) -> None:
    """A list of class names, which annotation tools write next to them, is no label file."""
    (yolo / "labels/train/deep").mkdir()
    for name in ("b.txt", "deep/c.TXT", "classes.txt", ".d.txt"):
        (yolo / "labels/train" / name).write_text(YOLO_LABELS)
    _, *notes = import_data_set("yolo", yolo, tmp_path / "out")
    assert [note.partition("left out ")[2] for note in notes] == ["2 label file(s) without an image"]


@pytest.mark.parametrize(
    ("names", "tag"), [("[yes, no]", "yes"), ("{0: on}", "on"), ("[1.50, 2]", "1.50"), ("\n  0: null\n", "null")]
)
def test_class_names_of_yolo_are_texts(yolo: Path, tmp_path: Path, names: str, tag: str) -> None:
    """YAML reads them as truth values, numbers and nothing."""
    (yolo / "data.yaml").write_text(f"names: {names}")
    import_data_set("yolo", yolo, tmp_path / "out")
    assert tags_of(tmp_path / "out") == {"train/a.png": [tag]}


def test_background_in_classes_txt_of_yolo_is_a_number_like_others(yolo: Path, tmp_path: Path) -> None:
    """Without its line, the numbers of all other classes would mean other names."""
    (yolo / "data.yaml").unlink()
    (yolo / "classes.txt").write_bytes("\ufeffbackground\r\ncat \r\ndog\r\n".encode())
    shutil.copy(yolo.parent / "b.png", yolo / "images/train/b.png")
    (yolo / "labels/train/a.txt").write_text("2 0.5 0.5 0.2 0.2")
    (yolo / "labels/train/b.txt").write_text("0 0.5 0.5 0.2 0.2")
    import_data_set("yolo", yolo, tmp_path / "out")
    assert tag_cells(tmp_path / "out") == {"a.png": "dog", "b.png": "none"}


@pytest.mark.parametrize("content", ["", "dog\n\ncat\n", None], ids=["empty", "blank line", "absent"])
def test_invalid_classes_txt_of_yolo_is_refused(yolo: Path, tmp_path: Path, content: str | None) -> None:
    (yolo / "data.yaml").unlink()
    message = "no file data.yaml or dataset.yaml or classes.txt"
    if content is not None:
        (yolo / "classes.txt").write_text(content)
        message = "classes.txt is empty, or a line before a class name is blank"
    with pytest.raises(UserError, match=message):
        import_data_set("yolo", yolo, tmp_path / "out")


@pytest.mark.parametrize("names", ["", "dog", "[[dog]]"])
def test_yolo_without_class_names_is_refused(yolo: Path, tmp_path: Path, names: str) -> None:
    (yolo / "data.yaml").write_text(f"names: {names}")
    with pytest.raises(UserError, match="`names` is not a list of class names"):
        import_data_set("yolo", yolo, tmp_path / "out")


def test_class_names_of_yolo_may_have_any_character(photographs: Path, tmp_path: Path) -> None:
    labels = np.zeros((20, 30), np.uint8)
    labels[:9, :9] = 1
    path = photographs / "a.png"
    image = LabeledImage(str(path), sha256(path.read_bytes()).hexdigest(), "a", labels)
    export_data_set("yolo", ["Löwe \N{LION FACE}"], [image], tmp_path / "written")

    import_data_set("yolo", tmp_path / "written", tmp_path / "out")
    assert tags_of(tmp_path / "out") == {"train/a.jpg": ["Löwe \N{LION FACE}"]}


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../secret/images/train", "no folders"),
        ("[images/train, x]", "train of .* does not name"),
        ("", "train of .* does not name"),
    ],
    ids=["outside", "list", "empty"],
)
def test_yolo_outside_of_its_folder_is_refused(yolo: Path, tmp_path: Path, location: str, message: str) -> None:
    shutil.copytree(yolo, tmp_path / "secret")
    (yolo / "data.yaml").write_text(f"names: [dog]\ntrain: {location}")
    with pytest.raises(UserError, match=message):
        import_data_set("yolo", yolo, tmp_path / "out")


def test_absent_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UserError, match="no library yaml") as caught:
        import_data_set("yolo", tmp_path, tmp_path / "out")
    assert caught.value.expected == "`yaml`, which the extra `formats` installs"
    assert ".[formats]" in caught.value.remedy

"""Data sets of other tools become tables that the source `tags` takes (exports that are read again: test_export)."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.formats import import_data_set
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.formats.outlines import compressed_run_pixels
from mcis.datasets.images.decode import decode_labels
from mcis.datasets.sources.tagged import list_tagged

SQUARE = [[2.0, 2.0, 12.0, 2.0, 12.0, 12.0, 2.0, 12.0]]
CONTENT: dict[str, Any] = {
    "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 9, "name": "a;b"}],
    "images": [{"id": k, "file_name": f"{name}.png", "height": 20, "width": 30} for k, name in enumerate("abc")],
    "annotations": [
        {"image_id": 0, "category_id": 7, "segmentation": SQUARE},
        {"image_id": 0, "category_id": 3, "segmentation": {"size": [20, 30], "counts": [0, 120, 480]}},
        {"image_id": 0, "category_id": 3, "segmentation": {"size": [20, 30], "counts": [400, 200]}, "iscrowd": 1},
        {"image_id": 1, "category_id": 7, "segmentation": SQUARE},
        {"image_id": 5, "category_id": 7, "segmentation": SQUARE},
    ],
}


def tags_and_masks(folder: Path) -> dict[str, tuple[list[str], Any]]:
    found = list_tagged(folder / "photos.csv")
    rows = found.table.to_pylist()
    assert all(Path(row["uri"]).is_file() for row in rows)
    masks = [row["mask_uri"] and decode_labels(Path(row["mask_uri"]).read_bytes()) for row in rows]
    tags = [[found.classes[k] for k in row["tags"]] for row in rows]
    return {row["image_id"][7:]: (tag, mask) for row, tag, mask in zip(rows, tags, masks, strict=True)}


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    for k, name in enumerate("ab"):  # c is absent
        Image.new("RGB", (30, 20), (k, 0, 0)).save(tmp_path / f"{name}.png")
    (tmp_path / "set.json").write_text(json.dumps(CONTENT))
    return tmp_path / "set.json"


def test_splits_of_coco_become_one_table(coco: Path, tmp_path: Path) -> None:
    """Classes by the alphabet; of two that overlap the smaller on top, crowds ignored and no tags."""
    said = import_data_set("coco", coco, tmp_path / "out")
    assert "left out 1 annotation(s) of images that it does not list" in said[1]
    assert "left out 1 crowd(s), which give no tag" in said[2]
    assert "left out 1 image(s) that are not in" in said[3]
    import_data_set("coco", coco, tmp_path / "out", split="val", classes=["cat"])
    labels, square = np.zeros((20, 30)), np.zeros((20, 30))
    labels[:, 20:], labels[:, :6], labels[2:12, 2:12], square[2:12, 2:12] = 255, 1, 2, 2
    expected = {"train/a": (["cat", "dog"], labels), "train/b": (["dog"], square)}
    expected |= {"val/a": (["cat", "dog"], labels), "val/b": (["dog"], square)}  # dog is a class of the table by then
    for (name, (tags, mask)), found in zip(expected.items(), tags_and_masks(tmp_path / "out").items(), strict=True):
        assert found[0] == f"{name}.png"
        assert found[1][0] == tags
        np.testing.assert_array_equal(found[1][1], mask)
    import_data_set("coco", coco, tmp_path / "one", classes=["cat"])
    with pytest.raises(UserError, match=r"1 class\(es\): dog"):
        import_data_set("coco", coco, tmp_path / "one", split="val")


FAULTS: list[tuple[str, int, str, Any, str]] = [
    ("images", 0, "file_name", "../a.png", "1 of 3 images of .* illegible: ../a.png"),
    ("images", 0, "file_name", "/etc/passwd", "/etc/passwd"),
    ("images", 0, "id", 1, "there twice"),
    ("annotations", 0, "category_id", 8, "category_id 8, which no category has"),
    ("annotations", 0, "category_id", 9, r"1 class\(es\): a;b"),
    ("categories", 0, "name", 3, "no attribute"),
]
BAD_RUNS: list[Any] = ["oooooo", "o" * 999, "", "0", [0, 50], [0, 50, 2**40], [700, -100], [2**70]]
UNDRAWN: list[tuple[str, str, Any, str]] = [
    ("images", "width", "wide", "annotations are of"),
    *(("annotations", "segmentation", {"size": [20, 30], "counts": runs}, "do not add up") for runs in BAD_RUNS),
    ("annotations", "segmentation", [[0, 0, float("nan"), 1, 1, 1]], "three corners"),
]


@pytest.mark.parametrize(("part", "key", "value", "found"), UNDRAWN)
def test_a_mask_that_cannot_be_drawn_is_named(coco: Path, part: str, key: str, value: Any, found: str) -> None:
    content = json.loads(json.dumps(CONTENT))
    content[part][0][key] = value
    coco.write_text(json.dumps(content))
    said = " ".join(import_data_set("coco", coco, coco.parent / "out"))
    assert "left out 1 mask(s)" in said
    assert found in said.partition("a.png: ")[2]
    (tags, mask), (_, other) = tags_and_masks(coco.parent / "out").values()
    assert (tags, mask, other.max()) == (["cat", "dog"], None, 2)
    coco.write_text(json.dumps(CONTENT))
    import_data_set("coco", coco, coco.parent / "out")
    assert all(mask.max() for _, mask in tags_and_masks(coco.parent / "out").values()), "once it is corrected"
    coco.write_text(json.dumps(content))
    Path(coco.parent / "b.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"/a\.png: "):
        import_data_set("coco", coco, coco.parent / "all")


@pytest.mark.parametrize(("part", "number", "key", "value", "found"), FAULTS)
def test_a_fault_in_a_json_is_named(coco: Path, part: str, number: int, key: str, value: Any, found: str) -> None:
    content = json.loads(json.dumps(CONTENT))
    content[part][number][key] = value
    coco.write_text(json.dumps(content))
    with pytest.raises(UserError, match=found) as caught:
        import_data_set("coco", coco, coco.parent / "out")
    assert caught.value.remedy
    assert not (coco.parent / "out" / "photos.csv").exists()


@settings(max_examples=100)
@given(arrays(np.bool_, array_shapes(min_dims=2, max_dims=2, max_side=40)))
def test_run_lengths_are_the_pixels_that_pycocotools_wrote(pixels: np.ndarray) -> None:
    compressed = require_module("pycocotools.mask").encode(np.asfortranarray(pixels, np.uint8))["counts"].decode()
    np.testing.assert_array_equal(compressed_run_pixels(compressed, *pixels.shape), pixels)


def test_a_photograph_in_two_class_folders_has_both_tags(coco: Path, tmp_path: Path) -> None:
    hidden = (("cat/.thumb.png", "a"), (".trash/dog/4.png", "b"))
    for name, of in (("cat/deep/1.png", "a"), ("dog/2.png", "a"), ("dog/3.png", "b"), *hidden):
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / f"{of}.png", tmp_path / "pets" / name)
    _, *told = import_data_set("folders", tmp_path / "pets", tmp_path / "out")
    assert [line.partition("left out ")[2][:8] for line in told] == ["1 furthe", "2 hidden"]
    found = {name: tags for name, (tags, _) in tags_and_masks(tmp_path / "out").items()}
    assert found == {"train/cat/deep/1.png": ["cat", "dog"], "train/dog/3.png": ["dog"]}
    shutil.copytree(tmp_path / "pets", tmp_path / "all/valid")
    with pytest.raises(UserError, match="1 files are in no class folder"):
        import_data_set("folders", tmp_path / "pets/cat/deep", tmp_path / "flat")
    with pytest.raises(UserError, match="folders of splits, not of classes"):
        import_data_set("folders", tmp_path / "all", tmp_path / "of splits")


CVAT = """<?xml version="1.0"?><annotations><version>1.1</version><meta/>
<image id="0" name="a.png" width="30" height="20"><tag label="cat" source="manual"><attribute name="x">1</attribute>
</tag><box label="dog" xtl="1" ytl="2" xbr="9" ybr="9"/></image><image id="1" name="b.png" width="30" height="20">
<polygon label="dog" points="2.0,2.0;11.5,2.0;11.5,11.5;2.0,11.5"/>
<mask label="cat" rle="1,2,3" left="28" top="17" width="2" height="3"/></image></annotations>"""


def test_tags_and_outlines_of_cvat(coco: Path, tmp_path: Path) -> None:
    (tmp_path / "annotations.xml").write_text(CVAT)
    import_data_set("cvat", tmp_path / "annotations.xml", tmp_path / "out")
    (tags, mask), (both, drawn) = tags_and_masks(tmp_path / "out").values()
    assert (tags, mask, both) == (["cat", "dog"], None, ["cat", "dog"])
    expected = np.zeros((20, 30))
    expected[2:12, 2:12], expected[17, 29], expected[18, 28] = 2, 1, 1
    np.testing.assert_array_equal(drawn, expected)
    (tmp_path / "annotations.xml").write_text(CVAT.replace('top="17"', 'top="18"'))
    with pytest.raises(UserError, match=r"b\.png: a mask at 28, 18 of 2x3 pixels in an image of 30x20"):
        import_data_set("cvat", tmp_path / "annotations.xml", tmp_path / "out")
    (tmp_path / "annotations.xml").write_text(CVAT.replace('id="0"', 'subset="val"'))
    told = import_data_set("cvat", tmp_path / "annotations.xml", tmp_path / "of one subset")
    assert "1 photographs" in told[0]
    assert f"left out 1 image(s) of subset val, for {tmp_path.name}" in told[1]
    for old, new, found in (
        ("a.png", "b.png", "two images are named b.png"),
        ("<image", '<image subset="A"', r"no photograph in it: left out 2 image\(s\) of subset A, for "),
    ):
        (tmp_path / "annotations.xml").write_text(CVAT.replace(old, new))
        with pytest.raises(UserError, match=found):
            import_data_set("cvat", tmp_path / "annotations.xml", tmp_path / "none")


def test_tags_of_label_studio_are_those_of_the_last_annotation_that_counts(coco: Path, tmp_path: Path) -> None:
    """By a path of its local storage, and by the name of an upload, which begins with eight digits or letters."""
    said = [{"result": [{"type": "choices", "value": {"choices": tags}}]} for tags in (["dog"], ["cat", "dog"])]
    places = ("/data/local-files/?d=set/a.png", "/data/upload/7/0f3a9b2c-b.png")
    tasks: Any = [{"data": {"image": place}, "annotations": said[:n]} for n, place in enumerate(places, 1)]
    tasks[1]["annotations"].append({"was_cancelled": True, "result": said[0]["result"]})
    tasks[1]["annotations"][1]["result"].append({"type": "relation", "from_id": "x", "to_id": "y"})
    tasks.append({"data": {"image": "c.png"}, "annotations": [{"was_cancelled": True, "result": []}]})
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    told = import_data_set("labelstudio", tmp_path / "tasks.json", tmp_path / "out", images=tmp_path)
    reasons = (
        "earlier annotation(s) of a photograph",
        "result(s) of type relation",
        "task(s) that nobody has annotated; predictions are submitted in Label Studio first",
    )
    assert [line.partition("left out ")[2] for line in told[1:]] == [f"1 {reason}" for reason in reasons]
    assert [tags for tags, _ in tags_and_masks(tmp_path / "out").values()] == [["dog"], ["cat", "dog"]]
    (tmp_path / "tasks.json").write_text(json.dumps([tasks[0], tasks[0] | {"data": {"image": "x/a.png"}}]))
    with pytest.raises(UserError, match=r"two tasks are of a\.png"):
        import_data_set("labelstudio", tmp_path / "tasks.json", tmp_path / "twice", images=tmp_path)
    proposals = json.dumps([{"data": {"image": "b.png"}, "predictions": [{"result": []}]}])
    (tmp_path / "tasks.json").write_text(proposals)
    with pytest.raises(UserError, match=r"left out 1 task\(s\) that nobody has annotated; predictions are submitted"):
        import_data_set("labelstudio", tmp_path / "tasks.json", tmp_path / "none", images=tmp_path)


@pytest.mark.parametrize("labels", [[1, 0], [[0, 1], []], ["cat", "dog"]], ids=["one", "several", "text"])
def test_a_data_set_of_hugging_face(coco: Path, tmp_path: Path, labels: list[Any]) -> None:
    hf = require_module("datasets")
    one = hf.Value("string") if labels[0] == "cat" else hf.ClassLabel(names=["dog", "cat"])
    features = {"image": hf.Image(), "label": hf.List(one) if isinstance(labels[0], list) else one}
    content = {"image": [str(tmp_path / "a.png"), str(tmp_path / "b.png")], "label": labels}
    data = hf.Dataset.from_dict(content, hf.Features(features))
    hf.DatasetDict({"train": data, "validation": data}).save_to_disk(str(tmp_path / "saved"))
    for split in ("train", "val"):
        import_data_set("huggingface", tmp_path / "saved", tmp_path / "out", split=split)
    tags = [tags for tags, _ in tags_and_masks(tmp_path / "out").values()]
    assert tags == 2 * ([["cat", "dog"], []] if isinstance(labels[0], list) else [["cat"], ["dog"]])


@pytest.mark.parametrize("name", ["photos.csv", "classes.txt"])
def test_files_of_others_are_not_written_over(coco: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("image,tags,split,mask\n")
    with pytest.raises(UserError, match=r"holds photos\.csv or classes\.txt of others"):
        import_data_set("coco", coco, tmp_path)
    assert (tmp_path / name).read_text() == "image,tags,split,mask\n"


def test_yolo_is_read_by_the_file_that_is_named_and_from_its_folder(coco: Path, tmp_path: Path) -> None:
    for part in ("images/train", "labels/train", "images/other", "labels/other"):
        (tmp_path / "yolo" / part).mkdir(parents=True)
    shutil.copy(tmp_path / "a.png", tmp_path / "yolo/images/train/a.png")
    (tmp_path / "yolo/labels/train/a.txt").write_text("\n0 0.5 0.5 0.2 0.2\n\n")
    (tmp_path / "yolo/data.yaml").write_text("names: [dog]")
    (tmp_path / "yolo/mine.yaml").write_text("names: [cat]")
    for source, tag in (("yolo", "dog"), ("yolo/mine.yaml", "cat")):
        import_data_set("yolo", tmp_path / source, tmp_path / tag)
        assert tags_and_masks(tmp_path / tag) == {"train/a.png": ([tag], None)}
    shutil.copytree(tmp_path / "yolo", tmp_path / "secret")
    for place, found in (("../secret/images/train", "no folders"), ("[images/train, x]", "train of .* is no text")):
        (tmp_path / "yolo/data.yaml").write_text(f"names: [dog]\ntrain: {place}")
        with pytest.raises(UserError, match=found):
            import_data_set("yolo", tmp_path / "yolo", tmp_path / "none")


def test_a_library_that_is_absent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UserError, match="no library yaml") as caught:
        import_data_set("yolo", tmp_path, tmp_path / "out")
    assert "mcis[formats]" in caught.value.remedy

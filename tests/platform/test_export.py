"""Other programs read what `mcis export` writes: torchvision, pycocotools, supervision, torch.export, ONNX Runtime."""

import csv
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import onnxruntime
import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageDraw, ImageOps
from scipy import ndimage
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.formats.importing import import_data_set
from mcis.datasets.images.label_masks import decode_labels, encode_labels
from mcis.datasets.index import INDEX_SCHEMA
from mcis.datasets.sources.tagged import list_tagged
from mcis.platform.cli import app
from mcis.platform.networks.predictor import Predictor
from mcis.platform.outputs.corrected_masks import CORRECTED, with_corrected
from mcis.platform.outputs.tables import MASKS_SCHEMA, PREDICTIONS_SCHEMA
from mcis.platform.reporting import files
from mcis.platform.reporting.export import export
from mcis.platform.reporting.files import class_file_names, file_names, labels_table
from mcis.platform.runs.files import write_table
from mcis.platform.runs.results import IndexResult, PredictResult, write_result
from mcis.platform.runs.workspace import Workspace


def image(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))


def labels(height: int, width: int, highest: int = 20) -> np.ndarray:
    return np.random.default_rng(width).integers(0, highest + 1, (height, width)).astype(np.uint8)


def make_run(workspace: Workspace, images: dict[str, Path], classes: tuple[str, ...], **tables: pa.Table) -> Workspace:
    """Makes a run `made` with an index of these images, and with tables as its stages write them."""
    rows = []
    for image_id, path in images.items():
        width, height = ImageOps.exif_transpose(Image.open(path)).size
        row: dict[str, Any] = {"image_id": image_id, "uri": str(path), "domain": "target", "split": "test"}
        row |= {"tags": [0], "is_negative": False}
        rows.append(row | {"height": height, "width": width, "content_hash": sha256(path.read_bytes()).hexdigest()})

    index = workspace.output("index", "made")
    write_table(index / "index.parquet", pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    write_table(index / "rejects.parquet", pa.table({"image_id": pa.array([], pa.string())}))
    write_result(index, IndexResult(classes=classes, counts={"images": {}}), key="made")

    outputs = {"index": index}
    for stage, table in tables.items():
        outputs[stage] = workspace.output(stage, "made")
        name = {"pseudo_masks": "masks", "predict": "predictions"}[stage]
        write_table(outputs[stage] / name / "part-00000000.parquet", table)
        write_result(outputs[stage], PredictResult(split="test"), key="made")
    workspace.run("made")
    workspace.record_outputs("made", outputs)
    return workspace


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Path]:
    """By id: a JPEG, a rotated JPEG, a PNG, a gray JPEG; ids are names, paths and URIs."""
    folder = tmp_path / "images"
    folder.mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6
    image(60, 80).save(folder / "plain.jpg")
    image(50, 70).save(folder / "turned.jpg", exif=turned)
    image(40, 30).save(folder / "a.png")
    image(20, 30).convert("L").save(folder / "gray.jpg")
    return {
        "plain": folder / "plain.jpg",
        "s3://bucket/web/turned.jpg": folder / "turned.jpg",
        str(folder / "a.png"): folder / "a.png",
        "My photos/gray": folder / "gray.jpg",
    }


@pytest.fixture
def pseudo_masks() -> list[np.ndarray]:
    """A mask for each image, some of them smaller than the image."""
    masks = [labels(*size, highest=2) for size in ((60, 80), (35, 25), (20, 15), (20, 30))]
    masks[0][:5] = 255
    return masks


@pytest.fixture
def workspace(images: dict[str, Path], pseudo_masks: list[np.ndarray], tmp_path: Path) -> Workspace:
    """A workspace with a run of these images and masks, which has been exported to `out`."""
    rows = []
    for image_id, mask in zip(images, pseudo_masks, strict=True):
        row = {"image_id": image_id, "labels": b"", "mask": encode_labels(mask), "cue": "crf"}
        rows.append(row | {"ignored": 0.0, "foreground": 0.0})
    table = pa.Table.from_pylist(rows, schema=MASKS_SCHEMA)
    workspace = make_run(Workspace(tmp_path / "workspace"), images, ("cat", "dog"), pseudo_masks=table)
    for _ in range(2):  # the second export overwrites the first
        text = export(workspace, "made", "masks", tmp_path / "out")
        assert text.startswith("4 images and their pseudo masks in ")
    return workspace


@pytest.mark.usefixtures("workspace")
def test_torchvision_reads_pseudo_masks_at_the_size_of_their_images(
    images: dict[str, Path], pseudo_masks: list[np.ndarray], tmp_path: Path
) -> None:
    importlib.import_module("mcis.models.torchvision_ops")  # must precede torchvision
    from torchvision.datasets import VOCSegmentation

    read = VOCSegmentation(str(tmp_path / "out"), year="2012", image_set="train", download=False)
    assert len(read) == 4
    for (picture, mask), (image_id, path), pseudo_mask in zip(read, images.items(), pseudo_masks, strict=True):
        size = (50, 70) if "turned" in image_id else Image.open(path).size
        assert picture.mode == "RGB"
        assert picture.size == mask.size == size
        nearest = Image.fromarray(pseudo_mask).resize(size, Image.Resampling.NEAREST)
        np.testing.assert_array_equal(np.asarray(mask), np.asarray(nearest))


@pytest.mark.usefixtures("workspace")
def test_an_upright_jpeg_is_copied_and_a_rotated_one_is_turned(images: dict[str, Path], tmp_path: Path) -> None:
    devkit = tmp_path / "out" / "VOCdevkit" / "VOC2012"
    assert (devkit / "JPEGImages" / "plain.jpg").read_bytes() == images["plain"].read_bytes()
    upright = np.asarray(Image.open(images["s3://bucket/web/turned.jpg"]).transpose(Image.Transpose.ROTATE_270))
    exported = np.asarray(Image.open(devkit / "JPEGImages" / "s3/bucket/web/turned.jpg"))
    assert np.abs(exported.astype(int) - upright).mean() < 4


@pytest.mark.usefixtures("workspace")
def test_tables_of_an_export_name_images_cues_and_labels(images: dict[str, Path], tmp_path: Path) -> None:
    devkit = tmp_path / "out" / "VOCdevkit" / "VOC2012"
    with (tmp_path / "out" / "cues.csv").open(newline="") as file:
        cues = list(csv.DictReader(file))
    assert [row["image"] for row in cues] == list(images)
    assert [row["name"] for row in cues] == (devkit / "ImageSets/Segmentation/train.txt").read_text().splitlines()
    assert (tmp_path / "out" / "labels.csv").read_text().splitlines()[2] == "1,cat,128,0,0"


@pytest.mark.usefixtures("workspace")
def test_files_are_named_after_ids_without_the_suffix_of_the_image(images: dict[str, Path], tmp_path: Path) -> None:
    names = (tmp_path / "out/VOCdevkit/VOC2012/ImageSets/Segmentation/train.txt").read_text().splitlines()
    assert names == ["plain", "s3/bucket/web/turned", str(images["plain"].parent / "a").lstrip("/"), "My photos/gray"]


def test_ids_that_differ_only_in_their_suffix_keep_it() -> None:
    names = file_names(["x/a.jpg", "x/a.PNG", "b.jpeg", "c.v2"], Path("out"))
    assert list(names.values()) == ["x/a.jpg", "x/a.PNG", "b", "c.v2"]


def test_a_changed_image_is_not_exported(workspace: Workspace, images: dict[str, Path], tmp_path: Path) -> None:
    image(60, 81).save(images["plain"])
    with pytest.raises(UserError, match=r"plain\.jpg was replaced or changed since it was indexed"):
        export(workspace, "made", "masks", tmp_path / "out")


class Labeled(NamedTuple):
    """A run of two images whose predictions have holes, islands in them, specks, lines, and an ignored frame.

    Attributes:
        workspace: Workspace of the run `made`, whose classes are cat and sea lion.
        images: Folder of the images.
        masks: The predictions, (H, W) each.
    """

    workspace: Workspace
    images: Path
    masks: list[np.ndarray]

    def export(self, out: Path, format: str) -> None:
        """Exports the predictions."""
        export(self.workspace, "made", "predictions", out, format)


def labeled_mask(height: int, width: int) -> np.ndarray:
    noise = np.random.default_rng(height).random((2, height, width))
    first = ndimage.gaussian_filter(noise[0], 3) > 0.5
    second = ndimage.gaussian_filter(noise[1], 0.8) > 0.5
    mask = np.where(first, 1, 2 * second).astype(np.uint8)
    mask[:3] = 255
    return mask


@pytest.fixture
def labeled(tmp_path: Path) -> Labeled:
    folder = tmp_path / "in"
    paths = {"p/one.png": folder / "p/one.png", "images/two": folder / "images/two.jpg"}
    sizes = [(90, 120), (60, 40)]
    masks = [labeled_mask(*size) for size in sizes]
    for path, size in zip(paths.values(), sizes, strict=True):
        path.parent.mkdir(parents=True)
        image(*size).save(path)

    rows = [{"image_id": name, "plain": encode_labels(mask)} for name, mask in zip(paths, masks, strict=True)]
    table = pa.Table.from_pylist(rows, schema=PREDICTIONS_SCHEMA)
    workspace = make_run(Workspace(tmp_path / "workspace"), paths, ("cat", "sea lion"), predict=table)
    return Labeled(workspace, folder, masks)


def without_ignored(mask: np.ndarray) -> np.ndarray:
    return np.where(mask == 255, 0, mask)


def assert_imported(folder: Path, masks: list[np.ndarray]) -> None:
    """An imported table has these masks, without ignored pixels and in any order, and their classes as tags."""
    imported = list_tagged(folder / "photos.csv")
    assert imported.classes == ("cat", "sea lion")
    assert imported.table["tags"].to_pylist() == [[0, 1], [0, 1]]
    read = [decode_labels(Path(uri).read_bytes()) for uri in imported.table["mask_uri"].to_pylist()]
    for mask, again in zip(masks, sorted(read, key=len, reverse=True), strict=True):
        np.testing.assert_array_equal(again, without_ignored(mask))


@pytest.fixture
def coco(labeled: Labeled, tmp_path: Path) -> Path:
    """The predictions in the format of COCO, exported by the command."""
    options = ["--name", "made", "--workspace", str(labeled.workspace.root), "--out", str(tmp_path / "coco")]
    done = CliRunner().invoke(app, ["export", "predictions", "--format", "coco", *options])
    assert done.exit_code == 0, done.output
    return tmp_path / "coco" / "annotations.json"


def test_torchvision_reads_objects_of_coco(labeled: Labeled, coco: Path) -> None:
    importlib.import_module("mcis.models.torchvision_ops")  # must precede torchvision
    from pycocotools.coco import COCO
    from torchvision.datasets import CocoDetection

    annotations = COCO(str(coco))
    data_set = CocoDetection(str(labeled.images), str(coco))
    for (picture, objects), mask in zip(data_set, labeled.masks, strict=True):
        assert picture.size == mask.shape[::-1]
        drawn = [annotations.annToMask(item) for item in objects]
        assert [item["area"] for item in objects] == [pixels.sum() for pixels in drawn]
        total: Any = sum(pixels * item["category_id"] for pixels, item in zip(drawn, objects, strict=True))
        np.testing.assert_array_equal(total, without_ignored(mask))


def test_objects_of_coco_have_full_precision_as_detections_of_themselves(coco: Path) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations = COCO(str(coco))
    detections = annotations.loadRes([item | {"score": 1.0} for item in annotations.dataset["annotations"]])
    evaluation = COCOeval(annotations, detections, "segm")
    evaluation.params.maxDets = [len(annotations.anns)]
    evaluation.evaluate()
    evaluation.accumulate()
    assert (evaluation.eval["precision"][:, :, :, 0] == 1).all()


def test_objects_of_coco_are_imported_again(labeled: Labeled, coco: Path, tmp_path: Path) -> None:
    options = ["--images", str(labeled.images), "--out", str(tmp_path / "again")]
    done = CliRunner().invoke(app, ["import", "coco", str(coco), *options])
    assert "2 photographs of split train, 2 with tags, 2 with a mask" in done.output
    assert_imported(tmp_path / "again", labeled.masks)


@pytest.mark.parametrize(
    ("image_id", "format", "is_noted"), [("17", "coco", True), ("17", "yolo", False), ("p/one.png", "coco", False)]
)
def test_images_that_are_named_by_ids_of_their_own_give_a_note(
    labeled: Labeled, tmp_path: Path, capsys: pytest.CaptureFixture[str], image_id: str, format: str, is_noted: bool
) -> None:
    """Another photograph could be named 17.png."""
    rows = [{"image_id": image_id, "plain": encode_labels(labeled.masks[0])}]
    table = pa.Table.from_pylist(rows, schema=PREDICTIONS_SCHEMA)
    paths = {image_id: labeled.images / "p/one.png"}
    workspace = make_run(Workspace(tmp_path / "other"), paths, ("cat", "sea lion"), predict=table)

    export(workspace, "made", "predictions", tmp_path / "out", format)
    shown = " ".join(capsys.readouterr().out.split())
    assert ("note: 1 image(s) are named by their ids, not by the paths of their files: 17.png" in shown) == is_noted


def test_objects_of_cvat_are_imported_again(labeled: Labeled, tmp_path: Path) -> None:
    labeled.export(tmp_path / "cvat", "cvat")
    annotations = tmp_path / "cvat" / "annotations.xml"
    import_data_set("cvat", annotations, tmp_path / "again", images=labeled.images)
    assert_imported(tmp_path / "again", labeled.masks)


@pytest.fixture
def yolo(labeled: Labeled, tmp_path: Path) -> Path:
    """The predictions in the format of YOLO."""
    labeled.export(tmp_path / "yolo", "yolo")
    return tmp_path / "yolo"


@pytest.mark.filterwarnings("ignore:OpenCV")
def test_polygons_of_yolo_are_read_to_the_pixel(labeled: Labeled, yolo: Path) -> None:
    from_yolo: Any = importlib.import_module("supervision").DetectionDataset.from_yolo
    for folder, mask in zip(("p", "_images"), labeled.masks, strict=True):  # readers replace the last `images`
        folders = [str(yolo / kind / folder) for kind in ("images", "labels")]
        ((_, _, objects),) = list(from_yolo(*folders, str(yolo / "data.yaml")))
        drawn: Any = sum(pixels * (k + 1) for pixels, k in zip(objects.mask, objects.class_id, strict=True))
        np.testing.assert_array_equal(drawn, without_ignored(mask))


def test_polygons_of_yolo_are_imported_again(labeled: Labeled, yolo: Path, tmp_path: Path) -> None:
    import_data_set("yolo", yolo, tmp_path / "again")
    assert_imported(tmp_path / "again", labeled.masks)


@pytest.mark.parametrize("format", ["coco", "cvat", "yolo", "labelstudio"])
def test_small_objects_are_left_out(labeled: Labeled, tmp_path: Path, format: str) -> None:
    areas = []
    for mask in labeled.masks:
        for label in (1, 2):
            regions, _ = ndimage.label(mask == label)
            areas += np.bincount(regions.ravel())[1:].tolist()
    kept = sum(area >= 40 for area in areas)
    assert 0 < kept < len(areas)

    text = export(labeled.workspace, "made", "predictions", tmp_path / "all", format)
    assert text.startswith(f"{len(areas)} objects, ")
    text = export(labeled.workspace, "made", "predictions", tmp_path / "large", format, min_area=40)
    assert text.startswith(f"{kept} objects, connected regions of at least 40 pixels")


def test_a_smallest_area_needs_objects(labeled: Labeled, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a smallest area of objects without a format"):
        export(labeled.workspace, "made", "predictions", tmp_path / "out", min_area=2)
    assert not (tmp_path / "out").exists()


def test_objects_are_exported_only_to_a_new_folder(labeled: Labeled, yolo: Path) -> None:
    with pytest.raises(UserError, match="yolo contains files"):
        labeled.export(yolo, "yolo")


@pytest.mark.parametrize(
    ("format", "advice"), [("yolo", "remove {out} or choose another --out, and repeat"), ("png", "incomplete; repeat")]
)
def test_an_interrupted_export_says_how_to_repeat_it(
    labeled: Labeled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, advice: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mcis.datasets.formats.yolo.write_photograph", interrupt)
    monkeypatch.setattr("mcis.platform.reporting.export.write_all", interrupt)
    out = tmp_path / "out"
    options = ["--name", "made", "--workspace", str(labeled.workspace.root), "--out", str(out)]
    done = CliRunner().invoke(app, ["export", "predictions", "--format", format, *options])
    assert done.exit_code == 130
    assert out.is_dir()
    assert advice.format(out=out) in done.output


def test_an_interrupted_export_does_not_advise_removing_earlier_files(
    labeled: Labeled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mcis.platform.reporting.export.export", interrupt)
    out = tmp_path / "out"
    out.mkdir()
    (out / "corrected.png").touch()
    options = ["--name", "made", "--workspace", str(labeled.workspace.root), "--out", str(out)]
    done = CliRunner().invoke(app, ["export", "predictions", "--format", "yolo", *options])
    assert done.exit_code == 130
    assert "interrupted: the result is incomplete; repeat the command" in done.output


def test_a_list_of_images_of_yolo_may_name_missing_ones(yolo: Path, tmp_path: Path) -> None:
    (yolo / "data.yaml").write_text("train: train.txt\nnames: [cat, sea lion]")
    (yolo / "train.txt").write_text("data/images/_images/two.jpg\ndata/images/gone.jpg\n")
    notes = import_data_set("yolo", yolo, tmp_path / "listed")
    assert "1 photographs of split train, 1 with tags, 1 with a mask" in notes[0]
    assert "left out 1 image(s) that are not in" in notes[1]


def test_polygons_of_yolo_in_pixels_are_refused(yolo: Path, tmp_path: Path) -> None:
    (yolo / "labels" / "_images" / "two.txt").write_text("0 10 10 90 10 90 90\n")
    with pytest.raises(UserError, match="polygon in fractions of the image's sides"):
        import_data_set("yolo", yolo, tmp_path / "in pixels")


@pytest.fixture
def label_studio(labeled: Labeled, tmp_path: Path) -> Path:
    """The predictions as tasks of Label Studio, and `done.json`, the tasks with their predictions accepted."""
    out = tmp_path / "tasks"
    labeled.export(out, "labelstudio")
    tasks = json.loads((out / "tasks.json").read_text())
    annotated = [task | {"annotations": task["predictions"]} for task in tasks]
    (tmp_path / "done.json").write_text(json.dumps(annotated))
    return out


def test_polygons_of_label_studio_are_masks_at_twice_the_size(labeled: Labeled, label_studio: Path) -> None:
    tasks = json.loads((label_studio / "tasks.json").read_text())
    for task, mask in zip(tasks, labeled.masks, strict=True):
        height, width = mask.shape
        doubled = Image.new("L", (2 * width, 2 * height))
        for result in task["predictions"][0]["result"]:
            value = result["value"]
            points = np.array(value["points"]) * (width / 50, height / 50) - 0.5
            label = ("cat", "sea lion").index(value["polygonlabels"][0]) + 1
            ImageDraw.Draw(doubled).polygon([(x, y) for x, y in points.round().tolist()], fill=label)
        np.testing.assert_array_equal(np.array(doubled)[::2, ::2], without_ignored(mask))


def test_tasks_of_label_studio_have_images_and_labels(labeled: Labeled, label_studio: Path) -> None:
    tasks = json.loads((label_studio / "tasks.json").read_text())
    for task, mask in zip(tasks, labeled.masks, strict=True):
        prefix, _, path = task["data"]["image"].partition("=")
        assert prefix == "/data/local-files/?d"
        assert Image.open(label_studio / path).size == mask.shape[::-1]
    labels = ElementTree.parse(label_studio / "labels.xml").findall("PolygonLabels/Label")
    assert [label.get("value") for label in labels] == ["cat", "sea lion"]


def test_tasks_of_label_studio_are_imported_again(labeled: Labeled, label_studio: Path, tmp_path: Path) -> None:
    import_data_set("labelstudio", tmp_path / "done.json", tmp_path / "again", images=label_studio)
    assert_imported(tmp_path / "again", labeled.masks)


def test_imported_masks_are_corrected_masks_with_the_labels_of_an_export(
    labeled: Labeled, label_studio: Path, tmp_path: Path
) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_bytes(labels_table(["dog", "sea lion", "cat"]))
    out = tmp_path / "as trained"
    import_data_set("labelstudio", tmp_path / "done.json", out, images=label_studio / "images", labels=labels)

    ids = pa.table({"image_id": ["images/two", "p/one.png"]})
    corrected = with_corrected(ids, out / "masks" / "train")[CORRECTED].to_pylist()
    for file, mask in zip(corrected, reversed(labeled.masks), strict=True):
        expected = np.array([0, 3, 2])[without_ignored(mask)]
        np.testing.assert_array_equal(decode_labels(Path(file).read_bytes()), expected)


def test_a_file_that_is_no_table_of_labels_is_refused(label_studio: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "done.json"
    with pytest.raises(UserError, match=r"done\.json is not a table of labels"):
        import_data_set("labelstudio", tasks, tmp_path / "out", images=label_studio / "images", labels=tasks)


def test_a_network_has_no_formats_of_objects(labeled: Labeled, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="format coco of network"):
        export(labeled.workspace, "made", "network", tmp_path / "out", "coco")


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (["a", ".."], "have no name"),
        (["b", "../B"], "the file of another"),
        (["s3://x/a", "s3/x/A"], "the file of another"),
        (["cat/1", "CAT/1"], "the file of another"),
        (["cat", "cat.png/1"], "below the file of another: 'cat.png/1'"),
        (["a\nb"], "line breaks"),
    ],
)
def test_ids_that_cannot_be_file_names_are_an_error(ids: list[str], found: str) -> None:
    with pytest.raises(UserError, match=found):
        file_names(ids, Path("out"))


def test_every_character_of_screenshots_may_be_in_file_names() -> None:
    """macOS writes a narrow no-break space before AM, and some programs invisible marks."""
    names = [
        "9.41\N{NARROW NO-BREAK SPACE}AM",
        "a\N{ZERO WIDTH SPACE}b",
        "\N{LEFT-TO-RIGHT MARK}c",
        "Löwe 猫 \U0001fae8",
    ]
    assert file_names([f"{name}.png" for name in names], Path("out")) == {f"{name}.png": name for name in names}


def test_classes_with_the_same_file_name_are_an_error() -> None:
    with pytest.raises(UserError, match=r"class\(es\) that lead to the file of another: 'Sea lion'"):
        class_file_names(["sea lion", "cat", "Sea lion"], Path("out"))


LOADS = """
import json, sys
sys.modules["mcis"] = None  # whatever imports the project fails
import numpy as np, torch
extra = {"about.json": ""}
network = torch.export.load(sys.argv[1], extra_files=extra).module()
for number, image in enumerate(np.load(sys.argv[2]).values()):
    np.save(f"{sys.argv[3]}-{number}.npy", network(torch.from_numpy(image)).argmax(0).to(torch.uint8).numpy())
print(extra["about.json"])
"""
PYRAMID = ("segmenter.network=pyramid", "segmenter.stride=32", "segmenter.init=pretrained")
NETWORKS = {
    "largefov": (),
    "pyramid": (*PYRAMID, "segmenter.backbone=timm/tf_efficientnet_lite0"),
    "convnext": (*PYRAMID, "segmenter.backbone=timm/convnext_atto"),
}


@pytest.mark.slow
@pytest.mark.parametrize("network", ["largefov", "pyramid", "convnext"])
def test_an_exported_network_predicts_without_mcis(trained: Callable[..., Path], tmp_path: Path, network: str) -> None:
    """For images of any size, at one scale and without the CRF, also with a backbone of timm."""
    run = trained(5, *NETWORKS[network])
    text = export(Workspace(run.parent.parent), run.name, "network", tmp_path / "network.pt2")
    assert text.startswith("network of 5 classes in ")

    sizes = [(64, 80), (97, 33), (150, 211)]
    pictures = [np.random.default_rng(h).integers(0, 256, (h, w, 3), np.uint8) for h, w in sizes]
    np.savez(tmp_path / "images.npz", *pictures)
    command = [sys.executable, "-c", LOADS, str(tmp_path / "network.pt2"), str(tmp_path / "images.npz")]
    done = subprocess.run([*command, str(tmp_path / "labels")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["classes"] == [f"class {k}" for k in range(5)]

    plain = ["predict.scales=[1.0]", "predict.hflip=false", "predict.crop=null", "predict.crf.iterations=0"]
    predictor = Predictor.load(run, plain)
    for number, picture in enumerate(pictures):
        expected = predictor(picture)
        assert len(np.unique(expected)) > 2
        predicted = np.load(tmp_path / f"labels-{number}.npy")
        assert predicted.shape == expected.shape
        assert (predicted != expected).mean() < 1e-3  # ties, by rounding


@pytest.mark.slow
@pytest.mark.parametrize("network", ["largefov", "pyramid"])
def test_an_onnx_network_gives_the_exported_ones_labels_at_any_size(
    trained: Callable[..., Path], tmp_path: Path, network: str
) -> None:
    run = trained(5, *NETWORKS[network])
    for kind in ("network", "onnx"):
        export(Workspace(run.parent.parent), run.name, kind, tmp_path / kind)

    exported: Any = torch.export.load(tmp_path / "network").module()
    session = onnxruntime.InferenceSession(tmp_path / "onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == [f"class {k}" for k in range(5)]
    for h, w in [(64, 80), (97, 33), (150, 211)]:
        picture = np.random.default_rng(h).integers(0, 256, (h, w, 3), np.uint8)
        expected = exported(torch.from_numpy(picture)).argmax(0).numpy()
        (probabilities,) = session.run(["probabilities"], {"image": picture})
        assert len(np.unique(expected)) > 2
        assert (probabilities.argmax(0) != expected).mean() < 1e-3  # ties, by rounding


def test_onnx_without_its_packages_says_how_to_install_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"pip install -c constraints.txt -e '\.\[onnx\]'"):
        export(Workspace(tmp_path), "any", "onnx", tmp_path / "network.onnx")


def test_few_pictures_are_in_memory_at_a_time() -> None:
    taken: list[int] = []
    written: list[int] = []

    def rows() -> Iterator[int]:
        for row in range(200):
            taken.append(row)
            yield row

    def write(row: int) -> int:
        assert len(taken) - len(written) <= 5 * files._THREADS + 1
        written.append(row)
        return 2

    assert files.write_all(rows(), write, label="pictures", total=200) == 400
    assert sorted(written) == taken

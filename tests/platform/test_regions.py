"""Runs make pseudo masks from segments and detections of other programs."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_masks

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import decode_labels
from mcis.platform.config.maps import PseudoMasksConfig
from mcis.platform.config.resolve import resolve
from mcis.platform.outputs.read_index import open_index
from mcis.platform.outputs.regions import REGIONS, check_regions, with_regions
from mcis.platform.pipeline import RunResult, check
from mcis.platform.runs.files import read_table
from mcis.platform.runs.results import MasksResult

PLAIN = (
    "maps.scale=range",
    "pseudo_masks.threshold=0.6",
    "pseudo_masks.crf.iterations=0",
    "compute.stop_if_not_learning=false",
)
SEGMENTS = ("pseudo_masks.rule=segments", "pseudo_masks.segments.random_walk=false", *PLAIN)
DETECTIONS = ("pseudo_masks.rule=detections", "pseudo_masks.detections.random_walk=false", *PLAIN)


class Images:
    """The training images of the small devkit.

    Attributes:
        rows: Their rows of the index.
        classes: Names of the classes.
    """

    def __init__(self, small: Any) -> None:
        small.run("maps", until="localize")
        opened = open_index(small.workspace, "maps")
        self.rows = opened.index.filter(pc.equal(opened.index["split"], "train")).to_pylist()
        self.classes = opened.classes

    def truth(self, row: dict[str, Any]) -> NDArray[np.uint8]:
        return np.asarray(decode_labels(Path(row["mask_uri"]).read_bytes()))

    def detections(self) -> list[dict[str, Any]]:
        """A detection for each class in each ground-truth mask."""
        items = []
        for row in self.rows:
            truth = self.truth(row)
            for label in np.setdiff1d(truth, [0, IGNORE]).tolist():
                encoded = coco_masks.encode(np.asfortranarray(truth == label, np.uint8))
                outline = {"size": encoded["size"], "counts": encoded["counts"].decode()}
                item = {"image_id": row["image_id"], "category_name": self.classes[label - 1], "score": 0.9}
                items.append(item | {"segmentation": outline})
        return items


@pytest.fixture(scope="module")
def images(small: Any) -> Images:
    return Images(small)


@pytest.fixture(scope="module")
def quarters(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four segments of each image."""
    folder = tmp_path_factory.mktemp("segments")
    for row in images.rows:
        height, width = row["height"], row["width"]
        rows, columns = np.indices((height, width))
        np.save(folder / f"{row['image_id']}.npy", 2 * (2 * rows >= height) + (2 * columns >= width))
    return folder


@pytest.fixture(scope="module")
def make_masks(small: Any) -> Callable[..., RunResult]:
    """Runs the stage `pseudo_masks`, with the localization maps of the other runs."""

    def make(name: str, *overrides: str) -> RunResult:
        result: RunResult = small.run(name, *overrides, until="pseudo_masks")
        return result

    return make


def labels_of(result: RunResult) -> list[NDArray[np.uint8]]:
    """The labels of all masks."""
    table = read_table(result.context.stage_outputs["pseudo_masks"] / "masks")
    return [np.asarray(decode_labels(png)) for png in table["labels"].to_pylist()]


def notes_of(result: RunResult) -> tuple[str, ...]:
    return result.context.result("pseudo_masks", MasksResult).notes


def test_masks_have_one_label_in_each_segment_of_a_file(make_masks: Callable[..., RunResult], quarters: Path) -> None:
    result = make_masks("quarters", *SEGMENTS, f"pseudo_masks.segments.folder={quarters}")
    masks = labels_of(result)
    assert len(masks) == 24
    assert any(len(np.unique(mask)) > 1 for mask in masks)
    for mask in masks:
        height, width = mask.shape
        for top in (mask[: height // 2], mask[height // 2 :]):
            assert len(np.unique(top[:, : width // 2])) == len(np.unique(top[:, width // 2 :])) == 1

    (score,) = [score for score in result.scores if score.output == "pseudo_masks"]
    assert score.background_cue == "segments (the program that made them may have been trained on masks)"


def test_superpixels_are_the_default_and_need_no_file(make_masks: Callable[..., RunResult]) -> None:
    result = make_masks("superpixels", *SEGMENTS, "pseudo_masks.segments.superpixels=40")
    assert result.context.result("pseudo_masks", MasksResult).background_cue == "segments"
    assert labels_of(result)


def test_a_changed_file_changes_the_key_and_a_moved_folder_does_not(
    make_masks: Callable[..., RunResult], quarters: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(quarters, moved)  # with modification times
    first = make_masks("here", *SEGMENTS, f"pseudo_masks.segments.folder={quarters}")
    there = make_masks("there", *SEGMENTS, f"pseudo_masks.segments.folder={moved}")
    assert there.context.stage_outputs["pseudo_masks"] == first.context.stage_outputs["pseudo_masks"]

    file = next(moved.iterdir())
    stamp = file.stat()
    np.save(file, np.zeros_like(np.load(file)))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert file.stat().st_size == stamp.st_size, "only its content is another"
    changed = make_masks("there", *SEGMENTS, f"pseudo_masks.segments.folder={moved}")
    assert changed.context.stage_outputs["pseudo_masks"] != first.context.stage_outputs["pseudo_masks"]


def test_missing_segments_are_listed(
    small: Any, make_masks: Callable[..., RunResult], quarters: Path, tmp_path: Path, images: Images
) -> None:
    folder = tmp_path / "some"
    shutil.copytree(quarters, folder)
    missing = images.rows[3]["image_id"]
    (folder / f"{missing}.npy").unlink()
    with pytest.raises(UserError, match=rf"1 of 24 images have no file of segments in .*: {re.escape(missing)}"):
        make_masks("some", *SEGMENTS, f"pseudo_masks.segments.folder={folder}")


def detections_run(make_masks: Callable[..., RunResult], folder: Path, items: Any, *overrides: str) -> RunResult:
    """Runs the rule `detections` with a file of these detections."""
    file = folder / "detections.json"
    file.write_text(json.dumps(items))
    return make_masks("detections", *DETECTIONS, f"pseudo_masks.detections.file={file}", *overrides)


def test_detections_of_the_truth_give_its_masks(
    make_masks: Callable[..., RunResult], images: Images, tmp_path: Path
) -> None:
    result = detections_run(make_masks, tmp_path, images.detections(), "pseudo_masks.detections.weight=1")
    (score,) = [score for score in result.scores if score.output == "pseudo_masks"]
    assert score.miou == 100
    assert notes_of(result)[0] == f"{len(images.detections())} detections are used"


def test_detections_of_classes_without_a_tag_are_left_out(
    make_masks: Callable[..., RunResult], images: Images, tmp_path: Path
) -> None:
    items = images.detections()
    row = next(row for row in images.rows if len(row["tags"]) < len(images.classes))
    (wrong,) = [name for tag, name in enumerate(images.classes) if tag not in row["tags"]][:1]
    whole = {"size": [row["height"], row["width"]], "counts": [0, row["height"] * row["width"]]}
    items.append({"image_id": row["image_id"], "category_name": wrong, "score": 1, "segmentation": whole})
    items.append({"image_id": "elsewhere", "category_name": wrong, "score": 1, "segmentation": whole})
    items.append({"image_id": row["image_id"], "category_name": "unicorn", "score": 1, "segmentation": whole})

    result = detections_run(make_masks, tmp_path, items, "pseudo_masks.detections.weight=1")
    (score,) = [score for score in result.scores if score.output == "pseudo_masks"]
    assert score.miou == 100
    assert notes_of(result)[0] == (
        f"{len(items) - 3} detections are used; left out: 1 of classes without a tag of their image, 1 in other "
        "images, 1 of other classes (unicorn)"
    )

    overrides = ("pseudo_masks.detections.weight=1", "pseudo_masks.detections.tagged_only=false")
    (score,) = [s for s in detections_run(make_masks, tmp_path, items, *overrides).scores if s.output == "pseudo_masks"]
    assert score.miou < 100


def test_images_without_a_detection_of_their_tags_are_noted(
    make_masks: Callable[..., RunResult], images: Images, tmp_path: Path
) -> None:
    kept = [item for item in images.detections() if item["image_id"] != images.rows[0]["image_id"]]
    result = detections_run(make_masks, tmp_path, kept)
    assert notes_of(result)[1] == "1 of 24 images have no detection of their tags"


def test_detections_of_no_image_or_class_of_the_run_are_refused(
    make_masks: Callable[..., RunResult], images: Images, tmp_path: Path
) -> None:
    renamed = [item | {"image_id": f"frame {number}"} for number, item in enumerate(images.detections())]
    with pytest.raises(UserError, match=r"has no detection of one of the 24 tagged training images: .*frame 0"):
        detections_run(make_masks, tmp_path, renamed)
    unknown = [item | {"category_name": "unicorn"} for item in images.detections()]
    with pytest.raises(UserError, match="detections of the classes unicorn in images"):
        detections_run(make_masks, tmp_path, unknown)


def test_numbers_name_images_that_no_other_image_shares(tmp_path: Path) -> None:
    """A detection is never used in two images."""
    image_ids = ["cats/001.jpg", "dogs/001.jpg", "dogs/002.jpg", "3.jpg", "03.jpg"]
    outline = {"size": [2, 2], "counts": [0, 4]}
    items = [{"image_id": number, "category_name": "cat", "segmentation": outline} for number in (1, 2, 3)]
    (tmp_path / "a.json").write_text(json.dumps(items))
    rows = pa.table({"image_id": image_ids, "tags": [[0]] * 5})
    file = f"pseudo_masks.detections.file={tmp_path / 'a.json'}"
    section = resolve("photos.csv", None, {}, [*DETECTIONS, file]).config.pseudo_masks

    found = with_regions(rows, [True] * 5, section, ["cat"])
    counts = [len(json.loads(text)) for text in found.rows[REGIONS].to_pylist()]
    assert counts == [0, 0, 1, 1, 0]  # 3.jpg is named 3
    assert found.notes == (
        "2 detections are used; left out: 1 in other images",
        "3 of 5 images have no detection of their tags",
    )
    found = with_regions(rows, [True] * 5, section, ["cat"], [*image_ids, "val/2.jpg"])
    counts = [len(json.loads(text)) for text in found.rows[REGIONS].to_pylist()]
    assert counts == [0, 0, 0, 1, 0]


def test_segments_named_after_images_in_two_splits_belong_to_neither(tmp_path: Path) -> None:
    np.save(tmp_path / "001.npy", np.zeros((4, 5), int))
    rows = pa.table({"image_id": ["train/001.jpg"], "tags": [[0]]})
    folder = f"pseudo_masks.segments.folder={tmp_path}"
    section = resolve("photos.csv", None, {}, [*SEGMENTS, folder]).config.pseudo_masks
    found = with_regions(rows, [True], section, ["cat"])
    assert found.rows[REGIONS].to_pylist() == [str(tmp_path / "001.npy")]
    with pytest.raises(UserError, match="1 of 1 images have no file of segments in"):
        with_regions(rows, [True], section, ["cat"], ["train/001.jpg", "val/001.jpg"])


def test_regions_of_another_size_are_found_before_a_run(
    small: Any, quarters: Path, images: Images, tmp_path: Path
) -> None:
    items = images.detections()
    items[0]["segmentation"] = {"size": [4, 5], "counts": [0, 20]}
    file = tmp_path / "detections.json"
    file.write_text(json.dumps(items))
    config = small.settings(*DETECTIONS, f"pseudo_masks.detections.file={file}").config
    with pytest.raises(UserError, match=rf"a detection in {items[0]['image_id']} cannot be drawn: run lengths are of"):
        check(config, small.workspace, "any", until="pseudo_masks")

    folder = tmp_path / "segments"
    shutil.copytree(quarters, folder)
    config = small.settings(*SEGMENTS, f"pseudo_masks.segments.folder={folder}").config
    check(config, small.workspace, "any", until="pseudo_masks")
    image_id = images.rows[0]["image_id"]
    np.save(folder / f"{image_id}.npy", np.zeros((4, 5), int))
    reason = r"ValueError: an array of int64 with the shape \(4, 5\)"
    with pytest.raises(UserError, match=rf"{image_id}.npy cannot be read \({reason}"):
        check(config, small.workspace, "any", until="pseudo_masks")


def test_regions_of_images_above_the_default_limit_are_checked(tmp_path: Path) -> None:
    Image.new("L", (7_100, 7_100)).save(tmp_path / "a.jpg")
    np.save(tmp_path / "a.npy", np.zeros((4, 5), int))
    rows = pa.table({"uri": [str(tmp_path / "a.jpg")], REGIONS: [str(tmp_path / "a.npy")]})
    section = resolve(
        "photos.csv", None, {}, [*SEGMENTS, f"pseudo_masks.segments.folder={tmp_path}"]
    ).config.pseudo_masks

    with pytest.raises(UserError, match=r"a.npy cannot be read \(ValueError: an array of int64"):
        check_regions(rows, section, 60_000_000)
    check_regions(rows, section, 50_000_000)  # the index rejects the image


def test_new_rules_leave_the_keys_of_other_runs_as_they_are() -> None:
    assert not {"segments", "detections"} & PseudoMasksConfig().model_dump(mode="json").keys()
    changed = resolve("voc", "paper", {}, ["pseudo_masks.segments.superpixels=7"]).config
    assert changed.pseudo_masks.model_dump(mode="json")["segments"]["superpixels"] == 7


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["pseudo_masks.rule=detections"], "pseudo_masks.detections.file is not set"),
        (["pseudo_masks.detections.file=a.json"], "detections.file is set but pseudo_masks.rule is affinity"),
        (["pseudo_masks.segments.folder=a"], "segments.folder is set but pseudo_masks.rule is affinity"),
    ],
)
def test_files_and_rules_belong_together(overrides: list[str], found: str) -> None:
    with pytest.raises(UserError, match=re.escape(found)):
        resolve("photos.csv", None, {}, overrides)


@pytest.mark.parametrize("walks", [True, False])
def test_the_random_walk_is_a_choice_of_the_rule(walks: bool) -> None:
    overrides = ["pseudo_masks.rule=segments", f"pseudo_masks.segments.random_walk={str(walks).lower()}"]
    assert resolve("photos.csv", None, {}, overrides).config.uses_random_walk == walks

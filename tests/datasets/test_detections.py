"""Detections of other programs in the format of COCO's results."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pycocotools import mask as coco_masks

from mcis.datasets.errors import UserError
from mcis.datasets.formats.detections import Detection, Detections, draw_detections, read_detections

CLASSES = ("cat", "sea lion")
POLYGON = [[0, 0, 4, 0, 4, 4, 0, 4]]


def detection(**values: Any) -> dict[str, Any]:
    """A detection of a cat in a.jpg, with changes; None removes a value."""
    default = {"image_id": "a.jpg", "category_name": "cat", "segmentation": POLYGON, "score": 0.5}
    return {key: value for key, value in (default | values).items() if value is not None}


def read(folder: Path, content: Any) -> Detections:
    """Reads detections that are written as JSON."""
    file = folder / "detections.json"
    file.write_text(json.dumps(content))
    return read_detections(file, CLASSES)


@pytest.mark.parametrize(
    ("values", "name", "label"),
    [
        ({}, "a.jpg", 0),
        ({"image_id": 139}, "139", 0),
        ({"image_id": 7, "file_name": "photos/a.jpg"}, "photos/a.jpg", 0),
        ({"image_id": "/data/photos/a.jpg"}, "data/photos/a.jpg", 0),
        ({"image_id": "o\N{COMBINING DIAERESIS}.jpg"}, "\N{LATIN SMALL LETTER O WITH DIAERESIS}.jpg", 0),
        ({"category_name": " Sea Lion "}, "a.jpg", 1),
        ({"category_name": None, "category_id": "sea lion"}, "a.jpg", 1),
        ({"category_name": None, "category_id": 2}, "a.jpg", 1),
    ],
)
def test_images_and_classes_have_names_or_numbers(
    tmp_path: Path, values: dict[str, Any], name: str, label: int
) -> None:
    detections = read(tmp_path, [detection(**values)])
    assert detections.by_image == {name: [Detection(label, 0.5, POLYGON)]}


def test_a_data_set_names_images_and_categories(tmp_path: Path) -> None:
    content = {
        "images": [{"id": 3, "file_name": "b.png", "height": 4, "width": 5}],
        "categories": [{"id": 17, "name": "cat"}, {"id": 2, "name": "horse"}],
        "annotations": [
            detection(image_id=3, category_name=None, category_id=17, score=None),
            detection(image_id=3, category_name=None, category_id=2),
        ],
    }
    detections = read(tmp_path, content)
    assert detections.by_image == {"b.png": [Detection(0, 1.0, POLYGON)]}
    assert detections.other_classes == {"horse": 1}


def test_detections_of_other_classes_and_boxes_are_counted(tmp_path: Path) -> None:
    items = [detection(category_name="horse")] * 2 + [detection(segmentation=None), detection(segmentation=[])]
    detections = read(tmp_path, [*items, detection()])
    assert detections.other_classes == {"horse": 2}
    assert detections.without_outline == 2
    assert list(map(len, detections.by_image.values())) == [1]


@pytest.mark.parametrize(
    "content",
    [
        3,
        [3],
        "text",
        {"annotations": []},
        [detection(image_id=None)],
        [detection(image_id=[1])],
        [detection(image_id=True)],
        [detection(category_name=None)],
        [detection(category_name=None, category_id=3)],
        [detection(category_name=None, category_id=0)],
        [detection(score=float("nan"))],
        [detection(score=1.5)],
        [detection(score="high")],
        [detection(score=[0.5])],
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UserError, match=r"(?s)the detections .*json cannot be read .*expected: a JSON list of det"):
        read(tmp_path, content)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"[{]"])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(UserError, match=r"the detections .*bad\.json cannot be read"):
        read_detections(tmp_path / "bad.json", CLASSES)
    with pytest.raises(UserError, match=r"the detections .*none\.json cannot be read \(No such file"):
        read_detections(tmp_path / "none.json", CLASSES)


def run_lengths(pixels: NDArray[np.bool_], *, compressed: bool) -> dict[str, Any]:
    """A mask in run lengths, as text or as numbers."""
    if compressed:
        encoded = coco_masks.encode(np.asfortranarray(pixels, np.uint8))
        return {"size": encoded["size"], "counts": encoded["counts"].decode()}
    runs = [(is_object, len(list(run))) for is_object, run in itertools.groupby(pixels.T.ravel().tolist())]
    first = [0] if runs[0][0] else []
    return {"size": list(pixels.shape), "counts": first + [length for _, length in runs]}


@pytest.mark.parametrize("compressed", [False, True])
def test_detections_with_higher_scores_are_on_top(compressed: bool) -> None:
    left = np.zeros((6, 8), bool)
    left[:, :5] = True
    right = np.zeros((6, 8), bool)
    right[1:5, 3:7] = True
    items = [Detection(1, 0.9, run_lengths(right, compressed=compressed))]
    items.append(Detection(0, 0.4, run_lengths(left, compressed=compressed)))

    labels, scores = draw_detections(items, 6, 8)
    expected = np.where(right, 2, np.where(left, 1, 0))
    np.testing.assert_array_equal(labels, expected)
    np.testing.assert_array_equal(scores, np.array([0, 0.4, 0.9], np.float32)[expected])
    assert (labels.dtype, scores.dtype) == (np.uint8, np.float32)


def test_of_equal_scores_the_smaller_detection_is_on_top_in_any_order() -> None:
    """COCO data sets have no scores."""
    whole = np.ones((6, 8), bool)
    part = np.zeros((6, 8), bool)
    part[1:5, 3:7] = True
    same_area = np.zeros((6, 8), bool)
    same_area[1:5, 4:8] = True
    areas = {2: part, 0: whole, 1: same_area}
    items = [Detection(label, 1.0, run_lengths(pixels, compressed=False)) for label, pixels in areas.items()]

    expected = np.where(part, 3, np.where(same_area, 2, 1))
    for ordered in itertools.permutations(items):
        labels, _ = draw_detections(ordered, 6, 8)
        np.testing.assert_array_equal(labels, expected)


def test_polygons_are_drawn_as_coco_draws_them() -> None:
    labels, _ = draw_detections([Detection(0, 0.5, POLYGON)], 6, 8)
    assert labels[:4, :4].all()
    assert labels.sum() == 16


def test_outlines_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="run lengths are of 5x4 pixels"):
        draw_detections([Detection(0, 0.5, {"size": [4, 5], "counts": [20]})], 6, 8)

"""Connected regions of label masks, which are cut out of the mask, and what the export of objects makes of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy import ndimage

from mcis.datasets.formats.data_set import LabeledImage
from mcis.datasets.formats.exporting import export_data_set
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.formats.regions import connected_regions, region_outline

label_masks = arrays(
    np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.sampled_from([0, 1, 1, 2, 255])
)


def whole_regions(labels: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Label and pixels, (H, W), of each region."""
    found = []
    for label in (1, 2):
        numbers, count = ndimage.label(labels == label)
        found += [(label, numbers == number) for number in range(1, count + 1)]
    return found


@given(label_masks)
def test_regions_are_cut_out_of_the_mask(labels: np.ndarray) -> None:
    regions = list(connected_regions(labels))
    assert len(regions) == len(whole_regions(labels))
    for region, (label, whole) in zip(regions, whole_regions(labels), strict=True):
        (box,) = ndimage.find_objects(whole.astype(int))
        assert (region.label, region.top, region.left) == (label, box[0].start, box[1].start)
        np.testing.assert_array_equal(region.pixels, whole[box])


@given(label_masks)
def test_outlines_of_regions_are_those_in_the_whole_mask(labels: np.ndarray) -> None:
    for region, (_, whole) in zip(connected_regions(labels), whole_regions(labels), strict=True):
        np.testing.assert_array_equal(region_outline(region.pixels) + region.corner, region_outline(whole))


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(width).choice([0, 1, 1, 2], (height, width)).astype(np.uint8)


@pytest.mark.parametrize(
    "labels",
    [noise(30, 40), noise(3, 200), noise(1, 9), np.full((4, 5), 2, np.uint8), np.ones((7, 1), np.uint8)],
    ids=["noise", "long", "line", "full", "column"],
)
def test_coco_has_the_run_lengths_of_whole_masks(labels: np.ndarray, tmp_path: Path) -> None:
    image = LabeledImage("a.png", "", "a", labels)
    export_data_set("coco", ["cat", "dog"], [image], tmp_path)

    masks = require_module("pycocotools.mask")
    written = json.loads((tmp_path / "annotations.json").read_text())["annotations"]
    for item, (label, whole) in zip(written, whole_regions(labels), strict=True):
        expected = masks.encode(np.asfortranarray(whole, np.uint8))
        assert item["category_id"] == label
        assert item["segmentation"] == {"size": list(labels.shape), "counts": expected["counts"].decode()}
        assert item["area"] == whole.sum()
        assert item["bbox"] == masks.toBbox(expected).tolist()

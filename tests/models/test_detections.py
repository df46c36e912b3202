"""The mask rule `detections`: fusion of detections and localization maps."""

import numpy as np
import pytest

from mcis.datasets.classes import IGNORE
from mcis.models.crf import CrfParameters
from mcis.models.detections import DETECTIONS, fuse_detections
from mcis.models.pseudo_masks import MASK_RULES, DetectedClasses, PseudoMask, TaggedMaps

MAPS = TaggedMaps(
    scores=np.array([[[0.8, 0.4, 0.0, 0.0]], [[0.2, 0.2, 0.6, 0.0]]], np.float32),
    tags=np.array([4, 9]),
    read_rgb=lambda: np.zeros((1, 4, 3), np.uint8),
)


def detected(labels: list[int], scores: list[float]) -> TaggedMaps:
    """The maps with detections of an image of one row."""
    return MAPS._replace(detections=DetectedClasses(np.array([labels], np.uint8), np.array([scores], np.float32)))


def mask_without_crf(maps: TaggedMaps, weight: float) -> PseudoMask:
    values = {"threshold": 0.3, "background_threshold": 0.1, "crf": CrfParameters(iterations=0), "weight": weight}
    return DETECTIONS(maps, values)


def test_scores_are_the_weighted_mean_of_detections_and_maps() -> None:
    fused = fuse_detections(detected([5, 10, 10, 0], [0.5, 0.9, 0.9, 0.0]), 0.25)
    assert fused.tags.tolist() == [4, 9]
    expected = [[[0.725, 0.3, 0.0, 0.0]], [[0.15, 0.375, 0.675, 0.0]]]
    np.testing.assert_allclose(fused.scores, expected, rtol=1e-6)
    assert fused.scores.dtype == np.float32


def test_the_map_of_a_tag_without_a_detection_counts_in_full() -> None:
    fused = fuse_detections(detected([5, 0, 0, 0], [1.0, 0, 0, 0]), 0.5)
    np.testing.assert_array_equal(fused.scores[1], MAPS.scores[1])
    np.testing.assert_allclose(fused.scores[0], [[0.9, 0.2, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize(("weight", "labels"), [(0.0, [5, 5, 10, 0]), (1.0, [0, 10, 10, 5]), (0.5, [5, 10, 10, 5])])
def test_the_weight_leads_from_maps_to_detections(weight: float, labels: list[int]) -> None:
    maps = detected([0, 10, 10, 5], [0, 0.9, 0.9, 0.8])
    assert mask_without_crf(maps, weight).labels.tolist() == [labels]


def test_detections_of_classes_without_a_tag_add_their_class() -> None:
    maps = detected([0, 0, 3, 3], [0, 0, 0.9, 0.9])
    assert fuse_detections(maps, 0.5).tags.tolist() == [4, 9, 2]
    assert mask_without_crf(maps, 0.5).labels.tolist() == [[5, 5, 10, 3]]


def test_an_image_without_a_detection_is_ignored_if_detections_count_alone() -> None:
    nothing = detected([0, 0, 0, 0], [0, 0, 0, 0])
    mask = mask_without_crf(nothing, 1.0)
    assert mask.labels.tolist() == [[0, 0, 0, 0]]
    assert mask.mask.tolist() == [[IGNORE] * 4]
    assert mask_without_crf(nothing, 0.9).labels.tolist() == [[5, 5, 10, 0]]


def test_the_rule_is_registered() -> None:
    assert MASK_RULES["detections"] is DETECTIONS

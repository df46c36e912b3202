"""The mask rule `segments`: majority votes in segments, and superpixels."""

import sys
from typing import Any

import numpy as np
import pytest

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError
from mcis.models.crf import CrfParameters
from mcis.models.pseudo_masks import MASK_RULES, TaggedMaps, by_crf
from mcis.models.segments import SEGMENTS, SegmentsConfig, majority, slic_superpixels

PLAIN = CrfParameters(iterations=0)


def values(**changes: Any) -> dict[str, Any]:
    """Values of the rule without a CRF."""
    return {"threshold": 0.3, "background_threshold": 0.1, "crf": PLAIN} | dict(SegmentsConfig()) | changes


def test_the_most_frequent_label_of_a_segment_wins_and_the_lowest_of_equal_ones() -> None:
    labels = np.array([[2, 2, 1, 1], [0, 2, 0, 1], [1, 0, 2, 0]], np.uint8)
    segments = np.array([[7, 7, 900, 900], [7, -1, 900, 900], [5, 5, -1, -1]], np.int32)
    voted = majority(labels, segments, 3)
    assert voted.tolist() == [[2, 2, 1, 1], [2, 2, 1, 1], [0, 0, 2, 0]]
    assert voted.dtype == labels.dtype


def test_each_segment_has_one_label_and_ignores_by_its_own_majority() -> None:
    scores = np.zeros((2, 2, 6), np.float32)
    scores[0, :, :2] = 0.9  # segment 0: mostly tag 4
    scores[1, :, 2:5] = 0.2  # segment 1: no class is certain
    scores[1, 0, 5] = 0.9
    segments = np.array([[0, 0, 0, 1, 1, 1]] * 2, np.int32)
    maps = TaggedMaps(scores, np.array([4, 9]), lambda: np.zeros((2, 6, 3), np.uint8), segments=segments)

    labels, mask = SEGMENTS(maps, values())
    assert labels.tolist() == [[5, 5, 5, 0, 0, 0]] * 2
    assert mask.tolist() == [[5, 5, 5, IGNORE, IGNORE, IGNORE]] * 2


def test_without_a_segment_of_several_pixels_it_is_the_rule_crf() -> None:
    rng = np.random.default_rng(3)
    rgb = rng.integers(0, 256, (12, 14, 3), np.uint8)
    maps = TaggedMaps(rng.random((2, 12, 14), np.float32), np.array([0, 3]), lambda: rgb)
    alone = maps._replace(segments=np.arange(12 * 14, dtype=np.int32).reshape(12, 14))
    crf = CrfParameters(iterations=2)
    expected = by_crf(maps, threshold=0.6, background_threshold=0.4, crf=crf)

    for segments in (alone, maps._replace(segments=np.full((12, 14), -1, np.int32))):
        actual = SEGMENTS(segments, values(threshold=0.6, background_threshold=0.4, crf=crf))
        np.testing.assert_array_equal(actual.labels, expected.labels)
        np.testing.assert_array_equal(actual.mask, expected.mask)


def test_superpixels_follow_the_edges_of_an_image() -> None:
    rgb = np.zeros((40, 60, 3), np.uint8)
    rgb[:, 23:] = 255
    superpixels = slic_superpixels(rgb, 12, 10.0)
    assert superpixels.shape == (40, 60)
    assert 4 <= superpixels.max() + 1 <= 24
    assert not set(np.unique(superpixels[:, :23])) & set(np.unique(superpixels[:, 23:]))

    scores = np.zeros((1, 40, 60), np.float32)
    scores[0, :, :20] = 1  # ends before the edge
    labels, _ = SEGMENTS(TaggedMaps(scores, np.array([1]), lambda: rgb), values(superpixels=12))
    np.testing.assert_array_equal(labels[:, 23:], 0)
    assert (labels[:, :20] == 2).mean() > 0.9


def test_superpixels_need_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage.segmentation", None)
    with pytest.raises(UserError, match=r"(?s)no library skimage.*pip install -c constraints.txt -e '\.\[segments\]'"):
        slic_superpixels(np.zeros((8, 8, 3), np.uint8), 4, 10.0)


def test_the_rule_is_registered() -> None:
    assert MASK_RULES["segments"] is SEGMENTS

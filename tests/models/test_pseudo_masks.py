"""Pseudo masks from saliency and from the dense CRF, against their rules applied pixel by pixel."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError
from mcis.models.crf import CrfParameters, dense_crf
from mcis.models.pseudo_masks import MaskRule, PseudoMask, TaggedMaps, by_crf, by_saliency

RECIPE: dict[str, Any] = {
    "score_floor": 0.3,
    "conflict_threshold": 0.99,
    "foreground_confidence": 0.95,
    "max_background_saliency": 32,
    "min_foreground_fraction": 0.01,
}
BLACK = np.zeros((1, 1, 3), np.uint8)


def tagged(
    maps: NDArray[np.float32], tags: NDArray[np.int64], saliency: NDArray[np.uint8] | None = None, **more: Any
) -> TaggedMaps:
    return TaggedMaps(maps, tags, lambda: BLACK, saliency, **more)


def by_the_recipe(
    maps: TaggedMaps,
    *,
    score_floor: float,
    conflict_threshold: float,
    foreground_confidence: float,
    max_background_saliency: int,
    min_foreground_fraction: float,
) -> PseudoMask:
    """`by_saliency` pixel by pixel (paper-vs-code, "Pseudo masks")."""
    saliency = maps.saliency
    assert saliency is not None
    scaled = []
    for class_map in maps.scores.astype(np.float64):
        low, high = (0, 1) if maps.one_scale else (class_map.min(), class_map.max())
        scaled.append((class_map - low) / (high - low) if high > low else np.zeros_like(class_map))

    labels = np.zeros(saliency.shape, np.uint8)
    mask = np.zeros(saliency.shape, np.uint8)
    foreground = 0
    for y, x in np.ndindex(*saliency.shape):
        class_scores = [class_map[y, x] for class_map in scaled]
        scores = [1 - int(saliency[y, x]) / 255, *class_scores]
        scores = [0 if s < score_floor else s for s in scores]
        best = scores.index(max(scores))
        label = 0 if best == 0 else maps.tags[best - 1] + 1
        labels[y, x] = label
        mask[y, x] = label
        foreground += best > 0
        if sum(s > conflict_threshold for s in scores) >= 2:
            mask[y, x] = IGNORE

        pixel_saliency = 255 if max(class_scores) > foreground_confidence else int(saliency[y, x])
        if best == 0 and pixel_saliency >= max_background_saliency:
            mask[y, x] = IGNORE

    if foreground / labels.size < min_foreground_fraction:
        mask[:] = IGNORE
    return PseudoMask(labels, mask)


@st.composite
def scenes(draw: st.DrawFn) -> TaggedMaps:
    """Maps, tags and saliency with many values at and next to the thresholds of the recipe."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 3))
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    maps = rng.choice([0, 0, 29, 30, 31, 60, 95, 96, 99, 100, 100], (count, *shape)).astype(np.float32)
    saliency = rng.choice([0, 2, 3, 31, 32, 100, 178, 179, 255], shape).astype(np.uint8)
    one_scale = draw(st.booleans())
    maps /= np.float32(128 if one_scale else draw(st.sampled_from([1, 128])))
    for array in (maps, saliency):
        array.flags.writeable = False
    return tagged(maps, rng.permutation(20)[:count], saliency, one_scale=one_scale)


LIMITS = {
    "score_floor": st.sampled_from([0.3, 0.1, 0.6]),
    "conflict_threshold": st.sampled_from([0.99, 0.2, 0.595]),
    "foreground_confidence": st.sampled_from([0.95, 0.28, 0.97]),
    "max_background_saliency": st.sampled_from([32, 0, 3, 255, 256]),
    "min_foreground_fraction": st.sampled_from([0.01, 0.0, 0.25, 0.5]),
}


@settings(max_examples=200)
@given(scenes(), st.just(RECIPE) | st.fixed_dictionaries(LIMITS))
def test_saliency_masks_follow_the_rules_with_any_thresholds(scene: TaggedMaps, limits: dict[str, Any]) -> None:
    actual = by_saliency(scene, **limits)
    expected = by_the_recipe(scene, **limits)
    assert actual.labels.dtype == actual.mask.dtype == np.uint8
    np.testing.assert_array_equal(actual.labels, expected.labels)
    np.testing.assert_array_equal(actual.mask, expected.mask)


@pytest.mark.parametrize(
    ("pixel", "label", "mask", "why"),
    [
        ((0.5, 0.4, 200), 5, 5, "the strongest tag"),
        ((0.4, 0.5, 200), 10, 10, "the strongest tag, in any position"),
        ((0.5, 0.4, 0), 0, 0, "background, 1 - saliency, beats 0.5"),
        ((0.5, 0.4, 127), 0, IGNORE, "background by 0.502, but salient"),
        ((0.5, 0.4, 128), 5, 5, "background has only 0.498"),
        ((0.29, 0.1, 255), 0, IGNORE, "a score under 0.3 counts as 0; all are 0, so background"),
        ((0.29, 0.1, 179), 0, IGNORE, "background's 0.298 counts as 0 as well"),
        ((0.3, 0.1, 179), 5, 5, "0.3 is not under 0.3"),
        ((0.995, 0.995, 255), 5, IGNORE, "two classes above 0.99"),
        ((0.995, 0.985, 255), 5, 5, "only one above 0.99"),
        ((0.995, 0.1, 2), 5, IGNORE, "a class and background (0.992) above 0.99"),
        ((0.995, 0.1, 3), 5, 5, "background has 0.988"),
        ((0.1, 0.1, 31), 0, 0, "saliency under 32"),
        ((0.1, 0.1, 32), 0, IGNORE, "background with saliency 32 is uncertain"),
        ((0.94, 0.1, 0), 0, 0, "a map of at most 0.95 does not affect background"),
        ((0.96, 0.1, 0), 0, IGNORE, "background with a map above 0.95 is uncertain"),
    ],
)
def test_one_pixel(pixel: tuple[float, float, int], label: int, mask: int, why: str) -> None:
    """`pixel`: score of tag 4, score of tag 9, saliency. Two more pixels, 0 and 1, make normalization the identity."""
    table = np.array([(0, 0, 255), (1, 1, 0), pixel], np.float64).T
    scene = tagged(table[:2, None].astype(np.float32), np.array([4, 9]), table[2][None].astype(np.uint8))
    actual = by_saliency(scene, **RECIPE | {"min_foreground_fraction": 0.0})
    assert (actual.labels[0, 2], actual.mask[0, 2]) == (label, mask), why


# --- from the dense CRF


def test_pixels_between_the_two_thresholds_are_ignored() -> None:
    maps = np.array([[[0.35, 0.2, 0.05], [0.31, 0.3, 0.02]], [[0.1, 0.1, 0.09], [0.6, 0.04, 0.11]]], np.float32)
    scene = TaggedMaps(maps, np.array([4, 9]), lambda: np.full((2, 3, 3), 90, np.uint8))
    plain = CrfParameters(iterations=0)
    labels, mask = by_crf(scene, threshold=0.3, background_threshold=0.1, crf=plain)
    assert labels.dtype == mask.dtype == np.uint8
    assert labels.tolist() == [[5, 0, 0], [10, 0, 0]]
    assert mask.tolist() == [[5, IGNORE, 0], [10, IGNORE, IGNORE]]

    labels, mask = by_crf(scene, threshold=0.15, background_threshold=0.12, crf=plain)
    assert labels.tolist() == [[5, 5, 0], [10, 5, 0]]
    np.testing.assert_array_equal(labels, mask)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_crf_refines_the_labels_of_each_threshold(count: int) -> None:
    """The winner of a pixel has probability 0.7, and the other labels share the rest equally."""
    rng = np.random.default_rng(count)
    rgb = rng.integers(0, 16, (12, 14, 1)).astype(np.uint8).repeat(3, axis=2) * 16
    maps = rng.random((count, 12, 14), np.float32) ** (4 * count)
    tags = rng.permutation(20)[:count]
    parameters = CrfParameters(iterations=3, bilateral_std=5.0, bilateral_weight=2.0, color_std=8.0)
    refined = []
    for background in (0.3, 0.1):
        probabilities = np.full((count + 1, 12, 14), 0.3 / count, np.float32)
        for y, x in np.ndindex(12, 14):
            scores = [background, *maps[:, y, x]]
            probabilities[scores.index(max(scores)), y, x] = 0.7
        winners = dense_crf(rgb, probabilities, parameters).argmax(axis=0)
        refined.append(np.array([0, *(tags + 1)])[winners])
    first, second = refined

    scene = TaggedMaps(maps, tags, lambda: rgb)
    labels, mask = by_crf(scene, threshold=0.3, background_threshold=0.1, crf=parameters)
    np.testing.assert_array_equal(labels, first)
    np.testing.assert_array_equal(mask, np.where((first == 0) & (second > 0), IGNORE, first))
    assert set(np.unique(mask)) == {0, *(tags + 1), IGNORE}, "the scene covers all cases"


def test_the_crf_moves_the_mask_to_the_edge_of_the_object() -> None:
    """The image is dark left of column 12 and bright right of it."""
    picture = np.broadcast_to(np.where(np.arange(24) < 12, 40, 200)[None, :, None], (16, 24, 3)).astype(np.uint8)
    scores = np.select([np.arange(24) < 9, np.arange(24) < 15], [0.9, 0.2], 0.0)
    scene = TaggedMaps(np.broadcast_to(scores, (1, 16, 24)).astype(np.float32), np.array([3]), lambda: picture)
    thresholds = {"threshold": 0.3, "background_threshold": 0.1}
    blurred = by_crf(scene, **thresholds, crf=CrfParameters(iterations=0))
    assert (blurred.labels[:, :9] == 4).all()
    assert (blurred.mask[:, 9:15] == IGNORE).all()

    refined = by_crf(scene, **thresholds, crf=CrfParameters(iterations=10, bilateral_std=30))
    np.testing.assert_array_equal(refined.labels, np.broadcast_to(np.where(np.arange(24) < 12, 4, 0), (16, 24)))
    np.testing.assert_array_equal(refined.mask, refined.labels)


@pytest.mark.parametrize("labels", [np.zeros((2, 3)), np.zeros((3, 2), np.uint8), np.full((2, 3), IGNORE, np.uint8)])
def test_arrays_that_are_no_pseudo_mask_of_the_image_are_refused(labels: NDArray[Any]) -> None:
    rule = MaskRule(make=lambda maps: PseudoMask(labels, labels))
    message = r"(?s)the rule .*lambda.* returned labels .*expected: uint8 arrays of shape \(2, 3\), with 255 only in"
    with pytest.raises(UserError, match=message):
        rule(tagged(np.zeros((1, 2, 3), np.float32), np.array([0])), {})

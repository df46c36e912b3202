"""Pseudo masks against their rules pixel by pixel: from saliency, and from the dense CRF."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.models.crf import CrfParameters, dense_crf
from mcis.models.pseudo_masks import IGNORE, PseudoMask, decided_by_maps, from_crf, from_saliency

quick = settings(deadline=None, max_examples=100)


def by_the_recipe(
    maps: np.ndarray,
    tags: np.ndarray,
    saliency: np.ndarray,
    *,
    stretch: bool = True,
    floor: float = 0.3,
    conflict: float = 0.99,
    confident: float = 0.95,
    doubt: int = 32,
    smallest: float = 0.01,
) -> PseudoMask:
    """The rules of (RELEASED_RECIPE, "Pseudo masks"), pixel by pixel."""
    scaled = []
    for one in maps.astype(np.float64):
        low, high = (one.min(), one.max()) if stretch else (0, 1)
        scaled.append((one - low) / (high - low) if high > low else np.zeros_like(one))
    labels = np.zeros(saliency.shape, np.uint8)
    mask = np.zeros(saliency.shape, np.uint8)
    foreground = 0
    for y, x in np.ndindex(*saliency.shape):
        scores = [1 - int(saliency[y, x]) / 255, *(one[y, x] for one in scaled)]
        scores = [0 if s < floor else s for s in scores]
        best = scores.index(max(scores))
        labels[y, x] = mask[y, x] = 0 if best == 0 else tags[best - 1] + 1
        foreground += best > 0
        if sum(s > conflict for s in scores) >= 2:
            mask[y, x] = IGNORE
        seen = max(int(saliency[y, x]), *(255 if one[y, x] > confident else 0 for one in scaled))
        if best == 0 and seen >= doubt:
            mask[y, x] = IGNORE
    if foreground / labels.size < smallest:
        mask[:] = IGNORE
    return PseudoMask(labels, mask)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.uint8]]:
    """Maps, tags and saliency whose values lie at the recipe's limits as often as beside them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, shape = draw(st.integers(1, 3)), (draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    maps = rng.choice([0, 0, 29, 30, 31, 60, 95, 96, 99, 100, 100], (count, *shape)).astype(np.float32)
    saliency = rng.choice([0, 2, 3, 31, 32, 100, 178, 179, 255], shape).astype(np.uint8)
    return maps / np.float32(draw(st.sampled_from([1, 128]))), rng.permutation(20)[:count], saliency


@quick
@given(scenes(), st.sampled_from([0.0, 0.01, 0.25, 0.5]))
def test_the_rules_of_the_recipe(scene: tuple[np.ndarray, np.ndarray, np.ndarray], smallest: float) -> None:
    got, expected = (f(*scene, smallest=smallest) for f in (from_saliency, by_the_recipe))
    assert got.labels.dtype == got.mask.dtype == np.uint8
    np.testing.assert_array_equal(got.labels, expected.labels)
    np.testing.assert_array_equal(got.mask, expected.mask)


@quick
@given(
    scenes(),
    st.sampled_from([0.1, 0.6]),
    st.sampled_from([0.2, 0.595]),
    st.sampled_from([0.28, 0.97]),
    st.sampled_from([0, 3, 255, 256]),
    st.booleans(),
)
def test_the_limits_may_be_set(
    scene: tuple[np.ndarray, np.ndarray, np.ndarray],
    floor: float,
    conflict: float,
    confident: float,
    doubt: int,
    stretch: bool,
) -> None:
    maps, tags, saliency = scene
    if not stretch:
        maps = maps / max(maps.max(), 1)
    limits = {"floor": floor, "conflict": conflict, "confident": confident}
    got, expected = (
        f(maps, tags, saliency, stretch=stretch, doubt=doubt, smallest=0.0, **limits)
        for f in (from_saliency, by_the_recipe)
    )
    np.testing.assert_array_equal(got.labels, expected.labels)
    np.testing.assert_array_equal(got.mask, expected.mask)


@quick
@given(scenes())
def test_what_is_trained_on_is_the_label_or_ignore_and_nothing_given_is_changed(
    scene: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    before = [array.copy() for array in scene]
    for array in scene:
        array.flags.writeable = False
    labels, mask = from_saliency(*scene)
    assert ((mask == labels) | (mask == IGNORE)).all()
    assert set(np.unique(labels)) <= {0, *(scene[1] + 1)}
    for array, old in zip(scene, before, strict=True):
        np.testing.assert_array_equal(array, old)


# --- the rules one by one: a row of pixels, and before it one that spans each map's range


def row(*pixels: tuple[float, float, int]) -> PseudoMask:
    """Pixels (score of tag 4, score of tag 9, saliency) after two of 0 and 1, so that normalizing changes nothing."""
    table = np.array([(0, 0, 255), (1, 1, 0), *pixels], np.float64).T
    maps = table[:2, None].astype(np.float32)
    return from_saliency(maps, np.array([4, 9]), table[2][None].astype(np.uint8), smallest=0)


@pytest.mark.parametrize(
    ("pixel", "label", "mask", "why"),
    [
        ((0.5, 0.4, 200), 5, 5, "the strongest tag"),
        ((0.4, 0.5, 200), 10, 10, "the strongest tag, whatever its place"),
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
        ((0.1, 0.1, 32), 0, IGNORE, "saliency of 32 is doubt"),
        ((0.94, 0.1, 0), 0, 0, "a map up to 0.95 leaves background alone"),
        ((0.96, 0.1, 0), 0, IGNORE, "a map above 0.95 is doubt"),
    ],
)
def test_one_pixel(pixel: tuple[float, float, int], label: int, mask: int, why: str) -> None:
    got = row(pixel)
    assert (got.labels[0, 2], got.mask[0, 2]) == (label, mask), why


@pytest.mark.parametrize(("pixels", "ignored"), [(0, True), (1, True), (2, False), (3, False)])
def test_an_image_with_less_than_one_percent_foreground_is_ignored_whole(pixels: int, ignored: bool) -> None:
    maps = np.zeros((1, 10, 20), np.float32)
    maps[0, 0, : max(pixels, 1)] = 1
    saliency = np.where(maps[0] > 0, 255 if pixels else 0, 0).astype(np.uint8)
    labels, mask = from_saliency(maps, np.array([6]), saliency)
    assert (labels == 7).sum() == pixels
    assert (mask == IGNORE).all() == ignored
    if not ignored:
        np.testing.assert_array_equal(mask, labels)


@pytest.mark.parametrize(("factor", "offset"), [(0.25, 0.0), (0.5, 0.5), (2.0, -1.0)])
def test_each_map_is_stretched_to_its_own_range(factor: float, offset: float) -> None:
    rng = np.random.default_rng(0)
    maps = (rng.integers(0, 65, (2, 5, 5)) / 64).astype(np.float32)
    saliency, tags = rng.integers(0, 256, (5, 5)).astype(np.uint8), np.array([0, 1])
    plain = from_saliency(maps, tags, saliency)
    stretched = maps.copy()
    stretched[1] = stretched[1] * factor + offset
    for a, b in zip(plain, from_saliency(stretched, tags, saliency), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_stretching_the_maps_compete_as_they_are() -> None:
    maps = np.array([[[0.55, 0.5]], [[0.7, 0.6]]], np.float32)
    saliency, tags = np.full((1, 2), 255, np.uint8), np.array([4, 9])
    assert from_saliency(maps, tags, saliency).labels.tolist() == [[5, 0]], "each reaches 1, then 0"
    assert from_saliency(maps, tags, saliency, stretch=False).labels.tolist() == [[10, 10]]


def test_a_map_without_contrast_names_nothing() -> None:
    flat = np.full((1, 4, 4), 0.8, np.float32)
    labels, mask = from_saliency(flat, np.array([2]), np.full((4, 4), 255, np.uint8))
    assert not labels.any()
    assert (mask == IGNORE).all()


# --- from the dense CRF

GREY = np.full((2, 3, 3), 90, np.uint8)


def test_between_the_two_thresholds_lies_what_is_ignored() -> None:
    maps = np.array([[[0.35, 0.2, 0.05], [0.31, 0.3, 0.02]], [[0.1, 0.1, 0.09], [0.6, 0.04, 0.11]]], np.float32)
    labels, mask = from_crf(GREY, maps, np.array([4, 9]), parameters=CrfParameters(iterations=0))
    assert labels.dtype == mask.dtype == np.uint8
    assert labels.tolist() == [[5, 0, 0], [10, 0, 0]]
    assert mask.tolist() == [[5, IGNORE, 0], [10, IGNORE, IGNORE]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_crf_refines_each_threshold_from_equal_doubt(count: int) -> None:
    """Each pixel's winner has 0.7 and the others share the rest; both refinements agree on what is background."""
    rng = np.random.default_rng(count)
    rgb = rng.integers(0, 16, (12, 14, 1)).astype(np.uint8).repeat(3, axis=2) * 16
    maps, tags = rng.random((count, 12, 14), np.float32) ** (4 * count), rng.permutation(20)[:count]
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
    labels, mask = from_crf(rgb, maps, tags, parameters=parameters)
    np.testing.assert_array_equal(labels, first)
    np.testing.assert_array_equal(mask, np.where((first == 0) & (second > 0), IGNORE, first))
    assert set(np.unique(mask)) == {0, *(tags + 1), IGNORE}, "the scene has everything"


def test_both_thresholds_may_be_set() -> None:
    maps = np.array([[[0.35, 0.2, 0.05], [0.31, 0.29, 0.3]]], np.float32)
    labels, mask = from_crf(
        GREY,
        maps,
        np.array([4]),
        threshold=0.25,
        background_threshold=0.22,
        parameters=CrfParameters(iterations=0),
    )
    assert labels.tolist() == [[5, 0, 0], [5, 5, 5]]
    np.testing.assert_array_equal(labels, mask)


def two_halves(at: int) -> NDArray[np.uint8]:
    """A picture (16, 24, 3), dark left of column `at` and bright right of it."""
    return np.broadcast_to(np.where(np.arange(24) < at, 40, 200)[None, :, None], (16, 24, 3)).astype(np.uint8)


def test_the_crf_moves_the_mask_to_the_edge_of_the_picture() -> None:
    scores = np.select([np.arange(24) < 9, np.arange(24) < 15], [0.9, 0.2], 0.0)
    maps = np.broadcast_to(scores, (1, 16, 24)).astype(np.float32)
    tags, parameters = np.array([3]), CrfParameters(iterations=10, bilateral_std=30)
    blurred = from_crf(two_halves(12), maps, tags, parameters=parameters.model_copy(update={"iterations": 0}))
    assert (blurred.labels[:, :9] == 4).all()
    assert (blurred.mask[:, 9:15] == IGNORE).all()
    refined = from_crf(two_halves(12), maps, tags, parameters=parameters)
    np.testing.assert_array_equal(refined.labels, np.broadcast_to(np.where(np.arange(24) < 12, 4, 0), (16, 24)))
    np.testing.assert_array_equal(refined.mask, refined.labels)
    sure = from_crf(two_halves(12), maps, tags, certainty=0.999, parameters=parameters)
    assert (sure.labels[:, :9] == 4).all()
    assert (sure.mask[:, 9:12] == IGNORE).all(), "a winner that is certain yields to no color"


def test_what_maps_decide_is_what_saliency_and_tags_leave_open() -> None:
    salient = np.array([[True, True, False, False]])
    tag, tags = np.array([4]), np.array([4, 9])
    assert decided_by_maps(np.array([[5, 5, 0, 0]], np.uint8), tag, salient) == 0, "the only tag where it is salient"
    assert decided_by_maps(np.array([[5, 0, 0, 0]], np.uint8), tag, salient) == 0.25
    assert decided_by_maps(np.array([[5, 5, 5, 0]], np.uint8), tag, salient) == 0.25
    assert decided_by_maps(np.array([[5, 10, 0, 0]], np.uint8), tags, salient) == 0.5, "which tag"
    assert decided_by_maps(np.array([[0, 10, 0, 5]], np.uint8), tags, salient) == 0.75

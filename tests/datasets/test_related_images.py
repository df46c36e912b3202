"""Tests of related images against lists, and of their exact probabilities."""

import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mcis.datasets.sampling.nearest_images import rounded_unit_vectors
from mcis.datasets.sampling.related_images import (
    RELATED_IMAGE_RULES,
    RelatedImagesQuery,
    Relations,
    draw_related_images,
)
from mcis.datasets.tags import Tags

Matrix = NDArray[np.bool_]


def drawn_by(matrix: Matrix, related: int = 3, **options: Any) -> Relations:
    return draw_related_images(
        Tags.from_matrix(matrix), np.zeros(len(matrix), bool), related=related, **{"seed": 0, **options}
    )


def related_of(matrix: Matrix, image: int, count: int, **options: Any) -> list[int]:
    """Returns the related images of an image with a single class."""
    return drawn_by(matrix, count, **options).related[image].tolist()


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    """Tags (N, K) of up to 10 images with at least one tag each."""
    matrix = draw(arrays(bool, st.tuples(st.integers(1, 10), st.integers(1, 4))))
    matrix[:, 0] |= ~matrix.any(axis=1)
    return matrix


@given(matrices(), st.integers(0, 9), st.integers(1, 8), st.booleans(), st.sampled_from(["class", "wrong_class"]))
def test_related_images_are_candidates_and_repeat_only_if_necessary(
    matrix: Matrix, seed: int, related: int, may_repeat: bool, by: str
) -> None:
    """Candidates have the class or, for the control, lack it if there are such images."""
    relations = drawn_by(matrix, related, seed=seed, related_may_repeat=may_repeat, related_by=by)
    assert relations.related.dtype == np.uint32
    rows_with_image = zip(relations.image.tolist(), relations.related.tolist(), strict=True)
    assert relations.num_repeating() == sum(len({image, *row}) <= related for image, row in rows_with_image)

    for image, tag, row in zip(relations.image, relations.tag, relations.related.tolist(), strict=True):
        members = np.flatnonzero(matrix[:, tag]).tolist()
        others = np.flatnonzero(~matrix[:, tag]).tolist()
        if by == "wrong_class" and others:
            candidates = others
        else:
            candidates = members if may_repeat else [i for i in members if i != image] or [int(image)]
        assert set(row) <= set(candidates)
        if not may_repeat:
            # Each candidate occurs once before any is repeated.
            assert len(set(row)) == min(related, len(candidates))
            assert max(Counter(row).values()) == -(-related // len(candidates))


@given(matrices(), st.sampled_from(["class", "wrong_class"]))
def test_maps_of_related_images_have_their_image_and_class(matrix: Matrix, by: str) -> None:
    relations = drawn_by(matrix, related_by=by)
    numbers = {key: n for n, key in enumerate(zip(relations.image.tolist(), relations.tag.tolist(), strict=True))}
    for tag, related, actual in zip(relations.tag, relations.related, relations.maps_of_related(), strict=True):
        assert actual.tolist() == [numbers.get((image, tag), -1) for image in related.tolist()]


def test_repeating_maps_are_counted_in_less_memory_than_the_related_images_take() -> None:
    """Every fourth map has an image twice."""
    num_maps = 2**20
    image = np.arange(num_maps)
    related = (image[:, None] + np.arange(1, 9)).astype(np.uint32)
    related[::4, 5] = related[::4, 2]
    empty = np.zeros(0, np.uint32)
    start = np.arange(num_maps + 1)
    relations = Relations(
        start=start, image=image, tag=image, related=related, contrastive=empty, contrastive_start=start
    )
    tracemalloc.start()
    assert relations.num_repeating() == num_maps // 4
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < related.nbytes


@pytest.mark.parametrize("image", [0, 2, 4])
def test_all_orders_of_related_images_are_equally_likely(image: int) -> None:
    """Counts the 24 orders of the four other members, for the first, a middle and the last member."""
    drawn = [tuple(related_of(np.ones((5, 1), bool), image, 4, seed=seed)) for seed in range(4800)]
    counts = Counter(drawn)

    assert all(image not in order for order in counts)
    assert len(counts) == 24
    # 23 degrees of freedom: the probability of 67 is below 1e-5.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 67


def test_related_images_depend_on_seed_image_and_class() -> None:
    wide = np.ones((50, 2), bool)
    base = drawn_by(wide, 8)
    other = drawn_by(wide, 8, seed=1)

    np.testing.assert_array_equal(base.related, drawn_by(wide, 8).related)
    assert len(np.unique(base.related, axis=0)) == 100, "each image and class has its own related images"
    assert not (base.related == other.related).all(axis=1).any()
    # A single order per class without the image itself would pass the checks above.
    assert len(np.unique(base.related[::2, 0])) > 20


def test_related_images_with_replacement_include_the_image_itself() -> None:
    rows = [related_of(np.ones((4, 1), bool), 2, 5, seed=seed, related_may_repeat=True) for seed in range(1000)]
    counts = np.bincount(np.concatenate(rows), minlength=4)
    assert ((counts - 1250) ** 2 / 1250).sum() < 25
    assert any(len(set(row)) < 4 for row in rows)
    assert related_of(np.ones((1, 1), bool), 0, 3, related_may_repeat=True) == [0, 0, 0]


# --- controls


def test_all_images_without_the_class_are_equally_likely() -> None:
    """Uses classes with members at the ends, in the middle, and everywhere except at one position."""
    matrix = np.zeros((9, 3), bool)
    matrix[[0, 1, 8], 0] = matrix[[3, 4, 6], 1] = matrix[[0, 1, 2, 3, 4, 5, 7, 8], 2] = True
    matrix = np.concatenate([matrix, np.ones((1, 3), bool)])  # an image with all classes, whose maps are tested
    drawn = np.stack([drawn_by(matrix, 2, seed=seed, related_by="wrong_class").related[-3:] for seed in range(4000)])
    for k in range(3):
        lacking = ~matrix[:, k]
        for column in drawn[:, k].T:
            counts = np.bincount(column, minlength=10)
            assert not counts[~lacking].any()
            expected = 4000 / lacking.sum()
            # At most 5 degrees of freedom: the probability of 30 is below 2e-5.
            assert ((counts[lacking] - expected) ** 2 / expected).sum() < 30


def test_images_without_the_class_depend_on_seed_image_and_class() -> None:
    matrix = np.repeat(np.eye(3, dtype=bool), 20, axis=0)
    base, other = (drawn_by(matrix, 8, related_by="wrong_class", seed=seed).related for seed in (0, 1))
    assert len(np.unique(base, axis=0)) == 60
    assert not (base == other).all(axis=1).any()


@given(matrices(), st.integers(1, 4))
def test_controls_fall_back_to_images_of_the_class(matrix: Matrix, related: int) -> None:
    """Controls use the image itself, or images without the class; if there are none, images of the class."""
    usual, itself, wrong = (drawn_by(matrix, related, related_by=by) for by in ("class", "itself", "wrong_class"))
    np.testing.assert_array_equal(itself.related, usual.image[:, None])
    everywhere = matrix[:, usual.tag].all(axis=0)
    np.testing.assert_array_equal(wrong.related[everywhere], usual.related[everywhere])
    assert not matrix[wrong.related[~everywhere], usual.tag[~everywhere, None]].any()


# --- fewer related images


WAYS: list[dict[str, Any]] = [
    {"contrastive": True},
    {"related_may_repeat": True, "contrastive": True},
    {"related_by": "wrong_class"},
    {"related_by": "wrong_class", "related_may_repeat": True},
    {"related_by": "itself"},
    {"related_by": "nearest", "contrastive": True},
]


@given(matrices(), st.sampled_from(WAYS), st.integers(0, 9))
def test_fewer_related_images_are_a_prefix_of_more(matrix: Matrix, how: dict[str, Any], seed: int) -> None:
    tags = Tags.from_matrix(matrix)
    is_source = np.arange(len(matrix)) % 3 == 0
    if how.get("related_by") == "nearest":
        alike = np.random.default_rng(seed).integers(-1, 2, (len(matrix), 3))  # integers give many ties
        how = {**how, "vectors": rounded_unit_vectors(alike.astype(np.float32))}
    most = draw_related_images(tags, is_source, seed=seed, related=6, **how)
    for related in range(1, 7):
        fewer = draw_related_images(tags, is_source, seed=seed, related=related, **how)
        np.testing.assert_array_equal(most.related[:, :related], fewer.related)


# --- nearest images, against a search image by image with integers

N = 40
K = 3
C = 6


def world(seed: int, alike: bool = False) -> tuple[Tags, NDArray[np.bool_], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    matrix = rng.random((N, K)) < 0.4
    matrix[:, 0] |= ~matrix.any(axis=1)
    vectors = rng.integers(-1, 2, (N, C)) if alike else rng.normal(size=(N, C))  # integers give many ties
    return Tags.from_matrix(matrix), rng.random(N) < 0.3, rounded_unit_vectors(vectors.astype(np.float32))


def every_tag(tags: Tags) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.repeat(np.arange(len(tags)), np.diff(tags.start)), tags.values.astype(np.int64)


def nearest(
    tags: Tags, is_source: NDArray[np.bool_], vectors: NDArray[np.float32], related: int
) -> NDArray[np.integer[Any]]:
    return RELATED_IMAGE_RULES["nearest"].draw(
        RelatedImagesQuery(tags, is_source, *every_tag(tags), related, seed=0, vectors=vectors)
    )


def one_by_one(tags: Tags, vectors: NDArray[np.float32], image: int, k: int, related: int) -> list[int]:
    candidates = np.flatnonzero(tags.matrix(np.arange(N))[:, k])
    whole = (vectors * 2**11).astype(np.int64)

    def sort_key(candidate: int) -> tuple[int, int]:
        return -int(whole[image] @ whole[candidate]), candidate

    others = sorted((candidate for candidate in candidates.tolist() if candidate != image), key=sort_key)
    return [others[r % min(len(others), related)] if others else image for r in range(related)]


@settings(max_examples=100)
@given(seed=st.integers(0, 30), alike=st.booleans(), related=st.sampled_from([1, 4, 64]))
def test_nearest_images_match_a_search_image_by_image(seed: int, alike: bool, related: int) -> None:
    tags, is_source, vectors = world(seed, alike)
    images, classes = every_tag(tags)
    actual = nearest(tags, is_source, vectors, related)
    for row, image, k in zip(actual, images.tolist(), classes.tolist(), strict=True):
        assert row.tolist() == one_by_one(tags, vectors, image, k, related)


def test_the_only_image_of_a_class_is_related_to_itself() -> None:
    tags = Tags.from_matrix(np.eye(3, dtype=bool))
    actual = nearest(tags, np.zeros(3, bool), rounded_unit_vectors(np.eye(3, dtype=np.float32)), 2)
    assert actual.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_products_of_rounded_vectors_are_exact_in_any_order() -> None:
    rng = np.random.default_rng(0)
    vectors = rounded_unit_vectors(rng.normal(size=(200, 432)).astype(np.float32))

    assert (np.linalg.norm(vectors, axis=1) <= 1).all()

    order = rng.permutation(432)
    exact = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    np.testing.assert_array_equal(vectors @ vectors.T, exact)
    np.testing.assert_array_equal(vectors[:, order] @ vectors[:, order].T, exact)

"""Related images by likeness, against a search one image at a time in whole numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.sampling.related_images import RELATED, Asked, rounded
from mcis.datasets.tags import Tags

N, K, C = 40, 3, 6


def world(seed: int, alike: bool = False) -> tuple[Tags, NDArray[np.bool_], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    matrix = rng.random((N, K)) < 0.4
    matrix[:, 0] |= ~matrix.any(axis=1)
    vectors = rng.integers(-1, 2, (N, C)) if alike else rng.normal(size=(N, C))  # whole numbers make many ties
    return Tags.of_matrix(matrix), rng.random(N) < 0.3, rounded(vectors.astype(np.float32))


def every_tag(tags: Tags) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.repeat(np.arange(len(tags)), np.diff(tags.start)), tags.values.astype(np.int64)


def nearest(tags: Tags, source: NDArray[np.bool_], vectors: NDArray[np.float32], related: int) -> NDArray[np.int64]:
    return RELATED["nearest"].draw(Asked(tags, source, *every_tag(tags), related, seed=0, vectors=vectors))


def one_by_one(tags: Tags, vectors: NDArray[np.float32], image: int, k: int, related: int) -> list[int]:
    candidates = np.flatnonzero(tags.matrix(np.arange(N))[:, k])
    whole = (vectors * 2**11).astype(np.int64)
    others = sorted((c for c in candidates.tolist() if c != image), key=lambda c: (-int(whole[image] @ whole[c]), c))
    return [others[r % min(len(others), related)] if others else image for r in range(related)]


@given(seed=st.integers(0, 30), alike=st.booleans(), related=st.sampled_from([1, 4, 64]))
def test_the_nearest_are_those_of_a_search_one_by_one(seed: int, alike: bool, related: int) -> None:
    tags, source, vectors = world(seed, alike)
    images, classes = every_tag(tags)
    got = nearest(tags, source, vectors, related)
    for row, image, k in zip(got, images.tolist(), classes.tolist(), strict=True):
        assert row.tolist() == one_by_one(tags, vectors, image, k, related)


@pytest.mark.parametrize("alike", [False, True])
def test_fewer_related_images_are_the_first_of_more(alike: bool) -> None:
    """Also where many are equally near."""
    tags, source, vectors = world(1, alike)
    one, three, seven = (nearest(tags, source, vectors, r) for r in (1, 3, 7))
    np.testing.assert_array_equal(three, seven[:, :3])
    np.testing.assert_array_equal(one, seven[:, :1])


def test_the_only_image_of_a_class_is_related_to_itself() -> None:
    tags = Tags.of_matrix(np.eye(3, dtype=bool))
    got = nearest(tags, np.zeros(3, bool), rounded(np.eye(3, dtype=np.float32)), 2)
    assert got.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_products_of_rounded_vectors_are_exact_in_any_order() -> None:
    rng = np.random.default_rng(0)
    vectors = rounded(rng.normal(size=(200, 432)).astype(np.float32))
    assert (np.linalg.norm(vectors, axis=1) <= 1).all()
    order = rng.permutation(432)
    exact = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    np.testing.assert_array_equal(vectors @ vectors.T, exact)
    np.testing.assert_array_equal(vectors[:, order] @ vectors[:, order].T, exact)

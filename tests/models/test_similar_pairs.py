"""Pairs of similar vectors: all of them, and the most similar of many."""

import numpy as np
import pytest

from mcis.models.similar_pairs import similar_pairs


def test_pairs_of_similar_vectors_are_found() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(5000, 32)).astype(np.float32)
    vectors[4000] = 3 * vectors[7]
    vectors[2049] = vectors[2048] + 0.05 * rng.normal(size=32)
    pairs = similar_pairs(vectors, 0.95, 10)
    assert pairs.total == 2
    assert pairs.first.tolist() == [7, 2048]
    assert pairs.second.tolist() == [4000, 2049]
    assert pairs.similarity[0] == pytest.approx(1)


def test_only_the_most_similar_of_many_pairs_are_kept() -> None:
    """Images of one machine: all look the same."""
    angles = np.linspace(0, 0.1, 1500)
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    vectors[1400] = vectors[3]
    pairs = similar_pairs(vectors, 0.95, 5)
    assert pairs.total == 1500 * 1499 // 2
    assert len(pairs.first) == 5
    assert (pairs.first[0], pairs.second[0]) == (3, 1400)

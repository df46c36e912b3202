"""Finds pairs of similar vectors, for example of images that look nearly the same."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_BLOCK = 512
"""Vectors that are compared with all others at a time."""


class SimilarPairs(NamedTuple):
    """Pairs of similar vectors.

    Attributes:
        total: Number of pairs.
        first, second: Rows of the most similar pairs, (P,).
        similarity: Their cosine similarities, in descending order, (P,).
    """

    total: int
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    similarity: NDArray[np.float32]


def similar_pairs(vectors: NDArray[np.float32], min_similarity: float, max_pairs: int) -> SimilarPairs:
    """Counts the pairs of rows whose cosine similarity is at least `min_similarity`, and returns the most similar.

    Args:
        vectors: Vectors of any length, (N, C).
        max_pairs: Maximum number of pairs to return. Memory holds these pairs and one block of similarities. Its pairs
            are sorted only if they are among its most similar ones.
    """
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    best = SimilarPairs(0, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
    for start in range(0, len(vectors), _BLOCK):
        similarities = np.minimum(vectors[start : start + _BLOCK] @ vectors[start:].T, 1)
        is_similar = np.triu(similarities >= min_similarity, 1)
        num_similar = int(np.count_nonzero(is_similar))
        if num_similar > max_pairs:
            is_similar &= similarities >= np.partition(similarities[is_similar], -max_pairs)[-max_pairs]
        rows, columns = np.nonzero(is_similar)

        first = np.concatenate([best.first, start + rows])
        second = np.concatenate([best.second, start + columns])
        similarity = np.concatenate([best.similarity, similarities[rows, columns]])
        order = np.lexsort((second, first, -similarity))[:max_pairs]
        best = SimilarPairs(best.total + num_similar, first[order], second[order], similarity[order])
    return best

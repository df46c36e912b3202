"""Finds training images that look nearly the same, by the image vectors that a run has anyway."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.storage.folders import path_exists
from mcis.platform.outputs.relations import VECTORS, read_vectors
from mcis.platform.runs.files import read_table
from mcis.platform.runs.workspace import Workspace

MIN_SIMILARITY = 0.95
"""Cosine similarity of two image vectors from which the images are near-duplicates."""
_BLOCK = 512
"""Images that are compared with all others at a time."""
_MAX_IMAGES = 100_000
"""Number of images above which no pairs are searched, because the time grows with its square."""
MAX_PAIRS = 500
"""Maximum number of pairs that are listed. Photographs of one machine may all look the same."""


class NearDuplicate(NamedTuple):
    """Two images that look nearly the same.

    Attributes:
        first, second: ids of the images.
        similarity: cosine similarity of their vectors.
    """

    first: str
    second: str
    similarity: float


class NearDuplicates(NamedTuple):
    """The near-duplicates among the training images of a run.

    Attributes:
        total: number of pairs.
        pairs: the most similar ones, at most MAX_PAIRS, in order.
    """

    total: int
    pairs: list[NearDuplicate]


def near_duplicates(workspace: Workspace, name: str) -> NearDuplicates | None:
    """Finds pairs of near-duplicates among the training images of a run.

    Returns:
        None if the run has no image vectors (only runs with `localize.related_by=nearest` have), or too many images.
    """
    localized = workspace.outputs(name).get("localize")
    if localized is None or not path_exists(localized / VECTORS):
        return None
    ids = read_table(localized / VECTORS, ["image_id"])["image_id"].to_pylist()
    if len(ids) > _MAX_IMAGES:
        return None

    similar = similar_pairs(read_vectors(localized / VECTORS), MIN_SIMILARITY, MAX_PAIRS)
    pairs = []
    for first, second, similarity in zip(similar.first, similar.second, similar.similarity, strict=True):
        pairs.append(NearDuplicate(ids[first], ids[second], float(similarity)))
    return NearDuplicates(similar.total, pairs)


class SimilarPairs(NamedTuple):
    """Pairs of similar vectors.

    Attributes:
        total: number of pairs.
        first, second: rows of the most similar pairs, (P,).
        similarity: their cosine similarities, in descending order, (P,).
    """

    total: int
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    similarity: NDArray[np.float32]


def similar_pairs(vectors: NDArray[np.float32], min_similarity: float, max_pairs: int) -> SimilarPairs:
    """Counts the pairs of rows whose cosine similarity is at least `min_similarity`, and returns the most similar.

    Args:
        vectors: vectors of any length, (N, C).
        max_pairs: maximum number of pairs to return. Memory holds these pairs and one block of similarities. Its pairs
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

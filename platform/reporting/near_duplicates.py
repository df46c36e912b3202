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
_BLOCK = 2048
"""Images that are compared with all others at a time."""
_MOST_IMAGES = 100_000
"""Number of images above which no pairs are searched, because the time grows with its square."""


class NearDuplicates(NamedTuple):
    """Two images that look nearly the same.

    Attributes:
        first, second: ids of the images.
        similarity: cosine similarity of their vectors.
    """

    first: str
    second: str
    similarity: float


def near_duplicates(workspace: Workspace, name: str) -> list[NearDuplicates] | None:
    """Finds pairs of near-duplicates among the training images of a run, the most similar first.

    Returns:
        None if the run has no image vectors (only runs with `localize.related_by=nearest` have), or too many images.
    """
    localized = workspace.outputs(name).get("localize")
    if localized is None or not path_exists(localized / VECTORS):
        return None
    ids = read_table(localized / VECTORS, ["image_id"])["image_id"].to_pylist()
    if len(ids) > _MOST_IMAGES:
        return None

    pairs = []
    for first, second, similarity in similar_pairs(read_vectors(localized / VECTORS), MIN_SIMILARITY):
        pairs.append(NearDuplicates(ids[first], ids[second], similarity))
    return pairs


def similar_pairs(vectors: NDArray[np.float32], min_similarity: float) -> list[tuple[int, int, float]]:
    """Returns the pairs of rows whose cosine similarity is at least `min_similarity`, the most similar first.

    Args:
        vectors: vectors of any length, (N, C).
    """
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    pairs = []
    for start in range(0, len(vectors), _BLOCK):
        similarities = vectors[start : start + _BLOCK] @ vectors[start:].T
        rows, columns = np.nonzero(np.triu(similarities >= min_similarity, 1))
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            pairs.append((start + row, start + column, min(1.0, float(similarities[row, column]))))
    pairs.sort(key=lambda pair: (-pair[2], pair[:2]))
    return pairs

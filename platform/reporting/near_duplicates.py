"""Finds training images that look nearly the same, by the image vectors that a run has anyway."""

from typing import NamedTuple

from mcis.datasets.storage.folders import path_exists
from mcis.models.similar_pairs import similar_pairs
from mcis.platform.outputs.relations import VECTORS, read_vectors
from mcis.platform.runs.files import read_table
from mcis.platform.runs.workspace import Workspace

MIN_SIMILARITY = 0.95
"""Cosine similarity of two image vectors from which the images are near-duplicates."""
_MAX_IMAGES = 100_000
"""Number of images above which no pairs are searched, because the time grows with its square."""
MAX_PAIRS = 500
"""Maximum number of pairs that are listed. Photographs of one machine may all look the same."""


class NearDuplicate(NamedTuple):
    """Two images that look nearly the same.

    Attributes:
        first, second: Ids of the images.
        similarity: Cosine similarity of their vectors.
    """

    first: str
    second: str
    similarity: float


class NearDuplicates(NamedTuple):
    """The near-duplicates among the training images of a run.

    Attributes:
        total: Number of pairs.
        pairs: The most similar ones, at most MAX_PAIRS, in order.
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

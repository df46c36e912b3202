"""Related images by likeness: for each image and class, the images of the class whose vectors are nearest to its own.

Vectors are rounded to multiples of 2^-11 (`rounded`): the product of two of unit length is then exact in float32
whatever the order of the sum, so equal vectors have equal neighbors on every machine. Ties go to the lower position.
"""

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.tags import Members

_STEPS = 2**11
_BLOCK = 2**22  # entries of a block of products, 32 MiB in float64


def rounded(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors (N, C) -> of unit length, rounded to multiples of 2^-11; a vector of zeros stays one."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return (np.trunc(unit * _STEPS) / _STEPS).astype(np.float32)  # towards 0, so that no length exceeds 1


def nearest_images(
    members: Members,
    vectors: NDArray[np.float32],
    images: NDArray[np.int64],
    classes: NDArray[np.int64],
    related: int,
) -> NDArray[np.int64]:
    """The R images nearest to each of B images among those of one of its classes, (B, R) positions, nearest first.

    The image itself is not among them and none comes twice while the class has enough; then the row repeats. The only
    image of a class is related to itself. The first r of a row are those for R = r.

    Args:
        members: of all N images.
        vectors: of all images, `rounded`, (N, C).
        images, classes: (B,); each image has the class.
        related: R.
    """
    out = np.empty((len(images), related), np.int64)
    for k in np.unique(classes):
        of_class = np.flatnonzero(classes == k)
        begin, end = members.ranges(np.array([k]))
        candidates = np.sort(members.images[begin[0] : end[0]].astype(np.int64))
        out[of_class] = _nearest(vectors, images[of_class], candidates, related)
    return out


def _nearest(
    vectors: NDArray[np.float32], images: NDArray[np.int64], candidates: NDArray[np.int64], related: int
) -> NDArray[np.int64]:
    """Rows of R of the candidates, which ascend, for some images, nearest first: (B, R)."""
    count = len(candidates)
    wanted = min(related + 1, count)  # as an image may be among its own candidates
    of_candidates = vectors[candidates]
    behind = np.arange(count) / (count * _STEPS**2)  # less than the difference of two products: the earlier goes first
    out = np.empty((len(images), related), np.int64)
    rows = max(1, _BLOCK // count)
    for first in range(0, len(images), rows):
        block = images[first : first + rows]
        nearness = vectors[block] @ of_candidates.T - behind
        top = np.argpartition(nearness, count - wanted, axis=1)[:, count - wanted :]
        order = np.argsort(-np.take_along_axis(nearness, top, axis=1), axis=1)
        found = candidates[np.take_along_axis(top, order, axis=1)]
        for row, image, nearest in zip(out[first:], block, found, strict=False):
            others = nearest[nearest != image]
            row[:] = np.resize(others, related) if len(others) else image
    return out

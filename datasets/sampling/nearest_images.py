"""Related images by likeness: for each image and class, the images of the class whose vectors are nearest to its own.

Vectors are rounded to multiples of 2^-11 (`rounded`): the product of two of unit length is then exact in float32
whatever the order of the sum, so equal vectors have equal neighbors on every machine. Ties go to the lower position.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.tags import Members

EXACT = 50_000
"""Images of a class up to which each is compared with every other; a larger class is searched by faiss, in the cells
of an inverted file that are nearest to the image, which finds most of the same images."""
_STEPS = 2**11
_BLOCK = 2**26  # entries of a block of products, 256 MiB
_CELLS_SEARCHED = 32
_ASKED = 65
"""Candidates that faiss is asked for at least: the most related images that a run may have, and the image itself."""
_SEED = 1234  # of the cells


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
    """Rows of R of the candidates for some images, nearest first."""
    wanted = min(related + 1, len(candidates))  # as an image may be among its own candidates
    find = (_exact if len(candidates) <= EXACT else _by_cells)(vectors[candidates], wanted)
    out = np.empty((len(images), related), np.int64)
    rows = max(1, _BLOCK // len(candidates))
    for first in range(0, len(images), rows):
        block = images[first : first + rows]
        for row, image, found in zip(out[first:], block, candidates[find(vectors[block])], strict=False):
            others = found[found != image]
            row[:] = np.resize(others, related) if len(others) else image
    return out


_Find = Callable[[NDArray[np.float32]], NDArray[np.int64]]
"""Vectors (B, C) -> the numbers of the R nearest candidates, (B, R), nearest first."""


def _exact(candidates: NDArray[np.float32], wanted: int) -> _Find:
    count = len(candidates)

    def find(queries: NDArray[np.float32]) -> NDArray[np.int64]:
        ranks = _ranks(queries @ candidates.T, np.arange(count), count)
        top = np.argpartition(ranks, count - wanted, axis=1)[:, count - wanted :]
        order = np.argsort(-np.take_along_axis(ranks, top, axis=1), axis=1)
        return np.take_along_axis(top, order, axis=1)

    return find


def _by_cells(candidates: NDArray[np.float32], wanted: int) -> _Find:
    import faiss

    count, cells, width = len(candidates), round(len(candidates) ** 0.5), candidates.shape[1]
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed, index.nprobe = _SEED, _CELLS_SEARCHED
    index.train(candidates)
    index.add(candidates)
    # Which of equally near ones faiss keeps, and their order, change with how many it is asked for.
    asked = min(max(wanted, _ASKED), count)

    def find(queries: NDArray[np.float32]) -> NDArray[np.int64]:
        products, found = index.search(queries, asked)
        order = np.argsort(-_ranks(products, found, count), axis=1)[:, :wanted]
        nearest = np.take_along_axis(found, order, axis=1)
        # Where the cells hold too few, -1 is left; the nearest stands in for them.
        return np.asarray(np.where(nearest < 0, nearest[:, :1], nearest))

    return find


def _ranks(products: NDArray[np.float32], candidates: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """A whole number for each of some of `count` candidates, larger the nearer it is; of equally near, the earlier.

    Args:
        products: of queries and candidates, (B, n).
        candidates: which ones, (B, n) or (n,); -1, of which the number is the smallest, for none.
    """
    whole = np.where(candidates < 0, -1.0, products) * _STEPS**2
    return np.asarray(whole.astype(np.int64) * count - np.where(candidates < 0, count, candidates))

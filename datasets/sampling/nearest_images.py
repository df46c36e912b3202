"""Finds, for each image of a class, the images of the class that are nearest to it by their vectors.

A class of up to MAX_CANDIDATES images is searched completely. In a larger class, each image is compared with
MAX_CANDIDATES images. Randomly chosen images are the centers of cells, and each image belongs to the cell of its
nearest center. The images of a cell are compared with each other and with those of the cells whose centers are nearest.
The time is then linear in the number of images.

Vectors are rounded (`rounded_unit_vectors`), so that their products are exact. The result is a function of the vectors,
the tags and the seed, on every machine, whatever the number of images that are searched at a time.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.tags import Positions, Tags

MAX_CANDIDATES = 2**16
"""Number of images with which an image is compared. Classes with no more images are searched completely."""
CELL_IMAGES = 2**9
"""Mean number of images of a cell."""
STEPS = 2**11
"""Unit vectors are rounded to multiples of 1 over this. The dot product of two such vectors is exact in float32, in
any order of summation, so equal vectors have equal neighbors on every machine."""
_BLOCK = 2**22  # entries in a block of dot products, 32 MiB in float64

Vectors = NDArray[np.float32] | NDArray[np.float16]
"""Rounded unit vectors of N images, (N, C). Both types hold them exactly."""


def rounded_unit_vectors(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales vectors (N, C) to unit length and rounds them toward 0 to multiples of 2^-11; zero vectors stay zero."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return (np.trunc(unit * STEPS) / STEPS).astype(np.float32)  # toward 0, so that no length exceeds 1


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassMaps:
    """T maps of K classes, ordered by class, then by cell, then by image.

    Attributes:
        maps: (T,) number of each map; maps are numbered by image, then by tag.
        images: (T,) image of each map.
        cells: (T,) cell of each map among those of its class.
        start: (K + 1,) where the maps of each class begin.
        centers: For each of the K classes, the images that are the centers of its cells; none if the class is not
            large.
        seed: Seed of the random numbers that choose the centers of cells.
        max_candidates, cell_images: See MAX_CANDIDATES and CELL_IMAGES.
    """

    maps: NDArray[np.int64]
    images: Positions
    cells: NDArray[np.int32]
    start: NDArray[np.int64]
    centers: tuple[Positions, ...]
    seed: int
    max_candidates: int = MAX_CANDIDATES
    cell_images: int = CELL_IMAGES

    @classmethod
    def from_tags(
        cls, tags: Tags, seed: int, *, max_candidates: int = MAX_CANDIDATES, cell_images: int = CELL_IMAGES
    ) -> "ClassMaps":
        """Orders the maps of all tags; each class is one cell."""
        maps = np.argsort(tags.values, kind="stable")
        images = np.repeat(np.arange(len(tags), dtype=np.uint32), np.diff(tags.start))[maps]
        start = np.concatenate([[0], np.cumsum(np.bincount(tags.values, minlength=tags.classes))])
        centers = []
        for k in range(tags.classes):
            class_images = images[start[k] : start[k + 1]]
            num_centers = len(class_images) // cell_images if len(class_images) > max_candidates else 0
            centers.append(_draw_images(seed, k, class_images, num_centers))
        return cls(
            maps=maps,
            images=images,
            cells=np.zeros(len(maps), np.int32),
            start=start,
            centers=tuple(centers),
            seed=seed,
            max_candidates=max_candidates,
            cell_images=cell_images,
        )

    @property
    def has_large_class(self) -> bool:
        """Whether some class has more than `max_candidates` images, and is searched by cells."""
        return bool((np.diff(self.start) > self.max_candidates).any())

    def find_cells(self, vectors: Vectors, first: int, stop: int) -> NDArray[np.int32]:
        """Returns the cells of the maps [first, stop) of this order, (stop - first,): 0 in classes that are not large.

        The cell of an image is the number of the center that is nearest to it.
        """
        cells = np.zeros(stop - first, np.int32)
        for k, low, high in self._parts(first, stop):
            if self._is_large(k):
                cells[low - first : high - first] = _nearest_centers(vectors, self.images[low:high], self.centers[k])
        return cells

    def with_cells(self, cells: NDArray[np.int32]) -> "ClassMaps":
        """Orders the maps again by the cells of all maps, (T,), from `find_cells`."""
        classes = np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))
        order = np.lexsort((cells, classes))
        return replace(self, maps=self.maps[order], images=self.images[order], cells=cells[order])

    def find_nearest(self, vectors: Vectors, first: int, stop: int, related: int) -> NDArray[np.int64]:
        """Returns the R images that are nearest to the image of each of the maps [first, stop) of this order.

        They have the class of the map, exclude the image itself and contain no image twice, as long as the class has
        enough; otherwise the row repeats. The only image of a class is related to itself.

        Returns:
            (stop - first, R), nearest first. Of images that are equally near, the one with the lower position is first.
        """
        nearest = np.empty((stop - first, related), np.int64)
        for k, low, high in self._parts(first, stop):
            begin, end = self.start[k : k + 2]
            if not self._is_large(k):
                images = self.images[low:high]
                nearest[low - first : high - first] = _nearest(vectors, images, self.images[begin:end], related)
                continue

            edges = np.flatnonzero(np.diff(self.cells[low:high])) + 1
            for part in np.split(np.arange(low, high), edges):
                candidates = self._candidates(vectors, k, int(self.cells[part[0]]))
                nearest[part - first] = _nearest(vectors, self.images[part], candidates, related)
        return nearest

    def _parts(self, first: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns the class, the first map and the last map + 1 of each part of [first, stop) with a single class."""
        parts = []
        first_class = int(np.searchsorted(self.start, first, side="right")) - 1
        for k in range(first_class, len(self.start) - 1):
            low = max(first, int(self.start[k]))
            high = min(stop, int(self.start[k + 1]))
            if low < high:
                parts.append((k, low, high))
            if self.start[k + 1] >= stop:
                break
        return parts

    def _is_large(self, k: int) -> bool:
        return bool(self.start[k + 1] - self.start[k] > self.max_candidates)

    def _candidates(self, vectors: Vectors, k: int, cell: int) -> Positions:
        """Returns the images with which the images of a cell of class k are compared, (max_candidates,), ascending.

        They are those of the cell itself and of the cells with the nearest centers. The last of these cells contributes
        only some of its images, chosen at random.
        """
        center_vectors = _as_float32(vectors, self.centers[k])
        similarity = center_vectors @ center_vectors[cell]
        similarity[cell] = np.inf
        nearest_cells = np.argsort(-similarity, kind="stable")

        begin, end = self.start[k : k + 2]
        edges = begin + np.searchsorted(self.cells[begin:end], np.arange(len(center_vectors) + 1))
        num_images = np.cumsum(np.diff(edges)[nearest_cells])
        num_whole = int(np.searchsorted(num_images, self.max_candidates, side="right"))
        candidates = [self.images[edges[c] : edges[c + 1]] for c in nearest_cells[:num_whole]]

        last = self.images[edges[nearest_cells[num_whole]] : edges[nearest_cells[num_whole] + 1]]
        missing = self.max_candidates - sum(map(len, candidates))
        candidates.append(_draw_images(self.seed, k, last, missing))
        return np.sort(np.concatenate(candidates))


def _draw_images(seed: int, k: int, images: Positions, count: int) -> Positions:
    """Draws `count` of B images of class k, (count,), in an order that depends on the seed and the class alone."""
    if not count:
        return images[:0]
    draws = uniforms(DrawPurpose.NEAREST_CENTER, seed, k, images.astype(np.int64))[:, 0]
    return images[np.argsort(draws, kind="stable")[:count]]


def _as_float32(vectors: Vectors, images: Positions) -> NDArray[np.float32]:
    return vectors[images].astype(np.float32)


def _nearest_centers(vectors: Vectors, images: Positions, centers: Positions) -> NDArray[np.int64]:
    """Returns the number of the center that is nearest to each of B images, (B,); of equal ones, the first."""
    center_vectors = _as_float32(vectors, centers)
    nearest = np.empty(len(images), np.int64)
    rows_per_block = max(1, _BLOCK // len(centers))
    for first in range(0, len(images), rows_per_block):
        block = slice(first, first + rows_per_block)
        nearest[block] = (_as_float32(vectors, images[block]) @ center_vectors.T).argmax(axis=1)
    return nearest


def _nearest(vectors: Vectors, images: Positions, candidates: Positions, related: int) -> NDArray[np.int64]:
    """Returns the R candidates nearest to each of B images, nearest first, (B, R). `candidates` is ascending."""
    count = len(candidates)
    wanted = min(related + 1, count)  # one more, since an image may be among its own candidates
    candidate_vectors = _as_float32(vectors, candidates)
    # Less than the difference of two dot products, so that ties go to the earlier candidate.
    tie_break = np.arange(count) / (count * STEPS**2)
    nearest = np.empty((len(images), related), np.int64)
    rows_per_block = max(1, _BLOCK // count)

    for first in range(0, len(images), rows_per_block):
        block = images[first : first + rows_per_block]
        similarity = _as_float32(vectors, block) @ candidate_vectors.T - tie_break
        top = np.argpartition(similarity, count - wanted, axis=1)[:, count - wanted :]
        order = np.argsort(-np.take_along_axis(similarity, top, axis=1), axis=1)
        sorted_candidates = candidates[np.take_along_axis(top, order, axis=1)]

        for row, image, neighbors in zip(nearest[first:], block, sorted_candidates, strict=False):
            others = neighbors[neighbors != image]
            row[:] = np.resize(others, related) if len(others) else image
    return nearest

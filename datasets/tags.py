"""Tags of N images in compressed rows, and the images of each class: what pairs are drawn from, 9 bytes per tag."""

import functools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Positions = NDArray[np.uint32]
"""Positions of images and of tags, of which there are fewer than 2^31, as Arrow counts them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tags:
    """T tags of N images among K classes: those of image i are values[start[i]:start[i + 1]], none twice."""

    values: NDArray[np.uint16]
    """(T,) class indices from 0, image by image."""
    start: Positions
    """(N + 1,) where each image's tags begin, and where the last one's end."""
    classes: int
    """K"""

    @classmethod
    def from_index(cls, column: pa.ChunkedArray, classes: int) -> "Tags":
        """Reads the column `tags` of an index, list<uint16>."""
        lists = column.combine_chunks()
        values, offsets = lists.flatten().to_numpy(), lists.offsets.to_numpy()
        return cls(values=values, start=(offsets - offsets[0]).astype(np.uint32), classes=classes)

    @classmethod
    def from_matrix(cls, matrix: NDArray[np.bool_]) -> "Tags":
        """Reads a matrix (N, K) of bool: image n has class k."""
        values = np.nonzero(matrix)[1]
        start = np.concatenate([[0], np.cumsum(matrix.sum(axis=1))]).astype(np.uint32)
        return cls(values=values.astype(np.uint16), start=start, classes=matrix.shape[1])

    def __len__(self) -> int:
        """N."""
        return len(self.start) - 1

    @functools.cached_property
    def num_tagged(self) -> int:
        """Number of images with at least one tag."""
        return int(np.count_nonzero(self.start[1:] > self.start[:-1]))

    def matrix(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The tags of the images at `positions`, (B,), as a matrix (B, K) of bool."""
        first = self.start[positions].astype(np.int64)
        counts = self.start[positions + 1].astype(np.int64) - first
        rows = np.repeat(np.arange(len(positions)), counts)
        within = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        out = np.zeros((len(positions), self.classes), bool)
        out[rows, self.values[first[rows] + within]] = True
        return out


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassMembers:
    """The images of each class: those of class k are images[start[k]:start[k + 1]].

    Positions ascend within a class and domain.
    """

    images: Positions
    """(T,) positions in the index, class by class, in each class those of the domain target first."""
    start: NDArray[np.int64]
    """(K + 1,) where each class begins in `images`, and where the last one ends."""

    @classmethod
    def from_tags(cls, tags: Tags, source: NDArray[np.bool_] | None = None) -> "ClassMembers":
        """Sorts the images by class.

        Args:
            source: (N,), which images are of the domain source; None if there are none.
        """
        group_type = np.min_scalar_type(2 * tags.classes)  # numbers of up to 16 bits are sorted by radix
        counts = np.diff(tags.start).astype(np.int64)
        images = np.repeat(np.arange(len(tags), dtype=np.uint32), counts)
        groups = tags.values.astype(group_type) * group_type.type(2)
        if source is not None:
            groups += source[images]
        ends = np.cumsum(np.bincount(groups, minlength=2 * tags.classes))
        order = np.argsort(groups, kind="stable")
        return cls(images=images[order], start=np.concatenate([[0], ends[1::2]]))

    def ranges(self, classes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where in `images` the members of each of some classes, (B,), begin, and where they end, (B,) both."""
        return self.start[classes], self.start[classes + 1]

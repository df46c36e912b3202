"""Tags of N images in compressed rows, and the images of each class. Pairs are drawn from them.

Both together take about 6 bytes per tag and 4 bytes per image.
"""

import functools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Positions = NDArray[np.uint32]
"""Positions of images or of tags. There are fewer than 2^31 of each, which is Arrow's limit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tags:
    """T tags of N images among K classes. The tags of image i are values[start[i]:start[i + 1]], without repetition."""

    values: NDArray[np.uint16]
    """(T,) class indices from 0, image by image."""
    start: Positions
    """(N + 1,) position of each image's first tag in `values`, followed by T."""
    classes: int
    """K, number of classes."""

    @classmethod
    def from_index(cls, column: pa.ChunkedArray, classes: int) -> "Tags":
        """Builds the tags from the column `tags` of an index, list<uint16>.

        Args:
            classes: K, number of classes.
        """
        lists = column.combine_chunks()
        values = lists.flatten().to_numpy()
        offsets = lists.offsets.to_numpy()
        return cls(values=values, start=(offsets - offsets[0]).astype(np.uint32), classes=classes)

    @classmethod
    def from_matrix(cls, matrix: NDArray[np.bool_]) -> "Tags":
        """Builds the tags from a matrix (N, K) of bool, whose entry (n, k) says whether image n has class k."""
        values = np.nonzero(matrix)[1]
        start = np.concatenate([[0], np.cumsum(matrix.sum(axis=1))]).astype(np.uint32)
        return cls(values=values.astype(np.uint16), start=start, classes=matrix.shape[1])

    def __len__(self) -> int:
        """N, number of images."""
        return len(self.start) - 1

    @functools.cached_property
    def num_tagged(self) -> int:
        """Number of images with at least one tag."""
        return int(np.count_nonzero(self.start[1:] > self.start[:-1]))

    def matrix(self, positions: NDArray[np.int64] | Positions) -> NDArray[np.bool_]:
        """Returns the tags of the images at `positions`, (B,), as a matrix (B, K) of bool."""
        first = self.start[positions].astype(np.int64)
        counts = self.start[positions + 1].astype(np.int64) - first

        rows = np.repeat(np.arange(len(positions)), counts)
        offset_in_row = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]

        matrix = np.zeros((len(positions), self.classes), bool)
        matrix[rows, self.values[first[rows] + offset_in_row]] = True
        return matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassMembers:
    """The images of each class. The images of class k are images[start[k]:start[k + 1]].

    Images may be in two groups: the domains `target` and `source`, or images of the data set and others. Within a
    class, images of the first group come before images of the second; within these, positions ascend.
    """

    images: Positions
    """(T,) positions in the index, class by class."""
    start: NDArray[np.int64]
    """(K + 1,) position of each class's first image in `images`, followed by T."""
    second_group_start: NDArray[np.int64]
    """(K,) position of each class's first image of the second group in `images`, or of the next class if it has
    none."""

    @classmethod
    def from_tags(cls, tags: Tags, is_second_group: NDArray[np.bool_] | None = None) -> "ClassMembers":
        """Sorts the images by class.

        Args:
            is_second_group: Whether each image is in the second group, (N,). None: no image is.
        """
        group_type = np.min_scalar_type(2 * tags.classes)  # NumPy sorts integers of up to 16 bits by radix
        counts = np.diff(tags.start).astype(np.int64)
        images = np.repeat(np.arange(len(tags), dtype=np.uint32), counts)

        groups = tags.values.astype(group_type) * group_type.type(2)  # 2 k for the first group, 2 k + 1 for the second
        if is_second_group is not None:
            groups += is_second_group[images]

        ends = np.cumsum(np.bincount(groups, minlength=2 * tags.classes))
        order = np.argsort(groups, kind="stable")
        return cls(images=images[order], start=np.concatenate([[0], ends[1::2]]), second_group_start=ends[0::2])

    def ranges(self, classes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns where the images of the given classes, (B,), begin and end in `images`, (B,) each."""
        return self.start[classes], self.start[classes + 1]


def count_tags(tags: pa.ChunkedArray, num_classes: int) -> NDArray[np.int64]:
    """Returns the number of images with each class, (K,).

    Args:
        tags: The column `tags` of an index or a listing, list<uint16>, without repetition in a row.
        num_classes: K.
    """
    return np.bincount(pc.list_flatten(tags).to_numpy(), minlength=num_classes)


def has_other_tags(first: pa.ChunkedArray, second: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Returns whether the tags of each image differ between two columns `tags` of the same N images, (N,).

    Args:
        first, second: Columns of an index or a listing, list<uint16>, ascending in each row.
    """
    counts = pc.list_value_length(first).to_numpy()
    differs = counts != pc.list_value_length(second).to_numpy()
    has_same_count = pa.array(~differs)

    first_tags = pc.list_flatten(first.filter(has_same_count)).to_numpy()
    second_tags = pc.list_flatten(second.filter(has_same_count)).to_numpy()
    image_of_tag = np.repeat(np.flatnonzero(~differs), counts[~differs])
    differs[image_of_tag[first_tags != second_tags]] = True
    return np.asarray(differs)

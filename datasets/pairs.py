"""Image pairs with at least one common class (section 3.2), and related images, drawn from (seed, epoch, image) alone.

Every image is m once an epoch. One of its classes is drawn, then a partner n that has it. Images without a tag are in
no pair. Epochs follow each other without a gap: row i of the endless stream of pairs is position i mod N of epoch
i div N, and batch t holds the rows t B .. (t + 1) B - 1, so no epoch ends in a partial batch and nothing is left out.
"""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.draws import order, uniforms

_PARTNER = 1


class PairRows(NamedTuple):
    """Pairs as positions in the index: m and n, (N,), and the epoch each belongs to, (N,)."""

    m: NDArray[np.int64]
    n: NDArray[np.int64]
    epoch: NDArray[np.int64]


class PairSampler:
    """Draws partners from the tags of N images.

    Args:
        tags: (N, K) bool.
        seed: of all draws.
        itself: whether an image may be its own partner (released recipe). Without, that happens only where the class
            drawn has no other image.
    """

    def __init__(self, tags: NDArray[np.bool_], *, seed: int, itself: bool = False):
        self.seed, self.itself = seed, itself
        self.images = np.flatnonzero(tags.any(axis=1))
        rows, columns = np.nonzero(tags)
        self._tags = columns.astype(np.int64)
        self._tag_start = np.concatenate([[0], np.cumsum(tags.sum(axis=1))]).astype(np.int64)
        by_class = np.lexsort((rows, columns))
        self._members = rows[by_class].astype(np.int64)
        self._class_start = np.concatenate([[0], np.cumsum(tags.sum(axis=0))]).astype(np.int64)
        # Where each (image, tag) stands in its class's list of members: what must be stepped over to avoid the image.
        self._place = np.empty(len(rows), np.int64)
        self._place[by_class] = np.arange(len(rows)) - self._class_start[columns[by_class]]

    def __len__(self) -> int:
        """Pairs an epoch: the images with a tag."""
        return len(self.images)

    def partners(self, epoch: NDArray[np.int64] | int, m: NDArray[np.int64]) -> NDArray[np.int64]:
        """n for each m, (N,) positions in the index."""
        draws = uniforms(self.seed, epoch, m, _PARTNER, 2)
        count = self._tag_start[m + 1] - self._tag_start[m]
        at = self._tag_start[m] + (draws[:, 0] * count).astype(np.int64)
        tag = self._tags[at]
        start, size = self._class_start[tag], self._class_start[tag + 1] - self._class_start[tag]
        if self.itself:
            return self._members[start + (draws[:, 1] * size).astype(np.int64)]
        choice = (draws[:, 1] * (size - 1)).astype(np.int64)
        choice += choice >= self._place[at]
        return self._members[start + np.where(size > 1, choice, 0)]

    def rows(self, first: int, last: int) -> PairRows:
        """Rows first .. last - 1 of the endless stream of pairs."""
        place, epoch = epoch_rows(self.seed, len(self), first, last)
        m = self.images[place]
        return PairRows(m, self.partners(epoch, m), epoch)


def epoch_rows(seed: int, count: int, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows first .. last - 1 of the endless stream of epochs over `count` images: place in 0..count-1, epoch, (N,)."""
    epoch, position = np.divmod(np.arange(first, last), count)
    place = np.empty(len(epoch), np.int64)
    for e in np.unique(epoch):
        here = epoch == e
        place[here] = _order(seed, int(e), count)[position[here]]
    return place, epoch


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return order(seed, epoch, count)


def related_images(
    tags: NDArray[np.bool_], image: int, tag: int, count: int, *, seed: int, may_repeat: bool = False
) -> NDArray[np.int64]:
    """The related images of one image for one of its classes (section 3.2), (count,) positions in the index.

    Drawn from (seed, image, class); the first r of them are the related images for R = r. Not the image itself and
    without repetition while the class has enough; then its members repeat; an only member is related to itself.

    Args:
        tags: (N, K) bool of all training images.
        may_repeat: with repetition, and the image itself may be drawn (released recipe).
    """
    members = np.flatnonzero(tags[:, tag])
    rng = np.random.default_rng([seed, image, tag])
    if may_repeat:
        return members[rng.integers(len(members), size=count)]
    others = members[members != image]
    if not len(others):
        return np.full(count, image, np.int64)
    drawn = rng.permutation(others)
    return np.resize(drawn, count)

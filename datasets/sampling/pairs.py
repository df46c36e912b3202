"""Image pairs with at least one common class (section 3.2), drawn from (seed, epoch, image) alone.

Every tagged image is m once per epoch. One of its classes is drawn, then a partner n that has it. Images without a tag
are in no pair. Epochs follow each other without a gap: row i of the endless stream of pairs is position i mod E of
epoch i div E, and batch t holds the rows t B .. (t + 1) B - 1, so no epoch ends in a partial batch and nothing is left
out. A row is computed from its number; nothing is walked through or laid out, whatever the number of images.

Beside the images of the data set itself (domain `target`; web images are among them) there may be single-label images
(domain `source`; end of section 3.2). Pairs are then of three kinds.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import DrawPurpose, OrderPurpose, permuted, uniforms
from mcis.datasets.tags import ClassMembers, Positions, Tags

TARGET_TARGET, SOURCE_SOURCE, TARGET_SOURCE = 0, 1, 2
"""Kinds of a pair: the domains of m and n. Each has its own W_P (end of section 3.2)."""
_KIND_BY_SOURCES = np.array([TARGET_TARGET, TARGET_SOURCE, SOURCE_SOURCE], np.uint8)
"""The kind by how many of the pair's images are of the domain source: 0, 1, 2."""


class PairRows(NamedTuple):
    """Pairs as positions in the index: m and n, (N,), the epoch each belongs to, (N,), and its kind, (N,).

    In a pair of kind TARGET_SOURCE m is of the domain target and n of the domain source.
    """

    m: NDArray[np.int64]
    n: NDArray[np.int64]
    epoch: NDArray[np.int64]
    kind: NDArray[np.uint8]


class _Half(NamedTuple):
    """B pairs that lack n: m, the class that m and n are to share, and the number in [0, 1) that chooses n, (B,)."""

    m: NDArray[np.int64]
    classes: NDArray[np.int64]
    choice: NDArray[np.float64]


class PairSampler:
    """Draws pairs from the tags of N images.

    Images take turns as m whatever their domain, and the partner is any other image of the class; an image is its own
    partner only where its class has no other. Where m is of the domain source and n of the domain target, they are
    exchanged, so that the pair is TARGET_SOURCE.

    Args:
        tags: of the N images, one of which has a tag at least.
        seed: of all draws.
        partner_may_be_itself: whether an image may be drawn as its own partner (RELEASED_RECIPE, "Classifier").
        wrong_class: whether partners are drawn of the images that lack the class, as a control of what partners bring.
        source: (N,), which images are of the domain source; None if there are none.
        epoch_pairs: E, pairs per epoch; None for as many as there are images with a tag.
        class_balanced_fraction: fraction of the pairs, in [0, 1], for which a class is drawn uniformly, then m from its
            images; this class is the one that the pair shares. 1 is class-balanced sampling.
    """

    def __init__(
        self,
        tags: Tags,
        *,
        seed: int,
        partner_may_be_itself: bool = False,
        wrong_class: bool = False,
        source: NDArray[np.bool_] | None = None,
        epoch_pairs: int | None = None,
        class_balanced_fraction: float = 0.0,
    ):
        self.tags, self.seed, self.partner_may_be_itself = tags, seed, partner_may_be_itself
        self.class_balanced_fraction, self.wrong_class = class_balanced_fraction, wrong_class
        self.members = ClassMembers.from_tags(tags, source)
        self._source = source if source is not None and source.any() else None
        self._tagged = _tagged(tags, self._source)
        self._pairs = epoch_pairs or tags.num_tagged

    def __len__(self) -> int:
        """E, pairs per epoch."""
        return self._pairs

    def rows(self, first: int, last: int) -> PairRows:
        """Rows first .. last - 1 of the endless stream of pairs."""
        number = np.arange(first, last)
        epoch, position = np.divmod(number, self._pairs)
        turn, within = np.divmod(number, self.tags.num_tagged)
        m = permuted(OrderPurpose.IMAGES, self.seed, turn, self.tags.num_tagged, within)
        half = self._half(turn, m if self._tagged is None else self._tagged[m].astype(np.int64))
        if self.class_balanced_fraction:
            self._balance(half, epoch, position)
        m, n = half.m, self._partners(half)
        if self._source is None:
            return PairRows(m, n, epoch, np.full(len(m), TARGET_TARGET, np.uint8))
        m_is_source, n_is_source = self._source[m], self._source[n]
        exchanged = m_is_source & ~n_is_source
        return PairRows(
            m=np.where(exchanged, n, m),
            n=np.where(exchanged, m, n),
            epoch=epoch,
            kind=_KIND_BY_SOURCES[m_is_source.astype(np.intp) + n_is_source],
        )

    def _half(self, turn: NDArray[np.int64], m: NDArray[np.int64]) -> _Half:
        """One of the classes of each m, and the number that chooses n."""
        draws = uniforms(DrawPurpose.PARTNER, self.seed, turn, m, count=2)
        start = self.tags.start[m].astype(np.int64)
        count = self.tags.start[m + 1].astype(np.int64) - start
        classes = self.tags.values[start + (draws[:, 0] * count).astype(np.int64)].astype(np.int64)
        return _Half(m, classes, draws[:, 1])

    def _balance(self, half: _Half, epoch: NDArray[np.int64], position: NDArray[np.int64]) -> None:
        """Draws a class first, and then m out of its images, in a fraction of the pairs; changes `half` in place."""
        draws = uniforms(DrawPurpose.CLASS_BALANCE, self.seed, epoch, position, count=4)
        rows = np.flatnonzero(draws[:, 0] < self.class_balanced_fraction)
        low, high = self.members.ranges(np.arange(self.tags.classes))
        filled = np.flatnonzero(high > low)
        half.classes[rows] = k = filled[(draws[rows, 1] * len(filled)).astype(np.int64)]
        half.m[rows] = self.members.images[low[k] + (draws[rows, 2] * (high - low)[k]).astype(np.int64)]
        half.choice[rows] = draws[rows, 3]

    def _partners(self, half: _Half) -> NDArray[np.int64]:
        """n for each m out of the images of the class, (B,)."""
        if self.wrong_class:
            return self._lacking(half)
        low, high = self.members.ranges(half.classes)
        size = high - low - (not self.partner_may_be_itself)
        # Where there is no candidate but m, the class holds m alone.
        member = np.where(size > 0, low + (half.choice * size).astype(np.int64), low)
        n = self.members.images[member].astype(np.int64)
        if not self.partner_may_be_itself:
            # The last candidate was left out of the draw; it stands in for m, so all but m have the same chance.
            met = np.flatnonzero((n == half.m) & (size > 0))
            n[met] = self.members.images[high[met] - 1]
        return n

    def _lacking(self, half: _Half) -> NDArray[np.int64]:
        """n for each m out of the images that lack the class, or out of all where none does, (B,)."""
        n = np.empty_like(half.m)
        for k in np.unique(half.classes):
            rows, (begin, end) = np.flatnonzero(half.classes == k), self.members.start[k : k + 2]
            everyone = np.arange(len(self.tags))
            lacking = np.delete(everyone, self.members.images[begin:end])
            candidates = lacking if len(lacking) else everyone
            n[rows] = candidates[(half.choice[rows] * len(candidates)).astype(np.int64)]
        return n


def _tagged(tags: Tags, source: NDArray[np.bool_] | None) -> Positions | None:
    """Positions of the images with a tag, those of the domain target first; None if these are simply all images."""
    if source is None and tags.num_tagged == len(tags):
        return None
    tagged = np.flatnonzero(tags.start[1:] > tags.start[:-1]).astype(np.uint32)
    return tagged if source is None else np.concatenate([tagged[~source[tagged]], tagged[source[tagged]]])


def epoch_rows(seed: int, count: int, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows first .. last - 1 of the endless stream of epochs over `count` images, each epoch in an order of its own:
    which image, in 0..count-1, and which epoch, (N,)."""
    epoch, position = np.divmod(np.arange(first, last), count)
    return permuted(OrderPurpose.IMAGES, seed, epoch, count, position), epoch

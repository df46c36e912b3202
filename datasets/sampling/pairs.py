"""Samples pairs of images, most with a common class (section 3.2), as a function of (seed, epoch, image).

By default, each image is image m once per epoch. One of its classes is drawn, then a partner n with it. An image
without tags is a negative: it shows none of the classes, and its partner is any tagged image. Such a pair has no common
class: only the losses that need none use it (`models.classifier_losses`). So every pair has a tagged image, even if
nearly all images are negatives.

Epochs follow each other without a gap: with E pairs per epoch and B per batch, row i of the endless stream of pairs is
position i mod E of epoch i div E, and batch t holds rows t B .. (t + 1) B - 1. So no epoch ends in a partial batch, and
no pair is dropped. A row is computed directly from its number, at a cost that does not depend on the number of images,
except for the control `wrong_class`.

Besides the images of the data set (domain `target`, which includes web images) there may be single-label images (domain
`source`, end of section 3.2). The images of a pair are then of one domain, or of both.

Single-label and web images may outnumber those of the data set many times. With a target share S, a fraction S of the
images m are of the data set: row i is one if floor((i + 1) S) > floor(i S), and both groups take turns of their own.
Each partner is of the data set with probability S, as far as both groups have images of the class.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import DrawPurpose, OrderPurpose, permuted, uniforms
from mcis.datasets.tags import ClassMembers, Positions, Tags

TARGET_TARGET = 0
SOURCE_SOURCE = 1
TARGET_SOURCE = 2
"""Domains of the images of a pair. Each of the three values has its own W_P (end of section 3.2)."""
_PAIR_DOMAINS_BY_NUM_SOURCES = np.array([TARGET_TARGET, TARGET_SOURCE, SOURCE_SOURCE], np.uint8)
"""Domains of a pair by the number of its images in the domain `source`: 0, 1 or 2."""

_SHARE_PARTS = 2**20
"""Denominator of the target share, which is rounded so that the rows of both groups are counted by integers."""
_BELOW_ONE = np.nextafter(1.0, 0.0)
_NO_CLASS = -1
"""Class of a pair whose image m is a negative."""


class PairRows(NamedTuple):
    """Pairs of images.

    Attributes:
        m, n: Positions of the images in the index, (N,). If the domains are TARGET_SOURCE, m is of the domain
            `target` and n of the domain `source`.
        epoch: Epoch of each pair, (N,).
        pair_domains: Domains of each pair, (N,).
    """

    m: NDArray[np.int64]
    n: NDArray[np.int64]
    epoch: NDArray[np.int64]
    pair_domains: NDArray[np.uint8]


class _HalfPairs(NamedTuple):
    """B pairs whose n is not chosen yet.

    Attributes:
        m: Positions of the first images, (B,).
        classes: Class that m and n are to share, (B,); _NO_CLASS if m is a negative.
        choice: Numbers in [0, 1) that choose n, (B,).
    """

    m: NDArray[np.int64]
    classes: NDArray[np.int64]
    choice: NDArray[np.float64]


class _Candidates(NamedTuple):
    """Images from which a partner is picked.

    Attributes:
        images: Positions of the images; with a target share, those of the data set first.
        num_targets: Number of images of the data set; without a target share, of all.
    """

    images: Positions | NDArray[np.int64]
    num_targets: int


class _CandidateRange(NamedTuple):
    """Where in `ClassMembers.images` the candidates of B choices are.

    Attributes:
        low: Position of the first candidate, (B,).
        high: Position after the last candidate, (B,).
        choice: Numbers in [0, 1) that choose among the candidates, (B,).
    """

    low: NDArray[np.int64]
    high: NDArray[np.int64]
    choice: NDArray[np.float64]


class PairSampler:
    """Samples pairs from the tags of N images.

    Images take turns as m, in either domain. The partner is any other image of the class; an image is its own partner
    only if its class has no other image. The partner of a negative is any tagged image. If m is of the domain `source`
    and n of the domain `target`, they are swapped, so that the pair is TARGET_SOURCE.

    Args:
        tags: Tags of the N images. At least one image has a tag; those without are negatives.
        seed: Seed of all random numbers.
        partner_may_be_itself: Whether an image may be drawn as its own partner (paper-vs-code, "Classifier").
        wrong_class: Whether to draw partners that lack the class, as a control for the effect of partners.
        is_source: Whether each image is of the domain `source`, (N,); None if none is.
        epoch_pairs: E, pairs per epoch; None: the number of images.
        class_balanced_fraction: Fraction of the pairs, in [0, 1], for which a class is drawn uniformly, then m from its
            images; this class is the one that the pair shares. 1 is class-balanced sampling. Pairs of negatives stay.
        target_share: Fraction of the images of pairs, in (0, 1], that are of the data set. None: its share of the
            images. It has no effect if all images are in one of the two groups.
        is_extra: Whether each image is a single-label or web image, not one of the data set, (N,); None if none is.
    """

    def __init__(
        self,
        tags: Tags,
        *,
        seed: int,
        partner_may_be_itself: bool = False,
        wrong_class: bool = False,
        is_source: NDArray[np.bool_] | None = None,
        epoch_pairs: int | None = None,
        class_balanced_fraction: float = 0.0,
        target_share: float | None = None,
        is_extra: NDArray[np.bool_] | None = None,
    ):
        self.tags = tags
        self.seed = seed
        self.partner_may_be_itself = partner_may_be_itself
        self.class_balanced_fraction = class_balanced_fraction
        self.wrong_class = wrong_class
        self._is_source = is_source if is_source is not None and is_source.any() else None
        self._share = _TargetShare.from_images(target_share, is_extra)
        self.members = ClassMembers.from_tags(tags, self._share.is_extra if self._share else is_source)
        has_negatives = tags.num_tagged < len(tags)
        self._tagged = self._candidates(_tagged_positions(tags)) if has_negatives else None
        all_images = np.arange(len(tags), dtype=np.uint32)
        self._turns = None if self._is_source is None else _by_group(all_images, self._is_source)
        self._pairs = epoch_pairs or len(tags)

    def __len__(self) -> int:
        """E, pairs per epoch."""
        return self._pairs

    def rows(self, first: int, last: int) -> PairRows:
        """Returns rows first .. last - 1 of the endless stream of pairs."""
        number = np.arange(first, last)
        epoch, position_in_epoch = np.divmod(number, self._pairs)
        m, turn = self._share.turns(self.seed, number) if self._share else self._take_turns(number)

        half_pairs = self._draw_classes(turn, m)
        if self.class_balanced_fraction:
            self._balance(half_pairs, epoch, position_in_epoch)
        m = half_pairs.m
        n = self._partners(half_pairs)
        if self._is_source is None:
            return PairRows(m, n, epoch, np.full(len(m), TARGET_TARGET, np.uint8))

        m_is_source = self._is_source[m]
        n_is_source = self._is_source[n]
        swapped = m_is_source & ~n_is_source
        return PairRows(
            m=np.where(swapped, n, m),
            n=np.where(swapped, m, n),
            epoch=epoch,
            pair_domains=_PAIR_DOMAINS_BY_NUM_SOURCES[m_is_source.astype(np.intp) + n_is_source],
        )

    def _take_turns(self, number: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns image m of some rows and the turn in which it is m, (B,) each."""
        num_images = len(self.tags)
        turn, position = np.divmod(number, num_images)
        m = permuted(OrderPurpose.IMAGES, self.seed, turn, num_images, position)
        if self._turns is not None:
            m = self._turns[m].astype(np.int64)
        return m, turn

    def _draw_classes(self, turn: NDArray[np.int64], m: NDArray[np.int64]) -> _HalfPairs:
        """Draws one of the classes of each m, none for a negative, and the number that chooses n."""
        draws = uniforms(DrawPurpose.PARTNER, self.seed, turn, m, count=2)
        start = self.tags.start[m].astype(np.int64)
        count = self.tags.start[m + 1].astype(np.int64) - start
        drawn_tag = start + (draws[:, 0] * count).astype(np.int64)

        classes = np.full(len(m), _NO_CLASS, np.int64)
        classes[count > 0] = self.tags.values[drawn_tag[count > 0]]
        return _HalfPairs(m, classes, draws[:, 1])

    def _balance(self, half_pairs: _HalfPairs, epoch: NDArray[np.int64], position_in_epoch: NDArray[np.int64]) -> None:
        """Redraws a fraction of the pairs in place: a class, then m from its images."""
        draws = uniforms(DrawPurpose.CLASS_BALANCE, self.seed, epoch, position_in_epoch, count=4)
        is_redrawn = (draws[:, 0] < self.class_balanced_fraction) & (half_pairs.classes != _NO_CLASS)
        rows = np.flatnonzero(is_redrawn)

        low, high = self.members.ranges(np.arange(self.tags.classes))
        nonempty = np.flatnonzero(high > low)
        classes = nonempty[(draws[rows, 1] * len(nonempty)).astype(np.int64)]
        low, high, choice = self._candidates_of_classes(classes, draws[rows, 2])
        members = low + (choice * (high - low)).astype(np.int64)

        half_pairs.classes[rows] = classes
        half_pairs.m[rows] = self.members.images[members]
        half_pairs.choice[rows] = draws[rows, 3]

    def _partners(self, half_pairs: _HalfPairs) -> NDArray[np.int64]:
        """Chooses n for each m, (B,)."""
        choose = self._partners_without_class if self.wrong_class else self._partners_with_class
        is_negative = half_pairs.classes == _NO_CLASS
        if self._tagged is None or not is_negative.any():
            return choose(half_pairs)

        n = np.empty_like(half_pairs.m)
        n[~is_negative] = choose(_HalfPairs(*(column[~is_negative] for column in half_pairs)))
        n[is_negative] = self._pick(self._tagged, half_pairs.choice[is_negative])
        return n

    def _candidates(self, images: Positions | NDArray[np.int64]) -> _Candidates:
        """Returns images as candidates. The time is linear in their number."""
        if self._share is None:
            return _Candidates(images, len(images))
        num_extra = int(np.count_nonzero(self._share.is_extra[images]))
        return _Candidates(_by_group(images, self._share.is_extra), len(images) - num_extra)

    def _pick(self, candidates: _Candidates, choice: NDArray[np.float64]) -> NDArray[np.int64]:
        """Picks one of the candidates by each number in [0, 1), with the target share."""
        images, num_targets = candidates
        if self._share is None:
            return images[(choice * len(images)).astype(np.int64)].astype(np.int64)

        num_extra = len(images) - num_targets
        is_extra, choice = self._share.draw(choice, np.array(num_targets), np.array(num_extra))
        size = np.where(is_extra, num_extra, num_targets)
        first = np.where(is_extra, num_targets, 0)
        return images[first + (choice * size).astype(np.int64)].astype(np.int64)

    def _candidates_of_classes(
        self, classes: NDArray[np.int64], choice: NDArray[np.float64], excluded: NDArray[np.int64] | None = None
    ) -> _CandidateRange:
        """Returns the members of each class as candidates; with a target share, those in one of the two groups.

        Args:
            classes: (B,) classes.
            choice: Numbers in [0, 1), (B,).
            excluded: A member of each class that is not to be chosen, (B,). It may be within the returned range. None:
                all members may be chosen.
        """
        low, high = self.members.ranges(classes)
        if self._share is None:
            return _CandidateRange(low, high, choice)

        middle = self.members.second_group_start[classes]
        num_targets = middle - low
        num_extra = high - middle
        if excluded is None:
            is_extra, choice = self._share.draw(choice, num_targets, num_extra)
        else:
            is_extra, choice = self._share.draw_without(excluded, choice, num_targets, num_extra)
        return _CandidateRange(np.where(is_extra, middle, low), np.where(is_extra, high, middle), choice)

    def _partners_with_class(self, half_pairs: _HalfPairs) -> NDArray[np.int64]:
        """Chooses n for each m from the images of the class, (B,)."""
        m = half_pairs.m
        excluded = None if self.partner_may_be_itself else m
        low, high, choice = self._candidates_of_classes(half_pairs.classes, half_pairs.choice, excluded)
        size = high - low
        if not self.partner_may_be_itself:
            size = np.where(self._is_in_group_of(m, low), size - 1, size)
        # If there is no candidate besides m, m is the only image of the class.
        member = np.where(size > 0, low + (choice * size).astype(np.int64), low)
        n = self.members.images[member].astype(np.int64)

        if not self.partner_may_be_itself:
            # The last member was excluded from the draw and now replaces m, so all members but m are equally likely.
            drew_itself = np.flatnonzero((n == m) & (size > 0))
            n[drew_itself] = self.members.images[high[drew_itself] - 1]
        return n

    def _is_in_group_of(self, m: NDArray[np.int64], low: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether images are in the group of the members at `low`, (B,); without a target share, all are."""
        if self._share is None:
            return np.ones(len(m), bool)
        return self._share.same_group(m, self.members.images[low])

    def _partners_without_class(self, half_pairs: _HalfPairs) -> NDArray[np.int64]:
        """Chooses n for each m from the images that lack the class, or from all images if there are none, (B,)."""
        n = np.empty_like(half_pairs.m)
        all_images = np.arange(len(self.tags))
        for k in np.unique(half_pairs.classes):
            rows = np.flatnonzero(half_pairs.classes == k)
            begin, end = self.members.start[k : k + 2]
            candidates = np.delete(all_images, self.members.images[begin:end])
            if not len(candidates):
                candidates = all_images
            n[rows] = self._pick(self._candidates(candidates), half_pairs.choice[rows])
        return n


class _TargetShare(NamedTuple):
    """The images of the data set and the others, which take turns as image m in a fixed proportion.

    Attributes:
        parts: Target share, in parts of `_SHARE_PARTS`.
        is_extra: Whether each image is not of the data set, (N,).
        targets, others: Images of each group.
    """

    parts: int
    is_extra: NDArray[np.bool_]
    targets: Positions
    others: Positions

    @classmethod
    def from_images(cls, share: float | None, is_extra: NDArray[np.bool_] | None) -> "_TargetShare | None":
        """Returns the share of images; None if there is none, or if one of the groups is empty.

        The arguments are those of `PairSampler`.
        """
        if share is None or is_extra is None:
            return None
        targets = np.flatnonzero(~is_extra).astype(np.uint32)
        others = np.flatnonzero(is_extra).astype(np.uint32)
        if not (len(targets) and len(others)):
            return None
        return cls(max(1, round(share * _SHARE_PARTS)), is_extra, targets, others)

    def turns(self, seed: int, number: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns image m of some rows and the turn of its group in which it is m, (B,) each."""
        num_targets = number * self.parts // _SHARE_PARTS  # in the rows before
        is_target = (number + 1) * self.parts // _SHARE_PARTS > num_targets

        m = np.empty_like(number)
        turn = np.empty_like(number)
        groups = (
            (is_target, num_targets, self.targets, OrderPurpose.IMAGES),
            (~is_target, number - num_targets, self.others, OrderPurpose.OTHER_DOMAINS),
        )
        for is_row, numbers, images, purpose in groups:
            turn[is_row], position = np.divmod(numbers[is_row], len(images))
            m[is_row] = images[permuted(purpose, seed, turn[is_row], len(images), position)]
        return m, turn

    def draw(
        self, choice: NDArray[np.float64], num_targets: NDArray[np.int64], num_extra: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Draws whether each image is extra; returns this and new numbers in [0, 1), (B,) each.

        Args:
            choice: Numbers in [0, 1).
            num_targets, num_extra: Number of candidates in both groups. A group without candidates is not drawn.
        """
        share = self.parts / _SHARE_PARTS
        is_extra = choice >= share
        new_choice = np.where(is_extra, (choice - share) / max(1 - share, 1 / _SHARE_PARTS), choice / share)
        is_extra = np.where(num_targets == 0, True, is_extra & (num_extra > 0))
        return is_extra, np.minimum(new_choice, _BELOW_ONE)

    def draw_without(
        self,
        excluded: NDArray[np.int64],
        choice: NDArray[np.float64],
        num_targets: NDArray[np.int64],
        num_extra: NDArray[np.int64],
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Works like `draw`, but does not draw a group whose only candidate is excluded.

        Args:
            excluded: One of the candidates of each draw, (B,). If there is no other, its group is drawn.
            choice, num_targets, num_extra: See `draw`.
        """
        excluded_is_extra = self.is_extra[excluded]
        num_targets = np.where(excluded_is_extra, num_targets, num_targets - 1)
        num_extra = np.where(excluded_is_extra, num_extra - 1, num_extra)
        is_extra, choice = self.draw(choice, num_targets, num_extra)
        is_alone = (num_targets == 0) & (num_extra == 0)
        return np.where(is_alone, excluded_is_extra, is_extra), choice

    def same_group(self, first: NDArray[np.int64], second: Positions) -> NDArray[np.bool_]:
        """Returns whether images are in the same group, (B,)."""
        same: NDArray[np.bool_] = self.is_extra[first] == self.is_extra[second]
        return same


def _tagged_positions(tags: Tags) -> Positions:
    """Returns the positions of the tagged images."""
    return np.flatnonzero(tags.start[1:] > tags.start[:-1]).astype(np.uint32)


def _by_group(positions: NDArray[Any], is_second_group: NDArray[np.bool_]) -> NDArray[Any]:
    """Sorts positions of images by group: the first group before the second."""
    is_second = is_second_group[positions]
    return np.concatenate([positions[~is_second], positions[is_second]])


def epoch_rows(seed: int, count: int, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns rows first .. last - 1 of the endless stream of epochs over `count` images, each epoch in its own order.

    Returns:
        The image, in 0..count-1, and the epoch of each row, (N,) each.
    """
    epoch, position = np.divmod(np.arange(first, last), count)
    return permuted(OrderPurpose.IMAGES, seed, epoch, count, position), epoch

"""Image pairs with at least one common class (section 3.2), drawn from (seed, epoch, image) alone.

Every tagged image is m once per epoch. One of its classes is drawn, then a partner n that has it. Images without a tag
are in no pair. Epochs follow each other without a gap: row i of the endless stream of pairs is position i mod E of
epoch i div E, and batch t holds the rows t B .. (t + 1) B - 1, so no epoch ends in a partial batch and nothing is left
out. A row is computed from its number; nothing is walked through or laid out, whatever the number of images.

Beside the images of the data set itself (domain `target`; web images are among them) there may be single-label images
(domain `source`; end of section 3.2). Pairs are then of three kinds, in a mix that every epoch keeps as far as classes
have images of both domains.

Beyond one machine. The sampler keeps two lists: the classes of each image (`Tags`) and the images of each class
(`Members`). Divide the images into S ranges, one per machine, and let each machine sort its own. Positions ascend
within a class, so the whole list of a class (and domain) is the concatenation of the machines' lists. A table of their
lengths, (K, 2, S), of which every machine has a copy, tells which machine holds the c-th member; the i-th image with a
tag is located likewise. The numbers drawn depend on the row alone, so any worker draws m and the random numbers of its
rows, asks the machine of m for m's classes, chooses the class and c, and asks the machine of that member for n; where n
is m, it asks the machine of the class's last member. That makes three rounds of requests of a few bytes per pair, for a
whole batch at once, and the pairs are those that one machine draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import Draw, Order, permuted, uniforms
from mcis.datasets.tags import Members, Numbers, Tags, number_type

TARGET_TARGET, SOURCE_SOURCE, TARGET_SOURCE = 0, 1, 2
"""Kinds of a pair: the domains of m and n. Each has its own W_P (end of section 3.2)."""
KINDS = ("target-target", "source-source", "target-source")
"""Their names."""
_KIND_BY_SOURCES = np.array([TARGET_TARGET, TARGET_SOURCE, SOURCE_SOURCE], np.uint8)
"""The kind by how many of the pair's images are of the domain source: 0, 1, 2."""
_ROWS_PER_COUNT = 2**16


class PairRows(NamedTuple):
    """Pairs as positions in the index: m and n, (N,), the epoch each belongs to, (N,), and its kind, (N,).

    In a pair of kind TARGET_SOURCE m is of the domain target and n of the domain source.
    """

    m: NDArray[np.int64]
    n: NDArray[np.int64]
    epoch: NDArray[np.int64]
    kind: NDArray[np.uint8]


class KindCounts(NamedTuple):
    """Pairs of each kind in an epoch, (3,): as the mix wants them, and as classes that lack a domain allow."""

    wanted: NDArray[np.int64]
    drawn: NDArray[np.int64]


class EpochRows(NamedTuple):
    """Rows of a stream of epochs over images: which image, in 0..count-1, and which epoch, (N,)."""

    image: NDArray[np.int64]
    epoch: NDArray[np.int64]


class _Images(NamedTuple):
    """Images of B rows: their positions in the index, and whether they are of the domain source, (B,)."""

    position: NDArray[np.int64]
    source: NDArray[np.bool_]


class _Turns(NamedTuple):
    """Which image has its turn as m in each of B rows.

    Attributes:
        turn: number of the turn, counted from 0 through all epochs, (B,).
        tagged: the image as a position among the tagged images, (B,).
        wanted: whether n is to be of the domain source, (B,); None if it may be of either.
    """

    turn: NDArray[np.int64]
    tagged: NDArray[np.int64]
    wanted: NDArray[np.bool_] | None


class _Half(NamedTuple):
    """B pairs that lack n: m, the class that m and n are to share, and the number in [0, 1) that chooses n, (B,)."""

    m: _Images
    classes: NDArray[np.int64]
    choice: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Tagged:
    """The images with a tag: those of the domain target, then those of the domain source, each ascending."""

    positions: Numbers | None
    """Positions in the index; None if these are simply all images."""
    bounds: NDArray[np.int64]
    """(3,) where the two domains begin and end."""

    @classmethod
    def of(cls, tags: Tags, source: NDArray[np.bool_] | None) -> "_Tagged":
        """Of the N images of `tags`, of which `source`, (N,), are of the domain source."""
        tagged = tags.start[1:] > tags.start[:-1]
        if source is None or not (source & tagged).any():
            positions = None if tags.tagged == len(tags) else _positions(tagged)
            targets = tags.tagged
        else:
            of_target = _positions(tagged & ~source)
            positions, targets = np.concatenate([of_target, _positions(tagged & source)]), len(of_target)
        return cls(positions, np.array([0, targets, tags.tagged]))

    def images(self, tagged: NDArray[np.int64]) -> _Images:
        """The images at some positions among these, (B,)."""
        positions = tagged.copy() if self.positions is None else self.positions[tagged].astype(np.int64)
        return _Images(positions, tagged >= self.bounds[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the positions."""
        return 0 if self.positions is None else self.positions.nbytes


class PairSampler:
    """Draws pairs from the tags of N images.

    Without `pair_mix`, images take turns as m whatever their domain, and the partner is any other image of the class.
    Where m is of the domain source and n of the domain target, they are exchanged, so that the pair is TARGET_SOURCE.

    With `pair_mix`, the slots of an epoch are assigned to the kinds in these proportions, rounded, and its rows take
    the slots in a random order. m is of the domain target, or of the domain source in a SOURCE_SOURCE pair; the images
    of either domain take turns as m, each once before any comes again, from one epoch into the next. The partner is of
    the domain that the kind names second. Where the class has no other image there, the partner is one of the class's
    images in the other domain (again with the target's as m), and the pair carries the kind that results;
    `kind_counts` counts these.

    Unless `partner_may_be_itself`, an image is its own partner only where its class has no other image at all.

    Args:
        tags: of the N images.
        seed: of all draws.
        partner_may_be_itself: whether an image may be its own partner wherever its own domain is drawn from
            (RELEASED_RECIPE, "Classifier").
        source: (N,), which images are of the domain source; None if there are none.
        pair_mix: weights of TARGET_TARGET, SOURCE_SOURCE and TARGET_SOURCE pairs; None if the kinds are to follow from
            the turns of the images.
        epoch_pairs: E, pairs per epoch; None for as many as there are images with a tag.
        class_balance: fraction of the pairs, in [0, 1], in which no image takes its turn: a class is drawn, all with
            the same chance, then m out of its images, and the class is the one that the pair shares. 1 is
            class-balanced sampling.
        random_pair_rate: fraction of the pairs, in [0, 1], whose n is any other tagged image, of the domain that the
            kind names; the two may share several classes or none.

    Raises:
        ValueError: no image has a tag, or an argument is out of its range, or a kind of the mix has no images, or an
            epoch has too few pairs for each kind.
    """

    def __init__(
        self,
        tags: Tags,
        *,
        seed: int,
        partner_may_be_itself: bool = False,
        source: NDArray[np.bool_] | None = None,
        pair_mix: Sequence[float] | None = None,
        epoch_pairs: int | None = None,
        class_balance: float = 0.0,
        random_pair_rate: float = 0.0,
    ):
        if not tags.tagged:
            raise ValueError("no image has a tag, so there is no pair")
        if source is not None and source.shape != (len(tags),):
            raise ValueError(f"source has shape {source.shape}, expected one value for each of {len(tags)} images")
        if epoch_pairs is not None and epoch_pairs < 1:
            raise ValueError(f"an epoch of {epoch_pairs} pairs, expected at least 1")
        for name, fraction in (("class_balance", class_balance), ("random_pair_rate", random_pair_rate)):
            if not 0 <= fraction <= 1:
                raise ValueError(f"{name} {fraction} is outside of [0, 1]")
        self.tags, self.seed, self.partner_may_be_itself = tags, seed, partner_may_be_itself
        self.class_balance, self.random_pair_rate = class_balance, random_pair_rate
        self.members = Members.of(tags, source)
        self._tagged = _Tagged.of(tags, source)
        self._pairs = epoch_pairs or tags.tagged
        self._kind_bounds = None if pair_mix is None else self._bounds_of_kinds(pair_mix)

    def _bounds_of_kinds(self, pair_mix: Sequence[float]) -> NDArray[np.int64]:
        """Where in an epoch's slots each kind begins and ends, (4,)."""
        weights = np.asarray(pair_mix, float)
        if weights.shape != (3,) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise ValueError(
                f"pair_mix {pair_mix}, expected weights of the three kinds of pairs, not negative and not all 0"
            )
        targets, sources = np.diff(self._tagged.bounds)
        if (weights[[TARGET_TARGET, TARGET_SOURCE]].any() and not targets) or (weights[1:].any() and not sources):
            raise ValueError(
                f"pair_mix {pair_mix}, but {targets} images of the target and {sources} of the source have a tag"
            )
        ends = np.floor(np.cumsum(weights) / weights.sum() * self._pairs + 0.5).astype(np.int64)
        if (np.diff(ends, prepend=0) == 0)[weights > 0].any():
            raise ValueError(f"pair_mix {pair_mix}, but an epoch of {self._pairs} pairs is too short for each kind")
        return np.concatenate([[0], ends])

    def __len__(self) -> int:
        """E, pairs per epoch."""
        return self._pairs

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self.tags.nbytes + self.members.nbytes + self._tagged.nbytes

    def partners(self, turn: NDArray[np.int64] | int, m: NDArray[np.int64]) -> NDArray[np.int64]:
        """n for each m, (B,) positions in the index, in m's turns `turn`, (B,) or one for all.

        They are those of `rows` without `pair_mix`, `class_balance` and `random_pair_rate`.
        """
        return self._partners(self._half(turn, _Images(m, np.zeros(len(m), bool))), None).position

    def rows(self, first: int, last: int) -> PairRows:
        """Rows first .. last - 1 of the endless stream of pairs."""
        number = np.arange(first, last)
        epoch, position = np.divmod(number, self._pairs)
        turns = self._turns(number, epoch, position)
        half = self._half(turns.turn, self._tagged.images(turns.tagged))
        if self.class_balance:
            self._balance(half, epoch, position, turns.wanted)
        n = self._partners(half, turns.wanted)
        if self.random_pair_rate:
            self._replace_at_random(n, half.m, epoch, position, turns.wanted)
        m = half.m
        exchanged = m.source & ~n.source
        return PairRows(
            m=np.where(exchanged, n.position, m.position),
            n=np.where(exchanged, m.position, n.position),
            epoch=epoch,
            kind=_KIND_BY_SOURCES[m.source.astype(np.intp) + n.source],
        )

    def kind_counts(self, epoch: int) -> KindCounts:
        """Counts the kinds of an epoch by drawing all of it: about a second for a million pairs."""
        first, last = epoch * self._pairs, (epoch + 1) * self._pairs
        drawn = np.zeros(3, np.int64)
        for start in range(first, last, _ROWS_PER_COUNT):
            drawn += np.bincount(self.rows(start, min(start + _ROWS_PER_COUNT, last)).kind, minlength=3)
        return KindCounts(drawn if self._kind_bounds is None else np.diff(self._kind_bounds), drawn)

    def _turns(self, number: NDArray[np.int64], epoch: NDArray[np.int64], position: NDArray[np.int64]) -> _Turns:
        """Which image is m in each row, (B,), and the domain of its partner."""
        if self._kind_bounds is None:
            turn, within = np.divmod(number, self.tags.tagged)
            return _Turns(turn, permuted(Order.IMAGES, self.seed, turn, self.tags.tagged, within), None)
        bounds = self._kind_bounds
        slot = permuted(Order.SLOTS, self.seed, epoch, self._pairs, position)
        kind = np.searchsorted(bounds[1:3], slot, side="right")
        turn, tagged = np.empty_like(slot), np.empty_like(slot)
        source_pairs = bounds[SOURCE_SOURCE + 1] - bounds[SOURCE_SOURCE]
        # Among the slots whose m is of a domain, `rank` counts those before a row's slot. The domain target has two
        # kinds, whose slots lie on both sides of the slots of SOURCE_SOURCE.
        target_rank = slot - source_pairs * (kind == TARGET_SOURCE)
        for domain, rows, rank, per_epoch, order in (
            (0, np.flatnonzero(kind != SOURCE_SOURCE), target_rank, self._pairs - source_pairs, Order.TARGETS),
            (1, np.flatnonzero(kind == SOURCE_SOURCE), slot - bounds[SOURCE_SOURCE], source_pairs, Order.SOURCES),
        ):
            first, last = self._tagged.bounds[domain : domain + 2].tolist()
            if len(rows):
                turn[rows], within = np.divmod(epoch[rows] * per_epoch + rank[rows], last - first)
                tagged[rows] = first + permuted(order, self.seed, turn[rows], last - first, within)
        return _Turns(turn, tagged, kind != TARGET_TARGET)

    def _half(self, turn: NDArray[np.int64] | int, m: _Images) -> _Half:
        """One of the classes of each m, and the number that chooses n."""
        draws = uniforms(Draw.PARTNER, self.seed, turn, m.position, count=2)
        start = self.tags.start[m.position].astype(np.int64)
        count = self.tags.start[m.position + 1].astype(np.int64) - start
        classes = self.tags.values[start + (draws[:, 0] * count).astype(np.int64)].astype(np.int64)
        return _Half(m, classes, draws[:, 1])

    def _balance(
        self, half: _Half, epoch: NDArray[np.int64], position: NDArray[np.int64], wanted: NDArray[np.bool_] | None
    ) -> None:
        """Draws a class first, and then m out of its images, in a fraction of the pairs; changes `half` in place.

        Under a mix m keeps its domain, and the class is one of those with images in that domain.
        """
        draws = uniforms(Draw.CLASS_BALANCE, self.seed, epoch, position, count=4)
        balanced = np.flatnonzero(draws[:, 0] < self.class_balance)
        every_class = np.arange(self.tags.classes)
        for domain in (None,) if wanted is None else (False, True):
            rows = balanced if domain is None else balanced[half.m.source[balanced] == domain]
            low, high = self.members.ranges(every_class, domain)
            filled = np.flatnonzero(high > low)
            half.classes[rows] = k = filled[(draws[rows, 1] * len(filled)).astype(np.int64)]
            member = low[k] + (draws[rows, 2] * (high - low)[k]).astype(np.int64)
            half.m.position[rows] = self.members.images[member]
            half.m.source[rows] = member >= self.members.split[k]
        half.choice[balanced] = draws[balanced, 3]

    def _replace_at_random(
        self,
        n: _Images,
        m: _Images,
        epoch: NDArray[np.int64],
        position: NDArray[np.int64],
        wanted: NDArray[np.bool_] | None,
    ) -> None:
        """Draws n out of all tagged images, in a fraction of the pairs; changes `n` in place.

        As for partners, the last candidate is left out of the draw and stands in for m.
        """
        draws = uniforms(Draw.RANDOM_PAIR, self.seed, epoch, position, count=2)
        rows = np.flatnonzero(draws[:, 0] < self.random_pair_rate)
        bounds = self._tagged.bounds
        low: NDArray[np.int64] | int = 0
        high: NDArray[np.int64] | int = bounds[2]
        m_is_candidate: NDArray[np.bool_] | bool = True
        if wanted is not None:
            domain = wanted[rows].astype(np.intp)
            low, high = bounds[domain], bounds[domain + 1]
            m_is_candidate = m.source[rows] == wanted[rows]
        size = high - low - m_is_candidate  # 0 where m is the only candidate, and then its own partner
        tagged = low + (draws[rows, 1] * size).astype(np.int64)
        tagged = np.where(self._tagged.images(tagged).position == m.position[rows], high - 1, tagged)
        n.position[rows], n.source[rows] = self._tagged.images(tagged)

    def _partners(self, half: _Half, wanted: NDArray[np.bool_] | None) -> _Images:
        """n for each m out of the images of the class: of the domain `wanted`, (B,), or of either if that is None."""
        m, classes = half.m, half.classes
        low, high = self.members.ranges(classes, wanted)
        steps_over_m: NDArray[np.bool_] | bool = not self.partner_may_be_itself
        if wanted is not None:
            lacking = high - low == ((m.source == wanted) & steps_over_m)
            wanted = wanted ^ lacking
            low, high = self.members.ranges(classes, wanted)
            steps_over_m = (m.source == wanted) & steps_over_m
        size = high - low - steps_over_m
        # Where there is no candidate but m, the class holds m alone, as its first member.
        member = np.where(size > 0, low + (half.choice * size).astype(np.int64), self.members.start[classes])
        n = self.members.images[member].astype(np.int64)
        if not self.partner_may_be_itself:
            # The last candidate was left out of the draw; it stands in for m, so all but m have the same chance.
            met = np.flatnonzero((n == m.position) & (size > 0))
            member[met] = high[met] - 1
            n[met] = self.members.images[member[met]]
        return _Images(n, member >= self.members.split[classes])


def _positions(mask: NDArray[np.bool_]) -> Numbers:
    return np.arange(len(mask), dtype=number_type(len(mask)))[mask]


def epoch_rows(seed: int, count: int, first: int, last: int) -> EpochRows:
    """Rows first .. last - 1 of the endless stream of epochs over `count` images, each epoch in an order of its own."""
    epoch, position = np.divmod(np.arange(first, last), count)
    return EpochRows(permuted(Order.IMAGES, seed, epoch, count, position), epoch)

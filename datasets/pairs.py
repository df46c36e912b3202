"""Image pairs with at least one common class (section 3.2), and related images, drawn from (seed, epoch, image) alone.

Every tagged image is m once an epoch. One of its classes is drawn, then a partner n that has it. Images without a tag
are in no pair. Epochs follow each other without a gap: row i of the endless stream of pairs is position i mod E of
epoch i div E, and batch t holds the rows t B .. (t + 1) B - 1, so no epoch ends in a partial batch and nothing is left
out. A row is computed from its number; nothing is walked through or laid out, whatever the number of images.

Beside the images of the dataset's own kind (domain `target`; web images are among them) there may be single-label
images (domain `source`; end of section 3.2). Pairs are then of three kinds, in a mix that every epoch keeps as far as
classes have images of both domains.

Past one machine. What is kept is two lists: of each image its classes (`Tags`), of each class its images (`Members`).
Cut the images into S ranges, one a machine, and each sorts its own; an index ascends within a class, so the whole list
of a class (and domain) is the machines' lists in turn, and a table of their lengths, (K, 2, S), which all hold, tells
where its c-th member lies; likewise for the i-th image with a tag. The numbers drawn depend on the row alone, so any
worker draws m and the random numbers of its rows, asks the machine of m for m's classes, chooses class and c, asks the
machine of that member for n, and, where n is m, the machine of the class's last member. Those are three rounds of
requests of a few bytes a pair, for a whole batch at once, and the pairs are those that one machine draws.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.draws import Draw, Order, permuted, uniforms
from mcis.datasets.tags import Members, Numbers, Tags, number_type

TARGET_TARGET, SOURCE_SOURCE, TARGET_SOURCE = 0, 1, 2
"""Kinds of a pair: the domains of m and n. Each has its own W_P (end of section 3.2)."""
KINDS = ("target-target", "source-source", "target-source")
"""Their names."""

_KIND_BY_SOURCES = np.array([TARGET_TARGET, TARGET_SOURCE, SOURCE_SOURCE], np.uint8)  # images of the source: 0, 1, 2
_ROWS_A_COUNT = 2**16


class PairRows(NamedTuple):
    """Pairs as positions in the index: m and n, (N,), the epoch each belongs to, (N,), and its kind, (N,).

    In a pair of kind TARGET_SOURCE m is of the target and n of the source.
    """

    m: NDArray[np.int64]
    n: NDArray[np.int64]
    epoch: NDArray[np.int64]
    kind: NDArray[np.uint8]


class KindCounts(NamedTuple):
    """Pairs of each kind in an epoch, (3,): as the mix wants them, and as classes that lack a domain allow."""

    wanted: NDArray[np.int64]
    drawn: NDArray[np.int64]


class PairSampler:
    """Draws pairs from the tags of N images.

    Without `mix`, images take their turns as m whatever their domain, and the partner is any other image of the class;
    a pair whose m is of the source and n of the target is turned round, so that it is TARGET_SOURCE.

    With `mix`, an epoch's slots are dealt to the kinds in its proportions, rounded, and its rows come to the slots in
    a random order. m is of the target, or of the source in a SOURCE_SOURCE pair; the images of either domain take
    turns as m, each once before any comes again, from one epoch into the next. The partner is of the domain that
    the kind names second. Where the class has no other image there, it is one of the class's in the other domain (again
    with the target's as m), and the pair carries the kind that it then is; `kind_counts` counts these.

    Unless `itself`, an image is its own partner only where its class has no other image at all.

    Args:
        tags: of the N images.
        seed: of all draws.
        itself: whether an image may be its own partner wherever its own domain is drawn from (released recipe).
        source: (N,), image is of the domain source; None = none is.
        mix: weights of TARGET_TARGET, SOURCE_SOURCE and TARGET_SOURCE pairs; None = as it comes.
        epoch_pairs: E, pairs an epoch; None = as many as images with a tag.
        balance: share of the pairs, in [0, 1], in which not an image takes its turn but a class is drawn, all classes
            with the same chance, and m out of its images; the class is then the pair's. 1 = class-balanced sampling.
        strangers: share of the pairs, in [0, 1], whose n is any other tagged image, of the domain that the kind names;
            what such a pair shares is whatever the two have in common, often nothing.

    Raises:
        ValueError: no image has a tag, or an option is out of its range, or a kind of the mix has no images or no room.
    """

    def __init__(
        self,
        tags: Tags,
        *,
        seed: int,
        itself: bool = False,
        source: NDArray[np.bool_] | None = None,
        mix: Sequence[float] | None = None,
        epoch_pairs: int | None = None,
        balance: float = 0.0,
        strangers: float = 0.0,
    ):
        if not tags.tagged:
            raise ValueError("no image has a tag, so there is no pair")
        if source is not None and source.shape != (len(tags),):
            raise ValueError(f"source has shape {source.shape}, expected one value for each of {len(tags)} images")
        if epoch_pairs is not None and epoch_pairs < 1:
            raise ValueError(f"an epoch of {epoch_pairs} pairs, expected at least 1")
        for name, share in (("balance", balance), ("strangers", strangers)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} {share} is outside of [0, 1]")
        self.tags, self.seed, self.itself, self.balance, self.strangers = tags, seed, itself, balance, strangers
        self.members = Members.of(tags, source)
        self._images, targets = _tagged_images(tags, source)
        self._domains = np.array([0, targets, tags.tagged])  # where in _images each begins and ends
        self._pairs = epoch_pairs or tags.tagged
        self._cuts = None if mix is None else self._shares(mix)

    def _shares(self, mix: Sequence[float]) -> NDArray[np.int64]:
        """Where in an epoch's slots each kind begins and ends, (4,)."""
        weights = np.asarray(mix, float)
        if weights.shape != (3,) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise ValueError(f"mix {mix}, expected weights of the three kinds of pairs, not negative and not all 0")
        targets, sources = np.diff(self._domains)
        if (weights[[TARGET_TARGET, TARGET_SOURCE]].any() and not targets) or (weights[1:].any() and not sources):
            raise ValueError(f"mix {mix}, but {targets} images of the target and {sources} of the source have a tag")
        ends = np.floor(np.cumsum(weights) / weights.sum() * self._pairs + 0.5).astype(np.int64)
        if (np.diff(ends, prepend=0) == 0)[weights > 0].any():
            raise ValueError(f"mix {mix}, but an epoch of {self._pairs} pairs has no room for each kind")
        return np.concatenate([[0], ends])

    def __len__(self) -> int:
        """E, pairs an epoch."""
        return self._pairs

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self.tags.nbytes + self.members.nbytes + (0 if self._images is None else self._images.nbytes)

    def partners(self, epoch: NDArray[np.int64] | int, m: NDArray[np.int64]) -> NDArray[np.int64]:
        """n for each m, (N,) positions in the index, as `rows` draws it without mix, balance and strangers."""
        draws = uniforms(Draw.PARTNER, self.seed, epoch, m, count=2)
        nowhere = np.zeros(len(m), bool)
        return self._partners(m, nowhere, self._classes(m, draws[:, 0]), draws[:, 1], None)[0]

    def rows(self, first: int, last: int) -> PairRows:
        """Rows first .. last - 1 of the endless stream of pairs."""
        number = np.arange(first, last)
        epoch, position = np.divmod(number, self._pairs)
        wanted = None
        if self._cuts is None:
            turn, place = np.divmod(number, self.tags.tagged)
            at = permuted(Order.IMAGES, self.seed, turn, self.tags.tagged, place)
        else:
            kind, turn, at = self._dealt(epoch, position, self._cuts)
            wanted = kind != TARGET_TARGET
        m = at if self._images is None else self._images[at].astype(np.int64)
        of_source = at >= self._domains[1]
        draws = uniforms(Draw.PARTNER, self.seed, turn, m, count=2)
        classes, choice = self._classes(m, draws[:, 0]), draws[:, 1]
        if self.balance:
            draws = uniforms(Draw.CLASS_BALANCE, self.seed, epoch, position, count=4)
            here = np.flatnonzero(draws[:, 0] < self.balance)
            drawn = self._balanced(draws[here, 1], draws[here, 2], None if wanted is None else of_source[here])
            m[here], classes[here], of_source[here] = drawn
            choice[here] = draws[here, 3]
        n, n_of_source = self._partners(m, of_source, classes, choice, wanted)
        if self.strangers:
            draws = uniforms(Draw.RANDOM_PAIR, self.seed, epoch, position, count=2)
            here = np.flatnonzero(draws[:, 0] < self.strangers)
            domains = None if wanted is None else wanted[here]
            n[here], n_of_source[here] = self._strangers(m[here], of_source[here], draws[here, 1], domains)
        turned = of_source & ~n_of_source
        kinds = _KIND_BY_SOURCES[of_source.astype(np.intp) + n_of_source]
        return PairRows(np.where(turned, n, m), np.where(turned, m, n), epoch, kinds)

    def kind_counts(self, epoch: int) -> KindCounts:
        """Counts the kinds of an epoch by drawing all of it: about a second for a million pairs."""
        first, last = epoch * self._pairs, (epoch + 1) * self._pairs
        drawn = np.zeros(3, np.int64)
        for start in range(first, last, _ROWS_A_COUNT):
            drawn += np.bincount(self.rows(start, min(start + _ROWS_A_COUNT, last)).kind, minlength=3)
        return KindCounts(drawn if self._cuts is None else np.diff(self._cuts), drawn)

    def _dealt(
        self, epoch: NDArray[np.int64], position: NDArray[np.int64], cuts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The kind of each row, the how-manieth turn of m's domain it belongs to, and m's place in _images, (B,)."""
        slot = permuted(Order.SLOTS, self.seed, epoch, self._pairs, position)
        kind = np.searchsorted(cuts[1:3], slot, side="right")
        turn, at = np.empty_like(slot), np.empty_like(slot)
        sources = cuts[SOURCE_SOURCE + 1] - cuts[SOURCE_SOURCE]
        # Slots of the two kinds whose m is of the target, one behind the other, and those of the third.
        places = (
            (kind != SOURCE_SOURCE, slot - sources * (kind == TARGET_SOURCE), self._pairs - sources, Order.TARGETS),
            (kind == SOURCE_SOURCE, slot - cuts[SOURCE_SOURCE], sources, Order.SOURCES),
        )
        for domain, (mine, rank, share, order) in enumerate(places):
            here = np.flatnonzero(mine)
            first, last = self._domains[domain : domain + 2].tolist()
            if len(here):
                turn[here], place = np.divmod(epoch[here] * share + rank[here], last - first)
                at[here] = first + permuted(order, self.seed, turn[here], last - first, place)
        return kind, turn, at

    def _classes(self, m: NDArray[np.int64], draw: NDArray[np.float64]) -> NDArray[np.int64]:
        """One of the classes of each image, (B,)."""
        start = self.tags.start[m].astype(np.int64)
        count = self.tags.start[m + 1].astype(np.int64) - start
        return self.tags.values[start + (draw * count).astype(np.int64)].astype(np.int64)

    def _balanced(
        self, of_class: NDArray[np.float64], of_image: NDArray[np.float64], of_source: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """m, its class and whether it is of the source, (B,): a class of those with images in the domain, then m."""
        every = np.arange(self.tags.classes)
        classes, place = np.empty(len(of_class), np.int64), np.empty(len(of_class), np.int64)
        for domain in (None,) if of_source is None else (False, True):
            here = np.arange(len(classes)) if domain is None else np.flatnonzero(of_source == domain)
            low, high = self.members.part(every, domain)
            filled = np.flatnonzero(high > low)
            classes[here] = k = filled[(of_class[here] * len(filled)).astype(np.int64)]
            place[here] = low[k] + (of_image[here] * (high - low)[k]).astype(np.int64)
        return self.members.images[place].astype(np.int64), classes, place >= self.members.split[classes]

    def _strangers(
        self,
        m: NDArray[np.int64],
        of_source: NDArray[np.bool_],
        draw: NDArray[np.float64],
        wanted: NDArray[np.bool_] | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """n for each m out of all tagged images, and whether it is of the source, (B,); arguments as of `_partners`."""
        low, high = (
            (np.zeros(len(m), np.int64), np.full(len(m), self._domains[2]))
            if wanted is None
            else (self._domains[wanted.astype(np.intp)], self._domains[wanted.astype(np.intp) + 1])
        )
        own = True if wanted is None else of_source == wanted
        size = high - low - own  # the last one stands in for m; without anyone else m is its own partner
        at = low + (draw * size).astype(np.int64)

        def image(at: NDArray[np.int64]) -> NDArray[np.int64]:
            return at if self._images is None else self._images[at].astype(np.int64)

        at = np.where(image(at) == m, high - 1, at)
        return image(at), at >= self._domains[1]

    def _partners(
        self,
        m: NDArray[np.int64],
        of_source: NDArray[np.bool_],
        classes: NDArray[np.int64],
        draw: NDArray[np.float64],
        wanted: NDArray[np.bool_] | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """n for each m, and whether it is of the source, (B,).

        Args:
            of_source: m is of the source.
            wanted: n shall be of the source; None = of either domain.
        """
        low, high = self.members.part(classes, wanted)
        own: NDArray[np.bool_] | bool = not self.itself  # m is among the candidates and has to be stepped over
        if wanted is not None:
            lacking = high - low == ((of_source == wanted) & own)
            wanted = wanted ^ lacking
            low, high = self.members.part(classes, wanted)
            own = (of_source == wanted) & own
        size = high - low - own
        # Without anyone else the class holds m alone, in its first place.
        place = np.where(size > 0, low + (draw * size).astype(np.int64), self.members.start[classes])
        n = self.members.images[place].astype(np.int64)
        if not self.itself:
            # The last candidate was left out of the draw; it stands in for m, so that all others have the same chance.
            met = np.flatnonzero((n == m) & (size > 0))
            place[met] = high[met] - 1
            n[met] = self.members.images[place[met]]
        return n, place >= self.members.split[classes]


def _tagged_images(tags: Tags, source: NDArray[np.bool_] | None) -> tuple[Numbers | None, int]:
    """Images with a tag, the target's then the source's (None: simply all), and how many are the target's."""
    tagged = tags.start[1:] > tags.start[:-1]
    if source is None or not (source & tagged).any():
        positions = None if tags.tagged == len(tags) else _positions(tagged)
        return positions, tags.tagged
    targets = _positions(tagged & ~source)
    return np.concatenate([targets, _positions(tagged & source)]), len(targets)


def _positions(mask: NDArray[np.bool_]) -> Numbers:
    return np.arange(len(mask), dtype=number_type(len(mask)))[mask]


def epoch_rows(seed: int, count: int, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows first .. last - 1 of the endless stream of epochs over `count` images: place in 0..count-1, epoch, (N,)."""
    epoch, position = np.divmod(np.arange(first, last), count)
    return permuted(Order.IMAGES, seed, epoch, count, position), epoch


def related_images(
    members: Members,
    images: NDArray[np.int64],
    classes: NDArray[np.int64],
    count: int,
    *,
    seed: int,
    may_repeat: bool = False,
    domain: Literal["target", "source", "both"] = "both",
    source: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """The related images of B images, of each for one of its classes (section 3.2), (B, count) positions in the index.

    Drawn from (seed, image, class); the first r of a row are the related images for R = r. Not the image itself and
    without repetition while the class has enough; then the row repeats; an only member is related to itself. The cost
    does not depend on the sizes of the classes.

    Args:
        members: of all training images.
        images, classes: (B,); each image has the class.
        may_repeat: with repetition, and the image itself may be drawn (released recipe).
        domain: of the related images; where the class has no other image there, they are of both.
        source: (B,), image is of the domain source; None = none is.
    """
    low, high = members.part(classes)
    own = np.ones(len(images), bool)  # the image is among the candidates and has to be stepped over
    if domain != "both":
        inside = (np.zeros(len(images), bool) if source is None else source) == (domain == "source")
        first, last = members.part(classes, domain == "source")
        enough = last - first > (inside & (not may_repeat))
        low, high, own = np.where(enough, first, low), np.where(enough, last, high), inside | ~enough
    draws = uniforms(Draw.RELATED, seed, classes, images, count=count)
    if may_repeat:
        return members.images[low[:, None] + (draws * (high - low)[:, None]).astype(np.int64)].astype(np.int64)
    size = high - low - own
    choice = np.empty((len(images), count), np.int64)
    for r in range(count):
        # The r-th of those that are left, counted over all by stepping over those taken, the smallest first.
        choice[:, r] = (draws[:, r] * (size - r)).astype(np.int64)
        for taken in np.sort(choice[:, :r], axis=1).T:
            choice[:, r] += choice[:, r] >= taken
        again = np.flatnonzero(r >= np.maximum(size, 1))
        choice[again, r] = choice[again, r % np.maximum(size, 1)[again]]
    drawn = members.images[low[:, None] + choice]
    # As for partners, the last member, which was left out, stands in for the image itself.
    return np.where(drawn == images[:, None], members.images[high - 1][:, None], drawn).astype(np.int64)

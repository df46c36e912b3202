"""Tests of pairs against a slow sampler with lists, and of their exact probabilities."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import DrawPurpose, OrderPurpose, permuted, uniforms
from mcis.datasets.sampling.pairs import SOURCE_SOURCE, TARGET_SOURCE, TARGET_TARGET, PairRows, PairSampler, epoch_rows
from mcis.datasets.tags import Tags

Matrix = NDArray[np.bool_]

TAGS = np.zeros((6, 4), bool)
for tag, members in enumerate(([0, 1, 2, 3], [1, 3, 5], [4], [2, 4, 5])):
    TAGS[members, tag] = True


class Case(NamedTuple):
    """Tags (N, K) of up to 12 images and 4 classes, with at least one tag, and options of the sampler.

    Negatives are of the target domain.
    """

    tags: Matrix
    options: dict[str, Any]

    def sampler(self) -> PairSampler:
        return PairSampler(Tags.from_matrix(self.tags), **self.options)


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    shape = (draw(st.integers(1, 12)), draw(st.integers(1, 4)))
    tags = draw(arrays(bool, shape))
    tags[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1))] = True
    return tags


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tags = draw(matrices())
    options: dict[str, Any] = {"seed": draw(st.integers(0, 9)), "partner_may_be_itself": draw(st.booleans())}
    if draw(st.booleans()):
        options["is_source"] = draw(arrays(bool, len(tags))) & tags.any(axis=1)
    options["wrong_class"] = draw(st.sampled_from([False, False, True]))
    options["epoch_pairs"] = draw(st.sampled_from([None, None, 1, 5, 30]))
    options["class_balanced_fraction"] = draw(st.sampled_from([0.0, 0.0, 0.4, 1.0]))
    return Case(tags, options)


def pick(choice: list[int], draw: float) -> int:
    return choice[int(draw * len(choice))]


def replace_itself(members: list[int], m: int) -> list[int]:
    """Returns the other members, with the last one in the place of m."""
    if m not in members:
        return members
    return [members[-1] if i == m else i for i in members[:-1]]


def slow_row(case: Case, row: int) -> tuple[int, int, int, int]:
    """Returns (m, n, epoch, pair_domains) of a row, computed with lists."""
    tags = case.tags
    seed = case.options["seed"]
    itself = case.options["partner_may_be_itself"]
    is_source = case.options.get("is_source", np.zeros(len(tags), bool)).tolist()
    targets_first = sorted(range(len(tags)), key=lambda i: is_source[i])
    tagged = [i for i in range(len(tags)) if tags[i].any()]
    epoch, position = divmod(row, case.options["epoch_pairs"] or len(tags))
    turn, within = divmod(row, len(tags))
    m = targets_first[int(permuted(OrderPurpose.IMAGES, seed, turn, len(tags), np.array([within]))[0])]
    class_draw, partner_draw = uniforms(DrawPurpose.PARTNER, seed, turn, np.array([m]), count=2)[0]
    if not tags[m].any():
        n = pick(tagged, partner_draw)
        return m, n, epoch, TARGET_SOURCE if is_source[n] else TARGET_TARGET
    tag = pick([k for k in range(tags.shape[1]) if tags[m, k]], class_draw)

    def members(tag: int) -> list[int]:
        return [i for i in targets_first if tags[i, tag]]

    draws = uniforms(DrawPurpose.CLASS_BALANCE, seed, epoch, np.array([position]), count=4)
    balanced, class_draw, image_draw, other_partner_draw = draws[0]
    if balanced < case.options["class_balanced_fraction"]:
        tag = pick([k for k in range(tags.shape[1]) if members(k)], class_draw)
        m = pick(members(tag), image_draw)
        partner_draw = other_partner_draw
    choice = members(tag) if itself else replace_itself(members(tag), m)
    n = pick(choice, partner_draw) if choice else m
    if case.options["wrong_class"]:
        n = pick([i for i in range(len(tags)) if not tags[i, tag]] or list(range(len(tags))), partner_draw)
    if is_source[m] and not is_source[n]:
        return n, m, epoch, TARGET_SOURCE
    pair_domains = {(False, False): TARGET_TARGET, (True, True): SOURCE_SOURCE, (False, True): TARGET_SOURCE}
    return m, n, epoch, pair_domains[is_source[m], is_source[n]]


@settings(max_examples=150)
@given(cases())
def test_rows_match_a_slow_reference(case: Case) -> None:
    sampler = case.sampler()
    last = 40
    rows = sampler.rows(0, last)
    slow = [slow_row(case, row) for row in range(last)]

    columns = [column.tolist() for column in rows]
    assert list(zip(*columns, strict=True)) == slow
    assert [column.dtype for column in rows] == [np.int64, np.int64, np.int64, np.uint8]

    for m, n in zip(rows.m, rows.n, strict=True):
        assert case.tags[[m, n]].any()
        if case.options["wrong_class"] or not case.tags[m].any():
            continue
        common = case.tags[m] & case.tags[n]
        assert common.any()
        if m == n and not case.options["partner_may_be_itself"]:
            assert (case.tags[:, common].sum(axis=0) == 1).any(), "itself, though its class has another image"


@given(matrices(), st.integers(0, 9))
def test_each_image_is_m_once_per_epoch(tags: Matrix, seed: int) -> None:
    sampler = PairSampler(Tags.from_matrix(tags), seed=seed)
    size = len(tags)

    assert len(sampler) == size
    for epoch in range(4):
        rows = sampler.rows(epoch * size, (epoch + 1) * size)
        assert sorted(rows.m) == list(range(size))
        assert tags[rows.n].any(axis=1).all(), "the partner has a tag"
        assert (rows.epoch == epoch).all()
        assert (rows.pair_domains == TARGET_TARGET).all()


@given(cases(), st.lists(st.integers(0, 60), max_size=6))
def test_a_stream_can_be_computed_in_parts(case: Case, cuts: list[int]) -> None:
    """A part of a batch, or a start in the middle, gives the same rows."""
    edges = sorted({0, 60, *cuts})
    whole = case.sampler().rows(0, 60)
    parts = [case.sampler().rows(first, last) for first, last in pairwise(edges)]
    for name in PairRows._fields:
        np.testing.assert_array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(whole, name))

    assert [len(column) for column in case.sampler().rows(7, 7)] == [0, 0, 0, 0]


def test_rows_far_ahead_are_computed_directly() -> None:
    sampler = PairSampler(Tags.from_matrix(TAGS), seed=0)
    rows = sampler.rows(6 * 10**9, 6 * 10**9 + 6)
    assert (rows.epoch == 10**9).all()
    assert sorted(rows.m) == [0, 1, 2, 3, 4, 5]


def test_epochs_and_seeds_have_different_orders() -> None:
    one_class = Tags.from_matrix(np.ones((40, 1), bool))
    sampler = PairSampler(one_class, seed=0)
    rows = sampler.rows(0, 80)
    other_seed_rows = PairSampler(one_class, seed=1).rows(0, 40)

    assert rows.m[:40].tolist() != rows.m[40:].tolist()
    assert rows.m[:40].tolist() != other_seed_rows.m.tolist()
    assert rows.n[np.argsort(rows.m[:40])].tolist() != other_seed_rows.n[np.argsort(other_seed_rows.m)].tolist()


def chi_square(counts: NDArray[np.int64], chances: NDArray[np.float64]) -> float:
    """Returns the statistic of counts for probabilities with sum 1. Impossible values must not occur."""
    assert chances.sum() == pytest.approx(1)
    assert not counts[chances == 0].any()
    expected = counts.sum() * chances[chances > 0]
    return float(((counts[chances > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("itself", [False, True])
def test_probabilities_of_partners_are_exact(itself: bool) -> None:
    """P(n | m) is the mean over m's classes of 1 / (number of candidates in the class), measured in 6,000 epochs."""
    sampler = PairSampler(Tags.from_matrix(TAGS), seed=2, partner_may_be_itself=itself)
    rows = sampler.rows(0, 6000 * len(sampler))
    for m in np.unique(rows.m):
        chance = np.zeros(len(TAGS))
        tags_of_m = np.flatnonzero(TAGS[m])
        for tag in tags_of_m:
            members = set(np.flatnonzero(TAGS[:, tag]).tolist())
            candidates = members if itself else (members - {int(m)}) or {int(m)}
            for n in candidates:
                chance[n] += 1 / len(tags_of_m) / len(candidates)
        # At most 5 degrees of freedom: the probability of 30 is below 2e-5.
        assert chi_square(np.bincount(rows.n[rows.m == m], minlength=len(TAGS)), chance) < 30


def test_each_epoch_is_a_permutation() -> None:
    image, epoch = epoch_rows(3, 7, 0, 21)
    assert epoch.tolist() == [0] * 7 + [1] * 7 + [2] * 7
    assert [sorted(image[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert image[:7].tolist() != image[7:14].tolist()


# --- domains


def test_domains_only_decide_which_image_is_m() -> None:
    """The partner is any other image of the class. In a pair of two domains, m is of the domain `target`."""
    tags = np.ones((9, 1), bool)
    is_source = np.arange(9) < 4
    sampler = PairSampler(Tags.from_matrix(tags), seed=0, is_source=is_source)
    rows = sampler.rows(0, 90_000)

    np.testing.assert_array_equal(is_source[rows.m], rows.pair_domains == SOURCE_SOURCE)
    np.testing.assert_array_equal(is_source[rows.n], rows.pair_domains != TARGET_TARGET)

    together = np.bincount(np.minimum(rows.m, rows.n) * 9 + np.maximum(rows.m, rows.n), minlength=81)
    # 35 degrees of freedom: the probability of 85 is below 1e-5.
    assert chi_square(together, np.triu(np.ones((9, 9)), 1).reshape(-1) / 36) < 85


# --- class balance


@pytest.mark.parametrize("balance", [0.0, 0.3, 1.0])
def test_probability_of_the_shared_class(balance: float) -> None:
    """Mixes class sizes (2, 10 and 48 images) and equal probabilities by the class-balanced fraction."""
    image_classes = np.repeat([0, 1, 2], [2, 10, 48])
    tags = Tags.from_matrix(image_classes[:, None] == np.arange(4))  # class 3 has no image
    rows = PairSampler(tags, seed=0, class_balanced_fraction=balance).rows(0, 60_000)

    np.testing.assert_array_equal(image_classes[rows.m], image_classes[rows.n])

    chance = balance / 3 + (1 - balance) * np.array([2, 10, 48]) / 60
    # Turns vary less than random draws: the statistic is at most that of 2 degrees of freedom.
    assert chi_square(np.bincount(image_classes[rows.m]), chance) < 24
    # Within a class, images are m equally often. 47 degrees of freedom: the probability of 107 is below 1e-5.
    assert chi_square(np.bincount(rows.m[image_classes[rows.m] == 2] - 12, minlength=48), np.full(48, 1 / 48)) < 107
    assert (rows.m != rows.n).all()


# --- target share


def shared(share: float, **options: Any) -> tuple[PairSampler, NDArray[np.bool_], NDArray[np.int64]]:
    """A sampler of 30 images of a data set and 600 others of three classes; which are others; the class of each image.

    The data set has no image of class 2, and the others have none of class 1.
    """
    classes = np.concatenate([np.arange(30) % 2, np.arange(600) % 2 * 2])
    is_extra = np.arange(630) >= 30
    tags = Tags.from_matrix(classes[:, None] == np.arange(3))
    return PairSampler(tags, seed=1, target_share=share, is_extra=is_extra, **options), is_extra, classes


@pytest.mark.parametrize("share", [0.03, 0.5, 0.8, 1.0])
def test_images_m_have_the_target_share(share: float) -> None:
    sampler, is_extra, _ = shared(share)
    assert len(sampler) == 630
    rows = sampler.rows(0, 20_000)
    for length in (100, 1000, 20_000):
        assert abs(np.count_nonzero(~is_extra[rows.m[:length]]) - share * length) < 1.1

    turns = np.bincount(rows.m[~is_extra[rows.m]], minlength=30)[:30]
    assert turns.max() - turns.min() <= 1
    if share < 1:
        others = np.bincount(rows.m[is_extra[rows.m]], minlength=630)[30:]
        assert others.max() - others.min() <= 1


@pytest.mark.parametrize("options", [{}, {"partner_may_be_itself": True}, {"class_balanced_fraction": 1.0}])
def test_partners_have_the_target_share(options: dict[str, Any]) -> None:
    """A class that only one of the groups has takes its partners from this group."""
    sampler, is_extra, classes = shared(0.6, **options)
    rows = sampler.rows(0, 60_000)

    np.testing.assert_array_equal(classes[rows.m], classes[rows.n])
    assert "partner_may_be_itself" in options or (rows.m != rows.n).all()
    assert not is_extra[rows.n[classes[rows.m] == 1]].any()
    assert is_extra[rows.n[classes[rows.m] == 2]].all()

    has_class_of_both = classes[rows.m] == 0
    share = (~is_extra[rows.n[has_class_of_both]]).mean()
    assert abs(share - 0.6) < 0.02
    # Within a group, partners are equally likely. 14 degrees of freedom: the probability of 50 is below 1e-5.
    partners = rows.n[has_class_of_both & ~is_extra[rows.n]]
    assert chi_square(np.bincount(partners, minlength=30)[:30:2], np.full(15, 1 / 15)) < 50
    # 299 degrees of freedom: the probability of 420 is below 1e-5.
    partners = rows.n[has_class_of_both & is_extra[rows.n]]
    assert chi_square(np.bincount(partners, minlength=630)[30::2], np.full(300, 1 / 300)) < 420


def test_the_only_image_of_its_group_is_paired_with_the_other_group() -> None:
    tags = Tags.from_matrix(np.ones((4, 1), bool))
    sampler = PairSampler(tags, seed=0, target_share=0.9, is_extra=np.array([False, True, True, True]))
    rows = sampler.rows(0, 1000)
    assert (rows.m != rows.n).all()
    assert set(rows.n[rows.m == 0]) == {1, 2, 3}


def test_negatives_and_wrong_partners_have_the_target_share() -> None:
    tags = np.zeros((400, 2), bool)
    tags[:100, 0] = True
    tags[200:, :] = np.eye(2, dtype=bool)[np.arange(200) % 2]  # images 100 to 199 are negatives
    is_extra = np.arange(400) >= 200
    options: dict[str, Any] = {"seed": 0, "target_share": 0.7, "is_extra": is_extra}
    rows = PairSampler(Tags.from_matrix(tags), **options).rows(0, 30_000)
    partners = rows.n[(rows.m >= 100) & (rows.m < 200)]
    assert tags[partners].any(axis=1).all()
    assert abs((~is_extra[partners]).mean() - 0.7) < 0.02

    rows = PairSampler(Tags.from_matrix(tags), wrong_class=True, **options).rows(0, 30_000)
    first = tags[rows.m, 0]
    assert not tags[rows.n[first], 0].any()
    assert abs((~is_extra[rows.n[first]]).mean() - 0.7) < 0.02


@pytest.mark.parametrize("is_extra", [None, np.zeros(6, bool), np.ones(6, bool)])
def test_the_target_share_of_one_group_changes_nothing(is_extra: NDArray[np.bool_] | None) -> None:
    plain = PairSampler(Tags.from_matrix(TAGS), seed=0).rows(0, 50)
    sampler = PairSampler(Tags.from_matrix(TAGS), seed=0, target_share=0.3, is_extra=is_extra)
    for column, expected in zip(sampler.rows(0, 50), plain, strict=True):
        np.testing.assert_array_equal(column, expected)


# --- size


def stored_bytes(thing: Any) -> int:
    """Returns the size of all arrays of a sampler, bytes."""
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    return sum(map(stored_bytes, vars(thing).values())) if hasattr(thing, "__dict__") else 0


@pytest.mark.parametrize("domain", [False, True])
def test_memory_per_tag(domain: bool) -> None:
    """Uses a million tags of 200 classes, 1.5 per image."""
    rng = np.random.default_rng(0)
    counts = rng.choice([1, 2, 3], 667_000, p=[0.6, 0.3, 0.1])
    start = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(start[-1]) - np.repeat(start[:-1], counts)
    values = (np.repeat(rng.integers(0, 60, len(counts)), counts) + 60 * within).astype(np.uint16)
    tags = Tags(values=values, start=start.astype(np.uint32), classes=200)

    assert len(values) > 990_000

    is_source = rng.random(len(counts)) < 0.5 if domain else None
    sampler = PairSampler(tags, seed=0, is_source=is_source)
    sampler.rows(0, 100)
    assert stored_bytes(sampler) < 12 * len(values) + (0 if is_source is None else is_source.nbytes)

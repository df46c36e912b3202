"""Pairs and related images: against a slow sampler that walks through lists, by exact chances, and for any cut."""

from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import Draw, Order, permuted, uniforms
from mcis.datasets.sampling.pairs import (
    SOURCE_SOURCE,
    TARGET_SOURCE,
    TARGET_TARGET,
    PairRows,
    PairSampler,
    epoch_rows,
)
from mcis.datasets.sampling.related_images import related_images
from mcis.datasets.tags import Members, Tags

quick = settings(deadline=None, max_examples=60)
Matrix = NDArray[np.bool_]

TAGS = np.array(
    [
        # class 0: 0, 1, 2, 4; class 1: 1, 4, 6; class 2: 5 alone; class 3: 2, 5, 6; image 3 has no tag
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 0, 1],
        [0, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 1],
        [0, 1, 0, 1],
    ],
    bool,
)


class Case(NamedTuple):
    """Tags (N, K) of up to 12 images and 4 classes, at least one tagged, and options of the sampler."""

    tags: Matrix
    options: dict[str, Any]

    def sampler(self) -> PairSampler:
        return PairSampler(Tags.of_matrix(self.tags), **self.options)


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
        options["source"] = source = draw(arrays(bool, len(tags)))
        targets, sources = (bool((tags.any(axis=1) & (source == domain)).any()) for domain in (False, True))
        possible = [targets, sources, targets and sources]
        if draw(st.booleans()):
            options["pair_mix"] = [draw(st.sampled_from([0, 1, 2.5])) * p for p in possible]
            if not any(options["pair_mix"]):
                options["pair_mix"] = [float(p) for p in possible]
    options["epoch_pairs"] = draw(st.sampled_from([7, 30] if "pair_mix" in options else [None, None, 1, 5, 30]))
    options["class_balance"] = draw(st.sampled_from([0.0, 0.0, 0.4, 1.0]))
    options["random_pair_rate"] = draw(st.sampled_from([0.0, 0.0, 0.4, 1.0]))
    return Case(tags, options)


def pick(choice: list[int], draw: float) -> int:
    return choice[int(draw * len(choice))]


def stepping_over(members: list[int], m: int) -> list[int]:
    """The others, the last of them where m would be."""
    if m not in members:
        return members
    return [members[-1] if i == m else i for i in members[:-1]]


def slow_row(case: Case, row: int) -> tuple[int, int, int, int, int]:
    """(m, n, epoch, kind, kind wanted or -1) of a row, from lists that are made anew for it."""
    tags, seed, itself = case.tags, case.options["seed"], case.options["partner_may_be_itself"]
    source = case.options.get("source")
    is_source = [bool(source is not None and source[i]) for i in range(len(tags))]
    targets = [i for i in range(len(tags)) if tags[i].any() and not is_source[i]]
    sources = [i for i in range(len(tags)) if tags[i].any() and is_source[i]]
    pairs = case.options["epoch_pairs"] or len(targets + sources)
    epoch, position = divmod(row, pairs)
    mix, kind = case.options.get("pair_mix"), -1
    if mix is None:
        images, number, order = targets + sources, row, Order.IMAGES
    else:
        ends = [int(sum(mix[: k + 1]) / sum(mix) * pairs + 0.5) for k in range(3)]
        kinds = [next(k for k in range(3) if slot < ends[k]) for slot in range(pairs)]
        slot = int(permuted(Order.SLOTS, seed, epoch, pairs, np.array([position]))[0])
        kind = kinds[slot]
        images, order = (sources, Order.SOURCES) if kind == SOURCE_SOURCE else (targets, Order.TARGETS)
        slots = [s for s in range(pairs) if (kinds[s] == SOURCE_SOURCE) == (kind == SOURCE_SOURCE)]
        number = epoch * len(slots) + slots.index(slot)
    turn, within = divmod(number, len(images))
    m = images[int(permuted(order, seed, turn, len(images), np.array([within]))[0])]
    of_class, of_partner = uniforms(Draw.PARTNER, seed, turn, np.array([m]), count=2)[0]
    tag = pick([k for k in range(tags.shape[1]) if tags[m, k]], of_class)

    def members(tag: int, domains: list[bool]) -> list[int]:
        return [i for domain in domains for i in range(len(tags)) if tags[i, tag] and is_source[i] == domain]

    positions = np.array([position])
    balanced, of_class, of_image, of_other = uniforms(Draw.CLASS_BALANCE, seed, epoch, positions, count=4)[0]
    if balanced < case.options["class_balance"]:
        domains = [False, True] if mix is None else [is_source[m]]
        tag = pick([k for k in range(tags.shape[1]) if members(k, domains)], of_class)
        m, of_partner = pick(members(tag, domains), of_image), of_other
    wanted = [[False, True]] if mix is None else [[kind != TARGET_TARGET], [kind == TARGET_TARGET]]
    n = m
    for domains in wanted:
        of_tag = members(tag, domains)
        if choice := of_tag if itself else stepping_over(of_tag, m):
            n = pick(choice, of_partner)
            break
    at_random, of_any = uniforms(Draw.RANDOM_PAIR, seed, epoch, positions, count=2)[0]
    if at_random < case.options["random_pair_rate"]:
        tagged = targets + sources if mix is None else sources if kind != TARGET_TARGET else targets
        choice = stepping_over(tagged, m)
        n = pick(choice, of_any) if choice else m
    if is_source[m] and not is_source[n]:
        m, n = n, m
    kinds_of_domains = {(False, False): TARGET_TARGET, (True, True): SOURCE_SOURCE, (False, True): TARGET_SOURCE}
    return m, n, epoch, kinds_of_domains[is_source[m], is_source[n]], kind


@settings(deadline=None, max_examples=150)
@given(cases())
def test_rows_are_the_references(case: Case) -> None:
    sampler, last = case.sampler(), 40
    rows = sampler.rows(0, last)
    slow = [slow_row(case, row) for row in range(last)]
    assert [tuple(r) for r in zip(*(c.tolist() for c in rows), strict=True)] == [r[:4] for r in slow]
    assert [c.dtype for c in rows] == [np.int64, np.int64, np.int64, np.uint8]
    for m, n in zip(rows.m, rows.n, strict=True):
        common = case.tags[m] & case.tags[n]
        assert common.any() or case.options["random_pair_rate"]
        if m == n and not case.options["partner_may_be_itself"] and not case.options["random_pair_rate"]:
            assert (case.tags[:, common].sum(axis=0) == 1).any(), "itself, though its class has another image"
    length = len(sampler)
    epoch = [slow_row(case, row) for row in range(length, 2 * length)]
    wanted, drawn = sampler.kind_counts(1)
    assert drawn.tolist() == [sum(r[3] == k for r in epoch) for k in range(3)]
    column = 3 if case.options.get("pair_mix") is None else 4
    assert wanted.tolist() == [sum(r[column] == k for r in epoch) for k in range(3)]


@quick
@given(matrices(), st.integers(0, 9), st.booleans())
def test_partners_are_those_of_the_rows(tags: Matrix, seed: int, itself: bool) -> None:
    sampler = PairSampler(Tags.of_matrix(tags), seed=seed, partner_may_be_itself=itself)
    rows = sampler.rows(0, 3 * len(sampler))
    np.testing.assert_array_equal(sampler.partners(rows.epoch, rows.m), rows.n)


@quick
@given(matrices(), st.integers(0, 9))
def test_each_tagged_image_is_m_once_per_epoch(tags: Matrix, seed: int) -> None:
    sampler = PairSampler(Tags.of_matrix(tags), seed=seed)
    tagged = [i for i in range(len(tags)) if tags[i].any()]
    assert len(sampler) == len(tagged)
    for epoch in range(4):
        rows = sampler.rows(epoch * len(tagged), (epoch + 1) * len(tagged))
        assert sorted(rows.m) == tagged
        assert (rows.epoch == epoch).all()
        assert (rows.kind == TARGET_TARGET).all()


@quick
@given(cases(), st.lists(st.integers(0, 60), max_size=6))
def test_cuts_add_up_to_the_whole(case: Case, cuts: list[int]) -> None:
    """A share of a batch, and a start in the middle, are parts of the same stream."""
    edges = sorted({0, 60, *cuts})
    whole = case.sampler().rows(0, 60)
    parts = [case.sampler().rows(first, last) for first, last in pairwise(edges)]
    for name in PairRows._fields:
        np.testing.assert_array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(whole, name))
    assert [len(column) for column in case.sampler().rows(7, 7)] == [0, 0, 0, 0]


def test_a_jump_far_ahead_needs_no_walk() -> None:
    sampler = PairSampler(Tags.of_matrix(TAGS), seed=0)
    rows = sampler.rows(6 * 10**9, 6 * 10**9 + 6)
    assert (rows.epoch == 10**9).all()
    assert sorted(rows.m) == [0, 1, 2, 4, 5, 6]


def test_epochs_and_seeds_come_in_other_orders() -> None:
    one_class = Tags.of_matrix(np.ones((40, 1), bool))
    sampler = PairSampler(one_class, seed=0)
    rows, of_seed_1 = sampler.rows(0, 80), PairSampler(one_class, seed=1).rows(0, 40)
    assert rows.m[:40].tolist() != rows.m[40:].tolist()
    assert rows.m[:40].tolist() != of_seed_1.m.tolist()
    assert rows.n[np.argsort(rows.m[:40])].tolist() != of_seed_1.n[np.argsort(of_seed_1.m)].tolist()


def chi_square(counts: NDArray[np.int64], chances: NDArray[np.float64]) -> float:
    """Of counts against chances that add up to 1; what has no chance must not come at all."""
    assert chances.sum() == pytest.approx(1)
    assert not counts[chances == 0].any()
    expected = counts.sum() * chances[chances > 0]
    return float(((counts[chances > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("itself", [False, True])
def test_chances_are_exact(itself: bool) -> None:
    """P(n | m): the mean over m's classes of 1 / (number of candidates in the class), counted over 6,000 epochs."""
    epochs = 6000
    sampler = PairSampler(Tags.of_matrix(TAGS), seed=2, partner_may_be_itself=itself)
    for m in range(len(TAGS)):
        tags_of_m = np.flatnonzero(TAGS[m])
        if not len(tags_of_m):
            continue
        chance = np.zeros(len(TAGS))
        for tag in tags_of_m:
            members = set(np.flatnonzero(TAGS[:, tag]).tolist())
            candidates = members if itself else (members - {m}) or {m}
            for n in candidates:
                chance[n] += 1 / len(tags_of_m) / len(candidates)
        drawn = sampler.partners(np.arange(epochs), np.full(epochs, m))
        # At most 5 degrees of freedom: 30 is beyond one chance in 50,000.
        assert chi_square(np.bincount(drawn, minlength=len(TAGS)), chance) < 30


def test_an_only_member_is_its_own_partner() -> None:
    tags = Tags.of_matrix(np.array([[1, 0], [0, 1], [0, 1]], bool))
    rows = PairSampler(tags, seed=0).rows(0, 300)
    assert set(rows.n[rows.m == 0].tolist()) == {0}
    assert set(rows.n[rows.m == 1].tolist()) == {2}
    itself = PairSampler(tags, seed=0, partner_may_be_itself=True).rows(0, 300)
    assert set(itself.n[itself.m == 1].tolist()) == {1, 2}


def test_epoch_rows_are_permutations_in_turn() -> None:
    image, epoch = epoch_rows(3, 7, 0, 21)
    assert epoch.tolist() == [0] * 7 + [1] * 7 + [2] * 7
    assert [sorted(image[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert image[:7].tolist() != image[7:14].tolist()


def test_epochs_of_another_length_share_the_turns() -> None:
    """13 images in epochs of 5 pairs: the epochs are cut out of the same stream of turns."""
    tags = Tags.of_matrix(np.ones((13, 2), bool))
    rows, plain = PairSampler(tags, seed=3, epoch_pairs=5).rows(0, 39), PairSampler(tags, seed=3).rows(0, 39)
    assert rows.epoch.tolist() == [i // 5 for i in range(39)]
    np.testing.assert_array_equal(rows.m, plain.m)
    np.testing.assert_array_equal(rows.n, plain.n)


# --- kinds


def domains() -> tuple[Matrix, Matrix]:
    """Tags (90, 3) and source: 50 images of the target, with one to three tags, and 40 of the source, with one."""
    rng = np.random.default_rng(5)
    tags = np.zeros((90, 3), bool)
    tags[np.arange(90), np.arange(90) % 3] = True
    source = rng.permutation(90) < 40
    tags[~source] |= rng.random((50, 3)) < 0.3
    return tags, source


def test_the_mix_is_exact_and_the_domains_are_the_kinds() -> None:
    tags, source = domains()
    sampler = PairSampler(Tags.of_matrix(tags), seed=0, source=source, pair_mix=(5, 2, 3), epoch_pairs=203)
    for epoch in range(3):
        rows = sampler.rows(203 * epoch, 203 * (epoch + 1))
        wanted, drawn = sampler.kind_counts(epoch)
        # 203 * 0.5 and * 0.7 end at 101.5 and 142.1, that is at 102 and 142.
        assert wanted.tolist() == [102, 40, 61]
        assert drawn.tolist() == [102, 40, 61]
        assert np.bincount(rows.kind, minlength=3).tolist() == [102, 40, 61]
        np.testing.assert_array_equal(source[rows.m], rows.kind == SOURCE_SOURCE)
        np.testing.assert_array_equal(source[rows.n], rows.kind != TARGET_TARGET)
        assert (tags[rows.m] & tags[rows.n]).any(axis=1).all()
        assert (rows.m != rows.n).all()
        # The kinds come mixed, not one after another: of 61 pairs between 20 and 41 lie in an epoch's first half.
        assert 20 < (rows.kind[:101] == TARGET_SOURCE).sum() < 41


def test_in_a_mix_the_images_of_a_domain_take_turns() -> None:
    tags, source = domains()
    sampler = PairSampler(Tags.of_matrix(tags), seed=1, source=source, pair_mix=(1, 1, 1), epoch_pairs=60)
    rows = sampler.rows(0, 600)
    # An epoch draws 40 m out of 50 of the target, and 20 out of 40 of the source: whole turns after 5 and 2 epochs.
    for domain, epochs, times in ((False, 5, 4), (True, 2, 1)):
        for first in range(0, 10, epochs):
            of_domain = (rows.epoch >= first) & (rows.epoch < first + epochs) & (source[rows.m] == domain)
            assert sorted(rows.m[of_domain]) == sorted(np.flatnonzero(source == domain).tolist() * times)


def test_partners_of_a_kind_have_the_same_chance() -> None:
    """Of the source image 0 in a SOURCE_SOURCE pair, and of the target image 4 in either other kind."""
    tags = np.ones((9, 1), bool)
    source = np.arange(9) < 4
    rows = PairSampler(Tags.of_matrix(tags), seed=0, source=source, pair_mix=(1, 1, 1)).rows(0, 90_000)
    for kind, m, chances in (
        (SOURCE_SOURCE, 0, [0, 1, 1, 1, 0, 0, 0, 0, 0]),
        (TARGET_TARGET, 4, [0, 0, 0, 0, 0, 1, 1, 1, 1]),
        (TARGET_SOURCE, 4, [1, 1, 1, 1, 0, 0, 0, 0, 0]),
    ):
        drawn = rows.n[(rows.kind == kind) & (rows.m == m)]
        assert len(drawn) > 4000
        # 3 degrees of freedom: 27 is beyond one chance in 100,000.
        assert chi_square(np.bincount(drawn, minlength=9), np.array(chances) / sum(chances)) < 27


def test_without_a_mix_the_domains_change_nothing_but_the_sides() -> None:
    """The partner is any other of the class; of two domains the target's is m."""
    tags = np.ones((9, 1), bool)
    source = np.arange(9) < 4
    sampler = PairSampler(Tags.of_matrix(tags), seed=0, source=source)
    rows = sampler.rows(0, 90_000)
    np.testing.assert_array_equal(source[rows.m], rows.kind == SOURCE_SOURCE)
    np.testing.assert_array_equal(source[rows.n], rows.kind != TARGET_TARGET)
    together = np.bincount(np.minimum(rows.m, rows.n) * 9 + np.maximum(rows.m, rows.n), minlength=81)
    # 35 degrees of freedom: 85 is beyond one chance in 100,000.
    assert chi_square(together, np.triu(np.ones((9, 9)), 1).reshape(-1) / 36) < 85
    wanted, drawn = sampler.kind_counts(7)
    assert wanted.tolist() == drawn.tolist()
    assert drawn.sum() == 9


def test_where_a_class_lacks_a_domain_the_pair_says_what_it_is() -> None:
    """Class 0: two of the target. Class 1: two of the source. Class 2: one of each. Class 3: one of the target."""
    of_class = np.array([0, 0, 1, 1, 2, 2, 3])
    source = np.array([0, 0, 1, 1, 0, 1, 0], bool)
    tags = Tags.of_matrix(of_class[:, None] == np.arange(4))
    target = PairSampler(tags, seed=0, source=source, pair_mix=(1, 0, 0))
    assert set(pairs_of(target.rows(0, 700))) == {(0, 1, 0), (1, 0, 0), (4, 5, TARGET_SOURCE), (6, 6, 0)}
    sources = PairSampler(tags, seed=0, source=source, pair_mix=(0, 1, 0))
    assert set(pairs_of(sources.rows(0, 700))) == {(2, 3, 1), (3, 2, 1), (4, 5, TARGET_SOURCE)}
    cross = PairSampler(tags, seed=0, source=source, pair_mix=(0, 0, 1), epoch_pairs=400)
    assert set(pairs_of(cross.rows(0, 400))) == {(0, 1, 0), (1, 0, 0), (4, 5, TARGET_SOURCE), (6, 6, 0)}
    # Four images of the target take turns; one of them has somebody in the source.
    assert [c.tolist() for c in cross.kind_counts(0)] == [[0, 0, 400], [300, 0, 100]]


def pairs_of(rows: PairRows) -> list[tuple[int, int, int]]:
    return list(zip(rows.m.tolist(), rows.n.tolist(), rows.kind.tolist(), strict=True))


def test_a_pair_with_itself_is_of_its_own_domain() -> None:
    tags = Tags.of_matrix(np.ones((2, 1), bool))
    source = np.array([True, False])
    options: dict[str, Any] = {"pair_mix": (1, 1, 1), "partner_may_be_itself": True, "epoch_pairs": 6}
    rows = PairSampler(tags, seed=0, source=source, **options).rows(0, 300)
    assert set(pairs_of(rows)) == {(1, 1, TARGET_TARGET), (0, 0, SOURCE_SOURCE), (1, 0, TARGET_SOURCE)}


# --- class balance


@pytest.mark.parametrize("balance", [0.0, 0.3, 1.0])
def test_the_chance_of_a_class_to_be_the_common_one(balance: float) -> None:
    """Classes of 2, 10 and 48 images of one tag: by their sizes, the same for each, or between as the share says."""
    of_class = np.repeat([0, 1, 2], [2, 10, 48])
    tags = Tags.of_matrix(of_class[:, None] == np.arange(4))  # class 3 has no image
    rows = PairSampler(tags, seed=0, class_balance=balance).rows(0, 60_000)
    np.testing.assert_array_equal(of_class[rows.m], of_class[rows.n])
    chance = balance / 3 + (1 - balance) * np.array([2, 10, 48]) / 60
    # Turns are no draws and vary less: the statistic is at most that of 2 degrees of freedom.
    assert chi_square(np.bincount(of_class[rows.m]), chance) < 24
    # Within a class all images are m equally often; with 47 degrees of freedom 107 is beyond one chance in 100,000.
    assert chi_square(np.bincount(rows.m[of_class[rows.m] == 2] - 12, minlength=48), np.full(48, 1 / 48)) < 107
    assert (rows.m != rows.n).all()


def test_a_class_drawn_first_is_the_one_that_the_pair_shares() -> None:
    """Image 0 has a rare class and a common one. Drawn for the rare one, its partner is the rare class's other."""
    tags = np.zeros((102, 2), bool)
    tags[[0, 101], 0] = True
    tags[:101, 1] = True
    rows = PairSampler(Tags.of_matrix(tags), seed=0, class_balance=1).rows(0, 20_000)
    chance = np.zeros((102, 102))
    chance[0, 101] = chance[101, 0] = 1 / 4
    chance[:101, :101] = (1 - np.eye(101)) / 2 / 101 / 100
    rare = np.array([((rows.m == 0) & (rows.n == 101)).sum(), ((rows.m == 101) & (rows.n == 0)).sum()])
    counts = np.append(rare, len(rows.m) - rare.sum())
    assert chi_square(counts, np.array([chance[0, 101], chance[101, 0], 1 / 2])) < 24  # 2 degrees of freedom


def test_balance_and_mix_together() -> None:
    """The class is drawn among those with an image of the domain that m is of: of the source that is class 1 alone."""
    of_class = np.repeat([0, 1, 1], [30, 3, 7])
    source = np.repeat([False, False, True], [30, 3, 7])
    tags = Tags.of_matrix(of_class[:, None] == np.arange(2))
    sampler = PairSampler(tags, seed=0, source=source, pair_mix=(2, 1, 0), class_balance=1)
    rows = sampler.rows(0, 30_000)
    assert sampler.kind_counts(0).wanted.tolist() == np.bincount(rows.kind[:40], minlength=3).tolist() == [27, 13, 0]
    assert (of_class[rows.m[rows.kind == SOURCE_SOURCE]] == 1).all()
    target = rows.m[rows.kind == TARGET_TARGET]
    assert chi_square(np.bincount(of_class[target]), np.array([0.5, 0.5])) < 20  # 1 degree of freedom


# --- size


def stored_bytes(thing: Any) -> int:
    """Of all arrays that a sampler holds."""
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    return sum(map(stored_bytes, vars(thing).values())) if hasattr(thing, "__dict__") else 0


@pytest.mark.parametrize("domain", [False, True])
def test_bytes_per_tag(domain: bool) -> None:
    """A million tags of 200 classes, 1.5 per image."""
    rng = np.random.default_rng(0)
    counts = rng.choice([1, 2, 3], 667_000, p=[0.6, 0.3, 0.1])
    start = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(start[-1]) - np.repeat(start[:-1], counts)
    values = (np.repeat(rng.integers(0, 60, len(counts)), counts) + 60 * within).astype(np.uint16)
    tags = Tags(values=values, start=start.astype(np.uint32), classes=200)
    assert len(values) > 990_000
    options: dict[str, Any] = {"source": rng.random(len(counts)) < 0.5, "pair_mix": (1, 1, 1)} if domain else {}
    sampler = PairSampler(tags, seed=0, **options)
    sampler.rows(0, 100)
    stored = stored_bytes(sampler)
    assert stored < 12 * len(values)
    assert sampler.nbytes <= stored < sampler.nbytes + 10_000


# --- what cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": np.ones(3, bool)}, r"source has shape \(3,\)"),
        ({"epoch_pairs": 0}, "an epoch of 0 pairs"),
        ({"class_balance": 1.5}, "class_balance 1.5 is outside"),
        ({"random_pair_rate": -0.1}, "random_pair_rate -0.1 is outside"),
        ({"class_balance": float("nan")}, "class_balance nan is outside"),
        ({"pair_mix": (1, 1)}, "expected weights of the three kinds"),
        ({"pair_mix": (1, -1, 1)}, "expected weights of the three kinds"),
        ({"pair_mix": (0, 0, 0)}, "expected weights of the three kinds"),
        ({"pair_mix": (1, float("inf"), 0)}, "expected weights of the three kinds"),
        ({"pair_mix": (98, 1, 1), "source": np.arange(7) > 4}, "an epoch of 6 pairs is too short for each kind"),
        ({"pair_mix": (1, 0, 1)}, "6 images of the target and 0 of the source"),
        ({"pair_mix": (0, 1, 0)}, "6 images of the target and 0 of the source"),
        ({"pair_mix": (1, 1, 0), "source": np.ones(7, bool)}, "0 images of the target and 6 of the source"),
        ({"pair_mix": (0, 1, 1), "source": np.ones(7, bool)}, "0 images of the target and 6 of the source"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PairSampler(Tags.of_matrix(TAGS), seed=0, **options)


def test_no_tag_is_no_pair() -> None:
    with pytest.raises(ValueError, match="no image has a tag"):
        PairSampler(Tags.of_matrix(np.zeros((3, 2), bool)), seed=0)


# --- related images


def related(tags: Matrix, image: int, tag: int, count: int, **options: Any) -> list[int]:
    """Of one image and class."""
    members = Members.of(Tags.of_matrix(tags))
    drawn = related_images(members, np.array([image]), np.array([tag]), count, **options)
    assert drawn.shape == (1, count)
    assert drawn.dtype == np.int64
    return drawn[0].tolist()


@quick
@given(st.integers(1, 12), st.integers(0, 99), st.booleans(), st.integers(0, 99))
def test_fewer_related_images_are_a_prefix(members: int, image: int, may_repeat: bool, seed: int) -> None:
    tags = np.ones((members, 1), bool)
    eight = related(tags, image % members, 0, 8, seed=seed, related_may_repeat=may_repeat)
    for count in range(9):
        assert related(tags, image % members, 0, count, seed=seed, related_may_repeat=may_repeat) == eight[:count]


@quick
@given(matrices(), st.integers(0, 9), st.integers(1, 8))
def test_related_images_share_the_class_and_repeat_only_where_they_must(tags: Matrix, seed: int, count: int) -> None:
    for image, tag in np.argwhere(tags).tolist():
        drawn = related(tags, image, tag, count, seed=seed)
        others = [i for i in range(len(tags)) if tags[i, tag] and i != image]
        if not others:
            assert drawn == [image] * count
        else:
            assert set(drawn) <= set(others)
            # As evenly as it goes: all of them once before any comes again.
            assert max(Counter(drawn).values()) == -(-count // len(others))
            assert len(set(drawn)) == min(count, len(others))


@quick
@given(matrices(), st.integers(0, 9), st.booleans())
def test_related_images_of_many_are_those_of_each(tags: Matrix, seed: int, may_repeat: bool) -> None:
    images, classes = np.nonzero(tags)
    members = Members.of(Tags.of_matrix(tags))
    together = related_images(members, images, classes, 5, seed=seed, related_may_repeat=may_repeat)
    for image, tag, row in zip(images.tolist(), classes.tolist(), together.tolist(), strict=True):
        assert related(tags, image, tag, 5, seed=seed, related_may_repeat=may_repeat) == row


@pytest.mark.parametrize("image", [0, 2, 4])
def test_all_orders_of_related_images_have_the_same_chance(image: int) -> None:
    """The 24 orders of the four others, for the first, a middle and the last member."""
    members, one = Members.of(Tags.of_matrix(np.ones((5, 1), bool))), np.array([image])
    drawn = [tuple(related_images(members, one, one * 0, 4, seed=seed)[0].tolist()) for seed in range(4800)]
    counts = Counter(drawn)
    assert all(image not in order for order in counts)
    assert len(counts) == 24
    # 23 degrees of freedom: 67 is beyond one chance in 100,000.
    assert chi_square(np.array(list(counts.values())), np.full(24, 1 / 24)) < 67


def test_related_images_are_drawn_for_each_name_anew() -> None:
    wide = np.ones((50, 2), bool)
    base = related(wide, 3, 0, 8, seed=0)
    assert base == related(wide, 3, 0, 8, seed=0)
    for image, tag, seed in ((4, 0, 0), (3, 1, 0), (3, 0, 1)):
        assert related(wide, image, tag, 8, seed=seed) != base
    # One order for a whole class, with the image itself stepped over, would pass so far.
    assert len({related(wide, image, 0, 1, seed=0)[0] for image in range(50)}) > 20


def test_related_images_with_repetition_hold_the_image_itself() -> None:
    members, two = Members.of(Tags.of_matrix(np.ones((4, 1), bool))), np.array([2])
    rows = [related_images(members, two, two * 0, 5, seed=seed, related_may_repeat=True) for seed in range(1000)]
    drawn = np.concatenate(rows)
    assert chi_square(np.bincount(drawn.reshape(-1), minlength=4), np.full(4, 1 / 4)) < 25
    assert any(len(set(row)) < 4 for row in drawn.tolist())
    assert related(np.ones((1, 1), bool), 0, 0, 3, seed=0, related_may_repeat=True) == [0, 0, 0]


# --- related images of one domain


def related_of(tags: Matrix, source: Matrix, image: int, tag: int, count: int, **options: Any) -> list[int]:
    """Of one image and class, with domains."""
    members = Members.of(Tags.of_matrix(tags), source)
    drawn = related_images(members, np.array([image]), np.array([tag]), count, **options)
    return drawn[0].tolist()


@quick
@given(matrices(), st.integers(0, 9), st.integers(1, 8), st.booleans(), st.data())
def test_related_images_have_the_class_and_repeat_where_it_has_too_few(
    tags: Matrix, seed: int, count: int, may_repeat: bool, data: st.DataObject
) -> None:
    source = data.draw(arrays(bool, len(tags)))
    options: dict[str, Any] = {"seed": seed, "related_may_repeat": may_repeat}
    images, classes = np.nonzero(tags)
    members = Members.of(Tags.of_matrix(tags), source)
    together = related_images(members, images, classes, count, **options).tolist()
    for image, tag, row in zip(images.tolist(), classes.tolist(), together, strict=True):
        drawn = related_of(tags, source, image, tag, count, **options)
        assert drawn == row, "many at once are those of each"
        for fewer in range(count):
            assert related_of(tags, source, image, tag, fewer, **options) == drawn[:fewer]
        candidates = [i for i in range(len(tags)) if tags[i, tag] and (may_repeat or i != image)] or [image]
        assert set(drawn) <= set(candidates)
        if not may_repeat:
            assert len(set(drawn)) == min(count, len(candidates))
            assert max(Counter(drawn).values()) == -(-count // len(candidates))


def test_related_images_have_the_same_chance() -> None:
    tags, source = np.ones((7, 1), bool), np.arange(7) >= 3
    drawn = [related_of(tags, source, 3, 0, 2, seed=seed) for seed in range(4000)]
    chances = np.array([1, 1, 1, 0, 1, 1, 1]) / 6
    for column in np.array(drawn).T:
        # 5 degrees of freedom: 30 is beyond one chance in 50,000.
        assert chi_square(np.bincount(column, minlength=7), chances) < 30

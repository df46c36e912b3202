"""Pairs and related images: against a slow sampler that walks through lists, by exact chances, and for any cut."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mcis.datasets.draws import uniforms
from mcis.datasets.pairs import PairSampler, epoch_rows, related_images

quick = settings(deadline=None, max_examples=60)
PARTNER = 1  # the purpose of the draws of partners
Tags = NDArray[np.bool_]

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


@st.composite
def tag_matrices(draw: st.DrawFn) -> Tags:
    """Up to 12 images and 4 classes; at least one image has a tag, others may have none."""
    shape = (draw(st.integers(1, 12)), draw(st.integers(1, 4)))
    tags = draw(arrays(bool, shape))
    tags[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1))] = True
    return tags


def slow_partner(tags: Tags, seed: int, epoch: int, m: int, itself: bool) -> tuple[int, int]:
    """(class drawn, n) for image m: a class out of the list of its classes, an image out of the list of the others."""
    of_class, of_image = uniforms(seed, epoch, np.array([m]), PARTNER, 2)[0]
    own = [k for k in range(tags.shape[1]) if tags[m, k]]
    tag = own[int(of_class * len(own))]
    members = [i for i in range(len(tags)) if tags[i, tag]]
    choice = members if itself else [i for i in members if i != m] or [m]
    return tag, choice[int(of_image * len(choice))]


@quick
@given(tag_matrices(), st.integers(0, 9), st.booleans())
def test_partners_are_the_references(tags: Tags, seed: int, itself: bool) -> None:
    sampler = PairSampler(tags, seed=seed, itself=itself)
    for epoch in range(3):
        rows = sampler.rows(epoch * len(sampler), (epoch + 1) * len(sampler))
        for m, n in zip(rows.m.tolist(), rows.n.tolist(), strict=True):
            tag, partner = slow_partner(tags, seed, epoch, m, itself)
            assert n == partner
            assert tags[m, tag]
            assert tags[n, tag]
            if n == m and not itself:
                assert tags[:, tag].sum() == 1, "itself, though its class has another image"


@quick
@given(tag_matrices(), st.integers(0, 9))
def test_each_tagged_image_is_m_once_an_epoch(tags: Tags, seed: int) -> None:
    sampler = PairSampler(tags, seed=seed)
    tagged = [i for i in range(len(tags)) if tags[i].any()]
    assert len(sampler) == len(tagged)
    for epoch in range(4):
        rows = sampler.rows(epoch * len(tagged), (epoch + 1) * len(tagged))
        assert sorted(rows.m) == tagged
        assert (rows.epoch == epoch).all()


@quick
@given(tag_matrices(), st.integers(0, 5), st.lists(st.integers(0, 60), max_size=6))
def test_cuts_add_up_to_the_whole(tags: Tags, seed: int, cuts: list[int]) -> None:
    sampler = PairSampler(tags, seed=seed)
    edges = sorted({0, 60, *cuts})
    whole = sampler.rows(0, 60)
    parts = [sampler.rows(first, last) for first, last in pairwise(edges)]
    for name in ("m", "n", "epoch"):
        np.testing.assert_array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(whole, name))
    assert [len(column) for column in sampler.rows(7, 7)] == [0, 0, 0]


def test_a_jump_far_ahead_needs_no_walk() -> None:
    sampler = PairSampler(TAGS, seed=0)
    rows = sampler.rows(6 * 10**9, 6 * 10**9 + 6)
    assert (rows.epoch == 10**9).all()
    assert sorted(rows.m) == [0, 1, 2, 4, 5, 6]


def test_epochs_and_seeds_come_in_other_orders() -> None:
    sampler, other = PairSampler(np.ones((40, 1), bool), seed=0), PairSampler(np.ones((40, 1), bool), seed=1)
    rows = sampler.rows(0, 80)
    assert rows.m[:40].tolist() != rows.m[40:].tolist()
    assert rows.m[:40].tolist() != other.rows(0, 40).m.tolist()
    assert rows.n[np.argsort(rows.m[:40])].tolist() != other.rows(0, 40).n[np.argsort(other.rows(0, 40).m)].tolist()


@pytest.mark.parametrize("itself", [False, True])
def test_chances_are_exact(itself: bool) -> None:
    """P(n | m): the mean over m's classes of 1 / (number of candidates in the class), counted over 6,000 epochs."""
    epochs = 6000
    sampler = PairSampler(TAGS, seed=2, itself=itself)
    for m in range(len(TAGS)):
        own = np.flatnonzero(TAGS[m])
        if not len(own):
            continue
        chance = np.zeros(len(TAGS))
        for tag in own:
            members = set(np.flatnonzero(TAGS[:, tag]).tolist())
            candidates = members if itself else (members - {m}) or {m}
            for n in candidates:
                chance[n] += 1 / len(own) / len(candidates)
        assert chance.sum() == pytest.approx(1)
        drawn = sampler.partners(np.arange(epochs), np.full(epochs, m))
        counts = np.bincount(drawn, minlength=len(TAGS))
        assert not counts[chance == 0].any()
        possible = chance > 0
        expected = epochs * chance[possible]
        # At most 5 degrees of freedom: 30 is beyond one chance in 50,000.
        assert ((counts[possible] - expected) ** 2 / expected).sum() < 30


def test_an_only_member_is_its_own_partner() -> None:
    tags = np.array([[1, 0], [0, 1], [0, 1]], bool)
    rows = PairSampler(tags, seed=0).rows(0, 300)
    assert set(rows.n[rows.m == 0].tolist()) == {0}
    assert set(rows.n[rows.m == 1].tolist()) == {2}
    itself = PairSampler(tags, seed=0, itself=True).rows(0, 300)
    assert set(itself.n[itself.m == 1].tolist()) == {1, 2}


def test_epoch_rows_are_permutations_in_turn() -> None:
    place, epoch = epoch_rows(3, 7, 0, 21)
    assert epoch.tolist() == [0] * 7 + [1] * 7 + [2] * 7
    assert [sorted(place[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert place[:7].tolist() != place[7:14].tolist()


# --- related images


@quick
@given(st.integers(2, 12), st.integers(0, 99), st.booleans(), st.integers(0, 99))
def test_fewer_related_images_are_a_prefix(members: int, image: int, may_repeat: bool, seed: int) -> None:
    tags = np.ones((members, 1), bool)
    eight = related_images(tags, image % members, 0, 8, seed=seed, may_repeat=may_repeat)
    for count in range(9):
        drawn = related_images(tags, image % members, 0, count, seed=seed, may_repeat=may_repeat)
        np.testing.assert_array_equal(drawn, eight[:count])


@quick
@given(tag_matrices(), st.integers(0, 9), st.integers(1, 8))
def test_related_images_share_the_class_and_repeat_only_where_they_must(tags: Tags, seed: int, count: int) -> None:
    for image, tag in zip(*np.nonzero(tags), strict=True):
        drawn = related_images(tags, image, tag, count, seed=seed).tolist()
        others = [i for i in range(len(tags)) if tags[i, tag] and i != image]
        assert len(drawn) == count
        if not others:
            assert drawn == [image] * count
        else:
            assert set(drawn) <= set(others)
            # As evenly as it goes: all of them once before any comes again.
            assert max(Counter(drawn).values()) == -(-count // len(others))
            assert len(set(drawn)) == min(count, len(others))


def test_related_images_are_drawn_evenly_and_for_each_name_anew() -> None:
    tags = np.ones((6, 2), bool)
    first = [related_images(tags, 0, 0, 1, seed=seed)[0] for seed in range(3000)]
    counts = np.bincount(first, minlength=6)
    assert counts[0] == 0
    assert ((counts[1:] - 600) ** 2 / 600).sum() < 25  # 4 degrees of freedom
    eight = related_images(tags, 0, 0, 8, seed=0).tolist()
    assert eight == related_images(tags, 0, 0, 8, seed=0).tolist()
    wide = np.ones((50, 2), bool)
    base = related_images(wide, 3, 0, 8, seed=0).tolist()
    for image, tag, seed in ((4, 0, 0), (3, 1, 0), (3, 0, 1)):
        assert related_images(wide, image, tag, 8, seed=seed).tolist() != base
    # One order for a whole class, with the image itself stepped over, would pass so far.
    assert len({int(related_images(wide, image, 0, 1, seed=0)[0]) for image in range(50)}) > 20


def test_related_images_with_repetition_hold_the_image_itself() -> None:
    tags = np.ones((4, 1), bool)
    drawn = np.stack([related_images(tags, 2, 0, 5, seed=seed, may_repeat=True) for seed in range(1000)])
    assert ((np.bincount(drawn.reshape(-1), minlength=4) - 1250) ** 2 / 1250).sum() < 25
    assert any(len(set(row)) < 4 for row in drawn.tolist())
    assert related_images(tags[:1], 0, 0, 3, seed=0, may_repeat=True).tolist() == [0, 0, 0]

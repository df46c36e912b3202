"""Draws follow from their keys alone: against SplitMix64 in whole numbers, and evenly spread by any count of them."""

import math
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import DrawPurpose, OrderPurpose, generator_seeds, permuted, uniforms

small = st.integers(0, 2**40)


def splitmix(state: int) -> int:
    """One output of SplitMix64 as its authors publish it, in Python's whole numbers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def draw(number: int) -> DrawPurpose:
    """Any number as a purpose: what is hashed is the number, whether or not the enumeration has it."""
    return cast(DrawPurpose, number)


def slow(purpose: int, seed: int, first: int, second: int, count: int) -> list[float]:
    state = splitmix(seed)
    for part in (first, second, purpose):
        state = splitmix(state ^ part)
    return [(splitmix((state + i * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for i in range(count)]


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64] | float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_reference_is_splitmix() -> None:
    # The first numbers of its authors' generator that starts from 0.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [splitmix(i * 0x9E3779B97F4A7C15 % 2**64) for i in range(3)] == published


@given(st.integers(0, 9), small, small, st.lists(small, max_size=4), st.integers(1, 8))
def test_draws_are_the_references(purpose: int, seed: int, first: int, second: list[int], count: int) -> None:
    drawn = uniforms(draw(purpose), seed, first, np.array(second, np.int64), count=count)
    assert drawn.shape == (len(second), count)
    assert drawn.dtype == np.float64
    assert drawn.tolist() == [slow(purpose, seed, first, part, count) for part in second]


# The first number of the key (3, 5, 7) for each purpose, and the value at position 7 of order 5 of 1009, seed 3.
FIRST_DRAWS = {
    DrawPurpose.PARTNER: 0.144119353249331,
    DrawPurpose.AUGMENT_M: 0.6654417729230072,
    DrawPurpose.AUGMENT_N: 0.506392502644138,
    DrawPurpose.SEGMENTER_CROP: 0.39552367044029224,
    DrawPurpose.SEGMENTER_JITTER: 0.8936255461928599,
    DrawPurpose.RANDOM_TAG: 0.6585506480892372,
    DrawPurpose.RELATED_IMAGES: 0.3274953062574678,
    DrawPurpose.THUMBNAIL: 0.49228746355598363,
    DrawPurpose.PAIR_CROP_N: 0.5434486091472647,
    DrawPurpose.DROPOUT: 0.710587795470082,
    DrawPurpose.CLASS_BALANCE: 0.3550741950484392,
    DrawPurpose.PAIR_CROP_M: 0.7683117532847903,
    DrawPurpose.WRONG_CLASS: 0.1768286221332237,
    DrawPurpose.CHANCE: 0.3212742861874225,
    DrawPurpose.AFFINITY_JITTER: 0.20994075436901216,
    DrawPurpose.BOOTSTRAP: 0.08788432830266724,
    DrawPurpose.BOOTSTRAP_SEEDS: 0.8435193105126645,
    DrawPurpose.COMPARED_IMAGES: 0.8996202971209578,
    DrawPurpose.CLASS_REPEAT: 0.42062646770180956,
}
FIRST_ORDERS = {OrderPurpose.IMAGES: 63, OrderPurpose.STATISTICS: 735}


def test_no_purpose_changes_its_number() -> None:
    """Published figures were drawn with these: a purpose that is renumbered draws other pairs, crops and maps."""
    assert {purpose: uniforms(purpose, 3, 5, np.array([7]))[0, 0] for purpose in DrawPurpose} == FIRST_DRAWS
    assert generator_seeds(DrawPurpose.DROPOUT, 3, np.array([7])) == [3364696294580851512]
    assert {purpose: permuted(purpose, 3, 5, 1009, np.array([7])).item() for purpose in OrderPurpose} == FIRST_ORDERS


def test_seeds_follow_from_their_keys_as_draws_do() -> None:
    rows = np.arange(1000)
    seeds = generator_seeds(DrawPurpose.DROPOUT, 3, rows)
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert generator_seeds(DrawPurpose.DROPOUT, 3, rows[[7, 2]]) == [seeds[7], seeds[2]]
    assert not set(seeds) & {
        *generator_seeds(DrawPurpose.DROPOUT, 4, rows),
        *generator_seeds(DrawPurpose.CLASS_BALANCE, 3, rows),
    }
    assert np.mean(seeds) / 2**62 == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("varied", ["second", "first", "seed", "purpose", "column"])
def test_draws_are_evenly_spread(varied: str) -> None:
    """Along each part of a key: 40 bins, and likewise the sum of neighbors, which shows what a lattice would hide."""
    n = 40_000
    if varied in ("seed", "purpose"):
        keys = ((1, k) if varied == "seed" else (k, 0) for k in range(n))
        drawn = np.array([uniforms(draw(purpose), seed, 0, np.array([3]))[0, 0] for purpose, seed in keys])
    elif varied == "column":
        drawn = uniforms(draw(1), 0, 0, np.array([3]), count=n)[0]
    elif varied == "first":
        drawn = uniforms(draw(1), 0, np.arange(n), np.full(n, 3))[:, 0]
    else:
        drawn = uniforms(draw(1), 0, 0, np.arange(n))[:, 0]
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # 39 degrees of freedom: 39 +- 8.8; 90 is beyond one chance in 100,000.
    assert chi_square(np.histogram(drawn, 40, (0, 1))[0], n / 40) < 90
    assert chi_square(np.histogram((drawn[1:] + drawn[:-1]) % 1, 40, (0, 1))[0], (n - 1) / 40) < 90
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 5 / n**0.5


def orders(seed: int, turns: int, count: int) -> NDArray[np.int64]:
    """The whole orders of many turns, (turns, count), asked for at once."""
    turn, position = np.divmod(np.arange(turns * count), count)
    return permuted(OrderPurpose.IMAGES, seed, turn, count, position).reshape(turns, count)


# One number, powers of two, squares and their neighbors, primes, and both sides of where the rounds become fewer.
COUNTS = [*range(1, 40), 63, 64, 65, 121, 127, 128, 997, 999, 1000, 1001, 1009, 1024, 4096, 10007, 10582, 65536]


@pytest.mark.parametrize("count", COUNTS)
def test_an_order_is_a_permutation(count: int) -> None:
    epochs = max(1, min(20, 2000 // count))
    assert (np.sort(orders(3, epochs, count), axis=1) == np.arange(count)).all()


def test_an_order_of_nothing() -> None:
    assert permuted(OrderPurpose.IMAGES, 0, 0, 0, np.arange(0)).shape == (0,)


@given(st.integers(1, 3000), small, small, st.data())
def test_an_order_is_the_same_asked_for_in_parts(count: int, seed: int, turn: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=20)), np.int64)
    whole = permuted(OrderPurpose.STATISTICS, seed, turn, count, np.arange(count))
    for turns in (turn, np.full(len(positions), turn)):
        np.testing.assert_array_equal(
            permuted(OrderPurpose.STATISTICS, seed, turns, count, positions), whole[positions]
        )


def test_each_row_may_have_its_own_turn() -> None:
    turns, positions = np.divmod(np.random.default_rng(0).permutation(300), 30)
    expected = [
        permuted(OrderPurpose.STATISTICS, 5, int(turn), 30, np.array([position]))[0]
        for turn, position in zip(turns, positions, strict=True)
    ]
    assert permuted(OrderPurpose.STATISTICS, 5, turns, 30, positions).tolist() == expected


def test_positions_in_a_huge_order() -> None:
    """Beyond 32 bits, where nobody lays an order out: in range, none twice, spread evenly and not by neighbors."""
    count = 10**11 + 3
    values = permuted(OrderPurpose.IMAGES, 1, 2, count, np.arange(20_000))
    assert values.min() >= 0
    assert values.max() < count
    assert len(np.unique(values)) == 20_000
    # 39 degrees of freedom: 90 is beyond one chance in 100,000.
    assert chi_square(np.histogram(values, 40, (0, count))[0], 500.0) < 90
    assert chi_square(np.histogram(np.diff(values) % count, 40, (0, count))[0], 19_999 / 40) < 90


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_all_orders_have_the_same_chance(count: int) -> None:
    """Every permutation of a few, over epochs of two seeds: within five deviations of the statistic's own mean."""
    epochs, possible = 60_000, math.factorial(count)
    for seed in (0, 1):
        code = (orders(seed, epochs, count) * count ** np.arange(count)).sum(axis=1)
        seen, counts = np.unique(code, return_counts=True)
        assert len(seen) == possible
        assert chi_square(counts, epochs / possible) < (possible - 1) + 5 * (2 * (possible - 1)) ** 0.5


@pytest.mark.parametrize("count", [7, 9, 10, 16, 17, 30, 1001])
def test_values_at_two_positions_are_independent(count: int) -> None:
    """The pairs of values at two positions, by the third of the order each lies in; and each position alone."""
    turns = 20_000
    positions = [(0, 1), (0, count // 2), (1, count - 1)]
    edges = np.array([0, count // 3, 2 * count // 3, count])
    sizes = np.diff(edges)
    chances = (np.outer(sizes, sizes) - np.diag(sizes)) / (count * (count - 1))
    for a, b in positions:
        first, second = (permuted(OrderPurpose.IMAGES, 0, np.arange(turns), count, np.full(turns, p)) for p in (a, b))
        thirds = [np.searchsorted(edges[1:], v, side="right") for v in (first, second)]
        table = np.bincount(thirds[0] * 3 + thirds[1], minlength=9).reshape(3, 3)
        assert chi_square(table, turns * chances) < 40  # 8 degrees of freedom: beyond one chance in 100,000
        if count <= 30:
            assert chi_square(np.bincount(first, minlength=count), turns / count) < 80  # up to 29 degrees


@pytest.mark.parametrize("changed", ["purpose", "seed", "turn"])
def test_every_part_of_an_orders_key_matters(changed: str) -> None:
    key = {"purpose": 1, "seed": 4, "turn": 9}

    def values(key: dict[str, int]) -> NDArray[np.int64]:
        return permuted(cast(OrderPurpose, key["purpose"]), key["seed"], key["turn"], 1000, np.arange(1000))

    for other in (values({**key, changed: key[changed] + 1}), values({**key, "seed": 9, "turn": 4})):
        assert (other == values(key)).sum() < 12  # one is expected to stay where it was

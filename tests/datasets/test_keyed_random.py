"""Tests of keyed random numbers: a SplitMix64 reference in Python integers, and statistical tests."""

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
    """Returns one output of SplitMix64, as published, with Python integers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def draw(number: int) -> DrawPurpose:
    """Returns any number as a purpose. Only the number is hashed."""
    return cast(DrawPurpose, number)


def slow(purpose: int, seed: int, first: int, second: int, count: int) -> list[float]:
    state = splitmix(seed)
    for part in (first, second, purpose):
        state = splitmix(state ^ part)
    return [(splitmix((state + i * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for i in range(count)]


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64] | float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_reference_is_splitmix() -> None:
    # The first outputs of the published generator with seed 0.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [splitmix(i * 0x9E3779B97F4A7C15 % 2**64) for i in range(3)] == published


@given(st.integers(0, 9), small, small, st.lists(small, max_size=4), st.integers(1, 8))
def test_numbers_match_the_reference(purpose: int, seed: int, first: int, second: list[int], count: int) -> None:
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
    DrawPurpose.NEAREST_CENTER: 0.19609537473548444,
}
FIRST_ORDERS = {OrderPurpose.IMAGES: 63, OrderPurpose.STATISTICS: 735, OrderPurpose.OTHER_DOMAINS: 2}


def test_purposes_keep_their_numbers() -> None:
    """Published results depend on them: a new number changes pairs, crops and maps."""
    assert {purpose: uniforms(purpose, 3, 5, np.array([7]))[0, 0] for purpose in DrawPurpose} == FIRST_DRAWS
    assert generator_seeds(DrawPurpose.DROPOUT, 3, np.array([7])) == [3364696294580851512]
    assert {purpose: permuted(purpose, 3, 5, 1009, np.array([7])).item() for purpose in OrderPurpose} == FIRST_ORDERS


def test_generator_seeds_depend_on_their_keys() -> None:
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
def test_numbers_are_uniform(varied: str) -> None:
    """Checks 40 bins along each part of a key, for numbers and for sums of neighbors, which reveal a lattice."""
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
    # 39 degrees of freedom: 39 +- 8.8. The probability of 90 is below 1e-5.
    assert chi_square(np.histogram(drawn, 40, (0, 1))[0], n / 40) < 90
    assert chi_square(np.histogram((drawn[1:] + drawn[:-1]) % 1, 40, (0, 1))[0], (n - 1) / 40) < 90
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 5 / n**0.5


def orders(seed: int, turns: int, count: int) -> NDArray[np.int64]:
    """Returns the whole permutations of many turns, (turns, count), from one call."""
    turn, position = np.divmod(np.arange(turns * count), count)
    return permuted(OrderPurpose.IMAGES, seed, turn, count, position).reshape(turns, count)


# One number, powers of two, squares and their neighbors, primes, and both sides of where the rounds become fewer.
COUNTS = [*range(1, 40), 63, 64, 65, 121, 127, 128, 997, 999, 1000, 1001, 1009, 1024, 4096, 10007, 10582, 65536]


@pytest.mark.parametrize("count", COUNTS)
def test_an_order_is_a_permutation(count: int) -> None:
    epochs = max(1, min(20, 2000 // count))
    assert (np.sort(orders(3, epochs, count), axis=1) == np.arange(count)).all()


def test_an_empty_order() -> None:
    assert permuted(OrderPurpose.IMAGES, 0, 0, 0, np.arange(0)).shape == (0,)


@given(st.integers(1, 3000), small, small, st.data())
def test_an_order_can_be_computed_in_parts(count: int, seed: int, turn: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=20)), np.int64)
    whole = permuted(OrderPurpose.STATISTICS, seed, turn, count, np.arange(count))
    for turns in (turn, np.full(len(positions), turn)):
        np.testing.assert_array_equal(
            permuted(OrderPurpose.STATISTICS, seed, turns, count, positions), whole[positions]
        )


def test_each_position_may_have_its_own_turn() -> None:
    turns, positions = np.divmod(np.random.default_rng(0).permutation(300), 30)
    expected = [
        permuted(OrderPurpose.STATISTICS, 5, int(turn), 30, np.array([position]))[0]
        for turn, position in zip(turns, positions, strict=True)
    ]
    assert permuted(OrderPurpose.STATISTICS, 5, turns, 30, positions).tolist() == expected


def test_orders_of_more_than_32_bits() -> None:
    """Values are in range, unique and uniform, and so are the differences of neighbors."""
    count = 10**11 + 3
    values = permuted(OrderPurpose.IMAGES, 1, 2, count, np.arange(20_000))

    assert values.min() >= 0
    assert values.max() < count
    assert len(np.unique(values)) == 20_000
    # 39 degrees of freedom: the probability of 90 is below 1e-5.
    assert chi_square(np.histogram(values, 40, (0, count))[0], 500.0) < 90
    assert chi_square(np.histogram(np.diff(values) % count, 40, (0, count))[0], 19_999 / 40) < 90


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_all_permutations_are_equally_likely(count: int) -> None:
    """Compares the counts of all permutations with a chi-square distribution, up to five standard deviations."""
    epochs = 60_000
    possible = math.factorial(count)
    for seed in (0, 1):
        code = (orders(seed, epochs, count) * count ** np.arange(count)).sum(axis=1)
        codes, counts = np.unique(code, return_counts=True)
        assert len(codes) == possible
        assert chi_square(counts, epochs / possible) < (possible - 1) + 5 * (2 * (possible - 1)) ** 0.5


@pytest.mark.parametrize("count", [7, 9, 10, 16, 17, 30, 1001])
def test_values_at_two_positions_are_independent(count: int) -> None:
    """Tests pairs of values at two positions, binned to thirds of the range, and each position on its own."""
    turns = 20_000
    positions = [(0, 1), (0, count // 2), (1, count - 1)]
    edges = np.array([0, count // 3, 2 * count // 3, count])
    sizes = np.diff(edges)
    chances = (np.outer(sizes, sizes) - np.diag(sizes)) / (count * (count - 1))
    for a, b in positions:
        first, second = (permuted(OrderPurpose.IMAGES, 0, np.arange(turns), count, np.full(turns, p)) for p in (a, b))
        thirds = [np.searchsorted(edges[1:], v, side="right") for v in (first, second)]
        table = np.bincount(thirds[0] * 3 + thirds[1], minlength=9).reshape(3, 3)
        assert chi_square(table, turns * chances) < 40  # 8 degrees of freedom: probability below 1e-5
        if count <= 30:
            assert chi_square(np.bincount(first, minlength=count), turns / count) < 80  # up to 29 degrees


@pytest.mark.parametrize("changed", ["purpose", "seed", "turn"])
def test_orders_depend_on_every_part_of_the_key(changed: str) -> None:
    key = {"purpose": 1, "seed": 4, "turn": 9}

    def values(key: dict[str, int]) -> NDArray[np.int64]:
        return permuted(cast(OrderPurpose, key["purpose"]), key["seed"], key["turn"], 1000, np.arange(1000))

    for other in (values({**key, changed: key[changed] + 1}), values({**key, "seed": 9, "turn": 4})):
        assert (other == values(key)).sum() < 12  # one fixed point is expected

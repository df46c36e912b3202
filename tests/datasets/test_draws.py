"""Draws follow from their names alone: against SplitMix64 in whole numbers, and evenly spread by any count of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.draws import generator_seeds, permuted, uniforms

quick = settings(deadline=None, max_examples=60)
small = st.integers(0, 2**40)


def splitmix(state: int) -> int:
    """One output of SplitMix64 as its authors publish it, in Python's whole numbers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def slow(seed: int, epoch: int, image: int, purpose: int, count: int) -> list[float]:
    state = splitmix(seed)
    for part in (epoch, image, purpose):
        state = splitmix(state ^ part)
    return [(splitmix((state + i * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for i in range(count)]


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64] | float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_reference_is_splitmix() -> None:
    # The first numbers of its authors' generator that starts from 0.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [splitmix(i * 0x9E3779B97F4A7C15 % 2**64) for i in range(3)] == published


@quick
@given(small, small, st.lists(small, max_size=4), st.integers(0, 9), st.integers(1, 8))
def test_draws_are_the_references(seed: int, epoch: int, images: list[int], purpose: int, count: int) -> None:
    drawn = uniforms(seed, epoch, np.array(images, np.int64), purpose, count)
    assert drawn.shape == (len(images), count)
    assert drawn.dtype == np.float64
    assert drawn.tolist() == [slow(seed, epoch, image, purpose, count) for image in images]


@quick
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9999)), min_size=1, max_size=30))
def test_company_and_order_change_nothing(rows: list[tuple[int, int]]) -> None:
    epochs, images = np.array(rows).T
    whole = uniforms(3, epochs, images, 1, 4)
    for place in range(len(rows)):
        alone = uniforms(3, int(epochs[place]), images[place : place + 1], 1, 4)
        np.testing.assert_array_equal(alone[0], whole[place])
    shuffled = np.random.default_rng(0).permutation(len(rows))
    np.testing.assert_array_equal(uniforms(3, epochs[shuffled], images[shuffled], 1, 4), whole[shuffled])


def test_seeds_are_named_as_draws_are() -> None:
    rows = np.arange(1000)
    seeds = generator_seeds(3, rows, 10)
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert generator_seeds(3, rows[[7, 2]], 10) == [seeds[7], seeds[2]]
    assert not set(seeds) & {*generator_seeds(4, rows, 10), *generator_seeds(3, rows, 11)}
    assert np.mean(seeds) / 2**62 == pytest.approx(0.5, abs=0.05)


def test_more_draws_begin_with_the_fewer() -> None:
    images = np.arange(50)
    np.testing.assert_array_equal(uniforms(0, 1, images, 2, 7)[:, :3], uniforms(0, 1, images, 2, 3))


@pytest.mark.parametrize("changed", ["seed", "epoch", "image", "purpose"])
def test_every_name_matters(changed: str) -> None:
    names = {"seed": 5, "epoch": 2, "image": 7, "purpose": 1}

    def draws(values: dict[str, int]) -> NDArray[np.float64]:
        return uniforms(values["seed"], values["epoch"], np.array([values["image"]]), values["purpose"], 4)[0]

    other = {**names, changed: names[changed] + 1}
    assert not np.isclose(draws(names), draws(other)).any()
    # Names are told apart by their place too: epoch 2 of image 7 is not epoch 7 of image 2.
    swapped = {**names, "epoch": names["image"], "image": names["epoch"]}
    assert not np.isclose(draws(names), draws(swapped)).any()


@pytest.mark.parametrize("varied", ["image", "epoch", "seed", "purpose", "column"])
def test_draws_are_evenly_spread(varied: str) -> None:
    """Along each name: 40 bins, and the same for the sum of neighbours, which shows what a lattice would hide."""
    n = 40_000
    if varied == "seed":
        drawn = np.array([uniforms(seed, 0, np.array([3]), 1)[0, 0] for seed in range(n)])
    elif varied == "purpose":
        drawn = np.array([uniforms(0, 0, np.array([3]), purpose)[0, 0] for purpose in range(n)])
    elif varied == "column":
        drawn = uniforms(0, 0, np.array([3]), 1, n)[0]
    else:
        numbers, fixed = np.arange(n), np.full(n, 3)
        drawn = uniforms(0, numbers, fixed, 1)[:, 0] if varied == "epoch" else uniforms(0, 0, numbers, 1)[:, 0]
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # 39 degrees of freedom: 39 +- 8.8; 90 is beyond one chance in 100,000.
    assert chi_square(np.histogram(drawn, 40, (0, 1))[0], n / 40) < 90
    assert chi_square(np.histogram((drawn[1:] + drawn[:-1]) % 1, 40, (0, 1))[0], (n - 1) / 40) < 90
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 5 / n**0.5


def test_no_draw_comes_twice() -> None:
    epochs, images = np.divmod(np.arange(200_000), 1000)
    assert len(np.unique(uniforms(1, epochs, images, 1))) == 200_000


def orders(seed: int, epochs: int, count: int, purpose: int = 0) -> NDArray[np.int64]:
    """The whole orders of many epochs, (epochs, count), asked for at once."""
    epoch, position = np.divmod(np.arange(epochs * count), count)
    return permuted(seed, epoch, count, position, purpose).reshape(epochs, count)


# One number, powers of two, squares and their neighbours, primes, and both sides of where the rounds become fewer.
COUNTS = [*range(1, 40), 63, 64, 65, 121, 127, 128, 997, 999, 1000, 1001, 1009, 1024, 4096, 10007, 10582, 65536]


@pytest.mark.parametrize("count", COUNTS)
def test_an_order_is_a_permutation(count: int) -> None:
    epochs = max(1, min(20, 2000 // count))
    assert (np.sort(orders(3, epochs, count), axis=1) == np.arange(count)).all()


def test_an_order_of_nothing() -> None:
    assert permuted(0, 0, 0, np.arange(0)).shape == (0,)


@quick
@given(st.integers(1, 3000), small, small, st.data())
def test_an_order_is_the_same_asked_for_in_parts(count: int, seed: int, epoch: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=20)), np.int64)
    whole = permuted(seed, epoch, count, np.arange(count))
    np.testing.assert_array_equal(permuted(seed, epoch, count, positions), whole[positions])
    np.testing.assert_array_equal(permuted(seed, np.full(len(positions), epoch), count, positions), whole[positions])


def test_each_row_may_have_its_own_epoch() -> None:
    epochs, positions = np.divmod(np.random.default_rng(0).permutation(300), 30)
    expected = [permuted(5, int(e), 30, np.array([p]))[0] for e, p in zip(epochs, positions, strict=True)]
    assert permuted(5, epochs, 30, positions).tolist() == expected


def test_places_in_a_huge_order() -> None:
    """Beyond 32 bits, where nobody lays an order out: in range, none twice, spread evenly and not by neighbours."""
    count = 10**11 + 3
    found = permuted(1, 2, count, np.arange(20_000))
    assert found.min() >= 0
    assert found.max() < count
    assert len(np.unique(found)) == 20_000
    # 39 degrees of freedom: 90 is beyond one chance in 100,000.
    assert chi_square(np.histogram(found, 40, (0, count))[0], 500.0) < 90
    assert chi_square(np.histogram(np.diff(found) % count, 40, (0, count))[0], 19_999 / 40) < 90


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
def test_what_stands_at_two_places_is_independent(count: int) -> None:
    """The pairs of values at two places, by the third of the order each lies in; and each place alone."""
    epochs = 20_000
    places = [(0, 1), (0, count // 2), (1, count - 1)]
    edges = np.array([0, count // 3, 2 * count // 3, count])
    sizes = np.diff(edges)
    chances = (np.outer(sizes, sizes) - np.diag(sizes)) / (count * (count - 1))
    for a, b in places:
        first, second = (permuted(0, np.arange(epochs), count, np.full(epochs, p)) for p in (a, b))
        thirds = [np.searchsorted(edges[1:], v, side="right") for v in (first, second)]
        table = np.bincount(thirds[0] * 3 + thirds[1], minlength=9).reshape(3, 3)
        assert chi_square(table, epochs * chances) < 40  # 8 degrees of freedom: beyond one chance in 100,000
        if count <= 30:
            assert chi_square(np.bincount(first, minlength=count), epochs / count) < 80  # up to 29 degrees


@pytest.mark.parametrize("changed", ["seed", "epoch", "purpose"])
def test_every_name_of_an_order_matters(changed: str) -> None:
    names = {"seed": 4, "epoch": 9, "purpose": 1}

    def order(values: dict[str, int]) -> NDArray[np.int64]:
        return permuted(values["seed"], values["epoch"], 1000, np.arange(1000), values["purpose"])

    for other in (order({**names, changed: names[changed] + 1}), order({**names, "seed": 9, "epoch": 4})):
        assert (other == order(names)).sum() < 12  # one is expected to stay where it was

"""Draws follow from their names alone: against SplitMix64 in whole numbers, and evenly spread by any count of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.draws import order, uniforms

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


@pytest.mark.parametrize("count", [0, 1, 2, 17])
def test_order_is_a_permutation(count: int) -> None:
    assert sorted(order(0, 3, count)) == list(range(count))


def test_order_follows_from_seed_and_epoch() -> None:
    np.testing.assert_array_equal(order(4, 9, 100), order(4, 9, 100))
    assert (order(4, 9, 100) != order(4, 10, 100)).any()
    assert (order(4, 9, 100) != order(5, 9, 100)).any()


def test_every_image_comes_at_every_place_of_an_epoch() -> None:
    orders = np.stack([order(0, epoch, 5) for epoch in range(4000)])
    for place in range(5):
        assert chi_square(np.bincount(orders[:, place], minlength=5), 800.0) < 25  # 4 degrees of freedom

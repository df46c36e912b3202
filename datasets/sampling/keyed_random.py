"""Random numbers that depend on nothing but their key: (seed, purpose, what is drawn for) -> a number, or an order.

Scheduling, worker count and restarts change nothing of what is drawn, because there is no generator with a state that
somebody could have advanced. The mixing function is SplitMix64 (Steele et al., OOPSLA 2014), vectorized.

The key of a number ends in a member of `DrawPurpose`, that of an order in a member of `OrderPurpose`. They differ in
length, so a number may be a member of both enumerations.
"""

import enum
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


@enum.unique
class DrawPurpose(enum.IntEnum):
    """Purposes of `uniforms` and `generator_seeds`; each docstring names the two parts of the key beside the seed.

    An image is its position in the rows that are drawn from. Published figures were made with these numbers: a new
    purpose takes a new number, and none is changed.
    """

    PARTNER = 1
    """Class and partner of a pair's image m, in its turn as m: (turn, m)."""
    AUGMENT_M = 2
    """Augmentation of image m of a pair: (row of the stream of pairs, m)."""
    AUGMENT_N = 3
    """Augmentation of image n of a pair: (row of the stream of pairs, n)."""
    SEGMENTER_CROP = 4
    """Scale, mirror image and window of a crop that the segmentation network is trained on: (epoch, image)."""
    SEGMENTER_JITTER = 5
    """Color jitter of such a crop: (epoch, image)."""
    RANDOM_TAG = 6
    """Tag that the baseline `random tag` takes for an image: (0, image)."""
    RELATED_IMAGES = 7
    """Related images of an image for one of its classes: (class, image)."""
    THUMBNAIL = 8
    """Which images of a class the page of an index shows: (class, image)."""
    PAIR_CROP_N = 9
    """Random crop of image n of a pair: (row of the stream of pairs, n)."""
    DROPOUT = 10
    """Units that dropout leaves out for a sample: (0, row of the training's stream)."""
    CLASS_BALANCE = 11
    """Whether a class is drawn first for a pair; class, m and n if so: (epoch, position in the epoch)."""
    PAIR_CROP_M = 13
    """Random crop of image m of a pair: (row of the stream of pairs, m)."""
    WRONG_CLASS = 14
    """Images that a map is related to although they lack its class, a control: (class, image)."""
    CHANCE = 15
    """Class scores of an image that know nothing of it: (repetition, image)."""
    AFFINITY_JITTER = 16
    """Color jitter of a crop that the affinity network is trained on: (epoch, image)."""
    BOOTSTRAP = 17
    """Image that a bootstrap's resample draws in one of its turns: (resample, turn)."""
    BOOTSTRAP_SEEDS = 18
    """Seed of a training that a bootstrap's resample draws in one of its turns: (resample, turn)."""
    COMPARED_IMAGES = 19
    """Which images the page of a comparison shows beside those that differ most: (0, image)."""
    CLASS_REPEAT = 21
    """Whether an image is repeated by the fraction that its class's repeat factor leaves over: (0, image)."""


@enum.unique
class OrderPurpose(enum.IntEnum):
    """Purposes of `permuted`: what is put in order; each docstring names the part of the key beside the seed."""

    IMAGES = 0
    """Tagged images of all domains: (turn)."""
    STATISTICS = 5  # the numbers between were orders that nothing draws any more
    """Training images, the first of which give the statistics of a backbone's channels: (0)."""


FLIP_DRAW = 5
"""Which of an image's numbers for augmentation mirrors it, below 1/2: a stream of features draws it as well."""


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _hashed(state: NDArray[np.uint64], *parts: ArrayLike) -> NDArray[np.uint64]:
    """64 bits for each key: the seed, `state`, into which the parts are mixed one after another."""
    state = _mix(state)
    for part in parts:
        state = _mix(state ^ np.asarray(part).astype(np.uint64))
    return state


def generator_seeds(purpose: DrawPurpose, seed: int, rows: NDArray[np.int64]) -> list[int]:
    """Seeds in 0..2^62 - 1 of a random generator for each row, (N,), where `uniforms` would be too many numbers.

    The key is (seed, 0, row).
    """
    return [int(n) for n in _hashed(np.full(len(rows), seed, np.uint64), 0, rows, purpose) >> np.uint64(2)]


def uniforms(
    purpose: DrawPurpose, seed: int, first: NDArray[np.int64] | int, second: NDArray[np.int64], *, count: int = 1
) -> NDArray[np.float64]:
    """Numbers in [0, 1), (N, count), for each of N keys; of a larger `count` the first columns are the same.

    Args:
        purpose: what is drawn; its docstring says what the next two parts of the key are.
        first: (N,), or the same for all keys.
        second: (N,).
    """
    state = _hashed(np.full(len(second), seed, np.uint64), first, second, purpose)
    counters = np.arange(count, dtype=np.uint64)[None, :] * _GOLDEN
    return (_mix(state[:, None] + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permuted(
    purpose: OrderPurpose, seed: int, turn: NDArray[np.int64] | int, count: int, positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The values at some positions of a random order of 0..count-1, (N,); the order itself is never laid out.

    A Feistel network on a table of about sqrt(count) rows and columns: in turn the row is moved on by a random number
    that depends on the column, and the column by one that depends on the row, which can be undone and so is a
    permutation of the table's cells. A cell outside of 0..count-1 is sent on until it falls inside (cycle walking,
    Black and Rogaway, CT-RSA 2002), which happens to at most one position in about sqrt(count).

    Args:
        purpose: what is put in order; its docstring says what `turn` counts.
        turn: number of the order, each of which is another one; the same for all positions, or (N,).
        count: below 2^62.
        positions: (N,), in 0..count-1.
    """
    # One element rather than a scalar: numpy warns of scalars that overflow, which is what mixing is made of.
    key = _hashed(np.full(1, seed, np.uint64), turn, purpose)
    out = _shuffled(key, count, positions.astype(np.uint64))
    outside = np.flatnonzero(out >= count)
    if len(outside):
        key = np.broadcast_to(key, out.shape)
        while len(outside):
            out[outside] = _shuffled(key[outside], count, out[outside])
            outside = outside[out[outside] >= count]
    return out.astype(np.int64)


def _shuffled(key: NDArray[np.uint64], count: int, cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of the smallest almost square table with at least `count` cells: key (1,) or (N,), cells (N,)."""
    height = math.isqrt(max(count, 1) - 1) + 1
    sides = np.uint64(height), np.uint64(max(1, -(-count // height)))
    left: NDArray[np.uint64] = cells // sides[1]
    right: NDArray[np.uint64] = cells - left * sides[1]
    # A small table has few numbers to move by and mixes slowly: with 10 rounds the orders of 5 are visibly uneven.
    for number in range(10 if count > 1000 else 24):
        side = sides[number % 2]
        random = _mix(key + (right + np.uint64(number << 32)))
        left = left + ((random >> _HALF) * side >> _HALF)
        # Below zero wraps to a huge number, so the smaller one is the remainder.
        left = np.minimum(left, left - side)
        left, right = right, left
    return left * sides[1] + right

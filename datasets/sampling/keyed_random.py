"""Random numbers and permutations that are functions of a key: (seed, purpose, further parts) -> number or order.

There is no generator with a state, so scheduling, the number of workers and restarts cannot change what is drawn. The
mixing function is SplitMix64 (Steele et al., OOPSLA 2014), vectorized.

The key of a number ends in a member of `DrawPurpose`, the key of a permutation in a member of `OrderPurpose`. The two
kinds of keys differ in length, so both enumerations may use the same numbers.
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
    """Purposes of `uniforms` and `generator_seeds`. Docstrings give the two key parts besides the seed.

    "Image" in a key means its position in the rows that are sampled from. Published results depend on these numbers:
    never change one, and give a new purpose a new number.
    """

    PARTNER = 1
    """Class and partner of image m of a pair: (turn of m, m)."""
    AUGMENT_M = 2
    """Augmentation of image m of a pair: (row of the stream of pairs, m)."""
    AUGMENT_N = 3
    """Augmentation of image n of a pair: (row of the stream of pairs, n)."""
    SEGMENTER_CROP = 4
    """Scale, flip and window of a crop for training the segmentation or the affinity network: (epoch, image)."""
    SEGMENTER_JITTER = 5
    """Color jitter of a crop for training the segmentation network: (epoch, image)."""
    RANDOM_TAG = 6
    """Tag that the baseline `random tag` chooses for an image: (0, image)."""
    RELATED_IMAGES = 7
    """Related images of an image, for one of its classes: (class, image)."""
    THUMBNAIL = 8
    """Images of a class that are shown on the page of an index: (class, image)."""
    PAIR_CROP_N = 9
    """Random crop of image n of a pair: (row of the stream of pairs, n)."""
    DROPOUT = 10
    """Units dropped by dropout for a sample: (0, row of the training stream)."""
    CLASS_BALANCE = 11
    """Whether a pair is class-balanced, and its class, m and n if so: (epoch, position in the epoch)."""
    PAIR_CROP_M = 13
    """Random crop of image m of a pair: (row of the stream of pairs, m)."""
    WRONG_CLASS = 14
    """Related images without the class of a map, used as a control: (class, image)."""
    CHANCE = 15
    """Class scores of an image at chance level: (repetition, image)."""
    AFFINITY_JITTER = 16
    """Color jitter of a crop for training the affinity network: (epoch, image)."""
    BOOTSTRAP = 17
    """Image drawn in a turn of a bootstrap resample: (resample, turn)."""
    BOOTSTRAP_SEEDS = 18
    """Training seed drawn in a turn of a bootstrap resample: (resample, turn)."""
    COMPARED_IMAGES = 19
    """Images shown on the page of a comparison in addition to those that differ most: (0, image)."""
    CLASS_REPEAT = 21
    """Whether the fractional part of an image's repeat factor adds a repeat: (0, image)."""
    NEAREST_CENTER = 22
    """Images of a large class that are centers of cells, in the search of nearest images: (class, image)."""


@enum.unique
class OrderPurpose(enum.IntEnum):
    """Purposes of `permuted`. Docstrings give what is permuted and the key part besides the seed."""

    IMAGES = 0
    """Tagged images of all domains, for pairs: (turn). Training images, for crops: (epoch)."""
    STATISTICS = 5
    """Training images; the first ones give the channel statistics of a backbone: (0)."""
    OTHER_DOMAINS = 6
    """Images of other domains than `target`, for pairs with a given share of target images: (turn)."""


FLIP_DRAW = 5
"""Index of the augmentation number that flips an image if it is below 1/2. Streams of features use it as well."""


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _hashed(state: NDArray[np.uint64], *parts: ArrayLike) -> NDArray[np.uint64]:
    """Returns 64 bits per key: the seeds in `state`, with the parts mixed in one after another."""
    state = _mix(state)
    for part in parts:
        state = _mix(state ^ np.asarray(part).astype(np.uint64))
    return state


def generator_seeds(purpose: DrawPurpose, seed: int, rows: NDArray[np.int64]) -> list[int]:
    """Returns a seed in 0..2^62 - 1 for a random generator per row, for uses that need many numbers per row.

    The key is (seed, 0, row).

    Args:
        rows: (N,).
    """
    hashed = _hashed(np.full(len(rows), seed, np.uint64), 0, rows, purpose)
    return [int(value) for value in hashed >> np.uint64(2)]


def uniforms(
    purpose: DrawPurpose, seed: int, first: NDArray[np.int64] | int, second: NDArray[np.int64], *, count: int = 1
) -> NDArray[np.float64]:
    """Returns numbers in [0, 1), (N, count), for N keys. A larger `count` adds columns and leaves the others unchanged.

    Args:
        purpose: What is drawn. Its docstring gives the next two parts of the key.
        first: (N,), or one value for all keys.
        second: (N,).
    """
    state = _hashed(np.full(len(second), seed, np.uint64), first, second, purpose)
    counters = np.arange(count, dtype=np.uint64)[None, :] * _GOLDEN
    return (_mix(state[:, None] + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permuted(
    purpose: OrderPurpose, seed: int, turn: NDArray[np.int64] | int, count: int, positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the values at some positions of a random permutation of 0..count-1, (N,), without materializing it.

    Uses a Feistel network on a table of about sqrt(count) rows and columns. Each round shifts the row by a random
    number that depends on the column, or the column by one that depends on the row. Both are invertible, so the result
    is a permutation of the cells. A cell outside of 0..count-1 is permuted again until it falls inside (cycle walking,
    Black and Rogaway, CT-RSA 2002). At most one position in about sqrt(count) needs this.

    Args:
        purpose: What is permuted. Its docstring gives the meaning of `turn`.
        turn: Number of the permutation; one value for all positions, or (N,).
        count: Below 2^62.
        positions: (N,), in 0..count-1.
    """
    # An array of one element, because numpy warns if a scalar overflows and mixing relies on overflow.
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
    """Permutes the cells of the smallest nearly square table with at least `count` cells.

    Args:
        key: (1,) or (N,).
        cells: (N,).
    """
    rows = math.isqrt(max(count, 1) - 1) + 1
    columns = np.uint64(max(1, -(-count // rows)))
    sides = (np.uint64(rows), columns)
    left: NDArray[np.uint64] = cells // columns
    right: NDArray[np.uint64] = cells - left * columns

    # Small tables mix slowly, since there are few numbers to shift by: 10 rounds are visibly uneven for count = 5.
    for number in range(10 if count > 1000 else 24):
        side = sides[number % 2]
        random = _mix(key + (right + np.uint64(number << 32)))
        shifted = left + ((random >> _HALF) * side >> _HALF)
        # Subtraction below zero wraps to a huge number, so the minimum is the remainder.
        shifted = np.minimum(shifted, shifted - side)
        left = right
        right = shifted
    return left * columns + right

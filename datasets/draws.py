"""Random numbers that depend on nothing but their names: (seed, epoch, image, purpose) -> a number, or an order.

Scheduling, worker count and restarts change nothing of what is drawn, because there is no generator with a state that
somebody could have advanced. The mixing function is SplitMix64 (Steele et al., OOPSLA 2014), vectorized.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _named(state: NDArray[np.uint64], *parts: ArrayLike) -> NDArray[np.uint64]:
    """A number of 64 bits for each name: the seed's state, into which the parts are mixed one after another."""
    state = _mix(state)
    for part in parts:
        state = _mix(state ^ np.asarray(part).astype(np.uint64))
    return state


def _states(seed: int, epoch: ArrayLike, image: NDArray[np.int64], purpose: int) -> NDArray[np.uint64]:
    return _named(np.full(len(image), seed, np.uint64), epoch, image, purpose)


def generator_seeds(seed: int, row: NDArray[np.int64], purpose: int) -> list[int]:
    """Seeds in 0..2^62 - 1 for generators of rows, (N,), of a stream, where `uniforms` would be too many numbers."""
    return [int(n) for n in _states(seed, 0, row, purpose) >> np.uint64(2)]


def uniforms(
    seed: int, epoch: NDArray[np.int64] | int, image: NDArray[np.int64], purpose: int, count: int = 1
) -> NDArray[np.float64]:
    """Numbers in [0, 1), (N, count), for N images (position in the index) in their epochs.

    Args:
        purpose: a small number that tells apart what is drawn (see the constants of the callers).
    """
    state = _states(seed, epoch, image, purpose)
    counters = np.arange(count, dtype=np.uint64)[None, :] * _GOLDEN
    return (_mix(state[:, None] + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permuted(
    seed: int, epoch: NDArray[np.int64] | int, count: int, positions: NDArray[np.int64], purpose: int = 0
) -> NDArray[np.int64]:
    """What stands at some positions of a random order of 0..count-1, (N,); the order itself is never laid out.

    A Feistel network on a table of about sqrt(count) rows and columns: in turn the row is moved on by a random number
    that depends on the column, and the column by one that depends on the row, which can be undone and so is a
    permutation of the table's cells. A cell outside of 0..count-1 is sent on until it falls inside (cycle walking,
    Black and Rogaway, CT-RSA 2002), which happens to at most one position in about sqrt(count).

    Args:
        epoch: each epoch has its own order; one for all positions or (N,).
        count: below 2^62.
        positions: (N,), in 0..count-1.
        purpose: tells apart orders of the same epoch.
    """
    # One element rather than a scalar: numpy warns of scalars that overflow, which is what mixing is made of.
    key = _named(np.full(1, seed, np.uint64), epoch, purpose)
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
    here: NDArray[np.uint64] = cells // sides[1]
    there: NDArray[np.uint64] = cells - here * sides[1]
    # A small table has few numbers to move by and mixes slowly: with 10 rounds the orders of 5 are visibly uneven.
    for turn in range(10 if count > 1000 else 24):
        side = sides[turn % 2]
        random = _mix(key + (there + np.uint64(turn << 32)))
        here = here + ((random >> _HALF) * side >> _HALF)
        # Below zero wraps to a huge number, so the smaller one is the remainder.
        here = np.minimum(here, here - side)
        here, there = there, here
    return here * sides[1] + there

"""Random numbers that depend on nothing but their names: (seed, epoch, image, purpose) -> a number.

Scheduling, worker count and restarts change nothing of what is drawn, because there is no generator with a state that
somebody could have advanced. The mixing function is SplitMix64 (Steele et al., OOPSLA 2014), vectorised.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(
    seed: int, epoch: NDArray[np.int64] | int, image: NDArray[np.int64], purpose: int, count: int = 1
) -> NDArray[np.float64]:
    """Numbers in [0, 1), (N, count), for N images (position in the index) in their epochs.

    Args:
        purpose: a small number that tells apart what is drawn (see the constants of the callers).
    """
    with np.errstate(over="ignore"):
        state = _mix(np.full(len(image), seed, np.uint64))
        for part in (epoch, image, purpose):
            state = _mix(state ^ np.asarray(part).astype(np.uint64))
        counters = np.arange(count, dtype=np.uint64)[None, :] * _GOLDEN
        mixed = _mix(state[:, None] + counters)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order in which the images of an epoch come, a permutation of 0..count-1."""
    return np.random.default_rng([seed, epoch]).permutation(count)

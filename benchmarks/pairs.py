"""Pairs per second, in millions, that one core draws from the tags of 100 million images.

Tags are made up: 200 classes whose sizes fall as one over the rank, 1 to 3 tags per image, 1.5 on average. Its
limit is measured in the same run on the same arrays: numpy gathers one number at a random position of each of the three
arrays that a pair has to look into. Targets: at least 1 million pairs per second; under 12 bytes per tag.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable

import machine
import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.pairs import PairSampler
from mcis.datasets.tags import Tags

TARGET, BYTES_TARGET = 1.0, 12
CLASSES, BATCH, SMALL_BATCH, BATCHES, REPEATS = 200, 4096, 8, 300, 5
_IMAGES_PER_CHUNK = 2**20


def synthetic(images: int, seed: int = 0) -> Tags:
    """Tags of made-up images; beside its result it needs some 100 MB."""
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, CLASSES + 1)
    class_of = np.repeat(
        np.arange(CLASSES), np.diff(np.floor(np.cumsum(shares) / shares.sum() * 2**16), prepend=0).astype(int)
    )
    count_of = np.repeat(np.array([1, 2, 3], np.uint8), [154, 76, 26])  # 1.5 on average, by 8 random bits
    counts = count_of[np.frombuffer(rng.bytes(images), np.uint8)]
    start = np.zeros(images + 1, np.uint32)
    np.cumsum(counts, out=start[1:])
    values = np.empty(start[-1], np.uint16)
    for first in range(0, images, _IMAGES_PER_CHUNK):
        chunk = counts[first : first + _IMAGES_PER_CHUNK]
        # Three classes per image, none twice: one that came already moves on to the next, twice at most.
        drawn = class_of[rng.integers(0, 2**16, (3, len(chunk)), np.uint16)]
        drawn[1] = np.where(drawn[1] == drawn[0], (drawn[1] + 1) % CLASSES, drawn[1])
        for _ in range(2):
            drawn[2] = np.where((drawn[2] == drawn[0]) | (drawn[2] == drawn[1]), (drawn[2] + 1) % CLASSES, drawn[2])
        kept = np.arange(3)[:, None] < chunk
        drawn = np.sort(np.where(kept, drawn, CLASSES), axis=0)
        values[start[first] : start[first + len(chunk)]] = drawn.T[kept.T]
    return Tags(values=values, start=start, classes=CLASSES)


def rate(batch: Callable[[int], object], size: int) -> float:
    """Rows per second of a function of a batch's number: the median of several runs over batches that differ."""
    rates = []
    for repeat in range(REPEATS):
        began = time.perf_counter()
        for number in range(repeat * BATCHES, (repeat + 1) * BATCHES):
            batch(number)
        rates.append(BATCHES * size / (time.perf_counter() - began))
    return statistics.median(rates)


def peak_bytes() -> int:
    """The most memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def main() -> None:
    """Makes the tags, sorts them, draws from them and prints what that takes."""
    images = machine.arguments(__doc__, images=100_000_000).parse_args().images
    print(machine.describe())
    without = peak_bytes()
    began = time.perf_counter()
    tags = synthetic(images)
    made = time.perf_counter()
    sampler = PairSampler(tags, seed=0)
    built = time.perf_counter()
    count = len(tags.values)
    arrays: list[NDArray[np.unsignedinteger]] = [tags.start, tags.values, sampler.members.images]
    kept = sum(array.nbytes for array in arrays)
    bytes_per_tag = kept / count
    sizes = np.sort(np.bincount(tags.values[: 10**7], minlength=CLASSES)) / min(count, 10**7)
    print(f"{images:,} images, {count:,} tags, {count / images:.3f} per image, {CLASSES} classes", end="")
    print(f" of which the most frequent has {sizes[-1]:.1%} and the rarest {sizes[0]:.2%} of the tags")
    print(f"tags made in {made - began:.1f} s, sampler built in {built - made:.1f} s")
    print(f"memory: {kept / 2**30:.2f} GiB kept", end="")
    print(f", peak resident {peak_bytes() / 2**30:.2f} GiB, of which {without / 2**30:.2f} before the first tag")

    rng = np.random.default_rng(1)
    firsts = rng.integers(0, len(sampler), REPEATS * BATCHES)
    pairs = rate(lambda number: sampler.rows(firsts[number], firsts[number] + BATCH), BATCH)
    small = rate(lambda number: sampler.rows(firsts[number], firsts[number] + SMALL_BATCH), SMALL_BATCH)
    positions = [rng.integers(0, len(array), (REPEATS * BATCHES, BATCH)) for array in arrays]
    limit = rate(lambda number: [a.take(p[number]) for a, p in zip(arrays, positions, strict=True)], BATCH)
    print(f"pairs per second: {pairs:,.0f} in batches of {BATCH}")
    print(f"a batch of {SMALL_BATCH} takes {SMALL_BATCH / small * 1e6:.0f} µs")
    print(f"limit: {limit:,.0f} times three gathered numbers per second; the sampler reaches {pairs / limit:.2f} of it")
    print(f"bytes per tag {bytes_per_tag:.2f} target {BYTES_TARGET}")
    print(f"ratio {pairs / 1e6:.2f} target {TARGET}")


if __name__ == "__main__":
    main()

"""Pairs per second, in millions, that one core draws from the tags of 100 million images.

The tags are synthetic: 200 classes whose sizes decrease as one over the rank, and 1 to 3 tags per image (mean 1.5). For
comparison, numpy gathers one number at a random position in each of the three arrays that a pair has to read.
Targets: at least 1 million pairs per second, and less than 12 bytes per tag.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable

import harness
import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.pairs import PairSampler
from mcis.datasets.tags import Tags

TARGET = 1.0
BYTES_TARGET = 12
CLASSES = 200
BATCH = 4096
SMALL_BATCH = 8
BATCHES = 300
"""Batches per measurement."""
REPEATS = 5
_CHUNK = 2**20
"""Images whose tags are drawn at a time."""


def synthetic_tags(images: int, seed: int = 0) -> Tags:
    """Draws the tags of synthetic images. In addition to the result this takes about 100 MB."""
    rng = np.random.default_rng(seed)
    class_sizes = 1 / np.arange(1, CLASSES + 1)
    bounds = np.floor(np.cumsum(class_sizes) / class_sizes.sum() * 2**16)
    class_of_draw = np.repeat(np.arange(CLASSES), np.diff(bounds, prepend=0).astype(int))
    count_of_draw = np.repeat(np.array([1, 2, 3], np.uint8), [154, 76, 26])  # 1.5 on average, from 8 random bits
    counts = count_of_draw[np.frombuffer(rng.bytes(images), np.uint8)]
    start = np.zeros(images + 1, np.uint32)
    np.cumsum(counts, out=start[1:])

    values = np.empty(start[-1], np.uint16)
    for first in range(0, images, _CHUNK):
        chunk_counts = counts[first : first + _CHUNK]
        classes = class_of_draw[rng.integers(0, 2**16, (3, len(chunk_counts)), np.uint16)]
        _make_distinct(classes)
        is_used = np.arange(3)[:, None] < chunk_counts
        classes = np.sort(np.where(is_used, classes, CLASSES), axis=0)
        values[start[first] : start[first + len(chunk_counts)]] = classes.T[is_used.T]
    return Tags(values=values, start=start, classes=CLASSES)


def _make_distinct(classes: NDArray[np.int64]) -> None:
    """Replaces repeated classes of an image, (3, N), with the next class, in place."""
    first, second, third = classes
    second[:] = np.where(second == first, (second + 1) % CLASSES, second)
    for _ in range(2):
        third[:] = np.where((third == first) | (third == second), (third + 1) % CLASSES, third)


def rows_per_second(draw_batch: Callable[[int], object], size: int) -> float:
    """Measures a function of a batch's number: the median of several measurements, all with different batches."""
    rates = []
    for repeat in range(REPEATS):
        start = time.perf_counter()
        for number in range(repeat * BATCHES, (repeat + 1) * BATCHES):
            draw_batch(number)
        rates.append(BATCHES * size / (time.perf_counter() - start))
    return statistics.median(rates)


def peak_bytes() -> int:
    """Returns the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def print_tags(tags: Tags, images: int) -> None:
    """Prints the numbers of tags and the shares of the largest and the smallest class."""
    count = len(tags.values)
    sizes = np.sort(np.bincount(tags.values[: 10**7], minlength=CLASSES)) / min(count, 10**7)
    print(
        f"{images:,} images, {count:,} tags, {count / images:.3f} per image, {CLASSES} classes with "
        f"{sizes[0]:.2%} to {sizes[-1]:.1%} of the tags"
    )


def main() -> None:
    """Draws the tags, builds the sampler, draws pairs and prints what this takes."""
    images = harness.option_parser(__doc__, images=100_000_000).parse_args().images
    print(harness.describe_machine())
    initial_bytes = peak_bytes()
    start = time.perf_counter()
    tags = synthetic_tags(images)
    tags_drawn = time.perf_counter()
    sampler = PairSampler(tags, seed=0)
    sampler_built = time.perf_counter()

    arrays: list[NDArray[np.unsignedinteger]] = [tags.start, tags.values, sampler.members.images]
    array_bytes = sum(array.nbytes for array in arrays)
    print_tags(tags, images)
    print(f"tags drawn in {tags_drawn - start:.1f} s, sampler built in {sampler_built - tags_drawn:.1f} s")
    print(
        f"memory: {array_bytes / 2**30:.2f} GiB in arrays, peak resident {peak_bytes() / 2**30:.2f} GiB, "
        f"{initial_bytes / 2**30:.2f} GiB of it before the first tag"
    )

    rng = np.random.default_rng(1)
    firsts = rng.integers(0, len(sampler), REPEATS * BATCHES)
    positions = [rng.integers(0, len(array), (REPEATS * BATCHES, BATCH)) for array in arrays]

    def gather(number: int) -> None:
        for array, array_positions in zip(arrays, positions, strict=True):
            array.take(array_positions[number])

    pairs = rows_per_second(lambda number: sampler.rows(firsts[number], firsts[number] + BATCH), BATCH)
    small = rows_per_second(lambda number: sampler.rows(firsts[number], firsts[number] + SMALL_BATCH), SMALL_BATCH)
    limit = rows_per_second(gather, BATCH)
    print(f"pairs per second: {pairs:,.0f} in batches of {BATCH}")
    print(f"a batch of {SMALL_BATCH} takes {SMALL_BATCH / small * 1e6:.0f} µs")
    print(f"limit: {limit:,.0f} times three gathered numbers per second; the sampler reaches {pairs / limit:.2f} of it")
    print(f"bytes per tag {array_bytes / len(tags.values):.2f} target {BYTES_TARGET}")
    print(f"ratio {pairs / 1e6:.2f} target {TARGET}")


if __name__ == "__main__":
    main()

"""Cost and recall of the search of nearest images (`localize.related_by=nearest`) among a million images.

The vectors are synthetic, as many numbers each as in `photos`: normally distributed with variances that fall like those
of photographs' vectors. Each image has one class. The search runs as in the stage `localize`, from the table of vectors
to the related and contrastive images of all maps, in a process of its own with a local Ray. The benchmark reports its
wall seconds and the peak resident memory of the driver, and the recall: the share of the R nearest images of a map that
the search found, for a sample of maps that are also searched completely. For classes that are searched completely it
must be 1. As a control, the time of the complete search of the sample on one core is extrapolated to all maps.
"""

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import harness
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.sampling.nearest_images import CELL_IMAGES, MAX_CANDIDATES, ClassMaps
from mcis.datasets.sampling.related_images import draw_related_images
from mcis.datasets.tags import Positions, Tags
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session
from mcis.platform.outputs.relations import RELATED_TABLE, VECTORS, read_related
from mcis.platform.runs.files import write_table
from mcis.platform.runs.progress import console
from mcis.platform.stages.localization.nearest import find_nearest_images

WIDTH = 472
"""Numbers of a vector in recipe `photos`."""
SPECTRUM = 0.75
"""Exponent with which the standard deviations of the principal components fall."""
R = 24
"""Related images of a map in recipe `photos`."""
SHARD_ROWS = 1024
GIB_TARGET = 3
RECALL_TARGET = 0.9
SEED = 0


def write_vectors(folder: Path, images: int) -> None:
    """Writes the table VECTORS."""
    rng = np.random.default_rng(SEED)
    deviations = np.arange(1, WIDTH + 1, dtype=np.float32) ** -SPECTRUM
    rotation = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0].astype(np.float32)
    for first in range(0, images, SHARD_ROWS):
        stop = min(first + SHARD_ROWS, images)
        vectors = rng.standard_normal((stop - first, WIDTH), np.float32) * deviations @ rotation
        lists = pa.ListArray.from_arrays(np.arange(stop - first + 1, dtype=np.int32) * WIDTH, pa.array(vectors.ravel()))
        ids = pa.array([str(number) for number in range(first, stop)])
        table = pa.table({"image_id": ids, "vector": lists})
        write_table(folder / VECTORS / f"part-{first:08d}-{stop:08d}.parquet", table)


def draw_tags(images: int, classes: int) -> Tags:
    """Draws one class per image."""
    values = np.random.default_rng(SEED + 1).integers(0, classes, images).astype(np.uint16)
    return Tags(values=values, start=np.arange(images + 1, dtype=np.uint32), classes=classes)


def search(folder: Path, tags: Tags, sizes: dict[str, int]) -> None:
    """Finds the related images of all maps. Prints the wall seconds and this process's peak memory in GiB."""
    compute = ComputeConfig(object_store_gb=1)
    console.stderr = True  # stdout is for the result
    with ray_session(compute):
        start = time.perf_counter()
        related = find_nearest_images(tags, SEED, R, folder, compute, **sizes)
        is_source = np.zeros(len(tags), bool)
        draw_related_images(tags, is_source, seed=SEED, related=R, contrastive=True, related_images=related)
        seconds = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    print([seconds, gib])


def sample_recall(folder: Path, tags: Tags, sample: int, sizes: dict[str, int]) -> tuple[float, float]:
    """Returns the recall in a sample of maps, and the seconds per map of the complete search of the sample."""
    vectors = np.load(folder / "unit_vectors.npy", mmap_mode="r")
    found = read_related(folder / RELATED_TABLE, len(tags), R)
    maps = ClassMaps.from_tags(tags, SEED, **{**sizes, "max_candidates": len(tags)})
    rng = np.random.default_rng(SEED + 2)
    first = int(rng.integers(0, len(tags) - sample + 1))
    start = time.perf_counter()
    exact = maps.find_nearest(vectors, first, first + sample, R)
    seconds = time.perf_counter() - start
    return recall(found[maps.maps[first : first + sample]], exact), seconds / sample


def recall(found: Positions, exact: NDArray[np.int64]) -> float:
    """Returns the mean share of the exact images that were found, over all rows."""
    pairs = zip(found.tolist(), exact.tolist(), strict=True)
    return float(np.mean([len(set(row) & set(exact_row)) / len(set(exact_row)) for row, exact_row in pairs]))


def main() -> None:
    """Writes the vectors, searches with each number of classes and prints what it took."""
    parser = harness.option_parser(
        __doc__, images=10**6, sample=512, max_candidates=MAX_CANDIDATES, cell_images=CELL_IMAGES
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[200, 10])
    parser.add_argument("--search", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {"max_candidates": options.max_candidates, "cell_images": options.cell_images}
    if options.search:
        search(options.search, draw_tags(options.images, options.classes[0]), sizes)
        return

    print(harness.describe_machine())
    peak = 0.0
    recalls = []
    with tempfile.TemporaryDirectory() as name:
        for classes in options.classes:
            folder = Path(name) / str(classes)
            write_vectors(folder, options.images)
            words = ["--images", str(options.images), "--classes", str(classes), "--search", str(folder)]
            words += ["--max_candidates", str(options.max_candidates), "--cell_images", str(options.cell_images)]
            seconds, gib = harness.run_script(__file__, *words)

            tags = draw_tags(options.images, classes)
            share, exact_seconds = sample_recall(folder, tags, options.sample, sizes)
            print(
                f"{options.images} images, {classes} classes: {seconds:.0f} s, driver {gib:.2f} GiB, recall "
                f"{share:.3f}; complete search on one core: {exact_seconds * options.images:.0f} s",
                flush=True,
            )
            peak = max(peak, gib)
            recalls.append(share)

    print(f"ratio {peak:.2f} target at most {GIB_TARGET}: GiB of the driver in the search of nearest images")
    print(f"ratio {min(recalls):.3f} target {RECALL_TARGET}: recall of nearest images, in the largest classes")


if __name__ == "__main__":
    main()

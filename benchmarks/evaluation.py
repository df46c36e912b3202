"""Predicted masks per second that the stage `evaluate` scores, relative to plain processes that decode and count.

The plain processes, one per core, read and decode each true mask and its two predictions, and count their pixels with
the same functions. Their sums are added at the end. The stage is measured completely, from the rows of the index to the
written scores, in a running Ray. With --masks it uses real masks, otherwise synthetic ones.
"""

import dataclasses
import shutil
import tempfile
import time
from pathlib import Path

import harness
import mask_files
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.images.label_masks import decode_labels
from mcis.models.counts import MASK_PARTS, add_counts, mask_counts
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.context import RunContext
from mcis.platform.stages import evaluation

TARGET = 0.9
CLASSES = len(VOC_CLASSES)


def plain_seconds(paths: list[Path], shards: list[Path]) -> float:
    """Measures the plain processes."""
    files = {path.stem: path for path in paths}
    with harness.process_pool() as pool:
        start = time.perf_counter()
        sum(pool.imap_unordered(_count_shard, [(files, shard) for shard in shards]))
        return time.perf_counter() - start


def _count_shard(arguments: tuple[dict[str, Path], Path]) -> NDArray[np.int64]:
    files, shard = arguments
    totals = np.zeros((2, MASK_PARTS, CLASSES + 1, CLASSES + 1), np.int64)
    for row in pq.read_table(shard).to_pylist():
        truth = decode_labels(files[row["image_id"]].read_bytes())
        predictions = map(decode_labels, (row["plain"], row["crf"]))
        for total, counts in zip(totals, mask_counts(truth, predictions, CLASSES), strict=True):
            add_counts(total, counts)
    return totals


def stage_seconds(context: RunContext, part: Path) -> float:
    """Measures the stage, whose output is written to `part` and removed."""
    start = time.perf_counter()
    evaluation.run(resolve("voc", "scratch").config, dataclasses.replace(context, output=part))
    seconds = time.perf_counter() - start
    shutil.rmtree(part)
    return seconds


def main() -> None:
    """Measures both sides in turn and prints the ratio of their medians."""
    parser = mask_files.mask_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(harness.describe_machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = mask_files.find_or_draw(options.masks, options.images, folder / "masks")
        context = mask_files.prepare_evaluation(folder / "workspace", paths)
        shards = sorted((context.stage_outputs["predict"] / "predictions").glob("*.parquet"))
        with ray_session(resolve("voc", "scratch").config.compute):
            stage_seconds(context, folder / "warm-up")  # Ray starts its processes at the first task
            sides = {
                "plain": lambda: plain_seconds(paths, shards),
                "stage": lambda: stage_seconds(context, folder / "part"),
            }
            measured = harness.measure_in_turn(sides, options.rounds)

    print(f"{len(paths)} {'real' if options.masks else 'synthetic'} masks with two predictions each")
    medians = harness.print_medians(measured, "s", images=len(paths))
    ratio = medians["plain"] / medians["stage"]
    print(f"ratio {ratio:.2f} target {TARGET}: images/s of the stage evaluate, relative to plain decoding and counting")


if __name__ == "__main__":
    main()

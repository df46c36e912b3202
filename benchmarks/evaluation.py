"""Predicted masks a second that the stage `evaluate` scores, of bare processes that decode and count.

Bare processes, as many as cores, read and decode each truth and its two predictions, and count their pixels by the same
functions; their sums are added up at the end. The stage is all that `evaluate` does, from the rows of the index to the
written scores, in a Ray that is up. With --masks, of real masks; without, of drawn ones.
"""

import dataclasses
import shutil
import tempfile
import time
from pathlib import Path

import machine
import masks
import numpy as np
import pyarrow.parquet as pq

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.images.decode import decode_labels
from mcis.models.counts import MASK_PARTS, add_counts, mask_counts
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.context import RunContext
from mcis.platform.stages import evaluation

TARGET = 0.9
K = len(VOC_CLASSES)


def bare(paths: list[Path], shards: list[Path]) -> float:
    """Seconds of the bare processes."""
    files = {path.stem: path for path in paths}
    with machine.processes() as pool:
        began = time.perf_counter()
        sum(pool.imap_unordered(_count, [(files, shard) for shard in shards]))
        return time.perf_counter() - began


def _count(work: tuple[dict[str, Path], Path]) -> np.ndarray:
    files, shard = work
    totals = np.zeros((2, MASK_PARTS, K + 1, K + 1), np.int64)
    for row in pq.read_table(shard).to_pylist():
        truth = decode_labels(files[row["image_id"]].read_bytes())
        pngs = (row["plain"], row["crf"])
        for total, counts in zip(totals, mask_counts(truth, map(decode_labels, pngs), K), strict=True):
            add_counts(total, counts)
    return totals


def stage(context: RunContext, part: Path) -> float:
    """Seconds of the stage."""
    began = time.perf_counter()
    evaluation.run(resolve("voc", "scratch").config, dataclasses.replace(context, part=part))
    seconds = time.perf_counter() - began
    shutil.rmtree(part)
    return seconds


def main() -> None:
    """Measures both sides in turn and prints the ratio of their medians."""
    parser = masks.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(machine.describe())
    with tempfile.TemporaryDirectory() as folder:
        paths = masks.find_or_draw(given.masks, given.images, Path(folder) / "masks")
        context = masks.evaluable(Path(folder) / "workspace", paths)
        shards = sorted((context.inputs["predict"] / "predictions").glob("*.parquet"))
        with ray_session(resolve("voc", "scratch").config.compute):
            stage(context, Path(folder) / "warm-up")  # Ray starts its processes at the first task
            sides = {"bare": lambda: bare(paths, shards), "stage": lambda: stage(context, Path(folder) / "part")}
            measured = machine.in_turn(sides, given.rounds)
    print(f"{len(paths)} {'real' if given.masks else 'drawn'} masks, two predictions of each")
    medians = machine.medians(measured, "s", images=len(paths))
    ratio = medians["bare"] / medians["stage"]
    print(f"ratio {ratio:.2f} target {TARGET}: images/s of the stage evaluate, of bare decoding and counting")


if __name__ == "__main__":
    main()

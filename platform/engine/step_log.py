"""Writes the log of a training's steps as JSON lines, measures its throughput, and judges whether its loss fell."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mcis.platform.runs.files import write_text
from mcis.platform.runs.progress import read_records

STEPS = "steps.jsonl"
"""The file of the log in the folder of a training."""
_MIN_WRITE_INTERVAL = 2.0
"""Minimum seconds between two times that the log is written."""
_MIN_RECORDS = 20
"""Minimum number of records by which the loss is judged."""
_SIGNIFICANCE = 0.05
"""Probability with which losses without a trend seem to fall steadily."""
_MEDIAN_OF_NORMAL = 0.6745
"""Median of the absolute value of a normal variable with standard deviation 1."""


class StepLog:
    """The log of a training. After a restart it is cut back to the last checkpoint.

    The whole file is written aside and renamed: by `flush`, and every few seconds, but for at most 5 % of the time.

    Args:
        path: The file.
        start: Number of steps in the checkpoint. Records of later steps are removed.
    """

    def __init__(self, path: Path, start: int):
        self.path = path
        self.lines = [f"{json.dumps(record)}\n" for record in read_records(path) if record["step"] <= start]
        self.flush()

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record."""
        self.lines.append(f"{json.dumps(record)}\n")
        if time.monotonic() - self.last_write_time > max(_MIN_WRITE_INTERVAL, 20 * self.write_seconds):
            self.flush()

    def flush(self) -> None:
        """Writes all records to the file before it returns."""
        start_time = time.monotonic()
        write_text(self.path, "".join(self.lines))
        self.last_write_time = time.monotonic()
        self.write_seconds = self.last_write_time - start_time


class Throughput:
    """Measures images per second, and the fraction of the time spent waiting for data.

    An interval lasts from `restart` to the next record. A validation between two intervals is part of neither.

    Args:
        done: Number of steps before the first interval.
        images_per_step: Number of images in a step, over all workers.
    """

    def __init__(self, done: int, images_per_step: int):
        self.images_per_step = images_per_step
        self.restart(done)

    def restart(self, done: int) -> None:
        """Starts the next interval after `done` steps."""
        self.start_time = time.monotonic()
        self.start_step = done
        self.waiting_seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the block as waiting."""
        start_time = time.monotonic()
        yield
        self.waiting_seconds += time.monotonic() - start_time

    def record(self, done: int) -> dict[str, float]:
        """Returns fields of a record about the interval that ends now, after `done` steps."""
        seconds = max(time.monotonic() - self.start_time, 1e-9)
        return {
            "images_per_second": (done - self.start_step) * self.images_per_step / seconds,
            "waiting": self.waiting_seconds / seconds,
            "time": time.time(),
        }


class LossTrend(NamedTuple):
    """Whether a loss fell.

    Attributes:
        fell: Whether it fell by more than twice the standard error, or steadily.
        text: The numbers, for messages.
    """

    fell: bool
    text: str


def loss_trend(folder: Path, term: str) -> LossTrend | None:
    """Judges by the log of a training whether a term of its loss fell.

    A record is about one batch, so losses vary. The loss fell if one of these holds:

    - The means over the first and the last tenth of the records, but at least five, differ by more than twice the
      standard error. The standard deviation is estimated from the median difference of successive records, which
      neither a trend nor single batches with a high loss affect much. This finds a fall at the beginning.
    - Later records tend to be lower, by Kendall's rank test at 5 %. This finds a slow fall of uneven batches.

    Args:
        folder: The folder of the training.
        term: The name of the term in the log.

    Returns:
        None if the log is too short.
    """
    from scipy.stats import kendalltau

    values = np.array([record[term] for record in read_records(folder / STEPS)])
    if len(values) < _MIN_RECORDS:
        return None

    count = max(len(values) // 10, 5)
    first = float(values[:count].mean())
    last = float(values[-count:].mean())
    deviation = np.median(np.abs(np.diff(values))) / (_MEDIAN_OF_NORMAL * np.sqrt(2))
    standard_error = float(deviation * np.sqrt(2 / count))

    fell = first - last > 2 * standard_error
    if not fell:
        rank_test = kendalltau(np.arange(len(values)), values, alternative="less")
        fell = bool(rank_test.pvalue < _SIGNIFICANCE)
    return LossTrend(
        fell,
        f"the mean loss was {first:.4g} over the first {count} of {len(values)} records and {last:.4g} over the last "
        f"{count}: {'a' if fell else 'no'} significant decrease (standard error {standard_error:.2g})",
    )

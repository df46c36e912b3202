"""The log of a training's steps, one JSON line each: the throughput that it records, and whether its loss fell."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mcis.platform.runs.files import write_text
from mcis.platform.runs.progress import read_records

STEPS = "steps.jsonl"
_EVERY = 2.0
"""Seconds between two times that the log is written."""
_RECORDS = 20
"""Records of a log from which its loss is judged."""


class StepLog:
    """The log of a training, which is cut back to the last checkpoint after a restart.

    The whole of it is written, aside and renamed, every few seconds, in a twentieth of the time, and by `flush`.

    Args:
        start: updates that the checkpoint has done; records of later ones are removed.
    """

    def __init__(self, path: Path, start: int):
        self.path = path
        self.lines = [f"{json.dumps(record)}\n" for record in read_records(path) if record["step"] <= start]
        self.flush()

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record."""
        self.lines.append(f"{json.dumps(record)}\n")
        if time.monotonic() - self.written > max(_EVERY, 20 * self.took):
            self.flush()

    def flush(self) -> None:
        """Has all records where the log lies when it returns."""
        began = time.monotonic()
        write_text(self.path, "".join(self.lines))
        self.written = time.monotonic()
        self.took = self.written - began


class Throughput:
    """Measures images per second and the fraction of the time spent waiting for data.

    An interval lasts from `restart` to the next record; a validation between two intervals belongs to neither.

    Args:
        done: updates before the first interval.
        images_per_step: over all workers.
    """

    def __init__(self, done: int, images_per_step: int):
        self.images_per_step = images_per_step
        self.restart(done)

    def restart(self, done: int) -> None:
        """Begins the next interval."""
        self.began, self.done, self.waited = time.monotonic(), done, 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block's time as waiting."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    def record(self, done: int) -> dict[str, float]:
        """The interval that ends now, with `done` updates, as fields of a record."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        return {
            "images_per_second": (done - self.done) * self.images_per_step / seconds,
            "waiting": self.waited / seconds,
            "time": time.time(),
        }


def loss_trend(folder: Path, term: str) -> tuple[bool, str] | None:
    """Whether a term of the loss fell in the log of a training's folder, and the figures, for messages.

    The means over the first and the last tenth of the log's records, five at least, are compared: a record is of one
    batch. It fell where their difference is more than twice its standard error, whose deviation is taken from
    successive records, which a trend hardly changes.

    Returns:
        None where the log is too short to tell.
    """
    values = np.array([record[term] for record in read_records(folder / STEPS)])
    if len(values) < _RECORDS:
        return None
    few = max(len(values) // 10, 5)
    first, last = float(values[:few].mean()), float(values[-few:].mean())
    error = float(np.sqrt(np.square(np.diff(values)).mean() / 2) * np.sqrt(2 / few))
    fell = first - last > 2 * error
    return fell, (
        f"the loss was {first:.4g} in the first {few} of {len(values)} records and {last:.4g} in the last, "
        f"{'a fall' if fell else 'no fall'} by more than twice the standard error of {error:.2g}"
    )

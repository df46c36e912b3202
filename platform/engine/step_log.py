"""The log of a training's steps, one JSON line each, and the throughput and waiting time that it records."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcis.datasets.storage.copies import fetched, in_bucket, is_there
from mcis.platform.runs.files import write_text

STEPS = "steps.jsonl"
_EVERY = 5.0
"""Seconds between two times that a log goes to a bucket."""


class StepLog:
    """Appends to the log, which is cut back to the last checkpoint after a restart.

    A record is on disk when `write` returns. In a bucket, where nothing can be appended to, the whole log is written
    again, at most every few seconds, and by `flush`.

    Args:
        start: updates that the checkpoint has done; records of later ones are removed.
    """

    def __init__(self, path: Path, start: int):
        self.path, self.sent = path, 0.0
        kept = []
        if is_there(path):
            for line in fetched(path).read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    break  # the line that a kill cut
                if record["step"] <= start:
                    kept.append(line + "\n")
        write_text(path, "".join(kept))
        self.lines = kept if in_bucket(path) else None
        self.file = path.open("a", buffering=1) if self.lines is None else None

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record."""
        line = json.dumps(record) + "\n"
        if self.file is not None:
            self.file.write(line)
        elif self.lines is not None:
            self.lines.append(line)
            if time.monotonic() - self.sent > _EVERY:
                self.flush()

    def flush(self) -> None:
        """Has all records where the log lies when it returns."""
        if self.lines is not None:
            write_text(self.path, "".join(self.lines))
            self.sent = time.monotonic()


class Throughput:
    """Measures images per second and the fraction of the time spent waiting for data.

    An interval lasts from `restart` to the next record; a validation between two intervals belongs to neither.

    Args:
        done: updates before the first interval.
        images_per_step: over all workers.
    """

    def __init__(self, done: int, images_per_step: int):
        self.images_per_step = images_per_step
        self.began = self.interval_began = time.monotonic()
        self.done = done
        self.waited = self.waited_before = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block's time as waiting."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    def record(self, done: int) -> dict[str, float]:
        """The interval that ends now, with `done` updates, as fields of a record."""
        now = time.monotonic()
        return {
            "images_per_second": (done - self.done) * self.images_per_step / (now - self.interval_began),
            "waiting": self.waited / max(now - self.interval_began, 1e-9),
            "time": time.time(),
        }

    def restart(self, done: int) -> None:
        """Begins the next interval."""
        self.interval_began, self.done = time.monotonic(), done
        self.waited_before, self.waited = self.waited_before + self.waited, 0.0

    def total(self) -> tuple[float, float]:
        """Seconds since the beginning, and the fraction of them spent waiting in the intervals that have ended."""
        seconds = time.monotonic() - self.began
        return seconds, self.waited_before / max(seconds, 1e-9)

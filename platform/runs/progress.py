"""Shows progress: bars on a terminal; in a log, one line every ten seconds at most. Reads step logs of trainings."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from mcis.datasets.errors import UserError, printable
from mcis.datasets.storage.folders import fetch_file

Item = TypeVar("Item")


class _PrintableConsole(Console):
    """A console that escapes control characters and ignores markup, because printed names come from outside."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)


LOG_SECONDS = 10.0
"""Minimum time in seconds between two lines of one task in a log. A task also prints at most 100 lines."""
console = _PrintableConsole(soft_wrap=True)


class _Rate(ProgressColumn):
    def render(self, task: Any) -> Text:
        unit = task.fields.get("unit", "")
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} {unit}/s" if speed else f"-- {unit}/s")


class Bar:
    """Progress of one task; created by `bar`."""

    def __init__(self, label: str, total: int, unit: str, progress: Progress | None):
        self.label = label
        self.total = total
        self.unit = unit
        self.progress = progress
        self.task = progress.add_task(label, total=total, unit=unit, note="") if progress else None
        self.start_time = time.monotonic()
        self.start_done: int | None = None
        self.last_line_time = self.start_time
        self.next_line_at = 0.0

    def update(self, done: int, note: str = "") -> None:
        """Shows that `done` of `total` units are done, with a short note such as the loss."""
        if self.progress and self.task is not None:
            self.progress.update(self.task, completed=done, note=note)
            return

        now = time.monotonic()
        if self.start_done is None:
            # A resumed task first reports what earlier calls did. The rate counts only what this call does.
            self.start_done = 0
            if now < self.start_time + LOG_SECONDS:
                self.start_done = done
                self.start_time = now
        if now < self.last_line_time + LOG_SECONDS or done < self.next_line_at:
            return
        self.last_line_time = now
        self.next_line_at = done + self.total / 100
        rate = (done - self.start_done) / max(now - self.start_time, 1e-6)
        seconds_left = (self.total - done) / max(rate, 1e-6)
        time_left = f"{seconds_left:.0f} s" if seconds_left < 3600 else f"{seconds_left / 3600:.1f} h"
        line = f"  {self.label}: {done}/{self.total} {rate:.1f} {self.unit}/s, {time_left} left {note}"
        console.print(line.rstrip())


@contextlib.contextmanager
def bar(label: str, total: int, unit: str) -> Iterator[Bar]:
    """Shows a progress bar over `total` units of work during the block."""
    if not console.is_terminal:
        yield Bar(label, total, unit, None)
        return
    columns = (
        TextColumn("  {task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        yield Bar(label, total, unit, progress)


def counted(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """Yields the items, one per image, and shows a progress bar."""
    with bar(label, total, "images") as progress:
        for done, item in enumerate(items, 1):
            yield item
            progress.update(done)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a JSON lines file; empty if the file does not exist."""
    records, _ = read_new_records(path, LogPosition())
    return records


class LogPosition(NamedTuple):
    """The end of a record in a JSON lines file, from which a later call reads the records that were added.

    Attributes:
        num_records: Number of records before it.
        num_bytes: Number of bytes before it.
        last_line: The line that ends there. If the file has another line there, it was cut and written again.
    """

    num_records: int = 0
    num_bytes: int = 0
    last_line: bytes = b""


def read_new_records(path: Path, position: LogPosition) -> tuple[list[dict[str, Any]], LogPosition]:
    """Reads the records of a JSON lines file after a position; none if the file does not exist.

    A restart cuts the log of a training and writes its last records again. Such a file is read from the start, without
    the first `position.num_records` records.

    Returns:
        The records, and the position after them.
    """
    try:
        with fetch_file(path).open("rb") as file:
            file.seek(position.num_bytes - len(position.last_line))
            is_unchanged = file.read(len(position.last_line)) == position.last_line
            start = position if is_unchanged else LogPosition()
            file.seek(start.num_bytes)
            content = file.read()
    except FileNotFoundError:
        return [], position

    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)  # without a line that is being written
    new_lines = lines[position.num_records - start.num_records :]
    if not new_lines:
        return [], position

    num_records = start.num_records + len(lines)
    num_bytes = start.num_bytes + sum(map(len, lines))
    return [json.loads(line) for line in new_lines], LogPosition(num_records, num_bytes, new_lines[-1])


@contextlib.contextmanager
def follow(path: Path, on_records: Callable[[list[dict[str, Any]]], None], every: float = 1.0) -> Iterator[None]:
    """During the block, a thread passes new records of a JSON lines file to `on_records`.

    Each record is read and passed once, even if a restart truncates the file and writes its last records again.

    Args:
        every: Seconds between two reads of the file.
    """
    stop = threading.Event()

    def read_until_stopped() -> None:
        position = LogPosition()
        stopping = False
        while not stopping:
            stopping = stop.wait(every)
            with contextlib.suppress(UserError, OSError):  # remote storage may be unreachable until the next read
                records, end = read_new_records(path, position)
                if records:
                    on_records(records)
                    position = end

    thread = threading.Thread(target=read_until_stopped, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=60)

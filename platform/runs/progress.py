"""Progress bars with rate and time left on a terminal; a line every ten seconds at most in a log."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from mcis.datasets.errors import UserError, printable
from mcis.datasets.storage.folders import fetched

Item = TypeVar("Item")


class _PrintableConsole(Console):
    """A console whose lines hold nothing that a terminal obeys, and `[/x]` as it stands: names come from outside."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **options)


LOG_SECONDS = 10.0
"""Least time between two lines of one piece of work in a log, of which there are 100 at most."""
console = _PrintableConsole(soft_wrap=True)


class _Rate(ProgressColumn):
    def render(self, task: Any) -> Text:
        unit = task.fields.get("unit", "")
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} {unit}/s" if speed else f"-- {unit}/s")


class Bar:
    """The progress of one piece of work; made by `bar`."""

    def __init__(self, label: str, total: int, unit: str, progress: Progress | None):
        self.label, self.total, self.unit, self.progress = label, total, unit, progress
        self.task = progress.add_task(label, total=total, unit=unit, note="") if progress else None
        self.began = self.told = time.monotonic()
        self.next = 0.0

    def update(self, done: int, note: str = "") -> None:
        """Shows that `done` units of the total are done, with a short note such as the loss."""
        if self.progress and self.task is not None:
            self.progress.update(self.task, completed=done, note=note)
        elif (now := time.monotonic()) >= self.told + LOG_SECONDS and done >= self.next:
            self.told, self.next, rate = now, done + self.total / 100, done / max(now - self.began, 1e-6)
            left = (self.total - done) / max(rate, 1e-6)
            console.print(f"  {self.label}: {done}/{self.total} {rate:.1f} {self.unit}/s, {left:.0f} s left {note}")


@contextlib.contextmanager
def bar(label: str, total: int, unit: str) -> Iterator[Bar]:
    """Shows a bar over `total` units of work while the block runs."""
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
    """Images, with a bar over the work on each."""
    with bar(label, total, "images") as progress:
        for done, item in enumerate(items, 1):
            yield item
            progress.update(done)


def read_records(path: Path, skip: int = 0) -> list[dict[str, Any]]:
    """The records of a JSON lines file, but for the first ones; none of an absent file."""
    try:
        lines = fetched(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[skip:]]


@contextlib.contextmanager
def follow(path: Path, on_records: Callable[[list[dict[str, Any]]], None], every: float = 1.0) -> Iterator[None]:
    """Passes the records that a JSON lines file gets to `on_records`, in a thread, while the block runs.

    Each record is passed once, also where a restart cuts the file back and writes the last ones again.

    Args:
        every: seconds between two looks at the file.
    """
    stop = threading.Event()

    def loop() -> None:
        passed, last = 0, False
        while not last:
            last = stop.wait(every)
            with contextlib.suppress(UserError, OSError):  # a bucket may be away until the next look
                if records := read_records(path, passed):
                    on_records(records)
                    passed += len(records)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=60)

"""Progress: each record of a growing file is read once, and lines of a log."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcis.datasets.sources.tagged import list_tagged
from mcis.platform.config.resolve import resolve
from mcis.platform.reporting.expectations import expectations
from mcis.platform.runs import progress
from mcis.platform.runs.progress import LogPosition, bar, follow, read_new_records

EVERY = 0.01


def test_no_line_contains_control_sequences_of_terminals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in a class name from a table of tags nor in a note."""
    (tmp_path / "t.csv").write_text("image,tags\na.jpg,cat\x1b[31m\x07\nb.jpg,d\u202eog\n", encoding="utf-8")
    for line in expectations(resolve("voc", "scratch").config, list_tagged(tmp_path / "t.csv")):
        progress.console.print(line)
    progress.console.print("[bold]note[/bold]: \x9b31m\n\tmore [/x] :cat:")
    shown = capsys.readouterr().out
    assert "cat?[31m? (1), d?og (1)" in shown
    assert "[bold]note[/bold]: ?31m\n" in shown
    assert "more [/x] :cat:" in shown
    assert all(c.isprintable() or c == "\n" for c in shown.expandtabs())


def lines(*steps: int) -> bytes:
    return b"".join(json.dumps({"step": step}).encode() + b"\n" for step in steps)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(EVERY / 2)


class Steps:
    """The records that `follow` returned, step by step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, records: list[dict[str, Any]]) -> None:
        self.seen += [record["step"] for record in records]


# --- following


def test_every_record_is_returned_once(tmp_path: Path) -> None:
    path, steps = tmp_path / "steps.jsonl", Steps()
    append(path, lines(1, 2))
    with follow(path, steps, EVERY):
        for step in range(3, 100):
            append(path, lines(step))
            time.sleep(EVERY / 3)
        wait_for(lambda: len(steps.seen) > 50)
        append(path, lines(100))
    assert steps.seen == list(range(1, 101))


def test_the_last_records_are_returned_without_waiting(tmp_path: Path) -> None:
    path, steps = tmp_path / "steps.jsonl", Steps()
    began = time.monotonic()
    with follow(path, steps, 60):
        append(path, lines(1, 2))
    assert steps.seen == [1, 2]
    assert time.monotonic() - began < 30


def test_records_that_a_restart_repeats_are_not_returned_again(tmp_path: Path) -> None:
    path, steps = tmp_path / "steps.jsonl", Steps()
    append(path, lines(1, 2, 3, 4))
    with follow(path, steps, EVERY):
        wait_for(lambda: len(steps.seen) == 4)
        path.write_bytes(lines(1, 2))
        time.sleep(3 * EVERY)
        append(path, lines(3, 4, 5))
        wait_for(lambda: len(steps.seen) == 5)
        append(path, lines(6))
    assert steps.seen == [1, 2, 3, 4, 5, 6]


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    """A long training would otherwise read its whole log each second."""
    path, steps = tmp_path / "steps.jsonl", Steps()
    append(path, lines(1, 2))
    with follow(path, steps, EVERY):
        wait_for(lambda: len(steps.seen) == 2)
        with path.open("r+b") as file:
            file.write(b"not JSON")
        append(path, lines(3))
        wait_for(lambda: len(steps.seen) == 3)
    assert steps.seen == [1, 2, 3]


def test_a_record_is_read_after_its_line_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(lines(1) + lines(2)[:5])
    records, position = read_new_records(path, LogPosition())
    append(path, lines(2)[5:])
    assert records == [{"step": 1}]
    assert read_new_records(path, position)[0] == [{"step": 2}]


def test_a_file_that_was_cut_and_is_longer_again_is_read_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(lines(1, 2, 3))
    _, position = read_new_records(path, LogPosition())
    path.write_bytes(b'{"step": 1, "speed": 1000}\n' + lines(2, 3, 4))
    records, position = read_new_records(path, position)
    assert records == [{"step": 4}]
    append(path, lines(5))
    assert read_new_records(path, position)[0] == [{"step": 5}]


# --- lines


@pytest.mark.parametrize(("seconds", "expected"), [(1, range(10, 401, 10)), (60, range(1, 401, 4)), (0.01, [])])
def test_a_log_gets_at_most_one_line_per_ten_seconds_and_per_hundredth(
    seconds: float, expected: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = (seconds * n for n in itertools.count())
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    with bar("classifier", 400, "images") as shown:
        for done in range(1, 401):
            shown.update(done, "loss 0.5")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == [f"{done}/400" for done in expected]
    assert all("images/s" in line and " left loss 0.5" in line for line in printed)


@pytest.mark.parametrize(
    ("seconds", "updates", "expected"),
    [
        (
            (0, 1, 21, 41),
            (1440, 1480, 1520),
            ("1480/3200 2.0 images/s, 860 s left", "1520/3200 2.0 images/s, 840 s left"),
        ),
        ((0, 20, 40), (80, 160), ("80/3200 4.0 images/s, 780 s left", "160/3200 4.0 images/s, 760 s left")),
    ],
    ids=["resumed", "from the start"],
)
def test_the_rate_counts_only_the_units_of_this_call(
    seconds: tuple[float, ...],
    updates: tuple[int, ...],
    expected: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter(seconds)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    with bar("classifier", 3200, "images") as shown:
        for done in updates:
            shown.update(done)
    assert capsys.readouterr().out.splitlines() == [f"  classifier: {line}" for line in expected]

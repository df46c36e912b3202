"""What commands print: scores with what they mean, and text from outside that is no markup."""

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcis.platform.commands import terminal
from mcis.platform.runs.scores import Score
from mcis.platform.runs.workspace import RunFolder

HOSTILE = "photos[/x][red]"


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """What the module prints on a wide terminal."""
    stream = StringIO()
    monkeypatch.setattr(terminal, "console", type(terminal.console)(file=stream, width=400))
    return stream


def test_scores_are_shown_with_what_they_mean_and_paths_as_they_are(printed: StringIO) -> None:
    origin: dict[str, Any] = {"seed": 0, "recipe": "scratch", "weights": "none", "git": None}
    score = Score(
        what="localization_maps",
        name=HOSTILE,
        split="train",
        images=9,
        miou=50.125,
        iou={},
        figures={},
        confusion=(),
        threshold=0.5,
        related=3,
        method="co-attention",
        **origin,
    )
    root = Path("/w") / HOSTILE
    context: Any = SimpleNamespace(name="first", folder=RunFolder(root / "runs" / "first"))
    context.seconds, context.computed = {"index": 1.0, "localize": 2.0}, {"index": False, "localize": True}
    context.workspace = SimpleNamespace(root=root)
    terminal.show_result(cast(Any, SimpleNamespace(context=context, scores=[score])))
    lines = printed.getvalue().splitlines()
    row, meaning = (line for line in lines if "localization maps" in line)
    cells = ["localization maps", HOSTILE, "train, 9", "50.12", "-"]
    assert [cell.strip() for cell in row.strip("│").split("│")] == cells
    assert meaning == f"localization maps, {HOSTILE}: threshold 0.5, related images 3, method co-attention"
    assert f"report:  /w/{HOSTILE}/runs/first/report.html" in lines
    assert "2 s in stages that were computed" in lines


def test_a_table_that_is_too_wide_is_a_line_for_each_row(printed: StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.show_table("wide", ("run", "what", "mIoU"), [("a" * 50, "b" * 50, "1.0"), ("c", "", "2.0")], ["mIoU"])
    assert "- run" not in printed.getvalue()
    monkeypatch.setattr(terminal, "console", type(terminal.console)(file=printed, width=80))
    terminal.show_table("wide", ("run", "what", "mIoU"), [("a" * 50, "b" * 50, "1.0"), ("c", "", "2.0")], ["mIoU"])
    assert printed.getvalue().endswith("\n- run c, mIoU 2.0\n")


def test_a_cell_with_brackets_is_shown_as_it_is(printed: StringIO) -> None:
    terminal.console.print(terminal.table_of("[/title]", ("found",), [[f"/{HOSTILE} is full"]]))
    assert "[/title]" in printed.getvalue()
    assert f"/{HOSTILE} is full" in printed.getvalue()

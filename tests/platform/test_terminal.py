"""The scores that `mcis run` prints."""

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcis.platform.commands import terminal
from mcis.platform.reporting import terminal as reporting_terminal
from mcis.platform.runs.scores import Score
from mcis.platform.runs.workspace import RunFolder

HOSTILE = "photos[/x][red]"


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """The output of the module on a wide terminal."""
    stream = StringIO()
    wide = type(terminal.console)(file=stream, width=400)
    monkeypatch.setattr(terminal, "console", wide)
    monkeypatch.setattr(reporting_terminal, "console", wide)
    return stream


def test_scores_are_printed_with_their_settings_and_paths_without_markup(printed: StringIO) -> None:
    origin: dict[str, Any] = {"seed": 0, "recipe": "scratch", "weights": "none", "git": None}
    score = Score(
        output="localization_maps",
        name=HOSTILE,
        split="train",
        images=9,
        miou=50.125,
        iou={},
        label_scores={},
        confusion=(),
        threshold=0.5,
        related=3,
        method="co-attention",
        **origin,
    )
    root = Path("/w") / HOSTILE
    context: Any = SimpleNamespace(name="first", folder=RunFolder(root / "runs" / "first"))
    context.seconds = {"index": 1.0, "localize": 2.0}
    context.computed = {"index": False, "localize": True}
    context.workspace = SimpleNamespace(root=root)
    terminal.show_result(cast(Any, SimpleNamespace(context=context, scores=[score])))

    lines = printed.getvalue().splitlines()
    row, meaning = (line for line in lines if "localization maps" in line)
    assert row.split() == ["localization", "maps", HOSTILE, "train", "9", "50.12"]
    term = f"localization maps, {HOSTILE}"
    assert meaning.split() == f"{term} threshold 0.5, related images 3, method co-attention".split()
    assert f"report:  /w/{HOSTILE}/runs/first/report.html" in lines
    assert f"MLflow:  mcis ui --workspace '/w/{HOSTILE}'" in lines, "a shell reads the path as one word"
    assert "2 s in stages that were computed" in lines

"""Tables and pictures of studies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mcis.platform.reporting import terminal
from mcis.tuning.definition import Case
from mcis.tuning.figures import Figures, PairedDifference, caption
from mcis.tuning.tables import cases_picture, cases_table, differences_table


def figures(group: str, name: str, miou: dict[str, list[float]], related: int = 0, **more: Any) -> Figures:
    how = {"sources": "voc", "inference": f"by {name}", "until": "evaluate", **more}
    seeds = list(range(max(map(len, miou.values()), default=0)))
    return Figures(case=Case(name=name, group=group, related=related, **how), seeds=seeds, miou=miou)


EFFECT = [
    figures("none", "none-single", {"pseudo masks": [10.0, 12.0]}, paper=61.7),
    figures("co", "co-itself", {"pseudo masks": [20.0, 20.0], "segmentation, CRF": [30.0, 33.0]}, related=1),
]


def test_the_table_has_mean_and_deviation_what_maps_decide_and_only_columns_that_were_reached() -> None:
    heads, rows = cases_table([replace(EFFECT[0], shares={"found": [12.0, 13.0]}), EFFECT[1]])
    assert heads == ("case", "maps by", "masks", "+CRF", "found", "paper")
    assert rows == [
        ("none-single", "by none-single", "11.00 ±1.41", "-", "12.5", "61.7"),
        ("co-itself", "by co-itself", "20.00 ±0.00", "31.50 ±2.12", "-", "-"),
    ]
    assert "found" not in cases_table(EFFECT)[0]


def test_a_narrow_terminal_wraps_text_and_keeps_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Console(width=80)
    monkeypatch.setattr(terminal, "console", narrow)
    masks = {"localization maps": [58.0, 59.0], "pseudo masks": [67.0, 68.0], "segmentation, CRF": [60.0, 62.0]}
    shares = {name: [50.0] for name in ("found", "exact", "mAP")}
    with narrow.capture() as capture:
        heads, rows = cases_table([replace(figures("co", "co-related", masks), shares=shares)])
        terminal.print_table("title", heads, rows, numbers=heads[2:])
    shown = capture.get()
    assert max(map(len, shown.splitlines())) <= 80
    assert "58.50 ±0.71" in shown
    assert "67.50 ±0.71" in shown


def test_differences_have_their_own_deviation_a_sign_and_an_interval_which_says_none_where_it_holds_0() -> None:
    """Both cases may vary by far more than their difference."""
    masks, maps = "pseudo masks", "localization maps"
    case = figures("co", "co-r3", {}).case.model_copy(update={"against": "co-itself", "shows": "other images"})
    intervals_of = {masks: [0.25, 2.75], maps: [-0.5, 1.5]}
    miou = {masks: [1.0, 2.0], maps: [0.5, 0.5]}
    found = PairedDifference(of=case, seeds=[0, 1], miou=miou, intervals=intervals_of)
    heads, rows = differences_table([found])
    assert "+CRF" not in heads
    assert rows == [
        ("co-r3 - co-itself", "other images", "+0.50 ±0.00 (none: -0.5 to +1.5)", "+1.50 ±0.71 (+0.2 to +2.8)")
    ]


def test_a_picture_has_a_plot_a_column(tmp_path: Path) -> None:
    """Also where a case has no figure in a column, and where no trial ended well."""
    for number, some in enumerate((EFFECT, EFFECT[:1], [])):
        cases_picture(some, tmp_path / f"{number}.png", "name", caption({}))
    whole, one, none = ((tmp_path / f"{number}.png").stat().st_size for number in range(3))
    assert whole > one > none

"""Tables and pictures of studies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcis.tuning.definition import Case
from mcis.tuning.figures import Figures, PairedDifference, caption
from mcis.tuning.tables import cases_picture, cases_table, differences_table


def figures(group: str, name: str, miou: dict[str, list[float]], related: int = 0, **more: Any) -> Figures:
    how = {"setting": "voc", "inference": f"by {name}", "until": "evaluate", **more}
    seeds = list(range(max(map(len, miou.values()), default=0)))
    return Figures(case=Case(name=name, group=group, related=related, **how), seeds=seeds, miou=miou)


def lines(table: Table, width: int = 200) -> list[str]:
    """The table's head and rows."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return [line for line in capture.get().splitlines() if "┃" in line or "│" in line]


EFFECT = [
    figures("none", "none-single", {"pseudo masks": [10.0, 12.0]}, paper=61.7),
    figures("co", "co-itself", {"pseudo masks": [20.0, 20.0], "segmentation, CRF": [30.0, 33.0]}, related=1),
]


def test_the_table_has_mean_and_deviation_what_maps_decide_and_only_columns_that_were_reached() -> None:
    head, *rows = lines(cases_table([replace(EFFECT[0], shares={"found": [12.0, 13.0]}), EFFECT[1]], "title"))
    names = ["case", "maps by", "pseudo masks", "with CRF", "found", "paper"]
    assert [text.strip() for text in head.split("┃")[1:-1]] == names
    assert [[text.strip() for text in row.split("│")[1:-1]] for row in rows] == [
        ["none-single", "by none-single", "11.00 ±1.41", "-", "12.5", "61.7"],
        ["co-itself", "by co-itself", "20.00 ±0.00", "31.50 ±2.12", "-", "-"],
    ]
    assert "found" not in lines(cases_table(EFFECT, "title"))[0]


def test_a_narrow_terminal_cuts_no_name() -> None:
    few = [figures("co", "co-contrastive-wrong-class-r3", {"pseudo masks": [1.0]})]
    assert "…" not in "".join(lines(cases_table(few, "title"), width=50))
    two = figures("co", "co-related", {"localization maps": [58.0, 59.0], "pseudo masks": [67.0, 68.0]})
    shares = {name: [50.0] for name in ("found", "exact", "mAP")}
    rows = (row.split("│")[1:3] for row in lines(cases_table([replace(two, shares=shares)], "title"), 80)[1:])
    assert ["".join(map(str.strip, column)) for column in zip(*rows, strict=True)] == ["co-related", "byco-related"]


def test_differences_have_their_own_deviation_a_sign_and_an_interval_which_says_none_where_it_holds_0() -> None:
    """Both cases may vary by far more than their difference."""
    masks, maps = "pseudo masks", "localization maps"
    case = figures("co", "co-r3", {}).case.model_copy(update={"against": "co-itself", "shows": "other images"})
    intervals_of = {masks: [0.25, 2.75], maps: [-0.5, 1.5]}
    miou = {masks: [1.0, 2.0], maps: [0.5, 0.5]}
    found = PairedDifference(of=case, seeds=[0, 1], miou=miou, intervals=intervals_of)
    head, row, intervals = lines(differences_table([found], "title"))
    assert "with CRF" not in head
    assert [text.strip() for text in row.split("│")[1:-1]] == [
        "co-r3 - co-itself", "other images", "+0.50 ±0.00", "+1.50 ±0.71",
    ]  # fmt: skip
    assert [text.strip() for text in intervals.split("│")[1:-1]] == ["", "", "none: -0.5 to +1.5", "+0.2 to +2.8"]


def test_a_picture_has_a_plot_a_column(tmp_path: Path) -> None:
    """Also where a case has no figure in a column, and where no trial ended well."""
    for number, some in enumerate((EFFECT, EFFECT[:1], [])):
        cases_picture(some, tmp_path / f"{number}.png", "name", caption({}))
    whole, one, none = ((tmp_path / f"{number}.png").stat().st_size for number in range(3))
    assert whole > one > none

"""Tables and pictures of studies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcis.tuning.cases import Case, Difference
from mcis.tuning.figures import Figures, PairedDifference, caption
from mcis.tuning.pictures import cases_picture, related_images_picture
from mcis.tuning.tables import cases_table, differences_table, related_images_table


def figures(training: str, name: str, miou: dict[str, list[float]], related: int = 0, **more: Any) -> Figures:
    case = Case(
        name=name,
        group=training,
        setting="voc",
        inference=f"by {name}",
        related=related,
        values={},
        until="evaluate",
        **more,
    )
    seeds = list(range(max(map(len, miou.values()), default=0)))
    return Figures(case=case, seeds=seeds, miou=miou, by_maps=[])


def lines(table: Table) -> list[str]:
    """The table's head and rows."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return [line for line in capture.get().splitlines() if "┃" in line or "│" in line]


EFFECT = [
    figures("none", "none-single", {"pseudo masks": [10.0, 12.0]}, paper=61.7),
    figures("co", "co-itself", {"pseudo masks": [20.0, 20.0], "segmentation, CRF": [30.0, 33.0]}, related=1),
]


def test_the_table_has_a_row_a_number_and_the_papers_column() -> None:
    table = related_images_table(
        [figures("co", "r3", {}, 3, paper=66.2), figures("co", "r0", {"pseudo masks": [12.345]}, paper=64.7)], "title"
    )
    _, *rows = lines(table)
    assert "12.3" in rows[0]
    assert "64.7" in rows[0]
    assert "66.2" in rows[1]


def test_the_table_of_effects_has_mean_and_deviation_and_only_columns_that_were_reached() -> None:
    head, *rows = lines(cases_table(EFFECT, "title"))
    assert "pseudo masks" in head
    assert "segments" not in head
    assert "maps" not in head.replace("pseudo masks", "").replace("maps by", "")
    assert "none-single" in rows[0]
    assert "11.00 ±1.41" in rows[0]
    assert "61.7" in rows[0]
    assert "by co-itself" in rows[1]
    assert "20.00 ±0.00" in rows[1]
    assert "31.50 ±2.12" in rows[1]


def test_the_table_of_effects_says_what_maps_decide() -> None:
    head, first, second = lines(cases_table([replace(EFFECT[0], by_maps=[12.0, 13.0]), EFFECT[1]], "title"))
    assert "decided by maps, %" in head
    assert "12.5" in first
    assert "12.5" not in second


def test_a_narrow_terminal_cuts_no_name() -> None:
    console = Console(width=50)
    with console.capture() as capture:
        console.print(cases_table([figures("co", "co-contrastive-wrong-class-r3", {"pseudo masks": [1.0]})], "title"))
    assert "…" not in capture.get()


def test_the_table_of_differences_has_their_own_deviation_and_a_sign() -> None:
    """Both cases may vary by far more than their difference."""
    of = Difference(case="co-r3", control="co-itself", shows="other images")
    head, row = lines(
        differences_table([PairedDifference(of=of, seeds=[0, 1], miou={"pseudo masks": [1.0, 2.0]})], "title")
    )
    assert "with CRF" not in head
    assert "co-r3 - co-itself" in row
    assert "other images" in row
    assert "+1.50 ±0.71" in row


def test_a_difference_has_its_interval_which_says_none_where_it_holds_0() -> None:
    masks, maps = "pseudo masks", "localization maps"
    of = Difference(case="co-r3", control="co-itself", shows="other images")
    intervals = {masks: [0.25, 2.75], maps: [-0.5, 1.5]}
    found = PairedDifference(
        of=of, seeds=[0], miou={masks: [1.5], maps: [0.5], "segmentation, CRF": [3.0]}, intervals=intervals
    )
    text = "\n".join(lines(differences_table([found], "title")))
    assert "+0.2 to +2.8" in text
    assert "none: -0.5 to +1.5" in text
    assert text.count(" to ") == 2


def test_a_picture_has_a_plot_a_column(tmp_path: Path) -> None:
    """Also where a case has no figure in a column, and where no trial ended well."""
    for number, some in enumerate((EFFECT, EFFECT[:1], [])):
        path = tmp_path / f"{number}.png"
        cases_picture(some, path, "name", caption({}))
        assert path.read_bytes()[:4] == b"\x89PNG"
    assert (
        (tmp_path / "0.png").stat().st_size > (tmp_path / "1.png").stat().st_size > (tmp_path / "2.png").stat().st_size
    )
    related_images_picture([figures("co", "r0", {"pseudo masks": [12.3]})], tmp_path / "r.png", "name", "")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"

"""Tables, CSV and plots of studies."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mcis.platform.reporting import terminal
from mcis.platform.reporting.comparison_tables import Table
from mcis.platform.runs.scores import format_count
from mcis.tuning.case_scores import CaseScores, PairedDifference
from mcis.tuning.definition import StudyCase
from mcis.tuning.table_formats import latex, markdown
from mcis.tuning.tables import (
    cases_csv,
    cases_table,
    differences_table,
    plot_cases,
    ranks_of_methods,
    seeds_table,
    summary_csv,
    written_tables,
)

MAPS = "localization maps"
MASKS = "pseudo masks"
CRF = "segmentation, CRF"
PAPER = "paper (VOC 2012 val, network)"


def case_scores(group: str, name: str, miou: dict[str, list[float]], related: int = 0, **case: Any) -> CaseScores:
    fields = {"sources": "voc", "recipe": "paper", "inference": f"method of {name}", "until": "evaluate", **case}
    num_seeds = max(map(len, miou.values()), default=0)
    return CaseScores(
        case=StudyCase(name=name, group=group, related=related, **fields), seeds=list(range(num_seeds)), miou=miou
    )


EFFECT = [
    replace(case_scores("none", "none-single", {MASKS: [10.0, 12.0]}, paper=61.7), shares={"recall": [12.0, 13.0]}),
    case_scores("co", "co-itself", {MASKS: [20.0, 20.0], CRF: [30.0, 33.0]}, related=1),
]


def test_the_table_of_cases_has_the_columns_that_any_case_has() -> None:
    table = cases_table(EFFECT, "title", PAPER)
    assert table.columns == ("case", "masks", "+CRF", PAPER, "recall", "maps by")
    assert table.rows == [
        ("none-single", "11.00 ± 1.41", "-", "61.7", "12.5", "method of none-single"),
        ("co-itself", "20.00", "31.50 ± 2.12", "", "-", "method of co-itself"),
    ]


def test_a_score_that_all_seeds_share_has_no_deviation() -> None:
    """It is that of one output of another program."""
    methods = [case_scores("x", "theirs", {MASKS: [20.0, 20.0]}), case_scores("x", "ours", {MASKS: [20.0, 22.0]})]
    assert [row[1] for row in cases_table(methods, "title").rows] == ["20.00", "21.00 ± 1.41"]

    theirs, ours = csv.DictReader(io.StringIO(summary_csv(methods, [])))
    assert theirs["pseudo masks, standard deviation"] == ""
    assert float(ours["pseudo masks, standard deviation"]) > 0


def test_methods_are_ranked_on_each_data_set() -> None:
    """By the last score that all methods of the data set have."""
    rows = [
        ("a", "x", {MASKS: [10.0, 12.0], CRF: [50.0, 52.0]}),
        ("b", "x", {MASKS: [20.0, 20.0]}),
        ("a", "y", {MASKS: [10.0, 12.0], CRF: [30.0, 32.0]}),
        ("b", "y", {MASKS: [10.0, 12.0], CRF: [31.0, 31.0]}),
        ("c", "y", {MASKS: [90.0, 90.0], CRF: [10.0, 10.0]}),
    ]
    grid = [case_scores(data, f"{data}-{method}", miou, method=method, data_set=data) for method, data, miou in rows]
    assert ranks_of_methods(grid) == {"x-a": "2", "x-b": "1", "y-a": "1", "y-b": "1", "y-c": "3"}
    table = cases_table(grid, "title")
    assert table.columns == ("case", "masks", "+CRF", "rank", "maps by")
    assert table.rows[0] == ("x-a", "11.00 ± 1.41", "51.00 ± 1.41", "2", "method of x-a")
    assert ranks_of_methods(EFFECT) == {}


def test_methods_that_are_scored_on_other_images_have_no_rank() -> None:
    mious = {"a": 10.0, "b": 90.0, "c": 20.0}
    methods = [case_scores("x", name, {MASKS: [miou]}, method=name, data_set="x") for name, miou in mious.items()]
    left_out = PairedDifference(case=methods[1].case, seeds=[0], miou={}, left_out={MASKS: "scored on other images"})
    compared = PairedDifference(case=methods[2].case, seeds=[0], miou={MASKS: [10.0]})
    assert ranks_of_methods(methods, [left_out, compared]) == {"a": "2", "b": "", "c": "1"}
    assert ranks_of_methods(methods[:2], [left_out]) == {"a": "", "b": ""}
    assert [row[2] for row in cases_table(methods, "title", None, [left_out, compared]).rows] == ["2", "", "1"]
    assert [row[1] for row in differences_table([left_out, compared]).rows] == ["-", "+10.00"]


def test_methods_with_fewer_seeds_say_so_and_have_no_rank() -> None:
    methods = [
        case_scores("x", "a", {MASKS: [10.0, 12.0, 11.0]}, method="a", data_set="x"),
        case_scores("x", "b", {MASKS: [90.0, 90.0]}, method="b", data_set="x", baseline="a"),
        case_scores("x", "c", {MASKS: [1.0, 1.0, 1.0]}, method="c", data_set="x", baseline="a"),
    ]
    assert ranks_of_methods(methods) == {"a": "1", "b": "", "c": "2"}
    assert [row[0] for row in cases_table(methods, "title").rows] == ["a", "b (2 of 3 seeds)", "c"]
    assert ranks_of_methods(methods[1:]) == {"b": "", "c": ""}, "the first method has no score"


def test_the_table_of_cases_has_no_column_without_values() -> None:
    assert cases_table(EFFECT[1:], "title").columns == ("case", "masks", "+CRF", "maps by")


def test_the_papers_column_stays_where_no_case_has_a_value() -> None:
    table = cases_table(EFFECT[1:], "title", PAPER)
    assert table.rows[0][table.columns.index(PAPER)] == ""
    assert f'"{PAPER}",seed' in cases_csv(EFFECT[1:], PAPER).splitlines()[0]


def printed(monkeypatch: pytest.MonkeyPatch, table: Table, width: int) -> str:
    console = Console(width=width)
    monkeypatch.setattr(terminal, "console", console)
    with console.capture() as capture:
        terminal.print_table("title", table.columns, table.rows, numbers=table.numbers, optional=table.optional)
    return capture.get()


def full_table() -> Table:
    miou = {MAPS: [58.0, 59.0], MASKS: [67.0, 68.0], "segmentation, no CRF": [60.0, 62.0], CRF: [61.0, 63.0]}
    scores = case_scores("co", "co-contrastive-itself-related", miou, paper=66.2)
    all_scores = replace(scores, shares={name: [50.0, 51.0] for name in ("recall", "precision", "mAP")})
    return cases_table([all_scores], "title", PAPER)


def test_a_terminal_of_80_columns_shows_every_miou(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = printed(monkeypatch, full_table(), 80)
    assert max(map(len, shown.splitlines())) <= 80
    for text in ("58.50 ± 0.71", "67.50 ± 0.71", "61.00 ± 1.41", "62.00 ± 1.41", "66.2", "network)"):
        assert text in shown
    assert "maps by" not in shown


def test_a_wide_terminal_shows_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    table = full_table()
    shown = printed(monkeypatch, table, 200)
    assert all(column in shown for column in table.columns)


def difference(miou: dict[str, list[float]], intervals: dict[str, list[float]]) -> PairedDifference:
    case = case_scores("co", "co-r3", {}, baseline="co-itself", description="other images").case
    return PairedDifference(case=case, seeds=[0, 1], miou=miou, intervals=intervals)


def test_differences_have_a_sign_their_own_deviation_and_an_interval() -> None:
    table = differences_table([difference({MASKS: [1.0, 2.0]}, {MASKS: [0.25, 2.75]})])
    assert table.columns == ("case - baseline", "masks", "description")
    assert table.rows == [("co-r3 - co-itself", "+1.50 ± 0.71 (+0.2 to +2.8)", "other images")]


def test_a_description_of_several_lines_is_one_line() -> None:
    item = difference({MASKS: [1.0]}, {})
    case = item.case.model_copy(update={"description": "other\n\nimages\n"})
    assert differences_table([replace(item, case=case)]).rows[0][-1] == "other images"


def test_an_interval_that_contains_0_says_no_difference() -> None:
    table = differences_table([difference({MAPS: [0.5, 0.5]}, {MAPS: [-0.5, 1.5]})])
    assert table.rows[0][1] == "+0.50 (no difference: -0.5 to +1.5)"


def test_a_difference_without_an_interval_has_only_its_mean() -> None:
    assert differences_table([difference({MAPS: [0.5]}, {})]).rows[0][1] == "+0.50"
    nan = float("nan")
    assert differences_table([difference({MAPS: [0.5]}, {MAPS: [nan, nan]})]).rows[0][1] == "+0.50"


def test_the_csv_has_a_row_per_case_and_seed_with_all_values() -> None:
    lines = cases_csv(EFFECT, PAPER).splitlines()
    columns = "case,group,method,data_set,recipe,sources,inference,related,until"
    assert lines[0] == f'{columns},"{PAPER}",seed,pseudo masks,"segmentation, CRF",recall'
    assert lines[1] == "none-single,none,,,paper,voc,method of none-single,0,evaluate,61.7,0,10.0,,12.0"
    assert lines[4] == "co-itself,co,,,paper,voc,method of co-itself,1,evaluate,,1,20.0,33.0,"


def test_the_table_of_seeds_is_a_data_frame_with_types() -> None:
    frame = seeds_table(EFFECT, PAPER).to_pandas()
    assert list(frame["seed"]) == [0, 1, 0, 1]
    assert frame.groupby("case")[MASKS].mean().to_dict() == {"co-itself": 20.0, "none-single": 11.0}
    assert frame[PAPER].dtype == frame["recall"].dtype == "float64"
    assert seeds_table([]).num_rows == 0


WRITTEN = written_tables(EFFECT, [difference({MASKS: [1.0, 2.0]}, {MASKS: [0.25, 2.75]})], PAPER)


def test_markdown_has_units_the_papers_scores_and_intervals() -> None:
    lines = markdown(WRITTEN).splitlines()
    assert lines[2] == f"| case | masks, mIoU % | +CRF, mIoU % | {PAPER}, mIoU % | recall % | maps by |"
    assert lines[3] == "| --- | ---: | ---: | --- | ---: | --- |"
    assert lines[4] == "| none-single | 11.00 ± 1.41 | - | 61.7 | 12.5 | method of none-single |"
    assert lines[-3] == "| case - baseline | masks, points of mIoU | description |"
    assert lines[-1] == "| co-r3 - co-itself | +1.50 ± 0.71 (+0.2 to +2.8) | other images |"


def test_the_tables_state_what_intervals_do_not_include() -> None:
    assert "neither ± nor the interval includes how it varies" in WRITTEN[-1].title


def test_latex_escapes_special_characters() -> None:
    text = latex([Table("50 % of a_b & c", ("case", "mIoU %"), [("x#1", "1.0 ± 0.5")], numbers=("mIoU %",))])
    assert r"\caption{50 \% of a\_b \& c}" in text
    assert r"\begin{tabular}{lr}" in text
    assert "x\\#1 & 1.0 $\\pm$ 0.5 \\\\\n" in text
    assert latex(WRITTEN).count(r"\end{tabular}") == 2


def test_latex_of_thousands_and_signs_needs_no_package() -> None:
    tables = written_tables(EFFECT, [], None, {MASKS: f"images {format_count(10582)}, R > 3 | a < b"})
    text = latex(tables)
    assert r"masks: images 10\,582, R \textgreater{} 3 \textbar{} a \textless{} b}" in text
    assert text.isascii()


def test_the_csv_of_a_study_has_a_row_per_case_with_intervals() -> None:
    compared = replace(difference({MASKS: [1.0, 2.0]}, {MASKS: [0.25, 2.75]}), case=EFFECT[1].case)
    rows = list(csv.DictReader(io.StringIO(summary_csv(EFFECT, [compared], PAPER))))
    assert [row["case"] for row in rows] == ["none-single", "co-itself"]
    assert rows[0]["pseudo masks, mIoU %"] == "11.0"
    assert rows[0][f"{PAPER}, mIoU %"] == "61.7"
    assert rows[0]["pseudo masks, difference, points of mIoU"] == ""
    low, high = (rows[1][f"pseudo masks, 95 % interval, {end}"] for end in ("low", "high"))
    assert (rows[1]["pseudo masks, difference, points of mIoU"], low, high) == ("1.5", "0.25", "2.75")


def test_the_csv_of_a_study_has_no_rank_for_cases_without_a_method() -> None:
    methods = [case_scores("x", name, {MASKS: [miou]}, method=name) for name, miou in (("a", 10.0), ("b", 20.0))]
    rows = csv.DictReader(io.StringIO(summary_csv([*methods, *EFFECT], [])))
    assert {row["case"]: row["rank"] for row in rows} == {"a": "2", "b": "1", "none-single": "", "co-itself": ""}


@pytest.mark.parametrize("scores", [EFFECT, EFFECT[:1], []])
def test_a_plot_is_written_also_without_values(tmp_path: Path, scores: list[CaseScores]) -> None:
    plot_cases(scores, tmp_path / "plot.png", "name", {MASKS: "split train"}, PAPER)
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"

"""Tables, CSV and plots of studies."""

import itertools
from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any

import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mcis.platform.reporting.comparison_tables import Table, mean_text
from mcis.platform.reporting.files import csv_table
from mcis.platform.runs.scores import VARIANTS
from mcis.tuning.case_scores import INTERVAL_NOTE, CaseScores, PairedDifference, used_columns

_HEADINGS = {variant.study_column: variant.heading for variant in VARIANTS}
"""Short headings of the columns."""
_CASE_FIELDS = (
    pa.field("case", pa.string()),
    pa.field("group", pa.string()),
    pa.field("method", pa.string()),
    pa.field("data_set", pa.string()),
    pa.field("recipe", pa.string()),
    pa.field("sources", pa.string()),
    pa.field("inference", pa.string()),
    pa.field("related", pa.int64()),
    pa.field("until", pa.string()),
)
"""Columns of `seeds_table` that describe a case."""
_GROUP_GAP = 0.7
"""Space between the bars of two groups of cases, in bars."""


def cases_table(
    case_scores: Sequence[CaseScores],
    title: str,
    paper_column: str | None = None,
    differences: Sequence[PairedDifference] = (),
) -> Table:
    """The scores of the cases: mean and standard deviation of mIoU, means of the further percentages, the paper's mIoU.

    A case with fewer finished seeds than others says so after its name.

    Args:
        case_scores: Scores of the cases.
        title: Title of the table.
        paper_column: Heading of the column with the paper's mIoU; None for no such column.
        differences: Differences between the cases, which state the scores that cannot be compared.
    """
    score_columns = used_columns(case_scores)
    share_columns = _share_names(case_scores)
    ranks = ranks_of_methods(case_scores, differences)
    num_seeds = len(_all_seeds(case_scores))

    rows = []
    for scores in case_scores:
        missing = num_seeds - len(scores.seeds)
        cells = [f"{scores.case.name} ({len(scores.seeds)} of {num_seeds} seeds)" if missing else scores.case.name]
        cells += [mean_text(_of_different_outputs(scores.miou.get(column, []))) for column in score_columns]
        if paper_column:
            cells.append("" if scores.case.paper is None else f"{scores.case.paper:.1f}")
        cells += [f"{mean(scores.shares[name]):.1f}" if name in scores.shares else "-" for name in share_columns]
        if ranks:
            cells.append(ranks.get(scores.case.name, ""))
        cells.append(scores.case.inference)
        rows.append(tuple(cells))

    score_headings = [_HEADINGS[column] for column in score_columns]
    paper_headings = [paper_column] if paper_column else []
    rank_headings = ["rank"] if ranks else []
    return Table(
        title=title,
        columns=("case", *score_headings, *paper_headings, *share_columns, *rank_headings, "maps by"),
        rows=rows,
        numbers=(*score_headings, *share_columns),  # the paper's heading is long and may wrap
        optional=("maps by", *reversed(share_columns)),
    )


def _of_different_outputs(values: Sequence[float]) -> Sequence[float]:
    """The values of a case's seeds, or one value if all are equal: all seeds then share one output.

    Outputs of another program, and masks that are made from them without a training, do not depend on the seed.
    """
    return values[:1] if len(set(values)) == 1 else values


def _all_seeds(case_scores: Sequence[CaseScores]) -> list[int]:
    """The seeds that any of the cases has finished."""
    seeds: set[int] = set()
    for scores in case_scores:
        seeds.update(scores.seeds)
    return sorted(seeds)


def _share_names(case_scores: Sequence[CaseScores]) -> list[str]:
    """Headings of the further percentages that any of the cases has."""
    names: dict[str, None] = {}
    for scores in case_scores:
        names |= dict.fromkeys(scores.shares)
    return list(names)


def ranks_of_methods(case_scores: Sequence[CaseScores], differences: Sequence[PairedDifference] = ()) -> dict[str, str]:
    """The ranks of the methods of a study on each data set, by case: `1` is the highest mean mIoU.

    Methods are ranked by the last score of the pipeline that all of them have on the data set. Ranks are empty without
    such a score, if the first method has no score, for methods whose score cannot be compared with that of the first
    method, and for methods without a seed that others have finished. Studies without methods have no ranks.

    Args:
        case_scores: Scores of the cases.
        differences: Differences between the cases, which state the scores that cannot be compared.
    """
    left_out = {difference.case.name: difference.left_out for difference in differences}
    method_scores = [scores for scores in case_scores if scores.case.method]
    ranks: dict[str, str] = {}
    for data_set in dict.fromkeys(scores.case.data_set for scores in method_scores):
        data_set_scores = [scores for scores in method_scores if scores.case.data_set == data_set]
        means = _comparable_means(data_set_scores, left_out)
        for scores in data_set_scores:
            ranks[scores.case.name] = _rank(scores.case.name, means)
    return ranks


def _comparable_means(case_scores: Sequence[CaseScores], left_out: Mapping[str, Mapping[str, str]]) -> dict[str, float]:
    """Mean mIoU over the seeds of the methods that have a rank, by case; empty if the methods cannot be ranked.

    Args:
        case_scores: Scores of the methods on one data set.
        left_out: By case and column, why the score cannot be compared with that of the first method.
    """
    common = [column for column in used_columns(case_scores) if all(column in scores.miou for scores in case_scores)]
    has_baseline = any(scores.case.baseline is None for scores in case_scores)
    if not common or not has_baseline:
        return {}

    column = common[-1]
    seeds = _all_seeds(case_scores)
    means = {}
    for scores in case_scores:
        is_comparable = column not in left_out.get(scores.case.name, {})
        if is_comparable and sorted(scores.seeds) == seeds:
            value = mean(scores.miou[column])
            if not isnan(value):
                means[scores.case.name] = value
    return means


def _rank(name: str, means: Mapping[str, float]) -> str:
    """The rank of a case by its mean, as text; empty if it has none or is the only one."""
    if name not in means or len(means) == 1:
        return ""
    higher = [value for value in means.values() if value > means[name]]
    return str(1 + len(higher))


def differences_table(differences: Sequence[PairedDifference]) -> Table:
    """The differences between cases: mean, standard deviation over the common seeds, and the interval in brackets.

    An interval that contains 0 says `no difference`.
    """
    score_columns = used_columns(differences)
    rows = []
    for difference in differences:
        cells = [f"{difference.case.name} - {difference.case.baseline}"]
        for column in score_columns:
            text = mean_text(_of_different_outputs(difference.miou.get(column, [])), sign="+")
            interval = difference.intervals.get(column)
            cells.append(f"{text} {_interval_text(interval)}".rstrip() if interval else text)
        cells.append(" ".join(difference.case.description.split()))
        rows.append(tuple(cells))

    columns = ("case - baseline", *(_HEADINGS[column] for column in score_columns), "description")
    title = "differences of mIoU %, over the same seeds"
    return Table(title, columns, rows, optional=("description",))


def seeds_table(case_scores: Sequence[CaseScores], paper_column: str | None = None) -> pa.Table:
    """All scores in percent: a row per case and seed, null where there is no value.

    Args:
        case_scores: Scores of the cases.
        paper_column: Heading of the column with the paper's mIoU; None for no such column.
    """
    score_columns = used_columns(case_scores)
    share_columns = _share_names(case_scores)
    paper_columns = [paper_column] if paper_column else []

    rows = []
    for scores in case_scores:
        case = scores.case
        case_values = {"case": case.name} | case.model_dump(include={field.name for field in _CASE_FIELDS})
        for position, seed in enumerate(scores.seeds):
            values = {column: percentages[position] for column, percentages in (scores.miou | scores.shares).items()}
            rows.append(case_values | dict.fromkeys(paper_columns, case.paper) | {"seed": seed} | values)

    fields = [*_CASE_FIELDS]
    fields += [pa.field(name, pa.float64()) for name in paper_columns]
    fields += [pa.field("seed", pa.int64())]
    fields += [pa.field(name, pa.float64()) for name in (*score_columns, *share_columns)]
    return pa.Table.from_pylist(rows, pa.schema(fields))


def cases_csv(case_scores: Sequence[CaseScores], paper_column: str | None = None) -> str:
    """`seeds_table` as CSV; cells without a value are empty."""
    table = seeds_table(case_scores, paper_column)
    return csv_table(table.column_names, [list(row.values()) for row in table.to_pylist()]).decode()


def written_tables(
    case_scores: Sequence[CaseScores],
    differences: Sequence[PairedDifference],
    paper_column: str | None = None,
    descriptions: Mapping[str, str] | None = None,
) -> list[Table]:
    """The tables of a study for a document: `cases_table` and `differences_table` with units in the headings.

    Args:
        case_scores: Scores of the cases.
        differences: Differences between the cases.
        paper_column: Heading of the column with the paper's mIoU; None for no such column.
        descriptions: Descriptions of the columns, which the title of the first table includes.
    """
    paper_headings = {paper_column: f"{paper_column}, mIoU %"} if paper_column else {}
    score_headings = {heading: f"{heading}, mIoU %" for heading in _HEADINGS.values()}
    share_headings = {name: f"{name} %" for name in _share_names(case_scores)}

    title = f"Mean and standard deviation over seeds {', '.join(map(str, _all_seeds(case_scores)))}"
    notes = [f"{_HEADINGS[column]}: {text}" for column, text in (descriptions or {}).items()]
    for difference in differences:
        case_names = f"{difference.case.name} and {difference.case.baseline}"
        for column, reason in difference.left_out.items():
            notes.append(f"{case_names} are not compared by {column}: {reason}")
    scored = cases_table(case_scores, ". ".join([title, *notes]), paper_column, differences)
    tables = [_with_headings(scored, paper_headings | score_headings | share_headings)]
    if differences:
        term, explanation = INTERVAL_NOTE
        compared = differences_table(differences)._replace(title=f"Differences to the baselines; {term}: {explanation}")
        points = {heading: f"{heading}, points of mIoU" for heading in _HEADINGS.values()}
        tables.append(_with_headings(compared, points))
    return tables


def _with_headings(table: Table, headings: Mapping[str, str]) -> Table:
    """A table with other headings."""
    columns = tuple(headings.get(column, column) for column in table.columns)
    numbers = tuple(headings.get(column, column) for column in table.numbers)
    return table._replace(columns=columns, numbers=numbers)


def summary_csv(
    case_scores: Sequence[CaseScores],
    differences: Sequence[PairedDifference],
    paper_column: str | None = None,
    descriptions: Mapping[str, str] | None = None,
) -> str:
    """The tables of a study as one CSV: a row per case, with units in the headings and numbers in full precision.

    For arguments see `written_tables`.
    """
    score_columns = used_columns(case_scores)
    share_names = _share_names(case_scores)
    compared_columns = used_columns(differences)
    columns_left_out = [column for column in _HEADINGS if any(column in item.left_out for item in differences)]
    differences_by_case = {difference.case.name: difference for difference in differences}
    ranks = ranks_of_methods(case_scores, differences)

    rows = []
    for scores in case_scores:
        row: dict[str, Any] = {"case": scores.case.name, "seeds": len(scores.seeds), "maps by": scores.case.inference}
        row |= _score_cells(scores, score_columns, descriptions)
        if paper_column:
            row[f"{paper_column}, mIoU %"] = scores.case.paper
        for name in share_names:
            row[f"{name} %"] = mean(scores.shares[name]) if name in scores.shares else None
        row |= _difference_cells(differences_by_case.get(scores.case.name), compared_columns, columns_left_out)
        if ranks:
            row["rank"] = ranks.get(scores.case.name, "")
        rows.append(row)
    return csv_table(list(rows[0]) if rows else ["case"], [list(row.values()) for row in rows]).decode()


def _score_cells(
    scores: CaseScores, columns: Sequence[str], descriptions: Mapping[str, str] | None
) -> dict[str, float | str | None]:
    """Mean, standard deviation and settings of the scores of a case, by heading."""
    cells: dict[str, float | str | None] = {}
    for column in columns:
        values = scores.miou.get(column, [])
        cells[f"{column}, mIoU %"] = mean(values) if values else None
        cells[f"{column}, standard deviation"] = stdev(values) if len(_of_different_outputs(values)) > 1 else None
        if descriptions:
            cells[f"{column}, settings"] = descriptions.get(column)
    return cells


def _difference_cells(
    difference: PairedDifference | None, compared_columns: Sequence[str], columns_left_out: Sequence[str]
) -> dict[str, float | str | None]:
    """The baseline of a case, and its differences with their intervals, by heading. Without a difference, all None."""
    cells: dict[str, float | str | None] = {"baseline": difference.case.baseline if difference else None}
    for column in compared_columns:
        points = difference.miou.get(column, []) if difference else []
        low, high = difference.intervals.get(column, (nan, nan)) if difference else (nan, nan)
        cells[f"{column}, difference, points of mIoU"] = mean(points) if points else None
        cells[f"{column}, 95 % interval, low"] = None if isnan(low) else low
        cells[f"{column}, 95 % interval, high"] = None if isnan(high) else high
    for column in columns_left_out:
        cells[f"{column}, not compared because"] = difference.left_out.get(column) if difference else None
    return cells


def _interval_text(interval: Sequence[float]) -> str:
    """`(+0.2 to +2.8)`, or `(no difference: -0.5 to +1.5)` if the interval contains 0; empty if it is not a number."""
    low, high = interval
    if isnan(low):
        return ""
    prefix = "no difference: " if low <= 0 <= high else ""
    return f"({prefix}{low:+.1f} to {high:+.1f})"


def plot_cases(
    case_scores: Sequence[CaseScores],
    path: Path,
    title: str,
    descriptions: Mapping[str, str],
    paper_column: str | None = None,
) -> None:
    """Plots mIoU: a bar for each case, a subplot for each column, a color for each group.

    Lines show the standard deviation over the seeds, dots the seeds.

    Args:
        case_scores: Scores of the cases.
        path: PNG file to write.
        title: Title of the figure.
        descriptions: Descriptions of the columns, printed below the subplots.
        paper_column: Title of the subplot with the paper's mIoU; None for no such subplot.
    """
    values_by_column = {}
    for column in used_columns(case_scores):
        values_by_column[column] = [scores.miou.get(column, []) for scores in case_scores]
    if paper_column:
        papers = [scores.case.paper for scores in case_scores]
        values_by_column[paper_column] = [[] if paper is None else [paper] for paper in papers]
    num_plots = max(1, len(values_by_column))
    groups = list(dict.fromkeys(scores.case.group for scores in case_scores))
    group_numbers = [groups.index(scores.case.group) for scores in case_scores]
    positions = [number + _GROUP_GAP * group for number, group in enumerate(group_numbers)]

    figure = Figure(figsize=(2.5 + 2.6 * num_plots, 1.8 + 0.26 * len(case_scores)), layout="constrained")
    subplots = figure.subplots(1, num_plots, sharey=True, squeeze=False)[0]
    for axes, (column, values) in zip(subplots, values_by_column.items(), strict=False):
        _plot_column(axes, column, values, positions, group_numbers)
    if case_scores:
        subplots[0].set_yticks(positions, [scores.case.name for scores in case_scores], fontsize=7)
        subplots[0].invert_yaxis()

    num_seeds = len(_all_seeds(case_scores))
    subtitle = f"{title}: mean and standard deviation of {num_seeds} seed(s); dots: single seeds"
    figure.suptitle(subtitle, x=0.01, ha="left", fontsize=9)
    note = "; ".join(f"{column}: {description}" for column, description in descriptions.items())
    figure.supxlabel(fill(note, 40 + 40 * num_plots), fontsize=6)
    figure.savefig(path, dpi=150, format="png")


def _plot_column(
    axes: Axes,
    column: str,
    values_by_case: Sequence[Sequence[float]],
    positions: Sequence[float],
    group_numbers: Sequence[int],
) -> None:
    """Plots the bars of a column. They start near the smallest value, since differences are small."""
    axes.set_title(column, fontsize=9)
    axes.tick_params(axis="x", labelsize=7)
    values_by_case = [[value for value in values if not isnan(value)] for values in values_by_case]
    all_values = list(itertools.chain.from_iterable(values_by_case))
    if not all_values:
        axes.set_xlabel("no values", fontsize=8)
        axes.set_xticks([])
        return

    margin = 0.15 * max(max(all_values) - min(all_values), 1.0)
    left = max(0.0, min(all_values) - margin)
    for position, group_number, values in zip(positions, group_numbers, values_by_case, strict=True):
        if not values:
            continue
        deviation = stdev(values) if len(values) > 1 else 0.0
        width = mean(values) - left
        axes.barh(position, width, left=left, xerr=deviation, color=f"C{group_number}", alpha=0.5, capsize=2)
        axes.scatter(values, [position] * len(values), s=6, color="black", zorder=3)

    axes.set_xlim(left, max(all_values) + margin)
    axes.set_xlabel(f"mIoU %, from {left:.1f}", fontsize=8)
    axes.grid(axis="x", alpha=0.3)

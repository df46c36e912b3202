"""A study on the terminal, ours beside the paper's, and as a picture: bars of its cases."""

from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mcis.platform.runs.scores import VARIANTS
from mcis.tuning.figures import Figures, PairedDifference, reached

_HEADS = {variant.study_column: variant.heading for variant in VARIANTS}


Cells = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""A table's heads, all but the first two above numbers, and its rows."""


def cases_table(figures: Sequence[Figures]) -> Cells:
    """Mean and deviation of mIoU by case; means of its shares; the paper's column."""
    columns, shares = reached(figures), list(dict.fromkeys(name for of in figures for name in of.shares))
    rows = []
    for of in figures:
        of_shares = (f"{mean(of.shares[name]):.1f}" if name in of.shares else "-" for name in shares)
        paper = "-" if of.case.paper is None else f"{of.case.paper:.1f}"
        rows.append((of.case.name, of.case.inference, *_texts(of.miou, columns), *of_shares, paper))
    return ("case", "maps by", *(_HEADS[column] for column in columns), *shares, "paper"), rows


def differences_table(differences: Sequence[PairedDifference]) -> Cells:
    """Mean and deviation of the differences between cases over the seeds that both have, and in brackets the interval.

    Where that contains 0 it says `none`.
    """
    columns, rows = reached(differences), []
    for each in differences:
        intervals = (_interval(*each.intervals.get(column, (nan, nan))) for column in columns)
        cells = zip(_texts(each.miou, columns, sign="+"), intervals, strict=True)
        name = f"{each.of.name} - {each.of.against}"
        rows.append((name, each.of.shows, *(" ".join(cell).rstrip() for cell in cells)))
    return ("case - control", "shows", *(_HEADS[column] for column in columns)), rows


def _texts(miou: dict[str, list[float]], columns: Sequence[str], sign: str = "") -> list[str]:
    """Mean and deviation of each column, a dash where there is none."""
    return [
        f"{mean(miou[column]):{sign}.2f}" + (f" ±{stdev(miou[column]):.2f}" if len(miou[column]) > 1 else "")
        if column in miou
        else "-"
        for column in columns
    ]


def _interval(low: float, high: float) -> str:
    return "" if isnan(low) else f"({'none: ' if low <= 0 <= high else ''}{low:+.1f} to {high:+.1f})"


def cases_picture(figures: Sequence[Figures], path: Path, title: str, below: str) -> None:
    """Bars of mIoU, a row per case in the groups of the trainings, a plot per column.

    A line shows the deviation over seeds, a dot each seed; `below` says what the columns mean.
    """
    columns = reached(figures)
    plots = max(1, len(columns))
    groups = list(dict.fromkeys(of.case.group for of in figures))
    colors = [groups.index(of.case.group) for of in figures]
    heights = [number + 0.7 * group for number, group in enumerate(colors)]  # with a gap between groups
    figure = Figure(figsize=(2.5 + 2.6 * plots, 1.8 + 0.26 * len(figures)), layout="constrained")
    for axes, column in zip(figure.subplots(1, plots, sharey=True, squeeze=False)[0], columns, strict=False):
        _bars(axes, figures, column, heights, colors)
    if figures:
        figure.axes[0].set_yticks(heights, [of.case.name for of in figures], fontsize=7)
        figure.axes[0].invert_yaxis()
    seeds = max((len(of.seeds) for of in figures), default=0)
    figure.suptitle(f"{title}: mean of {seeds} seed(s), their deviation, dots: each", x=0.01, ha="left", fontsize=9)
    figure.supxlabel(fill(below, 40 + 40 * plots), fontsize=6)
    figure.savefig(path, dpi=150, format="png")


def _bars(axes: Axes, figures: Sequence[Figures], column: str, heights: Sequence[float], colors: Sequence[int]) -> None:
    """The bars of a column; they begin near the smallest figure, since differences are small, as the axis says."""
    values = [value for of in figures for value in of.miou.get(column, [])]
    margin = 0.15 * max(max(values) - min(values), 1.0)
    left = max(0.0, min(values) - margin)
    for height, color, of in zip(heights, colors, figures, strict=True):
        if own := of.miou.get(column):
            xerr = stdev(own) if len(own) > 1 else 0.0
            axes.barh(height, mean(own) - left, left=left, xerr=xerr, color=f"C{color}", alpha=0.5, capsize=2)
            axes.scatter(own, [height] * len(own), s=6, color="black", zorder=3)
    axes.set_xlim(left, max(values) + margin)
    axes.set_title(column, fontsize=9)
    axes.set_xlabel(f"mIoU %, from {left:.1f}", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3)

"""Tables of studies and searches on the terminal, ours beside the paper's."""

from collections.abc import Sequence
from math import isnan, nan
from statistics import mean
from typing import TYPE_CHECKING

from rich.table import Table

from mcis.platform.commands.terminal import table_of
from mcis.tuning.figures import COLUMNS, Figures, PairedDifference, deviation, reached
from mcis.tuning.trials import short_names

if TYPE_CHECKING:
    from mcis.tuning.search_trials import Found

_HEADS = dict(zip(COLUMNS, ("maps", "pseudo masks", "segments", "with CRF"), strict=True))  # eighty characters are few
_BEST = 10
"""Trials of a search that are shown."""


def cases_table(figures: Sequence[Figures], title: str) -> Table:
    """Mean and deviation of mIoU by case, a section a group; what maps decide of the masks; the paper's column."""
    columns, decided = reached(figures), any(of.by_maps for of in figures)
    numbers = [_HEADS[column] for column in columns] + ["decided by maps, %"] * decided + ["paper, VOC"]
    rows = []
    for of in figures:
        by_maps = [f"{mean(of.by_maps):.1f}" if of.by_maps else "-"] if decided else []
        paper = "-" if of.case.paper is None else f"{of.case.paper:.1f}"
        rows.append((of.case.name, of.case.inference, *_texts(of.miou, columns), *by_maps, paper))
    table = table_of(title, ("case", "maps by", *numbers), rows, numbers=numbers)
    for row, of, following in zip(table.rows, figures, figures[1:], strict=False):
        row.end_section = of.case.group != following.case.group
    return table


def differences_table(differences: Sequence[PairedDifference], title: str) -> Table:
    """Mean and deviation of the differences between cases over the seeds that both have, and below them the interval.

    Where that contains 0 it says `none`.
    """
    columns = reached(differences)
    rows = []
    for each in differences:
        rows.append((f"{each.of.case} - {each.of.control}", each.of.shows, *_texts(each.miou, columns, sign="+")))
        of_columns = (each.intervals.get(column, (nan, nan)) for column in columns)
        rows.append(("", "", *(_interval(*interval) for interval in of_columns)))
    numbers = [_HEADS[column] for column in columns]
    return table_of(title, ("case - control", "shows", *numbers), rows, numbers=numbers)


def search_table(found: "Found", objective: str, axes: Sequence[str]) -> Table:
    """The best trials of a search, the configuration that it began from among them, and the values of their axes."""
    done = sorted((each for each in found.tried if each.objective is not None), key=lambda each: -(each.objective or 0))
    shown = done[:_BEST] + ([found.default] if found.default and found.default not in done[:_BEST] else [])
    rows = []
    for each in shown:
        name = f"{each.number}{' default' if each == found.default else ''}"
        values = (each.values[key] for key in axes)
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        precision = "-" if each.val_map is None else f"{each.val_map:.2f}"
        rows.append((name, *texts, f"{each.objective:.2f}", precision, f"{each.minutes:.1f}"))
    names, numbers = (name.replace("_", " ") for name in short_names(axes).values()), ("score", "val mAP", "min")
    title = f"{objective}: the best of {len(done)} trials that were done"
    return table_of(title, ("trial", *names, *numbers), rows, numbers=numbers)


def _texts(miou: dict[str, list[float]], columns: Sequence[str], sign: str = "") -> list[str]:
    """Mean and deviation of each column, a dash where there is none."""
    return [
        f"{mean(miou[column]):{sign}.2f}" + (f" ±{deviation(miou[column]):.2f}" if len(miou[column]) > 1 else "")
        if column in miou
        else "-"
        for column in columns
    ]


def _interval(low: float, high: float) -> str:
    return "" if isnan(low) else f"{'none: ' if low <= 0 <= high else ''}{low:+.1f} to {high:+.1f}"

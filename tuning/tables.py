"""Tables of studies and searches on the terminal, ours beside the paper's."""

from collections.abc import Sequence
from math import isnan
from statistics import mean
from typing import TYPE_CHECKING

from rich.table import Table

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
    table = _table(title, ["case", "maps by"], columns)
    for head in [*(["decided by maps, %"] if decided else []), "paper, VOC"]:
        table.add_column(head, justify="right")
    for number, of in enumerate(figures):
        if number and of.case.group != figures[number - 1].case.group:
            table.add_section()
        by_maps = [f"{mean(of.by_maps):.1f}" if of.by_maps else "-"] if decided else []
        paper = "-" if of.case.paper is None else f"{of.case.paper:.1f}"
        table.add_row(of.case.name, of.case.inference, *_texts(of.miou, columns), *by_maps, paper)
    return table


def differences_table(differences: Sequence[PairedDifference], title: str) -> Table:
    """Mean and deviation of the differences between cases over the seeds that both have, and below them the interval.

    Where that contains 0 it says `none`.
    """
    columns = reached(differences)
    table = _table(title, ["case - control", "shows"], columns)
    for each in differences:
        intervals = [_interval(*each.intervals[column]) if column in each.intervals else "" for column in columns]
        figures = _texts(each.miou, columns, sign="+")
        texts = ["\n".join(filter(None, lines)) for lines in zip(figures, intervals, strict=True)]
        table.add_row(f"{each.of.case} - {each.of.control}", each.of.shows, *texts)
    return table


def search_table(found: "Found", objective: str, axes: Sequence[str]) -> Table:
    """The best trials of a search, the configuration that it began from among them, and the values of their axes."""
    done = sorted((each for each in found.tried if each.objective is not None), key=lambda each: -(each.objective or 0))
    shown = done[:_BEST] + ([found.default] if found.default and found.default not in done[:_BEST] else [])
    table = Table(title=f"{objective}: the best of {len(done)} trials that were done", title_justify="left")
    for head in ("trial", *(name.replace("_", " ") for name in short_names(axes).values())):
        table.add_column(head, justify="right", overflow="fold")
    for head in ("score", "val mAP", "min"):
        table.add_column(head, justify="right", no_wrap=True)
    for each in shown:
        name = f"{each.number}{' default' if each == found.default else ''}"
        values = (each.values[key] for key in axes)
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        precision = "-" if each.val_map is None else f"{each.val_map:.2f}"
        table.add_row(name, *texts, f"{each.objective:.2f}", precision, f"{each.minutes:.1f}")
    return table


def _table(title: str, heads: Sequence[str], columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold")  # names are looked up elsewhere, so that none may be cut
    for column in columns:
        table.add_column(_HEADS[column], justify="right")
    return table


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

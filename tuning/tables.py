"""Tables of studies, ours beside the paper's, on the terminal and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import TYPE_CHECKING

from rich.table import Table

from mcis.platform.runs.scores import HEADINGS, ORIGIN, Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER_RELATED_IMAGES: Mapping[int, float] = {0: 64.7, 1: 65.9, 2: 66.0, 3: 66.2, 4: 66.1, 5: 66.0}
"""mIoU of the segmentation network on VOC 2012 val, ResNet-101, VOC only, by related images (table 7, section 4.5)."""
PAPER_EFFECT: Mapping[tuple[str, int], float] = {
    ("none", 0): 61.7,
    ("co", 3): 65.5,
    ("co+contrastive", 0): 64.7,
    ("co+contrastive", 3): 66.2,
}
"""The same, by training and related images (tables 5 and 6)."""

COLUMNS = ("localization maps", "pseudo masks", "segmentation, no CRF", "segmentation, CRF")
_HEADS = dict(zip(COLUMNS, ("maps", "pseudo masks", "segments", "with CRF"), strict=True))  # eighty characters are few
_OF_A_CELL = {"threshold", "related images", "ignored share", "seed"}
"""Headings of a score's meaning that differ from cell to cell, so that they do not describe a column."""

Meaning = dict[str, list[str]]
"""What a column of a study's figures means: heading -> the texts of its scores, one where all agree."""


def scores_by_column(scores: Sequence[Score], related: int) -> dict[str, Score]:
    """The scores of a trial that a study shows, by column; `related` is the trial's number of related images."""
    maps, masks, plain, refined = COLUMNS
    columns: dict[str, Score] = {}
    for score in scores:
        if score.what == "localization_maps" and score.related == related:
            columns[maps] = score
        elif score.what == "pseudo_masks":
            columns[masks] = score
        elif score.what == "segmentation":
            columns[refined if score.crf else plain] = score
    return columns


def meaning_of_columns(trials: Sequence[Mapping[str, Score]]) -> dict[str, Meaning]:
    """What each column means, from the trials' scores by column."""
    columns: dict[str, Meaning] = {}
    for column in COLUMNS:
        meanings = [trial[column].meaning() for trial in trials if column in trial]
        for heading in HEADINGS:
            texts = dict.fromkeys(meaning[heading] for meaning in meanings if heading in meaning)
            if texts and heading not in _OF_A_CELL:
                columns.setdefault(column, {})[heading] = list(texts)
    return columns


def caption(means: Mapping[str, Meaning]) -> str:
    """One line on what the columns mean, but for where their scores come from."""
    parts = []
    for column, meaning in means.items():
        texts = (f"{heading} {' or '.join(texts)}" for heading, texts in meaning.items() if heading not in ORIGIN)
        parts.append(f"{column}: {', '.join(texts)}")
    return "; ".join(parts)


@dataclass(frozen=True)
class Cell:
    """The figures of one cell of a study: a training (`classifier.attention`) with R = `related` related images.

    `miou` holds the mIoU in percent of each seed's run, by column.
    """

    attention: str
    related: int
    miou: dict[str, list[float]]


def related_images_table(cells: Sequence[Cell], title: str) -> Table:
    """mIoU by number of related images, and the paper's column beside ours."""
    table = Table(title=title, title_justify="left")
    table.add_column("R", justify="right")
    for column in COLUMNS:
        table.add_column(_HEADS[column], justify="right")
    table.add_column("paper, VOC", justify="right")
    for cell in sorted(cells, key=attrgetter("related")):
        texts = [_mean_and_deviation(cell.miou[c]) if c in cell.miou else "-" for c in COLUMNS]
        table.add_row(str(cell.related), *texts, f"{PAPER_RELATED_IMAGES.get(cell.related, float('nan')):.1f}")
    return table


def related_images_picture(cells: Sequence[Cell], path: Path, title: str, below: str) -> None:
    """A plot of the same figures, with a line below on what they mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ordered = sorted(cells, key=attrgetter("related"))
    for column in COLUMNS:
        points = [(cell.related, mean(cell.miou[column])) for cell in ordered if column in cell.miou]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=column)
    axes.set_title(f"{title}, mIoU %")
    axes.set_xlabel("related images R")
    axes.set_xticks([cell.related for cell in ordered])
    axes.set_ylabel("mIoU %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.supxlabel(fill(below, 110), fontsize=6)
    figure.savefig(path, dpi=150, format="png")


def effect_table(cells: Sequence[Cell], title: str) -> Table:
    """Mean and deviation of mIoU by training and number of related images, and the paper's column beside ours."""
    table = Table(title=title, title_justify="left")
    table.add_column("training", no_wrap=True)
    table.add_column("R", justify="right")
    columns = _reached(cells)
    for column in columns:
        table.add_column(_HEADS[column], justify="right")
    table.add_column("paper, VOC", justify="right")
    for cell in cells:
        texts = [_mean_and_deviation(cell.miou[column]) if column in cell.miou else "-" for column in columns]
        paper = PAPER_EFFECT.get((cell.attention, cell.related))
        table.add_row(cell.attention, str(cell.related), *texts, "-" if paper is None else f"{paper:.1f}")
    return table


def effect_picture(cells: Sequence[Cell], path: Path, title: str, below: str) -> None:
    """A plot per column: mIoU over related images, a line per training, bars for the deviation over seeds.

    Numbers of related images are drawn at equal distances; `below` says what the columns mean.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = _reached(cells)
    figure = Figure(figsize=(4.0 * max(1, len(columns)), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, column in zip(figure.subplots(1, max(1, len(columns)), squeeze=False)[0], columns, strict=False):
        _draw_effect(axes, cells, column)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=max(1, len(labels)), frameon=False, fontsize=8)
    seeds = max((len(values) for cell in cells for values in cell.miou.values()), default=0)
    figure.suptitle(f"{title}: mean of {seeds} seeds, bars: their deviation", x=0.01, ha="left", fontsize=9)
    figure.supxlabel(fill(below, 70 * max(1, len(columns))), fontsize=6)
    figure.savefig(path, dpi=150, format="png")


def _draw_effect(axes: "Axes", cells: Sequence[Cell], column: str) -> None:
    numbers = sorted({cell.related for cell in cells})
    trainings = list(dict.fromkeys(cell.attention for cell in cells))
    for nth, attention in enumerate(trainings):
        drawn = [cell for cell in cells if cell.attention == attention and column in cell.miou]
        # Beside one another, or their bars cover each other.
        positions = [numbers.index(cell.related) + 0.08 * (nth - (len(trainings) - 1) / 2) for cell in drawn]
        bars = [stdev(cell.miou[column]) if len(cell.miou[column]) > 1 else 0.0 for cell in drawn]
        means = [mean(cell.miou[column]) for cell in drawn]
        axes.errorbar(positions, means, yerr=bars, marker="o", linewidth=1, capsize=3, label=attention)
    axes.set_title(column)
    axes.set_xlabel("related images R")
    axes.set_xticks(range(len(numbers)), [str(r) for r in numbers])
    axes.set_ylabel("mIoU %, its own range")
    axes.grid(alpha=0.3)


def _reached(cells: Sequence[Cell]) -> list[str]:
    """The columns that any of the cells has a figure in."""
    return [column for column in COLUMNS if any(column in cell.miou for cell in cells)]


def _mean_and_deviation(values: Sequence[float]) -> str:
    return f"{mean(values):.2f}" + (f" ±{stdev(values):.2f}" if len(values) > 1 else "")

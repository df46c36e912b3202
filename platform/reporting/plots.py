"""Draws the plots of the pages: IoU per class, mIoU lost by kinds of errors, thresholds, training curves."""

import math
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mcis.datasets.errors import one_line
from mcis.platform.reporting.error_breakdown import ERROR_KINDS, ScoredStep
from mcis.platform.runs.scores import SCORED_OUTPUTS, Curve


class Theme(NamedTuple):
    """Colors of the plots and of the style sheet of the pages.

    Attributes:
        paper: Background.
        ink: Text.
        muted: Secondary text.
        line: Grid lines and borders.
        series: Colors of the lines and bars.
    """

    paper: str = "#ffffff"
    ink: str = "#16181d"
    muted: str = "#5c6370"
    line: str = "#e3e6ea"
    series: tuple[str, ...] = ("#d98200", "#2467c9", "#009e73", "#c2408b", "#7a52c7", "#8a6d3b", "#3aa3c4", "#d1495b")


THEME = Theme()
MAX_BARS = 40
"""Maximum number of labels in the chart of IoU."""
_TRAINING_VALUES = ("val_map", "learning_rate", "images_per_second", "waiting")
_NOT_LOSS_TERMS = ("step", "epoch", "loss", *_TRAINING_VALUES, "time")
"""Columns of a step log that are not terms of the loss."""
_SMOOTH_FROM = 60
"""Number of records above which a loss is drawn as a moving mean over 1/30 of them, over the faint original."""
_PIXEL = 1 / 96
"""Size of a CSS pixel in inches."""
TrainingLog = Mapping[str, NDArray[np.float64]]
"""The N records of a training's steps.jsonl as columns, (N,) each; NaN if a record lacks a value."""


def log_columns(records: Sequence[Mapping[str, Any]]) -> TrainingLog:
    """Converts the records of a step log, at least one, to columns; all of `_NOT_LOSS_TERMS` are present."""
    keys = dict.fromkeys(_NOT_LOSS_TERMS)
    for record in records:
        keys |= dict.fromkeys(record)
    return {key: np.array([record.get(key) for record in records], np.float64) for key in keys}


def loss_terms(log: TrainingLog) -> list[str]:
    """Names of the terms whose sum is the loss."""
    return [key for key in log if key not in _NOT_LOSS_TERMS]


class Plot(NamedTuple):
    """A plot.

    Attributes:
        png: Content of the PNG, with two pixels per CSS pixel.
        width: In CSS pixels.
        height: In CSS pixels.
    """

    png: bytes
    width: int
    height: int


def plot(width: int, height: int, draw: Callable[[Figure], None]) -> Plot:
    """Draws a plot.

    Args:
        width: In CSS pixels.
        height: In CSS pixels.
        draw: Draws on the figure.
    """
    buffer = BytesIO()
    with rc_context(_style()):
        figure = Figure(figsize=(width * _PIXEL, height * _PIXEL), layout="constrained")
        draw(figure)
        figure.savefig(buffer, format="png", dpi=2 / _PIXEL)
    return Plot(buffer.getvalue(), width, height)


class Bars(NamedTuple):
    """Values that a chart of IoU shows in one color.

    Attributes:
        label: Name in the legend.
        iou: IoU in percent by the name of the class; None has no bar.
        miou: Mean IoU in percent.
        color: Index of the color in `Theme.series`.
    """

    label: str
    iou: Mapping[str, float | None]
    miou: float
    color: int


def iou_chart(names: Sequence[str], bars: Sequence[Bars]) -> Plot:
    """Draws horizontal bars of IoU, a group per class, and dashed lines for mIoU.

    Args:
        names: Classes in their order from the top.
        bars: Values; one bar each per class.
    """
    thickness = 0.78 / len(bars)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for i, (label, iou, miou, color_index) in enumerate(bars):
            color = f"C{color_index}"
            values = np.nan_to_num(np.array([iou.get(name) for name in names], np.float64))
            centers = np.arange(len(names)) + (i - (len(bars) - 1) / 2) * thickness
            axes.barh(centers, values, thickness * 0.86, color=color, label=f" {one_line(label, 60)}")
            axes.axvline(miou, color=color, linewidth=1, linestyle=(0, (4, 3)), zorder=0.5)

        _name_rows(axes, [one_line(name, 24) for name in names])
        axes.set_xlabel("IoU in percent, dashed: mIoU")
        figure.legend(loc="outside upper left")

    legend_height = 90 + 18 * (len(bars) - 1)
    row_height = 12 + 8 * len(bars)
    return plot(480, legend_height + len(names) * row_height, draw)


def error_chart(steps: Sequence[ScoredStep]) -> Plot:
    """Draws a stacked horizontal bar per step: its mIoU, and the points lost by each kind of error."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        rows = np.arange(len(steps))
        mious = np.array([step.miou for step in steps])
        axes.barh(rows, mious, 0.62, color=[f"C{SCORED_OUTPUTS[step.output].color}" for step in steps])
        for row, miou in enumerate(mious):
            axes.text(miou - 1, row, f"{miou:.1f}", color=THEME.paper, va="center", ha="right")

        start = mious
        for number, name in enumerate(ERROR_KINDS):
            points = np.array([step.points_lost[number] for step in steps])
            axes.barh(rows, points, 0.62, left=start, color=f"C{3 + number}", label=name)
            start = start + points

        _name_rows(axes, [f"{one_line(step.name, 34)}\n{one_line(step.images, 40)}" for step in steps])
        axes.set_xlabel("mIoU, and points lost")
        figure.legend(loc="outside upper left", ncols=3)

    return plot(640, 90 + 46 * len(steps), draw)


def threshold_chart(curves: Mapping[str, Curve]) -> Plot:
    """Draws mIoU over the background threshold, with a line per curve and a dot at its maximum.

    Args:
        curves: Curves by their label in the legend.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.grid()
        for i, (label, curve) in enumerate(curves.items()):
            color = f"C{i}"
            text = one_line(label, 40)
            finite = [(threshold, miou) for threshold, miou in zip(*curve, strict=True) if math.isfinite(miou)]
            if finite:
                threshold, miou = max(finite, key=itemgetter(1))
                axes.axvline(threshold, color=color, linewidth=0.8, alpha=0.5)
                axes.plot(threshold, miou, "o", color=color, markersize=8, markeredgecolor=THEME.paper, zorder=3)
                text += f": best {miou:.1f} at {threshold:.3g}"
            axes.plot(*curve, color=color, linewidth=1.8, label=f" {text}")

        axes.set_xlabel("background threshold")
        axes.set_ylabel("mIoU in percent")
        figure.legend(loc="outside lower left")

    return plot(480, 320 + 18 * len(curves), draw)


def training_chart(log: TrainingLog) -> Plot:
    """Draws the loss and its terms, mean average precision, learning rate and waiting time of a training by epoch.

    Args:
        log: Columns of at least one record.
    """
    losses = {name: log[name] for name in ("loss", *loss_terms(log))}
    others = {}
    if np.isfinite(log["val_map"]).any():
        others["mean average precision on val tags, percent"] = log["val_map"]
    others["learning rate"] = log["learning_rate"]
    others["waiting for data, percent of the time"] = 100 * log["waiting"]

    def draw(figure: Figure) -> None:
        height_ratios = (3, *[1] * len(others))
        loss_axes, *other_axes = figure.subplots(1 + len(others), 1, sharex=True, height_ratios=height_ratios)
        _draw_losses(loss_axes, log["epoch"], losses)
        for axes, (title, values) in zip(other_axes, others.items(), strict=True):
            is_known = np.isfinite(values)
            _draw_line(axes, log["epoch"][is_known], values[is_known], THEME.ink)
            _finish_axes(axes, title, ticks=3)

        other_axes[-1].set_xlabel("epoch")
        figure.legend(loc="outside lower left", ncols=4)

    return plot(480, 480 + 90 * (len(others) - 2), draw)


def _draw_losses(axes: Axes, epoch: NDArray[np.float64], losses: Mapping[str, NDArray[np.float64]]) -> None:
    """Draws the loss and its terms; gaps in the records are gaps in the lines."""
    for i, (name, values) in enumerate(losses.items()):
        color = f"C{i - 1}" if i else THEME.ink
        shown = values
        if len(values) > _SMOOTH_FROM:
            axes.plot(epoch, values, color=color, linewidth=0.6, alpha=0.25)
            shown = _smoothed(values)
        _draw_line(axes, epoch, shown, color, f" {one_line(name, 30)}")
    _finish_axes(axes, "loss and its terms" if len(losses) > 1 else "loss", ticks=6)


def _draw_line(
    axes: Axes, epoch: NDArray[np.float64], values: NDArray[np.float64], color: str, label: str | None = None
) -> None:
    marker = "o" if len(values) < 2 else None
    axes.plot(epoch, values, color=color, linewidth=1.6, marker=marker, label=label)


def _finish_axes(axes: Axes, title: str, *, ticks: int) -> None:
    axes.grid(axis="y")
    axes.set_title(title)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.locator_params(axis="y", nbins=ticks)


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over a centered window of 1/30 of the records, cut off at both ends; NaN are left out."""
    finite = np.isfinite(values)
    kernel = np.ones(2 * (len(values) // 60) + 1)
    total = np.convolve(np.where(finite, values, 0), kernel, "same")
    count = np.convolve(finite, kernel, "same")
    return np.where(finite, total / np.maximum(count, 1), np.nan)


def _style() -> Any:
    """The matplotlib settings of all plots. Math text is off, so that "$" in a name is shown as it is."""
    colors = {
        THEME.paper: ("figure.facecolor", "savefig.facecolor", "axes.facecolor"),
        THEME.ink: ("text.color", "axes.titlecolor"),
        THEME.muted: ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"),
        THEME.line: ("axes.edgecolor", "grid.color"),
    }
    style: dict[str, Any] = {
        "text.parse_math": False,
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.prop_cycle": cycler(color=THEME.series),
        "axes.axisbelow": True,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "legend.handlelength": 1.2,
        "legend.columnspacing": 1.4,
    }
    for color, keys in colors.items():
        style |= dict.fromkeys(keys, color)
    for side in ("left", "right", "top"):
        style[f"axes.spines.{side}"] = False
    for axis in ("x", "y"):
        style[f"{axis}tick.major.size"] = 0
    return style


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Labels the rows of horizontal bars, from the top, and sets the axis of percent."""
    axes.grid(axis="x")
    axes.set_yticks(range(len(names)), names)
    axes.tick_params("y", labelcolor=THEME.ink)
    axes.set(xlim=(0, 100), ylim=(len(names) - 0.45, -0.55))

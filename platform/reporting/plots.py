"""Plots of the pages: IoU per class, losses, thresholds, trainings."""

import math
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mcis.datasets.errors import one_line
from mcis.platform.reporting.losses import LOST, Step
from mcis.platform.runs.scores import Curve, Scored

STAGE_COLORS: dict[Scored, int] = {"localization_maps": 0, "pseudo_masks": 2, "segmentation": 1}
"""By `Score.what` of a stage the number of its color in `Theme.series`; the pages' style sheet has the same."""


class Theme(NamedTuple):
    """Colors of a plot; the style sheet of the pages is made of them too."""

    paper: str = "#ffffff"
    ink: str = "#16181d"
    muted: str = "#5c6370"
    line: str = "#e3e6ea"
    series: tuple[str, ...] = (
        "#d98200", "#2467c9", "#009e73", "#c2408b", "#7a52c7", "#8a6d3b", "#3aa3c4", "#d1495b",
    )  # fmt: skip


THEME = Theme()
MOST_BARS = 40
"""Labels that the chart of IoU holds; with more, some are drawn."""
_OF_TRAINING = ("val_map", "learning_rate", "images_per_second", "waiting")
_NO_TERMS = ("step", "epoch", "loss", *_OF_TRAINING, "time")
"""Columns of a step log that are no terms of the loss."""
_SMOOTH_FROM = 60
"""Records from which on a loss is drawn as a mean over 1/30 of them over its faint self."""
_PIXEL = 1 / 96
"""Inches of a CSS pixel."""
Draw = Callable[[Figure], None]


TrainingLog = Mapping[str, NDArray[np.float64]]
"""The N records of a training's steps.jsonl as columns, (N,) each; NaN where a record lacks a value."""


def log_columns(records: Sequence[Mapping[str, Any]]) -> TrainingLog:
    """The columns of a step log with at least one record, those of `_NO_TERMS` among them."""
    keys = dict.fromkeys([*_NO_TERMS, *(key for record in records for key in record)])
    return {key: np.array([record.get(key) for record in records], np.float64) for key in keys}


def loss_terms(log: TrainingLog) -> list[str]:
    """The names of the terms that the loss is the sum of."""
    return [key for key in log if key not in _NO_TERMS]


class Plot(NamedTuple):
    """A plot as PNG, at twice the density; width and height in CSS pixels."""

    png: bytes
    width: int
    height: int


def plot(width: int, height: int, draw: Draw) -> Plot:
    """What `draw` draws."""
    buffer = BytesIO()
    with rc_context(_style()):
        figure = Figure(figsize=(width * _PIXEL, height * _PIXEL), layout="constrained")
        draw(figure)
        figure.savefig(buffer, format="png", dpi=2 / _PIXEL)
    return Plot(buffer.getvalue(), width, height)


class Bars(NamedTuple):
    """The IoU in percent by name that a chart shows in one color, the number of a series; None gets no bar."""

    label: str
    iou: Mapping[str, float | None]
    miou: float
    color: int


def iou_chart(names: Sequence[str], bars: Sequence[Bars]) -> Plot:
    """Horizontal bars, a group per name in the order given from the top; dashed lines are the means."""
    thickness = 0.78 / len(bars)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for i, (label, iou, miou, number) in enumerate(bars):
            values = np.nan_to_num(np.array([iou.get(name) for name in names], np.float64))
            centers = np.arange(len(names)) + (i - (len(bars) - 1) / 2) * thickness
            axes.barh(centers, values, thickness * 0.86, color=f"C{number}", label=f" {one_line(label, 60)}")
            axes.axvline(miou, color=f"C{number}", linewidth=1, linestyle=(0, (4, 3)), zorder=0.5)
        _name_rows(axes, [one_line(name, 24) for name in names])
        axes.set_xlabel("IoU in percent, dashed: mIoU")
        figure.legend(loc="outside upper left")

    return plot(480, 90 + 18 * (len(bars) - 1) + len(names) * (12 + 8 * len(bars)), draw)


def loss_chart(steps: Sequence[Step]) -> Plot:
    """Stacked horizontal bars of 100 points, a step each: its mIoU, and how it lost the others."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        rows, mious = np.arange(len(steps)), np.array([step.miou for step in steps])
        axes.barh(rows, mious, 0.62, color=[f"C{STAGE_COLORS[step.what]}" for step in steps])
        for row, miou in enumerate(mious):
            axes.text(miou - 1, row, f"{miou:.1f}", color=THEME.paper, va="center", ha="right")
        start = mious
        for number, name in enumerate(LOST):
            points = np.array([step.lost[number] for step in steps])
            axes.barh(rows, points, 0.62, left=start, color=f"C{3 + number}", label=name)
            start = start + points
        _name_rows(axes, [f"{one_line(step.name, 34)}\n{one_line(step.images, 40)}" for step in steps])
        axes.set_xlabel("mIoU, and points lost")
        figure.legend(loc="outside upper left", ncols=3)

    return plot(640, 90 + 46 * len(steps), draw)


def threshold_chart(curves: Mapping[str, Curve]) -> Plot:
    """mIoU in percent over the background threshold, a line per label, with a dot at its best point."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.grid()
        for i, (label, curve) in enumerate(curves.items()):
            color, text = f"C{i}", one_line(label, 40)
            known = [(threshold, miou) for threshold, miou in zip(*curve, strict=True) if math.isfinite(miou)]
            if best := max(known, key=lambda point: point[1], default=None):
                axes.axvline(best[0], color=color, linewidth=0.8, alpha=0.5)
                axes.plot(*best, "o", color=color, markersize=8, markeredgecolor=THEME.paper, zorder=3)
                text += f": best {best[1]:.1f} at {best[0]:.3g}"
            axes.plot(*curve, color=color, linewidth=1.8, label=f" {text}")
        axes.set_xlabel("threshold of the background")
        axes.set_ylabel("mIoU in percent")
        figure.legend(loc="outside lower left")

    return plot(480, 320 + 18 * len(curves), draw)


def training_chart(log: TrainingLog) -> Plot:
    """Loss and its terms, mean average precision, learning rate, time waiting, by epoch.

    `log` holds at least one record.
    """
    losses = {name: log[name] for name in ("loss", *loss_terms(log))}
    charts = {"loss and its terms" if len(losses) > 1 else "loss": losses}
    if np.isfinite(log["val_map"]).any():
        charts["mean average precision on val tags, percent"] = {"": log["val_map"]}
    charts["learning rate"] = {"": log["learning_rate"]}
    charts["waiting for data, percent of the time"] = {"": 100 * log["waiting"]}

    def draw(figure: Figure) -> None:
        all_axes = figure.subplots(len(charts), 1, sharex=True, height_ratios=(3, *[1] * (len(charts) - 1)))
        for axes, (title, lines) in zip(all_axes, charts.items(), strict=True):
            axes.grid(axis="y")
            for i, (name, values) in enumerate(lines.items()):
                color = f"C{i - 1}" if i else THEME.ink
                known = np.isfinite(values) if lines is not losses else np.ones(len(values), bool)
                epoch, values = log["epoch"][known], values[known]
                if lines is losses and len(values) > _SMOOTH_FROM:
                    axes.plot(epoch, values, color=color, linewidth=0.6, alpha=0.25)
                    values = _smoothed(values)
                marker = "o" if len(values) < 2 else None
                label = f" {one_line(name, 30)}" if name else None
                axes.plot(epoch, values, color=color, linewidth=1.6, marker=marker, label=label)
            axes.set_title(title)
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
            axes.locator_params(axis="y", nbins=6 if lines is losses else 3)
        all_axes[-1].set_xlabel("epoch")
        figure.legend(loc="outside lower left", ncols=4)

    return plot(480, 480 + 90 * (len(charts) - 3), draw)


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over a centered window of 1/30 of the records, at the ends over what there is of it; NaN are left out."""
    finite, kernel = np.isfinite(values), np.ones(2 * (len(values) // 60) + 1)
    total = np.convolve(np.where(finite, values, 0), kernel, "same")
    count = np.convolve(finite, kernel, "same")
    return np.where(finite, total / np.maximum(count, 1), np.nan)


def _style() -> Any:
    """The settings of matplotlib that all plots have in common; "$" in a name is a dollar."""
    no_spines = {f"axes.spines.{side}": False for side in ("left", "right", "top")}
    no_ticks = {f"{axis}tick.major.size": 0 for axis in "xy"}
    colors = {
        THEME.paper: ("figure.facecolor", "savefig.facecolor", "axes.facecolor"),
        THEME.ink: ("text.color", "axes.titlecolor"),
        THEME.muted: ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"),
        THEME.line: ("axes.edgecolor", "grid.color"),
    }
    return {
        **no_spines, **no_ticks, **{key: color for color, keys in colors.items() for key in keys},
        "text.parse_math": False, "font.size": 9, "axes.titlesize": 9.5, "axes.titlelocation": "left",
        "axes.prop_cycle": cycler(color=THEME.series), "axes.axisbelow": True, "legend.frameon": False,
        "legend.fontsize": 9, "legend.handlelength": 1.2, "legend.columnspacing": 1.4,
    }  # fmt: skip


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names the rows of horizontal bars, percent, from the top."""
    axes.grid(axis="x")
    axes.set_yticks(range(len(names)), names)
    axes.tick_params("y", labelcolor=THEME.ink)
    axes.set(xlim=(0, 100), ylim=(len(names) - 0.45, -0.55))

"""Plots of the page: IoU per class, losses, thresholds, training curves; each as PNG for a light and a dark page."""

import math
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mcis.platform.reporting.losses import LOST, Step
from mcis.platform.reporting.panels import drawable
from mcis.platform.reporting.run_data import TrainingLog
from mcis.platform.runs.scores import Curve, Score, Scored

STAGE_TITLES: dict[Scored, str] = {
    "localization_maps": "Localization maps",
    "pseudo_masks": "Pseudo masks",
    "segmentation": "Segmentation",
}
"""The stages whose results are scored: `Score.what`, and its title."""


class Theme(NamedTuple):
    """Colors of a plot; the stylesheet of the page has the same ones."""

    paper: str
    ink: str
    muted: str
    line: str
    stages: tuple[str, ...]
    """In the order of STAGE_TITLES."""
    series: tuple[str, ...]


THEMES = {
    "light": Theme(
        "#ffffff", "#16181d", "#5c6370", "#e3e6ea",
        ("#d98200", "#009e73", "#2467c9"),
        ("#d98200", "#2467c9", "#009e73", "#c2408b", "#7a52c7", "#8a6d3b", "#3aa3c4", "#d1495b"),
    ),
    "dark": Theme(
        "#171a21", "#e8eaee", "#9aa3b0", "#2c313b",
        ("#f2ac3c", "#2fc79a", "#6ba6ff"),
        ("#f2ac3c", "#6ba6ff", "#2fc79a", "#f07fbf", "#b295f5", "#cdb07a", "#6fd0ec", "#ff8a94"),
    ),
}  # fmt: skip


class Plot(NamedTuple):
    """A plot as PNG for a light and a dark page, at twice the density; width and height in CSS pixels."""

    light: bytes
    dark: bytes
    width: int
    height: int


class Bars(NamedTuple):
    """The IoU in percent by name that a chart shows in one color; one that is absent or None gets no bar."""

    label: str
    iou: Mapping[str, float | None]
    miou: float


def iou_chart(names: Sequence[str], scores: Mapping[Scored, Score]) -> Plot:
    """Horizontal bars, a group per name in the order given from the top; dashed lines are the means.

    Args:
        names: keys of `iou` of the scores; one that a score lacks, or has as None, gets no bar.
        scores: a score per stage.
    """
    order = list(STAGE_TITLES)
    bars = [Bars(STAGE_TITLES[what], score.iou, score.miou) for what, score in scores.items()]
    return _iou_plot(names, bars, lambda theme: [theme.stages[order.index(what)] for what in scores], columns=3)


def compared_iou_chart(names: Sequence[str], bars: Sequence[Bars]) -> Plot:
    """As `iou_chart`, of one score in several runs; colors are those of the series, hatched where they are used up."""
    return _iou_plot(names, bars, lambda theme: [theme.series[i % len(theme.series)] for i in range(len(bars))])


def _iou_plot(
    names: Sequence[str], bars: Sequence[Bars], colors: Callable[[Theme], Sequence[str]], *, columns: int = 1
) -> Plot:
    bar = 0.78 / len(bars)

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        _style(axes, theme, grid="x")
        for i, (of, color) in enumerate(zip(bars, colors(theme), strict=True)):
            values = np.array([of.iou.get(name) for name in names], np.float64)
            centers = np.arange(len(names)) + (i - (len(bars) - 1) / 2) * bar
            hatch = _HATCHES[i // len(theme.series) % len(_HATCHES)]
            look: dict[str, Any] = {"color": color, "label": f" {_short(of.label, 60)}"}
            if hatch:
                look |= {"hatch": hatch, "edgecolor": theme.paper, "linewidth": 0}
            axes.barh(centers, np.nan_to_num(values), bar * 0.86, **look)
            axes.axvline(of.miou, color=color, linewidth=1, linestyle=(0, (4, 3)), zorder=0.5)
        axes.set_yticks(range(len(names)), [_short(name, 24) for name in names], parse_math=False)
        axes.tick_params("y", labelcolor=theme.ink, labelsize=9.5)
        axes.set(xlim=(0, 100), ylim=(len(names) - 0.45, -0.55))
        axes.set_xlabel("IoU in percent, dashed: mIoU", color=theme.muted, fontsize=9)
        _outside_legend(figure, theme, "outside upper left", columns=columns)

    legend = 18 * (len(bars) - 1) if columns == 1 else 0
    return _plot(480, 90 + legend + len(names) * (12 + 8 * len(bars)), draw)


def loss_chart(steps: Sequence[Step]) -> Plot:
    """Stacked horizontal bars of 100 points, a step each: its mIoU, and how it lost the others."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        _style(axes, theme, grid="x")
        rows, lost = np.arange(len(steps)), np.array([step.lost for step in steps])
        mious = np.array([step.miou for step in steps])
        stages = [theme.stages[list(STAGE_TITLES).index(step.what)] for step in steps]
        axes.barh(rows, mious, 0.62, color=stages)
        for row, miou in enumerate(mious):
            axes.text(miou - 1, row, f"{miou:.1f}", color=theme.paper, fontsize=9, va="center", ha="right")
        starts = mious + np.cumsum(lost, axis=1).T - lost.T
        for name, color, start, points in zip(LOST, theme.series[3:], starts, lost.T, strict=False):
            axes.barh(rows, points, 0.62, left=start, color=color, label=name)
        texts = [f"{_short(step.name, 34)}\n{_short(_images(step), 40)}" for step in steps]
        axes.set_yticks(rows, texts, parse_math=False)
        axes.tick_params("y", labelcolor=theme.ink, labelsize=8.5)
        axes.set(xlim=(0, 100), ylim=(len(steps) - 0.45, -0.55))
        axes.set_xlabel("mIoU, and points lost", color=theme.muted, fontsize=9)
        _outside_legend(figure, theme, "outside upper left", columns=3)

    return _plot(640, 90 + 46 * len(steps), draw)


def _images(step: Step) -> str:
    return step.images if step.run is None else f"{step.images}, bound {step.run}"


def threshold_chart(curves: Mapping[str, Curve]) -> Plot:
    """mIoU in percent over the background threshold, a line per label, with a dot at its best point."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        _style(axes, theme, grid="both")
        for i, (label, curve) in enumerate(curves.items()):
            color = theme.series[i % len(theme.series)]
            style = ("-", "--", ":")[i // len(theme.series) % 3]
            text = _short(label, 40)
            if best := best_point(curve):
                axes.axvline(best[0], color=color, linewidth=0.8, alpha=0.5)
                axes.plot(*best, "o", color=color, markersize=8, markeredgecolor=theme.paper, zorder=3)
                text += f": best {best[1]:.1f} at {best[0]:.3g}"
            marker = "o" if len(curve.thresholds) == 1 else None
            axes.plot(*curve, style, color=color, linewidth=1.8, marker=marker, label=f" {text}")
        axes.set_xlabel("threshold of the background", color=theme.muted, fontsize=9)
        axes.set_ylabel("mIoU in percent", color=theme.muted, fontsize=9)
        _outside_legend(figure, theme, "outside lower left", columns=1)

    return _plot(480, 320 + 18 * len(curves), draw)


def best_point(curve: Curve) -> tuple[float, float] | None:
    """The threshold of the highest mIoU, the first of equals, and that mIoU; None where no mIoU is a number."""
    points = [(t, miou) for t, miou in zip(*curve, strict=True) if math.isfinite(miou)]
    return max(points, key=lambda point: point[1], default=None)


def training_chart(log: TrainingLog) -> Plot:
    """Loss and its terms, mean average precision, learning rate, share of time waiting for data, over steps.

    Thin lines begin the epochs. `log` holds at least one record.
    """
    starts = log.step[1:][np.diff(np.floor(log.epoch)) > 0]
    epochs = starts if len(starts) <= _MOST_EPOCHS else starts[:0]
    marker = "o" if len(log) == 1 else None
    validated = np.isfinite(log.val_map)
    titles = ["loss and its terms" if log.terms else "loss", "learning rate", "waiting for data, percent of the time"]
    if validated.any():
        titles.insert(1, "mean average precision on val tags, percent")

    def draw(figure: Figure, theme: Theme) -> None:
        charts = figure.subplots(len(titles), 1, sharex=True, height_ratios=(3, *[1] * (len(titles) - 1)))
        top, *between, middle, bottom = charts
        for axes in between:
            line = {"marker": "o", "markersize": 3, "color": theme.series[2], "linewidth": 1.6}
            axes.plot(log.step[validated], log.val_map[validated], **line)
        _draw_loss(top, log, theme, marker)
        middle.plot(log.step, log.learning_rate, color=theme.series[1], linewidth=1.6, marker=marker)
        waiting = 100 * log.waiting
        bottom.fill_between(log.step, 0, waiting, color=theme.series[0], alpha=0.35, linewidth=0)
        bottom.plot(log.step, waiting, color=theme.series[0], linewidth=1.2, marker=marker)
        for axes, title in zip(charts, titles, strict=True):
            _style(axes, theme, grid="y")
            axes.set_title(title, loc="left", color=theme.ink, fontsize=9.5)
            axes.locator_params(axis="y", nbins=6 if axes is top else 3)
            for start in epochs:
                axes.axvline(start, color=theme.line, linewidth=0.8, zorder=0.5)
        top.set_ylim(bottom=min(0, top.get_ylim()[0]))
        middle.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        middle.yaxis.get_offset_text().set(color=theme.muted, fontsize=8)
        middle.set_ylim(bottom=0)
        bottom.set_ylim(0, max(10.0, float(np.nanmax([*waiting, 0.0])) * 1.15))
        bottom.set_xlabel("step, thin lines: epochs" if len(epochs) else "step", color=theme.muted, fontsize=9)
        _outside_legend(figure, theme, "outside lower left", columns=4)

    return _plot(480, 480 + 90 * (len(titles) - 3), draw)


def _draw_loss(axes: Axes, log: TrainingLog, theme: Theme, marker: str | None) -> None:
    """The loss and its terms; where the records are many, smoothed over their faint selves."""
    for i, (name, values) in enumerate({"loss": log.loss, **log.terms}.items()):
        color = theme.ink if i == 0 else theme.series[(i - 1) % len(theme.series)]
        width, above = (2.0, 3) if i == 0 else (1.4, 2)
        if len(log) > _SMOOTH_FROM:
            axes.plot(log.step, values, color=color, linewidth=0.6, alpha=0.25)
            values = _smoothed(values)
        label = f" {_short(name, 30)}"
        axes.plot(
            log.step, values, label=label, color=color, linewidth=width, zorder=above, marker=marker, markersize=4
        )


_HATCHES = ("", "///", "...")
"""Patterns of bars whose colors are used a second and a third time."""
_SMOOTH_FROM = 60
"""Records from which on the loss is drawn smoothed over its faint self."""
_MOST_EPOCHS = 60
"""Epochs up to which each is marked."""
_PIXEL = 1 / 96
"""Inches of a CSS pixel."""


def _plot(width: int, height: int, draw: Callable[[Figure, Theme], None]) -> Plot:
    def png(theme: Theme) -> bytes:
        figure = Figure(figsize=(width * _PIXEL, height * _PIXEL), layout="constrained", facecolor=theme.paper)
        draw(figure, theme)
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=2 / _PIXEL, facecolor=theme.paper)
        return buffer.getvalue()

    return Plot(png(THEMES["light"]), png(THEMES["dark"]), width, height)


def _style(axes: Axes, theme: Theme, *, grid: Literal["x", "y", "both"]) -> None:
    axes.set_facecolor(theme.paper)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.line)
    axes.tick_params(color=theme.line, labelcolor=theme.muted, labelsize=9, length=0)
    axes.grid(axis=grid, color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)


def _outside_legend(
    figure: Figure, theme: Theme, where: Literal["outside upper left", "outside lower left"], *, columns: int
) -> None:
    legend = figure.legend(
        loc=where, ncols=columns, frameon=False, fontsize=9, labelcolor=theme.ink, handlelength=1.2, columnspacing=1.4
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # "$" in a name is a dollar


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over a centered window of 1/30 of the records, at the ends over what there is of it; NaN are left out."""
    half = len(values) // 60
    finite = np.isfinite(values)
    kernel = np.ones(2 * half + 1)
    total = np.convolve(np.where(finite, values, 0), kernel, "same")
    count = np.convolve(finite, kernel, "same")
    return np.where(finite, total / np.maximum(count, 1), np.nan)


def _short(text: str, limit: int) -> str:
    text = drawable(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"

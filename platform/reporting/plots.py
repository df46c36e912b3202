"""Plots of the page: IoU per class, mIoU over thresholds, training curves; each as PNG for a light and a dark page."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mcis.platform.reporting.panels import drawable

STAGES = {"localization_maps": "Localization maps", "pseudo_masks": "Pseudo masks", "segmentation": "Segmentation"}
"""The stages that are scored: `what` in scores.json, and its title."""


class Theme(NamedTuple):
    """Colors of a plot; the stylesheet of the page has the same ones."""

    paper: str
    ink: str
    muted: str
    line: str
    stages: tuple[str, ...]
    """In the order of STAGES."""
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


def iou_chart(names: Sequence[str], scores: Mapping[str, Mapping[str, Any]]) -> Plot:
    """Horizontal bars, a group a name in the order given from the top; dashed lines are the means.

    Args:
        names: keys of `iou` of the scores; one that a score lacks, or has as None, gets no bar.
        scores: entries of scores.json by `what`, with `miou` and `iou` in percent.
    """
    bar = 0.78 / len(scores)

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        _style(axes, theme, grid="x")
        for i, (what, score) in enumerate(scores.items()):
            color = theme.stages[list(STAGES).index(what)]
            values = np.array([score["iou"].get(name) for name in names], np.float64)
            places = np.arange(len(names)) + (i - (len(scores) - 1) / 2) * bar
            axes.barh(places, np.nan_to_num(values), bar * 0.86, color=color, label=STAGES[what])
            axes.axvline(score["miou"], color=color, linewidth=1, linestyle=(0, (4, 3)), zorder=0.5)
        axes.set_yticks(range(len(names)), [_short(name, 24) for name in names], parse_math=False)
        axes.tick_params("y", labelcolor=theme.ink, labelsize=9.5)
        axes.set(xlim=(0, 100), ylim=(len(names) - 0.45, -0.55))
        axes.set_xlabel("IoU in percent, dashed: mIoU", color=theme.muted, fontsize=9)
        _outside_legend(figure, theme, "outside upper left", columns=3)

    return _plot(480, 90 + len(names) * (12 + 8 * len(scores)), draw)


def threshold_chart(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Plot:
    """mIoU in percent over the background threshold, a line a label, its best point marked."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        _style(axes, theme, grid="both")
        for i, (label, (thresholds, mious)) in enumerate(curves.items()):
            color = theme.series[i % len(theme.series)]
            style = ("-", "--", ":")[i // len(theme.series) % 3]
            text = _short(label, 40)
            if best := best_point(thresholds, mious):
                axes.axvline(best[0], color=color, linewidth=0.8, alpha=0.5)
                axes.plot(*best, "o", color=color, markersize=8, markeredgecolor=theme.paper, zorder=3)
                text += f": best {best[1]:.1f} at {best[0]:.3g}"
            marker = "o" if len(thresholds) == 1 else None
            axes.plot(thresholds, mious, style, color=color, linewidth=1.8, marker=marker, label=f" {text}")
        axes.set_xlabel("threshold of the background", color=theme.muted, fontsize=9)
        axes.set_ylabel("mIoU in percent", color=theme.muted, fontsize=9)
        _outside_legend(figure, theme, "outside lower left", columns=1)

    return _plot(480, 320 + 18 * len(curves), draw)


def best_point(thresholds: Sequence[float], mious: Sequence[float]) -> tuple[float, float] | None:
    """The threshold of the highest mIoU, the first of equals, and that mIoU; None where no mIoU is a number."""
    points = [(t, miou) for t, miou in zip(thresholds, mious, strict=True) if math.isfinite(miou)]
    return max(points, key=lambda point: point[1], default=None)


def training_chart(records: Sequence[Mapping[str, Any]]) -> Plot:
    """Loss and its terms, mean average precision, learning rate, share of time waiting for data, over steps.

    Thin lines begin the epochs.

    Args:
        records: at least one, with the keys step; epoch, passes over the data, fractional; loss. Where they are known
            also val_map, mean average precision on val tags in percent; learning_rate; images_per_second; waiting,
            share of the time spent waiting for data; time, seconds since 1970. Every other key is a term of the loss.
    """
    steps, waiting = _column(records, "step"), 100 * _column(records, "waiting")
    terms = loss_terms(records)
    starts = steps[1:][np.diff(np.floor(_column(records, "epoch"))) > 0]
    epochs = starts if len(starts) <= _MOST_EPOCHS else starts[:0]
    marker = "o" if len(records) == 1 else None
    precision = _column(records, "val_map")
    validated = np.isfinite(precision)
    titles = ["loss and its terms" if terms else "loss", "learning rate", "waiting for data, percent of the time"]
    if validated.any():
        titles.insert(1, "mean average precision on val tags, percent")

    def draw(figure: Figure, theme: Theme) -> None:
        charts = figure.subplots(len(titles), 1, sharex=True, height_ratios=(3, *[1] * (len(titles) - 1)))
        top, *between, middle, bottom = charts
        for axes in between:
            known = {"marker": "o", "markersize": 3, "color": theme.series[2], "linewidth": 1.6}
            axes.plot(steps[validated], precision[validated], **known)
        for i, term in enumerate(["loss", *terms]):
            color = theme.ink if term == "loss" else theme.series[(i - 1) % len(theme.series)]
            width, above = (2.0, 3) if term == "loss" else (1.4, 2)
            values = _column(records, term)
            if len(records) > _SMOOTH_FROM:
                top.plot(steps, values, color=color, linewidth=0.6, alpha=0.25)
                values = _smoothed(values)
            line = {"color": color, "linewidth": width, "zorder": above, "marker": marker, "markersize": 4}
            top.plot(steps, values, label=f" {_short(term, 30)}", **line)
        middle.plot(steps, _column(records, "learning_rate"), color=theme.series[1], linewidth=1.6, marker=marker)
        bottom.fill_between(steps, 0, waiting, color=theme.series[0], alpha=0.35, linewidth=0)
        bottom.plot(steps, waiting, color=theme.series[0], linewidth=1.2, marker=marker)
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


def loss_terms(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of training records that are terms of the loss, in the order in which they appear."""
    return list(dict.fromkeys(key for record in records for key in record if key not in _NO_TERMS))


_NO_TERMS = {"step", "epoch", "loss", "val_map", "learning_rate", "images_per_second", "waiting", "time"}
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


def _column(records: Iterable[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
    """One number of each record, (N,), NaN where a record lacks it."""
    return np.array([record.get(key) for record in records], np.float64)


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over a centerd window of 1/30 of the records, at the ends over what there is of it; NaN are left out."""
    half = len(values) // 60
    known = np.isfinite(values)
    kernel = np.ones(2 * half + 1)
    total = np.convolve(np.where(known, values, 0), kernel, "same")
    count = np.convolve(known, kernel, "same")
    return np.where(known, total / np.maximum(count, 1), np.nan)


def _short(text: str, limit: int) -> str:
    text = drawable(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"

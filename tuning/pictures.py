"""Pictures of studies: bars of cases, and the trials of a search."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from mcis.tuning.figures import Figures, deviation, reached

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from optuna.study import Study


def cases_picture(figures: Sequence[Figures], path: Path, title: str, below: str) -> None:
    """Bars of mIoU, a row per case in the groups of the trainings, a plot per column.

    A line shows the deviation over seeds, a dot each seed; `below` says what the columns mean.
    """
    columns = reached(figures)
    plots = max(1, len(columns))
    figure = _figure(2.5 + 2.6 * plots, 1.8 + 0.26 * len(figures))
    for axes, column in zip(figure.subplots(1, plots, sharey=True, squeeze=False)[0], columns, strict=False):
        _draw_bars(axes, figures, column)
    if figures:
        figure.axes[0].set_yticks(_heights(figures), [of.case.name for of in figures], fontsize=7)
        figure.axes[0].invert_yaxis()
    seeds = max((len(of.seeds) for of in figures), default=0)
    figure.suptitle(f"{title}: mean of {seeds} seed(s), their deviation, dots: each", x=0.01, ha="left", fontsize=9)
    figure.supxlabel(fill(below, 40 + 40 * plots), fontsize=6)
    figure.savefig(path, dpi=150, format="png")


def _figure(width: float, height: float) -> "Figure":
    """An empty figure, inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _groups(figures: Sequence[Figures]) -> list[int]:
    """The number of each case's group."""
    groups = list(dict.fromkeys(of.case.group for of in figures))
    return [groups.index(of.case.group) for of in figures]


def _heights(figures: Sequence[Figures]) -> list[float]:
    """Where each case's bar lies, with a gap between groups."""
    return [number + 0.7 * group for number, group in enumerate(_groups(figures))]


def _draw_bars(axes: "Axes", figures: Sequence[Figures], column: str) -> None:
    """The bars of a column; they begin near the smallest figure, since differences are small, as the axis says."""
    values = [value for of in figures for value in of.miou.get(column, [])]
    margin = 0.15 * max(max(values) - min(values), 1.0)
    left = max(0.0, min(values) - margin)
    for height, group, of in zip(_heights(figures), _groups(figures), figures, strict=True):
        if own := of.miou.get(column):
            width, color = mean(own) - left, f"C{group}"
            axes.barh(height, width, left=left, xerr=deviation(own), color=color, alpha=0.5, capsize=2)
            axes.scatter(own, [height] * len(own), s=6, color="black", zorder=3)
    axes.set_xlim(left, max(values) + margin)
    axes.set_title(column, fontsize=9)
    axes.set_xlabel(f"mIoU %, from {left:.1f}", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3)


def search_picture(study: "Study", path: Path, objective: str) -> None:
    """Optuna's picture of a search: the objective over the value of each axis, the later the trial the darker."""
    import matplotlib.pyplot as plt
    from optuna.visualization.matplotlib import plot_slice

    plt.switch_backend("agg")
    with warnings.catch_warnings(action="ignore"), plt.rc_context():  # it is experimental, and sets a style for all
        plots: Any = plot_slice(study, target_name=objective)
    figure = np.ravel(plots)[0].figure
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)

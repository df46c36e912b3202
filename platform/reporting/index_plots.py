"""Plots of an index: which classes occur together, and the sizes of its images."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from numpy.typing import NDArray

from mcis.platform.reporting.plots import Plot, Theme, plot, short, styled

_MOST_NAMED = 40
"""Classes up to which a heat map names each."""
_SIDE, _LARGEST_CELL, _SMALLEST_CELL = 560, 26, 3
"""CSS pixels of a heat map: its side and the bounds of its cells."""


def together_chart(together: NDArray[np.int64], classes: Sequence[str]) -> Plot:
    """Of the images with a row's class, the share in percent that has the column's, as a heat map of (K, K) cells.

    Args:
        together: as `IndexFacts` has it; colors rise with the root of a share, which lifts what is rare.
    """
    shares = 100 * together / np.maximum(np.diagonal(together), 1)[:, None]
    np.fill_diagonal(shares, np.nan)

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        heat = axes.imshow(np.sqrt(shares), cmap=_colors(theme), vmin=0, vmax=10, interpolation="nearest")
        axes.set_facecolor(theme.paper)
        axes.tick_params(color=theme.line, labelcolor=theme.muted, labelsize=9, length=0)
        if len(classes) <= _MOST_NAMED:
            names = [short(name, 20) for name in classes]
            axes.set_yticks(range(len(names)), names, parse_math=False)
            axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
        bar = figure.colorbar(heat, ax=axes, ticks=np.sqrt([1, 10, 30, 100]), shrink=0.5)
        bar.ax.set_yticklabels([f"{share} %" for share in (1, 10, 30, 100)], color=theme.muted, fontsize=9)

    side = len(classes) * int(np.clip(_SIDE // len(classes), _SMALLEST_CELL, _LARGEST_CELL)) + 140
    return plot(side + 60, side, draw)


def size_chart(width: NDArray[Any], height: NDArray[Any]) -> Plot:
    """How many images have about which width and height, (N,), both logarithmic; on the dashed line lie squares."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = styled(figure.add_subplot(), theme, grid="both")
        low, high = min(width.min(), height.min()) / 1.25, max(width.max(), height.max()) * 1.25
        bins = np.geomspace(low, high, 49)
        *_, images = axes.hist2d(width, height, bins=[bins, bins], cmap=_colors(theme), cmin=1, norm="log")
        axes.plot([low, high], [low, high], color=theme.line, linestyle="--", linewidth=1)
        axes.set(xscale="log", yscale="log", aspect="equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(2))
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("width, pixels", color=theme.muted, fontsize=9)
        axes.set_ylabel("height, pixels", color=theme.muted, fontsize=9)
        bar = figure.colorbar(images, ax=axes, shrink=0.6, format=ScalarFormatter())
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
        bar.set_label("images", color=theme.muted, fontsize=9)
        bar.ax.tick_params(labelcolor=theme.muted, labelsize=9)

    return plot(480, 420, draw)


def _colors(theme: Theme) -> Colormap:
    """From nearly the paper to the blue of a theme."""
    return LinearSegmentedColormap.from_list("", [theme.line, theme.series[1]])

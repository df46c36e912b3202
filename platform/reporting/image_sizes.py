"""The sizes of an index's images: quantiles, and a picture of bubbles."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.tables.large_tables import whole
from mcis.platform.runs.scores import grouped

_BINS = 48
"""Bubbles on a side of the picture, at most."""
_QUANTILES = {"least": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "most": 1.0}


class Bubble(NamedTuple):
    """Images of about one size: its center and radius on a square of side 1, and a text."""

    x: float
    y: float
    radius: float
    text: str


class SizeView(NamedTuple):
    """Sizes in figures and as bubbles over the logarithms of width and height.

    Attributes:
        quantiles: names of the quantiles.
        rows: what is measured, and its quantiles as text.
        ticks: pixels, and their position on the sides of the square.
        different: how many different sizes there are.
    """

    quantiles: list[str]
    rows: list[tuple[str, list[str]]]
    bubbles: list[Bubble]
    ticks: list[tuple[int, float]]
    different: int


def size_view(index: pa.Table) -> SizeView | None:
    """The sizes of all images; None where there is no image."""
    if not len(index):
        return None
    width, height = (np.maximum(whole(index[n]).to_numpy(zero_copy_only=False), 1) for n in ("width", "height"))
    measures = {
        "width, pixels": (width, "{:.0f}"),
        "height, pixels": (height, "{:.0f}"),
        "area, megapixels": (width * height.astype(np.int64) / 1e6, "{:.3g}"),
        "width / height": (width / height, "{:.2f}"),
    }
    x, y = np.log2(width), np.log2(height)
    least, most = min(x.min(), y.min()), max(x.max(), y.max())
    low, scale = least - 0.3, most - least + 0.6
    powers = np.arange(np.ceil(low), low + scale)
    return SizeView(
        quantiles=list(_QUANTILES),
        rows=[
            (name, [text.format(v) for v in np.quantile(values, list(_QUANTILES.values()))])
            for name, (values, text) in measures.items()
        ],
        bubbles=_bubbles(x, y, low, scale),
        ticks=[(round(2**p), (p - low) / scale) for p in (powers if len(powers) > 1 else {least, most})],
        different=len(np.unique(width.astype(np.int64) << 32 | height)),
    )


def _bubbles(x: NDArray[np.float64], y: NDArray[np.float64], low: float, scale: float) -> list[Bubble]:
    """Images by cells of a grid, each a bubble at their mean; `low` and `scale` map logarithms to the square."""
    column, row = ((_BINS * (values - low) / scale).astype(np.int64) for values in (x, y))
    _, bins, counts = np.unique(column * _BINS + row, return_inverse=True, return_counts=True)
    centers = [np.bincount(bins, values) / counts for values in (x, y)]
    radius = np.maximum(0.05 * np.sqrt(counts / counts.max()), 0.004)
    return [
        Bubble((cx - low) / scale, 1 - (cy - low) / scale, r, f"about {2**cx:.0f} × {2**cy:.0f}: {grouped(int(n))}")
        for cx, cy, r, n in zip(*centers, radius, counts, strict=True)
    ]

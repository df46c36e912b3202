"""Classes that occur together in an index: counted, and shown as a heat map."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor

from mcis.platform.reporting.html import data_uri
from mcis.platform.reporting.panels import drawable

HEAT = "#4287e8"
"""Color of the heat map: by its opacity it reads on light and dark pages alike."""
_MOST_NAMED, _MOST_LISTED = 40, 20
"""Classes that the heat map names; pairs of classes that are listed."""
_SIDE, _LARGEST_CELL, _SMALLEST_CELL, _LETTER = 560, 26, 3, 6.6
"""Pixels of the heat map: its side and the bounds of its cells, width of a letter of its labels."""
_TAGS_AT_ONCE = 2**16


def count_together(rows: NDArray[np.int32], tags: NDArray[np.int32], images: int, classes: int) -> NDArray[np.int64]:
    """Images that have both of two classes, (K, K); on the diagonal, those that have the class.

    Args:
        rows, tags: every tag with the row that has it, rows ascending; some tags at a time are counted with every tag
            of their image, which few tags per image make cheap.
        images, classes: N and K.
    """
    lengths = np.bincount(rows, minlength=images)
    start = np.cumsum(lengths) - lengths
    total = np.zeros(classes * classes, np.int64)
    for first in range(0, len(rows), _TAGS_AT_ONCE):
        part, part_rows = tags[first : first + _TAGS_AT_ONCE], rows[first : first + _TAGS_AT_ONCE]
        counts = lengths[part_rows]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        others = tags[np.repeat(start[part_rows], counts) + within]
        total += np.bincount(np.repeat(part, counts) * classes + others, minlength=classes * classes)
    return total.reshape(classes, classes)


class HeatMap(NamedTuple):
    """The heat map of K classes and the pairs of classes that occur together most often.

    Attributes:
        map: the picture, (K, K) pixels, as a URI.
        side, cell, margin: pixels of the map, of a cell, and of the margin that holds the labels.
        ticks: offset in pixels and text of each label.
        named: whether the labels are names rather than class indices.
        scale: shares and their opacity, for the key.
        strongest: two classes, images with both, and these as shares of the images with the first and the second.
    """

    map: str
    side: int
    cell: int
    margin: int
    ticks: list[tuple[float, str]]
    named: bool
    scale: list[tuple[float, float]]
    strongest: list[tuple[int, int, int, float, float]]


def heat_map(together: NDArray[np.int64], classes: Sequence[str]) -> HeatMap | None:
    """Of the images with a row's class, the share that has the column's; None where no image has two classes.

    Args:
        together: of `count_together`.
    """
    K = len(classes)
    first, second = np.triu_indices(K, 1)
    both = together[first, second]
    strongest = np.argsort(-both, kind="stable")[: min(_MOST_LISTED, int((both > 0).sum()))]
    if not len(strongest):
        return None
    images = np.diagonal(together)
    cell = int(np.clip(_SIDE // K, _SMALLEST_CELL, _LARGEST_CELL))
    step = 1 if K <= _MOST_NAMED else 10
    texts = [_short(classes[k]) if step == 1 else str(k) for k in range(0, K, step)]
    margin = 12 + round(_LETTER * max(map(len, texts)))
    return HeatMap(
        map=data_uri(_picture(together), "PNG"),
        side=K * cell,
        cell=cell,
        margin=margin,
        ticks=[(margin + (k * step + 0.5) * cell, text) for k, text in enumerate(texts)],
        named=step == 1,
        scale=[(value, float(np.sqrt(value))) for value in (0.01, 0.1, 0.3, 1)],
        strongest=[
            (int(a), int(b), int(n), n / images[a], n / images[b])
            for a, b, n in zip(first[strongest], second[strongest], both[strongest], strict=True)
        ],
    )


def _picture(together: NDArray[np.int64]) -> Image.Image:
    """A pixel per two classes, as opaque as the root of their share, which lifts what is rare."""
    shares = together / np.maximum(np.diagonal(together), 1)[:, None]
    np.fill_diagonal(shares, 0)
    pixels = np.empty((*together.shape, 4), np.uint8)
    pixels[..., :3] = ImageColor.getrgb(HEAT)
    pixels[..., 3] = np.rint(255 * np.sqrt(shares))
    return Image.fromarray(pixels)


def _short(name: str) -> str:
    name = drawable(name)
    return name if len(name) <= 20 else name[:19] + "…"

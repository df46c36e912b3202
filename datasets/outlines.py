"""Outlines as other tools write them, polygons and run lengths, -> pixels, bool (H, W) of an image."""

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from mcis.datasets.errors import UserError


def require_module(name: str) -> Any:
    """A module of the libraries that the extra `formats` installs; UserError where it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"no library {name}", "it, for this format", "pip install 'mcis[formats]'") from None


def coco_pixels(outline: Any, size: tuple[int, int], height: int, width: int) -> NDArray[np.bool_]:
    """Polygons or run lengths -> pixels; ValueError where they are damaged, or of another size than the image."""
    of_runs = tuple(outline["size"]) if isinstance(outline, dict) else size
    if not size == of_runs == (height, width):
        raise ValueError(f"{(height, width)} pixels upright; annotations are of {size}, run lengths of {of_runs}")
    if isinstance(outline, dict):
        return pixels_of_runs(outline["counts"], height, width)
    # Cut to the image, since the memory that they take grows with their lengths.
    polygons = [np.clip(np.reshape(np.array(p, float), (-1, 2)), 0, (width, height)) for p in outline]
    if any(len(polygon) < 3 or not np.isfinite(polygon).all() for polygon in polygons):
        raise ValueError("a polygon without three corners")
    masks = require_module("pycocotools.mask")
    drawn = masks.frPyObjects([polygon.ravel().tolist() for polygon in polygons], height, width)
    return np.asarray(masks.decode(masks.merge(drawn)), bool)


def pixels_of_runs(counts: str | list[int], height: int, width: int) -> NDArray[np.bool_]:
    """COCO's run lengths, column by column, -> pixels; pycocotools leaves memory as it was where they end too soon.
    Compressed ones are numbers of 5 bits a character, the lowest first, while the sixth bit is set; from the fourth on
    they are differences to the last but one."""
    runs, value, shift = [] if isinstance(counts, str) else counts, 0, 0
    for bits in counts.encode() if isinstance(counts, str) else ():
        value, shift = value | (bits - 48 & 31) << shift, shift + 5
        if not bits - 48 & 32:
            value -= (bits - 48 & 16) << shift - 4
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
        if shift > 30:
            break
    if shift or min(runs, default=-1) < 0 or sum(runs) != height * width:
        raise ValueError(f"run lengths that do not end with the image's {height * width} pixels")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def polygon_pixels(corners: NDArray[np.float64], height: int, width: int) -> NDArray[np.bool_]:
    """A polygon (N, 2) of x and y in 0..1 -> its pixels and those of its border, as YOLO's trainers fill it."""
    picture = Image.new("1", (width, height))
    at = np.clip(np.floor(corners * (width, height)), 0, (width - 1, height - 1))
    ImageDraw.Draw(picture).polygon([(x, y) for x, y in at.tolist()], fill=1)
    return np.array(picture)


def cvat_pixels(mask: dict[str, str], height: int, width: int) -> NDArray[np.bool_]:
    """Run lengths of a rectangle, row by row, -> pixels; ValueError where they do not fill it or it is not inside."""
    left, top, wide, high = (int(mask[key]) for key in ("left", "top", "width", "height"))
    if not (0 <= left <= left + wide <= width and 0 <= top <= top + high <= height):
        raise ValueError(f"a mask at {left}, {top} of {wide}x{high} pixels in an image of {width}x{height}")
    runs = pixels_of_runs([int(run) for run in mask["rle"].split(",")], wide, high).T
    return np.pad(runs, ((top, height - top - high), (left, width - left - wide)))

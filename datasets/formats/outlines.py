"""Draws the outlines that other tools write, polygons and run lengths, as pixels: bool (H, W) of an image."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from mcis.datasets.formats.libraries import require_module

_COMPRESSED_RUNS = re.compile("([P-o]{0,5}[0-O])*")
"""COCO's compressed run lengths: numbers of at most 30 bits, 5 in each character; P to o continue, 0 to O end one."""


def coco_pixels(
    outline: dict[str, Any] | list[list[float]], annotated_size: tuple[int, int], height: int, width: int
) -> NDArray[np.bool_]:
    """Draws an outline of COCO.

    Args:
        outline: Run lengths, `{"size": [height, width], "counts": ...}`, or polygons, lists of x and y in pixels.
        annotated_size: Height and width of the image according to the annotations.
        height: Height of the image, pixels.
        width: Width of the image, pixels.

    Returns:
        (H, W), whether a pixel is inside.

    Raises:
        ValueError: The outline is damaged, or its size is not that of the image.
        UserError: Pycocotools is required and not installed.
    """
    outline_size = tuple(outline["size"]) if isinstance(outline, dict) else annotated_size
    if annotated_size != (height, width):
        raise _other_size(annotated_size, height, width)
    if outline_size != annotated_size:
        found = f"run lengths are of {_size_text(outline_size)} pixels"
        raise ValueError(f"{found}, but the image has {_size_text(annotated_size)}")

    if isinstance(outline, list):
        return _polygons_pixels(outline, height, width)
    if isinstance(outline["counts"], str):
        return compressed_run_pixels(outline["counts"], height, width)
    return _run_pixels(outline["counts"], height * width).reshape(width, height).T


def _other_size(annotated_size: tuple[Any, ...], height: int, width: int) -> ValueError:
    found = f"annotations are of an image of {_size_text(annotated_size)} pixels"
    return ValueError(f"{found}, but the file has {_size_text((height, width))}, turned upright")


def _size_text(size: tuple[Any, ...]) -> str:
    """Returns height and width, which may be anything in a damaged file, as width x height."""
    return "x".join(str(side) for side in reversed(size))


def _polygons_pixels(polygons: list[list[float]], height: int, width: int) -> NDArray[np.bool_]:
    """Draws COCO's polygons, lists of x and y, as pycocotools does."""
    masks = require_module("pycocotools.mask")
    flat_polygons: list[list[float]] = []
    for polygon in polygons:
        corners = np.reshape(np.array(polygon, float), (-1, 2))
        corners = np.clip(corners, 0, (width, height))  # pycocotools takes memory in proportion to the edges' lengths
        if len(corners) < 3 or not np.isfinite(corners).all():
            raise ValueError("a polygon without three corners")
        flat_polygons.append(corners.ravel().tolist())

    run_lengths = masks.frPyObjects(flat_polygons, height, width)
    return np.asarray(masks.decode(masks.merge(run_lengths)), bool)


def compressed_run_pixels(counts: str, height: int, width: int) -> NDArray[np.bool_]:
    """Decodes COCO's compressed run lengths, which go column by column.

    Raises:
        ValueError: The run lengths are damaged, or do not add up to the pixels of the image.
    """
    masks = require_module("pycocotools.mask")
    size = height * width
    if not _COMPRESSED_RUNS.fullmatch(counts):  # pycocotools would read beyond the end of the text
        raise _wrong_total(size)

    def decode(*shape: int) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = masks.decode({"size": shape, "counts": counts.encode()})
        return pixels

    try:
        pixels = decode(height, width)
    except ValueError:  # the runs end after the last pixel
        raise _wrong_total(size) from None

    # If the runs end before the last pixel, pycocotools returns uninitialized memory. They then fit fewer pixels too.
    try:
        decode(size - 1, 1)
    except ValueError:
        return np.asarray(pixels, bool)
    raise _wrong_total(size)


def _run_pixels(runs: Sequence[int], size: int) -> NDArray[np.bool_]:
    """Expands run lengths to pixels, (size,): background, object, background, and so on.

    Raises:
        ValueError: A run is negative, or the runs do not add up to `size`.
    """
    if min(runs, default=-1) < 0 or sum(runs) != size:
        raise _wrong_total(size)
    is_object = np.arange(len(runs)) % 2 == 1
    return np.repeat(is_object, runs)


def _wrong_total(size: int) -> ValueError:
    return ValueError(f"run lengths that do not add up to the {size} pixels of the mask")


def polygon_pixels(corners: NDArray[np.float64], height: int, width: int) -> NDArray[np.bool_]:
    """Draws a polygon with its border, as the trainers of YOLO fill it.

    Args:
        corners: (N, 2), x and y as fractions of the image's width and height.
    """
    picture = Image.new("1", (width, height))
    pixels = np.clip(np.floor(corners * (width, height)), 0, (width - 1, height - 1))
    ImageDraw.Draw(picture).polygon([(x, y) for x, y in pixels.tolist()], fill=1)
    return np.array(picture)


def resized_polygon_pixels(
    corners: NDArray[np.float64], annotated_size: tuple[int, int], height: int, width: int
) -> NDArray[np.bool_]:
    """Draws a polygon of an image that may have been resized since it was annotated.

    Args:
        corners: (N, 2), x and y as fractions of the image's width and height.
        annotated_size: Height and width of the image according to the annotations.
        height: Height of the image, pixels.
        width: Width of the image, pixels.

    Raises:
        ValueError: The image has another aspect ratio, for example because it was turned or cropped.
    """
    _check_aspect_ratio(annotated_size, height, width)
    return polygon_pixels(corners, height, width)


def _check_aspect_ratio(annotated_size: tuple[int, int], height: int, width: int) -> None:
    """Raises ValueError if an image differs from the annotated one by more than rounding the sides of a resized one."""
    annotated_height, annotated_width = annotated_size
    difference = abs(width * annotated_height - height * annotated_width)
    if difference >= annotated_height + annotated_width:
        raise _other_size(annotated_size, height, width)


def pixel_polygon_pixels(
    corners: NDArray[np.float64], annotated_size: tuple[int, int], height: int, width: int
) -> NDArray[np.bool_]:
    """Works like `resized_polygon_pixels` for corners in pixels of the annotated image."""
    _check_aspect_ratio(annotated_size, height, width)
    annotated_height, annotated_width = annotated_size
    return polygon_pixels(corners / (annotated_width, annotated_height), height, width)


def cvat_pixels(mask: dict[str, str], annotated_size: tuple[int, int], height: int, width: int) -> NDArray[np.bool_]:
    """Draws a mask of CVAT, the run lengths of a rectangle, row by row.

    Args:
        mask: Attributes left, top, width and height of the rectangle, and rle, the run lengths.
        annotated_size: Height and width of the image according to the annotations.
        height: Height of the image, pixels.
        width: Width of the image, pixels.

    Raises:
        ValueError: The size is not that of the image, the rectangle is not inside the image, or the runs do not add up
            to its pixels.
    """
    if annotated_size != (height, width):
        raise _other_size(annotated_size, height, width)
    left = int(mask["left"])
    top = int(mask["top"])
    box_width = int(mask["width"])
    box_height = int(mask["height"])
    inside = 0 <= left <= left + box_width <= width and 0 <= top <= top + box_height <= height
    if not inside:
        raise ValueError(
            f"a mask at {left}, {top} of {box_width}x{box_height} pixels in an image of {width}x{height} pixels"
        )

    runs = [int(run) for run in mask["rle"].split(",")]
    box = _run_pixels(runs, box_height * box_width).reshape(box_height, box_width)
    pixels = np.zeros((height, width), bool)
    pixels[top : top + box_height, left : left + box_width] = box
    return pixels

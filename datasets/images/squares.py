"""Reads images at one square size, from a cache of decoded images or from their files.

The cache consists of memory-mapped Arrow shards of uint8, so that images are decoded once rather than in every epoch.
It holds the first images of an index, as many as its size limit allows. A reader decodes the other images, and images
of a shard that was removed in the meantime.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.errors import UserError, recompute_command
from mcis.datasets.images.decode import (
    MAX_PIXELS,
    PILLOW_MAX_PIXELS,
    DecodedImage,
    RejectedImage,
    decode_picture,
    decode_square,
)
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import RELOCATE, read_decoded
from mcis.datasets.tables.memory_mapped import CachedRows, cache_table

_SQUARES = "squares"
"""The column of images that were read before their rows are mapped."""


def read_rgb(
    uri: str,
    size: int | None = None,
    *,
    max_side: int | None = None,
    content_hash: str | None = None,
    value_range: ValueRange | None = None,
) -> NDArray[np.uint8]:
    """Reads an image of an index. It could be decoded when the index was made, so a failure is an error.

    Args:
        uri: Path or URI of the file.
        size: Side of the square that the image is resized to (`decode_square`), pixels. None: keep its shape.
        max_side: Longest side of an image that keeps its shape, pixels; a larger one is resized (`decode_picture`).
        content_hash: SHA-256 of the indexed file, which the file must match. None: the content is not checked.
        value_range: `data.value_range` of the index, see `decode_picture`.

    Returns:
        RGB, (H, W, 3) or (size, size, 3), uint8.

    Raises:
        UserError: The file is gone, damaged or replaced since it was indexed, or cannot be read at present
            (`UnreachableFile`).
    """
    expected = "the file as it was indexed"
    remedy = f"restore it, or make the index again: {recompute_command('index')}"

    def decode(data: bytes) -> NDArray[np.uint8]:
        if content_hash is not None and hashlib.sha256(data).hexdigest() != content_hash:
            raise UserError(f"{uri} was replaced or changed since it was indexed", expected, remedy)
        if size is None:
            return decode_picture(
                data, min_side=1, max_pixels=PILLOW_MAX_PIXELS, max_side=max_side, value_range=value_range
            ).rgb
        return decode_square(data, size, max_pixels=PILLOW_MAX_PIXELS, value_range=value_range)

    try:
        return read_decoded(uri, decode)
    except FileNotFoundError:
        raise UserError(
            f"{uri} cannot be read any more: it does not exist", expected, f"restore it; {RELOCATE}"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{uri} cannot be read any more ({error})", expected, remedy) from None


def add_squares(size: int, value_range: ValueRange | None, rows: pa.Table) -> pa.Table:
    """Reads the images of some rows of an index. Returns the rows with the images as a column for `read_squares`."""
    squares = cache_table(read_squares(rows, size, value_range))
    return rows.append_column(_SQUARES, squares["rows"])


def read_squares(rows: pa.Table, size: int, value_range: ValueRange | None = None) -> NDArray[np.uint8]:
    """Reads the images of some rows of an index as squares, (N, S, S, 3) uint8.

    Args:
        rows: Columns `uri` and `content_hash`; or the result of `add_squares`, whose images were read before.
        size: S, side of the squares, pixels.
        value_range: See `read_rgb`.

    Raises:
        UserError: See `read_rgb`.
    """
    if _SQUARES in rows.column_names:
        values = rows[_SQUARES].combine_chunks().flatten().to_numpy()
        return values.reshape(len(rows), size, size, 3).copy()  # torch takes no read-only arrays
    files = zip(rows["uri"].to_pylist(), rows["content_hash"].to_pylist(), strict=True)
    return np.stack([read_rgb(uri, size, content_hash=sha256, value_range=value_range) for uri, sha256 in files])


def read_picture(
    uri: str,
    *,
    min_side: int = 1,
    max_pixels: int = MAX_PIXELS,
    max_side: int | None = None,
    value_range: ValueRange | None = None,
) -> DecodedImage:
    """Reads an image that is in no index. Returns it, resized if it is too long, with the size of its file.

    Args:
        uri: Path or URI of the file.
        min_side: Smallest width and height, pixels.
        max_pixels: Largest width x height.
        max_side: Longest side of the result, pixels. None: no limit.
        value_range: See `decode_picture`.

    Raises:
        RejectedImage: The file is absent or its access is refused, or it holds no picture (`decode_picture`).
        UnreachableFile: The file cannot be read at present.
    """
    decode = functools.partial(
        decode_picture, min_side=min_side, max_pixels=max_pixels, max_side=max_side, value_range=value_range
    )
    try:
        return read_decoded(uri, decode)
    except RejectedImage:
        raise
    except (OSError, ValueError) as error:  # a path with a null byte raises ValueError
        raise RejectedImage(f"cannot be read: {error_text(error)}") from None


def image_bytes(size: int) -> int:
    """Returns the size in bytes of a cached image whose side is `size` pixels."""
    return 3 * size * size


def make_squares(size: int, value_range: ValueRange | None = None) -> Callable[[pa.Table], pa.Table]:
    """Returns a function that decodes rows of an index to a shard of the cache: one image (S, S, 3) uint8 per row."""

    def decode_rows(rows: pa.Table) -> pa.Table:
        return cache_table(read_squares(rows, size, value_range))

    return decode_rows


class Squares:
    """Reads images of an index by their positions. It can be pickled, because shards are opened on first use.

    Args:
        uris: Paths or URIs of the N images.
        size: S, side of the squares, pixels.
        cache: Folder of shards `part-<first>-<last + 1>.arrow` from `make_squares`, or None.
        hashes: SHA-256 of the indexed files, which the files must match. None: the content is not checked.
        value_range: See `read_rgb`.
    """

    def __init__(
        self,
        uris: Sequence[str],
        size: int,
        *,
        cache: Path | None = None,
        hashes: Sequence[str] | None = None,
        value_range: ValueRange | None = None,
    ):
        self.uris = uris
        self.size = size
        self.hashes = hashes
        self.value_range = value_range
        self.cache = CachedRows(cache, (size, size, 3))

    @property
    def is_cached(self) -> bool:
        """Whether the cache holds all images. A cache of some holds the first ones."""
        return self.cache.row(len(self.uris) - 1) is not None

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns the images at N positions, (N, S, S, 3) uint8. Raises UserError, see `read_rgb`."""
        images = np.empty((len(positions), self.size, self.size, 3), np.uint8)

        for image, position in zip(images, positions.tolist(), strict=True):
            cached = self.cache.row(position)
            image[:] = self.read(position, self.size) if cached is None else cached

        return images

    def read(self, position: int, size: int | None = None) -> NDArray[np.uint8]:
        """Reads the image at a position from its file (`read_rgb`)."""
        content_hash = self.hashes[position] if self.hashes else None
        return read_rgb(self.uris[position], size, content_hash=content_hash, value_range=self.value_range)

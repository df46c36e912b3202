"""Images at one size: from a cache of decoded images, memory-mapped Arrow shards of uint8, or from their files.

With the cache, images are decoded once rather than in every epoch. It holds the first images of an index, as many as
its bound allows; a reader decodes the others, and those of a shard that was removed in the meantime.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import (
    MAX_PIXELS,
    PILLOW_MAX_PIXELS,
    Picture,
    RejectedImage,
    decode_picture,
    decode_square,
)
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import read_decoded
from mcis.datasets.tables.memory_mapped import CachedRows, cache_table


def read_rgb(
    uri: str, size: int | None = None, *, max_side: int | None = None, content_hash: str | None = None
) -> NDArray[np.uint8]:
    """Reads an image of the index, which was decoded before when the index was made.

    Args:
        uri: path or URI of the file.
        size: side of the square that the image is made to fit (`decode_square`), pixels; None for the image as it is.
        max_side: longest side of an image that is no square, pixels; a larger one is made to fit (`decode_picture`).
        content_hash: SHA-256 of the file that the index has, which is compared; None = any file will do.

    Returns:
        RGB, (H, W, 3) or (size, size, 3), uint8.

    Raises:
        UserError: the file is gone, damaged or replaced since the index was made, or cannot be read at present.
    """

    as_indexed = "the file as it was indexed", "restore it, or repeat `index`"

    def decode(data: bytes) -> NDArray[np.uint8]:
        if content_hash is not None and hashlib.sha256(data).hexdigest() != content_hash:
            raise UserError(f"{uri} was replaced or changed since it was indexed", *as_indexed)
        if size is None:
            return decode_picture(data, min_side=1, max_pixels=PILLOW_MAX_PIXELS, max_side=max_side).rgb
        return decode_square(data, size, max_pixels=PILLOW_MAX_PIXELS)

    try:
        return read_decoded(uri, decode)
    except (OSError, ValueError) as error:
        raise UserError(f"{uri} cannot be read any more ({error})", *as_indexed) from None


def read_squares(rows: pa.Table, size: int) -> NDArray[np.uint8]:
    """The images of some rows of an index as squares, (N, S, S, 3), of the files indexed; errors as of `read_rgb`."""
    files = zip(rows["uri"].to_pylist(), rows["content_hash"].to_pylist(), strict=True)
    return np.stack([read_rgb(uri, size, content_hash=digest) for uri, digest in files])


def read_picture(uri: str, *, min_side: int = 1, max_pixels: int = MAX_PIXELS, max_side: int | None = None) -> Picture:
    """Reads an image that no index has, at most `max_side` pixels long, and the size of its file.

    Args:
        uri: path or URI of the file.
        min_side: least width and height, pixels.
        max_pixels: greatest width x height.

    Raises:
        RejectedImage: the file is absent or refused, or gives no picture (`decode_picture`).
        UserError: it cannot be read at present.
    """
    decode = functools.partial(decode_picture, min_side=min_side, max_pixels=max_pixels, max_side=max_side)
    try:
        return read_decoded(uri, decode)
    except RejectedImage:
        raise
    except (OSError, ValueError) as error:  # ValueError: no path, as it holds a null byte
        raise RejectedImage(f"cannot be read: {error_text(error)}") from None


def image_bytes(size: int) -> int:
    """Bytes of an image in the cache, whose side is `size` pixels."""
    return 3 * size * size


def make_squares(size: int) -> Callable[[pa.Table], pa.Table]:
    """A decoder of rows of an index into a shard of the cache, per row an image (S, S, 3) uint8."""
    return lambda rows: cache_table(read_squares(rows, size))


class Squares:
    """Reads images of an index by their positions; can be pickled, as it opens a shard only when one is read.

    Args:
        uris: of the N images.
        size: S, pixels.
        cache: folder of shards `part-<first>-<last + 1>.arrow` written by `make_squares`, or None.
        hashes: SHA-256 of the images' files as they were indexed, which are compared; None = any files will do.
    """

    def __init__(
        self, uris: Sequence[str], size: int, *, cache: Path | None = None, hashes: Sequence[str] | None = None
    ):
        self.uris, self.size, self.hashes = uris, size, hashes
        self.cache = CachedRows(cache, (size, size, 3))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The images at N positions, (N, S, S, 3) uint8; errors as of `read_rgb`."""
        images = np.empty((len(positions), self.size, self.size, 3), np.uint8)
        for image, position in zip(images, positions.tolist(), strict=True):
            cached = self.cache.row(position)
            image[:] = self.read(position, self.size) if cached is None else cached
        return images

    def read(self, position: int, size: int | None = None) -> NDArray[np.uint8]:
        """The image at a position, from its file (`read_rgb`)."""
        digest = self.hashes[position] if self.hashes else None
        return read_rgb(self.uris[position], size, content_hash=digest)

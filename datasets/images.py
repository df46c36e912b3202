"""Images at one size: from a cache of decoded images, memory-mapped Arrow shards of uint8, or from their files.

With the cache, images are decoded once rather than in every epoch. It holds the first images of an index, as many as
its bound allows; a reader decodes the others, and those of a shard that was removed in the meantime.
"""

import bisect
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.decode import decode_rgb, decode_square
from mcis.datasets.errors import UserError
from mcis.datasets.files import read_bytes


def read_rgb(uri: str, size: int | None = None, *, middle: bool = False) -> NDArray[np.uint8]:
    """Reads an image of the index, which was decoded before when the index was made.

    Args:
        uri: path or URI of the file.
        size: side of the square that the image is made to fit (`decode_square`), pixels; None for the image as it is.
        middle: whether the square shows the middle of the image, see `decode_square`.

    Returns:
        RGB, (H, W, 3) or (size, size, 3), uint8.

    Raises:
        UserError: the file is gone or damaged since the index was made.
    """
    try:
        data = read_bytes(uri)
        return decode_rgb(data, min_side=1) if size is None else decode_square(data, size, middle=middle)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{uri} cannot be read any more ({error})",
            "the file as it was indexed",
            "restore it, or repeat `index`",
        ) from None


def image_bytes(size: int) -> int:
    """Bytes of an image in the cache, whose side is `size` pixels."""
    return 3 * size * size


class MakeSquares:
    """Decodes rows of an index into a shard of the cache: column `pixels`, per row an image (S, S, 3) uint8, flat.

    Args:
        size: S, pixels.
        middle: see `Squares`.
    """

    def __init__(self, size: int, middle: bool = False):
        self.size, self.middle = size, middle

    def __call__(self, rows: pa.Table) -> pa.Table:
        pixels = np.stack([read_rgb(uri, self.size, middle=self.middle) for uri in rows["uri"].to_pylist()])
        return pa.table({"pixels": pa.FixedSizeListArray.from_arrays(pixels.ravel(), image_bytes(self.size))})


class Squares:
    """Reads images of an index by their positions; can be pickled, as it opens a shard only when one is read.

    Args:
        uris: of the N images.
        size: S, pixels.
        middle: whether an image shows its middle square; else the whole image is squashed, without its aspect ratio.
        cache: folder of shards `part-<first>-<last + 1>.arrow` written by `MakeSquares`, or None.
    """

    def __init__(self, uris: list[str], size: int, *, middle: bool = False, cache: Path | None = None):
        self.uris, self.size, self.middle = uris, size, middle
        self.shards = sorted(cache.glob("part-*.arrow")) if cache else []
        self.spans = [tuple(map(int, path.stem.split("-")[1:])) for path in self.shards]
        self.opened: dict[int, NDArray[np.uint8] | None] = {}

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The images at N positions, (N, S, S, 3) uint8.

        Raises:
            UserError: a file is gone or damaged since the index was made.
        """
        images = np.empty((len(positions), self.size, self.size, 3), np.uint8)
        for image, position in zip(images, positions.tolist(), strict=True):
            cached = self._cached(position)
            image[:] = self._decoded(position) if cached is None else cached
        return images

    def _decoded(self, position: int) -> NDArray[np.uint8]:
        return read_rgb(self.uris[position], self.size, middle=self.middle)

    def _cached(self, position: int) -> NDArray[np.uint8] | None:
        shard = bisect.bisect_right(self.spans, (position, 2**63)) - 1
        if shard < 0 or position >= self.spans[shard][1]:
            return None
        if shard not in self.opened:
            self.opened[shard] = self._open(self.shards[shard])
        images = self.opened[shard]
        return None if images is None else images[position - self.spans[shard][0]]

    def _open(self, path: Path) -> NDArray[np.uint8] | None:
        try:
            column = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)["pixels"]
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(
                f"{path} is damaged ({error})", "a shard of decoded images", "remove its folder and repeat the command"
            ) from None
        return column.flatten().to_numpy(zero_copy_only=True).reshape(-1, self.size, self.size, 3)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "opened": {}}

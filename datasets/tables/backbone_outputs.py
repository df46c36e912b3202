"""What a frozen backbone makes of images, computed once: each image's output and that of its mirror image."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.tables.memory_mapped import CachedRows

COLUMN = "features"


def features_bytes(shape: tuple[int, int, int]) -> int:
    """Bytes of the features of an image, of shape (C, H, W), and of its mirror image, float16."""
    return 2 * 2 * int(np.prod(shape))


class Statistics(NamedTuple):
    """Mean and standard deviation of a backbone's channels, (C,) float32 both, over all positions of some images."""

    mean: NDArray[np.float32]
    deviation: NDArray[np.float32]


class Features:
    """Reads the backbone's outputs of images of an index by their positions; can be pickled.

    Args:
        uris: of the N images, for messages.
        folder: of the shards, each row (2, C, H, W) float16: of the image and of its mirror image.
        shape: (C, H, W).
    """

    def __init__(self, uris: Sequence[str], folder: Path, shape: tuple[int, int, int]):
        self.uris, self.shape, self.folder = uris, shape, folder
        self.cache = CachedRows(folder, COLUMN, (2, *shape))

    @property
    def row_bytes(self) -> int:
        """Bytes of an image's output."""
        return features_bytes(self.shape) // 2

    def __call__(self, positions: NDArray[np.int64], mirrored: NDArray[np.bool_] | None = None) -> NDArray[np.float16]:
        """The outputs of the images at N positions, (N, C, H, W).

        Args:
            mirrored: (N,), of which the mirror image's is wanted; None = of none.

        Raises:
            UserError: the cache holds an image no longer.
        """
        out = np.empty((len(positions), *self.shape), np.float16)
        which = np.zeros(len(positions), np.int64) if mirrored is None else mirrored.astype(np.int64)
        for image, position, view in zip(out, positions.tolist(), which.tolist(), strict=True):
            row = self.cache.row(position)
            if row is None:
                raise UserError(
                    f"{self.folder} holds no features of {self.uris[position]} any more",
                    "the features that the training began with",
                    "repeat the command, which computes them again",
                )
            image[:] = row[view]
        return out

    def statistics(self, positions: NDArray[np.int64]) -> Statistics:
        """Those of the images at some positions."""
        count, total, squares = 0, np.zeros(self.shape[0]), np.zeros(self.shape[0])
        for position in positions:
            channels = self(np.array([position]))[0].reshape(self.shape[0], -1).astype(np.float64)
            count += channels.shape[1]
            total += channels.sum(axis=1)
            squares += (channels**2).sum(axis=1)
        mean = total / count
        deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
        return Statistics(mean.astype(np.float32), deviation.astype(np.float32))

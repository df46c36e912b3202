"""Batches of pairs and of crops as named records, and the decoders that make them from step numbers."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.images.squares import Squares, read_rgb
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.sampling.batch_stream import Batch, WorkerShard
from mcis.datasets.sampling.crops import CROP_DRAWS, Crop, random_crop
from mcis.datasets.sampling.keyed_random import FLIP_DRAW, DrawPurpose, uniforms
from mcis.datasets.sampling.pairs import PairRows, PairSampler, epoch_rows
from mcis.datasets.tables.memory_mapped import Features
from mcis.datasets.tables.shards import Shards
from mcis.datasets.tags import Tags


@dataclass(frozen=True, kw_only=True, eq=False)
class PairBatch(Batch):
    """Decoded pairs of images (m, n).

    Attributes:
        images_m, images_n: (N, S, S, 3) uint8 images, or their features from a frozen backbone, (N, C, H, W) float16;
            0 for images whose features are not cached.
        m, n: Positions of the images in the index, (N,).
        epoch, pair_domains: Epoch and domains of each pair (see `PairRows`), (N,).
        row: Number of each pair in the endless stream, (N,). Random numbers for a pair are keyed by it, since an image
            may occur in several pairs of an epoch.
        unshared_m: Whether any image m of the whole batch, over all workers, has a tag that its partner lacks, (N,)
            bool; the same value in all rows.
        unshared_n: The same for images n.
        pixels_m, pixels_n: (N, S, S, 3) uint8, the images whose features are not cached; 0 for the others. None if the
            features of all images of the data set are cached, or none are used.
    """

    images_m: NDArray[Any]
    images_n: NDArray[Any]
    m: NDArray[np.int64]
    n: NDArray[np.int64]
    epoch: NDArray[np.int64]
    pair_domains: NDArray[np.uint8]
    row: NDArray[np.int64]
    unshared_m: NDArray[np.bool_]
    unshared_n: NDArray[np.bool_]
    pixels_m: NDArray[np.uint8] | None = None
    pixels_n: NDArray[np.uint8] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class CropBatch(Batch):
    """Random crops of images and of their pseudo masks.

    Attributes:
        images: (N, S, S, 3) uint8.
        labels: (N, S, S) uint8, 255 = ignore.
        index: Positions of the images among the training images, (N,).
        epoch: Epoch of each crop, (N,).
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    index: NDArray[np.int64]
    epoch: NDArray[np.int64]


@dataclass(eq=False)
class PairDecoder:
    """Decodes the pairs of a worker's steps.

    Attributes:
        images: Images of the index, or their features.
        sampler: Draws the pairs.
        batch: Pairs per step, over all workers.
        shard: Steps and rows of the worker.
        crop_scales: If given, images are random crops (`random_crop`), keyed by (seed, row, image); otherwise whole.
        hflip: Whether features of the horizontally flipped image are used with probability 1/2. The random number is
            the one that flips images.
        uncached: Images of the index, some of whose features are not cached; None: all are, or none are used.
    """

    images: Squares | Features
    sampler: PairSampler
    _: KW_ONLY
    batch: int
    shard: WorkerShard
    crop_scales: Sequence[float] | None = None
    hflip: bool = False
    uncached: Squares | None = None

    def __call__(self, steps: NDArray[np.int64]) -> PairBatch:
        worker_positions = self.shard.positions(self.batch)
        first_rows = (steps + self.shard.start) * self.batch
        batches = [self.sampler.rows(first, first + self.batch) for first in first_rows.tolist()]

        m = np.concatenate([rows.m[worker_positions] for rows in batches])
        n = np.concatenate([rows.n[worker_positions] for rows in batches])
        row = np.concatenate([first + worker_positions for first in first_rows])
        unshared = np.repeat(
            [_has_unshared_labels(rows, self.sampler.tags) for rows in batches], len(worker_positions), axis=0
        )

        return PairBatch(
            images_m=self._images(m, row, DrawPurpose.PAIR_CROP_M, DrawPurpose.AUGMENT_M),
            images_n=self._images(n, row, DrawPurpose.PAIR_CROP_N, DrawPurpose.AUGMENT_N),
            m=m,
            n=n,
            epoch=np.concatenate([rows.epoch[worker_positions] for rows in batches]),
            pair_domains=np.concatenate([rows.pair_domains[worker_positions] for rows in batches]),
            row=row,
            unshared_m=unshared[:, 0],
            unshared_n=unshared[:, 1],
            pixels_m=self._pixels(m, row, DrawPurpose.AUGMENT_M),
            pixels_n=self._pixels(n, row, DrawPurpose.AUGMENT_N),
        )

    def _images(
        self, positions: NDArray[np.int64], row: NDArray[np.int64], crop: DrawPurpose, augment: DrawPurpose
    ) -> NDArray[Any]:
        if isinstance(self.images, Features):
            return self.images(positions, self._is_flipped(positions, row, augment))

        if self.crop_scales is None:
            return self.images(positions)

        draws = uniforms(crop, self.sampler.seed, row, positions, count=CROP_DRAWS)
        return np.stack([self._crop(*pair) for pair in zip(positions.tolist(), draws, strict=True)])

    def _pixels(
        self, positions: NDArray[np.int64], row: NDArray[np.int64], augment: DrawPurpose
    ) -> NDArray[np.uint8] | None:
        """Returns the images whose features are not cached, flipped as the features would be; 0 for the others."""
        if self.uncached is None:
            return None

        assert isinstance(self.images, Features)
        missing = np.flatnonzero(~self.images.holds(positions))
        pixels = np.zeros((len(positions), self.uncached.size, self.uncached.size, 3), np.uint8)
        pixels[missing] = self.uncached(positions[missing])
        flipped = missing[self._is_flipped(positions, row, augment)[missing]]
        pixels[flipped] = pixels[flipped, :, ::-1]
        return pixels

    def _is_flipped(
        self, positions: NDArray[np.int64], row: NDArray[np.int64], augment: DrawPurpose
    ) -> NDArray[np.bool_]:
        """Returns which images are horizontally flipped, (N,)."""
        draws = uniforms(augment, self.sampler.seed, row, positions, count=FLIP_DRAW + 1)
        return self.hflip & (draws[:, FLIP_DRAW] < 0.5)

    def _crop(self, position: int, draws: NDArray[np.float64]) -> NDArray[np.uint8]:
        assert isinstance(self.images, Squares)
        rgb = self.images.read(position)
        no_labels = np.zeros(rgb.shape[:2], np.uint8)
        scales = self.crop_scales or ()
        return random_crop(rgb, no_labels, size=self.images.size, scales=scales, hflip=False, draws=draws).image


def _has_unshared_labels(rows: PairRows, tags: Tags) -> tuple[bool, bool]:
    """Returns whether any m has a tag that its n lacks, and whether any n has a tag that its m lacks."""
    tags_m = tags.matrix(rows.m)
    tags_n = tags.matrix(rows.n)
    return bool((tags_m & ~tags_n).any()), bool((tags_n & ~tags_m).any())


@dataclass(frozen=True, eq=False)
class MaskedImages:
    """Training images and their label masks.

    Attributes:
        ids, uris: Names and files of the images.
        masks: Table of the masks.
        max_side: Longest side at which images are read and masks were made, pixels; None: original size.
        hashes: SHA-256 of the indexed image files, compared on reading; None: not compared.
        value_range: See `read_rgb`.
        mask_positions: (N,) position of each image in the table of masks; None: masks are found by the images' ids.
    """

    ids: Sequence[str]
    uris: Sequence[str]
    masks: Shards
    max_side: int | None = None
    hashes: Sequence[str] | None = None
    value_range: ValueRange | None = None
    mask_positions: NDArray[np.int64] | None = None

    def read(self, position: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Returns an image, (H, W, 3), and its mask, (H, W), 255 = ignore."""
        content_hash = self.hashes[position] if self.hashes else None
        uri = self.uris[position]
        image = read_rgb(uri, max_side=self.max_side, content_hash=content_hash, value_range=self.value_range)
        mask_position = None if self.mask_positions is None else int(self.mask_positions[position])
        mask = decode_labels(self.masks.rows(self.ids[position], mask_position)["mask"][0].as_py())
        return image, mask


@dataclass(frozen=True, eq=False)
class CropDecoder:
    """Decodes random crops of the training images and their masks.

    Attributes:
        images: The training images and their masks.
        seed: Seed of all random numbers.
        batch: Images per step, over all workers.
        shard: Steps and rows of the worker.
        size: Side of a crop, pixels.
        scales, hflip: See `random_crop`.
    """

    images: MaskedImages
    _: KW_ONLY
    seed: int
    batch: int
    shard: WorkerShard
    size: int
    scales: Sequence[float]
    hflip: bool

    def __call__(self, steps: NDArray[np.int64]) -> CropBatch:
        worker_positions = self.shard.positions(self.batch)
        indices = []
        epochs = []
        for step in steps.tolist():
            first = (step + self.shard.start) * self.batch
            image, epoch_of_row = epoch_rows(self.seed, len(self.images.uris), first, first + self.batch)
            indices.append(image[worker_positions])
            epochs.append(epoch_of_row[worker_positions])

        index = np.concatenate(indices)
        epoch = np.concatenate(epochs)
        draws = uniforms(DrawPurpose.SEGMENTER_CROP, self.seed, epoch, index, count=CROP_DRAWS)
        crops = [self._crop(position, numbers) for position, numbers in zip(index.tolist(), draws, strict=True)]

        return CropBatch(
            images=np.stack([crop.image for crop in crops]),
            labels=np.stack([crop.labels for crop in crops]),
            index=index,
            epoch=epoch,
        )

    def _crop(self, position: int, draws: NDArray[np.float64]) -> Crop:
        image, mask = self.images.read(position)
        return random_crop(image, mask, size=self.size, scales=self.scales, hflip=self.hflip, draws=draws)

"""The batches of both trainings, as named records, and the decoders that make them from step numbers."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.images.decode import decode_labels
from mcis.datasets.images.squares import Squares, read_rgb
from mcis.datasets.sampling.batch_stream import Batch, WorkerShard
from mcis.datasets.sampling.crops import CROP_DRAWS, random_crop
from mcis.datasets.sampling.keyed_random import FLIP_DRAW, DrawPurpose, uniforms
from mcis.datasets.sampling.pairs import PairRows, PairSampler, epoch_rows
from mcis.datasets.tables.memory_mapped import Features
from mcis.datasets.tables.shards import Shards
from mcis.datasets.tags import Tags


@dataclass(frozen=True, kw_only=True, eq=False)
class PairBatch(Batch):
    """Decoded pairs of images (m, n).

    Attributes:
        images_m, images_n: (N, S, S, 3) uint8; or what a frozen backbone makes of them, (N, C, H, W) float16.
        m, n: the images' positions in the index, (N,).
        epoch, kind: of each pair (see `PairRows`), (N,).
        row: the pair's number in the endless stream, (N,). What is drawn for a pair is drawn from it, since an image
            may be in several pairs of an epoch.
        unshared_m, unshared_n: whether any pair of the whole batch, those of other workers included, has a label on
            that side that the other side lacks, (N,) bool.
    """

    images_m: NDArray[Any]
    images_n: NDArray[Any]
    m: NDArray[np.int64]
    n: NDArray[np.int64]
    epoch: NDArray[np.int64]
    kind: NDArray[np.uint8]
    row: NDArray[np.int64]
    unshared_m: NDArray[np.bool_]
    unshared_n: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class CropBatch(Batch):
    """Random crops of images and of their pseudo masks.

    Attributes:
        images: (N, S, S, 3) uint8.
        labels: (N, S, S) uint8, 255 = ignore.
        index: the images' positions among the training images, (N,).
        epoch: the epoch that each crop belongs to, (N,).
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    index: NDArray[np.int64]
    epoch: NDArray[np.int64]


@dataclass(eq=False)
class PairDecoder:
    """Decodes the pairs of a worker's steps.

    Attributes:
        images: of the index, or their features.
        sampler: draws the pairs.
        batch: pairs per step, over all workers.
        crop_scales: where given, images are random crops (`random_crop`), drawn from (seed, row, image); else whole.
        hflip: whether features are those of the mirror image with probability 1/2, by the draw that mirrors images.
    """

    images: Squares | Features
    sampler: PairSampler
    _: KW_ONLY
    batch: int
    shard: WorkerShard
    crop_scales: Sequence[float] | None = None
    hflip: bool = False

    def __call__(self, steps: NDArray[np.int64]) -> PairBatch:
        of_worker = self.shard.positions(self.batch)
        firsts = (steps + self.shard.start) * self.batch
        batches = [self.sampler.rows(first, first + self.batch) for first in firsts.tolist()]
        m, n, epoch, kind = (np.concatenate([rows[column][of_worker] for rows in batches]) for column in range(4))
        row = np.concatenate([first + of_worker for first in firsts])
        unshared = np.repeat([_unshared(rows, self.sampler.tags) for rows in batches], len(of_worker), axis=0)
        return PairBatch(
            images_m=self._images(m, row, DrawPurpose.PAIR_CROP_M, DrawPurpose.AUGMENT_M),
            images_n=self._images(n, row, DrawPurpose.PAIR_CROP_N, DrawPurpose.AUGMENT_N),
            m=m,
            n=n,
            epoch=epoch,
            kind=kind,
            row=row,
            unshared_m=unshared[:, 0],
            unshared_n=unshared[:, 1],
        )

    def _images(
        self, positions: NDArray[np.int64], row: NDArray[np.int64], crop: DrawPurpose, augment: DrawPurpose
    ) -> NDArray[Any]:
        if isinstance(self.images, Features):
            draws = uniforms(augment, self.sampler.seed, row, positions, count=FLIP_DRAW + 1)
            return self.images(positions, self.hflip & (draws[:, FLIP_DRAW] < 0.5))
        if self.crop_scales is None:
            return self.images(positions)
        draws = uniforms(crop, self.sampler.seed, row, positions, count=CROP_DRAWS)
        return np.stack([self._crop(*pair) for pair in zip(positions.tolist(), draws, strict=True)])

    def _crop(self, position: int, draws: NDArray[np.float64]) -> NDArray[np.uint8]:
        assert isinstance(self.images, Squares)
        rgb = self.images.read(position)
        empty = np.zeros(rgb.shape[:2], np.uint8)
        crop = random_crop(rgb, empty, size=self.images.size, scales=self.crop_scales or (), hflip=False, draws=draws)
        return crop.image


def _unshared(rows: PairRows, tags: Tags) -> tuple[bool, bool]:
    """Whether some pair has a label on the side of m, and of n, that its other side lacks."""
    tags_m, tags_n = tags.matrix(rows.m), tags.matrix(rows.n)
    return bool((tags_m & ~tags_n).any()), bool((tags_n & ~tags_m).any())


@dataclass(frozen=True, eq=False)
class MaskedImages:
    """Training images and their label masks.

    Attributes:
        ids, uris: of the images.
        masks: table of their masks.
        max_side: longest side at which the images are read and their masks were made, pixels; None = as they are.
        hashes: SHA-256 of the images' files as they were indexed, which are compared; None = any files will do.
    """

    ids: Sequence[str]
    uris: Sequence[str]
    masks: Shards
    max_side: int | None = None
    hashes: Sequence[str] | None = None

    def read(self, position: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """An image, (H, W, 3), and its mask, (H, W), 255 = ignore."""
        digest = self.hashes[position] if self.hashes else None
        image = read_rgb(self.uris[position], max_side=self.max_side, content_hash=digest)
        return image, decode_labels(self.masks.rows(self.ids[position])["mask"][0].as_py())


@dataclass(frozen=True, eq=False)
class CropDecoder:
    """Decodes random crops of the training images and of their masks.

    Attributes:
        seed: of all draws.
        batch: images per step, over all workers.
        size: side of a crop, pixels.
        scales, hflip: see `random_crop`.
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
        of_worker = self.shard.positions(self.batch)
        firsts = ((steps + self.shard.start) * self.batch).tolist()
        batches = [epoch_rows(self.seed, len(self.images.uris), first, first + self.batch) for first in firsts]
        index = np.concatenate([image[of_worker] for image, _ in batches])
        epoch = np.concatenate([of_row[of_worker] for _, of_row in batches])
        draws = uniforms(DrawPurpose.SEGMENTER_CROP, self.seed, epoch, index, count=CROP_DRAWS)
        crops = [
            random_crop(
                *self.images.read(position), size=self.size, scales=self.scales, hflip=self.hflip, draws=numbers
            )
            for position, numbers in zip(index.tolist(), draws, strict=True)
        ]
        return CropBatch(
            images=np.stack([crop.image for crop in crops]),
            labels=np.stack([crop.labels for crop in crops]),
            index=index,
            epoch=epoch,
        )

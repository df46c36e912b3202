"""What trainings on crops of images and label masks share: the schedule, the crops, and where the backbone starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import CropBatch, CropDecoder
from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.datasets.tables.shards import Shards
from mcis.models.augment import Augmentation
from mcis.models.networks import normalization_of
from mcis.platform.config.training import AffinityNetConfig, SegmenterConfig
from mcis.platform.engine.learner import Schedule, device_images


@dataclass(frozen=True, kw_only=True)
class CropLearner:
    """A training on crops of images with a label mask each; a subclass adds the network and its losses.

    Attributes:
        image_ids, uris: of the training images.
        masks: table of their label masks.
        pretrained: file of the backbone's pretrained weights; None = it is trained from scratch.
        max_side: longest side at which images are read, pixels, and their masks were made; None = as they are.
    """

    config: AffinityNetConfig | SegmenterConfig
    seed: int
    image_ids: Sequence[str]
    uris: Sequence[str]
    masks: Shards
    pretrained: Path | None
    max_side: int | None = None
    hashes: Sequence[str] | None = None

    @property
    def schedule(self) -> Schedule:
        c = self.config
        steps = c.updates(len(self.uris))
        return Schedule(
            batch=c.batch,
            images_per_sample=1,
            steps=steps,
            schedule_steps=steps,
            steps_per_epoch=len(self.uris) / c.batch,
            seed=self.seed,
            optimizer=c.optimizer,
        )

    @property
    def rests_parameters(self) -> bool:
        return False

    def decoder(self, shard: WorkerShard) -> CropDecoder:
        c = self.config
        return CropDecoder(
            self.image_ids,
            self.uris,
            self.masks,
            seed=self.seed,
            batch=c.batch,
            shard=shard,
            size=c.crop,
            scales=c.scales,
            mirror=c.mirror,
            max_side=self.max_side,
            hashes=self.hashes,
        )

    def image_uris(self, batch: CropBatch) -> list[str]:
        return [self.uris[index] for index in batch.index.tolist()]

    def images(self, batch: CropBatch, jitter: Draw, device: torch.device) -> Tensor:
        """The batch's crops with changed colors, normalized for the backbone, (B, 3, crop, crop), on the device."""
        draws = uniforms(jitter, self.seed, batch.epoch, batch.index, count=Augmentation.DRAWS)
        augmentation = Augmentation(color_jitter=self.config.color_jitter)
        return device_images(batch.images, draws, augmentation, normalization_of(self.config.backbone), device)

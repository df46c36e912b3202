"""What the learners of the segmentation and the affinity network share: crops of images and their label masks."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import CropBatch, CropDecoder, MaskedImages
from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.models.augment import Augmentation
from mcis.models.registry import backbone_normalization
from mcis.platform.config.training import AffinityNetConfig, SegmenterConfig
from mcis.platform.engine.devices import device_images
from mcis.platform.engine.learner import TrainingSchedule


@dataclass(frozen=True, kw_only=True)
class CropLearner:
    """A training on crops of images with a label mask each; a subclass adds the network and its losses.

    Attributes:
        masked: the training images and their masks.
        pretrained: file of the backbone's pretrained weights; None = it is trained from scratch.
    """

    config: AffinityNetConfig | SegmenterConfig
    seed: int
    masked: MaskedImages
    pretrained: Path | None

    @property
    def schedule(self) -> TrainingSchedule:
        c, images = self.config, len(self.masked.uris)
        steps = c.num_steps(images)
        return TrainingSchedule(
            batch=c.batch,
            images_per_sample=1,
            steps=steps,
            schedule_steps=steps,
            steps_per_epoch=images / c.batch,
            seed=self.seed,
            optimizer=c.optimizer,
        )

    @property
    def has_unused_parameters(self) -> bool:
        return False

    def decoder(self, shard: WorkerShard) -> CropDecoder:
        c = self.config
        return CropDecoder(
            self.masked, seed=self.seed, batch=c.batch, shard=shard, size=c.crop, scales=c.scales, hflip=c.hflip
        )

    def image_uris(self, batch: CropBatch) -> list[str]:
        return [self.masked.uris[index] for index in batch.index.tolist()]

    def images(self, batch: CropBatch, jitter: DrawPurpose, device: torch.device) -> Tensor:
        """The batch's crops with changed colors, normalized for the backbone, (B, 3, crop, crop), on the device."""
        draws = uniforms(jitter, self.seed, batch.epoch, batch.index, count=Augmentation.DRAWS)
        augmentation = Augmentation(color_jitter=self.config.color_jitter)
        return device_images(batch.images, draws, augmentation, backbone_normalization(self.config.backbone), device)

"""The common part of the learners of the segmentation network and the affinity network: crops with label masks."""

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
    """Trains a network on crops of images and their label masks. A subclass adds the network and its losses.

    Attributes:
        config: The section of the network in the configuration.
        seed: Seed of the initial weights and of all draws.
        masked: The training images and their masks. An image may be repeated.
        pretrained: File of the backbone's pretrained weights. None: it is trained from scratch.
        num_images: Number of different images, which determines the length of the training. None: none is repeated.
    """

    config: AffinityNetConfig | SegmenterConfig
    seed: int
    masked: MaskedImages
    pretrained: Path | None
    num_images: int | None = None

    @property
    def schedule(self) -> TrainingSchedule:
        config = self.config
        images = len(self.masked.uris)
        steps = config.num_steps(self.num_images or images)
        return TrainingSchedule(
            batch=config.batch,
            images_per_sample=1,
            steps=steps,
            schedule_steps=steps,
            steps_per_epoch=images / config.batch,
            seed=self.seed,
            optimizer=config.optimizer,
        )

    @property
    def has_unused_parameters(self) -> bool:
        return False

    @property
    def decodes_images(self) -> bool:
        return True

    def decoder(self, shard: WorkerShard) -> CropDecoder:
        config = self.config
        return CropDecoder(
            self.masked,
            seed=self.seed,
            batch=config.batch,
            shard=shard,
            size=config.crop,
            scales=config.scales,
            hflip=config.hflip,
        )

    def image_uris(self, batch: CropBatch) -> list[str]:
        return [self.masked.uris[index] for index in batch.index.tolist()]

    def images(self, batch: CropBatch, jitter: DrawPurpose, device: torch.device) -> Tensor:
        """Returns the crops of a batch with color jitter, normalized for the backbone, (B, 3, crop, crop).

        Args:
            jitter: The purpose of the draws of the color jitter.
            device: Where the crops are moved to.
        """
        draws = uniforms(jitter, self.seed, batch.epoch, batch.index, count=Augmentation.DRAWS)
        augmentation = Augmentation(color_jitter=self.config.color_jitter)
        return device_images(batch.images, draws, augmentation, backbone_normalization(self.config.backbone), device)

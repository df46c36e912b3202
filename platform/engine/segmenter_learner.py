"""The segmentation network as a training sees it: crops of images and pseudo masks, and the loss of their pixels."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mcis.datasets.batches import CropBatch, CropDecoder
from mcis.datasets.classes import IGNORE
from mcis.datasets.draws import Draw, uniforms
from mcis.datasets.maps import Shards
from mcis.datasets.stream import WorkerShard
from mcis.models.augment import Augmentation
from mcis.models.backbones import Backbone
from mcis.models.losses import pixel_ce
from mcis.platform.config.training import SegmenterConfig
from mcis.platform.engine.learner import Network, Schedule, device_images
from mcis.platform.networks.build import build_segmenter, freeze, normalization_of
from mcis.platform.networks.pretrained import start_backbone


@dataclass(frozen=True, kw_only=True)
class SegmenterLearner:
    """Trains the segmentation network on pseudo masks.

    Attributes:
        classes: K.
        image_ids, uris: of the training images.
        masks: table of their pseudo masks.
        backbone: the weights that the backbone starts from, or None.
        pretrained: file of the backbone's pretrained weights, used where `backbone` is None. Without either the
            backbone is trained from scratch.
        max_side: longest side at which images are read, pixels, and their masks were made; None = as they are.
    """

    config: SegmenterConfig
    seed: int
    classes: int
    image_ids: list[str]
    uris: list[str]
    masks: Shards
    backbone: Mapping[str, Tensor] | None
    pretrained: Path | None
    max_side: int | None = None

    @property
    def schedule(self) -> Schedule:
        c = self.config
        return Schedule(
            batch=c.batch,
            images_per_sample=1,
            steps=c.steps,
            schedule_steps=c.steps,
            steps_per_epoch=len(self.uris) / c.batch,
            seed=self.seed,
            optimizer=c.optimizer,
        )

    @property
    def rests_parameters(self) -> bool:
        return False

    def model(self) -> nn.Module:
        model = build_segmenter(self.config, self.classes)
        assert isinstance(model.backbone, Backbone)
        start_backbone("segmenter", model.backbone, self.backbone, self.pretrained)
        freeze(model, self.config)
        return model

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
        )

    def image_uris(self, batch: CropBatch) -> list[str]:
        return [self.uris[index] for index in batch.index.tolist()]

    def count(self, batch: CropBatch) -> int:
        return int((batch.labels != IGNORE).sum())

    def losses(self, model: Network, batch: CropBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        """The term `pixel`: cross entropy over the labeled pixels."""
        draws = uniforms(Draw.SEGMENTER_JITTER, self.seed, batch.epoch, batch.index, count=Augmentation.DRAWS)
        augmentation = Augmentation(color_jitter=self.config.color_jitter)
        images = device_images(batch.images, draws, augmentation, normalization_of(self.config.backbone), device)
        labels = torch.from_numpy(np.array(batch.labels)).to(device)
        return {"pixel": pixel_ce(model(images).float(), labels).total}

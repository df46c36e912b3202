"""The affinity network as a training sees it: crops of images and confident labels, and the losses of their pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mcis.datasets.batches import CropBatch, CropDecoder
from mcis.datasets.draws import Draw, uniforms
from mcis.datasets.maps import Shards
from mcis.datasets.stream import WorkerShard
from mcis.models.affinity_net import AffinityNet, affinity_losses, nearest_labels
from mcis.models.augment import Augmentation
from mcis.models.layouts import Layout
from mcis.platform.config.training import AffinityNetConfig
from mcis.platform.engine.learner import Network, Schedule, device_images
from mcis.platform.networks.build import build_affinity_net, freeze, normalization_of
from mcis.platform.networks.pretrained import start_backbone


@dataclass(frozen=True, kw_only=True)
class AffinityLearner:
    """Trains affinities between neighboring positions on confident labels.

    Attributes:
        layout: of the positions.
        image_ids, uris: of the training images.
        labels: table of their confident labels.
        backbone: the weights that the backbone starts from, or None.
        pretrained: file of the backbone's pretrained weights, used where `backbone` is None.
        max_side: longest side at which images are read, pixels, and their labels were made; None = as they are.
    """

    config: AffinityNetConfig
    seed: int
    layout: Layout
    image_ids: list[str]
    uris: list[str]
    labels: Shards
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

    def model(self) -> AffinityNet:
        model = build_affinity_net(self.config)
        start_backbone("affinity_net", model.backbone, self.backbone, self.pretrained)
        freeze(model, self.config)
        return model

    def decoder(self, shard: WorkerShard) -> CropDecoder:
        c = self.config
        return CropDecoder(
            self.image_ids,
            self.uris,
            self.labels,
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
        return len(batch)

    def losses(self, model: Network, batch: CropBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        """The terms `background`, `foreground` and `different` of the labeled pairs."""
        c = self.config
        draws = uniforms(Draw.AFFINITY_JITTER, self.seed, batch.epoch, batch.index, count=Augmentation.DRAWS)
        augmentation = Augmentation(color_jitter=c.color_jitter)
        images = device_images(batch.images, draws, augmentation, normalization_of(c.backbone), device)
        affinities = model(images)
        grids = self.layout.grids((c.crop, c.crop), (affinities.shape[2], affinities.shape[3]))
        labels = nearest_labels(torch.from_numpy(np.array(batch.labels)).to(device), grids)
        return affinity_losses(affinities, labels, c.radius)

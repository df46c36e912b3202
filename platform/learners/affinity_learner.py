"""Trains the affinity network on confident labels."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mcis.datasets.sampling.batches import CropBatch
from mcis.datasets.sampling.keyed_random import DrawPurpose
from mcis.models.affinity_net import AffinityNet, affinity_losses, nearest_labels
from mcis.platform.config.training import AffinityNetConfig
from mcis.platform.engine.learner import Network
from mcis.platform.learners.crop_learner import CropLearner
from mcis.platform.networks.build import build_affinity_net, freeze
from mcis.platform.networks.pretrained import load_backbone


@dataclass(frozen=True, kw_only=True)
class AffinityLearner(CropLearner):
    """Trains affinities of neighboring positions on confident labels."""

    config: AffinityNetConfig

    def model(self) -> AffinityNet:
        model = build_affinity_net(self.config)
        if self.pretrained:
            load_backbone("affinity_net", model.backbone, self.pretrained)
        freeze(model, self.config)
        return model

    def count(self, batch: CropBatch) -> int:
        return len(batch)

    def loss_sums(self, model: Network, batch: CropBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        """Computes `background`, `foreground` and `different`, the losses of pairs of labeled positions."""
        neighbors = model(self.images(batch, DrawPurpose.AFFINITY_JITTER, device))
        labels = nearest_labels(torch.from_numpy(np.array(batch.labels)).to(device), neighbors.grids)
        return affinity_losses(neighbors.affinities, labels, self.config.radius)

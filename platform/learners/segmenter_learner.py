"""Trains the segmentation network on pseudo masks."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from mcis.datasets.classes import IGNORE
from mcis.datasets.sampling.batches import CropBatch
from mcis.datasets.sampling.keyed_random import DrawPurpose
from mcis.models.backbones import Backbone
from mcis.models.losses import pixel_ce, presence_ce
from mcis.platform.config.training import SegmenterConfig
from mcis.platform.engine.learner import Network
from mcis.platform.learners.crop_learner import CropLearner
from mcis.platform.networks.build import build_segmenter, freeze
from mcis.platform.networks.pretrained import load_backbone


@dataclass(frozen=True, kw_only=True)
class SegmenterLearner(CropLearner):
    """Trains the segmentation network on pseudo masks.

    Attributes:
        classes: K.
        backbone: Initial weights of the backbone, instead of `pretrained`. None: use `pretrained`.
    """

    config: SegmenterConfig
    classes: int
    backbone: Mapping[str, Tensor] | None = None

    def model(self) -> nn.Module:
        model = build_segmenter(self.config, self.classes)
        assert isinstance(model.backbone, Backbone)
        if self.backbone is not None:
            model.backbone.load_state_dict(self.backbone)
        elif self.pretrained:
            load_backbone("segmenter", model.backbone, self.pretrained)
        freeze(model, self.config)
        return model

    def count(self, batch: CropBatch) -> int:
        return int((batch.labels != IGNORE).sum())

    def loss_sums(self, model: Network, batch: CropBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        """Computes `pixel`, the cross entropy of the labeled pixels, and `image`, that of the classes in each crop."""
        config = self.config
        labels = torch.from_numpy(np.array(batch.labels)).to(device)
        images = self.images(batch, DrawPurpose.SEGMENTER_JITTER, device)
        if not config.image_loss_weight:
            return {"pixel": pixel_ce(model(images).float(), labels)}

        logits, image_logits = model(images, with_image_logits=True)
        # With six classes, the image-level head counts as much as all pixels of the crop (`image_loss_weight`).
        weight = config.image_loss_weight * config.crop**2 * self.classes / 6
        return {"pixel": pixel_ce(logits.float(), labels), "image": weight * presence_ce(image_logits.float(), labels)}

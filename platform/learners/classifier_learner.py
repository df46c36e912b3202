"""Trains the co-attention classifier on pairs of images by the losses of their scores (section 3.1)."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mcis.datasets.images.squares import Squares
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import PairBatch, PairDecoder
from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.sampling.pairs import PairSampler
from mcis.datasets.tables.memory_mapped import Features, Statistics
from mcis.datasets.tags import Tags
from mcis.models.augment import Augmentation
from mcis.models.backbones import to_float_images
from mcis.models.classifier import (
    AttentionPartner,
    BatchScores,
    CoAttentionClassifier,
    MissingOutputs,
    PairInputs,
    pool,
)
from mcis.models.classifier_losses import LossInputs, PairScores, weighted_losses
from mcis.models.registry import backbone_normalization
from mcis.models.seam import Equivariance, EquivariantMaps, RefinedMaps
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.engine.devices import device_images
from mcis.platform.engine.learner import Network, TrainingSchedule
from mcis.platform.networks.build import build_classifier, freeze
from mcis.platform.networks.pretrained import load_backbone


@dataclass(frozen=True, kw_only=True)
class ClassifierLearner:
    """Trains the classifier on pairs of images, at least one of which is tagged.

    Attributes:
        config: The section `classifier` of the configuration.
        seed: Seed of the initial weights and of all draws.
        tags: Tags of the N training images. Those without tags are negatives.
        is_source: Whether each image is of the source domain, (N,). None: none is.
        is_extra: Whether each image is of another domain than target, (N,). None: none is.
        images: The N images at the classifier's input size, or the features that its frozen backbone extracts.
        uncached: The N images at the classifier's input size, if the features of some are not cached.
        pretrained: File of the backbone's pretrained weights. None: it is trained from scratch.
        statistics: Means and deviations of the backbone's channels, if they are standardized.
    """

    config: ClassifierConfig
    seed: int
    tags: Tags
    is_source: NDArray[np.bool_] | None
    images: Squares | Features
    pretrained: Path | None
    statistics: Statistics | None = None
    is_extra: NDArray[np.bool_] | None = None
    uncached: Squares | None = None

    @property
    def schedule(self) -> TrainingSchedule:
        config = self.config
        steps_per_epoch = (config.epoch_pairs or len(self.tags)) / config.batch
        schedule_steps = math.ceil(config.epochs * steps_per_epoch)
        steps = schedule_steps
        if config.stop_epoch is not None:
            steps = math.ceil((config.stop_epoch + 1) * steps_per_epoch)

        return TrainingSchedule(
            batch=config.batch,
            images_per_sample=2,
            steps=steps,
            schedule_steps=schedule_steps,
            steps_per_epoch=steps_per_epoch,
            seed=self.seed,
            optimizer=config.optimizer,
        )

    @property
    def has_unused_parameters(self) -> bool:
        config = self.config
        if config.attention == "none" or config.attention_start_epoch == 0:
            return False
        # Parameters of the attention are unused until pairs attend.
        return config.attention == "co+contrastive" or config.head == "own" or config.affinity.w_p == "learned"

    @property
    def decodes_images(self) -> bool:
        if isinstance(self.images, Features):
            return self.uncached is not None
        return self.config.sizing == "random_crop" or not self.images.is_cached

    def model(self) -> CoAttentionClassifier:
        model = build_classifier(self.config, self.tags.classes)
        if self.pretrained:
            load_backbone("classifier", model.backbone, self.pretrained)
        if self.statistics:
            model.set_statistics(*(torch.from_numpy(values) for values in self.statistics))
        freeze(model, self.config)
        return model

    def decoder(self, shard: WorkerShard) -> PairDecoder:
        config = self.config
        sampler = PairSampler(
            self.tags,
            seed=self.seed,
            partner_may_be_itself=config.partner_may_be_itself,
            wrong_class=config.attention_partner == "wrong_class",
            is_source=self.is_source,
            epoch_pairs=config.epoch_pairs,
            class_balanced_fraction=config.class_balanced_fraction,
            target_share=config.target_share,
            is_extra=self.is_extra,
        )
        scales = config.crop_scales if config.sizing == "random_crop" else None
        return PairDecoder(
            self.images,
            sampler,
            batch=config.batch,
            shard=shard,
            crop_scales=scales,
            hflip=config.hflip,
            uncached=self.uncached,
        )

    def image_uris(self, batch: PairBatch) -> list[str]:
        uris = []
        for m, n in zip(batch.m, batch.n, strict=True):
            uris += [self.images.uris[m], self.images.uris[n]]
        return uris

    def count(self, batch: PairBatch) -> int:
        return len(batch)

    def loss_sums(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        """Computes the weighted losses of the pairs by name (Eq. 10) and, as `self_NAME`, those of the self pairs."""
        tags_m = self._tags(batch.m, device)
        tags_n = self._tags(batch.n, device)
        out = self._forward(model, batch, step, tags_m, tags_n, device)
        epoch = self.schedule.epoch(step)
        values = self.config.loss_values

        pair_features, *self_features = out.features
        inputs = LossInputs(
            in_float32(out.pairs),
            tags_m,
            tags_n,
            *pair_features,
            unshared_m=bool(batch.unshared_m[0]),
            unshared_n=bool(batch.unshared_n[0]),
            copies=None if out.copies is None else in_float32(out.copies),
            maps=None if out.maps is None else _maps_in_float32(out.maps),
        )
        terms = weighted_losses(inputs, values, epoch=epoch)

        for scores, features in zip(out.selves, self_features, strict=True):
            self_inputs = LossInputs(in_float32(scores), tags_m, tags_m, *features)
            for name, value in weighted_losses(self_inputs, values, epoch=epoch).items():
                terms[f"self_{name}"] = terms.get(f"self_{name}", torch.zeros((), device=device)) + value
        return terms

    def _tags(self, index: NDArray[np.int64], device: torch.device) -> Tensor:
        """Returns the tags of images by their index, (B, K) of 0 and 1, on the device."""
        return torch.from_numpy(self.tags.matrix(index)).to(device, torch.float32)

    def _forward(
        self, model: Network, batch: PairBatch, step: int, tags_m: Tensor, tags_n: Tensor, device: torch.device
    ) -> BatchScores:
        """Passes a batch of images, or of features of a frozen backbone, through the network."""
        config = self.config
        pair_domains = None
        if config.num_domain_affinities > 1:
            pair_domains = torch.from_numpy(batch.pair_domains.astype(np.int64)).to(device)
        partner: AttentionPartner = "itself" if config.attention_partner == "itself" else "partner"
        options: dict[str, Any] = {
            "pair_domains": pair_domains,
            "attend": self.schedule.epoch(step) >= config.attention_start_epoch,
            "attention_partner": partner,
        }
        out: BatchScores
        if isinstance(self.images, Features):
            out = model(self._feature_inputs(batch, device), **options)
            return out

        inputs = self._image_inputs(batch, device)
        if config.equivariant.weight:
            num_tags = self.tags.matrix(np.concatenate([batch.m, batch.n])).sum(axis=1)
            max_tags = max(1, int(num_tags.max()))
            options["equivariance"] = Equivariance(torch.cat([tags_m, tags_n]), max_tags, config.equivariant.scale)
        out = model(inputs, self_transforms=config.self_pairs, **options)
        return out

    def _feature_inputs(self, batch: PairBatch, device: torch.device) -> PairInputs:
        """Returns cached features m and n, (B, C, H, W), and the images whose features are not cached."""
        features_m = torch.from_numpy(batch.images_m).to(device).float()
        features_n = torch.from_numpy(batch.images_n).to(device).float()
        return PairInputs(features_m, features_n, is_embedded=True, missing=self._missing_outputs(batch, device))

    def _missing_outputs(self, batch: PairBatch, device: torch.device) -> MissingOutputs | None:
        """Returns the images of the batch whose features are not cached; None if there are none."""
        if batch.pixels_m is None or batch.pixels_n is None:
            return None

        assert isinstance(self.images, Features)
        missing = np.flatnonzero(~self.images.holds(np.concatenate([batch.m, batch.n])))
        if not len(missing):
            return None
        pixels = torch.from_numpy(np.concatenate([batch.pixels_m, batch.pixels_n])[missing]).to(device)
        images = backbone_normalization(self.config.backbone)(to_float_images(pixels))
        return MissingOutputs(
            rows=torch.from_numpy(missing).to(device), images=images.contiguous(memory_format=torch.channels_last)
        )

    def _image_inputs(self, batch: PairBatch, device: torch.device) -> PairInputs:
        """Returns augmented images m and n, (B, 3, S, S), and images m without color jitter if self pairs need them.

        The transformed image tau(m) keeps its colors (paper-vs-code, "Classifier").
        """
        config = self.config
        normalize = backbone_normalization(config.backbone)

        augmentation = Augmentation(color_jitter=config.color_jitter, hflip=config.hflip, shift=config.shift)
        draws_m = uniforms(DrawPurpose.AUGMENT_M, self.seed, batch.row, batch.m, count=Augmentation.DRAWS)
        draws_n = uniforms(DrawPurpose.AUGMENT_N, self.seed, batch.row, batch.n, count=Augmentation.DRAWS)
        images_m = device_images(batch.images_m, draws_m, augmentation, normalize, device)
        images_n = device_images(batch.images_n, draws_n, augmentation, normalize, device)
        if not (config.self_pairs and any(config.color_jitter)):
            return PairInputs(images_m, images_n)

        without_jitter = replace(augmentation, color_jitter=(0, 0, 0, 0))
        unjittered_m = device_images(batch.images_m, draws_m, without_jitter, normalize, device)
        return PairInputs(images_m, images_n, unjittered_m=unjittered_m)


def _maps_in_float32(maps: EquivariantMaps) -> EquivariantMaps:
    """Converts maps of a network of any precision to float32, in which losses are computed."""
    images, copies = (RefinedMaps(view.maps.float(), view.refined.float()) for view in maps)
    return EquivariantMaps(images, copies)


def in_float32(scores: PairScores) -> PairScores:
    """Converts scores of a network of any precision to float32, in which losses are computed."""
    return PairScores(**{name: values.float() for name, values in scores._asdict().items() if values is not None})


def val_scores(model: nn.Module, images: Tensor) -> Tensor:
    """Computes basic scores for a validation: global average pooling of the class activations (Eq. 1).

    Args:
        model: The classifier.
        images: Images (B, S, S, 3) uint8, or features of a frozen backbone (B, C, H, W).

    Returns:
        (B, K) float32. Scores are pooled in float32, because means in bfloat16 would often be equal.
    """
    assert isinstance(model, CoAttentionClassifier)
    if images.dtype == torch.uint8:
        outputs = model.backbone(model.backbone.normalize(to_float_images(images)))
    else:
        outputs = images
    return pool(model.activations(model.standardize(outputs.float())).float())

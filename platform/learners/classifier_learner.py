"""The co-attention classifier as a training sees it: pairs of images, and the losses of their scores (section 3.1)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mcis.datasets.images.squares import Squares
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import PairBatch, PairDecoder
from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.datasets.sampling.pairs import PairSampler
from mcis.datasets.tables.memory_mapped import Features, Statistics
from mcis.datasets.tags import Tags
from mcis.models.augment import Augmentation
from mcis.models.backbones import to_unit
from mcis.models.classifier import Attended, BatchScores, CoAttentionClassifier, pool
from mcis.models.losses import PairScores, pair_losses
from mcis.models.metrics import average_precision
from mcis.models.networks import normalization_of
from mcis.models.seam import Equivariance, EquivariantMaps, RefinedMaps, equivariant_losses
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.engine.learner import Network, Schedule, device_images
from mcis.platform.networks.build import build_classifier, freeze
from mcis.platform.networks.pretrained import load_backbone


@dataclass(frozen=True, kw_only=True)
class ClassifierLearner:
    """Trains the classifier on pairs of tagged images.

    Attributes:
        tags: of the N training images.
        source: (N,), whether an image is of the domain source; None where no image is.
        images: the N images at the classifier's size, or what its frozen backbone makes of them.
        pretrained: file of the backbone's pretrained weights, or None.
        statistics: of the backbone's channels, where these are standardized.
    """

    config: ClassifierConfig
    seed: int
    tags: Tags
    source: NDArray[np.bool_] | None
    images: Squares | Features
    pretrained: Path | None
    statistics: Statistics | None = None

    @property
    def schedule(self) -> Schedule:
        c = self.config
        steps_per_epoch = (c.epoch_pairs or self.tags.num_tagged) / c.batch
        schedule_steps = math.ceil(c.epochs * steps_per_epoch)
        return Schedule(
            batch=c.batch,
            images_per_sample=2,
            steps=schedule_steps if c.stop_epoch is None else math.ceil((c.stop_epoch + 1) * steps_per_epoch),
            schedule_steps=schedule_steps,
            steps_per_epoch=steps_per_epoch,
            seed=self.seed,
            optimizer=c.optimizer,
        )

    @property
    def has_unused_parameters(self) -> bool:
        c = self.config
        of_attention = c.attention == "co+contrastive" or c.head == "own" or c.affinity.w_p == "learned"
        return c.attention != "none" and c.attention_start_epoch > 0 and of_attention

    def model(self) -> CoAttentionClassifier:
        model = build_classifier(self.config, self.tags.classes)
        if self.pretrained:
            load_backbone("classifier", model.backbone, self.pretrained)
        if self.statistics:
            model.set_statistics(*(torch.from_numpy(values) for values in self.statistics))
        freeze(model, self.config)
        return model

    def decoder(self, shard: WorkerShard) -> PairDecoder:
        c = self.config
        sampler = PairSampler(
            self.tags,
            seed=self.seed,
            partner_may_be_itself=c.partner_may_be_itself,
            wrong_class=c.attention_partner == "wrong_class",
            source=self.source,
            epoch_pairs=c.epoch_pairs,
            class_balance=c.class_balanced_fraction,
        )
        scales = c.crop_scales if c.sizing == "random_crop" else None
        return PairDecoder(self.images, sampler, batch=c.batch, shard=shard, crop_scales=scales, mirror=c.hflip)

    def image_uris(self, batch: PairBatch) -> list[str]:
        return [self.images.uris[index] for pair in zip(batch.m, batch.n, strict=True) for index in pair]

    def count(self, batch: PairBatch) -> int:
        return len(batch)

    def losses(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        """The terms `basic`, `common`, `contrastive` of the pairs (Eq. 10), and `self_*` of the self pairs.

        With equivariant attention `basic` is the mean over images and copies, and `equivariant` and `cross` are the
        terms of their maps.
        """
        c = self.config
        kind = torch.from_numpy(batch.kind.astype(np.int64)).to(device) if c.num_domain_affinities > 1 else None
        attend = self.schedule.epoch(step) >= c.attention_start_epoch
        attended: Attended = "itself" if c.attention_partner == "itself" else "partner"
        tags = [self.tags.matrix(index) for index in (batch.m, batch.n)]
        tags_m, tags_n = (torch.from_numpy(matrix).to(device, torch.float32) for matrix in tags)
        if isinstance(self.images, Features):
            outputs = (torch.from_numpy(images).to(device).float() for images in (batch.images_m, batch.images_n))
            out: BatchScores = model(*outputs, kind=kind, embedded=True, attend=attend, attended=attended)
        else:
            images_m, images_n, plain_m = self._images(batch, device)
            images = images_m, images_n, c.self_pairs, kind, plain_m
            most = max(1, int(np.concatenate(tags).sum(axis=1).max()))
            equivariance = Equivariance(torch.cat([tags_m, tags_n]), most, c.equivariant.scale)
            also = {"equivariance": equivariance} if c.equivariant.weight else {}
            out = model(*images, attend=attend, attended=attended, **also)

        terms = _summed_losses(in_float32(out.pairs), tags_m, tags_n, c)
        if out.copies is not None and out.maps is not None:
            of_copies = _summed_losses(in_float32(out.copies), tags_m, tags_n, c)
            terms["basic"] = (terms["basic"] + of_copies["basic"]) / 2
            terms |= _summed_equivariant_losses(out.maps, c, self.tags.classes)
        if "contrastive_m" in terms:
            weight_m, weight_n = self._contrastive_weights(batch, step)
            terms["contrastive"] = weight_m * terms.pop("contrastive_m") + weight_n * terms.pop("contrastive_n")
        for scores in out.selves:
            for name, value in _summed_losses(in_float32(scores), tags_m, tags_m, c).items():
                terms[f"self_{name}"] = terms.get(f"self_{name}", torch.zeros((), device=device)) + value
        return terms

    def _images(self, batch: PairBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Augmented images m and n, (B, 3, S, S), and m with its own colors where self pairs need it.

        tau(m) keeps its colors (RELEASED_RECIPE, "Classifier").
        """
        c = self.config
        normalize = normalization_of(c.backbone)
        augmentation = Augmentation(color_jitter=c.color_jitter, flip=c.hflip, shift=c.shift)
        draws_m = uniforms(Draw.AUGMENT_M, self.seed, batch.row, batch.m, count=Augmentation.DRAWS)
        draws_n = uniforms(Draw.AUGMENT_N, self.seed, batch.row, batch.n, count=Augmentation.DRAWS)
        images_m = device_images(batch.images_m, draws_m, augmentation, normalize, device)
        images_n = device_images(batch.images_n, draws_n, augmentation, normalize, device)
        if not (c.self_pairs and any(c.color_jitter)):
            return images_m, images_n, None
        without_jitter = replace(augmentation, color_jitter=(0, 0, 0, 0))
        return images_m, images_n, device_images(batch.images_m, draws_m, without_jitter, normalize, device)

    def _contrastive_weights(self, batch: PairBatch, step: int) -> tuple[float, float]:
        """The weights of the contrastive terms of m and n, 0 where they do not count.

        A term counts from the configured epoch on and, as released, where the whole batch's pairs have an unshared
        label on its side.
        """
        c = self.config
        weight = c.contrastive_weight * (self.schedule.epoch(step) >= c.contrastive_from_epoch)
        if not c.contrastive_needs_unshared:
            return weight, weight
        return weight * bool(batch.unshared_m[0]), weight * bool(batch.unshared_n[0])


def _summed_losses(scores: PairScores, tags_m: Tensor, tags_n: Tensor, config: ClassifierConfig) -> dict[str, Tensor]:
    losses: Mapping[str, Tensor] = pair_losses(scores, tags_m, tags_n, loss_reduction=config.loss_reduction)
    return {name: values.sum() for name, values in losses.items()}


def _summed_equivariant_losses(maps: EquivariantMaps, config: ClassifierConfig, classes: int) -> dict[str, Tensor]:
    """Added up over both images of the pairs, as the basic term is."""
    weight = config.equivariant.weight * (0.5 if config.loss_reduction == "released" else 1.0)
    precise = EquivariantMaps(*(RefinedMaps(*(each.float() for each in view)) for view in maps))
    losses = equivariant_losses(precise, classes=classes, hard=config.equivariant.hard)
    return {name: weight * values.sum() for name, values in losses.items()}


def in_float32(scores: PairScores) -> PairScores:
    """Scores of a network of any precision in float32, in which losses are taken."""
    return PairScores(**{name: values.float() for name, values in scores._asdict().items() if values is not None})


def val_scores(model: nn.Module, images: Tensor) -> Tensor:
    """Basic scores of uint8 images (B, S, S, 3), or of what a frozen backbone makes of them, (B, C, H, W): GAP of phi's
    class activations (Eq. 1), (B, K)."""
    assert isinstance(model, CoAttentionClassifier)
    outputs = model.backbone(model.backbone.normalize(to_unit(images))) if images.dtype == torch.uint8 else images
    return pool(model.activations(model.standard(outputs.float())).float())  # means of bfloat16 would be few values


_POSITIVES = 20
"""Tags of the scored images from which their average precision is judged: of a dozen images chance makes anything."""
_REPETITIONS = 20
"""Rankings by chance."""


def chance(tags: Tags, seed: int) -> tuple[float, float] | None:
    """Mean average precision, in percent, of rankings that know nothing of the images with these tags.

    Returns:
        Its mean, which is about the share of images with a class, averaged over the classes; and what 95 % of such
        rankings stay below. None where the tags are too few to tell learning from chance.
    """
    if len(tags.values) < _POSITIVES:
        return None
    images = np.arange(len(tags))
    matrix = tags.matrix(images)
    drawn = [
        float(np.nanmean(average_precision(uniforms(Draw.CHANCE, seed, n, images, count=tags.classes), matrix)))
        for n in range(_REPETITIONS)
    ]
    mean = float(np.mean(drawn))
    return mean, mean + 1.645 * float(np.std(drawn, ddof=1))

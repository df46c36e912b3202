"""Stage 2: tagged training images -> weights.pt of the co-attention classifier, steps.jsonl (section 3.2)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mcis.datasets.draws import Draw, uniforms
from mcis.datasets.errors import UserError
from mcis.datasets.images import Squares, image_bytes
from mcis.datasets.index import Listing, shown
from mcis.datasets.pairs import KINDS, PairSampler
from mcis.datasets.stream import Batch, PairDecoder, Share
from mcis.datasets.tags import Tags
from mcis.models.augment import Augmentation, augment
from mcis.models.backbones import load_pretrained, normalize, to_unit
from mcis.models.classifier import CoAttentionClassifier, pool
from mcis.models.losses import PairScores, pair_losses
from mcis.platform.config.sections import ClassifierConfig, Config, Optimizer
from mcis.platform.engine.cache import decoded_cache
from mcis.platform.engine.training import Network, fit, precision_key
from mcis.platform.engine.validation import Validation
from mcis.platform.networks.build import build_backbone, build_classifier
from mcis.platform.networks.checkpoints import WEIGHTS, save_weights
from mcis.platform.networks.pretrained import classifier_weights
from mcis.platform.networks.trained import classifier_description, load_trained_classifier, trained_classifier
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import split_rows
from mcis.platform.runs.results import TrainingResult
from mcis.platform.runs.workspace import Workspace, file_stamps


def device_images(
    batch: Batch, name: str, draws: NDArray[np.float64], how: Augmentation, device: torch.device
) -> Tensor:
    """uint8 images of a batch -> augmented and normalized on the device, (B, 3, H, W), channels last."""
    images = to_unit(torch.from_numpy(np.array(batch[name])).to(device, non_blocking=True))
    images = normalize(augment(images, how, torch.from_numpy(draws).to(device, torch.float32)))
    return images.contiguous(memory_format=torch.channels_last)  # as the weights are


def val_scores(model: nn.Module, images: Tensor) -> Tensor:
    """Basic scores of uint8 images (B, S, S, 3): GAP of phi's class activations (Eq. 1), (B, K)."""
    assert isinstance(model, CoAttentionClassifier)
    scores: Tensor = pool(model.phi(model.backbone(normalize(to_unit(images)))).float())
    return scores


@dataclass(frozen=True, kw_only=True)
class ClassifierLearner:
    """The classifier as `training.fit` sees it."""

    config: ClassifierConfig
    seed: int
    tags: Tags
    source: NDArray[np.bool_] | None
    pictures: Squares
    pretrained: Path | None
    validation: Validation | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    images: int = 2

    @property
    def batch(self) -> int:
        return self.config.batch

    @property
    def optimizer(self) -> Optimizer:
        return self.config.optimizer

    @property
    def epoch_steps(self) -> float:
        return (self.config.epoch_pairs or self.tags.tagged) / self.batch

    @property
    def schedule_steps(self) -> int:
        return math.ceil(self.config.epochs * self.epoch_steps)

    @property
    def steps(self) -> int:
        keep = self.config.keep_epoch
        return self.schedule_steps if keep is None else math.ceil((keep + 1) * self.epoch_steps)

    def model(self) -> nn.Module:
        model = build_classifier(self.config, self.tags.classes)
        if self.pretrained:
            load_pretrained(model.backbone, self.pretrained)
        return model

    def decoder(self, share: Share) -> PairDecoder:
        scales = self.config.crop_scales if self.config.sizing == "random_crop" else None
        return PairDecoder(self.pictures, self.sampler(), batch=self.batch, share=share, crop_scales=scales)

    def sampler(self) -> PairSampler:
        """Draws the pairs.

        Raises:
            ValueError: the images allow no such pairs.
        """
        c = self.config
        return PairSampler(
            self.tags,
            seed=self.seed,
            partner_may_be_itself=c.partner_may_be_itself,
            source=self.source,
            pair_mix=c.pair_mix,
            epoch_pairs=c.epoch_pairs,
            class_balance=c.class_balance,
            random_pair_rate=c.random_pair_rate,
        )

    def image_uris(self, batch: Batch) -> list[str]:
        return [self.pictures.uris[i] for pair in zip(batch["m"], batch["n"], strict=True) for i in pair]

    def count(self, batch: Batch) -> int:
        return len(batch["m"])

    def losses(self, model: Network, batch: Batch, step: int, device: torch.device) -> dict[str, Tensor]:
        c, row = self.config, batch["row"]
        how = Augmentation(jitter=c.color_jitter, flip=c.flip, shift=c.shift)
        draws_m, draws_n = (
            uniforms(purpose, self.seed, row, batch[side], count=Augmentation.DRAWS)
            for side, purpose in (("m", Draw.AUGMENT_M), ("n", Draw.AUGMENT_N))
        )
        images_m = device_images(batch, "images_m", draws_m, how, device)
        images_n = device_images(batch, "images_n", draws_n, how, device)
        plain_m = None
        if c.self_pairs and any(c.color_jitter):  # tau(m) keeps its colors (RECIPE)
            plain_m = device_images(batch, "images_m", draws_m, replace(how, jitter=(0, 0, 0, 0)), device)
        tags_m, tags_n = (torch.from_numpy(self.tags.matrix(batch[s])).to(device, torch.float32) for s in ("m", "n"))
        kind = torch.from_numpy(batch["kind"].astype(np.int64)).to(device) if c.kinds > 1 else None
        scores, selves = model(images_m, images_n, c.self_pairs, kind, plain_m)
        scores, selves = in_float32(scores), [in_float32(own) for own in selves]
        terms = {
            name: values.sum()
            for name, values in pair_losses(scores, tags_m, tags_n, reduction=c.loss_reduction).items()
        }
        if "contrastive_m" in terms:
            of_m, of_n = self._contrastive_weights(batch, step)
            terms["contrastive"] = of_m * terms.pop("contrastive_m") + of_n * terms.pop("contrastive_n")
        for own in selves:
            for name, values in pair_losses(own, tags_m, tags_m, reduction=c.loss_reduction).items():
                terms[f"self_{name}"] = terms.get(f"self_{name}", torch.zeros((), device=device)) + values.sum()
        return terms

    def _contrastive_weights(self, batch: Batch, step: int) -> tuple[float, float]:
        """1 or 0 for each side: from the configured epoch on, and, as released, where the whole batch's pairs have an
        unshared label on that side.
        """
        begun = int(step / self.epoch_steps) >= self.config.contrastive_from_epoch
        if not self.config.contrastive_needs_unshared:
            return float(begun), float(begun)
        return float(begun and batch["unshared_m"][0]), float(begun and batch["unshared_n"][0])


def in_float32(scores: PairScores) -> PairScores:
    """Scores out of a network of any precision, for losses, which are taken in float32."""
    known = {name: each.float() for name, each in scores._asdict().items() if each is not None}
    return PairScores(**known)


def _take(config: Config, context: RunContext, path: Path) -> TrainingResult:
    model = load_trained_classifier(config, path, context.classes)
    save_weights(model, context.part / WEIGHTS, classifier_description(config.classifier, context.classes))
    note = f"the classifier was not trained but taken from {path}"
    return TrainingResult(counts={"steps": 0}, notes=(note,))


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Loads the weights that the classifier is taken over or starts from.

    Raises:
        UserError: they cannot be had or do not fit.
    """
    if trained := trained_classifier(config):
        load_trained_classifier(config, trained, listing.classes)
    if path := classifier_weights(config, workspace):
        load_pretrained(build_backbone(config.classifier.backbone, channels=config.classifier.channels), path)


def inputs(config: Config, context: RunContext) -> Any:
    """The pretrained weights' file, or the trained classifier's, and the precision."""
    path = trained_classifier(config) or classifier_weights(config, context.workspace)
    return file_stamps([str(path)] if path else []), precision_key(config.classifier.optimizer, config.compute)


def run(config: Config, context: RunContext) -> TrainingResult:
    """Trains the classifier on pairs of tagged training images with Ray Train, or takes a trained one.

    Raises:
        UserError: weights cannot be had or do not fit, or the loss is not finite.
    """
    if trained := trained_classifier(config):
        return _take(config, context, trained)
    rows = split_rows(context, "train", tagged=True)
    size = config.classifier.input_size
    middle = config.classifier.sizing == "short_side"
    cache = None
    if config.classifier.sizing != "random_crop":
        cache = decoded_cache(rows, size, context, config.compute, middle=middle)
    learner = ClassifierLearner(
        config=config.classifier,
        seed=config.seed,
        tags=Tags.of_index(rows["tags"], len(context.classes)),
        source=np.array(rows["domain"].to_pylist()) == "source",
        pictures=Squares(rows["uri"].to_pylist(), size, middle=middle, cache=cache),
        pretrained=classifier_weights(config, context.workspace),
        about=classifier_description(config.classifier, context.classes),
        validation=_validation(config, context, cached=0 if cache is None else len(rows)),
    )
    try:
        sampler = learner.sampler()
    except ValueError as error:
        raise UserError(
            f"pairs cannot be drawn: {error}",
            "images and classifier.pair_mix, epoch_pairs and class_balance that go together",
            "change these values, or the setting's sources",
        ) from None
    result = fit(learner, context.part, config.compute, context.tracker, label="classifier")
    counts: dict[str, Any] = {"steps": learner.steps}
    notes = [f"the classifier was trained in {result.precision}"] if result.precision != "float32" else []
    images = np.bincount(learner.tags.values, minlength=learner.tags.classes)
    for number, many, rule in ((0, "no", "nothing is learnt of them"), (1, "one", "it is paired with itself")):
        few = [name for name, count in zip(context.classes, images.tolist(), strict=True) if count == number]
        if few:
            counts[f"classes with {many} training image"] = len(few)
            notes.append(f"{len(few)} of {len(images)} classes have {many} training image ({shown(few)}): {rule}")
    val_ap = None
    if result.val_ap:
        val_ap = dict(zip(context.classes, result.val_ap, strict=True))
        known = [ap for ap in result.val_ap if ap is not None]
        counts["val mAP"] = round(sum(known) / len(known), 2)
    elif config.classifier.val_every:
        notes.append("no image of the split val has a tag: there is no mean average precision of the classifier")
    if learner.source is not None and learner.source.any():
        kinds = sampler.kind_counts(0)
        counts["pairs of the first epoch"] = dict(zip(KINDS, kinds.drawn.tolist(), strict=True))
        moved = int(np.abs(kinds.wanted - kinds.drawn).sum()) // 2
        if moved:
            notes.append(f"{moved} pair(s) of the first epoch are of another kind than wanted: a class lacks a domain")
    return TrainingResult(
        busy=result.seconds,
        waiting=result.waiting,
        precision=result.precision,
        val_ap=val_ap,
        counts=counts,
        notes=tuple(notes),
    )


def _validation(config: Config, context: RunContext, *, cached: int) -> Validation | None:
    """The tagged val images, decoded once where the cache holds them beside the `cached` training images."""
    c, compute = config.classifier, config.compute
    rows = split_rows(context, "val", tagged=True)
    if not c.val_every or not len(rows):
        return None
    room = (cached + len(rows)) * image_bytes(c.input_size) <= compute.cache_gb * 2**30
    cache = decoded_cache(rows, c.input_size, context, compute) if room else None
    return Validation(
        images=Squares(rows["uri"].to_pylist(), c.input_size, cache=cache),
        tags=Tags.of_index(rows["tags"], len(context.classes)),
        scores=val_scores,
        every=c.val_every,
    )

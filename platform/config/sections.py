"""The configuration of a run: frozen sections, validated at the boundary, every problem reported together.

`recipes` and `resolve` fill the sections from recipes, data settings, files and `--set`; each stage takes the sections
that concern it. This module holds the whole, the sections of what follows the trainings, and the checks between
sections; a section's own are its `problems`.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from mcis.datasets.errors import UserError
from mcis.datasets.section import Contradictions, Rate, Section
from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.lists import did_you_mean
from mcis.models.crf import CrfParameters
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.data import DataConfig, WeightsConfig
from mcis.platform.config.keys import value_of
from mcis.platform.config.maps import LocalizeConfig, MapsConfig, PseudoMasksConfig
from mcis.platform.config.training import AffinityNetConfig, ClassifierConfig, SegmenterConfig

_WITH_CLASSES = tuple(name for name, source in SOURCES.items() if source.defines_classes)
SOURCE_COMBINATIONS = (*_WITH_CLASSES, *(f"{_WITH_CLASSES[0]}+{name}" for name in SOURCES if name not in _WITH_CLASSES))
"""The usual ones; any sources that go together make one."""


class PredictConfig(Section):
    """Inference of the segmentation network."""

    scales: tuple[Rate, ...] = (0.5, 0.75, 1.0, 1.25, 1.5)
    """Factors of the image's size, probabilities averaged."""
    hflip: bool = True
    """Average with the mirror image."""
    split: Literal["auto", "train", "val", "test"] = "auto"
    """Images that are predicted; auto = val, or train where there is no val."""
    crop: int | None = Field(default=401, gt=0)
    """Side of sliding windows with two thirds' stride, pixels; None = the image whole."""
    crf: CrfParameters = CrfParameters()
    """Refinement of the probabilities; both plain and refined predictions are kept and scored."""


class EvaluateConfig(Section):
    """Scores."""

    thresholds: int = Field(default=128, ge=2, le=1024)
    """Background thresholds i / thresholds tried on the localization maps' scores (`maps.scale`), in one pass."""


class ReportConfig(Section):
    """The report."""

    panels: int = Field(default=12, ge=0, le=200)
    """Images shown, half of train and half of val."""


class TrackingConfig(Section):
    """What MLflow is given beside parameters, figures, reports and pictures; nothing here changes a result."""

    model: bool | None = None
    """Log the trained segmentation network as a model, which takes the disk of its weights once more. None = of a run,
    but not of the trials of a study."""


class Config(Section):
    """A run from tags to masks."""

    sources: str = "voc"
    """Which image sources are used, joined by +."""
    recipe: str = "paper"
    """Which recipe the values come from, where nothing else changed them."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of every draw: initial weights, pairs, related images, augmentation."""
    supervision: Literal["tags", "full"] = "tags"
    """What the segmentation network learns from. `full`: the training images' ground-truth masks in place of pseudo
    masks, an upper bound that tags can be compared with; nothing of ground truth reaches a training without that word
    but the masks of `data.corrected_masks`."""
    data: DataConfig = DataConfig()
    """Images, tags, saliency maps."""
    weights: WeightsConfig = WeightsConfig()
    """Pretrained weights."""
    classifier: ClassifierConfig = ClassifierConfig()
    """Stage train_classifier."""
    localize: LocalizeConfig = LocalizeConfig()
    """Stage localize."""
    maps: MapsConfig = MapsConfig()
    """Stages pseudo_masks and evaluate."""
    affinity_net: AffinityNetConfig = AffinityNetConfig()
    """Stage train_affinity, which takes part where `pseudo_masks.rule` is affinity."""
    pseudo_masks: PseudoMasksConfig = PseudoMasksConfig()
    """Stage pseudo_masks."""
    segmenter: SegmenterConfig = SegmenterConfig()
    """Stage train_segmenter."""
    predict: PredictConfig = PredictConfig()
    """Stage predict."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Stage evaluate."""
    report: ReportConfig = ReportConfig()
    """Stage report."""
    compute: ComputeConfig = ComputeConfig()
    """Workers, memory, threads; changes no result."""
    tracking: TrackingConfig = TrackingConfig()
    """What MLflow is given; changes no result."""

    @property
    def uses_random_walk(self) -> bool:
        """Whether maps walk over learnt affinities, which a network is trained for."""
        return self.supervision == "tags" and self.pseudo_masks.uses_random_walk

    def problems(self) -> Iterator[str]:
        """What contradicts itself, within the sections and between them."""
        for name in type(self).model_fields:
            section = getattr(self, name)
            if isinstance(section, Section):
                yield from section.problems()
        yield from _locations_of_unused_sources(self)
        yield from _corrected_masks_beside_the_truth(self)
        yield from _related_images_without_co_attention(self)
        yield from _contrastive_maps_without_their_training(self)
        yield from _a_scale_of_activations_for_scores(self)
        yield from _a_segmenter_unlike_its_classifier(self)
        yield from _a_frozen_backbone_without_weights(self)
        yield from _workers_without_a_sample(self)

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        if problems := list(self.problems()):
            raise Contradictions(problems)
        return self


def sources_of(sources: str) -> tuple[str, ...]:
    """The image sources of a combination: its parts between +, the one that names the classes first; UserError for an
    unknown source, one twice, or two that each have classes of their own."""
    names = tuple(sources.split("+"))
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        hint = (
            did_you_mean([sources], SOURCE_COMBINATIONS)
            or did_you_mean(unknown[:1], [*SOURCES])
            or "choose one of them"
        )
        if sources in ("coco", "yolo", "cvat", "labelstudio") or "." in sources:
            hint = "mcis run tags --tags TABLE; mcis import makes a table of data sets such as COCO's"
        expected = f"{', '.join(SOURCE_COMBINATIONS)}, or other sources ({', '.join(SOURCES)}) by +"
        raise UserError(f"unknown sources {sources!r}", expected, hint.strip())
    if len(set(names)) < len(names) or len(set(names).intersection(_WITH_CLASSES)) > 1:
        raise UserError(
            f"sources {sources!r}",
            f"each source once, and one of {', '.join(_WITH_CLASSES)} at most, since each has classes of its own",
            "run them one by one, or write one table for the source tags",
        )
    return tuple(sorted(names, key=[*_WITH_CLASSES, *SOURCES].index))


def _locations_of_unused_sources(config: Config) -> Iterator[str]:
    for name, source in SOURCES.items():
        location = value_of(config, source.keys(name)[source.location])
        if location is not None and name not in config.sources.split("+"):
            yield (
                f"sources {config.sources} have no source {name}, but {location} is given for it; "
                f"use {config.sources}+{name}, or leave it out"
            )


def _related_images_without_co_attention(config: Config) -> Iterator[str]:
    localize = config.localize
    learnt = config.classifier.affinity.w_p == "learned" and localize.method.w_p == "learned"
    if config.classifier.attention == "none" and localize.related and learnt:
        yield (
            f"localize.related is {localize.related} but classifier.attention is none, which trains no W_P to relate "
            "images by; set localize.related=0, classifier.attention=co, or what needs none: "
            "classifier.affinity.w_p=identity, or localize.method.w_p=identity of "
            "localize.method.name=co_attention"
        )


def _contrastive_maps_without_their_training(config: Config) -> Iterator[str]:
    attention = config.classifier.attention
    if config.localize.method.contrastive and attention != "co+contrastive":
        yield (
            f"localize.method.contrastive is set but classifier.attention is {attention}, which trains no contrastive "
            "co-attention; set localize.method.contrastive=false or classifier.attention=co+contrastive"
        )


def _a_scale_of_activations_for_scores(config: Config) -> Iterator[str]:
    if config.maps.scale != "logarithm":
        return
    if config.localize.method.name == "released":
        yield (
            "maps.scale is logarithm but localize.method.name is released, whose maps are no activations: each is "
            "normalized to [0, 1] already; set maps.scale=maximum or localize.method.name=co_attention"
        )
    if config.classifier.equivariant.weight:
        yield (
            f"maps.scale is logarithm but classifier.equivariant.weight is {config.classifier.equivariant.weight:g}, "
            "whose single-round maps are no activations but scores in [0, 1]; set maps.scale=range or maximum"
        )


def _corrected_masks_beside_the_truth(config: Config) -> Iterator[str]:
    if config.data.corrected_masks and config.supervision == "full":
        yield (
            "data.corrected_masks is set but supervision is full, which trains on all ground-truth masks; "
            "leave one of them out"
        )


def downstream_networks(config: Config) -> dict[str, SegmenterConfig | AffinityNetConfig]:
    """The networks behind the classifier that take part, by the names of their sections."""
    return {"segmenter": config.segmenter, **({"affinity_net": config.affinity_net} if config.uses_random_walk else {})}


def _a_segmenter_unlike_its_classifier(config: Config) -> Iterator[str]:
    c, segmenter = config.classifier, config.segmenter
    if segmenter.init != "classifier":
        return
    if config.supervision == "full":
        yield (
            "segmenter.init is classifier but supervision is full, which trains no classifier; set "
            "segmenter.init=pretrained or supervision=tags"
        )
    same = segmenter.backbone == c.backbone and (c.backbone != "small" or segmenter.channels == c.channels)
    if not same:
        yield (
            f"segmenter.init is classifier, but the segmenter's backbone {segmenter.backbone} ({segmenter.channels} "
            f"channels) is not the classifier's {c.backbone} ({c.channels} channels); make them equal or use "
            "init=pretrained"
        )


def _a_frozen_backbone_without_weights(config: Config) -> Iterator[str]:
    c, weights = config.classifier, config.weights
    if weights.classifier_backbone == "none" and weights.classifier is None:
        for key, value, without in (
            ("trainable_stages", c.trainable_stages, "all"),
            ("standardize", c.standardize, False),
        ):
            if value != without:
                yield (
                    f"classifier.{key} is {str(value).lower()} but weights.classifier_backbone is none, which leaves "
                    "the backbone at its random initialization; set weights.classifier_backbone=bundled, download or "
                    "a file, or "
                    f"classifier.{key}={str(without).lower()}"
                )
    if c.trainable_stages == 0 and c.backbone == "vgg16" and weights.classifier is None:
        yield (
            "classifier.trainable_stages is 0 but classifier.backbone is vgg16, whose last layers are new: they would "
            "stay random; set classifier.trainable_stages=1, which trains these"
        )
    for name, network in downstream_networks(config).items():
        starts_from_classifier = isinstance(network, SegmenterConfig) and network.init == "classifier"
        if network.trainable_stages != "all" and not starts_from_classifier and weights.origin(name) == "none":
            yield (
                f"{name}.trainable_stages is {network.trainable_stages} but weights.{name}_backbone is none, "
                f"which leaves its frozen stages random; set weights.{name}_backbone=bundled, download or a file"
            )


def _workers_without_a_sample(config: Config) -> Iterator[str]:
    workers = config.compute.workers
    batches = {name: network.batch for name, network in downstream_networks(config).items()}
    for name, batch in {"classifier": config.classifier.batch, **batches}.items():
        if batch < workers:
            yield (
                f"{name}.batch is {batch} for compute.workers {workers}, each of which needs a sample; set "
                f"compute.workers={batch} or fewer, or a larger {name}.batch, at a learning rate that follows"
            )

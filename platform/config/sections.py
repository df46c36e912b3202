"""The configuration of a run: frozen sections that are validated once, with all problems reported together.

`recipes` and `resolve` fill the sections from recipes, files and the command line; each stage receives the sections
that it depends on. This module holds the whole configuration, the sections of prediction, evaluation and reporting, and
the checks between sections. Checks within a section are its method `problems`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mcis.datasets.errors import UserError
from mcis.datasets.section import Contradictions, LocalPath, Rate, Section
from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.annotations import refuse_annotations
from mcis.datasets.sources.lists import did_you_mean
from mcis.models.crf import CrfParameters
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.data import DataConfig, WeightsConfig
from mcis.platform.config.keys import value_of
from mcis.platform.config.maps import LocalizeConfig, MapsConfig, PseudoMasksConfig
from mcis.platform.config.training import AffinityNetConfig, ClassifierConfig, SegmenterConfig

_DEFINE_CLASSES = tuple(name for name, source in SOURCES.items() if source.defines_classes)
_NEED_CLASSES = tuple(name for name in SOURCES if name not in _DEFINE_CLASSES)
SOURCE_COMBINATIONS = (*_DEFINE_CLASSES, *(f"{_DEFINE_CLASSES[0]}+{name}" for name in _NEED_CLASSES))
"""Common values of `sources`; other combinations are possible."""


class PredictConfig(Section):
    """Inference of the segmentation network."""

    scales: tuple[Rate, ...] = (0.5, 0.75, 1.0, 1.25, 1.5)
    """Scale factors of the image; probabilities are averaged."""
    hflip: bool = True
    """Average the probabilities with those of the horizontally flipped image."""
    split: Literal["auto", "train", "val", "test"] = "auto"
    """Images to predict; `auto` = val, or train if there is no val."""
    crop: int | None = Field(default=401, gt=0)
    """Side length in pixels of sliding windows, which overlap by a third; None: the whole image at once."""
    crf: CrfParameters = CrfParameters()
    """Dense CRF applied to the probabilities; plain and refined predictions are both stored and scored."""
    masks: LocalPath | None = Field(default=None, exclude=True)  # the output depends on the files in it
    """Folder of predictions of another program: a label PNG <id>.png for each image of the split, 0 = background, k =
    the k-th class; or logits <id>.npy. No segmentation network is trained then. None: the run makes the
    predictions."""

    @property
    def is_imported(self) -> bool:
        """Whether the predictions are those of another program."""
        return self.masks is not None


class EvaluateConfig(Section):
    """Scoring of maps, masks and predictions against the ground truth."""

    thresholds: int = Field(default=128, ge=2, le=1024)
    """Number N of background thresholds, i / N, that are tried on localization maps. Their scores are in [0, 1]
    (`maps.scale`)."""


class ReportConfig(Section):
    """The HTML report."""

    panels: int = Field(default=12, ge=0, le=200)
    """Number of images shown: half from train, half from the predicted split (`predict.split`)."""


class TrackingConfig(Section):
    """What is logged to MLflow in addition to parameters, metrics, reports and pictures; it changes no result."""

    model: bool | None = None
    """Log the trained segmentation network as a model, which stores its weights a second time. None: for runs, but not
    for trials of a study."""


class Config(Section):
    """Configuration of a run, from tags to masks."""

    sources: str = "voc"
    """Image sources joined by +, such as `tags` or `voc+web`."""
    recipe: str = "paper"
    """Recipe: a named set of values, for all keys that are not set in another way."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of every random draw: initial weights, pairs, related images, augmentation."""
    supervision: Literal["tags", "full"] = "tags"
    """What the segmentation network is trained on: `tags` = pseudo masks; `full` = the ground-truth masks of the
    training images, an upper bound for tags. With `tags`, no training reads ground truth except
    `data.corrected_masks`."""
    data: DataConfig = DataConfig()
    """Images, tags, masks, saliency maps."""
    weights: WeightsConfig = WeightsConfig()
    """Pretrained weights."""
    classifier: ClassifierConfig = ClassifierConfig()
    """Stage train_classifier."""
    localize: LocalizeConfig = LocalizeConfig()
    """Stage localize."""
    maps: MapsConfig = MapsConfig()
    """Scale of localization maps in the stages pseudo_masks and evaluate."""
    affinity_net: AffinityNetConfig = AffinityNetConfig()
    """Stage train_affinity, which runs if the rule of `pseudo_masks` has a random walk."""
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
    """Workers, memory, failures; they change results only by rounding."""
    tracking: TrackingConfig = TrackingConfig()
    """What is logged to MLflow; it changes no result."""

    @property
    def trains_segmenter(self) -> bool:
        """Whether a segmentation network is trained, rather than predictions of another program imported."""
        return not self.predict.is_imported

    @property
    def makes_masks(self) -> bool:
        """Whether the run has pseudo masks: to train on, or those of another program."""
        return self.trains_segmenter or self.pseudo_masks.is_imported

    @property
    def needs_maps(self) -> bool:
        """Whether pseudo masks are made from localization maps."""
        return self.supervision == "tags" and self.trains_segmenter and not self.pseudo_masks.is_imported

    @property
    def has_maps(self) -> bool:
        """Whether the run has localization maps: to make pseudo masks from, or those of another program."""
        return self.needs_maps or self.localize.is_imported

    @property
    def trains_classifier(self) -> bool:
        """Whether a classifier is trained, to make localization maps."""
        return self.needs_maps and not self.localize.is_imported

    @property
    def map_scale(self) -> str:
        """The scale of localization maps: `maps.scale`, or `given` for those of another program."""
        return "given" if self.localize.is_imported else self.maps.scale

    @property
    def uses_random_walk(self) -> bool:
        """Whether maps are refined by a random walk, for which an affinity network is trained."""
        return self.needs_maps and self.pseudo_masks.uses_random_walk

    @property
    def refines_maps(self) -> bool:
        """Whether single-round maps are refined by pixel correlation."""
        is_equivariant = self.classifier.equivariant.weight > 0
        return is_equivariant and self.localize.pixel_correlation and not self.localize.is_imported

    def problems(self) -> Iterator[str]:
        """All contradictions within and between the sections."""
        for name in type(self).model_fields:
            section = getattr(self, name)
            if isinstance(section, Section):
                yield from section.problems()
        yield from _check_unused_locations(self)
        yield from _check_imported_outputs(self)
        yield from _check_corrected_masks(self)
        yield from _check_related_images(self)
        yield from _check_contrastive_maps(self)
        yield from _check_map_scale(self)
        yield from _check_segmenter_init(self)
        yield from _check_frozen_backbones(self)
        yield from _check_batch_sizes(self)

    @model_validator(mode="after")
    def _raise_problems(self) -> "Config":
        problems = list(self.problems())
        if problems:
            raise Contradictions(problems)
        return self


def sources_of(sources: str) -> tuple[str, ...]:
    """Splits a combination of image sources such as `web+voc` into names. The source that defines classes comes first.

    Raises:
        UserError: A source is unknown or given twice, or two sources define classes.
    """
    names = tuple(sources.split("+"))
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        hint = did_you_mean([sources], SOURCE_COMBINATIONS) or did_you_mean(unknown[:1], [*SOURCES])
        hint = hint or "name one of them, or your own table of images and tags, such as photos.csv"
        refuse_annotations(Path(sources))
        from mcis.datasets.formats.importing import FORMATS  # its libraries would slow down every command

        if sources in FORMATS or "." in sources:
            hint = "convert the data set by `mcis import`, then name its table: `mcis run OUT/photos.csv --name NAME`"
        expected = f"{', '.join(SOURCE_COMBINATIONS)}, or other sources ({', '.join(SOURCES)}) joined by +"
        raise UserError(f"unknown sources {sources!r}", expected, hint.strip())
    if len(set(names)) < len(names) or len(set(names).intersection(_DEFINE_CLASSES)) > 1:
        raise UserError(
            f"sources {sources!r}",
            f"each source once, and at most one of {', '.join(_DEFINE_CLASSES)}, because each defines classes",
            "use one run for each, or list all images in one table for the source tags",
        )
    order = [*_DEFINE_CLASSES, *SOURCES]
    return tuple(sorted(names, key=order.index))


def downstream_networks(config: Config) -> dict[str, SegmenterConfig | AffinityNetConfig]:
    """Networks that are trained after the classifier, by the names of their sections."""
    networks: dict[str, SegmenterConfig | AffinityNetConfig] = {}
    if config.trains_segmenter:
        networks["segmenter"] = config.segmenter
    if config.uses_random_walk:
        networks["affinity_net"] = config.affinity_net
    return networks


def _check_unused_locations(config: Config) -> Iterator[str]:
    """A location is given for a source that is not among `sources`."""
    for name, source in SOURCES.items():
        location = value_of(config, source.keys(name)[source.location])
        if location is not None and name not in config.sources.split("+"):
            places = ", ".join(location) if isinstance(location, tuple) else location
            yield (
                f"sources is {config.sources}, without {name}, but {places} is given for {name}; "
                f"use {config.sources}+{name}, or leave it out"
            )


def _check_imported_outputs(config: Config) -> Iterator[str]:
    """Outputs of another program are given, but supervision is full."""
    if config.supervision == "tags":
        return
    imported = {
        "localize.maps": config.localize.maps,
        "pseudo_masks.masks": config.pseudo_masks.masks,
        "predict.masks": config.predict.masks,
    }
    for key, folder in imported.items():
        if folder is not None:
            yield (
                f"{key} is set but supervision is full, which trains on all ground-truth masks; set supervision=tags, "
                f"or leave {key} out"
            )


def _check_corrected_masks(config: Config) -> Iterator[str]:
    """Corrected masks are given, but all masks are trained on already."""
    if config.data.corrected_masks and config.supervision == "full":
        yield (
            "data.corrected_masks is set but supervision is full, which trains on all ground-truth masks; "
            "leave one of them out"
        )


def _check_related_images(config: Config) -> Iterator[str]:
    """Maps use related images, but no W_P is trained to compare them with."""
    localize = config.localize
    if not config.trains_classifier:
        return
    needs_w_p = config.classifier.affinity.w_p == "learned" and localize.method.w_p == "learned"
    if config.classifier.attention == "none" and localize.related and needs_w_p:
        yield (
            f"localize.related is {localize.related} but classifier.attention is none, which trains no W_P to compare "
            "images with; set localize.related=0, classifier.attention=co, classifier.affinity.w_p=identity, or "
            "localize.method.w_p=identity with localize.method.name=co_attention"
        )


def _check_contrastive_maps(config: Config) -> Iterator[str]:
    """Maps use contrastive co-attention that is not trained."""
    attention = config.classifier.attention
    if config.trains_classifier and config.localize.method.contrastive and attention != "co+contrastive":
        yield (
            f"localize.method.contrastive is set but classifier.attention is {attention}, which trains no contrastive "
            "co-attention; set localize.method.contrastive=false or classifier.attention=co+contrastive"
        )


def _check_map_scale(config: Config) -> Iterator[str]:
    """The scale of activations is chosen for maps that are scores already."""
    if config.map_scale != "logarithm":
        return
    if config.localize.method.name == "released":
        yield (
            "maps.scale is logarithm but localize.method.name is released, whose maps are normalized to [0, 1]; set "
            "maps.scale=maximum or localize.method.name=co_attention"
        )
    if config.refines_maps:
        yield (
            f"maps.scale is logarithm but classifier.equivariant.weight is {config.classifier.equivariant.weight:g}, "
            "whose single-round maps are scores in [0, 1]; set maps.scale=range or maximum, or "
            "localize.pixel_correlation=false"
        )


def _check_segmenter_init(config: Config) -> Iterator[str]:
    """The segmentation network starts from a classifier that does not exist or does not fit."""
    classifier = config.classifier
    segmenter = config.segmenter
    if segmenter.init != "classifier" or not config.trains_segmenter:
        return
    if config.supervision == "full":
        yield (
            "segmenter.init is classifier but supervision is full, which trains no classifier; set "
            "segmenter.init=pretrained or supervision=tags"
        )
    elif not config.trains_classifier:
        yield (
            "segmenter.init is classifier but maps or masks of another program are given, for which no classifier is "
            "trained; set segmenter.init=pretrained"
        )
    same_width = classifier.backbone != "small" or segmenter.channels == classifier.channels
    if segmenter.backbone != classifier.backbone or not same_width:
        yield (
            f"segmenter.init is classifier, but the segmenter's backbone {segmenter.backbone} ({segmenter.channels} "
            f"channels) is not the classifier's {classifier.backbone} ({classifier.channels} channels); make them "
            "equal or set segmenter.init=pretrained"
        )


def _check_frozen_backbones(config: Config) -> Iterator[str]:
    """A backbone is frozen, or standardized, at its random initialization."""
    classifier = config.classifier
    weights = config.weights
    if config.trains_classifier and weights.classifier_backbone == "none" and weights.classifier is None:
        remedy = "set weights.classifier_backbone=bundled, download or a file"
        if classifier.trainable_stages != "all":
            yield (
                f"classifier.trainable_stages is {classifier.trainable_stages} but weights.classifier_backbone is "
                f"none: the frozen stages would stay random; {remedy}, or classifier.trainable_stages=all"
            )
        if classifier.standardize:
            yield (
                "classifier.standardize is true but weights.classifier_backbone is none: there is nothing to "
                f"standardize before training; {remedy}, or classifier.standardize=false"
            )
    is_vgg16 = config.trains_classifier and classifier.backbone == "vgg16"
    if is_vgg16 and classifier.trainable_stages == 0 and weights.classifier is None:
        yield (
            "classifier.trainable_stages is 0 but classifier.backbone is vgg16, whose last layers are new: they would "
            "stay random; set classifier.trainable_stages=1, which trains them"
        )
    for name, network in downstream_networks(config).items():
        starts_from_classifier = isinstance(network, SegmenterConfig) and network.init == "classifier"
        if network.trainable_stages != "all" and not starts_from_classifier and weights.origin(name) == "none":
            yield (
                f"{name}.trainable_stages is {network.trainable_stages} but weights.{name}_backbone is none: the "
                f"frozen stages would stay random; set weights.{name}_backbone=bundled, download or a file"
            )


def _check_batch_sizes(config: Config) -> Iterator[str]:
    """A batch has fewer samples than there are workers."""
    workers = config.compute.workers
    batches = {"classifier": config.classifier.batch} if config.trains_classifier else {}
    for name, network in downstream_networks(config).items():
        batches[name] = network.batch
    for name, batch in batches.items():
        if batch < workers:
            yield (
                f"{name}.batch is {batch} for compute.workers {workers}, each of which needs a sample; set "
                f"compute.workers={batch} or fewer, or a larger {name}.batch with a suitable learning rate"
            )

"""Stage 2: tagged training images -> weights.pt of the co-attention classifier, steps.jsonl (section 3.2)."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import Squares, image_bytes
from mcis.datasets.index import Listing, shown
from mcis.datasets.sampling.keyed_random import Order, permuted
from mcis.datasets.sampling.pairs import KINDS, PairSampler
from mcis.datasets.tables.backbone_outputs import Features, Statistics
from mcis.datasets.tables.large_tables import Texts
from mcis.datasets.tags import Tags
from mcis.models.metrics import average_precision
from mcis.platform.config.sections import Config
from mcis.platform.engine.cache import decoded_cache, features_cache
from mcis.platform.engine.classifier_learner import ClassifierLearner, val_scores, val_scores_of_features
from mcis.platform.engine.learnt import Chance, LossTrend
from mcis.platform.engine.loop import FitResult
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.training import fit
from mcis.platform.engine.validation import Validation
from mcis.platform.networks.build import build_backbone, build_classifier, freeze
from mcis.platform.networks.checkpoints import WEIGHTS, save_weights
from mcis.platform.networks.pair_scores import ScorePairs
from mcis.platform.networks.pretrained import classifier_weights, load_backbone
from mcis.platform.networks.trained import (
    check_initial_classifier,
    classifier_description,
    initial_classifier,
    load_trained_classifier,
    trained_classifier,
)
from mcis.platform.outputs.read_index import of_source, split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import content_digest, read_table
from mcis.platform.runs.results import TrainingResult
from mcis.platform.runs.workspace import Workspace

_VAL_PAIRS = 512  # at most
_SAMPLE = 256
"""Training images that are scored where no val image has a tag, or give a backbone's statistics, at most."""


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Loads the weights that the classifier is taken over or starts from, and looks for the stages to be trained.

    Raises:
        UserError: weights cannot be had or do not fit, or the backbone has no such stride or stages.
    """
    if trained := trained_classifier(config):
        load_trained_classifier(config, trained, listing.classes)
        return
    with torch.device("meta"):
        freeze(build_classifier(config.classifier, len(listing.classes)), config.classifier)
    pretrained = classifier_weights(config, workspace)
    if initial := initial_classifier(config):
        check_initial_classifier(config, initial, listing.classes, pretrained)
    elif pretrained:
        load_backbone("classifier", build_backbone(config.classifier), pretrained)


def inputs(config: Config, context: RunContext) -> Any:
    """The content of the files of weights that are taken over, or that training starts from."""
    starts = initial_classifier(config), classifier_weights(config, context.workspace)
    trained = trained_classifier(config)
    return [content_digest(path) for path in ([trained] if trained else starts) if path]


def run(config: Config, context: RunContext) -> TrainingResult:
    """Trains the classifier on pairs of tagged training images with Ray Train, or takes a trained one.

    Raises:
        UserError: weights cannot be had or do not fit, or the loss is not finite.
    """
    if trained := trained_classifier(config):
        return _take_trained(config, context, trained)
    learner, cached = _learner(config, context)
    sampler = _sampler(learner)
    validation = _validation(config, context, cached=cached)
    result = fit(
        learner,
        context.part,
        config.compute,
        context.tracker,
        label="classifier",
        about=classifier_description(config.classifier, context.classes),
        validation=validation,
    )
    of_val = validation is not None and validation.name == "val_map"
    # Of weights that had learnt before, a loss that stands says nothing.
    trend = None if config.weights.initial else LossTrend.of_log(context.part, "basic")
    facts = (
        Facts({"steps": learner.schedule.steps}, result.notes("classifier") + _computed_again(config, learner)),
        Facts({}, (f"the classifier's training began from {learner.initial}",) if learner.initial else ()),
        _rare_classes(learner.tags, context.classes),
        _precision(validation, result),
        _exclusive_precision(config, context),
        _pair_kinds(sampler) if learner.source is not None and learner.source.any() else Facts({}, ()),
    )
    return TrainingResult(
        busy=result.seconds,
        waiting=result.waiting,
        precision=result.precision,
        val_ap=dict(zip(context.classes, result.val_ap, strict=True)) if of_val and result.val_ap else None,
        counts={label: value for part in facts for label, value in part.counts.items()},
        notes=tuple(note for part in facts for note in part.notes),
        problem=_problem(validation, result, trend, config.seed),
    )


class Facts(NamedTuple):
    """Counts and notes of a stage's result."""

    counts: dict[str, Any]
    notes: tuple[str, ...]


def _take_trained(config: Config, context: RunContext, path: Path) -> TrainingResult:
    """Writes the weights of a trained classifier as this stage's, with the description of this configuration."""
    model = load_trained_classifier(config, path, context.classes)
    save_weights(model, context.part / WEIGHTS, classifier_description(config.classifier, context.classes))
    return TrainingResult(counts={"steps": 0}, notes=(f"the classifier was not trained but taken from {path}",))


def _learner(config: Config, context: RunContext) -> tuple[ClassifierLearner, int]:
    """What is trained, and how many training images may take space in the cache of decoded images."""
    rows = split_rows(context, "train", tagged=True)
    c = config.classifier
    pretrained, initial = classifier_weights(config, context.workspace), initial_classifier(config)
    if initial:
        check_initial_classifier(config, initial, context.classes, pretrained)
    features = _features(config, context, rows) if c.from_features else None
    cache = None
    if features is None and c.sizing != "random_crop":
        cache = decoded_cache(rows, c.input_size, context, config.compute)
    learner = ClassifierLearner(
        config=c,
        seed=config.seed,
        tags=Tags.of_index(rows["tags"], len(context.classes)),
        source=of_source(rows),
        images=features or _squares(rows, c.input_size, cache=cache),
        pretrained=pretrained,
        initial=initial,
        statistics=_statistics(config, context, rows) if c.standardize and not initial else None,
    )
    return learner, 0 if cache is None else len(rows)


def _squares(rows: pa.Table, size: int, *, cache: Path | None = None) -> Squares:
    """The images of an index's rows, each the file that was indexed."""
    uris, hashes = Texts(rows["uri"]), Texts(rows["content_hash"])
    return Squares(uris, size, cache=cache, hashes=hashes)


def _features(config: Config, context: RunContext, rows: pa.Table, images: int | None = None) -> Features | None:
    """What the backbone makes of images before its training; None where so many images' exceed the cache.

    Args:
        images: whose features are kept in all; None = all that a training reads, of train and val.
    """
    pretrained = classifier_weights(config, context.workspace)
    assert pretrained is not None, "a configuration without pretrained weights uses no features of them"
    if images is None:
        images = sum(len(split_rows(context, split, tagged=True, columns=["tags"])) for split in ("train", "val"))
    return features_cache(rows, config.classifier, pretrained, context, config.compute, images=images)


def _statistics(config: Config, context: RunContext, rows: pa.Table) -> Statistics:
    """Of the backbone's channels before its training, over a sample of the training images."""
    count = min(_SAMPLE, len(rows))
    sample = np.sort(permuted(Order.STATISTICS, config.seed, 0, len(rows), np.arange(count)))
    if config.classifier.from_features and (features := _features(config, context, rows)):
        return features.statistics(sample)
    features = _features(config, context, rows.take(sample), count)
    if features is None:
        raise UserError(
            f"the backbone's outputs of {count} images exceed compute.cache_gb={config.compute.cache_gb:g} GiB",
            "space for what the channels' statistics are taken of",
            "raise compute.cache_gb",
        )
    return features.statistics(np.arange(count))


def _sampler(learner: ClassifierLearner) -> PairSampler:
    """The learner's pairs.

    Raises:
        UserError: the images allow no such pairs.
    """
    try:
        return learner.sampler()
    except ValueError as error:
        raise UserError(
            f"pairs cannot be drawn: {error}",
            "tagged training images",
            "add tags, or images that have some",
        ) from None


def _validation(config: Config, context: RunContext, *, cached: int) -> Validation | None:
    """The tagged val images, decoded once where the cache holds them beside the `cached` training images.

    Where there is none, some training images, scored once at the end: what is not even learnt of them is not learnt.
    """
    c, compute = config.classifier, config.compute
    rows = split_rows(context, "val", tagged=True)
    if not c.val_every:
        return None
    if not len(rows):
        rows = split_rows(context, "train", tagged=True)
        rows = rows.take(np.unique(np.linspace(0, len(rows) - 1, min(_SAMPLE, len(rows))).astype(np.int64)))
        return Validation(
            images=_squares(rows, c.input_size),
            tags=Tags.of_index(rows["tags"], len(context.classes)),
            scores=val_scores,
            every=c.epochs + 1,
            name="train_map",
        )
    if c.from_features and (features := _features(config, context, rows)):
        return Validation(
            images=features,
            tags=Tags.of_index(rows["tags"], len(context.classes)),
            scores=val_scores_of_features,
            every=c.val_every,
        )
    fits = (cached + len(rows)) * image_bytes(c.input_size) <= compute.cache_gb * 2**30
    cache = decoded_cache(rows, c.input_size, context, compute) if fits else None
    return Validation(
        images=_squares(rows, c.input_size, cache=cache),
        tags=Tags.of_index(rows["tags"], len(context.classes)),
        scores=val_scores,
        every=c.val_every,
    )


def _computed_again(config: Config, learner: ClassifierLearner) -> tuple[str, ...]:
    """A note where a frozen backbone's outputs were not kept, as the cache does not hold them."""
    if not config.classifier.from_features or isinstance(learner.images, Features):
        return ()
    return (
        f"the frozen backbone computed every image in every epoch: its outputs exceed compute.cache_gb="
        f"{config.compute.cache_gb:g}",
    )


def _rare_classes(tags: Tags, classes: tuple[str, ...]) -> Facts:
    """The classes with no or one training image."""
    counts: dict[str, Any] = {}
    notes = []
    images = np.bincount(tags.values, minlength=tags.classes).tolist()
    for number, word, rule in ((0, "no", "nothing is learnt of them"), (1, "one", "it is paired with itself")):
        rare = [name for name, count in zip(classes, images, strict=True) if count == number]
        if rare:
            counts[f"classes with {word} training image"] = len(rare)
            notes.append(f"{len(rare)} of {len(images)} classes have {word} training image ({shown(rare)}): {rule}")
    return Facts(counts, tuple(notes))


def _precision(validation: Validation | None, result: FitResult) -> Facts:
    """Mean average precision over the classes that a scored image has, and a note where these are training images."""
    if validation is None:
        return Facts({}, ())
    if validation.name == "val_map":
        return Facts({"val mAP": _mean_precision(result)}, ())
    note = (
        f"no image of the split val has a tag: the mean average precision of the classifier is that on "
        f"{len(validation.tags)} of its own training images"
    )
    return Facts({"training images' mAP": _mean_precision(result)}, (note,))


def _mean_precision(result: FitResult) -> float:
    precisions = [ap for ap in result.val_ap or () if ap is not None]
    return round(sum(precisions) / len(precisions), 2)


def _problem(
    validation: Validation | None, result: FitResult, trend: LossTrend | None, seed: int
) -> tuple[str, str, str] | None:
    """Why the classifier is of no use: it ranks images as chance does, or, where that cannot be told, its loss stood.

    Args:
        trend: of the basic term, which counts from the first step to the last.
    """
    chance = None if validation is None else Chance.of_tags(validation.tags, seed)
    figures = [trend.in_words()] if trend else []
    if validation is not None and chance is not None:
        precision, images = _mean_precision(result), "val" if validation.name == "val_map" else "training"
        if precision > chance.most:
            return None
        scored = f"{precision:.1f} % mean average precision on {len(validation.tags)} {images} images"
        figures.insert(0, f"{scored}, where {chance.in_words()}")
    elif trend is None or trend.fell:
        return None
    return (
        f"the classifier learnt nothing: {'; '.join(figures)}",
        "images ranked by their tags better than by chance, and a loss that falls",
        "look at the loss curve, and whether the tags fit the images (mcis index browse); try pretrained weights "
        "(weights.backbone), another classifier.optimizer.learning_rate, more classifier.epochs, or another recipe",
    )


def _exclusive_precision(config: Config, context: RunContext) -> Facts:
    """Mean average precision of what only one image of a val pair has: of the contrastive scores, and of basic ones.

    Basic scores know nothing of the other image: what contrastive scores have above them is the gate's (Eq. 7-10).
    """
    c, rows = config.classifier, split_rows(context, "val", tagged=True)
    if c.attention != "co+contrastive" or not c.val_every or not len(rows):
        return Facts({}, ())
    tags = Tags.of_index(rows["tags"], len(context.classes))
    source = of_source(rows)
    pairs = PairSampler(tags, seed=config.seed, source=source).rows(0, min(2 * len(rows), _VAL_PAIRS))
    table = pa.table({"m": pa.array(pairs.m), "n": pa.array(pairs.n), "kind": pa.array(pairs.kind)})
    gpu, folder = config.compute.gpu, context.part / "pairs"
    outputs = _features(config, context, rows) if c.from_features else None
    arguments = c, context.part, len(context.classes), gpu, outputs or Texts(rows["uri"])
    map_table(
        table, ScorePairs, arguments, folder, label="val pairs", compute=config.compute, network=True, shard_rows=32
    )
    scores = read_table(folder)
    tags_m, tags_n = (tags.matrix(positions) for positions in (pairs.m, pairs.n))
    exclusive = np.concatenate([tags_m & ~tags_n, tags_n & ~tags_m])
    counts: dict[str, Any] = {"val pairs": len(table)}
    for label, name in (("val mAP of unshared classes", "exclusive"), ("the same of basic scores", "basic")):
        of_both = [np.array(scores[f"{name}_{side}"].to_pylist()) for side in "mn"]
        precisions = average_precision(np.concatenate(of_both), exclusive)
        if np.isfinite(precisions).any():
            counts[label] = round(float(np.nanmean(precisions)), 2)
    return Facts(counts, ())


def _pair_kinds(sampler: PairSampler) -> Facts:
    """The kinds among the first epoch's pairs."""
    kinds = sampler.kind_counts(0).tolist()
    return Facts({"pairs of the first epoch": dict(zip(KINDS, kinds, strict=True))}, ())

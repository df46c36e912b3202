"""Stage 2: tagged training images -> weights.pt of the co-attention classifier, steps.jsonl (section 3.2)."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import Squares, image_bytes
from mcis.datasets.index import Listing
from mcis.datasets.sampling.keyed_random import OrderPurpose, permuted
from mcis.datasets.tables.large_tables import Texts
from mcis.datasets.tables.memory_mapped import Features, Statistics
from mcis.datasets.tags import Tags
from mcis.platform.config.sections import Config
from mcis.platform.engine.cache import decoded_cache, features_cache
from mcis.platform.engine.step_log import loss_trend
from mcis.platform.engine.training import fit
from mcis.platform.engine.validation import Validation
from mcis.platform.learners.chance import chance_precision
from mcis.platform.learners.classifier_learner import ClassifierLearner, val_scores
from mcis.platform.networks.build import build_backbone, build_classifier, freeze
from mcis.platform.networks.pretrained import (
    classifier_description,
    classifier_weights,
    load_backbone,
    load_trained_classifier,
    trained_classifier_file,
)
from mcis.platform.networks.weights_files import WEIGHTS, save_weights
from mcis.platform.outputs.read_index import from_source_domain, split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import content_digest
from mcis.platform.runs.results import VAL_MAP, StageResult
from mcis.platform.runs.workspace import Workspace

_SAMPLE = 256
"""Training images that give a backbone's statistics, at most."""


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError where weights cannot be had or do not fit, or the backbone has no such stride or stages."""
    if trained := trained_classifier_file(config):
        load_trained_classifier(config, trained, listing.classes)
        return
    with torch.device("meta"):
        freeze(build_classifier(config.classifier, len(listing.classes)), config.classifier)
    if pretrained := classifier_weights(config, workspace):
        load_backbone("classifier", build_backbone(config.classifier), pretrained)


def inputs(config: Config, context: RunContext) -> Any:
    """The content of the file of weights that are taken over, or that training starts from; whether it is validated."""
    path = trained_classifier_file(config) or classifier_weights(config, context.workspace)
    return path and content_digest(path), config.classifier.val_every == 0


def run(config: Config, context: RunContext) -> StageResult:
    """Trains the classifier on pairs of tagged training images with Ray Train, or takes a trained one.

    Raises:
        UserError: weights cannot be had or do not fit, or the loss is not finite.
    """
    if trained := trained_classifier_file(config):
        return _take_trained(config, context, trained)
    learner = _learner(config, context)
    validation = _validation(config, context, learner)
    about = classifier_description(config.classifier, context.classes)
    compute, tracker = config.compute, context.tracker
    result = fit(learner, context.part, compute, tracker, label="classifier", about=about, validation=validation)
    precisions = [ap for ap in result.val_ap or () if ap is not None]
    precision = round(sum(precisions) / len(precisions), 2) if precisions else None
    counts: dict[str, Any] = {"steps": learner.schedule.steps}
    if validation is not None:
        counts[VAL_MAP] = precision
    return StageResult(
        counts=counts,
        notes=result.notes("classifier") + _notes(config, learner, validation),
        problem=_problem(validation, precision, loss_trend(context.part, "basic"), config.seed),
    )


def _take_trained(config: Config, context: RunContext, path: Path) -> StageResult:
    """Writes the weights of a trained classifier as this stage's, with the description of this configuration."""
    model = load_trained_classifier(config, path, context.classes)
    save_weights(model, context.part / WEIGHTS, classifier_description(config.classifier, context.classes))
    return StageResult(counts={"steps": 0}, notes=(f"the classifier was not trained but taken from {path}",))


def _learner(config: Config, context: RunContext) -> ClassifierLearner:
    """What is trained; UserError where no training image has a tag."""
    rows = split_rows(context, "train", tagged=True)
    if not len(rows):
        raise UserError("no training image has a tag", "images with tags to draw pairs of", "add tags")
    c = config.classifier.scaled_for(len(rows))
    beside = len(split_rows(context, "val", tagged=True, columns=["tags"])) if c.trains_on_features else 0
    images = _images(config, context, rows, cached=c.sizing != "random_crop", beside=beside)
    return ClassifierLearner(
        config=c,
        seed=config.seed,
        tags=Tags.from_index(rows["tags"], len(context.classes)),
        source=from_source_domain(rows),
        images=images,
        pretrained=classifier_weights(config, context.workspace),
        statistics=_statistics(config, context, rows, images) if c.standardize else None,
    )


def _images(config: Config, context: RunContext, rows: pa.Table, *, cached: bool, **how: int) -> Squares | Features:
    """What a frozen backbone makes of the images of an index's rows, where the cache holds that; else the images, each
    the file that was indexed, decoded once where they are `cached`. `how`: as of `features_cache`."""
    c = config.classifier
    if c.trains_on_features and (features := features_cache(rows, config, context, **how)):
        return features
    cache = decoded_cache(rows, c.input_size, context, config.compute) if cached else None
    return Squares(Texts(rows["uri"]), c.input_size, cache=cache, hashes=Texts(rows["content_hash"]))


def _statistics(config: Config, context: RunContext, rows: pa.Table, images: Squares | Features) -> Statistics:
    """Of the backbone's channels before its training, over a sample of the training images; `images` are all."""
    count = min(_SAMPLE, len(rows))
    sample = np.sort(permuted(OrderPurpose.STATISTICS, config.seed, 0, len(rows), np.arange(count)))
    if isinstance(images, Features):
        return images.statistics(sample)
    features = features_cache(rows.take(sample), config, context, views=1)
    if features is None:
        found = f"the backbone's outputs of {count} images exceed compute.cache_gb={config.compute.cache_gb:g} GiB"
        raise UserError(found, "space for what the channels' statistics are taken of", "raise compute.cache_gb")
    return features.statistics(np.arange(count))


def _validation(config: Config, context: RunContext, learner: ClassifierLearner) -> Validation | None:
    """The tagged val images, decoded once where the cache holds them beside the training images."""
    c, compute, trained = learner.config, config.compute, len(learner.tags)
    rows = split_rows(context, "val", tagged=True)
    if not c.val_every or not len(rows):
        return None
    cached = trained if learner.images.cache.shards else 0
    fits = (cached + len(rows)) * image_bytes(c.input_size) <= compute.cache_gb * 2**30
    return Validation(
        images=_images(config, context, rows, cached=fits, views=1, beside=2 * trained),
        tags=Tags.from_index(rows["tags"], len(context.classes)),
        scores=val_scores,
        every=c.val_every,
    )


def _notes(config: Config, learner: ClassifierLearner, validation: Validation | None) -> tuple[str, ...]:
    """What the user should read of a training beside its figures."""
    notes = []
    if config.classifier.trains_on_features and not isinstance(learner.images, Features):
        notes.append(
            "the frozen backbone computed every image in every epoch: its outputs exceed compute.cache_gb="
            f"{config.compute.cache_gb:g}"
        )
    if config.classifier.val_every and validation is None:
        notes.append("no image of the split val has a tag, so that the classifier's average precision is not known")
    counts = np.bincount(learner.tags.values, minlength=learner.tags.classes)
    if n := int((counts == len(learner.tags)).sum()):
        notes.append(f"{n} of {len(counts)} class(es) are in every tagged training image: add images with other tags")
    return tuple(notes)


def _problem(
    validation: Validation | None, precision: float | None, trend: tuple[bool, str] | None, seed: int
) -> tuple[str, str, str] | None:
    """Why the classifier is of no use: it ranks images as chance does, or, where that cannot be told, its loss stood.

    Args:
        precision: mean average precision on the validation's images.
        trend: as `loss_trend` says, of the basic term, which counts from the first step to the last.
    """
    by_chance = None if validation is None else chance_precision(validation.tags, seed)
    figures = [trend[1]] if trend else []
    if validation is not None and precision is not None and by_chance is not None:
        mean, most = by_chance
        if precision > most:
            return None
        scored = f"{precision:.1f} % mean average precision on {len(validation.tags)} val images"
        figures.insert(0, f"{scored}, where chance has {mean:.1f}, and stays below {most:.1f} in 95 of 100 cases")
    elif trend is None or trend[0]:
        return None
    return (
        f"the classifier learnt nothing: {'; '.join(figures)}",
        "images ranked by their tags better than by chance, and a loss that falls",
        "look at the loss curve, and whether the tags fit the images (mcis index browse); try pretrained weights "
        "(weights.classifier_backbone), another classifier.optimizer.learning_rate, more classifier.epochs, or another "
        "recipe",
    )

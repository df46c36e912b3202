"""Stage 2: tagged images and negatives -> weights.pt of the co-attention classifier, steps.jsonl (section 3.2)."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import Squares
from mcis.datasets.index import Listing
from mcis.datasets.sampling.keyed_random import OrderPurpose, permuted
from mcis.datasets.tables.large_tables import Texts, take_rows
from mcis.datasets.tables.memory_mapped import Features, Statistics
from mcis.datasets.tags import Tags
from mcis.platform.config.sections import Config
from mcis.platform.engine.cache import (
    NUM_STATISTICS_IMAGES,
    decoded_cache,
    features_cache,
    temporary_features,
    training_features,
)
from mcis.platform.engine.step_log import LossTrend, loss_trend
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
from mcis.platform.outputs.read_index import from_other_domains, from_source_domain, split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import content_digest
from mcis.platform.runs.results import VAL_MAP, Problem, StageResult
from mcis.platform.runs.workspace import Workspace


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError if weights are missing or do not fit, or the backbone lacks a stride or stage."""
    trained = trained_classifier_file(config)
    if trained:
        load_trained_classifier(config, trained, listing.classes)
        return
    with torch.device("meta"):
        freeze(build_classifier(config.classifier, len(listing.classes)), config.classifier)
    pretrained = classifier_weights(config, workspace)
    if pretrained:
        load_backbone("classifier", build_backbone(config.classifier), pretrained)


def inputs(config: Config, context: RunContext) -> Any:
    """Inputs of the stage key: the given trained or pretrained weights, and whether training is not validated."""
    path = trained_classifier_file(config) or classifier_weights(config, context.workspace)
    digest = content_digest(path) if path else None
    is_not_validated = config.classifier.val_every == 0
    return digest, is_not_validated


def run(config: Config, context: RunContext) -> StageResult:
    """Trains the classifier on pairs of training images with Ray Train, or copies a trained classifier.

    Raises:
        UserError: Weights are missing or do not fit, or the loss is not finite.
    """
    trained = trained_classifier_file(config)
    if trained:
        return _copy_trained(config, context, trained)

    learner = _learner(config, context)
    validation = _validation(config, context, learner)
    result = fit(
        learner,
        context.output,
        config.compute,
        context.tracker,
        label="classifier",
        about=classifier_description(config.classifier, context.classes),
        validation=validation,
    )

    counts: dict[str, Any] = {"steps": learner.schedule.steps}
    precisions = [value for value in result.val_ap or () if value is not None]
    precision = round(sum(precisions) / len(precisions), 2) if precisions else None
    if validation is not None:
        counts[VAL_MAP] = precision
    return StageResult(
        counts=counts,
        notes=result.notes("classifier") + _notes(config, learner, validation),
        problem=_problem(validation, precision, loss_trend(context.output, "basic"), config.seed),
    )


def _copy_trained(config: Config, context: RunContext, path: Path) -> StageResult:
    """Writes the weights of a classifier that was trained elsewhere as the output of this stage."""
    model = load_trained_classifier(config, path, context.classes)
    save_weights(model, context.output / WEIGHTS, classifier_description(config.classifier, context.classes))
    return StageResult(counts={"steps": 0}, notes=(f"the classifier was not trained but taken from {path}",))


def _learner(config: Config, context: RunContext) -> ClassifierLearner:
    """Makes the learner, with its images, their tags and the statistics of the backbone.

    Raises:
        UserError: No training image has a tag.
    """
    rows = split_rows(context, "train", tagged=True, negatives=True)
    tags = Tags.from_index(rows["tags"], len(context.classes))
    if not tags.num_tagged:
        raise UserError("no training image has a tag", "images with tags to draw pairs from", "add tags")

    section = config.classifier.scaled_for(len(rows))
    images = _images(config, context, rows)
    has_uncached = isinstance(images, Features) and not images.holds(np.arange(len(rows))).all()
    return ClassifierLearner(
        config=section,
        seed=config.seed,
        tags=tags,
        is_source=from_source_domain(rows),
        is_extra=from_other_domains(rows),
        images=images,
        pretrained=classifier_weights(config, context.workspace),
        statistics=_statistics(config, context, rows, images) if section.standardize else None,
        uncached=_squares(config, rows) if has_uncached else None,
    )


def _images(config: Config, context: RunContext, rows: pa.Table) -> Squares | Features:
    """The training images, or the features of the backbone if it is frozen; those that fit the cache are cached."""
    section = config.classifier
    if section.trains_on_features:
        features = training_features(rows, config, context)
        if features:
            return features
    cache = None
    if section.sizing != "random_crop":
        cache = decoded_cache(rows, section.input_size, context, config.compute, config.data.value_range)
    return _squares(config, rows, cache)


def _val_images(config: Config, context: RunContext, rows: pa.Table, images: Squares | Features) -> Squares | Features:
    """The val images, or their features; cached if all of them fit the cache next to the training images.

    Args:
        rows: Rows of the val images in the index.
        images: The training images.
    """
    if isinstance(images, Features):
        num_cached = int(images.holds(np.arange(len(images.uris))).sum())
        reserved_views = 2 * num_cached + min(NUM_STATISTICS_IMAGES, len(images.uris))
        features = features_cache(rows, config, context, views=1, reserved_views=reserved_views, all_or_none=True)
        return features or _squares(config, rows)

    num_cached = int(images.cache.holds(np.arange(len(images.uris))).sum())
    cache = decoded_cache(
        rows,
        config.classifier.input_size,
        context,
        config.compute,
        config.data.value_range,
        reserved_images=num_cached,
        all_or_none=True,
    )
    return _squares(config, rows, cache)


def _squares(config: Config, rows: pa.Table, cache: Path | None = None) -> Squares:
    """The images of some rows of the index at the classifier's input size."""
    return Squares(
        Texts(rows["uri"]),
        config.classifier.input_size,
        cache=cache,
        hashes=Texts(rows["content_hash"]),
        value_range=config.data.value_range,
    )


def _statistics(config: Config, context: RunContext, rows: pa.Table, images: Squares | Features) -> Statistics:
    """Mean and deviation of the backbone's channels before training, over a sample of the training images.

    The features of the sample are cached if those of the training images are, and if they fit the cache next to these.
    Otherwise they would displace decoded training images.
    """
    num_images = min(NUM_STATISTICS_IMAGES, len(rows))
    sample = np.sort(permuted(OrderPurpose.STATISTICS, config.seed, 0, len(rows), np.arange(num_images)))
    if isinstance(images, Features) and images.holds(sample).all():
        return images.statistics(sample)

    sampled = take_rows(rows, sample)
    if isinstance(images, Features):
        reserved_views = 2 * int(images.holds(np.arange(len(rows))).sum())
        features = features_cache(sampled, config, context, views=1, reserved_views=reserved_views, all_or_none=True)
        if features is not None:
            return features.statistics(np.arange(num_images))
    with temporary_features(sampled, config, context) as features:
        return features.statistics(np.arange(num_images))


def _validation(config: Config, context: RunContext, learner: ClassifierLearner) -> Validation | None:
    """Makes the validation on tagged val images and negatives; None if it is off or no val image has a tag."""
    section = learner.config
    rows = _val_rows(context)
    tags = Tags.from_index(rows["tags"], len(context.classes))
    if not section.val_every or not tags.num_tagged:
        return None

    return Validation(
        images=_val_images(config, context, rows, learner.images), tags=tags, scores=val_scores, every=section.val_every
    )


def _val_rows(context: RunContext) -> pa.Table:
    """Rows of the tagged val images and negatives."""
    return split_rows(context, "val", tagged=True, negatives=True)


def _notes(config: Config, learner: ClassifierLearner, validation: Validation | None) -> tuple[str, ...]:
    """Notes on the training for the user."""
    notes = []
    epoch_pairs = learner.config.epoch_pairs
    if epoch_pairs != config.classifier.epoch_pairs:
        unbounded_pairs = config.classifier.epoch_pairs or len(learner.tags)
        notes.append(
            f"an epoch has {epoch_pairs} pairs instead of {unbounded_pairs}, so that "
            f"training ends after classifier.max_steps={config.classifier.max_steps} updates"
        )
    if config.classifier.trains_on_features and not isinstance(learner.images, Features):
        notes.append("the features of the frozen backbone were not cached, but computed in every epoch")
    if config.classifier.val_every and validation is None:
        notes.append("no image of the split val has a tag, so the classifier's average precision is unknown")
    counts = np.bincount(learner.tags.values, minlength=learner.tags.classes)
    num_everywhere = int((counts == len(learner.tags)).sum())
    if num_everywhere:
        notes.append(
            f"{num_everywhere} of {len(counts)} class(es) are in every tagged training image: add images with other "
            "tags, or with none of the classes (tag none)"
        )
    return tuple(notes)


def _problem(
    validation: Validation | None, precision: float | None, trend: LossTrend | None, seed: int
) -> Problem | None:
    """Why later stages cannot learn from the classifier; None if they can.

    They cannot if it ranks val images no better than chance or, if this cannot be measured, if its loss did not fall.

    Args:
        precision: Mean average precision on the val images, percent.
        trend: Trend of the basic loss, which is used in every step. None: the training was too short.
    """
    evidence = []
    random_precision = None if validation is None else chance_precision(validation.tags, seed)
    if validation is not None and precision is not None and random_precision is not None:
        random_mean, random_limit = random_precision
        if precision > random_limit:
            return None
        evidence.append(
            f"{precision:.1f} % mean average precision on {len(validation.tags)} val images, where chance reaches "
            f"{random_mean:.1f}, and less than {random_limit:.1f} in 95 % of cases"
        )
    elif trend is None or trend.fell:
        return None

    if trend is not None:
        evidence.append(trend.text)
    return Problem(
        f"the classifier did not learn: {'; '.join(evidence)}",
        "a ranking of images by tags that is better than chance, and a falling loss",
        "look at the loss curve, and whether the tags fit the images (mcis index browse); try pretrained weights "
        "(weights.classifier_backbone), another classifier.optimizer.learning_rate, more classifier.epochs, or another "
        "recipe",
    )

"""Stage 6: training images + pseudo masks -> weights.pt of the segmentation network, steps.jsonl."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import nn

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.index import Listing
from mcis.datasets.sampling.class_balance import repeat_rare_classes
from mcis.datasets.storage.folders import REPEAT_STAGE
from mcis.datasets.tables.large_tables import take_rows
from mcis.datasets.tables.shards import Shards
from mcis.datasets.tags import Tags
from mcis.models.backbones import Backbone
from mcis.platform.config.sections import Config
from mcis.platform.learners.crop_training import crop_learner_arguments, train_on_crops
from mcis.platform.learners.segmenter_learner import SegmenterLearner
from mcis.platform.networks.build import build_backbone, build_classifier, build_segmenter, freeze, load_trained
from mcis.platform.networks.pretrained import downstream_weights, load_backbone
from mcis.platform.outputs.corrected_masks import CORRECTED
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import content_digest, read_table
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.workspace import Workspace

_COLUMNS = ["image_id", "uri", "content_hash", "tags", "is_negative"]
"""The columns of the index that are read."""


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError if weights are missing or do not fit, or the backbone lacks a stride, stage or level."""
    with torch.device("meta"):
        network = build_segmenter(config.segmenter, len(listing.classes))
        freeze(network, config.segmenter)
        if config.segmenter.init == "classifier":
            _check_classifier_has_tensors(network, config)
    path = downstream_weights(config, "segmenter", workspace)
    if path:
        load_backbone("segmenter", build_backbone(config.segmenter), path)


def _check_classifier_has_tensors(network: nn.Module, config: Config) -> None:
    """Raises UserError if the segmenter's backbone has tensors that the backbone of the classifier lacks.

    `pyramid` uses layers of an EfficientNet that the classifier does not have (`keep_pretrained_head`).
    """
    assert isinstance(network.backbone, Backbone)
    missing = network.backbone.state_dict().keys() - build_backbone(config.classifier).state_dict().keys()
    if missing:
        raise UserError(
            f"segmenter.init is classifier, but segmenter.network {config.segmenter.network} uses tensors of the "
            f"backbone {config.segmenter.backbone} that the classifier does not have: "
            f"{join_shortened(sorted(missing))}",
            "a network whose backbone is the classifier's",
            "set segmenter.init=pretrained, which reads weights.segmenter_backbone, or segmenter.network=largefov",
        )


def inputs(config: Config, context: RunContext) -> Any:
    """Inputs of the stage key: the pretrained weights."""
    path = downstream_weights(config, "segmenter", context.workspace)
    return content_digest(path) if path else None


def run(config: Config, context: RunContext) -> StageResult:
    """Trains the segmentation network on the pseudo masks with Ray Train. Masks that are ignored entirely are left out.

    Raises:
        UserError: All masks of tagged images are ignored, pretrained weights are missing, or the loss is not finite.
    """
    section = config.segmenter
    classes = context.classes
    folder = context.stage_outputs["pseudo_masks"] / "masks"
    masks = read_table(folder, ["image_id", "ignored", "cue"])
    rows = split_rows(context, "train", tagged=True, negatives=True, columns=_COLUMNS)
    if len(masks) != len(rows):
        raise UserError(
            f"{folder} has {len(masks)} masks for {len(rows)} images", "one mask for each image", REPEAT_STAGE
        )

    useful_ids = masks.filter(pc.less(masks["ignored"], 1.0))["image_id"].combine_chunks()
    is_useful = pc.is_in(rows["image_id"], useful_ids)
    is_tagged = pc.invert(rows["is_negative"])
    if not pc.any(pc.and_(is_tagged, is_useful)).as_py():  # negatives alone teach no class
        raise UserError(
            f"all {pc.sum(is_tagged, min_count=0).as_py()} pseudo masks of tagged images are ignored entirely",
            "masks with foreground",
            "look at the localization maps in the report; train the classifier longer, or lower "
            "pseudo_masks.threshold (rule saliency: pseudo_masks.min_foreground_fraction)",
        )
    rows = rows.filter(is_useful)

    epoch_rows = take_rows(rows, _epoch_row_numbers(config, rows, masks, len(classes)))
    learner_arguments = crop_learner_arguments(
        "segmenter", config, context, epoch_rows, Shards(folder, ["mask"]), masks["image_id"]
    )

    backbone = None
    if section.init == "classifier":
        classifier = build_classifier(config.classifier, len(classes))
        backbone = load_trained(classifier, context.stage_outputs["train_classifier"]).backbone.state_dict()

    return train_on_crops(
        "segmenter",
        SegmenterLearner(classes=len(classes), backbone=backbone, **learner_arguments),
        config,
        context,
        about={"classes": list(classes), "network": section.network},
        counts={
            "training images": len(rows),
            "negatives": pc.sum(rows["is_negative"]).as_py(),
            "images of an epoch, rare classes and corrected masks repeated": len(epoch_rows),
            "without a useful mask": len(masks) - len(rows),
        },
        remedy="look at the pseudo masks in the report; try another segmenter.optimizer.learning_rate, more "
        "segmenter.min_steps, pretrained weights (weights.classifier_backbone), or another recipe",
    )


def _epoch_row_numbers(config: Config, rows: pa.Table, masks: pa.Table, num_classes: int) -> NDArray[np.int64]:
    """Numbers of the rows that one epoch shows: images of rare classes and images with corrected masks repeat."""
    section = config.segmenter
    tags = Tags.from_index(rows["tags"], num_classes)
    max_images = section.num_steps(len(rows)) * section.batch
    repeated = repeat_rare_classes(tags, section.class_balance_exponent, config.seed, max_images=max_images)

    corrected_ids = masks.filter(pc.equal(masks["cue"], CORRECTED))["image_id"].combine_chunks()
    is_corrected = pc.is_in(rows["image_id"], corrected_ids).to_numpy()
    repetitions = np.where(is_corrected[repeated], section.corrected_weight, 1)
    return np.repeat(repeated, repetitions)

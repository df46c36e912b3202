"""Stage 6: training images + pseudo masks -> weights.pt of the segmentation network, steps.jsonl."""

from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.datasets.sampling.class_balance import repeat_rare_classes
from mcis.datasets.storage.folders import REPEAT_STAGE
from mcis.datasets.tables.large_tables import take_rows
from mcis.datasets.tables.shards import Shards
from mcis.datasets.tags import Tags
from mcis.platform.config.sections import Config
from mcis.platform.learners.crop_training import crop_learner_arguments, rows_with_masks, train_on_crops
from mcis.platform.learners.segmenter_learner import SegmenterLearner
from mcis.platform.networks.build import build_backbone, build_classifier, build_segmenter, freeze, load_trained
from mcis.platform.networks.pretrained import downstream_weights, load_backbone
from mcis.platform.outputs.corrected_masks import CORRECTED
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import content_digest, read_table
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.workspace import Workspace


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError where weights cannot be had or do not fit, or the backbone lacks the stride, stages or level."""
    with torch.device("meta"):
        freeze(build_segmenter(config.segmenter, len(listing.classes)), config.segmenter)
    if path := downstream_weights(config, "segmenter", workspace):
        load_backbone("segmenter", build_backbone(config.segmenter), path)


def inputs(config: Config, context: RunContext) -> Any:
    """The content of the pretrained weights' file."""
    path = downstream_weights(config, "segmenter", context.workspace)
    return path and content_digest(path)


def run(config: Config, context: RunContext) -> StageResult:
    """Trains the segmentation network on the pseudo masks with Ray Train; those ignored whole teach nothing.

    Raises:
        UserError: all masks are ignored whole, pretrained weights cannot be had, or the loss is not finite.
    """
    folder, classes = context.inputs["pseudo_masks"] / "masks", context.classes
    masks = read_table(folder, ["image_id", "ignored", "cue"])
    lacking = UserError(
        f"all {len(masks)} pseudo masks are ignored whole",
        "foreground in some of them",
        "look at the localization maps in the report; train the classifier longer, or lower "
        "pseudo_masks.min_foreground_fraction",
    )
    useful = masks.filter(pc.less(masks["ignored"], 1.0))
    tagged = split_rows(context, "train", tagged=True)
    if len(masks) != len(tagged):
        raise UserError(f"{len(masks)} masks of {len(tagged)} images in {folder}", "one of each", REPEAT_STAGE)
    rows = rows_with_masks(tagged, useful, lacking)
    tags = Tags.from_index(rows["tags"], len(classes))
    c = config.segmenter
    repeated = repeat_rare_classes(tags, c.class_balance_exponent, config.seed, most=c.num_steps(len(rows)) * c.batch)
    corrected = pc.is_in(rows["image_id"], masks.filter(pc.equal(masks["cue"], CORRECTED))["image_id"].combine_chunks())
    times = np.where(corrected.to_numpy()[repeated], c.corrected_weight, 1)
    shown = take_rows(rows, np.repeat(repeated, times))
    made_of, backbone = crop_learner_arguments("segmenter", config, context, shown, Shards(folder, ["mask"])), None
    if config.segmenter.init == "classifier":
        classifier = build_classifier(config.classifier, len(classes))
        backbone = load_trained(classifier, context.inputs["train_classifier"]).backbone.state_dict()
    return train_on_crops(
        "segmenter",
        SegmenterLearner(classes=len(classes), backbone=backbone, **made_of),
        config,
        context,
        about={"classes": list(classes), "network": config.segmenter.network},
        counts={
            "training images": len(rows),
            "images of an epoch, rare classes and corrected masks repeated": len(shown),
            "without a useful mask": len(masks) - len(rows),
        },
        remedy="look at the pseudo masks in the report; try another segmenter.optimizer.learning_rate, more "
        "segmenter.min_steps, pretrained weights (weights.classifier_backbone), or another recipe",
    )

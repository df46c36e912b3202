"""Stage 6: training images + pseudo masks -> weights.pt of the segmentation network, steps.jsonl."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.datasets.tables.large_tables import Texts
from mcis.datasets.tables.shards import Shards
from mcis.platform.config.sections import Config
from mcis.platform.engine.learnt import LossTrend
from mcis.platform.engine.segmenter_learner import SegmenterLearner
from mcis.platform.engine.training import fit
from mcis.platform.networks.build import build_backbone, freeze, load_classifier
from mcis.platform.networks.pretrained import later_weights, load_backbone
from mcis.platform.networks.segmenter import build_segmenter
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import content_digest, read_table
from mcis.platform.runs.results import TrainingResult
from mcis.platform.runs.workspace import Workspace


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Loads the pretrained weights that the network starts from, and looks for the stages to be trained.

    Raises:
        UserError: weights cannot be had or do not fit, or the backbone has no such stride, stages or level.
    """
    with torch.device("meta"):
        freeze(build_segmenter(config.segmenter, len(listing.classes)), config.segmenter)
    if path := later_weights(config, "segmenter", workspace):
        load_backbone("segmenter", build_backbone(config.segmenter), path)


def inputs(config: Config, context: RunContext) -> Any:
    """The content of the pretrained weights' file."""
    path = later_weights(config, "segmenter", context.workspace)
    return path and content_digest(path)


def run(config: Config, context: RunContext) -> TrainingResult:
    """Trains the segmentation network on the pseudo masks with Ray Train; those ignored whole teach nothing.

    Raises:
        UserError: pretrained weights cannot be had, or the loss is not finite.
    """
    masks = read_table(context.inputs["pseudo_masks"] / "masks", ["image_id", "ignored"])
    rows = _taught_rows(split_rows(context, "train", tagged=True), masks)
    learner = _learner(config, context, rows)
    result = fit(
        learner,
        context.part,
        config.compute,
        context.tracker,
        label="segmenter",
        about={"classes": list(context.classes), "network": config.segmenter.network},
    )
    return TrainingResult(
        busy=result.seconds,
        waiting=result.waiting,
        precision=result.precision,
        notes=result.notes("segmenter"),
        counts={
            "steps": learner.schedule.steps,
            "training images": len(rows),
            "without a useful mask": len(masks) - len(rows),
        },
        problem=_problem(LossTrend.of_log(context.part, "loss")),
    )


def _problem(trend: LossTrend | None) -> tuple[str, str, str] | None:
    if trend is None or trend.fell:
        return None
    return (
        f"the segmenter learnt nothing: {trend.in_words()}",
        "a loss that falls",
        "look at the pseudo masks in the report; try another segmenter.optimizer.learning_rate, more segmenter.steps, "
        "pretrained weights (weights.backbone), or another recipe",
    )


def _taught_rows(rows: pa.Table, masks: pa.Table) -> pa.Table:
    """The images whose pseudo mask is not ignored whole.

    Raises:
        UserError: there is none.
    """
    useful = set(masks.filter(pc.less(masks["ignored"], 1.0))["image_id"].to_pylist())
    taught = rows.filter(pa.array([image_id in useful for image_id in Texts(rows["image_id"])]))
    if not len(taught):
        raise UserError(
            f"all {len(masks)} pseudo masks are ignored whole",
            "foreground in some of them",
            "look at the localization maps in the report; train the classifier longer, or lower pseudo_masks.smallest",
        )
    return taught


def _learner(config: Config, context: RunContext, rows: pa.Table) -> SegmenterLearner:
    classes = len(context.classes)
    backbone = None
    if config.segmenter.init == "classifier":
        backbone = load_classifier(config.classifier, context.inputs["train_classifier"], classes).backbone.state_dict()
    return SegmenterLearner(
        config=config.segmenter,
        seed=config.seed,
        classes=classes,
        image_ids=Texts(rows["image_id"]),
        uris=Texts(rows["uri"]),
        hashes=Texts(rows["content_hash"]),
        masks=Shards(context.inputs["pseudo_masks"] / "masks", ["mask"]),
        backbone=backbone,
        pretrained=later_weights(config, "segmenter", context.workspace),
        max_side=config.data.max_side,
    )

"""Stage 4: localization maps -> confident labels -> weights.pt of an affinity network trained on them.

It runs if pseudo masks use a random walk (`Config.uses_random_walk`). The networks are those of Ahn and Kwak (CVPR
2018) and Ahn et al. (CVPR 2019).
"""

import functools
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import encode_labels
from mcis.datasets.index import Listing
from mcis.datasets.tables.shards import Shards
from mcis.models.pseudo_masks import MASK_RULES
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.learners.affinity_learner import AffinityLearner
from mcis.platform.learners.crop_training import crop_learner_arguments, train_on_crops
from mcis.platform.networks.build import build_affinity_net, build_backbone, freeze
from mcis.platform.networks.pretrained import downstream_weights, load_backbone
from mcis.platform.networks.tagged_maps import tagged_maps
from mcis.platform.outputs.corrected_masks import CORRECTED, given_mask, with_corrected
from mcis.platform.outputs.read_index import read_image_ids, split_rows
from mcis.platform.outputs.tables import LABELS_SCHEMA, with_maps_position
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import content_digest, file_stamps, read_table
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.workspace import Workspace


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError if pretrained weights are missing or do not fit, or the backbone lacks a stride or stage."""
    with torch.device("meta"):
        freeze(build_affinity_net(config.affinity_net), config.affinity_net)
    path = downstream_weights(config, "affinity_net", workspace)
    if path:
        load_backbone("affinity_net", build_backbone(config.affinity_net), path)


def inputs(config: Config, context: RunContext) -> Any:
    """Inputs of the stage key: the pretrained weights, the longest side of images, and the corrected masks."""
    path = downstream_weights(config, "affinity_net", context.workspace)
    rows = split_rows(context, "train", tagged=True, negatives=True, columns=["image_id"])
    rows = with_corrected(rows, config.data.corrected_masks, read_image_ids(context))
    digest = content_digest(path) if path else None
    return digest, config.data.max_side, file_stamps(rows[CORRECTED])


def _rows(config: Config, context: RunContext) -> pa.Table:
    """Tagged training images, and negatives with a corrected mask; the mask's file is in the column `corrected`.

    Other negatives have no localization map from which labels could be made.
    """
    rows = split_rows(context, "train", tagged=True, negatives=True)
    rows = with_corrected(rows, config.data.corrected_masks, read_image_ids(context))
    return rows.filter(pc.or_(pc.invert(rows["is_negative"]), rows[CORRECTED].is_valid()))


def make_labels(config: Config, classes: int, maps: Shards, rows: pa.Table) -> pa.Table:
    """Makes confident labels from localization maps and the dense CRF, or from corrected masks.

    Args:
        classes: Number of classes K.
        maps: Table of localization maps.
        rows: Rows of training images with the column `corrected`; those without a corrected mask have tags.

    Returns:
        Table of LABELS_SCHEMA.
    """
    label_rows = []
    for row in rows.to_pylist():
        if row.get(CORRECTED):
            labels = given_mask(row, row[CORRECTED], classes, config.data.max_side)
        else:
            labels = MASK_RULES["crf"](tagged_maps(row, maps, config), dict(config.affinity_net)).mask
        fraction = float((labels != IGNORE).mean())
        label_rows.append({"image_id": row["image_id"], "mask": encode_labels(labels), "confident": fraction})
    return pa.Table.from_pylist(label_rows, schema=LABELS_SCHEMA)


def run(config: Config, context: RunContext) -> StageResult:
    """Makes confident labels in parallel and trains the affinity network on them with Ray Train.

    Raises:
        UserError: No image has a confident label, or the loss is not finite.
    """
    rows = _rows(config, context)
    maps = Shards(context.stage_outputs["localize"] / "maps")
    labels = context.output / "labels"
    worker = functools.partial(make_labels, config, len(context.classes), maps)
    map_table(with_maps_position(rows), labels, worker=worker, label="confident labels", compute=config.compute)

    fractions = read_table(labels, ["image_id", "confident"])
    confident_ids = fractions.filter(pc.greater(fractions["confident"], 0.0))["image_id"].combine_chunks()
    training_rows = rows.filter(pc.is_in(rows["image_id"], confident_ids))
    if not len(training_rows):
        raise UserError(
            f"none of {len(rows)} training images has a confident label",
            "training images with pixels that are certainly foreground or background",
            "look at the localization maps in the report; try other thresholds (affinity_net.threshold, "
            "affinity_net.background_threshold)",
        )

    masks = Shards(labels, ["mask"])
    mask_ids = fractions["image_id"]
    learner_arguments = crop_learner_arguments("affinity_net", config, context, training_rows, masks, mask_ids)
    return train_on_crops(
        "affinity_net",
        AffinityLearner(**learner_arguments),
        config,
        context,
        about={"kind": config.affinity_net.kind, "backbone": config.affinity_net.backbone},
        counts={
            "training images": len(training_rows),
            "without a confident label": len(rows) - len(training_rows),
            "share of confident pixels": round(float(pc.mean(fractions["confident"]).as_py()), 4),
        },
        remedy="look at the localization maps in the report; try another affinity_net.optimizer.learning_rate, more "
        "affinity_net.min_steps, or pseudo_masks.rule=crf, which needs no affinity network",
    )

"""What the trainings of the segmentation and the affinity network, on crops of images and label masks, share."""

from collections.abc import Mapping
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.datasets.sampling.batches import CropBatch, MaskedImages
from mcis.datasets.tables.large_tables import Texts
from mcis.datasets.tables.shards import Shards
from mcis.platform.config.sections import Config
from mcis.platform.engine.learner import Learner
from mcis.platform.engine.step_log import loss_trend
from mcis.platform.engine.training import fit
from mcis.platform.networks.pretrained import downstream_weights
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.results import StageResult

_NAMES = {"segmenter": "segmenter", "affinity_net": "affinity network"}


def taught_rows(rows: pa.Table, useful: pa.Table, lacking: UserError) -> pa.Table:
    """The rows of an index whose masks are `useful`, by their image_id; raises `lacking` where there is none."""
    taught = rows.filter(pc.is_in(rows["image_id"], useful["image_id"].combine_chunks()))
    if not len(taught):
        raise lacking
    return taught


def crops(
    network: Literal["segmenter", "affinity_net"], config: Config, context: RunContext, rows: pa.Table, masks: Shards
) -> dict[str, Any]:
    """What a `CropLearner` is made of: the images of some rows of the index, their masks, and pretrained weights."""
    ids, uris, hashes = (Texts(rows[column]) for column in ("image_id", "uri", "content_hash"))
    section = getattr(config, network)
    updates = section.num_steps(pc.count_distinct(rows["image_id"]).as_py())  # which repeated images do not prolong
    return {
        "config": section.model_copy(update={"min_steps": updates, "min_epochs": 0.0}),
        "seed": config.seed,
        "masked": MaskedImages(ids, uris, masks, config.data.max_side, hashes),
        "pretrained": downstream_weights(config, network, context.workspace),
    }


def train_on_crops(
    network: Literal["segmenter", "affinity_net"],
    learner: Learner[CropBatch],
    config: Config,
    context: RunContext,
    *,
    about: Mapping[str, Any],
    counts: Mapping[str, Any],
    remedy: str,
) -> StageResult:
    """Trains a network with Ray Train; errors as of `fit`.

    Args:
        about: what the reader of its weights has to know.
        counts: of the images, for the report.
        remedy: what to do where the loss has not fallen.
    """
    result = fit(learner, context.part, config.compute, context.tracker, label=network, about=about)
    trend, problem = loss_trend(context.part, "loss"), None
    if trend and not trend[0]:
        problem = (f"the {_NAMES[network]} learnt nothing: {trend[1]}", "a loss that falls", remedy)
    return StageResult(
        notes=result.notes(_NAMES[network]), counts={"steps": learner.schedule.steps, **counts}, problem=problem
    )

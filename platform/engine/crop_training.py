"""What the trainings on crops of images share, those of the segmentation and of the affinity network."""

from collections.abc import Mapping
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.datasets.sampling.batches import CropBatch
from mcis.datasets.tables.large_tables import Texts
from mcis.datasets.tables.shards import Shards
from mcis.platform.config.sections import Config
from mcis.platform.engine.learner import Learner
from mcis.platform.engine.learnt import loss_trend
from mcis.platform.engine.training import fit
from mcis.platform.networks.pretrained import later_weights
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.results import StageResult

_NAMES = {"segmenter": "segmenter", "affinity_net": "affinity network"}


def taught_rows(rows: pa.Table, useful: pa.Table, lacking: UserError) -> pa.Table:
    """The rows of an index whose masks are `useful`, by their image_id.

    Raises:
        UserError: `lacking`, where there is none.
    """
    taught = rows.filter(pc.is_in(rows["image_id"], useful["image_id"].combine_chunks()))
    if not len(taught):
        raise lacking
    return taught


def crops(
    network: Literal["segmenter", "affinity_net"], config: Config, context: RunContext, rows: pa.Table, masks: Shards
) -> dict[str, Any]:
    """What a `CropLearner` is made of: the images of some rows of the index, their masks, and pretrained weights."""
    return {
        "config": getattr(config, network),
        "seed": config.seed,
        "image_ids": Texts(rows["image_id"]),
        "uris": Texts(rows["uri"]),
        "hashes": Texts(rows["content_hash"]),
        "masks": masks,
        "pretrained": later_weights(config, network, context.workspace),
        "max_side": config.data.max_side,
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
    """Trains a network with Ray Train.

    Args:
        about: what the reader of its weights has to know.
        counts: of the images, for the report.
        remedy: what to do where the loss has not fallen.

    Raises:
        UserError: pretrained weights cannot be had, or the loss is not finite.
    """
    result = fit(learner, context.part, config.compute, context.tracker, label=network, about=about)
    trend, problem = loss_trend(context.part, "loss"), None
    if trend and not trend[0]:
        problem = (f"the {_NAMES[network]} learnt nothing: {trend[1]}", "a loss that falls", remedy)
    return StageResult(
        notes=result.notes(_NAMES[network]),
        counts={"steps": learner.schedule.steps, **counts},
        problem=problem,
    )

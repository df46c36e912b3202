"""The common part of the stages that train a network on crops: the segmentation network and the affinity network."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.sampling.batches import CropBatch, MaskedImages
from mcis.datasets.tables.large_tables import Texts
from mcis.datasets.tables.shards import Shards
from mcis.platform.config.sections import Config
from mcis.platform.engine.learner import Learner
from mcis.platform.engine.step_log import loss_trend
from mcis.platform.engine.training import fit
from mcis.platform.networks.pretrained import downstream_weights
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.results import Problem, StageResult

CropNetwork = Literal["segmenter", "affinity_net"]
"""A network that is trained on crops, by its section of the configuration."""
_NAMES = {"segmenter": "segmenter", "affinity_net": "affinity network"}
"""Names of the networks in messages."""


def crop_learner_arguments(
    network: CropNetwork, config: Config, context: RunContext, rows: pa.Table, masks: Shards, mask_ids: pa.ChunkedArray
) -> dict[str, Any]:
    """Returns the arguments of a `CropLearner`.

    Args:
        network: The network to train.
        config: The configuration.
        context: The context of the run.
        rows: Rows of the index. An image may be repeated; that does not make the training longer.
        masks: The table of their label masks.
        mask_ids: The column `image_id` of that table.
    """
    masked = MaskedImages(
        Texts(rows["image_id"]),
        Texts(rows["uri"]),
        masks,
        config.data.max_side,
        Texts(rows["content_hash"]),
        config.data.value_range,
        pc.index_in(rows["image_id"], mask_ids.combine_chunks()).to_numpy().astype(np.int64),
    )
    return {
        "config": getattr(config, network),
        "seed": config.seed,
        "masked": masked,
        "num_images": pc.count_distinct(rows["image_id"]).as_py(),
        "pretrained": downstream_weights(config, network, context.workspace),
    }


def train_on_crops(
    network: CropNetwork,
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
        network: The network to train.
        learner: The network with its data and its losses.
        config: The configuration.
        context: The context of the run.
        about: Description of the network for the file of its weights.
        counts: Numbers of images, for the report.
        remedy: What to do if the loss has not fallen.

    Returns:
        The result of the stage, with a problem if the loss has not fallen.

    Raises:
        UserError: See `fit`.
    """
    result = fit(learner, context.output, config.compute, context.tracker, label=network, about=about)
    trend = loss_trend(context.output, "loss")
    problem = None
    if trend is not None and not trend.fell:
        problem = Problem(f"the {_NAMES[network]} learned nothing: {trend.text}", "a loss that falls", remedy)

    return StageResult(
        notes=result.notes(_NAMES[network]), counts={"steps": learner.schedule.steps, **counts}, problem=problem
    )

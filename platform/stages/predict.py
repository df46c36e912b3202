"""Stage 6: segmentation network + images of a split -> labels, plain and after the dense CRF (PREDICTIONS_SCHEMA)."""

from collections.abc import Mapping
from typing import Any

from mcis.datasets.errors import UserError
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.runtime import uses_gpu
from mcis.platform.networks.predictor import Predictor
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import split_rows


def predicted_split(config: Config, there: Mapping[str, int]) -> str:
    """The split whose images are predicted, of those that are there with so many images.

    Raises:
        UserError: a split without an image is asked for.
    """
    if config.predict.split == "auto":
        return "val" if there.get("val") else "train"
    if not there.get(config.predict.split):
        raise UserError(
            f"predict.split is {config.predict.split}, which has no image",
            f"one of {', '.join(there)}",
            "set predict.split to one of them, or name a list for that split",
        )
    return config.predict.split


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Predicts every image of a split, over the configured scales and mirror images."""
    gpu = uses_gpu(config.compute)
    split = predicted_split(config, context.summary("index")["counts"]["images"])
    rows = split_rows(context, split)
    mapped = map_table(
        rows,
        Predictor,
        (config, context.inputs["train_segmenter"], len(context.classes), gpu),
        context.part / "predictions",
        label="predict",
        shard_rows=min(config.compute.shard_rows, 32),
        gpu=gpu,
    )
    return {"busy": mapped.busy, "split": split, "counts": {"images": len(rows)}}

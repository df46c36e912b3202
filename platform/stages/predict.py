"""Stage 7: segmentation network + images of a split -> labels, plain and after the dense CRF (PREDICTIONS_SCHEMA)."""

from collections.abc import Mapping

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.runtime import uses_gpu
from mcis.platform.networks.predictor import Predictor
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import split_rows
from mcis.platform.runs.results import IndexResult, PredictResult
from mcis.platform.runs.workspace import Workspace


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError where the split that is asked for has no image."""
    counts = listing.table["split"].value_counts().to_pylist()
    _predicted_split(config, {row["values"]: row["counts"] for row in counts})


def inputs(config: Config, context: RunContext) -> int | None:
    """The size at which images are read; the images are the index's."""
    return config.data.max_side


def run(config: Config, context: RunContext) -> PredictResult:
    """Predicts every image of a split, over the configured scales and mirror images."""
    gpu = uses_gpu(config.compute)
    split = _predicted_split(config, context.result("index", IndexResult).images)
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
    return PredictResult(busy=mapped.busy, split=split, counts={"images": len(rows)})


def _predicted_split(config: Config, images: Mapping[str, int]) -> str:
    """The split whose images are predicted.

    Args:
        images: number of images by split.

    Raises:
        UserError: a split without an image is asked for.
    """
    if config.predict.split == "auto":
        return "val" if images.get("val") else "train"
    if not images.get(config.predict.split):
        raise UserError(
            f"predict.split is {config.predict.split}, which has no image",
            f"one of {', '.join(images)}",
            "set predict.split to one of them, or name a list for that split",
        )
    return config.predict.split

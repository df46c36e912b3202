"""The images of a run's report, half of train and half of val, with what the stages made of them -> panels."""

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from mcis.datasets.images.decode import decode_labels, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.storage.files import stamp
from mcis.datasets.tables.shards import Shards
from mcis.models.localization import score_maps
from mcis.platform.config.sections import Config
from mcis.platform.networks.predictor import Predictor, TrainedRun
from mcis.platform.outputs.read_index import split_rows, truth_of_row
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.panels import Panel
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.results import PredictResult


def panels_of_run(config: Config, context: RunContext) -> list[Panel]:
    """The panels of `report.panels` images; works after any stage behind the index.

    Ground truth is shown once it was scored (`evaluate`). The training images are predicted here, for display alone.
    """
    half = config.report.panels // 2
    second = context.result("predict", PredictResult).split if "predict" in context.inputs else "val"
    counts = {"train": config.report.panels - half, second: half} if second != "train" else {"train": 2 * half}
    panels = []
    for split, count in counts.items():
        tagged = split == "train"
        found = len(split_rows(context, split, tagged=tagged, columns=["tags"]))
        spread = np.linspace(0, found - 1, min(count, found)).astype(np.int64)  # no other rows are in memory
        rows = split_rows(context, split, tagged=tagged, only=spread)
        predictions = _predictions(config, context, rows, split)
        panels += _panels(context, rows, split, predictions, max_side=config.data.max_side)
    return panels


def _panels(
    context: RunContext,
    rows: pa.Table,
    split: str,
    predictions: Mapping[str, NDArray[np.uint8]],
    *,
    max_side: int | None,
) -> list[Panel]:
    """The panels of some rows, each at the size at which its image is read."""
    classes, inputs = context.classes, context.inputs
    maps = Shards(inputs["localize"] / "maps") if "localize" in inputs else None
    masks = Shards(inputs["pseudo_masks"] / "masks") if "pseudo_masks" in inputs else None
    panels = []
    for row in rows.to_pylist():
        image_id, image = row["image_id"], read_rgb(row["uri"], max_side=max_side)
        shape: tuple[int, int] = image.shape[:2]
        truth, prediction = None, predictions.get(image_id)
        mask = masks.rows(image_id) if masks else None
        kept = image_maps(maps, image_id) if maps else None
        heat: Iterable[NDArray[np.float32]] = ()
        if kept:  # each by its own maximum, whatever `maps.scale` says: on a scale that all share a faint one is dark
            heat = score_maps(torch.from_numpy(kept.maps), kept.grids, "maximum", *shape).numpy()
        if "evaluate" in inputs and row["mask_uri"] and stamp(row["mask_uri"]):
            truth = resize_labels(truth_of_row(row, len(classes)), *shape)
        panels.append(
            Panel(
                image_id=image_id,
                split=split,
                tags=tuple(classes[k] for k in row["tags"]),
                image=image,
                truth=truth,
                maps=tuple((classes[k], of) for k, of in zip(kept.classes if kept else (), heat, strict=True)),
                kept=kept,
                full_size=(row["height"], row["width"]),
                pseudo_mask=decode_labels(mask["mask"][0].as_py()) if mask else None,
                cue=mask["cue"][0].as_py() if mask else None,
                prediction=None if prediction is None else resize_labels(prediction, *shape),
            )
        )
    return panels


def _predictions(config: Config, context: RunContext, rows: pa.Table, split: str) -> dict[str, NDArray[np.uint8]]:
    """Predicted labels by image id, after the CRF where there is one; empty before the segmenter is trained."""
    if "predict" not in context.inputs:
        return {}
    if split == context.result("predict", PredictResult).split:
        shards = Shards(context.inputs["predict"] / "predictions")
        tables = (shards.rows(image_id) or rows.slice(0, 0) for image_id in rows["image_id"].to_pylist())
        predicted = [row for table in tables for row in table.to_pylist()]
        return {row["image_id"]: decode_labels(row["crf"] or row["plain"]) for row in predicted}
    trained = TrainedRun(config, context.inputs["train_segmenter"], context.classes, config.data.max_side)
    predictor = Predictor(trained, gpu=False)
    return {row["image_id"]: predictor(row["uri"]) for row in rows.select(["image_id", "uri"]).to_pylist()}

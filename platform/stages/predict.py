"""Stage 7: segmentation network + images of a split -> labels without and with the dense CRF (PREDICTIONS_SCHEMA)."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.formats.logit_files import SUFFIX as LOGITS_SUFFIX
from mcis.datasets.formats.logit_files import read_logit_labels
from mcis.datasets.images.decode import DecodedImage
from mcis.datasets.images.label_masks import LabelMask, encode_labels, read_label_mask
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.index import Listing
from mcis.datasets.tags import count_tags
from mcis.platform.config.sections import Config, PredictConfig
from mcis.platform.engine.mapping import map_table
from mcis.platform.networks.predictor import Prediction, PredictionInput, Predictor
from mcis.platform.networks.trained_segmenter import TrainedSegmenter
from mcis.platform.outputs.imported_files import IMPORTED_FILE, ImportedFiles, imported_masks, palette_note, unused_note
from mcis.platform.outputs.read_index import predicted_split, read_image_ids, rows_in_split, split_rows
from mcis.platform.outputs.tables import DIFFERS_FROM_INDICES, IMPORTED_PREDICTIONS_SCHEMA, PREDICTIONS_SCHEMA
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import contents_digest, read_table
from mcis.platform.runs.results import IndexResult, PredictResult
from mcis.platform.runs.workspace import Workspace

_MASKS_KEY = "predict.masks"
_MIN_TAGGED = 5
"""Number of images tagged with a class from which a note reports that predictions lack the class."""


class PredictRows:
    """Predicts the images of index rows; returns a table of PREDICTIONS_SCHEMA.

    Args:
        weights: Folder of the trained segmentation network.
        classes: The K class names.
    """

    def __init__(self, config: Config, weights: Path, classes: tuple[str, ...]):
        self.max_side = config.data.max_side
        trained = TrainedSegmenter(config, weights, classes, self.max_side)
        self.predictor = Predictor(trained, gpu=config.compute.gpu)

    def __call__(self, rows: pa.Table) -> pa.Table:
        images = rows.select(["image_id", "uri", "height", "width", "content_hash", "tags"]).to_pylist()
        predictions = list(self.predictor.map(map(self._read, images), _prediction_row))
        return pa.Table.from_pylist(predictions, schema=PREDICTIONS_SCHEMA)

    def _read(self, row: dict[str, Any]) -> PredictionInput[dict[str, Any]]:
        rgb = read_rgb(
            row["uri"], max_side=self.max_side, content_hash=row["content_hash"], value_range=self.predictor.value_range
        )
        return PredictionInput(row, DecodedImage(rgb, row["height"], row["width"]))


def _prediction_row(row: dict[str, Any], prediction: Prediction) -> dict[str, Any]:
    """Row of PREDICTIONS_SCHEMA for a prediction of the network."""
    refined = None if prediction.refined is None else prediction.labels()
    return _as_row(row, prediction.labels(plain=True), refined)


def _as_row(row: dict[str, Any], plain: NDArray[np.uint8], refined: NDArray[np.uint8] | None) -> dict[str, Any]:
    """Row of PREDICTIONS_SCHEMA: labels without and with the CRF as PNG, and the tags that the final labels lack."""
    labels = plain if refined is None else refined
    return {
        "image_id": row["image_id"],
        "plain": encode_labels(plain),
        "crf": None if refined is None else encode_labels(refined),
        "absent_tags": [tag for tag in row["tags"] if not (labels == tag + 1).any()],
    }


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError if the split to predict has no image, or none of the predictions of another program is of it."""
    counts = listing.table["split"].value_counts().to_pylist()
    split = _nonempty_split(config, {row["values"]: row["counts"] for row in counts})
    if config.predict.is_imported:
        files = _prediction_files(config.predict)._replace(key=f"{_MASKS_KEY} or predict.split")
        image_ids = rows_in_split(listing.table, split)["image_id"].to_pylist()
        files.check_any_matches(image_ids, listing.table["image_id"].to_pylist())


def inputs(config: Config, context: RunContext) -> Any:
    """Inputs of the stage key: the longest side to which images are reduced, or the contents of the predictions
    of another program."""
    if not config.predict.is_imported:
        return config.data.max_side
    split = _nonempty_split(config, context.result("index", IndexResult).images)
    rows = _with_imported(config.predict, split_rows(context, split), read_image_ids(context))
    return [split, contents_digest(rows[IMPORTED_FILE].to_pylist())]


def run(config: Config, context: RunContext) -> PredictResult:
    """Predicts every image of a split, averaged over the configured scales and the horizontal flip."""
    split = _nonempty_split(config, context.result("index", IndexResult).images)
    rows = split_rows(context, split)
    if config.predict.is_imported:
        return _import_predictions(config, context, rows, split)

    map_table(
        rows,
        context.output / "predictions",
        make_worker=functools.partial(PredictRows, config, context.stage_outputs["train_segmenter"], context.classes),
        label="predict",
        compute=config.compute,
        network=True,
        shard_rows=min(config.compute.shard_rows, 32),
        memory_hint="lower data.max_side, predict.crop or the largest of predict.scales",
    )
    absent = read_table(context.output / "predictions", ["absent_tags"])["absent_tags"]
    notes = unpredicted_tags(rows["tags"], absent, context.classes, split)
    return PredictResult(split=split, counts={"images": len(rows)}, notes=notes)


def _prediction_files(section: PredictConfig) -> ImportedFiles[str]:
    """Finds the predictions of another program, label masks or logits: paths by the name of their image."""
    assert section.masks is not None
    return imported_masks(section.masks, "prediction", _MASKS_KEY, (".png", LOGITS_SUFFIX))


def _with_imported(section: PredictConfig, rows: pa.Table, all_ids: Iterable[str]) -> pa.Table:
    """Adds the column IMPORTED_FILE: the file of each image's prediction."""
    matched = _prediction_files(section).match_all(rows["image_id"].to_pylist(), all_ids)
    return rows.append_column(IMPORTED_FILE, pa.array(matched, pa.string()))


def _import_predictions(config: Config, context: RunContext, rows: pa.Table, split: str) -> PredictResult:
    """Reads the predictions of another program."""
    map_table(
        _with_imported(config.predict, rows, read_image_ids(context)),
        context.output / "predictions",
        worker=functools.partial(import_predictions, len(context.classes)),
        label="import predictions",
        compute=config.compute,
    )
    files = _prediction_files(config.predict)
    reordered = read_table(context.output / "predictions", [DIFFERS_FROM_INDICES.name])[DIFFERS_FROM_INDICES.name]
    notes = palette_note("prediction", pc.sum(reordered).as_py() or 0, len(rows))
    notes += unused_note("prediction", files.folder, len(files.files), len(rows))
    return PredictResult(split=split, counts={"images": len(rows)}, notes=tuple(notes))


def import_predictions(classes: int, rows: pa.Table) -> pa.Table:
    """Reads label masks or logits of another program into a table of IMPORTED_PREDICTIONS_SCHEMA.

    Args:
        classes: Number of classes K.
        rows: Index rows with the column IMPORTED_FILE.
    """
    predictions = []
    for row in rows.to_pylist():
        file = row[IMPORTED_FILE]
        shape = (row["height"], row["width"])
        if file.lower().endswith(LOGITS_SUFFIX):
            mask = LabelMask(read_logit_labels(file, shape, classes))
        else:
            mask = read_label_mask(file, shape, classes, may_ignore=False)
        predictions.append(_as_row(row, mask.labels, None) | {DIFFERS_FROM_INDICES.name: mask.differs_from_indices})
    return pa.Table.from_pylist(predictions, schema=IMPORTED_PREDICTIONS_SCHEMA)


def unpredicted_tags(
    tags: pa.ChunkedArray, absent: pa.ChunkedArray, classes: Sequence[str], split: str
) -> tuple[str, ...]:
    """A note on classes that predictions lack in most images tagged with them, if any. It needs no ground truth.

    Args:
        tags: Tags of each image.
        absent: Tags of each image that its prediction lacks.
        classes: The K class names.
    """
    num_tagged = count_tags(tags, len(classes)).tolist()
    num_absent = count_tags(absent, len(classes)).tolist()
    unpredicted = []
    for name, tagged, missing in zip(classes, num_tagged, num_absent, strict=True):
        if tagged >= _MIN_TAGGED and 2 * missing > tagged:
            unpredicted.append(f"{name} ({missing} of {tagged})")
    if not unpredicted:
        return ()
    return (
        f"predictions lack these classes in most {split} images tagged with them: {join_shortened(unpredicted)}; try "
        "more photographs of them, or more segmenter.min_epochs; if tags are known, `mcis predict --tags` excludes "
        "other classes",
    )


def _nonempty_split(config: Config, images: Mapping[str, int]) -> str:
    """The split to predict, given the number of images per split.

    Raises:
        UserError: The configured split has no image.
    """
    split = predicted_split(config, has_val=bool(images.get("val")))
    if config.predict.split != "auto" and not images.get(split):
        raise UserError(
            f"predict.split is {split}, which has no images",
            f"one of {', '.join(images)}",
            "set predict.split to one of them, or give a list for that split",
        )
    return split

"""Stage 8: maps, pseudo masks and predictions + ground truth -> scores.json, curves.json.

Everything that the run has reached is scored; a run that stops at the pseudo masks has no predictions. All pixels count
except those that the ground truth ignores. Pseudo masks are scored by their labels before pixels are ignored; the score
states the ignored share.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.images.decode import decode_picture
from mcis.datasets.images.masks import tags_of_mask
from mcis.datasets.index import Listing
from mcis.datasets.storage.files import read_bytes, stamp, stamps
from mcis.platform.config.sections import Config
from mcis.platform.outputs.corrected_masks import CORRECTED, with_corrected
from mcis.platform.outputs.counts import IMPORTED
from mcis.platform.outputs.read_index import read_image_ids, rows_in_split, split_rows, truth_of_row
from mcis.platform.outputs.supervision import used_regions, used_saliency
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import file_stamps, write_json
from mcis.platform.runs.results import PredictResult, StageResult
from mcis.platform.runs.scores import (
    CURVES,
    FULL_SUPERVISION,
    REGIONS_SUPERVISION,
    SALIENCY_SUPERVISION,
    SCORES,
    Curve,
    Score,
)
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages.evaluation.scoring import evaluate_predictions, evaluate_train

_MAX_CHECKED = 16
"""Maximum number of ground-truth masks, and of corrected masks, that `check` reads."""
_LARGE_DROP = 15
"""Percentage points. Larger drops in the IoU of a class from the pseudo masks to the predictions are reported."""


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Reads some ground-truth masks and corrected masks, to find masks with other labels before any training.

    Raises:
        UserError: A mask cannot be read (see `read_truth`), or most of them contradict the tags of their images.
    """
    columns = listing.table.select(["uri", "tags", "is_negative", "mask_uri", "split"])
    is_scored = pc.is_in(columns["split"], pa.array(["train", "val", config.predict.split]))
    with_mask = columns.filter(pc.and_(is_scored, pc.is_valid(columns["mask_uri"])))
    _check_masks(with_mask, listing.classes, config.data.max_pixels)
    if config.data.corrected_masks:
        rows = rows_in_split(listing.table, "train", tagged=True, negatives=True)
        rows = with_corrected(rows, config.data.corrected_masks, listing.image_ids())
        rows = rows.drop(["mask_uri"]).rename_columns({CORRECTED: "mask_uri"})
        with_mask = rows.filter(pc.is_valid(rows["mask_uri"]))
        _check_masks(with_mask, listing.classes, config.data.max_pixels, corrected=True)


def _check_masks(rows: pa.Table, classes: Sequence[str], max_pixels: int, *, corrected: bool = False) -> None:
    """Checks some masks against the tags of their images. A corrected mask may have no foreground.

    Args:
        rows: Rows with a `mask_uri`.
        classes: The K class names.
        max_pixels: Largest width x height of an image (`data.max_pixels`); masks of larger ones may have any size.
        corrected: Whether these are corrected masks.
    """
    stride = len(rows) // _MAX_CHECKED + 1
    samples = rows[::stride].to_pylist()
    wrong = []
    for row in samples:
        if not stamp(row["mask_uri"]):
            continue
        with contextlib.suppress(OSError, ValueError):  # the index rejects images that cannot be read
            _, row["height"], row["width"] = decode_picture(
                read_bytes(row["uri"]), min_side=1, max_pixels=max_pixels, max_side=1
            )
        found = tags_of_mask(truth_of_row(row, len(classes)), len(classes), row["mask_uri"])
        if _contradicts_tags(row, found, may_lack_foreground=corrected):
            wrong.append(row["mask_uri"])

    if 2 * len(wrong) > len(samples):
        kind = "corrected" if corrected else "ground-truth"
        raise UserError(
            f"{len(wrong)} of {len(samples)} {kind} masks contain none of the tags of their images, or other classes: "
            f"{join_shortened(wrong)}",
            f"label k for pixels of the k-th class of {', '.join(classes)}; {IGNORE} is not scored",
            "correct the masks, set data.classes to the file that lists their classes, or remove them; with "
            "data.untagged=negative, add the tags of images that show a class",
        )


def _contradicts_tags(row: Mapping[str, Any], found: Sequence[int], *, may_lack_foreground: bool) -> bool:
    """Returns whether a mask has other classes than the tags of its image, or none although the image has tags.

    Nothing contradicts the tags of an image whose tags are unknown.

    Args:
        row: The image's row of a listing.
        found: The classes in the mask.
        may_lack_foreground: Whether a mask without any class is right for an image with tags.
    """
    tags = set(row["tags"])
    if not tags and not row["is_negative"]:
        return False
    has_other_classes = not set(found) <= tags
    lacks_foreground = bool(tags) and not found
    return has_other_classes or (lacks_foreground and not may_lack_foreground)


def inputs(config: Config, context: RunContext) -> Any:
    """Inputs of the stage key: stamps of the ground-truth masks, of the saliency maps of training images if the rule
    for pseudo masks reads them (for the baselines), and of the corrected masks (whose images are not scored)."""
    splits = ["train"]
    if "predict" in context.stage_outputs:
        splits.append(context.result("predict", PredictResult).split)
    masks = []
    for split in dict.fromkeys(splits):
        masks.append(file_stamps(split_rows(context, split, columns=["mask_uri"])["mask_uri"]))
    saliency = None
    if config.pseudo_masks.may_use_saliency:
        saliency = file_stamps(split_rows(context, "train", columns=["saliency_uri"])["saliency_uri"])
    corrected = file_stamps(_with_corrected(config, context)[CORRECTED]) if config.data.corrected_masks else None
    return [*masks, saliency, corrected]


def _with_corrected(config: Config, context: RunContext) -> pa.Table:
    """Tagged training images and negatives, with the file of the corrected mask or null in the column `corrected`."""
    rows = split_rows(context, "train", tagged=True, negatives=True, columns=["image_id"])
    return with_corrected(rows, config.data.corrected_masks, read_image_ids(context))


def run(config: Config, context: RunContext) -> StageResult:
    """Scores all outputs for which ground truth exists. Without ground truth the lists are empty and a note says so.

    Raises:
        UserError: A mask cannot be read, see `read_truth`.
    """
    notes = _supervision_notes(config, context)
    corrected_ids = pa.array([], pa.string())
    if config.data.corrected_masks:
        rows = _with_corrected(config, context)
        corrected_ids = rows.filter(pc.is_valid(rows[CORRECTED]))["image_id"].combine_chunks()
        notes.append("images with a corrected mask are not scored")

    scores: list[Score] = []
    curves: dict[str, Curve] = {}
    num_scored = {"train": 0}
    if config.has_maps or config.makes_masks:
        rows, truth_notes = rows_with_truth(context, "train", tagged=True)
        notes += truth_notes
        rows = rows.filter(pc.invert(pc.is_in(rows["image_id"], corrected_ids)))
        if config.supervision == "tags":
            num_scored["train"] = len(rows)
            if len(rows):
                scores, curves = evaluate_train(config, context, rows)
                notes += held_out_note(scores)

    if "predict" in context.stage_outputs:
        split = context.result("predict", PredictResult).split
        rows, truth_notes = rows_with_truth(context, split, tagged=False)
        notes += truth_notes
        rows = rows.filter(pc.invert(pc.is_in(rows["image_id"], corrected_ids)))
        num_scored[split] = len(rows)
        if len(rows):
            scores += evaluate_predictions(config, context, rows, split)

    if config.supervision == "tags" and config.trains_segmenter:
        notes += large_drops(scores, config, context)
    notes += counted_as_zero(scores)

    write_json(context.output / SCORES, [dataclasses.asdict(score) for score in scores])
    write_json(context.output / CURVES, curves)
    return StageResult(notes=tuple(notes), counts={"scored": num_scored})


def _supervision_notes(config: Config, context: RunContext) -> list[str]:
    """Notes on what the scores depend on besides tags: the ground truth, saliency maps, segments or detections."""
    notes: list[str] = []
    if config.supervision == "full":
        notes.append(FULL_SUPERVISION)
    if used_saliency(config, context.stage_outputs):
        notes.append(f"the pseudo masks use saliency maps, and {SALIENCY_SUPERVISION}: scores are not from tags alone")
    regions = used_regions(config, context.stage_outputs)
    if regions:
        notes.append(f"the pseudo masks use {regions}, and {REGIONS_SUPERVISION}: scores are then not from tags alone")
    return notes


def held_out_note(scores: Sequence[Score]) -> list[str]:
    """A note on the threshold of maps of another program, if any: chosen on the scored images, and on others."""
    for score in scores:
        if score.name == IMPORTED and score.held_out_miou is not None:
            return [
                f"localization maps: mIoU {score.miou:.2f} at the threshold {score.threshold:.3g}, the best for the "
                f"scored images themselves; {score.held_out_miou:.2f} if each half of the {score.images} images, "
                "alternating in the order of their ids, is scored at the best threshold for the other half"
            ]
    return []


def large_drops(scores: Sequence[Score], config: Config, context: RunContext) -> list[str]:
    """A note on classes whose predictions have a much lower IoU than the pseudo masks, if any."""
    masks = [score for score in scores if score.output == "pseudo_masks"]
    predictions = [score for score in scores if score.output == "segmentation"]
    if not masks or not predictions:
        return []

    tags = pc.list_flatten(split_rows(context, "train", columns=["tags"])["tags"]).to_pylist()
    num_images = collections.Counter(tags)
    dropped = []
    for tag, name in enumerate(context.classes):
        mask_iou = masks[0].iou[name]
        prediction_iou = predictions[-1].iou[name]
        is_in_truth = predictions[-1].label_scores["recall"][name] is not None
        if not is_in_truth or mask_iou is None or prediction_iou is None:
            continue
        if mask_iou - prediction_iou > _LARGE_DROP:
            dropped.append(f"{name} ({num_images[tag]} images; masks {mask_iou:.1f}, predictions {prediction_iou:.1f})")
    if not dropped:
        return []

    balance = "" if config.segmenter.class_balance_exponent == 1 else "segmenter.class_balance_exponent=1, "
    return [
        f"predictions are much worse than the pseudo masks for {len(dropped)} of {len(context.classes)} classes: "
        f"{join_shortened(dropped)}; try {balance}more segmenter.min_epochs, or more photographs of these "
        "classes; if the tags of photographs are known, use `mcis predict --tags`"
    ]


def counted_as_zero(scores: Sequence[Score]) -> list[str]:
    """Notes on labels that an output predicts but no ground-truth mask has: their IoU is 0 in the mean.

    There is at most one note for each output, on its last score, and none for baselines.
    """
    last_scores = {score.output: score for score in scores if score.variant}
    notes = []
    for score in last_scores.values():
        notes += _zero_note(score)
    return notes


def _zero_note(score: Score) -> list[str]:
    recalls = score.label_scores["recall"]
    absent = [name for name, value in score.iou.items() if value is not None and recalls[name] is None]
    if not absent:
        return []
    mean_present = fmean(value for name, value in score.iou.items() if value is not None and name not in absent)
    return [
        f"{len(absent)} label(s) of {score.title} are in no ground-truth mask of {score.split} and count as 0 in the "
        f"mIoU of {score.miou:.1f}; over the other labels it is {mean_present:.1f}: {join_shortened(absent)}"
    ]


class RowsWithTruth(NamedTuple):
    """Images whose ground truth is known.

    Attributes:
        rows: Their rows of the index, with the column `position`.
        notes: Notes on masks that no longer exist, on negatives without a mask, and if no image has a mask.
    """

    rows: pa.Table
    notes: list[str]


def rows_with_truth(context: RunContext, split: str, *, tagged: bool) -> RowsWithTruth:
    """Images of a split whose ground truth is known, with their `position` in the split.

    It is known by a mask that exists. For a negative without a mask it is all background, which counts if any other
    image of the split has a mask: without one, nothing measures whether the classes are found.

    Args:
        tagged: Whether to take only tagged images; `position` counts only these.
    """
    notes = []
    rows = split_rows(context, split, tagged=tagged)
    rows = rows.append_column("position", pa.array(np.arange(len(rows)), pa.int64()))
    with_mask = rows.filter(pc.is_valid(rows["mask_uri"]))
    exists = pa.array([found is not None for found in stamps(with_mask["mask_uri"].to_pylist())], pa.bool_())
    missing = with_mask.filter(pc.invert(exists))["mask_uri"].to_pylist()
    if missing:
        notes.append(
            f"{len(missing)} of {len(with_mask)} ground-truth masks of split {split} no longer exist: "
            f"{join_shortened(missing)}"
        )
    if len(missing) == len(with_mask):
        notes.append(f"nothing of split {split} is scored: there are no ground-truth masks")
        return RowsWithTruth(with_mask.filter(exists), notes)
    if tagged:
        return RowsWithTruth(with_mask.filter(exists), notes)

    is_background = pc.and_(rows["is_negative"], pc.is_null(rows["mask_uri"]))
    num_background = pc.sum(is_background).as_py()
    if num_background:
        notes.append(
            f"{num_background} negative(s) of split {split} have no ground-truth mask, and are scored as all background"
        )
    is_scored = pc.is_in(rows["position"], with_mask.filter(exists)["position"].combine_chunks())
    return RowsWithTruth(rows.filter(pc.or_(is_scored, is_background)), notes)

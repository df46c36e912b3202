"""Stage 8: maps, pseudo masks and predictions against ground truth -> scores.json, curves.json.

Scores what was reached: a run that ends at the pseudo masks has no predictions. Every truth pixel counts but the
truth's own ignored ones; pseudo masks are scored by the label before ignore is applied, with the ignored share of the
scored ones beside the score.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_picture
from mcis.datasets.images.masks import tags_of_mask
from mcis.datasets.index import Listing, shown
from mcis.datasets.storage.files import read_bytes, stamp, stamps
from mcis.platform.config.sections import Config
from mcis.platform.outputs.corrected_masks import CORRECTED, with_corrected
from mcis.platform.outputs.read_index import rows_in_split, split_rows, truth_of_row
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import file_stamps, write_json
from mcis.platform.runs.results import PredictResult, StageResult
from mcis.platform.runs.scores import CURVES, FULL_SUPERVISION, SCORES, Curve, Score
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages.evaluation.scoring import evaluate_predictions, evaluate_train


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Reads some of the masks that are scored, and of the corrected ones, so that a wrong kind of them shows before the
    trainings: UserError as of `read_truth`, or where most of either contradict their images' tags."""
    columns = listing.table.select(["uri", "tags", "mask_uri", "split"])
    scored = pc.is_in(columns["split"], pa.array(["train", "val", config.predict.split]))
    truth = columns.filter(pc.and_(scored, pc.is_valid(columns["mask_uri"])))
    _check_some(truth, listing.classes)
    if config.data.corrected_masks:
        rows = with_corrected(rows_in_split(listing.table, "train", tagged=True), config.data.corrected_masks)
        masks = rows.drop(["mask_uri"]).rename_columns({CORRECTED: "mask_uri"})
        _check_some(masks.filter(pc.is_valid(masks["mask_uri"])), listing.classes, corrected=True)


def _check_some(rows: pa.Table, classes: Sequence[str], *, corrected: bool = False) -> None:
    """As `check`, of rows and their masks; a corrected mask may be all background, as where a network sees nothing."""
    looked_at, wrong = rows[:: len(rows) // _LOOKED_AT + 1].to_pylist(), list[str]()
    for row in looked_at:
        if stamp(row["mask_uri"]):
            with contextlib.suppress(OSError, ValueError):  # which the index rejects
                _, row["height"], row["width"] = decode_picture(read_bytes(row["uri"]), min_side=1, max_side=1)
            found = tags_of_mask(truth_of_row(row, len(classes)), len(classes), row["mask_uri"])
            if row["tags"] and not ((found or corrected) and {*found} <= {*row["tags"]}):
                wrong.append(row["mask_uri"])
    if 2 * len(wrong) > len(looked_at):
        what = f"{'corrected' if corrected else 'true'} masks hold no tag of their images, or others: {shown(wrong)}"
        raise UserError(
            f"{len(wrong)} of {len(looked_at)} {what}",
            f"k in the pixels of the k-th class of {', '.join(classes)}; {IGNORE} is not scored",
            "correct them, name the file of their classes by data.classes, or take them away",
        )


def inputs(config: Config, context: RunContext) -> Any:
    """The stamps of all ground-truth masks, of the training images' saliency maps, which the baselines need, and of
    corrected masks, whose images are not scored."""
    splits = ["train", *([context.result("predict", PredictResult).split] if "predict" in context.inputs else [])]
    masks = [file_stamps(split_rows(context, of, columns=["mask_uri"])["mask_uri"]) for of in dict.fromkeys(splits)]
    saliency = file_stamps(split_rows(context, "train", columns=["saliency_uri"])["saliency_uri"])
    return [*masks, saliency, file_stamps(_tagged(config, context)[CORRECTED]) if config.data.corrected_masks else None]


def _tagged(config: Config, context: RunContext) -> pa.Table:
    """The tagged training images, and the file of the corrected mask of each, or null."""
    return with_corrected(split_rows(context, "train", tagged=True, columns=["image_id"]), config.data.corrected_masks)


def run(config: Config, context: RunContext) -> StageResult:
    """Scores what there is truth for; without any the lists are empty and a note says so. Errors as of `read_truth`."""
    scores, notes, curves = list[Score](), list[str](), dict[str, Curve]()
    rows = rows_with_truth(context, "train", notes, tagged=True)
    corrected = pa.array([], pa.string())
    if config.data.corrected_masks:
        tagged = _tagged(config, context)
        corrected = tagged.filter(pc.is_valid(tagged[CORRECTED]))["image_id"].combine_chunks()
        rows = rows.filter(pc.invert(pc.is_in(rows["image_id"], corrected)))
        notes.append("images with a corrected mask are not scored")
    scored = {"train": len(rows) if config.supervision == "tags" else 0}
    if config.supervision == "full":
        notes.append(FULL_SUPERVISION)
    elif len(rows):
        scores, curves = evaluate_train(config, context, rows)
    if "predict" in context.inputs:
        split = context.result("predict", PredictResult).split
        rows = rows_with_truth(context, split, notes, tagged=False)
        rows = rows.filter(pc.invert(pc.is_in(rows["image_id"], corrected)))
        scored[split] = len(rows)
        if len(rows):
            scores += evaluate_predictions(config, context, rows, split)
    if config.supervision == "tags":
        notes += falls_behind(scores, config, context)
    for score in [score for score in scores if score.what in ("pseudo_masks", "segmentation")][-1:]:
        notes += counted_as_zero(score)
    write_json(context.part / SCORES, list(map(dataclasses.asdict, scores)))
    write_json(context.part / CURVES, curves)
    return StageResult(notes=tuple(notes), counts={"scored": scored})


_LOOKED_AT = 16
"""Ground-truth masks that are read before a run, at most."""
_FAR = 15
"""Points of IoU by which a class's predictions fall far behind its pseudo masks."""


def falls_behind(scores: Sequence[Score], config: Config, context: RunContext) -> list[str]:
    """A note on the classes of which the network loses much of what its pseudo masks have, and what to do."""
    masks, predictions = ([s for s in scores if s.what == what] for what in ("pseudo_masks", "segmentation"))
    if not masks or not predictions:
        return []
    images = collections.Counter(pc.list_flatten(split_rows(context, "train", columns=["tags"])["tags"]).to_pylist())
    lost = []
    for label, name in enumerate(context.classes):
        taught, found = masks[0].iou[name], predictions[-1].iou[name]
        there = predictions[-1].figures["recall"][name] is not None
        if there and taught is not None and found is not None and taught - found > _FAR:
            lost.append(f"{name} ({images[label]} images; {taught:.1f} in masks, {found:.1f} in predictions)")
    if not lost:
        return []
    balance = "" if config.segmenter.class_balance_exponent == 1 else "segmenter.class_balance_exponent=1, "
    return [
        f"the network falls far behind its masks on {len(lost)} of {len(context.classes)} classes: {shown(lost)}; try "
        f"{balance}more segmenter.min_epochs, more photographs of these, or, where it is known what is in photographs, "
        "`mcis predict --tags`"
    ]


def counted_as_zero(score: Score) -> list[str]:
    """A note on labels that no true mask has and some prediction has, each an IoU of 0 in the mean, as is usual."""
    recalls = score.figures["recall"]
    false = [name for name, iou in score.iou.items() if iou is not None and recalls[name] is None]
    if not false:
        return []
    there = fmean(iou for name, iou in score.iou.items() if iou is not None and name not in false)
    return [
        f"{len(false)} label(s) of {score.title} are in no true mask of {score.split} and count as 0 in the mIoU of "
        f"{score.miou:.1f}, which is {there:.1f} over the labels that are there: {shown(false)}"
    ]


def rows_with_truth(context: RunContext, split: str, notes: list[str], *, tagged: bool) -> pa.Table:
    """The images of a split that have a ground-truth mask, with their `position` in it; notes say where there is none,
    and which masks that the index names are gone."""
    rows = split_rows(context, split, tagged=tagged)
    rows = rows.append_column("position", pa.array(np.arange(len(rows)), pa.int64()))
    named = rows.filter(pc.is_valid(rows["mask_uri"]))
    there = pa.array([each is not None for each in stamps(named["mask_uri"].to_pylist())], pa.bool_())
    if gone := named.filter(pc.invert(there))["mask_uri"].to_pylist():
        notes.append(f"{len(gone)} of {len(named)} ground-truth masks of split {split} are gone: {shown(gone)}")
    if len(gone) == len(named):
        notes.append(f"nothing of split {split} is scored: there are no ground-truth masks")
    return named.filter(there)

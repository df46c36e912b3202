"""Predictions, maps, pseudo masks and baselines against ground truth -> counts of pixels, image by image -> scores."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from mcis.datasets.images.decode import decode_labels, resize_labels
from mcis.datasets.images.masks import SALIENCY_THRESHOLD, read_saliency
from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.tables.shards import Shards
from mcis.models.counts import MASK_PARTS, Counts, map_counts
from mcis.models.localization import score_maps
from mcis.models.metrics import LABEL_SCORES, best_tag_mask, boundary_iou, iou, mean, random_tag_mask, sweep
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.outputs.counts import (
    BEST_TAG,
    COUNTS_SCHEMA,
    PLAIN,
    PREDICTED_IMAGES,
    PSEUDO_MASKS,
    RANDOM_TAG,
    RELATED,
    SINGLE_ROUND,
    TRAINING_IMAGES,
    WITH_CRF,
    counts_row,
    mask_rows,
    sum_counts,
)
from mcis.platform.outputs.read_index import truth_of_row
from mcis.platform.outputs.tables import image_maps
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_table
from mcis.platform.runs.results import MasksResult
from mcis.platform.runs.scores import Curve, Score
from mcis.platform.runs.version import code_digest, git_revision


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Makes the scores of one split, with what all of them have in common."""

    config: Config
    classes: tuple[str, ...]
    split: str
    images: int

    def score(self, what: str, name: str, matrix: NDArray[np.int64], **made: Any) -> Score:
        """The score of a confusion matrix (K + 1, K + 1); `made` are further fields of `Score`."""
        weights = self.config.weights
        origin = (
            weights.origin("segmenter") if what == "segmentation" else weights.classifier or weights.classifier_backbone
        )
        return Score(
            what=what,
            name=name,
            split=self.split,
            images=self.images,
            miou=round(mean(iou(matrix)), 2),
            iou=self._by_label(iou(matrix)),
            figures={name: self._by_label(figure(matrix)) for name, figure in LABEL_SCORES.items()},
            confusion=tuple(map(tuple, matrix.tolist())),
            seed=self.config.seed,
            recipe=self.config.recipe,
            weights=origin,
            git=git_revision(),
            code=code_digest(),
            **made,
        )

    def mask_score(self, what: str, name: str, counts: NDArray[np.int64], **made: Any) -> Score:
        """The score of label masks, from their counts (MASK_PARTS, K + 1, K + 1), with its boundary IoU."""
        values = boundary_iou(counts)
        boundary = {"boundary_miou": round(mean(values), 2), "boundary_iou": self._by_label(values)}
        return self.score(what, name, counts.sum(axis=0), **boundary, **made)

    def _by_label(self, values: NDArray[np.float64]) -> dict[str, float | None]:
        """Values (K + 1,) by the names of their labels, rounded; None for NaN."""
        named = zip(("background", *self.classes), values.tolist(), strict=True)
        return {label: None if np.isnan(value) else round(value, 2) for label, value in named}


def count_predictions(classes: int, predictions: Shards, rows: pa.Table) -> pa.Table:
    """Rows of predicted images -> the counts of their pixels (COUNTS_SCHEMA); `classes` is K."""
    out: list[dict[str, Any]] = []
    for row in rows.to_pylist():
        prediction = predictions.rows(row["image_id"])
        pngs = {PLAIN: prediction["plain"][0].as_py(), WITH_CRF: prediction["crf"][0].as_py()}
        masks = {scored: decode_labels(png) for scored, png in pngs.items() if png is not None}
        out += mask_rows(row["image_id"], truth_of_row(row, classes), masks, classes)
    return pa.Table.from_pylist(out, schema=COUNTS_SCHEMA)


def evaluate_predictions(config: Config, context: RunContext, rows: pa.Table, split: str) -> list[Score]:
    """Scores the predictions of images with ground truth."""
    classes = len(context.classes)
    part = context.part / PREDICTED_IMAGES
    worker = functools.partial(count_predictions, classes, Shards(context.inputs["predict"] / "predictions"))
    map_table(rows, part, worker=worker, label="score predictions", compute=config.compute)
    scored = (PLAIN, WITH_CRF) if config.predict.crf.iterations else (PLAIN,)
    counts = sum_counts(part, dict.fromkeys(scored, (MASK_PARTS, classes + 1, classes + 1)))
    scorer = Scorer(config=config, classes=context.classes, split=split, images=len(rows))
    trained_on = "ground truth" if config.supervision == "full" else None
    how: dict[str, Any] = {"scales": config.predict.scales, "hflip": config.predict.hflip, "trained_on": trained_on}
    return [scorer.mask_score("segmentation", name, of, crf=name == WITH_CRF, **how) for name, of in counts.items()]


@dataclass(frozen=True, kw_only=True)
class ScoreTrain:
    """Rows of tagged training images -> the counts of their pixels (COUNTS_SCHEMA).

    Attributes:
        classes, bins: K, and the number of thresholds that the maps' scores are counted for.
        scale: of the maps (`maps.scale`).
        seed: of the random tag.
        single, related: tables of localization maps without and with related images.
        masks: the table of pseudo masks; None where the run ended before them.
    """

    classes: int
    bins: int
    scale: str
    seed: int
    single: Shards
    related: Shards
    masks: Shards | None

    def __call__(self, rows: pa.Table) -> pa.Table:
        out: list[dict[str, Any]] = []
        for row in rows.to_pylist():
            truth = truth_of_row(row, self.classes)
            for scored, table in ((SINGLE_ROUND, self.single), (RELATED, self.related)):
                counts = self._map_counts(table, row["image_id"], truth)
                out.append(counts_row(row["image_id"], truth, scored, counts))
            out += mask_rows(row["image_id"], truth, dict(self._label_masks(row, truth)), self.classes)
        return pa.Table.from_pylist(out, schema=COUNTS_SCHEMA)

    def _map_counts(self, table: Shards, image_id: str, truth: NDArray[np.uint8]) -> Counts:
        image = image_maps(table, image_id)
        maps = score_maps(torch.from_numpy(image.maps), image.grids, self.scale, *truth.shape).numpy()
        return map_counts(truth, maps, image.classes, self.bins)

    def _label_masks(self, row: dict[str, Any], truth: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """What is scored of an image beside its maps: the pseudo mask, and the baselines where it has saliency."""
        if self.masks:
            mask = self.masks.rows(row["image_id"])
            yield PSEUDO_MASKS, resize_labels(decode_labels(mask["labels"][0].as_py()), *truth.shape)
        if row["saliency_uri"]:
            salient = read_saliency(row["saliency_uri"], truth.shape) >= SALIENCY_THRESHOLD
            tags = np.array(row["tags"], np.int64)
            draw = float(uniforms(DrawPurpose.RANDOM_TAG, self.seed, 0, np.array([row["position"]]))[0, 0])
            yield RANDOM_TAG, random_tag_mask(salient, tags, draw)
            yield BEST_TAG, best_tag_mask(salient, tags, truth)


def evaluate_train(config: Config, context: RunContext, rows: pa.Table) -> tuple[list[Score], dict[str, Curve]]:
    """Scores the maps, the pseudo masks where there are any, and the baselines where every image has a saliency map and
    masks are made of such.

    Beside the scores it returns the mIoU of the maps over thresholds, by the name of their score.

    Args:
        rows: tagged training images with ground truth, and their `position` among the tagged training images.
    """
    classes, bins = len(context.classes), config.evaluate.thresholds
    reached = "pseudo_masks" in context.inputs
    worker = ScoreTrain(
        classes=classes,
        bins=bins,
        scale=config.maps.scale,
        seed=config.seed,
        single=Shards(context.inputs["localize"] / "single"),
        related=Shards(context.inputs["localize"] / "maps"),
        masks=Shards(context.inputs["pseudo_masks"] / "masks") if reached else None,
    )
    if not config.pseudo_masks.reads_saliency:  # what nothing reads may be anything
        at = rows.schema.get_field_index("saliency_uri")
        rows = rows.set_column(at, "saliency_uri", pa.nulls(len(rows), pa.string()))
    part = context.part / TRAINING_IMAGES
    map_table(rows, part, worker=worker, label="score train", compute=config.compute)
    shapes = dict.fromkeys((SINGLE_ROUND, RELATED), (bins, classes + 1, classes + 1))
    shapes |= dict.fromkeys((PSEUDO_MASKS, RANDOM_TAG, BEST_TAG), (MASK_PARTS, classes + 1, classes + 1))
    counts = sum_counts(part, shapes)
    scorer = Scorer(config=config, classes=context.classes, split="train", images=len(rows))
    scored_maps = list(localization_maps(scorer, counts))
    scores = [score for score, _ in scored_maps]
    if reached:
        scores.append(pseudo_masks(scorer, counts[PSEUDO_MASKS], context, rows))
    if rows["saliency_uri"].null_count == 0:
        scores += baselines(scorer, counts)
    return scores, {score.name: curve for score, curve in scored_maps}


def localization_maps(scorer: Scorer, counts: Mapping[str, NDArray[np.int64]]) -> Iterator[tuple[Score, Curve]]:
    """The maps' scores at their best threshold: single round, and with related images."""
    bins, scale = scorer.config.evaluate.thresholds, scorer.config.maps.scale
    thresholds = [i / bins for i in range(bins)]
    for related in dict.fromkeys((0, scorer.config.localize.related)):
        matrices = sweep(counts[RELATED if related else SINGLE_ROUND])
        mious = [mean(iou(matrix)) for matrix in matrices]
        best = int(np.argmax(mious))
        score = scorer.score(
            "localization_maps",
            f"R = {related}" if related else "single round",
            matrices[best],
            threshold=thresholds[best],
            background_cue="best threshold",
            map_scale=scale,
            related=related,
            method=_method(scorer.config, related),
        )
        yield score, Curve(thresholds, [round(miou, 3) for miou in mious])


def _method(config: Config, related: int) -> str | None:
    """How maps were made of so many related images; of single-round ones, what they were refined by, if anything."""
    if related:
        return config.localize.description()
    return "pixel correlation" if config.classifier.equivariant.weight else None


def pseudo_masks(scorer: Scorer, counts: NDArray[np.int64], context: RunContext, rows: pa.Table) -> Score:
    """The score of the pseudo masks' labels before ignore is applied."""
    localize = scorer.config.localize
    masks = read_table(context.inputs["pseudo_masks"] / "masks", ["image_id", "ignored"])
    masks = masks.filter(pc.is_in(masks["image_id"], rows["image_id"].combine_chunks()))
    ignored = round(float(pc.mean(masks["ignored"]).as_py()), 4)
    return scorer.mask_score(
        "pseudo_masks",
        f"R = {localize.related}",
        counts,
        background_cue=context.result("pseudo_masks", MasksResult).background_cue,
        map_scale=scorer.config.maps.scale,
        related=localize.related,
        method=_method(scorer.config, localize.related),
        ignored_share=ignored,
    )


def baselines(scorer: Scorer, counts: Mapping[str, NDArray[np.int64]]) -> Iterator[Score]:
    """What tags and saliency maps reach without a classifier: with a tag at random, and with the best one."""
    cue = f"saliency >= {SALIENCY_THRESHOLD}"
    for name in (RANDOM_TAG, BEST_TAG):
        yield scorer.mask_score("baseline", name, counts[name], background_cue=cue)

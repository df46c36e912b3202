"""Scores maps, pseudo masks, predictions and baselines: compares them with the ground truth by counting pixels per
image, then computes scores from the sums."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from mcis.datasets.images.label_masks import decode_labels, resize_labels
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
    IMPORTED,
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
from mcis.platform.outputs.read_index import tagged_among_negatives, truth_of_row
from mcis.platform.outputs.supervision import trained_on, used_regions, used_saliency
from mcis.platform.outputs.tables import image_maps
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_table
from mcis.platform.runs.results import MasksResult
from mcis.platform.runs.scores import REGIONS_SUPERVISION, SALIENCY_SUPERVISION, Curve, Score
from mcis.platform.runs.version import code_digest, git_revision

_IMPORTED_METHOD = "another program"
"""Value of `Score.method` of outputs of another program."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Makes the scores of one split.

    Attributes:
        config: Configuration of the run.
        classes: The K class names.
        split: Name of the split.
        images: Number of scored images.
    """

    config: Config
    classes: tuple[str, ...]
    split: str
    images: int

    def score(
        self,
        output: str,
        name: str,
        matrix: NDArray[np.int64],
        *,
        is_imported: bool = False,
        method: str | None = None,
        **score_fields: Any,
    ) -> Score:
        """Makes a score.

        Args:
            output: The scored output.
            name: Name of the score.
            matrix: Confusion matrix, (K + 1, K + 1).
            is_imported: Whether another program made the output. The score then has no recipe and no weights, and its
                method says so.
            method: Value of `Score.method` of an output of this run.
            score_fields: Further fields of `Score`.
        """
        weights = self.config.weights
        recipe = self.config.recipe
        if is_imported:
            method = _IMPORTED_METHOD
            origin = ""
            recipe = ""
        elif output == "segmentation":
            origin = weights.origin("segmenter")
        elif self.config.trains_classifier:
            origin = weights.classifier or weights.classifier_backbone
        else:
            origin = ""
        return Score(
            output=output,
            name=name,
            split=self.split,
            images=self.images,
            miou=round(mean(iou(matrix)), 2),
            iou=self._by_label(iou(matrix)),
            label_scores={measure: self._by_label(compute(matrix)) for measure, compute in LABEL_SCORES.items()},
            confusion=tuple(map(tuple, matrix.tolist())),
            seed=self.config.seed,
            recipe=recipe,
            weights=origin,
            method=method,
            git=git_revision(),
            code=code_digest(),
            **score_fields,
        )

    def mask_score(self, output: str, name: str, counts: NDArray[np.int64], **score_fields: Any) -> Score:
        """Makes a score with boundary IoU from the counts of label masks, (MASK_PARTS, K + 1, K + 1).

        Further arguments are those of `score`.
        """
        boundary_values = boundary_iou(counts)
        return self.score(
            output,
            name,
            counts.sum(axis=0),
            boundary_miou=round(mean(boundary_values), 2),
            boundary_iou=self._by_label(boundary_values),
            **score_fields,
        )

    def _by_label(self, values: NDArray[np.float64]) -> dict[str, float | None]:
        """Rounded values (K + 1,) by label name; None for NaN."""
        labels = ("background", *self.classes)
        pairs = zip(labels, values.tolist(), strict=True)
        return {label: None if np.isnan(value) else round(value, 2) for label, value in pairs}


def count_predictions(classes: int, predictions: Shards, rows: pa.Table, *, plain: str = PLAIN) -> pa.Table:
    """Counts pixels by true and predicted label, in a table of COUNTS_SCHEMA.

    Args:
        classes: Number of classes K.
        predictions: Table of predictions.
        rows: Index rows of a split, with their `position` in it.
        plain: Name of the score of predictions without CRF.
    """
    count_rows: list[dict[str, Any]] = []
    for row in rows.to_pylist():
        prediction = predictions.rows(row["image_id"], row["position"])
        masks = {plain: decode_labels(prediction["plain"][0].as_py())}
        refined = prediction["crf"][0].as_py()
        if refined is not None:
            masks[WITH_CRF] = decode_labels(refined)
        count_rows += mask_rows(row["image_id"], truth_of_row(row, classes), masks, classes)
    return pa.Table.from_pylist(count_rows, schema=COUNTS_SCHEMA)


def evaluate_predictions(config: Config, context: RunContext, rows: pa.Table, split: str) -> list[Score]:
    """Scores predictions, without and with the CRF.

    Args:
        rows: Images of the split with ground truth.
        split: The predicted split.
    """
    if config.predict.is_imported:
        names = [IMPORTED]
        settings: dict[str, Any] = {}
    else:
        names = [PLAIN, WITH_CRF] if config.predict.crf.iterations > 0 else [PLAIN]
        settings = {
            "scales": config.predict.scales,
            "hflip": config.predict.hflip,
            "trained_on": trained_on(config, context.stage_outputs),
        }

    classes = len(context.classes)
    counts_folder = context.output / PREDICTED_IMAGES
    predictions = Shards(context.stage_outputs["predict"] / "predictions")
    worker = functools.partial(count_predictions, classes, predictions, plain=names[0])
    map_table(rows, counts_folder, worker=worker, label="score predictions", compute=config.compute)
    counts = sum_counts(counts_folder, dict.fromkeys(names, (MASK_PARTS, classes + 1, classes + 1)))

    scorer = Scorer(config=config, classes=context.classes, split=split, images=len(rows))
    scores = []
    for name in names:
        is_refined = name == WITH_CRF
        score = scorer.mask_score(
            "segmentation", name, counts[name], is_imported=config.predict.is_imported, crf=is_refined, **settings
        )
        scores.append(score)
    return scores


@dataclass(frozen=True, kw_only=True)
class CountTrainingImages:
    """Counts pixels of maps, pseudo masks and baselines by true and predicted label, in a table of COUNTS_SCHEMA.

    It is called with rows of tagged training images, with their `position` among these, and with `mask_position`, the
    position among tagged training images and negatives, which have pseudo masks.

    Attributes:
        classes: Number of classes K.
        bins: Number of background thresholds at which maps are counted.
        scale: Scale of the maps (`Config.map_scale`).
        seed: Seed of the baseline with a random tag.
        maps: Tables of maps, by their value of the column `scored`.
        masks: Table of pseudo masks; None if the run stopped before it.
    """

    classes: int
    bins: int
    scale: str
    seed: int
    maps: Mapping[str, Shards]
    masks: Shards | None

    def __call__(self, rows: pa.Table) -> pa.Table:
        count_rows: list[dict[str, Any]] = []
        for row in rows.to_pylist():
            truth = truth_of_row(row, self.classes)
            for name, table in self.maps.items():
                counts = self._map_counts(table, row, truth)
                count_rows.append(counts_row(row["image_id"], truth, name, counts))
            count_rows += mask_rows(row["image_id"], truth, dict(self._label_masks(row, truth)), self.classes)
        return pa.Table.from_pylist(count_rows, schema=COUNTS_SCHEMA)

    def _map_counts(self, table: Shards, row: dict[str, Any], truth: NDArray[np.uint8]) -> Counts:
        image = image_maps(table, row["image_id"], row["position"])
        maps = score_maps(torch.from_numpy(image.maps), image.grids, self.scale, *truth.shape).numpy()
        return map_counts(truth, maps, image.classes, self.bins)

    def _label_masks(self, row: dict[str, Any], truth: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Yields the name and the labels of the pseudo mask, and of the baselines if the image has a saliency map."""
        if self.masks:
            mask = self.masks.rows(row["image_id"], row["mask_position"])
            yield PSEUDO_MASKS, resize_labels(decode_labels(mask["labels"][0].as_py()), *truth.shape)
        if row["saliency_uri"]:
            salient = read_saliency(row["saliency_uri"], truth.shape) >= SALIENCY_THRESHOLD
            tags = np.array(row["tags"], np.int64)
            draw = float(uniforms(DrawPurpose.RANDOM_TAG, self.seed, 0, np.array([row["position"]]))[0, 0])
            yield RANDOM_TAG, random_tag_mask(salient, tags, draw)
            yield BEST_TAG, best_tag_mask(salient, tags, truth)


def evaluate_train(config: Config, context: RunContext, rows: pa.Table) -> tuple[list[Score], dict[str, Curve]]:
    """Scores maps, pseudo masks and baselines of training images.

    Baselines are scored if all images have saliency maps and the configured rule for pseudo masks reads them.

    Args:
        rows: Tagged training images with ground truth, and their `position` among the tagged training images.

    Returns:
        The scores, and the curves of mIoU over background thresholds, by the name of the score of the maps.
    """
    if not config.pseudo_masks.may_use_saliency:  # no stage has validated the saliency maps
        position = rows.schema.get_field_index("saliency_uri")
        rows = rows.set_column(position, "saliency_uri", pa.nulls(len(rows), pa.string()))
    maps = _tables_of_maps(config, context)
    counts_folder = context.output / TRAINING_IMAGES
    _count_training_images(config, context, rows, maps, counts_folder)

    labels = len(context.classes) + 1
    shapes = dict.fromkeys(maps, (config.evaluate.thresholds, labels, labels))
    shapes |= dict.fromkeys((PSEUDO_MASKS, RANDOM_TAG, BEST_TAG), (MASK_PARTS, labels, labels))
    counts = sum_counts(counts_folder, shapes)
    scorer = Scorer(config=config, classes=context.classes, split="train", images=len(rows))
    scores = []
    curves = {}
    if maps:
        first_half = _counts_of_half(counts_folder, {name: shapes[name] for name in maps}, rows["image_id"].to_pylist())
        for score, curve in score_localization_maps(scorer, counts, first_half):
            scores.append(score)
            curves[score.name] = curve
    if "pseudo_masks" in context.stage_outputs:
        scores.append(score_pseudo_masks(scorer, counts[PSEUDO_MASKS], context, rows))
    if rows["saliency_uri"].null_count == 0:
        scores += score_baselines(scorer, counts)
    return scores, curves


def _count_training_images(
    config: Config, context: RunContext, rows: pa.Table, maps: Mapping[str, Path], folder: Path
) -> None:
    """Writes the pixel counts of training images to a folder, see `CountTrainingImages`.

    Args:
        rows: See `evaluate_train`.
        maps: See `_tables_of_maps`.
        folder: The folder.
    """
    masks = context.stage_outputs.get("pseudo_masks")
    worker = CountTrainingImages(
        classes=len(context.classes),
        bins=config.evaluate.thresholds,
        scale=config.map_scale,
        seed=config.seed,
        maps={name: Shards(table) for name, table in maps.items()},
        masks=Shards(masks / "masks") if masks else None,
    )
    mask_positions = np.flatnonzero(tagged_among_negatives(context))
    rows = rows.append_column("mask_position", pa.array(mask_positions[rows["position"].to_numpy()]))
    map_table(rows, folder, worker=worker, label="score train", compute=config.compute)


def _tables_of_maps(config: Config, context: RunContext) -> dict[str, Path]:
    """Tables of the maps of the run by their value of the column `scored`; none if it has only imported masks."""
    folder = context.stage_outputs.get("localize")
    if folder is None:
        return {}
    if config.localize.is_imported:
        return {IMPORTED: folder / "maps"}
    return {SINGLE_ROUND: folder / "single", RELATED: folder / "maps"}


def _counts_of_half(
    folder: Path, shapes: Mapping[str, tuple[int, int, int]], image_ids: list[str]
) -> dict[str, NDArray[np.int64]]:
    """The sums of counts over every second image, in the order of the ids; none for a single image.

    Args:
        folder: Counts per image.
        shapes: See `sum_counts`.
        image_ids: The scored images.
    """
    if len(image_ids) < 2:
        return {}
    return sum_counts(folder, shapes, only=pa.array(sorted(image_ids)[::2]))


def score_localization_maps(
    scorer: Scorer, counts: Mapping[str, NDArray[np.int64]], first_half: Mapping[str, NDArray[np.int64]]
) -> Iterator[tuple[Score, Curve]]:
    """Yields the scores of the maps and their curves: those of another program, or single-round, then related images.

    Args:
        counts: Counts of each kind of maps, (bins, K + 1, K + 1).
        first_half: Counts of half of the images, see `_score_maps`; empty for a single image.
    """
    config = scorer.config
    if config.localize.is_imported:
        yield _score_maps(scorer, IMPORTED, counts[IMPORTED], first_half.get(IMPORTED), is_imported=True)
        return
    for related in dict.fromkeys((0, config.localize.related)):
        scored = RELATED if related else SINGLE_ROUND
        name = f"R = {related}" if related else "single round"
        method = _method(config, related)
        yield _score_maps(scorer, name, counts[scored], first_half.get(scored), related=related, method=method)


def _score_maps(
    scorer: Scorer, name: str, counts: NDArray[np.int64], first_half: NDArray[np.int64] | None, **score_fields: Any
) -> tuple[Score, Curve]:
    """Returns the score of maps at their best background threshold, and their curve.

    Args:
        name: Name of the score.
        counts: Counts of the maps, (bins, K + 1, K + 1).
        first_half: Counts of every second image, in the order of the ids; None for a single image.
        score_fields: Further arguments of `Scorer.score`.
    """
    bins = scorer.config.evaluate.thresholds
    thresholds = [i / bins for i in range(bins)]
    matrices = sweep(counts)
    mious = _mious(matrices)
    best = int(np.argmax(mious))
    score = scorer.score(
        "localization_maps",
        name,
        matrices[best],
        threshold=thresholds[best],
        held_out_miou=None if first_half is None else _held_out_miou(first_half, counts - first_half),
        background_cue="best threshold",
        map_scale=scorer.config.map_scale,
        **score_fields,
    )
    return score, Curve(thresholds, [round(miou, 3) for miou in mious])


def _held_out_miou(first_half: NDArray[np.int64], second_half: NDArray[np.int64]) -> float:
    """mIoU in percent if each half of the images is scored at the best threshold for the other half.

    Args:
        first_half, second_half: Counts of the maps of each half, (bins, K + 1, K + 1).
    """
    first_matrices = sweep(first_half)
    second_matrices = sweep(second_half)
    best_for_first = int(np.argmax(_mious(first_matrices)))
    best_for_second = int(np.argmax(_mious(second_matrices)))
    matrix = first_matrices[best_for_second] + second_matrices[best_for_first]
    return round(mean(iou(matrix)), 2)


def _mious(matrices: NDArray[np.int64]) -> list[float]:
    """mIoU in percent at each threshold, from the confusion matrices (bins, K + 1, K + 1)."""
    return [mean(iou(matrix)) for matrix in matrices]


def _method(config: Config, related: int) -> str | None:
    """Text for `Score.method` of maps with this number of related images, 0 for single-round maps."""
    if related:
        return config.localize.description()
    return "pixel correlation" if config.refines_maps else None


def score_pseudo_masks(scorer: Scorer, counts: NDArray[np.int64], context: RunContext, rows: pa.Table) -> Score:
    """Scores the labels of pseudo masks, before pixels are ignored.

    Args:
        counts: Their counts, (MASK_PARTS, K + 1, K + 1).
        rows: The scored images.
    """
    config = scorer.config
    cue = context.result("pseudo_masks", MasksResult).background_cue
    if used_saliency(config, context.stage_outputs):
        cue = f"{cue} ({SALIENCY_SUPERVISION})"
    if used_regions(config, context.stage_outputs):
        cue = f"{cue} ({REGIONS_SUPERVISION})"
    masks = read_table(context.stage_outputs["pseudo_masks"] / "masks", ["image_id", "ignored"])
    masks = masks.filter(pc.is_in(masks["image_id"], rows["image_id"].combine_chunks()))
    ignored_share = round(float(pc.mean(masks["ignored"]).as_py()), 4)
    if config.pseudo_masks.is_imported:
        return scorer.mask_score("pseudo_masks", IMPORTED, counts, is_imported=True, ignored_share=ignored_share)

    related = config.localize.related_of_maps
    return scorer.mask_score(
        "pseudo_masks",
        "imported maps" if related is None else f"R = {related}",
        counts,
        background_cue=cue,
        map_scale=config.map_scale,
        related=related,
        method=config.localize.description() if related is None else _method(config, related),
        ignored_share=ignored_share,
    )


def score_baselines(scorer: Scorer, counts: Mapping[str, NDArray[np.int64]]) -> Iterator[Score]:
    """Yields the scores of salient pixels labeled with a random tag and with the best tag; they use no classifier."""
    cue = f"saliency >= {SALIENCY_THRESHOLD} ({SALIENCY_SUPERVISION})"
    for name in (RANDOM_TAG, BEST_TAG):
        yield scorer.mask_score("baseline", name, counts[name], background_cue=cue)

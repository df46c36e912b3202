"""Localization maps, pseudo masks and baselines of the tagged training images against their ground truth."""

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

from mcis.datasets.images.decode import decode_labels, resize_labels
from mcis.datasets.images.masks import SALIENT, read_saliency
from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.datasets.tables.shards import Shards
from mcis.models.counts import MASK_PARTS, Counts, map_counts
from mcis.models.localization import score_maps
from mcis.models.metrics import best_tag_mask, iou, mean, random_tag_mask, sweep
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.outputs.counts import (
    BEST_TAG,
    PSEUDO_MASKS,
    RANDOM_TAG,
    RELATED,
    SINGLE_ROUND,
    TRAINING_IMAGES,
    CountsTable,
    sum_counts,
)
from mcis.platform.outputs.read_index import truth_of_row
from mcis.platform.outputs.tables import image_maps
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_shards, read_table
from mcis.platform.runs.results import MasksResult
from mcis.platform.runs.scores import Curve, Score
from mcis.platform.stages.evaluation.scoring import Evaluation, Scorer


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
        out = CountsTable()
        for row in rows.to_pylist():
            truth = truth_of_row(row, self.classes)
            for scored, table in ((SINGLE_ROUND, self.single), (RELATED, self.related)):
                out.add(row["image_id"], truth, scored, self._map_counts(table, row["image_id"], truth))
            out.add_masks(row["image_id"], truth, dict(self._label_masks(row, truth)), self.classes)
        return out.table()

    def _map_counts(self, table: Shards, image_id: str, truth: NDArray[np.uint8]) -> Counts:
        image = image_maps(table, image_id)
        assert image is not None, f"no localization map of the tagged image {image_id}"
        maps = score_maps(torch.from_numpy(image.maps), image.grids, self.scale, *truth.shape).numpy()
        return map_counts(truth, maps, image.classes, self.classes, self.bins)

    def _label_masks(self, row: dict[str, Any], truth: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """What is scored of an image beside its maps: the pseudo mask, and the baselines where it has saliency."""
        if self.masks:
            mask = self.masks.rows(row["image_id"])
            assert mask is not None, f"no pseudo mask of the tagged image {row['image_id']}"
            yield PSEUDO_MASKS, resize_labels(decode_labels(mask["labels"][0].as_py()), *truth.shape)
        if row["saliency_uri"]:
            salient = read_saliency(row["saliency_uri"], truth.shape) >= SALIENT
            tags = np.array(row["tags"], np.int64)
            draw = float(uniforms(Draw.RANDOM_TAG, self.seed, 0, np.array([row["position"]]))[0, 0])
            yield RANDOM_TAG, random_tag_mask(salient, tags, draw)
            yield BEST_TAG, best_tag_mask(salient, tags, truth)


def evaluate_training_images(config: Config, context: RunContext, rows: pa.Table) -> Evaluation:
    """Scores the maps, the pseudo masks where there are any, and the baselines where every image has a saliency map.

    Args:
        rows: tagged training images with ground truth, and their `position` among the tagged training images.
    """
    classes, bins = len(context.classes), config.evaluate.thresholds
    reached = "pseudo_masks" in context.inputs
    worker = functools.partial(
        ScoreTrain,
        classes=classes,
        bins=bins,
        scale=config.maps.scale,
        seed=config.seed,
        single=Shards(context.inputs["localize"] / "single"),
        related=Shards(context.inputs["localize"] / "maps"),
        masks=Shards(context.inputs["pseudo_masks"] / "masks") if reached else None,
    )
    part = context.part / TRAINING_IMAGES
    mapped = map_table(rows, worker, (), part, label="score train", compute=config.compute)
    of_maps, of_masks = (bins, classes + 1, classes + 1), (MASK_PARTS, classes + 1, classes + 1)
    shapes = dict.fromkeys((SINGLE_ROUND, RELATED), of_maps)
    counts = sum_counts(part, shapes | dict.fromkeys((PSEUDO_MASKS, RANDOM_TAG, BEST_TAG), of_masks))
    scorer = Scorer(config=config, classes=context.classes, split="train", images=len(rows), reused=context.reused)
    scored_maps = list(localization_maps(scorer, counts))
    scores = [score for score, _ in scored_maps]
    if reached:
        scores.append(pseudo_masks(scorer, counts[PSEUDO_MASKS], context, rows))
    if rows["saliency_uri"].null_count == 0:
        scores += baselines(scorer, counts)
    disagreeing = disagreeing_tags(part, rows)
    note = (
        f"{disagreeing} of {len(rows)} scored training image(s) have tags that disagree with their mask: "
        "`mcis index show --check-masks` names them"
    )
    return Evaluation(
        scores=scores,
        curves={score.name: curve for score, curve in scored_maps},
        counts={"tags that disagree with the mask": disagreeing},
        notes=[note] if disagreeing else [],
        busy=mapped.busy,
    )


def disagreeing_tags(part: Path, rows: pa.Table) -> int:
    """How many images have tags that are not the classes of their masks, by the counts in `part`."""
    tags = {row["image_id"]: set(row["tags"]) for row in rows.select(["image_id", "tags"]).to_pylist()}
    disagreeing = 0
    for shard in read_shards(part, ["image_id", "scored", "truth"]):
        counted = shard.filter(pc.equal(shard["scored"], SINGLE_ROUND))
        for image_id, labels in zip(counted["image_id"].to_pylist(), counted["truth"].to_pylist(), strict=True):
            disagreeing += tags[image_id] != {label - 1 for label in labels if label}
    return disagreeing


def localization_maps(scorer: Scorer, counts: Mapping[str, NDArray[np.int64]]) -> Iterator[tuple[Score, Curve]]:
    """The maps' scores at their best threshold: single round, and with related images."""
    localize = scorer.config.localize
    yield _at_best_threshold(scorer, counts[SINGLE_ROUND], "single round", 0, _method(scorer.config, 0))
    if localize.related:
        name = f"R = {localize.related}"
        method = _method(scorer.config, localize.related)
        yield _at_best_threshold(scorer, counts[RELATED], name, localize.related, method)


def _method(config: Config, related: int) -> str | None:
    """How maps were made of so many related images; of single-round ones, what they were refined by, if anything."""
    if related:
        return config.localize.in_words()
    return "pixel correlation" if config.classifier.equivariant.weight else None


def _at_best_threshold(
    scorer: Scorer, counts: NDArray[np.int64], name: str, related: int, method: str | None
) -> tuple[Score, Curve]:
    bins = scorer.config.evaluate.thresholds
    thresholds = [i / bins for i in range(bins)]
    matrices = sweep(counts)
    mious = [mean(iou(matrix)) for matrix in matrices]
    best = int(np.argmax(mious))
    score = scorer.score(
        "localization_maps",
        name,
        matrices[best],
        threshold=thresholds[best],
        background_cue="best threshold",
        map_scale=scorer.config.maps.scale,
        related=related,
        method=method,
    )
    return score, Curve(thresholds, [round(miou, 3) for miou in mious])


def pseudo_masks(scorer: Scorer, counts: NDArray[np.int64], context: RunContext, rows: pa.Table) -> Score:
    """The score of the pseudo masks' labels before ignore is applied."""
    localize = scorer.config.localize
    masks = read_table(context.inputs["pseudo_masks"] / "masks", ["image_id", "ignored", "by_maps"])
    masks = masks.filter(pc.is_in(masks["image_id"], rows["image_id"].combine_chunks()))
    ignored, by_maps = (round(float(pc.mean(masks[share]).as_py()), 4) for share in ("ignored", "by_maps"))
    return scorer.mask_score(
        "pseudo_masks",
        f"R = {localize.related}",
        counts,
        background_cue=context.result("pseudo_masks", MasksResult).background_cue,
        map_scale=scorer.config.maps.scale,
        related=localize.related,
        method=_method(scorer.config, localize.related),
        ignored_share=ignored,
        by_maps=by_maps,
    )


def baselines(scorer: Scorer, counts: Mapping[str, NDArray[np.int64]]) -> Iterator[Score]:
    """What tags and saliency maps reach without a classifier: with a tag at random, and with the best one."""
    cue = f"saliency >= {SALIENT}"
    for name in (RANDOM_TAG, BEST_TAG):
        yield scorer.mask_score("baseline", name, counts[name], background_cue=cue)

"""Localization maps, pseudo masks and baselines of the tagged training images against their ground truth."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from mcis.datasets.decode import decode_labels, resize_labels
from mcis.datasets.draws import Draw, uniforms
from mcis.datasets.maps import Shards
from mcis.datasets.masks import read_saliency, tags_of_mask
from mcis.models.localization import score_maps
from mcis.models.metrics import best_tag_mask, confusion, map_histogram, mean_iou, random_tag_mask, sweep
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import truth_of_row
from mcis.platform.runs.results import MasksResult
from mcis.platform.runs.scores import Curve, Score
from mcis.platform.stages.evaluation.scoring import Evaluation, Scorer, Sums


@dataclass(kw_only=True)
class TrainingSums(Sums):
    """What was counted on training images with K classes.

    Attributes:
        single_round, related: (K + 1, K, bins) histograms of the localization maps (`metrics.map_histogram`), without
            and with related images.
        pseudo_masks, random_tag, best_tag: (K + 1, K + 1) confusions of the pseudo masks and the two baselines.
        ignored, by_maps: () the pseudo masks' shares of ignored pixels, and of those that maps decided.
        disagreeing: () images whose tags are not the classes of their mask.
    """

    single_round: NDArray[np.int64]
    related: NDArray[np.int64]
    pseudo_masks: NDArray[np.int64]
    random_tag: NDArray[np.int64]
    best_tag: NDArray[np.int64]
    ignored: NDArray[np.float64]
    by_maps: NDArray[np.float64]
    disagreeing: NDArray[np.int64]

    @classmethod
    def zeros(cls, classes: int, bins: int) -> "TrainingSums":
        """The sums over no image."""
        histogram, matrix = (classes + 1, classes, bins), (classes + 1, classes + 1)
        return cls(
            single_round=np.zeros(histogram, np.int64),
            related=np.zeros(histogram, np.int64),
            pseudo_masks=np.zeros(matrix, np.int64),
            random_tag=np.zeros(matrix, np.int64),
            best_tag=np.zeros(matrix, np.int64),
            ignored=np.zeros((), np.float64),
            by_maps=np.zeros((), np.float64),
            disagreeing=np.zeros((), np.int64),
        )


@dataclass(frozen=True, kw_only=True)
class ScoreTrain:
    """Rows of tagged training images -> their `TrainingSums` as a row.

    Attributes:
        classes, bins: K, and the number of thresholds that the maps' scores are counted for.
        scale: of the maps (`maps.scale`).
        salient: saliency, of 255, from which a pixel is salient for the baselines.
        seed: of the random tag.
        single, related: tables of localization maps without and with related images.
        masks: the table of pseudo masks; None where the run ended before them.
    """

    classes: int
    bins: int
    scale: str
    salient: int
    seed: int
    single: Shards
    related: Shards
    masks: Shards | None

    def __call__(self, rows: pa.Table) -> pa.Table:
        sums = TrainingSums.zeros(self.classes, self.bins)
        for row in rows.to_pylist():
            truth = truth_of_row(row, self.classes)
            sums.disagreeing += tags_of_mask(truth, self.classes) != row["tags"]
            sums.single_round += self._histogram(self.single, row["image_id"], truth)
            sums.related += self._histogram(self.related, row["image_id"], truth)
            if self.masks:
                mask = self.masks.rows(row["image_id"])
                assert mask is not None, f"no pseudo mask of the tagged image {row['image_id']}"
                labels = resize_labels(decode_labels(mask["labels"][0].as_py()), *truth.shape)
                sums.pseudo_masks += confusion(truth, labels, self.classes)
                sums.ignored += mask["ignored"][0].as_py()
                sums.by_maps += mask["by_maps"][0].as_py()
            if row["saliency_uri"]:
                self._add_baselines(sums, row, truth)
        return sums.row()

    def _histogram(self, table: Shards, image_id: str, truth: NDArray[np.uint8]) -> NDArray[np.int64]:
        image = table.maps(image_id)
        assert image is not None, f"no localization map of the tagged image {image_id}"
        maps = score_maps(torch.from_numpy(image.maps), image.grids, self.scale, *truth.shape).numpy()
        return map_histogram(truth, maps, image.classes, self.classes, self.bins)

    def _add_baselines(self, sums: TrainingSums, row: dict[str, Any], truth: NDArray[np.uint8]) -> None:
        salient = read_saliency(row["saliency_uri"], truth.shape) >= self.salient
        tags = np.array(row["tags"], np.int64)
        draw = float(uniforms(Draw.RANDOM_TAG, self.seed, 0, np.array([row["position"]]))[0, 0])
        sums.random_tag += confusion(truth, random_tag_mask(salient, tags, draw), self.classes)
        sums.best_tag += confusion(truth, best_tag_mask(salient, tags, truth), self.classes)


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
        salient=config.evaluate.salient,
        seed=config.seed,
        single=Shards(context.inputs["localize"] / "single"),
        related=Shards(context.inputs["localize"] / "maps"),
        masks=Shards(context.inputs["pseudo_masks"] / "masks") if reached else None,
    )
    part = context.part / "train"
    mapped = map_table(rows, worker, (), part, label="score train", shard_rows=config.compute.shard_rows)
    sums = TrainingSums.zeros(classes, bins).with_shards(part)
    scorer = Scorer(config=config, classes=context.classes, split="train", images=len(rows))
    scored_maps = list(localization_maps(scorer, sums))
    scores = [score for score, _ in scored_maps]
    if reached:
        scores.append(pseudo_masks(scorer, sums, context.result("pseudo_masks", MasksResult).background_cue))
    if rows["saliency_uri"].null_count == 0:
        scores += baselines(scorer, sums)
    disagreeing = int(sums.disagreeing)
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


def localization_maps(scorer: Scorer, sums: TrainingSums) -> Iterator[tuple[Score, Curve]]:
    """The maps' scores at their best threshold: single round, and with related images."""
    localize = scorer.config.localize
    yield _at_best_threshold(scorer, sums.single_round, "single round", 0, _method(scorer.config, 0))
    if localize.related:
        name = f"R = {localize.related}"
        yield _at_best_threshold(scorer, sums.related, name, localize.related, _method(scorer.config, localize.related))


def _method(config: Config, related: int) -> str | None:
    """How maps were made of so many related images; of single-round ones, what they were refined by, if anything."""
    if related:
        return config.localize.in_words()
    return "pixel correlation" if config.classifier.equivariant.weight else None


def _at_best_threshold(
    scorer: Scorer, histogram: NDArray[np.int64], name: str, related: int, method: str | None
) -> tuple[Score, Curve]:
    bins = scorer.config.evaluate.thresholds
    thresholds = [i / bins for i in range(bins)]
    matrices = sweep(histogram)
    mious = [mean_iou(matrix) for matrix in matrices]
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


def pseudo_masks(scorer: Scorer, sums: TrainingSums, cue: str) -> Score:
    """The score of the pseudo masks' labels before ignore is applied."""
    localize = scorer.config.localize
    return scorer.score(
        "pseudo_masks",
        f"R = {localize.related}",
        sums.pseudo_masks,
        background_cue=cue,
        map_scale=scorer.config.maps.scale,
        related=localize.related,
        method=_method(scorer.config, localize.related),
        ignored_share=round(float(sums.ignored) / scorer.images, 4),
        by_maps=round(float(sums.by_maps) / scorer.images, 4),
    )


def baselines(scorer: Scorer, sums: TrainingSums) -> Iterator[Score]:
    """What tags and saliency maps reach without a classifier: with a tag at random, and with the best one."""
    cue = f"saliency >= {scorer.config.evaluate.salient}"
    yield scorer.score("baseline", "a random tag on salient pixels", sums.random_tag, background_cue=cue)
    yield scorer.score("baseline", "the best tag on salient pixels", sums.best_tag, background_cue=cue)

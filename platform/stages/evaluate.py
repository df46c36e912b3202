"""Stage 7: maps, pseudo masks and predictions against ground truth -> scores.json, curves.json.

Scores what was reached: a run that ends at the pseudo masks has no predictions. The only stage that opens ground-truth
masks. Every truth pixel counts but the truth's own ignored ones; pseudo masks are scored by the label before ignore is
applied, with the ignored share of the scored ones beside the score.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from mcis.datasets.decode import decode_labels
from mcis.datasets.draws import Draw, uniforms
from mcis.datasets.errors import UserError
from mcis.datasets.files import stamps
from mcis.datasets.index import Listing, shown
from mcis.datasets.maps import ImageMaps, Shards
from mcis.datasets.masks import read_saliency, tags_of_mask
from mcis.models.localization import resize_maps, scale_maps
from mcis.models.metrics import best_tag_mask, confusion, iou, map_histogram, mean_iou, random_tag_mask, sweep
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import split_rows, truth_of_row
from mcis.platform.runs.results import MasksResult, PredictResult, StageResult
from mcis.platform.runs.version import git_revision
from mcis.platform.runs.workspace import Workspace, file_stamps, read_table, write_json


class ScoreTrain:
    """Rows of tagged training images -> one row of sums.

    `histograms` of the maps, `confusions` of pseudo masks and marks, `ignored`: the pseudo masks' shares of ignored
    pixels added up, `disagreeing`: how many images' tags are not the classes of their mask.
    """

    def __init__(
        self,
        classes: int,
        bins: int,
        scale: str,
        salient: int,
        seed: int,
        single: Shards,
        maps: Shards,
        masks: Shards | None,
    ):
        self.classes, self.bins, self.scale, self.salient, self.seed = classes, bins, scale, salient, seed
        self.single, self.maps, self.masks = single, maps, masks

    def __call__(self, rows: pa.Table) -> pa.Table:
        k = self.classes
        histograms = np.zeros((2, k + 1, k, self.bins), np.int64)
        confusions = np.zeros((3, k + 1, k + 1), np.int64)
        ignored, disagreeing = 0.0, 0
        for row in rows.to_pylist():
            truth = truth_of_row(row, k)
            disagreeing += tags_of_mask(truth, k) != row["tags"]
            for place, shards in enumerate((self.single, self.maps)):
                found = shards.maps(row["image_id"])
                assert isinstance(found, ImageMaps)
                maps = resize_maps(scale_maps(torch.from_numpy(found.maps), self.scale), *truth.shape).numpy()
                histograms[place] += map_histogram(truth, maps, found.classes, k, self.bins)
            if self.masks:
                mask = self.masks.rows(row["image_id"])
                assert mask is not None
                confusions[0] += confusion(truth, decode_labels(mask["labels"][0].as_py()), k)
                ignored += mask["ignored"][0].as_py()
            if row["saliency_uri"]:
                salient = read_saliency(row["saliency_uri"], truth.shape) >= self.salient
                tags = np.array(row["tags"], np.int64)
                draw = float(uniforms(Draw.RANDOM_TAG, self.seed, 0, np.array([row["position"]]))[0, 0])
                confusions[1] += confusion(truth, random_tag_mask(salient, tags, draw), k)
                confusions[2] += confusion(truth, best_tag_mask(salient, tags, truth), k)
        sums = {"histograms": [histograms.ravel()], "confusions": [confusions.ravel()]}
        return pa.table(sums | {"ignored": [ignored], "disagreeing": [disagreeing]})


class ScoreVal:
    """Rows of val images -> one row of counts: confusions of the plain and the refined prediction."""

    def __init__(self, classes: int, predictions: Shards):
        self.classes, self.predictions = classes, predictions

    def __call__(self, rows: pa.Table) -> pa.Table:
        confusions = np.zeros((2, self.classes + 1, self.classes + 1), np.int64)
        for row in rows.to_pylist():
            truth = truth_of_row(row, self.classes)
            found = self.predictions.rows(row["image_id"])
            assert found is not None
            for place, name in enumerate(("plain", "crf")):
                png = found[name][0].as_py()
                if png is not None:
                    confusions[place] += confusion(truth, decode_labels(png), self.classes)
        return pa.table({"confusions": [confusions.ravel()]})


def _summed(folder: Path, column: str, *shape: int) -> NDArray[np.int64]:
    total = np.zeros(shape, np.int64)
    for file in sorted(folder.glob("part-*.parquet")):  # one at a time: with many classes each is tens of megabytes
        for chunk in read_table(file, [column])[column].chunks:
            total += chunk.flatten().to_numpy().reshape(-1, *shape).sum(axis=0)
    return total


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Truth is looked for when there is something to score: a run without it ends in masks all the same."""


def inputs(config: Config, context: RunContext) -> Any:
    """The stamps of all ground-truth masks, and of the training images' saliency maps, which the marks are made of."""
    splits = ["train", *([context.result("predict", PredictResult).split] if "predict" in context.inputs else [])]
    masks = [file_stamps(split_rows(context, split)["mask_uri"].to_pylist()) for split in dict.fromkeys(splits)]
    return [*masks, file_stamps(split_rows(context, "train")["saliency_uri"].to_pylist())]


def run(config: Config, context: RunContext) -> StageResult:
    """Scores what there is truth for; without a folder of masks the lists are empty and a note says so.

    Raises:
        UserError: a mask is missing, unreadable, of another size or with an unknown label.
    """
    classes = len(context.classes)
    scores: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    notes: list[str] = []
    counts: dict[str, Any] = {}
    busy = 0.0

    def entry(what: str, name: str, split: str, matrix: NDArray[np.int64], images: int, **meaning: Any) -> None:
        values = iou(matrix)
        known: dict[str, Any] = {"scales": None, "mirror": None, "crf": None, "threshold": None, "background_cue": None}
        known |= {"map_scale": None, "related_images": None, "aggregation": None, "ignored_share": None}
        labels = ("background", *context.classes)
        scores.append(
            {
                "what": what,
                "name": name,
                "split": split,
                "miou": round(mean_iou(matrix), 2),
                "iou": {n: None if np.isnan(v) else round(float(v), 2) for n, v in zip(labels, values, strict=True)},
                "images": images,
                **known,
                **meaning,
                "seed": config.seed,
                "recipe": config.recipe,
                "weights": config.weights.classifier or config.weights.backbone,
                "git": git_revision(),
            }
        )

    def with_truth(split: str, tagged: bool) -> pa.Table:
        rows = split_rows(context, split, tagged=tagged)
        rows = rows.append_column("position", pa.array(np.arange(len(rows)), pa.int64()))
        named = rows.filter(pc.is_valid(rows["mask_uri"]))
        there = stamps(named["mask_uri"].to_pylist())
        if not any(there):
            notes.append(f"nothing of split {split} is scored: there are no ground-truth masks")
            return rows.slice(0, 0)
        if len(named) < len(rows):
            notes.append(f"{len(rows) - len(named)} image(s) of split {split} have no ground-truth mask: not scored")
        rows = named
        missing = [u for u, stamp in zip(rows["mask_uri"].to_pylist(), there, strict=True) if not stamp]
        if missing:
            raise UserError(
                f"{len(missing)} of {len(rows)} ground-truth masks of split {split} are missing: {shown(missing)}",
                "every mask that the index names",
                "add them, or move all masks away to go on without scores",
            )
        return rows

    train = with_truth("train", tagged=True)
    if len(train):
        bins = config.evaluate.thresholds
        single, maps = (Shards(context.inputs["localize"] / table) for table in ("single", "maps"))
        masks = Shards(context.inputs["pseudo_masks"] / "masks") if "pseudo_masks" in context.inputs else None
        scale = config.maps.scale
        arguments = (classes, bins, scale, config.evaluate.salient, config.seed, single, maps, masks)
        part = context.part / "train"
        busy += map_table(
            train, ScoreTrain, arguments, part, label="score train", shard_rows=config.compute.shard_rows
        ).busy
        histograms = _summed(part, "histograms", 2, classes + 1, classes, bins)
        confusions = _summed(part, "confusions", 3, classes + 1, classes + 1)
        sums = read_table(part, ["ignored", "disagreeing"])
        disagreeing = counts["tags that disagree with the mask"] = pc.sum(sums["disagreeing"]).as_py()
        if disagreeing:
            notes.append(
                f"{disagreeing} of {len(train)} scored training image(s) have tags that disagree with their mask: "
                "`mcis index show --check-masks` names them"
            )
        how = config.localize.method.in_words()
        kinds = [("single round", 0)] + [(f"R = {config.localize.related}", config.localize.related)] * bool(
            config.localize.related
        )
        for (name, related), histogram in zip(kinds, histograms, strict=False):
            matrices = sweep(histogram)
            means = [mean_iou(m) for m in matrices]
            best = int(np.argmax(means))
            thresholds = [i / bins for i in range(bins)]
            curves[name] = [thresholds, [round(m, 3) for m in means]]
            entry(
                "localization_maps", name, "train", matrices[best], len(train),
                threshold=thresholds[best], background_cue="best threshold", map_scale=scale, related_images=related,
                aggregation=how if related else None,
            )  # fmt: skip
        if masks:
            cue = context.result("pseudo_masks", MasksResult).background_cue
            ignored = round(pc.sum(sums["ignored"]).as_py() / len(train), 4)
            entry(
                "pseudo_masks", f"R = {config.localize.related}", "train", confusions[0], len(train),
                background_cue=cue, map_scale=scale, related_images=config.localize.related,
                aggregation=how if config.localize.related else None, ignored_share=ignored,
            )  # fmt: skip
        if train["saliency_uri"].null_count == 0:
            salient = f"saliency >= {config.evaluate.salient}"
            entry("mark", "a random tag on salient pixels", "train", confusions[1], len(train), background_cue=salient)
            entry("mark", "the best tag on salient pixels", "train", confusions[2], len(train), background_cue=salient)
    split = context.result("predict", PredictResult).split if "predict" in context.inputs else None
    val = with_truth(split, tagged=False) if split else train.slice(0, 0)
    if split and len(val):
        part = context.part / "val"
        shards = Shards(context.inputs["predict"] / "predictions")
        busy += map_table(
            val, ScoreVal, (classes, shards), part, label="score val", shard_rows=config.compute.shard_rows
        ).busy
        confusions = _summed(part, "confusions", 2, classes + 1, classes + 1)
        inference = {"scales": list(config.predict.scales), "mirror": config.predict.mirror}
        entry("segmentation", "plain", split, confusions[0], len(val), crf=False, **inference)
        if config.predict.crf.iterations:
            entry("segmentation", "with CRF", split, confusions[1], len(val), crf=True, **inference)
    write_json(context.part / "scores.json", scores)
    write_json(context.part / "curves.json", curves)
    return StageResult(
        busy=busy,
        notes=tuple(notes),
        counts=counts | {"scored": {"train": len(train), **({split: len(val)} if split else {})}},
    )

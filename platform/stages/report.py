"""Stage 9: all outputs -> scores.json, environment.json, report.html and pictures in runs/NAME/, and in MLflow."""

import collections
import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import join_shortened
from mcis.datasets.images.label_masks import decode_labels, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.storage.files import stamp
from mcis.datasets.tables.large_tables import take_rows
from mcis.datasets.tables.shards import Shards
from mcis.platform.config.keys import leaves
from mcis.platform.config.sections import Config
from mcis.platform.engine.step_log import STEPS
from mcis.platform.networks.predictor import Predictor
from mcis.platform.networks.trained_segmenter import TrainedSegmenter
from mcis.platform.outputs.read_index import split_rows, truth_of_row
from mcis.platform.outputs.relations import MapRelations, relations_of_run
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.explorer import explorer_data
from mcis.platform.reporting.pairs import PairData
from mcis.platform.reporting.panels import Panel
from mcis.platform.reporting.plots import TrainingLog, log_columns
from mcis.platform.reporting.run_page import ReportData, write_report
from mcis.platform.reporting.worst_images import (
    Ranking,
    WorstImages,
    choose_worst,
    rank_by_absent_tags,
    rank_by_ignored,
    rank_by_miou,
)
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_json, read_table, write_json
from mcis.platform.runs.progress import read_records
from mcis.platform.runs.results import PredictResult, StageResult
from mcis.platform.runs.scores import CURVES, Curve, Score, read_scores
from mcis.platform.runs.version import environment, git_revision

_TRAININGS = {"train_classifier": "classifier", "train_affinity": "affinity_net", "train_segmenter": "segmenter"}
"""Configuration section of the network that each stage trains, which is also the prefix of its MLflow metrics."""


def run(config: Config, context: RunContext) -> StageResult:
    """Writes the report and the scores of a run, and passes them to MLflow. A run may end after any stage."""
    records = _training_records(context)
    logs = {network.replace("_", " "): log_columns(rows) for network, rows in records.items()}
    data = report_data(config, context, logs)

    folder = context.folder
    scores = [dataclasses.asdict(score) for score in data.scores]
    write_json(folder.scores, {"scores": scores, "counts": data.counts, "seconds": data.seconds})
    write_report(data, folder)
    write_json(folder.environment, data.environment)

    for stage, network in _TRAININGS.items():
        if network in records:
            context.tracker.log(network, context.stage_outputs[stage] / STEPS)
    _track(config, context, data.scores, data.seconds)
    return StageResult(counts={"panels": len(data.panels)})


def report_data(config: Config, context: RunContext, training: Mapping[str, TrainingLog]) -> ReportData:
    """Collects the content of the report from the stages that were reached."""
    results = {stage: context.result(stage, StageResult) for stage in context.stage_outputs}
    rejects = read_table(context.stage_outputs["index"] / "rejects.parquet", ["reason"])["reason"].to_pylist()
    scores = read_scores(context.stage_outputs)
    curves = _curves(context)
    panels = _panels_of_run(config, context)
    relations = relations_of_run(config, context) if any(panel.maps for panel in panels) else None
    pair_data = _pair_data(config, context, relations) if relations else None
    return ReportData(
        name=context.name,
        sources=config.sources,
        recipe=config.recipe,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        git=git_revision(),
        classes=context.classes,
        scores=scores,
        counts={stage: result.counts for stage, result in results.items() if result.counts},
        rejected=len(rejects),
        notes=_notes(context, results, rejects),
        seconds={stage: round(seconds, 2) for stage, seconds in context.seconds.items()},
        computed={**context.computed, "report": True},
        training=training,
        curves=curves,
        config=[(key, str(value), context.origins[key]) for key, value in leaves(config)],
        environment=environment(config.compute.device),
        panels=panels,
        worst=_worst_images(config, context, scores),
        explorer=explorer_data(config, context.classes, panels, relations, pair_data, scores=scores, curves=curves),
    )


def _notes(context: RunContext, results: Mapping[str, StageResult], reject_reasons: Sequence[str]) -> list[str]:
    """Notes of all stages, and one on the rejected images, if any."""
    notes: list[str] = []
    for result in results.values():
        notes += result.remarks()
    if reject_reasons:
        counts = collections.Counter(reject_reasons).most_common()
        reasons = join_shortened([f"{count} x {reason}" for reason, count in counts])
        notes.append(
            f"{len(reject_reasons)} images rejected: {reasons}; `mcis index browse --name {context.name}` lists them"
        )
    return notes


def _curves(context: RunContext) -> dict[str, Curve]:
    """Curves of mIoU over background thresholds, by the name of the score; none if the run is not evaluated."""
    if "evaluate" not in context.stage_outputs:
        return {}
    curves = read_json(context.stage_outputs["evaluate"] / CURVES)
    return {name: Curve(*values) for name, values in curves.items()}


def _pair_data(config: Config, context: RunContext, relations: MapRelations) -> PairData:
    """The classifier, features and related images from which the page shows the attention of pairs."""
    classifier = context.stage_outputs["train_classifier"]
    features = context.stage_outputs["localize"] / "single"
    return PairData(config, len(context.classes), classifier, features, relations)


def _training_records(context: RunContext) -> dict[str, list[dict[str, Any]]]:
    """Records of the finished trainings by network. A classifier that was trained elsewhere has none."""
    logs = {}
    for stage, network in _TRAININGS.items():
        if stage in context.stage_outputs:
            records = read_records(context.stage_outputs[stage] / STEPS)
            if records:
                logs[network] = records
    return logs


def _track(config: Config, context: RunContext, scores: Sequence[Score], seconds: Mapping[str, float]) -> None:
    """Passes metrics and files of the run to MLflow."""
    tracker = context.tracker
    metrics: dict[str, float] = {}
    for score in scores:
        metrics.update(score.metrics())
    tracker.metrics(metrics)
    tracker.metrics({f"seconds.{stage}": value for stage, value in seconds.items()})

    folder = context.folder
    for path in (folder.report, folder.pictures, folder.scores, folder.config, folder.environment):
        if path.exists():
            tracker.artifact(path)

    is_trial = tracker.parent is not None
    log_model = not is_trial if config.tracking.model is None else config.tracking.model
    if log_model and "train_segmenter" in context.stage_outputs:
        tracker.model()


def _panels_of_run(config: Config, context: RunContext) -> list[Panel]:
    """Panels of at most `report.panels` images, half of them from the predicted split.

    Ground truth is shown only after it was scored (`evaluate`). Training images are predicted here, only for display.
    """
    half = config.report.panels // 2
    second_split = context.result("predict", PredictResult).split if "predict" in context.stage_outputs else "val"
    if second_split == "train":
        counts = {"train": 2 * half}
    else:
        counts = {"train": config.report.panels - half, second_split: half}

    panels = []
    for split, count in counts.items():
        tagged = split == "train"
        num_rows = len(split_rows(context, split, tagged=tagged, negatives=True, columns=["tags"]))
        # Evenly spaced row numbers, so that only these rows are loaded.
        positions = np.linspace(0, num_rows - 1, min(count, num_rows)).astype(np.int64)
        rows = split_rows(context, split, tagged=tagged, negatives=True, only=positions)
        panels += panels_of(config, context, rows, split)
    return panels


def _worst_images(config: Config, context: RunContext, scores: Sequence[Score]) -> dict[str, WorstImages]:
    """The worst images of each split, at most half of `report.panels` and one for each other class."""
    if not config.report.panels:
        return {}

    worst = {}
    for split, ranking in _rankings(context, scores).items():
        columns = split_rows(context, split, negatives=True, columns=["image_id", "tags"])
        found = pc.index_in(ranking.images["image_id"], value_set=columns["image_id"])
        ranks = np.flatnonzero(found.is_valid())
        if not len(ranks):
            continue

        positions = found.drop_null().to_numpy().astype(np.int64)
        tags = take_rows(columns.select(["tags"]), positions)["tags"].combine_chunks()
        count = max(1, config.report.panels // 2)
        chosen = choose_worst(tags, count)
        rows = split_rows(context, split, negatives=True, only=positions[chosen])
        worst[split] = WorstImages(
            criterion=ranking.criterion,
            ranked=len(ranks),
            panels=panels_of(config, context, rows, split, predict=False),
            notes=ranking.notes(ranks[chosen]),
            num_worst=min(count, len(chosen)),
        )
    return worst


def _rankings(context: RunContext, scores: Sequence[Score]) -> dict[str, Ranking]:
    """The ranked images of split train, by their pseudo masks, and of the predicted split, by their predictions.

    If training images were predicted, they are ranked by their predictions.
    """
    rankings: dict[str, Ranking] = {}
    masks = [score for score in scores if score.output == "pseudo_masks"]
    if masks:
        rankings["train"] = rank_by_miou(context.stage_outputs["evaluate"], masks[0])
    elif "pseudo_masks" in context.stage_outputs:
        rankings["train"] = rank_by_ignored(context.stage_outputs["pseudo_masks"] / "masks")

    if "predict" in context.stage_outputs:
        split = context.result("predict", PredictResult).split
        segmentation = [score for score in scores if score.output == "segmentation"]
        if segmentation:
            shown_score = max(segmentation, key=lambda score: bool(score.crf))
            rankings[split] = rank_by_miou(context.stage_outputs["evaluate"], shown_score)
        else:
            rankings[split] = rank_by_absent_tags(context.stage_outputs["predict"] / "predictions", context.classes)
    return rankings


def panels_of(config: Config, context: RunContext, rows: pa.Table, split: str, *, predict: bool = True) -> list[Panel]:
    """Makes the panels of some index rows of a split, each at the size at which its image is read.

    Args:
        predict: Whether images of another split than the predicted one are predicted here.
    """
    classes = context.classes
    stage_outputs = context.stage_outputs
    predictions = _predictions(config, context, rows, split, predict=predict)
    maps = Shards(stage_outputs["localize"] / "maps") if "localize" in stage_outputs else None
    masks = Shards(stage_outputs["pseudo_masks"] / "masks") if "pseudo_masks" in stage_outputs else None

    panels = []
    for row in rows.to_pylist():
        image_id = row["image_id"]
        image = read_rgb(row["uri"], max_side=config.data.max_side, value_range=config.data.value_range)
        height, width = image.shape[:2]
        truth = None
        if "evaluate" in stage_outputs and row["mask_uri"] and stamp(row["mask_uri"]):
            truth = resize_labels(truth_of_row(row, len(classes)), height, width)
        prediction = predictions.get(image_id)
        mask = masks.rows(image_id) if masks and image_id in masks else None
        panels.append(
            Panel(
                image_id=image_id,
                split=split,
                tags=tuple(classes[tag] for tag in row["tags"]),
                image=image,
                truth=truth,
                maps=image_maps(maps, image_id) if maps and image_id in maps else None,
                full_size=(row["height"], row["width"]),
                pseudo_mask=decode_labels(mask["mask"][0].as_py()) if mask else None,
                cue=mask["cue"][0].as_py() if mask else None,
                prediction=None if prediction is None else resize_labels(prediction, height, width),
            )
        )
    return panels


def _predictions(
    config: Config, context: RunContext, rows: pa.Table, split: str, *, predict: bool
) -> dict[str, NDArray[np.uint8]]:
    """Predicted labels by image id, refined by the CRF if it is on; empty if the run has not reached `predict`."""
    if "predict" not in context.stage_outputs:
        return {}

    predictions: dict[str, NDArray[np.uint8]] = {}
    if split == context.result("predict", PredictResult).split:
        shards = Shards(context.stage_outputs["predict"] / "predictions")
        for image_id in rows["image_id"].to_pylist():
            if image_id in shards:
                (row,) = shards.rows(image_id).to_pylist()
                predictions[image_id] = decode_labels(row["crf"] or row["plain"])
        return predictions
    if not predict or "train_segmenter" not in context.stage_outputs:
        return {}

    trained = TrainedSegmenter(config, context.stage_outputs["train_segmenter"], context.classes, config.data.max_side)
    predictor = Predictor(trained, gpu=False)
    for row in rows.select(["image_id", "uri"]).to_pylist():
        predictions[row["image_id"]] = predictor(row["uri"])
    return predictions

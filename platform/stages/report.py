"""Stage 9: everything before -> runs/NAME/scores.json, report.html and pictures, and what MLflow keeps of the run."""

import collections
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from mcis.datasets.index import Listing, shown
from mcis.platform.config.keys import leaves
from mcis.platform.config.sections import Config
from mcis.platform.engine.step_log import STEPS
from mcis.platform.outputs.relations import relations_of_run
from mcis.platform.reporting.explorer import explorer_data
from mcis.platform.reporting.gallery import panels_of_run
from mcis.platform.reporting.plots import TrainingLog, log_columns
from mcis.platform.reporting.run_page import ReportData, write_report
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_json, read_table, write_json, write_text
from mcis.platform.runs.progress import console, read_records
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.scores import CURVES, Curve, Score, read_scores, scores_as_csv
from mcis.platform.runs.version import environment, git_revision
from mcis.platform.runs.workspace import Workspace

_TRAININGS = {"train_classifier": "classifier", "train_affinity": "affinity_net", "train_segmenter": "segmenter"}
"""By stage: section of the network that it trains, by which MLflow knows its curves."""


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Asks for nothing: the report works after any stage."""


def inputs(config: Config, context: RunContext) -> None:
    """The report is written in every call, so that it has no key."""


def run(config: Config, context: RunContext) -> StageResult:
    """Writes the run's report and scores and hands them to MLflow; works after any stage."""
    records = _training_records(context)
    logs = {network.replace("_", " "): log_columns(rows) for network, rows in records.items()}
    data = report_data(config, context, logs)
    folder = context.folder
    write_json(
        folder.scores,
        {
            "scores": [score.as_json() for score in data.scores],
            "counts": data.counts,
            "seconds": data.seconds,
        },
    )
    write_text(folder.score_table, scores_as_csv(data.scores))
    write_report(data, folder)
    write_json(folder.environment, data.environment)
    for stage, network in _TRAININGS.items():
        if network in records:
            context.tracker.log(network, context.inputs[stage] / STEPS)
    _track(config, context, data.scores, data.seconds)
    return StageResult(counts={"panels": len(data.panels)})


def report_data(config: Config, context: RunContext, training: Mapping[str, TrainingLog]) -> ReportData:
    """What the page shows, read from the stages that were reached."""
    results = {stage: context.result(stage, StageResult) for stage in context.inputs}
    notes = [note for result in results.values() for note in result.remarks()]
    rejects = read_table(context.inputs["index"] / "rejects.parquet", ["reason"])["reason"].to_pylist()
    if rejects:
        reasons = shown([f"{n} x {reason}" for reason, n in collections.Counter(rejects).most_common()])
        notes.append(
            f"{len(rejects)} image(s) rejected: {reasons}; `mcis index browse --name {context.name}` lists them"
        )
    scores = read_scores(context.inputs)
    found = read_json(context.inputs["evaluate"] / CURVES) if "evaluate" in context.inputs else {}
    curves = {name: Curve(*points) for name, points in found.items()}
    panels = panels_of_run(config, context)
    relations = relations_of_run(config, context) if any(panel.kept for panel in panels) else None
    return ReportData(
        name=context.name,
        setting=config.setting,
        recipe=config.recipe,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        git=git_revision(),
        classes=context.classes,
        scores=scores,
        counts={stage: result.counts for stage, result in results.items() if result.counts},
        rejected=len(rejects),
        notes=notes,
        seconds={stage: round(seconds, 2) for stage, seconds in context.seconds.items()},
        computed={**context.computed, "report": True},
        training=training,
        curves=curves,
        config=[(key, str(value), context.origins[key]) for key, value in leaves(config)],
        environment=environment(config.compute.device),
        panels=panels,
        explorer=explorer_data(config, context.classes, panels, relations, scores=scores, curves=curves),
    )


def _training_records(context: RunContext) -> dict[str, list[dict[str, Any]]]:
    """The step logs of the trainings that were reached, by network; a classifier that was taken over has none."""
    logs = {}
    for stage, network in _TRAININGS.items():
        if stage in context.inputs and (records := read_records(context.inputs[stage] / STEPS)):
            logs[network] = records
    return logs


def _track(config: Config, context: RunContext, scores: Sequence[Score], seconds: Mapping[str, float]) -> None:
    """Hands the figures and the files of the run to MLflow."""
    tracker = context.tracker
    tracker.metrics({name: value for score in scores for name, value in score.metrics().items()})
    tracker.metrics({f"seconds.{stage}": s for stage, s in seconds.items()})
    folder = context.folder
    for path in (
        folder.report, folder.pictures, folder.scores, folder.score_table, folder.config, folder.environment
    ):  # fmt: skip
        if path.exists():
            tracker.artifact(path)
    settings = config.tracking
    wanted = tracker.parent is None if settings.model is None else settings.model
    if wanted and "train_segmenter" in context.inputs:
        tracker.model(settings.register_as)
    elif settings.register_as:
        console.print(
            f"note: nothing is registered as {settings.register_as}: the run ended before a segmentation network",
            markup=False,
        )

"""Stage 8: everything before -> runs/NAME/scores.json, report.html and pictures, and what MLflow keeps of the run."""

import collections
import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from mcis.datasets.decode import decode_labels
from mcis.datasets.files import stamps
from mcis.datasets.images import read_rgb
from mcis.datasets.index import Listing, shown
from mcis.datasets.maps import Shards
from mcis.models.localization import resize_maps, scale_maps
from mcis.platform.config.keys import leaves
from mcis.platform.config.sections import Config
from mcis.platform.engine.step_log import STEPS
from mcis.platform.networks.predictor import Predictor
from mcis.platform.reporting.attention import attention_steps
from mcis.platform.reporting.panels import Panel
from mcis.platform.reporting.run_page import ReportData, write_report
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.environment import environment
from mcis.platform.runs.progress import read_records
from mcis.platform.runs.read_index import split_rows, truth_of_row
from mcis.platform.runs.results import PredictResult, StageResult
from mcis.platform.runs.version import git_revision
from mcis.platform.runs.workspace import Workspace, read_json, read_table, write_json

_MAPS = 3
"""Images of the gallery whose maps are shown step by step."""


def _spread(rows: pa.Table, count: int) -> pa.Table:
    """`count` rows, or all there are, spread evenly; those with several tags first, since they show most."""
    many = pc.greater(pc.list_value_length(rows["tags"]), 1)
    ordered = pa.concat_tables([rows.filter(many), rows.filter(pc.invert(many))])
    multi = int(pc.sum(many).as_py() or 0)
    wanted = min(count, len(rows))
    first = min(multi, max((wanted + 1) // 2, wanted - (len(rows) - multi)))
    places = [*np.linspace(0, multi - 1, first).astype(int)] if first else []
    places += [*np.linspace(multi, len(rows) - 1, wanted - first).astype(int)] if wanted > first else []
    return ordered.take(pa.array(sorted(set(map(int, places))), pa.int64()))


def panels(config: Config, context: RunContext) -> list[Panel]:
    """The images shown, half of train and half of val; the training images are predicted here, for the eye alone."""
    classes, inputs = context.classes, context.inputs
    half = config.report.panels // 2
    maps = Shards(inputs["localize"] / "maps") if "localize" in inputs else None
    masks = Shards(inputs["pseudo_masks"] / "masks") if "pseudo_masks" in inputs else None
    out = []
    second = context.result("predict", PredictResult).split if "predict" in inputs else "val"
    counts = {"train": config.report.panels - half, second: half} if second != "train" else {"train": 2 * half}
    for split, count in counts.items():
        rows = split_rows(context, split, tagged=split == "train")
        rows = _spread(rows, count)
        predicted = _predictions(config, context, rows, split)
        for row in rows.to_pylist():
            image_id, tags = row["image_id"], row["tags"]
            found = maps.maps(image_id) if maps else None
            shown_maps = []
            if found:
                # Each by its own maximum, whatever `maps.scale`: on a scale that all share a faint map would not show.
                scores = scale_maps(torch.from_numpy(found.maps), "maximum")
                resized = resize_maps(scores, row["height"], row["width"]).numpy()
                shown_maps = [(classes[k], m) for k, m in zip(found.classes, resized, strict=True)]
            mask = masks.rows(image_id) if masks else None
            has_truth = "evaluate" in inputs and row["mask_uri"] and stamps([row["mask_uri"]])[0]
            out.append(
                Panel(
                    image_id=image_id,
                    split=split,
                    tags=tuple(classes[k] for k in tags),
                    image=read_rgb(row["uri"]),
                    truth=truth_of_row(row, len(classes)) if has_truth else None,
                    maps=tuple(shown_maps),
                    pseudo_mask=decode_labels(mask["mask"][0].as_py()) if mask else None,
                    prediction=predicted.get(image_id),
                )
            )
    return out


def _predictions(config: Config, context: RunContext, rows: pa.Table, split: str) -> dict[str, NDArray[np.uint8]]:
    """The predicted labels of the images shown, as refined as they are; empty before the segmenter is trained."""
    if "predict" not in context.inputs:
        return {}
    if split == context.result("predict", PredictResult).split:
        shards = Shards(context.inputs["predict"] / "predictions")
        found = [row for i in rows["image_id"].to_pylist() for row in (shards.rows(i) or rows.slice(0, 0)).to_pylist()]
    else:
        folder = context.inputs["train_segmenter"]
        found = Predictor(config, folder, len(context.classes), gpu=False)(rows).to_pylist()
    return {row["image_id"]: decode_labels(row["crf"] or row["plain"]) for row in found}


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """The report works after any stage and asks for nothing."""


def inputs(config: Config, context: RunContext) -> None:
    """The report is written in every call, so that it has no key."""


def run(config: Config, context: RunContext) -> StageResult:
    """Writes the run's report and scores and hands them to MLflow; works after any stage."""
    folder, inputs = context.folder, context.inputs
    results = {stage: context.result(stage, StageResult) for stage in inputs}
    counts = {stage: result.counts for stage, result in results.items() if result.counts}
    scores = read_json(inputs["evaluate"] / "scores.json") if "evaluate" in inputs else []
    curves = read_json(inputs["evaluate"] / "curves.json") if "evaluate" in inputs else {}
    training = {}
    for stage, label in (("train_classifier", "classifier"), ("train_segmenter", "segmenter")):
        if stage in inputs:
            records = read_records(inputs[stage] / STEPS)[0]
            if records:  # a classifier that was taken ready has none
                training[label] = records
                context.tracker.steps(label, records)
    rejects = read_table(inputs["index"] / "rejects.parquet").to_pylist() if "index" in inputs else []
    notes = [note for result in results.values() for note in result.notes]
    if rejects:
        reasons = collections.Counter(r["reason"] for r in rejects)
        notes.append(f"{len(rejects)} image(s) rejected: {shown([f'{n} x {r}' for r, n in reasons.items()])}")
    seconds = {stage: round(s, 2) for stage, s in context.seconds.items()}
    write_json(
        folder.scores,
        {
            "scores": scores,
            "counts": counts,
            "seconds": seconds,
            "busy": {stage: round(result.busy, 2) for stage, result in results.items()},
        },
    )
    shown_panels = panels(config, context) if "index" in inputs else []
    maps_of = [panel.image_id for panel in shown_panels if panel.split == "train" and panel.maps]
    data = ReportData(
        name=context.name,
        setting=config.setting,
        recipe=config.recipe,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        git=git_revision(),
        classes=context.classes if "index" in inputs else (),
        scores=scores,
        counts=counts,
        rejects=rejects,
        notes=notes,
        seconds=seconds,
        computed=dict(context.computed) | {"report": True},
        training=training,
        curves={k: (v[0], v[1]) for k, v in curves.items()},
        config=[(key, str(value), context.origins[key]) for key, value in leaves(config)],
        environment=environment(),
        panels=shown_panels,
        attention=attention_steps(config, context, maps_of[:_MAPS]) if "localize" in inputs else [],
    )
    write_report(data, folder.path)
    write_json(folder.environment, data.environment)
    tracker = context.tracker
    metrics = {f"{s['what']}.{s['name']}.miou": s["miou"] for s in scores}
    tracker.metrics({_metric_name(k): v for k, v in metrics.items()})
    tracker.metrics({f"seconds.{stage}": s for stage, s in seconds.items()})
    for path in (folder.report, folder.pictures, folder.scores, folder.config, folder.environment):
        if path.exists():
            tracker.artifact(path)
    return StageResult(counts={"panels": len(data.panels)})


def _metric_name(text: str) -> str:
    """MLflow allows letters, digits, `_-. :/` in metric names."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "" for c in text).replace("  ", " ")

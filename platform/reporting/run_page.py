"""The page of one run: scores, pictures, curves, counts -> report.html, one self-contained file, and pictures/*.png.

A pure function of `ReportData`: no Ray, no MLflow. The page names what a run lacks (it stopped early, there is no
ground truth) instead of failing. Names and reasons come from outside, so the template escapes everything, and the page
forbids itself, by its content security policy, to load anything and to run anything but its own script, which makes
pictures of localization maps and never HTML; without it the page is whole but for its section "Try a threshold".
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias, Union

import numpy as np

from mcis.platform.config.keys import flat
from mcis.platform.reporting import plots
from mcis.platform.reporting.files import write_bytes
from mcis.platform.reporting.html import printable, render, script
from mcis.platform.reporting.losses import LOST, steps
from mcis.platform.reporting.panels import CELL_HEIGHT, COLUMNS, Panel, cells, labels, legend
from mcis.platform.runs.files import write_text
from mcis.platform.runs.scores import Curve, Score, Scored, grouped, headings_of, percent, same_origin
from mcis.platform.runs.workspace import RunFolder

Counts: TypeAlias = Mapping[str, Union[float, "Counts"]]
"""Numbers by name, nested as deep as needed: {"images": {"train": 480, "val": 120}, ...}."""

_TITLES: dict[Scored, str] = {
    **{what: what.replace("_", " ").capitalize() for what in plots.STAGE_COLORS},
    "baseline": "Baselines, without a classifier",
}
_NUMBERS = {"images", "threshold", "related images", "ignored share", "seed"}
"""Headings of columns of numbers, which are aligned on the right."""
_PICTURE_NAME = re.compile(r"(iou|losses|thresholds|training-\w+)\.png")


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the page shows. Scores and IoU are in percent, shares in [0, 1], times in seconds.

    Attributes:
        name, sources, recipe, created (ISO 8601), git: what ran, when, and from which commit.
        classes: K names; class index k is label k + 1.
        notes: warnings in plain words.
        counts: by stage.
        rejected: images that the index has left out, which its own page lists.
        seconds, computed: by stage, its wall time and whether it was computed in this call or taken from before.
        training: the logs of the trainings "classifier", "affinity net" and "segmenter", those that took part.
        config: each value's dotted key, the value as text, and where it comes from.
        curves: mIoU of localization maps over thresholds, by label.
        environment: versions and machine, by name.
        explorer: images whose maps a reader can set against thresholds (`explorer_data`); None where there are none.
    """

    name: str
    sources: str
    recipe: str
    created: str
    git: str | None
    classes: tuple[str, ...]
    scores: Sequence[Score]
    counts: Mapping[str, Counts]
    rejected: int
    notes: Sequence[str]
    seconds: Mapping[str, float]
    computed: Mapping[str, bool]
    training: Mapping[str, plots.TrainingLog]
    curves: Mapping[str, Curve]
    config: Sequence[tuple[str, str, str]]
    environment: Mapping[str, str]
    panels: Sequence[Panel]
    explorer: Mapping[str, Any] | None = None


def write_report(data: ReportData, folder: RunFolder) -> Path:
    """Writes the report and its pictures into a run's folder, in place of those of an earlier one; returns the page."""
    view = _view(data)
    content = {f"{name}.png": plot.png for name, plot in view["plots"].items()}
    for name, png in content.items():
        write_bytes(folder.pictures / name, png)
    for path in folder.pictures.glob("*.png"):
        if path.name not in content and _PICTURE_NAME.fullmatch(path.name):
            path.unlink()  # an earlier report's: this run has no such picture
    write_text(folder.report, render("run_page.html.j2", view))
    return folder.report


def _view(data: ReportData) -> dict[str, Any]:
    """The template's variables; its plots are by the name of their file."""
    meanings = [score.meaning() for score in data.scores]
    same = same_origin(meanings)
    groups = [
        (what, title, [(s, meaning) for s, meaning in zip(data.scores, meanings, strict=True) if s.what == what])
        for what, title in _TITLES.items()
    ]
    tiles = [_tile(data.scores, what) for what in plots.STAGE_COLORS]
    shown = [tile for tile in tiles if tile["score"] and tile["score"].iou]
    order = _iou_order([tile["score"] for tile in shown])
    most_bars, drawn = plots.MOST_BARS, dict[str, plots.Plot]()
    if order:
        names = order if len(order) <= most_bars else order[: most_bars // 2] + order[-most_bars // 2 :]
        bars = [plots.Bars(t["title"], t["score"].iou, t["score"].miou, plots.STAGE_COLORS[t["what"]]) for t in shown]
        drawn["iou"] = plots.iou_chart(names, bars)
    lost = steps(data.scores)
    if lost:
        drawn["losses"] = plots.loss_chart(lost)
    if swept := {name: curve for name, curve in data.curves.items() if curve.thresholds}:
        drawn["thresholds"] = plots.threshold_chart(swept)
    drawn |= {_training_name(network): plots.training_chart(log) for network, log in data.training.items()}
    return {
        "data": data,
        "created": f"{datetime.fromisoformat(data.created):%d %B %Y, %H:%M %Z}".lstrip("0"),
        "commit": data.git or "not known",
        "tiles": tiles,
        "training": [_training_view(network, log) for network, log in data.training.items()],
        "times": [
            (stage.replace("_", " "), data.seconds.get(stage), data.computed.get(stage))
            for stage in dict.fromkeys([*data.seconds, *data.computed])
        ],
        "spent": sum(s for stage, s in data.seconds.items() if data.computed.get(stage, True)),
        "origins": Counter(origin for _, _, origin in data.config).most_common(),
        "plots": drawn,
        "splits": _gallery_by_split(data.panels, data.classes, data.explorer),
        "labels_shown": legend(data.panels, data.classes),
        "explorer": data.explorer,
        "script": script("explorer.js"),
        "score_groups": [group for group in groups if group[2]],
        "headings": headings_of(meanings, but=same),
        "same_origin": same,
        "numbers": _NUMBERS,
        "iou_columns": [(tile["what"], tile["title"], tile["score"]) for tile in shown],
        "iou_order": order,
        "images_of": data.counts.get("index", {}).get("tags", {}),
        "most_bars": most_bars,
        "steps": lost,
        "lost": list(LOST),
        "label_of": {label.name: label for label in labels(data.classes).values()},
        "counts": list(flat(data.counts, " → ")),
        "theme": plots.THEME,
    }


def _candidates(scores: Sequence[Score], what: Scored) -> list[Score]:
    """Scores with a mIoU that may stand for a stage: of segmentation, where possible, not on training images."""
    computed = [score for score in scores if score.what == what and isfinite(score.miou)]
    if what == "segmentation":
        return [score for score in computed if not score.split.startswith("train")] or computed
    return computed


def _tile(scores: Sequence[Score], what: Scored) -> dict[str, Any]:
    """A stage's tile of the page's head: its best of `of` scores and how that was made, or why there is none.

    Beside pseudo masks it has the baselines of the same split.
    """
    candidates = _candidates(scores, what)
    best = max(candidates, key=attrgetter("miou"), default=None)
    how = "scored without truth: no mIoU" if any(s.what == what for s in scores) else "no score in this run"
    if best:
        how = " · ".join(f"{heading} {text}" for heading, text in best.made().items())
    baselines = _candidates(scores, "baseline") if best and what == "pseudo_masks" else []
    baselines = [baseline for baseline in baselines if best and baseline.split == best.split]
    shown = {"what": what, "title": _TITLES[what], "score": best, "how": how}
    return shown | {"of": len(candidates), "baselines": baselines}


def _iou_order(scores: Sequence[Score]) -> list[str]:
    """The names of labels in falling order of the last score's IoU."""

    def rank(name: str) -> list[float]:
        values = [score.iou.get(name) for score in reversed(scores)]
        return [-1.0 if value is None else value for value in values]

    return sorted(dict.fromkeys(name for score in scores for name in score.iou), key=rank, reverse=True)


def _gallery_by_split(
    panels: Sequence[Panel], classes: Sequence[str], explorer: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Panels by split, with the columns that any of the split's has; the explorer's images can be tried out."""
    label_of, splits = labels(classes), []
    explored = [image["id"] for image in explorer["images"]] if explorer else []
    for split in dict.fromkeys(panel.split for panel in panels):
        members = [(panel, cells(panel, classes, CELL_HEIGHT)) for panel in panels if panel.split == split]
        columns = [column for column in COLUMNS if any(column in row for _, row in members)]
        shown = [
            {
                "id": panel.image_id,
                "explore": explored.index(name) if (name := printable(panel.image_id)) in explored else None,
                "tags": [label_of[classes.index(name) + 1] for name in panel.tags],
                "cells": [(column, row.get(column)) for column in columns],
            }
            for panel, row in members
        ]
        splits.append({"name": split, "columns": columns, "panels": shown})
    return splits


def _training_name(network: str) -> str:
    """The name of the file that holds the curves of a network's training."""
    return f"training-{re.sub(r'[^a-z0-9]', '_', network.lower())}"


def _training_view(network: str, log: plots.TrainingLog) -> dict[str, Any]:
    """Facts of a training with at least one record, and words for its plot; `broken`: a loss was not a number."""
    losses = log["loss"].tolist()
    first, last = f"{losses[0]:.3g}", f"{fmean(losses[-max(1, len(losses) // 20) :]):.3g}"
    facts = [
        ("steps", grouped(int(log["step"][-1]))),
        ("epochs", f"{log['epoch'][-1]:.4g}"),
        ("loss", f"{first} → {last}"),
    ]
    columns = (log[name] for name in ("val_map", "images_per_second", "waiting"))
    precision, speeds, waits = (column[~np.isnan(column)].tolist() for column in columns)
    if precision:
        facts.append(("mAP on val tags", f"{precision[-1]:.1f}"))
    if speeds:
        facts.append(("images per second", f"{median(speeds):,.0f}"))
    if waits:
        facts.append(("waiting for data", percent(fmean(waits))))
    alt = f"Loss of the {network} over {len(losses)} records, from {first} to {last}"
    if terms := plots.loss_terms(log):
        alt += f"; terms: {', '.join(terms)}"
    shown = {"network": network, "facts": facts, "plot": _training_name(network), "alt": alt}
    return shown | {"broken": not all(map(isfinite, losses))}

"""All that the template of a run's page shows, ready to be written down."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import isfinite
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from mcis.platform.reporting.explorer import MOST_BYTES, MOST_IMAGES, ExplorerData, explorer_data
from mcis.platform.reporting.html import script
from mcis.platform.reporting.losses import LOST, steps
from mcis.platform.reporting.panels import COLUMNS, Panel, cells, labels, legend
from mcis.platform.reporting.plots import STAGE_TITLES, THEMES, Plot, best_point
from mcis.platform.reporting.run_data import Counts, ReportData, TrainingLog
from mcis.platform.reporting.score_table import NUMBERS, iou_table, is_number, score_table, tile
from mcis.platform.runs.scores import grouped, percent, short_commit

MOST_BARS = 40
"""Labels that the chart of IoU holds; with more, the best and the worst are drawn."""
_MOST_REJECTS = 300
"""Rows of the table of rejects; the counts by reason cover all of them."""
CELL_HEIGHT = 240
"""Pixels of a panel's picture in a page, where it is shown at about 200 px width: sharp on a dense screen."""


def training_name(network: str) -> str:
    """The name of the file that holds the curves of a network's training."""
    return f"training-{re.sub(r'[^a-z0-9]', '_', network.lower())}"


def run_view(data: ReportData, plots: Mapping[str, Plot]) -> dict[str, Any]:
    """The template's variables."""
    explorer = _explorer_view(data)
    iou = iou_table(data.scores)
    return {
        "data": data,
        "created": f"{datetime.fromisoformat(data.created):%d %B %Y, %H:%M %Z}".lstrip("0"),
        "commit": short_commit(data.git) if data.git else "not known",
        "tiles": [tile(data.scores, what) for what in STAGE_TITLES],
        "missing": _missing(data),
        "training": [_training_view(network, log) for network, log in data.training.items()],
        "times": [
            (_words(stage), data.seconds.get(stage), data.computed.get(stage))
            for stage in dict.fromkeys([*data.seconds, *data.computed])
        ],
        "spent": sum(s for stage, s in data.seconds.items() if data.computed.get(stage, True)),
        "origins": Counter(value.origin for value in data.config).most_common(),
        "plots": plots,
        "splits": _gallery_by_split(data.panels, data.classes, explorer.shown if explorer else []),
        "labels_shown": legend(data.panels, data.classes),
        "explorer": explorer,
        "script": script("explorer_numbers.js", "explorer.js"),
        "most_explored": (MOST_IMAGES, MOST_BYTES),
        "score_table": score_table(data.scores),
        "numbers": NUMBERS,
        "iou_columns": [(what, STAGE_TITLES[what], score) for what, score in iou.scores.items()],
        "iou_order": iou.order,
        "most_bars": MOST_BARS,
        "steps": steps(data.scores, data.bound),
        "lost": list(LOST),
        "curves": [(name, len(curve.thresholds), best_point(curve)) for name, curve in data.curves.items()],
        "label_of": {label.name: label for label in labels(data.classes).values()},
        "counts": [(_words(name), list(_flat(counts))) for name, counts in data.counts.items()],
        "reject_reasons": Counter(reject.reason for reject in data.rejects).most_common(),
        "rejects": data.rejects[:_MOST_REJECTS],
        **THEMES,
    }


def _missing(data: ReportData) -> list[str]:
    """What a whole run has and this one lacks, in plain words."""
    absent = []
    for what, title in STAGE_TITLES.items():
        scores = [score for score in data.scores if score.what == what]
        if not scores:
            absent.append(f"{title}: not scored; the run ended before, or there is no truth to score against.")
        elif not any(is_number(score.miou) for score in scores):
            absent.append(f"{title}: no mIoU, for there is no truth to score against.")
    absent += [f"Training of the {n}: no records." for n in ("classifier", "segmenter") if not data.training.get(n)]
    if not data.panels:
        absent.append("Gallery: no images.")
    elif all(panel.truth is None for panel in data.panels):
        absent.append("Truth: not known for the gallery's images.")
    return absent


def _explorer_view(data: ReportData) -> ExplorerData | None:
    """What the page embeds for its script, with the curve of its maps; None where that is no image."""
    if data.explorer is None:
        return None
    scores = [score for score in data.scores if score.what == "localization_maps"]
    score = next((score for score in scores if score.related == data.explorer.related), None)
    curve: dict[str, Any] | None = None
    if score and score.threshold is not None and score.name in data.curves and is_number(score.miou):
        mious = [miou if is_number(miou) else None for miou in data.curves[score.name].mious]
        curve = {"name": score.name, "split": score.split, "images": score.images, "mious": mious}
        curve |= {"threshold": score.threshold, "miou": score.miou}
    embedded = explorer_data(data.explorer, data.classes, curve, data.attention)
    return embedded if embedded.shown else None


def _gallery_by_split(panels: Sequence[Panel], classes: Sequence[str], explored: Sequence[str]) -> list[dict[str, Any]]:
    """Panels by split, with the columns that any of the split's has; `explored` are the ids that can be tried out."""
    label_of, splits = labels(classes), []
    for split in dict.fromkeys(panel.split for panel in panels):
        members = [(panel, cells(panel, classes, CELL_HEIGHT)) for panel in panels if panel.split == split]
        columns = [column for column in COLUMNS if any(column in row for _, row in members)]
        shown = [
            {
                "id": panel.image_id,
                "explore": explored.index(panel.image_id) if panel.image_id in explored and panel.maps else None,
                "tags": [label_of[classes.index(name) + 1] for name in panel.tags],
                "cells": [(column, row.get(column)) for column in columns],
            }
            for panel, row in members
        ]
        splits.append({"name": split, "columns": columns, "panels": shown})
    return splits


class TrainingView(NamedTuple):
    """Facts of a training and words for its plot; `broken`: the loss was not a number at some steps."""

    network: str
    facts: list[tuple[str, str]]
    plot: str
    alt: str
    broken: bool


def _training_view(network: str, log: TrainingLog) -> TrainingView:
    """Of a training with at least one record."""
    losses = log.loss.tolist()
    first, last = f"{losses[0]:.3g}", f"{fmean(losses[-max(1, len(losses) // 20) :]):.3g}"
    facts = [("steps", grouped(int(log.step[-1]))), ("epochs", f"{log.epoch[-1]:.4g}"), ("loss", f"{first} → {last}")]
    precision, speeds, waits = (
        column[~np.isnan(column)].tolist() for column in (log.val_map, log.images_per_second, log.waiting)
    )
    if precision:
        facts.append(("mAP on val tags", f"{precision[-1]:.1f}"))
    if speeds:
        facts.append(("images per second", f"{median(speeds):,.0f}"))
    if waits:
        facts.append(("waiting for data", percent(fmean(waits))))
    alt = f"Loss of the {network} over {len(log)} records, from {first} to {last}"
    alt += f"; terms: {', '.join(log.terms)}" if log.terms else ""
    return TrainingView(network, facts, training_name(network), alt, not all(map(isfinite, losses)))


def _flat(counts: Counts, above: str = "") -> Iterator[tuple[str, float]]:
    """Counts with the names that lead to them, joined by arrows."""
    for name, value in counts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name} → ")
        else:
            yield above + name, value


def _words(name: str) -> str:
    return name.replace("_", " ")

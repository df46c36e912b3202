"""The page of a comparison: configuration, scores, differences, IoU per class and images -> one self-contained file.

Its images are those whose scores differ most between cases and some at random, with every case's masks and maps. Names
come from outside, so the template escapes everything and the page forbids itself, by its content security policy, to
load or run anything.
"""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_labels, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.tables.shards import Shards
from mcis.platform.outputs.counts import PLAIN, WITH_CRF
from mcis.platform.outputs.read_index import truth_of_row
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.compared_runs import Case
from mcis.platform.reporting.comparison import ComparedScore, Comparison
from mcis.platform.reporting.html import render
from mcis.platform.reporting.panels import CELL_HEIGHT, Panel, cells, labels, legend
from mcis.platform.reporting.plots import MOST_BARS, THEME, Bars, iou_chart
from mcis.platform.runs.files import fingerprint, read_table, write_text

_LONGEST_NAME = 120
"""Bytes of the runs' names in the name of a page's file."""
_MAX_SIDE = 480
"""Pixels of the longer side at which images are read: twice what the page shows."""
_SHOWN = {
    "segmentation": ("Predictions", "predict", "predictions", "prediction"),
    "pseudo_masks": ("Pseudo masks", "pseudo_masks", "masks", "pseudo mask"),
    "localization_maps": ("Localization maps", "localize", "maps", "localization map"),
}
"""What is shown -> its title, the stage that made it, its table, and the column of panels that it takes."""


def compared_images(comparison: Comparison, count: int) -> list[dict[str, Any]]:
    """Images of which every case has a mask or maps: half of them those that differ most, others drawn by the seed.

    Args:
        count: of images, at most, for predictions, pseudo masks and localization maps each; 0 = none.

    Returns:
        What the page shows of each of these: how many images are in all cases that have them (`common`), which cases
        have none (`without`), and the chosen images with cells for the photograph, the truth, and of each case the mask
        or the maps, of its first seed.

    Raises:
        UserError: the baseline's index, a photograph or a ground-truth mask cannot be read.
    """
    whats = [what for what in _SHOWN if any(score.what == what for score in comparison.scores)]
    try:
        return [_gallery(comparison, what, count) for what in whats] if count else []
    except UserError as error:
        raise UserError(error.found, error.expected, f"{error.remedy}, or show no images by --images 0") from None


def choose(
    image_ids: Sequence[str], mious: Sequence[Mapping[str, float]], count: int, *, seed: int
) -> list[tuple[str, bool]]:
    """Chooses up to `count` images, half of them, rounded up, by the range of their scores, the largest first.

    Each comes with whether it was chosen by its range. Images of equal ranges come in the order of their ids, and one
    on which the cases are equal does not differ most. The others are drawn by (seed, position of the image) alone.

    Args:
        image_ids: sorted.
        mious: by image, of each case; an image that one of them lacks or has as NaN has no range.
    """
    scores = np.array([[of.get(image_id, np.nan) for image_id in image_ids] for of in mious])
    ranges = scores.max(axis=0) - scores.min(axis=0)
    order = np.argsort(-np.nan_to_num(ranges), kind="stable")
    most = [int(i) for i in order[: (count + 1) // 2] if ranges[i] > 0]
    drawn = np.argsort(uniforms(DrawPurpose.COMPARED_IMAGES, seed, 0, np.arange(len(image_ids)))[:, 0], kind="stable")
    others = [int(i) for i in drawn if i not in most][: count - len(most)]
    return [(image_ids[i], True) for i in most] + [(image_ids[i], False) for i in others]


def _gallery(comparison: Comparison, what: str, count: int) -> dict[str, Any]:
    (title, stage, table, column), classes = _SHOWN[what], _classes(comparison)
    cases = [case for case in comparison.cases if stage in case.runs[0].outputs]
    runs = [case.runs[0] for case in cases]
    if len(cases) < 2:
        return {"title": title, "common": 0, "images": []}
    tables = [Shards(run.outputs[stage] / table) for run in runs]
    common = sorted(set.intersection(*(set(of) for of in tables)))
    mious = [_mious(comparison, what, run.name) for run in runs]
    compared = [of for of in mious if of]  # of a run that is not compared there are none
    chosen = dict(choose(common, compared, count, seed=comparison.settings.seed))
    panels, masked, images, label_of = _panels(comparison, list(chosen)), list[Panel](), [], labels(classes)
    for image_id, differs_most in chosen.items():
        panel = panels[image_id]
        of_image = cells(panel, classes, CELL_HEIGHT)
        shown = [(name, of_image.get(name), "") for name in ("image", "truth")]
        for case, of_case, of in zip(cases, tables, mious, strict=True):
            made, which = _with_made(panel, what, of_case)
            masked.append(made)
            cell = cells(made, classes, CELL_HEIGHT)[column]
            facts = ["" if len(case.runs) == 1 else case.runs[0].name, which]
            facts.append("" if math.isnan(of.get(image_id, math.nan)) else f"mIoU here {of[image_id]:.1f}")
            shown.append((case.label, cell._replace(alt=f"{case.label}: {cell.alt}"), ", ".join(filter(None, facts))))
        tags = [label_of[classes.index(name) + 1] for name in panel.tags]
        why = f"{panel.split}, {'differs most' if differs_most else 'drawn at random'}"
        images.append({"id": image_id, "tags": tags, "why": why, "cells": shown})
    without = [case.label for case in comparison.cases if stage not in case.runs[0].outputs]
    view = {"title": title, "common": len(common), "without": without}
    return view | {"legend": legend(masked, classes), "images": images}


def _mious(comparison: Comparison, what: str, run: str) -> Mapping[str, float]:
    """A run's mIoU by image, of what is shown: after the CRF where there is one, of maps at the run's threshold."""
    scores = {score.title: score.image_mious for score in comparison.scores if score.what == what}
    names = [f"segmentation, {WITH_CRF}", f"segmentation, {PLAIN}", "pseudo masks", "localization maps"]
    return next((scores[name][run] for name in names if run in scores.get(name, {})), {})


def _panels(comparison: Comparison, image_ids: Sequence[str]) -> dict[str, Panel]:
    """The photographs and the truth of images of the baseline's index."""
    classes = _classes(comparison)
    columns = ["image_id", "uri", "split", "tags", "mask_uri", "height", "width"]
    index = read_table(comparison.cases[0].runs[0].outputs["index"] / "index.parquet", columns)
    panels = {}
    for row in index.filter(pc.is_in(index["image_id"], pc.cast(list(image_ids), "string"))).to_pylist():
        image_id, photograph, truth = row["image_id"], read_rgb(row["uri"], max_side=_MAX_SIDE), None
        if row["mask_uri"]:
            truth = resize_labels(truth_of_row(row, len(classes)), *photograph.shape[:2])
        tags = tuple(classes[k] for k in row["tags"])
        panels[image_id] = Panel(image_id=image_id, split=row["split"], tags=tags, image=photograph, truth=truth)
    return panels


def _with_made(panel: Panel, what: str, table: Shards) -> tuple[Panel, str]:
    """A panel with its image's row or maps of one of a run's tables, and which of the predictions it shows."""
    if what == "localization_maps":
        return replace(panel, maps=image_maps(table, panel.image_id)), ""
    [row] = table.rows(panel.image_id).to_pylist()
    labels = decode_labels(row["labels"] if what == "pseudo_masks" else row["crf"] or row["plain"])
    mask = resize_labels(labels, *panel.image.shape[:2])
    if what == "pseudo_masks":
        return replace(panel, pseudo_mask=mask), ""
    return replace(panel, prediction=mask), WITH_CRF if row["crf"] else PLAIN


def default_file(cases: Sequence[Case]) -> Path:
    """Where the page of a choice of runs lies unless another file is asked for: in the workspace of the first one.

    `~` is in no name of a run. Long names, and those of several workspaces, are told apart by a fingerprint.
    """
    runs = [run for case in cases for run in case.runs]
    names = "~".join(",".join(run.folder.path.name for run in case.runs) for case in cases)
    beginning = names.encode()[:_LONGEST_NAME].decode(errors="ignore")
    if beginning != names or len({run.workspace.root for run in runs}) > 1:
        names = f"{beginning}-{fingerprint([[str(run.folder.path) for run in case.runs] for case in cases])}"
    return runs[0].workspace.comparisons / f"{names}.html"


def write_page(comparison: Comparison, galleries: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Writes the page with its `compared_images`, in place of what lies there."""
    view = {
        "created": f"{datetime.datetime.now(datetime.UTC):%d %B %Y, %H:%M UTC}".lstrip("0"),
        "comparison": comparison,
        "tables": comparison.tables()[::-1],
        "charts": [_chart(score, [case.label for case in comparison.cases]) for score in comparison.scores],
        "most_bars": MOST_BARS,
        "label_of": {label.name: label for label in labels(_classes(comparison)).values()},
        "galleries": galleries,
        "theme": THEME,
    }
    write_text(file, render("comparison_page.html.j2", view))


def _chart(score: ComparedScore, labels: list[str]) -> dict[str, Any]:
    """A chart of IoU by class, those first that differ most between the cases, and the values that it shows."""
    bars = []
    for case in score.cases:
        scores = case.scores(score.title)
        known = {name: [value for of in scores if (value := of.iou[name]) is not None] for name in scores[0].iou}
        iou = {name: fmean(values) if values else None for name, values in known.items()}
        bars.append(Bars(case.label, iou, fmean(of.miou for of in scores), labels.index(case.label)))

    def spread(name: str) -> float:
        values = [value for of in bars if (value := of.iou[name]) is not None]
        return max(values) - min(values) if values else -1.0

    order = sorted(bars[0].iou, key=spread, reverse=True)
    return {"title": score.title, "order": order, "rows": bars, "plot": iou_chart(order[:MOST_BARS], bars)}


def _classes(comparison: Comparison) -> tuple[str, ...]:
    first = comparison.cases[0].runs[0].scores[comparison.scores[0].title]
    return tuple(first.iou)[1:]

"""The page of a comparison: configuration, scores, differences, IoU per class and images -> one self-contained file.

A pure function of `Comparison` and its images. Names come from outside, so the template escapes everything and the page
forbids itself, by its content security policy, to load or run anything.
"""

import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcis.datasets.errors import UserError
from mcis.platform.reporting.compared_images import ComparedImage, ComparedImages
from mcis.platform.reporting.compared_runs import Case
from mcis.platform.reporting.comparison import ComparedScore, Comparison
from mcis.platform.reporting.html import render
from mcis.platform.reporting.panels import CELL_HEIGHT, cells, labels, legend
from mcis.platform.reporting.plots import MOST_BARS, THEMES, Bars, iou_chart
from mcis.platform.runs.files import disk_errors, fingerprint, write_text
from mcis.platform.runs.scores import headings_of

_GENERATOR = "mcis compare"
"""How a page says that it is one; only such a file is written over."""
_LONGEST_NAME = 120
"""Bytes of the runs' names in the name of a page's file."""
_TITLES = {"segmentation": ("Predictions", "prediction"), "pseudo_masks": ("Pseudo masks", "pseudo mask")}
"""What is shown -> title of the gallery, and the column of its panels."""


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


def check_file(file: Path) -> None:
    """Raises UserError where a page would take the place of something else than an earlier page, or has no place."""
    expected, remedy = "a new file, or an earlier page of a comparison", "name another file by --html"
    with disk_errors(file):
        if not file.exists():
            return
        if not file.is_file():
            raise UserError(f"{file} is no plain file", expected, remedy)
        with file.open("rb") as stream:
            head = stream.read(2000)
    if f'<meta name="generator" content="{_GENERATOR}">'.encode() not in head:
        raise UserError(f"{file} exists and is no page of a comparison", expected, remedy)


def write_page(comparison: Comparison, images: Sequence[ComparedImages], file: Path) -> None:
    """Writes the page, in place of what lies there (see `check_file`)."""
    classes = tuple(comparison.scores[0].rows[0].iou)[1:]
    meanings = [row.meaning for score in comparison.scores for row in score.rows]
    label_of = labels(classes)
    view = {
        "generator": _GENERATOR,
        "created": f"{datetime.datetime.now(datetime.UTC):%d %B %Y, %H:%M UTC}".lstrip("0"),
        "comparison": comparison,
        "headings": headings_of(meanings, but=comparison.same_origin),
        "classes": [_class_view(comparison, score) for score in comparison.scores],
        "most_bars": MOST_BARS,
        "label_of": {label.name: label for label in label_of.values()},
        "galleries": [_gallery_view(of, classes) for of in images],
        **THEMES,
    }
    write_text(file, render("comparison_page.html.j2", view))


def _by_range(score: ComparedScore) -> list[str]:
    """The labels of a score, those first whose IoU differs most between the cases, in points."""

    def spread(name: str) -> float:
        values = [value for row in score.rows if (value := row.iou.get(name)) is not None]
        return max(values) - min(values) if values else -1.0

    return sorted(score.rows[0].iou, key=spread, reverse=True)


def _class_view(comparison: Comparison, score: ComparedScore) -> dict[str, Any]:
    order, places = _by_range(score), [case.label for case in comparison.cases]
    bars = [Bars(row.case, row.iou, row.miou, places.index(row.case)) for row in score.rows]
    return {"title": score.title, "order": order, "rows": bars, "plot": iou_chart(order[:MOST_BARS], bars)}


def _gallery_view(images: ComparedImages, classes: tuple[str, ...]) -> dict[str, Any]:
    panels = [shown.panel for image in images.images for shown in image.masks]
    return {
        "title": _TITLES[images.what][0],
        "common": images.common,
        "legend": legend(panels, classes),
        "images": [_image_view(image, images.what, classes) for image in images.images],
    }


def _image_view(image: ComparedImage, what: str, classes: tuple[str, ...]) -> dict[str, Any]:
    """An image as titled cells with notes: photograph, truth, and the mask of each case."""
    panel, label_of = image.panel, labels(classes)
    of_image = cells(panel, classes, CELL_HEIGHT)
    shown = [(column, of_image.get(column), "") for column in ("image", "truth")]
    for mask in image.masks:
        facts = ["" if mask.run == mask.case else mask.run, mask.which]
        facts += [] if math.isnan(mask.miou) else [f"mIoU here {mask.miou:.1f}"]
        cell = cells(mask.panel, classes, CELL_HEIGHT)[_TITLES[what][1]]
        shown.append((mask.case, cell._replace(alt=f"{mask.case}: {cell.alt}"), ", ".join(filter(None, facts))))
    return {
        "id": panel.image_id,
        "split": panel.split,
        "tags": [label_of[classes.index(name) + 1] for name in panel.tags],
        "why": "differs most" if image.chosen.differs_most else "drawn at random",
        "cells": shown,
    }

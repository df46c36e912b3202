"""The page of a comparison: configuration, scores, differences, IoU per class and images -> one self-contained file.

A pure function of `Comparison` and its images. Names come from outside, so the template escapes everything and the page
forbids itself, by its content security policy, to load or run anything.
"""

import datetime
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mcis.datasets.errors import UserError
from mcis.platform.reporting.compared_images import ComparedImage, ComparedImages, Shown
from mcis.platform.reporting.compared_runs import Case
from mcis.platform.reporting.comparison import ComparedScore, Comparison, ScoreRow
from mcis.platform.reporting.html import data_uri, picture_uri, render
from mcis.platform.reporting.panels import Panel, cells, describe, labels, legend
from mcis.platform.reporting.plots import THEMES, Bars, compared_iou_chart
from mcis.platform.runs.files import disk_errors, fingerprint, write_text
from mcis.platform.runs.scores import HEADINGS

MOST_BARS = 40
"""Labels that a chart of IoU holds; with more, those that differ most are drawn."""
_CELL_HEIGHT = 240
"""Pixels of a picture in the page, where it is shown at about 200 px width: sharp on a dense screen."""
_GENERATOR = "mcis compare"
"""How a page says that it is one; only such a file is written over."""
_LONGEST_NAME = 120
"""Bytes of the runs' names in the name of a page's file."""


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
    """Writes the page, in place of an earlier one.

    Raises:
        UserError: the file is something else, or cannot be written.
    """
    check_file(file)
    write_text(file, render("comparison_page.html.j2", _view(comparison, images)))


def _view(comparison: Comparison, images: Sequence[ComparedImages]) -> dict[str, Any]:
    """The template's variables."""
    classes = tuple(comparison.scores[0].rows[0].iou)[1:]
    return {
        "generator": _GENERATOR,
        "created": f"{datetime.datetime.now(datetime.UTC):%d %B %Y, %H:%M UTC}".lstrip("0"),
        "comparison": comparison,
        "cases": [(case.label, [(run.name, run.seed) for run in case.runs]) for case in comparison.cases],
        "has_seeds": any(len(case.runs) > 1 for case in comparison.cases),
        "scores": [_score_view(score, comparison.same_origin) for score in comparison.scores],
        "classes": [_class_view(comparison, score) for score in comparison.scores],
        "most_bars": MOST_BARS,
        "colors": dict(labels(classes).values()),
        "galleries": [_gallery_view(of, classes) for of in images],
        **THEMES,
    }


def _score_view(score: ComparedScore, said: Collection[str]) -> dict[str, Any]:
    """A table of scores, with a column for every heading that any of them has, but for those in `said`."""
    headings = [h for h in HEADINGS if h not in said and any(h in row.meaning for row in score.rows)]
    return {"score": score, "headings": headings}


def by_range(score: ComparedScore) -> list[str]:
    """The labels of a score, those first whose IoU differs most between the cases, in points."""

    def spread(name: str) -> float:
        values = [value for row in score.rows if (value := row.iou.get(name)) is not None]
        return max(values) - min(values) if values else -1.0

    return sorted(score.rows[0].iou, key=spread, reverse=True)


def shown_label(row: ScoreRow) -> str:
    """A case's label, with a mark where its score is of other images than the baseline's."""
    return f"{row.case} (not comparable)" if row.incomparable else row.case


def _class_view(comparison: Comparison, score: ComparedScore) -> dict[str, Any]:
    order = by_range(score)
    bars = [Bars(shown_label(row), row.iou, row.miou) for row in score.rows]
    plot = compared_iou_chart(order[:MOST_BARS], bars)
    return {
        "title": score.title,
        "order": order,
        "rows": score.rows,
        "labels": [shown_label(row) for row in score.rows],
        "series": [[case.label for case in comparison.cases].index(row.case) for row in score.rows],
        "plot": plot._asdict() | {"light": data_uri(plot.light, "PNG"), "dark": data_uri(plot.dark, "PNG")},
        "alt": f"Bars: IoU of {min(len(order), MOST_BARS)} labels of {len(bars)} cases; the table beside has all",
    }


def _gallery_view(images: ComparedImages, classes: tuple[str, ...]) -> dict[str, Any]:
    panels = [shown.panel for image in images.images for shown in image.masks]
    return {
        "title": {"segmentation": "Predictions", "pseudo_masks": "Pseudo masks"}[images.what],
        "common": images.common,
        "legend": legend(panels, classes),
        "images": [_image_view(image, images.what, classes) for image in images.images],
        "columns": ["image", "truth", *(shown.case for image in images.images[:1] for shown in image.masks)],
    }


def _image_view(image: ComparedImage, what: str, classes: tuple[str, ...]) -> dict[str, Any]:
    """An image as cells: photograph, truth, and the mask of each case; None where there is no picture."""
    panel, label_of = image.panel, labels(classes)
    return {
        "id": panel.image_id,
        "split": panel.split,
        "tags": [label_of[classes.index(name) + 1] for name in panel.tags],
        "why": "differs most" if image.chosen.differs_most else "drawn at random",
        "missing": image.missing,
        "cells": [
            _cell(panel, "image", classes, title="image") if image.has_photograph else None,
            _cell(panel, "truth", classes, title="truth") if panel.truth is not None else None,
            *(_mask_cell(shown, what, classes) for shown in image.masks),
        ],
    }


def _mask_cell(shown: Shown, what: str, classes: tuple[str, ...]) -> dict[str, Any]:
    column = "prediction" if what == "segmentation" else "pseudo mask"
    facts = ["" if shown.run == shown.case else shown.run, shown.which]
    facts += ["" if shown.miou is None else f"mIoU here {shown.miou:.1f}"]
    return _cell(shown.panel, column, classes, title=shown.case, note=", ".join(filter(None, facts)))


def _cell(panel: Panel, column: str, classes: tuple[str, ...], *, title: str, note: str = "") -> dict[str, Any]:
    picture = cells(panel, classes, _CELL_HEIGHT)[column]
    about, _ = describe(panel, column, classes)
    return {
        "title": title,
        "note": note,
        # Masks are flat colors, which PNG packs small and exact; photographs are ten times smaller as JPEG.
        "uri": picture_uri(picture, "JPEG" if column == "image" else "PNG"),
        "width": picture.width,
        "height": picture.height,
        "alt": about if title == column else f"{title}: {about}",
    }

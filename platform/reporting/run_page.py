"""The page of one run: scores, pictures, curves, counts -> report.html, one self-contained file, and pictures/*.png.

A pure function of `ReportData`: no Ray, no MLflow. The page names what a run lacks (it stopped early, there is no
ground truth) instead of failing. Names and reasons come from outside, so the template escapes everything, and the page
forbids itself, by its content security policy, to load anything and to run anything but its own script, which makes
pictures of localization maps and never HTML; without it the page is whole but for its section "Try a threshold".
"""

import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from mcis.platform.reporting.html import encode, render
from mcis.platform.reporting.losses import steps
from mcis.platform.reporting.panels import Panel, cells, side_by_side
from mcis.platform.reporting.plots import (
    STAGE_COLORS,
    STAGE_TITLES,
    Bars,
    Plot,
    gallery,
    iou_chart,
    loss_chart,
    threshold_chart,
    training_chart,
)  # fmt: skip
from mcis.platform.reporting.run_data import ReportData
from mcis.platform.reporting.run_view import MOST_BARS, run_view, training_name
from mcis.platform.reporting.score_table import iou_table
from mcis.platform.runs.files import written_aside
from mcis.platform.runs.workspace import RunFolder

_PANEL_HEIGHT = 160
"""Pixels of a panel's picture in its file."""
_PICTURE_NAME = re.compile(r"(panel-\d+|attention-\d+|gallery|iou|losses|thresholds|training-\w+)\.png")


def write_report(data: ReportData, folder: RunFolder) -> Path:
    """Writes the report and its pictures into a run's folder, in place of those of an earlier report; returns the page.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    plots = _plots(data)
    content = {f"{name}.png": plot.light for name, plot in plots.items()}
    if data.panels:
        content["gallery.png"] = gallery(data.panels, data.classes)
    rows = [(f"panel-{n:02}", _row(panel, data.classes)) for n, panel in enumerate(data.panels, 1)]
    rows += [(f"attention-{n:02}", [of.picture for of in steps.tiles]) for n, steps in enumerate(data.attention, 1)]
    content |= {f"{name}.png": encode(side_by_side(pictures), "PNG") for name, pictures in rows}
    for name, png in content.items():
        with written_aside(folder.pictures / name, durable=False) as aside:
            aside.write_bytes(png)
    for path in folder.pictures.glob("*.png"):
        if path.name not in content and _PICTURE_NAME.fullmatch(path.name):
            path.unlink()  # an earlier report's: this run has no such picture, or fewer panels
    with written_aside(folder.report) as aside:
        aside.write_text(render("run_page.html.j2", run_view(data, plots)), encoding="utf-8")
    return folder.report


def _row(panel: Panel, classes: Sequence[str]) -> list[Image.Image]:
    return [cell.picture for cell in cells(panel, classes, _PANEL_HEIGHT).values()]


def _plots(data: ReportData) -> dict[str, Plot]:
    """All plots that the data has points for, by the name of their file."""
    plots: dict[str, Plot] = {}
    order, scores = iou_table(data.scores)
    if order:
        half = MOST_BARS // 2
        names = order if len(order) <= MOST_BARS else order[:half] + order[-half:]
        bars = [Bars(STAGE_TITLES[what], s.iou, s.miou, STAGE_COLORS[what]) for what, s in scores.items()]
        plots["iou"] = iou_chart(names, bars)
    if lost := steps(data.scores, data.bound):
        plots["losses"] = loss_chart(lost)
    if curves := {name: curve for name, curve in data.curves.items() if curve.thresholds}:
        plots["thresholds"] = threshold_chart(curves)
    return plots | {training_name(network): training_chart(log) for network, log in data.training.items()}

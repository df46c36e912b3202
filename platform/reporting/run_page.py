"""The page of one run: scores, pictures, curves, counts -> report.html, one self-contained file, and pictures/*.png.

A pure function of `ReportData`: no Ray, no MLflow. The page names what a run lacks (it stopped early, there is no
ground truth) instead of failing. Names and reasons come from outside, so the template escapes everything, and the page
forbids itself, by its content security policy, to load anything and to run anything but its own script, which makes
pictures of localization maps and never HTML; without it the page is whole but for its section "Try a threshold".
"""

import re
from pathlib import Path

from mcis.platform.reporting.html import encode, render
from mcis.platform.reporting.losses import steps
from mcis.platform.reporting.panels import gallery, panel_picture, steps_picture
from mcis.platform.reporting.plots import Plot, iou_chart, loss_chart, threshold_chart, training_chart
from mcis.platform.reporting.run_data import ReportData
from mcis.platform.reporting.run_view import MOST_BARS, run_view, training_name
from mcis.platform.reporting.score_table import iou_table
from mcis.platform.runs.files import written_aside
from mcis.platform.runs.workspace import RunFolder

_PICTURE_NAME = re.compile(r"(panel-\d+|attention-\d+|gallery|iou|losses|thresholds|training-\w+)\.png")


def write_report(data: ReportData, folder: RunFolder) -> Path:
    """Writes the report and its pictures into a run's folder, in place of those of an earlier report; returns the page.

    Raises:
        ValueError: a panel's arrays differ in size, or hold a label or a map of a class that `data.classes` lacks.
        UserError: the disk is full or cannot be written.
    """
    drawn = {f"panel-{n:02}": panel_picture(panel, data.classes) for n, panel in enumerate(data.panels, 1)}
    if data.panels:
        drawn["gallery"] = gallery(data.panels, data.classes)
    drawn |= {f"attention-{n:02}": steps_picture(steps) for n, steps in enumerate(data.attention, 1)}
    plots = _plots(data)
    content = {f"{name}.png": encode(picture, "PNG") for name, picture in drawn.items()}
    content |= {f"{name}.png": plot.light for name, plot in plots.items()}
    for name, png in content.items():
        with written_aside(folder.pictures / name, durable=False) as aside:
            aside.write_bytes(png)
    for path in folder.pictures.glob("*.png"):
        if path.name not in content and _PICTURE_NAME.fullmatch(path.name):
            path.unlink()  # an earlier report's: this run has no such picture, or fewer panels
    with written_aside(folder.report) as aside:
        aside.write_text(render("run_page.html.j2", run_view(data, plots)), encoding="utf-8")
    return folder.report


def _plots(data: ReportData) -> dict[str, Plot]:
    """All plots that the data has points for, by the name of their file."""
    plots: dict[str, Plot] = {}
    order, scores = iou_table(data.scores)
    if order:
        half = MOST_BARS // 2
        plots["iou"] = iou_chart(order if len(order) <= MOST_BARS else order[:half] + order[-half:], scores)
    if lost := steps(data.scores, data.bound):
        plots["losses"] = loss_chart(lost)
    if curves := {name: curve for name, curve in data.curves.items() if curve.thresholds}:
        plots["thresholds"] = threshold_chart(curves)
    return plots | {training_name(network): training_chart(log) for network, log in data.training.items() if len(log)}

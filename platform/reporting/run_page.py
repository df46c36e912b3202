"""Writes the page of one run, report.html, and its pictures: scores, images, curves, counts, configuration.

The page depends only on `ReportData`; it needs no Ray and no MLflow. If something is missing because the run stopped
early or there is no ground truth, the page says so. Names and reasons come from users, so the template escapes
everything. The content security policy of the page forbids loading anything, and running anything except for its own
script, which draws localization maps and attention, and never writes HTML. Without the script, only the sections "Try a
threshold" and "Maps and related images" are missing.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias, Union

import numpy as np

from mcis.platform.config.keys import flat
from mcis.platform.reporting import plots
from mcis.platform.reporting.error_breakdown import ERROR_KINDS, ScoredStep, scored_steps
from mcis.platform.reporting.files import write_bytes
from mcis.platform.reporting.html import printable, render, script
from mcis.platform.reporting.panels import CELL_HEIGHT, COLUMNS, Cell, Label, Panel, cells, labels, legend
from mcis.platform.reporting.plots import Plot, Theme
from mcis.platform.reporting.worst_images import WorstImages
from mcis.platform.runs.files import write_text
from mcis.platform.runs.scores import SCORED_OUTPUTS, Curve, Score, format_count, headings_of, percent, shared_origin
from mcis.platform.runs.workspace import RunFolder

Counts: TypeAlias = Mapping[str, Union[float, "Counts"]]
"""Numbers by name, with any nesting: {"images": {"train": 480, "val": 120}, ...}."""

_TILES = tuple(output for output, scored_output in SCORED_OUTPUTS.items() if scored_output.stage)
"""The outputs that have a tile at the top of the page."""
_NUMBER_HEADINGS = {
    "images",
    "threshold",
    "mIoU at the threshold of other images",
    "related images",
    "ignored share",
    "seed",
}
"""Headings of right-aligned columns."""
_PICTURE_NAME = re.compile(r"(iou|errors|thresholds|training-\w+)\.png")


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Content of the page. Scores and IoU are in percent, shares in [0, 1], times in seconds.

    Attributes:
        name: Name of the run.
        sources: Image sources of the configuration.
        recipe: Recipe of the configuration.
        created: Time of the report, ISO 8601.
        git: The commit; None outside a checkout.
        classes: The K class names; class index k has label k + 1.
        scores: All scores of the run.
        counts: Counts by stage.
        rejected: Number of images that the index rejected; its own page lists them.
        notes: Notes of the stages for the user.
        seconds: Wall time by stage.
        computed: By stage, whether this call computed it; otherwise its output was reused.
        training: Step logs of the finished trainings, by network: "classifier", "affinity net", "segmenter".
        curves: mIoU of localization maps over thresholds, by the name of their score.
        config: Dotted key, value as text, and origin (`RunContext.origins`) of every value.
        environment: Versions and machine, by name.
        panels: Images of the gallery, evenly spaced over their split.
        worst: The worst images of each split that was ranked.
        explorer: `explorer_data`; None if there are no maps to explore.
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
    worst: Mapping[str, WorstImages] = field(default_factory=dict)
    explorer: Mapping[str, Any] | None = None


class Tile(NamedTuple):
    """The headline number of an output.

    Attributes:
        output: Key of `SCORED_OUTPUTS`.
        title: Its heading.
        score: The best score; None if there is none.
        explanation: How the scored output was made, or why there is no score.
        candidates: Number of scores that the best one was chosen from.
        baselines: Baselines on the same split, for pseudo masks.
    """

    output: str
    title: str
    score: Score | None
    explanation: str
    candidates: int
    baselines: list[Score]


class ScoreGroup(NamedTuple):
    """The scores of one output, each with its `Score.settings`."""

    output: str
    title: str
    rows: list[tuple[Score, dict[str, str]]]


class IouColumn(NamedTuple):
    """A column of the table of IoU per class."""

    output: str
    title: str
    score: Score


class GalleryPanel(NamedTuple):
    """An image of the gallery.

    Attributes:
        id: id of the image.
        explore: Its position in the explorer; None if it is not there.
        tags: Its tags.
        numbers: Labels of the classes that the gallery's filter offers.
        cells: Its picture in each column, or None.
        note: Why it is shown; may be empty.
        only_of_class: Whether it is shown only if the gallery is filtered by class.
    """

    id: str
    explore: int | None
    tags: list[Label]
    numbers: list[int]
    cells: list[tuple[str, Cell | None]]
    note: str = ""
    only_of_class: bool = False


class GallerySplit(NamedTuple):
    """The images of a split, and the columns that any of them has.

    Attributes:
        title: How the images were chosen, as text.
    """

    name: str
    title: str
    columns: list[str]
    panels: list[GalleryPanel]


class TrainingSummary(NamedTuple):
    """Facts about the training of a network.

    Attributes:
        network: Name of the network.
        facts: Names and values.
        plot: Name of its plot.
        alt: Description of the plot.
        broken: Whether the loss was not a number at some steps.
    """

    network: str
    facts: list[tuple[str, str]]
    plot: str
    alt: str
    broken: bool


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The variables of the template `run_page.html.j2`.

    Attributes:
        data: Content of the page.
        created: Time of the report, as text.
        commit: The commit, or `unknown`.
        tiles: The headline numbers.
        training: Facts about each training.
        times: Each stage with its seconds and whether this call computed it; None if unknown.
        spent: Seconds of the stages that this call computed.
        origins: Origins of configuration values with the number of values, most frequent first.
        plots: Plots by the stem of their file name.
        splits: The gallery's evenly spaced images, by split.
        worst: The gallery's worst images, by split.
        filters: Labels that the gallery's filter offers, with their numbers.
        labels_shown: Labels that occur in the gallery.
        explorer: See `ReportData`.
        has_pairs: Whether the explorer shows attention to related images.
        script: The script of the page, see `html.script`.
        score_groups: All scores, by output.
        headings: Columns of the table of scores: settings that differ between scores.
        shared_origin: Configuration and code that all scores share, by heading.
        numbers: Headings whose columns hold numbers.
        iou_columns: Columns of the table of IoU per class.
        iou_order: Rows of that table: names of the labels.
        images_of: Number of images by class name.
        max_bars: Maximum number of labels in the plot of IoU per class.
        scored_steps: Errors of each step.
        error_kinds: Names of the kinds of errors.
        label_of: Labels by name.
        counts: Counts, each with the names that lead to it.
        theme: Colors of the page.
    """

    data: ReportData
    created: str
    commit: str
    tiles: list[Tile]
    training: list[TrainingSummary]
    times: list[tuple[str, float | None, bool | None]]
    spent: float
    origins: list[tuple[str, int]]
    plots: dict[str, Plot]
    splits: list[GallerySplit]
    worst: list[GallerySplit]
    filters: list[tuple[int, Label]]
    labels_shown: list[Label]
    explorer: Mapping[str, Any] | None
    has_pairs: bool
    script: dict[str, str]
    score_groups: list[ScoreGroup]
    headings: list[str]
    shared_origin: dict[str, str]
    numbers: set[str]
    iou_columns: list[IouColumn]
    iou_order: list[str]
    images_of: Mapping[str, int]
    max_bars: int
    scored_steps: list[ScoredStep]
    error_kinds: list[str]
    label_of: dict[str, Label]
    counts: list[tuple[str, Any]]
    theme: Theme


def write_report(data: ReportData, folder: RunFolder) -> Path:
    """Writes the report and its pictures into the folder of a run, replacing earlier ones; returns the page's path."""
    view = _make_view(data)
    pictures = {f"{name}.png": plot.png for name, plot in view.plots.items()}
    for name, png in pictures.items():
        write_bytes(folder.pictures / name, png)
    for path in folder.pictures.glob("*.png"):
        if path.name not in pictures and _PICTURE_NAME.fullmatch(path.name):
            path.unlink()  # from an earlier report; this one has no such picture
    write_text(folder.report, render("run_page.html.j2", vars(view)))
    return folder.report


def _make_view(data: ReportData) -> RunView:
    """Computes the variables of the template."""
    all_settings = [score.settings() for score in data.scores]
    shared = shared_origin(all_settings)
    tiles = [_make_tile(data.scores, output) for output in _TILES]
    iou_columns = [IouColumn(tile.output, tile.title, tile.score) for tile in tiles if tile.score and tile.score.iou]
    iou_order = _iou_order([column.score for column in iou_columns])
    stages = dict.fromkeys([*data.seconds, *data.computed])
    splits = _gallery_by_split(data)
    worst = _worst_by_split(data)
    shown_panels = [*data.panels]
    for images in data.worst.values():
        shown_panels += images.panels
    index_counts: Mapping[str, Any] = data.counts.get("index", {})
    return RunView(
        data=data,
        created=f"{datetime.fromisoformat(data.created):%d %B %Y, %H:%M %Z}".lstrip("0"),
        commit=data.git or "unknown",
        tiles=tiles,
        training=[_summarize_training(network, log) for network, log in data.training.items()],
        times=[(stage.replace("_", " "), data.seconds.get(stage), data.computed.get(stage)) for stage in stages],
        spent=sum(seconds for stage, seconds in data.seconds.items() if data.computed.get(stage, True)),
        origins=Counter(origin for _, _, origin in data.config).most_common(),
        plots=_draw_plots(data, iou_columns, iou_order),
        splits=splits,
        worst=worst,
        filters=_filters(splits + worst, data.classes),
        labels_shown=legend(shown_panels, data.classes),
        explorer=data.explorer,
        has_pairs=any(image["attention"] for image in data.explorer["images"]) if data.explorer else False,
        script=script("shared.js", "explorer.js", "pairs.js"),
        score_groups=_group_scores(data.scores, all_settings),
        headings=headings_of(all_settings, without=shared),
        shared_origin=shared,
        numbers=_NUMBER_HEADINGS,
        iou_columns=iou_columns,
        iou_order=iou_order,
        images_of=index_counts.get("tags", {}),
        max_bars=plots.MAX_BARS,
        scored_steps=scored_steps(data.scores),
        error_kinds=list(ERROR_KINDS),
        label_of={label.name: label for label in labels(data.classes).values()},
        counts=list(flat(data.counts, " → ")),
        theme=plots.THEME,
    )


def _draw_plots(data: ReportData, iou_columns: Sequence[IouColumn], iou_order: list[str]) -> dict[str, Plot]:
    """Draws the plots for which there is data; returns them by the stem of their file name."""
    drawn: dict[str, Plot] = {}
    if iou_order:
        half = plots.MAX_BARS // 2
        names = iou_order
        if len(names) > plots.MAX_BARS:
            names = iou_order[:half] + iou_order[-half:]
        bars = []
        for column in iou_columns:
            color = SCORED_OUTPUTS[column.output].color or 0
            bars.append(plots.Bars(column.title, column.score.iou, column.score.miou, color))
        drawn["iou"] = plots.iou_chart(names, bars)

    run_steps = scored_steps(data.scores)
    if run_steps:
        drawn["errors"] = plots.error_chart(run_steps)

    swept = {name: curve for name, curve in data.curves.items() if curve.thresholds}
    if swept:
        drawn["thresholds"] = plots.threshold_chart(swept)

    for network, log in data.training.items():
        drawn[_training_plot_name(network)] = plots.training_chart(log)
    return drawn


def _group_scores(scores: Sequence[Score], all_settings: Sequence[dict[str, str]]) -> list[ScoreGroup]:
    """Groups scores by output, without empty groups."""
    groups = []
    for output, scored_output in SCORED_OUTPUTS.items():
        rows = [
            (score, settings) for score, settings in zip(scores, all_settings, strict=True) if score.output == output
        ]
        if rows:
            groups.append(ScoreGroup(output, scored_output.page_title, rows))
    return groups


def _candidates(scores: Sequence[Score], output: str) -> list[Score]:
    """Scores with an mIoU, of which a tile shows the best; for segmentation, not of split train if there are others."""
    computed = [score for score in scores if score.output == output and isfinite(score.miou)]
    if output == "segmentation":
        held_out = [score for score in computed if not score.split.startswith("train")]
        return held_out or computed
    return computed


def _make_tile(scores: Sequence[Score], output: str) -> Tile:
    """Makes the tile of an output from its best score."""
    title = SCORED_OUTPUTS[output].page_title
    candidates = _candidates(scores, output)
    best = max(candidates, key=attrgetter("miou"), default=None)
    if best is None:
        is_scored = any(score.output == output for score in scores)
        explanation = "no mIoU: no pixel was scored" if is_scored else "no score in this run"
        return Tile(output, title, None, explanation, 0, [])

    baselines = []
    if output == "pseudo_masks":
        baselines = [baseline for baseline in _candidates(scores, "baseline") if baseline.split == best.split]
    explanation = " · ".join(f"{heading} {text}" for heading, text in best.output_settings().items())
    return Tile(output, title, best, explanation, len(candidates), baselines)


def _iou_order(scores: Sequence[Score]) -> list[str]:
    """Names of the labels, sorted by decreasing IoU in the last score."""

    def rank(name: str) -> list[float]:
        values = [score.iou.get(name) for score in reversed(scores)]
        return [-1.0 if value is None else value for value in values]

    names: dict[str, None] = {}
    for score in scores:
        names |= dict.fromkeys(score.iou)
    return sorted(names, key=rank, reverse=True)


def _gallery_by_split(data: ReportData) -> list[GallerySplit]:
    """The evenly spaced images by split."""
    explored = [image["id"] for image in data.explorer["images"]] if data.explorer else []
    splits = []
    for split in dict.fromkeys(panel.split for panel in data.panels):
        panels = [panel for panel in data.panels if panel.split == split]
        gallery = _gallery_split(panels, data.classes, explored)
        number = f"{format_count(len(panels))} {'image' if len(panels) == 1 else 'images'}"
        splits.append(gallery._replace(title=number))
    return splits


def _worst_by_split(data: ReportData) -> list[GallerySplit]:
    """The worst images by split."""
    splits = []
    for worst in data.worst.values():
        gallery = _gallery_split(worst.panels, data.classes, [])
        panels = []
        for position, (panel, note) in enumerate(zip(gallery.panels, worst.notes, strict=True)):
            panels.append(panel._replace(note=note, only_of_class=position >= worst.num_worst))
        title = f"worst of {format_count(worst.ranked)} images, by {worst.criterion}"
        splits.append(gallery._replace(title=title, panels=panels))
    return splits


def _gallery_split(panels: Sequence[Panel], classes: Sequence[str], explored: Sequence[str]) -> GallerySplit:
    """Draws images of one split.

    Args:
        explored: Names of the images in the explorer.
    """
    label_of = labels(classes)
    drawn = [cells(panel, classes, CELL_HEIGHT) for panel in panels]
    columns = [column for column in COLUMNS if any(column in panel_cells for panel_cells in drawn)]
    shown = []
    for panel, panel_cells in zip(panels, drawn, strict=True):
        name = printable(panel.image_id)
        position = explored.index(name) if name in explored else None
        numbers = [classes.index(tag) + 1 for tag in panel.tags]
        tags = [label_of[number] for number in numbers]
        row = [(column, panel_cells.get(column)) for column in columns]
        shown.append(GalleryPanel(panel.image_id, position, tags, numbers, row))
    return GallerySplit(panels[0].split, "", columns, shown)


def _filters(splits: Iterable[GallerySplit], classes: Sequence[str]) -> list[tuple[int, Label]]:
    """Returns the labels of the classes that the gallery's filter offers; empty if there is only one class."""
    numbers: set[int] = set()
    for split in splits:
        for panel in split.panels:
            numbers.update(panel.numbers)
    label_of = labels(classes)
    return [(number, label_of[number]) for number in sorted(numbers)] if len(numbers) > 1 else []


def _training_plot_name(network: str) -> str:
    """Stem of the file that holds the training curves of a network."""
    return f"training-{re.sub(r'[^a-z0-9]', '_', network.lower())}"


def _summarize_training(network: str, log: plots.TrainingLog) -> TrainingSummary:
    """Summarizes a training with at least one record."""
    losses = log["loss"].tolist()
    last_twentieth = losses[-max(1, len(losses) // 20) :]
    first = f"{losses[0]:.3g}"
    last = f"{fmean(last_twentieth):.3g}"
    facts = [
        ("steps", format_count(int(log["step"][-1]))),
        ("epochs", f"{log['epoch'][-1]:.4g}"),
        ("loss", f"{first} → {last}"),
    ]
    precisions = _known(log, "val_map")
    if precisions:
        facts.append(("mAP on val tags", f"{precisions[-1]:.1f}"))
    speeds = _known(log, "images_per_second")
    if speeds:
        facts.append(("images per second", f"{median(speeds):,.0f}"))
    waits = _known(log, "waiting")
    if waits:
        facts.append(("waiting for data", percent(fmean(waits))))

    alt = f"Loss of the {network} over {len(losses)} records, from {first} to {last}"
    terms = plots.loss_terms(log)
    if terms:
        alt += f"; terms: {', '.join(terms)}"
    broken = not all(isfinite(loss) for loss in losses)
    return TrainingSummary(network, facts, _training_plot_name(network), alt, broken)


def _known(log: plots.TrainingLog, name: str) -> list[float]:
    """The values of a column without NaN."""
    column = log[name]
    known: list[float] = column[~np.isnan(column)].tolist()
    return known

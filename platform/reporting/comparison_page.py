"""Writes the page of a comparison as one self-contained file: tables, IoU per class, and images side by side.

Half of the images are those whose mIoU differs most between groups; the others are drawn at random. Names come from
users, so the template escapes everything. The content security policy of the page forbids loading or running anything.
"""

import datetime
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import decode_labels, read_label_mask, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.tables.shards import Shards
from mcis.models.counts import confusion
from mcis.models.metrics import iou, mean
from mcis.platform.outputs.counts import PLAIN, WITH_CRF
from mcis.platform.outputs.read_index import read_image_ids, truth_of_row
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.compared_runs import RunGroup
from mcis.platform.reporting.comparison import ComparedScore, Comparison
from mcis.platform.reporting.comparison_tables import Table, footnotes, page_tables
from mcis.platform.reporting.html import render
from mcis.platform.reporting.other_methods import MethodMasks, OtherMethod, find_masks
from mcis.platform.reporting.panels import CELL_HEIGHT, Cell, Label, Panel, cells, labels, legend
from mcis.platform.reporting.plots import MAX_BARS, THEME, Bars, iou_chart
from mcis.platform.runs.files import fingerprint, read_table, write_text
from mcis.platform.runs.results import IndexResult, read_result
from mcis.platform.runs.scores import SCORED_OUTPUTS

_MAX_NAME_BYTES = 120
"""Maximum number of bytes of the runs' names in the name of a page's file."""
_MAX_SIDE = 480
"""Longer side, in pixels, at which images are read: twice the size on the page."""


class GalleryCell(NamedTuple):
    """A picture of an image.

    Attributes:
        title: `image`, `truth`, or the label of the group whose output it shows.
        cell: The picture; None if there is none.
        note: Shown below the picture.
    """

    title: str
    cell: Cell | None
    note: str


class GalleryImage(NamedTuple):
    """An image with its pictures.

    Attributes:
        id: id of the image.
        tags: Its tags.
        why: Text with its split and the reason why it was chosen.
        cells: The photograph, the ground truth, and the output of every group and other method.
    """

    id: str
    tags: list[Label]
    why: str
    cells: list[GalleryCell]


class Gallery(NamedTuple):
    """Images with the outputs of several groups.

    Attributes:
        title: Name of the output.
        common: Number of images that all of these groups have.
        without: Labels of the groups that lack the output.
        methods: Names of the other methods that are shown.
        remarks: On masks of other methods that are missing or belong to no image.
        legend: The labels that occur.
        images: The chosen images.
    """

    title: str
    common: int
    without: list[str]
    methods: list[str]
    remarks: list[str]
    legend: list[Label]
    images: list[GalleryImage]


class IouChart(NamedTuple):
    """The IoU of each class in the groups.

    Attributes:
        title: What is scored.
        order: Names of the labels, those with the largest differences first.
        rows: The values of each group.
        plot: A bar chart of the first `MAX_BARS` labels.
    """

    title: str
    order: list[str]
    rows: list[Bars]
    plot: Any


def compared_images(comparison: Comparison, count: int, methods: Sequence[OtherMethod] = ()) -> list[Gallery]:
    """Chooses images for which every group has an output, and draws them. For each group, its first run is shown.

    Args:
        comparison: The comparison.
        count: Maximum number of images for each output; 0 for no galleries.
        methods: Other methods, whose masks are shown next to the segmentation. Images without them are not chosen.

    Returns:
        A gallery for each of the compared outputs: segmentation, pseudo masks, localization maps.

    Raises:
        UserError: The baseline's index, a photograph, a ground-truth mask or a method's mask cannot be read; or there
            are methods, but no images or no segmentation to show them with.
    """
    compared = {score.output for score in comparison.scores}
    if methods and not count:
        raise UserError("--with and --images 0", "images that show other methods", "leave one of them out")
    if methods and "segmentation" not in compared:
        raise UserError(
            f"{comparison.groups[0].label} has no scored segmentation, next to which --with shows masks",
            "runs that have finished the stage predict",
            "leave out --with, or repeat the run's command without --until",
        )
    if not count:
        return []

    galleries = []
    try:
        for output in reversed(SCORED_OUTPUTS):
            shown_methods = methods if output == "segmentation" else ()
            if output in compared and len(comparison.groups) + len(shown_methods) > 1:
                galleries.append(_make_gallery(comparison, output, count, shown_methods))
        return galleries
    except UserError as error:
        raise UserError(
            error.found, error.expected, f"{error.remedy}; or leave out the images with --images 0"
        ) from None


def choose_images(
    image_ids: Sequence[str], mious: Sequence[Mapping[str, float]], count: int, *, seed: int
) -> list[tuple[str, bool]]:
    """Chooses up to `count` images: half of them, rounded up, by the range of their mIoU, the others at random.

    The range of an image is the difference between its highest and its lowest mIoU. The largest range comes first;
    images with the same range are ordered by their ids. Images with a range of 0 are never chosen by their range. The
    random choice depends only on the seed and the position of the image.

    Args:
        image_ids: Sorted ids.
        mious: For each group, mIoU by image. An image that is missing or NaN in one of them has no range.
        count: Maximum number of images.
        seed: Seed of the random choice.

    Returns:
        The id of each chosen image, and whether it was chosen by its range.
    """
    values = np.array([[by_image.get(image_id, np.nan) for image_id in image_ids] for by_image in mious])
    ranges = values.max(axis=0) - values.min(axis=0)
    order = np.argsort(-np.nan_to_num(ranges), kind="stable")
    largest = [int(i) for i in order[: (count + 1) // 2] if ranges[i] > 0]

    draws = uniforms(DrawPurpose.COMPARED_IMAGES, seed, 0, np.arange(len(image_ids)))[:, 0]
    drawn = np.argsort(draws, kind="stable")
    others = [int(i) for i in drawn if i not in largest][: count - len(largest)]
    return [(image_ids[i], True) for i in largest] + [(image_ids[i], False) for i in others]


class _ShownOutput(NamedTuple):
    """The output of a group that a gallery shows: that of its first run.

    Attributes:
        group: The group.
        table: The output.
        mious: mIoU of the output by image id.
    """

    group: RunGroup
    table: Shards
    mious: Mapping[str, float]


class _Example(NamedTuple):
    """A chosen image.

    Attributes:
        panel: Its photograph and its ground truth, at the size on the page.
        size: Height and width of the image, pixels.
        truth: Its ground truth, (height, width); None if there is none.
    """

    panel: Panel
    size: tuple[int, int]
    truth: NDArray[np.uint8] | None


def _make_gallery(comparison: Comparison, output: str, count: int, methods: Sequence[OtherMethod]) -> Gallery:
    """Makes the gallery of an output; it has no images if there is nothing to compare the output with."""
    scored_output = SCORED_OUTPUTS[output]
    groups = [group for group in comparison.groups if scored_output.stage in group.runs[0].outputs]
    without = [group.label for group in comparison.groups if scored_output.stage not in group.runs[0].outputs]
    if len(groups) + len(methods) < min(2, len(comparison.groups)):
        return Gallery(scored_output.page_title, 0, [], [], [], [], [])

    shown = [_shown_output(comparison, output, group) for group in groups]
    image_ids = set.intersection(*(set(shown_output.table) for shown_output in shown))
    index_file = groups[0].runs[0].outputs["index"] / "index.parquet"
    method_masks = [find_masks(method, sorted(image_ids), read_image_ids(index_file)) for method in methods]
    for masks in method_masks:
        image_ids = image_ids.intersection(masks.files)
    compared_mious = [shown_output.mious for shown_output in shown if shown_output.mious]  # not all runs are compared
    chosen = dict(choose_images(sorted(image_ids), compared_mious, count, seed=comparison.bootstrap.seed))

    examples = _read_examples(comparison, list(chosen))
    images = []
    drawn_panels: list[Panel] = []
    for image_id, differs_most in chosen.items():
        example = examples[image_id]
        image, panels = _gallery_image(example, output, differs_most, shown, method_masks, comparison.classes)
        images.append(image)
        drawn_panels += panels

    remarks: list[str] = []
    for masks in method_masks:
        remarks += masks.remarks()
    return Gallery(
        title=scored_output.page_title,
        common=len(image_ids),
        without=without,
        methods=[method.name for method in methods],
        remarks=remarks,
        legend=legend(drawn_panels, comparison.classes),
        images=images,
    )


def _shown_output(comparison: Comparison, output: str, group: RunGroup) -> _ShownOutput:
    scored_output = SCORED_OUTPUTS[output]
    run = group.runs[0]
    table = Shards(run.outputs[str(scored_output.stage)] / scored_output.table)
    return _ShownOutput(group, table, _image_mious(comparison, output, run.name))


def _gallery_image(
    example: _Example,
    output: str,
    differs_most: bool,
    shown: Sequence[_ShownOutput],
    method_masks: Sequence[MethodMasks],
    classes: Sequence[str],
) -> tuple[GalleryImage, list[Panel]]:
    """Draws the pictures of an image.

    Args:
        example: The image.
        output: Key of `SCORED_OUTPUTS`.
        differs_most: Whether the image was chosen by the range of its mIoU.
        shown: The output of every group.
        method_masks: The masks of the other methods.
        classes: The K class names.

    Returns:
        The image with its pictures, and a panel for each output and mask that they show.
    """
    panel = example.panel
    image_cells = cells(panel, classes, CELL_HEIGHT)
    gallery_cells = [GalleryCell(column, image_cells.get(column), "") for column in ("image", "truth")]
    drawn_panels = []
    for group, table, mious in shown:
        with_output, variant = _with_output(panel, output, table)
        drawn_panels.append(with_output)
        cell = cells(with_output, classes, CELL_HEIGHT)[SCORED_OUTPUTS[output].picture]
        described = cell._replace(alt=f"{group.label}: {cell.alt}")
        note = _cell_note(group, variant, mious.get(panel.image_id, math.nan))
        gallery_cells.append(GalleryCell(group.label, described, note))
    for masks in method_masks:
        with_mask, miou = _with_method_mask(example, masks.files[panel.image_id], classes)
        drawn_panels.append(with_mask)
        cell = cells(with_mask, classes, CELL_HEIGHT)["pseudo mask"]  # may have ignored pixels
        described = cell._replace(alt=f"{masks.method.name}: mask of {panel.image_id}")
        note = "" if math.isnan(miou) else f"mIoU here {miou:.1f}"
        gallery_cells.append(GalleryCell(masks.method.name, described, note))

    why = f"{panel.split}, {'differs most' if differs_most else 'drawn at random'}"
    return GalleryImage(panel.image_id, _tag_labels(panel, classes), why, gallery_cells), drawn_panels


def _cell_note(group: RunGroup, variant: str, miou: float) -> str:
    notes = []
    if len(group.runs) > 1:
        notes.append(group.runs[0].name)
    if variant:
        notes.append(variant)
    if not math.isnan(miou):
        notes.append(f"mIoU here {miou:.1f}")
    return ", ".join(notes)


def _tag_labels(panel: Panel, classes: Sequence[str]) -> list[Label]:
    by_label = labels(classes)
    return [by_label[classes.index(name) + 1] for name in panel.tags]


def _image_mious(comparison: Comparison, output: str, run: str) -> Mapping[str, float]:
    """mIoU of a run by image id, for the shown variant of an output: with the CRF if the run has it."""
    by_title = {score.title: score.image_mious for score in comparison.scores if score.output == output}
    for variant in reversed(SCORED_OUTPUTS[output].variants):
        mious = by_title.get(variant.title, {})
        if run in mious:
            return mious[run]
    return {}


def _read_examples(comparison: Comparison, image_ids: Sequence[str]) -> dict[str, _Example]:
    """Reads the photographs and the ground truth of images in the index of the baseline."""
    classes = comparison.classes
    columns = ["image_id", "uri", "split", "tags", "mask_uri", "height", "width"]
    folder = comparison.groups[0].runs[0].outputs["index"]
    value_range = read_result(folder, IndexResult).value_range
    index = read_table(folder / "index.parquet", columns)
    examples = {}
    for row in index.filter(pc.is_in(index["image_id"], pc.cast(list(image_ids), "string"))).to_pylist():
        image_id = row["image_id"]
        photograph = read_rgb(row["uri"], max_side=_MAX_SIDE, value_range=value_range)
        truth = None
        shown_truth = None
        if row["mask_uri"]:
            truth = truth_of_row(row, len(classes))
            shown_truth = resize_labels(truth, *photograph.shape[:2])
        tags = tuple(classes[k] for k in row["tags"])
        panel = Panel(image_id=image_id, split=row["split"], tags=tags, image=photograph, truth=shown_truth)
        examples[image_id] = _Example(panel, (row["height"], row["width"]), truth)
    return examples


def _with_method_mask(example: _Example, file: Path, classes: Sequence[str]) -> tuple[Panel, float]:
    """Adds the mask of another method to a panel; returns the panel and the mask's mIoU, NaN if it has none."""
    mask = read_label_mask(str(file), example.size, len(classes)).labels
    miou = math.nan
    if example.truth is not None and (mask != IGNORE).all():
        miou = mean(iou(confusion(example.truth, mask, len(classes))))
    return replace(example.panel, pseudo_mask=resize_labels(mask, *example.panel.image.shape[:2])), miou


def _with_output(panel: Panel, output: str, table: Shards) -> tuple[Panel, str]:
    """Adds an output of a run to a panel; returns the panel and which variant of the segmentation it shows."""
    if output == "localization_maps":
        return replace(panel, maps=image_maps(table, panel.image_id)), ""

    [row] = table.rows(panel.image_id).to_pylist()
    size = panel.image.shape[:2]
    if output == "pseudo_masks":
        return replace(panel, pseudo_mask=resize_labels(decode_labels(row["labels"]), *size)), ""
    prediction = resize_labels(decode_labels(row["crf"] or row["plain"]), *size)
    return replace(panel, prediction=prediction), WITH_CRF if row["crf"] else PLAIN


def default_file(groups: Sequence[RunGroup]) -> Path:
    """Default file of the page, in the workspace of the first run.

    The name joins the runs' names by `~`, which no run's name contains. A fingerprint distinguishes long names, and
    runs of several workspaces.
    """
    runs = list(itertools.chain.from_iterable(group.runs for group in groups))
    names = "~".join(",".join(run.folder.path.name for run in group.runs) for group in groups)
    prefix = names.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    if prefix != names or len({run.workspace.root for run in runs}) > 1:
        paths = [[str(run.folder.path) for run in group.runs] for group in groups]
        names = f"{prefix}-{fingerprint(paths)}"
    return runs[0].workspace.comparisons / f"{names}.html"


def write_page(
    comparison: Comparison, galleries: Sequence[Gallery], file: Path, *, first_tables: Sequence[Table] = ()
) -> None:
    """Writes the page. An existing file is overwritten.

    Args:
        comparison: The comparison.
        galleries: Result of `compared_images`.
        file: The file to write.
        first_tables: Tables that the page shows before those of the comparison.
    """
    group_labels = [group.label for group in comparison.groups]
    view = {
        "created": f"{datetime.datetime.now(datetime.UTC):%d %B %Y, %H:%M UTC}".lstrip("0"),
        "comparison": comparison,
        "tables": [*first_tables, *page_tables(comparison)[::-1]],
        "notes": footnotes(comparison),
        "charts": [_make_chart(score, group_labels) for score in comparison.scores],
        "max_bars": MAX_BARS,
        "label_of": {label.name: label for label in labels(comparison.classes).values()},
        "galleries": galleries,
        "theme": THEME,
    }
    write_text(file, render("comparison_page.html.j2", view))


def _make_chart(score: ComparedScore, group_labels: list[str]) -> IouChart:
    """Makes the chart of IoU by class; classes whose IoU differs most between the groups come first."""
    rows = []
    for group in score.groups:
        scores = group.scores(score.title)
        ious = {name: _mean_of_present(run_score.iou[name] for run_score in scores) for name in scores[0].iou}
        miou = fmean(run_score.miou for run_score in scores)
        rows.append(Bars(group.label, ious, miou, group_labels.index(group.label)))

    def spread(name: str) -> float:
        values = [row.iou[name] for row in rows]
        present = [value for value in values if value is not None]
        return max(present) - min(present) if present else -1.0

    order = sorted(rows[0].iou, key=spread, reverse=True)
    return IouChart(score.title, order, rows, iou_chart(order[:MAX_BARS], rows))


def _mean_of_present(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are not None; None if there are none."""
    present = [value for value in values if value is not None]
    return fmean(present) if present else None

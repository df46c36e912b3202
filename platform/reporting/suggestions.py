"""Suggests which pseudo masks to correct first: masks that differ most from the predictions, weighted by class."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import UnreachableFile, UserError
from mcis.datasets.formats.data_set import LabeledImage
from mcis.datasets.images.decode import DecodedImage
from mcis.datasets.images.label_masks import decode_labels, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.sources.photographs import Photograph
from mcis.datasets.tables.shards import Shards
from mcis.models.counts import confusion
from mcis.platform.networks.predictor import Prediction, PredictionInput, Predictor
from mcis.platform.outputs.corrected_masks import CORRECTED
from mcis.platform.outputs.read_index import open_index, rows_in_split
from mcis.platform.reporting.export import check_objects, export_objects
from mcis.platform.reporting.files import csv_table, file_names, stage_table, write_bytes
from mcis.platform.reporting.html import render
from mcis.platform.reporting.panels import CELL_HEIGHT, Panel, cells, labels, legend
from mcis.platform.reporting.photographs import Rejects, mask_name, predict_photographs
from mcis.platform.reporting.plots import THEME
from mcis.platform.runs.files import read_table
from mcis.platform.runs.progress import counted
from mcis.platform.runs.workspace import Workspace


class Suggestion(NamedTuple):
    """A training image whose pseudo mask should be corrected.

    Attributes:
        row: The image's row of the index.
        need: Estimate of how much a correction can change, see `suggest_images`.
        worst: Class index of the tag that adds most to `need`.
    """

    row: dict[str, Any]
    need: float
    worst: int


class Suggestions(NamedTuple):
    """Result of `suggest_images`.

    Attributes:
        images: The images, the largest need first.
        rejected: Images that cannot be read at present, and the reasons.
    """

    images: list[Suggestion]
    rejected: list[tuple[str, str]]


class _PredictedSuggestion(NamedTuple):
    """A suggestion whose mask is predicted.

    Attributes:
        suggestion: The suggestion.
        photograph: The image's file, and the name of the files that are written for it.
    """

    suggestion: Suggestion
    photograph: Photograph


class WrittenSuggestions(NamedTuple):
    """Result of `write_suggestions`.

    Attributes:
        description: Description of what was written.
        rejected: Number of images that were left out, because they cannot be read.
    """

    description: str
    rejected: int


def suggest_images(workspace: Workspace, name: str, predictor: Predictor, count: int) -> Suggestions:
    """Ranks the training images of a run by how much they need a corrected mask, without using any ground truth.

    The need of an image is a sum over its tags: the number of pixels that have the class in the pseudo mask or in the
    prediction, but not in both, divided by the number of pixels of the class in all pseudo masks. It estimates how much
    a correction can change the IoU of the class. An image that cannot be read at present is left out.

    Args:
        workspace: The workspace of the run.
        name: Name of the run.
        predictor: The segmentation network of the run.
        count: Maximum number of images.

    Raises:
        UserError: The run has no pseudo masks, all masks are corrected, an image is missing or was changed, or several
            images in a row cannot be read at present.
    """
    table = stage_table(workspace, name, "pseudo_masks", "masks")
    masks = Shards(table, ["labels"])
    rows = _uncorrected_rows(workspace, name, table)
    rejects = Rejects(len(rows))

    def read() -> Iterator[PredictionInput[dict[str, Any]]]:
        for row in rows:
            try:
                rgb = read_rgb(
                    row["uri"],
                    max_side=predictor.max_side,
                    content_hash=row["content_hash"],
                    value_range=predictor.value_range,
                )
            except UnreachableFile as error:
                rejects.add_unreachable(row["uri"], error)
                continue
            rejects.note_readable()
            yield PredictionInput(row, DecodedImage(rgb, row["height"], row["width"]))

    def compare(row: dict[str, Any], prediction: Prediction) -> tuple[dict[str, Any], NDArray[np.int64]]:
        mask = masks.rows(row["image_id"])
        pseudo_mask = resize_labels(decode_labels(mask["labels"][0].as_py()), row["height"], row["width"])
        return row, confusion(pseudo_mask, prediction.labels(), len(predictor.classes))

    differing_pixels: list[tuple[dict[str, Any], NDArray[np.int64]]] = []
    class_pixels = np.zeros(len(predictor.classes), np.int64)
    for row, matrix in counted(predictor.map(read(), compare), "suggest", len(rows)):
        class_pixels += matrix.sum(axis=1)[1:]
        differing = matrix.sum(axis=0) + matrix.sum(axis=1) - 2 * matrix.diagonal()
        differing_pixels.append((row, differing[np.array(row["tags"]) + 1]))

    suggestions = []
    for row, pixels in differing_pixels:
        needs = pixels / class_pixels[row["tags"]].clip(min=1)
        suggestions.append(Suggestion(row, float(needs.sum()), row["tags"][int(needs.argmax())]))
    suggestions.sort(key=lambda suggestion: suggestion.need, reverse=True)
    return Suggestions(suggestions[:count], rejects.rows)


def _uncorrected_rows(workspace: Workspace, name: str, table: Path) -> list[dict[str, Any]]:
    """Index rows of the tagged training images without a corrected mask. Raises UserError if there are none."""
    cues = read_table(table, ["image_id", "cue"])
    uncorrected = cues.filter(pc.not_equal(cues["cue"], CORRECTED))["image_id"].combine_chunks()
    tagged: pa.Table = rows_in_split(open_index(workspace, name).index, "train", tagged=True)
    rows: list[dict[str, Any]] = tagged.filter(pc.is_in(tagged["image_id"], uncorrected)).to_pylist()
    if not rows:
        raise UserError(f"all masks of run {name!r} are corrected", "masks to correct", "add images to the run")
    return rows


def write_suggestions(
    workspace: Workspace,
    name: str,
    predictor: Predictor,
    *,
    count: int,
    out: Path,
    format: str | None = None,
    min_area: int = 1,
) -> WrittenSuggestions:
    """Writes the images of `suggest_images`, with predicted masks from which corrections can start.

        suggested.csv     images, the largest need first: mask file, need in percent, the class that adds most to it
        suggested.html    page that shows them
        <format>/         the masks as objects of at least `min_area` pixels, if `format` is given
        masks/, ...       files of `predict_photographs`, with predictions restricted to the tags of the images

    Images that cannot be read at present are left out and listed in rejects.csv.

    Args:
        workspace: The workspace of the run.
        name: Name of the run.
        predictor: The segmentation network of the run.
        count: Maximum number of images.
        out: The folder to write to.
        format: One of `EXPORT_FORMATS`, for the objects; None for no objects.
        min_area: Smallest number of pixels of an object.

    Raises:
        UserError: As in `suggest_images`; an image id cannot be a file name; or the folders exist already.
    """
    masks_folder = out / "masks"
    if masks_folder.exists():
        raise UserError(
            f"{masks_folder} exists, and may contain corrected masks",
            "a folder in which it does not exist",
            "choose another --out, or move it away",
        )
    check_objects(format, out / format if format else out, min_area)

    suggestions, unreadable = suggest_images(workspace, name, predictor, count)
    predicted, rejected = _predict_suggestions(predictor, suggestions, out, unreadable)
    _write_table(out / "suggested.csv", predicted, predictor.classes)
    page = _render_page(workspace, name, predictor, predicted, out)
    write_bytes(out / "suggested.html", page.encode())

    order = f"in the order of {out / 'suggested.html'} and .csv"
    description = f"{len(predicted)} masks to correct below {masks_folder}, {order}"
    if format:
        images = _labeled_images(predicted, out, predictor.value_range)
        description += f"; {export_objects(format, predictor.classes, images, out / format, min_area)}"
    return WrittenSuggestions(description, len(rejected))


def _predict_suggestions(
    predictor: Predictor, suggestions: Sequence[Suggestion], out: Path, rejected_before: Sequence[tuple[str, str]]
) -> tuple[list[_PredictedSuggestion], list[tuple[str, str]]]:
    """Predicts the suggested images among their tags, see `predict_photographs`.

    Returns:
        The images that could be read, and all rows of rejects.csv.
    """
    names = file_names((suggestion.row["image_id"] for suggestion in suggestions), out)
    candidates = []
    for suggestion in suggestions:
        photograph = Photograph(suggestion.row["uri"], names[suggestion.row["image_id"]])
        candidates.append(_PredictedSuggestion(suggestion, photograph))

    photographs = [candidate.photograph for candidate in candidates]
    tags = {suggestion.row["uri"]: suggestion.row["tags"] for suggestion in suggestions}
    rejected = predict_photographs(predictor, photographs, out, tags, rejected_before)
    unread = {uri for uri, _ in rejected}
    return [candidate for candidate in candidates if candidate.photograph.uri not in unread], rejected


def _labeled_images(
    predicted: Sequence[_PredictedSuggestion], out: Path, value_range: ValueRange | None
) -> Iterator[LabeledImage]:
    """Yields the images with their predicted masks, from the files of the masks."""
    for suggestion, photograph in predicted:
        mask = decode_labels((out / mask_name(photograph)).read_bytes())
        yield LabeledImage(photograph.uri, suggestion.row["content_hash"], photograph.name, mask, value_range)


def _write_table(file: Path, predicted: Sequence[_PredictedSuggestion], classes: Sequence[str]) -> None:
    """Writes suggested.csv."""
    rows = []
    for suggestion, photograph in predicted:
        worst = classes[suggestion.worst]
        rows.append((suggestion.row["image_id"], mask_name(photograph), f"{100 * suggestion.need:.3f}", worst))
    write_bytes(file, csv_table(["image", "mask", "need %", "class"], rows))


def _render_page(
    workspace: Workspace, name: str, predictor: Predictor, predicted: Sequence[_PredictedSuggestion], out: Path
) -> str:
    """Renders a page with each image, its pseudo mask, and its prediction among its tags, from the file of the mask."""
    classes = predictor.classes
    masks = Shards(stage_table(workspace, name, "pseudo_masks", "masks"), ["labels"])
    panels = []
    shown = []
    for suggestion, photograph in predicted:
        row = suggestion.row
        image = read_rgb(
            row["uri"], max_side=2 * CELL_HEIGHT, content_hash=row["content_hash"], value_range=predictor.value_range
        )
        pseudo_mask = decode_labels(masks.rows(row["image_id"])["labels"][0].as_py())
        prediction = decode_labels((out / mask_name(photograph)).read_bytes())
        size = image.shape[:2]
        panel = Panel(
            image_id=row["image_id"],
            split="train",
            tags=tuple(classes[tag] for tag in row["tags"]),
            image=image,
            pseudo_mask=resize_labels(pseudo_mask, *size),
            prediction=resize_labels(prediction, *size),
        )
        panels.append(panel)
        shown.append((suggestion, panel, cells(panel, classes, CELL_HEIGHT)))
    view = {"name": name, "labels": labels(classes), "legend": legend(panels, classes), "shown": shown, "theme": THEME}
    return render("suggestions_page.html.j2", view)

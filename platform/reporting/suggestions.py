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
from mcis.platform.reporting.photographs import Rejects, predict_photographs
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
    order = np.argsort([-suggestion.need for suggestion in suggestions], kind="stable")[:count]
    return Suggestions([suggestions[i] for i in order.tolist()], rejects.rows)


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

    suggestions, rejected = suggest_images(workspace, name, predictor, count)
    names = file_names((suggestion.row["image_id"] for suggestion in suggestions), out)
    photographs = []
    tags = {}
    for suggestion in suggestions:
        uri = suggestion.row["uri"]
        photographs.append(Photograph(uri, names[suggestion.row["image_id"]]))
        tags[uri] = suggestion.row["tags"]
    rejected = predict_photographs(predictor, photographs, out, tags, rejected)
    unread = {uri for uri, _ in rejected}
    suggestions = [suggestion for suggestion in suggestions if suggestion.row["uri"] not in unread]
    photographs = [photograph for photograph in photographs if photograph.uri not in unread]

    mask_names = [f"masks/{photograph.name}.png" for photograph in photographs]
    mask_files = [out / mask_name for mask_name in mask_names]
    _write_table(out / "suggested.csv", suggestions, mask_names, predictor.classes)
    page = _render_page(workspace, name, predictor, suggestions, mask_files)
    write_bytes(out / "suggested.html", page.encode())

    order = f"in the order of {out / 'suggested.html'} and .csv"
    description = f"{len(suggestions)} masks to correct below {masks_folder}, {order}"
    if not format:
        return WrittenSuggestions(description, len(rejected))

    def labeled_images() -> Iterator[LabeledImage]:
        for suggestion, photograph, file in zip(suggestions, photographs, mask_files, strict=True):
            content_hash = suggestion.row["content_hash"]
            mask = decode_labels(file.read_bytes())
            yield LabeledImage(photograph.uri, content_hash, photograph.name, mask, predictor.value_range)

    description += f"; {export_objects(format, predictor.classes, labeled_images(), out / format, min_area)}"
    return WrittenSuggestions(description, len(rejected))


def _write_table(
    file: Path, suggestions: Sequence[Suggestion], mask_names: Sequence[str], classes: Sequence[str]
) -> None:
    """Writes suggested.csv."""
    rows = []
    for suggestion, mask_name in zip(suggestions, mask_names, strict=True):
        worst = classes[suggestion.worst]
        rows.append((suggestion.row["image_id"], mask_name, f"{100 * suggestion.need:.3f}", worst))
    write_bytes(file, csv_table(["image", "mask", "need %", "class"], rows))


def _render_page(
    workspace: Workspace, name: str, predictor: Predictor, suggestions: Sequence[Suggestion], mask_files: Sequence[Path]
) -> str:
    """Renders a page with each image, its pseudo mask, and its prediction among its tags, from the file of the mask."""
    classes = predictor.classes
    masks = Shards(stage_table(workspace, name, "pseudo_masks", "masks"), ["labels"])
    panels = []
    for (row, _, _), mask_file in zip(suggestions, mask_files, strict=True):
        image = read_rgb(
            row["uri"], max_side=2 * CELL_HEIGHT, content_hash=row["content_hash"], value_range=predictor.value_range
        )
        pseudo_mask = decode_labels(masks.rows(row["image_id"])["labels"][0].as_py())
        prediction = decode_labels(mask_file.read_bytes())
        size = image.shape[:2]
        panels.append(
            Panel(
                image_id=row["image_id"],
                split="train",
                tags=tuple(classes[tag] for tag in row["tags"]),
                image=image,
                pseudo_mask=resize_labels(pseudo_mask, *size),
                prediction=resize_labels(prediction, *size),
            )
        )
    shown = [
        (suggestion, panel, cells(panel, classes, CELL_HEIGHT))
        for suggestion, panel in zip(suggestions, panels, strict=True)
    ]
    view = {"name": name, "labels": labels(classes), "legend": legend(panels, classes), "shown": shown, "theme": THEME}
    return render("suggestions_page.html.j2", view)

"""Which masks to correct first: those whose pixels the network disagrees with most, class by class."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.images.decode import Picture, decode_labels, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.sources.photographs import Photograph
from mcis.datasets.tables.shards import Shards
from mcis.models.counts import confusion
from mcis.platform.networks.predictor import Photo, Prediction, Predictor
from mcis.platform.outputs.corrected_masks import CORRECTED
from mcis.platform.outputs.read_index import open_index, rows_in_split
from mcis.platform.reporting.export import export_objects
from mcis.platform.reporting.files import csv_table, names_of, table_of, write_bytes
from mcis.platform.reporting.html import render
from mcis.platform.reporting.panels import CELL_HEIGHT, Panel, cells, labels, legend
from mcis.platform.reporting.photographs import predict_photographs
from mcis.platform.reporting.plots import THEME
from mcis.platform.runs.files import read_table
from mcis.platform.runs.progress import counted
from mcis.platform.runs.workspace import Workspace


class Suggestion(NamedTuple):
    """A training image whose mask is worth correcting.

    Attributes:
        row: of the index.
        need: sum over its tags of what `suggestions` says.
        worst: the class, index from 0, that adds most to it.
    """

    row: dict[str, Any]
    need: float
    worst: int


def suggestions(workspace: Workspace, name: str, predictor: Predictor, count: int) -> list[Suggestion]:
    """The training images of a run whose masks most need to be corrected, those first that need it most.

    A tag adds the pixels of the class that the pseudo mask and the network do not share, divided by those that it has
    in all pseudo masks: about what a correction may change of the class's IoU. No ground truth is looked at.

    Raises:
        UserError: the run has no pseudo masks, or all masks are corrected.
    """
    table, classes = table_of(workspace, name, "pseudo_masks", "masks"), len(predictor.classes)
    cues, masks = read_table(table, ["image_id", "cue"]), Shards(table, ["labels"])
    left = cues.filter(pc.not_equal(cues["cue"], CORRECTED))["image_id"].combine_chunks()
    rows = rows_in_split(open_index(workspace, name).index, "train", tagged=True)
    rows = rows.filter(pc.is_in(rows["image_id"], left)).to_pylist()
    if not rows:
        raise UserError(f"all masks of run {name!r} are corrected", "some that are not", "add images to the run")

    def read() -> Iterator[Photo[dict[str, Any]]]:
        for row in rows:
            rgb = read_rgb(row["uri"], max_side=predictor.max_side, content_hash=row["content_hash"])
            yield Photo(row, Picture(rgb, row["height"], row["width"]))

    def compare(row: dict[str, Any], prediction: Prediction) -> NDArray[np.int64]:
        mask = masks.rows(row["image_id"])
        labels = resize_labels(decode_labels(mask["labels"][0].as_py()), row["height"], row["width"])
        return confusion(labels, prediction.labels(), classes)

    unshared, taught = list[NDArray[np.int64]](), np.zeros(classes, np.int64)
    for row, matrix in counted(zip(rows, predictor.map(read(), compare), strict=True), "suggest", len(rows)):
        taught += matrix.sum(axis=1)[1:]
        apart = matrix.sum(axis=0) + matrix.sum(axis=1) - 2 * matrix.diagonal()
        unshared.append(apart[np.array(row["tags"]) + 1])
    needs = [pixels / taught[row["tags"]].clip(min=1) for row, pixels in zip(rows, unshared, strict=True)]
    order = np.argsort([-need.sum() for need in needs], kind="stable")[:count]
    return [Suggestion(rows[i], float(needs[i].sum()), rows[i]["tags"][int(needs[i].argmax())]) for i in order.tolist()]


def write_suggestions(
    workspace: Workspace, name: str, predictor: Predictor, count: int, out: Path, format: str | None = None
) -> str:
    """Writes masks to begin from, of what `suggestions` names; returns what it wrote, in words.

    Beside what `predict_photographs` writes, of the network among the images' tags, `suggested.csv`: the images, those
    first that need it most, each with its mask's file, its need in percent, and the class that adds most to it;
    `suggested.html`, a page of them; and in a folder `<format>` the masks as objects in one of OBJECTS.

    Raises:
        UserError: as `suggestions`; an image id cannot be a file's name; or there are masks already.
    """
    for place in filter(Path.exists, (out / "masks", out / (format or "masks"))):
        there = f"{place} is there, and may hold masks that were corrected"
        raise UserError(there, "a folder without it", "name another --out, or move it away")
    if format == "coco":
        require_module("pycocotools.mask")  # before the network is at work for minutes
    found = suggestions(workspace, name, predictor, count)
    names = names_of((each.row["image_id"] for each in found), out)
    photographs = [Photograph(each.row["uri"], names[each.row["image_id"]]) for each in found]
    predict_photographs(predictor, photographs, out, {each.row["uri"]: each.row["tags"] for each in found})
    rows = [
        (each.row["image_id"], f"masks/{photo.name}.png", f"{100 * each.need:.3f}", predictor.classes[each.worst])
        for each, photo in zip(found, photographs, strict=True)
    ]
    write_bytes(out / "suggested.csv", csv_table(["image", "mask", "need %", "class"], rows))
    masks = [decode_labels((out / mask).read_bytes()) for _, mask, _, _ in rows]
    write_bytes(out / "suggested.html", _page(workspace, name, predictor.classes, found, masks).encode())
    said = f"{len(found)} masks to correct below {out / 'masks'}, in the order of {out / 'suggested.html'} and .csv"
    if not format:
        return said
    labelled = ((each.row, photo.name, mask) for each, photo, mask in zip(found, photographs, masks, strict=True))
    return f"{said}; {export_objects(format, predictor.classes, labelled, out / format)}"


def _page(
    workspace: Workspace, name: str, classes: Sequence[str], found: list[Suggestion], predicted: list[NDArray[np.uint8]]
) -> str:
    """A page of what was found: each image, its pseudo mask, and the network's among its tags."""
    masks, panels = Shards(table_of(workspace, name, "pseudo_masks", "masks"), ["labels"]), list[Panel]()
    for (row, _, _), mask in zip(found, predicted, strict=True):
        image = read_rgb(row["uri"], max_side=2 * CELL_HEIGHT, content_hash=row["content_hash"])
        taught = decode_labels(masks.rows(row["image_id"])["labels"][0].as_py())
        both = [resize_labels(each, *image.shape[:2]) for each in (taught, mask)]
        about = {"image_id": row["image_id"], "split": "train", "tags": tuple(classes[tag] for tag in row["tags"])}
        panels.append(Panel(**about, image=image, pseudo_mask=both[0], prediction=both[1]))
    shown = [(*each, panel, cells(panel, classes, CELL_HEIGHT)) for each, panel in zip(found, panels, strict=True)]
    view = {"name": name, "labels": labels(classes), "legend": legend(panels, classes), "shown": shown, "theme": THEME}
    return render("suggestions_page.html.j2", view)

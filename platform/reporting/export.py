"""Exports parts of a run: localization maps with overlays, pseudo masks, predictions, the network."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.formats.data_set import LabeledImage
from mcis.datasets.formats.exporting import COPYING_FORMATS, EXPORT_FORMATS, export_data_set
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.images.label_masks import decode_labels, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.tables.shards import Shards
from mcis.models.localization import score_maps
from mcis.platform.networks.exported import export_network, export_onnx, export_pretrained
from mcis.platform.networks.trained_segmenter import DEFAULT_MAX_SIDE
from mcis.platform.outputs.read_index import open_index
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.files import (
    class_file_names,
    csv_table,
    file_names,
    labels_table,
    stage_table,
    table_rows,
    write_all,
    write_bytes,
    write_masked_photograph,
)
from mcis.platform.reporting.html import encode
from mcis.platform.reporting.panels import heat_picture
from mcis.platform.reporting.wsss_files import WSSS_MAP_FORMATS, export_scored_maps, export_wsss_masks
from mcis.platform.runs.files import disk_errors
from mcis.platform.runs.progress import console, counted
from mcis.platform.runs.workspace import Workspace


class _LabelTable(NamedTuple):
    """A table of label masks, which can be exported as objects.

    Attributes:
        stage: The stage that writes the table.
        table: Name of the table.
    """

    stage: str
    table: str


def export(
    workspace: Workspace, name: str, output: str, out: Path, format: str | None = None, min_area: int = 1
) -> str:
    """Exports one kind of output of a run.

    Args:
        workspace: The workspace of the run.
        name: Name of the run.
        output: The kind of output, one of `EXPORTS`.
        out: File or folder to write.
        format: One of `formats_of(output)`; None for the default format.
        min_area: Smallest number of pixels of an object; smaller regions are left out.

    Returns:
        A description of what was written.

    Raises:
        UserError: `output` is unknown or cannot be written in the format, the format has no objects that a `min_area`
            could leave out, the run has not finished the stage, or an image
            id cannot be a file name below the folder.
    """
    if output not in EXPORTS:
        raise UserError(f"export {output}", f"one of {', '.join(EXPORTS)}", "choose one of them")

    if format is not None and format not in formats_of(output):
        expected = ", ".join(formats_of(output))
        raise UserError(
            f"format {format} of {output}",
            f"one of {expected}" if expected else "no --format",
            "choose another by --format",
        )
    if format is None or format not in EXPORT_FORMATS:
        check_objects(None, out, min_area)
        write = EXPORTS[output] if format is None else _FORMATS[output][format]
        return write(workspace, name, out)
    check_objects(format, out, min_area)

    classes = open_index(workspace, name, ["split"]).classes
    return export_objects(format, classes, _labeled_images(workspace, name, output, out), out, min_area)


def formats_of(output: str) -> tuple[str, ...]:
    """Names of the formats of a kind of output; empty if it has only one."""
    return (*_FORMATS.get(output, ()), *(EXPORT_FORMATS if output in _LABEL_TABLES else ()))


def check_objects(format: str | None, out: Path, min_area: int) -> None:
    """Checks that objects can be written, before masks are computed.

    Args:
        format: One of `EXPORT_FORMATS`; None if no objects are written.
        out: Folder to write.
        min_area: Smallest number of pixels of an object.

    Raises:
        UserError: There is a smallest area but no format, the folder contains files, or the format needs a library that
            is not installed.
    """
    if format is None:
        if min_area > 1:
            raise UserError(
                "a smallest area of objects without a format that has objects",
                f"--format {', '.join(EXPORT_FORMATS)}",
                "add --format, or leave out --min-area",
            )
        return
    if out.is_dir() and any(out.iterdir()):
        raise UserError(
            f"{out} contains files",
            "a new folder, so that two exports are not mixed",
            "remove it if they are those of an interrupted export, or choose another --out",
        )
    if format == "coco":
        require_module("pycocotools.mask")


def export_objects(
    format: str, classes: Sequence[str], images: Iterable[LabeledImage], out: Path, min_area: int = 1
) -> str:
    """Writes label masks as objects in one of `EXPORT_FORMATS`; returns a description of what was written.

    A note says if the written files name images that are not copied by other names than those of their files.
    """
    renamed: list[str] = []

    def noted() -> Iterator[LabeledImage]:
        for image in images:
            if not image.is_named_by_path:
                renamed.append(image.file_name)
            yield image

    with disk_errors(out):
        count = export_data_set(format, classes, noted(), out, min_area)
    if renamed and format not in COPYING_FORMATS:
        console.print(
            f"note: {len(renamed)} image(s) are named by their ids, not by the paths of their files: "
            f"{join_shortened(renamed)}. Before the objects are imported again, copy the images under these names, or "
            f"choose a format that copies them: {', '.join(COPYING_FORMATS)}"
        )
    smallest = f" of at least {min_area} pixels" if min_area > 1 else ""
    return f"{count} objects, connected regions{smallest} of a class, below {out}"


def export_maps(workspace: Workspace, name: str, out: Path) -> str:
    """Writes localization maps, each clipped at 0 and divided by its maximum, regardless of `maps.scale`.

    Maps of another program are written as given.

        <id>/<class>.png            8-bit gray at the image's size
        <id>/<class>.overlay.jpg    in color over the image, at most DEFAULT_MAX_SIDE pixels a side

    Returns:
        A description of what was written.
    """
    index = open_index(workspace, name, ["image_id", "uri", "height", "width", "content_hash"])
    shards = Shards(stage_table(workspace, name, "localize", "maps"))
    names = file_names(shards, out)
    class_names = list(class_file_names(index.classes, out).values())
    rows = {row["image_id"]: row for row in index.index.to_pylist()}

    def write(row: dict[str, Any]) -> int:
        shown = read_rgb(
            row["uri"], max_side=DEFAULT_MAX_SIDE, content_hash=row["content_hash"], value_range=index.value_range
        )
        return _write_maps(shards, row, Image.fromarray(shown), class_names, out / names[row["image_id"]])

    count = write_all((rows[image_id] for image_id in shards), write, label="export maps", total=len(names))
    return f"{count} maps below {out}"


def _write_maps(
    shards: Shards, row: dict[str, Any], shown: Image.Image, class_names: Sequence[str], folder: Path
) -> int:
    """Writes the maps of an image, and overlays of the size of `shown`; returns their number."""
    image_map = image_maps(shards, row["image_id"])
    activations = torch.from_numpy(image_map.maps)
    maps = score_maps(activations, image_map.grids, image_map.export_scale, row["height"], row["width"]).numpy()
    for class_index, heat in zip(image_map.classes.tolist(), maps, strict=True):
        name = class_names[class_index]
        gray = Image.fromarray((heat * 255).round().astype(np.uint8))
        overlay = heat_picture(shown, heat[None], [class_index + 1])
        write_bytes(folder / f"{name}.png", encode(gray, "PNG"))
        write_bytes(folder / f"{name}.overlay.jpg", encode(overlay, "JPEG"))
    return len(maps)


def export_predictions(workspace: Workspace, name: str, out: Path) -> str:
    """Writes predictions, refined by the CRF if the run uses one.

        <id>.png      palette PNG at the image's size
        labels.csv    class and color of each label

    Returns:
        A description of what was written.
    """
    table = stage_table(workspace, name, "predict", "predictions")
    write_bytes(out / "labels.csv", labels_table(open_index(workspace, name, ["split"]).classes))
    names = file_names((row["image_id"] for row in table_rows(table, ["image_id"])), out)

    def write(row: dict[str, Any]) -> int:
        write_bytes(out / f"{names[row['image_id']]}.png", row["crf"] or row["plain"])
        return 1

    count = write_all(table_rows(table), write, label="export predictions", total=len(names))
    return f"{count} predictions below {out}"


def export_masks(workspace: Workspace, name: str, out: Path) -> str:
    """Writes pseudo masks and their images as a VOC devkit.

        VOCdevkit/VOC2012/JPEGImages/<id>.jpg            the image: a copy of an upright JPEG; others are converted
        VOCdevkit/VOC2012/SegmentationClass/<id>.png     palette PNG at the image's size, 255 = ignore
        VOCdevkit/VOC2012/ImageSets/Segmentation/train.txt   <id> per line
        labels.csv                                       class and color of each label
        cues.csv                                         image, background cue of its mask, <id>

    An <id> is the image's id without the suffix of an image file; for a path or a URI, the part after its root. Masks
    that are smaller than the image (`data.max_side`) are resized by nearest neighbor.

    Returns:
        A description of what was written.

    Raises:
        UserError: The run has no pseudo masks, an id cannot be a file name, or an image is missing.
    """
    index = open_index(workspace, name)
    table = stage_table(workspace, name, "pseudo_masks", "masks")
    devkit = out / "VOCdevkit" / "VOC2012"
    masked = list(table_rows(table, ["image_id", "cue"]))
    names = file_names((row["image_id"] for row in masked), out)
    images = {row["image_id"]: row for row in index.index.to_pylist()}

    def write(row: dict[str, Any]) -> int:
        file_name = names[row["image_id"]]
        image = images[row["image_id"]]
        photograph = devkit / "JPEGImages" / f"{file_name}.jpg"
        mask = devkit / "SegmentationClass" / f"{file_name}.png"
        write_masked_photograph(image, row["mask"], photograph, mask, index.value_range)
        return 1

    with disk_errors(out):
        count = write_all(table_rows(table, ["image_id", "mask"]), write, label="export masks", total=len(masked))

    image_list = "".join(f"{names[row['image_id']]}\n" for row in masked)
    write_bytes(devkit / "ImageSets" / "Segmentation" / "train.txt", image_list.encode())
    write_bytes(out / "labels.csv", labels_table(index.classes))
    cues = ((row["image_id"], row["cue"], names[row["image_id"]]) for row in masked)
    write_bytes(out / "cues.csv", csv_table(["image", "cue", "name"], cues))
    return f"{count} images and their pseudo masks in {devkit}"


def _labeled_images(workspace: Workspace, name: str, output: str, out: Path) -> Iterator[LabeledImage]:
    """Yields each image with its pseudo mask or prediction, and shows the progress."""
    label_table = _LABEL_TABLES[output]
    table = stage_table(workspace, name, label_table.stage, label_table.table)
    names = file_names((row["image_id"] for row in table_rows(table, ["image_id"])), out)
    index = open_index(workspace, name)
    images = {row["image_id"]: row for row in index.index.to_pylist()}
    for row in counted(table_rows(table), f"export {output}", len(names)):
        image = images[row["image_id"]]
        content = row.get("mask") or row.get("crf") or row["plain"]
        labels = resize_labels(decode_labels(content), image["height"], image["width"])
        yield LabeledImage(image["uri"], image["content_hash"], names[row["image_id"]], labels, index.value_range)


EXPORTS: Mapping[str, Callable[[Workspace, str, Path], str]] = {
    "maps": export_maps,
    "masks": export_masks,
    "predictions": export_predictions,
    "network": export_network,
    "onnx": export_onnx,
    "pretrained": export_pretrained,
}
"""Kinds of output that can be exported, and the functions that write them and return a description."""
_FORMATS: Mapping[str, Mapping[str, Callable[[Workspace, str, Path], str]]] = {
    "maps": {format: functools.partial(export_scored_maps, format=format) for format in WSSS_MAP_FORMATS},
    "masks": {"voc": export_masks, "wsss": export_wsss_masks},
    "predictions": {"png": export_predictions},
}
"""Formats by kind of output, and the functions that write them and return a description."""
_LABEL_TABLES = {"masks": _LabelTable("pseudo_masks", "masks"), "predictions": _LabelTable("predict", "predictions")}
"""Kinds of output that can be exported as objects in `EXPORT_FORMATS`, too."""

"""What `mcis export` writes of a run: maps with overlays, pseudo masks, predictions, the network, a submission."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_labels, encode_labels, lies_upright_as_jpeg, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.uris import is_remote
from mcis.datasets.tables.shards import Shards
from mcis.models.localization import score_maps
from mcis.platform.networks.exported import export_network, export_onnx, export_pretrained
from mcis.platform.outputs.read_index import open_index
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.files import csv_table, labels_table, names_of, rows_of, table_of, write_all, write_bytes
from mcis.platform.reporting.html import encode
from mcis.platform.reporting.panels import heat_picture
from mcis.platform.reporting.voc_server import export_submission
from mcis.platform.runs.files import written_aside
from mcis.platform.runs.workspace import Workspace

_QUALITY = 95
"""Of the JPEGs that images of other formats become."""


def export(workspace: Workspace, name: str, what: str, out: Path) -> str:
    """Writes a part of a run to `out`, a file or a folder; returns what it wrote, in words.

    Raises:
        UserError: `what` is none of EXPORTS, the run has not come so far, or an image id would lead out of the folder.
    """
    if what not in EXPORTS:
        raise UserError(f"export {what}", f"one of {', '.join(EXPORTS)}", "choose one of them")
    return EXPORTS[what](workspace, name, out)


def export_maps(workspace: Workspace, name: str, out: Path) -> str:
    """Writes `<id>/<class>.png`, 8-bit gray at the image's size, and `<id>/<class>.overlay.jpg`.

    Each map is clipped at 0 and divided by its maximum, for any `maps.scale`.
    """
    index = open_index(workspace, name, ["image_id", "uri", "height", "width"])
    shards = Shards(table_of(workspace, name, "localize", "maps"))
    names, files = names_of(shards, out), list(names_of(index.classes, out, what="class(es)").values())
    rows = {row["image_id"]: row for row in index.index.to_pylist()}
    count = write_all(
        (rows[image_id] for image_id in shards),
        lambda row: _write_maps(shards, row, files, out / names[row["image_id"]]),
        label="export maps",
        total=len(names),
    )
    return f"{count} maps below {out}"


def _write_maps(shards: Shards, row: dict[str, Any], files: Sequence[str], folder: Path) -> int:
    found = image_maps(shards, row["image_id"])
    assert found is not None, f"no localization map of {row['image_id']} in its own table"
    activations = torch.from_numpy(found.maps)
    maps = score_maps(activations, found.grids, "maximum", row["height"], row["width"]).numpy()
    image = Image.fromarray(read_rgb(row["uri"]))
    for k, heat in zip(found.classes.tolist(), maps, strict=True):
        name = files[k]
        gray = Image.fromarray((heat * 255).round().astype(np.uint8))
        write_bytes(folder / f"{name}.png", encode(gray, "PNG"))
        write_bytes(folder / f"{name}.overlay.jpg", encode(heat_picture(image, heat[None], [k + 1]), "JPEG"))
    return len(maps)


def export_predictions(workspace: Workspace, name: str, out: Path) -> str:
    """Writes `<id>.png`, palette PNGs, after the CRF where there is one, and `labels.csv`."""
    table = table_of(workspace, name, "predict", "predictions")
    write_bytes(out / "labels.csv", labels_table(open_index(workspace, name, ["split"]).classes))
    names = names_of((row["image_id"] for row in rows_of(table, ["image_id"])), out)

    def write(row: dict[str, Any]) -> int:
        write_bytes(out / f"{names[row['image_id']]}.png", row["crf"] or row["plain"])
        return 1

    count = write_all(rows_of(table), write, label="export predictions", total=len(names))
    return f"{count} predictions below {out}"


def export_masks(workspace: Workspace, name: str, out: Path) -> str:
    """Writes the pseudo masks of a run and their images; returns what it wrote, in words.

        VOCdevkit/VOC2012/JPEGImages/<id>.jpg            a hard link to the image where it is an upright JPEG of this
                                                         disk, a copy of one elsewhere; others are converted
        VOCdevkit/VOC2012/SegmentationClass/<id>.png     palette PNG at the image's size, 255 = ignore
        VOCdevkit/VOC2012/ImageSets/Segmentation/train.txt   <id> per line
        labels.csv, cues.csv                             which label is which class, and its color; of each image its
                                                         <id> and the background cue of its mask

    An <id> is the image's id, of a path or a URI what follows its root. Masks that were made smaller (`data.max_side`)
    are brought to the image's size by nearest neighbor.

    Raises:
        UserError: the run has no pseudo masks, an id cannot be a file's name, or an image is gone.
    """
    index, table = open_index(workspace, name), table_of(workspace, name, "pseudo_masks", "masks")
    devkit = out / "VOCdevkit" / "VOC2012"
    masked = list(rows_of(table, ["image_id", "cue"]))
    names = names_of((row["image_id"] for row in masked), out)
    images = {row["image_id"]: row for row in index.index.select(["image_id", "uri", "height", "width"]).to_pylist()}

    def write(row: dict[str, Any]) -> int:
        named, image = names[row["image_id"]], images[row["image_id"]]
        _write_image(image["uri"], devkit / "JPEGImages" / f"{named}.jpg")
        labels = resize_labels(decode_labels(row["mask"]), image["height"], image["width"])
        write_bytes(devkit / "SegmentationClass" / f"{named}.png", encode_labels(labels))
        return 1

    count = write_all(rows_of(table, ["image_id", "mask"]), write, label="export masks", total=len(masked))
    lists = devkit / "ImageSets" / "Segmentation"
    write_bytes(lists / "train.txt", "".join(f"{names[row['image_id']]}\n" for row in masked).encode())
    write_bytes(out / "labels.csv", labels_table(index.classes))
    rows = ((row["image_id"], row["cue"], names[row["image_id"]]) for row in masked)
    write_bytes(out / "cues.csv", csv_table(["image", "cue", "name"], rows))
    return f"{count} images and their pseudo masks in {devkit}"


def _write_image(uri: str, path: Path) -> None:
    """An image as a JPEG that lies as its mask does: readers apply no EXIF orientation."""
    if not _is_usable(uri):
        stream = BytesIO()
        Image.fromarray(read_rgb(uri)).save(stream, "JPEG", quality=_QUALITY, subsampling=0)
        write_bytes(path, stream.getvalue())
    elif is_remote(uri):
        write_bytes(path, read_bytes(uri))
    else:
        with written_aside(path, durable=False) as aside:
            try:
                os.link(os.path.realpath(uri), aside)
            except OSError:  # another disk, or one without links
                shutil.copyfile(uri, aside)


def _is_usable(uri: str) -> bool:
    try:
        return lies_upright_as_jpeg(read_bytes(uri))
    except (OSError, ValueError):
        return False  # reading it will say why


EXPORTS: Mapping[str, Callable[[Workspace, str, Path], str]] = {
    "maps": export_maps,
    "masks": export_masks,
    "predictions": export_predictions,
    "network": export_network,
    "onnx": export_onnx,
    "pretrained": export_pretrained,
    "voc-server": export_submission,
}
"""What is exported, and the function that writes it."""

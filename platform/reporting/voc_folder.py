"""Pseudo masks -> a VOC devkit, which other trainers read as it is: torchvision's VOCSegmentation, mmsegmentation."""

import os
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from mcis.datasets.images.decode import decode_labels, encode_labels, lies_upright_as_jpeg, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.uris import is_remote
from mcis.platform.outputs.read_index import open_index
from mcis.platform.reporting.files import csv_table, labels_table, names_of, rows_of, table_of, write_all, write_bytes
from mcis.platform.runs.files import written_aside
from mcis.platform.runs.workspace import Workspace

_QUALITY = 95
"""Of the JPEGs that images of other formats become."""


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
        mask = _at_size(row["mask"], image["height"], image["width"])
        write_bytes(devkit / "SegmentationClass" / f"{named}.png", mask)
        return 1

    count = write_all(rows_of(table, ["image_id", "mask"]), write, label="export masks", total=len(masked))
    lists = devkit / "ImageSets" / "Segmentation"
    write_bytes(lists / "train.txt", "".join(f"{names[row['image_id']]}\n" for row in masked).encode())
    write_bytes(out / "labels.csv", labels_table(index.classes))
    rows = ((row["image_id"], row["cue"], names[row["image_id"]]) for row in masked)
    write_bytes(out / "cues.csv", csv_table(["image", "cue", "name"], rows))
    return f"{count} images and their pseudo masks in {devkit}"


def _at_size(png: bytes, height: int, width: int) -> bytes:
    labels = decode_labels(png)
    return png if labels.shape == (height, width) else encode_labels(resize_labels(labels, height, width))


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

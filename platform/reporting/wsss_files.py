"""Writes localization maps and pseudo masks as the repositories for weakly supervised segmentation read them."""

import io
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.tables.shards import Shards
from mcis.models.localization import score_maps
from mcis.platform.outputs.read_index import open_index
from mcis.platform.outputs.tables import ImageMaps, image_maps
from mcis.platform.reporting.files import (
    file_names,
    labels_table,
    stage_table,
    table_rows,
    write_all,
    write_bytes,
    write_masked_photograph,
)
from mcis.platform.reporting.html import encode
from mcis.platform.runs.files import disk_errors
from mcis.platform.runs.workspace import Workspace

_STRIDE = 4
"""Pixels per position of the maps `cam` of IRN."""
_VOC_ID = re.compile(r"[1-9]\d{3}_\d{6}")
"""Id of an image of VOC, which IRN reads as an integer."""


class SizedMaps(NamedTuple):
    """The localization maps of an image, and the size of the image.

    Attributes:
        maps: The maps of its C tags.
        height, width: Size of the image's file after its EXIF orientation, pixels.
    """

    maps: ImageMaps
    height: int
    width: int

    @property
    def keys(self) -> NDArray[np.int64]:
        """Class indices of the maps, counted from 0, (C,)."""
        return self.maps.classes

    def scores(self, stride: int = 1) -> NDArray[np.float32]:
        """Returns the maps at the pixels of the image, or at every `stride`-th, (C, H, W).

        Each map is clipped at 0 and divided by its maximum. `maps.scale` is not used. Maps of another program are as
        given, clipped to [0, 1].
        """
        height = -(-self.height // stride)
        width = -(-self.width // stride)
        activations = torch.from_numpy(self.maps.maps)
        return np.asarray(score_maps(activations, self.maps.grids, self.maps.export_scale, height, width).numpy())


Files: TypeAlias = Mapping[str, bytes]
"""Content of the files of an image by what follows the image's name, such as `.npy`."""


def _irn(maps: SizedMaps) -> Files:
    """IRN, AdvCAM, ReCAM: `cam` at every fourth pixel is a tensor, because IRN moves it to the GPU as it is."""
    cam = torch.from_numpy(maps.scores(_STRIDE))
    return {".npy": _pickled({"keys": maps.keys, "cam": cam, "high_res": maps.scores()})}


def _psa(maps: SizedMaps) -> Files:
    """PSA, SEAM, MCTformer, S2C: a map by class index."""
    return {".npy": _pickled(dict(zip(maps.keys.tolist(), maps.scores(), strict=True)))}


def _clip_es(maps: SizedMaps) -> Files:
    """CLIP-ES: maps in half precision."""
    return {".npy": _pickled({"keys": maps.keys, "attn_highres": maps.scores().astype(np.float16)})}


def _png(maps: SizedMaps) -> Files:
    """OAA, L2G: a gray picture of each map."""
    pictures = (maps.scores() * 255).round().astype(np.uint8)
    keys = maps.keys.tolist()
    return {f"_{key}.png": encode(Image.fromarray(gray), "PNG") for key, gray in zip(keys, pictures, strict=True)}


WSSS_MAP_FORMATS: Mapping[str, Callable[[SizedMaps], Files]] = {
    "irn": _irn,
    "psa": _psa,
    "clip-es": _clip_es,
    "png": _png,
}
"""Formats of localization maps, and the functions that make the files of an image."""


def _pickled(value: object) -> bytes:
    """Returns a `.npy` file of one Python object, as `numpy.save` writes it, for every version of NumPy.

    NumPy 2 names its module `numpy._core` in pickles; NumPy 1 before 1.26 knows only `numpy.core`, which NumPy 2 reads
    too. The repositories were written for NumPy 1.
    """
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "|O", "fortran_order": False, "shape": ()})
    pickled = pickle.dumps(np.array(value, dtype=object), protocol=3)  # names modules as text that ends with \n
    content.write(pickled.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    return content.getvalue()


def export_scored_maps(workspace: Workspace, name: str, out: Path, format: str) -> str:
    """Writes localization maps in one of `WSSS_MAP_FORMATS`.

    Args:
        workspace: The workspace of the run.
        name: Name of the run.
        out: Folder to write, with `labels.csv`: class index k is label k + 1.
        format: The format.

    Returns:
        A description of what was written.
    """
    index = open_index(workspace, name, ["image_id", "height", "width"])
    shards = Shards(stage_table(workspace, name, "localize", "maps"))
    names = file_names(shards, out)
    rows = {row["image_id"]: row for row in index.index.to_pylist()}
    make_files = WSSS_MAP_FORMATS[format]

    def write(image_id: str) -> int:
        row = rows[image_id]
        sized = SizedMaps(image_maps(shards, image_id), row["height"], row["width"])
        for suffix, content in make_files(sized).items():
            write_bytes(out / f"{names[image_id]}{suffix}", content)
        return len(sized.keys)

    with disk_errors(out):
        count = write_all(shards, write, label="export maps", total=len(names))
    write_bytes(out / "labels.csv", labels_table(index.classes))
    return f"{count} maps of {len(names)} images below {out}"


def export_wsss_masks(workspace: Workspace, name: str, out: Path) -> str:
    """Writes pseudo masks, tags and lists for the second stage of other repositories.

        VOC2012/SegmentationClassAug/<id>.png                palette PNG at the image's size, 255 = ignore
        VOC2012/JPEGImages/<id>.jpg                          the image: a copy of an upright JPEG; others are converted
        VOC2012/ImageSets/SegmentationAug/train_aug.txt      `/JPEGImages/<id>.jpg /SegmentationClassAug/<id>.png`
        train_aug.txt                                        <id> per line
        cls_labels.npy                                       tags by <id>, K float32 each
        labels.csv                                           class and color of each label

    The keys of `cls_labels.npy` are the ids, and for ids of VOC such as 2007_000032 also the integers 2007000032, by
    which IRN reads them.

    Returns:
        A description of what was written.

    Raises:
        UserError: The run has no pseudo masks, an id cannot be a file name or has a space, or an image is missing.
    """
    index = open_index(workspace, name)
    table = stage_table(workspace, name, "pseudo_masks", "masks")
    names = file_names((row["image_id"] for row in table_rows(table, ["image_id"])), out)
    _check_spaces(list(names.values()))
    images = {row["image_id"]: row for row in index.index.to_pylist()}
    root = out / "VOC2012"

    def write(row: dict[str, Any]) -> int:
        file_name = names[row["image_id"]]
        photograph = root / "JPEGImages" / f"{file_name}.jpg"
        mask = root / "SegmentationClassAug" / f"{file_name}.png"
        write_masked_photograph(images[row["image_id"]], row["mask"], photograph, mask, index.value_range)
        return 1

    with disk_errors(out):
        count = write_all(table_rows(table, ["image_id", "mask"]), write, label="export masks", total=len(names))

    pairs = [f"/JPEGImages/{file_name}.jpg /SegmentationClassAug/{file_name}.png\n" for file_name in names.values()]
    write_bytes(root / "ImageSets" / "SegmentationAug" / "train_aug.txt", "".join(pairs).encode())
    write_bytes(out / "train_aug.txt", "".join(f"{file_name}\n" for file_name in names.values()).encode())
    tags = {file_name: images[image_id]["tags"] for image_id, file_name in names.items()}
    write_bytes(out / "cls_labels.npy", _pickled(_tag_vectors(tags, len(index.classes))))
    write_bytes(out / "labels.csv", labels_table(index.classes))
    return f"{count} images, their pseudo masks and their tags below {out}"


def _check_spaces(names: list[str]) -> None:
    """Raises UserError if the name of a file has a space, which separates the two columns of a list."""
    spaced = [name for name in names if " " in name]
    if spaced:
        raise UserError(
            f"{len(spaced)} of {len(names)} image ids have a space: {join_shortened(spaced)}",
            "ids without spaces, which separate the columns of train_aug.txt",
            "rename the images, or give the table a column `id`; or export --format voc, whose list has one column",
        )


def _tag_vectors(tags: Mapping[str, list[int]], classes: int) -> dict[str | int, NDArray[np.float32]]:
    """Returns the tags of images as vectors of K zeros and ones, by file name and by the integer of an id of VOC."""
    vectors: dict[str | int, NDArray[np.float32]] = {}
    for name, indices in tags.items():
        vector = np.zeros(classes, np.float32)
        vector[indices] = 1
        vectors[name] = vector
        if _VOC_ID.fullmatch(name):
            vectors[int(name.replace("_", ""))] = vector
    return vectors

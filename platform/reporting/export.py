"""What `mcis export` writes of a run: maps with overlays, pseudo masks, predictions, the network."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

import numpy as np
import torch
from contourpy import FillType, contour_generator
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from mcis.datasets.classes import BACKGROUND, IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.images.decode import decode_labels, encode_labels, is_upright_jpeg, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.tables.shards import Shards
from mcis.models.localization import score_maps
from mcis.platform.networks.exported import export_network, export_onnx, export_pretrained
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
)
from mcis.platform.reporting.html import encode
from mcis.platform.reporting.panels import heat_picture
from mcis.platform.runs.files import write_json
from mcis.platform.runs.progress import counted
from mcis.platform.runs.workspace import Workspace

_Labelled = tuple[dict[str, Any], str, NDArray[np.uint8]]
"""An image's row of the index, a name for its files, and its labels (H, W)."""
_QUALITY = 95
"""Of the JPEGs that images of other formats become."""


def export(workspace: Workspace, name: str, what: str, out: Path, format: str | None = None) -> str:
    """Writes a part of a run to `out`, a file or a folder; returns what it wrote, in words. UserError where `what` is
    none of EXPORTS or has no such format, the run has not come so far, or an image id would lead out of the folder."""
    if what not in EXPORTS:
        raise UserError(f"export {what}", f"one of {', '.join(EXPORTS)}", "choose one of them")
    usual = _LABELS[what][0] if what in _LABELS else None
    if format in (None, usual):
        return EXPORTS[what](workspace, name, out)
    if usual is None or format not in OBJECTS:
        expected = f"one of {usual}, {', '.join(OBJECTS)}" if usual else "no format"
        raise UserError(f"format {format} of {what}", expected, "choose another by --format")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} holds files", "a new folder, as two exports would mix", "remove it, or name another")
    classes = open_index(workspace, name, ["split"]).classes
    return export_objects(format, classes, _labelled(workspace, name, what, out), out)


def export_objects(format: str, classes: Sequence[str], labelled: Iterable[_Labelled], out: Path) -> str:
    """Writes label masks as objects in a format of OBJECTS to a folder; returns what it wrote, in words."""
    return f"{OBJECTS[format](classes, labelled, out)} objects, connected regions of a class, below {out}"


def export_maps(workspace: Workspace, name: str, out: Path) -> str:
    """Writes `<id>/<class>.png`, 8-bit gray at the image's size, and `<id>/<class>.overlay.jpg`.

    Each map is clipped at 0 and divided by its maximum, for any `maps.scale`.
    """
    index = open_index(workspace, name, ["image_id", "uri", "height", "width", "content_hash"])
    shards = Shards(stage_table(workspace, name, "localize", "maps"))
    names = file_names(shards, out)
    files = list(class_file_names(index.classes, out).values())
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
    activations = torch.from_numpy(found.maps)
    maps = score_maps(activations, found.grids, "maximum", row["height"], row["width"]).numpy()
    image = Image.fromarray(read_rgb(row["uri"], content_hash=row["content_hash"]))
    for k, heat in zip(found.classes.tolist(), maps, strict=True):
        name = files[k]
        gray = Image.fromarray((heat * 255).round().astype(np.uint8))
        write_bytes(folder / f"{name}.png", encode(gray, "PNG"))
        write_bytes(folder / f"{name}.overlay.jpg", encode(heat_picture(image, heat[None], [k + 1]), "JPEG"))
    return len(maps)


def export_predictions(workspace: Workspace, name: str, out: Path) -> str:
    """Writes `<id>.png`, palette PNGs, after the CRF where there is one, and `labels.csv`."""
    table = stage_table(workspace, name, "predict", "predictions")
    write_bytes(out / "labels.csv", labels_table(open_index(workspace, name, ["split"]).classes))
    names = file_names((row["image_id"] for row in table_rows(table, ["image_id"])), out)

    def write(row: dict[str, Any]) -> int:
        write_bytes(out / f"{names[row['image_id']]}.png", row["crf"] or row["plain"])
        return 1

    count = write_all(table_rows(table), write, label="export predictions", total=len(names))
    return f"{count} predictions below {out}"


def export_masks(workspace: Workspace, name: str, out: Path) -> str:
    """Writes the pseudo masks of a run and their images; returns what it wrote, in words.

        VOCdevkit/VOC2012/JPEGImages/<id>.jpg            a copy of the image where it is an upright JPEG; others are
                                                         converted
        VOCdevkit/VOC2012/SegmentationClass/<id>.png     palette PNG at the image's size, 255 = ignore
        VOCdevkit/VOC2012/ImageSets/Segmentation/train.txt   <id> per line
        labels.csv, cues.csv                             which label is which class, and its color; of each image its
                                                         <id> and the background cue of its mask

    An <id> is the image's id, of a path or a URI what follows its root. Masks that were made smaller (`data.max_side`)
    are brought to the image's size by nearest neighbor.

    Raises:
        UserError: the run has no pseudo masks, an id cannot be a file's name, or an image is gone.
    """
    index, table = open_index(workspace, name), stage_table(workspace, name, "pseudo_masks", "masks")
    devkit = out / "VOCdevkit" / "VOC2012"
    masked = list(table_rows(table, ["image_id", "cue"]))
    names = file_names((row["image_id"] for row in masked), out)
    images = {row["image_id"]: row for row in index.index.to_pylist()}

    def write(row: dict[str, Any]) -> int:
        named, image = names[row["image_id"]], images[row["image_id"]]
        _write_image(image, devkit / "JPEGImages" / f"{named}.jpg")
        labels = resize_labels(decode_labels(row["mask"]), image["height"], image["width"])
        write_bytes(devkit / "SegmentationClass" / f"{named}.png", encode_labels(labels))
        return 1

    count = write_all(table_rows(table, ["image_id", "mask"]), write, label="export masks", total=len(masked))
    lists = devkit / "ImageSets" / "Segmentation"
    write_bytes(lists / "train.txt", "".join(f"{names[row['image_id']]}\n" for row in masked).encode())
    write_bytes(out / "labels.csv", labels_table(index.classes))
    rows = ((row["image_id"], row["cue"], names[row["image_id"]]) for row in masked)
    write_bytes(out / "cues.csv", csv_table(["image", "cue", "name"], rows))
    return f"{count} images and their pseudo masks in {devkit}"


def _write_image(row: dict[str, Any], path: Path) -> None:
    """An image as a JPEG that lies as its mask does: readers apply no EXIF orientation."""
    with contextlib.suppress(OSError, ValueError):  # where it cannot be read, or was changed, `read_rgb` says so
        content = read_bytes(row["uri"])
        if is_upright_jpeg(content) and hashlib.sha256(content).hexdigest() == row["content_hash"]:
            write_bytes(path, content)
            return
    stream, image = BytesIO(), Image.fromarray(read_rgb(row["uri"], content_hash=row["content_hash"]))
    image.save(stream, "JPEG", quality=_QUALITY, subsampling=0)
    write_bytes(path, stream.getvalue())


def _file_name(row: dict[str, Any], named: str) -> str:
    """An image's id, with the suffix of its file."""
    suffix = os.path.splitext(row["uri"].partition("?")[0])[1]
    return named if named.endswith(suffix) else named + suffix


def export_coco(classes: Sequence[str], labelled: Iterable[_Labelled], out: Path) -> int:
    """Writes `annotations.json`: objects in run lengths; `file_name` is as of `_file_name`."""
    runs_of, images, objects = require_module("pycocotools.mask"), list[dict[str, Any]](), list[dict[str, Any]]()
    for row, named, labels in labelled:
        image = {"id": len(images) + 1, "file_name": _file_name(row, named)}
        images.append(image | {"height": row["height"], "width": row["width"]})
        for label, region in _regions(labels):
            runs = runs_of.encode(np.asfortranarray(region.astype(np.uint8)))
            about = {"id": len(objects) + 1, "image_id": image["id"], "category_id": label, "iscrowd": 0}
            about |= {"area": int(runs_of.area(runs)), "bbox": runs_of.toBbox(runs).tolist()}
            objects.append(about | {"segmentation": runs | {"counts": runs["counts"].decode()}})
    categories = [{"id": label, "name": each} for label, each in enumerate(classes, 1)]
    write_json(out / "annotations.json", {"images": images, "categories": categories, "annotations": objects})
    return len(objects)


def export_cvat(classes: Sequence[str], labelled: Iterable[_Labelled], out: Path) -> int:
    """Writes `annotations.xml`, `CVAT for images`: objects as masks, in run lengths of their boxes, row by row."""
    root, count = ElementTree.Element("annotations"), 0
    ElementTree.SubElement(root, "version").text = "1.1"
    known = functools.reduce(ElementTree.SubElement, ("meta", "task", "labels"), root)
    for name in classes:
        ElementTree.SubElement(ElementTree.SubElement(known, "label"), "name").text = name
    for number, (row, named, labels) in enumerate(labelled):
        about: dict[str, Any] = {"id": number, "name": _file_name(row, named)}
        about |= {"width": labels.shape[1], "height": labels.shape[0]}
        image = ElementTree.SubElement(root, "image", {name: str(value) for name, value in about.items()})
        for label, region in _regions(labels):
            ys, xs = (np.flatnonzero(region.any(axis=axis)) for axis in (1, 0))
            inside = region[ys[0] : ys[-1] + 1, xs[0] : xs[-1] + 1].ravel()
            runs = np.diff([0, *np.flatnonzero(np.diff(inside)) + 1, len(inside)]).tolist()
            about = {"label": classes[label - 1], "rle": ", ".join(map(str, [0, *runs] if inside[0] else runs))}
            about |= {"left": xs[0], "top": ys[0], "width": xs[-1] - xs[0] + 1, "height": ys[-1] - ys[0] + 1}
            about |= {"occluded": 0, "z_order": 0, "source": "auto"}
            ElementTree.SubElement(image, "mask", {name: str(value) for name, value in about.items()})
            count += 1
    write_bytes(out / "annotations.xml", ElementTree.tostring(root, "utf-8", xml_declaration=True))
    return count


def export_yolo(classes: Sequence[str], labelled: Iterable[_Labelled], out: Path) -> int:
    """Writes `labels/<id>.txt`, polygons through the outermost pixels of objects, `images/<id>.jpg` and `data.yaml`."""
    count = 0
    for row, name, labels in labelled:
        named = re.sub(r"(?<![^/])(_*images)(?=/)", r"_\1", name)  # readers swap a path's last `images` for `labels`
        polygons = [(label - 1, (_outline(region) + 0.25) / labels.shape[::-1]) for label, region in _regions(labels)]
        lines = [f"{k} {' '.join(f'{value:.6f}' for value in polygon.flat)}\n" for k, polygon in polygons]
        write_bytes(out / "labels" / f"{named}.txt", "".join(lines).encode())
        _write_image(row, out / "images" / f"{named}.jpg")
        count += len(lines)
    names = json.dumps(list(classes))  # is YAML as well
    write_bytes(
        out / "data.yaml",
        f"train: images\nval: images  # the same: name others for honest scores\nnames: {names}\n".encode(),
    )
    return count


def export_label_studio(classes: Sequence[str], labelled: Iterable[_Labelled], out: Path) -> int:
    """Writes `tasks.json`, whose predictions are polygons within half a pixel of objects; `images/<id>.jpg`, which the
    local storage of Label Studio has, its root being `out`; and `labels.xml`, the labeling interface."""
    tasks = list[dict[str, Any]]()
    for row, named, labels in labelled:
        height, width = labels.shape
        shape = {"from_name": "label", "to_name": "image", "original_width": width, "original_height": height}
        result = []
        for label, region in _regions(labels):
            corners = (_outline(region.repeat(2, 0).repeat(2, 1)) + 0.5) * (50 / width, 50 / height)  # percent
            value = {"points": corners.tolist(), "closed": True, "polygonlabels": [classes[label - 1]]}
            result.append({**shape, "type": "polygonlabels", "value": value})
        image = {"image": f"/data/local-files/?d=images/{quote(named)}.jpg"}
        tasks.append({"data": image, "predictions": [{"model_version": "mcis", "result": result}]})
        _write_image(row, out / "images" / f"{named}.jpg")
    write_json(out / "tasks.json", tasks)
    names = "".join(f"<Label value={quoteattr(name)}/>" for name in classes)
    shown = f'<Image name="image" value="$image"/><PolygonLabels name="label" toName="image">{names}</PolygonLabels>'
    write_bytes(out / "labels.xml", f"<View>{shown}</View>\n".encode())
    return sum(len(task["predictions"][0]["result"]) for task in tasks)


def _labelled(workspace: Workspace, name: str, what: str, out: Path) -> Iterator[_Labelled]:
    """Each image of a table of labels, with the progress shown."""
    table = stage_table(workspace, name, *_LABELS[what][1:])
    names = file_names((row["image_id"] for row in table_rows(table, ["image_id"])), out)
    images = {row["image_id"]: row for row in open_index(workspace, name).index.to_pylist()}
    for row in counted(table_rows(table), f"export {what}", len(names)):
        image = images[row["image_id"]]
        labels = decode_labels(row.get("mask") or row.get("crf") or row["plain"])
        yield image, names[row["image_id"]], resize_labels(labels, image["height"], image["width"])


def _regions(labels: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """The regions of a label mask (H, W), each connected by 4 neighbors: its label, and its pixels (H, W)."""
    for label in sorted({*np.unique(labels).tolist()} - {BACKGROUND, IGNORE}):
        regions, _ = ndimage.label(labels == label)
        for number, at in enumerate(ndimage.find_objects(regions), 1):
            region = np.zeros(labels.shape, bool)
            region[at] = regions[at] == number
            yield label, region


def _outline(region: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The pixels (N, 2), x and y, that a polygon leads through which is the region when it is filled with its border.

    A hole is joined to what lies left of its leftmost pixel, by a seam that is walked in both directions.
    """
    contours: Any = contour_generator(z=np.pad(region, 1).astype(float), fill_type=FillType.OuterOffset)
    (points,), (starts,) = contours.filled(0.99, 2.0)  # 0.99: nearly through the centers of the border's pixels
    loops = [(np.rint(points[a : b - 1]) - 1).astype(int).tolist() for a, b in itertools.pairwise(starts)]
    polygon = loops[0]
    for hole in sorted(loops[1:], key=min):
        x, y = min(hole)
        start, gaps = hole.index([x, y]), np.flatnonzero(~region[y, :x])
        seam = [int(gaps[-1]) + 1 if len(gaps) else 0, y]
        at = polygon.index(seam)
        polygon[at:at] = [seam, *hole[start:], *hole[:start], [x, y]]
    corners = np.array(polygon)
    steps = np.diff(corners, axis=0, prepend=corners[-1:])
    corners = corners[(steps != np.roll(steps, -1, axis=0)).any(axis=1)] if steps.any() else corners
    return np.resize(corners, (max(3, len(corners)), 2))


EXPORTS: Mapping[str, Callable[[Workspace, str, Path], str]] = {
    "maps": export_maps,
    "masks": export_masks,
    "predictions": export_predictions,
    "network": export_network,
    "onnx": export_onnx,
    "pretrained": export_pretrained,
}
"""What is exported, and the function that writes it."""
OBJECTS = {"coco": export_coco, "cvat": export_cvat, "yolo": export_yolo, "labelstudio": export_label_studio}
"""How masks and predictions are written as objects; the functions return how many there are."""
_LABELS = {"masks": ("voc", "pseudo_masks", "masks"), "predictions": ("png", "predict", "predictions")}
"""What can be written as objects: the format in which EXPORTS writes it, the stage that leaves it, and its table."""

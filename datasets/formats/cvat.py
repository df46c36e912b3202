"""Reads and writes data sets in the format `CVAT for images`."""

import functools
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.formats.data_set import (
    AnnotatedObject,
    DataSet,
    Draw,
    ExportRequest,
    Format,
    ImportRequest,
    Photos,
    naming,
    write_file,
)
from mcis.datasets.formats.outlines import cvat_pixels, pixel_polygon_pixels
from mcis.datasets.formats.regions import Region, connected_regions


def read_cvat(request: ImportRequest) -> DataSet:
    """Reads an XML file of images with tags, boxes, polygons and masks."""
    folder = (request.images or request.source.parent).resolve()
    photos: Photos = {}
    images = list(ElementTree.fromstring(request.source.read_bytes()).iter("image"))
    chosen_subset = _chosen_subset(request.source, images, folder)

    for image in images:
        name = image.attrib["name"]
        size = (int(float(image.attrib["height"])), int(float(image.attrib["width"])))
        subset = image.get("subset", folder.name)
        if subset != chosen_subset:
            request.left_out[f"image(s) of subset {subset}, for {chosen_subset}"] += 1
            continue
        if name in photos:
            raise ValueError(f"two images are named {name}")
        with naming(name):
            photos[name] = [_annotated_object(shape, size) for shape in image]

    return DataSet(folder, photos)


def _chosen_subset(source: Path, images: Iterable[ElementTree.Element], folder: Path) -> str:
    """Returns the subset whose images are read: the one that is named like the folder of the images, or the only one.

    Images without a subset count as images of the folder.

    Raises:
        UserError: There are several subsets, and none is named like the folder.
    """
    subsets = sorted({image.get("subset", folder.name) for image in images})
    if folder.name in subsets or not subsets:
        return folder.name
    if len(subsets) > 1:
        raise UserError(
            f"{source} holds images of the subsets {join_shortened(subsets)}, and none is named {folder.name}",
            "one subset, or a subset that is named like the folder of its images",
            f"name that folder by --images, for example --images DIR/{subsets[0]}, or export one subset from CVAT",
        )
    return subsets[0]


def _annotated_object(shape: ElementTree.Element, size: tuple[int, int]) -> AnnotatedObject:
    """Reads a tag, box, polygon or mask of an image of the given height and width."""
    draw: Draw | None = None
    if shape.tag == "polygon":
        if not shape.get("points"):
            raise ValueError("a polygon without points")
        points = [point.split(",") for point in shape.attrib["points"].split(";")]
        draw = functools.partial(pixel_polygon_pixels, np.array(points, float), size)
    elif shape.tag == "mask":
        draw = functools.partial(cvat_pixels, shape.attrib, size)
    return AnnotatedObject(shape.attrib["label"].strip(), draw)


def write_cvat(request: ExportRequest) -> int:
    """Writes `annotations.xml`, with objects as masks. Images are not copied."""
    root = ElementTree.Element("annotations")
    ElementTree.SubElement(root, "version").text = "1.1"
    meta = ElementTree.SubElement(root, "meta")
    task = ElementTree.SubElement(meta, "task")
    label_list = ElementTree.SubElement(task, "labels")
    for name in request.classes:
        label_element = ElementTree.SubElement(label_list, "label")
        ElementTree.SubElement(label_element, "name").text = name

    count = 0
    for number, image in enumerate(request.images):
        height, width = image.labels.shape
        sides = {"width": str(width), "height": str(height)}
        element = ElementTree.SubElement(root, "image", {"id": str(number), "name": image.file_name, **sides})
        for region in connected_regions(image.labels, request.min_area):
            ElementTree.SubElement(element, "mask", _mask_attributes(request.classes[region.label - 1], region))
            count += 1

    text = ElementTree.tostring(root, "utf-8", xml_declaration=True).decode()
    write_file(request.out / "annotations.xml", text)
    return count


def _mask_attributes(name: str, region: Region) -> dict[str, str]:
    """Attributes of a mask: the box of a region, and run lengths in it, row by row, which start with background."""
    height, width = region.pixels.shape
    pixels = region.pixels.ravel()
    changes = np.flatnonzero(np.diff(pixels)) + 1
    runs = np.diff([0, *changes, len(pixels)]).tolist()
    if pixels[0]:
        runs.insert(0, 0)
    return {
        "label": name,
        "rle": ", ".join(str(run) for run in runs),
        "left": str(region.left),
        "top": str(region.top),
        "width": str(width),
        "height": str(height),
        "occluded": "0",
        "z_order": "0",
        "source": "auto",
    }


CVAT = Format(
    read_cvat,
    "CVAT's XML `CVAT for images` of tags, boxes, polygons and masks, next to its images, or with the folder --images",
    write_cvat,
)

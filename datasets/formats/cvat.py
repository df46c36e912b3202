"""Reads data sets in the format `CVAT for images`."""

import functools
from xml.etree import ElementTree

import numpy as np

from mcis.datasets.formats.data_set import AnnotatedObject, DataSet, Draw, Format, ImportRequest, Photos
from mcis.datasets.formats.outlines import cvat_pixels, polygon_pixels


def read_cvat(request: ImportRequest) -> DataSet:
    """Reads an XML file of images with tags, boxes, polygons and masks."""
    folder = (request.images or request.source.parent).resolve()
    photos: Photos = {}

    for image in ElementTree.fromstring(request.source.read_bytes()).iter("image"):
        name = image.attrib["name"]
        sides = (float(image.attrib["width"]), float(image.attrib["height"]))
        subset = image.get("subset", folder.name)
        if subset != folder.name:
            request.left_out[f"image(s) of subset {subset}, for {folder.name}"] += 1
            continue
        if name in photos:
            raise ValueError(f"two images are named {name}")
        photos[name] = [_annotated_object(shape, sides) for shape in image]

    return DataSet(folder, photos)


def _annotated_object(shape: ElementTree.Element, sides: tuple[float, float]) -> AnnotatedObject:
    """Reads a tag, box, polygon or mask of an image of the given width and height."""
    draw: Draw | None = None
    if shape.tag == "polygon":
        points = [point.split(",") for point in shape.attrib["points"].split(";")]
        draw = functools.partial(polygon_pixels, np.array(points, float) / sides)
    elif shape.tag == "mask":
        draw = functools.partial(cvat_pixels, shape.attrib)
    return AnnotatedObject(shape.attrib["label"].strip(), draw)


CVAT = Format(
    read_cvat,
    "CVAT's XML `CVAT for images` of tags, boxes, polygons and masks, next to its images, or with the folder --images",
)

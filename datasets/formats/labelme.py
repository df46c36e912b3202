"""Reads data sets in the JSON format of LabelMe, a file for each image."""

import functools
import json
from typing import Any

import numpy as np

from mcis.datasets.formats.data_set import (
    AnnotatedObject,
    DataSet,
    Format,
    ImportRequest,
    Photos,
    annotation_files,
    name_text,
    naming,
)
from mcis.datasets.formats.image_files import images_next_to
from mcis.datasets.formats.outlines import pixel_polygon_pixels
from mcis.datasets.sources.lists import LeftOut


def read_labelme(request: ImportRequest) -> DataSet:
    """Reads flags as tags, polygons as objects with outlines, and other shapes as objects without."""
    photos: Photos = {}
    for file, subfolder in annotation_files(request.source, ".json"):
        with naming(file):
            content = json.loads(file.read_bytes())
            image = name_text(content["imagePath"], "imagePath").replace("\\", "/").rpartition("/")[2]
            objects = [AnnotatedObject(flag.strip()) for flag, is_set in (content.get("flags") or {}).items() if is_set]
            for shape in content["shapes"]:
                objects.append(_annotated_object(shape, content, request.left_out))

        name = (subfolder / image).as_posix()
        if name in photos:
            raise ValueError(f"two files are of {name}")
        photos[name] = objects

    source_folder = request.source if request.source.is_dir() else request.source.parent
    folder = (request.images or source_folder).resolve()
    if request.source.is_dir():
        request.left_out["image(s) without a JSON file, next to annotated ones"] = len(images_next_to(folder, photos))
    return DataSet(folder, photos)


def _annotated_object(shape: dict[str, Any], content: dict[str, Any], left_out: LeftOut) -> AnnotatedObject:
    kind = shape.get("shape_type") or "polygon"
    draw = None
    if kind == "polygon":
        for key in ("imageHeight", "imageWidth"):
            if content.get(key) is None:
                raise ValueError(f"no {key}, a side of the image in pixels")
        size = (int(content["imageHeight"]), int(content["imageWidth"]))
        draw = functools.partial(pixel_polygon_pixels, np.array(shape["points"], float), size)
    else:
        left_out[f"outline(s) of shapes of type {kind}, which give tags and no mask"] += 1
    return AnnotatedObject(name_text(shape["label"], "label").strip(), draw)


LABELME = Format(
    read_labelme,
    "a folder of LabelMe's JSON files, next to their images, or with the folder --images that has the same subfolders",
)

"""Reads data sets in the JSON format of Label Studio."""

import functools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from mcis.datasets.formats.data_set import AnnotatedObject, DataSet, Format, ImportRequest, Photos
from mcis.datasets.formats.outlines import polygon_pixels
from mcis.datasets.sources.lists import LeftOut


def read_label_studio(request: ImportRequest) -> DataSet:
    """Reads tasks with choices, rectangles, polygons or brushes. The last annotation of a task that counts is used."""
    folder = (request.images or request.source.parent).resolve()
    photos: Photos = {}

    for task in json.loads(request.source.read_bytes()):
        name = _image_name(task["data"]["image"], folder)
        annotations = [item for item in task.get("annotations", []) if not item.get("was_cancelled")]
        if not annotations:
            reason = "task(s) that nobody has annotated; predictions are submitted in Label Studio first"
            request.left_out[reason] += 1
            continue
        if name in photos:
            raise ValueError(f"two tasks are of {name}")
        request.left_out["earlier annotation(s) of a photograph"] += len(annotations) - 1

        photos[name] = []
        for result in annotations[-1]["result"]:
            photos[name] += _annotated_objects(result, request.left_out)

    return DataSet(folder, photos)


def _image_name(location: str, folder: Path) -> str:
    """Returns the path below a folder of an image that a task names by a path or URL of Label Studio.

    Local storage has paths `/data/local-files/?d=<path>`. Names of uploads begin with 8 hexadecimal digits and `-`.
    """
    url = urlsplit(location)
    path = unquote(url.query.partition("d=")[2] or url.path).lstrip("/")
    parts = path.split("/")
    candidates = ["/".join(parts[start:]) for start in range(len(parts))]
    candidates.append(re.sub("^[0-9a-f]{8}-", "", parts[-1]))

    existing = [name for name in candidates if name and (folder / name).is_file()]
    return existing[0] if existing else candidates[-1]


def _annotated_objects(result: dict[str, Any], left_out: LeftOut) -> list[AnnotatedObject]:
    """Reads the objects of a result of an annotation: one for each of its labels."""
    kind = result["type"]
    if kind != "choices" and not kind.endswith("labels"):
        left_out[f"result(s) of type {kind}"] += 1
        return []

    value = result["value"]
    draw = None
    if kind == "polygonlabels":
        fractions = np.array(value.get("points", ()), float) / 100  # points are percentages of the image's sides
        draw = functools.partial(polygon_pixels, fractions)
    return [AnnotatedObject(tag.strip(), draw) for tag in value.get(kind, ())]


LABEL_STUDIO = Format(
    read_label_studio,
    "Label Studio's JSON with choices, rectangles, polygons or brushes; --images is the folder of its images",
)

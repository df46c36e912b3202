"""Reads and writes data sets in the JSON format of Label Studio."""

import functools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.formats.data_set import (
    AnnotatedObject,
    DataSet,
    Draw,
    ExportRequest,
    Format,
    ImportRequest,
    LabeledImage,
    Photos,
    name_text,
    write_file,
)
from mcis.datasets.formats.outlines import polygon_pixels, resized_polygon_pixels
from mcis.datasets.formats.photographs import write_photograph
from mcis.datasets.formats.regions import Region, connected_regions, region_outline
from mcis.datasets.sources.lists import LeftOut

_EXPECTED = "Label Studio's JSON with choices, rectangles, polygons or brushes; --images is the folder of its images"


def read_label_studio(request: ImportRequest) -> DataSet:
    """Reads tasks with choices, rectangles, polygons or brushes: of each task, the last annotation not cancelled."""
    folder = (request.images or request.source.parent).resolve()
    photos: Photos = {}

    for task in json.loads(request.source.read_bytes()):
        if "data" not in task and "annotator" in task:
            raise UserError(f"{request.source} is an export `JSON-MIN`", _EXPECTED, "export `JSON` from Label Studio")
        name = _image_name(_location(task["data"]), folder)
        annotations = [item for item in task.get("annotations", []) if not item.get("was_cancelled")]
        if not annotations:
            reason = "task(s) that nobody has annotated; predictions are submitted in Label Studio first"
            request.left_out[reason] += 1
            continue
        if name in photos:
            raise ValueError(f"two tasks are of {name}")
        request.left_out["earlier annotation(s) of a photograph"] += len(annotations) - 1

        results = annotations[-1]["result"]
        photos[name] = []
        for result in results:
            photos[name] += _annotated_objects(result, request.left_out)
        if not photos[name] and not all(_is_read(result) for result in results):
            photos[name] = [AnnotatedObject(None)]  # nothing says whether it shows a class

    return DataSet(folder, photos)


def _location(data: dict[str, Any]) -> str:
    """Returns the path or URL of the image in the data of a task: `image`, or the only text."""
    if "image" in data:
        return name_text(data["image"], "image")
    texts = [value for value in data.values() if isinstance(value, str)]
    if len(texts) != 1:
        raise ValueError(f"no key `image` in the data of a task, and {len(texts)} texts in its keys {', '.join(data)}")
    return texts[0]


def _image_name(location: str, folder: Path) -> str:
    """Returns the path below a folder of an image that a task names by a path or URL of Label Studio.

    Local storage has paths `/data/local-files/?d=<path>`. Names of uploads begin with 8 hexadecimal digits and `-`.
    Names of other files may begin in the same way, for example with a date. Without such a file, it returns the path of
    the task, for `find_files`.
    """
    url = urlsplit(location)
    local_path = parse_qs(url.query).get("d", [""])[0]
    path = (local_path or unquote(url.path)).lstrip("/")
    parts = path.split("/")
    candidates = ["/".join(parts[start:]) for start in range(len(parts))]
    is_upload = not local_path and ("/data/upload/" in url.path or url.path.startswith(("upload/", "/upload/")))
    if is_upload:
        parts[-1] = re.sub("^[0-9a-f]{8}-", "", parts[-1])
        candidates.append(parts[-1])

    existing = [name for name in candidates if name and (folder / name).is_file()]
    return existing[0] if existing else "/".join(parts)


def _annotated_objects(result: dict[str, Any], left_out: LeftOut) -> list[AnnotatedObject]:
    """Reads the objects of a result of an annotation: one for each of its labels."""
    kind = result["type"]
    if not _is_read(result):
        left_out[f"result(s) of type {kind}"] += 1
        return []

    value = result["value"]
    draw = _polygon(result) if kind == "polygonlabels" else None
    return [AnnotatedObject(tag.strip(), draw) for tag in value.get(kind, ())]


def _polygon(result: dict[str, Any]) -> Draw:
    """Returns the function that draws a polygon. Results that other programs made may lack the size of the image."""
    fractions = np.array(result["value"].get("points", ()), float) / 100  # points are percentages of the image's sides
    height = result.get("original_height")
    width = result.get("original_width")
    if not height or not width:
        return functools.partial(polygon_pixels, fractions)
    return functools.partial(resized_polygon_pixels, fractions, (int(height), int(width)))


def _is_read(result: dict[str, Any]) -> bool:
    return result["type"] == "choices" or result["type"].endswith("labels")


def write_label_studio(request: ExportRequest) -> int:
    """Writes tasks with predictions as polygons within half a pixel of the objects.

    tasks.json           the tasks; their images are below the root of Label Studio's local storage, `request.out`
    images/<name>.jpg    the images
    labels.xml           the labeling interface
    """
    tasks = []
    count = 0
    for image in request.images:
        results = _polygon_results(image, request)
        count += len(results)
        location = f"/data/local-files/?d=images/{quote(image.name)}.jpg"
        predictions = [{"model_version": "mcis", "result": results}]
        tasks.append({"data": {"image": location}, "predictions": predictions})
        path = request.out / "images" / f"{image.name}.jpg"
        write_photograph(image.uri, image.content_hash, path, image.value_range)

    write_file(request.out / "tasks.json", json.dumps(tasks, ensure_ascii=False))
    write_file(request.out / "labels.xml", _labeling_interface(request))
    return count


def _polygon_results(image: LabeledImage, request: ExportRequest) -> list[dict[str, Any]]:
    height, width = image.labels.shape
    results: list[dict[str, Any]] = []
    for region in connected_regions(image.labels, request.min_area):
        value = {
            "points": _corners_in_percent(region, height, width).tolist(),
            "closed": True,
            "polygonlabels": [request.classes[region.label - 1]],
        }
        results.append(
            {
                "from_name": "label",
                "to_name": "image",
                "original_width": width,
                "original_height": height,
                "type": "polygonlabels",
                "value": value,
            }
        )
    return results


def _corners_in_percent(region: Region, height: int, width: int) -> NDArray[np.float64]:
    """Corners of a region in percent of the image's sides, (N, 2), from its outline at twice the resolution."""
    doubled = region.pixels.repeat(2, axis=0).repeat(2, axis=1)
    outline = region_outline(doubled) + 2 * region.corner
    return ((outline + 0.5) * (50 / width, 50 / height)).astype(np.float64)


def _labeling_interface(request: ExportRequest) -> str:
    labels = "".join(f"<Label value={quoteattr(name)}/>" for name in request.classes)
    picture = '<Image name="image" value="$image"/>'
    return f'<View>{picture}<PolygonLabels name="label" toName="image">{labels}</PolygonLabels></View>\n'


LABEL_STUDIO = Format(read_label_studio, _EXPECTED, write_label_studio, copies_images=True)

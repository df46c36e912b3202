"""Reads and writes data sets in the format of COCO."""

import functools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.formats.data_set import (
    AnnotatedObject,
    DataSet,
    ExportRequest,
    Format,
    ImportRequest,
    Photos,
    name_text,
    write_file,
)
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.formats.outlines import coco_pixels
from mcis.datasets.formats.regions import Region, connected_regions

_EXPECTED = "a JSON file of COCO's images, annotations and categories, next to its images, or with the folder --images"
_WITHOUT_ANNOTATIONS = {"info", "licenses", "images", "categories"}
"""Parts of files that describe images without their objects, such as image_info_test2017.json."""
_NAME_ANNOTATIONS = "name the file of annotations, such as instances_train2017.json"


def read_coco(request: ImportRequest) -> DataSet:
    """Reads a JSON file of images, annotations and categories."""
    content = json.loads(request.source.read_bytes())
    _check_parts(request.source, content)
    category_names = {_id_text(item["id"]): name_text(item["name"], "name").strip() for item in content["categories"]}
    images = {_id_text(image["id"]): image for image in content["images"]}
    file_names = {_id_text(image["id"]): name_text(image["file_name"], "file_name") for image in content["images"]}
    _refuse_repeated("image id", [_id_text(image["id"]) for image in content["images"]])
    _refuse_repeated("file_name", list(file_names.values()))
    photos: Photos = {name: [] for name in file_names.values()}

    for annotation in content.get("annotations", []):
        image_id = _id_text(annotation["image_id"])
        category = _id_text(annotation["category_id"])
        if category not in category_names:
            raise ValueError(f"an annotation of category_id {category}, which no category has")
        if image_id not in images:
            request.left_out["annotation(s) of images that it does not list"] += 1
            continue
        if annotation.get("iscrowd"):
            request.left_out["crowd(s), which give no tag and are ignored in masks; some tools write brushes so"] += 1
        if not annotation.get("segmentation"):
            request.left_out["outline(s) of annotations without `segmentation`, which give tags and no mask"] += 1
        photos[file_names[image_id]].append(_annotated_object(annotation, images[image_id], category_names[category]))

    return DataSet((request.images or request.source.parent).resolve(), photos)


def _refuse_repeated(kind: str, names: Sequence[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"{kind} occurs twice: {join_shortened(repeated)}")


def _check_parts(source: Path, content: Any) -> None:
    """Raises a UserError if a file lacks images, annotations or categories, and says what it holds instead.

    A file of another format passes, and the reader fails on it.
    """
    if not isinstance(content, dict):
        return
    if content and set(content) <= _WITHOUT_ANNOTATIONS:
        found = f"{source} holds no annotations, only {', '.join(content)}"
        raise UserError(found, _EXPECTED, _NAME_ANNOTATIONS)

    annotations = content.get("annotations") or []
    if annotations and "caption" in annotations[0]:
        raise UserError(f"{source} holds {len(annotations)} captions, not classes", _EXPECTED, _NAME_ANNOTATIONS)
    if annotations and not content.get("categories"):
        found = f"{source} holds {len(annotations)} annotation(s) but no categories, the names of the classes"
        raise UserError(found, _EXPECTED, "add the list `categories`, with the id and the name of each class")
    if annotations and not content.get("images"):
        found = f"{source} holds {len(annotations)} annotation(s) but no images, the names of the files"
        raise UserError(found, _EXPECTED, "add the list `images`, with id, file_name, height and width of each image")
    listed = {_id_text(image["id"]) for image in content["images"]}
    if annotations and not any(_id_text(annotation["image_id"]) in listed for annotation in annotations):
        found = f"{source} lists none of the images of its {len(annotations)} annotation(s)"
        raise UserError(found, _EXPECTED, "make image_id of each annotation the id of its image")


def _id_text(value: Any) -> str:
    """Returns an id as text, because some tools write the same id as 7, "7" and 7.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _annotated_object(annotation: dict[str, Any], image: dict[str, Any], name: str) -> AnnotatedObject:
    outline = annotation.get("segmentation")
    if outline and isinstance(outline, list) and not isinstance(outline[0], list):
        outline = [outline]  # VIA writes one polygon without the list around it
    draw = functools.partial(coco_pixels, outline, (image["height"], image["width"])) if outline else None
    return AnnotatedObject(None if annotation.get("iscrowd") else name, draw)


def write_coco(request: ExportRequest) -> int:
    """Writes `annotations.json`, with objects in compressed run lengths. Images are not copied."""
    masks = require_module("pycocotools.mask")
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image in request.images:
        height, width = image.labels.shape
        image_id = len(images) + 1
        images.append({"id": image_id, "file_name": image.file_name, "height": height, "width": width})

        for region in connected_regions(image.labels, request.min_area):
            uncompressed = {"size": [height, width], "counts": _run_lengths(region, height, width)}
            run_lengths = masks.frPyObjects(uncompressed, height, width)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": region.label,
                    "iscrowd": 0,
                    "area": int(masks.area(run_lengths)),
                    "bbox": masks.toBbox(run_lengths).tolist(),
                    "segmentation": run_lengths | {"counts": run_lengths["counts"].decode()},
                }
            )

    categories = [{"id": label, "name": name} for label, name in enumerate(request.classes, 1)]
    content = {"images": images, "categories": categories, "annotations": annotations}
    write_file(request.out / "annotations.json", json.dumps(content, ensure_ascii=False))
    return len(annotations)


def _run_lengths(region: Region, height: int, width: int) -> list[int]:
    """Run lengths of an image's mask that shows only a region, column by column: background, object, and so on."""
    columns = np.pad(region.pixels, ((1, 1), (0, 0))).T
    column, row = np.nonzero(columns[:, 1:] != columns[:, :-1])
    edges, counts = np.unique((region.left + column) * height + region.top + row, return_counts=True)
    edges = edges[counts == 1]  # a run that ends where the next one starts, at the top of the next column, goes on
    size = height * width
    runs: list[int] = np.diff(edges[edges < size], prepend=0, append=size).tolist()
    return runs


COCO = Format(read_coco, _EXPECTED, write_coco)

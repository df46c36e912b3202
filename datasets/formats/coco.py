"""Reads and writes data sets in the format of COCO."""

import functools
import json
from collections import Counter
from typing import Any

import numpy as np

from mcis.datasets.formats.data_set import (
    AnnotatedObject,
    DataSet,
    ExportRequest,
    Format,
    ImportRequest,
    Photos,
    write_file,
)
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.formats.outlines import coco_pixels
from mcis.datasets.formats.regions import connected_regions
from mcis.datasets.index import shown


def read_coco(request: ImportRequest) -> DataSet:
    """Reads a JSON file of images, annotations and categories."""
    content = json.loads(request.source.read_bytes())
    category_names = {category["id"]: category["name"].strip() for category in content["categories"]}
    images = {image["id"]: image for image in content["images"]}
    photos: Photos = {image["file_name"]: [] for image in content["images"]}
    if not len(photos) == len(images) == len(content["images"]):
        counts = Counter(image["file_name"] for image in content["images"])
        repeated = [name for name, count in counts.items() if count > 1]
        raise ValueError(f"an image id or a file_name occurs twice: {shown(repeated)}")

    for annotation in content.get("annotations", []):
        image = images.get(annotation["image_id"])
        category = annotation["category_id"]
        if category not in category_names:
            raise ValueError(f"an annotation of category_id {category}, which no category has")
        if image is None:
            request.left_out["annotation(s) of images that it does not list"] += 1
            continue
        if annotation.get("iscrowd"):
            request.left_out["crowd(s), which give no tag and are ignored in masks; some tools write brushes so"] += 1
        photos[image["file_name"]].append(_annotated_object(annotation, image, category_names[category]))

    return DataSet((request.images or request.source.parent).resolve(), photos)


def _annotated_object(annotation: dict[str, Any], image: dict[str, Any], name: str) -> AnnotatedObject:
    outline = annotation.get("segmentation")
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

        for label, region in connected_regions(image.labels, request.min_area):
            run_lengths = masks.encode(np.asfortranarray(region.astype(np.uint8)))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": label,
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


COCO = Format(
    read_coco,
    "a JSON file of COCO's images, annotations and categories, next to its images, or with the folder --images",
    write_coco,
)

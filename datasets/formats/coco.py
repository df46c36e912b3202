"""Reads data sets in the format of COCO."""

import functools
import json
from collections import Counter
from typing import Any

from mcis.datasets.formats.data_set import AnnotatedObject, DataSet, Format, ImportRequest, Photos
from mcis.datasets.formats.outlines import coco_pixels
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


COCO = Format(
    read_coco,
    "a JSON file of COCO's images, annotations and categories, next to its images, or with the folder --images",
)

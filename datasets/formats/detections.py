"""Reads detections of other programs: masks with class and score in the format of COCO's results."""

import json
import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.formats.outlines import coco_pixels
from mcis.datasets.sources.lists import relative_name
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import read_bytes

_MAX_BYTES = 2**33
"""Maximum size of a file, 8 GiB."""
EXPECTED = (
    "a JSON list of detections with `image_id` or `file_name`, `category_id` or `category_name`, `segmentation` and "
    "`score`; or a COCO data set with `images`, `categories` and `annotations`"
)


class Detection(NamedTuple):
    """A detection.

    Attributes:
        label: Class index.
        score: In [0, 1].
        outline: Run lengths or polygons of COCO.
    """

    label: int
    score: float
    outline: Any


class Detections(NamedTuple):
    """The detections of a file.

    Attributes:
        by_image: Detections by the name of their image: the path of its file, or its number as text.
        other_classes: Number of detections by name of a class that the run does not have.
        without_outline: Number of detections without `segmentation`.
    """

    by_image: Mapping[str, list[Detection]]
    other_classes: Counter[str]
    without_outline: int


def read_detections(file: Path, classes: Sequence[str]) -> Detections:
    """Reads a file of detections.

    Args:
        file: The file.
        classes: The K class names. Names of categories are compared without case. In a file without names,
            `category_id` is the label: class index + 1.

    Raises:
        UserError: The file cannot be read or is in another format.
    """
    try:
        content = json.loads(read_bytes(str(file), _MAX_BYTES))
        return _parse(content, classes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = error_text(error) if isinstance(error, OSError) else f"{type(error).__name__}: {unquoted(error)[:200]}"
        raise UserError(
            f"the detections {file} cannot be read ({reason})",
            EXPECTED,
            "write the file again, or correct pseudo_masks.detections.file",
        ) from None


def _parse(content: Any, classes: Sequence[str]) -> Detections:
    image_names: dict[Any, str] = {}
    category_names: dict[Any, str] = {}
    items = content
    if isinstance(content, dict):
        image_names = {image["id"]: image["file_name"] for image in content["images"]}
        category_names = {category["id"]: category["name"] for category in content["categories"]}
        items = content["annotations"]
    if not isinstance(items, list):
        raise TypeError(f"a {type(items).__name__} instead of a list of detections")

    class_index = {name.casefold(): index for index, name in enumerate(classes)}
    by_image: dict[str, list[Detection]] = defaultdict(list)
    other_classes: Counter[str] = Counter()
    without_outline = 0
    for item in items:
        category = _category(item, category_names, classes)
        label = class_index.get(category.strip().casefold())
        if label is None:
            other_classes[category] += 1
        elif not item.get("segmentation"):
            without_outline += 1
        else:
            detection = Detection(label, _score(item), item["segmentation"])
            by_image[_image_name(item, image_names)].append(detection)
    return Detections(by_image, other_classes, without_outline)


def _image_name(item: Mapping[str, Any], names: Mapping[Any, str]) -> str:
    """Returns the name of a detection's image: the path of its file in the Unicode form NFC, or its number."""
    image_id = item.get("image_id")
    name = item.get("file_name") or names.get(image_id, image_id)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise ValueError(f"a detection with image_id {image_id}, and without file_name")
    return unicodedata.normalize("NFC", relative_name(str(name)) or "")


def _category(item: Mapping[str, Any], names: Mapping[Any, str], classes: Sequence[str]) -> str:
    """Returns the name of a detection's class."""
    name = item.get("category_name")
    category = item.get("category_id")
    if isinstance(name, str):
        return name
    if isinstance(category, str):
        return category
    if names:
        return names[category]
    if not isinstance(category, int) or not 1 <= category <= len(classes):
        raise ValueError(
            f"a detection with category_id {category}, and without category_name; labels are 1 to {len(classes)}"
        )
    return classes[category - 1]


def _score(item: Mapping[str, Any]) -> float:
    """Returns the score of a detection; 1 if it has none."""
    score = float(item.get("score", 1.0))
    if math.isnan(score) or not 0 <= score <= 1:
        raise ValueError(f"a detection with the score {score}, outside of 0 to 1")
    return score


def draw_detections(
    detections: Iterable[Detection], height: int, width: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Draws detections, those with higher scores on top.

    Of equal scores, the smaller one is on top; of equal areas, too, the one of the higher class index. Any order of the
    detections gives the same result.

    Args:
        detections: The detections of an image.
        height: Height of the image, pixels.
        width: Width of the image, pixels.

    Returns:
        Label, class index + 1, and score of the detection at each pixel; 0 where there is none, (H, W) each.

    Raises:
        ValueError: An outline is damaged or of another size than the image.
    """
    size = (height, width)

    def order(detection: Detection) -> tuple[float, int, int]:
        area = int(np.count_nonzero(coco_pixels(detection.outline, size, height, width)))
        return detection.score, -area, detection.label

    labels = np.zeros(size, np.uint8)
    scores = np.zeros(size, np.float32)
    for label, score, outline in sorted(detections, key=order):  # one drawn outline at a time is in memory
        pixels = coco_pixels(outline, size, height, width)
        labels[pixels] = label + 1
        scores[pixels] = score
    return labels, scores

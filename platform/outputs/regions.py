"""Finds and reads what a rule for pseudo masks takes from files of other programs: segments or detections of images."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.formats.detections import EXPECTED, Detection, Detections, draw_detections, read_detections
from mcis.datasets.formats.segment_files import find_segment_files, read_segments
from mcis.datasets.images.decode import decode_picture
from mcis.datasets.images.label_masks import resize_labels
from mcis.datasets.storage.files import read_bytes
from mcis.models.detections import DetectionsConfig
from mcis.models.pseudo_masks import DetectedClasses, TaggedMaps
from mcis.platform.config.maps import PseudoMasksConfig
from mcis.platform.outputs.imported_files import ImportedFiles, match_files
from mcis.platform.runs.files import content_digest, contents_digest

REGIONS = "regions"
"""Column of index rows: the file of an image's segments, or its detections as JSON; null for images without."""
_MAX_CHECKED = 16
"""Maximum number of images whose regions `check_regions` reads."""
_NO_DETECTIONS = json.dumps([])


class RowsWithRegions(NamedTuple):
    """Rows of images with the column REGIONS.

    Attributes:
        rows: The rows.
        notes: Sentences for the user on what was left out.
    """

    rows: pa.Table
    notes: tuple[str, ...] = ()


def with_regions(
    rows: pa.Table,
    needed: Sequence[bool],
    section: PseudoMasksConfig,
    classes: Sequence[str],
    all_ids: Iterable[str] | None = None,
) -> RowsWithRegions:
    """Adds the column REGIONS to rows of an index or a listing.

    Args:
        rows: Rows with the columns `image_id` and `tags`.
        needed: Whether the mask of an image is made by the rule.
        section: The section `pseudo_masks`, with a rule that reads regions.
        classes: The K class names.
        all_ids: Ids of all images, see `match_files`.

    Raises:
        UserError: A file is missing, or cannot be read.
    """
    is_needed = np.asarray(needed, bool)
    images = rows.select(["image_id", "tags"]).filter(pa.array(is_needed))
    notes: tuple[str, ...] = ()
    if section.regions == "segments":
        found = find_segments(images["image_id"].to_pylist(), section, all_ids)
    else:
        found, notes = _find_detections(images, section, classes, all_ids)

    column = np.full(len(rows), None, object)
    column[is_needed] = found
    return RowsWithRegions(rows.append_column(REGIONS, pa.array(column, pa.string())), notes)


def find_segments(
    image_ids: Sequence[str], section: PseudoMasksConfig, all_ids: Iterable[str] | None = None
) -> list[str]:
    """Returns the file of segments of each image. For `all_ids` see `match_files`.

    Raises:
        UserError: An image has none, or the folder is missing.
    """
    folder = section.section_of("segments").folder
    key = "pseudo_masks.segments.folder"
    files = ImportedFiles(find_segment_files(folder), "file of segments", folder, key)
    return files.match_all(image_ids, all_ids)


def regions_digest(image_ids: Sequence[str], section: PseudoMasksConfig, all_ids: Iterable[str] | None = None) -> str:
    """Returns a digest of the files that the regions of images depend on: their segments, or all detections.

    Args:
        image_ids: Ids of the images whose masks are made by the rule.
        section: The section `pseudo_masks`, with a rule that reads regions.
        all_ids: Ids of all images, see `match_files`.
    """
    if section.regions == "segments":
        return contents_digest(find_segments(image_ids, section, all_ids))
    return content_digest(section.section_of("detections").file)


def check_regions(rows: pa.Table, section: PseudoMasksConfig, max_pixels: int) -> None:
    """Reads the regions of some images, to find files that cannot be used before any training.

    Args:
        rows: Rows of a listing with the column REGIONS.
        section: The section `pseudo_masks`, with a rule that reads regions.
        max_pixels: Largest width x height of an image (`data.max_pixels`). Larger images are left out.

    Raises:
        UserError: Regions cannot be read or are of another size than their image.
    """
    rows = rows.filter(pc.not_equal(rows[REGIONS], _NO_DETECTIONS))
    stride = len(rows) // _MAX_CHECKED + 1
    for row in rows[::stride].to_pylist():
        try:
            picture = decode_picture(read_bytes(row["uri"]), min_side=1, max_pixels=max_pixels, max_side=1)
        except (OSError, ValueError):  # the index rejects images that cannot be read
            continue
        row["height"] = picture.height
        row["width"] = picture.width
        if section.regions == "segments":
            read_segments(row[REGIONS], row["height"], row["width"])
        else:
            _draw_detections(row)


def add_regions(maps: TaggedMaps, row: Mapping[str, Any], section: PseudoMasksConfig) -> TaggedMaps:
    """Returns the input of a rule with the segments or detections of its image, resized by nearest neighbor.

    Args:
        maps: The image and its maps.
        row: The image's row of the index, with the column REGIONS.
        section: The section `pseudo_masks`.

    Raises:
        UserError: The regions cannot be read or are of another size than the image.
    """
    size = maps.scores.shape[1:]
    if section.regions == "segments":
        segments = read_segments(row[REGIONS], row["height"], row["width"])
        return maps._replace(segments=_resized(segments, size))
    if section.regions == "detections":
        labels, scores = _draw_detections(row)
        return maps._replace(detections=DetectedClasses(resize_labels(labels, *size), _resized(scores, size)))
    return maps


def _draw_detections(row: Mapping[str, Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Draws the detections of an image at its full size, see `draw_detections`."""
    detections = [Detection(*values) for values in json.loads(row[REGIONS])]
    try:
        return draw_detections(detections, row["height"], row["width"])
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"a detection in {row['image_id']} cannot be drawn: {str(error)[:200]}",
            "outlines of the image at its full size, with its EXIF orientation applied",
            "write the file again, or correct pseudo_masks.detections.file",
        ) from None


def _resized(values: NDArray[Any], size: tuple[int, ...]) -> NDArray[Any]:
    """Resizes numbers (H, W) int32 or float32 by nearest neighbor."""
    height, width = size
    return np.array(Image.fromarray(values).resize((width, height), Image.Resampling.NEAREST))


def _find_detections(
    images: pa.Table, section: PseudoMasksConfig, classes: Sequence[str], all_ids: Iterable[str] | None
) -> tuple[list[str], tuple[str, ...]]:
    """Returns the detections of each image that the rule uses, as JSON, and notes on those that it does not use."""
    values = section.section_of("detections")
    detections = read_detections(values.file, classes)
    image_ids = images["image_id"].to_pylist()
    listed_ids = image_ids if all_ids is None else list(all_ids)
    matched = _match_images(image_ids, detections.by_image, listed_ids)
    if not any(matched):
        raise UserError(
            f"{values.file} has no detection of one of the {len(image_ids)} tagged training images: it has detections "
            f"of the classes {join_shortened(_classes_in(detections, classes))} in images such as "
            f"{join_shortened(list(detections.by_image)[:3])}",
            f"{EXPECTED}; of the classes {join_shortened(list(classes))} in images such as "
            f"{join_shortened(image_ids[:3])}",
            "write the names of the run's images and classes, or correct pseudo_masks.detections.file",
        )

    used: list[list[Detection]] = []
    left_out: Counter[str] = Counter()
    image_tags = images["tags"].to_pylist()
    for tags, of_image in zip(image_tags, matched, strict=True):
        used.append(_used_detections(of_image or (), tags, values, left_out))

    num_used = sum(map(len, used))
    num_matched = num_used + left_out.total()
    left_out["in other images"] = sum(map(len, detections.by_image.values())) - num_matched
    left_out[f"of other classes ({join_shortened(list(detections.other_classes))})"] = detections.other_classes.total()
    left_out["without an outline"] = detections.without_outline
    return [json.dumps(of_image) for of_image in used], _detection_notes(used, image_tags, left_out)


def _used_detections(
    detections: Iterable[Detection], tags: Sequence[int], section: DetectionsConfig, left_out: Counter[str]
) -> list[Detection]:
    """Returns the detections of an image that the rule uses.

    Args:
        detections: All detections of the image.
        tags: Class indices of its tags.
        section: The section `pseudo_masks.detections`.
        left_out: Number of detections that are not used, by reason; those of the image are added.
    """
    used = []
    for detection in detections:
        if detection.score < section.min_score:
            left_out["below pseudo_masks.detections.min_score"] += 1
        elif section.tagged_only and detection.label not in tags:
            left_out["of classes without a tag of their image"] += 1
        else:
            used.append(detection)
    return used


def _detection_notes(
    used: Sequence[Sequence[Detection]], image_tags: Sequence[Sequence[int]], left_out: Counter[str]
) -> tuple[str, ...]:
    """Returns notes on the number of used and left-out detections, and on images without a detection of their tags.

    Args:
        used: The detections that the rule uses, by image.
        image_tags: Class indices of the tags, by image.
        left_out: Number of detections that are not used, by reason.
    """
    reasons = [f"{count} {reason}" for reason, count in left_out.items() if count]
    suffix = f"; left out: {', '.join(reasons)}" if reasons else ""
    notes = [f"{sum(map(len, used))} detections are used{suffix}"]

    num_without = 0
    for of_image, tags in zip(used, image_tags, strict=True):
        detected_labels = {detection.label for detection in of_image}
        if detected_labels.isdisjoint(tags):
            num_without += 1
    if num_without:
        notes.append(f"{num_without} of {len(used)} images have no detection of their tags")
    return tuple(notes)


def _match_images(
    image_ids: Sequence[str], by_image: Mapping[str, list[Detection]], all_ids: Sequence[str]
) -> list[list[Detection] | None]:
    """Returns the detections of each image. An image `000000000139.jpg` is also number 139, as in COCO.

    Numbers that several images have, such as those of `cat/001.jpg` and `dog/001.jpg`, name none of them. For
    `all_ids` see `match_files`.
    """
    matched = match_files(image_ids, by_image, all_ids)
    images_by_number = Counter(_number_of(image_id) for image_id in all_ids)

    for position, number in enumerate(map(_number_of, image_ids)):
        if matched[position] is None and number is not None and images_by_number[number] == 1:
            matched[position] = by_image.get(number)
    return matched


def _number_of(image_id: str) -> str | None:
    """Returns the number that is the name of an image's file, without leading zeros; None if it is no number."""
    stem = PurePosixPath(image_id).stem
    return str(int(stem)) if stem.isdecimal() else None


def _classes_in(detections: Detections, classes: Sequence[str]) -> list[str]:
    """Returns the names of all classes that a file has."""
    labels: set[int] = set()
    for of_image in detections.by_image.values():
        labels.update(detection.label for detection in of_image)
    return [*(classes[label] for label in sorted(labels)), *detections.other_classes]

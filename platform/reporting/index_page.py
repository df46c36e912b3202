"""Renders the page of an index: images per class, domain and split, example images, copies, rejects.

It is one self-contained HTML page. Every name is escaped, and the page loads and runs nothing.
"""

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.copies import find_duplicates
from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import PILLOW_MAX_PIXELS, RejectedImage
from mcis.datasets.images.squares import read_picture
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.storage.threads import map_in_threads
from mcis.datasets.tags import Tags
from mcis.platform.outputs.provenance import license_counts
from mcis.platform.reporting.html import render
from mcis.platform.reporting.index_facts import index_facts
from mcis.platform.reporting.near_duplicates import MIN_SIMILARITY, NearDuplicates
from mcis.platform.reporting.panels import labels
from mcis.platform.reporting.plots import THEME

_MAX_ROWS = 500
"""Maximum number of rejects, and of groups of copies, that are listed."""
_MAX_REASONS = 50
"""Maximum number of kinds of reasons that are listed."""
_SIDE = 96
"""Longer side of a thumbnail in pixels."""
_MAX_PER_CLASS = 6
"""Maximum number of thumbnails per class."""
_MAX_THUMBNAILS = 1200
"""Maximum number of thumbnails on a page, about 8 MB."""


class Thumbnail(NamedTuple):
    """An image of the index.

    Attributes:
        id: id of the image.
        split: Its split.
        tags: Names of its classes, or `none of the classes`; empty for an unlabelled image.
        picture: None if the file cannot be shown.
        reason: Why the file cannot be shown, or None.
    """

    id: str
    split: str
    tags: list[str]
    picture: Image.Image | None
    reason: str | None


class ExampleImages(NamedTuple):
    """Example images by class.

    Attributes:
        max_per_class: Maximum number of thumbnails per class.
        classes: Number of images and thumbnails by class index; index K is for negatives, K + 1 for unlabelled
            images.
        broken: Number of the chosen files that cannot be shown.
    """

    max_per_class: int
    classes: dict[int, tuple[int, list[Thumbnail]]]
    broken: int


def browse_page(
    index: pa.Table,
    rejects: pa.Table,
    classes: Sequence[str],
    *,
    notes: Sequence[str],
    title: str,
    value_range: ValueRange | None = None,
    provenance: pa.Table | None = None,
    near_duplicates: NearDuplicates | None = None,
) -> str:
    """Renders the page of an index.

    Args:
        index: Rows of INDEX_SCHEMA.
        rejects: Rows of REJECTS_SCHEMA.
        classes: The K class names.
        notes: Notes of the index and its sources.
        title: Heading of the page.
        value_range: `data.value_range` of the index.
        provenance: Where images come from (PROVENANCE_SCHEMA), as far as it is known.
        near_duplicates: Pairs of training images that look nearly the same; None if they were not searched.
    """
    facts = index_facts(index, rejects, classes)
    label_of = labels(classes)
    totals = facts.per_class.sum(axis=1)
    by_frequency = np.argsort(-totals, kind="stable")
    view = {
        "title": title,
        "facts": facts,
        "groups": facts.groups,
        "rejected": len(rejects),
        "notes": notes,
        "classes": [label_of[k + 1] for k in range(len(classes))],
        "per_class": [(int(k), facts.per_class[k].tolist()) for k in by_frequency],
        "pictures": _choose_examples(index, classes, value_range),
        "copies": find_duplicates(lambda columns: [index.select(columns)]),
        "licenses": license_counts(provenance) if provenance is not None else [],
        "near_duplicates": near_duplicates,
        "min_similarity": MIN_SIMILARITY,
        "max_rows": _MAX_ROWS,
        "rejects": rejects.slice(0, _MAX_ROWS).to_pylist(),
        "max_reasons": _MAX_REASONS,
        "theme": THEME,
    }
    return render("index_page.html.j2", view)


def _choose_examples(index: pa.Table, classes: Sequence[str], value_range: ValueRange | None) -> ExampleImages | None:
    """Chooses images of each class; the choice depends only on the class and the row. None for an empty index."""
    if not len(index):
        return None

    rows_by_class = _shuffled_rows(index, len(classes))
    max_per_class = min(_MAX_PER_CLASS, max(1, _MAX_THUMBNAILS // len(rows_by_class)))
    chosen = {number: rows[:max_per_class].tolist() for number, rows in rows_by_class.items()}
    chosen_rows: set[int] = set()
    for rows in chosen.values():
        chosen_rows.update(rows)

    thumbnails = _read_thumbnails(index, sorted(chosen_rows), classes, value_range)
    examples = {}
    for number, rows in chosen.items():
        examples[number] = (len(rows_by_class[number]), [thumbnails[row] for row in rows])
    broken = len([thumbnail for thumbnail in thumbnails.values() if thumbnail.reason is not None])
    return ExampleImages(max_per_class, examples, broken)


def _shuffled_rows(index: pa.Table, num_classes: int) -> dict[int, NDArray[np.int64]]:
    """Returns the rows of the images of each class that occurs, in random order.

    An image with several tags is in several classes. Keys are those of `ExampleImages.classes`.
    """
    tags = Tags.from_index(index["tags"], num_classes)
    tag_counts = np.diff(tags.start).astype(np.int64)
    tagged_rows = np.repeat(np.arange(len(index)), tag_counts)
    untagged_rows = np.flatnonzero(tag_counts == 0)
    is_negative = index["is_negative"].to_numpy()[untagged_rows]

    rows = np.concatenate([tagged_rows, untagged_rows])
    numbers = np.concatenate([tags.values.astype(np.int64), np.where(is_negative, num_classes, num_classes + 1)])
    draws = uniforms(DrawPurpose.THUMBNAIL, 0, numbers, rows)[:, 0]
    order = np.lexsort((draws, numbers))
    present_numbers, starts = np.unique(numbers[order], return_index=True)
    return dict(zip(present_numbers.tolist(), np.split(rows[order], starts[1:]), strict=True))


def _read_thumbnails(
    index: pa.Table, rows: list[int], classes: Sequence[str], value_range: ValueRange | None
) -> dict[int, Thumbnail]:
    """Reads the thumbnails of some rows, in threads; returns them by row number."""
    images = index.select(["image_id", "uri", "split", "tags", "is_negative"]).take(rows).to_pylist()
    uris = (image["uri"] for image in images)
    thumbnails = {}
    open_thumbnail = functools.partial(_open, value_range=value_range)
    with contextlib.closing(map_in_threads(open_thumbnail, uris, threads=min(8, os.cpu_count() or 1))) as opened:
        for row, image, (picture, reason) in zip(rows, images, opened, strict=True):
            tags = ["none of the classes"] if image["is_negative"] else [classes[tag] for tag in image["tags"]]
            thumbnails[row] = Thumbnail(image["image_id"], image["split"], tags, picture, reason)
    return thumbnails


def _open(uri: str, value_range: ValueRange | None) -> tuple[Image.Image | None, str | None]:
    """Reads a small picture, or returns why it cannot be read."""
    try:
        picture = read_picture(uri, max_pixels=PILLOW_MAX_PIXELS, max_side=_SIDE, value_range=value_range)
        return Image.fromarray(picture.rgb), None
    except RejectedImage as error:
        return None, error.reason
    except UserError as error:  # one file must not end the page
        return None, error.found

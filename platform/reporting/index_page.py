"""The page of an index: how many images per class, domain and split, pictures, copies, rejects.

One self-contained HTML page, on which every name is escaped and nothing is loaded or run.
"""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import PILLOW_MAX_PIXELS, RejectedImage
from mcis.datasets.images.squares import read_picture
from mcis.datasets.index import find_duplicates
from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.storage.threads import map_in_threads
from mcis.datasets.tags import Tags
from mcis.platform.reporting.html import render
from mcis.platform.reporting.index_facts import index_facts
from mcis.platform.reporting.panels import labels
from mcis.platform.reporting.plots import THEME

_MOST_ROWS, _MOST_REASONS = 500, 50
"""Rows of the list of rejects and contents of that of copies; kinds of reasons."""
_SIDE, _OF_A_CLASS, _MOST_PICTURES = 96, 6, 1200
"""Pixels of a thumbnail's long side; thumbnails of a class, and of a page: about 8 MB."""


def browse_page(index: pa.Table, rejects: pa.Table, classes: Sequence[str], *, notes: Sequence[str], title: str) -> str:
    """An index (INDEX_SCHEMA, REJECTS_SCHEMA) as one HTML page that needs no other file.

    Args:
        notes: what its sources said of themselves, in plain words.
    """
    facts = index_facts(index, rejects, classes)
    label_of = labels(classes)
    totals = facts.per_class.sum(axis=1)
    view = {
        "title": title,
        "facts": facts,
        "groups": facts.groups,
        "rejected": len(rejects),
        "notes": notes,
        "classes": [label_of[k + 1] for k in range(len(classes))],
        "per_class": [(int(k), facts.per_class[k].tolist()) for k in np.argsort(-totals, kind="stable")],
        "pictures": _choose_pictures(index, classes),
        "copies": find_duplicates(lambda columns: [index.select(columns)]),
        "most_rows": _MOST_ROWS,
        "rejects": rejects.slice(0, _MOST_ROWS).to_pylist(),
        "most_reasons": _MOST_REASONS,
        "theme": THEME,
    }
    return render("index_page.html.j2", view)


def _choose_pictures(index: pa.Table, classes: Sequence[str]) -> dict[str, Any] | None:
    """Thumbnails by class, images without a tag last; which ones depends on (class, image) alone.

    Returns:
        most: the number of thumbnails of a class.
        classes: by class index, or K for images without a tag: how many images it has, and thumbnails.
        broken: how many of the chosen files cannot be shown.
    """
    if not len(index):
        return None
    of_images = Tags.from_index(index["tags"], len(classes))
    counts = np.diff(of_images.start).astype(np.int64)
    untagged = np.flatnonzero(counts == 0)
    rows = np.concatenate([np.repeat(np.arange(len(index)), counts), untagged])
    tags = np.concatenate([of_images.values.astype(np.int64), np.full(len(untagged), len(classes))])
    order = np.lexsort((uniforms(DrawPurpose.THUMBNAIL, 0, tags, rows)[:, 0], tags))
    shelves, start, sizes = np.unique(tags[order], return_index=True, return_counts=True)
    most = min(_OF_A_CLASS, max(1, _MOST_PICTURES // len(shelves)))
    chosen = [rows[order[first : first + min(most, size)]].tolist() for first, size in zip(start, sizes, strict=True)]
    pictures = _thumbnails(index, np.unique(np.concatenate(chosen)).tolist(), classes)
    by_class = {
        tag: (size, [pictures[row] for row in shown])
        for tag, size, shown in zip(shelves.tolist(), sizes.tolist(), chosen, strict=True)
    }
    broken = sum(picture["reason"] is not None for picture in pictures.values())
    return {"most": most, "classes": by_class, "broken": broken}


def _thumbnails(index: pa.Table, rows: list[int], classes: Sequence[str]) -> dict[int, dict[str, Any]]:
    """The images of some rows, by row: each with its picture, or the reason why there is none."""
    images = index.select(["image_id", "uri", "split", "tags"]).take(rows).to_pylist()
    opened = map_in_threads(_open, (image["uri"] for image in images), threads=min(8, os.cpu_count() or 1))
    with contextlib.closing(opened):
        return {
            row: {
                "id": image["image_id"],
                "split": image["split"],
                "tags": [classes[tag] for tag in image["tags"]],
                "picture": picture,
                "reason": reason,
            }
            for row, image, (picture, reason) in zip(rows, images, opened, strict=True)
        }


def _open(uri: str) -> tuple[Image.Image | None, str | None]:
    """A small picture, or why there is none."""
    try:
        return Image.fromarray(read_picture(uri, max_pixels=PILLOW_MAX_PIXELS, max_side=_SIDE).rgb), None
    except RejectedImage as error:
        return None, error.reason
    except UserError as error:  # one file must not end the page
        return None, error.found

"""Thumbnails of an index, some for every class and domain; the only figures of its page that open images."""

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from PIL import Image

from mcis.datasets.images.decode import MOST_PIXELS, RejectedImage, decode_rgb
from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.threads import in_threads
from mcis.platform.reporting.index_facts import codes_of, flat_tags

_SIDE, _MOST_PICTURES = 96, 1200
"""Pixels of a thumbnail's long side; thumbnails that a page holds: about 8 MB."""


class Thumbnail(NamedTuple):
    """An image with its picture, or the reason why there is none."""

    id: str
    split: str
    tags: list[str]
    picture: Image.Image | None
    reason: str | None


class Shelf(NamedTuple):
    """Some of a class's images in one domain, and how many there are of them."""

    domain: str
    images: int
    thumbnails: list[Thumbnail]


class Pictures(NamedTuple):
    """The thumbnails of a page.

    Attributes:
        most: the number of thumbnails per class and domain.
        classes: shelves by class index; K stands for images without a tag.
        broken: how many of the chosen files cannot be shown.
    """

    most: int
    classes: dict[int, list[Shelf]]
    broken: int


def choose_pictures(index: pa.Table, classes: Sequence[str], thumbnails: int, seed: int) -> Pictures | None:
    """Thumbnails by class and domain, images without a tag last; which ones depends on (seed, class, image) alone.

    Args:
        thumbnails: per class and domain, at most; fewer where the page would hold too many.
    """
    rows, tags = (numbers.astype(np.int64) for numbers in flat_tags(index))
    untagged = np.setdiff1d(np.arange(len(index)), rows)
    rows, tags = np.concatenate([rows, untagged]), np.concatenate([tags, np.full(len(untagged), len(classes))])
    domain, domains = codes_of(index["domain"])
    if thumbnails < 1 or not len(rows):
        return None
    codes = tags * len(domains) + domain[rows]
    order = np.lexsort((uniforms(Draw.THUMBNAIL, seed, tags, rows)[:, 0], codes))
    shelves, start, sizes = np.unique(codes[order], return_index=True, return_counts=True)
    most = min(thumbnails, max(1, _MOST_PICTURES // len(shelves)))
    chosen = [rows[order[first : first + min(most, size)]] for first, size in zip(start, sizes, strict=True)]
    pictures = _thumbnails(index, np.unique(np.concatenate(chosen)).tolist(), classes)
    by_class: dict[int, list[Shelf]] = {}
    for code, size, shown in zip(shelves.tolist(), sizes.tolist(), chosen, strict=True):
        tag, domain_code = divmod(code, len(domains))
        by_class.setdefault(tag, []).append(
            Shelf(domains[domain_code], size, [pictures[row] for row in shown.tolist()])
        )
    return Pictures(most, by_class, sum(picture.reason is not None for picture in pictures.values()))


def _thumbnails(index: pa.Table, rows: list[int], classes: Sequence[str]) -> dict[int, Thumbnail]:
    """Opens the images of some rows, by row."""
    images = index.select(["image_id", "uri", "split", "tags"]).take(rows).to_pylist()
    opened = in_threads(_open, (image["uri"] for image in images), threads=min(8, os.cpu_count() or 1))
    with contextlib.closing(opened):
        return {
            row: Thumbnail(image["image_id"], image["split"], [classes[tag] for tag in image["tags"]], picture, reason)
            for row, image, (picture, reason) in zip(rows, images, opened, strict=True)
        }


def _open(uri: str) -> tuple[Image.Image | None, str | None]:
    """A small picture, or why there is none."""
    try:
        picture = Image.fromarray(decode_rgb(read_bytes(uri), min_side=1, max_pixels=MOST_PIXELS))
    except RejectedImage as error:
        return None, error.reason
    except Exception as error:  # file systems raise what they like, and one file must not end the page
        return None, f"cannot be read: {getattr(error, 'strerror', None) or error}"
    picture.thumbnail((_SIDE, _SIDE))
    return picture, None

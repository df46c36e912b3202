"""The index: one row an image, whatever its source, and a table of what was rejected and why.

INDEX_SCHEMA and REJECTS_SCHEMA are the contract between the sources and every later stage.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.decode import RejectedImage, decode_shape, one_line
from mcis.datasets.errors import UserError
from mcis.datasets.files import read_bytes

INDEX_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False, metadata={"about": "name, unique in the index"}),
        pa.field("uri", pa.string(), nullable=False, metadata={"about": "absolute path of the image file, or URI"}),
        pa.field(
            "domain", pa.string(), nullable=False, metadata={"about": "target, source (single-label images) or web"}
        ),
        pa.field("split", pa.string(), nullable=False, metadata={"about": "train, val or test"}),
        pa.field("tags", pa.list_(pa.uint16()), nullable=False, metadata={"about": "class indices from 0, ascending"}),
        pa.field("height", pa.int32(), nullable=False, metadata={"about": "pixels, orientation applied"}),
        pa.field("width", pa.int32(), nullable=False, metadata={"about": "pixels, orientation applied"}),
        pa.field("content_hash", pa.string(), nullable=False, metadata={"about": "SHA-256 of the file"}),
        pa.field("mask_uri", pa.string(), metadata={"about": "ground truth for scoring alone, or null"}),
        pa.field("saliency_uri", pa.string(), metadata={"about": "class-agnostic saliency map, or null"}),
    ]
)
REJECTS_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("uri", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
    ]
)
LISTING_SCHEMA = pa.schema([f for f in INDEX_SCHEMA if f.name not in ("height", "width", "content_hash")])


class Listing(NamedTuple):
    """What a source says it holds, before any image is opened.

    Attributes:
        table: LISTING_SCHEMA, one row an image.
        classes: K class names.
        notes: what a user should know about the source, in plain words.
    """

    table: pa.Table
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def merge(first: Listing, *others: Listing) -> Listing:
    """Listings of several sources, one behind the other, with all their notes.

    Raises:
        UserError: they name different classes, or an image twice.
    """
    for other in others:
        if other.classes != first.classes:
            raise UserError(
                f"sources of different classes: {shown(first.classes)}; {shown(other.classes)}",
                "the same class names in the same order",
                "name one class file for all sources",
            )
    table = pa.concat_tables([first.table, *(other.table for other in others)])
    counts = pc.value_counts(table["image_id"])
    twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
    if twice:
        raise UserError(
            f"{len(twice)} image(s) are in two sources: {shown(twice)}", "each image once", "name each source once"
        )
    return Listing(table, first.classes, tuple(note for each in (first, *others) for note in each.notes))


def verify(listing: pa.Table, *, min_side: int = 32) -> pa.Table:
    """Opens, decodes and hashes every image of a part of a listing.

    Returns:
        INDEX_SCHEMA and a column `reason`, null for an image that is in order.
    """
    heights, widths, hashes, reasons = [], [], [], []
    for uri in listing["uri"].to_pylist():
        height, width, digest, reason = 0, 0, "", None
        try:
            data = read_bytes(uri)
            digest = hashlib.sha256(data).hexdigest()
            height, width = decode_shape(data, min_side=min_side)
        except RejectedImage as error:
            reason = error.reason
        except (OSError, ValueError) as error:  # ValueError: no path, as it holds a null byte
            reason = one_line(f"cannot be read: {getattr(error, 'strerror', None) or error}")
        heights.append(height)
        widths.append(width)
        hashes.append(digest)
        reasons.append(reason)
    columns: dict[str, Any] = {name: listing[name] for name in LISTING_SCHEMA.names}
    columns |= {"height": heights, "width": widths, "content_hash": hashes}
    schema = INDEX_SCHEMA.append(pa.field("reason", pa.string()))
    arrays = [columns[n] if n in LISTING_SCHEMA.names else pa.array(columns[n]) for n in INDEX_SCHEMA.names]
    return pa.table([*arrays, pa.array(reasons, pa.string())], names=schema.names).cast(schema)


def duplicates(index: pa.Table) -> list[tuple[str, list[tuple[str, str]]]]:
    """Content that lies in more than one split: what is trained on would be scored on.

    Returns:
        For each such content its hash and the (split, image id) of all its images, in the order of the index.
    """
    places: dict[str, list[tuple[str, str]]] = {}
    for row in index.select(["content_hash", "split", "image_id"]).to_pylist():
        places.setdefault(row["content_hash"], []).append((row["split"], row["image_id"]))
    return [(digest, found) for digest, found in places.items() if digest and len({split for split, _ in found}) > 1]


def shown(names: Sequence[str], most: int = 5) -> str:
    """The first names of many, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

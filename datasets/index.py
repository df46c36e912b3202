"""The index: one row per image, whatever its source, and a table of what was rejected and why.

INDEX_SCHEMA and REJECTS_SCHEMA are the contract between the sources and every later stage.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import UserError, one_line
from mcis.datasets.images.decode import MAX_PIXELS, MAX_REASON, RejectedImage, decode_picture, size_problem
from mcis.datasets.storage.faults import access_refused, error_text, retry_io
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.tables.large_tables import repeated_texts, text_hashes

INDEX_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False, metadata={"about": "name, unique in the index"}),
        pa.field("uri", pa.string(), nullable=False, metadata={"about": "absolute path of the image file, or URI"}),
        pa.field("domain", pa.string(), nullable=False, metadata={"about": "target, source (single-label) or web"}),
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
        pa.field("reason", pa.string(), nullable=False, metadata={"about": "<kind>: <detail>"}),
    ]
)
LISTING_SCHEMA = pa.schema([f for f in INDEX_SCHEMA if f.name not in ("height", "width", "content_hash")])


CHECKED_SCHEMA = INDEX_SCHEMA.append(pa.field("reason", pa.string()))
CHECK_SCHEMA = pa.schema([CHECKED_SCHEMA.field(name) for name in ("height", "width", "content_hash", "reason")])
"""Columns that hold verdicts, by the names of `ImageCheck`; of a sound image the reason is null."""


class Listing(NamedTuple):
    """What a source says it holds, before any image is opened.

    Attributes:
        table: LISTING_SCHEMA, one row per image.
        classes: K class names.
        notes: sentences that a user should read.
    """

    table: pa.Table
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def merge(first: Listing, *others: Listing) -> Listing:
    """Listings of several sources that mean the same classes, one after the other, with all their notes; UserError
    where an image is in two of them."""
    table = pa.concat_tables([first.table, *(listing.table for listing in others)])
    if others and (twice := repeated_texts(table["image_id"])):
        raise UserError(f"{len(twice)} image(s) in two sources: {shown(twice)}", "each image once", "name each once")
    return Listing(table, first.classes, tuple(note for listing in (first, *others) for note in listing.notes))


class ImageCheck(NamedTuple):
    """What opening an image file has shown.

    Attributes:
        height, width: pixels, orientation applied; 0 where there is no picture.
        content_hash: SHA-256 of the file, empty where it could not even be read.
        reason: why the image is rejected, None for one that is sound: a `RejectedImage`'s, `cannot be read` of a file
            that is absent, no plain file or too large, or `kills the decoder` of one that ends each process that opens
            it. What may pass (a disk's error, a server's, refused access) is never one.
    """

    height: int
    width: int
    content_hash: str
    reason: str | None


def check_images(listing: pa.Table, *, min_side: int = 32, max_pixels: int = MAX_PIXELS) -> pa.Table:
    """Opens, decodes and hashes every image of a part of a listing.

    Args:
        min_side: images with a shorter side are rejected, pixels.
        max_pixels: images of a larger width x height are rejected, before they are decoded.

    Returns:
        CHECKED_SCHEMA. Reasons are lasting: the file is absent, or its bytes give no image.

    Raises:
        UserError: a file cannot be read at present (`read_bytes`), or access to it is refused.
    """
    return with_checks(listing, [_verify_file(uri, min_side, max_pixels) for uri in listing["uri"].to_pylist()])


def with_checks(listing: pa.Table, verdicts: Sequence[ImageCheck]) -> pa.Table:
    """Rows of LISTING_SCHEMA and a verdict on each -> CHECKED_SCHEMA."""
    columns = {name: [getattr(verdict, name) for verdict in verdicts] for name in ImageCheck._fields}
    return with_check_columns(listing, pa.table(columns, CHECK_SCHEMA))


def with_check_columns(listing: pa.Table, verdicts: pa.Table) -> pa.Table:
    """Rows of LISTING_SCHEMA and the columns of their verdicts (CHECK_SCHEMA) -> CHECKED_SCHEMA."""
    of_table = {name: listing for name in LISTING_SCHEMA.names} | {name: verdicts for name in ImageCheck._fields}
    return pa.table([of_table[name][name] for name in CHECKED_SCHEMA.names], schema=CHECKED_SCHEMA)


def reject_out_of_bounds(verdicts: pa.Table, min_side: int, max_pixels: int) -> pa.Table:
    """Verdicts (CHECK_SCHEMA), where images of more pixels, or with a shorter side, are rejected too."""
    height, width = verdicts["height"].to_numpy().astype(np.int64), verdicts["width"].to_numpy()
    beyond = (height * width > max_pixels) | (np.minimum(height, width) < min_side)
    beyond &= verdicts["reason"].is_null().to_numpy()
    if not beyond.any():
        return verdicts
    sizes = zip(height[beyond].tolist(), width[beyond].tolist(), strict=True)
    rejected = pa.array([size_problem(h, w, min_side, max_pixels) for h, w in sizes], pa.string())
    reasons = pc.replace_with_mask(verdicts["reason"].combine_chunks(), pa.array(beyond), rejected)
    return verdicts.set_column(verdicts.schema.get_field_index("reason"), CHECK_SCHEMA.field("reason"), reasons)


def _verify_file(uri: str, min_side: int, max_pixels: int) -> ImageCheck:
    content_hash = ""
    try:
        data = read_bytes(uri)
        content_hash = hashlib.sha256(data).hexdigest()
        decode = functools.partial(decode_picture, data, min_side=min_side, max_pixels=max_pixels)
        _, height, width = retry_io(uri, decode)
    except RejectedImage as error:
        return ImageCheck(0, 0, content_hash, error.reason)
    except PermissionError as error:  # says nothing of the image
        raise access_refused(uri, error) from None
    except (OSError, ValueError) as error:  # ValueError: no path, as it holds a null byte
        return ImageCheck(0, 0, content_hash, one_line(f"cannot be read: {error_text(error)}", MAX_REASON))
    return ImageCheck(height, width, content_hash, None)


def find_duplicates(read: Callable[[list[str]], Iterable[pa.Table]]) -> list[list[str]]:
    """The names of images with the same content, for each content that lies in more than one split: images that are
    trained on would be scored.

    Args:
        read: columns of an index, by their names, in tables one after the other; is called twice where it has content.
    """
    parts = [_contents(table) for table in read(["content_hash", "split"])]
    content, split = np.concatenate([np.zeros((2, 0), np.int64), *parts], axis=1)
    order = np.lexsort((split, content))
    same, other = np.diff(content[order]) == 0, np.diff(split[order]) != 0
    several = np.unique(content[order][1:][same & other])
    images: dict[str, list[str]] = {}
    for table in read(["content_hash", "split", "image_id"]) if len(several) else ():
        for row in table.filter(pa.array(np.isin(_contents(table)[0], several))).to_pylist():
            if row["content_hash"]:
                images.setdefault(row["content_hash"], []).append(row["image_id"])
    return list(images.values())


def _contents(table: pa.Table) -> NDArray[np.int64]:
    """Numbers for the content and the split of each row, (2, N), equal for equal ones in this process."""
    return np.stack([text_hashes(table["content_hash"]), text_hashes(table["split"])])


def shown(names: Sequence[str], most: int = 5) -> str:
    """The first names of many, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

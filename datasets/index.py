"""The index: one row per image of any source, and a table of rejected images with the reasons.

INDEX_SCHEMA and REJECTS_SCHEMA are the contract between the sources and all later stages.
"""

import errno
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError, join_shortened, one_line
from mcis.datasets.images.decode import MAX_PIXELS, MAX_REASON, RejectedImage, check_picture, size_problem
from mcis.datasets.images.value_range import ValueRange, range_problem
from mcis.datasets.storage.faults import access_refused, error_text, retry_io
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.folders import MAX_NAME_BYTES, describe_length
from mcis.datasets.tables.large_tables import repeated_texts, take_rows

_MAX_IMAGE_NAME = MAX_NAME_BYTES - len(".png")
"""Maximum length of an image's name in bytes, because files such as masks are named after it."""

INDEX_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False, metadata={"about": "name, unique in the index"}),
        pa.field("uri", pa.string(), nullable=False, metadata={"about": "absolute path of the image file, or URI"}),
        pa.field("domain", pa.string(), nullable=False, metadata={"about": "target, source (single-label) or web"}),
        pa.field("split", pa.string(), nullable=False, metadata={"about": "train, val or test"}),
        pa.field("tags", pa.list_(pa.uint16()), nullable=False, metadata={"about": "class indices from 0, ascending"}),
        pa.field(
            "is_negative",
            pa.bool_(),
            nullable=False,
            metadata={"about": "whether the image shows none of the classes; without tags and false, it is unlabelled"},
        ),
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
LISTING_SCHEMA = pa.schema([field for field in INDEX_SCHEMA if field.name not in ("height", "width", "content_hash")])
CHECK_SCHEMA = pa.schema(
    [
        *(INDEX_SCHEMA.field(name) for name in ("height", "width", "content_hash")),
        pa.field("reason", pa.string(), metadata={"about": "why it is rejected; null for valid images"}),
        pa.field("pixels", pa.string(), metadata={"about": "see `PictureCheck`; null for ordinary pixels"}),
        pa.field("low", pa.float64(), metadata={"about": "see `PictureCheck`"}),
        pa.field("high", pa.float64(), metadata={"about": "see `PictureCheck`"}),
    ]
)
"""Columns with the results of checks, named as in `ImageCheck`."""
CHECKED_SCHEMA = pa.schema([*INDEX_SCHEMA, *(field for field in CHECK_SCHEMA if field.name not in INDEX_SCHEMA.names)])


PROVENANCE_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("url", pa.string(), metadata={"about": "address of the original, or null"}),
        pa.field("license", pa.string(), metadata={"about": "license of the image, or null"}),
    ]
)
"""Where images come from, for the images whose source states it."""


class Listing(NamedTuple):
    """The images of a source, before any image is opened.

    Attributes:
        table: LISTING_SCHEMA, one row per image.
        classes: K class names.
        notes: Messages for the user.
        provenance: PROVENANCE_SCHEMA, at most one row per image; None if no source states where its images come from.
    """

    table: pa.Table
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    provenance: pa.Table | None = None

    def image_ids(self) -> Iterator[str]:
        """Yields the id of each image."""
        for chunk in self.table["image_id"].chunks:
            yield from chunk.to_pylist()


def merge(first: Listing, *others: Listing) -> Listing:
    """Concatenates the listings of several sources with the same classes, with all their notes, and sorts them by id.

    The order of rows in lists and tables therefore changes no result.

    Raises:
        UserError: An image id is in two of them, or is too long.
    """
    tables = [first.table]
    tables += [listing.table for listing in others]
    table = pa.concat_tables(tables)
    is_long = pc.greater(pc.binary_length(table["image_id"]), _MAX_IMAGE_NAME)
    check_name_lengths(table["image_id"].filter(is_long).to_pylist())

    if others:
        repeated = repeated_texts(table["image_id"])
        if repeated:
            raise UserError(
                f"{len(repeated)} image(s) in two sources: {join_shortened(repeated)}",
                "each image in one source",
                "remove them from one of the sources",
            )

    notes = list(first.notes)
    for listing in others:
        notes += listing.notes
    provenances = [listing.provenance for listing in (first, *others) if listing.provenance is not None]
    provenance = pa.concat_tables(provenances).sort_by("image_id") if provenances else None
    return Listing(_sorted_by_id(table), first.classes, tuple(notes), provenance)


def _sorted_by_id(table: pa.Table) -> pa.Table:
    """Returns the rows of a listing in the order of their ids, compared by bytes; the same table if they are in it."""
    ids = table["image_id"]
    if pc.all(pc.less(ids.slice(0, max(0, len(ids) - 1)), ids.slice(1))).as_py():
        return table
    return take_rows(table, pc.sort_indices(ids).to_numpy().astype(np.int64))


def check_name_lengths(names: Iterable[str]) -> None:
    """Checks the names of images, which files such as masks are named after.

    Raises:
        UserError: A name is too long for a file system.
    """
    lengths: dict[str, int] = {}
    for name in names:
        length = max(len(part.encode()) for part in name.split("/"))
        if length > _MAX_IMAGE_NAME:
            lengths[name] = length

    if lengths:
        longest = max(lengths, key=lengths.__getitem__)
        raise UserError(
            f"{len(lengths)} image(s) have too long a name; the longest has {lengths[longest]} bytes: "
            f"{longest[:60]}...",
            f"names of at most {_MAX_IMAGE_NAME} bytes: file systems accept {MAX_NAME_BYTES}, and masks are named "
            "after the images, with .png at the end",
            "rename the files, or give the images of a table shorter names in a column `id`",
        )


class ImageCheck(NamedTuple):
    """Result of checking an image file.

    Attributes:
        height, width: Pixels, orientation applied; 0 if there is no picture.
        content_hash: SHA-256 of the file; empty if it could not be read.
        reason: Why the image is rejected; None if it is valid. It is the reason of a `RejectedImage`, `cannot be read`
            for a file that does not exist, is not a regular file or is too large, or `kills the decoder` for a file
            that ends every process that opens it. Transient errors (of a disk or a server, or refused access) are never
            reasons.
        pixels, low, high: See `PictureCheck`.
    """

    height: int
    width: int
    content_hash: str
    reason: str | None
    pixels: str | None = None
    low: float | None = None
    high: float | None = None


def check_images(listing: pa.Table, *, min_side: int = 32, max_pixels: int = MAX_PIXELS) -> pa.Table:
    """Opens, decodes and hashes the images of a part of a listing.

    Args:
        min_side: Minimum length of the shorter side, pixels. Smaller images are rejected.
        max_pixels: Maximum width x height. Larger images are rejected before they are decoded.

    Returns:
        Table of CHECKED_SCHEMA. Reasons are permanent: the file does not exist, or its content is not a valid image.

    Raises:
        UserError: A file cannot be read at present (see `read_bytes`), or access to it is refused.
    """
    return with_checks(listing, [_check_file(uri, min_side, max_pixels) for uri in listing["uri"].to_pylist()])


def with_checks(listing: pa.Table, checks: Sequence[ImageCheck]) -> pa.Table:
    """Adds one check per row to rows of LISTING_SCHEMA. Returns a table of CHECKED_SCHEMA."""
    columns: dict[str, list[Any]] = {}
    for name in ImageCheck._fields:
        columns[name] = [getattr(check, name) for check in checks]
    return with_check_columns(listing, pa.table(columns, CHECK_SCHEMA))


def with_check_columns(listing: pa.Table, checks: pa.Table) -> pa.Table:
    """Adds the columns of checks (CHECK_SCHEMA) to rows of LISTING_SCHEMA. Returns a table of CHECKED_SCHEMA."""
    columns = [checks[name] if name in ImageCheck._fields else listing[name] for name in CHECKED_SCHEMA.names]
    return pa.table(columns, schema=CHECKED_SCHEMA)


def reject_out_of_bounds(checks: pa.Table, min_side: int, max_pixels: int) -> pa.Table:
    """Rejects images with too many pixels or too short a side in a table of checks (CHECK_SCHEMA)."""
    height = checks["height"].to_numpy().astype(np.int64)
    width = checks["width"].to_numpy()
    out_of_bounds = (height * width > max_pixels) | (np.minimum(height, width) < min_side)
    out_of_bounds &= checks["reason"].is_null().to_numpy()
    if not out_of_bounds.any():
        return checks

    sizes = zip(height[out_of_bounds].tolist(), width[out_of_bounds].tolist(), strict=True)
    new_reasons = pa.array([size_problem(h, w, min_side, max_pixels) for h, w in sizes], pa.string())
    reasons = pc.replace_with_mask(checks["reason"].combine_chunks(), pa.array(out_of_bounds), new_reasons)
    return checks.set_column(checks.schema.get_field_index("reason"), CHECK_SCHEMA.field("reason"), reasons)


def reject_unknown_ranges(checks: pa.Table, value_range: ValueRange | None) -> pa.Table:
    """Rejects images whose pixels cannot be read without `data.value_range` in a table of checks (CHECK_SCHEMA)."""
    is_deep = pc.and_(pc.is_in(checks["pixels"], pa.array(["integers", "floats"])), checks["reason"].is_null())
    deep = checks.filter(is_deep)
    if value_range is not None or not len(deep):
        return checks

    rows = deep.select(["pixels", "low", "high"]).to_pylist()
    problems = pa.array([range_problem(row["pixels"], row["low"], row["high"], None) for row in rows], pa.string())
    reasons = pc.replace_with_mask(checks["reason"].combine_chunks(), is_deep.combine_chunks(), problems)
    return checks.set_column(checks.schema.get_field_index("reason"), CHECK_SCHEMA.field("reason"), reasons)


def _check_file(uri: str, min_side: int, max_pixels: int) -> ImageCheck:
    content_hash = ""
    try:
        data = read_bytes(uri)
        content_hash = hashlib.sha256(data).hexdigest()
        decode = functools.partial(check_picture, data, min_side=min_side, max_pixels=max_pixels)
        height, width, pixels, low, high = retry_io(uri, decode)
    except RejectedImage as error:
        return ImageCheck(0, 0, content_hash, error.reason)
    except PermissionError as error:  # not a property of the image
        raise access_refused(uri, error) from None
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return ImageCheck(0, 0, content_hash, f"cannot be read: {describe_length(uri)}")
        return ImageCheck(0, 0, content_hash, one_line(f"cannot be read: {error_text(error)}", MAX_REASON))
    return ImageCheck(height, width, content_hash, None, pixels, low, high)

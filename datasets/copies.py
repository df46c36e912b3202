"""Finds files with the same content: copies that are left out of train, and images in more than one split."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.index import CHECK_SCHEMA
from mcis.datasets.tables.large_tables import take_rows, text_hashes

COPY_IN_TRAIN = "copy of a training image"
COPY_OF_VAL = "copy of a val image"
"""Kinds of reasons for which copies are left out of train."""
_DOMAIN_ORDER = ("target", "source", "web")


class TrainingCopies(NamedTuple):
    """Training images that are left out because another image has the same content.

    Attributes:
        rows: Row numbers in the listing, ascending, (C,).
        reasons: Reason of each row, `COPY_IN_TRAIN: <id>` or `COPY_OF_VAL: <id>`.
        other_tags: Number of copies in train whose tags differ from those of the image that stays.
    """

    rows: NDArray[np.int64]
    reasons: list[str]
    other_tags: int


def find_training_copies(listing: pa.Table, content_hash: pa.ChunkedArray) -> TrainingCopies:
    """Finds the images of split train that have the content of a val image or of another image of train.

    Of several copies in train, the one stays whose domain comes first in target, source, web; then one that has a tag
    or is a negative; then the first.

    Args:
        listing: LISTING_SCHEMA, N rows.
        content_hash: SHA-256 of each file, N rows; empty if it could not be read.
    """
    content = text_hashes(content_hash)
    ordered = np.sort(content)
    repeated = np.unique(ordered[1:][np.diff(ordered) == 0])
    del ordered
    rows = np.flatnonzero(np.isin(content, repeated))

    images = take_rows(listing.select(["image_id", "domain", "split", "tags", "is_negative"]), rows).to_pylist()
    hashes = take_rows(pa.table({"hash": content_hash}), rows)["hash"].to_pylist()
    same: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row, image, text in zip(rows.tolist(), images, hashes, strict=True):
        if text:
            same.setdefault(text, []).append((row, image))

    reason_of: dict[int, str] = {}
    other_tags = 0
    for copies in same.values():
        val = [image for _, image in copies if image["split"] == "val"]
        train = [(row, image) for row, image in copies if image["split"] == "train"]
        train.sort(key=_copy_rank)
        if val:
            reason_of |= {row: f"{COPY_OF_VAL}: {val[0]['image_id']}" for row, _ in train}
        elif train:
            (_, remaining), *others = train
            reason_of |= {row: f"{COPY_IN_TRAIN}: {remaining['image_id']}" for row, _ in others}
            other_tags += sum(image["tags"] != remaining["tags"] for _, image in others)
    ordered_rows = sorted(reason_of)
    return TrainingCopies(np.array(ordered_rows, np.int64), [reason_of[row] for row in ordered_rows], other_tags)


def _copy_rank(copy: tuple[int, dict[str, Any]]) -> tuple[int, bool, int]:
    row, image = copy
    is_unlabelled = not (image["tags"] or image["is_negative"])
    domain = image["domain"]
    if domain in _DOMAIN_ORDER:
        position = _DOMAIN_ORDER.index(domain)
    else:
        position = len(_DOMAIN_ORDER)
    return position, is_unlabelled, row


def is_copy(rejects: pa.Table) -> pa.ChunkedArray:
    """Returns which rejects (REJECTS_SCHEMA) are copies, which can be read but are not trained on."""
    return pc.starts_with(rejects["reason"], "copy of a ")


def reject_copies(checks: pa.Table, copies: TrainingCopies, first: int) -> pa.Table:
    """Rejects copies in a table of checks (CHECK_SCHEMA), whose row 0 is row `first` of the listing."""
    begin, end = np.searchsorted(copies.rows, [first, first + len(checks)])
    if begin == end:
        return checks

    reasons = checks["reason"].to_pylist()
    for row, reason in zip(copies.rows[begin:end].tolist(), copies.reasons[begin:end], strict=True):
        reasons[row - first] = reasons[row - first] or reason
    position = checks.schema.get_field_index("reason")
    return checks.set_column(position, CHECK_SCHEMA.field("reason"), pa.array(reasons, pa.string()))


def find_duplicates(read: Callable[[list[str]], Iterable[pa.Table]]) -> list[list[str]]:
    """Finds images with the same content in more than one split. A network would be trained and scored on them.

    Args:
        read: Returns the given columns of an index as consecutive tables. It is called a second time if there are such
            images.

    Returns:
        The ids of the images, one list per content.
    """
    parts = [_hash_columns(table) for table in read(["content_hash", "split"])]
    content, split = np.concatenate([np.zeros((2, 0), np.int64), *parts], axis=1)
    order = np.lexsort((split, content))
    same_content = np.diff(content[order]) == 0
    other_split = np.diff(split[order]) != 0
    contents_in_several_splits = np.unique(content[order][1:][same_content & other_split])
    if not len(contents_in_several_splits):
        return []

    images: dict[str, list[str]] = {}
    for table in read(["content_hash", "split", "image_id"]):
        rows = table.filter(pa.array(np.isin(_hash_columns(table)[0], contents_in_several_splits)))
        for row in rows.to_pylist():
            if row["content_hash"]:
                images.setdefault(row["content_hash"], []).append(row["image_id"])
    return list(images.values())


def _hash_columns(table: pa.Table) -> NDArray[np.int64]:
    """Returns hashes of the content and the split of each row, (2, N), valid in this process only."""
    return np.stack([text_hashes(table["content_hash"]), text_hashes(table["split"])])

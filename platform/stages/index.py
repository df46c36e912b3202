"""Stage 1: lists and images of the sources -> index.parquet (INDEX_SCHEMA), rejects.parquet (REJECTS_SCHEMA).

The workspace stores the result of checking each file. The stage opens only images that are new or changed.
"""

import collections
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.copies import (
    COPY_OF_VAL,
    TrainingCopies,
    find_duplicates,
    find_training_copies,
    is_copy,
    reject_copies,
)
from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.images.decode import CHECKS_VERSION
from mcis.datasets.index import (
    CHECK_SCHEMA,
    INDEX_SCHEMA,
    REJECTS_SCHEMA,
    ImageCheck,
    check_images,
    reject_out_of_bounds,
    reject_unknown_ranges,
    with_check_columns,
    with_checks,
)
from mcis.datasets.sources import SOURCES
from mcis.datasets.storage.folders import remove
from mcis.datasets.tables.large_tables import in_shards, release_arrow_memory, table_digest, take_rows
from mcis.datasets.tags import count_tags
from mcis.datasets.unclear_pixels import UnclearPixels
from mcis.platform.config.sections import Config, sources_of
from mcis.platform.engine.mapping import map_table
from mcis.platform.outputs.provenance import license_counts, write_provenance
from mcis.platform.outputs.read_index import rows_in_split
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import file_stamps, fingerprint, read_parts, read_table, write_batches, write_table
from mcis.platform.runs.image_checks import StoredChecks, image_files, store_checks
from mcis.platform.runs.results import IndexResult

_INDEX_FILE = "index.parquet"
_SHARD_ROWS = 256  # about 0.2 s of work for one core
_BLOCK_ROWS = 2**20
"""Number of consecutive rows of a listing that are checked before the results are stored. It bounds the memory."""
_CHECK_COLUMNS = ["uri", *ImageCheck._fields]
_IDENTITY_COLUMNS = [name for name in INDEX_SCHEMA.names if name not in ("uri", "mask_uri", "saliency_uri")]
"""Columns that later stages depend on. Stages that read masks or saliency maps add these files to their own keys."""


def inputs(config: Config, context: RunContext) -> Any:
    """Inputs of the stage key: lists, class names, size and modification time of every image, version of the checks."""
    assert context.sources is not None
    listing = context.sources.listing()
    parts: list[Any] = [
        table_digest([listing.table]),
        listing.classes,
        file_stamps(listing.table["uri"]),
        CHECKS_VERSION,
    ]
    if listing.provenance is not None:
        parts.append(table_digest([listing.provenance]))
    return parts


def run(config: Config, context: RunContext) -> IndexResult:
    """Checks every new or changed image in parallel and writes the index.

    Raises:
        UserError: A file cannot be read at present, or changes during the check (the stage then stays unfinished); too
            many images are rejected (data.max_rejected); no training image is left; or a class has no training image
            although a source is curated.
    """
    if context.recompute:
        remove(context.workspace.image_checks)
    assert context.sources is not None
    table, classes, listing_notes, provenance = context.sources.listing()
    num_images = len(table)
    context.sources.release()

    shards, num_opened, copies = _check_images(table, config, context)
    del table  # `shards` yields shards and frees the listing with the last one
    rejects, unclear = _write_index(context, shards, config)
    _raise_for_rejects(config, rejects, num_images)

    index_file = context.output / _INDEX_FILE
    index = read_table(index_file, ["split", "domain", "tags", "is_negative", "saliency_uri"])
    train = rows_in_split(index, "train")
    train_counts = _images_per_class(train["tags"], classes)
    _raise_for_classes(config, len(train), train_counts, rejects)

    counts = _counts(index, train, rejects, num_opened, classes)
    if provenance is not None:
        counts["licenses"] = _write_licenses(context, provenance)
    duplicates = find_duplicates(functools.partial(read_parts, index_file))
    reject_notes = _reject_notes(rejects, num_images, copies)
    data_notes = _data_notes(train_counts, counts["unlabelled"], duplicates)
    return IndexResult(
        identity=_identity(config, index_file, classes),
        classes=classes,
        value_range=config.data.value_range,
        notes=(*listing_notes, *reject_notes, *unclear.notes(), *data_notes),
        counts=counts,
    )


def _write_index(context: RunContext, shards: Iterator[pa.Table], config: Config) -> tuple[pa.Table, UnclearPixels]:
    """Writes index.parquet and rejects.parquet.

    Args:
        shards: Tables of CHECKED_SCHEMA.

    Returns:
        The rejected images (REJECTS_SCHEMA), and counts of the accepted images whose pixels are unclear.
    """
    rejected: list[pa.Table] = []
    unclear = UnclearPixels(config.data.value_range)
    write_batches(context.output / _INDEX_FILE, INDEX_SCHEMA, _accepted_images(shards, rejected, unclear))
    release_arrow_memory()  # returns the listing's memory to the system

    rejects = pa.concat_tables([REJECTS_SCHEMA.empty_table(), *rejected])
    write_table(context.output / "rejects.parquet", rejects)
    return rejects, unclear


def _accepted_images(
    shards: Iterator[pa.Table], rejected: list[pa.Table], unclear: UnclearPixels
) -> Iterator[pa.Table]:
    """Yields the rows of accepted images (INDEX_SCHEMA).

    Args:
        shards: Tables of CHECKED_SCHEMA.
        rejected: List to which the rows of rejected images (REJECTS_SCHEMA) are appended.
        unclear: Counts the images whose pixels are unclear.
    """
    for shard in shards:
        is_accepted = shard["reason"].is_null()
        rejected.append(shard.filter(pc.invert(is_accepted)).select(REJECTS_SCHEMA.names).cast(REJECTS_SCHEMA))
        accepted = shard.filter(is_accepted)
        unclear.add(accepted)
        yield accepted.select(INDEX_SCHEMA.names).cast(INDEX_SCHEMA)


def open_images(max_pixels: int, rows: pa.Table) -> pa.Table:
    """Checks the images of a listing. Returns URIs and results; images above `max_pixels` are not decoded."""
    return check_images(rows, min_side=1, max_pixels=max_pixels).select(_CHECK_COLUMNS)


class _Checked(NamedTuple):
    """The images of a listing with the results of their checks.

    Attributes:
        shards: Iterator over shards of CHECKED_SCHEMA, each made on demand.
        num_opened: Number of images that were opened.
        copies: Copies that are left out of train; None if copies are kept.
    """

    shards: Iterator[pa.Table]
    num_opened: int
    copies: TrainingCopies | None


def _check_images(table: pa.Table, config: Config, context: RunContext) -> _Checked:
    """Checks the images of a listing, except for files whose results are stored in the workspace.

    Raises:
        UserError: Files changed during the check.
    """
    files = image_files(table["uri"])
    stored = StoredChecks(context.workspace)
    checks = stored.checks
    check_rows = stored.find(files)

    unchecked = np.flatnonzero(check_rows < 0)
    if len(unchecked):
        block_starts = np.flatnonzero(np.diff(unchecked // _BLOCK_ROWS)) + 1
        for block in np.split(unchecked, block_starts):
            new_checks = _open_and_store(take_rows(table, block), take_rows(files, block), config, context)
            check_rows[block] = len(checks) + np.arange(len(block))
            checks = pa.concat_tables([checks, new_checks])
    copies = None if config.data.keep_copies else _find_copies(table, check_rows, checks)
    return _Checked(_shards(table, check_rows, checks, copies, config), len(unchecked), copies)


def _find_copies(table: pa.Table, check_rows: NDArray[np.int64], checks: pa.Table) -> TrainingCopies:
    """Finds copies in a listing; for the arguments see `_shards`."""
    hashes = take_rows(checks.select(["content_hash"]), check_rows)["content_hash"]
    return find_training_copies(table, hashes)


def _open_and_store(table: pa.Table, files: pa.Table, config: Config, context: RunContext) -> pa.Table:
    """Opens the images of a listing, stores the results in the workspace, and returns them (CHECK_SCHEMA).

    Args:
        table: Rows of the listing.
        files: `image_files` of these rows.

    Raises:
        UserError: Files changed during the check; their results are not stored.
    """
    # Shards are named after row numbers. The digest in the folder's name identifies the files of these rows.
    folder = context.output / f"verified-{table_digest([files])}"
    map_table(
        table,
        folder,
        worker=functools.partial(open_images, config.data.max_pixels),
        label="index",
        compute=config.compute,
        shard_rows=max(config.compute.shard_rows, _SHARD_ROWS),
        reject=_reject_crashing_image,
    )
    opened = read_table(folder)
    assert opened["uri"].equals(files["uri"])

    checks = opened.select(CHECK_SCHEMA.names).cast(CHECK_SCHEMA)
    changed = pa.array(_has_changed(files))
    stamped_checks = files
    for name in CHECK_SCHEMA.names:
        stamped_checks = stamped_checks.append_column(name, checks[name])
    store_checks(context.workspace, stamped_checks.filter(pc.invert(changed)))
    remove(folder)

    changed_uris = sorted(files["uri"].filter(changed).unique().to_pylist())
    if changed_uris:
        raise UserError(
            f"{len(changed_uris)} file(s) changed while they were read: {join_shortened(changed_uris)}",
            "files that do not change while the index is made",
            "repeat the command once they are complete; it opens only these files again",
        )
    return checks


def _shards(
    table: pa.Table, check_rows: NDArray[np.int64], checks: pa.Table, copies: TrainingCopies | None, config: Config
) -> Iterator[pa.Table]:
    """Yields a listing with the check of each image, in shards (CHECKED_SCHEMA).

    Args:
        table: The listing, N rows.
        check_rows: For each image, the row number of its check, (N,).
        checks: Results of all checks (CHECK_SCHEMA).
        copies: Copies that are rejected.
    """
    start = 0
    for shard in in_shards([table]):
        shard_checks = take_rows(checks, check_rows[start : start + len(shard)])
        shard_checks = reject_out_of_bounds(shard_checks, config.data.min_side, config.data.max_pixels)
        shard_checks = reject_unknown_ranges(shard_checks, config.data.value_range)
        if copies:
            shard_checks = reject_copies(shard_checks, copies, start)
        yield with_check_columns(shard, shard_checks)
        start += len(shard)


def _has_changed(opened: pa.Table) -> NDArray[np.bool_]:
    """Whether each file was changed or removed since `image_files` returned its stamp, (N,)."""
    current = image_files(opened["uri"])
    other_size = opened["size"].to_numpy() != current["size"].to_numpy()
    other_time = opened["changed"].to_numpy() != current["changed"].to_numpy()
    return np.logical_or(other_size, other_time)


def _reject_crashing_image(row: pa.Table, cause: str) -> pa.Table:
    """The check of an image that ends every process that opens it; used instead of the result of `open_images`.

    The result has no content hash, so it is not stored: the image may be valid, and the machine out of memory.
    """
    return with_checks(row, [ImageCheck(0, 0, "", f"kills the decoder: {cause}")]).select(_CHECK_COLUMNS)


def _raise_for_rejects(config: Config, rejects: pa.Table, num_images: int) -> None:
    """Raises UserError if more images are rejected than allowed: data.max_rejected, or no image of a curated source.

    Copies do not count: they can be read.
    """
    rejects = rejects.filter(pc.invert(is_copy(rejects)))
    if config.data.max_rejected is not None:
        allowed = config.data.max_rejected
        counted = rejects
        description = ""
    else:
        curated = [name for name in sources_of(config.sources) if SOURCES[name].curated]
        domains = pa.array([SOURCES[name].domain for name in curated], pa.string())
        allowed = 0
        counted = rejects.filter(pc.is_in(rejects["domain"], domains))
        description = f" of the curated images of {join_shortened(curated)}"
    if len(counted) > allowed:
        raise UserError(
            f"{len(counted)} of {num_images} images cannot be read: {_reasons(counted)}",
            f"at most {allowed} unreadable images{description} (data.max_rejected)",
            f"replace or remove them, or set data.max_rejected={len(rejects)} to continue without them",
        )


def _reject_notes(rejects: pa.Table, num_images: int, copies: TrainingCopies | None) -> list[str]:
    """Notes on the images that are left out: those that cannot be read, and copies.

    Args:
        rejects: REJECTS_SCHEMA.
        num_images: Number of images of the listing.
        copies: Copies that are left out of train; None if copies are kept.
    """
    notes = []
    unreadable = rejects.filter(pc.invert(is_copy(rejects)))
    if len(unreadable):
        notes.append(f"{len(unreadable)} of {num_images} images are rejected: {_reasons(unreadable)}")
    if copies:
        notes += _copy_notes(rejects.filter(is_copy(rejects)), copies.other_tags)
    return notes


def _copy_notes(rejects: pa.Table, other_tags: int) -> list[str]:
    """Notes on the copies that are left out of train.

    Args:
        rejects: The rejects that are copies.
        other_tags: See `TrainingCopies`.
    """
    if not len(rejects):
        return []
    num_val_copies = pc.sum(pc.starts_with(rejects["reason"], COPY_OF_VAL)).as_py()
    parts = []
    if len(rejects) > num_val_copies:
        parts.append(
            f"{len(rejects) - num_val_copies} exact copies of other training images ({other_tags} with other tags)"
        )
    if num_val_copies:
        parts.append(f"{num_val_copies} exact copies of val images")
    return [f"left out of train: {' and '.join(parts)}: {_reasons(rejects)}; data.keep_copies=true keeps them"]


def _reasons(rejects: pa.Table) -> str:
    """Ids of some rejected images, with their reasons."""
    return join_shortened(pc.binary_join_element_wise(rejects["image_id"], rejects["reason"], ": ").to_pylist())


def _raise_for_classes(config: Config, num_train: int, train_counts: Mapping[str, int], rejects: pa.Table) -> None:
    """Raises UserError if no training image is left, or if a class has none although a source is curated."""
    if not num_train:
        raise UserError(
            f"no readable image in split train: {_reasons(rejects) or 'no image has this split'}",
            "at least one training image",
            "correct the paths, which are relative to the table, replace the rejected images, or keep copies by "
            "data.keep_copies=true",
        )
    empty = [name for name, count in train_counts.items() if count == 0]
    if empty and any(SOURCES[name].curated for name in sources_of(config.sources)):
        raise UserError(
            f"no readable training image of class {join_shortened(empty)}",
            "at least one training image for each class",
            "replace the rejected images, or remove the class from the class file (data.classes)",
        )


def _counts(
    index: pa.Table, train: pa.Table, rejects: pa.Table, num_opened: int, classes: tuple[str, ...]
) -> dict[str, Any]:
    """Numbers for the report, by label.

    Args:
        index: Columns of the index: `split`, `domain`, `tags`, `is_negative`, `saliency_uri`.
        train: Its rows of split train.
        rejects: REJECTS_SCHEMA.
        num_opened: Number of images that were opened.
        classes: The K class names.
    """
    reject_kinds = [reason.partition(":")[0] for reason in rejects["reason"].to_pylist()]
    return {
        "images": _value_counts(index["split"]),
        "domains": _value_counts(index["domain"]),
        "opened": num_opened,
        "tags": _images_per_class(index["tags"], classes),
        "negatives": pc.sum(train["is_negative"]).as_py() or 0,
        "unlabelled": len(train) - len(rows_in_split(train, "train", tagged=True, negatives=True)),
        "rejected": dict(collections.Counter(reject_kinds)),
        "with saliency map": len(index) - index["saliency_uri"].null_count,
    }


def _write_licenses(context: RunContext, provenance: pa.Table) -> dict[str, int]:
    """Writes the provenance of the images of the index, and counts them by license."""
    image_ids = read_table(context.output / _INDEX_FILE, ["image_id"])["image_id"]
    rows = write_provenance(context.output, provenance, image_ids)
    return {count.license: count.images for count in license_counts(rows)}


def _identity(config: Config, index_file: Path, classes: tuple[str, ...]) -> str:
    """Fingerprint of what later stages depend on: columns of the index, classes and the range of pixel values."""
    rows_digest = table_digest(read_parts(index_file, _IDENTITY_COLUMNS))
    return fingerprint(rows_digest, classes, config.data.value_range)


def _images_per_class(tags: pa.ChunkedArray, classes: tuple[str, ...]) -> dict[str, int]:
    """Number of images with each class."""
    return dict(zip(classes, count_tags(tags, len(classes)).tolist(), strict=True))


def _data_notes(train_counts: Mapping[str, int], num_unlabelled: int, duplicates: list[list[str]]) -> list[str]:
    """Notes on weaknesses of the data.

    Args:
        train_counts: Number of training images per class.
        num_unlabelled: Number of training images that have no tag and are no negatives.
        duplicates: Result of `find_duplicates`: the image ids of each content that is in more than one split.
    """
    notes = []
    empty = [name for name, count in train_counts.items() if count == 0]
    if empty:
        notes.append(f"{len(empty)} class(es) have no training image and are never predicted: {join_shortened(empty)}")
    single = [name for name, count in train_counts.items() if count == 1]
    if single:
        notes.append(
            f"{len(single)} class(es) have a single training image, which is paired with itself: "
            f"{join_shortened(single)}"
        )
    if duplicates:
        examples = [" = ".join(images) for images in duplicates]
        notes.append(
            f"{len(duplicates)} image(s) are in more than one split with the same content: {join_shortened(examples)}"
        )
    if num_unlabelled:
        notes.append(
            f"{num_unlabelled} training image(s) have no tag and are not used in training; if they show none of the "
            "classes, set data.untagged=negative"
        )
    return notes


def _value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Number of rows with each value."""
    return {str(pair["values"]): int(pair["counts"]) for pair in pc.value_counts(column).to_pylist()}

"""Stage 1: the sources' lists and images -> index.parquet (INDEX_SCHEMA), rejects.parquet (REJECTS_SCHEMA).

The workspace keeps the verdict on every file, so that any run's index opens only images that are new or changed.
"""

import collections
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.index import (
    CHECK_SCHEMA,
    INDEX_SCHEMA,
    REJECTS_SCHEMA,
    ImageCheck,
    check_images,
    find_duplicates,
    reject_out_of_bounds,
    shown,
    with_check_columns,
    with_checks,
)
from mcis.datasets.sources import SOURCES
from mcis.datasets.storage.folders import remove
from mcis.datasets.tables.large_tables import in_shards, release_arrow_memory, table_digest, take_rows
from mcis.platform.config.sections import Config, sources_of
from mcis.platform.engine.mapping import map_table
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import file_stamps, fingerprint, read_parts, read_table, write_batches, write_table
from mcis.platform.runs.image_checks import KeptVerdicts, image_files, keep_verdicts
from mcis.platform.runs.results import IndexResult

_SHARD_ROWS = 256  # a fifth of a second's work of a core
_BLOCK = 2**20
"""Rows of a listing whose verdicts are kept together: what a kill may lose, and what lies in memory beside them."""
_OPENED = ["uri", *ImageCheck._fields]


def inputs(config: Config, context: RunContext) -> Any:
    """What the index depends on beside the configuration: the lists, and the stamps of every image."""
    assert context.sources is not None
    listed = context.sources.listing()
    return [table_digest([listed.table]), listed.classes, file_stamps(listed.table["uri"])]


def run(config: Config, context: RunContext) -> IndexResult:
    """Verifies in parallel every image that is new or changed and writes the index.

    Raises:
        UserError: a file cannot be read at present or changes meanwhile, which leaves the stage unfinished; more images
            than data.max_rejected are rejected, none is left to train on, or a class of a curated source has none.
    """
    if context.recompute:
        remove(context.workspace.image_checks)
    assert context.sources is not None
    table, classes, notes = context.sources.listing()
    images = len(table)
    context.sources.release()
    verified, opened = _verify(table, config, context)
    del table  # the shards that are to come have the only one
    rejected: list[pa.Table] = []
    index_file = context.part / "index.parquet"
    write_batches(index_file, INDEX_SCHEMA, _sound(verified, rejected))
    release_arrow_memory()  # the listing
    rejects = pa.concat_tables([REJECTS_SCHEMA.empty_table(), *rejected])
    write_table(context.part / "rejects.parquet", rejects)
    _check_rejects(config, rejects, images)
    index = read_table(index_file, ["split", "domain", "tags", "saliency_uri"])
    train = index.filter(pc.equal(index["split"], "train"))["tags"]
    trained, untagged = _images_of_classes(train, classes), pc.sum(pc.equal(pc.list_value_length(train), 0)).as_py()
    _check_classes(config, len(train), trained, rejects)
    left_out = [f"{len(rejects)} of {images} images are rejected: {_reasons(rejects)}"] if len(rejects) else []
    return IndexResult(
        identity=fingerprint(table_digest(read_parts(index_file, _IDENTITY)), classes),
        classes=classes,
        notes=(
            *notes,
            *left_out,
            *_notes(trained, untagged, find_duplicates(functools.partial(read_parts, index_file))),
        ),
        counts={
            "images": _value_counts(index["split"]),
            "domains": _value_counts(index["domain"]),
            "opened": opened,
            "tags": _images_of_classes(index["tags"], classes),
            "untagged": untagged,
            "rejected": dict(collections.Counter(reason.partition(":")[0] for reason in rejects["reason"].to_pylist())),
            "with saliency map": len(index) - index["saliency_uri"].null_count,
        },
    )


_IDENTITY = [name for name in INDEX_SCHEMA.names if name not in ("uri", "mask_uri", "saliency_uri")]
"""Later stages depend on what the images are, not on where they lie, when touched, or whether they have truth."""


def _sound(shards: Iterator[pa.Table], rejected: list[pa.Table]) -> Iterator[pa.Table]:
    """The rows of images that are sound (INDEX_SCHEMA); those of others (REJECTS_SCHEMA) are added to `rejected`."""
    for shard in shards:
        sound = shard["reason"].is_null()
        rejected.append(shard.filter(pc.invert(sound)).select(REJECTS_SCHEMA.names).cast(REJECTS_SCHEMA))
        yield shard.filter(sound).select(INDEX_SCHEMA.names).cast(INDEX_SCHEMA)


def open_images(max_pixels: int, rows: pa.Table) -> pa.Table:
    """Rows of a listing -> the uri and the verdict of each, however small; more than `max_pixels` are not decoded."""
    return check_images(rows, min_side=1, max_pixels=max_pixels).select(_OPENED)


def _verify(table: pa.Table, config: Config, context: RunContext) -> tuple[Iterator[pa.Table], int]:
    """Shards of CHECKED_SCHEMA, each made when it is taken, and how many images were opened."""
    files, kept = image_files(table["uri"]), KeptVerdicts(context.workspace)
    rows, verdicts = kept.find(files), kept.verdicts
    unverified = np.flatnonzero(rows < 0)
    for block in np.split(unverified, np.flatnonzero(np.diff(unverified // _BLOCK)) + 1) if len(unverified) else ():
        fresh = _fresh(take_rows(table, block), take_rows(files, block), config, context)
        rows[block] = len(verdicts) + np.arange(len(block))
        verdicts = pa.concat_tables([verdicts, fresh])
    return _shards(table, rows, verdicts, config), len(unverified)


def _fresh(table: pa.Table, files: pa.Table, config: Config, context: RunContext) -> pa.Table:
    """The verdicts on the files of a listing's rows, CHECK_SCHEMA, which the workspace keeps.

    UserError where files changed meanwhile: these are not kept.
    """
    # A shard is named by the numbers of its rows, so the folder is named by the files that these numbers count.
    folder = context.part / f"verified-{table_digest([files])}"
    map_table(
        table,
        folder,
        worker=functools.partial(open_images, config.data.max_pixels),
        label="index",
        compute=config.compute,
        shard_rows=max(config.compute.shard_rows, _SHARD_ROWS),
        reject=_kills,
    )
    opened = read_table(folder)
    assert opened["uri"].equals(files["uri"])
    fresh, changed = opened.select(CHECK_SCHEMA.names).cast(CHECK_SCHEMA), pa.array(_changed(files))
    columns = {name: part[name] for part in (files, fresh) for name in part.column_names}
    keep_verdicts(context.workspace, pa.table(columns).filter(pc.invert(changed)))
    remove(folder)
    if uris := sorted(files["uri"].filter(changed).unique().to_pylist()):
        raise UserError(
            f"{len(uris)} file(s) changed meanwhile: {shown(uris)}",
            "files that stay as they are meanwhile",
            "repeat the command once they do: it opens these files again, and no others",
        )
    return fresh


def _shards(table: pa.Table, rows: NDArray[np.int64], verdicts: pa.Table, config: Config) -> Iterator[pa.Table]:
    """The listing and the verdict on each of its rows, (N,) rows of `verdicts`, some at a time."""
    first = 0
    for shard in in_shards([table]):
        of_shard = take_rows(verdicts, rows[first : first + len(shard)])
        yield with_check_columns(shard, reject_out_of_bounds(of_shard, config.data.min_side, config.data.max_pixels))
        first += len(shard)


def _changed(opened: pa.Table) -> NDArray[np.bool_]:
    """Whether a file was changed or removed after it was listed, (N,): which of its contents was read is unknown."""
    now = image_files(opened["uri"])
    return np.any([opened[name].to_numpy() != now[name].to_numpy() for name in ("size", "changed")], axis=0)


def _kills(row: pa.Table, what: str) -> pa.Table:
    """The rejection of an image that ends each process that opens it, in place of what `open_images` makes of it.

    It has no hash, so it is not kept for other indexes: the image may be as sound as its machine was short of memory.
    """
    return with_checks(row, [ImageCheck(0, 0, "", f"kills the decoder: {what}")]).select(_OPENED)


def _check_rejects(config: Config, rejects: pa.Table, images: int) -> None:
    """Raises where more images are unreadable than the run is to go on without."""
    allowed, counted, which = config.data.max_rejected, rejects, ""
    if allowed is None:
        curated = [name for name in sources_of(config.sources) if SOURCES[name].curated]
        domains = pa.array([SOURCES[name].domain for name in curated], pa.string())
        allowed, counted = 0, rejects.filter(pc.is_in(rejects["domain"], domains))
        which = f" of the curated images of {shown(curated)}"
    if len(counted) > allowed:
        raise UserError(
            f"{len(counted)} of {images} images cannot be read: {_reasons(counted)}",
            f"at most {allowed} unreadable images{which} (data.max_rejected)",
            f"replace or remove them, or go on without them by data.max_rejected={len(rejects)}",
        )


def _reasons(rejects: pa.Table) -> str:
    return shown(pc.binary_join_element_wise(rejects["uri"], rejects["reason"], ": ").to_pylist())


def _check_classes(config: Config, images: int, trained: Mapping[str, int], rejects: pa.Table) -> None:
    """Raises where no image is left to train on, or, with a curated source, none of a class."""
    if not images:
        raise UserError(f"no readable image in split train: {_reasons(rejects)}", "at least one", "correct the paths")
    empty = [name for name, count in trained.items() if not count]
    if empty and any(SOURCES[name].curated for name in sources_of(config.sources)):
        raise UserError(
            f"no readable training image of class {shown(empty)}",
            "at least one for each class",
            "replace the rejected images, or take the class out of the class file (data.classes)",
        )


def _images_of_classes(tags: pa.ChunkedArray, classes: tuple[str, ...]) -> dict[str, int]:
    """How many images have each class."""
    counts = np.bincount(pc.list_flatten(tags).to_numpy(), minlength=len(classes)).tolist()
    return dict(zip(classes, counts, strict=True))


def _notes(trained: Mapping[str, int], untagged: int, repeated: list[list[str]]) -> list[str]:
    """What makes an index less useful.

    Args:
        trained: training images of each class.
        untagged: training images without a tag.
        repeated: images of several splits that have the same content.
    """
    notes, (empty, single) = [], ([name for name, count in trained.items() if count == n] for n in (0, 1))
    if empty:
        notes.append(f"{len(empty)} class(es) without a training image are never predicted: {shown(empty)}")
    if single:
        notes.append(f"{len(single)} class(es) with a single training image, its own partner in pairs: {shown(single)}")
    if repeated:
        examples = [" = ".join(images) for images in repeated]
        notes.append(f"{len(repeated)} image(s) are in more than one split with the same content: {shown(examples)}")
    if untagged:
        notes.append(f"{untagged} training image(s) without a tag take no part in training")
    return notes


def _value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {str(pair["values"]): int(pair["counts"]) for pair in pc.value_counts(column).to_pylist()}

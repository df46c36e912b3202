"""Stage 1: the sources' lists and images -> index.parquet (INDEX_SCHEMA), rejects.parquet (REJECTS_SCHEMA).

The workspace keeps the verdict on every file, so that an index, of this run or another, opens only images that are new
or changed.
"""

import collections
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.copies import remove
from mcis.datasets.errors import UserError
from mcis.datasets.index import (
    INDEX_SCHEMA,
    REJECTS_SCHEMA,
    Listing,
    Verdict,
    duplicates,
    shown,
    verify,
    with_verdicts,
)
from mcis.datasets.sources import SOURCES
from mcis.platform.config.sections import Config
from mcis.platform.config.settings import sources_of
from mcis.platform.engine.mapping import map_table
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.listing import listing
from mcis.platform.runs.results import IndexResult
from mcis.platform.runs.verdicts import (
    ImageFile,
    Verdicts,
    image_files,
    keep_verdicts,
    read_verdicts,
    verdicts_of,
)
from mcis.platform.runs.workspace import Workspace, file_stamps, fingerprint, read_table, write_table

_SHARD_ROWS = 256  # a fifth of a second's work of a core
_OPENED = ["uri", *Verdict._fields]


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Making the listing has found what can be found without opening an image."""


def inputs(config: Config, context: RunContext) -> Any:
    """What the index depends on beside the configuration: the lists, and the stamps of every image."""
    listed = listing(config)
    return [fingerprint(listed.table.to_pydict()), listed.classes, file_stamps(listed.table["uri"].to_pylist())]


def run(config: Config, context: RunContext) -> IndexResult:
    """Verifies in parallel every image that is new or changed and writes the index.

    Raises:
        UserError: a file cannot be read at present or changes meanwhile, which leaves the stage unfinished; more images
            than data.max_rejected are rejected, none is left to train on, or a class of a curated source has none.
    """
    if context.afresh:
        context.workspace.verdicts.unlink(missing_ok=True)
    listed = listing(config)
    verified = _verify(listed.table, config, context)
    rejected = pc.is_valid(verified.table["reason"])
    rejects = verified.table.filter(rejected).select(REJECTS_SCHEMA.names).cast(REJECTS_SCHEMA)
    index = verified.table.filter(pc.invert(rejected)).select(INDEX_SCHEMA.names).cast(INDEX_SCHEMA)
    write_table(context.part / "index.parquet", index)
    write_table(context.part / "rejects.parquet", rejects)
    _check_rejects(config, rejects, len(listed.table))
    _check_classes(config, index, listed.classes)
    return IndexResult(
        # Later stages depend on what the images are, not on where they lie, when they were touched, or whether there
        # is truth for them.
        identity=fingerprint(index.drop_columns(["uri", "mask_uri", "saliency_uri"]).to_pydict(), listed.classes),
        classes=listed.classes,
        notes=(*listed.notes, *_notes(index, listed.classes)),
        busy=verified.busy,
        counts=_counts(index, rejects, listed.classes, verified.opened),
    )


class _Verified(NamedTuple):
    """A listing with the columns of each image's verdict, seconds of verifying, and how many images were opened."""

    table: pa.Table
    busy: float
    opened: int


class Verify:
    """Rows of a listing -> the uri and the verdict of each, however small.

    Args:
        max_pixels: greatest width x height that is decoded.
    """

    def __init__(self, max_pixels: int):
        self.max_pixels = max_pixels

    def __call__(self, rows: pa.Table) -> pa.Table:
        return verify(rows, min_side=1, max_pixels=self.max_pixels).select(_OPENED)


def _verify(table: pa.Table, config: Config, context: RunContext) -> _Verified:
    files = image_files(table["uri"].to_pylist())
    verdicts = read_verdicts(context.workspace)
    unverified = [row for row, file in enumerate(files) if file not in verdicts]
    busy = 0.0
    if unverified:
        opened = [files[row] for row in unverified]
        # A shard is named by the numbers of its rows, so the folder is named by the files that these numbers count.
        folder = context.part / f"verified-{fingerprint(opened)}"
        busy = _open(table.take(pa.array(unverified)), folder, config)
        fresh = _read_opened(folder, opened)
        changed = _changed(opened)
        keep_verdicts(context.workspace, {file: verdict for file, verdict in fresh.items() if file not in changed})
        remove(folder)
        if changed:
            raise UserError(
                f"{len(changed)} file(s) changed meanwhile: {shown(sorted(file.uri for file in changed))}",
                "files that stay as they are meanwhile",
                "repeat the command once they do: it opens these files again, and no others",
            )
        verdicts = {**verdicts, **fresh}
    of_rows = [verdicts[file].within(config.data.min_side, config.data.max_pixels) for file in files]
    return _Verified(with_verdicts(table, of_rows), busy, len(unverified))


def _changed(opened: list[ImageFile]) -> set[ImageFile]:
    """The files that were changed or removed after they were listed: which of their contents was read is unknown."""
    now = image_files([file.uri for file in opened])
    return {was for was, file in zip(opened, now, strict=True) if was != file}


def _open(rows: pa.Table, folder: Path, config: Config) -> float:
    """Opens the images of a listing's rows in parallel and writes their verdicts; the seconds that all tasks took."""
    shard_rows = max(config.compute.shard_rows, _SHARD_ROWS)
    arguments = (config.data.max_pixels,)
    return map_table(rows, Verify, arguments, folder, label="index", shard_rows=shard_rows, instead=_kills).busy


def _kills(row: pa.Table, what: str) -> pa.Table:
    """The rejection of an image that ends each process that opens it, in place of what `Verify` makes of it.

    It has no hash, so it is not kept for other indexes: the image may be as sound as its machine was short of memory.
    """
    return with_verdicts(row, [Verdict(0, 0, "", f"kills the decoder: {what}")]).select(_OPENED)


def _read_opened(folder: Path, files: list[ImageFile]) -> Verdicts:
    table = read_table(folder)
    assert table["uri"].to_pylist() == [file.uri for file in files]
    return dict(zip(files, verdicts_of(table), strict=True))


def _check_rejects(config: Config, rejects: pa.Table, images: int) -> None:
    """Raises where more images are unreadable than the run is to go on without."""
    allowed, counted, which = config.data.max_rejected, rejects, ""
    if allowed is None:
        curated = [name for name in sources_of(config.setting) if SOURCES[name].curated]
        domains = pa.array([SOURCES[name].domain for name in curated], pa.string())
        allowed, counted = 0, rejects.filter(pc.is_in(rejects["domain"], domains))
        which = f" of the curated images of {shown(curated)}"
    if len(counted) > allowed:
        reasons = [f"{row['uri']}: {row['reason']}" for row in counted.to_pylist()]
        raise UserError(
            f"{len(counted)} of {images} images cannot be read: {shown(reasons)}",
            f"at most {allowed} unreadable images{which} (data.max_rejected)",
            f"replace or remove them, or go on without them by --set data.max_rejected={len(rejects)}",
        )


def _check_classes(config: Config, index: pa.Table, classes: tuple[str, ...]) -> None:
    """Raises where no image is left to train on, or, with a curated source, none of a class."""
    if not pc.sum(pc.equal(index["split"], "train")).as_py():
        raise UserError("no readable image in split train", "at least one", "see the reasons in the rejects table")
    empty = _untrained(index, classes)
    if empty and any(SOURCES[name].curated for name in sources_of(config.setting)):
        raise UserError(
            f"no readable training image of class {shown(empty)}",
            "at least one for each class",
            "replace the rejected images, or take the class out of the class file (data.classes)",
        )


def _untrained(index: pa.Table, classes: tuple[str, ...]) -> list[str]:
    """The classes that no training image has."""
    train = index.filter(pc.equal(index["split"], "train"))
    tagged = set(pc.list_flatten(train["tags"]).to_pylist())
    return [name for k, name in enumerate(classes) if k not in tagged]


def _untagged(index: pa.Table) -> int:
    """The number of training images without a tag."""
    train = pc.equal(index["split"], "train")
    return int(pc.sum(pc.and_(train, pc.equal(pc.list_value_length(index["tags"]), 0))).as_py())


def _notes(index: pa.Table, classes: tuple[str, ...]) -> list[str]:
    notes = []
    if empty := _untrained(index, classes):
        notes.append(f"{len(empty)} class(es) without a training image are never predicted: {shown(empty)}")
    if repeated := duplicates(index):
        examples = [" = ".join(image.image_id for image in copies.images) for copies in repeated]
        notes.append(f"{len(repeated)} image(s) are in more than one split with the same content: {shown(examples)}")
    if untagged := _untagged(index):
        notes.append(f"{untagged} training image(s) without a tag take no part in training")
    return notes


def _counts(index: pa.Table, rejects: pa.Table, classes: tuple[str, ...], opened: int) -> dict[str, Any]:
    tags = collections.Counter(pc.list_flatten(index["tags"]).to_pylist())
    return {
        "images": _value_counts(index["split"]),
        "domains": _value_counts(index["domain"]),
        "opened": opened,
        "tags": {name: tags[k] for k, name in enumerate(classes)},
        "untagged": _untagged(index),
        "rejected": dict(collections.Counter(reason.partition(":")[0] for reason in rejects["reason"].to_pylist())),
        "with saliency map": len(index) - index["saliency_uri"].null_count,
    }


def _value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {str(pair["values"]): int(pair["counts"]) for pair in pc.value_counts(column).to_pylist()}

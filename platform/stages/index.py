"""Stage 1: the sources' lists and images -> index.parquet (INDEX_SCHEMA), rejects.parquet (REJECTS_SCHEMA).

What was verified once is kept with the file's size and time in the workspace, so that an index, of this run or
another, opens only images that are new or changed.
"""

import collections
import shutil
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.datasets.files import stamps
from mcis.datasets.index import (
    INDEX_SCHEMA,
    REJECTS_SCHEMA,
    Listing,
    duplicates,
    shown,
    verify,
)
from mcis.platform.config.sections import Config
from mcis.platform.config.settings import sources_of
from mcis.platform.engine.mapping import map_table
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.listing import listing
from mcis.platform.runs.results import IndexResult
from mcis.platform.runs.workspace import Workspace, file_stamps, fingerprint, read_table, write_table

VERDICT_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False, metadata={"about": "bytes"}),
        pa.field("changed", pa.int64(), nullable=False, metadata={"about": "time of the last change, ns"}),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("reason", pa.string(), metadata={"about": "why it was rejected, or null"}),
    ]
)
_SHARD_ROWS = 256  # a fifth of a second's work of a core
_ASKED = ["uri", "size", "changed"]
_FOUND = ["height", "width", "content_hash", "reason"]


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Making the listing has found what can be found without opening an image."""


def inputs(config: Config, context: RunContext) -> Any:
    """What the index depends on beside the configuration: the lists, and the stamps of every image."""
    found = listing(config)
    return [fingerprint(found.table.to_pydict()), found.classes, file_stamps(found.table["uri"].to_pylist())]


class Verify:
    """Rows of a listing -> their uri and _FOUND, whatever their size."""

    def __call__(self, rows: pa.Table) -> pa.Table:
        return verify(rows, min_side=1).select(["uri", *_FOUND])


def _verified(table: pa.Table, config: Config, context: RunContext) -> tuple[pa.Table, float, int]:
    """The listing with _FOUND of each image, seconds of verifying, and how many images were opened for it."""
    workspace = context.workspace
    uris = table["uri"].to_pylist()
    asked = [(uri, *(stamp or (-1, -1))) for uri, stamp in zip(uris, stamps(uris), strict=True)]
    known = _known(workspace)
    fresh = [place for place, key in enumerate(asked) if key not in known]
    busy = 0.0
    if fresh:
        # Shards are named by their rows' places among those that are fresh, so the folder by which these are.
        folder = context.part / f"verified-{fingerprint([asked[place] for place in fresh])}"
        busy = map_table(
            table.take(pa.array(fresh, pa.int64())),
            Verify,
            (),
            folder,
            label="index",
            shard_rows=max(config.compute.shard_rows, _SHARD_ROWS),
        ).busy
        opened = read_table(folder)
        assert opened["uri"].to_pylist() == [uris[place] for place in fresh]
        new = {asked[place]: found for place, found in zip(fresh, _rows(opened, _FOUND), strict=True)}
        touched = {key[0] for key in new}
        with workspace.lock("cache", "verdicts"):
            known = {key: found for key, found in _known(workspace).items() if key[0] not in touched}
            # Without a hash the file could not even be read: that may be mended without a trace on its stamp.
            known |= {key: found for key, found in new.items() if found[2]}
            rows = [key + found for key, found in known.items()]
            arrays = [pa.array([row[place] for row in rows], f.type) for place, f in enumerate(VERDICT_SCHEMA)]
            write_table(workspace.verdicts, pa.table(arrays, schema=VERDICT_SCHEMA))
        known |= new
        shutil.rmtree(folder)
    found = [_large_enough(known[key], config.data.min_side) for key in asked]
    for place, name in enumerate(_FOUND):
        table = table.append_column(name, pa.array([row[place] for row in found], VERDICT_SCHEMA.field(name).type))
    return table, busy, len(fresh)


def _large_enough(found: tuple[Any, ...], least: int) -> tuple[Any, ...]:
    height, width, content, reason = found
    if reason is None and min(height, width) < least:
        reason = f"too small: {width}x{height} pixels, both sides must be at least {least}"
    return height, width, content, reason


def _rows(table: pa.Table, columns: list[str]) -> list[tuple[Any, ...]]:
    return list(zip(*(table[name].to_pylist() for name in columns), strict=True))


def _known(workspace: Workspace) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Verdicts of all runs of the workspace, _ASKED -> _FOUND; none where the table is damaged."""
    try:
        table = read_table(workspace.verdicts) if workspace.verdicts.exists() else VERDICT_SCHEMA.empty_table()
        return dict(zip(_rows(table, _ASKED), _rows(table, _FOUND), strict=True))
    except UserError:
        return {}


def run(config: Config, context: RunContext) -> IndexResult:
    """Verifies in parallel every image that is new or changed and writes the index.

    Raises:
        UserError: more images than data.max_rejected cannot be read, or none is left.
    """
    if context.afresh:
        context.workspace.verdicts.unlink(missing_ok=True)
    found = listing(config)
    verified, busy, opened = _verified(found.table, config, context)
    bad = pc.is_valid(verified["reason"])
    rejects = verified.filter(bad).select(REJECTS_SCHEMA.names).cast(REJECTS_SCHEMA)
    index = verified.filter(pc.invert(bad)).select(INDEX_SCHEMA.names).cast(INDEX_SCHEMA)
    write_table(context.part / "index.parquet", index)
    write_table(context.part / "rejects.parquet", rejects)
    _check_rejects(config, rejects, len(verified))
    if not pc.sum(pc.equal(index["split"], "train")).as_py():
        raise UserError("no readable image in split train", "at least one", "see the reasons in the rejects table")
    classes = found.classes
    tags = collections.Counter(t for row in index["tags"].to_pylist() for t in row)
    train_tags = {t for r in index.select(["split", "tags"]).to_pylist() if r["split"] == "train" for t in r["tags"]}
    empty = [name for k, name in enumerate(classes) if k not in train_tags]
    notes = list(found.notes)
    if empty and "voc" in sources_of(config.setting):
        raise UserError(
            f"no readable training image of class {shown(empty)}",
            "at least one for each class",
            "mend the rejected images, or take the class out of the class file (data.classes)",
        )
    if empty:
        notes.append(f"{len(empty)} class(es) without a training image are never predicted: {shown(empty)}")
    twice = duplicates(index)
    if twice:
        examples = [f"{' = '.join(name for _, name in images)}" for _, images in twice]
        notes.append(f"{len(twice)} image(s) are in more than one split with the same content: {shown(examples)}")
    train = pc.equal(index["split"], "train")
    untagged = int(pc.sum(pc.and_(train, pc.equal(pc.list_value_length(index["tags"]), 0))).as_py())
    if untagged:
        notes.append(f"{untagged} training image(s) without a tag take no part in training")
    return IndexResult(
        # Later stages depend on what the images are, not on where they lie, when they were touched, or whether there
        # is truth for them.
        identity=fingerprint(index.drop_columns(["uri", "mask_uri", "saliency_uri"]).to_pydict(), classes),
        classes=classes,
        notes=tuple(notes),
        busy=busy,
        counts={
            "images": _counts(index["split"]),
            "domains": _counts(index["domain"]),
            "opened": opened,
            "tags": {name: tags.get(k, 0) for k, name in enumerate(classes)},
            "untagged": untagged,
            "rejected": dict(collections.Counter(reason.partition(":")[0] for reason in rejects["reason"].to_pylist())),
            "with saliency map": len(index) - index["saliency_uri"].null_count,
        },
    )


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {str(pair["values"]): int(pair["counts"]) for pair in pc.value_counts(column).to_pylist()}


def _check_rejects(config: Config, rejects: pa.Table, images: int) -> None:
    allowed = config.data.max_rejected
    counted, which = rejects, ""
    if allowed is None:
        if "voc" not in sources_of(config.setting):
            return
        allowed, counted, which = 0, rejects.filter(pc.equal(rejects["domain"], "target")), " of VOC's curated images"
    if len(counted) > allowed:
        reasons = [f"{r['uri']}: {r['reason']}" for r in counted.to_pylist()]
        raise UserError(
            f"{len(counted)} of {images} images cannot be read: {shown(reasons)}",
            f"at most {allowed} unreadable images{which} (data.max_rejected)",
            f"mend or remove them, or go on without them by --set data.max_rejected={len(rejects)}",
        )

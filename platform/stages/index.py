"""Stage 1: a source's lists and images -> index.parquet (INDEX_SCHEMA), rejects.parquet (REJECTS_SCHEMA)."""

import collections
import os
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.datasets.index import INDEX_SCHEMA, REJECTS_SCHEMA, Listing, shown, verify
from mcis.datasets.voc import list_voc
from mcis.platform.config import Config
from mcis.platform.context import RunContext
from mcis.platform.mapping import map_table
from mcis.platform.workspace import fingerprint, read_table, write_table


def listing(config: Config) -> Listing:
    """What the configured source says it holds."""
    data = config.data
    if data.voc is None:
        raise UserError("setting voc without a data folder", "a VOC 2012 devkit", "add --voc DIR (the folder VOC2012)")
    return list_voc(
        data.voc,
        classes=data.classes,
        train_list=data.train_list,
        val_list=data.val_list,
        saliency=data.saliency,
        masks=data.masks,
    )


def file_stamps(uris: list[str | None]) -> str:
    """Fingerprint of names, sizes and times of files: changes when one of them does."""
    stamps = []
    for uri in uris:
        if uri is None:
            continue
        try:
            stat = os.stat(uri)
            stamps.append((uri, stat.st_size, stat.st_mtime_ns))
        except OSError:
            stamps.append((uri, -1, -1))
    return fingerprint(stamps)


def inputs(config: Config, context: RunContext) -> Any:
    """What the index depends on beside the configuration: the lists, and the stamps of every image."""
    found = listing(config)
    return [fingerprint(found.table.to_pylist()), found.classes, file_stamps(found.table["uri"].to_pylist())]


class Verify:
    """Rows of a listing -> the same rows verified."""

    def __init__(self, min_side: int):
        self.min_side = min_side

    def __call__(self, rows: pa.Table) -> pa.Table:
        return verify(rows, min_side=self.min_side)


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Verifies every image in parallel and writes the index.

    Raises:
        UserError: more images than data.max_rejected cannot be read, or none is left.
    """
    found = listing(config)
    mapped = map_table(
        found.table,
        Verify,
        (config.data.min_side,),
        context.part / "verified",
        label="index",
        shard_rows=config.compute.shard_rows,
    )
    verified = read_table(context.part / "verified")
    bad = pc.is_valid(verified["reason"])
    rejects = verified.filter(bad).select(REJECTS_SCHEMA.names).cast(REJECTS_SCHEMA)
    index = verified.filter(pc.invert(bad)).select(INDEX_SCHEMA.names).cast(INDEX_SCHEMA)
    write_table(context.part / "index.parquet", index)
    write_table(context.part / "rejects.parquet", rejects)
    if len(rejects) > config.data.max_rejected:
        reasons = [f"{r['uri']}: {r['reason']}" for r in rejects.to_pylist()]
        raise UserError(
            f"{len(rejects)} of {len(verified)} images cannot be read: {shown(reasons)}",
            f"at most data.max_rejected = {config.data.max_rejected} unreadable images",
            f"mend or remove them, or go on without them by --set data.max_rejected={len(rejects)}",
        )
    for split in ("train", "val"):
        if not pc.sum(pc.equal(index["split"], split)).as_py():
            raise UserError(
                f"no readable image in split {split}", "at least one", "see the reasons in the rejects table"
            )
    classes = found.classes
    tags = collections.Counter(t for row in index["tags"].to_pylist() for t in row)
    train_tags = {t for r in index.select(["split", "tags"]).to_pylist() if r["split"] == "train" for t in r["tags"]}
    empty = [name for k, name in enumerate(classes) if k not in train_tags]
    if empty:
        raise UserError(
            f"no readable training image of class {shown(empty)}",
            "at least one for each class",
            "mend the rejected images, or take the class out of the class file (data.classes)",
        )
    notes = list(found.notes)
    untagged = int(pc.sum(pc.equal(pc.list_value_length(index["tags"]), 0)).as_py())
    if untagged:
        notes.append(f"{untagged} image(s) without a tag take no part in training")
    return {
        # Later stages depend on what the images are, not on where they lie, when they were touched, or whether there
        # is truth for them.
        "content": fingerprint(index.drop_columns(["uri", "mask_uri", "saliency_uri"]).to_pylist(), classes),
        "classes": classes,
        "notes": notes,
        "busy": mapped.busy,
        "counts": {
            "images": {s: int(pc.sum(pc.equal(index["split"], s)).as_py()) for s in ("train", "val")},
            "tags": {name: tags.get(k, 0) for k, name in enumerate(classes)},
            "untagged": untagged,
            "rejected": dict(collections.Counter(rejects["reason"].to_pylist())),
            "with saliency map": len(index) - index["saliency_uri"].null_count,
        },
    }


def split_rows(context: RunContext, split: str, *, tagged: bool = False) -> pa.Table:
    """Rows of the index of one split, in order; with `tagged`, those with at least one tag."""
    index = read_table(context.inputs["index"] / "index.parquet")
    rows = index.filter(pc.equal(index["split"], split))
    return rows.filter(pc.greater(pc.list_value_length(rows["tags"]), 0)) if tagged else rows

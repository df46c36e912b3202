"""Stage 1: the sources' lists and images -> index.parquet (INDEX_SCHEMA), rejects.parquet (REJECTS_SCHEMA).

What was verified once is kept with the file's size and time in the workspace, so that an index, of this run or
another, opens only images that are new or changed.
"""

import collections
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets import lid, single_label, tagged, voc, web
from mcis.datasets.classes import VOC_CLASSES, read_classes
from mcis.datasets.errors import UserError
from mcis.datasets.files import stamps
from mcis.datasets.index import (
    INDEX_SCHEMA,
    REJECTS_SCHEMA,
    Listing,
    duplicates,
    merge,
    shown,
    verify,
)
from mcis.datasets.pairs import KINDS, PairSampler
from mcis.datasets.tags import Tags
from mcis.platform.config import Config, DataConfig
from mcis.platform.context import SUMMARY, RunContext
from mcis.platform.mapping import map_table
from mcis.platform.settings import sources_of
from mcis.platform.workspace import Workspace, fingerprint, read_json, read_table, write_table

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


def _needed(path: Path | str | None, setting: str, what: str, option: str) -> Path:
    if path is None:
        raise UserError(f"setting {setting} without its images", what, f"add {option}")
    return Path(path)


def _list(source: str, data: DataConfig, setting: str, classes: tuple[str, ...]) -> Listing:
    if source == "voc":
        return voc.list_voc(
            _needed(data.voc, setting, "a VOC 2012 devkit", "--voc DIR (the folder VOC2012)"),
            classes=data.classes,
            train_list=data.train_list,
            val_list=data.val_list,
            test_list=data.test_list,
            saliency=data.saliency,
            masks=data.masks,
            sbd=data.sbd,
            tags_from=data.tags_from,
        )
    if source == "lid":
        c = data.lid
        root = _needed(c.root, setting, "the folder of the LID challenge", "--lid DIR")
        return lid.list_lid(
            root,
            train_list=root / c.train_list,
            val_list=root / c.val_list,
            test_list=root / c.test_list if c.test_list else None,
            classes=root / c.classes,
            masks=root / c.masks if c.masks else None,
            first_index=c.first_index,
        )
    if source == "tags":
        t = data.tags
        if t.table is None:
            raise UserError(f"setting {setting} without its table", "a table of images and tags", "add --tags FILE")
        return tagged.list_tagged(
            t.table,
            classes=data.classes,
            image_column=t.image,
            tags_column=t.tags,
            mask_column=t.mask,
            saliency_column=t.saliency,
            split_column=t.split,
            id_column=t.id,
            ignore_others=t.ignore_others,
        )
    if source == "single":
        return single_label.list_single_label(
            _needed(data.single.root, setting, "a folder of single-label images", "--single DIR"),
            classes,
            class_file=data.single.classes,
            list_file=data.single.subset,
            saliency=data.single.saliency,
        )
    root = _needed(data.web.root, setting, "a folder of <class>/<file>", "--web DIR")
    return web.list_web(root, classes, saliency=data.web.saliency)


def listing(config: Config) -> Listing:
    """What the configured sources say they hold.

    Raises:
        UserError: a source is not named, or its lists are in disorder.
    """
    parts: list[Listing] = []
    classes = read_classes(config.data.classes) if config.data.classes else VOC_CLASSES
    for source in sources_of(config.setting):
        parts.append(_list(source, config.data, config.setting, classes))
        classes = parts[0].classes
    return merge(*parts)


def file_stamps(uris: Sequence[str | None]) -> str:
    """Fingerprint of names, sizes and times of files: changes when one of them does."""
    named = [uri for uri in uris if uri is not None]
    return fingerprint(list(zip(named, stamps(named), strict=True)))


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


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Verifies in parallel every image that is new or changed and writes the index.

    Raises:
        UserError: more images than data.max_rejected cannot be read, or none is left.
    """
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
    return {
        # Later stages depend on what the images are, not on where they lie, when they were touched, or whether there
        # is truth for them.
        "content": fingerprint(index.drop_columns(["uri", "mask_uri", "saliency_uri"]).to_pydict(), classes),
        "classes": classes,
        "notes": notes,
        "busy": busy,
        "counts": {
            "images": _counts(index["split"]),
            "domains": _counts(index["domain"]),
            "opened": opened,
            "tags": {name: tags.get(k, 0) for k, name in enumerate(classes)},
            "untagged": untagged,
            "rejected": dict(collections.Counter(reason.partition(":")[0] for reason in rejects["reason"].to_pylist())),
            "with saliency map": len(index) - index["saliency_uri"].null_count,
        },
    }


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


class OpenedIndex(NamedTuple):
    """A finished index: its tables, K class names, and what a user should know of it."""

    index: pa.Table
    rejects: pa.Table
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def open_index(workspace: Workspace, name: str) -> OpenedIndex:
    """The index of a run.

    Raises:
        UserError: the run has none.
    """
    known = workspace.run(name, new=False) / "run.json"
    folder = workspace.root / read_json(known).get("index", "") if known.exists() else None
    if folder is None or not (folder / SUMMARY).exists():
        raise UserError(
            f"run {name!r} has no index in {workspace.root}", "a run whose index is finished", "see `mcis index --help`"
        )
    summary = read_json(folder / SUMMARY)
    index, rejects = (read_table(folder / f"{table}.parquet") for table in ("index", "rejects"))
    return OpenedIndex(index, rejects, tuple(summary["classes"]), tuple(summary["notes"]))


def pair_kind_shares(opened: OpenedIndex) -> dict[str, float] | None:
    """Share of each kind among an epoch's pairs, as the images' turns bring them; None without single-label images."""
    rows = opened.index.filter(pc.equal(opened.index["split"], "train"))
    source = np.array(rows["domain"].to_pylist()) == "source"
    tags = Tags.of_index(rows["tags"], len(opened.classes))
    if not source.any() or not tags.tagged:
        return None
    drawn = PairSampler(tags, seed=0, source=source).kind_counts(0).drawn
    return dict(zip(KINDS, (drawn / drawn.sum()).tolist(), strict=True))


def split_rows(context: RunContext, split: str, *, tagged: bool = False) -> pa.Table:
    """Rows of the index of one split, in order; with `tagged`, those with at least one tag."""
    index = read_table(context.inputs["index"] / "index.parquet")
    rows = index.filter(pc.equal(index["split"], split))
    return rows.filter(pc.greater(pc.list_value_length(rows["tags"]), 0)) if tagged else rows

"""A user's table of images and tags, CSV, JSONL or Parquet -> listing; `TagsConfig` says which columns it has.

Spaces around a tag are dropped, those inside belong to its name (`potted plant; cat`); null and empty mean: no tag. A
table names files below its own folder alone, unless whoever trusts it says so, by `allow_absolute` (`user_table`).

S3 credentials come from the environment or ~/.aws, as the AWS command line finds them. Another server than Amazon's is
named in the URI, `s3://bucket/key?endpoint_override=HOST:PORT&scheme=http`, or by the environment variable
AWS_ENDPOINT_URL. A relative path in a remote table leads to a URI with the table's own query.
"""

import difflib
import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.classes import check_classes, read_classes
from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.section import PathOrUri, Section
from mcis.datasets.sources.lists import did_you_mean, lacking_masks, listing_table, repeated_value
from mcis.datasets.sources.source import Source
from mcis.datasets.sources.user_table import UserTable, read_user_table, trimmed
from mcis.datasets.storage.uris import is_remote
from mcis.datasets.tables.large_tables import give_back, pieces, repeated

SPLITS = ("train", "val", "test")


class TagsConfig(Section):
    """Your own images and tags (source `tags`), a table."""

    table: PathOrUri | None = None
    """Path or URI of a .csv, .jsonl or .parquet table."""
    image: str = "image"
    """Column of image paths (relative to the table's folder, or absolute) or URIs such as s3://."""
    tags: str = "tags"
    """Column of class names: lists, or text with ; , or | between the names."""
    mask: str = "mask"
    """Column of ground-truth masks for scoring, or absent."""
    saliency: str = "saliency"
    """Column of saliency maps, or absent."""
    split: str = "split"
    """Column with train, val or test; absent = all train."""
    id: str = "id"
    """Column of unique image ids; absent = made from the paths."""
    ignore_others: bool = False
    """Leave out tags that are not among `data.classes`, with a count in the report; else they are an error."""
    allow_absolute: bool = False
    """Whether the table is trusted to name files outside of its own folder, by absolute paths or `..`, and other
    servers than its own; else such names are an error."""


def list_tagged(
    table: str | Path,
    *,
    classes: Path | None = None,
    image: str = "image",
    tags: str = "tags",
    mask: str = "mask",
    saliency: str = "saliency",
    split: str = "split",
    id: str = "id",
    ignore_others: bool = False,
    allow_absolute: bool = False,
) -> Listing:
    """Reads a table of images and tags; no image is opened.

    Arguments are the fields of `TagsConfig`; columns for mask, saliency, split and id may be absent under their usual
    names, not under others. `classes` is a file with one class name per line; without it every tag of the table is a
    class, in the order of the alphabet.

    Raises:
        UserError: the table cannot be read or is empty, a column is missing or no text, an image is null or named
            twice, a file lies where the table may not name one, a cell holds a password, key, token or signature, a
            local mask or saliency map is absent, a tag is unknown, there are none or too many, a split is unknown or
            train is empty.
    """
    columns = {"image": image, "tags": tags, "mask": mask, "saliency": saliency, "split": split, "id": id}
    rows = read_user_table(table, columns, ("mask", "saliency", "split", "id"), trusted=allow_absolute)
    images = rows.filled("image")
    ids = _ids(rows, images, id)
    splits = _splits(rows)
    tags_of_rows, names, tag_notes = _tagged(rows, classes, ignore_others)
    notes = [*_notes(rows, splits), *tag_notes]
    saliency_uris = _existing(rows, "saliency")
    if "saliency" in rows.columns and saliency_uris.null_count:
        notes.append(f"no saliency map for {saliency_uris.null_count} of {len(images)} images")
    mask_uris = _masks(rows, splits, notes)
    listed = listing_table(
        image_id=ids,
        uri=rows.uris("image", images),
        domain="target",
        split=splits,
        tags=tags_of_rows,
        mask_uri=mask_uris,
        saliency_uri=saliency_uris,
    )
    found = Listing(listed, names, tuple(f"{rows.path}: {note}" for note in notes))
    del rows, images
    give_back()
    return found


def photograph_tags(table: str, classes: Sequence[str], *, allow_absolute: bool = False) -> dict[str, list[int]]:
    """The tags of photographs that a trained network is to label: path or URI -> class indices; not of an empty cell.

    Args:
        table: as of `list_tagged`; other columns than those of images and tags are not looked at.
        classes: the K class names of the network.

    Raises:
        UserError: as of `list_tagged`; an image is named twice, or a tag is no class.
    """
    rows = read_user_table(table, {"image": "image", "tags": "tags"}, trusted=allow_absolute)
    uris, cells = rows.uris("image", rows.filled("image")), _tag_cells(rows)
    if twice := repeated(uris):
        raise UserError(f"{rows.path}: {shown(twice)} more than once", "each image once", "merge the rows")
    found = {tag for chunk in pieces(cells) for tag in _split(chunk)[1].unique().to_pylist()}
    if others := sorted(found.difference(classes)):
        raise UserError(
            f"{rows.path}: {len(others)} tag(s) are no class: {shown(others)}",
            f"the classes of the trained run, {', '.join(classes)}",
            f"{did_you_mean(others, classes)}correct the table",
        )
    indices = [row for chunk in pieces(cells) for row in _indices(chunk, classes).to_pylist()]
    said = "tags" not in rows.columns  # by columns of 0 and 1 it is known that there is none
    return {uri: tags for uri, tags in zip(uris.to_pylist(), indices, strict=True) if tags or said}


def _ids(rows: UserTable, images: pa.ChunkedArray, id_column: str) -> pa.ChunkedArray:
    """A unique name for each row: of the column for it, or the image's path as written."""
    what = "id" if "id" in rows.columns else "image"
    ids = rows.filled("id") if what == "id" else images
    if twice := repeated(ids):
        raise UserError(
            f"{rows.path}: {len(twice)} value(s) of column {rows.columns[what]!r} are there more than once: "
            f"{shown(twice)}",
            "each image once, under a name of its own",
            f"delete or merge the rows, or give each a name in a column {id_column!r}",
        )
    return ids


def _splits(rows: UserTable) -> pa.ChunkedArray:
    """The split of each row; every image is in train where no column says otherwise."""
    if "split" not in rows.columns:
        return repeated_value("train", len(rows.content), pa.string())
    splits, column = pc.utf8_lower(rows.filled("split")), rows.columns["split"]
    splits = pc.replace_substring_regex(splits, "^valid(ation)?$", "val")
    names = splits.unique().to_pylist()
    unknown = sorted(set(names) - set(SPLITS))
    if unknown:
        expected = f"one of {', '.join(SPLITS)}"
        raise UserError(f"{rows.path}: unknown split {shown(unknown)} in column {column!r}", expected, "rename it")
    if "train" not in names:
        raise UserError(f"{rows.path} has no image of split train", "at least one", f"correct its column {column!r}")
    return splits


def _tagged(
    rows: UserTable, classes: Path | None, ignore_others: bool
) -> tuple[pa.ChunkedArray, tuple[str, ...], list[str]]:
    """The tags of every row as ascending class indices, list<uint16>; the K class names, from their file or of all
    tags; and notes."""
    cells = _tag_cells(rows)
    found = {tag for chunk in pieces(cells) for tag in _split(chunk)[1].unique().to_pylist()}
    names = read_classes(classes) if classes else tuple(sorted(found))
    check_classes(rows.path, names)
    if not names:
        raise UserError(f"{rows.path}: no tag in column {rows.columns.get('tags')!r}", "a tagged image", "add tags")
    if odd := [name for name in names if re.search(r"[\n\r]|^[\[{\"']", name)]:
        raise UserError(f"{rows.path}: tags such as {shown(odd)}", "names without brackets or quotes", "correct them")
    joined = [name for name in names if " " in name and set(name.split()) <= set(names)]
    if joined and not classes and not rows.flags:
        told = f"{rows.path}: {shown(joined)} in column {rows.columns.get('tags')!r}: tags with spaces between them"
        remedy = "write one of these; or, where such a text is a class, name a file of all classes by `classes`"
        raise UserError(told, "';', ',' or '|' between the tags of an image", remedy)
    others = sorted(found.difference(names))
    if others and not ignore_others:
        raise UserError(
            f"{rows.path}: {len(others)} tag(s) are no class: {shown(others)}",
            f"the {len(names)} classes of {classes}",
            f"{did_you_mean(others, names)}correct the table or the class file, or leave such tags out by "
            "`ignore_others=true`",
        )
    indices = pa.chunked_array([_indices(chunk, names) for chunk in pieces(cells)], pa.list_(pa.uint16()))
    if not others:
        return indices, names, _slips(indices, names)
    left = pa.array(others, pa.string())
    count = sum(pc.is_in(_split(chunk)[1], left).true_count for chunk in pieces(cells))
    untagged = int(pc.sum(pc.equal(pc.list_value_length(indices), 0)).as_py())
    note = f"{count} tags of {len(others)} names that are no class were left out: {shown(others)}"
    return indices, names, [f"{note}; {untagged} of {len(indices)} images have no tag"]


def _slips(indices: pa.ChunkedArray, names: Sequence[str]) -> list[str]:
    """Classes named as others but for capitals or how accents are written, or nearly as far more frequent ones."""
    counts = np.bincount(pc.list_flatten(indices).to_numpy(), minlength=len(names)).tolist()
    images, notes, known = dict(zip(names, counts, strict=True)), [], dict[str, str]()
    for name in sorted(names, key=lambda name: -images[name]):
        folded = unicodedata.normalize("NFC", name).casefold()
        times, alike = (20, 0.65) if len(name) < 5 else (4, 0.8)
        frequent = [other for other, of in known.items() if images[of] >= times * max(images[name], 1)]
        near = difflib.get_close_matches(folded, frequent, 1, alike)
        like = known.setdefault(folded, known[near[0]] if near else name)
        if like != name:
            notes.append(f"{name!r} ({images[name]} images) is a class beside {like!r} ({images[like]}): a slip?")
    return notes


def _tag_cells(rows: UserTable) -> pa.ChunkedArray:
    """The column of tags, lists or texts; or lists of the columns of 0 and 1 that stand for a class each."""
    if rows.flags:
        set_in = [pc.fill_null(rows.content[name].cast(pa.int8()), 0).to_numpy() for name in rows.flags]
        of_row, flag = np.nonzero(np.stack(set_in, axis=1))
        start = np.searchsorted(of_row, np.arange(len(rows.content) + 1)).astype(np.int32)
        return pa.chunked_array([pa.ListArray.from_arrays(start, pa.array(rows.flags).take(pa.array(flag)))])
    cells = rows.cells("tags")
    if cells.type == pa.list_(pa.string()):
        return cells
    if cells.type == pa.string():
        return rows.texts("tags")
    raise UserError(
        f"{rows.path}: column {rows.columns['tags']!r} holds {cells.type}",
        "lists of strings, or strings with ';', ',' or '|' between the tags",
        "write the names of the classes",
    )


def _split(cells: pa.Array) -> tuple[NDArray[np.int32], pa.Array]:
    """The tags in a chunk of cells, lists or texts, without empty ones, and the row of each, ascending."""
    lists = pc.split_pattern_regex(cells, "[;,|]") if pa.types.is_string(cells.type) else cells
    counts = pc.list_value_length(lists).fill_null(0).to_numpy()
    tags = trimmed(lists.flatten())
    row = np.repeat(np.arange(len(cells), dtype=np.int32), counts)[tags.is_valid().to_numpy(zero_copy_only=False)]
    return row, tags.drop_null()


def _indices(cells: pa.Array, names: Sequence[str]) -> pa.Array:
    """The class indices of each row of a chunk, ascending and none twice, as list<uint16>; other tags are left out."""
    row, tags = _split(cells)
    classes = pc.index_in(tags, value_set=pa.array(names, pa.string())).fill_null(-1).to_numpy()
    keys = np.unique((row * np.int64(2**16) + classes)[classes >= 0])
    start = np.searchsorted(keys, np.arange(len(cells) + 1) * np.int64(2**16)).astype(np.int32)
    return pa.ListArray.from_arrays(start, pa.array((keys % 2**16).astype(np.uint16)))


def _existing(rows: UserTable, what: str) -> pa.ChunkedArray:
    """The masks or saliency maps of a column. Those of this machine exist, which later stages take for granted."""
    if what not in rows.columns:
        return repeated_value(None, len(rows.content), pa.string())
    uris = rows.uris(what, rows.texts(what))
    absent = [
        uri
        for chunk in pieces(uris)
        for uri in chunk.drop_null().to_pylist()
        if not is_remote(uri) and not os.path.isfile(uri)
    ]
    if absent:
        raise UserError(
            f"{rows.path}: {len(absent)} file(s) of column {rows.columns[what]!r} are missing: {shown(absent)}",
            "an existing file, or an empty cell for none",
            "add the files or empty the cells",
        )
    return uris


def _masks(rows: UserTable, splits: pa.ChunkedArray, notes: list[str]) -> pa.ChunkedArray:
    """The ground-truth masks of each row; of how many a split lacks is added to the notes."""
    uris = _existing(rows, "mask")
    for split in sorted(splits.unique().to_pylist()) if "mask" in rows.columns else ():
        of_split = pc.equal(splits, split)
        images, absent = (pc.sum(mask).as_py() for mask in (of_split, pc.and_(of_split, uris.is_null())))
        notes += lacking_masks(absent, images, split)
    return uris


def _notes(rows: UserTable, splits: pa.ChunkedArray) -> list[str]:
    notes = [] if "val" in splits.unique().to_pylist() else ["no image of split val: the training images are predicted"]
    if rows.guessed:
        notes.append(f"columns are taken for what they seem to hold: {', '.join(rows.guessed)}")
    if rows.unread:
        notes.append(f"columns that are not read: {shown(rows.unread)}")
    return notes


TAGS = Source(
    lister=list_tagged,
    location="table",
    help="Your own images and tags: path or URI of a .csv, .jsonl or .parquet table.",
    example="tags photos.csv",
    location_kind="FILE",
    record=TagsConfig,
    data_keys={"classes": "classes"},
    defines_classes=True,
    recipe="photos",
)

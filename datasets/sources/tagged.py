"""Lists a user's table of images and tags, CSV, JSONL or Parquet (source `tags`). `TagsConfig` names its columns.

Spaces around a tag are dropped; spaces inside belong to its name (`potted plant; cat`). Null and empty cells mean no
tag. A name that contains a separator is written in a JSON list, `["tench, Tinca tinca"]`. A table may only name files
below its own folder, unless `allow_absolute` marks it as trusted (`user_table`).

S3 credentials come from the environment or ~/.aws, as for the AWS command line. A server other than Amazon's is set in
the URI, `s3://bucket/key?endpoint_override=HOST:PORT&scheme=http`, or by the environment variable AWS_ENDPOINT_URL. A
relative path in a remote table becomes a URI with the table's own query.
"""

import contextlib
import difflib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.classes import check_classes, read_classes
from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.section import PathOrUri, Section
from mcis.datasets.sources.lists import constant_column, did_you_mean, listing_table, missing_mask_notes
from mcis.datasets.sources.source import Source
from mcis.datasets.sources.user_table import UserTable, in_existing_spellings, read_user_table, trimmed
from mcis.datasets.storage.uris import is_remote
from mcis.datasets.tables.large_tables import pieces, release_arrow_memory, repeated_texts

SPLITS = ("train", "val", "test")

_SEPARATORS = "[;,|]"
"""Regular expression of the characters between the tags of a text."""
_SHORT_NAME = 5
"""Names with fewer characters count as misspellings at a lower similarity, but only of far more frequent names."""


class TagsConfig(Section):
    """Your own images and tags (source `tags`), a table."""

    table: PathOrUri | None = None
    """Path or URI of a .csv, .jsonl or .parquet table."""
    image: str = "image"
    """Column of image paths, relative to the table's folder, or URIs such as s3://. See `allow_absolute` for others."""
    tags: str = "tags"
    """Column of class names: lists, or text with ; , or | between the names, or JSON lists."""
    mask: str = "mask"
    """Column of ground-truth masks, used only for scores; may be absent."""
    saliency: str = "saliency"
    """Column of saliency maps; may be absent."""
    split: str = "split"
    """Column with train, val or test; if absent, all images are in train."""
    id: str = "id"
    """Column of unique image ids; if absent, the paths relative to the table's folder are used."""
    ignore_others: bool = False
    """Leave out tags that are not in `data.classes`, with a count in the report. By default they are an error."""
    allow_absolute: bool = False
    """Trust the table to name files outside of its own folder, by absolute paths or `..`, and on other servers. By
    default such names are an error."""


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
    """Lists a table of images and tags. No image is opened.

    The other arguments are the fields of `TagsConfig`. The columns mask, saliency, split and id may be absent under
    their default names, but not under others.

    Args:
        classes: File with one class name per line. None: every tag of the table is a class, in alphabetical order.

    Raises:
        UserError: The table cannot be read or is empty; a column is missing or is not text; an image is null or named
            twice; the table may not name a file; a cell holds a password, key, token or signature; a local mask or
            saliency map is absent; a tag is unknown; there are no tags or too many classes; a split is unknown; or
            train is empty.
    """
    columns = {"image": image, "tags": tags, "mask": mask, "saliency": saliency, "split": split, "id": id}
    rows = read_user_table(table, columns, ("mask", "saliency", "split", "id"), trusted=allow_absolute)
    written_uris = rows.uris("image", rows.filled("image"))
    uris = in_existing_spellings(written_uris)
    ids = _ids(rows, uris, id)
    splits = _splits(rows)
    tagged = _read_tags(rows, classes, ignore_others)
    notes = [*_table_notes(rows, splits), *tagged.notes]

    saliency_uris = _existing_uris(rows, "saliency")
    if "saliency" in rows.columns and saliency_uris.null_count:
        notes.append(f"no saliency map for {saliency_uris.null_count} of {len(uris)} images")
    mask_uris = _existing_uris(rows, "mask")
    if "mask" in rows.columns:
        notes += _mask_notes(splits, mask_uris)

    respelled = written_uris.filter(pc.not_equal(written_uris, uris))
    if len(respelled):
        differences = "Unicode form NFC or NFD, \\ or %20"
        notes.append(
            f"{len(respelled)} file(s) are found under another spelling ({differences}): {shown(respelled.to_pylist())}"
        )

    listing = listing_table(
        image_id=ids,
        uri=uris,
        domain="target",
        split=splits,
        tags=tagged.indices,
        mask_uri=mask_uris,
        saliency_uri=saliency_uris,
    )
    result = Listing(listing, tagged.classes, tuple(f"{rows.path}: {note}" for note in notes))

    del rows, written_uris, uris
    release_arrow_memory()
    return result


def photograph_tags(table: str, classes: Sequence[str], *, allow_absolute: bool = False) -> dict[str, list[int]]:
    """Reads the tags of photographs that a trained network will label.

    Args:
        table: See `list_tagged`. Only the columns of images and tags are read.
        classes: K class names of the network.

    Returns:
        Path or URI of each photograph -> its class indices. A photograph with an empty cell is absent, because its tags
        are unknown; with columns of 0 and 1 it is present, because it is known to have none.

    Raises:
        UserError: See `list_tagged`; or an image is named twice, or a tag is no class.
    """
    columns = {"image": "image", "tags": "tags"}
    rows = read_user_table(table, columns, trusted=allow_absolute, has_column_keys=False)
    uris = in_existing_spellings(rows.uris("image", rows.filled("image")))
    cells = _tag_cells(rows)

    duplicates = repeated_texts(uris)
    if duplicates:
        raise UserError(f"{rows.path}: {shown(duplicates)} occur more than once", "each image once", "merge the rows")

    unknown = sorted(_distinct_tags(cells).difference(classes))
    if unknown:
        raise UserError(
            f"{rows.path}: {len(unknown)} tag(s) are not among the classes: {shown(unknown)}",
            f"the classes of the trained run, {', '.join(classes)}",
            f"{did_you_mean(unknown, classes)}correct the table",
        )

    indices: list[list[int]] = []
    for chunk in pieces(cells):
        indices += _class_indices(chunk, classes).to_pylist()
    untagged_is_known = "tags" not in rows.columns
    return {uri: tags for uri, tags in zip(uris.to_pylist(), indices, strict=True) if tags or untagged_is_known}


def _ids(rows: UserTable, uris: pa.ChunkedArray, id_column: str) -> pa.ChunkedArray:
    """Returns a unique id for each row: from the column of ids, or the image's path relative to the table's folder."""
    role = "id" if "id" in rows.columns else "image"
    ids = rows.filled("id") if role == "id" else rows.names(uris)
    duplicates = repeated_texts(ids)
    if duplicates:
        raise UserError(
            f"{rows.path}: {len(duplicates)} value(s) of column {rows.columns[role]!r} occur more than once: "
            f"{shown(duplicates)}",
            "each image once, under a unique name",
            f"delete or merge the rows, or give each a name in a column {id_column!r}",
        )
    return ids


def _splits(rows: UserTable) -> pa.ChunkedArray:
    """Returns the split of each row. Without a column of splits, every image is in train."""
    if "split" not in rows.columns:
        return constant_column("train", len(rows.content), pa.string())

    column = rows.columns["split"]
    splits = pc.utf8_lower(rows.filled("split"))
    splits = pc.replace_substring_regex(splits, "^valid(ation)?$", "val")
    names = splits.unique().to_pylist()

    unknown = sorted(set(names) - set(SPLITS))
    if unknown:
        expected = f"one of {', '.join(SPLITS)}"
        found = f"{rows.path}: unknown split {shown(unknown)} in column {column!r}"
        raise UserError(found, expected, "rename the split")
    if "train" not in names:
        raise UserError(f"{rows.path} has no image of split train", "at least one", f"correct its column {column!r}")
    return splits


class _Tagged(NamedTuple):
    """The tags of a table.

    Attributes:
        indices: Class indices of each row, ascending, list<uint16>.
        classes: K class names.
        notes: Notes about the tags.
    """

    indices: pa.ChunkedArray
    classes: tuple[str, ...]
    notes: list[str]


def _read_tags(rows: UserTable, classes: Path | None, ignore_others: bool) -> _Tagged:
    """Reads the tags of every row. The classes are those of a file or, without one, all tags."""
    cells = _tag_cells(rows)
    found = _distinct_tags(cells)
    names = read_classes(classes) if classes else tuple(sorted(found))
    _check_names(rows, names, classes)

    others = sorted(found.difference(names))
    if others and not ignore_others:
        raise UserError(
            f"{rows.path}: {len(others)} tag(s) are not among the classes: {shown(others)}",
            f"the {len(names)} classes of {classes}",
            f"{did_you_mean(others, names)}correct the table or the class file, or set data.tags.ignore_others=true to "
            "leave such tags out",
        )

    indices = pa.chunked_array([_class_indices(chunk, names) for chunk in pieces(cells)], pa.list_(pa.uint16()))
    if not others:
        return _Tagged(indices, names, _misspelling_notes(indices, names))

    left_out = pa.array(others, pa.string())
    count = sum(pc.is_in(_split_cells(chunk).tags, left_out).true_count for chunk in pieces(cells))
    untagged = int(pc.sum(pc.equal(pc.list_value_length(indices), 0)).as_py())
    note = (
        f"left out {count} tags, whose {len(others)} names are not among the classes: {shown(others)}; "
        f"{untagged} of {len(indices)} images have no tag"
    )
    return _Tagged(indices, names, [note])


def _check_names(rows: UserTable, names: tuple[str, ...], classes: Path | None) -> None:
    """Raises a UserError if there is no class name, or if names show that tags were not separated as expected."""
    check_classes(rows.path, names)
    column = rows.columns.get("tags")
    if not names:
        raise UserError(f"{rows.path}: no tag in column {column!r}", "at least one tagged image", "add tags")

    quoted = [name for name in names if re.search(r"[\n\r]|^[\[{\"']", name)]
    if quoted:
        found = f"{rows.path}: tags such as {shown(quoted)}"
        raise UserError(found, "names without brackets or quotes", "correct the tags")

    # "cat dog" where cat and dog are classes of their own
    joined = [name for name in names if " " in name and set(name.split()) <= set(names)]
    if joined and not classes and not rows.flags:
        raise UserError(
            f"{rows.path}: {shown(joined)} in column {column!r}: tags with spaces between them",
            "';', ',' or '|' between the tags of an image",
            "write one of these characters; if such a text is a class, name a file of all classes by data.classes",
        )


def _misspelling_notes(indices: pa.ChunkedArray, names: Sequence[str]) -> list[str]:
    """Returns notes on classes that are probably misspelled.

    A name is reported if it differs from another only by capitals, or if it is similar to that of a class with many
    times as many images.
    """
    counts = np.bincount(pc.list_flatten(indices).to_numpy(), minlength=len(names)).tolist()
    images = dict(zip(names, counts, strict=True))
    notes: list[str] = []
    name_of_folded: dict[str, str] = {}

    for name in sorted(names, key=lambda name: -images[name]):
        folded = name.casefold()
        if len(name) < _SHORT_NAME:
            min_ratio = 20
            min_similarity = 0.65
        else:
            min_ratio = 4
            min_similarity = 0.8

        min_images = min_ratio * max(images[name], 1)
        frequent = [other for other, spelled in name_of_folded.items() if images[spelled] >= min_images]
        similar = difflib.get_close_matches(folded, frequent, 1, min_similarity)

        likely = name_of_folded.setdefault(folded, name_of_folded[similar[0]] if similar else name)
        if likely != name:
            notes.append(
                f"{name!r} ({images[name]} images) may be a misspelling of {likely!r} ({images[likely]} images)"
            )
    return notes


def _tag_cells(rows: UserTable) -> pa.ChunkedArray:
    """Returns the cells of tags, lists or texts. Columns of 0 and 1 become lists of their names."""
    if rows.flags:
        columns = [pc.fill_null(rows.content[name].cast(pa.int8()), 0).to_numpy() for name in rows.flags]
        row, flag = np.nonzero(np.stack(columns, axis=1))
        start = np.searchsorted(row, np.arange(len(rows.content) + 1)).astype(np.int32)
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


def split_tags(cell: str) -> list[str]:
    """Splits a text into tags. It is a JSON list, whose names may contain separators, or names between separators."""
    if cell.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):  # brackets that are not JSON are an error of the names
            names = json.loads(cell)
            if all(isinstance(name, str) for name in names):
                return list(names)
    return re.split(_SEPARATORS, cell)


def join_tags(tags: Sequence[str]) -> str:
    """Returns the text that `split_tags` splits into these tags."""
    if any(re.search(_SEPARATORS, tag) for tag in tags):
        return json.dumps(tags, ensure_ascii=False)
    return ";".join(tags)


def _split_texts(texts: pa.Array) -> pa.Array:
    """Applies `split_tags` to an array; null texts stay null."""
    if not pc.any(pc.starts_with(texts, "[")).as_py():
        return pc.split_pattern_regex(texts, _SEPARATORS)
    lists = [None if text is None else split_tags(text) for text in texts.to_pylist()]
    return pa.array(lists, pa.list_(pa.string()))


class _SplitCells(NamedTuple):
    """The tags in a chunk of cells.

    Attributes:
        row: (T,) row of each tag, ascending.
        tags: (T,) tags, none of them empty.
    """

    row: NDArray[np.int32]
    tags: pa.Array


def _split_cells(cells: pa.Array) -> _SplitCells:
    """Splits a chunk of cells, lists or texts, into tags in the Unicode form NFC."""
    lists = _split_texts(cells) if pa.types.is_string(cells.type) else cells
    counts = pc.list_value_length(lists).fill_null(0).to_numpy()
    tags = trimmed(lists.flatten())
    if not pc.all(pc.string_is_ascii(tags)).as_py():
        encoded = tags.dictionary_encode()
        names = [unicodedata.normalize("NFC", name) for name in encoded.dictionary.to_pylist()]
        tags = pa.array(names, pa.string()).take(encoded.indices)
    row = np.repeat(np.arange(len(cells), dtype=np.int32), counts)
    return _SplitCells(row[tags.is_valid().to_numpy(zero_copy_only=False)], tags.drop_null())


def _distinct_tags(cells: pa.ChunkedArray) -> set[str]:
    """Returns all tags that occur in a column."""
    tags: set[str] = set()
    for chunk in pieces(cells):
        tags.update(_split_cells(chunk).tags.unique().to_pylist())
    return tags


def _class_indices(cells: pa.Array, names: Sequence[str]) -> pa.Array:
    """Returns the class indices of each row of a chunk, distinct and ascending, list<uint16>, without other tags."""
    row, tags = _split_cells(cells)
    classes = pc.index_in(tags, value_set=pa.array(names, pa.string())).fill_null(-1).to_numpy()
    keys = np.unique((row * np.int64(2**16) + classes)[classes >= 0])
    start = np.searchsorted(keys, np.arange(len(cells) + 1) * np.int64(2**16)).astype(np.int32)
    return pa.ListArray.from_arrays(start, pa.array((keys % 2**16).astype(np.uint16)))


def _existing_uris(rows: UserTable, role: str) -> pa.ChunkedArray:
    """Returns the masks or saliency maps of a column. Checks that local files exist, which later stages assume."""
    if role not in rows.columns:
        return constant_column(None, len(rows.content), pa.string())

    uris = in_existing_spellings(rows.uris(role, rows.texts(role)))
    absent: list[str] = []
    for chunk in pieces(uris):
        absent += _absent_files(chunk.drop_null().to_pylist())
    if absent:
        raise UserError(
            f"{rows.path}: {len(absent)} file(s) of column {rows.columns[role]!r} are missing: {shown(absent)}",
            "an existing file, or an empty cell for none",
            "add the files or empty the cells",
        )
    return uris


def _absent_files(uris: Iterable[str]) -> list[str]:
    return [uri for uri in uris if not is_remote(uri) and not os.path.isfile(uri)]


def _mask_notes(splits: pa.ChunkedArray, mask_uris: pa.ChunkedArray) -> list[str]:
    """Returns notes on the images of each split that have no ground-truth mask."""
    notes: list[str] = []
    for split in sorted(splits.unique().to_pylist()):
        in_split = pc.equal(splits, split)
        images = pc.sum(in_split).as_py()
        missing = pc.sum(pc.and_(in_split, mask_uris.is_null())).as_py()
        notes += missing_mask_notes(missing, images, split)
    return notes


def _table_notes(rows: UserTable, splits: pa.ChunkedArray) -> list[str]:
    """Returns notes on a missing split val and on how the columns were understood."""
    notes: list[str] = []
    if "val" not in splits.unique().to_pylist():
        notes.append("no image of split val: the training images are predicted")
    if rows.guessed:
        notes.append(f"columns recognized by their names or values: {', '.join(rows.guessed)}")
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

"""Lists a user's table of images and tags, CSV, JSONL or Parquet (source `tags`). `TagsConfig` names its columns.

Spaces around a tag are dropped; spaces inside belong to its name (`potted plant; cat`). A name that contains a
separator is written in a JSON list, `["tench, Tinca tinca"]`. A table may only name files below its own folder, unless
`allow_absolute` marks it as trusted (`user_table`).

An image that shows none of the classes is a negative. A table says so by a tag of NEGATIVE_TAGS, an empty list, or
zeros in all columns of classes. Null and empty cells mean that the tags are unknown, unless `untagged` says otherwise.

S3 credentials come from the environment or ~/.aws, as for the AWS command line. A server other than Amazon's is set in
the URI, `s3://bucket/key?endpoint_override=HOST:PORT&scheme=http`, or by the environment variable AWS_ENDPOINT_URL. A
relative path in a remote table becomes a URI with the table's own query.
"""

import contextlib
import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BeforeValidator

from mcis.datasets.classes import (
    MAY_BE_MISSING_TAGS,
    MAY_BE_NEGATIVE_TAGS,
    NEGATIVE_TAGS,
    check_classes,
    normalized_name,
    read_classes,
)
from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.index import Listing
from mcis.datasets.section import PathOrUri, Section
from mcis.datasets.sources.lists import constant_column, did_you_mean, listing_table, missing_mask_notes
from mcis.datasets.sources.source import Source
from mcis.datasets.sources.user_table import UserTable, in_existing_spellings, read_user_table, trimmed
from mcis.datasets.storage.files import is_file
from mcis.datasets.storage.uris import is_remote
from mcis.datasets.tables.large_tables import pieces, release_arrow_memory, repeated_texts
from mcis.datasets.tags import count_tags

SPLITS = ("train", "val", "test")

_SEPARATORS = "[;,|；，、｜]"
"""Regular expression of the characters between the tags of a text, also those of East Asian texts."""
_UNCLEAR_SEPARATORS = r"[\s/&+]+"
"""Regular expression of what may separate tags, but may also be part of a name."""
_SHORT_NAME = 5
"""Names with fewer characters count as misspellings at a lower similarity, but only of far more frequent names."""


def _as_cell(value: Any) -> Any:
    """Returns a number, a truth value or a list of texts as a cell of a table has it. The command line reads JSON."""
    is_list_of_texts = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if is_list_of_texts or isinstance(value, bool | int | float):
        return json.dumps(value, ensure_ascii=False)
    return value


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
    negative_tags: Annotated[str, BeforeValidator(_as_cell)] = ""
    """Further tags, next to `none` and `background`, of images that show none of the classes, such as ok; written as in
    the table."""
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
    negative_tags: str = "",
    untagged: Literal["unlabelled", "negative"] = "unlabelled",
    ignore_others: bool = False,
    allow_absolute: bool = False,
) -> Listing:
    """Lists a table of images and tags. No image is opened.

    The other arguments are the fields of `TagsConfig`. The columns mask, saliency, split and id may be absent under
    their default names, but not under others.

    Args:
        classes: File with one class name per line. None: every tag of the table is a class, in alphabetical order.
        untagged: What an empty cell means, see `data.untagged`.

    Raises:
        UserError: The table cannot be read or is empty; a column is missing or is not text; an image is null or named
            twice; the table may not name a file; a cell holds a password, key, token or signature; a local mask or
            saliency map is absent; a tag is unknown; there are no tags or too many classes; an image has both a class
            and a tag for none of them; a split is unknown; or train is empty.
    """
    columns = {"image": image, "tags": tags, "mask": mask, "saliency": saliency, "split": split, "id": id}
    rows = read_user_table(table, columns, ("mask", "saliency", "split", "id"), trusted=allow_absolute)
    written_uris = rows.uris("image", rows.filled("image"))
    uris = in_existing_spellings(written_uris)
    ids = _ids(rows, uris, id)
    splits = _splits(rows)
    tagged = _read_tags(rows, ids, classes, negative_tags, untagged, ignore_others)
    notes = [*_table_notes(rows, splits), *tagged.notes]

    saliency_uris = _existing_uris(rows, "saliency")
    if "saliency" in rows.columns and saliency_uris.null_count:
        notes.append(f"no saliency map for {saliency_uris.null_count} of {len(uris)} images")
    mask_uris = _existing_uris(rows, "mask")
    if "mask" in rows.columns:
        notes += _mask_notes(splits, pc.or_(mask_uris.is_valid(), tagged.is_negative))
    notes += _spelling_notes(written_uris, uris)

    listing = listing_table(
        image_id=ids,
        uri=uris,
        domain="target",
        split=splits,
        tags=tagged.indices,
        is_negative=tagged.is_negative,
        mask_uri=mask_uris,
        saliency_uri=saliency_uris,
    )
    result = Listing(listing, tagged.classes, tuple(f"{rows.path}: {note}" for note in notes))

    del rows, written_uris, uris
    release_arrow_memory()
    return result


def _spelling_notes(written_uris: pa.ChunkedArray, uris: pa.ChunkedArray) -> list[str]:
    """Returns a note if files are spelled differently in the table (`in_existing_spellings`)."""
    respelled = written_uris.filter(pc.not_equal(written_uris, uris))
    if not len(respelled):
        return []
    differences = "Unicode form NFC or NFD, \\ or %20"
    return [
        f"{len(respelled)} file(s) are found under another spelling ({differences}): "
        f"{join_shortened(respelled.to_pylist())}"
    ]


def photograph_tags(
    table: str, classes: Sequence[str], *, negative_tags: str = "", allow_absolute: bool = False
) -> dict[str, list[int]]:
    """Reads the tags of photographs that a trained network will label.

    Args:
        table: See `list_tagged`. Only the columns of images and tags are read.
        classes: K class names of the network.
        negative_tags: See `TagsConfig`.

    Returns:
        Path or URI of each photograph -> its class indices; none for a negative. A photograph with an empty cell is
        absent, because its tags are unknown.

    Raises:
        UserError: See `list_tagged`; or an image is named twice, or a tag is no class.
    """
    columns = {"image": "image", "tags": "tags"}
    rows = read_user_table(table, columns, trusted=allow_absolute, has_column_keys=False)
    uris = in_existing_spellings(rows.uris("image", rows.filled("image")))
    cells = tag_cells(rows)
    all_tags = _distinct_tags(cells)
    none_tags = _none_tags(all_tags, classes, negative_tags)

    duplicates = repeated_texts(uris)
    if duplicates:
        raise UserError(
            f"{rows.path}: {join_shortened(duplicates)} occur more than once", "each image once", "merge the rows"
        )

    unknown = sorted(all_tags.difference(classes, none_tags))
    if unknown:
        raise UserError(
            f"{rows.path}: {len(unknown)} tag(s) are not among the classes: {join_shortened(unknown)}",
            f"the classes of the trained run, {', '.join(classes)}",
            f"{did_you_mean(unknown, classes)}correct the table",
        )

    class_indices: list[list[int]] = []
    for chunk in pieces(cells):
        class_indices += _class_indices(chunk, classes).to_pylist()
    negative_flags = _negatives(rows, uris, cells, none_tags).to_pylist()

    indices_by_uri: dict[str, list[int]] = {}
    for uri, indices, is_negative in zip(uris.to_pylist(), class_indices, negative_flags, strict=True):
        if indices or is_negative:
            indices_by_uri[uri] = indices
    return indices_by_uri


def _ids(rows: UserTable, uris: pa.ChunkedArray, id_column: str) -> pa.ChunkedArray:
    """Returns a unique id for each row: from the column of ids, or the image's path relative to the table's folder."""
    role = "id" if "id" in rows.columns else "image"
    ids = rows.filled("id") if role == "id" else rows.names(uris)
    duplicates = repeated_texts(ids)
    if duplicates:
        raise UserError(
            f"{rows.path}: {len(duplicates)} value(s) of column {rows.columns[role]!r} occur more than once: "
            f"{join_shortened(duplicates)}",
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
        found = f"{rows.path}: unknown split {join_shortened(unknown)} in column {column!r}"
        raise UserError(found, expected, "rename the split")
    if "train" not in names:
        raise UserError(f"{rows.path} has no image of split train", "at least one", f"correct its column {column!r}")
    return splits


class _Tagged(NamedTuple):
    """The tags of a table.

    Attributes:
        indices: Class indices of each row, ascending, list<uint16>.
        is_negative: Whether each row is an image that shows none of the classes.
        classes: K class names.
        notes: Notes about the tags.
    """

    indices: pa.ChunkedArray
    is_negative: pa.ChunkedArray
    classes: tuple[str, ...]
    notes: list[str]


def _read_tags(
    rows: UserTable,
    images: pa.ChunkedArray,
    classes: Path | None,
    negative_tags: str,
    untagged: Literal["unlabelled", "negative"],
    ignore_others: bool,
) -> _Tagged:
    """Reads the tags of every row. The classes are those of a file or, without one, all tags that name a class.

    Args:
        images: Name of the image of each row, for messages.
    """
    cells = tag_cells(rows)
    all_tags = _distinct_tags(cells)
    names = read_classes(classes) if classes else ()
    none_tags = _none_tags(all_tags, names, negative_tags)
    if not classes:
        names = tuple(sorted(all_tags - none_tags))
    _check_names(rows, names, classes)

    unknown = sorted(all_tags.difference(names, none_tags))
    if unknown and not ignore_others:
        raise UserError(
            f"{rows.path}: {len(unknown)} tag(s) are not among the classes: {join_shortened(unknown)}",
            f"the {len(names)} classes of {classes}",
            f"{did_you_mean(unknown, names)}correct the table or the class file, or set data.tags.ignore_others=true "
            "to leave such tags out",
        )

    indices = pa.chunked_array([_class_indices(chunk, names) for chunk in pieces(cells)], pa.list_(pa.uint16()))
    is_negative = _negatives(rows, images, cells, none_tags)
    has_no_class = pc.equal(pc.list_value_length(indices), 0)
    if untagged == "negative":
        is_negative = pc.or_(is_negative, has_no_class)

    notes = _negative_notes(is_negative, none_tags)
    if unknown:
        count = _count_tags_named(unknown, cells)
        notes.append(
            f"left out {count} tags, whose {len(unknown)} names are not among the classes: {join_shortened(unknown)}; "
            f"{pc.sum(has_no_class).as_py()} of {len(indices)} images have no tag"
        )
    else:
        num_images = dict(zip(names, count_tags(indices, len(names)).tolist(), strict=True))
        if not classes:
            notes += _doubtful_class_notes(num_images)
        notes += _misspelling_notes(num_images)
    return _Tagged(indices, is_negative, names, notes)


def _count_tags_named(names: Sequence[str], cells: pa.ChunkedArray) -> int:
    """Returns how many tags in the cells of a column have one of some names."""
    value_set = pa.array(names, pa.string())
    return sum(pc.is_in(_split_cells(chunk).tags, value_set).true_count for chunk in pieces(cells))


def _none_tags(all_tags: set[str], names: Sequence[str], negative_tags: str) -> set[str]:
    """Returns the tags of a table that mean none of the classes.

    Args:
        all_tags: All tags of the table.
        names: Class names that are given. One of them is a class even if NEGATIVE_TAGS has it.
        negative_tags: See `TagsConfig`.

    Raises:
        UserError: A given class is among `negative_tags`.
    """
    further = {normalized_name(tag) for tag in split_tags(negative_tags)}
    contradictions = sorted(further & set(names))
    if contradictions:
        raise UserError(
            f"{join_shortened(contradictions)} is a class, and in data.tags.negative_tags",
            "tags that mean none of the classes",
            "remove the name from the class file (data.classes) or from data.tags.negative_tags",
        )
    return {tag for tag in all_tags if tag in further or (tag.casefold() in NEGATIVE_TAGS and tag not in names)}


def _negatives(
    rows: UserTable, images: pa.ChunkedArray, cells: pa.ChunkedArray, none_tags: set[str]
) -> pa.ChunkedArray:
    """Returns whether each cell says that its image shows none of the classes: an empty list, or one of `none_tags`.

    Args:
        images: Name of the image of each row, for messages.

    Raises:
        UserError: A cell has one of `none_tags` and another tag.
    """
    value_set = pa.array(sorted(none_tags), pa.string())
    columns: list[pa.Array] = []
    contradictions: list[str] = []
    first = 0
    for chunk in pieces(cells):
        split = _split_cells(chunk)
        means_none = pc.is_in(split.tags, value_set=value_set).to_numpy(zero_copy_only=False)
        has_none_tag = np.zeros(len(chunk), bool)
        has_none_tag[split.row[means_none]] = True
        has_other_tag = np.zeros(len(chunk), bool)
        has_other_tag[split.row[~means_none]] = True

        columns.append(pa.array(has_none_tag | split.is_empty_list))
        contradictory = pa.array(has_none_tag & has_other_tag)
        contradictions += images.slice(first, len(chunk)).filter(contradictory).to_pylist()
        first += len(chunk)

    if contradictions:
        raise UserError(
            f"{rows.path}: {len(contradictions)} image(s) have a class and a tag that means none of the classes "
            f"({join_shortened(sorted(none_tags))}): {join_shortened(contradictions)}",
            "either classes, or one tag for none of them",
            "delete one of the tags",
        )
    return pa.chunked_array(columns, pa.bool_())


def _negative_notes(is_negative: pa.ChunkedArray, none_tags: set[str]) -> list[str]:
    """Returns a note on how many images show none of the classes, if any."""
    count = pc.sum(is_negative).as_py()
    if not count:
        return []
    tags = f", by the tag {join_shortened(sorted(none_tags))}" if none_tags else ""
    return [f"{count} of {len(is_negative)} images are negatives, which show none of the classes{tags}"]


def _doubtful_class_notes(num_images: Mapping[str, int]) -> list[str]:
    """Returns notes on classes whose names suggest that their images show none of the classes, or have no tag.

    Args:
        num_images: Number of images by class name.
    """
    notes: list[str] = []
    for name, count in num_images.items():
        found = f"{name!r} ({count} images) is a class"
        if name.casefold() in MAY_BE_NEGATIVE_TAGS:
            notes.append(f"{found}; if it means none of the classes, set data.tags.negative_tags={name}")
        if name.casefold() in MAY_BE_MISSING_TAGS:
            notes.append(f"{found}; if it means that tags are missing, empty these cells of the table")
    return notes


def _check_names(rows: UserTable, names: tuple[str, ...], classes: Path | None) -> None:
    """Raises a UserError if there is no class name, or if names show that tags were not separated as expected."""
    check_classes(rows.path, names)
    column = rows.columns.get("tags")
    if not names:
        raise UserError(f"{rows.path}: no tag in column {column!r}", "at least one tagged image", "add tags")

    quoted = [name for name in names if re.search(r"[\n\r]|^[\[{\"']", name)]
    if quoted:
        found = f"{rows.path}: tags such as {join_shortened(quoted)}"
        raise UserError(found, "names without brackets or quotes", "correct the tags")

    joined = [name for name in names if _is_joined(name, names)]
    if joined and not classes and not rows.flags:
        raise UserError(
            f"{rows.path}: {join_shortened(joined)} in column {column!r}: "
            "tags with a space, '/', '&' or '+' between them",
            "';', ',' or '|' between the tags of an image",
            "write one of these characters; if such a text is a class, name a file of all classes by data.classes",
        )


def _is_joined(name: str, names: Collection[str]) -> bool:
    """Returns whether a name consists of other names, such as "cat dog" or "cat/dog"."""
    parts = [part for part in re.split(_UNCLEAR_SEPARATORS, name) if part]
    return len(parts) > 1 and set(parts) <= set(names)


def _misspelling_notes(num_images: Mapping[str, int]) -> list[str]:
    """Returns notes on classes that are probably misspelled.

    A name is reported if it differs from another only by capitals, or if it is similar to that of a class with many
    times as many images. Names are visited from the most to the least frequent one, so each is compared with the more
    frequent ones.

    Args:
        num_images: Number of images by class name.
    """
    notes: list[str] = []
    correct_names: dict[str, str] = {}  # visited name without capitals -> its probable correct spelling

    for name in sorted(num_images, key=lambda name: -num_images[name]):
        folded = name.casefold()
        if len(name) < _SHORT_NAME:
            min_ratio = 20
            min_similarity = 0.65
        else:
            min_ratio = 4
            min_similarity = 0.8

        min_images = min_ratio * max(num_images[name], 1)
        frequent = [other for other, correct in correct_names.items() if num_images[correct] >= min_images]
        similar = difflib.get_close_matches(folded, frequent, 1, min_similarity)

        if folded not in correct_names:
            correct_names[folded] = correct_names[similar[0]] if similar else name
        likely = correct_names[folded]
        if likely != name:
            notes.append(
                f"{name!r} ({num_images[name]} images) may be a misspelling of {likely!r} ({num_images[likely]} images)"
            )
    return notes


def tag_cells(rows: UserTable) -> pa.ChunkedArray:
    """Returns the cells of tags, lists or texts. Columns of 0 and 1 become lists (`_tags_of_flags`)."""
    if rows.flags:
        return _tags_of_flags(rows.content, rows.flags)

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


def _tags_of_flags(content: pa.Table, flags: Sequence[str]) -> pa.ChunkedArray:
    """Returns the names of the columns in which each row has a 1, list<string>.

    A row with empty cells and no 1 becomes null, because it does not say that the image shows none of the classes.

    Args:
        flags: Names of columns of 0, 1 and empty cells.
    """
    columns = [pc.fill_null(content[name].cast(pa.int8()), 0).to_numpy() for name in flags]
    row, column = np.nonzero(np.stack(columns, axis=1))
    start = np.searchsorted(row, np.arange(len(content) + 1)).astype(np.int32)  # first tag of each row, and the end
    has_tag = np.diff(start) > 0

    has_empty_cell = np.zeros(len(content), bool)
    for name in flags:
        has_empty_cell |= content[name].is_null().to_numpy()

    tags = pa.array(flags).take(pa.array(column))
    lists = pa.ListArray.from_arrays(start, tags, mask=pa.array(has_empty_cell & ~has_tag))
    return pa.chunked_array([lists])


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
        is_empty_list: (N,) whether a cell is a list without entries. Texts and null are none.
    """

    row: NDArray[np.int32]
    tags: pa.Array
    is_empty_list: NDArray[np.bool_]


def _split_cells(cells: pa.Array) -> _SplitCells:
    """Splits a chunk of cells, lists or texts, into tags, see `normalized_name`."""
    lists = _split_texts(cells) if pa.types.is_string(cells.type) else cells
    counts = pc.list_value_length(lists).fill_null(0).to_numpy()
    is_empty_list = (counts == 0) & lists.is_valid().to_numpy(zero_copy_only=False)

    tags = trimmed(lists.flatten())
    if not pc.all(pc.string_is_ascii(tags)).as_py():
        encoded = tags.dictionary_encode()
        names = [normalized_name(name) or None for name in encoded.dictionary.to_pylist()]
        tags = pa.array(names, pa.string()).take(encoded.indices)

    is_present = tags.is_valid().to_numpy(zero_copy_only=False)
    row = np.repeat(np.arange(len(cells), dtype=np.int32), counts)
    return _SplitCells(row[is_present], tags.drop_null(), is_empty_list)


def _distinct_tags(cells: pa.ChunkedArray) -> set[str]:
    """Returns all tags that occur in a column."""
    tags: set[str] = set()
    for chunk in pieces(cells):
        tags.update(_split_cells(chunk).tags.unique().to_pylist())
    return tags


def _class_indices(cells: pa.Array, names: Sequence[str]) -> pa.Array:
    """Returns the class indices of each row of a chunk, distinct and ascending, list<uint16>, without other tags."""
    row, tags, _ = _split_cells(cells)
    classes = pc.index_in(tags, value_set=pa.array(names, pa.string())).fill_null(-1).to_numpy()

    # One number for each pair of row and class, so that one sort orders the pairs and drops repetitions.
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
            f"{rows.path}: {len(absent)} file(s) of column {rows.columns[role]!r} are missing: "
            f"{join_shortened(absent)}",
            "an existing file, or an empty cell for none",
            "add the files or empty the cells",
        )
    return uris


def _absent_files(uris: Iterable[str]) -> list[str]:
    return [uri for uri in uris if not is_remote(uri) and not is_file(uri)]


def _mask_notes(splits: pa.ChunkedArray, has_truth: pa.ChunkedArray) -> list[str]:
    """Returns notes on the images of each split that have no ground-truth mask and are no negatives."""
    notes: list[str] = []
    for split in sorted(splits.unique().to_pylist()):
        in_split = pc.equal(splits, split)
        images = pc.sum(in_split).as_py()
        missing = pc.sum(pc.and_(in_split, pc.invert(has_truth))).as_py()
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
        notes.append(f"columns that are not read: {join_shortened(rows.unread)}")
    if rows.counts:
        notes.append(
            f"{join_shortened(rows.counts)} may count the objects of a class: if so, write 1 for larger numbers; "
            "otherwise an image with such objects is a negative if all other classes are 0"
        )
    return notes


TAGS = Source(
    lister=list_tagged,
    location="table",
    help="Your own images and tags: path or URI of a .csv, .jsonl or .parquet table.",
    example="tags photos.csv",
    location_kind="FILE",
    record=TagsConfig,
    data_keys={"classes": "classes", "untagged": "untagged"},
    defines_classes=True,
    recipe="photos",
)

"""A user's table of images and tags, CSV, JSONL or Parquet -> listing.

Columns, whose names the caller may choose:

- image: path of this machine, absolute or relative to the table's folder, or a URI (`s3://bucket/key`, `gs://...`).
- tags: a list of strings, or one string with `;`, `,` or `|` between the tags. Spaces around a tag are dropped, those
  inside belong to its name (`potted plant; cat`). Null and empty mean: no tag.
- mask, saliency (optional, null for none): paths or URIs as above. A split that lacks some of its masks is taken as one
  without masks, and noted, because a score is of every image.
- split (optional): train, val or test; without the column every image is in train.
- id (optional): unique names; without it the image's path as written is its name.

A table may come from someone else, so it names files below its own folder alone: no absolute paths or `..` that lead
out of it, no local files where the table is remote. A local table may name buckets, which are reached with the user's
credentials, but no server that these would be sent to (`endpoint_override`). Whoever trusts a table says so, by
`allow_absolute`. Symbolic links are followed: no table can make one.

S3 credentials come from the environment or ~/.aws, as the AWS command line finds them. Another server than Amazon's is
named in the URI, `s3://bucket/key?endpoint_override=HOST:PORT&scheme=http`, or by the environment variable
AWS_ENDPOINT_URL. A relative path in a remote table leads to a URI with the table's own query.
"""

import os
import posixpath
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from numpy.typing import NDArray

from mcis.datasets.classes import MAX_CLASSES, read_classes
from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.index import Listing, shown
from mcis.datasets.section import PathOrUri, Section
from mcis.datasets.sources.lists import lacking_masks, listing_table, nearest, repeated_value
from mcis.datasets.sources.source import Source
from mcis.datasets.storage.files import (
    credentials_refused,
    holds_credentials,
    is_remote,
    local_path,
    read_opened,
    without_credentials,
)
from mcis.datasets.tables.large_tables import give_back, pieces, repeated

OPTIONAL = {"mask": "mask", "saliency": "saliency", "split": "split", "id": "id"}
"""The columns that may be absent, and their names where the caller names none."""

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")
"""Of the URIs that can be opened."""

SPLITS = ("train", "val", "test")

MAX_TABLE = 2**34
"""Largest table, bytes."""

_NAME = r"([^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+)"
_PLAIN, _ROOTED = rf"^{_NAME}(/{_NAME})*$", rf"^(/{_NAME})+$"
"""Relative and absolute paths that are as `normpath` would have them."""
_STANDS_IN_URI = r"^[\w ./+=,@-]+$"
"""Texts that mean nothing but themselves in the path of a URI."""
_BUCKET = r"^(s3|gs|gcs|abfs|abfss|hdfs|viewfs)://[A-Za-z0-9._-]+/[^?#\[\]]+$"
"""URIs that need not be taken apart: of a known scheme, without a port, a user or a query."""
_MAY_HOLD_CREDENTIALS = r"(?s)://.*[@?]"
"""Texts of which `holds_credentials` may be true."""
_PATH_OF_URI = r"(?s)^([^:/?]+://[^:/?]*)/[^?]*"
"""The path that says nothing of credentials, behind what is kept: the same for most rows of a table."""
_MARK = "\ue000"


class _Table(NamedTuple):
    """A table of a user.

    Attributes:
        path: absolute path or URI, for messages and relative paths.
        content: the columns of it that are read.
        columns: what a column holds -> its name, as far as the table has it.
        unread: names of its other columns.
        trusted: whether it may name any file and server.
    """

    path: str
    content: pa.Table
    columns: dict[str, str]
    unread: list[str]
    trusted: bool


class _Content(NamedTuple):
    """The names of all columns of a file, and the rows of at least those that are wanted and there once."""

    names: list[str]
    rows: pa.Table


class _Tagged(NamedTuple):
    """The tags of every row as ascending class indices, list<uint16>, the K class names, and notes."""

    tags: pa.ChunkedArray
    names: tuple[str, ...]
    notes: list[str]


class _Masks(NamedTuple):
    """The ground-truth masks of every row, null for none, and notes about those that are missing."""

    uris: pa.ChunkedArray
    notes: list[str]


class TagsConfig(Section):
    """Your own images and tags (source `tags`), a table."""

    table: PathOrUri | None = None
    """Path or URI of a .csv, .jsonl or .parquet table."""
    image: str = "image"
    """Column of image paths (relative to the table's folder, or absolute) or URIs such as s3://."""
    tags: str = "tags"
    """Column of class names: lists, or text with ; between the names."""
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
    mask: str = OPTIONAL["mask"],
    saliency: str = OPTIONAL["saliency"],
    split: str = OPTIONAL["split"],
    id: str = OPTIONAL["id"],
    ignore_others: bool = False,
    allow_absolute: bool = False,
) -> Listing:
    """Reads a table of images and tags; no image is opened.

    Args:
        table: path of a .csv, .jsonl or .parquet table, or its URI.
        classes: file with one class name per line; None = every tag of the table is a class, in the order of the
            alphabet.
        image, tags: names of columns that have to exist.
        mask, saliency, split, id: names of columns that may be absent under these names, not under others.
        ignore_others: tags that are no class are left out, and counted in a note.
        allow_absolute: whether the table may name files outside of its folder, and other servers.

    Raises:
        UserError: the table cannot be read or is empty, a column is missing or no text, an image is null or named
            twice, a file lies where the table may not name one, a cell holds a password, key, token or signature, a
            local mask or saliency map is absent, a tag is unknown, there are none or too many, a split is unknown or
            train is empty.
    """
    path = str(table) if is_remote(str(table)) else str(Path(table).expanduser().resolve())
    columns = {"image": image, "tags": tags, "mask": mask, "saliency": saliency, "split": split, "id": id}
    rows = _read(path, columns, trusted=allow_absolute)
    images = _filled(rows, "image")
    ids = _ids(rows, images, id)
    splits = _splits(rows)
    tagged = _tagged(rows, classes, ignore_others)
    masks = _masks(rows, splits)
    saliency_uris = _existing(rows, "saliency")
    notes = [*_notes(rows, splits, tagged.names), *tagged.notes]
    if "saliency" in rows.columns and (absent := saliency_uris.null_count):
        notes.append(f"{path}: no saliency map for {absent} of {len(images)} images")
    listed = listing_table(
        image_id=ids,
        uri=_uris(rows, "image", images),
        domain="target",
        split=splits,
        tags=tagged.tags,
        mask_uri=masks.uris,
        saliency_uri=saliency_uris,
    )
    found = Listing(listed, tagged.names, (*notes, *masks.notes))
    del rows, images
    give_back()
    return found


def image_column(table: str, image: str = "image", *, allow_absolute: bool = False) -> list[tuple[str, str]]:
    """The images of a table as written, each with its absolute path or URI; other columns are not looked at.

    Raises:
        UserError: the table cannot be read or is empty, the column is missing, no text, or empty in a row, or names a
            file where the table may not name one (`list_tagged`).
    """
    path = table if is_remote(table) else str(Path(table).expanduser().resolve())
    rows = _read(path, {"image": image}, trusted=allow_absolute)
    texts = _filled(rows, "image")
    return list(zip(texts.to_pylist(), _uris(rows, "image", texts).to_pylist(), strict=True))


def _read_csv(file: BinaryIO, wanted: Sequence[str]) -> _Content:
    names = pa.csv.open_csv(file).schema.names
    file.seek(0)
    present = [name for name in dict.fromkeys(wanted) if names.count(name) == 1]
    options = pa.csv.ConvertOptions(include_columns=present, column_types=dict.fromkeys(present, pa.string()))
    return _Content(names, pa.csv.read_csv(file, convert_options=options))


def _read_jsonl(file: BinaryIO, wanted: Sequence[str]) -> _Content:
    """Read twice where Arrow takes texts that look like it for times."""
    table = pa.json.read_json(file)
    times = [f.name for f in table.schema if f.name in wanted and pa.types.is_timestamp(f.type)]
    if times:
        file.seek(0)
        schema = pa.schema([(name, pa.string()) for name in times])
        table = pa.json.read_json(file, parse_options=pa.json.ParseOptions(explicit_schema=schema))
    return _Content(table.column_names, table)


def _read_parquet(file: BinaryIO, wanted: Sequence[str]) -> _Content:
    content = pa.parquet.ParquetFile(file)
    names = content.schema_arrow.names
    present = [name for name in dict.fromkeys(wanted) if names.count(name) == 1]
    return _Content(names, content.read(present))


READERS: dict[str, Callable[[BinaryIO, Sequence[str]], _Content]] = {
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
"""By the table's suffix: its file and the columns that are wanted, which hold text -> what it holds."""


def _read(path: str, columns: dict[str, str], *, trusted: bool) -> _Table:
    """Reads the table and checks that it has the columns that it has to have."""
    suffix = posixpath.splitext(urlsplit(path).path if is_remote(path) else path)[1].lower()
    expected = f"a table of images and tags, {', '.join(READERS)}"
    _check_scheme(path, path)
    if suffix not in READERS:
        raise UserError(f"{path} has the suffix {suffix or 'none'}", expected, "convert or rename the table")
    try:
        read, wanted = READERS[suffix], list(columns.values())
        names, content = read_opened(path, lambda file: read(file, wanted), MAX_TABLE)
        content.validate(full=True)  # not every reader looks whether texts are UTF-8
    except FileNotFoundError:
        raise UserError(f"no table {path}", expected, "name a table that exists") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {unquoted(error)}", expected, "correct the table") from None
    present = _present(path, names, columns)
    if not len(content):
        raise UserError(f"{path} has no row", "at least one image", "add images, or name another table")
    unread = [name for name in names if name not in present.values()]
    return _Table(path, content.select(list(dict.fromkeys(present.values()))), present, unread, trusted)


def _present(path: str, names: Sequence[str], columns: dict[str, str]) -> dict[str, str]:
    """The columns that the table has.

    Raises:
        UserError: it has one of them twice, or lacks one that has to exist.
    """
    for what, column in columns.items():
        count = names.count(column)
        if count > 1:
            raise UserError(f"{path} has {count} columns {column!r}", "each column once", "rename or delete one")
        if not count and column != OPTIONAL.get(what):
            raise UserError(
                f"{path} has no column {column!r}; it has {', '.join(map(repr, names))}",
                f"a column for {what}",
                f"add it, or say which column holds it: `{what}=COLUMN`",
            )
    return {what: column for what, column in columns.items() if column in names}


def _texts(rows: _Table, what: str) -> pa.ChunkedArray:
    """A column of strings without spaces around them; null for those that are empty."""
    column = rows.columns[what]
    values = rows.content[column]
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if not _is_text(values.type) and not pa.types.is_integer(values.type) and not pa.types.is_null(values.type):
        raise UserError(f"{rows.path}: column {column!r} holds {values.type}", "text", "write it as strings")
    texts = pa.chunked_array([_trimmed(chunk) for chunk in pieces(values.cast(pa.string()))], pa.string())
    broken = _rows_where(pc.match_substring(texts, "\0"))
    if broken:
        raise UserError(
            f"{rows.path}: NUL bytes in column {column!r}: row {shown(broken)}",
            "text without NUL bytes",
            "correct the table",
        )
    if secret := _rows_with_credentials(texts):
        raise credentials_refused(f"column {column!r} of {rows.path}: row {shown(secret)}")
    return texts


def _rows_with_credentials(texts: pa.ChunkedArray) -> list[str]:
    """The numbers, from 1, of the rows in which a text is a URI that holds a password, key, token or signature."""
    may = pc.match_substring_regex(texts, _MAY_HOLD_CREDENTIALS)
    if not pc.any(may).as_py():
        return []
    servers = pc.replace_substring_regex(texts, _PATH_OF_URI, r"\1")
    holding = [text for text in servers.filter(may).unique().to_pylist() if holds_credentials(text)]
    return _rows_where(pc.is_in(servers, pa.array(holding, pa.string())))


def _trimmed(texts: pa.Array) -> pa.Array:
    """Texts without spaces around them, null for those that are empty; the same memory where that changes nothing."""
    trimmed = pc.utf8_trim_whitespace(texts)
    empty = pc.equal(pc.binary_length(trimmed), 0)
    if pc.any(empty).as_py():
        return pc.if_else(empty, None, trimmed)
    return texts if trimmed.equals(texts) else trimmed


def _rows_where(mask: pa.ChunkedArray) -> list[str]:
    """The numbers, from 1, of the rows in which a column of bool holds true."""
    positions: NDArray[np.int64] = np.flatnonzero(mask.fill_null(False).to_numpy())
    return [str(number) for number in (positions + 1).tolist()]


def _is_text(column_type: pa.DataType) -> bool:
    return (
        pa.types.is_string(column_type) or pa.types.is_large_string(column_type) or pa.types.is_string_view(column_type)
    )


def _filled(rows: _Table, what: str) -> pa.ChunkedArray:
    """The texts of a column that may not be empty anywhere."""
    texts = _texts(rows, what)
    if texts.null_count:
        empty = _rows_where(texts.is_null())
        raise UserError(
            f"{rows.path}: {len(empty)} empty cell(s) in column {rows.columns[what]!r}: row {shown(empty)}",
            "a value in each row (they are counted from 1, without a header)",
            "fill or delete the rows",
        )
    return texts


def _ids(rows: _Table, images: pa.ChunkedArray, id_column: str) -> pa.ChunkedArray:
    """A unique name for each row: of the column for it, or the image's path as written."""
    what = "id" if "id" in rows.columns else "image"
    ids = _filled(rows, "id") if what == "id" else images
    if twice := repeated(ids):
        raise UserError(
            f"{rows.path}: {len(twice)} value(s) of column {rows.columns[what]!r} are there more than once: "
            f"{shown(twice)}",
            "each image once, under a name of its own",
            f"delete or merge the rows, or give each a name in a column {id_column!r}",
        )
    return ids


def _splits(rows: _Table) -> pa.ChunkedArray:
    """The split of each row; every image is in train where no column says otherwise."""
    if "split" not in rows.columns:
        return repeated_value("train", len(rows.content), pa.string())
    splits, column = _filled(rows, "split"), rows.columns["split"]
    names = splits.unique().to_pylist()
    unknown = sorted(set(names) - set(SPLITS))
    if unknown:
        expected = f"one of {', '.join(SPLITS)}"
        raise UserError(f"{rows.path}: unknown split {shown(unknown)} in column {column!r}", expected, "rename it")
    if "train" not in names:
        raise UserError(f"{rows.path} has no image of split train", "at least one", f"correct its column {column!r}")
    return splits


def _tagged(rows: _Table, classes: Path | None, ignore_others: bool) -> _Tagged:
    """The classes, from their file or of all tags, and the class indices of each row."""
    tags = _tags(rows)
    names = read_classes(classes) if classes else _names(rows, tags.names)
    index = {name: k for k, name in enumerate(names)}
    others = sorted(set(tags.names) - set(index))
    if others and not ignore_others:
        raise UserError(
            f"{rows.path}: {len(others)} tag(s) are no class: {shown(others)}",
            f"the {len(names)} classes of {classes}",
            f"{nearest(others, names)}correct the table or the class file, or leave such tags out by "
            "`ignore_others=true`",
        )
    class_of = np.array([index.get(name, -1) for name in tags.names], np.int64)
    indices = pa.chunked_array([_indices(part, class_of) for part in tags.parts], pa.list_(pa.uint16()))
    if not others:
        return _Tagged(indices, names, [])
    count = sum(int((class_of[part.tags] < 0).sum()) for part in tags.parts)
    untagged = int(pc.sum(pc.equal(pc.list_value_length(indices), 0)).as_py())
    note = (
        f"{rows.path}: {count} tags of {len(others)} names that are no class were left out: {shown(others)}; "
        f"{untagged} of {len(indices)} images have no tag"
    )
    return _Tagged(indices, names, [note])


class _Part(NamedTuple):
    """Tags of consecutive rows: how many rows, and of each tag its row, ascending, and its number among the names."""

    rows: int
    row: NDArray[np.int32]
    tags: NDArray[np.int32]


class _Tags(NamedTuple):
    """The different tags of a table, as they are written without spaces around them, and where they are."""

    names: list[str]
    parts: list[_Part]


def _indices(part: _Part, class_of: NDArray[np.int64]) -> pa.Array:
    """The class indices of each row, ascending and none twice, as list<uint16>.

    Args:
        class_of: by the number of a tag; -1 for one that is no class.
    """
    classes = class_of[part.tags]
    numbers = np.sort((part.row * np.int64(2**16) + classes)[classes >= 0])
    numbers = numbers[np.diff(numbers, prepend=-1) > 0]
    start = np.searchsorted(numbers, np.arange(part.rows + 1) * np.int64(2**16)).astype(np.int32)
    return pa.ListArray.from_arrays(start, pa.array((numbers % 2**16).astype(np.uint16)))


def _tags(rows: _Table) -> _Tags:
    """The tags of each row; empty ones are dropped."""
    column = rows.columns["tags"]
    column_type = rows.content[column].type
    is_list = pa.types.is_list(column_type) or pa.types.is_large_list(column_type)
    cell = column_type.value_type if is_list else column_type
    if not (_is_text(cell) or pa.types.is_null(cell) or (pa.types.is_dictionary(cell) and not is_list)):
        raise UserError(
            f"{rows.path}: column {column!r} holds {f'lists of {cell}' if is_list else cell}",
            "lists of strings, or strings with ';', ',' or '|' between the tags",
            "write the names of the classes",
        )
    return _numbered(rows.content[column] if is_list else _texts(rows, "tags"), is_list=is_list)


def _numbered(cells: pa.ChunkedArray, *, is_list: bool) -> _Tags:
    """Takes cells apart, a chunk of lists or of texts at a time."""
    numbers: dict[str, int] = {}
    parts = []
    for chunk in pieces(cells):
        lists = chunk if is_list else pc.split_pattern_regex(chunk, "[;,|]")
        counts = pc.list_value_length(lists).fill_null(0).to_numpy()
        tags = _trimmed(lists.flatten().cast(pa.string()))
        row = np.repeat(np.arange(len(chunk), dtype=np.int32), counts)[tags.is_valid().to_numpy(zero_copy_only=False)]
        encoded = tags.drop_null().dictionary_encode()
        of_chunk = [numbers.setdefault(name, len(numbers)) for name in encoded.dictionary.to_pylist()]
        parts.append(_Part(len(chunk), row, np.array(of_chunk, np.int32)[encoded.indices.to_numpy()]))
    return _Tags(list(numbers), parts)


def _names(rows: _Table, tags: Sequence[str]) -> tuple[str, ...]:
    """The class names where no file gives them: every tag of the table."""
    path = rows.path
    names = tuple(sorted(tags))
    if not names:
        raise UserError(f"{path}: no tag in column {rows.columns['tags']!r}", "at least one tagged image", "add tags")
    if "background" in names:
        raise UserError(f"{path}: the tag background", "tags of things; background is no class", "delete that tag")
    if len(names) > MAX_CLASSES:
        raise UserError(
            f"{path}: {len(names)} different tags: {shown(names)}",
            f"at most {MAX_CLASSES}, because labels are bytes",
            "merge tags, or name the classes that you want in a file, one per line: `classes=FILE` "
            "`ignore_others=true`",
        )
    return names


def _check_scheme(table: str, text: str) -> None:
    """A path, or a URI of a known scheme that can be taken apart."""
    if not is_remote(text):
        return
    expected = f"a path, or a URI {', '.join(f'{scheme}://' for scheme in SCHEMES)}"
    try:
        scheme = urlsplit(text).scheme
    except ValueError as error:
        raise UserError(f"{table}: {text} is no URI: {error}", expected, "correct it") from None
    if scheme not in SCHEMES:
        raise UserError(f"{table}: unknown scheme of {text}", expected, "correct it")


def _uri(table: str, text: str) -> str:
    """A cell of the table -> absolute path or URI."""
    if is_remote(text):
        _check_scheme(table, text)
        return text
    if os.path.isabs(text):
        return os.path.normpath(text)
    if not is_remote(table):
        return os.path.normpath(os.path.join(os.path.dirname(table), text))
    parts = urlsplit(table, allow_fragments=False)
    key = posixpath.normpath(posixpath.join(posixpath.dirname(parts.path), text))
    return parts._replace(path=key).geturl()


def _uris(rows: _Table, what: str, texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """The cells of a column, null where they are -> absolute paths and URIs.

    Raises:
        UserError: a table that is not trusted names files that it may not name.
    """
    outside: list[str] = []
    chunks = [_uris_of_chunk(rows, chunk, outside) for chunk in pieces(texts)]
    if outside:
        of_buckets = "" if is_remote(rows.path) else ", or in buckets of the server that the environment names"
        raise UserError(
            f"{rows.path}: {len(outside)} file(s) of column {rows.columns[what]!r} lie outside of the table's folder "
            f"or on another server: {shown([without_credentials(uri) for uri in outside])}",
            f"files below {without_credentials(rows.path).rpartition('/')[0]}/{of_buckets}",
            "put the table into a folder above them, or, where you trust it, allow that by `allow_absolute=true`",
        )
    return pa.chunked_array(chunks, pa.string())


def _uris_of_chunk(rows: _Table, texts: pa.Array, outside: list[str]) -> pa.Array:
    """As `_uris`, of a chunk; adds to `outside` what the table may not name.

    Nearly all cells are plain: relative paths below the table's folder, absolute paths, URIs of buckets. These are made
    all at once; the others one by one, by `_uri` and `_may_name`, which say the same of plain ones.
    """
    of_server = is_remote(rows.path)
    below = pc.match_substring_regex(texts, _PLAIN)
    if of_server:
        below = pc.and_(below, pc.match_substring_regex(texts, _STANDS_IN_URI))
    before, _, behind = _uri(rows.path, _MARK).partition(_MARK)
    uris = pc.if_else(below, pc.binary_join_element_wise(before, texts, behind, ""), texts)
    if pc.all(below).as_py():
        return uris
    plain = below
    if rows.trusted or not of_server:
        rooted = pc.match_substring_regex(texts, _ROOTED)
        inside = rooted if rows.trusted else pc.and_(rooted, pc.starts_with(texts, before))
        plain = pc.or_(plain, pc.or_(inside, pc.match_substring_regex(texts, _BUCKET)))
    others = pc.invert(plain).fill_null(False)
    one_by_one = [_uri(rows.path, text) for text in texts.filter(others).to_pylist()]
    if not rows.trusted:
        outside += [uri for uri in one_by_one if not _may_name(rows.path, uri)]
    return pc.replace_with_mask(uris, others, pa.array(one_by_one, pa.string()))


def _may_name(table: str, uri: str) -> bool:
    """Whether a table that is not trusted may name a file: it lies below the table's folder, on the same server."""
    (server, path), (its_server, its_path) = _place(table), _place(uri)
    if its_server and not server:
        return all(name == "region" for name, _ in parse_qsl(urlsplit(uri).query, keep_blank_values=True))
    folder = posixpath.dirname(path).rstrip("/") + "/"
    return server == its_server and (
        its_path.startswith(folder) or (not server and os.path.realpath(its_path).startswith(folder))
    )


def _place(uri: str) -> tuple[str, str]:
    """Where a file lies: all of its URI that says which server, nothing for this machine, and its path."""
    local = local_path(uri)
    if local is not None:
        return "", os.path.normpath(local)
    parts = urlsplit(uri, allow_fragments=False)
    return parts._replace(path="").geturl(), posixpath.normpath(parts.path)


def _existing(rows: _Table, what: str) -> pa.ChunkedArray:
    """The masks or saliency maps of a column. Those of this machine exist, which later stages take for granted."""
    if what not in rows.columns:
        return repeated_value(None, len(rows.content), pa.string())
    uris = _uris(rows, what, _texts(rows, what))
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


def _masks(rows: _Table, splits: pa.ChunkedArray) -> _Masks:
    """The ground-truth masks of each row; a split has all of its masks or none."""
    uris, notes = _existing(rows, "mask"), []
    for split in sorted(splits.unique().to_pylist()) if "mask" in rows.columns else ():
        of_split = pc.equal(splits, split)
        images, absent = (pc.sum(mask).as_py() for mask in (of_split, pc.and_(of_split, uris.is_null())))
        notes += [f"{rows.path}: {note}" for note in lacking_masks(absent, images, split)]
        if absent:
            uris = pc.if_else(of_split, None, uris)
    return _Masks(uris, notes)


def _notes(rows: _Table, splits: pa.ChunkedArray, names: tuple[str, ...]) -> list[str]:
    path, notes = rows.path, []
    if "val" not in splits.unique().to_pylist():
        notes.append(f"{path} has no image of split val: the training images are predicted")
    if rows.unread:
        notes.append(f"{path}: columns that are not read: {shown(rows.unread)}")
    several = [name for name in names if " " in name and set(name.split()) <= set(names)]
    if several:
        notes.append(f"{path}: {shown(several)} is one class each; tags are divided by ; , or |, never by spaces")
    return notes


TAGS = Source(
    lister=list_tagged,
    location="table",
    about="a table of images and tags",
    help="Your own images and tags: path or URI of a .csv, .jsonl or .parquet table.",
    example="tags photos.csv",
    where="FILE",
    record=TagsConfig,
    of_data={"classes": "classes"},
    options={"classes": "data.classes"},
    names_classes=True,
    recipe="photos",
)

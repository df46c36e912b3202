"""A table that a user wrote, CSV, JSONL or Parquet -> its columns as texts, and the files that it names as URIs.

A table may come from someone else, so it names files below its own folder alone: no absolute paths or `..` that lead
out of it, no local files where the table is remote. A local table may name buckets, which are reached with the user's
credentials, but no server that these would be sent to (`endpoint_override`). Links are followed: no table makes one.
"""

import itertools
import os
import posixpath
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import BinaryIO, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.index import shown
from mcis.datasets.storage.files import path_on_disk, read_opened
from mcis.datasets.storage.uris import credentials_refused, holds_credentials, is_remote, without_credentials
from mcis.datasets.tables.large_tables import pieces

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")
"""Of the URIs that can be opened."""
MAX_TABLE = 2**34
"""Largest table, bytes."""
_PLAIN = r"^[^/.?#\x00-\x1f][^/?#\x00-\x1f]*(/[^/.?#\x00-\x1f][^/?#\x00-\x1f]*)*$"
"""Relative paths that `normpath` and a URI leave as they are; no name in them begins with a dot."""
_MARK = "\ue000"
_NAMES = {
    "image": ("file_name", "filename", "file", "path", "image_path", "uri"),
    "tags": ("labels", "label", "tag", "classes", "class"),
    "mask": ("mask_path",),
    "split": ("subset",),
}
_GUESSES = {
    what: [way(n) for n in (what, *names) for way in (str, str.title, str.upper, lambda n: n.title().replace("_", " "))]
    for what, names in _NAMES.items()
}
"""What a column holds -> names that it has in people's tables."""
_MAY_HOLD_CREDENTIALS = r"(?s)://.*[@?]"
"""Texts of which `holds_credentials` may be true."""


class UserTable(NamedTuple):
    """A table of a user.

    Attributes:
        path: absolute path or URI, for messages and relative paths.
        content: the columns of it that are read.
        columns: what a column holds -> its name, as far as the table has it.
        flags: names of the columns that stand for a class each, 0 and 1, where none holds tags.
        guessed: which columns hold what, as far as that was guessed from their names and values, in words.
        unread: names of its other columns.
        trusted: whether it may name any file and server.
    """

    path: str
    content: pa.Table
    columns: dict[str, str]
    flags: list[str]
    guessed: list[str]
    unread: list[str]
    trusted: bool

    def cells(self, what: str) -> pa.ChunkedArray:
        """A column as it is, but for its texts and lists of texts, which are `string` and `list<string>`."""
        cells = self.content[self.columns[what]]
        return cells.cast(_read_as(cells.type))

    def texts(self, what: str) -> pa.ChunkedArray:
        """A column of strings without spaces around them; null for those that are empty. UserError where it holds
        something else, a NUL byte, or a password, key, token or signature."""
        column = self.columns[what]
        values = self.cells(what)
        if values.type != pa.string() and not pa.types.is_integer(values.type):
            raise UserError(f"{self.path}: column {column!r} holds {values.type}", "text", "write it as strings")
        texts = pa.chunked_array([trimmed(chunk) for chunk in pieces(values.cast(pa.string()))], pa.string())
        if broken := _rows_where(pc.match_substring(texts, "\0")):
            found = f"{self.path}: NUL bytes in column {column!r}: row {shown(broken)}"
            raise UserError(found, "text without NUL bytes", "correct the table")
        secret = pc.match_substring_regex(texts, _MAY_HOLD_CREDENTIALS)
        if holding := [text for text in texts.filter(secret).unique().to_pylist() if holds_credentials(text)]:
            rows = _rows_where(pc.is_in(texts, pa.array(holding, pa.string())))
            raise credentials_refused(f"column {column!r} of {self.path}: row {shown(rows)}")
        return texts

    def filled(self, what: str) -> pa.ChunkedArray:
        """The texts of a column that may not be empty anywhere; UserError where it is, others as of `texts`."""
        texts = self.texts(what)
        if texts.null_count:
            empty = _rows_where(texts.is_null())
            raise UserError(
                f"{self.path}: {len(empty)} empty cell(s) in column {self.columns[what]!r}: row {shown(empty)}",
                "a value in each row (they are counted from 1, without a header)",
                "fill or delete the rows",
            )
        return texts

    def uris(self, what: str, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        """The cells of a column, null where they are -> absolute paths and URIs; UserError where a table that is not
        trusted names files that it may not name, or a URI cannot be opened."""
        outside: list[str] = []
        uris = pa.chunked_array([self._uris(chunk, outside) for chunk in pieces(texts)], pa.string())
        if outside:
            of_buckets = "" if is_remote(self.path) else ", or in buckets of the server that the environment names"
            raise UserError(
                f"{self.path}: {len(outside)} file(s) of column {self.columns[what]!r} lie outside of the table's "
                f"folder or on another server: {shown([without_credentials(uri) for uri in outside])}",
                f"files below {without_credentials(self.path).rpartition('/')[0]}/{of_buckets}",
                "put the table into a folder above them, or, where you trust it, allow that by `allow_absolute=true`",
            )
        return uris

    def _uris(self, texts: pa.Array, outside: list[str]) -> pa.Array:
        """As `uris`, of a chunk; adds to `outside` what the table may not name.

        Nearly all cells are plain relative paths and are made all at once; the others one by one.
        """
        plain = pc.match_substring_regex(texts, _PLAIN).fill_null(True)
        before, _, behind = _uri(self.path, _MARK).partition(_MARK)
        uris = pc.if_else(plain, pc.binary_join_element_wise(before, texts, behind, ""), texts)
        others = pc.invert(plain)
        one_by_one = [_uri(self.path, text) for text in texts.filter(others).to_pylist()]
        if not self.trusted:
            outside += [uri for uri in one_by_one if not _may_name(self.path, uri)]
        return pc.replace_with_mask(uris, others, pa.array(one_by_one, pa.string())) if one_by_one else uris


def trimmed(texts: pa.Array) -> pa.Array:
    """Texts without spaces around them, null for those that are empty; the same memory where that changes nothing."""
    stripped = pc.utf8_trim_whitespace(texts)
    empty = pc.equal(pc.binary_length(stripped), 0)
    if pc.any(empty).as_py():
        return pc.if_else(empty, None, stripped)
    return texts if stripped.equals(texts) else stripped


def _rows_where(mask: pa.ChunkedArray) -> list[str]:
    """The numbers, from 1, of the rows in which a column of bool holds true."""
    return [str(number + 1) for number in np.flatnonzero(mask.fill_null(False).to_numpy()).tolist()]


def _uri(table: str, text: str) -> str:
    """A cell of a table -> absolute path or URI."""
    if is_remote(text):
        try:
            found = "" if urlsplit(text).scheme in SCHEMES else "unknown scheme"
        except ValueError as error:
            found = str(error)
        if found:
            expected = f"a path, or a URI {', '.join(f'{scheme}://' for scheme in SCHEMES)}"
            raise UserError(f"{table}: {found}: {without_credentials(text)}", expected, "correct it")
        return text
    if os.path.isabs(text) or not is_remote(table):
        return os.path.normpath(os.path.join(os.path.dirname(table), text))
    parts = urlsplit(table, allow_fragments=False)
    return parts._replace(path=posixpath.normpath(posixpath.join(posixpath.dirname(parts.path), text))).geturl()


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
    local = path_on_disk(uri)
    if local is not None:
        return "", os.path.normpath(local)
    parts = urlsplit(uri, allow_fragments=False)
    return parts._replace(path="").geturl(), posixpath.normpath(parts.path)


_Read = tuple[Sequence[str], pa.Table]
"""The names of all columns of a file, and the rows of at least those that are wanted and there once."""


def _read_csv(file: BinaryIO, wanted: Iterable[str]) -> _Read:
    """Columns stand between commas; where the first line has none, between its tabs or semicolons."""
    first = file.readline(2**16)
    file.seek(0)
    between = next((mark for mark in (",", "\t", ";") if mark.encode() in first), ",")
    options = pa.csv.ConvertOptions(column_types=dict.fromkeys(wanted, pa.string()))
    # Arrow's threads may hold the file when Python ends, and then end it by a signal.
    reading = pa.csv.ReadOptions(use_threads=False), pa.csv.ParseOptions(delimiter=between), options
    table = pa.csv.read_csv(file, *reading)
    return table.column_names, table


def _read_jsonl(file: BinaryIO, wanted: Iterable[str]) -> _Read:
    """Read twice where Arrow takes texts that look like it for times."""
    table = pa.json.read_json(file)
    times = [f.name for f in table.schema if f.name in wanted and pa.types.is_timestamp(f.type)]
    if times:
        file.seek(0)
        schema = pa.schema([(name, pa.string()) for name in times])
        table = pa.json.read_json(file, parse_options=pa.json.ParseOptions(explicit_schema=schema))
    return table.column_names, table


def _read_parquet(file: BinaryIO, wanted: Iterable[str]) -> _Read:
    content = pa.parquet.ParquetFile(file)
    names = content.schema_arrow.names
    schema = content.schema_arrow
    flags = [f.name for f in schema if pa.types.is_integer(f.type) or pa.types.is_boolean(f.type)]
    return names, content.read([name for name in dict.fromkeys([*wanted, *flags]) if names.count(name) == 1])


READERS: dict[str, Callable[[BinaryIO, Iterable[str]], _Read]] = {
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
"""By the table's suffix: its file and the columns that are wanted, which hold text -> what it holds."""


def read_user_table(
    table: str | os.PathLike[str], columns: dict[str, str], optional: Iterable[str] = (), *, trusted: bool = False
) -> UserTable:
    """Reads a table and checks that it has the columns that it has to have.

    Args:
        table: path of a .csv, .jsonl or .parquet table, or its URI.
        columns: what a column holds -> its name. Where `image` or `tags` is absent under that name, one of `_GUESSES`;
            where there is none for tags either, columns of 0 and 1, each for the class that it is named after.
        optional: names of columns that may be absent.
        trusted: whether the table may name files outside of its folder, and other servers.

    Raises:
        UserError: the table cannot be read or is empty, lacks a column, or has one twice.
    """
    path = str(table) if is_remote(str(table)) else os.path.realpath(os.path.expanduser(table))
    suffix = posixpath.splitext(urlsplit(path).path if is_remote(path) else path)[1].lower()
    expected = f"a table of images and tags, {', '.join(READERS)}"
    if suffix not in READERS:
        raise UserError(f"{path} has the suffix {suffix or 'none'}", expected, "convert or rename the table")
    guesses = {what: others for what, others in _GUESSES.items() if columns.get(what) == what}
    wanted = list(dict.fromkeys([*columns.values(), *itertools.chain(*guesses.values())]))
    try:
        names, content = read_opened(path, lambda file: READERS[suffix](file, wanted), MAX_TABLE)
        content.validate(full=True)  # not every reader looks whether texts are UTF-8
    except FileNotFoundError:
        raise UserError(f"no table {path}", expected, "name a table that exists") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {unquoted(error)}", expected, "correct the table") from None
    guessed: list[str] = []
    for what, others in guesses.items():
        there = [name for name in names if name in others]
        if len(there) == 1 and what not in names:
            columns, guessed = columns | {what: there[0]}, [*guessed, f"{there[0]!r} as {what}"]
    lacks_tags = "tags" in columns and columns["tags"] not in names
    if flags := _flags(content, columns.values()) if lacks_tags else []:
        guessed.append(f"{shown(flags)} as a class each, 0 or 1")
    for what, column in columns.items():
        if (count := names.count(column)) > 1:
            raise UserError(f"{path} has {count} columns {column!r}", "each column once", "rename or delete one")
        if not count and column not in optional and not (what == "tags" and flags):
            raise UserError(
                f"{path} has no column {column!r}; it has {', '.join(map(repr, names))}",
                f"a column for {what}",
                f"add it, or say which column holds it: `{what}=COLUMN`",
            )
    if not len(content):
        raise UserError(f"{path} has no row", "at least one image", "add images, or name another table")
    present = {what: column for what, column in columns.items() if column in names}
    unread = [name for name in names if name not in present.values() and name not in flags]
    kept = content.select(list(dict.fromkeys([*present.values(), *flags])))
    return UserTable(path, kept, present, flags, guessed, unread, trusted)


def _flags(content: pa.Table, but: Collection[str]) -> list[str]:
    """The columns of 0, empty cells and 1, or of truths, where there are two or more, but for some."""
    for are_flags in (pa.types.is_integer, pa.types.is_boolean):
        named = {f.name: set(pc.unique(content[f.name]).to_pylist()) for f in content.schema if are_flags(f.type)}
        flags = [name for name, values in named.items() if name not in but and {1} <= values <= {0, 1, None}]
        if len(flags) > 1:
            return flags
    return []


def _read_as(column_type: pa.DataType) -> pa.DataType:
    """`string` for every type of text, `list<string>` for lists of them; other types as they are."""
    if pa.types.is_dictionary(column_type):
        return _read_as(column_type.value_type)
    if pa.types.is_list(column_type) or pa.types.is_large_list(column_type):
        return pa.list_(_read_as(column_type.value_type))
    texts = (pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return pa.string() if any(holds(column_type) for holds in texts) else column_type

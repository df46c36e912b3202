"""Reads a user's table, CSV, JSONL or Parquet: its columns as texts, and the files that it names as URIs.

A table may come from someone else, so it may only name files below its own folder: no absolute paths or `..` that lead
out of it, and no local files if the table is remote. A local table may name buckets, which are accessed with the user's
credentials, but no server that these would be sent to (`endpoint_override`, hosts of abfs:// outside of Azure, hosts of
hdfs://). Links are followed, because a table cannot create one.
"""

import codecs
import csv
import os
import posixpath
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from mcis.datasets.errors import UserError, join_shortened, one_line, unquoted
from mcis.datasets.sources.annotations import refuse_annotations
from mcis.datasets.storage.files import RELOCATE, existing_spelling, path_on_disk, read_opened
from mcis.datasets.storage.uris import credentials_refused, holds_credentials, is_remote, without_credentials
from mcis.datasets.tables.large_tables import pieces

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")
"""Schemes of the URIs that can be opened."""
MAX_TABLE = 2**34
"""Largest table, bytes."""
_AZURE_PLACE = re.compile(r"[\w$-]+|[\w.-]+\.core\.windows\.net", re.ASCII)
"""A container of the account that the environment or the URI names, or a host of Azure. Arrow takes any other name with
a dot, or a name with a port, for the server."""
_PLAIN = r"^[^/.?#\x00-\x1f][^/?#\x00-\x1f]*(/[^/.?#\x00-\x1f][^/?#\x00-\x1f]*)*$"
"""Relative paths that `normpath` and a URI leave unchanged; no name in them begins with a dot."""
_SPELLED_DIFFERENTLY = r"[^\x00-\x7f]|[\\%]"
"""Characters that other systems may write differently."""
_PLACEHOLDER = "\ue000"
"""Private-use character that takes the place of a cell in a URI."""
_COMMON_NAMES = {
    "image": ("file_name", "filename", "file", "path", "image_path", "uri"),
    "tags": ("labels", "label", "tag", "classes", "class", "class_name", "categories", "category"),
    "mask": ("mask_path",),
    "split": ("subset",),
}
_CONTENTS = {
    "image": "paths or URIs of images",
    "tags": "class names",
    "mask": "paths of ground-truth masks",
    "saliency": "paths of saliency maps",
    "split": "splits: train, val or test",
    "id": "unique ids",
}
"""Role of a column -> what it holds, for messages."""
_SEPARATOR_LINE = re.compile(rb"(?i)sep=([\t,;|])\s*")
"""First line of a CSV file that names the separator of its columns."""
_PLAIN_FLAG = r"(?i)^\s*([01](\.0*)?|true|false)\s*$"
"""Texts that stand for 0 and 1."""
_FLAG = r"(?i)^\s*([01](\.0*)?|true|false|yes|no|x)\s*$"
"""Texts that people write into the column of a class."""
_MAX_SHOWN_CELL = 40
"""Maximum length of the text of a cell in a message, characters."""
_MAY_HOLD_CREDENTIALS = r"(?s)://.*[@?]"
"""Texts for which `holds_credentials` may be true."""


def _spellings(name: str) -> list[str]:
    """Returns a column name in the ways that people write it: file_name, File_Name, FILE_NAME, File Name."""
    return [name, name.title(), name.upper(), name.title().replace("_", " ")]


def _guesses() -> dict[str, list[str]]:
    """Returns role of a column -> names that people give it, in the order of preference."""
    guesses: dict[str, list[str]] = {}
    for role, common_names in _COMMON_NAMES.items():
        guesses[role] = []
        for name in (role, *common_names):
            guesses[role] += _spellings(name)
    return guesses


_GUESSES = _guesses()


class UserTable(NamedTuple):
    """A user's table.

    The *role* of a column is what it holds: image, tags, mask, saliency, split or id.

    Attributes:
        path: Absolute path or URI, for messages and relative paths.
        content: The columns that are read.
        columns: Role -> name of the column, for the columns that the table has.
        flags: Names of the columns of 0 and 1, one for each class, if no column holds tags.
        guessed: Descriptions of the roles that were guessed from names and values.
        unread: Names of the other columns.
        trusted: Whether the table may name any file and server.
        counts: Names of columns that are not read and may count the objects of a class each, if there are `flags`.
    """

    path: str
    content: pa.Table
    columns: dict[str, str]
    flags: list[str]
    guessed: list[str]
    unread: list[str]
    trusted: bool
    counts: Sequence[str] = ()

    def cells(self, role: str) -> pa.ChunkedArray:
        """Returns a column. Texts and lists of texts of any type become `string` and `list<string>`."""
        cells = self.content[self.columns[role]]
        return cells.cast(_normal_type(cells.type))

    def texts(self, role: str) -> pa.ChunkedArray:
        """Returns a column of stripped strings, null for empty ones.

        Raises:
            UserError: The column does not hold texts or integers, or holds a NUL byte, a password, key, token or
                signature.
        """
        column = self.columns[role]
        values = self.cells(role)
        if values.type != pa.string() and not pa.types.is_integer(values.type):
            found = f"{self.path}: column {column!r} holds {values.type}"
            raise UserError(found, "text", "write the values as strings")
        texts = pa.chunked_array([trimmed(chunk) for chunk in pieces(values.cast(pa.string()))], pa.string())

        with_nul = _row_numbers(pc.match_substring(texts, "\0"))
        if with_nul:
            found = f"{self.path}: NUL bytes in column {column!r}: row {join_shortened(with_nul)}"
            raise UserError(found, "text without NUL bytes", "correct the table")

        suspects = texts.filter(pc.match_substring_regex(texts, _MAY_HOLD_CREDENTIALS)).unique().to_pylist()
        secrets = [text for text in suspects if holds_credentials(text)]
        if secrets:
            rows = _row_numbers(pc.is_in(texts, pa.array(secrets, pa.string())))
            raise credentials_refused(f"column {column!r} of {self.path}: row {join_shortened(rows)}")
        return texts

    def filled(self, role: str) -> pa.ChunkedArray:
        """Returns the texts of a column that must have a value in every row.

        Raises:
            UserError: See `texts`; or a cell is empty.
        """
        texts = self.texts(role)
        if texts.null_count:
            empty = _row_numbers(texts.is_null())
            raise UserError(
                f"{self.path}: {len(empty)} empty cell(s) in column {self.columns[role]!r}: row "
                f"{join_shortened(empty)}",
                "a value in each row (rows are counted from 1, without a header)",
                "fill or delete the rows",
            )
        return texts

    def uris(self, role: str, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        """Makes absolute paths and URIs from the cells of a column. Null stays null.

        Args:
            role: Role of the column; used in messages.
            texts: The cells.

        Raises:
            UserError: The table is not trusted and names files that it may not name, or a URI cannot be opened.
        """
        outside: list[str] = []
        uris = pa.chunked_array([self._uris(chunk, outside) for chunk in pieces(texts)], pa.string())
        if outside:
            folder = without_credentials(self.path).rpartition("/")[0]
            buckets = "" if is_remote(self.path) else ", or in buckets of the server that the environment names"
            raise UserError(
                f"{self.path}: {len(outside)} file(s) of column {self.columns[role]!r} are outside of the table's "
                f"folder or on another server: {join_shortened([without_credentials(uri) for uri in outside])}",
                f"files below {folder}/{buckets}",
                "move the table to a folder above them or, if you trust it, set data.tags.allow_absolute=true",
            )
        return uris

    def _uris(self, texts: pa.Array, outside: list[str]) -> pa.Array:
        """Makes the URIs of a chunk, and adds those that the table may not name to `outside`.

        Nearly all cells are plain relative paths, which are converted together; the others are converted one by one.
        """
        is_plain = pc.match_substring_regex(texts, _PLAIN).fill_null(True)
        prefix, suffix = self._affixes()
        uris = pc.if_else(is_plain, pc.binary_join_element_wise(prefix, texts, suffix, ""), texts)

        is_other = pc.invert(is_plain)
        other_uris = [_uri(self.path, text) for text in texts.filter(is_other).to_pylist()]
        if not other_uris:
            return uris
        if not self.trusted:
            outside += [uri for uri in other_uris if not _may_name(self.path, uri)]
        return pc.replace_with_mask(uris, is_other, pa.array(other_uris, pa.string()))

    def names(self, uris: pa.ChunkedArray) -> pa.ChunkedArray:
        """Returns paths relative to the table's folder for files in it; other files keep their path or URI.

        So the same file has the same name however a table spells its path, also in another Unicode form.

        Args:
            uris: Result of `uris`, without nulls.
        """
        prefix, suffix = self._affixes()
        num_affix_bytes = len(prefix.encode()) + len(suffix.encode())
        names = []
        for piece in pieces(uris):
            has_affixes = pc.and_(pc.starts_with(piece, prefix), pc.ends_with(piece, suffix))
            has_more = pc.greater(pc.subtract(pc.binary_length(piece), num_affix_bytes), 0)
            is_inside = pc.and_(has_affixes, has_more)
            relative = pc.utf8_slice_codeunits(piece, len(prefix), -len(suffix) or None)
            names.append(_in_nfc(pc.if_else(is_inside, relative, piece)))
        return pa.chunked_array(names, pa.string())

    def _affixes(self) -> tuple[str, str]:
        """Returns what precedes and what follows a plain relative path in a URI of the table's folder."""
        prefix, _, suffix = _uri(self.path, _PLACEHOLDER).partition(_PLACEHOLDER)
        return prefix, suffix


def _in_nfc(texts: pa.Array) -> pa.Array:
    """Returns texts in the Unicode form NFC. Arrow's own function returns NFD instead."""
    has_other_characters = pc.invert(pc.string_is_ascii(texts))
    if not pc.any(has_other_characters).as_py():
        return texts
    normalized = [unicodedata.normalize("NFC", text) for text in texts.filter(has_other_characters).to_pylist()]
    return pc.replace_with_mask(texts, has_other_characters, pa.array(normalized, pa.string()))


def in_existing_spellings(uris: pa.ChunkedArray) -> pa.ChunkedArray:
    """Replaces the paths of files that another system spells differently (`existing_spelling`).

    URIs, absent files and nulls stay as they are. Names of letters, digits and other plain ASCII characters are not
    looked up, because a table may have millions.
    """
    chunks = []
    for chunk in pieces(uris):
        is_suspect = pc.match_substring_regex(chunk, _SPELLED_DIFFERENTLY).fill_null(False)
        if pc.any(is_suspect).as_py():
            suspects = chunk.filter(is_suspect).to_pylist()
            paths = [uri if is_remote(uri) else existing_spelling(uri) for uri in suspects]
            chunk = pc.replace_with_mask(chunk, is_suspect, pa.array(paths, pa.string()))
        chunks.append(chunk)
    return pa.chunked_array(chunks, pa.string())


def trimmed(texts: pa.Array) -> pa.Array:
    """Strips texts and makes empty ones null. Returns the same array if that changes nothing."""
    stripped = pc.utf8_trim_whitespace(texts)
    empty = pc.equal(pc.binary_length(stripped), 0)
    if pc.any(empty).as_py():
        return pc.if_else(empty, None, stripped)
    return texts if stripped.equals(texts) else stripped


def _row_numbers(mask: pa.ChunkedArray) -> list[str]:
    """Returns the numbers, counted from 1, of the rows in which a column of bool is true."""
    return [str(row + 1) for row in np.flatnonzero(mask.fill_null(False).to_numpy()).tolist()]


def _uri(table: str, text: str) -> str:
    """Makes an absolute path or URI from a cell of a table.

    Raises:
        UserError: The cell is an invalid URI, or a URI with an unknown scheme.
    """
    if is_remote(text):
        try:
            problem = "" if urlsplit(text).scheme in SCHEMES else "unknown scheme"
        except ValueError as error:
            problem = str(error)
        if problem:
            prefixes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            expected = f"a path, or a URI {prefixes}"
            raise UserError(f"{table}: {problem}: {without_credentials(text)}", expected, "correct the cell")
        return text

    if os.path.isabs(text) or not is_remote(table):
        return os.path.normpath(os.path.join(os.path.dirname(table), text))

    parts = urlsplit(table, allow_fragments=False)
    path = posixpath.join(posixpath.dirname(parts.path), text)
    return parts._replace(path=posixpath.normpath(path)).geturl()


def _may_name(table: str, uri: str) -> bool:
    """Returns whether a table that is not trusted may name a file: below the table's folder, on the same server.

    A table of this machine may also name files in buckets.
    """
    table_server, table_path = _server_and_path(table)
    file_server, file_path = _server_and_path(uri)
    is_local_table = not table_server
    if is_local_table and file_server:
        return not _names_server(uri)
    if file_server != table_server:
        return False

    folder = posixpath.dirname(table_path).rstrip("/") + "/"
    if file_path.startswith(folder):
        return True
    # The folder's path has no links, but the file's path may lead into the folder by one.
    return is_local_table and os.path.realpath(file_path).startswith(folder)


def _names_server(uri: str) -> bool:
    """Returns whether a URI names the server that credentials are sent to, rather than a bucket of a known one.

    Any parameter except `region` may name a server, as `endpoint_override` does.
    """
    parts = urlsplit(uri, allow_fragments=False)
    if any(name != "region" for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        return True
    if parts.scheme in ("hdfs", "viewfs"):
        return bool(parts.netloc)
    if parts.scheme in ("abfs", "abfss"):
        host = parts.netloc.rpartition("@")[2]
        return not _AZURE_PLACE.fullmatch(host)
    return False


def _server_and_path(uri: str) -> tuple[str, str]:
    """Splits a URI into the parts that identify the server, empty for this machine, and the path."""
    local = path_on_disk(uri)
    if local is not None:
        return "", os.path.normpath(local)
    parts = urlsplit(uri, allow_fragments=False)
    return parts._replace(path="").geturl(), posixpath.normpath(parts.path)


class _Columns(NamedTuple):
    """Columns of a file.

    Attributes:
        names: Names of all columns.
        content: At least the columns that are wanted and whose name occurs once.
    """

    names: Sequence[str]
    content: pa.Table


class CsvLayout(NamedTuple):
    """How a CSV file is written.

    Attributes:
        delimiter: Separator of the columns.
        header: The line of the names of the columns.
        num_skipped: Number of lines before `header`.
    """

    delimiter: str
    header: bytes
    num_skipped: int

    def names(self) -> list[str]:
        """Returns the names of the columns with the blanks around them, except for names that contain line breaks."""
        line = re.split(rb"[\r\n]", self.header)[0].decode("utf-8", "replace")
        return next(csv.reader([line], delimiter=self.delimiter), [])


def csv_layout(file: BinaryIO) -> CsvLayout:
    """Returns how an opened CSV file is written.

    The separator is that of a first line such as `sep=;`, which Excel reads; else it is a tab or semicolon if the
    header has no comma.
    """
    header = file.readline(2**16).removeprefix(codecs.BOM_UTF8)
    declaration = _SEPARATOR_LINE.fullmatch(header)
    if declaration:
        header = file.readline(2**16)
    file.seek(0)

    if declaration:
        return CsvLayout(declaration[1].decode(), header, 1)
    for delimiter in (",", "\t", ";"):
        if delimiter.encode() in header:
            return CsvLayout(delimiter, header, 0)
    return CsvLayout(",", header, 0)


def _read_csv(file: BinaryIO, wanted: Iterable[str]) -> _Columns:
    """Reads a CSV file. The names of its columns lose blanks around them.

    Raises:
        UnicodeError: The file is in UTF-16, which Excel writes as "Unicode Text".
    """
    if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise UnicodeError("UTF-16")
    file.seek(0)
    layout = csv_layout(file)
    texts = [*wanted, *(name for name in layout.names() if name.strip() in wanted)]

    # Arrow's threads may hold the file when Python ends, and would then end it by a signal.
    table = pa.csv.read_csv(
        file,
        pa.csv.ReadOptions(use_threads=False, skip_rows=layout.num_skipped),
        pa.csv.ParseOptions(delimiter=layout.delimiter, newlines_in_values=True),
        pa.csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string())),
    )
    names = [name.strip() for name in table.column_names]
    return _Columns(names, table.rename_columns(names))


def _read_jsonl(file: BinaryIO, wanted: Iterable[str]) -> _Columns:
    """Reads a JSONL file, and reads it again if Arrow has parsed texts as times."""
    has_byte_order_mark = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    start = len(codecs.BOM_UTF8) if has_byte_order_mark else 0
    file.seek(start)
    table = pa.json.read_json(file)
    times = [column.name for column in table.schema if column.name in wanted and pa.types.is_timestamp(column.type)]
    if times:
        file.seek(start)
        schema = pa.schema([(name, pa.string()) for name in times])
        table = pa.json.read_json(file, parse_options=pa.json.ParseOptions(explicit_schema=schema))
    return _Columns(table.column_names, table)


def _read_parquet(file: BinaryIO, wanted: Iterable[str]) -> _Columns:
    """Reads the wanted columns of a Parquet file, and its columns of numbers and truth values."""
    content = pa.parquet.ParquetFile(file)
    schema = content.schema_arrow
    names = schema.names
    flags = [column.name for column in schema if _is_number_or_boolean(column.type)]
    read = [name for name in dict.fromkeys([*wanted, *flags]) if names.count(name) == 1]
    return _Columns(names, content.read(read))


READERS: dict[str, Callable[[BinaryIO, Iterable[str]], _Columns]] = {
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
"""Suffix of a table -> function that reads it, given the open file and the names of the wanted columns, which hold
text."""


def is_table(text: str) -> bool:
    """Returns whether a path or URI has one of the suffixes of READERS."""
    path = text.partition("?")[0] if is_remote(text) else text
    return path.lower().endswith(tuple(READERS))


def read_user_table(
    table: str | os.PathLike[str],
    columns: dict[str, str],
    optional: Iterable[str] = (),
    *,
    trusted: bool = False,
    has_column_keys: bool = True,
) -> UserTable:
    """Reads a table and checks that it has the required columns.

    Args:
        table: Path or URI of a .csv, .jsonl or .parquet table.
        columns: Role -> name of the column. A column whose name is that of its role may instead have a name in
            `_GUESSES`. If no column has a name for tags, columns of 0 and 1 are used, each for the class that it is
            named after.
        optional: Names of columns that may be absent.
        trusted: Whether the table may name files outside of its folder and on other servers.
        has_column_keys: Whether the user can set the names of the columns by the keys `data.tags.<role>`; used in
            messages.

    Raises:
        UserError: The table cannot be read or is empty, lacks a column, or has one twice; or no column holds tags, and
            a column of 0 and 1 holds other values too.
    """
    path = str(table) if is_remote(str(table)) else os.path.realpath(os.path.expanduser(table))
    guesses = {role: names for role, names in _GUESSES.items() if columns.get(role) == role}
    wanted = list(columns.values())
    for names in guesses.values():
        wanted += names
    file = _read_file(path, list(dict.fromkeys(wanted)))

    recognized = _recognized_columns(file.names, guesses)
    columns = columns | recognized
    guessed = [f"{column!r} as {role}" for role, column in recognized.items()]

    flags: list[str] = []
    counts: list[str] = []
    if "tags" in guesses and not any(name in guesses["tags"] for name in file.names):
        _refuse_minus_one(path, file.content, columns.values())
        flags = _flags(file.content, columns.values())
    if flags:
        _refuse_damaged_flags(path, file.content, [*columns.values(), *flags], has_column_keys)
        counts = _counts(file.content, columns.values())
        guessed.append(f"{join_shortened(flags)} as a class each, 0 or 1")

    required = {role: column for role, column in columns.items() if not (role == "tags" and flags)}
    _check_columns(path, file.names, required, list(optional), has_column_keys)
    if not len(file.content):
        raise UserError(f"{path} has no row", "at least one image", "add images, or name another table")

    present = {role: column for role, column in columns.items() if column in file.names}
    used = list(dict.fromkeys([*present.values(), *flags]))
    unread = [name for name in file.names if name not in used]
    return UserTable(path, file.content.select(used), present, flags, guessed, unread, trusted, counts)


def _recognized_columns(names: Sequence[str], guesses: dict[str, list[str]]) -> dict[str, str]:
    """Returns role -> column, for the roles that no column is named after and that exactly one column is named like.

    Args:
        names: Names of all columns of a table.
        guesses: Role -> names that a column with this role may have.
    """
    recognized: dict[str, str] = {}
    for role, common_names in guesses.items():
        candidates = [name for name in names if name in common_names]
        if len(candidates) == 1 and role not in names:
            recognized[role] = candidates[0]
    return recognized


def _read_file(path: str, wanted: Sequence[str]) -> _Columns:
    """Reads the columns of a file with one of the suffixes of READERS."""
    suffix = posixpath.splitext(urlsplit(path).path if is_remote(path) else path)[1].lower()
    expected = f"a table of images and tags, {', '.join(READERS)}"
    if suffix not in READERS:
        refuse_annotations(Path(path))
        raise UserError(f"{path} has the suffix {suffix or 'none'}", expected, "convert or rename the table")

    try:
        columns = read_opened(path, lambda file: READERS[suffix](file, wanted), MAX_TABLE)
        columns.content.validate(full=True)  # not every reader checks that texts are UTF-8
    except FileNotFoundError:
        raise UserError(f"no table {path}", expected, f"name a table that exists; {RELOCATE}") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        if suffix == ".csv" and (isinstance(error, UnicodeError) or "invalid utf8" in str(error).lower()):
            remedy = "save it as UTF-8; in Excel choose Save as, CSV UTF-8"
            raise UserError(f"{path} is not UTF-8: {unquoted(error)}", "a table in UTF-8", remedy) from None
        raise UserError(f"{path} cannot be read: {unquoted(error)}", expected, "correct the table") from None
    return columns


def _check_columns(
    path: str, names: Sequence[str], columns: dict[str, str], optional: Collection[str], has_column_keys: bool
) -> None:
    """Raises a UserError if a column occurs twice, or is absent and not optional."""
    for role, column in columns.items():
        count = names.count(column)
        if count > 1:
            raise UserError(f"{path} has {count} columns {column!r}", "each column once", "rename or delete one")
        if count == 0 and column not in optional:
            if has_column_keys:
                remedy = f"add it, or name the column that holds the {role}: data.tags.{role}=COLUMN"
            else:
                remedy = f"add it, or rename the column that holds the {role} to {column!r}"
            raise UserError(
                f"{path} has no column {column!r}; it has {', '.join(map(repr, names))}",
                f"a column of {_CONTENTS[role]}",
                remedy,
            )


def _flags(content: pa.Table, excluded: Collection[str]) -> list[str]:
    """Returns the columns of 0, 1 and empty cells, or of truth values and empty cells, one of each class.

    pandas writes 0 and 1 as 0.0 and 1.0 if a cell of the column is empty. A column alone must have both values: one
    class, and images that do not show it.

    Args:
        excluded: Names of columns that have another role.
    """
    candidates = _columns_of_type(content, excluded, _is_number_or_boolean)
    flags = [name for name, values in candidates.items() if _holds_flags(values)]
    if len(flags) > 1 or (flags and pc.min(content[flags[0]]).as_py() == 0):
        return flags
    return []


def _refuse_damaged_flags(path: str, content: pa.Table, excluded: Collection[str], has_column_keys: bool) -> None:
    """Raises a UserError if columns that are not read look like classes, next to the columns of 0 and 1 of others.

    Images of such a class would be negatives of the other classes.

    Args:
        excluded: Names of columns that are read.
        has_column_keys: See `read_user_table`.
    """
    damaged: list[str] = []
    for name, values in _columns_of_type(content, excluded, _is_number).items():
        row = _odd_number(values)
        if row is not None:
            damaged.append(f"{name!r} (row {row + 1}: {values[row].as_py()})")
    for name, values in _columns_of_type(content, excluded, pa.types.is_string).items():
        row = _odd_text(values)
        if row is not None:
            damaged.append(f"{name!r} (row {row + 1}: {one_line(values[row].as_py(), _MAX_SHOWN_CELL)!r})")

    if damaged:
        key = "data.tags.tags=COLUMN" if has_column_keys else "the name 'tags'"
        raise UserError(
            f"{path}: {len(damaged)} column(s) may be classes, but hold other cells than 0 and 1: "
            f"{join_shortened(damaged)}",
            "0, 1 or an empty cell in each column of a class (rows are counted from 1, without a header)",
            f"correct the cells; or delete columns that are no classes; or name the column of tags by {key}",
        )


def _odd_number(values: pa.ChunkedArray) -> int | None:
    """Returns the first row, counted from 0, that damages a column of 0 and 1; None if the column is none.

    At least half of the values of such a column are 0 and 1, or all are between 0 and 1. All values of an index of
    rows are different.
    """
    is_flag = pc.is_in(values, pa.array([0, 1], values.type))
    num_flags = pc.sum(is_flag).as_py() or 0
    num_values = len(values) - values.null_count
    if num_flags == num_values:
        return None

    is_fraction = pc.min(values).as_py() >= 0 and pc.max(values).as_py() <= 1
    if not is_fraction and (2 * num_flags < num_values or pc.count_distinct(values).as_py() == len(values)):
        return None
    row: int = pc.index(pc.and_not(values.is_valid(), is_flag), True).as_py()
    return row


def _odd_text(values: pa.ChunkedArray) -> int | None:
    """Returns the first row, counted from 0, that damages a column of 0 and 1; None if the column is none.

    At least half of the texts of such a column are flags. An empty text is an empty cell.
    """
    num_flags = pc.sum(pc.match_substring_regex(values, _FLAG)).as_py()
    if not num_flags:
        return None
    is_text = pc.match_substring_regex(values, r"\S").fill_null(False)
    if 2 * num_flags < pc.sum(is_text).as_py():
        return None

    is_odd = pc.and_not(is_text, pc.match_substring_regex(values, _PLAIN_FLAG).fill_null(False))
    row: int = max(pc.index(is_odd, True).as_py(), 0)
    return row


def _columns_of_type(
    content: pa.Table, excluded: Collection[str], is_wanted: Callable[[pa.DataType], bool]
) -> dict[str, pa.ChunkedArray]:
    """Returns the columns of some types by name, without columns that have another role or the name of another one."""
    names = content.column_names
    columns: dict[str, pa.ChunkedArray] = {}
    for name, values in zip(names, content.columns, strict=True):
        if name not in excluded and names.count(name) == 1 and is_wanted(values.type):
            columns[name] = values
    return columns


def _refuse_minus_one(path: str, content: pa.Table, excluded: Collection[str]) -> None:
    """Raises a UserError if columns hold -1 next to 1, as tables do for classes that are uncertain or absent.

    Such a column would not be read, and images of its class would be negatives of the other classes.
    """
    numbers = _columns_of_type(content, excluded, _is_number)
    names = [name for name, values in numbers.items() if _holds_minus_one(values)]
    if names:
        raise UserError(
            f"{path}: {len(names)} column(s) hold -1 next to 0 or 1: {join_shortened(names)}",
            "0, 1 or an empty cell in each column of a class",
            "write 0 for -1 if the class is absent, or an empty cell if it is uncertain; delete columns that are no "
            "classes",
        )


def _holds_minus_one(values: pa.ChunkedArray) -> bool:
    """Returns whether a column of numbers holds -1 and 1, and no other values than these and 0."""
    if pc.min(values).as_py() != -1 or pc.max(values).as_py() != 1:
        return False
    return bool(pc.all(pc.is_in(values.drop_null(), pa.array([-1, 0, 1], values.type))).as_py())


def _counts(content: pa.Table, excluded: Collection[str]) -> list[str]:
    """Returns the columns of whole numbers from 0 to more than 1, unless all are different, as in an index of rows."""
    numbers = _columns_of_type(content, excluded, _is_number)
    return [name for name, values in numbers.items() if _holds_counts(values)]


def _holds_counts(values: pa.ChunkedArray) -> bool:
    """Returns whether a column of numbers holds whole numbers only, from 0 to more than 1."""
    if pc.min(values).as_py() != 0 or pc.max(values).as_py() <= 1:
        return False
    if pc.count_distinct(values).as_py() == len(values):
        return False
    # Arrow cannot round large integers.
    return bool(pa.types.is_integer(values.type) or pc.all(pc.equal(pc.floor(values), values)).as_py())


def _is_number(column_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(column_type) or pa.types.is_float32(column_type) or pa.types.is_float64(column_type)
    )


def _is_number_or_boolean(column_type: pa.DataType) -> bool:
    return bool(_is_number(column_type) or pa.types.is_boolean(column_type))


def _holds_flags(values: pa.ChunkedArray) -> bool:
    """Returns whether a column of numbers or truth values has no values but 0 and 1, and a 1."""
    if pc.max(values).as_py() != 1:
        return False
    if pa.types.is_boolean(values.type):
        return True
    return bool(pc.all(pc.is_in(values.drop_null(), pa.array([0, 1], values.type))).as_py())


def _normal_type(column_type: pa.DataType) -> pa.DataType:
    """Returns `string` for every type of text, `list<string>` for lists of texts, and other types unchanged."""
    if pa.types.is_dictionary(column_type):
        return _normal_type(column_type.value_type)
    if pa.types.is_list(column_type) or pa.types.is_large_list(column_type):
        return pa.list_(_normal_type(column_type.value_type))
    is_text = (
        pa.types.is_large_string(column_type) or pa.types.is_string_view(column_type) or pa.types.is_null(column_type)
    )
    return pa.string() if is_text else column_type

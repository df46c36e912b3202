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

import collections
import io
import os
import posixpath
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from mcis.datasets.classes import MAX_CLASSES, read_classes
from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.files import is_remote, local_path, read_bytes, without_credentials
from mcis.datasets.index import Listing, shown
from mcis.datasets.sources.lists import SplitMasks, complete_masks, listing_table, nearest

OPTIONAL = {"mask": "mask", "saliency": "saliency", "split": "split", "id": "id"}
"""The columns that may be absent, and their names where the caller names none."""

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")
"""Of the URIs that can be opened."""

SPLITS = ("train", "val", "test")

MAX_TABLE = 2**34
"""Largest table, bytes."""


class _Table(NamedTuple):
    """A table of a user.

    Attributes:
        path: absolute path or URI, for messages and relative paths.
        content: its rows.
        columns: what a column holds -> its name, as far as the table has it.
        trusted: whether it may name any file and server.
    """

    path: str
    content: pa.Table
    columns: dict[str, str]
    trusted: bool


class _Tagged(NamedTuple):
    """The tags of every row as ascending class indices, the K class names, and notes."""

    tags: list[list[int]]
    names: tuple[str, ...]
    notes: list[str]


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
            twice, a file lies where the table may not name one, a local mask or saliency map is absent, a tag is
            unknown, there are none or too many, a split is unknown or train is empty.
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
    if "saliency" in rows.columns and (absent := saliency_uris.count(None)):
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
    return Listing(listed, tagged.names, (*notes, *masks.notes))


def image_column(table: str, image: str = "image", *, allow_absolute: bool = False) -> list[tuple[str, str]]:
    """The images of a table as written, each with its absolute path or URI; other columns are not looked at.

    Raises:
        UserError: the table cannot be read or is empty, the column is missing, no text, or empty in a row, or names a
            file where the table may not name one (`list_tagged`).
    """
    path = table if is_remote(table) else str(Path(table).expanduser().resolve())
    rows = _read(path, {"image": image}, trusted=allow_absolute)
    texts = _filled(rows, "image")
    return list(zip(texts, _uris(rows, "image", texts), strict=True))


def _read_csv(data: bytes, text: Sequence[str]) -> pa.Table:
    options = pa.csv.ConvertOptions(column_types={name: pa.string() for name in text})
    return pa.csv.read_csv(io.BytesIO(data), convert_options=options)


def _read_jsonl(data: bytes, text: Sequence[str]) -> pa.Table:
    """Read twice where Arrow takes texts that look like it for times."""
    table = pa.json.read_json(io.BytesIO(data))
    times = [f.name for f in table.schema if f.name in text and pa.types.is_timestamp(f.type)]
    schema = pa.schema([(name, pa.string()) for name in times])
    options = pa.json.ParseOptions(explicit_schema=schema)
    return pa.json.read_json(io.BytesIO(data), parse_options=options) if times else table


def _read_parquet(data: bytes, text: Sequence[str]) -> pa.Table:
    return pa.parquet.read_table(io.BytesIO(data))


READERS: dict[str, Callable[[bytes, Sequence[str]], pa.Table]] = {
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
"""By the table's suffix: content, names of the columns that hold text -> table."""


def _read(path: str, columns: dict[str, str], *, trusted: bool) -> _Table:
    """Reads the table and checks that it has the columns that it has to have."""
    suffix = posixpath.splitext(urlsplit(path).path if is_remote(path) else path)[1].lower()
    expected = f"a table of images and tags, {', '.join(READERS)}"
    _check_scheme(path, path)
    if suffix not in READERS:
        raise UserError(f"{path} has the suffix {suffix or 'none'}", expected, "convert or rename the table")
    try:
        content = READERS[suffix](read_bytes(path, MAX_TABLE), list(columns.values()))
        content.validate(full=True)  # not every reader looks whether texts are UTF-8
    except FileNotFoundError:
        raise UserError(f"no table {path}", expected, "name a table that exists") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {unquoted(error)}", expected, "correct the table") from None
    if not len(content):
        raise UserError(f"{path} has no row", "at least one image", "add images, or name another table")
    return _Table(path, content, _present(path, content, columns), trusted)


def _present(path: str, content: pa.Table, columns: dict[str, str]) -> dict[str, str]:
    """The columns that the table has.

    Raises:
        UserError: it has one of them twice, or lacks one that has to exist.
    """
    for what, column in columns.items():
        count = content.column_names.count(column)
        if count > 1:
            raise UserError(f"{path} has {count} columns {column!r}", "each column once", "rename or delete one")
        if not count and column != OPTIONAL.get(what):
            raise UserError(
                f"{path} has no column {column!r}; it has {', '.join(map(repr, content.column_names))}",
                f"a column for {what}",
                f"add it, or say which column holds it: `{what}=COLUMN`",
            )
    return {what: column for what, column in columns.items() if column in content.column_names}


def _texts(rows: _Table, what: str) -> list[str | None]:
    """A column of strings without spaces around them; null for those that are empty."""
    column = rows.columns[what]
    values = rows.content[column]
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if not _is_text(values.type) and not pa.types.is_integer(values.type) and not pa.types.is_null(values.type):
        raise UserError(f"{rows.path}: column {column!r} holds {values.type}", "text", "write it as strings")
    texts = [None if value is None else str(value).strip() or None for value in values.to_pylist()]
    broken = [str(number) for number, text in enumerate(texts, 1) if text and "\0" in text]
    if broken:
        raise UserError(
            f"{rows.path}: NUL bytes in column {column!r}: row {shown(broken)}",
            "text without NUL bytes",
            "correct the table",
        )
    return texts


def _is_text(column_type: pa.DataType) -> bool:
    return (
        pa.types.is_string(column_type) or pa.types.is_large_string(column_type) or pa.types.is_string_view(column_type)
    )


def _filled(rows: _Table, what: str) -> list[str]:
    """The texts of a column that may not be empty anywhere."""
    texts = _texts(rows, what)
    empty = [str(number) for number, text in enumerate(texts, 1) if text is None]
    if empty:
        raise UserError(
            f"{rows.path}: {len(empty)} empty cell(s) in column {rows.columns[what]!r}: row {shown(empty)}",
            "a value in each row (they are counted from 1, without a header)",
            "fill or delete the rows",
        )
    return [text for text in texts if text is not None]


def _ids(rows: _Table, images: list[str], id_column: str) -> list[str]:
    """A unique name for each row: of the column for it, or the image's path as written."""
    what = "id" if "id" in rows.columns else "image"
    ids = _filled(rows, "id") if what == "id" else images
    twice = [name for name, count in collections.Counter(ids).items() if count > 1]
    if twice:
        raise UserError(
            f"{rows.path}: {len(twice)} value(s) of column {rows.columns[what]!r} are there more than once: "
            f"{shown(twice)}",
            "each image once, under a name of its own",
            f"delete or merge the rows, or give each a name in a column {id_column!r}",
        )
    return ids


def _splits(rows: _Table) -> list[str]:
    """The split of each row; every image is in train where no column says otherwise."""
    if "split" not in rows.columns:
        return ["train"] * len(rows.content)
    splits, column = _filled(rows, "split"), rows.columns["split"]
    unknown = sorted(set(splits) - set(SPLITS))
    if unknown:
        expected = f"one of {', '.join(SPLITS)}"
        raise UserError(f"{rows.path}: unknown split {shown(unknown)} in column {column!r}", expected, "rename it")
    if "train" not in splits:
        raise UserError(f"{rows.path} has no image of split train", "at least one", f"correct its column {column!r}")
    return splits


def _tagged(rows: _Table, classes: Path | None, ignore_others: bool) -> _Tagged:
    """The classes, from their file or of all tags, and the class indices of each row."""
    tags = _tags(rows)
    names = read_classes(classes) if classes else _names(rows, tags)
    index = {name: k for k, name in enumerate(names)}
    others = sorted({tag for row in tags for tag in row} - set(index))
    if others and not ignore_others:
        raise UserError(
            f"{rows.path}: {len(others)} tag(s) are no class: {shown(others)}",
            f"the {len(names)} classes of {classes}",
            f"{nearest(others, names)}correct the table or the class file, or leave such tags out by "
            "`ignore_others=true`",
        )
    indices = [sorted({index[tag] for tag in row if tag in index}) for row in tags]
    if not others:
        return _Tagged(indices, names, [])
    count = sum(tag not in index for row in tags for tag in row)
    note = (
        f"{rows.path}: {count} tags of {len(others)} names that are no class were left out: {shown(others)}; "
        f"{indices.count([])} of {len(indices)} images have no tag"
    )
    return _Tagged(indices, names, [note])


def _tags(rows: _Table) -> list[list[str]]:
    """The tags of each row as they are written, without spaces around them; empty ones are dropped."""
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
    if is_list:
        cells = [tags or [] for tags in rows.content[column].to_pylist()]
    else:
        cells = [(text or "").replace(",", ";").replace("|", ";").split(";") for text in _texts(rows, "tags")]
    return [[tag.strip() for tag in tags if tag and tag.strip()] for tags in cells]


def _names(rows: _Table, tags: list[list[str]]) -> tuple[str, ...]:
    """The class names where no file gives them: every tag of the table."""
    path = rows.path
    names = tuple(sorted({tag for row in tags for tag in row}))
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


def _uris(rows: _Table, what: str, texts: Sequence[str]) -> list[str]:
    """The cells of a column -> absolute paths and URIs.

    Raises:
        UserError: a table that is not trusted names files that it may not name.
    """
    uris = [_uri(rows.path, text) for text in texts]
    outside = [] if rows.trusted else [uri for uri in uris if not _may_name(rows.path, uri)]
    if outside:
        of_buckets = "" if is_remote(rows.path) else ", or in buckets of the server that the environment names"
        raise UserError(
            f"{rows.path}: {len(outside)} file(s) of column {rows.columns[what]!r} lie outside of the table's folder "
            f"or on another server: {shown([without_credentials(uri) for uri in outside])}",
            f"files below {without_credentials(rows.path).rpartition('/')[0]}/{of_buckets}",
            "put the table into a folder above them, or, where you trust it, allow that by `allow_absolute=true`",
        )
    return uris


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


def _existing(rows: _Table, what: str) -> list[str | None]:
    """The masks or saliency maps of a column. Those of this machine exist, which later stages take for granted."""
    if what not in rows.columns:
        return [None] * len(rows.content)
    texts = _texts(rows, what)
    named = iter(_uris(rows, what, [text for text in texts if text]))
    uris = [next(named) if text else None for text in texts]
    absent = [uri for uri in uris if uri and not is_remote(uri) and not os.path.isfile(uri)]
    if absent:
        raise UserError(
            f"{rows.path}: {len(absent)} file(s) of column {rows.columns[what]!r} are missing: {shown(absent)}",
            "an existing file, or an empty cell for none",
            "add the files or empty the cells",
        )
    return uris


def _masks(rows: _Table, splits: list[str]) -> SplitMasks:
    """The ground-truth masks of each row; a split has all of its masks or none."""
    uris, notes = _existing(rows, "mask"), []
    for split in sorted(set(splits)) if "mask" in rows.columns else ():
        positions = [position for position, name in enumerate(splits) if name == split]
        of_split = complete_masks([uris[position] for position in positions], split)
        notes += [f"{rows.path}: {note}" for note in of_split.notes]
        for position, uri in zip(positions, of_split.uris, strict=True):
            uris[position] = uri
    return SplitMasks(uris, notes)


def _notes(rows: _Table, splits: Sequence[str], names: tuple[str, ...]) -> list[str]:
    path, notes = rows.path, []
    if "val" not in splits:
        notes.append(f"{path} has no image of split val: the training images are predicted")
    unread = [column for column in rows.content.column_names if column not in rows.columns.values()]
    if unread:
        notes.append(f"{path}: columns that are not read: {shown(unread)}")
    several = [name for name in names if " " in name and set(name.split()) <= set(names)]
    if several:
        notes.append(f"{path}: {shown(several)} is one class each; tags are divided by ; , or |, never by spaces")
    return notes

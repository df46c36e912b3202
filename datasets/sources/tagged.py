"""Bring your own: a CSV, JSONL or Parquet table of images and tags -> listing.

Columns, each under a name of the caller's choice:

- image: path of this machine, absolute or relative to the table's folder, or a URI (`s3://bucket/key`, `gs://...`).
- tags: a list of strings, or one string with `;`, `,` or `|` between the tags. Spaces around a tag are dropped, those
  inside belong to its name (`potted plant; cat`). Null and empty mean: no tag.
- mask, saliency (optional, null for none): paths or URIs as above. A split that lacks some of its masks is taken as one
  without masks, and noted, because a score is of every image.
- split (optional): train, val or test; without the column every image is in train.
- id (optional): unique names; without it the image's path as written is its name.

S3 credentials come from the environment or ~/.aws, as AWS' own programs find them. Another server than Amazon's is
named in the URI, `s3://bucket/key?endpoint_override=HOST:PORT&scheme=http`, or by the environment variable
AWS_ENDPOINT_URL. A relative path in a remote table leads to a URI with the table's own query.
"""

import collections
import io
import os
import posixpath
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from mcis.datasets.classes import MAX_CLASSES, read_classes
from mcis.datasets.errors import UserError
from mcis.datasets.files import is_remote, read_bytes
from mcis.datasets.index import Listing, shown
from mcis.datasets.sources.lists import listing_table, nearest, whole

OPTIONAL = {"mask": "mask", "saliency": "saliency", "split": "split", "id": "id"}
"""The columns that may be absent, and their names where the caller names none."""

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")
"""Of the URIs that can be opened."""

SPLITS = ("train", "val", "test")

MAX_TABLE = 2**34
"""Largest table, bytes."""


def list_tagged(
    path: str | Path,
    *,
    classes: Path | None = None,
    image_column: str = "image",
    tags_column: str = "tags",
    mask_column: str = OPTIONAL["mask"],
    saliency_column: str = OPTIONAL["saliency"],
    split_column: str = OPTIONAL["split"],
    id_column: str = OPTIONAL["id"],
    ignore_others: bool = False,
) -> Listing:
    """Reads a table of images and tags; no image is opened.

    Args:
        path: of the table, .csv, .jsonl or .parquet, or its URI.
        classes: file with one class name a line; None = every tag of the table is a class, in the order of the
            alphabet.
        image_column, tags_column: have to be there.
        mask_column, saliency_column, split_column, id_column: may be absent under these names, not under others.
        ignore_others: tags that are no class are left out, and counted in a note.

    Raises:
        UserError: the table cannot be read or is empty, a column is missing or no text, an image is null or named
            twice, a local mask or saliency map is absent, a tag is unknown, there are none or too many, a split is
            unknown or train is empty.
    """
    path = str(path) if is_remote(str(path)) else str(Path(path).expanduser().resolve())
    optional = {"mask": mask_column, "saliency": saliency_column, "split": split_column, "id": id_column}
    columns = {"image": image_column, "tags": tags_column, **optional}
    table = _read(path, list(columns.values()))
    _check_columns(path, table, columns)
    columns = {what: column for what, column in columns.items() if column in table.column_names}

    images = _filled(path, table, image_column)
    ids = _filled(path, table, id_column) if "id" in columns else images
    twice = [name for name, count in collections.Counter(ids).items() if count > 1]
    if twice:
        raise UserError(
            f"{path}: {len(twice)} value(s) of column {columns.get('id', image_column)!r} are there more than once: "
            f"{shown(twice)}",
            "each image once, under a name of its own",
            f"delete or merge the rows, or give each a name in a column {id_column!r}",
        )
    splits = _filled(path, table, split_column) if "split" in columns else ["train"] * len(table)
    _check_splits(path, split_column, splits)
    tags = _tags(path, table, tags_column)
    names = read_classes(classes) if classes else _names(path, tags_column, tags)
    index = {name: k for k, name in enumerate(names)}
    foreign = sorted({tag for row in tags for tag in row} - set(index))
    if foreign and not ignore_others:
        raise UserError(
            f"{path}: {len(foreign)} tag(s) are no class: {shown(foreign)}",
            f"the {len(names)} classes of {classes}",
            f"{nearest(foreign, names)}mend the table or the class file, or leave such tags out by "
            "--set data.tags.ignore_others=true",
        )
    notes = _notes(path, table, set(columns.values()), splits, names)
    if foreign:
        count = sum(tag not in index for row in tags for tag in row)
        tags = [[tag for tag in row if tag in index] for row in tags]
        left = sum(not row for row in tags)
        notes.append(
            f"{path}: {count} tags of {len(foreign)} names that are no class were left out: {shown(foreign)}; "
            f"{left} of {len(table)} images have no tag"
        )
    masks = _existing(path, table, columns.get("mask"))
    salient = _existing(path, table, columns.get("saliency"))
    if "saliency" in columns and (absent := salient.count(None)):
        notes.append(f"{path}: no saliency map for {absent} of {len(table)} images")
    for split in sorted(set(splits)) if "mask" in columns else ():
        places = [place for place, name in enumerate(splits) if name == split]
        of_split, news = whole([masks[place] for place in places], split)
        notes += [f"{path}: {note}" for note in news]
        for place, mask in zip(places, of_split, strict=True):
            masks[place] = mask
    rows = listing_table(
        image_id=ids,
        uri=[_place(path, image) for image in images],
        domain="target",
        split=splits,
        tags=[sorted({index[tag] for tag in row}) for row in tags],
        mask_uri=masks,
        saliency_uri=salient,
    )
    return Listing(rows, names, tuple(notes))


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


def _read(path: str, text: Sequence[str]) -> pa.Table:
    suffix = posixpath.splitext(urlsplit(path).path if is_remote(path) else path)[1].lower()
    expected = f"a table of images and tags, {', '.join(READERS)}"
    _check_scheme(path, path)
    if suffix not in READERS:
        raise UserError(f"{path} has the suffix {suffix or 'none'}", expected, "convert or rename the table")
    try:
        table = READERS[suffix](read_bytes(path, MAX_TABLE), text)
        table.validate(full=True)  # not every reader looks whether texts are UTF-8
    except FileNotFoundError:
        raise UserError(f"no table {path}", expected, "name a table that exists") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {error}", expected, "mend the table") from None
    if not len(table):
        raise UserError(f"{path} has no row", "at least one image", "add images, or name another table")
    return table


def _check_columns(path: str, table: pa.Table, columns: dict[str, str]) -> None:
    there = ", ".join(map(repr, table.column_names))
    for what, column in columns.items():
        count = table.column_names.count(column)
        if count > 1:
            raise UserError(f"{path} has {count} columns {column!r}", "each column once", "rename or delete one")
        if not count and column != OPTIONAL.get(what):
            remedy = f"add it, or say which column holds it: --set data.tags.{what}=COLUMN"
            raise UserError(f"{path} has no column {column!r}; it has {there}", f"a column for {what}", remedy)


def _texts(path: str, table: pa.Table, column: str) -> list[str | None]:
    """A column of strings without spaces around them; null for those that are empty."""
    values = table[column]
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if not _is_text(values.type) and not pa.types.is_integer(values.type) and not pa.types.is_null(values.type):
        raise UserError(f"{path}: column {column!r} holds {values.type}", "text", "write it as strings")
    texts = [None if value is None else str(value).strip() or None for value in values.to_pylist()]
    broken = next((text for text in texts if text and "\0" in text), None)
    if broken:
        raise UserError(f"{path}: {broken!r} in column {column!r}", "text without NUL bytes", "mend the table")
    return texts


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _filled(path: str, table: pa.Table, column: str) -> list[str]:
    """The texts of a column that may not be empty anywhere."""
    texts = _texts(path, table, column)
    rows = [str(row) for row, text in enumerate(texts, 1) if text is None]
    if rows:
        raise UserError(
            f"{path}: {len(rows)} empty cell(s) in column {column!r}: row {shown(rows)}",
            "a value in each row (they are counted from 1, without a header)",
            "fill or delete the rows",
        )
    return [text for text in texts if text is not None]


def _check_splits(path: str, column: str, splits: list[str]) -> None:
    unknown = sorted(set(splits) - set(SPLITS))
    if unknown:
        expected = f"one of {', '.join(SPLITS)}"
        raise UserError(f"{path}: unknown split {shown(unknown)} in column {column!r}", expected, "rename it")
    if "train" not in splits:
        raise UserError(f"{path} has no image of split train", "at least one", f"mend its column {column!r}")


def _tags(path: str, table: pa.Table, column: str) -> list[list[str]]:
    kind = table[column].type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if not _is_text(kind.value_type) and not pa.types.is_null(kind.value_type):
            raise UserError(
                f"{path}: column {column!r} holds lists of {kind.value_type}",
                "lists of strings, or strings with ';', ',' or '|' between the tags",
                "write the names of the classes",
            )
        rows = [row or [] for row in table[column].to_pylist()]
    else:
        if not _is_text(kind) and not pa.types.is_dictionary(kind) and not pa.types.is_null(kind):
            raise UserError(
                f"{path}: column {column!r} holds {kind}",
                "lists of strings, or strings with ';', ',' or '|' between the tags",
                "write the names of the classes",
            )
        texts = _texts(path, table, column)
        rows = [(text or "").replace(",", ";").replace("|", ";").split(";") for text in texts]
    return [[tag.strip() for tag in row if tag and tag.strip()] for row in rows]


def _names(path: str, column: str, tags: list[list[str]]) -> tuple[str, ...]:
    names = tuple(sorted({tag for row in tags for tag in row}))
    if not names:
        raise UserError(f"{path}: no tag in column {column!r}", "at least one tagged image", "add tags")
    if "background" in names:
        raise UserError(f"{path}: the tag background", "tags of things; background is no class", "delete that tag")
    if len(names) > MAX_CLASSES:
        raise UserError(
            f"{path}: {len(names)} different tags: {shown(names)}",
            f"at most {MAX_CLASSES}, because labels are bytes",
            "merge tags, or name the classes that you want in a file, one a line: --set data.classes=FILE "
            "--set data.tags.ignore_others=true",
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
        raise UserError(f"{table}: {text} is no URI: {error}", expected, "mend it") from None
    if scheme not in SCHEMES:
        raise UserError(f"{table}: unknown scheme of {text}", expected, "mend it")


def _place(table: str, text: str) -> str:
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


def _existing(path: str, table: pa.Table, column: str | None) -> list[str | None]:
    """The masks or saliency maps of a column; those of this machine are there, as later stages take for granted."""
    if column is None:
        return [None] * len(table)
    uris = [text and _place(path, text) for text in _texts(path, table, column)]
    absent = [uri for uri in uris if uri and not is_remote(uri) and not os.path.isfile(uri)]
    if absent:
        raise UserError(
            f"{path}: {len(absent)} file(s) of column {column!r} are missing: {shown(absent)}",
            "an existing file, or an empty cell for none",
            "add the files or empty the cells",
        )
    return uris


def _notes(path: str, table: pa.Table, read: set[str], splits: Sequence[str], names: tuple[str, ...]) -> list[str]:
    notes = []
    if "val" not in splits:
        notes.append(f"{path} has no image of split val: the training images are predicted")
    unread = [column for column in table.column_names if column not in read]
    if unread:
        notes.append(f"{path}: columns that are not read: {shown(unread)}")
    several = [name for name in names if " " in name and set(name.split()) <= set(names)]
    if several:
        notes.append(f"{path}: {shown(several)} is one class each; tags are divided by ; , or |, never by spaces")
    return notes

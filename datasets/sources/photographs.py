"""Lists photographs without tags, which are to be predicted: from files, folders and tables, each with a name."""

import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.index import check_name_lengths
from mcis.datasets.sources.lists import (
    LeftOut,
    files_below,
    is_line,
    is_utf8,
    left_out_notes,
    path_inside,
    relative_name,
)
from mcis.datasets.sources.user_table import in_existing_spellings, is_table, read_user_table
from mcis.datasets.storage.uris import credentials_refused, holds_credentials, is_remote, without_credentials


class Photograph(NamedTuple):
    """A photograph.

    Attributes:
        uri: Absolute path, or URI.
        name: Relative path without suffix, unique among the photographs even if case is ignored.
    """

    uri: str
    name: str


class _Names(NamedTuple):
    """Candidates for the name of a photograph, from the shortest to the most specific."""

    stem: str
    file_name: str
    whole_path: str


def list_photographs(
    items: Sequence[str], *, excluded: Path, allow_absolute: bool = False
) -> tuple[list[Photograph], list[str]]:
    """Lists photographs in the given order. No image is opened. Suffixes are not checked, except those of tables.

    A photograph is named by its path, without suffix: the path below the given folder, the path in the table, or the
    name of the given file. Photographs whose names would be equal keep the suffix; if that does not distinguish them,
    they are named by their whole path.

    Args:
        items: Paths or URIs of files; folders, which are read with their subfolders; or tables .csv, .jsonl or .parquet
            with a column `image`, as `list_tagged` reads them. A file that is given twice counts once.
        excluded: Folder that is not read if it is inside one of the folders, because predictions are written there.
        allow_absolute: Whether tables may name files outside of their folders and on other servers (`list_tagged`).

    Returns:
        The photographs, and notes.

    Raises:
        UserError: A folder or a table cannot be read, a table names a file that it may not name, a path is not UTF-8, a
            URI holds a password, key, token or signature, a name is too long, or there is no file at all.
    """
    excluded = excluded.expanduser().resolve()
    left_out = LeftOut()
    names: dict[str, _Names] = {}

    for item in items:
        if not is_utf8(item):
            raise UserError(f"the name {os.fsencode(item)!r} is not UTF-8", "names in UTF-8", "rename the file")
        if holds_credentials(item):
            raise credentials_refused(without_credentials(item))

        for uri, short_path in _files(item, excluded, left_out, allow_absolute):
            if not is_line(uri):  # annotations in XML could not be read again
                left_out["file(s) whose path has line breaks or control characters, or ends with a space"] += 1
            elif uri in names:
                left_out["file(s) that are given more than once"] += 1
            else:
                names[uri] = _candidate_names(uri, short_path)

    if not names:
        expected = f"at least one photograph that is not in {excluded}"
        raise UserError(f"no file in {join_shortened(list(items))}", expected, "name files, folders or tables")

    photographs = [Photograph(uri, name) for uri, name in _distinct_names(names).items()]
    check_name_lengths(photograph.name for photograph in photographs)
    return photographs, left_out_notes("photographs", left_out)


def _files(item: str, excluded: Path, left_out: LeftOut, allow_absolute: bool) -> Iterator[tuple[str, str]]:
    """Yields the URI of each file of an item, and the short path that names it."""
    path = Path(item).expanduser()

    if not is_remote(item) and path.is_dir():
        yield from _files_of_folder(path.resolve(), excluded, left_out)
    elif is_table(item):
        yield from _files_of_table(item, allow_absolute)
    elif not is_remote(item) and not path.exists():
        raise UserError(f"no file or folder {item}", "photographs, folders of them, or tables", "correct the path")
    else:
        # Without links to folders, as the files of folders and tables have their paths.
        uri = item if is_remote(item) else os.path.join(os.path.realpath(path.parent), path.name)
        path_of_uri = uri.partition("?")[0] if is_remote(item) else uri
        yield uri, path_of_uri.rpartition("/")[2]


def _files_of_folder(root: Path, excluded: Path, left_out: LeftOut) -> Iterator[tuple[str, str]]:
    for name in files_below(root, left_out, excluded):
        if name.rpartition("/")[2].startswith("."):
            left_out["hidden file(s)"] += 1
        else:
            yield f"{root}/{name}", name


def _files_of_table(table: str, allow_absolute: bool) -> Iterator[tuple[str, str]]:
    rows = read_user_table(table, {"image": "image"}, trusted=allow_absolute, has_column_keys=False)
    texts = rows.filled("image")
    uris = in_existing_spellings(rows.uris("image", texts))
    for text, uri in zip(texts.to_pylist(), uris.to_pylist(), strict=True):
        relative = None if is_remote(text) else path_inside(text)
        yield uri, relative or uri.rpartition("/")[2]


def _candidate_names(uri: str, short_path: str) -> _Names:
    stem, _ = posixpath.splitext(short_path)
    return _Names(stem, short_path, relative_name(uri) or short_path)


def _distinct_names(names: dict[str, _Names]) -> dict[str, str]:
    """Chooses a name for each photograph, as short as possible.

    Photographs whose names are equal take a more specific one, which may equal that of another photograph; that one
    then also takes its whole path.

    Raises:
        UserError: Two photographs have the same whole path in another case or with another scheme.
    """
    chosen = {uri: candidates.stem for uri, candidates in names.items()}
    # A whole path may equal a shorter name of another photograph, which then also needs its whole path, and so on.
    for level in ("file_name", "whole_path", "whole_path", "whole_path"):
        count = Counter(name.casefold() for name in chosen.values())
        ambiguous = [uri for uri, name in chosen.items() if count[name.casefold()] > 1]
        if not ambiguous:
            return chosen
        chosen |= {uri: getattr(names[uri], level) for uri in ambiguous}

    raise UserError(
        f"photographs whose paths cannot be distinguished: {join_shortened(ambiguous)}",
        "paths that differ in more than case or scheme",
        "rename one of them",
    )

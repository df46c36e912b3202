"""Photographs without tags, to be predicted: files, folders and tables -> where they lie, and a name for each."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mcis.datasets.errors import UserError
from mcis.datasets.index import shown
from mcis.datasets.sources.lists import files_below, inside, is_text, left_out, relative_name
from mcis.datasets.sources.user_table import READERS, read_user_table
from mcis.datasets.storage.uris import credentials_refused, holds_credentials, is_remote, without_credentials


class Photograph(NamedTuple):
    """A photograph.

    Attributes:
        uri: absolute path, or URI.
        name: relative path without suffix that no other photograph has, also where case does not count.
    """

    uri: str
    name: str


def list_photographs(
    given: Sequence[str], *, leave_out: Path, allow_absolute: bool = False
) -> tuple[list[Photograph], list[str]]:
    """Lists photographs, in the order given, and notes; no image is opened, and no suffix trusted but a table's.

    A photograph is named by its path below the folder that was given, by the one that a table has, or by its file's
    name, without the suffix. Where several would have the same name they keep the suffix, and where that does not tell
    them apart they are named by their whole path.

    Args:
        given: paths or URIs of files; folders, whose sub-folders are read as well; .csv, .jsonl or .parquet tables with
            a column `image`, as `list_tagged` reads them. A file that is given twice counts once.
        leave_out: folder that is not looked into where it lies in one of them: where predictions go.
        allow_absolute: whether tables may name files outside of their folders, and other servers (`list_tagged`).

    Raises:
        UserError: a folder or a table cannot be read, a table names a file that it may not name, a path is no UTF-8, a
            URI holds a password, key, token or signature, or there is no file at all.
    """
    leave_out = leave_out.expanduser().resolve()
    left: Counter[str] = Counter()
    names: dict[str, tuple[str, ...]] = {}
    for item in given:
        if not is_text(item):
            raise UserError(f"the name {os.fsencode(item)!r} is no UTF-8", "names in UTF-8", "rename it")
        if holds_credentials(item):
            raise credentials_refused(without_credentials(item))
        for uri, short in _files(item, leave_out, left, allow_absolute):
            if uri in names:
                left["file(s) that are given more than once"] += 1
            names.setdefault(uri, _names(uri, short))
    if not names:
        expected = f"at least one photograph that does not lie in {leave_out}"
        raise UserError(f"no file in {shown(list(given))}", expected, "name files, folders or tables")
    return [Photograph(*each) for each in _told_apart(names).items()], left_out("photographs", left)


def _files(item: str, leave_out: Path, left: Counter[str], allow_absolute: bool) -> Iterator[tuple[str, str]]:
    """Where the files of an argument lie, and what each is named by."""
    path = Path(item).expanduser()
    if not is_remote(item) and path.is_dir():
        root = path.resolve()
        for name in files_below(root, left, leave_out):
            if name.rpartition("/")[2].startswith("."):
                left["hidden file(s)"] += 1
            else:
                yield f"{root}/{name}", name
    elif item.lower().endswith(tuple(READERS)):
        rows = read_user_table(item, {"image": "image"}, trusted=allow_absolute)
        texts = rows.filled("image")
        for text, uri in zip(texts.to_pylist(), rows.uris("image", texts).to_pylist(), strict=True):
            relative = None if is_remote(text) else inside(text)
            yield uri, relative or uri.rpartition("/")[2]
    elif not is_remote(item) and not path.exists():
        raise UserError(f"no file or folder {item}", "photographs, folders of them, or tables", "correct the path")
    else:
        uri = item if is_remote(item) else os.path.abspath(path)
        yield uri, uri.rpartition("/")[2]


def _names(uri: str, short: str) -> tuple[str, ...]:
    """Names of a photograph, each telling more than the one before."""
    stem, dot, _ = short.rpartition(".")
    without = stem if dot and not stem.endswith("/") and stem else short
    return without, short, relative_name(uri) or short


def _told_apart(names: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """A name of each photograph that no other has, of those that tell more the longer they are; UserError where two
    have the same whole path, in another case or with another scheme."""
    chosen = {uri: of_uri[0] for uri, of_uri in names.items()}
    for level in (1, 2, 2, 2):
        count = Counter(name.casefold() for name in chosen.values())
        same = [uri for uri, name in chosen.items() if count[name.casefold()] > 1]
        if not same:
            return chosen
        chosen |= {uri: names[uri][level] for uri in same}
    raise UserError(f"photographs whose paths cannot be told apart: {shown(same)}", "paths of their own", "rename one")

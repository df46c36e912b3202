"""Helpers that the sources share: text lists, the files of a folder, and tables of listings."""

import collections
import difflib
import functools
import os
import posixpath
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from mcis.datasets.errors import UserError, join_shortened, unquoted
from mcis.datasets.index import LISTING_SCHEMA
from mcis.datasets.storage.faults import access_refused, error_text, is_transient, retry_io
from mcis.datasets.tables.large_tables import SHARD_ROWS

_IMAGE_SUFFIXES = {
    ".avif",
    ".bmp",
    ".gif",
    ".heic",
    ".heif",
    ".j2k",
    ".jp2",
    ".jpeg",
    ".jpg",
    ".png",
    ".tif",
    ".tiff",
    ".webp",
}
_NOT_IN_LINES = {"Cc", "Cs", "Zl", "Zp"}
"""Unicode categories of control characters, surrogates and line breaks."""
LeftOut: TypeAlias = collections.Counter[str]
"""Number of items that were left out, by the reason; a reason reads "hidden file(s)" in "left out 3 hidden file(s)"."""


def read_lines(path: Path, expected: str, remedy: str) -> list[tuple[int, str]]:
    """Reads a UTF-8 text file.

    Args:
        expected: What the file should hold; used in messages.
        remedy: What to do if the file cannot be used; used in messages.

    Returns:
        Number, counted from 1, and stripped text of each line that is not blank.

    Raises:
        UserError: The file is missing, unreadable, not UTF-8, or has no such line.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"no file {path}", expected, remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {unquoted(error)}", expected, remedy) from None

    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path} is empty", expected, remedy)
    return lines


def read_tag_list(
    path: Path, classes: int, list_remedy: str, class_remedy: str, first_index: int = 0
) -> dict[str, list[int]]:
    """Reads a list of lines `<path> <class index> <class index> ...`.

    Args:
        classes: K, number of classes.
        list_remedy: What to do if there is no such list; used in messages.
        class_remedy: What to do if a class index is unknown; used in messages.
        first_index: Number of the first class in the list.

    Returns:
        Path of each image -> its class indices, counted from 0 and ascending, in the order of the list.

    Raises:
        UserError: See `read_lines`; or a path leads out of the folder, an image is listed twice, or a class index is
            unknown.
    """
    expected = f"lines '<path> <class index> ...' with indices {first_index}..{classes - 1 + first_index}"
    index_of_text = {str(index + first_index): index for index in range(classes)}
    tags: dict[str, list[int]] = {}

    for number, line in read_lines(path, expected, list_remedy):
        where = f"{path}, line {number}"
        text, *indices = line.split()

        image = path_inside(text)
        if image is None:
            raise UserError(f"{where}: {text} is outside of the folder of images", expected, "remove it from the list")
        if image in tags:
            raise UserError(f"{where}: {text} is listed twice", "one line per image", "merge the lines")

        unknown = [index for index in indices if index not in index_of_text]
        if unknown:
            raise UserError(f"{where}: class index {join_shortened(unknown)} of image {text}", expected, class_remedy)
        tags[image] = sorted({index_of_text[index] for index in indices})

    return tags


def source_folder(path: Path, expected: str, remedy: str) -> Path:
    """Returns the absolute path of a folder, with links resolved.

    Raises:
        UserError: It is no folder, or its name is not UTF-8.
    """
    folder = path.expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"no folder {path}", expected, remedy)
    if not is_utf8(str(folder)):
        raise UserError(f"the name of folder {os.fsencode(folder)!r} is not UTF-8", expected, "rename the folder")
    return folder


def is_utf8(name: str) -> bool:
    """Returns whether a file name is UTF-8, as the columns of a table require."""
    return name == name.encode(errors="ignore").decode()


def path_inside(path: str) -> str | None:
    """Normalizes a relative path; None if it is absolute, leads out by `..`, or is not a path."""
    path = posixpath.normpath(path)
    leads_out = path == ".." or path.startswith(("/", "../"))
    return None if leads_out or "\0" in path else path


def relative_name(path: str) -> str | None:
    """Makes a relative path from any path or URI, to name files by it. It leaves out `..` at the start.

    Returns:
        The path; None for a path without a name, such as `..`.
    """
    normalized = posixpath.normpath(path.replace("://", "/").lstrip("/"))
    while normalized.startswith("../"):
        normalized = normalized.removeprefix("../")
    return path_inside(normalized)


def is_line(name: str) -> bool:
    """Returns whether a name can be a line of a text file: without line breaks, control characters and outer spaces.

    Narrow spaces and invisible marks are valid; screenshots of macOS have them.
    """
    return name == name.strip() and not any(unicodedata.category(char) in _NOT_IN_LINES for char in name)


def without_image_suffix(path: str) -> str:
    """Removes the suffix of an image file from a path, for example `.jpg`; other suffixes are part of the name."""
    stem, suffix = posixpath.splitext(path)
    return stem if suffix.lower() in _IMAGE_SUFFIXES else path


class Folder(NamedTuple):
    """Content of a folder, without that of its subfolders.

    Attributes:
        files: Names, ascending, hidden files (`.name`) included.
        folders: Names, ascending.
        left_out: Number of other entries, by reason.
    """

    files: list[str]
    folders: list[str]
    left_out: LeftOut


def scan(folder: Path, root: Path, *, follow_links: bool = False) -> Folder:
    """Reads the names in a folder without opening any file.

    A link counts as its target. Left out are links that lead out of `root`, names that are not UTF-8, and entries that
    are neither a file nor a folder. Transient errors are retried (`retry_io`).

    Args:
        root: Absolute path without links.
        follow_links: Whether links may lead out of `root`.

    Raises:
        UserError: The folder cannot be read.
    """
    try:
        return retry_io(str(folder), functools.partial(_read_folder, folder, root, follow_links))
    except PermissionError as error:
        raise access_refused(str(folder), error) from None
    except OSError as error:
        found = f"folder {folder} cannot be read: {error_text(error)}"
        raise UserError(found, "a folder of images", "correct the folder and repeat the command") from None


def _read_folder(folder: Path, root: Path, follow_links: bool) -> Folder:
    content = Folder([], [], LeftOut())
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_utf8(entry.name):
                content.left_out["name(s) that are not UTF-8"] += 1
            elif not follow_links and _leads_out(entry, root):
                content.left_out[f"link(s) that lead out of {root}"] += 1
            elif _has_kind(entry.is_file):
                content.files.append(entry.name)
            elif _has_kind(entry.is_dir):
                content.folders.append(entry.name)
            else:
                content.left_out["pipe(s) or broken link(s)"] += 1

    content.files.sort()
    content.folders.sort()
    return content


def _has_kind(is_kind: Callable[[], bool]) -> bool:
    """Returns the result of `is_file` or `is_dir` of an entry; False for a broken link, such as one to itself."""
    try:
        return is_kind()
    except OSError as error:
        if isinstance(error, PermissionError) or is_transient(error):
            raise
        return False


def _leads_out(entry: os.DirEntry[str], root: Path) -> bool:
    return entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(root)


def files_below(root: Path, left_out: LeftOut, excluded: Path | None = None) -> Iterator[str]:
    """Yields the relative paths of all files below a folder, as `scan` reads it. Links to folders are not followed.

    Args:
        root: Absolute path without links.
        left_out: Updated with what is left out.
        excluded: Folder that is not read, because predictions are written there.
    """
    waiting = [""]
    while waiting:
        below = waiting.pop()
        if root / below == excluded:
            left_out[f"folder {excluded}, where predictions are written"] += 1
            continue

        content = scan(root / below, root)
        left_out.update(content.left_out)
        for name in content.files:
            yield f"{below}{name}"

        for name in reversed(content.folders):
            if (root / below / name).is_symlink():
                left_out["link(s) to folders"] += 1
            else:
                waiting.append(f"{below}{name}/")


def map_paths(folder: Path | None, kind: str, suffixes: Sequence[str] = (".png",)) -> dict[str, str]:
    """Returns the files below a folder: relative path without suffix, which is that of the image -> absolute path.

    The relative paths are in the Unicode form NFC.

    Args:
        folder: None: no maps.
        kind: Name of such a map, such as "saliency map"; used in messages.
        suffixes: Suffixes of the files, in lower case. Other files are left out.

    Raises:
        UserError: The folder is missing, something in it would be left out (`scan`), or two maps have the same name.
    """
    if folder is None:
        return {}

    expected = f"a folder of {kind}s, <path of the image>{' or '.join(suffixes)}"
    root = source_folder(folder, expected, f"name the folder of the {kind}s, or leave the setting empty")
    left_out = LeftOut()
    paths: dict[str, str] = {}
    for name in files_below(root, left_out):
        stem, suffix = os.path.splitext(name)
        if suffix.lower() not in suffixes:
            continue
        stem = unicodedata.normalize("NFC", stem)
        if stem in paths:
            raise UserError(f"two {kind}s of {stem}: {paths[stem]} and {root}/{name}", "one", "remove one")
        paths[stem] = f"{root}/{name}"

    if left_out.total():
        found = "; ".join(left_out_notes(str(root), left_out))
        raise UserError(found, "readable files", "copy the files into the folder, or remove these entries")
    return paths


def check_present(listed: Path, absent: Sequence[str], folder: Path, expected: str) -> None:
    """Raises a UserError if a list names images that are absent from a folder."""
    if absent:
        raise UserError(
            f"{listed} names {len(absent)} image(s) that are not in {folder}: {join_shortened(absent)}",
            expected,
            "add the images or remove them from the list",
        )


def check_listed_once(lists: Iterable[tuple[Path, Sequence[str]]]) -> None:
    """Raises a UserError if an image is listed twice, in one list or in two of them.

    Args:
        lists: Path and images of each list.
    """
    first_list: dict[str, Path] = {}
    for path, images in lists:
        for image in images:
            if image in first_list:
                other = first_list[image]
                where = f"twice in {path}" if other == path else f"in {path} and in {other}"
                raise UserError(f"image {image} is listed {where}", "each image once, in one split", "delete a line")
            first_list[image] = path


def missing_mask_notes(missing: int, images: int, split: str) -> list[str]:
    """Returns a note if some images of a split lack a ground-truth mask, or all images of the split val."""
    note = f"no ground-truth mask for {missing} of {images} images of split {split}: these are not scored"
    return [note] if missing and (split == "val" or missing < images) else []


def left_out_notes(where: str, left_out: LeftOut) -> list[str]:
    """Returns a note for each reason for which something was left out.

    Args:
        where: What it was left out of, such as a path.
    """
    return [f"{where}: left out {count} {reason}" for reason, count in sorted(left_out.items()) if count]


def did_you_mean(names: Iterable[str], choices: Sequence[str]) -> str:
    """Returns a hint at the choices closest to misspelled names, `did you mean cat? `; empty if there are none."""
    matches: dict[str, None] = {}
    for name in names:
        matches |= dict.fromkeys(difflib.get_close_matches(name, choices, 1))
    return f"did you mean {join_shortened(list(matches))}? " if matches else ""


Column: TypeAlias = Sequence[Any] | pa.ChunkedArray
"""The values of a column."""


def listing_table(*, image_id: Column, **others: Column | str | bool | None) -> pa.Table:
    """Builds a table of LISTING_SCHEMA from its columns.

    A single text is the value of every row. A column that is None or absent is null; `is_negative` is then false.

    Raises:
        KeyError: The schema has no such column.
    """
    values = {**dict.fromkeys(LISTING_SCHEMA.names), "is_negative": False, "image_id": image_id, **others}
    columns: dict[str, Column] = {}
    for name, value in values.items():
        column_type = LISTING_SCHEMA.field(name).type
        if value is None or isinstance(value, str | bool):
            value = constant_column(value, len(image_id), column_type)
        columns[name] = value

    return pa.table(columns, schema=LISTING_SCHEMA)


def constant_column(value: str | bool | None, rows: int, column_type: pa.DataType) -> pa.ChunkedArray:
    """Returns a column with one value in all rows, whose chunks share their memory."""
    chunk = pa.repeat(pa.scalar(value, column_type), min(rows, SHARD_ROWS))
    chunks = [chunk.slice(0, min(SHARD_ROWS, rows - start)) for start in range(0, rows, SHARD_ROWS)]
    return pa.chunked_array(chunks, column_type)

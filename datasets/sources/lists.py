"""What the sources share: text lists, the files of a folder, and columns -> a table of a listing."""

import collections
import difflib
import os
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.index import LISTING_SCHEMA, shown
from mcis.datasets.tables.large_tables import SHARD_ROWS


def read_lines(path: Path, expected: str, remedy: str) -> list[tuple[int, str]]:
    """The lines of a text file that are not blank, each with its number from 1, without spaces around it; UserError
    where the file is missing, unreadable, no UTF-8 or holds no line."""
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


def read_tag_list(path: Path, classes: int, remedy: str, correct: str, first: int = 0) -> dict[str, list[int]]:
    """Image -> its class indices, from 0 and ascending, of lines `<path> <class index> ...`, in the order of the list.

    Args:
        remedy: what to do where there is no such list.
        correct: what to do where a class is unknown.
        first: number of the first class in the list.

    Raises:
        UserError: as of `read_lines`; a path leads out, an image comes twice, or a class is unknown.
    """
    expected = f"lines '<path> <class index> ...' with indices {first}..{classes - 1 + first}"
    by_text = {str(index + first): index for index in range(classes)}
    tags: dict[str, list[int]] = {}
    for number, line in read_lines(path, expected, remedy):
        where, (text, *indices) = f"{path}, line {number}", line.split()
        image = inside(text)
        if image is None:
            raise UserError(f"{where}: {text} lies outside of the images", expected, "take it off the list")
        if image in tags:
            raise UserError(f"{where}: {text} a second time", "one line per image", "merge the lines")
        if unknown := [index for index in indices if index not in by_text]:
            raise UserError(f"{where}: class index {shown(unknown)} of image {text}", expected, correct)
        tags[image] = sorted({by_text[index] for index in indices})
    return tags


def source_folder(path: Path, expected: str, remedy: str) -> Path:
    """The absolute path, without links, of a folder; UserError where it is no folder, or its name is no UTF-8."""
    folder = path.expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"no folder {path}", expected, remedy)
    if not is_text(str(folder)):
        raise UserError(f"the name of folder {os.fsencode(folder)!r} is no UTF-8", expected, "rename it")
    return folder


def is_text(name: str) -> bool:
    """Whether a file's name is UTF-8, as every column of a table has to be."""
    return name == name.encode(errors="ignore").decode()


def inside(path: str) -> str | None:
    """The normal form of a list's relative path, None where it is absolute, climbs out by `..` or is no path at all."""
    path = posixpath.normpath(path)
    return None if path == ".." or path.startswith(("/", "../")) or "\0" in path else path


def relative_name(path: str) -> str | None:
    """A relative path for an absolute one or a URI, to name files after it; None where it would lead out."""
    return inside(path.replace("://", "/").lstrip("/"))


class Folder(NamedTuple):
    """What lies directly in a folder.

    Attributes:
        files, folders: names, ascending. Files may be hidden (`.name`).
        left: what was left out, and how often.
    """

    files: list[str]
    folders: list[str]
    left: collections.Counter[str]


def scan(folder: Path, root: Path) -> Folder:
    """Reads a folder once and opens nothing in it.

    A link counts as what it leads to. Left out is what leads out of `root` (an absolute path without links in it), what
    has a name that is no UTF-8, and what is neither file nor folder.

    Raises:
        UserError: the folder cannot be read.
    """
    content = Folder([], [], collections.Counter())
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not is_text(entry.name):
                    content.left["name(s) that are no UTF-8"] += 1
                elif entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(root):
                    content.left[f"link(s) that lead out of {root}"] += 1
                elif entry.is_file():
                    content.files.append(entry.name)
                elif entry.is_dir():
                    content.folders.append(entry.name)
                else:
                    content.left["pipe(s) or broken link(s)"] += 1
    except OSError as error:
        found = f"folder {folder} cannot be read: {error.strerror}"
        raise UserError(found, "a folder of images", "correct its permissions") from None
    content.files.sort()
    content.folders.sort()
    return content


def files_below(root: Path, left: collections.Counter[str], leave_out: Path | None = None) -> Iterator[str]:
    """The relative paths of the files below a folder, as `scan` reads it; links to folders are left out as well.

    Args:
        root: an absolute path without links in it.
        left: is told what was left out, and how often.
        leave_out: a folder that is not looked into.
    """
    waiting = [""]
    while waiting:
        below = waiting.pop()
        if root / below == leave_out:
            left[f"folder {leave_out}, where predictions go"] += 1
            continue
        content = scan(root / below, root)
        left.update(content.left)
        yield from (f"{below}{name}" for name in content.files)
        for name in reversed(content.folders):
            if (root / below / name).is_symlink():
                left["link(s) to folders"] += 1
            else:
                waiting.append(f"{below}{name}/")


def map_paths(folder: Path | None, what: str) -> dict[str, str]:
    """The PNGs of a folder, by the relative path of the image that each goes with, without suffix; no folder: none.

    Args:
        what: name of such a map, for messages.

    Raises:
        UserError: the folder is missing.
    """
    if folder is None:
        return {}
    root = source_folder(folder, f"a folder of {what}s, <path of the image>.png", f"name that of the {what}s, or none")
    left = collections.Counter[str]()
    files = {file[:-4]: f"{root}/{file}" for file in files_below(root, left) if file.lower().endswith(".png")}
    if left.total():
        raise UserError("; ".join(left_out(str(root), left)), "readable files", "copy them there, or remove them")
    return files


def check_present(listed: Path, absent: Sequence[str], folder: Path, expected: str) -> None:
    """Raises a UserError where a list names images that are absent from a folder."""
    if absent:
        raise UserError(
            f"{listed} names {len(absent)} image(s) that are not in {folder}: {shown(absent)}",
            expected,
            "add the images or take them off the list",
        )


def check_once(lists: Iterable[tuple[Path, Sequence[str]]]) -> None:
    """Raises a UserError where an image is listed twice, in one list or in two of them."""
    first: dict[str, Path] = {}
    for path, images in lists:
        for image in images:
            if image in first:
                where = f"twice in {path}" if first[image] == path else f"in {path} and in {first[image]}"
                raise UserError(f"image {image} is listed {where}", "each image once, in one split", "delete a line")
            first[image] = path


def lacking_masks(absent: int, images: int, split: str) -> list[str]:
    """A note where some of a split's images lack a ground-truth mask, or, of the split val, all of them."""
    note = f"no ground-truth mask for {absent} of {images} images of split {split}: these are not scored"
    return [note] if absent and (split == "val" or absent < images) else []


def left_out(what: str, left: collections.Counter[str]) -> list[str]:
    """A note for each reason for which something was left out."""
    return [f"{what}: left out {count} {reason}" for reason, count in sorted(left.items()) if count]


def did_you_mean(names: Iterable[str], choices: Sequence[str]) -> str:
    """A hint at what misspelled names may mean, `did you mean cat? `, or an empty text."""
    matches = {match: None for name in names for match in difflib.get_close_matches(name, choices, 1)}
    return f"did you mean {shown(list(matches))}? " if matches else ""


Column: TypeAlias = Sequence[Any] | pa.ChunkedArray
"""The values of a column."""


def listing_table(*, image_id: Column, **others: Column | str | None) -> pa.Table:
    """Columns of LISTING_SCHEMA -> a table of it. A single text holds for every row, an absent column is null. KeyError
    where there is no such column."""
    columns = {**dict.fromkeys(LISTING_SCHEMA.names), "image_id": image_id, **others}
    rows, types = len(image_id), {name: LISTING_SCHEMA.field(name).type for name in columns}
    return pa.table(
        {
            name: repeated_value(value, rows, types[name]) if value is None or isinstance(value, str) else value
            for name, value in columns.items()
        },
        schema=LISTING_SCHEMA,
    )


def repeated_value(value: str | None, rows: int, of_type: pa.DataType) -> pa.ChunkedArray:
    """A column of one value, whose chunks are the same memory."""
    one = pa.repeat(pa.scalar(value, of_type), min(rows, SHARD_ROWS))
    chunks = [one.slice(0, min(SHARD_ROWS, rows - first)) for first in range(0, rows, SHARD_ROWS)]
    return pa.chunked_array(chunks, of_type)

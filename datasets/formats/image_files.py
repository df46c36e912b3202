"""Finds the image files of a data set that was annotated on another machine, where paths may be written differently."""

import collections
import posixpath
import unicodedata
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from mcis.datasets.formats.data_set import visible_files
from mcis.datasets.sources.lists import LeftOut, files_below, path_inside, without_image_suffix
from mcis.datasets.storage.files import is_file


class FoundFiles(NamedTuple):
    """The files of images.

    Attributes:
        file_of_name: Name of each image that was found, as in the data set -> path of its file below the folder.
        absent: Names of images without a file.
        ambiguous: Names of images that several files fit, or whose file fits several images.
    """

    file_of_name: dict[str, str]
    absent: list[str]
    ambiguous: list[str]


def find_files(folder: Path, names: Collection[str], *, listed: Collection[str] = ()) -> FoundFiles:
    """Finds the files of images below a folder.

    A name is first tried as it is. If there is no such file, the file whose path has the longest tail in common with
    the name is found. `\\` is read as `/`; percent-encoding, the Unicode form and the case of the suffix are ignored.
    If other names of the same folder are files as they are, only files in that folder are tried: a missing image of
    `train` is not one of `val`.

    Args:
        folder: Absolute path without links.
        names: Paths, URLs or names of images, as in the data set.
        listed: Files below the folder that are known to exist, so they are not looked up one by one.

    Raises:
        UserError: A file or folder cannot be looked up at present. It does not count as absent.
    """
    file_of_name = {name: name for name in names if name in listed or _is_file_inside(folder, name)}
    others = [name for name in names if name not in file_of_name]
    if not others:
        return FoundFiles(file_of_name, [], [])

    exact_folders = {posixpath.dirname(name) for name in file_of_name}
    free_files = _files_by_last_part(folder, excluded=set(file_of_name.values()))
    absent: list[str] = []
    ambiguous: list[str] = []
    names_of_file: dict[str, list[str]] = collections.defaultdict(list)
    for name in others:
        best_files = _longest_tails(name, free_files)
        name_folder = posixpath.dirname(name.replace("\\", "/"))
        if name_folder in exact_folders:
            best_files = [file for file in best_files if posixpath.dirname(file) == name_folder]
        if len(best_files) == 1:
            names_of_file[best_files[0]].append(name)
        elif best_files:
            ambiguous.append(name)
        else:
            absent.append(name)

    for file, file_names in names_of_file.items():
        if len(file_names) == 1:
            file_of_name[file_names[0]] = file
        else:
            ambiguous += file_names
    return FoundFiles(file_of_name, sorted(absent), sorted(ambiguous))


def images_next_to(folder: Path, names: Collection[str]) -> list[str]:
    """Returns the image files that are in the same subfolders as some images, without these images.

    Args:
        folder: Absolute path without links.
        names: The images, see `find_files`.

    Raises:
        UserError: See `find_files`.
    """
    files = visible_files(folder, LeftOut())
    known = set(find_files(folder, names, listed=set(files)).file_of_name.values())
    subfolders = {posixpath.dirname(file) for file in known}
    images = [file for file in files if without_image_suffix(file) != file]
    return [file for file in images if file not in known and posixpath.dirname(file) in subfolders]


def _is_file_inside(folder: Path, name: str) -> bool:
    return path_inside(name) == name and is_file(str(folder / name))


def _files_by_last_part(folder: Path, excluded: Collection[str]) -> dict[str, list[str]]:
    """Returns the files below a folder by the last part of their path (`_parts`)."""
    files: dict[str, list[str]] = collections.defaultdict(list)
    for file in files_below(folder, LeftOut()):
        if file not in excluded:
            files[_parts(file)[-1]].append(file)
    return files


def _longest_tails(name: str, files: dict[str, list[str]]) -> list[str]:
    """Returns the files whose paths have the most last parts in common with a name, at least one.

    Args:
        files: Files by the last part of their path.
    """
    longest = 0
    best_files: list[str] = []
    for spelling in dict.fromkeys((name, unquote(name))):
        parts = _parts(spelling)
        for file in files.get(parts[-1], ()):
            length = _common_tail(parts, _parts(file))
            if length > longest:
                longest = length
                best_files = []
            if length == longest and file not in best_files:
                best_files.append(file)
    return best_files


def _parts(path: str) -> list[str]:
    """Splits a path at `/` and `\\`, in the Unicode form NFC, with the suffix in lower case."""
    stem, suffix = posixpath.splitext(unicodedata.normalize("NFC", path).replace("\\", "/"))
    return [part for part in f"{stem}{suffix.lower()}".split("/") if part] or [""]


def _common_tail(first: Iterable[str], second: Iterable[str]) -> int:
    """Returns the number of last parts that two paths have in common."""
    length = 0
    for first_part, second_part in zip(reversed(list(first)), reversed(list(second)), strict=False):
        if first_part != second_part:
            break
        length += 1
    return length

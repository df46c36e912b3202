"""Data sets of other tools, as the readers of this package return them and as the writers take them."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.sources.lists import LeftOut, files_below, relative_name
from mcis.datasets.storage.folders import atomic_write
from mcis.datasets.storage.uris import is_remote

_SIDE_FOLDERS = {"__macosx", "@eadir"}
"""Folders of thumbnails and attributes that macOS and Synology write next to photographs, in lower case."""
_SIDE_SUFFIXES = {".csv", ".db", ".ini", ".json", ".txt", ".xml"}
"""Suffixes of files that are no photographs, such as Thumbs.db and desktop.ini of Windows, in lower case."""

Draw: TypeAlias = Callable[[int, int], NDArray[np.bool_]]
"""Draws an outline: (height, width) of an image -> bool (H, W). May raise an exception if the outline is damaged."""


class AnnotatedObject(NamedTuple):
    """An object of a photograph, or a tag of it.

    Attributes:
        tag: Class name. None: a crowd or an unknown class, which gives no tag and is ignored in masks.
        draw: Draws its outline. None: it has no outline.
    """

    tag: str | None
    draw: Draw | None = None


Photos: TypeAlias = dict[str, list[AnnotatedObject]]
"""Path of each photograph below the folder of the images -> its objects; none if it shows none of the classes."""


class DataSet(NamedTuple):
    """A split of a data set.

    Attributes:
        folder: Folder of the images.
        photos: Photographs in it, and their objects.
        notes: Messages on how it was read.
    """

    folder: Path
    photos: Photos
    notes: Sequence[str] = ()


class ImportRequest(NamedTuple):
    """Input of a reader.

    Attributes:
        source: File or folder of the data set.
        images: Folder of the images. None: where the format expects it.
        out: Folder that the import writes. Its files are no photographs of the data set.
        copies: New folder for copies of the images, for formats whose images are not files.
        split: Train, val or test.
        left_out: Counts of items that are left out, by reason. The reader adds to them.
    """

    source: Path
    images: Path | None
    out: Path
    copies: Path
    split: str
    left_out: LeftOut


class LabeledImage(NamedTuple):
    """An image with its label mask.

    Attributes:
        uri: Path or URI of the image.
        content_hash: SHA-256 of its content.
        name: Relative path to name files after the image, without suffix.
        labels: Label mask at the image's size, (H, W).
        value_range: See `read_rgb`.
    """

    uri: str
    content_hash: str
    name: str
    labels: NDArray[np.uint8]
    value_range: ValueRange | None = None

    @property
    def file_name(self) -> str:
        """The name with the suffix of the image's file."""
        suffix = os.path.splitext(self._path)[1]
        return self.name if self.name.endswith(suffix) else self.name + suffix

    @property
    def is_named_by_path(self) -> bool:
        """Whether the path of the image's file ends with `file_name`. It does not if a table has ids of its own."""
        return f"/{relative_name(self._path)}".endswith(f"/{self.file_name}")

    @property
    def _path(self) -> str:
        """The URI without its parameters."""
        return self.uri.partition("?")[0] if is_remote(self.uri) else self.uri


class ExportRequest(NamedTuple):
    """Input of a writer.

    Attributes:
        classes: The K class names; class index k is label k + 1.
        images: The images. A writer iterates over them once.
        out: Folder to write to.
        min_area: Smallest number of pixels of an object; smaller regions are left out.
    """

    classes: Sequence[str]
    images: Iterable[LabeledImage]
    out: Path
    min_area: int = 1


class Format(NamedTuple):
    """A format of data sets.

    Attributes:
        read: Reads a split of a data set. Invalid data may raise any exception.
        expected: Description of a valid data set; used in messages.
        write: Writes label masks as objects and returns their number. None: the format cannot be written.
        copies_images: Whether `write` also copies the images, with the file names that its objects refer to.
    """

    read: Callable[[ImportRequest], DataSet]
    expected: str
    write: Callable[[ExportRequest], int] | None = None
    copies_images: bool = False


def write_file(path: Path, content: str) -> None:
    """Writes a text file atomically."""
    with atomic_write(path, durable=False) as temporary:
        temporary.write_text(content, encoding="utf-8")


def annotation_files(source: Path, suffix: str) -> Iterator[tuple[Path, PurePath]]:
    """Yields the files of a folder with a suffix in any case, or a single file, each with its folder below `source`."""
    if source.is_file():
        yield source, PurePath()
        return
    files = [file for file in source.rglob("*.*") if file.suffix.lower() == suffix]
    for file in sorted(files):
        if file.is_file() and not file.name.startswith("."):
            yield file, file.parent.relative_to(source)


def name_text(value: Any, key: str) -> str:
    """Returns a name of JSON as text. Some tools write names as numbers.

    Args:
        key: Key of the name, for the error.

    Raises:
        ValueError: It is neither a text nor a number.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{key} is {json.dumps(value)[:100]}, which is neither a text nor a number")
    return str(value)


@contextmanager
def naming(file: Path | str) -> Iterator[None]:
    """Turns any error that the content of a file or image raises inside into a ValueError that names it."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # invalid values can raise anything in parsers
        problem = f"no {error.args[0]}" if isinstance(error, KeyError) else unquoted(error)
        raise ValueError(f"{file}: {problem}") from error


def visible_files(folder: Path, left_out: LeftOut) -> list[str]:
    """Returns the files below a folder that are not hidden, nor in a hidden folder, whatever their suffixes.

    Args:
        left_out: Updated with the number of hidden files.
    """
    files = list(files_below(folder, left_out))
    visible = [name for name in files if not name.startswith(".") and "/." not in name]
    left_out["hidden file(s)"] = len(files) - len(visible)
    return visible


def photograph_files(files: Iterable[str], folder: Path, request: ImportRequest) -> list[str]:
    """Returns the files that may be photographs of a data set: without the output of imports and side files.

    Args:
        files: Paths below `folder`.
        folder: Absolute path without links.
        request: Names the output. Its counts are updated with the number of other files.
    """
    is_output_inside = folder in request.out.parents
    photographs: list[str] = []
    for name in files:
        path = PurePosixPath(name.lower())
        if is_output_inside and (folder / name).is_relative_to(request.out):
            request.left_out[f"file(s) in {request.out}, where the import writes"] += 1
        elif path.suffix in _SIDE_SUFFIXES or _SIDE_FOLDERS.intersection(path.parts):
            request.left_out["file(s) that are no photographs, such as Thumbs.db, __MACOSX and texts"] += 1
        else:
            photographs.append(name)
    return photographs

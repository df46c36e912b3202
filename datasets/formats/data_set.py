"""Data sets of other tools as the readers of this package return them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sources.lists import LeftOut, files_below

Draw: TypeAlias = Callable[[int, int], NDArray[np.bool_]]
"""Draws an outline: (height, width) of an image -> bool (H, W). May raise an exception if the outline is damaged."""


class AnnotatedObject(NamedTuple):
    """An object of a photograph, or a tag of it.

    Attributes:
        tag: Class name. None: a crowd, which gives no tag and is ignored in masks.
        draw: Draws its outline. None: it has no outline.
    """

    tag: str | None
    draw: Draw | None = None


Photos: TypeAlias = dict[str, list[AnnotatedObject]]
"""Path of each photograph below the folder of the images -> its objects."""


class DataSet(NamedTuple):
    """A split of a data set.

    Attributes:
        folder: Folder of the images.
        photos: Photographs in it, and their objects.
    """

    folder: Path
    photos: Photos


class ImportRequest(NamedTuple):
    """What a reader is to read.

    Attributes:
        source: File or folder of the data set.
        images: Folder of the images. None: where the format expects it.
        copies: Folder for copies of the images, for formats whose images are not files.
        split: train, val or test.
        left_out: Updated with what is left out.
    """

    source: Path
    images: Path | None
    copies: Path
    split: str
    left_out: LeftOut


class Format(NamedTuple):
    """A format of data sets.

    Attributes:
        read: Reads a split of a data set. Invalid data may raise any exception.
        expected: Description of a valid data set; used in messages.
    """

    read: Callable[[ImportRequest], DataSet]
    expected: str


def visible_files(folder: Path, left_out: LeftOut) -> list[str]:
    """Returns the files below a folder that are not hidden, nor in a hidden folder. No suffix is trusted."""
    files = list(files_below(folder, left_out))
    visible = [name for name in files if not name.startswith(".") and "/." not in name]
    left_out["hidden file(s)"] = len(files) - len(visible)
    return visible

"""The folders and lists of a PASCAL VOC 2012 devkit, as `voc` and `voc_tags` read them."""

from pathlib import Path
from typing import NamedTuple

from mcis.datasets.errors import UserError
from mcis.datasets.index import shown
from mcis.datasets.sources.lists import read_lines


class Devkit(NamedTuple):
    """Folders of a devkit, the names in the folder of its images, and the K class names."""

    root: Path
    images: Path
    image_names: set[str]
    lists: Path
    classes: tuple[str, ...]


class DevkitList(NamedTuple):
    """A list of the devkit.

    Attributes:
        split: that its images are of.
        path: of the file `<name>.txt`.
        ids: of its images, in its order.
        notes: about the list.
    """

    split: str
    path: Path
    ids: list[str]
    notes: list[str]

    @property
    def tags_path(self) -> Path:
        """Path of the file with the tags of the list's images."""
        return self.path.with_name(f"{self.path.stem}_cls.txt")


def existing_folder(path: Path, what: str, remedy: str) -> Path:
    """The folder itself.

    Raises:
        UserError: it does not exist.
    """
    if not path.is_dir():
        raise UserError(f"no folder {path}", what, remedy)
    return path


def split_lines(path: Path, remedy: str) -> list[tuple[int, list[str]]]:
    """The lines that are not blank, each with its number from 1 and cut into words.

    Raises:
        UserError: no such file, or no UTF-8.
    """
    expected = "a UTF-8 text file with one image id per line"
    if not path.is_file():
        raise UserError(f"no list {path}", expected, remedy)
    return [(number, line.split()) for number, line in read_lines(path, expected, remedy, may_be_empty=True)]


def read_ids(path: Path, remedy: str) -> list[str]:
    """The image ids of a list, one per line, in its order.

    Raises:
        UserError: no such file, no UTF-8, or a line of several words.
    """
    lines = split_lines(path, remedy)
    for number, words in lines:
        if len(words) > 1:
            raise UserError(
                f"{path}, line {number}: {shown(words)}", "one image id per line", "leave the id alone on its line"
            )
    return [words[0] for _, words in lines]


def names_in(folder: Path) -> set[str]:
    """The names in a folder, none where there is no such folder."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()

"""Finds the class that a folder or a tag of another data set means: by its name, by a spelling or a synonym of it."""

import re
import tomllib
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

_TABLE = Path(__file__).with_name("voc_folders.toml")
_SEPARATORS = re.compile(r"[\s_\-/.]+")


class ClassNames:
    """The K classes of a run by the names that other data sets have for them.

    Attributes:
        names: K class names.
        class_of: Given name -> class index.
    """

    def __init__(self, names: Sequence[str], given: Mapping[str, str], *, spellings: bool):
        """Makes the lookup.

        Args:
            given: Name -> class name; those of other classes are ignored.
            spellings: Whether further spellings of class names, and synonyms of VOC's classes, are recognized.
        """
        self.names = tuple(names)
        index_of = {name: k for k, name in enumerate(names)}
        self.class_of = {_nfc(name): index_of[target] for name, target in given.items() if target in index_of}
        self._by_spelling = _spellings(index_of) if spellings else {}

    def find(self, name: str) -> int | None:
        """Returns the class index of a folder or tag; None if it is no class."""
        name = _nfc(name)
        return self.class_of.get(name, self._by_spelling.get(_simplified(name)))

    def is_exact(self, name: str) -> bool:
        """Returns whether a name equals a given name, without regard to its Unicode form."""
        return _nfc(name) in self.class_of


def _spellings(index_of: Mapping[str, int]) -> dict[str, int]:
    """Returns simplified names and synonyms of classes -> class index, without those that two classes share."""
    by_spelling: dict[str, int] = {}
    shared = set()
    for name, index in index_of.items():
        spelling = _simplified(_nfc(name))
        if by_spelling.setdefault(spelling, index) != index:
            shared.add(spelling)
    for spelling in shared:
        del by_spelling[spelling]

    for name, synonyms in _tables()["names"].items():
        if name in index_of:
            for synonym in synonyms:
                by_spelling.setdefault(_simplified(synonym), index_of[name])
    return by_spelling


def voc_folders() -> dict[str, str]:
    """Returns the folders of ImageNet and Caltech-256 with images of a VOC class -> name of the class."""
    tables = _tables()
    class_of: dict[str, str] = {}
    for table in (tables["imagenet"], tables["caltech"]):
        for name, entries in table.items():
            class_of |= {entry.split()[0]: name for entry in entries}
    return class_of


def _tables() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def _nfc(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _simplified(name: str) -> str:
    """Returns a name without capitals, spaces and the characters that replace them."""
    return _SEPARATORS.sub("", name.casefold())

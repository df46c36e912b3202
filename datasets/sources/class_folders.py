"""Lists images by the names of their class folders, or by tables, for the sources `single` and `web`.

Both sources may have several such folders and tables, a list of images, and a maximum number of images per class.
"""

import collections
import hashlib
import itertools
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import BeforeValidator, Field

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.index import PROVENANCE_SCHEMA, Listing
from mcis.datasets.section import LocalPath, Section, absolute_location, absolute_path
from mcis.datasets.sources.class_names import ClassNames
from mcis.datasets.sources.lists import (
    LeftOut,
    did_you_mean,
    left_out_notes,
    listing_table,
    map_paths,
    read_lines,
    relative_name,
    scan,
)
from mcis.datasets.sources.tag_table import read_tag_table
from mcis.datasets.sources.user_table import is_table

_RUNNING_NUMBER = re.compile(r"\s+\d+$")
"""What follows the names in ImageNet's lists of images, such as train_cls.txt."""


def _absolute_locations(value: Any) -> tuple[str, ...] | None:
    """Makes paths absolute. A single path needs no list."""
    if value is None:
        return None
    paths = value if isinstance(value, list | tuple) else [value]
    if not paths or not all(isinstance(path, str | Path) for path in paths):
        raise ValueError("Input should be a path or a list of paths")
    return tuple(_absolute_location(str(path)) for path in paths)


def _absolute_location(path: str) -> str:
    return absolute_location(path) if is_table(path) else str(absolute_path(Path(path)))


Locations = Annotated[tuple[str, ...] | None, BeforeValidator(_absolute_locations)]


class ClassFoldersConfig(Section):
    """Fields of both sources."""

    root: Locations = None
    """Folder of class folders, or a table of images and tags; or a list of folders and tables."""
    list: LocalPath | None = None
    """File with one image per line, <folder>/<image>, with or without suffix. Other images are left out, and listed
    images that are absent from their folder are an error. None: all images."""
    max_per_class: int | None = Field(default=None, gt=0)
    """Maximum number of images of a class. If there are more, those are used whose names have the smallest SHA-256, so
    the choice depends neither on a seed nor on the order of files. None: unlimited."""
    follow_links: bool = False
    """Use files and folders that links name outside of the folders. By default these are left out, with a note."""


class ImageKind(NamedTuple):
    """A kind of images.

    Attributes:
        name: What the images are; used in notes.
        source: Name of the source, with which the ids of its images start.
        domain: Domain of the images.
        has_subfolders: Whether images in folders below a class folder are used.
    """

    name: str
    source: str
    domain: Literal["source", "web"]
    has_subfolders: bool


class ImageChoice(NamedTuple):
    """Which images are used. The fields are those of `ClassFoldersConfig`."""

    list: Path | None
    max_per_class: int | None
    follow_links: bool


class FolderImage(NamedTuple):
    """An image.

    Attributes:
        name: Path relative to the folder of class folders or to the folder of the table.
        uri: Absolute path or URI.
        tags: Class indices, ascending.
        id: Unique id, `<source>/<name>`.
        saliency, url, license: See `TableImage`.
    """

    name: str
    uri: str
    tags: tuple[int, ...]
    id: str = ""
    saliency: str | None = None
    url: str | None = None
    license: str | None = None


class FolderListing:
    """The images and notes of several locations, and the folders that hold the images.

    Args:
        kind: Kind of the images.
        classes: Names of the classes.
        choice: Which images are used.
    """

    def __init__(self, kind: ImageKind, classes: ClassNames, choice: ImageChoice):
        self.kind = kind
        self.classes = classes
        self.choice = choice
        self.images: list[FolderImage] = []
        self.notes: list[str] = []
        self.bases: list[str] = []

    def add(self, base: Path | str, images: Sequence[FolderImage]) -> None:
        """Adds the images of a location. Images with a path that an earlier one has get the location's number."""
        self.bases.append(str(base))
        taken = {image.name for image in self.images}
        for image in images:
            prefix = f"{self.kind.source}/{len(self.bases)}" if image.name in taken else self.kind.source
            self.images.append(image._replace(id=f"{prefix}/{image.name}"))

    def add_table(self, table: str, *, trusted: bool) -> None:
        """Adds the images of a table."""
        rows, notes = read_tag_table(table, self.classes, trusted=trusted)
        self.notes += notes
        images = []
        for row in rows:
            images.append(
                FolderImage(row.name, row.uri, row.tags, saliency=row.saliency, url=row.url, license=row.license)
            )
        self.add(table, images)

    def add_folder(self, base: Path) -> bool:
        """Adds all files of class folders that are not hidden. Returns whether there are any; else nothing is changed.

        Args:
            base: Folder of class folders, an absolute path without links.
        """
        content = scan(base, base, follow_links=self.choice.follow_links)
        class_of_folder: dict[str, int] = {}
        for folder in content.folders:
            index = self.classes.find(folder)
            if index is not None:
                class_of_folder[folder] = index

        left_out = content.left_out
        left_out["file(s) or folder(s) that are not images"] += len(content.files)
        images = []
        for folder, index in class_of_folder.items():
            for name in self._files(base, folder, left_out):
                images.append(FolderImage(name, f"{base}/{name}", (index,)))
        if not images:
            return False

        where = f"{self.kind.name} in {base}"
        self.note_left_out(where, left_out)
        other_folders = [folder for folder in content.folders if folder not in class_of_folder]
        if other_folders:
            count = len(other_folders)
            self.notes.append(
                f"{where}: left out {count} folder(s) that match no class: {join_shortened(other_folders)}"
            )
        renamed = [folder for folder in class_of_folder if not self.classes.is_exact(folder)]
        if renamed:
            pairs = [f"{folder} = {self.classes.names[class_of_folder[folder]]}" for folder in renamed]
            self.notes.append(
                f"{where}: folders whose names are not those of classes: {join_shortened(pairs, len(pairs))}"
            )
        self.add(base, images)
        return True

    def _files(self, base: Path, folder: str, left_out: LeftOut) -> Iterator[str]:
        """Yields the files of a class folder, relative to `base`, and counts what is left out."""
        follow_links = self.choice.follow_links
        waiting = [folder]
        read: set[str] = set()
        while waiting:
            below = waiting.pop()
            target = os.path.realpath(base / below)
            if target in read:
                left_out["link(s) to folders that were read already"] += 1
                continue
            read.add(target)

            content = scan(base / below, base, follow_links=follow_links)
            left_out.update(content.left_out)
            names = [name for name in content.files if not name.startswith(".")]
            for name in names:
                yield f"{below}/{name}"

            folders = []
            if self.kind.has_subfolders:
                folders = [name for name in content.folders if not name.startswith(".")]
            waiting += [f"{below}/{name}" for name in reversed(folders)]
            others = len(content.files) + len(content.folders) - len(names) - len(folders)
            left_out["file(s) or folder(s) that are not images"] += others

    def note_left_out(self, where: str, left_out: LeftOut) -> None:
        """Adds notes on what was left out of a location."""
        for note in left_out_notes(where, left_out):
            leads_out = "link(s) that lead out of" in note
            remedy = f"; to use them, set data.{self.kind.source}.follow_links=true" if leads_out else ""
            self.notes.append(f"{note}{remedy}")

    def note_absent_folders(self, class_file: Path) -> None:
        """Adds a note on folders that a class file names and that do not exist."""
        present: set[str] = set()
        folders = [Path(base) for base in self.bases if not is_table(base)]
        for base in folders:
            content = scan(base, base, follow_links=self.choice.follow_links)
            present.update(unicodedata.normalize("NFC", folder) for folder in content.folders)
        absent = sorted(set(self.classes.class_of) - present)
        if folders and absent:
            where = " and ".join(map(str, folders))
            self.notes.append(
                f"{class_file} names {len(absent)} folder(s) that are not in {where}: {join_shortened(absent)}"
            )

    def to_listing(self, saliency: Path | None) -> Listing:
        """Chooses images and makes the listing.

        Args:
            saliency: Folder of saliency maps.
        """
        names = self.classes.names
        where = f"{self.kind.name} in {' and '.join(self.bases)}"
        if self.choice.list:
            self._keep_listed(self.choice.list, where)
        if self.choice.max_per_class:
            self._limit_classes(self.choice.max_per_class, where)

        present = set(itertools.chain.from_iterable(image.tags for image in self.images))
        absent = [name for k, name in enumerate(names) if k not in present]
        if absent:
            self.notes.append(f"{where}: no image of class {join_shortened(absent, len(absent))}")

        saliency_uris, saliency_notes = _saliency_uris(self.images, saliency, where)
        rows = listing_table(
            image_id=[image.id for image in self.images],
            uri=[image.uri for image in self.images],
            domain=self.kind.domain,
            split="train",
            tags=[image.tags for image in self.images],
            saliency_uri=saliency_uris,
        )
        return Listing(rows, names, tuple(self.notes + saliency_notes), _provenance(self.images))

    def _keep_listed(self, path: Path, where: str) -> None:
        """Removes images that a list does not name.

        Numbers after the names are those of ImageNet's lists if every line has one and none is part of a file's name.

        Raises:
            UserError: See `read_lines`; or the list names an image that is absent from the folder of a class.
        """
        expected = "lines '<folder>/<image>', such as n02084071/n02084071_10.JPEG"
        remedy = "name another file, or leave the setting empty to use all images"
        texts: dict[int, str] = {}
        for number, written in read_lines(path, expected, remedy):
            texts[number] = unicodedata.normalize("NFC", written).removeprefix("./")
        names = texts
        line_of = _first_lines(names)
        has_numbers = all(_RUNNING_NUMBER.search(text) for text in texts.values())
        if has_numbers and not any(_line_of_image(image, line_of) for image in self.images):
            names = {number: _RUNNING_NUMBER.sub("", text) for number, text in texts.items()}
            line_of = _first_lines(names)

        found_lines: set[int | None] = set()
        listed_images = []
        for image in self.images:
            line = _line_of_image(image, line_of)
            found_lines.add(line)
            if line is not None:
                listed_images.append(image)

        missing = [
            text for number, text in texts.items() if number not in found_lines and line_of[names[number]] == number
        ]
        absent = [text for text in missing if self.classes.find(text.partition("/")[0]) is not None]
        unmatched = [text for text in missing if text not in absent]
        if absent:
            raise UserError(
                f"{path} names {len(absent)} image(s) that are not in the folders of {where}: {join_shortened(absent)}",
                expected,
                "add the images or remove them from the list",
            )
        if unmatched:
            count = len(unmatched)
            self.notes.append(
                f"{path} names {count} image(s) in folders that match no class: {join_shortened(unmatched)}"
            )
        self.notes.append(
            f"{where}: {len(listed_images)} of {len(self.images)} images are in {path}, the others are left out"
        )
        self.images = listed_images

    def _limit_classes(self, max_per_class: int, where: str) -> None:
        """Removes images of classes with more than `max_per_class` images; those with the smallest hashes stay.

        An image with several tags stays if none of its classes has its number of images yet.
        """
        hashes = [hashlib.sha256(image.id.encode()).digest() for image in self.images]
        available: collections.Counter[int] = collections.Counter()
        chosen: collections.Counter[int] = collections.Counter()
        is_kept = [False] * len(hashes)
        for position in sorted(range(len(hashes)), key=hashes.__getitem__):
            tags = self.images[position].tags
            available.update(tags)
            is_kept[position] = all(chosen[k] < max_per_class for k in tags)
            if is_kept[position]:
                chosen.update(tags)

        limited = [f"{self.classes.names[k]} ({available[k]})" for k in sorted(available) if available[k] > chosen[k]]
        if limited:
            self.notes.append(
                f"{where}: {is_kept.count(False)} image(s) are left out, because the number per class is limited to "
                f"{max_per_class}: {join_shortened(limited, len(limited))}"
            )
        self.images = list(itertools.compress(self.images, is_kept))


def _saliency_uris(
    images: Sequence[FolderImage], saliency: Path | None, where: str
) -> tuple[list[str | None], list[str]]:
    """Returns the saliency map of each image, and notes: that of its table, or that of the folder.

    A map of the folder is named after the image's id without the name of the source: `<folder>/<file>.png`, or
    `<folder>/<stem>.png` if no other image has the same stem.
    """
    maps = map_paths(saliency, "saliency map")
    names = [unicodedata.normalize("NFC", (relative_name(image.id) or "").partition("/")[2]) for image in images]
    stems = [os.path.splitext(name)[0] for name in names]
    count = collections.Counter(stems)
    uris: list[str | None] = []
    for image, name, stem in zip(images, names, stems, strict=True):
        map_of_stem = maps.get(stem) if count[stem] == 1 else None
        uris.append(image.saliency or maps.get(name) or map_of_stem)
    ambiguous = sum(uri is None and count[stem] > 1 for uri, stem in zip(uris, stems, strict=True))

    notes = []
    if saliency and ambiguous:
        notes.append(f"{where}: {ambiguous} share a stem with another image, so their saliency maps are not used")
    if saliency and None in uris:
        notes.append(f"{where}: no saliency map for {uris.count(None)} of {len(uris)}")
    return uris, notes


def _first_lines(names: Mapping[int, str]) -> dict[str, int]:
    """Returns name -> number of the first line that has it."""
    line_of: dict[str, int] = {}
    for number, name in names.items():
        line_of.setdefault(name, number)
    return line_of


def _line_of_image(image: FolderImage, line_of: Mapping[str, int]) -> int | None:
    """Returns the number of the line that names an image, with or without suffix; None if there is none."""
    name = unicodedata.normalize("NFC", image.name)
    return line_of.get(name) or line_of.get(os.path.splitext(name)[0])


def _provenance(images: Sequence[FolderImage]) -> pa.Table | None:
    """Returns the addresses and licenses of the images that have one (PROVENANCE_SCHEMA); None if there are none."""
    rows = [
        {"image_id": image.id, "url": image.url, "license": image.license}
        for image in images
        if image.url or image.license
    ]
    return pa.Table.from_pylist(rows, PROVENANCE_SCHEMA) if rows else None


def read_class_file(path: Path, names: tuple[str, ...], key: str) -> dict[str, str]:
    """Reads lines `<folder> <class name>`; returns folder -> class name, both in the Unicode form NFC.

    Args:
        key: Setting that names the file; used in messages.
    """
    expected = "lines '<folder> <class name>'"
    remedy = f"name another file by {key}, or leave it empty to use the names of the folders"
    class_of: dict[str, str] = {}

    for number, written in read_lines(path, expected, remedy):
        line = unicodedata.normalize("NFC", written)
        folder, *rest = [part.strip() for part in line.split("\t" if "\t" in line else None, 1)]
        if not rest:
            raise UserError(f"{path}, line {number}: no class name for {folder}", expected, "name its class")
        if folder in class_of:
            raise UserError(f"{path}, line {number}: {folder} is listed twice", "each folder once", "delete one line")
        class_of[folder] = rest[0]

    unknown = sorted(set(class_of.values()) - set(names))
    if unknown:
        remedy = f"{did_you_mean(unknown, names)}correct {path.name}, or remove those folders from it"
        raise UserError(
            f"{path} names unknown classes: {join_shortened(unknown)}", f"some of {', '.join(names)}", remedy
        )
    return class_of

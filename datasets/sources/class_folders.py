"""Lists single-label images and web images, the sources `single` and `web`, by the names of their folders or by tables.

The folders of `single` are those of ImageNet CLS-LOC, `<wnid>/*.JPEG`, those of Caltech-256, `<nnn.name>/*.jpg`, or
folders named after the classes. The folders of `web`, which hold results of a search engine, are named after the
classes; or the files are, `<number of a VOC class>_<name>`, as those of Shen et al. (CVPR 2018). Both sources may have
several such folders and tables, a list of images, and a maximum number of images per class.
"""

import collections
import hashlib
import itertools
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import BeforeValidator, Field

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.index import PROVENANCE_SCHEMA, Listing
from mcis.datasets.section import LocalPath, Section, absolute_location, absolute_path
from mcis.datasets.sources.class_names import ClassNames, voc_folders
from mcis.datasets.sources.lists import (
    LeftOut,
    did_you_mean,
    left_out_notes,
    listing_table,
    map_paths,
    read_lines,
    relative_name,
    scan,
    source_folder,
)
from mcis.datasets.sources.source import Source
from mcis.datasets.sources.tag_table import read_tag_table
from mcis.datasets.sources.user_table import is_table

_SUBFOLDERS = ("Data/CLS-LOC/train", "CLS-LOC/train", "train", "256_ObjectCategories", ".")
"""Folders below the root that may hold the class folders of single-label images, tried in this order."""
_RUNNING_NUMBER = re.compile(r"\s+\d+$")
"""What follows the names in ImageNet's lists of images, such as train_cls.txt."""
_NUMBERED_FILE = re.compile(r"(\d{1,2})_.+")
"""Names of files that start with the number of a VOC class, from 1."""


def _absolute_locations(value: Any) -> str | tuple[str, ...] | None:
    """Makes one or several paths absolute. One path stays a text, as experiments of earlier versions have it."""
    if value is None:
        return None
    paths = value if isinstance(value, list | tuple) else [value]
    if not paths or not all(isinstance(path, str | Path) for path in paths):
        raise ValueError("Input should be a path or a list of paths")
    locations = tuple(_absolute_location(str(path)) for path in paths)
    return locations[0] if len(locations) == 1 else locations


def _absolute_location(path: str) -> str:
    return absolute_location(path) if is_table(path) else str(absolute_path(Path(path)))


Locations = Annotated[str | tuple[str, ...] | None, BeforeValidator(_absolute_locations)]


class _ClassFoldersConfig(Section):
    """Fields of both sources. Fields that are not set are left out of stage keys, which earlier versions made."""

    root: Locations = None
    """Folder of class folders, or a table of images and tags; or a list of folders and tables."""
    list: LocalPath | None = Field(default=None, exclude_if=lambda path: path is None)
    """File with one image per line, <folder>/<image>, with or without suffix. Other images are left out, and listed
    images that are absent from their folder are an error. None: all images."""
    max_per_class: int | None = Field(default=None, gt=0, exclude_if=lambda number: number is None)
    """Maximum number of images of a class. If there are more, those are used whose names have the smallest SHA-256, so
    the choice depends neither on a seed nor on the order of files. None: unlimited."""
    follow_links: bool = Field(default=False, exclude_if=lambda follows: not follows)
    """Use files and folders that links name outside of the folders. By default these are left out, with a note."""


class SingleConfig(_ClassFoldersConfig):
    """Single-label images (source `single`): ImageNet CLS-LOC, Caltech-256, plain class folders, or a table."""

    root: Locations = None
    """Folder of ImageNet's <wnid>/*.JPEG, Caltech-256's <nnn.name>/*.jpg or <class>/<image>, or a folder above it; or a
    table with the columns image and tags; or a list of these."""
    classes: LocalPath | None = None
    """File of lines `<folder> <class name>`, such as `n02084071 dog`. None: the project's table of ImageNet and
    Caltech-256 folders, and folders named after the classes."""
    saliency: LocalPath | None = None
    """Folder of saliency maps with the relative paths of the images, as `mcis saliency single` makes them. Images
    without a map are allowed."""


class WebConfig(_ClassFoldersConfig):
    """Crawled images (source `web`)."""

    root: Locations = None
    """Folder of <class>/<file>, also in subfolders; or of <number of a VOC class>_<file>; or a table with the columns
    image and tags and, optionally, url, license and saliency; or a list of these."""
    classes: LocalPath | None = Field(default=None, exclude_if=lambda path: path is None)
    """File of lines `<folder> <class name>`. If the folder has spaces, a tab separates them. None: folders named after
    the classes, or by another spelling or a synonym, such as `potted plant` and `tv`."""
    saliency: LocalPath | None = None
    """Folder of saliency maps <class>/<stem>.png, as `mcis saliency web` makes them. Images without a map are
    allowed."""


class _Kind(NamedTuple):
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


_SINGLE = _Kind("single-label images", "single", "source", has_subfolders=False)
_WEB = _Kind("web images", "web", "web", has_subfolders=True)


class _Choice(NamedTuple):
    """Which images are used. The fields are those of `_ClassFoldersConfig`."""

    list: Path | None
    max_per_class: int | None
    follow_links: bool


class _Image(NamedTuple):
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


class _Listed:
    """The images and notes of several locations, and the folders that hold the images.

    Args:
        kind: Kind of the images.
        classes: Names of the classes.
        choice: Which images are used.
    """

    def __init__(self, kind: _Kind, classes: ClassNames, choice: _Choice):
        self.kind = kind
        self.classes = classes
        self.choice = choice
        self.images: list[_Image] = []
        self.notes: list[str] = []
        self.bases: list[str] = []

    def add(self, base: Path | str, images: Sequence[_Image]) -> None:
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
            images.append(_Image(row.name, row.uri, row.tags, saliency=row.saliency, url=row.url, license=row.license))
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
                images.append(_Image(name, f"{base}/{name}", (index,)))
        if not images:
            return False

        where = f"{self.kind.name} in {base}"
        self.notes += self._left_out_notes(where, left_out)
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

    def add_numbered(self, base: Path) -> bool:
        """Adds all files `<number of a VOC class>_<name>`. Returns whether there are any; else nothing is changed."""
        content = scan(base, base, follow_links=self.choice.follow_links)
        images = []
        for name in content.files:
            index = self._class_of_numbered(name)
            if index is not None:
                images.append(_Image(name, f"{base}/{name}", (index,)))
        if not images:
            return False

        where = f"{self.kind.name} in {base}"
        left_out = content.left_out
        left_out["file(s) or folder(s) that are not named after a class"] += (
            len(content.files) + len(content.folders) - len(images)
        )
        self.notes.append(f"{where}: files are named by the number of their VOC class, such as {images[0].name}")
        self.notes += self._left_out_notes(where, left_out)
        self.add(base, images)
        return True

    def _class_of_numbered(self, name: str) -> int | None:
        match = _NUMBERED_FILE.fullmatch(name)
        number = int(match[1]) if match else 0
        return self.classes.find(VOC_CLASSES[number - 1]) if 1 <= number <= len(VOC_CLASSES) else None

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

    def _left_out_notes(self, where: str, left_out: LeftOut) -> list[str]:
        """Returns notes on what was left out of a location."""
        notes = []
        for note in left_out_notes(where, left_out):
            leads_out = "link(s) that lead out of" in note
            remedy = f"; to use them, set data.{self.kind.source}.follow_links=true" if leads_out else ""
            notes.append(f"{note}{remedy}")
        return notes

    def listing(self, saliency: Path | None) -> Listing:
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

        Raises:
            UserError: See `read_lines`; or the list names an image that is absent from the folder of a class.
        """
        expected = "lines '<folder>/<image>', such as n02084071/n02084071_10.JPEG"
        remedy = "name another file, or leave the setting empty to use all images"
        line_of: dict[str, int] = {}
        texts: dict[int, str] = {}
        for number, written in read_lines(path, expected, remedy):
            text = unicodedata.normalize("NFC", written).removeprefix("./")
            texts[number] = text
            line_of.setdefault(text, number)
            line_of.setdefault(_RUNNING_NUMBER.sub("", text), number)

        found: set[int | None] = set()
        kept = []
        for image in self.images:
            name = unicodedata.normalize("NFC", image.name)
            line = line_of.get(name) or line_of.get(os.path.splitext(name)[0])
            found.add(line)
            if line is not None:
                kept.append(image)

        missing = [text for number, text in texts.items() if number not in found and line_of[text] == number]
        absent = [text for text in missing if self.classes.find(text.partition("/")[0]) is not None]
        of_other_folders = [text for text in missing if text not in absent]
        if absent:
            raise UserError(
                f"{path} names {len(absent)} image(s) that are not in the folders of {where}: {join_shortened(absent)}",
                expected,
                "add the images or remove them from the list",
            )
        if of_other_folders:
            count = len(of_other_folders)
            self.notes.append(
                f"{path} names {count} image(s) in folders that match no class: {join_shortened(of_other_folders)}"
            )
        self.notes.append(f"{where}: {len(kept)} of {len(self.images)} images are in {path}, the others are left out")
        self.images = kept

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


def list_single_label(
    root: Path | str | Sequence[Path | str],
    names: tuple[str, ...],
    *,
    classes: Path | None = None,
    saliency: Path | None = None,
    list: Path | None = None,
    max_per_class: int | None = None,
    follow_links: bool = False,
    allow_absolute: bool = False,
) -> Listing:
    """Lists single-label images from the names in their class folders, or from tables.

    No image is opened and suffixes are not checked: files that are no images are rejected when the images are checked.
    The arguments are the fields of `SingleConfig`.

    Args:
        names: K class names. Folders of other classes are left out, with a note.
        allow_absolute: Whether tables are trusted, see `read_user_table`.

    Returns:
        Rows `single/<folder>/<file>` of split train and domain source. If an earlier location has an image of the same
        path, the id is `single/<number of the location>/<folder>/<file>`.

    Raises:
        UserError: A folder or file is missing or unreadable, no folder belongs to a class, a class is unknown, or a
            listed image is absent; see also `read_tag_table`.
    """
    if classes:
        class_names = ClassNames(names, _read_class_file(classes, names, "data.single.classes"), spellings=False)
    else:
        class_names = ClassNames(names, voc_folders() | {name: name for name in names}, spellings=True)

    listed = _Listed(_SINGLE, class_names, _Choice(list, max_per_class, follow_links))
    for location in _locations(root):
        if is_table(str(location)):
            listed.add_table(str(location), trusted=allow_absolute)
        else:
            _add_single_label(listed, Path(location))

    if classes:
        listed.notes += _absent_folder_notes(listed, classes)
    return listed.listing(saliency)


def _add_single_label(listed: _Listed, location: Path) -> None:
    """Adds the images of a root of single-label images."""
    root = source_folder(location, "a folder of single-label images", "name it by --single")
    bases = [(root / below).resolve() for below in _SUBFOLDERS if (root / below).is_dir()]
    for base in bases:
        if listed.add_folder(base):  # `train` may also be the folder of a class of that name
            break
    else:
        names = listed.classes.names
        raise UserError(
            f"no folder with images in {root} matches one of the {len(names)} classes; there are "
            f"{join_shortened(scan(root, root).folders) or 'none'}",
            "folders like n02084071 (ImageNet), here or in train, CLS-LOC/train or Data/CLS-LOC/train; like 056.dog "
            "(Caltech-256), here or in 256_ObjectCategories; or named after the classes "
            f"({join_shortened(names)}), with images",
            "name by --single the folder that holds them, or by data.single.classes a file of their classes",
        )

    for other in bases:
        folders = [] if base.is_relative_to(other) else scan(other, other).folders
        if any(listed.classes.is_exact(folder) for folder in folders):
            listed.notes.append(
                f"single-label images in {root}: used {base}, and left out the class folders in {other}; add --single "
                f"{other} to use both"
            )


def list_web(
    root: Path | str | Sequence[Path | str],
    names: tuple[str, ...],
    *,
    classes: Path | None = None,
    saliency: Path | None = None,
    list: Path | None = None,
    max_per_class: int | None = None,
    follow_links: bool = False,
    allow_absolute: bool = False,
) -> Listing:
    """Lists crawled images from the names in their class folders, by the numbers in their file names, or from tables.

    No image is opened. Suffixes are not checked, because search engines return many files with wrong names. The
    arguments are the fields of `WebConfig`.

    Args:
        names: K class names. Other folders are left out, with a note.
        allow_absolute: Whether tables are trusted, see `read_user_table`.

    Returns:
        Rows `web/<class>/<file>` of split train and domain web; see `list_single_label`.

    Raises:
        UserError: A folder is missing or unreadable, no folder that is named as a class holds an image, or a listed
            image is absent; see also `read_tag_table`.
    """
    if classes:
        class_names = ClassNames(names, _read_class_file(classes, names, "data.web.classes"), spellings=False)
    else:
        class_names = ClassNames(names, {name: name for name in names}, spellings=True)

    remedy = "name by --web the folder that holds the classes"
    listed = _Listed(_WEB, class_names, _Choice(list, max_per_class, follow_links))
    for location in _locations(root):
        if is_table(str(location)):
            listed.add_table(str(location), trusted=allow_absolute)
            continue
        base = source_folder(Path(location), "a folder of crawled images, <class>/<file>", remedy)
        if not (listed.add_folder(base) or listed.add_numbered(base)):
            folders = join_shortened(scan(base, base).folders) or "none"
            raise UserError(
                f"no folder in {base} that is named as a class holds an image; there are {folders}",
                f"folders named {', '.join(names)}",
                f"{remedy}, or rename its folders, or name by data.web.classes a file of their classes",
            )

    if classes:
        listed.notes += _absent_folder_notes(listed, classes)
    return listed.listing(saliency)


def _locations(root: Path | str | Sequence[Path | str]) -> Sequence[Path | str]:
    return [root] if isinstance(root, Path | str) else root


def _absent_folder_notes(listed: _Listed, class_file: Path) -> list[str]:
    """Returns a note on folders of a class file that do not exist."""
    present: set[str] = set()
    folders = [Path(base) for base in listed.bases if not is_table(base)]
    for base in folders:
        content = scan(base, base, follow_links=listed.choice.follow_links)
        present.update(unicodedata.normalize("NFC", folder) for folder in content.folders)
    absent = sorted(set(listed.classes.class_of) - present)
    if not folders or not absent:
        return []
    where = " and ".join(map(str, folders))
    return [f"{class_file} names {len(absent)} folder(s) that are not in {where}: {join_shortened(absent)}"]


def _saliency_uris(images: Sequence[_Image], saliency: Path | None, where: str) -> tuple[list[str | None], list[str]]:
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


def _provenance(images: Sequence[_Image]) -> pa.Table | None:
    """Returns the addresses and licenses of the images that have one (PROVENANCE_SCHEMA); None if there are none."""
    rows = [
        {"image_id": image.id, "url": image.url, "license": image.license}
        for image in images
        if image.url or image.license
    ]
    return pa.Table.from_pylist(rows, PROVENANCE_SCHEMA) if rows else None


def _read_class_file(path: Path, names: tuple[str, ...], key: str) -> dict[str, str]:
    """Reads lines `<folder> <class name>`; returns folder -> class name.

    Args:
        key: Setting that names the file; used in messages.
    """
    expected = "lines '<folder> <class name>'"
    remedy = f"name another file by {key}, or leave it empty to use the names of the folders"
    class_of: dict[str, str] = {}

    for number, line in read_lines(path, expected, remedy):
        folder, *rest = line.split("\t" if "\t" in line else None, 1)
        if not rest:
            raise UserError(f"{path}, line {number}: no class name for {folder}", expected, "name its class")
        if folder in class_of:
            raise UserError(f"{path}, line {number}: {folder} is listed twice", "each folder once", "delete one line")
        class_of[folder.strip()] = rest[0].strip()

    unknown = sorted(set(class_of.values()) - set(names))
    if unknown:
        remedy = f"{did_you_mean(unknown, names)}correct {path.name}, or remove those folders from it"
        found = f"{path} names unknown classes: {join_shortened(unknown)}"
        raise UserError(found, f"some of {', '.join(names)}", remedy)
    return class_of


SINGLE = Source(
    lister=list_single_label,
    location="root",
    several=True,
    help="Folder of single-label images: ImageNet CLS-LOC (by synset), Caltech-256, or `<class>/<image>`; or a table "
    "of images and tags. Repeatable.",
    example="single ILSVRC/Data/CLS-LOC/train",
    record=SingleConfig,
    data_keys={"allow_absolute": "tags.allow_absolute"},
    domain="source",
)
WEB = Source(
    lister=list_web,
    location="root",
    several=True,
    help="Folder of crawled images, `<class>/<file>`, whose tags are the folders; or a table of images and tags. "
    "Repeatable.",
    example="web bing",
    record=WebConfig,
    data_keys={"allow_absolute": "tags.allow_absolute"},
    domain="web",
)

"""Lists images with one tag each from class folders, `<folder>/<image>`: the sources `single` and `web`.

The folders of `single` are those of ImageNet CLS-LOC, `<wnid>/*.JPEG`, those of Caltech-256, `<nnn.name>/*.jpg`, or
folders named after the classes. The folders of `web`, which hold results of a search engine, are named after the
classes. Both sources may have several such folders, a list of images, and a maximum number of images per class.
"""

import collections
import hashlib
import itertools
import os
import re
import tomllib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.section import LocalPath, Section, absolute_path
from mcis.datasets.sources.lists import (
    LeftOut,
    did_you_mean,
    left_out_notes,
    listing_table,
    map_paths,
    read_lines,
    scan,
    source_folder,
)
from mcis.datasets.sources.source import Source

_SUBFOLDERS = ("Data/CLS-LOC/train", "CLS-LOC/train", "train", "256_ObjectCategories", ".")
"""Folders below the root that may hold the class folders of single-label images, tried in this order."""
_RUNNING_NUMBER = re.compile(r"\s+\d+$")
"""What follows the names in ImageNet's lists of images, such as train_cls.txt."""


def _absolute_locations(value: Any) -> str | tuple[str, ...] | None:
    """Makes one or several paths absolute. One path stays a text, as experiments of earlier versions have it."""
    if value is None:
        return None
    paths = value if isinstance(value, list | tuple) else [value]
    if not paths or not all(isinstance(path, str | Path) for path in paths):
        raise ValueError("Input should be a path or a list of paths")
    locations = tuple(str(absolute_path(Path(path))) for path in paths)
    return locations[0] if len(locations) == 1 else locations


Locations = Annotated[str | tuple[str, ...] | None, BeforeValidator(_absolute_locations)]


class _ClassFoldersConfig(Section):
    """Fields of both sources. Fields that are not set are left out of stage keys, which earlier versions made."""

    root: Locations = None
    """Folder of class folders, or a list of such folders."""
    list: LocalPath | None = Field(default=None, exclude_if=lambda path: path is None)
    """File with one image per line, <folder>/<image>, with or without suffix. Other images are left out, and listed
    images that are in none of the folders are an error. None: all images."""
    max_per_class: int | None = Field(default=None, gt=0, exclude_if=lambda number: number is None)
    """Maximum number of images of a class. If there are more, those are used whose names have the smallest SHA-256, so
    the choice depends neither on a seed nor on the order of files. None: unlimited."""
    follow_links: bool = Field(default=False, exclude_if=lambda follows: not follows)
    """Use files and folders that links name outside of the folders. By default these are left out, with a note."""


class SingleConfig(_ClassFoldersConfig):
    """Single-label images (source `single`): ImageNet CLS-LOC, Caltech-256 or plain class folders."""

    root: Locations = None
    """Folder of ImageNet's <wnid>/*.JPEG, Caltech-256's <nnn.name>/*.jpg or <class>/<image>, or a folder above it; or a
    list of such folders."""
    classes: LocalPath | None = None
    """File of lines `<folder> <class name>`, such as `n02084071 dog`. None: the project's table of ImageNet and
    Caltech-256 folders, and folders named after the classes."""
    saliency: LocalPath | None = None
    """Folder of saliency maps with the relative paths of the images. Images without a map are allowed."""


class WebConfig(_ClassFoldersConfig):
    """Crawled images (source `web`)."""

    root: Locations = None
    """Folder of <class>/<file>, or a list of such folders."""
    saliency: LocalPath | None = None
    """Folder of saliency maps <class>/<stem>.png. Images without a map are allowed."""


class _Kind(NamedTuple):
    """A kind of images.

    Attributes:
        name: What the images are; used in notes.
        source: Name of the source, with which the ids of its images start.
        domain: Domain of the images.
    """

    name: str
    source: str
    domain: Literal["source", "web"]


_SINGLE = _Kind("single-label images", "single", "source")
_WEB = _Kind("web images", "web", "web")


class _Choice(NamedTuple):
    """Which images of the class folders are used. The fields are those of `_ClassFoldersConfig`."""

    list: Path | None
    max_per_class: int | None
    follow_links: bool


@dataclass
class _Images:
    """Images of class folders, one entry per image in each list.

    Attributes:
        names: Path relative to the folder of class folders.
        ids: Unique id, `<source>/<name>`.
        uris: Absolute path.
        classes: Class index.
        notes: Notes for the user.
    """

    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    uris: list[str] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def keep(self, is_kept: Sequence[bool]) -> None:
        """Removes all other images."""
        self.names = list(itertools.compress(self.names, is_kept))
        self.ids = list(itertools.compress(self.ids, is_kept))
        self.uris = list(itertools.compress(self.uris, is_kept))
        self.classes = list(itertools.compress(self.classes, is_kept))


def list_single_label(
    root: Path | str | Sequence[Path | str],
    names: tuple[str, ...],
    *,
    classes: Path | None = None,
    saliency: Path | None = None,
    list: Path | None = None,
    max_per_class: int | None = None,
    follow_links: bool = False,
) -> Listing:
    """Lists single-label images from the names in their class folders.

    No image is opened and suffixes are not checked: files that are no images are rejected when the images are checked.
    The arguments are the fields of `SingleConfig`.

    Args:
        names: K class names. Folders of other classes are left out, with a note.

    Returns:
        Rows `single/<folder>/<file>` of split train and domain source. If an earlier folder has an image of the same
        path, the id is `single/<number of the folder>/<folder>/<file>`.

    Raises:
        UserError: A folder or file is missing or unreadable, no folder belongs to a class, a class is unknown, or a
            listed image is absent.
    """
    if classes:
        class_names = _read_class_file(classes, names)
    else:
        class_names = voc_folders() | {name: name for name in names}
    class_of = {folder: names.index(name) for folder, name in class_names.items() if name in names}

    choice = _Choice(list, max_per_class, follow_links)
    images = _Images()
    bases = []
    for number, location in enumerate(_locations(root), 1):
        base = _add_single_label(images, Path(location), number, class_of, names, choice)
        bases.append(base)

    if classes:
        present = set().union(*(scan(base, base, follow_links=follow_links).folders for base in bases))
        absent = sorted(set(class_of) - present)
        if absent:
            where = _shown_paths(bases)
            images.notes.append(f"{classes} names {len(absent)} folder(s) that are not in {where}: {shown(absent)}")
    return _listing(images, bases, names, class_of, _SINGLE, choice, saliency)


def _add_single_label(
    images: _Images, location: Path, number: int, class_of: Mapping[str, int], names: tuple[str, ...], choice: _Choice
) -> Path:
    """Adds the images of a root of single-label images. Returns the folder that holds its class folders."""
    root = source_folder(location, "a folder of single-label images", "name it by --single")
    bases = [(root / below).resolve() for below in _SUBFOLDERS if (root / below).is_dir()]
    for base in bases:
        if _add(images, base, number, class_of, _SINGLE, choice):  # `train` may also be the folder of a class
            break
    else:
        raise UserError(
            f"no folder with images in {root} matches one of the {len(names)} classes; there are "
            f"{shown(scan(root, root).folders) or 'none'}",
            "folders like n02084071 (ImageNet), here or in train, CLS-LOC/train or Data/CLS-LOC/train; like 056.dog "
            f"(Caltech-256), here or in 256_ObjectCategories; or named after the classes ({shown(names)}), with images",
            "name by --single the folder that holds them, or by data.single.classes a file of their classes",
        )

    for other in bases:
        folders = [] if base.is_relative_to(other) else scan(other, other).folders
        if other != base and not class_of.keys().isdisjoint(folders):
            images.notes.append(
                f"single-label images in {root}: used {base}, and left out the class folders in {other}; add --single "
                f"{other} to use both"
            )
    return base


def list_web(
    root: Path | str | Sequence[Path | str],
    names: tuple[str, ...],
    *,
    saliency: Path | None = None,
    list: Path | None = None,
    max_per_class: int | None = None,
    follow_links: bool = False,
) -> Listing:
    """Lists crawled images from the names in their class folders.

    No image is opened. Suffixes are not checked, because search engines return many files with wrong names. The
    arguments are the fields of `WebConfig`. An image whose stem occurs twice in its folder gets no saliency map.

    Args:
        names: K class names. Other folders are left out, with a note.

    Returns:
        Rows `web/<class>/<file>` of split train and domain web; see `list_single_label`.

    Raises:
        UserError: A folder is missing or unreadable, no folder that is named as a class holds an image, or a listed
            image is absent.
    """
    remedy = "name by --web the folder that holds the classes"
    class_of = {name: k for k, name in enumerate(names)}

    choice = _Choice(list, max_per_class, follow_links)
    images = _Images()
    bases = []
    for number, location in enumerate(_locations(root), 1):
        base = source_folder(Path(location), "a folder of crawled images, <class>/<file>", remedy)
        if not _add(images, base, number, class_of, _WEB, choice):
            folders = shown(scan(base, base).folders) or "none"
            raise UserError(
                f"no folder in {base} that is named as a class holds an image; there are {folders}",
                f"folders named {', '.join(names)}",
                f"{remedy}, or rename its folders",
            )
        bases.append(base)
    return _listing(images, bases, names, class_of, _WEB, choice, saliency)


def _locations(root: Path | str | Sequence[Path | str]) -> Sequence[Path | str]:
    return [root] if isinstance(root, Path | str) else root


def _shown_paths(paths: Sequence[Path]) -> str:
    return " and ".join(map(str, paths))


def _add(images: _Images, base: Path, number: int, class_of: Mapping[str, int], kind: _Kind, choice: _Choice) -> int:
    """Adds all files of class folders that are not hidden. Returns their number; without any, nothing is changed.

    Args:
        base: Folder of class folders, an absolute path without links.
        number: Number of the folder, from 1.
        class_of: Name of a class folder -> class index.
    """
    content = scan(base, base, follow_links=choice.follow_links)
    class_of_name = {unicodedata.normalize("NFC", folder): k for folder, k in class_of.items()}
    class_of_folder: dict[str, int] = {}  # of the folders that exist, by the Unicode form that they have
    for folder in content.folders:
        name = unicodedata.normalize("NFC", folder)
        if name in class_of_name:
            class_of_folder[folder] = class_of_name[name]

    names: list[str] = []
    classes: list[int] = []
    for folder, class_index in class_of_folder.items():
        class_content = scan(base / folder, base, follow_links=choice.follow_links)
        files = [name for name in class_content.files if not name.startswith(".")]
        names += [f"{folder}/{name}" for name in files]
        classes += [class_index] * len(files)

        others = len(class_content.files) + len(class_content.folders) - len(files)
        content.left_out.update(class_content.left_out)
        content.left_out["file(s) or folder(s) that are not images"] += others
    if not names:
        return 0

    other_folders = [folder for folder in content.folders if folder not in class_of_folder]
    images.notes += _folder_notes(f"{kind.name} in {base}", kind, content.left_out, other_folders)

    taken = set(images.names)
    for name in names:
        prefix = f"{kind.source}/{number}" if name in taken else kind.source
        images.ids.append(f"{prefix}/{name}")
    images.names += names
    images.uris += [f"{base}/{name}" for name in names]
    images.classes += classes
    return len(names)


def _folder_notes(where: str, kind: _Kind, left_out: LeftOut, other_folders: Sequence[str]) -> list[str]:
    """Returns notes on what was left out of a folder of class folders."""
    notes = []
    for note in left_out_notes(where, left_out):
        leads_out = "link(s) that lead out of" in note
        remedy = f"; to use them, set data.{kind.source}.follow_links=true" if leads_out else ""
        notes.append(f"{note}{remedy}")
    if other_folders:
        count = len(other_folders)
        notes.append(f"{where}: left out {count} folder(s) that match no class: {shown(other_folders)}")
    return notes


def _listing(
    images: _Images,
    bases: Sequence[Path],
    names: tuple[str, ...],
    class_of: Mapping[str, int],
    kind: _Kind,
    choice: _Choice,
    saliency: Path | None,
) -> Listing:
    """Chooses images and makes the listing of a source.

    Args:
        bases: Folders of class folders.
        class_of: Name of a class folder -> class index.
    """
    where = f"{kind.name} in {_shown_paths(bases)}"
    if choice.list:
        _keep_listed(images, choice.list, class_of, where)
    if choice.max_per_class:
        _limit_classes(images, choice.max_per_class, names, where)

    present = set(images.classes)
    absent = [name for k, name in enumerate(names) if k not in present]
    if absent:
        images.notes.append(f"{where}: no image of class {shown(absent, len(absent))}")

    saliency_uris, saliency_notes = _saliency_uris(images.names, saliency, where)
    rows = listing_table(
        image_id=images.ids,
        uri=images.uris,
        domain=kind.domain,
        split="train",
        tags=[[k] for k in images.classes],
        saliency_uri=saliency_uris,
    )
    return Listing(rows, names, tuple(images.notes + saliency_notes))


def _keep_listed(images: _Images, path: Path, class_of: Mapping[str, int], where: str) -> None:
    """Removes images that a list does not name.

    Raises:
        UserError: See `read_lines`; or the list names an image that is absent from the folder of a class.
    """
    expected = "lines '<folder>/<image>', such as n02084071/n02084071_10.JPEG"
    line_of: dict[str, int] = {}
    texts: dict[int, str] = {}
    remedy = "name another file, or leave the setting empty to use all images"
    for number, written in read_lines(path, expected, remedy):
        text = unicodedata.normalize("NFC", written).removeprefix("./")
        texts[number] = text
        line_of.setdefault(text, number)
        line_of.setdefault(_RUNNING_NUMBER.sub("", text), number)

    found: set[int | None] = set()
    is_listed = []
    for name in images.names:
        name = unicodedata.normalize("NFC", name)
        line = line_of.get(name) or line_of.get(os.path.splitext(name)[0])
        is_listed.append(line is not None)
        found.add(line)

    missing = [text for number, text in texts.items() if number not in found and line_of[text] == number]
    of_other_folders = [text for text in missing if text.partition("/")[0] not in class_of]
    absent = [text for text in missing if text.partition("/")[0] in class_of]
    if absent:
        raise UserError(
            f"{path} names {len(absent)} image(s) that are not in the folders of {where}: {shown(absent)}",
            expected,
            "add the images or remove them from the list",
        )
    if of_other_folders:
        count = len(of_other_folders)
        images.notes.append(f"{path} names {count} image(s) in folders that match no class: {shown(of_other_folders)}")
    images.notes.append(f"{where}: {sum(is_listed)} of {len(is_listed)} images are in {path}, the others are left out")
    images.keep(is_listed)


def _limit_classes(images: _Images, max_per_class: int, names: tuple[str, ...], where: str) -> None:
    """Removes images of classes with more than `max_per_class` images; those with the smallest hashes stay."""
    hashes = [hashlib.sha256(image.encode()).digest() for image in images.ids]
    counts: collections.Counter[int] = collections.Counter()
    is_kept = [False] * len(hashes)
    for position in sorted(range(len(hashes)), key=hashes.__getitem__):
        class_index = images.classes[position]
        is_kept[position] = counts[class_index] < max_per_class
        counts[class_index] += 1

    limited = [f"{names[k]} ({counts[k]})" for k in sorted(counts) if counts[k] > max_per_class]
    if limited:
        images.notes.append(
            f"{where}: {is_kept.count(False)} image(s) are left out, because the number per class is limited to "
            f"{max_per_class}: {shown(limited, len(limited))}"
        )
    images.keep(is_kept)


def _saliency_uris(images: list[str], saliency: Path | None, where: str) -> tuple[list[str | None], list[str]]:
    """Returns the saliency map `<folder>/<stem>.png` of each image, and notes.

    An image whose stem occurs twice gets None.
    """
    maps = map_paths(saliency, "saliency map")
    stems = [unicodedata.normalize("NFC", os.path.splitext(image)[0]) for image in images]
    count = collections.Counter(stems)
    uris = [maps.get(stem) if count[stem] == 1 else None for stem in stems]

    notes = []
    ambiguous = sum(count[stem] > 1 for stem in stems)
    if saliency and ambiguous:
        notes.append(f"{where}: {ambiguous} share a stem with another image, so their saliency maps are not used")
    if saliency and None in uris:
        notes.append(f"{where}: no saliency map for {uris.count(None)} of {len(uris)}")
    return uris, notes


def voc_folders() -> dict[str, str]:
    """Returns the folders of ImageNet and Caltech-256 with images of a VOC class -> name of the class."""
    text = Path(__file__).with_name("voc_folders.toml").read_text(encoding="utf-8")
    class_of: dict[str, str] = {}
    for table in tomllib.loads(text).values():
        for name, entries in table.items():
            class_of |= {entry.split()[0]: name for entry in entries}
    return class_of


def _read_class_file(path: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Reads lines `<folder> <class name>`; returns folder -> class name."""
    expected = "lines '<folder> <class name>'"
    remedy = "name another file by data.single.classes, or leave it empty to use the names of the folders"
    class_of: dict[str, str] = {}

    for number, line in read_lines(path, expected, remedy):
        folder, *rest = line.split(None, 1)
        if not rest:
            raise UserError(f"{path}, line {number}: no class name for {folder}", expected, "name its class")
        if folder in class_of:
            raise UserError(f"{path}, line {number}: {folder} is listed twice", "each folder once", "delete one line")
        class_of[folder] = rest[0]

    unknown = sorted(set(class_of.values()) - set(names))
    if unknown:
        remedy = f"{did_you_mean(unknown, names)}correct {path.name}, or remove those folders from it"
        raise UserError(f"{path} names unknown classes: {shown(unknown)}", f"some of {', '.join(names)}", remedy)
    return class_of


SINGLE = Source(
    lister=list_single_label,
    location="root",
    several=True,
    help="Folder of single-label images: ImageNet CLS-LOC (by synset), Caltech-256, or `<class>/<image>`. Repeatable.",
    example="single ILSVRC/Data/CLS-LOC/train",
    record=SingleConfig,
    domain="source",
)
WEB = Source(
    lister=list_web,
    location="root",
    several=True,
    help="Folder of crawled images, `<class>/<file>`; the folder is the tag. Repeatable.",
    example="web bing",
    record=WebConfig,
    domain="web",
)

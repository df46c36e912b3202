"""Lists images with one tag each from class folders, `<folder>/<image>`: the sources `single` and `web`.

The folders of `single` are those of ImageNet CLS-LOC, `<wnid>/*.JPEG`, those of Caltech-256, `<nnn.name>/*.jpg`, or
folders named after the classes. The folders of `web`, which hold results of a search engine, are named after the
classes.
"""

import collections
import os
import tomllib
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.section import LocalPath, Section
from mcis.datasets.sources.lists import (
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


class SingleConfig(Section):
    """Single-label images (source `single`): ImageNet CLS-LOC, Caltech-256 or plain class folders."""

    root: LocalPath | None = None
    """Folder of ImageNet's <wnid>/*.JPEG, Caltech-256's <nnn.name>/*.jpg or <class>/<image>, or a folder above it."""
    classes: LocalPath | None = None
    """File of lines `<folder> <class name>`, such as `n02084071 dog`. None: the project's table of ImageNet and
    Caltech-256 folders, and folders named after the classes."""
    saliency: LocalPath | None = None
    """Folder of saliency maps with the relative paths of the images. Images without a map are allowed."""


class WebConfig(Section):
    """Crawled images (source `web`)."""

    root: LocalPath | None = None
    """Folder of <class>/<file>."""
    saliency: LocalPath | None = None
    """Folder of saliency maps <class>/<stem>.png. Images without a map are allowed."""


def list_single_label(
    root: Path, names: tuple[str, ...], *, classes: Path | None = None, saliency: Path | None = None
) -> Listing:
    """Lists single-label images from the names in their class folders.

    No image is opened and suffixes are not checked: files that are no images are rejected when the images are checked.

    Args:
        root: See `SingleConfig`.
        names: K class names. Folders of other classes are left out, with a note.
        classes: See `SingleConfig`.
        saliency: See `SingleConfig`.

    Returns:
        Rows `single/<folder>/<file>` of split train and domain source.

    Raises:
        UserError: A folder or file is missing or unreadable, no folder belongs to a class, or a class is unknown.
    """
    root = source_folder(root, "a folder of single-label images", "name it by --single")
    if classes:
        class_names = _read_class_file(classes, names)
    else:
        class_names = voc_folders() | {name: name for name in names}
    class_of = {folder: names.index(name) for folder, name in class_names.items() if name in names}

    bases = [(root / below).resolve() for below in _SUBFOLDERS if (root / below).is_dir()]
    for base in bases:
        listing = _list(base, class_of, names, kind="single-label images", domain="source", saliency=saliency)
        if len(listing.table):  # `train` may also be the folder of a class of that name
            break
    else:
        raise UserError(
            f"no folder with images in {root} matches one of the {len(names)} classes; there are "
            f"{shown(scan(root, root).folders) or 'none'}",
            "folders like n02084071 (ImageNet), here or in train, CLS-LOC/train or Data/CLS-LOC/train; like 056.dog "
            f"(Caltech-256), here or in 256_ObjectCategories; or named after the classes ({shown(names)}), with images",
            "name by --single the folder that holds them, or by data.single.classes a file of their classes",
        )

    if classes:
        absent = sorted(set(class_of) - set(scan(base, base).folders))
        if absent:
            note = f"{classes} names {len(absent)} folder(s) that are not in {base}: {shown(absent)}"
            return listing._replace(notes=(*listing.notes, note))
    return listing


def list_web(root: Path, names: tuple[str, ...], *, saliency: Path | None = None) -> Listing:
    """Lists crawled images from the names in their class folders.

    No image is opened. Suffixes are not checked, because search engines return many files with wrong names.

    Args:
        root: See `WebConfig`.
        names: K class names. Other folders are left out, with a note.
        saliency: See `WebConfig`. An image whose stem occurs twice in its folder gets no map.

    Returns:
        Rows `web/<class>/<file>` of split train and domain web.

    Raises:
        UserError: A folder is missing or unreadable, or no folder that is named as a class holds an image.
    """
    remedy = "name by --web the folder that holds the classes"
    root = source_folder(root, "a folder of crawled images, <class>/<file>", remedy)
    class_of = {name: k for k, name in enumerate(names)}
    listing = _list(root, class_of, names, kind="web images", domain="web", saliency=saliency)

    if not len(listing.table):
        folders = shown(scan(root, root).folders) or "none"
        raise UserError(
            f"no folder in {root} that is named as a class holds an image; there are {folders}",
            f"folders named {', '.join(names)}",
            f"{remedy}, or rename its folders",
        )
    return listing


def _list(
    base: Path,
    class_of: Mapping[str, int],
    names: tuple[str, ...],
    *,
    kind: str,
    domain: Literal["source", "web"],
    saliency: Path | None,
) -> Listing:
    """Lists all files of class folders that are not hidden, in split train.

    Args:
        class_of: Name of a class folder -> class index.
        kind: What the images are; used in notes.
    """
    where = f"{kind} in {base}"
    content = scan(base, base)
    images: list[str] = []
    classes: list[int] = []

    class_of_name = {unicodedata.normalize("NFC", folder): k for folder, k in class_of.items()}
    class_of_folder: dict[str, int] = {}  # of the folders that exist, by the Unicode form that they have
    for folder in content.folders:
        name = unicodedata.normalize("NFC", folder)
        if name in class_of_name:
            class_of_folder[folder] = class_of_name[name]

    for folder, class_index in class_of_folder.items():
        class_content = scan(base / folder, base)
        files = [name for name in class_content.files if not name.startswith(".")]
        images += [f"{folder}/{name}" for name in files]
        classes += [class_index] * len(files)

        others = len(class_content.files) + len(class_content.folders) - len(files)
        content.left_out.update(class_content.left_out)
        content.left_out["file(s) or folder(s) that are not images"] += others

    notes = left_out_notes(where, content.left_out)
    other_folders = [folder for folder in content.folders if folder not in class_of_folder]
    if other_folders:
        count = len(other_folders)
        notes.append(f"{where}: left out {count} folder(s) that match no class: {shown(other_folders)}")

    present = set(classes)
    absent = [name for k, name in enumerate(names) if k not in present]
    if absent:
        notes.append(f"{where}: no image of class {shown(absent, len(absent))}")

    saliency_uris, saliency_notes = _saliency_uris(images, saliency, where)
    prefix = "single" if domain == "source" else domain
    rows = listing_table(
        image_id=[f"{prefix}/{image}" for image in images],
        uri=[f"{base}/{image}" for image in images],
        domain=domain,
        split="train",
        tags=[[k] for k in classes],
        saliency_uri=saliency_uris,
    )
    return Listing(rows, names, tuple(notes + saliency_notes))


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
    help="Folder of single-label images: ImageNet CLS-LOC (by synset), Caltech-256, or `<class>/<image>`.",
    example="single ILSVRC/Data/CLS-LOC/train",
    record=SingleConfig,
    domain="source",
)
WEB = Source(
    lister=list_web,
    location="root",
    help="Folder of crawled images, `<class>/<file>`; the folder is the tag.",
    example="web bing",
    record=WebConfig,
    domain="web",
)

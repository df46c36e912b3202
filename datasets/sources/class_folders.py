"""Class folders, `<folder>/<image>` -> listing of images with one tag each: the sources `single` and `web`.

Class folders of `single` are those of ImageNet CLS-LOC, `<wnid>/*.JPEG`, those of Caltech-256, `<nnn.name>/*.jpg`, and
folders that are named as the classes; those of `web`, which hold what a search engine returned, are named as these.
"""

import collections
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.section import LocalPath, Section
from mcis.datasets.sources.lists import (
    did_you_mean,
    left_out,
    listing_table,
    map_paths,
    read_lines,
    scan,
    source_folder,
)
from mcis.datasets.sources.source import Source

_BELOW = ("Data/CLS-LOC/train", "CLS-LOC/train", "train", "256_ObjectCategories", ".")
"""Folders below the root that may hold the class folders of single-label images, tried in this order."""


class SingleConfig(Section):
    """Single-label images (source `single`): ImageNet CLS-LOC, Caltech-256 or plain class folders."""

    root: LocalPath | None = None
    """Folder of ImageNet's <wnid>/*.JPEG or Caltech-256's <nnn.name>/*.jpg, or one above it; or of <class>/<image>."""
    classes: LocalPath | None = None
    """File of lines `<wnid or folder> <class name>`; None = the table of the project, and the folders' names."""
    saliency: LocalPath | None = None
    """Folder of saliency maps with the images' relative paths; an image may be without."""


class WebConfig(Section):
    """Crawled images (source `web`)."""

    root: LocalPath | None = None
    """Folder of <class>/<file>."""
    saliency: LocalPath | None = None
    """Folder of saliency maps <class>/<stem>.png; an image may be without."""


def list_single_label(
    root: Path, names: tuple[str, ...], *, classes: Path | None = None, saliency: Path | None = None
) -> Listing:
    """Reads the names in the class folders; no image is opened, and no suffix is trusted: what is no image is rejected
    with a reason when the images are verified.

    Args:
        names: K class names; folders that stand for none of them are left out and noted.
        root, classes, saliency: as of `SingleConfig`.

    Returns:
        Rows `single/<folder>/<file>` of split train and domain source.

    Raises:
        UserError: a folder or file is missing or unreadable, no folder stands for a class, or a class is unknown.
    """
    root = source_folder(root, "a folder of single-label images", "name it by `root`")
    table = _read_class_file(classes, names) if classes else {**voc_folders(), **{name: name for name in names}}
    class_of = {folder: names.index(name) for folder, name in table.items() if name in names}
    for base in [(root / below).resolve() for below in _BELOW if (root / below).is_dir()]:
        found = _list(base, class_of, names, what="single-label images", domain="source", saliency=saliency)
        if len(found.table):  # a class may be called `train`, as a folder of `_BELOW`
            break
    else:
        raise UserError(
            f"no folder with images in {root} stands for one of the {len(names)} classes; there are "
            f"{shown(scan(root, root).folders) or 'none'}",
            "folders like n02084071 (ImageNet), here or in train, CLS-LOC/train or Data/CLS-LOC/train; like 056.dog "
            f"(Caltech-256), here or in 256_ObjectCategories; or named as the classes ({shown(names)}), with images",
            "name by `root` the folder that holds them, or say by `classes` which folder is which class",
        )
    if classes and (absent := sorted(set(class_of) - set(scan(base, base).folders))):
        note = f"{classes} names {len(absent)} folder(s) that are not in {base}: {shown(absent)}"
        return found._replace(notes=(*found.notes, note))
    return found


def list_web(root: Path, names: tuple[str, ...], *, saliency: Path | None = None) -> Listing:
    """As `list_single_label`, of folders that are named as the classes: search engines return much under false names.

    Args:
        names: K class names; other folders are left out and noted.
        root, saliency: as of `WebConfig`. An image whose stem another of its folder has is without a saliency map.

    Returns:
        Rows `web/<class>/<file>` of split train and domain web.

    Raises:
        UserError: a folder is missing or unreadable, or no folder that is named as a class holds an image.
    """
    remedy = "name by `root` the folder that holds the classes"
    root = source_folder(root, "a folder of crawled images, <class>/<file>", remedy)
    class_of = {name: k for k, name in enumerate(names)}
    found = _list(root, class_of, names, what="web images", domain="web", saliency=saliency)
    if not len(found.table):
        there = shown(scan(root, root).folders) or "none"
        raise UserError(
            f"no folder in {root} that is named as a class holds an image; there are {there}",
            f"folders named {', '.join(names)}",
            f"{remedy}, or rename those in it",
        )
    return found


def _list(
    base: Path,
    class_of: Mapping[str, int],
    names: tuple[str, ...],
    *,
    what: str,
    domain: Literal["source", "web"],
    saliency: Path | None,
) -> Listing:
    """The images of a folder's class folders, all in split train; every file that is not hidden is taken for one.

    An image whose stem another has is without a saliency map `<folder>/<stem>.png`.
    """
    what, top, images, classes = f"{what} in {base}", scan(base, base), list[str](), list[int]()
    for folder in top.folders:
        if folder in class_of:
            content = scan(base / folder, base)
            files = [name for name in content.files if name[0] != "."]
            images += [f"{folder}/{name}" for name in files]
            classes += [class_of[folder]] * len(files)
            top.left.update(content.left)
            top.left["file(s) or folder(s) that are no image"] += len(content.files) + len(content.folders) - len(files)
    notes = left_out(what, top.left)
    if others := [folder for folder in top.folders if folder not in class_of]:
        notes.append(f"{what}: left out {len(others)} folder(s) that stand for no class: {shown(others)}")
    present = set(classes)
    if absent := [name for k, name in enumerate(names) if k not in present]:
        notes.append(f"{what}: none of class {shown(absent, len(absent))}")
    maps, stems = map_paths(saliency, "saliency map"), [os.path.splitext(image)[0] for image in images]
    count = collections.Counter(stems)
    uris = [maps.get(stem) if count[stem] == 1 else None for stem in stems]
    if saliency and (shared := sum(count[stem] > 1 for stem in stems)):
        notes.append(f"{what}: {shared} share a stem with another, so that no saliency map can be told to be theirs")
    if saliency and None in uris:
        notes.append(f"{what}: no saliency map for {uris.count(None)} of {len(uris)}")
    rows = listing_table(
        image_id=[f"{'single' if domain == 'source' else domain}/{image}" for image in images],
        uri=[f"{base}/{image}" for image in images],
        domain=domain,
        split="train",
        tags=[[k] for k in classes],
        saliency_uri=uris,
    )
    return Listing(rows, names, tuple(notes))


def voc_folders() -> dict[str, str]:
    """Folder of ImageNet or Caltech-256 -> VOC class."""
    tables = tomllib.loads(Path(__file__).with_name("voc_folders.toml").read_text(encoding="utf-8")).values()
    return {text.split()[0]: name for table in tables for name, folders in table.items() for text in folders}


def _read_class_file(path: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Folder -> class name."""
    expected, table = "lines '<folder> <class name>'", dict[str, str]()
    remedy = "name another by `classes`, or leave it off to go by the folders' names"
    for number, line in read_lines(path, expected, remedy):
        folder, name = (*line.split(None, 1), "")[:2]
        if not name:
            raise UserError(f"{path}, line {number}: no class name for {folder}", expected, "name its class")
        if folder in table:
            raise UserError(f"{path}, line {number}: {folder} a second time", "each folder once", "delete one")
        table[folder] = name
    if unknown := sorted(set(table.values()) - set(names)):
        remedy = f"{did_you_mean(unknown, names)}correct {path.name}, or leave those folders off"
        raise UserError(f"{path} names unknown classes: {shown(unknown)}", f"some of {', '.join(names)}", remedy)
    return table


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

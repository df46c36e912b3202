"""Folders of single-label images -> listing, domain `source`: one tag each, by the image's class folder.

Class folders are those of ImageNet CLS-LOC, `<wnid>/*.JPEG`, those of Caltech-256, `<nnn.name>/*.jpg`, and folders that
are named as the classes.
"""

import collections
import os
from pathlib import Path

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.section import LocalPath, Section
from mcis.datasets.sources.class_folders import ClassFolders, list_class_folders, read_class_folders
from mcis.datasets.sources.lists import check_present, inside, nearest, read_lines, scan, source_folder
from mcis.datasets.sources.source import Source
from mcis.datasets.sources.synsets import CALTECH, IMAGENET

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""Of images, in any case; files with other suffixes are left out and counted."""
_BELOW = ("Data/CLS-LOC/train", "CLS-LOC/train", "train", "256_ObjectCategories", ".")
"""Folders below the root that may hold the class folders, tried in this order."""


class SingleConfig(Section):
    """Single-label images (source `single`): ImageNet CLS-LOC, Caltech-256 or plain class folders."""

    root: LocalPath | None = None
    """Folder of ImageNet's <wnid>/*.JPEG or Caltech-256's <nnn.name>/*.jpg, or one above it; or of <class>/<image>."""
    classes: LocalPath | None = None
    """File of lines `<wnid or folder> <class name>`; None = the table of the project, and the folders' names."""
    subset: LocalPath | None = None
    """File with one relative path per line: the images that are used; None = all."""
    saliency: LocalPath | None = None
    """Folder of saliency maps with the images' relative paths; an image may be without."""


def list_single_label(
    root: Path,
    names: tuple[str, ...],
    *,
    classes: Path | None = None,
    subset: Path | None = None,
    saliency: Path | None = None,
) -> Listing:
    """Reads the names in the class folders; no image is opened.

    Args:
        names: K class names; folders that stand for none of them are left out and noted.
        root, classes, subset, saliency: as of `SingleConfig`. A subset gives the order, and its paths are relative to
            the folder that holds the class folders.

    Returns:
        Rows `single/<folder>/<stem>` of split train.

    Raises:
        UserError: a folder or file is missing or unreadable, no folder stands for a class, a class is unknown, a listed
            image is absent, has no class or leads out of the root, two images have the same stem, or none is left.
    """
    root = source_folder(root, "a folder of single-label images", "name it by `root`")
    table = _read_class_file(classes, names) if classes else {**IMAGENET, **CALTECH, **{name: name for name in names}}
    folders = _read_folders(root, {folder: names.index(name) for folder, name in table.items() if name in names}, names)
    if subset:
        images = _listed(subset, folders)
        folders.notes.append(f"{folders.what}: {len(images)} of {len(folders.images)} are on the list {subset}")
        folders = folders._replace(images=images)
    if classes and (absent := sorted(set(folders.class_of) - set(folders.names))):
        folders.notes.append(f"{classes} names {len(absent)} folder(s) that are not in {folders.base}: {shown(absent)}")
    counts = collections.Counter(os.path.splitext(image)[0] for image in folders.images)
    if twice := [stem for stem, count in counts.items() if count > 1]:
        raise UserError(
            f"{len(twice)} images in {folders.base} are there twice, by different suffixes: {shown(twice)}",
            "one image per name, which is its name in the index and that of its saliency map",
            "remove or rename one of each",
        )
    return list_class_folders(
        folders, names, lambda image: f"single/{os.path.splitext(image)[0]}", domain="source", saliency=saliency
    )


def _read_folders(root: Path, class_of: dict[str, int], names: tuple[str, ...]) -> ClassFolders:
    """Finds the folder that holds the class folders, here or below, and reads these."""
    for below in _BELOW:
        base = (root / below).resolve()
        if base.is_dir():
            found = read_class_folders(base, class_of, "single-label images", SUFFIXES)
            # A class may be called `train`, as the folder that holds ImageNet's class folders is.
            if found.images:
                return found
    raise UserError(
        f"no folder with images in {root} stands for one of the {len(names)} classes; there are "
        f"{shown(scan(root, root).folders) or 'none'}",
        "folders like n02084071 (ImageNet), here or in train, CLS-LOC/train or Data/CLS-LOC/train; like 056.dog "
        f"(Caltech-256), here or in 256_ObjectCategories; or named as the classes ({shown(names)}), with images",
        "name by `root` the folder that holds them, or say by `classes` which folder is which class",
    )


def _read_class_file(path: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Folder -> class name.

    Raises:
        UserError: the file cannot be read, names a folder twice, a folder without a class, or an unknown class.
    """
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
        remedy = f"{nearest(unknown, names)}correct {path.name}, or leave those folders off"
        raise UserError(f"{path} names unknown classes: {shown(unknown)}", f"some of {', '.join(names)}", remedy)
    return table


def _listed(path: Path, folders: ClassFolders) -> list[str]:
    """The images of a list, in its order."""
    base = folders.base
    expected = f"lines '<folder>/<file>', relative to {base}"
    existing = set(folders.images)
    images: dict[str, None] = {}
    absent, without_class = [], []
    for number, line in read_lines(path, expected, "name a list of images by `subset`, or none to take all"):
        image = inside(line)
        if image is None:
            raise UserError(f"{path}, line {number}: {line} lies outside of {base}", expected, "take it off the list")
        if image.partition("/")[0] not in folders.class_of:
            without_class.append(line)
        elif image not in existing:
            absent.append(line)
        elif image in images:
            raise UserError(f"{path}, line {number}: {line} a second time", "each image once", "delete one line")
        images[image] = None
    check_present(path, absent, base, "an image that lies there for each line (links that lead elsewhere do not count)")
    if without_class:
        raise UserError(
            f"{path} names {len(without_class)} image(s) of folders that stand for no class: {shown(without_class)}",
            "images of folders with a class",
            "take them off the list, or say by `classes` which folder is which class",
        )
    return list(images)


SINGLE = Source(
    lister=list_single_label,
    location="root",
    about="a folder of single-label images",
    help="Folder of single-label images: ImageNet CLS-LOC (by synset), Caltech-256, or `<class>/<image>`.",
    example="single ILSVRC/Data/CLS-LOC/train",
    record=SingleConfig,
    options={"classes": "data.single.classes", "list": "data.single.subset"},
    domain="source",
)

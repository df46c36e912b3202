"""ImageNet CLS-LOC or Caltech-256 -> listing of single-label images, domain `source`: one tag each, by its folder."""

import collections
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.sources.lists import Maps, inside, left_out, listing_table, nearest, read_lines, scan, source_folder
from mcis.datasets.sources.synsets import CALTECH, IMAGENET


class Layout(NamedTuple):
    """How a data set lays out its class folders.

    Attributes:
        places: where they may lie below the root, tried in this order.
        pattern: of their names.
        classes: folder -> VOC class.
    """

    places: tuple[str, ...]
    pattern: str
    classes: Mapping[str, str]


LAYOUTS = {
    "imagenet": Layout(("Data/CLS-LOC/train", "CLS-LOC/train", "train", "."), r"n\d{8}", IMAGENET),
    "caltech": Layout(("256_ObjectCategories", "."), r"\d{3}\..+", CALTECH),
}
SUFFIXES = (".jpeg", ".jpg")
"""Of images, in any case: both data sets hold JPEGs alone; Caltech-256 has stray scripts beside them."""


def list_single_label(
    root: Path,
    classes: tuple[str, ...],
    *,
    layout: str | None = None,
    class_file: Path | None = None,
    list_file: Path | None = None,
    saliency: Path | None = None,
) -> Listing:
    """Reads the names in the class folders; no image is opened.

    Args:
        root: ImageNet's folder with `<wnid>/*.JPEG`, or one above it (train, CLS-LOC, Data/CLS-LOC); Caltech-256's
            with `<nnn.name>/*.jpg`, or the one above it.
        classes: K class names; folders that stand for none of them are left out and noted.
        layout: a name of LAYOUTS; None = by the names of the folders.
        class_file: folder -> class name, in place of the table of `synsets`: a JSON object, or lines `<folder> <name>`.
        list_file: takes only these images, in this order: lines `<folder>/<file>`, relative to the class folders.
        saliency: folder of saliency maps `<folder>/<stem>.png`; an image may be without.

    Returns:
        Rows `single/<folder>/<stem>` of split train.

    Raises:
        UserError: a folder or file is missing or unreadable, the layout is none or unclear, a class is unknown, a
            listed image is absent, has no class or leads out of the root, an image is there twice, none is left.
    """
    base, chosen = _place(source_folder(root, "the folder of ImageNet CLS-LOC or Caltech-256", "name it"), layout)
    table = _read_class_file(class_file, classes) if class_file else chosen.classes
    known = {folder: classes.index(name) for folder, name in table.items() if name in classes}
    top = scan(base, base)
    left = top.left.copy()
    names: dict[str, list[str]] = {}
    for folder in top.folders:
        if folder in known:
            found = scan(base / folder, base)
            left += found.left
            names[folder] = [name for name in found.files if name.lower().endswith(SUFFIXES)]
            left["file(s) or folder(s) that are no JPEG"] += len(found.files) + len(found.folders) - len(names[folder])
    what = f"single-label images in {base}"
    notes = left_out(what, left)
    if list_file:
        images = _listed(list_file, base, known, names)
        notes.append(f"{what}: {len(images)} of {sum(map(len, names.values()))} are on the list {list_file}")
    else:
        images = [(folder, name) for folder in names for name in names[folder]]
        others = [folder for folder in top.folders if folder not in known]
        if others:
            notes.append(f"{what}: left out {len(others)} folder(s) that stand for no class: {shown(others)}")
    if class_file and (absent := [folder for folder in known if folder not in names]):
        notes.append(f"{class_file} names {len(absent)} folder(s) that are not in {base}: {shown(absent)}")
    if not images:
        raise UserError(
            "\n".join([f"no single-label image of any of the {len(classes)} classes in {base}", *notes]),
            "JPEGs in at least one folder that stands for a class",
            "name another folder, or say by a class file which folder is which class",
        )
    tags = [known[folder] for folder, _ in images]
    without = [name for k, name in enumerate(classes) if k not in set(tags)]
    if without:
        notes.append(f"{what}: none of class {shown(without, len(without))}")
    stems = [f"{folder}/{name.rpartition('.')[0]}" for folder, name in images]
    twice = [stem for stem, count in collections.Counter(stems).items() if count > 1]
    if twice:
        raise UserError(
            f"{len(twice)} images in {base} are there twice, by different suffixes: {shown(twice)}",
            "one JPEG a name",
            "remove or rename one of each",
        )
    maps = Maps(saliency, "saliency map")
    salient = [maps.of(stem) for stem in stems]
    rows = listing_table(
        image_id=[f"single/{stem}" for stem in stems],
        uri=[f"{base}/{folder}/{name}" for folder, name in images],
        domain="source",
        split="train",
        tags=[[tag] for tag in tags],
        saliency_uri=salient,
    )
    return Listing(rows, classes, (*notes, *maps.notes(salient, "single-label images")))


def _place(root: Path, layout: str | None) -> tuple[Path, Layout]:
    """The folder that holds the class folders, and their layout."""
    if layout is not None and layout not in LAYOUTS:
        raise UserError(
            f"unknown layout {layout!r}", f"one of {', '.join(LAYOUTS)}", "choose one, or none to detect it"
        )
    found: list[tuple[str, Path]] = []
    for name in [layout] if layout else LAYOUTS:
        for place in LAYOUTS[name].places:
            base = (root / place).resolve()
            if base.is_dir() and any(re.fullmatch(LAYOUTS[name].pattern, f) for f in scan(base, base).folders):
                found.append((name, base))
                break
    if not found:
        raise UserError(
            f"no class folders in {root}",
            "folders like n02084071 (ImageNet), here or in train, CLS-LOC/train or Data/CLS-LOC/train, or like "
            "056.dog (Caltech-256), here or in 256_ObjectCategories",
            "name the folder that holds them",
        )
    if len(found) > 1:
        places = " and ".join(f"{name} in {base}" for name, base in found)
        raise UserError(f"the folders of two data sets: {places}", "those of one", "choose a layout or a folder below")
    name, base = found[0]
    return base, LAYOUTS[name]


def _read_class_file(path: Path, classes: tuple[str, ...]) -> dict[str, str]:
    expected = "a JSON object {folder: class name}, or lines '<folder> <class name>'"
    lines = read_lines(path, expected, "mend it, or leave it off to use the table that comes with the program")
    pairs: list[tuple[int, str, object]] = []
    if lines[0][1].startswith("{"):
        text = "\n".join(line for _, line in lines)
        try:
            found = json.loads(text, object_pairs_hook=list)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is no JSON: {error}", expected, "mend it") from None
        pairs = [(0, folder, name) for folder, name in found]
    else:
        for number, line in lines:
            folder, name = (*line.split(None, 1), "")[:2]
            pairs.append((number, folder, name))
    table: dict[str, str] = {}
    for number, folder, value in pairs:
        where = f"{path}, line {number}" if number else f"{path}"
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{where}: no class name for {folder}", expected, "name its class, or leave it off")
        if folder in table:
            raise UserError(f"{where}: {folder} a second time", "each folder once", "delete one")
        table[folder] = value.strip()
    unknown = sorted({name for name in table.values() if name not in classes})
    if unknown:
        remedy = f"{nearest(unknown, classes)}mend {path.name}, or leave those folders off"
        raise UserError(f"{path} names unknown classes: {shown(unknown)}", f"some of {', '.join(classes)}", remedy)
    return table


def _listed(path: Path, base: Path, known: Mapping[str, int], names: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """The images of a list, as folder and file name."""
    expected = f"lines '<folder>/<file>', relative to {base}"
    images: dict[tuple[str, str], None] = {}
    absent, foreign = [], []
    present = {folder: set(files) for folder, files in names.items()}
    for number, line in read_lines(path, expected, "name a list of images, or none to take all"):
        entry = inside(line)
        if entry is None:
            raise UserError(f"{path}, line {number}: {line} lies outside of {base}", expected, "take it off the list")
        folder, _, name = entry.partition("/")
        if folder not in known:
            foreign.append(line)
        elif name not in present.get(folder, ()):
            absent.append(line)
        elif (folder, name) in images:
            raise UserError(f"{path}, line {number}: {line} a second time", "each image once", "delete one line")
        images[folder, name] = None
    if absent:
        raise UserError(
            f"{path} names {len(absent)} image(s) that are not in {base}: {shown(absent)}",
            "a JPEG that lies there for each line (links that lead elsewhere do not count)",
            "add the images or take them off the list",
        )
    if foreign:
        raise UserError(
            f"{path} names {len(foreign)} image(s) of folders that stand for no class: {shown(foreign)}",
            "images of folders with a class",
            "take them off the list, or say by a class file which class they are",
        )
    return list(images)

"""Class folders, `<folder>/<image>` -> listing of images with one tag each: what sources `single` and `web` share."""

import collections
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from mcis.datasets.index import Listing, shown
from mcis.datasets.sources.lists import Maps, left_out, listing_table, scan


class ClassFolders(NamedTuple):
    """The names in the class folders.

    Attributes:
        base: the folder that holds the class folders, absolute and without links.
        what: the images, for messages.
        class_of: folder -> class index, of every folder that stands for a class, whether it exists or not.
        names: of all folders in `base`, ascending.
        images: those in class folders, `<folder>/<name>`.
        notes: what was left out.
    """

    base: Path
    what: str
    class_of: Mapping[str, int]
    names: list[str]
    images: list[str]
    notes: list[str]


def read_class_folders(
    base: Path, class_of: Mapping[str, int], what: str, suffixes: tuple[str, ...] = ()
) -> ClassFolders:
    """Reads the names in the folders that stand for a class; no image is opened.

    Args:
        suffixes: of images, in any case; none: every file that is not hidden is taken for one.

    Raises:
        UserError: a folder cannot be read.
    """
    what, top, images = f"{what} in {base}", scan(base, base), list[str]()
    left = top.left
    no_image = "file(s) or folder(s) that are no image" + (f" ({', '.join(suffixes)})" if suffixes else "")
    for folder in top.folders:
        if folder in class_of:
            content = scan(base / folder, base)
            files = [name for name in content.files if name[0] != "." and name.lower().endswith(suffixes or ("",))]
            images += [f"{folder}/{name}" for name in files]
            left += content.left
            left[no_image] += len(content.files) + len(content.folders) - len(files)
    notes = left_out(what, left)
    if others := [folder for folder in top.folders if folder not in class_of]:
        notes.append(f"{what}: left out {len(others)} folder(s) that stand for no class: {shown(others)}")
    return ClassFolders(base, what, class_of, top.folders, images, notes)


def list_class_folders(
    found: ClassFolders,
    names: tuple[str, ...],
    name_of: Callable[[str], str],
    *,
    domain: Literal["source", "web"],
    saliency: Path | None,
) -> Listing:
    """The listing of class folders, all in split train. An image whose stem another has is without a saliency map.

    Args:
        names: K class names.
        name_of: an image's path -> its name in the index.
        saliency: folder of saliency maps `<folder>/<stem>.png`; None = there are none.

    Raises:
        UserError: the folder of saliency maps is missing.
    """
    images, notes = found.images, list(found.notes)
    classes = [found.class_of[image.partition("/")[0]] for image in images]
    stems = [os.path.splitext(image)[0] for image in images]
    present = set(classes)
    if absent := [name for k, name in enumerate(names) if k not in present]:
        notes.append(f"{found.what}: none of class {shown(absent, len(absent))}")
    maps, count = Maps(saliency, "saliency map"), collections.Counter(stems)
    shared = sum(count[stem] > 1 for stem in stems)
    if saliency and shared:
        notes.append(
            f"{found.what}: {shared} share a stem with another, so that no saliency map can be told to be theirs"
        )
    uris = [maps.of(stem) if count[stem] == 1 else None for stem in stems]
    if saliency and None in uris:
        notes.append(f"{found.what}: no saliency map for {uris.count(None)} of {len(uris)}")
    rows = listing_table(
        image_id=[name_of(image) for image in images],
        uri=[f"{found.base}/{image}" for image in images],
        domain=domain,
        split="train",
        tags=[[k] for k in classes],
        saliency_uri=uris,
    )
    return Listing(rows, names, tuple(notes))

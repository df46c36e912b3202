"""Crawled folders -> listing of web images, domain `web`: one tag each, the class that was searched for."""

import collections
from pathlib import Path

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.sources.lists import Maps, left_out, listing_table, scan, source_folder


def list_web(root: Path, classes: tuple[str, ...], *, saliency: Path | None = None) -> Listing:
    """Reads the names in the class folders; no image is opened, and no suffix is trusted.

    What a search engine returned under a false name, cut off or empty, is listed here and rejected with a reason when
    the images are verified.

    Args:
        root: folder with `<class>/<file>`.
        classes: K class names; other folders are left out and noted.
        saliency: folder of saliency maps `<class>/<stem>.png`; an image may be without, and is where another image of
            its folder has the same stem, because the map could be of either.

    Returns:
        Rows `web/<class>/<file>` of split train.

    Raises:
        UserError: a folder is missing or unreadable, no folder is named as a class, or they are all empty.
    """
    root = source_folder(root, "a folder of crawled images, <class>/<file>", "name the folder that holds the classes")
    top = scan(root, root)
    folders = [folder for folder in top.folders if folder in classes]
    if not folders:
        raise UserError(
            f"no folder in {root} is named as a class; there are {shown(top.folders) or 'none'}",
            f"folders named {', '.join(classes)}",
            "name the folder that holds the classes, or rename those in it",
        )
    left = top.left.copy()
    left["file(s) beside the class folders"] += len(top.files)
    images: list[tuple[str, str]] = []
    for folder in folders:
        found = scan(root / folder, root)
        files = [name for name in found.files if not name.startswith(".")]
        left += found.left
        left["hidden file(s)"] += len(found.files) - len(files)
        left["folder(s) inside of class folders"] += len(found.folders)
        images += [(folder, name) for name in files]
    what = f"web images in {root}"
    notes = left_out(what, left)
    others = [folder for folder in top.folders if folder not in classes]
    if others:
        notes.append(f"{what}: left out {len(others)} folder(s) that are no class: {shown(others)}")
    if not images:
        raise UserError(f"the class folders of {root} hold no image", "at least one", "name another folder")
    filled = {folder for folder, _ in images}
    without = [name for name in classes if name not in filled]
    if without:
        notes.append(f"{what}: none of class {shown(without, len(without))}")
    stems = [f"{folder}/{name.rpartition('.')[0] or name}" for folder, name in images]
    count = collections.Counter(stems)
    maps = Maps(saliency, "saliency map")
    shared = sum(count[stem] > 1 for stem in stems)
    if saliency and shared:
        notes.append(f"{what}: {shared} share a stem with another, so that no saliency map can be told to be theirs")
    salient = [maps.of(stem) if count[stem] == 1 else None for stem in stems]
    rows = listing_table(
        image_id=[f"web/{folder}/{name}" for folder, name in images],
        uri=[f"{root}/{folder}/{name}" for folder, name in images],
        domain="web",
        split="train",
        tags=[[classes.index(folder)] for folder, _ in images],
        saliency_uri=salient,
    )
    return Listing(rows, classes, (*notes, *maps.notes(salient, "web images")))

"""Crawled folders -> listing of web images, domain `web`: one tag each, the class that was searched for."""

import collections
from pathlib import Path

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.section import LocalPath, Section
from mcis.datasets.sources.lists import FolderImage, Maps, left_out, listing_table, scan, source_folder, without_images
from mcis.datasets.sources.source import Source


class WebConfig(Section):
    """Crawled images (source `web`)."""

    root: LocalPath | None = None
    """Folder of <class>/<file>."""
    saliency: LocalPath | None = None
    """Folder of saliency maps <class>/<stem>.png; an image may be without."""


def list_web(root: Path, names: tuple[str, ...], *, saliency: Path | None = None) -> Listing:
    """Reads the names in the class folders; no image is opened, and no suffix is trusted.

    What a search engine returned under a false name, cut off or empty, is listed here and rejected with a reason when
    the images are verified.

    Args:
        names: K class names; other folders are left out and noted.
        root, saliency: as of `WebConfig`. An image whose stem another of its folder has is without a saliency map.

    Returns:
        Rows `web/<class>/<file>` of split train.

    Raises:
        UserError: a folder is missing or unreadable, no folder is named as a class, or they are all empty.
    """
    root = source_folder(
        root, "a folder of crawled images, <class>/<file>", "name by `root` the folder that holds the classes"
    )
    what = f"web images in {root}"
    images, notes = _read_folders(root, names, what)
    if not images:
        raise UserError(f"the class folders of {root} hold no image", "at least one", "name another folder by `root`")
    notes += without_images(what, names, {names.index(image.folder) for image in images})
    maps = Maps(saliency, "saliency map")
    count = collections.Counter(image.stem for image in images)
    shared = sum(count[image.stem] > 1 for image in images)
    if saliency and shared:
        notes.append(f"{what}: {shared} share a stem with another, so that no saliency map can be told to be theirs")
    saliency_uris = [maps.of(image.stem) if count[image.stem] == 1 else None for image in images]
    rows = listing_table(
        image_id=[f"web/{image.folder}/{image.name}" for image in images],
        uri=[f"{root}/{image.folder}/{image.name}" for image in images],
        domain="web",
        split="train",
        tags=[[names.index(image.folder)] for image in images],
        saliency_uri=saliency_uris,
    )
    return Listing(rows, names, (*notes, *maps.notes(saliency_uris, "web images")))


def _read_folders(root: Path, names: tuple[str, ...], what: str) -> tuple[list[FolderImage], list[str]]:
    """The images of the folders that are named as a class, and notes of what was left out."""
    top = scan(root, root)
    folders = [folder for folder in top.folders if folder in names]
    if not folders:
        raise UserError(
            f"no folder in {root} is named as a class; there are {shown(top.folders) or 'none'}",
            f"folders named {', '.join(names)}",
            "name by `root` the folder that holds the classes, or rename those in it",
        )
    left = top.left.copy()
    left["file(s) beside the class folders"] += len(top.files)
    images: list[FolderImage] = []
    for folder in folders:
        content = scan(root / folder, root)
        files = [name for name in content.files if not name.startswith(".")]
        left += content.left
        left["hidden file(s)"] += len(content.files) - len(files)
        left["folder(s) inside of class folders"] += len(content.folders)
        images += [FolderImage(folder, name) for name in files]
    notes = left_out(what, left)
    others = [folder for folder in top.folders if folder not in names]
    if others:
        notes.append(f"{what}: left out {len(others)} folder(s) that are no class: {shown(others)}")
    return images, notes


WEB = Source(
    lister=list_web,
    location="root",
    about="a folder of crawled images, <class>/<file>",
    help="Folder of crawled images, `<class>/<file>`; the folder is the tag.",
    example="web bing",
    record=WebConfig,
    options={"classes": "data.classes"},
    domain="web",
)

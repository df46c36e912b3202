"""Crawled folders -> listing of web images, domain `web`: one tag each, the class that was searched for."""

from pathlib import Path

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.section import LocalPath, Section
from mcis.datasets.sources.class_folders import list_class_folders, read_class_folders
from mcis.datasets.sources.lists import source_folder
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
        UserError: a folder is missing or unreadable, or no folder that is named as a class holds an image.
    """
    remedy = "name by `root` the folder that holds the classes"
    root = source_folder(root, "a folder of crawled images, <class>/<file>", remedy)
    found = read_class_folders(root, {name: k for k, name in enumerate(names)}, "web images")
    if not found.images:
        raise UserError(
            f"no folder in {root} that is named as a class holds an image; there are {shown(found.names) or 'none'}",
            f"folders named {', '.join(names)}",
            f"{remedy}, or rename those in it",
        )
    return list_class_folders(found, names, lambda image: f"web/{image}", domain="web", saliency=saliency)


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

"""The source `web`: results of a search engine, in class folders or tables.

The folders are named after the classes; or the files are, `<number of a VOC class>_<name>`, as those of Shen et al.
(CVPR 2018).
"""

import re
from collections.abc import Sequence
from pathlib import Path

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.index import Listing
from mcis.datasets.section import LocalPath
from mcis.datasets.sources.class_folders import (
    ClassFoldersConfig,
    FolderImage,
    FolderListing,
    ImageChoice,
    ImageKind,
    Locations,
    read_class_file,
)
from mcis.datasets.sources.class_names import ClassNames
from mcis.datasets.sources.lists import scan, source_folder
from mcis.datasets.sources.source import Source
from mcis.datasets.sources.user_table import is_table

_NUMBERED_FILE = re.compile(r"(\d{1,2})_.+")
"""Names of files that start with the number of a VOC class, from 1."""
_KIND = ImageKind("web images", "web", "web", has_subfolders=True)


class WebConfig(ClassFoldersConfig):
    """Crawled images (source `web`)."""

    root: Locations = None
    """Folder of <class>/<file>, also in subfolders; or of <number of a VOC class>_<file>; or a table with the columns
    image and tags and, optionally, url, license and saliency; or a list of these."""
    classes: LocalPath | None = None
    """File of lines `<folder> <class name>`. If the folder has spaces, a tab separates them. None: folders named after
    the classes, or by another spelling or a synonym, such as `potted plant` and `tv`."""
    saliency: LocalPath | None = None
    """Folder of saliency maps <class>/<stem>.png, as `mcis saliency web` makes them. Images without a map are
    allowed."""


def list_web(
    root: Sequence[Path | str],
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
        class_names = ClassNames(names, read_class_file(classes, names, "data.web.classes"), spellings=False)
    else:
        class_names = ClassNames(names, {name: name for name in names}, spellings=True)

    remedy = "name by --web the folder that holds the classes"
    listing = FolderListing(_KIND, class_names, ImageChoice(list, max_per_class, follow_links))
    for location in root:
        if is_table(str(location)):
            listing.add_table(str(location), trusted=allow_absolute)
            continue
        base = source_folder(Path(location), "a folder of crawled images, <class>/<file>", remedy)
        if not (listing.add_folder(base) or _add_numbered(listing, base)):
            folders = join_shortened(scan(base, base).folders) or "none"
            raise UserError(
                f"no folder in {base} that is named as a class holds an image; there are {folders}",
                f"folders named {', '.join(names)}",
                f"{remedy}, or rename its folders, or name by data.web.classes a file of their classes",
            )

    if classes:
        listing.note_absent_folders(classes)
    return listing.to_listing(saliency)


def _add_numbered(listing: FolderListing, base: Path) -> bool:
    """Adds all files `<number of a VOC class>_<name>`. Returns whether there are any; else nothing is changed."""
    content = scan(base, base, follow_links=listing.choice.follow_links)
    images = []
    for name in content.files:
        index = _class_of_numbered(name, listing.classes)
        if index is not None:
            images.append(FolderImage(name, f"{base}/{name}", (index,)))
    if not images:
        return False

    where = f"{listing.kind.name} in {base}"
    left_out = content.left_out
    left_out["file(s) or folder(s) that are not named after a class"] += (
        len(content.files) + len(content.folders) - len(images)
    )
    listing.notes.append(f"{where}: files are named by the number of their VOC class, such as {images[0].name}")
    listing.note_left_out(where, left_out)
    listing.add(base, images)
    return True


def _class_of_numbered(name: str, classes: ClassNames) -> int | None:
    match = _NUMBERED_FILE.fullmatch(name)
    number = int(match[1]) if match else 0
    return classes.find(VOC_CLASSES[number - 1]) if 1 <= number <= len(VOC_CLASSES) else None


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

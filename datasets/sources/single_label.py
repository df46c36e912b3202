"""The source `single`: single-label images, in class folders or tables.

The folders are those of ImageNet CLS-LOC, `<wnid>/*.JPEG`, those of Caltech-256, `<nnn.name>/*.jpg`, or folders named
after the classes.
"""

from collections.abc import Sequence
from pathlib import Path

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.index import Listing
from mcis.datasets.section import LocalPath
from mcis.datasets.sources.class_folders import (
    ClassFoldersConfig,
    FolderListing,
    ImageChoice,
    ImageKind,
    Locations,
    read_class_file,
)
from mcis.datasets.sources.class_names import ClassNames, voc_folders
from mcis.datasets.sources.lists import scan, source_folder
from mcis.datasets.sources.source import Source
from mcis.datasets.sources.user_table import is_table

_SUBFOLDERS = ("Data/CLS-LOC/train", "CLS-LOC/train", "train", "256_ObjectCategories", ".")
"""Folders below the root that may hold the class folders of single-label images, tried in this order."""
_KIND = ImageKind("single-label images", "single", "source", has_subfolders=False)


class SingleConfig(ClassFoldersConfig):
    """Single-label images (source `single`): ImageNet CLS-LOC, Caltech-256, plain class folders, or a table."""

    root: Locations = None
    """Folder of ImageNet's <wnid>/*.JPEG, Caltech-256's <nnn.name>/*.jpg or <class>/<image>, or a folder above it; or a
    table with the columns image and tags; or a list of these."""
    classes: LocalPath | None = None
    """File of lines `<folder> <class name>`, such as `n02084071 dog`. None: the project's table of ImageNet and
    Caltech-256 folders, and folders named after the classes."""
    saliency: LocalPath | None = None
    """Folder of saliency maps with the relative paths of the images, as `mcis saliency single` makes them. Images
    without a map are allowed."""


def list_single_label(
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
    """Lists single-label images from the names in their class folders, or from tables.

    No image is opened and suffixes are not checked: files that are no images are rejected when the images are checked.
    The arguments are the fields of `SingleConfig`.

    Args:
        names: K class names. Folders of other classes are left out, with a note.
        allow_absolute: Whether tables are trusted, see `read_user_table`.

    Returns:
        Rows `single/<folder>/<file>` of split train and domain source. If an earlier location has an image of the same
        path, the id is `single/<number of the location>/<folder>/<file>`.

    Raises:
        UserError: A folder or file is missing or unreadable, no folder belongs to a class, a class is unknown, or a
            listed image is absent; see also `read_tag_table`.
    """
    if classes:
        class_names = ClassNames(names, read_class_file(classes, names, "data.single.classes"), spellings=False)
    else:
        class_names = ClassNames(names, voc_folders() | {name: name for name in names}, spellings=True)

    listing = FolderListing(_KIND, class_names, ImageChoice(list, max_per_class, follow_links))
    for location in root:
        if is_table(str(location)):
            listing.add_table(str(location), trusted=allow_absolute)
        else:
            _add_single_label(listing, Path(location))

    if classes:
        listing.note_absent_folders(classes)
    return listing.to_listing(saliency)


def _add_single_label(listing: FolderListing, location: Path) -> None:
    """Adds the images of a root of single-label images."""
    root = source_folder(location, "a folder of single-label images", "name it by --single")
    bases = [(root / below).resolve() for below in _SUBFOLDERS if (root / below).is_dir()]
    for base in bases:
        if listing.add_folder(base):  # `train` may also be the folder of a class of that name
            break
    else:
        names = listing.classes.names
        raise UserError(
            f"no folder with images in {root} matches one of the {len(names)} classes; there are "
            f"{join_shortened(scan(root, root).folders) or 'none'}",
            "folders like n02084071 (ImageNet), here or in train, CLS-LOC/train or Data/CLS-LOC/train; like 056.dog "
            "(Caltech-256), here or in 256_ObjectCategories; or named after the classes "
            f"({join_shortened(names)}), with images",
            "name by --single the folder that holds them, or by data.single.classes a file of their classes",
        )

    for other in bases:
        folders = [] if base.is_relative_to(other) else scan(other, other).folders
        if any(listing.classes.is_exact(folder) for folder in folders):
            listing.notes.append(
                f"single-label images in {root}: used {base}, and left out the class folders in {other}; add --single "
                f"{other} to use both"
            )


SINGLE = Source(
    lister=list_single_label,
    location="root",
    several=True,
    help="Folder of single-label images: ImageNet CLS-LOC (by synset), Caltech-256, or `<class>/<image>`; or a table "
    "of images and tags. Repeatable.",
    example="single ILSVRC/Data/CLS-LOC/train",
    record=SingleConfig,
    data_keys={"allow_absolute": "tags.allow_absolute"},
    domain="source",
)

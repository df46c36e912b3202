"""Lists the LID challenge track, a subset of ImageNet DET, from its lists of image paths with class indices."""

import collections
import itertools
import os
import unicodedata
from collections.abc import Iterable, Set
from pathlib import Path

import pyarrow as pa
from pydantic import Field

from mcis.datasets.classes import read_classes
from mcis.datasets.index import Listing
from mcis.datasets.section import LocalPath, Section
from mcis.datasets.sources.lists import (
    check_listed_once,
    check_present,
    files_below,
    listing_table,
    map_paths,
    missing_mask_notes,
    read_tag_list,
    source_folder,
)
from mcis.datasets.sources.source import Source

_SUFFIX = ".JPEG"
"""Suffix of the challenge's images, which its lists may omit."""


class LidConfig(Section):
    """The LID challenge (source `lid`), and any data set of list files."""

    root: LocalPath | None = None
    """Folder that the paths in the lists are relative to."""
    train_list: Path = Path("train.txt")
    """List of training images, lines `<path> <class index> <class index> ...`; inside root or absolute."""
    val_list: Path = Path("val.txt")
    """List of validation images, in the same format; indices may be absent."""
    test_list: Path | None = None
    """List of test images, in the same format; None: no test split."""
    classes: Path = Path("classes.txt")
    """File with one class name per line, inside root or absolute."""
    truth_masks: Path | None = None
    """Folder of ground-truth masks <path of the image>.png, inside root or absolute."""
    first_index: int = Field(default=0, ge=0, le=1)
    """Index of the first class in the lists."""


def list_lid(
    root: Path,
    *,
    train_list: Path,
    val_list: Path,
    classes: Path,
    test_list: Path | None = None,
    truth_masks: Path | None = None,
    first_index: int = 0,
) -> Listing:
    """Lists the images of the LID challenge from its lists. Reads the names below the root, but opens no image.

    The challenge has 349,319 training images of 200 classes, 4,690 val and 10,000 test images (paper, section 4.4).

    The arguments are the fields of `LidConfig`. The paths of a list are relative to the root or, all of them, to the
    folder in it that is named like the split. All paths of a list may lack the suffix .JPEG. An image without indices
    has no tags: the tags of val and test images are then unknown, and a training image is not used.

    Returns:
        Rows `lid/<path below root>`.

    Raises:
        UserError: A folder or file is missing, empty or unreadable, a class index is unknown, or a listed image is
            absent, listed twice or outside of the root.
    """
    root = source_folder(root, "the folder of the challenge's images", "name it by --lid")
    names = read_classes(root / classes)
    masks = map_paths(root / truth_masks if truth_masks else None, "ground-truth mask")
    files = frozenset(files_below(root, collections.Counter()))

    lists = {"train": root / train_list, "val": root / val_list}
    if test_list:
        lists["test"] = root / test_list

    class_remedy = (
        "correct the list, name the right class file by data.lid.classes, or set by data.lid.first_index whether "
        "indices count from 0 or 1"
    )
    tables: list[pa.Table] = []
    notes: list[str] = []
    for split, path in lists.items():
        entries = read_tag_list(path, len(names), "name a list of the challenge", class_remedy, first_index)
        prefix, suffix = _affixes(entries, split, files)
        images = [f"{prefix}{entry}{suffix}" for entry in entries]
        absent = [image for image in images if image not in files]
        check_present(path, absent, root, "a file for each line; links that lead out of the root do not count")

        stems = [entry if suffix else os.path.splitext(entry)[0] for entry in entries]
        mask_uris = [masks.get(unicodedata.normalize("NFC", stem)) for stem in stems]
        notes += missing_mask_notes(mask_uris.count(None), len(stems), split)
        table = listing_table(
            image_id=[f"lid/{image}" for image in images],
            uri=[f"{root}/{image}" for image in images],
            domain="target",
            split=split,
            tags=list(entries.values()),
            mask_uri=mask_uris,
        )
        tables.append(table)

    check_listed_once((path, table["image_id"].to_pylist()) for path, table in zip(lists.values(), tables, strict=True))
    if not truth_masks:
        notes = ["no folder of ground-truth masks: nothing is scored"]
    return Listing(pa.concat_tables(tables), names, tuple(notes))


def _affixes(entries: Iterable[str], split: str, files: Set[str]) -> tuple[str, str]:
    """Returns the prefix and the suffix that make the entries of a list names of files; both are often empty.

    Tries them on the first entry.
    """
    first_entry = next(iter(entries))
    for prefix, suffix in itertools.product(("", f"{split}/"), ("", _SUFFIX)):
        if f"{prefix}{first_entry}{suffix}" in files:
            return prefix, suffix
    return "", ""


LID = Source(
    lister=list_lid,
    location="root",
    help="Folder of the LID challenge (200 classes), or of any data set with list files of class indices.",
    example="lid LID data.lid.truth_masks=val_masks",
    record=LidConfig,
    defines_classes=True,
    recipe="lid",
)

"""LID challenge track (a subset of ImageNet DET) -> listing: lists of image paths with class indices, masks for val."""

import collections
import itertools
import os
from pathlib import Path

import pyarrow as pa
from pydantic import Field

from mcis.datasets.classes import read_classes
from mcis.datasets.index import Listing
from mcis.datasets.section import LocalPath, Section
from mcis.datasets.sources.lists import (
    check_once,
    check_present,
    files_below,
    lacking_masks,
    listing_table,
    map_paths,
    read_tag_list,
    source_folder,
)
from mcis.datasets.sources.source import Source


class LidConfig(Section):
    """The LID challenge (source `lid`), and any data set of list files."""

    root: LocalPath | None = None
    """Folder that the lists' paths are relative to."""
    train_list: Path = Path("train.txt")
    """Lines `<path> <class index> <class index> ...`, inside root or absolute."""
    val_list: Path = Path("val.txt")
    """Likewise; indices may be absent."""
    test_list: Path | None = None
    """Likewise; None = no test split."""
    classes: Path = Path("classes.txt")
    """File with one class name per line, inside root or absolute."""
    truth_masks: Path | None = None
    """Folder of ground-truth masks <path of the image>.png, inside root or absolute."""
    first_index: int = Field(default=0, ge=0, le=1)
    """Number of the first class in the lists."""


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
    """Reads the lists and the names of all files below the root, each folder once; no image is opened.

    The challenge has 349,319 images of 200 classes to train on, 4,690 in val and 10,000 in test (paper, section 4.4).

    Arguments are the fields of `LidConfig`. Paths of a list are relative to root, or all of them to the folder in it
    that is named as the split; all may lack the suffix .JPEG. An image without indices has no tags: in val and test its
    tags are not known, in training it takes no part.

    Returns:
        Rows `lid/<path below root>`.

    Raises:
        UserError: a folder or file is missing, empty or unreadable, a class index is unknown, a listed image is absent,
            listed twice or leads out of the root.
    """
    root = source_folder(root, "the folder of the challenge's images", "name it by `root`")
    names = read_classes(root / classes)
    truth = map_paths(root / truth_masks if truth_masks else None, "ground-truth mask")
    files = frozenset(files_below(root, collections.Counter()))
    lists = {"train": root / train_list, "val": root / val_list} | ({"test": root / test_list} if test_list else {})
    correct = "name the right class file by `classes`, or say by `first_index` whether indices count from 0 or 1"
    tables, notes = [], list[str]()
    for split, path in lists.items():
        remedy = "name a list of the challenge"
        entries = read_tag_list(path, len(names), remedy, f"correct the list, {correct}", first_index)
        start, ends = next(iter(entries)), itertools.product(("", f"{split}/"), ("", ".JPEG"))
        prefix, suffix = next((each for each in ends if start.join(each) in files), ("", ""))
        images = [f"{prefix}{entry}{suffix}" for entry in entries]
        absent = [image for image in images if image not in files]
        check_present(path, absent, root, "a file for each line (links that lead elsewhere do not count)")
        stems = [entry if suffix else os.path.splitext(entry)[0] for entry in entries]
        mask_uris = [truth.get(stem) for stem in stems]
        notes += lacking_masks(mask_uris.count(None), len(stems), split)
        table = listing_table(
            image_id=[f"lid/{image}" for image in images],
            uri=[f"{root}/{image}" for image in images],
            domain="target",
            split=split,
            tags=list(entries.values()),
            mask_uri=mask_uris,
        )
        tables.append(table)
    check_once((path, table["image_id"].to_pylist()) for path, table in zip(lists.values(), tables, strict=True))
    if not truth_masks:
        notes = ["no folder of ground-truth masks: nothing is scored"]
    return Listing(pa.concat_tables(tables), names, tuple(notes))


LID = Source(
    lister=list_lid,
    location="root",
    help="Folder of the LID challenge (200 classes), or of any data set with list files of class indices.",
    example="lid LID --set data.lid.truth_masks=val_masks",
    record=LidConfig,
    defines_classes=True,
    recipe="lid",
)

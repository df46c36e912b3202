"""LID challenge track (a subset of ImageNet DET) -> listing: lists of image paths with class indices, masks for val."""

import os
from pathlib import Path

from mcis.datasets.classes import read_classes
from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, shown
from mcis.datasets.sources.lists import (
    Files,
    Maps,
    class_indices,
    inside,
    listing_table,
    read_lines,
    source_folder,
    whole,
)


def list_lid(
    root: Path,
    *,
    train_list: Path,
    val_list: Path,
    classes: Path,
    test_list: Path | None = None,
    masks: Path | None = None,
    first_index: int = 0,
) -> Listing:
    """Reads the lists and the names in the folders that they mention, each folder once; no image is opened.

    The challenge has 349,319 images of 200 classes to train on, 4,690 in val and 10,000 in test (paper, section 4.4).

    Args:
        root: folder of the images.
        train_list, val_list, test_list: files with lines `<path> <class index> ...`. Paths are relative to root, or all
            of a list to the folder in it that is named as the split; all may lack the suffix .JPEG. An image without
            indices has no tags: in val and test they are not known, in training it takes no part.
        classes: file with one class name a line.
        masks: folder with `<path in the list without suffix>.png`; None = nothing is scored. A split that lacks some of
            its masks is taken as one without masks, and noted.
        first_index: that of the first class in the lists, 0 or 1.

    Returns:
        Rows `lid/<path below root>`.

    Raises:
        UserError: a folder or file is missing, empty or unreadable, a class index is unknown, a listed image is absent,
            listed twice or leads out of the root.
    """
    root = source_folder(root, "the folder of the challenge's images", "name it")
    names = read_classes(classes)
    truth = Maps(masks, "ground-truth mask")
    files = Files(root)
    notes = [] if masks else ["no folder of ground-truth masks: nothing is scored"]
    paths: list[str] = []
    splits: list[str] = []
    tags: list[list[int]] = []
    mask_uris: list[str | None] = []
    for split, path in (("train", train_list), ("val", val_list), ("test", test_list)):
        if path is None:
            continue
        entries = _entries(path, len(names), first_index)
        prefix, suffix = _place(root, split, next(iter(entries)))
        found = [f"{prefix}{entry}{suffix}" for entry in entries]
        absent = [image for image in found if image not in files]
        if absent:
            raise UserError(
                f"{path} names {len(absent)} image(s) that are not in {root}: {shown(absent)}",
                "a file for each line (links that lead elsewhere do not count)",
                "add the images or take them off the list",
            )
        of_split, news = whole([truth.of(entry if suffix else os.path.splitext(entry)[0]) for entry in entries], split)
        notes += news if masks else []
        paths += found
        splits += [split] * len(found)
        tags += entries.values()
        mask_uris += of_split
    first: dict[str, str] = {}
    for image, split in zip(paths, splits, strict=True):
        if image in first:
            where = f"the lists of {first[image]} and {split}"
            raise UserError(f"{image} is in {where}", "each image in one split", "take it off one of them")
        first[image] = split
    rows = listing_table(
        image_id=[f"lid/{image}" for image in paths],
        uri=[f"{root}/{image}" for image in paths],
        domain="target",
        split=splits,
        tags=tags,
        mask_uri=mask_uris,
    )
    return Listing(rows, names, tuple(notes))


def _place(root: Path, split: str, first: str) -> tuple[str, str]:
    """What the entries of a list lack before and behind to be paths below root, by its first."""
    for prefix in ("", f"{split}/"):
        for suffix in ("", ".JPEG"):
            if os.path.isfile(root / f"{prefix}{first}{suffix}"):
                return prefix, suffix
    return "", ""


def _entries(path: Path, classes: int, first_index: int) -> dict[str, list[int]]:
    """Image -> class indices from 0, in the order of the list."""
    expected = f"lines '<path> <class index> ...' with indices {first_index}..{classes - 1 + first_index}"
    remedy = "mend the list, name the right class file, or say whether indices count from 0 or 1"
    entries: dict[str, list[int]] = {}
    for number, line in read_lines(path, expected, "name a list of the challenge"):
        text, *indices = line.split()
        entry = inside(text)
        if entry is None:
            raise UserError(
                f"{path}, line {number}: {text} lies outside of the images", expected, "take it off the list"
            )
        if entry in entries:
            raise UserError(f"{path}, line {number}: {text} a second time", "one line an image", "merge the lines")
        where = f"{path}, line {number}"
        entries[entry] = class_indices(where, text, indices, classes, remedy, first_index)
    return entries

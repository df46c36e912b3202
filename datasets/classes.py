"""Class names, their labels in masks and their colors: what a class index k means everywhere in the project.

Two numberings meet here. A *class index* k in 0..K-1 counts the tagged classes (lists of tags, channels of a
classifier). A *label* is the value of a mask's pixel: BACKGROUND, k + 1 for class index k, IGNORE where it is unknown.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mcis.datasets.errors import UserError, unquoted

BACKGROUND = 0
"""Label of pixels that belong to no class; the label of class index k is k + 1."""

IGNORE = 255
"""Label of pixels that take no part in training or scores."""

MAX_CLASSES = IGNORE - 1
"""Labels are bytes: 0 is background and 255 is ignored, so 254 classes fit."""

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
"""The 20 classes of PASCAL VOC in its order: class index 0..19, label 1..20."""


def palette() -> np.ndarray:
    """The color of each label, (256, 3) uint8 RGB: PASCAL VOC's color map.

    Label bits 0, 3, 6 fill red from its highest bit down, bits 1, 4, 7 green, bits 2, 5 blue (VOCcolormap of the VOC
    development kit), so adjacent labels get distant colors: background is black, IGNORE is (224, 224, 192).
    """
    labels = np.arange(256)
    colors = np.zeros((256, 3), np.uint8)
    for channel in range(3):
        for step in range(8):
            bit = 3 * step + channel
            colors[:, channel] |= (((labels >> bit) & 1) << (7 - step)).astype(np.uint8)
    return colors


def read_classes(path: Path | str) -> tuple[str, ...]:
    """The class names of a text file in UTF-8, one per line; line i (from 0) names class index i.

    Raises:
        UserError: the file is missing or not text, holds no name, a blank line before a name, a name twice,
            "background" (which has its label already and would shift every other), or more than MAX_CLASSES names.
    """
    expected = "a text file with one class name per line, in the order of the class indices, without background"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"no file of class names at {path}", expected, f"write {path}, or name another file") from None
    except (OSError, UnicodeDecodeError) as error:
        why = unquoted(error)
        raise UserError(f"cannot read {path}: {why}", expected, "correct or replace the file") from error
    names = tuple(line.strip() for line in text.rstrip().splitlines())
    if not names:
        raise UserError(f"{path} is empty", expected, "add the names of the classes")
    if "" in names:
        raise UserError(f"line {names.index('') + 1} of {path} is blank", expected, "name the class or delete the line")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{path} names {', '.join(twice)} more than once", "each class once", "rename or delete lines")
    check_classes(path, names)
    return names


def check_classes(where: Path | str, names: Sequence[str]) -> None:
    """Raises a UserError where a file or a table names background as a class, or more than MAX_CLASSES classes."""
    if any(name.casefold() == "background" for name in names):
        raise UserError(
            f"{where} names background as a class",
            "things alone: background is label 0 in every mask, the first class is label 1",
            "delete that name",
        )
    if len(names) > MAX_CLASSES:
        raise UserError(
            f"{where} names {len(names)} classes: {', '.join(names[:3])} and more",
            f"at most {MAX_CLASSES}, because labels are bytes",
            "name those that you want in a file, one per line: `classes=FILE` `ignore_others=true` (of a table)",
        )

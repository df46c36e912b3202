"""Class names, their labels in masks, and their colors.

The project uses two numberings. A *class index* k in 0..K-1 counts the tagged classes: it is used in lists of tags and
for the channels of a classifier. A *label* is the value of a pixel in a mask: BACKGROUND, k + 1 for class index k, or
IGNORE if the class is unknown.
"""

import csv
import json
import os
import unicodedata
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from mcis.datasets.errors import UserError, unquoted

BACKGROUND = 0
"""Label of pixels that belong to no class. The label of class index k is k + 1."""

IGNORE = 255
"""Label of pixels that training and scores leave out."""

_MAX_NAME = 251
"""Maximum length of a class name in bytes: file systems accept 255, and .png is added to the name."""
MAX_CLASSES = IGNORE - 1
"""Maximum number of classes. Labels are bytes, 0 is background and 255 is ignored, so 254 values remain."""

NEGATIVE_TAGS = ("none", "background")
"""Tags, in any case, of an image that shows none of the classes: a *negative*."""

MAY_BE_NEGATIVE_TAGS = (
    *("negative", "negatives", "nothing", "ok", "good", "normal", "empty", "clean", "neither"),
    *("0", "false", "no", "absent", "healthy"),
)
"""Tags, in any case, that often mean none of the classes. They are classes, and a note asks the user."""

MAY_BE_MISSING_TAGS = ("nan", "null", "na", "n/a", "<na>", "nil", "-", "?", "unknown")
"""Tags, in any case, that programs and people write if they know no tag. They are classes, and a note asks the user."""

VOC_CLASSES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
"""The 20 classes of PASCAL VOC in its order: class indices 0..19, labels 1..20."""


_DIFFERENT_CHARACTERS = {ord("\N{NO-BREAK SPACE}"): " ", ord("\N{ZERO WIDTH SPACE}"): None, 0xFEFF: None}
"""Characters that look like a space or like nothing -> what they are replaced by. 0xFEFF is the byte order mark."""


def normalized_name(text: str) -> str:
    """Returns a class name in the Unicode form NFC, with ordinary spaces, without spaces around it.

    Web pages and office programs write characters into names that nobody sees.
    """
    return unicodedata.normalize("NFC", text.translate(_DIFFERENT_CHARACTERS).strip())


def palette() -> np.ndarray:
    """Returns the color of each label, (256, 3) uint8 RGB: the color map of PASCAL VOC.

    The bits of a label fill the channels from their highest bit down: bits 0, 3, 6 go to red, bits 1, 4, 7 to green and
    bits 2, 5 to blue (VOCcolormap of the VOC development kit). Adjacent labels therefore get distant colors. Background
    is black, IGNORE is (224, 224, 192).
    """
    labels = np.arange(256)
    colors = np.zeros((256, 3), np.uint8)

    for channel in range(3):
        for step in range(8):
            bit = 3 * step + channel
            colors[:, channel] |= (((labels >> bit) & 1) << (7 - step)).astype(np.uint8)

    return colors


def split_names(texts: Sequence[str], occurring: Collection[str]) -> list[str]:
    """Splits the values of an option into class names, in the Unicode form NFC.

    Args:
        texts: Each text is a name that occurs, with any characters; a JSON list; a file, see `read_classes`; or names
            separated by commas, in which a name with a comma is quoted: `"tench, Tinca tinca",cat`.
        occurring: The names that occur, in the form NFC.

    Raises:
        UserError: A text is not a valid JSON list, or a file is invalid.
    """
    names: list[str] = []
    for text in texts:
        if unicodedata.normalize("NFC", text) in occurring:
            names.append(text)
        elif text.startswith("["):
            names += _json_names(text)
        elif os.path.isfile(text):
            names += read_classes(text)
        else:
            names += next(csv.reader([text], skipinitialspace=True), [])
    return [unicodedata.normalize("NFC", name.strip()) for name in names]


def _json_names(text: str) -> list[str]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"class names {text}", 'a JSON list of texts, such as ["cat", "dog"]', "correct the list")
    return names


def read_classes(path: Path | str) -> tuple[str, ...]:
    """Reads class names from a UTF-8 text file with one name per line; line i, counted from 0, names class index i.

    Returns:
        The names as tags are, see `normalized_name`.

    Raises:
        UserError: The file is missing or is not text; it holds no name, a blank line before a name, a name twice,
            "background" (which already has a label and would shift every other), or more than MAX_CLASSES names.
    """
    expected = "a text file with one class name per line, in the order of the class indices, without background"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"no file of class names at {path}", expected, f"create {path}, or name another file") from None
    except (OSError, UnicodeDecodeError) as error:
        found = f"cannot read {path}: {unquoted(error)}"
        raise UserError(found, expected, "correct or replace the file") from error

    names = tuple(normalized_name(line) for line in text.rstrip().splitlines())
    if not names:
        raise UserError(f"{path} is empty", expected, "add the class names")
    if "" in names:
        raise UserError(f"line {names.index('') + 1} of {path} is blank", expected, "name the class or delete the line")

    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        found = f"{path} names {', '.join(repeated)} more than once"
        raise UserError(found, "each class once", "rename or delete the repeated lines")

    check_classes(path, names)
    return names


def check_classes(where: Path | str, names: Sequence[str]) -> None:
    """Checks that class names do not include background, are not too long, and are at most MAX_CLASSES.

    Args:
        where: File or table that holds the names; used in messages.

    Raises:
        UserError: A name is "background" in any case or too long, or there are too many names.
    """
    longest = max(names, key=lambda name: len(name.encode()), default="")
    if len(longest.encode()) > _MAX_NAME:
        raise UserError(
            f"{where} has a class name of {len(longest.encode())} bytes: {longest[:60]}...",
            f"names of at most {_MAX_NAME} bytes, because maps are exported to files that are named after classes",
            "shorten the name",
        )

    if any(name.casefold() == "background" for name in names):
        raise UserError(
            f"{where} names background as a class",
            "object classes only: background is label 0 in every mask, and the first class is label 1",
            "delete that name",
        )

    if len(names) > MAX_CLASSES:
        raise UserError(
            f"{where} names {len(names)} classes: {', '.join(names[:3])} and more",
            f"at most {MAX_CLASSES} classes, because labels are bytes",
            "list the classes to keep in a file, one per line; set data.classes=FILE data.tags.ignore_others=true",
        )

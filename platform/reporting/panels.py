"""Pictures of what the stages made of an image: image | truth | localization map | pseudo mask | prediction.

One panel as a row, many as a gallery with a legend. Labels take the palette's colors, ignored pixels are striped, and
localization maps glow in their class's hue over the gray image.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from mcis.datasets.classes import BACKGROUND, IGNORE, palette
from mcis.models.counts import confusion
from mcis.models.metrics import iou, mean
from mcis.platform.runs.scores import percent

COLUMNS = ("image", "truth", "localization map", "pseudo mask", "prediction")
"""The cells of a panel, from left to right."""

_GAP, _MARGIN, _HEADING, _CAPTION, _LEGEND_LINE = 10, 20, 28, 34, 24
"""Pixels: between cells, around the gallery, for its column headings, for a row's caption, for a line of its legend."""
_SWATCH, _SWATCH_GAP, _ITEM_GAP = 12, 6, 22
"""Pixels of the legend: a color's square, from there to its name, from there to the next item."""
_DIMMED = np.array([0.36, 0.39, 0.44])
"""Factors of the gray image's brightness under localization maps, red to blue: cool, so that gray classes show too."""
_IGNORE_STRIPES = np.array([[236, 236, 230], [196, 198, 204]], np.uint8)
_INK, _MUTED, _FAINT, _BLANK = "#16181d", "#5c6370", "#8a919c", "#f3f4f6"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One image of the gallery with what the stages made of it; (H, W) is the same for all arrays.

    image: (H, W, 3) uint8 RGB.
    truth, pseudo_mask, prediction: (H, W) uint8 labels, k + 1 for class index k, 255 ignored (in a prediction nothing
        is); None where the run has none.
    maps: (class name, (H, W) float32 in [0, 1]) a tag, its localization map; empty where none was made.
    cue: background cue of the pseudo mask.
    """

    image_id: str
    split: str
    tags: tuple[str, ...]
    image: NDArray[np.uint8]
    truth: NDArray[np.uint8] | None
    maps: tuple[tuple[str, NDArray[np.float32]], ...]
    pseudo_mask: NDArray[np.uint8] | None
    prediction: NDArray[np.uint8] | None
    cue: str | None = None

    @property
    def masks(self) -> dict[str, NDArray[np.uint8]]:
        """The panel's masks by the name of their column."""
        masks = {"truth": self.truth, "pseudo mask": self.pseudo_mask, "prediction": self.prediction}
        return {column: mask for column, mask in masks.items() if mask is not None}


class Tile(NamedTuple):
    """A step of a localization map: its title and its picture."""

    title: str
    picture: Image.Image


class Steps(NamedTuple):
    """How a localization map was made: image, class, and a tile per step, all of one height."""

    image_id: str
    name: str
    tiles: tuple[Tile, ...]


class Label(NamedTuple):
    """What a label of a mask is called, and its color as #rrggbb."""

    name: str
    color: str


def panel_picture(panel: Panel, classes: Sequence[str], *, height: int = 160) -> Image.Image:
    """The cells of a panel in one row, RGB on white; sizes and errors as in `cells`."""
    pictures = list(cells(panel, classes, height).values())
    width, height = pictures[0].size
    row = Image.new("RGB", (len(pictures) * (width + _GAP) - _GAP, height), "white")
    for i, cell in enumerate(pictures):
        row.paste(cell, (i * (width + _GAP), 0))
    return row


def gallery(panels: Sequence[Panel], classes: Sequence[str], *, height: int = 160) -> Image.Image:
    """All panels (at least one) as rows under column headings, with names and tags, over a legend of their labels.

    Columns that no panel has are left out; the picture is `len(columns)` times the widest cell, plus gaps and margin.
    Sizes and errors as in `cells`.
    """
    rows = [cells(panel, classes, height) for panel in panels]
    columns = [column for column in COLUMNS if any(column in row for row in rows)]
    width = max(row["image"].width for row in rows)
    inner = len(columns) * (width + _GAP) - _GAP
    font, small = ImageFont.load_default(16), ImageFont.load_default(13)
    lines = list(_wrapped(legend(panels, classes), small, inner))
    tall = sum(row["image"].height + _CAPTION for row in rows) + len(lines) * _LEGEND_LINE
    picture = Image.new("RGB", (inner + 2 * _MARGIN, tall + _HEADING + 2 * _MARGIN), "white")
    draw = ImageDraw.Draw(picture)
    lefts = [_MARGIN + i * (width + _GAP) for i in range(len(columns))]
    for left, column in zip(lefts, columns, strict=True):
        draw.text((left, _MARGIN), column, _INK, font)
    y = _MARGIN + _HEADING
    for panel, row in zip(panels, rows, strict=True):
        below = y + row["image"].height
        for left, column in zip(lefts, columns, strict=True):
            if column in row:
                picture.paste(row[column], (left, y))
            else:
                draw.rectangle((left, y, left + width - 1, below - 1), fill=_BLANK)
                draw.text((left + width / 2, (y + below) / 2), "none", _FAINT, small, anchor="mm")
        caption = f"{panel.image_id}  ·  {panel.split}  ·  {', '.join(panel.tags) or 'no tag'}"
        draw.text((_MARGIN, below + 5), _fitted(caption, small, inner), _MUTED, small)
        y = below + _CAPTION
    for line in lines:
        for x, item in line:
            left = _MARGIN + x
            draw.rectangle((left, y, left + _SWATCH, y + _SWATCH), fill=item.color, outline=_FAINT)
            draw.text((left + _SWATCH + _SWATCH_GAP, y - 1), item.name, _INK, small)
        y += _LEGEND_LINE
    return picture


def cells(panel: Panel, classes: Sequence[str], height: int) -> dict[str, Image.Image]:
    """The pictures that a panel has, by their column and in the order of COLUMNS, all of one size.

    They keep the image's shape and are `height` pixels high, less where they would be more than twice as wide.

    Raises:
        ValueError: the panel's arrays differ in size, or hold a label or a class that `classes` lacks.
    """
    _check(panel, classes)
    full_height, full_width = panel.image.shape[:2]
    scale = min(height / full_height, 2 * height / full_width)
    size = (max(1, round(full_width * scale)), max(1, round(full_height * scale)))
    image = Image.fromarray(panel.image).resize(size, Image.Resampling.LANCZOS)
    pictures = {"image": image} | {column: _mask_picture(mask, size) for column, mask in panel.masks.items()}
    if panel.maps:
        pictures["localization map"] = heat_picture(image, panel.maps, classes)
    return {column: pictures[column] for column in COLUMNS if column in pictures}


def describe(panel: Panel, column: str, classes: Sequence[str]) -> tuple[str, str]:
    """A cell that the panel has, for those who cannot see it, and a note for its caption, which may be empty."""
    if column == "image":
        return f"image {panel.image_id}, tagged {', '.join(panel.tags) or 'with nothing'}", ""
    if column == "localization map":
        strong = (f"{name} above one half on {percent((heat > 0.5).mean())}" for name, heat in panel.maps)
        return f"localization maps of {panel.image_id}: {', '.join(strong)} of the image", ""
    mask, names = panel.masks[column], labels(classes)
    values, counts = np.unique(mask, return_counts=True)
    shares = dict(zip(values.tolist(), counts / mask.size, strict=True))
    areas = ", ".join(f"{names[label].name} {percent(area)}" for label, area in shares.items())
    note = ""
    if column == "pseudo mask":
        ignored = f"{percent(shares[IGNORE])} ignored" if IGNORE in shares else ""
        note = ", ".join(filter(None, (f"cue {panel.cue}" if panel.cue else "", ignored)))
    elif column == "prediction" and panel.truth is not None and (panel.truth != IGNORE).any():
        note = f"mIoU here {mean(iou(confusion(panel.truth, mask, len(classes)))):.0f}"
    return f"{column} of {panel.image_id}: {areas}", note


def legend(panels: Iterable[Panel], classes: Sequence[str]) -> list[Label]:
    """The labels that occur in the panels' tags and masks: background first, ignored last."""
    seen: set[int] = set()
    for panel in panels:
        seen |= {classes.index(name) + 1 for name in panel.tags}
        for mask in panel.masks.values():
            seen |= set(np.unique(mask).tolist())
    label_of = labels(classes)
    return [label_of[label] for label in sorted(seen)]


def labels(classes: Sequence[str]) -> dict[int, Label]:
    """Every label of K classes with the palette's color; ignored pixels have the lighter one of their stripes."""
    colors = palette()
    colors[IGNORE] = _IGNORE_STRIPES[0]
    names = {BACKGROUND: "background", IGNORE: "ignored"} | dict(enumerate(classes, 1))
    return {label: Label(name, f"#{colors[label].tobytes().hex()}") for label, name in names.items()}


def drawable(text: str) -> str:
    """Text from outside as one line that font renderers take: no line breaks, control characters, lone surrogates.

    Of a text longer than any line, the first 400 characters.
    """
    text = text[:400].encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else " " for c in text)


def steps_picture(steps: Steps) -> Image.Image:
    """The tiles of a map side by side."""
    pictures = [tile.picture for tile in steps.tiles]
    width = sum(picture.width for picture in pictures) + _GAP * (len(pictures) - 1)
    row = Image.new("RGB", (width, pictures[0].height), "white")
    left = 0
    for picture in pictures:
        row.paste(picture, (left, 0))
        left += picture.width + _GAP
    return row


def _check(panel: Panel, classes: Sequence[str]) -> None:
    size = panel.image.shape[:2]
    for what, mask in panel.masks.items():
        if mask.shape != size:
            raise ValueError(f"{what} of {panel.image_id} is {mask.shape}; expected its image's {size}")
        highest = mask.max(where=mask != IGNORE, initial=0)
        if highest > len(classes):
            raise ValueError(f"{what} of {panel.image_id} has label {highest}; expected at most {len(classes)}")
    for name, heat in panel.maps:
        if heat.shape != size:
            raise ValueError(f"map of {name} on {panel.image_id} is {heat.shape}; expected its image's {size}")
    if unknown := [name for name in (*panel.tags, *(name for name, _ in panel.maps)) if name not in classes]:
        raise ValueError(f"{panel.image_id} has the unknown class {unknown[0]!r}; expected one of {', '.join(classes)}")


def _mask_picture(mask: NDArray[np.uint8], size: tuple[int, int]) -> Image.Image:
    """Labels in palette colors, ignored pixels striped, segments with a light rim that lifts dark ones off black."""
    mask = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
    colors = palette()[mask].astype(np.float32)
    rim = _rim(mask)
    colors[rim] += 0.65 * (255 - colors[rim])
    ignored = mask == IGNORE
    stripe = np.add.outer(np.arange(size[1]), np.arange(size[0])) // 5 % 2
    colors[ignored] = _IGNORE_STRIPES[stripe[ignored]]
    return Image.fromarray(colors.astype(np.uint8))


def overlay_picture(image: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Image.Image:
    """Labels (H, W) in palette colors over their image (H, W, 3), segments with a light rim, background as it is."""
    mixed = (image.astype(np.float32) + palette()[labels]) / 2
    rim = _rim(labels)
    mixed[rim] += 0.65 * (255 - mixed[rim])
    return Image.fromarray(np.where((labels == BACKGROUND)[..., None], image, mixed.astype(np.uint8)))


def _rim(mask: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """The pixels of segments (H, W) that touch another label."""
    framed = np.pad(mask, 1, mode="edge")
    neighbors = (framed[:-2, 1:-1], framed[2:, 1:-1], framed[1:-1, :-2], framed[1:-1, 2:])
    return np.logical_or.reduce([mask != neighbor for neighbor in neighbors]) & (mask != BACKGROUND)


def heat_picture(
    image: Image.Image, maps: Sequence[tuple[str, NDArray[np.float32]]], classes: Sequence[str]
) -> Image.Image:
    """Localization maps as heat over the dimmed gray image: a class in its hue, pale at 1, mixed where maps overlap."""
    values = np.stack([np.asarray(Image.fromarray(heat).resize(image.size)) for _, heat in maps])
    values = values.clip(0, 1)  # bicubic resizing overshoots
    hues = np.array([_hue(classes.index(name) + 1) for name, _ in maps])
    strength = values.max(axis=0)[..., None]
    weights = values**3 / np.maximum((values**3).sum(axis=0), 1e-9)
    mixed = np.einsum("thw,tc->hwc", weights, hues)
    mixed += (255 - mixed) * 0.7 * np.maximum(strength - 0.55, 0) / 0.45
    gray = np.asarray(image.convert("L"), np.float32)[..., None] * _DIMMED + 10
    opacity = np.minimum(strength / 0.6, 1) * 0.88
    return Image.fromarray((gray * (1 - opacity) + mixed * opacity).astype(np.uint8))


def _hue(label: int) -> NDArray[np.float64]:
    """A label's palette color, (3,), stronger and brighter to shine over a gray image; dark ones stay darker."""
    rgb = palette()[label].astype(np.float64)
    rgb -= 0.5 * rgb.min()
    return rgb * 255 / rgb.max() * (0.76 + 0.24 * min(rgb.max() / 192, 1))


_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def _wrapped(items: Iterable[Label], font: _Font, width: int) -> Iterator[list[tuple[int, Label]]]:
    """Items with their x positions, a list per line of `width` pixels; names too long for a line are cut."""
    line: list[tuple[int, Label]] = []
    x = 0
    for item in items:
        name = _fitted(item.name, font, width - _SWATCH - _SWATCH_GAP)
        needed = _SWATCH + _SWATCH_GAP + int(font.getlength(name)) + _ITEM_GAP
        if line and x + needed > width:
            yield line
            line, x = [], 0
        line.append((x, Label(name, item.color)))
        x += needed
    if line:
        yield line


def _fitted(text: str, font: _Font, width: float) -> str:
    """The text, cut with an ellipsis to a width in pixels."""
    text = drawable(text)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"

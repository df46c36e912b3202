"""Draws what the stages computed for an image: image | truth | localization map | pseudo mask | prediction.

Labels have the palette's colors, ignored pixels are striped, and localization maps have the hue of their class over the
gray image.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.classes import BACKGROUND, IGNORE, palette
from mcis.models.counts import confusion
from mcis.models.localization import score_maps
from mcis.models.metrics import iou, mean
from mcis.platform.outputs.tables import ImageMaps
from mcis.platform.runs.scores import percent

COLUMNS = ("image", "truth", "localization map", "pseudo mask", "prediction")
"""Names of the cells of a panel, from left to right."""

CELL_HEIGHT = 240
"""Height in pixels of a picture on a page. It is shown about 200 CSS pixels wide, so it is sharp on dense screens."""
_DIMMED = np.array([0.36, 0.39, 0.44])
"""Brightness of the gray image below localization maps, red to blue. It is bluish, so that gray classes stand out."""
_RIM_BRIGHTENING = 0.65
"""How far the rims of segments are brightened, from their color (0) to white (1)."""
_IGNORE_STRIPES = np.array([[236, 236, 230], [196, 198, 204]], np.uint8)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """An image and what the stages computed for it. All arrays have the same height H and width W.

    Masks have label k + 1 for class index k, and 255 for ignored pixels.

    Attributes:
        image_id: id of the image.
        split: Its split.
        tags: Names of its classes.
        image: RGB, uint8 (H, W, 3).
        truth: Ground-truth mask, (H, W); None if there is none.
        maps: Localization maps of its tags; None if there are none.
        full_size: Height and width in pixels at which the image is scored; None if unknown.
        pseudo_mask: (H, W); None if there is none.
        prediction: (H, W), without ignored pixels; None if there is none.
        cue: Background cue of the pseudo mask.
    """

    image_id: str
    split: str
    tags: tuple[str, ...]
    image: NDArray[np.uint8]
    truth: NDArray[np.uint8] | None = None
    maps: ImageMaps | None = None
    full_size: tuple[int, int] | None = None
    pseudo_mask: NDArray[np.uint8] | None = None
    prediction: NDArray[np.uint8] | None = None
    cue: str | None = None

    @property
    def masks(self) -> dict[str, NDArray[np.uint8]]:
        """The masks that the panel has, by their column."""
        masks = {"truth": self.truth, "pseudo mask": self.pseudo_mask, "prediction": self.prediction}
        return {column: mask for column, mask in masks.items() if mask is not None}


class Cell(NamedTuple):
    """A picture of a panel.

    Attributes:
        picture: The picture.
        alt: Alternative text.
        note: Text for its caption.
        is_mask: Whether it has flat colors, so that PNG is small. Other pictures are ten times smaller as JPEG.
    """

    picture: Image.Image
    alt: str
    note: str
    is_mask: bool


class Label(NamedTuple):
    """Name of a label of a mask, and its color as #rrggbb."""

    name: str
    color: str


def cells(panel: Panel, classes: Sequence[str], height: int) -> dict[str, Cell]:
    """Draws the cells that a panel has, in the order of `COLUMNS`. All pictures have the same size.

    Args:
        panel: The panel.
        classes: The K class names.
        height: Height of the pictures in pixels. Wide pictures are lower, so that no width exceeds twice this height.
    """
    full_height, full_width = panel.image.shape[:2]
    scale = min(height / full_height, 2 * height / full_width)
    size = (max(1, round(full_width * scale)), max(1, round(full_height * scale)))
    image = Image.fromarray(panel.image).resize(size, Image.Resampling.LANCZOS)
    pictures = {"image": image} | {column: _mask_picture(mask, size) for column, mask in panel.masks.items()}
    if panel.maps:  # each map has its own scale here, because on a common one faint maps would be dark
        activations = torch.from_numpy(panel.maps.maps)
        heat = score_maps(activations, panel.maps.grids, "maximum", full_height, full_width).numpy()
        pictures["localization map"] = heat_picture(image, heat, panel.maps.classes + 1)

    drawn = {}
    for column in COLUMNS:
        if column in pictures:
            alt = f"{column} of {panel.image_id}, tagged {', '.join(panel.tags) or 'with nothing'}"
            drawn[column] = Cell(pictures[column], alt, _note(panel, column, classes), column in panel.masks)
    return drawn


def _note(panel: Panel, column: str, classes: Sequence[str]) -> str:
    """Text for the caption of a cell; may be empty."""
    if column == "pseudo mask":
        notes = []
        if panel.cue:
            notes.append(f"cue {panel.cue}")
        ignored = float((panel.masks[column] == IGNORE).mean())
        if ignored:
            notes.append(f"{percent(ignored)} ignored")
        return ", ".join(notes)
    if column == "prediction" and panel.truth is not None and (panel.truth != IGNORE).any():
        matrix = confusion(panel.truth, panel.masks[column], len(classes))
        return f"mIoU here {mean(iou(matrix)):.0f}"
    return ""


def legend(panels: Iterable[Panel], classes: Sequence[str]) -> list[Label]:
    """Labels that occur in the tags and masks of panels, background first and ignored last."""
    seen: set[int] = set()
    for panel in panels:
        seen |= {classes.index(name) + 1 for name in panel.tags}
        for mask in panel.masks.values():
            seen |= set(np.unique(mask).tolist())
    label_of = labels(classes)
    return [label_of[label] for label in sorted(seen)]


def labels(classes: Sequence[str]) -> dict[int, Label]:
    """All labels of K classes with their palette colors; `ignored` has the lighter color of its stripes."""
    colors = palette()
    colors[IGNORE] = _IGNORE_STRIPES[0]
    names = {BACKGROUND: "background", IGNORE: "ignored"} | dict(enumerate(classes, 1))
    return {label: Label(name, f"#{colors[label].tobytes().hex()}") for label, name in names.items()}


def _mask_picture(mask: NDArray[np.uint8], size: tuple[int, int]) -> Image.Image:
    """Draws labels in palette colors. Ignored pixels are striped; a light rim makes dark segments visible."""
    mask = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
    colors = palette()[mask].astype(np.float32)
    rim = _rim(mask)
    colors[rim] += _RIM_BRIGHTENING * (255 - colors[rim])

    ignored = mask == IGNORE
    stripe = np.add.outer(np.arange(size[1]), np.arange(size[0])) // 5 % 2
    colors[ignored] = _IGNORE_STRIPES[stripe[ignored]]
    return Image.fromarray(colors.astype(np.uint8))


def overlay_picture(image: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Image.Image:
    """Draws segments in palette colors with a light rim over their image; background stays as it is.

    Args:
        image: RGB, (H, W, 3).
        labels: Label mask, (H, W).
    """
    mixed = (image.astype(np.float32) + palette()[labels]) / 2
    rim = _rim(labels)
    mixed[rim] += _RIM_BRIGHTENING * (255 - mixed[rim])
    is_background = (labels == BACKGROUND)[..., None]
    return Image.fromarray(np.where(is_background, image, mixed.astype(np.uint8)))


def _rim(mask: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Pixels of segments that touch another label, (H, W)."""
    framed = np.pad(mask, 1, mode="edge")
    neighbors = (framed[:-2, 1:-1], framed[2:, 1:-1], framed[1:-1, :-2], framed[1:-1, 2:])
    return np.logical_or.reduce([mask != neighbor for neighbor in neighbors]) & (mask != BACKGROUND)


def heat_picture(image: Image.Image, maps: NDArray[np.float32], labels: Iterable[int]) -> Image.Image:
    """Draws localization maps over the dimmed gray image, each in the hue of its label, pale at 1, and mixed.

    Args:
        image: The image.
        maps: Maps in [0, 1], (T, H, W).
        labels: The T labels.
    """
    values = np.stack([np.asarray(Image.fromarray(heat).resize(image.size)) for heat in maps])
    values = values.clip(0, 1)  # bicubic resizing overshoots
    hues = np.array([_hue(label) for label in labels])
    strength = values.max(axis=0)[..., None]
    weights = values**3 / np.maximum((values**3).sum(axis=0), 1e-9)
    mixed = np.einsum("thw,tc->hwc", weights, hues)
    mixed += (255 - mixed) * 0.7 * np.maximum(strength - 0.55, 0) / 0.45

    gray = np.asarray(image.convert("L"), np.float32)[..., None] * _DIMMED + 10
    opacity = np.minimum(strength / 0.6, 1) * 0.88
    return Image.fromarray((gray * (1 - opacity) + mixed * opacity).astype(np.uint8))


def _hue(label: int) -> NDArray[np.float64]:
    """A label's palette color, (3,), more saturated and brighter for use over a gray image; dark colors stay darker."""
    rgb = palette()[label].astype(np.float64)
    rgb -= 0.5 * rgb.min()
    return rgb * 255 / rgb.max() * (0.76 + 0.24 * min(rgb.max() / 192, 1))

"""Pictures of what the stages made of an image: image | truth | localization map | pseudo mask | prediction.

Labels take the palette's colors, ignored pixels are striped, localization maps glow in their class's hue over gray.
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
"""The cells of a panel, from left to right."""

CELL_HEIGHT = 240
"""Pixels of a panel's picture in a page, where it is shown at about 200 px width: sharp on a dense screen."""
_DIMMED = np.array([0.36, 0.39, 0.44])
"""Factors of the gray image's brightness under localization maps, red to blue: cool, so that gray classes show too."""
_IGNORE_STRIPES = np.array([[236, 236, 230], [196, 198, 204]], np.uint8)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One image of the gallery with what the stages made of it; (H, W) is the same for all arrays.

    image: (H, W, 3) uint8 RGB.
    truth, pseudo_mask, prediction: (H, W) uint8 labels, k + 1 for class index k, 255 ignored (in a prediction nothing
        is); None where the run has none.
    maps: the localization maps of its tags, as the stage localize keeps them; None where none was made.
    full_size: height and width of the image's file, at which the program scores it, pixels; None where nobody asks.
    cue: background cue of the pseudo mask.
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
        """The panel's masks by the name of their column."""
        masks = {"truth": self.truth, "pseudo mask": self.pseudo_mask, "prediction": self.prediction}
        return {column: mask for column, mask in masks.items() if mask is not None}


class Cell(NamedTuple):
    """A picture of a panel, its description for those who cannot see it, and a note for its caption."""

    picture: Image.Image
    alt: str
    note: str
    is_mask: bool
    """A mask is of flat colors, which PNG packs small and exact; others are ten times smaller as JPEG."""


class Label(NamedTuple):
    """What a label of a mask is called, and its color as #rrggbb."""

    name: str
    color: str


def cells(panel: Panel, classes: Sequence[str], height: int) -> dict[str, Cell]:
    """The cells that a panel has, by their column and in the order of COLUMNS, all pictures of one size.

    They keep the image's shape and are `height` pixels high, less where they would be more than twice as wide.
    """
    full_height, full_width = panel.image.shape[:2]
    scale = min(height / full_height, 2 * height / full_width)
    size = (max(1, round(full_width * scale)), max(1, round(full_height * scale)))
    image = Image.fromarray(panel.image).resize(size, Image.Resampling.LANCZOS)
    pictures = {"image": image} | {column: _mask_picture(mask, size) for column, mask in panel.masks.items()}
    if panel.maps:  # each by its own maximum, whatever `maps.scale` says: on a scale that all share a faint one is dark
        activations = torch.from_numpy(panel.maps.maps)
        heat = score_maps(activations, panel.maps.grids, "maximum", full_height, full_width).numpy()
        pictures["localization map"] = heat_picture(image, heat, panel.maps.classes + 1)
    return {
        column: Cell(
            pictures[column],
            f"{column} of {panel.image_id}, tagged {', '.join(panel.tags) or 'with nothing'}",
            _note(panel, column, classes),
            column in panel.masks,
        )
        for column in COLUMNS
        if column in pictures
    }


def _note(panel: Panel, column: str, classes: Sequence[str]) -> str:
    """A note for the caption of a cell that the panel has, which may be empty."""
    if column == "pseudo mask":
        ignored = float((panel.masks[column] == IGNORE).mean())
        notes = [f"cue {panel.cue}"] if panel.cue else []
        return ", ".join(notes + ([f"{percent(ignored)} ignored"] if ignored else []))
    if column == "prediction" and panel.truth is not None and (panel.truth != IGNORE).any():
        return f"mIoU here {mean(iou(confusion(panel.truth, panel.masks[column], len(classes)))):.0f}"
    return ""


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


def heat_picture(image: Image.Image, maps: NDArray[np.float32], labels: Iterable[int]) -> Image.Image:
    """Localization maps (T, H, W) in [0, 1] of T labels as heat over the dimmed gray image: a label in its hue, pale
    at 1, mixed where maps overlap."""
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
    """A label's palette color, (3,), stronger and brighter to shine over a gray image; dark ones stay darker."""
    rgb = palette()[label].astype(np.float64)
    rgb -= 0.5 * rgb.min()
    return rgb * 255 / rgb.max() * (0.76 + 0.24 * min(rgb.max() / 192, 1))

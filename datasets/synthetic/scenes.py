"""Draws synthetic scenes from a seed and a number: a picture, its labels, a saliency map and tags, without files.

Each class is a family of random silhouettes. It has a *head*, a vivid color checker on a fifth of the object, and a
*body* whose texture is almost the same as that of one or two other classes. A plain classifier learns only the heads
from tags, so the bodies have to be mined. Scenes contain several classes, some of which often occur together, on a
noisy background of any hue, with other clutter.
"""

from collections.abc import Callable, Iterable
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from mcis.datasets.classes import BACKGROUND, IGNORE
from mcis.datasets.synthetic.silhouettes import DRAWN_CLASSES, Outline, capsule, ellipse

SPLITS = ("train_aug", "val")

_UNIT = 96
"""Lengths below are in pixels of an image with this long side, and scale with the image."""
_MIN_VISIBLE = 60
"""Minimum number of visible pixels of a new object."""
_MIN_FRACTION = 0.45
"""Minimum fraction of an object's initial pixels that stay visible when other objects cover it."""
_HEAD_FRACTION = 0.2
_SUPERSAMPLING = 3


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One image and its ground truth.

    Attributes:
        rgb: (H, W, 3) uint8.
        labels: (H, W) uint8, 0 background, k + 1 for class index k, 255 on a border of one pixel.
        saliency: (H, W) uint8, imitates the output of a salient object detector.
        tags: Class indices in `labels`, ascending; at least one.
    """

    rgb: np.ndarray
    labels: np.ndarray
    saliency: np.ndarray
    tags: tuple[int, ...]


def draw_scene(seed: int, split: str, index: int, *, size: int = 96, classes: int = 8) -> Scene:
    """Draws image `index` of a split. Equal arguments give equal scenes.

    Args:
        seed: Seed of all random numbers.
        split: Name in SPLITS.
        index: Number of the image in the split, from 0.
        size: Long side of the image, at least 48 pixels.
        classes: Number of classes, 2 to 8.
    """
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    short = 3 * size // 4
    height, width = [(size, size), (short, size), (size, short)][rng.integers(3)]
    canvas = _Canvas(rng, height, width, size / _UNIT)
    for _ in range(rng.integers(2, 5)):
        canvas.add(_clutter, BACKGROUND, range(1))

    drawn = _drawn_classes(rng, index % classes, classes)
    for position, k in enumerate(drawn):
        make = partial(_object, k=k, classes=classes, largest=44 if len(drawn) == 1 else 36)
        # The first object is tried until it fits, because each image has at least one tag. Others may be left out.
        canvas.add(make, k + 1, count() if position == 0 else range(10))

    if rng.random() < 0.3:
        canvas.add(_clutter, BACKGROUND, range(3))  # in front of the objects

    labels = canvas.labels_with_border()
    tags = tuple(int(label) - 1 for label in np.unique(labels) if label not in (BACKGROUND, IGNORE))
    return Scene(rgb=canvas.rgb(), labels=labels, saliency=canvas.saliency(), tags=tags)


def _drawn_classes(rng: np.random.Generator, first: int, classes: int) -> list[int]:
    """Draws the class indices of the objects: `first`, up to two others, and, in one of five scenes, one of them twice.

    Classes 0 and 1, 2 and 3, and so on are partners: the weight of the partner of `first` is multiplied by six. Lower
    indices are more frequent.
    """
    weights = np.linspace(1.5, 0.5, classes)
    if first ^ 1 < classes:
        weights[first ^ 1] *= 6
    weights[first] = 0

    num_others = min(rng.choice(3, p=[0.56, 0.33, 0.11]), classes - 1)
    others = rng.choice(classes, num_others, replace=False, p=weights / weights.sum())
    drawn = [first, *map(int, others)]
    if rng.random() < 0.2:
        drawn.append(drawn[rng.integers(len(drawn))])
    return drawn


# --- the canvas


@dataclass(frozen=True, kw_only=True)
class _Thing:
    """An outline with its pose in the image and its paint.

    Attributes:
        outline: Polygons in coordinates of the thing.
        frame: (2, 2) matrix from coordinates of the thing to pixels.
        center: (2,), position of the thing's origin, pixels.
        paint: Maps x and y of each pixel, (H, W), in coordinates of the thing, and the coverage, (H, W), to colors in
            [0, 1], (H, W, 3).
    """

    outline: Outline
    frame: np.ndarray
    center: np.ndarray
    paint: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class _Canvas:
    """A picture in progress: colors, labels, and the thing that each pixel shows."""

    def __init__(self, rng: np.random.Generator, height: int, width: int, unit: float):
        self.rng = rng
        self.height = height
        self.width = width
        self.unit = unit
        self.colors = _background(rng, height, width)
        self.rows, self.columns = np.mgrid[:height, :width].astype(np.float32) + np.float32(0.5)
        self.labels = np.zeros((height, width), np.uint8)
        self.things = np.zeros((height, width), np.int64)  # 0: background, then 1, 2, ... in the order of adding
        self.min_visible = [0.0]  # minimum number of visible pixels of thing i; 0 unless it is an object with a class

    def add(self, make: Callable[["_Canvas"], _Thing], label: int, tries: Iterable[int]) -> None:
        """Paints a thing over the picture, unless every attempt hides too much of an object or of the thing itself."""
        for _ in tries:
            thing = make(self)
            coverage = self._coverage(thing)
            labels = np.where(coverage > 0.5, label, self.labels).astype(np.uint8)
            things = np.where(coverage > 0.5, len(self.min_visible), self.things)
            visible = np.bincount(things[~_border(labels)], minlength=len(self.min_visible) + 1)
            minimum = _MIN_VISIBLE * self.unit**2 if label != BACKGROUND else 0.0

            if (visible >= [*self.min_visible, minimum]).all():
                self._blend(thing, coverage)
                self.labels = labels
                self.things = things
                self.min_visible.append(max(minimum, _MIN_FRACTION * visible[-1]) if label != BACKGROUND else 0.0)
                return

    def _coverage(self, thing: _Thing) -> np.ndarray:
        """Returns the fraction of each pixel that the thing covers, (H, W) float32 in [0, 1]."""
        stencil = Image.new("L", (self.width * _SUPERSAMPLING, self.height * _SUPERSAMPLING))
        pen = ImageDraw.Draw(stencil)
        for polygon in thing.outline:
            corners = (polygon @ thing.frame.T + thing.center) * _SUPERSAMPLING
            pen.polygon([tuple(corner) for corner in corners.tolist()], fill=255)
        return np.asarray(stencil.reduce(_SUPERSAMPLING), np.float32) / 255

    def _blend(self, thing: _Thing, coverage: np.ndarray) -> None:
        """Blends the thing into the picture, darker toward its edge and with a shadow."""
        (a, b), (c, d) = np.linalg.inv(thing.frame).astype(np.float32)
        across = self.columns - np.float32(thing.center[0])
        down = self.rows - np.float32(thing.center[1])
        colors = thing.paint(a * across + b * down, c * across + d * down, coverage)

        soft = _blur(coverage, 2.2 * self.unit)
        step = round(1.5 * self.unit)
        shadow = np.zeros_like(soft)
        shadow[step:, step:] = soft[:-step, :-step]
        self.colors *= (1 - 0.45 * shadow)[..., None]
        self.colors += coverage[..., None] * (colors * (0.7 + 0.35 * soft)[..., None] - self.colors)

    def rgb(self) -> np.ndarray:
        """Returns the picture, (H, W, 3) uint8."""
        return (self.colors.clip(0, 1) * 255).round().astype(np.uint8)

    def labels_with_border(self) -> np.ndarray:
        """Returns the labels, (H, W) uint8, with 255 along edges."""
        return np.where(_border(self.labels), IGNORE, self.labels).astype(np.uint8)

    def saliency(self) -> np.ndarray:
        """Returns a blurred, blotchy map, (H, W) uint8. It misses one object in ten and shows one clutter in eight."""
        chance = np.where(np.array(self.min_visible) > 0, 0.9, 0.12)
        salient = self.rng.random(len(chance)) < chance
        salient[0] = False
        response = _blur(salient[self.things].astype(np.float32), 1.8 * self.unit)
        blotches = 0.22 * _noise(self.rng, self.height, self.width, (8, 14))
        strength = ((response - 0.3 + blotches * (response > 0.02)) / 0.4).clip(0, 1)
        return (strength * 255).round().astype(np.uint8)


def _border(labels: np.ndarray) -> np.ndarray:
    """Marks pixels whose right or lower neighbor has another label, (H, W): a line of one pixel along all edges."""
    border = np.zeros(labels.shape, bool)
    border[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    border[:-1] |= labels[:-1] != labels[1:]
    return border


def _blur(values: np.ndarray, radius: float) -> np.ndarray:
    """Blurs (H, W) values in [0, 1] with a Gaussian of standard deviation `radius` pixels, in 8-bit precision."""
    image = Image.fromarray((values * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(radius))
    return np.asarray(image, np.float32) / 255


def _noise(rng: np.random.Generator, height: int, width: int, cells: Iterable[int]) -> np.ndarray:
    """Returns smooth noise, (H, W) float32, with mean 0 and deviation 1: a sum of grids, weighted by cell size.

    Args:
        cells: Number of cells per side of each grid.
    """
    total = np.zeros((height, width), np.float32)
    for side in cells:
        grid = Image.fromarray(rng.standard_normal((side, side)).astype(np.float32))
        total += np.asarray(grid.resize((width, height), Image.Resampling.BICUBIC)) / side
    return (total - total.mean()) / total.std()


def _background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Returns two pale colors of any hue, mixed and shaded by noise, (H, W, 3)."""
    hue = rng.random()
    light = rng.uniform(0.68, 0.9)
    dark = rng.uniform(0.4, 0.6)
    first = np.array(hsv_to_rgb(hue, rng.uniform(0.1, 0.35), light), np.float32)
    second = np.array(hsv_to_rgb(hue + rng.uniform(-0.15, 0.15), rng.uniform(0.15, 0.4), dark), np.float32)
    mix = 1 / (1 + np.exp(-1.3 * _noise(rng, height, width, (3, 6, 12, 24))))
    shade = 1 + 0.04 * _noise(rng, height, width, (24, 48))
    return (first + mix[..., None] * (second - first)) * shade[..., None]


def _frame(scale: float, angle: float, stretch: float = 1.0, hflip: bool = False) -> np.ndarray:
    """Returns the (2, 2) matrix from coordinates of a thing to pixels.

    Args:
        angle: Rotation, radians.
        stretch: Factor of the width; the height is divided by it.
    """
    cos = np.cos(angle)
    sin = np.sin(angle)
    sign = -1 if hflip else 1
    return np.array([[cos, -sin], [sin, cos]]) @ np.diag([sign * scale * stretch, scale / stretch])


def _clutter(canvas: _Canvas) -> _Thing:
    """Draws an ellipse, a stick or a pebble without a class, in a neutral color, sometimes striped."""
    rng = canvas.rng
    hue = rng.random()
    saturation = rng.uniform(0.03, 0.18)
    value = rng.uniform(0.35, 0.85)
    color = np.array(hsv_to_rgb(hue, saturation, value), np.float32)
    contrast = rng.choice([0, 0.12])
    scale = rng.uniform(6, 15) * canvas.unit
    shape = rng.integers(3)
    if shape == 0:
        outline = [ellipse(0, 0, 1, rng.uniform(0.45, 1))]
    elif shape == 1:
        outline = [capsule(-1, 0, 1, 0, 0.09, 0.13)]
        scale *= 1.6
    else:
        angles = np.sort(rng.uniform(0, 2 * np.pi, 7))
        outline = [np.stack([np.cos(angles), np.sin(angles)], 1)]

    def paint(x: np.ndarray, y: np.ndarray, _: np.ndarray) -> np.ndarray:
        return color * (1 + contrast * np.sin(2 * np.pi * x * scale / (5 * canvas.unit)))[..., None]

    center = rng.uniform(0, 1, 2) * (canvas.width, canvas.height)
    return _Thing(outline=outline, frame=_frame(scale, rng.uniform(0, 2 * np.pi)), center=center, paint=paint)


# --- objects of the classes


def _object(canvas: _Canvas, *, k: int, classes: int, largest: float) -> _Thing:
    """Draws an object of class index k, with a radius of up to `largest`, mostly inside the image."""
    rng = canvas.rng
    unit = canvas.unit
    drawn = DRAWN_CLASSES[k]
    scale = unit * rng.uniform(15, largest)
    tilt = np.radians(rng.uniform(-1, 1) * drawn.tilt)
    frame = _frame(scale, tilt, rng.uniform(0.85, 1.18), hflip=rng.random() < 0.5)
    size = np.array([canvas.width, canvas.height])
    margin = np.minimum(0.75 * scale, size / 2)
    body = _body(rng, k, classes, scale / unit)
    cell = rng.uniform(3.8, 4.8) * unit
    first, second = np.array(drawn.colors, np.float32) / 255

    def paint(x: np.ndarray, y: np.ndarray, coverage: np.ndarray) -> np.ndarray:
        field = drawn.head(x, y)
        threshold = np.quantile(field[coverage > 0.5], 1 - _HEAD_FRACTION)
        head = ((field - threshold) * scale + 0.5).clip(0, 1)[..., None]
        squares = np.sin(np.pi * x * scale / cell) * np.sin(np.pi * y * scale / cell)
        checker = first + (0.5 + 2 * squares).clip(0, 1)[..., None] * (second - first)
        textured = body(x, y)
        return textured + head * (1.05 * checker - textured)

    center = margin + rng.random(2) * (size - 2 * margin)
    return _Thing(outline=drawn.outline(rng), frame=frame, center=center, paint=paint)


def body_group(k: int, classes: int) -> int:
    """Returns the body texture of class index k: 0, 1 or 2. Each group has at least two members."""
    return k % min(3, classes // 2)


def _body(
    rng: np.random.Generator, k: int, classes: int, length: float
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Draws a striped texture. Members of a group differ in hue about as much as instances of a class."""
    group = body_group(k, classes)
    member = k // min(3, classes // 2)
    hue = (0.075, 0.55, 0.30)[group] + 0.012 * (member - 1) + 0.01 * rng.standard_normal()
    color = np.array(hsv_to_rgb(hue, rng.uniform(0.38, 0.5), rng.uniform(0.62, 0.8)), np.float32)
    direction = np.radians((20, 90, 150)[group] + 8 * (member - 1) + 5 * rng.standard_normal())
    waves = 2 * np.pi * length / (5.0 + 0.5 * member)
    across = np.array([np.cos(direction), np.sin(direction)], np.float32) * np.float32(waves)

    def paint(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return color * (1 + 0.13 * np.sin(across[0] * x + across[1] * y))[..., None]

    return paint

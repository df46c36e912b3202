"""The embedded data set: seed -> a small VOC devkit of drawn scenes, with tags, masks for scoring and saliency maps.

Every class is a family of random silhouettes with a *head*, a strong colour checker on a fifth of the object, and a
*body* whose texture it nearly shares with one or two other classes. Tags alone teach a plain classifier the heads; the
bodies have to be mined. Scenes hold several classes, some of which like each other's company, on noise of any hue, with
clutter that has no name.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from math import inf
from os import rename
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from mcis.datasets.classes import BACKGROUND, IGNORE
from mcis.datasets.decode import encode_labels
from mcis.datasets.errors import UserError

SPLITS = ("train_aug", "val")

Outline = list[np.ndarray]
"""A silhouette: the union of polygons (N, 2), x to the right and y down, within about [-1, 1]."""

_VERSION = 1
"""Raised when the same arguments come to draw other pictures, so that an old folder is not taken for a new one."""
_UNIT = 96
"""Lengths below are in pixels of an image with this long side, and grow with it."""
_MIN_SIZE = 48
_MIN_VISIBLE = 60
_MIN_SHARE = 0.45
"""What an object keeps in the mask, whatever covers it: so many pixels, and this share of those it began with."""
_HEAD_SHARE = 0.2
_SUPERSAMPLING = 3


def draw(root: Path, *, train: int = 480, val: int = 120, size: int = 96, classes: int = 8, seed: int = 0) -> None:
    """Draws the data set into `root`, in the layout of a VOC devkit.

        JPEGImages/<id>.jpg             RGB; the long side has `size` pixels, the short one as many or 3/4 of that
        SegmentationClassAug/<id>.png   palette PNG: 0 background, k + 1 for class index k, 255 on a thin border
        SaliencyMaps/<id>.png           grey, of train_aug only: soft, knows no classes, errs
        ImageSets/Segmentation/{train_aug,val}.txt       <id> a line
        ImageSets/Segmentation/{train_aug,val}_cls.txt   <id> <class index> ... a line
        classes.txt                     a name a line
        drawn.json                      the arguments

    Each image follows from (seed, split, its number in the split, size, classes), so a longer list begins with the
    shorter. A split of at least `classes` images holds every class. The folder appears complete or not at all; one that
    was drawn with the same arguments is left as it is.

    Raises:
        UserError: an argument out of range, or `root` holds something else.
    """
    root = Path(root).absolute()
    arguments = {"version": _VERSION, "train": train, "val": val, "size": size, "classes": classes, "seed": seed}
    _check(arguments)
    if _drawn_before(root, arguments):
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as aside:
        folder = Path(aside) / "drawn"  # the temporary directory itself is closed to other users, and would stay so
        folder.mkdir()
        for split, number in zip(SPLITS, (train, val), strict=True):
            scenes = (draw_scene(seed, split, index, size=size, classes=classes) for index in range(number))
            _write_split(folder, split, scenes)
        (folder / "classes.txt").write_text("".join(f"{kind.name}\n" for kind in KINDS[:classes]))
        (folder / "drawn.json").write_text(json.dumps(arguments) + "\n")
        try:
            rename(folder, root)
        except OSError:
            if not _drawn_before(root, arguments):  # another process may have been faster
                raise


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One image and all that is known about it.

    Attributes:
        rgb: (H, W, 3) uint8.
        labels: (H, W) uint8, 0 background, k + 1 for class index k, 255 on a border of one pixel.
        saliency: (H, W) uint8, what a detector of salient objects would give.
        tags: the class indices in `labels`, ascending; one at least.
    """

    rgb: np.ndarray
    labels: np.ndarray
    saliency: np.ndarray
    tags: tuple[int, ...]


def draw_scene(seed: int, split: str, index: int, *, size: int = 96, classes: int = 8) -> Scene:
    """Draws image `index` of a split; its long side has `size` pixels. The same arguments give the same scene."""
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    short = 3 * size // 4
    height, width = [(size, size), (short, size), (size, short)][rng.integers(3)]
    canvas = _Canvas(rng, height, width, size / _UNIT)
    for _ in range(rng.integers(2, 5)):
        canvas.place(_clutter, BACKGROUND, range(1))
    company = _company(rng, index % classes, classes)
    for position, k in enumerate(company):
        make = partial(_object, k=k, classes=classes, largest=44 if len(company) == 1 else 36)
        # The first class has to find a place, for an image has one tag at least; others may leave the scene.
        canvas.place(make, k + 1, count() if position == 0 else range(10))
    if rng.random() < 0.3:
        canvas.place(_clutter, BACKGROUND, range(3))  # in front of the objects
    labels = canvas.labels_with_border()
    tags = tuple(int(label) - 1 for label in np.unique(labels) if label not in (BACKGROUND, IGNORE))
    return Scene(rgb=canvas.rgb(), labels=labels, saliency=canvas.saliency(), tags=tags)


def _check(arguments: dict[str, int]) -> None:
    limits = {
        "train": (1, inf),
        "val": (1, inf),
        "size": (_MIN_SIZE, inf),
        "classes": (2, len(KINDS)),
        "seed": (0, inf),
    }
    for name, (low, high) in limits.items():
        if not low <= arguments[name] <= high:
            expected = f"at least {low}" if high == inf else f"{low} to {high}"
            raise UserError(f"{name} = {arguments[name]} for the embedded data set", expected, f"change {name}")


def _drawn_before(root: Path, arguments: dict[str, int]) -> bool:
    """Whether `root` holds just this data set; False for a missing or empty folder."""
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return False
    try:
        before = json.loads((root / "drawn.json").read_text())
    except (OSError, ValueError):
        before = "something else"
    if before != arguments:
        found = f"{root} already holds {before}"
        raise UserError(found, f"a new folder, or one drawn with {arguments}", f"remove {root} or name another folder")
    return True


def _write_split(folder: Path, split: str, scenes: Iterable[Scene]) -> None:
    kinds = ("JPEGImages", "SegmentationClassAug", "SaliencyMaps", "ImageSets/Segmentation")
    images, masks, saliency, lists = (folder / kind for kind in kinds)
    for kind in (images, masks, saliency, lists):
        kind.mkdir(parents=True, exist_ok=True)
    names, tagged = [], []
    for index, scene in enumerate(scenes):
        name = f"{split.removesuffix('_aug')}_{index:06d}"
        # Without chroma subsampling: at this size it would wash out the checkers.
        Image.fromarray(scene.rgb).save(images / f"{name}.jpg", quality=92, subsampling=0)
        (masks / f"{name}.png").write_bytes(encode_labels(scene.labels))
        if split == "train_aug":
            Image.fromarray(scene.saliency).save(saliency / f"{name}.png")
        names.append(name)
        tagged.append(" ".join([name, *map(str, scene.tags)]))
    (lists / f"{split}.txt").write_text("\n".join(names) + "\n")
    (lists / f"{split}_cls.txt").write_text("\n".join(tagged) + "\n")


def _company(rng: np.random.Generator, first: int, classes: int) -> list[int]:
    """Class indices of the objects to draw: `first`, whom it keeps company with, now and then one of them twice.

    A class meets its neighbour (0 and 1, 2 and 3, ...) six times as often as another, and low indices are commoner.
    """
    weights = np.linspace(1.5, 0.5, classes)
    if first ^ 1 < classes:
        weights[first ^ 1] *= 6
    weights[first] = 0
    more = min(rng.choice(3, p=[0.56, 0.33, 0.11]), classes - 1)
    others = rng.choice(classes, more, replace=False, p=weights / weights.sum())
    company = [first, *map(int, others)]
    if rng.random() < 0.2:
        company.append(company[rng.integers(len(company))])
    return company


# --- the canvas


@dataclass(frozen=True, kw_only=True)
class _Thing:
    """An outline with its pose on the image and its paint.

    Attributes:
        outline: polygons in the thing's own coordinates.
        frame: (2, 2), own coordinates -> pixels.
        centre: (2,), where own (0, 0) lies, pixels.
        paint: own x, y of each pixel (H, W) and coverage (H, W) -> colours (H, W, 3) in about 0..1.
    """

    outline: Outline
    frame: np.ndarray
    centre: np.ndarray
    paint: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class _Canvas:
    """A picture in the making: colours, labels, and which thing each pixel shows."""

    def __init__(self, rng: np.random.Generator, height: int, width: int, unit: float):
        self.rng, self.height, self.width, self.unit = rng, height, width, unit
        self.colours = _background(rng, height, width)
        self.rows, self.columns = np.mgrid[:height, :width].astype(np.float32) + np.float32(0.5)
        self.labels = np.zeros((height, width), np.uint8)
        self.things = np.zeros((height, width), np.int64)  # 0: the background, then 1, 2, ... in the order of placing
        self.keeps = [0.0]  # of thing i: how many pixels it has to keep; none unless it is an object with a class

    def place(self, make: Callable[["_Canvas"], _Thing], label: int, tries: Iterable[int]) -> None:
        """Paints a thing over what is there, unless every try hides too much of an object or shows too little of it."""
        for _ in tries:
            thing = make(self)
            coverage = self._coverage(thing)
            labels = np.where(coverage > 0.5, label, self.labels).astype(np.uint8)
            things = np.where(coverage > 0.5, len(self.keeps), self.things)
            visible = np.bincount(things[~_border(labels)], minlength=len(self.keeps) + 1)
            least = _MIN_VISIBLE * self.unit**2 if label != BACKGROUND else 0.0
            if (visible >= [*self.keeps, least]).all():
                self._blend(thing, coverage)
                self.labels, self.things = labels, things
                self.keeps.append(max(least, _MIN_SHARE * visible[-1]) if label != BACKGROUND else 0.0)
                return

    def _coverage(self, thing: _Thing) -> np.ndarray:
        """The share of each pixel that the thing covers, (H, W) float32 in [0, 1]."""
        stencil = Image.new("L", (self.width * _SUPERSAMPLING, self.height * _SUPERSAMPLING))
        pen = ImageDraw.Draw(stencil)
        for polygon in thing.outline:
            corners = (polygon @ thing.frame.T + thing.centre) * _SUPERSAMPLING
            pen.polygon([tuple(corner) for corner in corners.tolist()], fill=255)
        return np.asarray(stencil.reduce(_SUPERSAMPLING), np.float32) / 255

    def _blend(self, thing: _Thing, coverage: np.ndarray) -> None:
        """Lays the thing on the picture, darker towards its edge, with a shadow beneath."""
        (a, b), (c, d) = np.linalg.inv(thing.frame).astype(np.float32)
        across, down = self.columns - np.float32(thing.centre[0]), self.rows - np.float32(thing.centre[1])
        colours = thing.paint(a * across + b * down, c * across + d * down, coverage)
        soft = _blur(coverage, 2.2 * self.unit)
        step = round(1.5 * self.unit)
        shadow = np.zeros_like(soft)
        shadow[step:, step:] = soft[:-step, :-step]
        self.colours *= (1 - 0.45 * shadow)[..., None]
        self.colours += coverage[..., None] * (colours * (0.7 + 0.35 * soft)[..., None] - self.colours)

    def rgb(self) -> np.ndarray:
        return (self.colours.clip(0, 1) * 255).round().astype(np.uint8)

    def labels_with_border(self) -> np.ndarray:
        return np.where(_border(self.labels), IGNORE, self.labels).astype(np.uint8)

    def saliency(self) -> np.ndarray:
        """(H, W) uint8: blurred and blotchy; one object in ten is missed, one piece of clutter in eight kept."""
        chance = np.where(np.array(self.keeps) > 0, 0.9, 0.12)
        found = self.rng.random(len(chance)) < chance
        found[0] = False
        response = _blur(found[self.things].astype(np.float32), 1.8 * self.unit)
        blotches = 0.22 * _noise(self.rng, self.height, self.width, (8, 14))
        return (((response - 0.3 + blotches * (response > 0.02)) / 0.4).clip(0, 1) * 255).round().astype(np.uint8)


def _border(labels: np.ndarray) -> np.ndarray:
    """Pixels (H, W) whose right or lower neighbour has another label: a line one pixel wide along every edge."""
    border = np.zeros(labels.shape, bool)
    border[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    border[:-1] |= labels[:-1] != labels[1:]
    return border


def _blur(values: np.ndarray, radius: float) -> np.ndarray:
    """Gaussian blur of (H, W) in [0, 1] with standard deviation `radius` pixels, by way of 8 bits."""
    image = Image.fromarray((values * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(radius))
    return np.asarray(image, np.float32) / 255


def _noise(rng: np.random.Generator, height: int, width: int, cells: Iterable[int]) -> np.ndarray:
    """Smooth noise (H, W) float32 of mean 0 and deviation 1: a grid for each number of cells, weighed by cell size."""
    total = np.zeros((height, width), np.float32)
    for n in cells:
        grid = Image.fromarray(rng.standard_normal((n, n)).astype(np.float32))
        total += np.asarray(grid.resize((width, height), Image.Resampling.BICUBIC)) / n
    return (total - total.mean()) / total.std()


def _background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Two pale colours of any hue, mixed and shaded by noise, (H, W, 3)."""
    hue = rng.random()
    light, dark = rng.uniform(0.68, 0.9), rng.uniform(0.4, 0.6)
    one = np.array(hsv_to_rgb(hue, rng.uniform(0.1, 0.35), light), np.float32)
    other = np.array(hsv_to_rgb(hue + rng.uniform(-0.15, 0.15), rng.uniform(0.15, 0.4), dark), np.float32)
    mix = 1 / (1 + np.exp(-1.3 * _noise(rng, height, width, (3, 6, 12, 24))))
    shade = 1 + 0.04 * _noise(rng, height, width, (24, 48))
    return (one + mix[..., None] * (other - one)) * shade[..., None]


def _frame(scale: float, angle: float, stretch: float = 1.0, mirror: bool = False) -> np.ndarray:
    """(2, 2): own coordinates -> pixels; `stretch` widens and flattens, `angle` turns, radians."""
    cos, sin = np.cos(angle), np.sin(angle)
    flip = -1 if mirror else 1
    return np.array([[cos, -sin], [sin, cos]]) @ np.diag([flip * scale * stretch, scale / stretch])


def _clutter(canvas: _Canvas) -> _Thing:
    """An ellipse, a stick or a pebble of neutral colour, sometimes striped: nothing with a name."""
    rng = canvas.rng
    hue, saturation, value = rng.random(), rng.uniform(0.03, 0.18), rng.uniform(0.35, 0.85)
    colour = np.array(hsv_to_rgb(hue, saturation, value), np.float32)
    contrast = rng.choice([0, 0.12])
    scale = rng.uniform(6, 15) * canvas.unit
    shape = rng.integers(3)
    if shape == 0:
        outline = [_ellipse(0, 0, 1, rng.uniform(0.45, 1))]
    elif shape == 1:
        outline, scale = [_capsule(-1, 0, 1, 0, 0.09, 0.13)], 1.6 * scale
    else:
        angles = np.sort(rng.uniform(0, 2 * np.pi, 7))
        outline = [np.stack([np.cos(angles), np.sin(angles)], 1)]

    def paint(x: np.ndarray, y: np.ndarray, _: np.ndarray) -> np.ndarray:
        return colour * (1 + contrast * np.sin(2 * np.pi * x * scale / (5 * canvas.unit)))[..., None]

    centre = rng.uniform(0, 1, 2) * (canvas.width, canvas.height)
    return _Thing(outline=outline, frame=_frame(scale, rng.uniform(0, 2 * np.pi)), centre=centre, paint=paint)


# --- the classes


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A class of the drawn world.

    Attributes:
        name: what it is called.
        outline: draws one silhouette.
        head: own x, y -> a field; the fifth of the object where it is highest is the head.
        colours: the two of the head's checker, RGB in 0..255.
        tilt: how far an instance leans either way, degrees.
    """

    name: str
    outline: Callable[[np.random.Generator], Outline]
    head: Callable[[np.ndarray, np.ndarray], np.ndarray]
    colours: tuple[tuple[int, int, int], tuple[int, int, int]]
    tilt: float


def _object(canvas: _Canvas, *, k: int, classes: int, largest: float) -> _Thing:
    """One object of class index k, up to `largest` from its middle to its end, mostly within the image."""
    rng, unit, kind = canvas.rng, canvas.unit, KINDS[k]
    scale = unit * rng.uniform(15, largest)
    tilt = np.radians(rng.uniform(-1, 1) * kind.tilt)
    frame = _frame(scale, tilt, rng.uniform(0.85, 1.18), mirror=rng.random() < 0.5)
    size = np.array([canvas.width, canvas.height])
    margin = np.minimum(0.75 * scale, size / 2)
    body = _body(rng, k, classes, scale / unit)
    cell = rng.uniform(3.8, 4.8) * unit
    one, other = np.array(kind.colours, np.float32) / 255

    def paint(x: np.ndarray, y: np.ndarray, coverage: np.ndarray) -> np.ndarray:
        field = kind.head(x, y)
        threshold = np.quantile(field[coverage > 0.5], 1 - _HEAD_SHARE)
        head = ((field - threshold) * scale + 0.5).clip(0, 1)[..., None]
        squares = np.sin(np.pi * x * scale / cell) * np.sin(np.pi * y * scale / cell)
        checker = one + (0.5 + 2 * squares).clip(0, 1)[..., None] * (other - one)
        textured = body(x, y)
        return textured + head * (1.05 * checker - textured)

    centre = margin + rng.random(2) * (size - 2 * margin)
    return _Thing(outline=kind.outline(rng), frame=frame, centre=centre, paint=paint)


def body_group(k: int, classes: int) -> int:
    """Which body texture class index k has: 0, 1 or 2; every group has two members at least."""
    return k % min(3, classes // 2)


def _body(
    rng: np.random.Generator, k: int, classes: int, length: float
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A striped texture. Members of a group differ in hue by about as much as instances of one class do."""
    group = body_group(k, classes)
    member = k // min(3, classes // 2)
    hue = (0.075, 0.55, 0.30)[group] + 0.012 * (member - 1) + 0.01 * rng.standard_normal()
    colour = np.array(hsv_to_rgb(hue, rng.uniform(0.38, 0.5), rng.uniform(0.62, 0.8)), np.float32)
    direction = np.radians((20, 90, 150)[group] + 8 * (member - 1) + 5 * rng.standard_normal())
    waves = 2 * np.pi * length / (5.0 + 0.5 * member)
    across = np.array([np.cos(direction), np.sin(direction)], np.float32) * np.float32(waves)

    def paint(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return colour * (1 + 0.13 * np.sin(across[0] * x + across[1] * y))[..., None]

    return paint


def _ellipse(x: float, y: float, rx: float, ry: float, turn: float = 0.0) -> np.ndarray:
    angles = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    cos, sin = np.cos(turn), np.sin(turn)
    along, across = rx * np.cos(angles), ry * np.sin(angles)
    return np.stack([x + cos * along - sin * across, y + sin * along + cos * across], 1)


def _capsule(ax: float, ay: float, bx: float, by: float, ra: float, rb: float) -> np.ndarray:
    """A thick line with round ends, radius ra at (ax, ay) and rb at (bx, by)."""
    turn = np.arctan2(by - ay, bx - ax) + np.linspace(-np.pi / 2, np.pi / 2, 12)
    end = np.stack([bx + rb * np.cos(turn), by + rb * np.sin(turn)], 1)
    start = np.stack([ax - ra * np.cos(turn), ay - ra * np.sin(turn)], 1)
    return np.concatenate([end, start])


def _tube(path: np.ndarray, radius: float) -> Outline:
    return [_capsule(ax, ay, bx, by, radius, radius) for (ax, ay), (bx, by) in pairwise(path)]


def _both_sides(polygon: Sequence[tuple[float, float]]) -> Outline:
    right = np.array(polygon, float)
    return [right, right * (-1, 1)]


def _cactus(rng: np.random.Generator) -> Outline:
    trunk = rng.uniform(0.2, 0.27)
    parts = [_capsule(0, 0.6, 0, -1 + trunk, trunk, 0.9 * trunk)]
    for side in (-1, 1):
        start, reach, height = rng.uniform(-0.15, 0.25), side * rng.uniform(0.48, 0.65), rng.uniform(0.3, 0.5)
        parts += _tube(np.array([(0, start), (reach, start), (reach, start - height)]), rng.uniform(0.12, 0.16))
    rim, foot = rng.uniform(0.42, 0.5), rng.uniform(0.28, 0.36)
    return [*parts, np.array([(-rim, 0.52), (rim, 0.52), (foot, 1.02), (-foot, 1.02)])]


def _fish(rng: np.random.Generator) -> Outline:
    height, fin = rng.uniform(0.38, 0.52), rng.uniform(0.15, 0.35)
    tail = rng.uniform(0.4, 0.6)
    return [
        _ellipse(0.2, 0, 0.78, height),
        np.array([(-0.35, 0), (-1, -tail), (-0.82, 0), (-1, tail)]),
        np.array([(-0.2, -0.75 * height), (-0.15, -height - fin), (0.5, -0.85 * height)]),
        np.array([(0, 0.8 * height), (-0.1, height + 0.7 * fin), (0.35, 0.85 * height)]),
    ]


def _kite(rng: np.random.Generator) -> Outline:
    width, shoulder, sway = rng.uniform(0.52, 0.7), rng.uniform(-0.4, -0.2), rng.uniform(0.08, 0.18)
    y = np.linspace(0.45, 1.25, 9)
    x = sway * np.sin(np.linspace(0, 2 * np.pi, 9))
    bows = [wing + np.array([x[i], y[i]]) for i in (3, 6) for wing in _both_sides([(0, 0), (0.2, -0.11), (0.2, 0.11)])]
    sail = np.array([(0, -1), (width, shoulder), (0, 0.55), (-width, shoulder)])
    return [sail, *_tube(np.stack([x, y], 1), 0.035), *bows]


def _mug(rng: np.random.Generator) -> Outline:
    top, foot, height = rng.uniform(0.52, 0.62), rng.uniform(0.42, 0.55), rng.uniform(0.7, 0.85)
    turn = np.linspace(-0.45 * np.pi, 0.45 * np.pi, 10)
    reach, grip = rng.uniform(0.38, 0.5), rng.uniform(0.38, 0.48)
    handle = np.stack([0.45 + reach * np.cos(turn), grip * np.sin(turn)], 1)
    wall = np.array([(-top, -height), (top, -height), (foot, height), (-foot, height)])
    return [wall, _ellipse(0, -height, top, 0.1), _ellipse(0, height, foot, 0.1), *_tube(handle, 0.09)]


def _mushroom(rng: np.random.Generator) -> Outline:
    width, height, lip = rng.uniform(0.75, 0.95), rng.uniform(0.75, 1.0), rng.uniform(0.1, 0.2)
    turn = np.linspace(np.pi, 2 * np.pi, 30)
    cap = np.stack([width * np.cos(turn), height * np.sin(turn)], 1)
    neck = rng.uniform(0.16, 0.24)
    return [cap, _ellipse(0, 0, width, lip), _capsule(0, 0, rng.uniform(-0.1, 0.1), 0.75, neck, 1.35 * neck)]


def _owl(rng: np.random.Generator) -> Outline:
    width, ear = rng.uniform(0.5, 0.62), rng.uniform(0.85, 1.05)
    return [
        _ellipse(0, 0.2, width, 0.72),
        _ellipse(0, -0.35, 0.95 * width, 0.45),
        _ellipse(width, 0.25, 0.16, 0.48, 0.25),
        _ellipse(-width, 0.25, 0.16, 0.48, -0.25),
        *_both_sides([(0.05, -0.7), (0.9 * width, -ear), (0.9 * width, -0.3)]),
        *_both_sides([(0.05, 0.8), (0.38, 0.8), (0.42, 1), (0.05, 1)]),
    ]


def _rocket(rng: np.random.Generator) -> Outline:
    width, fin = rng.uniform(0.26, 0.36), rng.uniform(0.3, 0.42)
    along = np.linspace(0, 1, 20)
    hull = np.stack([width * np.sqrt(np.sin(np.pi * (0.02 + 0.8 * along))), -1.05 + 1.75 * along], 1)
    return [
        np.concatenate([hull, hull[::-1] * (-1, 1)]),
        *_both_sides([(0.9 * width, 0.05), (width + fin, 0.6), (width + fin, 1), (0.7 * width, 0.6)]),
        np.array([(-0.6 * width, 0.6), (0.6 * width, 0.6), (0.8 * width, 0.88), (-0.8 * width, 0.88)]),
    ]


def _snail(rng: np.random.Generator) -> Outline:
    shell, rise = rng.uniform(0.5, 0.62), rng.uniform(-0.25, 0.0)
    return [
        _ellipse(-0.15, 0.5 - shell, shell, shell),
        _capsule(-0.95, 0.58, 0.6, 0.5, 0.07, 0.17),
        _capsule(0.6, 0.5, 0.78, rise, 0.17, 0.18),
        *_tube(np.array([(0.7, rise), (0.62, rise - 0.42)]), 0.05),
        *_tube(np.array([(0.84, rise), (0.98, rise - 0.4)]), 0.05),
    ]


KINDS = (
    Kind(name="cactus", outline=_cactus, head=lambda x, y: y, colours=((232, 28, 140), (60, 8, 48)), tilt=12),
    Kind(name="fish", outline=_fish, head=lambda x, y: x, colours=((255, 122, 0), (20, 26, 80)), tilt=30),
    Kind(name="kite", outline=_kite, head=lambda x, y: -y, colours=((255, 222, 10), (24, 24, 24)), tilt=50),
    Kind(
        name="mug",
        outline=_mug,
        head=lambda x, y: -np.abs(y) - 4 * np.maximum(x - 0.55, 0),
        colours=((0, 214, 232), (12, 40, 84)),
        tilt=15,
    ),
    Kind(name="mushroom", outline=_mushroom, head=lambda x, y: -y, colours=((226, 16, 28), (255, 250, 240)), tilt=15),
    Kind(
        name="owl",
        outline=_owl,
        head=lambda x, y: -np.hypot(x, y + 0.32),
        colours=((150, 240, 20), (10, 60, 30)),
        tilt=12,
    ),
    Kind(name="rocket", outline=_rocket, head=lambda x, y: -y, colours=((134, 40, 235), (250, 244, 255)), tilt=60),
    Kind(
        name="snail",
        outline=_snail,
        head=lambda x, y: -np.hypot(x + 0.15, y),
        colours=((10, 90, 255), (255, 245, 250)),
        tilt=12,
    ),
)
"""The classes in the order of their indices."""

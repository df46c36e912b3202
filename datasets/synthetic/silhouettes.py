"""Synthetic classes: random silhouettes, with the position and the colors of their heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

Outline = list[np.ndarray]
"""A silhouette: union of polygons (N, 2), with x to the right and y down, within about [-1, 1]."""


@dataclass(frozen=True, kw_only=True)
class DrawnClass:
    """A synthetic class.

    Attributes:
        name: Name of the class.
        outline: Draws a silhouette.
        head: Maps x and y to a score. The fifth of the object with the highest scores is the head.
        colors: Two colors of the head's checker, RGB in 0..255.
        tilt: Maximum rotation to either side, degrees.
    """

    name: str
    outline: Callable[[np.random.Generator], Outline]
    head: Callable[[np.ndarray, np.ndarray], np.ndarray]
    colors: tuple[tuple[int, int, int], tuple[int, int, int]]
    tilt: float


def ellipse(x: float, y: float, rx: float, ry: float, turn: float = 0.0) -> np.ndarray:
    """Returns a polygon (48, 2) around (x, y) with radii rx and ry, rotated by `turn` radians."""
    angles = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    cos = np.cos(turn)
    sin = np.sin(turn)
    along = rx * np.cos(angles)
    across = ry * np.sin(angles)
    return np.stack([x + cos * along - sin * across, y + sin * along + cos * across], 1)


def capsule(ax: float, ay: float, bx: float, by: float, ra: float, rb: float) -> np.ndarray:
    """Returns a polygon (24, 2): a thick line with round ends, of radius ra at (ax, ay) and rb at (bx, by)."""
    turn = np.arctan2(by - ay, bx - ax) + np.linspace(-np.pi / 2, np.pi / 2, 12)
    end = np.stack([bx + rb * np.cos(turn), by + rb * np.sin(turn)], 1)
    start = np.stack([ax - ra * np.cos(turn), ay - ra * np.sin(turn)], 1)
    return np.concatenate([end, start])


def _tube(path: np.ndarray, radius: float) -> Outline:
    """Returns capsules along a path (N, 2)."""
    return [capsule(ax, ay, bx, by, radius, radius) for (ax, ay), (bx, by) in pairwise(path)]


def _both_sides(polygon: Sequence[tuple[float, float]]) -> Outline:
    """Returns a polygon and its reflection at the vertical axis."""
    right = np.array(polygon, float)
    return [right, right * (-1, 1)]


def _cactus(rng: np.random.Generator) -> Outline:
    trunk = rng.uniform(0.2, 0.27)
    parts = [capsule(0, 0.6, 0, -1 + trunk, trunk, 0.9 * trunk)]
    for side in (-1, 1):
        start = rng.uniform(-0.15, 0.25)
        reach = side * rng.uniform(0.48, 0.65)
        height = rng.uniform(0.3, 0.5)
        parts += _tube(np.array([(0, start), (reach, start), (reach, start - height)]), rng.uniform(0.12, 0.16))
    rim = rng.uniform(0.42, 0.5)
    foot = rng.uniform(0.28, 0.36)
    return [*parts, np.array([(-rim, 0.52), (rim, 0.52), (foot, 1.02), (-foot, 1.02)])]


def _fish(rng: np.random.Generator) -> Outline:
    height = rng.uniform(0.38, 0.52)
    fin = rng.uniform(0.15, 0.35)
    tail = rng.uniform(0.4, 0.6)
    return [
        ellipse(0.2, 0, 0.78, height),
        np.array([(-0.35, 0), (-1, -tail), (-0.82, 0), (-1, tail)]),
        np.array([(-0.2, -0.75 * height), (-0.15, -height - fin), (0.5, -0.85 * height)]),
        np.array([(0, 0.8 * height), (-0.1, height + 0.7 * fin), (0.35, 0.85 * height)]),
    ]


def _kite(rng: np.random.Generator) -> Outline:
    width = rng.uniform(0.52, 0.7)
    shoulder = rng.uniform(-0.4, -0.2)
    sway = rng.uniform(0.08, 0.18)
    y = np.linspace(0.45, 1.25, 9)
    x = sway * np.sin(np.linspace(0, 2 * np.pi, 9))
    bows = []
    for position in (3, 6):
        for wing in _both_sides([(0, 0), (0.2, -0.11), (0.2, 0.11)]):
            bows.append(wing + np.array([x[position], y[position]]))
    sail = np.array([(0, -1), (width, shoulder), (0, 0.55), (-width, shoulder)])
    return [sail, *_tube(np.stack([x, y], 1), 0.035), *bows]


def _mug(rng: np.random.Generator) -> Outline:
    top = rng.uniform(0.52, 0.62)
    foot = rng.uniform(0.42, 0.55)
    height = rng.uniform(0.7, 0.85)
    turn = np.linspace(-0.45 * np.pi, 0.45 * np.pi, 10)
    reach = rng.uniform(0.38, 0.5)
    grip = rng.uniform(0.38, 0.48)
    handle = np.stack([0.45 + reach * np.cos(turn), grip * np.sin(turn)], 1)
    wall = np.array([(-top, -height), (top, -height), (foot, height), (-foot, height)])
    return [wall, ellipse(0, -height, top, 0.1), ellipse(0, height, foot, 0.1), *_tube(handle, 0.09)]


def _mushroom(rng: np.random.Generator) -> Outline:
    width = rng.uniform(0.75, 0.95)
    height = rng.uniform(0.75, 1.0)
    lip = rng.uniform(0.1, 0.2)
    turn = np.linspace(np.pi, 2 * np.pi, 30)
    cap = np.stack([width * np.cos(turn), height * np.sin(turn)], 1)
    neck = rng.uniform(0.16, 0.24)
    return [cap, ellipse(0, 0, width, lip), capsule(0, 0, rng.uniform(-0.1, 0.1), 0.75, neck, 1.35 * neck)]


def _owl(rng: np.random.Generator) -> Outline:
    width = rng.uniform(0.5, 0.62)
    ear = rng.uniform(0.85, 1.05)
    return [
        ellipse(0, 0.2, width, 0.72),
        ellipse(0, -0.35, 0.95 * width, 0.45),
        ellipse(width, 0.25, 0.16, 0.48, 0.25),
        ellipse(-width, 0.25, 0.16, 0.48, -0.25),
        *_both_sides([(0.05, -0.7), (0.9 * width, -ear), (0.9 * width, -0.3)]),
        *_both_sides([(0.05, 0.8), (0.38, 0.8), (0.42, 1), (0.05, 1)]),
    ]


def _rocket(rng: np.random.Generator) -> Outline:
    width = rng.uniform(0.26, 0.36)
    fin = rng.uniform(0.3, 0.42)
    along = np.linspace(0, 1, 20)
    hull = np.stack([width * np.sqrt(np.sin(np.pi * (0.02 + 0.8 * along))), -1.05 + 1.75 * along], 1)
    return [
        np.concatenate([hull, hull[::-1] * (-1, 1)]),
        *_both_sides([(0.9 * width, 0.05), (width + fin, 0.6), (width + fin, 1), (0.7 * width, 0.6)]),
        np.array([(-0.6 * width, 0.6), (0.6 * width, 0.6), (0.8 * width, 0.88), (-0.8 * width, 0.88)]),
    ]


def _snail(rng: np.random.Generator) -> Outline:
    shell = rng.uniform(0.5, 0.62)
    rise = rng.uniform(-0.25, 0.0)
    return [
        ellipse(-0.15, 0.5 - shell, shell, shell),
        capsule(-0.95, 0.58, 0.6, 0.5, 0.07, 0.17),
        capsule(0.6, 0.5, 0.78, rise, 0.17, 0.18),
        *_tube(np.array([(0.7, rise), (0.62, rise - 0.42)]), 0.05),
        *_tube(np.array([(0.84, rise), (0.98, rise - 0.4)]), 0.05),
    ]


DRAWN_CLASSES = (
    DrawnClass(name="cactus", outline=_cactus, head=lambda x, y: y, colors=((232, 28, 140), (60, 8, 48)), tilt=12),
    DrawnClass(name="fish", outline=_fish, head=lambda x, y: x, colors=((255, 122, 0), (20, 26, 80)), tilt=30),
    DrawnClass(name="kite", outline=_kite, head=lambda x, y: -y, colors=((255, 222, 10), (24, 24, 24)), tilt=50),
    DrawnClass(
        name="mug",
        outline=_mug,
        head=lambda x, y: -np.abs(y) - 4 * np.maximum(x - 0.55, 0),
        colors=((0, 214, 232), (12, 40, 84)),
        tilt=15,
    ),
    DrawnClass(
        name="mushroom", outline=_mushroom, head=lambda x, y: -y, colors=((226, 16, 28), (255, 250, 240)), tilt=15
    ),
    DrawnClass(
        name="owl",
        outline=_owl,
        head=lambda x, y: -np.hypot(x, y + 0.32),
        colors=((150, 240, 20), (10, 60, 30)),
        tilt=12,
    ),
    DrawnClass(name="rocket", outline=_rocket, head=lambda x, y: -y, colors=((134, 40, 235), (250, 244, 255)), tilt=60),
    DrawnClass(
        name="snail",
        outline=_snail,
        head=lambda x, y: -np.hypot(x + 0.15, y),
        colors=((10, 90, 255), (255, 245, 250)),
        tilt=12,
    ),
)
"""The classes in the order of their indices."""

"""Masks from superpixels and tags alone, as an independent program would write them. It has no network.

    python superpixel_masks.py IMAGES TAGS OUT

IMAGES holds <id>.jpg, and TAGS has a line `<id> <class index> ...` per image, as VOC's lists. Superpixels whose color
is far from those at the image's border are foreground. Each gets the image's tag whose mean color in images of one tag
is nearest. Writes OUT/<id>.png: 0 background, k + 1 for class index k.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage.color import rgb2lab
from skimage.filters import threshold_otsu
from skimage.segmentation import slic

SUPERPIXELS = 150


def foreground(path: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Superpixels (H, W), their mean colors (S, 3) in CIELAB, and which of them are foreground (S,)."""
    with Image.open(path) as image:
        colors = rgb2lab(np.asarray(image.convert("RGB")))
    segments = slic(colors, SUPERPIXELS, convert2lab=False, start_label=0)
    counts = np.bincount(segments.ravel())
    sums = [np.bincount(segments.ravel(), channel.ravel()) for channel in np.moveaxis(colors, 2, 0)]
    means = np.stack(sums, axis=1) / counts[:, None]

    edge = np.unique(np.concatenate([segments[0], segments[-1], segments[:, 0], segments[:, -1]]))
    distances = np.linalg.norm(means[:, None] - means[edge], axis=2)
    contrast = np.sort(distances, axis=1)[:, : max(1, len(edge) // 4)].mean(axis=1)
    is_foreground = contrast > threshold_otsu(contrast) if np.ptp(contrast) else np.ones(len(contrast), bool)
    return segments, means, is_foreground


def main(images: Path, tags: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = [line.split() for line in tags.read_text().splitlines()]
    found = {name: foreground(images / f"{name}.jpg") for name, *_ in lines}
    of_class: dict[int, list[Any]] = {}
    for name, *words in lines:
        _, means, is_foreground = found[name]
        if len(words) == 1:
            of_class.setdefault(int(words[0]), []).append(means[is_foreground].mean(axis=0))
    centers = {k: np.mean(colors, axis=0) for k, colors in of_class.items()}

    for name, *words in lines:
        segments, means, is_foreground = found[name]
        classes = [k for k in map(int, words) if k in centers] or [int(words[0])]
        reference = np.stack([centers.get(k, np.zeros(3)) for k in classes])
        nearest = np.linalg.norm(means[:, None] - reference, axis=2).argmin(axis=1)
        labels = np.where(is_foreground, np.array(classes)[nearest] + 1, 0).astype(np.uint8)
        Image.fromarray(labels[segments]).save(out / f"{name}.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))

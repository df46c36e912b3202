"""Figures of masks that agree to the last digit with those of a plain program.

The plain program shares nothing with the project's: it opens each PNG with Pillow, counts in masks of one label after
another, erodes them by one pixel at a time as the authors of boundary IoU do, and divides whole numbers as fractions.
With --masks, of real masks; without, of drawn ones.
"""

import io
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import machine
import masks
import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from scipy import ndimage

from mcis.datasets.classes import VOC_CLASSES
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.files import read_json
from mcis.platform.runs.scores import SCORES
from mcis.platform.stages import evaluation

LABELS = len(VOC_CLASSES) + 1


def counted(pair: tuple[Path, bytes]) -> list[list[list[int]]]:
    """Pixels of a mask and its prediction: by true and predicted label; by label of boundary regions, (LABELS, 3)."""
    truth, prediction = (np.array(Image.open(source)) for source in (pair[0], io.BytesIO(pair[1])))
    scored, width = truth != 255, max(1, round(0.02 * math.sqrt(truth.shape[0] ** 2 + truth.shape[1] ** 2)))
    confusion, boundary = [[0] * LABELS for _ in range(LABELS)], [[0] * 3 for _ in range(LABELS)]
    present = [set(np.unique(mask).tolist()) - {255} for mask in (truth, prediction)]
    for label in present[0]:
        for other in present[1]:
            confusion[label][other] = int(np.sum((truth == label) & (prediction == other)))
    for label in present[0] | present[1]:
        regions = [edge(mask == label, width) & scored for mask in (truth, prediction)]
        boundary[label] = [int(np.sum(region)) for region in (regions[0] & regions[1], *regions)]
    return [confusion, boundary]


def edge(mask: np.ndarray, width: int) -> np.ndarray:
    """What erosion by a square of 3 x 3 pixels takes off a mask in so many steps; outside of the image nothing is."""
    if not mask.any():
        return mask
    return mask & ~ndimage.binary_erosion(mask, np.ones((3, 3)), iterations=width, border_value=0)


def figures(confusion: np.ndarray, boundary: np.ndarray) -> dict[str, Any]:
    """The fields of a score that follow from sums over all images."""
    names = ("background", *VOC_CLASSES)
    rows, columns = [int(n) for n in confusion.sum(axis=1)], [int(n) for n in confusion.sum(axis=0)]
    hits = [int(confusion[label][label]) for label in range(LABELS)]

    def percent(parts: list[int], wholes: list[int]) -> list[float | None]:
        return [float(100 * Fraction(p, w)) if w else None for p, w in zip(parts, wholes, strict=True)]

    def named(values: list[float | None]) -> dict[str, float | None]:
        return {name: None if v is None else round(v, 2) for name, v in zip(names, values, strict=True)}

    iou = percent(hits, [t + p - h for t, p, h in zip(rows, columns, hits, strict=True)])
    both, truth, predicted = ([int(n) for n in column] for column in boundary.T)
    edges = percent(both, [t + p - b for t, p, b in zip(truth, predicted, both, strict=True)])
    means = {
        name: round(statistics.fmean(v for v in values if v is not None), 2)
        for name, values in (("miou", iou), ("boundary_miou", edges))
    }
    further = {"precision": named(percent(hits, columns)), "recall": named(percent(hits, rows))}
    by_label = {"iou": named(iou), "boundary_iou": named(edges), "figures": further}
    return means | by_label | {"confusion": confusion.tolist()}


def plain(paths: list[Path], predictions: Path, mapped: Callable[..., Iterable[Any]] = map) -> list[dict[str, Any]]:
    """The figures of the predictions `plain` and `crf` by the plain program; `mapped` does what `map` does."""
    table = pq.read_table(predictions)
    files = {path.stem: path for path in paths}
    out = []
    for column in ("plain", "crf"):
        pairs = zip(table["image_id"].to_pylist(), table[column].to_pylist(), strict=True)
        confusion, boundary = np.zeros((LABELS, LABELS), int), np.zeros((LABELS, 3), int)
        for one, other in mapped(counted, [(files[i], png) for i, png in pairs]):
            confusion += np.array(one)
            boundary += np.array(other)
        out.append(figures(confusion, boundary))
    return out


def agreeing(ours: Any, theirs: Any) -> tuple[int, int]:
    """How many numbers of two nested values are the same, and how many there are."""
    if isinstance(theirs, dict):
        return agreeing([ours[key] for key in theirs], list(theirs.values()))
    if isinstance(theirs, list):
        pairs = [agreeing(a, b) for a, b in zip(ours, theirs, strict=True)]
        return sum(same for same, _ in pairs), sum(all_of for _, all_of in pairs)
    return int(ours == theirs), 1


def main() -> None:
    """Scores the masks both ways and prints the share of figures that are the same."""
    given = masks.arguments(__doc__).parse_args()
    print(machine.describe())
    with tempfile.TemporaryDirectory() as folder:
        paths = masks.find_or_draw(given.masks, given.images, Path(folder) / "masks")
        context = masks.evaluable(Path(folder) / "workspace", paths)
        config = resolve("voc", "scratch").config
        with ray_session(config.compute):
            evaluation.run(config, context)
        scores = read_json(context.part / SCORES)
        with machine.processes() as pool:
            expected = plain(paths, context.inputs["predict"] / "predictions", pool.imap_unordered)
    same, total = agreeing(scores, expected)
    for score, of_plain in zip(scores, expected, strict=True):
        for name in ("miou", "boundary_miou"):
            print(f"{score['name']:10}{name:15}{score[name]:8.2f}, plain program {of_plain[name]:8.2f}")
    print(f"{len(paths)} {'real' if given.masks else 'drawn'} masks, {same} of {total} figures are the same")
    print(f"ratio {same / total:.4g} target 1: figures of masks that agree to the last digit with a plain program's")


if __name__ == "__main__":
    main()

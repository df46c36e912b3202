"""Checks that the scores of masks agree to the last digit with an independent program.

The independent program shares no code with the project: it opens each PNG with Pillow, counts pixels label by label,
erodes masks by one pixel at a time like the authors of boundary IoU, and divides integers as fractions. With --masks it
uses real masks, otherwise synthetic ones.
"""

import io
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import harness
import mask_files
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

LABEL_NAMES = ("background", *VOC_CLASSES)
LABELS = len(LABEL_NAMES)
IGNORED = 255


def count_pixels(pair: tuple[Path, bytes]) -> list[list[list[int]]]:
    """Counts the pixels of a mask and its prediction.

    Args:
        pair: File of the mask, and the prediction as PNG.

    Returns:
        Pixels by true and predicted label, (LABELS, LABELS). Pixels of boundary regions by label, (LABELS, 3): in both
        regions, in the truth's, in the prediction's.
    """
    path, png = pair
    truth = np.array(Image.open(path))
    prediction = np.array(Image.open(io.BytesIO(png)))
    is_scored = truth != IGNORED
    width = max(1, round(0.02 * math.sqrt(truth.shape[0] ** 2 + truth.shape[1] ** 2)))
    true_labels = set(np.unique(truth).tolist()) - {IGNORED}
    predicted_labels = set(np.unique(prediction).tolist()) - {IGNORED}

    confusion = [[0] * LABELS for _ in range(LABELS)]
    for true_label in true_labels:
        for label in predicted_labels:
            confusion[true_label][label] = int(np.sum((truth == true_label) & (prediction == label)))

    boundary = [[0] * 3 for _ in range(LABELS)]
    for label in true_labels | predicted_labels:
        true_region = boundary_region(truth == label, width) & is_scored
        predicted_region = boundary_region(prediction == label, width) & is_scored
        boundary[label] = [
            int(np.sum(true_region & predicted_region)),
            int(np.sum(true_region)),
            int(np.sum(predicted_region)),
        ]
    return [confusion, boundary]


def boundary_region(mask: np.ndarray, width: int) -> np.ndarray:
    """Returns the pixels that `width` erosions by a square of 3 x 3 pixels remove. Outside the image nothing is set."""
    if not mask.any():
        return mask
    return mask & ~ndimage.binary_erosion(mask, np.ones((3, 3)), iterations=width, border_value=0)


def percentages(parts: Iterable[int], wholes: Iterable[int]) -> list[float | None]:
    """Divides exactly. None: the whole is 0."""
    return [float(100 * Fraction(part, whole)) if whole else None for part, whole in zip(parts, wholes, strict=True)]


def ious(intersections: list[int], truths: list[int], predictions: list[int]) -> list[float | None]:
    """Computes IoUs in percent from numbers of pixels by label."""
    triples = zip(intersections, truths, predictions, strict=True)
    return percentages(intersections, [truth + predicted - both for both, truth, predicted in triples])


def by_name(values: list[float | None]) -> dict[str, float | None]:
    """Rounds the values of all labels to two decimals."""
    return {name: None if value is None else round(value, 2) for name, value in zip(LABEL_NAMES, values, strict=True)}


def mean(values: list[float | None]) -> float:
    """Returns the mean over labels that have a value, rounded to two decimals."""
    return round(statistics.fmean(value for value in values if value is not None), 2)


def compute_score(confusion: np.ndarray, boundary: np.ndarray) -> dict[str, Any]:
    """Computes the fields of a score from the pixels of all images (see `count_pixels`)."""
    truths = [int(pixels) for pixels in confusion.sum(axis=1)]
    predictions = [int(pixels) for pixels in confusion.sum(axis=0)]
    hits = [int(confusion[label][label]) for label in range(LABELS)]
    iou = ious(hits, truths, predictions)
    boundary_hits, boundary_truths, boundary_predictions = ([int(pixels) for pixels in column] for column in boundary.T)
    boundary_iou = ious(boundary_hits, boundary_truths, boundary_predictions)
    return {
        "miou": mean(iou),
        "boundary_miou": mean(boundary_iou),
        "iou": by_name(iou),
        "boundary_iou": by_name(boundary_iou),
        "label_scores": {
            "precision": by_name(percentages(hits, predictions)),
            "recall": by_name(percentages(hits, truths)),
        },
        "confusion": confusion.tolist(),
    }


def independent_scores(
    paths: list[Path], predictions: Path, map_function: Callable[..., Iterable[Any]] = map
) -> list[dict[str, Any]]:
    """Scores the predictions `plain` and `crf` with the independent program.

    Args:
        paths: Files of the masks.
        predictions: Table of the predictions.
        map_function: Applies a function to all elements of a list, like `map`, in any order.
    """
    table = pq.read_table(predictions)
    files = {path.stem: path for path in paths}
    true_files = [files[image_id] for image_id in table["image_id"].to_pylist()]
    scores = []
    for column in ("plain", "crf"):
        pairs = list(zip(true_files, table[column].to_pylist(), strict=True))
        confusion = np.zeros((LABELS, LABELS), int)
        boundary = np.zeros((LABELS, 3), int)
        for image_confusion, image_boundary in map_function(count_pixels, pairs):
            confusion += np.array(image_confusion)
            boundary += np.array(image_boundary)
        scores.append(compute_score(confusion, boundary))
    return scores


def count_agreeing(values: Any, expected: Any) -> tuple[int, int]:
    """Returns how many numbers in two nested values are equal, and how many there are.

    Only the keys of `expected` are compared.
    """
    if isinstance(expected, dict):
        return count_agreeing([values[key] for key in expected], list(expected.values()))
    if isinstance(expected, list):
        equal = 0
        total = 0
        for value, expected_value in zip(values, expected, strict=True):
            value_equal, value_total = count_agreeing(value, expected_value)
            equal += value_equal
            total += value_total
        return equal, total
    return int(values == expected), 1


def main() -> None:
    """Scores the masks with both programs and prints the fraction of equal numbers."""
    options = mask_files.mask_parser(__doc__).parse_args()
    print(harness.describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        paths = mask_files.find_or_draw(options.masks, options.images, Path(folder) / "masks")
        context = mask_files.prepare_evaluation(Path(folder) / "workspace", paths)
        config = resolve("voc", "scratch").config
        with ray_session(config.compute):
            evaluation.run(config, context)
        scores = read_json(context.output / SCORES)
        with harness.process_pool() as pool:
            expected = independent_scores(paths, context.stage_outputs["predict"] / "predictions", pool.imap_unordered)

    for score, expected_score in zip(scores, expected, strict=True):
        for name in ("miou", "boundary_miou"):
            print(f"{score['name']:10}{name:15}{score[name]:8.2f}, independent program {expected_score[name]:8.2f}")
    equal, total = count_agreeing(scores, expected)
    print(f"{len(paths)} {'real' if options.masks else 'synthetic'} masks, {equal} of {total} numbers are equal")
    print(f"ratio {equal / total:.4g} target 1: share of mask scores that equal those of an independent implementation")


if __name__ == "__main__":
    main()

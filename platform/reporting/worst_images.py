"""Ranks the images of a split from the worst, and chooses the images of the gallery "Worst first".

Images are ranked by their mIoU if they were scored. Without ground truth, training images are ranked by the share of
pixels that their pseudo mask ignores, and predicted images by the number of their tags that the prediction lacks.

There may be millions of images, so they are ranked as columns. Only the chosen ones become Python objects.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.tables.large_tables import SHARD_ROWS, take_rows
from mcis.models.counts import Counts, overlaps
from mcis.models.metrics import iou_of, mean
from mcis.platform.outputs.counts import ImageCounts, read_counts
from mcis.platform.reporting.panels import Panel
from mcis.platform.runs.files import read_table
from mcis.platform.runs.scores import Score, percent

_MAX_ADDED_CLASSES = 24
"""Maximum number of classes whose worst image is added to the gallery."""


class Ranking(NamedTuple):
    """The ranked images of a split.

    Attributes:
        criterion: By what the images are ranked, as text.
        images: Columns `image_id` and `value`, which determines the rank; N rows, the worst first.
        note: Converts a value to text.
    """

    criterion: str
    images: pa.Table
    note: Callable[[Any], str]

    def notes(self, ranks: NDArray[np.int64]) -> list[str]:
        """Returns the values of some images as text.

        Args:
            ranks: Row numbers in `images`, (M,).
        """
        return [self.note(value) for value in take_rows(self.images, ranks)["value"].to_pylist()]


@dataclass(frozen=True, kw_only=True)
class WorstImages:
    """What the gallery "Worst first" shows of a split.

    Attributes:
        criterion: By what the images are ranked, as text.
        ranked: Number of images that were ranked.
        panels: The images, the worst first.
        notes: The value of each, as text.
        num_worst: Number of images that are the worst of all; those after them are each the worst of a class.
    """

    criterion: str
    ranked: int
    panels: Sequence[Panel]
    notes: Sequence[str]
    num_worst: int


def rank_by_miou(evaluate: Path, score: Score) -> Ranking:
    """Ranks the images of a score of label masks by their mIoU over the labels in truth or mask.

    Args:
        evaluate: Output of the stage `evaluate`.
        score: One of its scores.
    """
    counted = read_counts(evaluate, score)
    mious = _mious(counted, len(score.iou) - 1)
    order = np.argsort(mious, kind="stable")  # NaN is last
    order = order[np.isfinite(mious[order])]
    images = take_rows(pa.table({"image_id": counted.image_ids, "value": mious}), order)
    return Ranking(f"mIoU of the {_mask_name(score)} in the image", images, lambda miou: f"mIoU {miou:.1f}")


def _mious(counted: ImageCounts, num_classes: int) -> NDArray[np.float64]:
    """Computes the mIoU of each image in percent, (N,); NaN without scored pixels.

    The table of all labels of N images would take gigabytes, so that it is computed for a part of the images at a time.
    """
    num_images = len(counted.image_ids)
    mious = np.empty(num_images)
    for first in range(0, num_images, SHARD_ROWS):
        last = min(first + SHARD_ROWS, num_images)
        entries = slice(*np.searchsorted(counted.images, [first, last]))
        truth, predicted, part, pixels = counted.counts
        counts = Counts(truth[entries], predicted[entries], part[entries], pixels[entries])
        ious = iou_of(*overlaps(counts, counted.images[entries] - first, last - first, num_classes))
        mious[first:last] = [mean(values) for values in ious]
    return mious


def _mask_name(score: Score) -> str:
    if score.output == "pseudo_masks":
        return "pseudo mask"
    return "prediction after the CRF" if score.crf else "prediction"


def rank_by_ignored(masks: Path) -> Ranking:
    """Ranks images by the share of ignored pixels in their pseudo mask, without those that ignore nothing.

    Args:
        masks: Table of the pseudo masks, whose rows are in the order of the ids.
    """
    images = read_table(masks, ["image_id", "ignored"]).rename_columns(["image_id", "value"])
    images = images.filter(pc.greater(images["value"], 0))
    return Ranking(
        "share of pixels that the pseudo mask ignores, because there is no truth",
        take_rows(images, _descending(images["value"].to_numpy())),
        lambda share: f"{percent(share)} ignored",
    )


def rank_by_absent_tags(predictions: Path, classes: Sequence[str]) -> Ranking:
    """Ranks images by the number of their tags that no pixel of the prediction has, without those that lack none.

    Args:
        predictions: Table of the predictions, whose rows are in the order of the ids.
        classes: The K class names.
    """
    images = read_table(predictions, ["image_id", "absent_tags"]).rename_columns(["image_id", "value"])
    images = images.filter(pc.greater(pc.list_value_length(images["value"]), 0))
    return Ranking(
        "number of tags that the prediction lacks, because there is no truth",
        take_rows(images, _descending(pc.list_value_length(images["value"]).to_numpy())),
        lambda tags: f"lacks {', '.join(classes[tag] for tag in tags)}",
    )


def _descending(values: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the positions of values in descending order, (N,). Equal values stay in their order."""
    return np.lexsort((np.arange(len(values)), -values))


def choose_worst(tags: pa.ListArray, count: int) -> NDArray[np.int64]:
    """Chooses the worst images, and then the worst image of each class that none of them has.

    An image is added for the classes of which it is the worst, until _MAX_ADDED_CLASSES classes are added.

    Args:
        tags: Tags of the N ranked images, (N,).
        count: Number of images to choose, whatever their class.

    Returns:
        Positions in the ranking: the first `count`, then the added ones, each part in the order of the ranking.
    """
    rank_of_tag = np.repeat(np.arange(len(tags)), pc.list_value_length(tags).to_numpy(zero_copy_only=False))
    _, first_of_class = np.unique(tags.flatten().to_numpy(), return_index=True)
    worst_of_class = np.sort(rank_of_tag[first_of_class])
    added = np.unique(worst_of_class[worst_of_class >= count][:_MAX_ADDED_CLASSES])
    return np.concatenate([np.arange(min(count, len(tags))), added])

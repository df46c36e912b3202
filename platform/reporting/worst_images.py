"""Ranks the images of a split from the worst, and chooses the images of the gallery "Worst first".

Images are ranked by their mIoU if they were scored. Without ground truth, training images are ranked by the share of
pixels that their pseudo mask ignores, and predicted images by the number of their tags that the prediction lacks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mcis.models.counts import overlaps
from mcis.models.metrics import iou_of, mean
from mcis.platform.outputs.counts import read_counts
from mcis.platform.reporting.files import table_rows
from mcis.platform.reporting.panels import Panel
from mcis.platform.runs.scores import Score, percent

_MAX_ADDED_CLASSES = 24
"""Maximum number of classes whose worst image is added to the gallery."""


class RankedImage(NamedTuple):
    """An image and the value that determines its rank.

    Attributes:
        image_id: Its id.
        note: The value, as text.
    """

    image_id: str
    note: str


class Ranking(NamedTuple):
    """The ranked images of a split.

    Attributes:
        criterion: By what the images are ranked, as text.
        images: The images, the worst first.
    """

    criterion: str
    images: list[RankedImage]


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
    num_classes = len(score.iou) - 1
    ious = iou_of(*overlaps(counted.counts, counted.images, len(counted.image_ids), num_classes))
    mious = np.array([mean(values) for values in ious])
    images = []
    for position in np.argsort(mious, kind="stable"):  # NaN is last
        if np.isfinite(mious[position]):
            images.append(RankedImage(counted.image_ids[position], f"mIoU {mious[position]:.1f}"))
    return Ranking(f"mIoU of the {_mask_name(score)} in the image", images)


def _mask_name(score: Score) -> str:
    if score.output == "pseudo_masks":
        return "pseudo mask"
    return "prediction after the CRF" if score.crf else "prediction"


def rank_by_ignored(masks: Path) -> Ranking:
    """Ranks images by the share of ignored pixels in their pseudo mask, without those that ignore nothing.

    Args:
        masks: Table of the pseudo masks.
    """
    shares = {row["image_id"]: row["ignored"] for row in table_rows(masks, ["image_id", "ignored"]) if row["ignored"]}
    ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    images = [RankedImage(image_id, f"{percent(share)} ignored") for image_id, share in ordered]
    return Ranking("share of pixels that the pseudo mask ignores, because there is no truth", images)


def rank_by_absent_tags(predictions: Path, classes: Sequence[str]) -> Ranking:
    """Ranks images by the number of their tags that no pixel of the prediction has, without those that lack none.

    Args:
        predictions: Table of the predictions.
        classes: The K class names.
    """
    absent = {row["image_id"]: row["absent_tags"] for row in table_rows(predictions, ["image_id", "absent_tags"])}
    lacking = {image_id: tags for image_id, tags in absent.items() if tags}
    ordered = sorted(lacking.items(), key=lambda item: (-len(item[1]), item[0]))
    images = [RankedImage(image_id, f"lacks {', '.join(classes[tag] for tag in tags)}") for image_id, tags in ordered]
    return Ranking("number of tags that the prediction lacks, because there is no truth", images)


def choose_worst(tags: Sequence[Iterable[int]], count: int) -> list[int]:
    """Chooses the worst images, and then the worst image of each class that none of them has.

    Args:
        tags: Tags of the ranked images.
        count: Number of images to choose, whatever their class.

    Returns:
        Positions in the ranking: the first `count`, then the added ones, each part in the order of the ranking.
    """
    chosen = list(range(min(count, len(tags))))
    seen: set[int] = set()
    for position in chosen:
        seen.update(tags[position])

    added_classes = 0
    for position in range(len(chosen), len(tags)):
        new = set(tags[position]) - seen
        if new and added_classes < _MAX_ADDED_CLASSES:
            chosen.append(position)
            seen |= new
            added_classes += len(new)
    return chosen

"""Splits the 100 points of each scored output into its mIoU and the points that three kinds of errors cost."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mcis.models.metrics import error_shares, mean
from mcis.platform.runs.scores import Score, format_count

ERROR_KINDS = ("missed", "spurious", "confused")
"""The kinds of errors (`models.metrics.ErrorShares`), in the order of columns and bars."""


class ScoredStep(NamedTuple):
    """A score as a step of the pipeline. All values are in percent.

    Attributes:
        output: The scored output, a key of `SCORED_OUTPUTS`.
        name: Name of the score.
        images: Text with the split and the number of its images.
        miou: mIoU.
        points_lost: Points lost by each kind of error in `ERROR_KINDS`, means over the labels; with `miou` they sum to
            100.
        gain: mIoU minus the mIoU of the previous step; None if it is scored on another number of images or split.
        measures: Headings of the values of a label.
        labels: Name and values of each label, background first; None for values that it does not have.
    """

    output: str
    name: str
    images: str
    miou: float
    points_lost: list[float]
    gain: float | None
    measures: list[str]
    labels: list[tuple[str, list[float | None]]]


def scored_steps(scores: Sequence[Score]) -> list[ScoredStep]:
    """The steps of a run in their order, without baselines."""
    steps: list[ScoredStep] = []
    previous: Score | None = None
    for score in scores:
        if score.output != "baseline" and np.any(score.confusion):
            steps.append(_make_step(score, previous))
            previous = score
    return steps


def _make_step(score: Score, previous: Score | None) -> ScoredStep:
    shares = error_shares(np.array(score.confusion))
    rows: list[tuple[str, list[float | None]]] = []
    for label, name in enumerate(score.iou):
        boundary = score.boundary_iou[name] if score.boundary_iou else None
        registered = [by_label.get(name) for by_label in score.label_scores.values()]
        label_shares = [None if np.isnan(share[label]) else float(share[label]) for share in shares]
        rows.append((name, [score.iou[name], boundary, *registered, *label_shares]))

    gain = None
    if previous and previous.split == score.split and previous.images == score.images:
        gain = score.miou - previous.miou
    return ScoredStep(
        output=score.output,
        name=score.title if score.output == "pseudo_masks" else f"{score.title}, {score.name}",
        images=f"{score.split}, {format_count(score.images)} images",
        miou=score.miou,
        points_lost=[mean(share) for share in shares],
        gain=gain,
        measures=["IoU", "boundary IoU", *score.label_scores, *ERROR_KINDS],
        labels=rows,
    )

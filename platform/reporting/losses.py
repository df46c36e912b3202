"""What each step of a run loses: of 100 points of mIoU, those that it has and how it lost the others."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mcis.models.metrics import error_shares, mean
from mcis.platform.runs.scores import Score, Scored, grouped

LOST = ("missed", "spurious", "confused")
"""How points are lost, see `models.metrics.ErrorShares`; in the order of the columns and bars."""


class Step(NamedTuple):
    """A score as a step of the pipeline.

    Attributes:
        name: what is scored and which of them.
        images: the split and how many images it has.
        miou: percent.
        lost: means over the labels by LOST, percent; with `miou` they sum to 100.
        gain: points of mIoU above the step before; None where that is of other images.
        figures: headings of the figures of a label.
        labels: each label's figures, percent, background first; None for what the label or the score does not have.
    """

    what: Scored
    name: str
    images: str
    miou: float
    lost: list[float]
    gain: float | None
    figures: list[str]
    labels: list[tuple[str, list[float | None]]]


def steps(scores: Sequence[Score]) -> list[Step]:
    """The steps of a run in their order, without baselines."""
    scored = [score for score in scores if score.what != "baseline" and np.any(score.confusion)]
    return [_step(score, before) for before, score in zip([None, *scored], scored, strict=False)]


def _step(score: Score, before: Score | None) -> Step:
    alike = before is not None and (before.split, before.images) == (score.split, score.images)
    lost = error_shares(np.array(score.confusion))
    rows: list[tuple[str, list[float | None]]] = []
    for label, name in enumerate(score.iou):
        boundary = score.boundary_iou[name] if score.boundary_iou else None
        further = [of.get(name) for of in score.figures.values()]
        of_label = [None if np.isnan(part[label]) else float(part[label]) for part in lost]
        rows.append((name, [score.iou[name], boundary, *further, *of_label]))
    return Step(
        what=score.what,
        name=score.title if score.what == "pseudo_masks" else f"{score.title}, {score.name}",
        images=f"{score.split}, {grouped(score.images)} images",
        miou=score.miou,
        lost=[mean(part) for part in lost],
        gain=score.miou - before.miou if before and alike else None,
        figures=["IoU", "boundary IoU", *score.figures, *LOST],
        labels=rows,
    )

"""What each step of a run loses: of 100 points of mIoU, those that it has and how it lost the others."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mcis.models.metrics import losses, mean
from mcis.platform.runs.scores import Score, Scored, grouped

LOST = ("missed", "spurious", "confused")
"""How points are lost, see `models.metrics.Losses`; in the order of the columns and bars."""


class LabelRow(NamedTuple):
    """The figures of a label, percent; None for what the label or the score does not have."""

    name: str
    iou: float | None
    boundary_iou: float | None
    figures: list[float | None]
    lost: list[float | None]


class Bound(NamedTuple):
    """An upper bound: a run that trained the same network on the ground truth, and its scores of segmentation."""

    run: str
    scores: Sequence[Score]


class Step(NamedTuple):
    """A score as a step of the pipeline.

    Attributes:
        name: what is scored and which of them.
        images: the split and how many images it has.
        miou: percent.
        lost: means over the labels by LOST, percent; with `miou` they sum to 100.
        gain: points of mIoU above the step before; None where that is of other images.
        run: the run of the upper bound; None for the run's own steps.
        figures: names of the further figures of a label.
        labels: the figures of each label, background first.
    """

    what: Scored
    name: str
    images: str
    miou: float
    lost: list[float]
    gain: float | None
    run: str | None
    figures: list[str]
    labels: list[LabelRow]


def steps(scores: Sequence[Score], bound: Bound | None) -> list[Step]:
    """The steps of a run in their order, without baselines, and those of the upper bound behind them."""
    runs = [(None, scores), *([(bound.run, bound.scores)] if bound else [])]
    out: list[Step] = []
    for run, of_run in runs:
        before: Score | None = None
        for score in of_run:
            if score.what == "baseline" or not np.any(score.confusion):
                continue
            alike = before is not None and (before.split, before.images) == (score.split, score.images)
            out.append(_step(score, run, score.miou - before.miou if before and alike else None))
            before = score
    return out


def _step(score: Score, run: str | None, gain: float | None) -> Step:
    lost = losses(np.array(score.confusion))
    rows = [
        LabelRow(
            name,
            score.iou[name],
            score.boundary_iou[name] if score.boundary_iou else None,
            [of.get(name) for of in score.figures.values()],
            [None if np.isnan(part[label]) else float(part[label]) for part in lost],
        )
        for label, name in enumerate(score.iou)
    ]
    name = score.title if score.what == "pseudo_masks" else f"{score.title}, {score.name}"
    images = f"{score.split}, {grouped(score.images)} images"
    return Step(
        score.what, name, images, score.miou, [mean(part) for part in lost], gain, run, list(score.figures), rows
    )

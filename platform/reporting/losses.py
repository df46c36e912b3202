"""What each step of a run loses: of 100 points of mIoU, those that it has and how it lost the others."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mcis.models.metrics import losses, mean
from mcis.platform.runs.scores import Score, Scored, grouped

LOST = ("missed", "spurious", "confused")
"""How points are lost, see `models.metrics.Losses`; in the order of the columns and bars."""


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
        figures: headings of the figures of a label.
        labels: each label's figures, percent, background first; None for what the label or the score does not have.
    """

    what: Scored
    name: str
    images: str
    miou: float
    lost: list[float]
    gain: float | None
    run: str | None
    figures: list[str]
    labels: list[tuple[str, list[float | None]]]


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
    rows: list[tuple[str, list[float | None]]] = []
    for label, name in enumerate(score.iou):
        boundary = score.boundary_iou[name] if score.boundary_iou else None
        further = [of.get(name) for of in score.figures.values()]
        of_label = [None if np.isnan(part[label]) else float(part[label]) for part in lost]
        rows.append((name, [score.iou[name], boundary, *further, *of_label]))
    title = score.title if score.what == "pseudo_masks" else f"{score.title}, {score.name}"
    images = f"{score.split}, {grouped(score.images)} images"
    figures = ["IoU", "boundary IoU", *score.figures, *LOST]
    return Step(score.what, title, images, score.miou, [mean(part) for part in lost], gain, run, figures, rows)

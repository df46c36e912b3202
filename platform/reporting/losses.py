"""Where each step of a run loses mIoU: the points that it has of 100, and how it lost the others."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mcis.models.metrics import error_shares, mean
from mcis.platform.runs.scores import Score, grouped

LOST = ("missed", "spurious", "confused")
"""How points are lost (`models.metrics.ErrorShares`), in the order of columns and bars."""


class Step(NamedTuple):
    """A score as a step of the pipeline. All values are in percent.

    Attributes:
        what: what is scored, a key of `SCORED_OUTPUTS`.
        name: name of the score.
        images: the split and the number of its images.
        miou: mIoU.
        lost: means over the labels in the order of `LOST`; with `miou` they sum to 100.
        gain: mIoU minus that of the step before; None if that is scored on other images.
        measures: headings of the values of a label.
        labels: name and values of each label, background first; None for values that it does not have.
    """

    what: str
    name: str
    images: str
    miou: float
    lost: list[float]
    gain: float | None
    measures: list[str]
    labels: list[tuple[str, list[float | None]]]


def steps(scores: Sequence[Score]) -> list[Step]:
    """The steps of a run in their order, without baselines."""
    scored = [score for score in scores if score.what != "baseline" and np.any(score.confusion)]
    previous = [None, *scored[:-1]]
    return [_make_step(score, before) for score, before in zip(scored, previous, strict=False)]


def _make_step(score: Score, before: Score | None) -> Step:
    lost = error_shares(np.array(score.confusion))
    rows: list[tuple[str, list[float | None]]] = []
    for label, name in enumerate(score.iou):
        boundary = score.boundary_iou[name] if score.boundary_iou else None
        registered = [by_label.get(name) for by_label in score.figures.values()]
        label_losses = [None if np.isnan(part[label]) else float(part[label]) for part in lost]
        rows.append((name, [score.iou[name], boundary, *registered, *label_losses]))

    gain = None
    if before and (before.split, before.images) == (score.split, score.images):
        gain = score.miou - before.miou
    return Step(
        what=score.what,
        name=score.title if score.what == "pseudo_masks" else f"{score.title}, {score.name}",
        images=f"{score.split}, {grouped(score.images)} images",
        miou=score.miou,
        lost=[mean(part) for part in lost],
        gain=gain,
        measures=["IoU", "boundary IoU", *score.figures, *LOST],
        labels=rows,
    )

"""Two runs compared image by image: differences of mIoU with intervals of a paired bootstrap over the images."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mcis.datasets.errors import UserError
from mcis.datasets.index import shown
from mcis.models.bootstrap import bootstrap_differences, percentile_interval
from mcis.models.counts import boundary_overlaps, overlaps
from mcis.models.metrics import iou_of, mean
from mcis.platform.runs.counts import ImageCounts, read_counts
from mcis.platform.runs.scores import CURVES, SCORES, Score, Scored, read_scores
from mcis.platform.runs.workspace import Workspace, read_json


class Difference(NamedTuple):
    """A figure of two runs, percent, and the second's less the first's with its interval, points.

    Attributes:
        what: what is scored, and which of them.
        figure: `mIoU` or `boundary mIoU`.
        split, images: the images that both runs are scored on.
    """

    what: str
    figure: str
    split: str
    images: int
    first: float
    second: float
    difference: float
    low: float
    high: float


class _Run(NamedTuple):
    """A run to compare: its name, where the stage `evaluate` left its output, and the scores there."""

    name: str
    output: Path
    scores: Mapping[str, Score]


def compare(
    workspace: Workspace,
    first: str,
    second: str,
    *,
    what: Sequence[Scored],
    resamples: int,
    seed: int,
    confidence: float,
) -> Iterator[Difference]:
    """Compares the scores that two runs have in common.

    Args:
        first, second: names of the runs.
        what: of the scores to compare.
        resamples, seed, confidence: of the bootstrap, see `models.bootstrap`.

    Raises:
        UserError: a run is absent, has no scores, or they have none in common; or the images, their truth or the
            classes differ.
    """
    runs = [_opened(workspace, name, what) for name in (first, second)]
    common = [key for key in runs[0].scores if key in runs[1].scores]
    if not common:
        raise UserError(
            f"runs {first!r} and {second!r} have no score in common: "
            + "; ".join(f"{run.name!r} has {', '.join(run.scores) or 'none'}" for run in runs),
            f"scores of both of {', '.join(what)}",
            "let both runs reach the same stage, or choose what to compare by --what",
        )
    for key in common:
        counted = [_counts(run, key) for run in runs]
        _check_same_images(runs, key, counted)
        own, others = (run.scores[key] for run in runs)
        for figure, overlap in (("mIoU", overlaps), ("boundary mIoU", boundary_overlaps)):
            if figure == "mIoU" or own.boundary_iou is not None:
                sums = [overlap(c.counts, c.images, len(c.image_ids), len(own.iou) - 1) for c in counted]
                values = bootstrap_differences(*sums, resamples=resamples, seed=seed)
                mious = [mean(iou_of(*(part.sum(axis=0) for part in of))) for of in sums]
                low, high = percentile_interval(values, confidence)
                yield Difference(
                    what=f"{own.title}, {' and '.join(dict.fromkeys((own.name, others.name)))}",
                    figure=figure,
                    split=own.split,
                    images=own.images,
                    first=mious[0],
                    second=mious[1],
                    difference=mious[1] - mious[0],
                    low=low,
                    high=high,
                )


def _opened(workspace: Workspace, name: str, what: Sequence[Scored]) -> _Run:
    outputs = workspace.outputs(name)
    if "evaluate" not in outputs or not (outputs["evaluate"] / SCORES).exists():
        raise UserError(
            f"run {name!r} has no scores in {workspace.root}",
            "a run that came to the stage evaluate",
            f"run it; {workspace.root} has the runs {shown([path.name for path in workspace.in_runs()])}",
        )
    scores: dict[str, Score] = {}
    for score in read_scores(outputs["evaluate"] / SCORES):
        if score.what in what:
            # Maps with related images come behind those of a single round, which are the run's where it has no others.
            scores[f"{score.title}, {score.name}" if score.what == "segmentation" else score.title] = score
    return _Run(name, outputs["evaluate"], scores)


def _counts(run: _Run, key: str) -> ImageCounts:
    """What was counted for a score; of localization maps at the run's own threshold, so that both are label masks."""
    score = run.scores[key]
    counted = read_counts(run.output, score)
    if score.what != "localization_maps":
        return counted
    thresholds, _ = read_json(run.output / CURVES)[score.name]
    above = counted.counts.part >= thresholds.index(score.threshold)
    predicted = np.where(above, counted.counts.predicted, 0).astype(np.uint8)
    return counted._replace(counts=counted.counts._replace(predicted=predicted))


def _check_same_images(runs: Sequence[_Run], key: str, counted: Sequence[ImageCounts]) -> None:
    """Raises UserError unless both runs were scored on the same images, the same truth and the same classes."""
    first, second = runs
    labels = [list(run.scores[key].iou) for run in runs]
    expected = "runs scored on the same images, with the same ground truth and classes"
    if labels[0] != labels[1]:
        raise UserError(
            f"{key}: run {first.name!r} has the classes {', '.join(labels[0][1:])}, "
            f"run {second.name!r} {', '.join(labels[1][1:])}",
            expected,
            "compare runs of the same classes in the same order",
        )
    ids = [counts.image_ids for counts in counted]
    if ids[0] != ids[1]:
        alone = [sorted(set(mine) - set(others)) for mine, others in (ids, ids[::-1])]
        lists = [f"{len(a)} of {run.name!r} alone ({shown(a)})" for a, run in zip(alone, runs, strict=True) if a]
        raise UserError(
            f"{key}: run {first.name!r} is scored on {len(ids[0])} images of {first.scores[key].split}, "
            f"run {second.name!r} on {len(ids[1])} of {second.scores[key].split}: {'; '.join(lists)}",
            expected,
            "score both on the same split of the same lists (predict.split, data.*), or choose another --what",
        )
    other = np.flatnonzero(counted[0].truth_crc != counted[1].truth_crc)
    if len(other):
        raise UserError(
            f"{key}: {len(other)} of {len(ids[0])} images have another ground truth in run {second.name!r} than in "
            f"run {first.name!r}: {shown([ids[0][i] for i in other])}",
            expected,
            "repeat the command of the run with the older masks, which scores it anew",
        )

"""Runs compared image by image: differences of mIoU with intervals of a paired bootstrap over the images and seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from mcis.datasets.errors import UserError
from mcis.datasets.index import shown
from mcis.models.bootstrap import bootstrap_differences, percentile_interval
from mcis.models.counts import Overlaps, overlaps
from mcis.models.metrics import iou_of, mean
from mcis.platform.outputs.counts import ImageCounts, read_counts
from mcis.platform.reporting.compared_runs import Case, KeyRow, Run, differing_keys, merged
from mcis.platform.runs.files import read_json
from mcis.platform.runs.scores import CURVES, HEADINGS, ORIGIN, Score, Scored


class Settings(NamedTuple):
    """Of the bootstrap: number and seed of its resamples, and the share that an interval is to hold, in (0, 1)."""

    resamples: int = 2000
    seed: int = 0
    confidence: float = 0.95


class Difference(NamedTuple):
    """A figure of the baseline and of another case, percent, and how much the other has more, points.

    Attributes:
        what: what is scored, and which of them.
        figure: `mIoU` or `boundary mIoU`.
        case: label of the other case.
        split, images: the images that both are scored on.
        first, second: of the baseline and of the other case, means over their seeds.
        low, high: the interval of the difference.
    """

    what: str
    figure: str
    case: str
    split: str
    images: int
    first: float
    second: float
    difference: float
    low: float
    high: float

    @property
    def is_found(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def verdict(self) -> str:
        """The difference in words: none where the interval contains 0; there is none of fewer than two images."""
        if np.isnan(self.low) or np.isnan(self.high):
            return "cannot be told"
        return "no difference" if not self.is_found else "higher" if self.low > 0 else "lower"


class ScoreRow(NamedTuple):
    """A score of a case and what it means.

    Attributes:
        case: its label.
        name: which score, such as "R = 3".
        miou, boundary_miou: percent, means over the seeds; None where there is none.
        deviation, boundary_deviation: of the seeds, points; None for one seed.
        iou: percent by name of the label, means over the seeds in which it occurs; None where it occurs in none.
        meaning: heading -> text; of several seeds all texts.
        incomparable: why it cannot be compared with the baseline's; None where it can.
        differing: headings of the meaning under which the baseline has another text.
    """

    case: str
    name: str
    miou: float
    deviation: float | None
    boundary_miou: float | None
    boundary_deviation: float | None
    iou: Mapping[str, float | None]
    meaning: Mapping[str, str]
    incomparable: str | None
    differing: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class ComparedScore:
    """One score of all cases that have it.

    Attributes:
        title: what is scored; of segmentation also which of them.
        rows: of the cases in their order.
        absent: labels of the cases without such a score.
        image_mious: mIoU in percent by the name of a run and the id of an image, NaN where no pixel of it is scored.
    """

    what: Scored
    title: str
    rows: list[ScoreRow]
    absent: list[str]
    differences: list[Difference]
    image_mious: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What cases have in common and what not; the first of them is the baseline."""

    cases: Sequence[Case]
    keys: Sequence[KeyRow]
    scores: Sequence[ComparedScore]
    settings: Settings

    @property
    def differences(self) -> list[Difference]:
        return [difference for score in self.scores for difference in score.differences]

    @property
    def same_origin(self) -> dict[str, str]:
        """Heading and text of what all scores have in common of their origin."""
        meanings = [row.meaning for score in self.scores for row in score.rows]
        return {h: meanings[0][h] for h in ORIGIN if h in meanings[0] and len({m.get(h) for m in meanings}) == 1}

    @property
    def drawn(self) -> str:
        """What the intervals are over, in words."""
        several = [len(case.runs) > 1 for case in self.cases]
        seeds = " and seeds" if all(several) else ", and of the seeds where there are several" if any(several) else ""
        paired = all(several) and all(case.seeds == self.cases[0].seeds for case in self.cases)
        resamples, seed, confidence = self.settings
        return (
            f"{100 * confidence:g} % intervals over {resamples} resamples of the images{seeds}; "
            f"the images{' and seeds' if paired else ''} are drawn for all alike (seed {seed})"
        )

    @property
    def limits(self) -> str:
        """What the intervals do not tell, in words."""
        alone = [case.label for case in self.cases if len(case.runs) == 1]
        untold = f"; what another seed would change they do not tell of {', '.join(alone)}" if alone else ""
        return (
            f"An interval that contains 0 is marked as no difference. Each interval stands for itself: of many, about "
            f"{100 * (1 - self.settings.confidence):.3g} % leave out 0 where there is no difference{untold}."
        )


def compare(cases: Sequence[Case], settings: Settings) -> Comparison:
    """Compares the scores of cases with those of the first one.

    Raises:
        UserError: no score of another case can be compared with the first one's; the truth of an image is another one;
            or the runs of a case do not have the same scores on the same images.
    """
    if not any(key in run.scores for key in cases[0].runs[0].scores for case in cases[1:] for run in case.runs):
        raise UserError(
            "there is no score that a run has in common with the first: "
            + "; ".join(f"{run.name!r} has {', '.join(run.scores) or 'none'}" for case in cases for run in case.runs),
            "runs with scores of the same kind",
            "let them reach the same stage, or choose what to compare by --what",
        )
    scores = compared_scores(cases, settings)
    comparison = Comparison(cases=cases, keys=differing_keys(cases), scores=scores, settings=settings)
    if not comparison.differences:
        reasons = [
            f"{score.title}, {row.case}: {row.incomparable}"
            for score in scores
            for row in score.rows
            if row.incomparable
        ]
        raise UserError(
            "no score can be compared: " + "; ".join(reasons),
            "runs scored on the same images",
            "score them on the same split of the same lists (predict.split, data.*)",
        )
    return comparison


def compared_scores(cases: Sequence[Case], settings: Settings) -> list[ComparedScore]:
    """All scores of cases beside those of the first one; without differences where these are of other images.

    Raises:
        UserError: the truth of an image is another one; or the runs of a case do not have the same scores on the same
            images.
    """
    keys = dict.fromkeys(key for case in cases for run in case.runs for key in run.scores)
    return [_compared(cases, key, settings) for key in keys]


def _compared(cases: Sequence[Case], key: str, settings: Settings) -> ComparedScore:
    having = [case for case in cases if case.scores(key)]
    baseline = cases[0].scores(key)
    counted = {run.name: _counts(run, key) for case in having for run in case.runs if key in run.scores}
    stacks: dict[str, dict[str, Overlaps]] = {}
    image_mious: dict[str, Mapping[str, float]] = {}
    rows: list[ScoreRow] = []
    differences: list[Difference] = []
    for case in having:
        _check_whole(case, key)
        incomparable = _why_incomparable(cases[0], case, key, counted) if baseline else f"{cases[0].label} has none"
        of_runs = [_overlaps(counted[run.name], score) for run, score in zip(case.runs, case.scores(key), strict=True)]
        for run, of_run in zip(case.runs, of_runs, strict=True):
            image_mious[run.name] = _image_mious(counted[run.name].image_ids, of_run["mIoU"])
        rows.append(_row(case, key, incomparable, rows[0] if baseline and rows else None))
        if incomparable is None:
            stacks[case.label] = {
                figure: Overlaps(*(np.stack(part) for part in zip(*(of[figure] for of in of_runs), strict=True)))
                for figure in of_runs[0]
            }
            if case is not cases[0]:
                differences += _differences(cases[0], case, key, stacks, settings)
    return ComparedScore(
        what=having[0].scores(key)[0].what,
        title=key,
        rows=rows,
        absent=[case.label for case in cases if case not in having],
        differences=differences,
        image_mious=image_mious,
    )


def _differences(
    first: Case, second: Case, key: str, stacks: Mapping[str, Mapping[str, Overlaps]], settings: Settings
) -> list[Difference]:
    """The differences of two cases, (S, N, K + 1) overlaps by label of the case and figure."""
    own, others = first.scores(key)[0], second.scores(key)[0]
    out = []
    for figure in stacks[first.label]:
        if figure not in stacks[second.label]:
            continue
        stacked = [stacks[case.label][figure] for case in (first, second)]
        values = bootstrap_differences(
            *stacked, paired=first.seeds == second.seeds, resamples=settings.resamples, seed=settings.seed
        )
        mious = [fmean(mean(iou) for iou in iou_of(*(part.sum(axis=1) for part in of))) for of in stacked]
        low, high = percentile_interval(values, settings.confidence)
        out.append(
            Difference(
                what=f"{own.title}, {merged((own.name, others.name))}",
                figure=figure,
                case=second.label,
                split=own.split,
                images=own.images,
                first=mious[0],
                second=mious[1],
                difference=mious[1] - mious[0],
                low=low,
                high=high,
            )
        )
    return out


def _row(case: Case, key: str, incomparable: str | None, baseline: ScoreRow | None) -> ScoreRow:
    scores = case.scores(key)
    meanings = [score.meaning() for score in scores]
    headings = [heading for heading in HEADINGS if any(heading in meaning for meaning in meanings)]
    meaning = {heading: merged(of[heading] for of in meanings if heading in of) for heading in headings}
    boundary = [score.boundary_miou for score in scores if score.boundary_miou is not None]
    named = {name: [of for score in scores if (of := score.iou[name]) is not None] for name in scores[0].iou}
    return ScoreRow(
        case=case.label,
        name=merged(score.name for score in scores),
        miou=fmean(score.miou for score in scores),
        deviation=stdev(score.miou for score in scores) if len(scores) > 1 else None,
        boundary_miou=fmean(boundary) if boundary else None,
        boundary_deviation=stdev(boundary) if len(boundary) > 1 else None,
        iou={name: fmean(values) if values else None for name, values in named.items()},
        meaning=meaning,
        incomparable=incomparable,
        differing=frozenset(h for h in headings if baseline and meaning[h] != baseline.meaning.get(h)),
    )


def _overlaps(counted: ImageCounts, score: Score) -> dict[str, Overlaps]:
    """The overlaps of a score's images, (N, K + 1), by figure."""
    of = (counted.counts, counted.images, len(counted.image_ids), len(score.iou) - 1)
    figures = {"mIoU": overlaps(*of)}
    return figures if score.boundary_iou is None else figures | {"boundary mIoU": overlaps(*of, boundary=True)}


def _image_mious(image_ids: Sequence[str], of: Overlaps) -> dict[str, float]:
    return dict(zip(image_ids, (mean(iou) for iou in iou_of(*of)), strict=True))


def _counts(run: Run, key: str) -> ImageCounts:
    """What was counted for a score; of localization maps at the run's own threshold, so that all are label masks."""
    score, output = run.scores[key], run.outputs["evaluate"]
    counted = read_counts(output, score)
    if score.what != "localization_maps":
        return counted
    if not (output / CURVES).is_file():
        raise UserError(
            f"{output / CURVES} is missing, which run {run.name!r} wrote beside its scores",
            "the stage evaluate as the run left it",
            "repeat the run's command with --from evaluate",
        )
    thresholds, _ = read_json(output / CURVES)[score.name]
    above = counted.counts.part >= thresholds.index(score.threshold)
    predicted = np.where(above, counted.counts.predicted, 0).astype(np.uint8)
    return counted._replace(counts=counted.counts._replace(predicted=predicted))


def _check_whole(case: Case, key: str) -> None:
    """Raises UserError where a run of a case lacks a score that others of it have."""
    without = [run.name for run in case.runs if key not in run.scores]
    if without:
        raise UserError(
            f"{key}: {', '.join(without)} of the case {case.label} have no such score",
            "the same scores of all runs of a case",
            "repeat the commands of these runs, which go on from there, or choose what to compare by --what",
        )


def _why_incomparable(baseline: Case, case: Case, key: str, counted: Mapping[str, ImageCounts]) -> str | None:
    """Why a case's score cannot be compared with the baseline's: other images; None where it can.

    Raises:
        UserError: images have another truth, or the runs of a case are scored on other images than one another.
    """
    first = baseline.runs[0]
    reasons = []
    for run in case.runs:
        _check_truth(first, run, key, counted)
        reasons.append(_other_images(first, run, key, counted))
    if len({reason is None for reason in reasons}) > 1 or (case is baseline and reasons[-1]):
        raise UserError(
            f"{key}: the runs of the case {case.label} are scored on different images: {merged(filter(None, reasons))}",
            "runs of one case on the same images",
            "repeat the commands of these runs",
        )
    return reasons[0]


def _other_images(first: Run, second: Run, key: str, counted: Mapping[str, ImageCounts]) -> str | None:
    scores = [run.scores[key] for run in (first, second)]
    if scores[0].split != scores[1].split:
        return f"scored on split {scores[1].split}, {first.name} on {scores[0].split}"
    ids = [counted[run.name].image_ids for run in (first, second)]
    if ids[0] == ids[1]:
        return None
    alone = [sorted(set(mine) - set(others)) for mine, others in (ids, ids[::-1])]
    lists = [f"{len(a)} of {run.name} alone ({shown(a)})" for a, run in zip(alone, (first, second), strict=True) if a]
    return f"scored on {len(ids[1])} images of {scores[1].split}, {first.name} on {len(ids[0])}: {'; '.join(lists)}"


def _check_truth(first: Run, second: Run, key: str, counted: Mapping[str, ImageCounts]) -> None:
    """Raises UserError where an image that both runs were scored on has another truth in one of them."""
    truths = [dict(zip(of.image_ids, of.truth_crc, strict=True)) for of in (counted[first.name], counted[second.name])]
    common = [image_id for image_id in truths[0] if image_id in truths[1]]
    other = [image_id for image_id in common if truths[0][image_id] != truths[1][image_id]]
    if other:
        raise UserError(
            f"{key}: {len(other)} of {len(common)} images have another ground truth in run {second.name!r} than in "
            f"run {first.name!r}: {shown(other)}",
            "runs scored against the same ground truth",
            "repeat the command of the run with the older masks, which scores it anew",
        )

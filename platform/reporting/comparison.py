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
from mcis.platform.reporting.compared_runs import Case, ConfigValue, Run, differing_keys, merged
from mcis.platform.runs.files import read_json
from mcis.platform.runs.scores import CURVES, Score, Scored, headings_of, same_origin


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
    def verdict(self) -> str:
        """The difference in words: none where the interval contains 0; there is none of fewer than two images."""
        if np.isnan(self.low) or np.isnan(self.high):
            return "cannot be told"
        return "higher" if self.low > 0 else "lower" if self.high < 0 else "no difference"


class ScoreRow(NamedTuple):
    """A score of a case and what it means.

    Attributes:
        case: its label.
        name: which score, such as "R = 3".
        miou, boundary_miou: percent, means over the seeds; None where there is none.
        deviation, boundary_deviation: of the seeds, points; None for one seed.
        iou: percent by name of the label, means over the seeds in which it occurs; None where it occurs in none.
        meaning: heading -> text; of several seeds all texts.
    """

    case: str
    name: str
    miou: float
    deviation: float | None
    boundary_miou: float | None
    boundary_deviation: float | None
    iou: Mapping[str, float | None]
    meaning: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ComparedScore:
    """One score of the baseline and of the cases that can be compared with it.

    Attributes:
        title: what is scored; of segmentation also which of them.
        rows: of the baseline and of these cases, in their order.
        left_out: why the other cases cannot be compared, by their labels.
        image_mious: mIoU in percent by the name of a run and the id of an image, NaN where no pixel of it is scored.
    """

    what: Scored
    title: str
    rows: list[ScoreRow]
    left_out: Mapping[str, str]
    differences: list[Difference]
    image_mious: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What cases have in common and what not; the first of them is the baseline."""

    cases: Sequence[Case]
    keys: Mapping[str, Sequence[ConfigValue | None]]
    scores: Sequence[ComparedScore]
    settings: Settings

    @property
    def differences(self) -> list[Difference]:
        return [difference for score in self.scores for difference in score.differences]

    @property
    def same_origin(self) -> dict[str, str]:
        """Heading and text of what all scores have in common of their origin."""
        return same_origin([row.meaning for score in self.scores for row in score.rows])

    @property
    def explanation(self) -> str:
        """What the intervals are over, and what they do not tell."""
        resamples, seed, confidence = self.settings
        seeds = ", and of the seeds where there are several" if any(len(case.runs) > 1 for case in self.cases) else ""
        return (
            f"{100 * confidence:g} % intervals over {resamples} resamples of the images{seeds}, drawn for all runs "
            f"alike (seed {seed}). An interval that contains 0 is marked as no difference. Each stands for itself: of "
            f"many, about {100 * (1 - confidence):.3g} % leave out 0 where there is no difference. Of a single run they"
            " do not tell what another seed would change."
        )


def compare(cases: Sequence[Case], settings: Settings) -> Comparison:
    """Compares the scores of cases with those of the first one.

    Raises:
        UserError: no score of another case can be compared with the first one's; the truth of an image is another one;
            or the runs of the first case are not scored on the same images.
    """
    scores = compared_scores(cases, settings)
    if not any(score.differences for score in scores):
        reasons = [f"{score.title}, {case}: {why}" for score in scores for case, why in score.left_out.items()]
        raise UserError(
            f"no score can be compared: {'; '.join(reasons) or f'{cases[0].label} has none'}",
            "runs with the same scores, of the same images",
            "let them reach the same stage, score them on the same split of the same lists (predict.split, data.*), or "
            "choose what to compare by --what",
        )
    return Comparison(cases=cases, keys=differing_keys(cases), scores=scores, settings=settings)


def compared_scores(cases: Sequence[Case], settings: Settings) -> list[ComparedScore]:
    """All scores of the first case beside those of the others.

    Raises:
        UserError: the truth of an image is another one; or the runs of the first case are not scored on the same
            images.
    """
    return [_compared(cases, key, settings) for key in cases[0].runs[0].scores]


def _compared(cases: Sequence[Case], key: str, settings: Settings) -> ComparedScore:
    baseline, left_out = cases[0], {}
    first = baseline.runs[0]
    counted = {run.name: _counts(run, key) for case in cases for run in case.runs if key in run.scores}
    rows: list[ScoreRow] = []
    differences: list[Difference] = []
    figures: dict[str, dict[str, Overlaps]] = {}
    image_mious: dict[str, Mapping[str, float]] = {}
    for case in cases:
        reasons = (_why_incomparable(first, run, key, counted) for run in case.runs)
        if reason := next(filter(None, reasons), None):
            if case is baseline:
                found = f"{key}: the runs of {case.label} cannot be compared with one another: {reason}"
                raise UserError(found, "runs of one case on the same images", "repeat the commands of these runs")
            left_out[case.label] = reason
            continue
        of_runs = [_overlaps(counted[run.name], run.scores[key]) for run in case.runs]
        for run, of_run in zip(case.runs, of_runs, strict=True):
            ious = iou_of(*of_run["mIoU"])
            image_mious[run.name] = dict(zip(counted[run.name].image_ids, map(mean, ious), strict=True))
        rows.append(_row(case, key))
        figures[case.label] = {
            figure: Overlaps(*(np.stack(part) for part in zip(*(of[figure] for of in of_runs), strict=True)))
            for figure in of_runs[0]
        }
        if case is not baseline:
            differences += _differences(baseline, case, key, figures, settings)
    return ComparedScore(
        what=first.scores[key].what,
        title=key,
        rows=rows,
        left_out=left_out,
        differences=differences,
        image_mious=image_mious,
    )


def _differences(
    first: Case, second: Case, key: str, figures: Mapping[str, Mapping[str, Overlaps]], settings: Settings
) -> list[Difference]:
    """The differences of two cases, (S, N, K + 1) overlaps by label of the case and figure."""
    own, others = first.scores(key)[0], second.scores(key)[0]
    out = []
    for figure in figures[first.label].keys() & figures[second.label].keys():
        stacked = [figures[case.label][figure] for case in (first, second)]
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
    return sorted(out, key=lambda each: each.figure != "mIoU")


def _row(case: Case, key: str) -> ScoreRow:
    scores = case.scores(key)
    meanings = [score.meaning() for score in scores]
    meaning = {h: merged(of[h] for of in meanings if h in of) for h in headings_of(meanings)}
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
    )


def _overlaps(counted: ImageCounts, score: Score) -> dict[str, Overlaps]:
    """The overlaps of a score's images, (N, K + 1), by figure."""
    of = (counted.counts, counted.images, len(counted.image_ids), len(score.iou) - 1)
    figures = {"mIoU": overlaps(*of)}
    return figures if score.boundary_iou is None else figures | {"boundary mIoU": overlaps(*of, boundary=True)}


def _counts(run: Run, key: str) -> ImageCounts:
    """What was counted for a score; of localization maps at the run's own threshold, so that all are label masks."""
    score, output = run.scores[key], run.outputs["evaluate"]
    counted = read_counts(output, score)
    if score.what != "localization_maps":
        return counted
    thresholds, _ = read_json(output / CURVES)[score.name]
    above = counted.counts.part >= thresholds.index(score.threshold)
    predicted = np.where(above, counted.counts.predicted, 0).astype(np.uint8)
    return counted._replace(counts=counted.counts._replace(predicted=predicted))


def _why_incomparable(first: Run, second: Run, key: str, counted: Mapping[str, ImageCounts]) -> str | None:
    """Why a run's score cannot be compared with that of the first one: it has none, or of other images.

    Raises:
        UserError: an image that both runs were scored on has another truth in one of them.
    """
    if key not in second.scores:
        return f"{second.name} has none"
    scores, both = (first.scores[key], second.scores[key]), (counted[first.name], counted[second.name])
    truths = [dict(zip(of.image_ids, of.truth_crc, strict=True)) for of in both]
    common = truths[0].keys() & truths[1].keys()
    other = sorted(image_id for image_id in common if truths[0][image_id] != truths[1][image_id])
    if other:
        raise UserError(
            f"{key}: {len(other)} of {len(common)} images have another ground truth in run {second.name!r} than in "
            f"run {first.name!r}: {shown(other)}",
            "runs scored against the same ground truth",
            "repeat the command of the run with the older masks, which scores it anew",
        )
    if scores[0].split != scores[1].split:
        return f"scored on split {scores[1].split}, {first.name} on {scores[0].split}"
    if truths[0].keys() == truths[1].keys():
        return None
    alone = [sorted(mine.keys() - others.keys()) for mine, others in (truths, truths[::-1])]
    lists = [f"{len(a)} of {run.name} alone ({shown(a)})" for a, run in zip(alone, (first, second), strict=True) if a]
    return f"scored on {len(truths[1])} images of {scores[1].split}, {first.name} on {len(truths[0])}: " + "; ".join(
        lists
    )

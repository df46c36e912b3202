"""Runs compared image by image: differences of mIoU with intervals of a paired bootstrap over the images and seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.index import shown
from mcis.models.bootstrap import bootstrap_differences, percentile_interval
from mcis.models.counts import Overlaps, overlaps
from mcis.models.metrics import iou_of, mean
from mcis.platform.outputs.counts import read_counts
from mcis.platform.reporting.compared_runs import Case, Run, differing_keys, merged
from mcis.platform.runs.files import read_json
from mcis.platform.runs.results import VAL_MAP, StageResult, read_result
from mcis.platform.runs.scores import CURVES, Scored, grouped, headings_of, same_origin

FIGURES = ("mIoU", "boundary mIoU")
_Counted = tuple[Case, Mapping[str, Overlaps]]
"""A case and by figure its runs' overlaps by label of the images, (S, N, K + 1)."""


class _OfRun(NamedTuple):
    """A run's images, what their truth is known by, and by figure the overlaps of their labels, (N, K + 1)."""

    image_ids: Sequence[str]
    truth_crc: NDArray[np.uint32]
    overlaps: Mapping[str, Overlaps]


class Settings(NamedTuple):
    """Of the bootstrap: number and seed of its resamples, and the share that an interval is to hold, in (0, 1)."""

    resamples: int = 2000
    seed: int = 0
    confidence: float = 0.95


class Difference(NamedTuple):
    """A figure of the baseline and of another case, percent.

    Attributes:
        what: what is scored, and which of them.
        figure: one of FIGURES.
        case: label of the other case.
        split, images: the images that both are scored on.
        first, second: of the baseline and of the other case, means over their seeds.
        low, high: the interval of what the other case has more, points.
    """

    what: str
    figure: str
    case: str
    split: str
    images: int
    first: float
    second: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """The difference in words: none where the interval contains 0; there is none of fewer than two images."""
        if np.isnan(self.low) or np.isnan(self.high):
            return "cannot be told"
        return "higher" if self.low > 0 else "lower" if self.high < 0 else "no difference"


@dataclass(frozen=True, kw_only=True)
class ComparedScore:
    """One score of the baseline and of the cases that can be compared with it.

    Attributes:
        title: what is scored; of segmentation also which of them.
        cases: the baseline and these cases, in their order.
        left_out: why the other cases cannot be compared, by their labels.
        image_mious: mIoU in percent by the name of a run and the id of an image, NaN where no pixel of it is scored.
    """

    what: Scored
    title: str
    cases: Sequence[Case]
    left_out: Mapping[str, str]
    differences: Sequence[Difference]
    image_mious: Mapping[str, Mapping[str, float]]


class Table(NamedTuple):
    """Rows of text below headings; those in `numbers` stand above numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What cases have in common and what not; the first of them is the baseline."""

    cases: Sequence[Case]
    scores: Sequence[ComparedScore]
    settings: Settings

    def tables(self) -> list[Table]:
        """Configuration, scores, trained classifiers and differences, as the terminal and the page show them."""
        labels, keys, scores, differences = [case.label for case in self.cases], differing_keys(self.cases), [], []
        for score in self.scores:
            scores += [_row(case, score.title, self._same_origin()) for case in score.cases]
            for of in score.differences:
                mious = (f"{of.first:.2f}", f"{of.second:.2f}", f"{of.second - of.first:+.2f}")
                figures = (grouped(of.images), *mious, f"{of.low:+.2f} to {of.high:+.2f}")
                differences.append((of.what, of.figure, of.case, of.verdict, of.split, *figures))
        right = tuple(f"{figure} %" for figure in FIGURES)
        numbers = ("images", "baseline", "compared", "difference", "interval")
        columns = ("score", "figure", "run", "verdict", "split", *numbers)
        precision = f"{VAL_MAP} %"
        classifiers = [row for row in map(_classifier, self.cases) if set(row[1:]) != {"-"}]
        return [
            Table("Configuration", ("key", *labels), [(key, *values) for key, values in keys.items()]),
            Table("Scores", ("score", "run", "which", "split", "meaning", *right), scores, right),
            *([Table("Classifiers", ("run", precision), classifiers, (precision,))] if classifiers else []),
            Table(f"Differences to {labels[0]}", columns, differences, numbers),
        ]

    def remarks(self) -> list[str]:
        """What all scores share, which are not compared and why, what the intervals are over and do not tell."""
        resamples, seed, confidence = self.settings
        seeds = ", and over seeds by Student's t" if any(len(case.runs) > 1 for case in self.cases) else ""
        same = ", ".join(f"{heading} {text}" for heading, text in self._same_origin().items())
        lines = [f"all scores: {same}"] if same else []
        for score in self.scores:
            lines += [f"not compared: {score.title} of {case}: {why}" for case, why in score.left_out.items()]
        return [
            *lines,
            f"{100 * confidence:g} % intervals over {resamples} resamples of the images, the same of all runs (seed "
            f"{seed}){seeds}. An interval that contains 0 is marked as no difference. Each stands for itself: of "
            f"many, about {100 * (1 - confidence):.3g} % leave out 0 where there is no difference. Of a single run they"
            " do not tell what another seed would change.",
        ]

    def _same_origin(self) -> dict[str, str]:
        """Heading and text of what all scores have in common of their origin."""
        found = [of for score in self.scores for case in score.cases for of in case.scores(score.title)]
        return same_origin([score.meaning() for score in found])


def _row(case: Case, title: str, same: Mapping[str, str]) -> list[str]:
    """A case's row in the table of scores, without what is the `same` for all of them."""
    scores = case.scores(title)
    meanings = [score.meaning() for score in scores]
    made = [f"{h} {merged(of[h] for of in meanings if h in of)}" for h in headings_of(meanings, but=("split", *same))]
    boundary = [score.boundary_miou for score in scores if score.boundary_miou is not None]
    figures = (_figure([score.miou for score in scores]), _figure(boundary))
    return [title, case.label, merged(score.name for score in scores), scores[0].split, ", ".join(made), *figures]


def _classifier(case: Case) -> list[str]:
    """A case's row in the table of classifiers: figures that all of its runs have."""
    outputs = [run.outputs["train_classifier"] for run in case.runs if "train_classifier" in run.outputs]
    counts = [read_result(output, StageResult).counts for output in outputs]
    precisions = [count[VAL_MAP] for count in counts if count.get(VAL_MAP) is not None]
    return [case.label, _figure(precisions if len(precisions) == len(case.runs) else [])]


def _figure(values: Sequence[float]) -> str:
    """A figure, of several seeds with their deviation; `-` where there is none."""
    deviation = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{deviation}" if values else "-"


def compare(cases: Sequence[Case], settings: Settings) -> Comparison:
    """Compares the scores of cases with those of the first one; UserError where the first case has no score, or its
    runs are not scored on the same images; or the truth of an image is another one."""
    titles = list(cases[0].runs[0].scores)
    if not titles:
        raise UserError(f"{cases[0].label} has no score", "one to compare others with", "choose another first run")
    scores = [_compared(cases, title, settings) for title in titles]
    return Comparison(cases=cases, scores=scores, settings=settings)


def _compared(cases: Sequence[Case], title: str, settings: Settings) -> ComparedScore:
    first, left_out = cases[0].runs[0], {}
    counted = {run.name: _of_run(run, title) for case in cases for run in case.runs if title in run.scores}
    compared: list[_Counted] = []
    for case in cases:
        reasons = (_why_incomparable(first, run, title, counted) for run in case.runs)
        if (reason := next(filter(None, reasons), None)) is None:
            compared.append((case, _overlaps(case, counted)))
        elif case is not cases[0]:
            left_out[case.label] = reason
        else:
            found = f"{title}: the runs of {case.label} cannot be compared with one another: {reason}"
            raise UserError(found, "runs of one case on the same images", "repeat the commands of these runs")
    return ComparedScore(
        what=first.scores[title].what,
        title=title,
        cases=[case for case, _ in compared],
        left_out=left_out,
        differences=[
            _difference(compared[0], of_case, title, figure, settings)
            for of_case in compared[1:]
            for figure in FIGURES
            if all(figure in figures for _, figures in (compared[0], of_case))
        ],
        image_mious={
            run.name: dict(zip(counted[run.name].image_ids, map(mean, iou_of(*parts)), strict=True))
            for case, figures in compared
            for run, *parts in zip(case.runs, *figures["mIoU"], strict=True)
        },
    )


def _difference(first: _Counted, second: _Counted, title: str, figure: str, settings: Settings) -> Difference:
    """The difference of two cases in a figure."""
    (baseline, _), (other, _) = first, second
    both, own = [overlaps_of[figure] for _, overlaps_of in (first, second)], baseline.scores(title)[0]
    paired = baseline.seeds == other.seeds
    values = bootstrap_differences(*both, paired=paired, resamples=settings.resamples, seed=settings.seed)
    before, after = (fmean(mean(iou) for iou in iou_of(*(part.sum(axis=1) for part in of))) for of in both)
    low, high = percentile_interval(values, settings.confidence)
    what = f"{own.title}, {merged((own.name, other.scores(title)[0].name))}"
    return Difference(what, figure, other.label, own.split, own.images, before, after, low, high)


def _overlaps(case: Case, counted: Mapping[str, _OfRun]) -> dict[str, Overlaps]:
    """The overlaps by label of the images of a case's runs, (S, N, K + 1), by figure."""
    runs = [counted[run.name].overlaps for run in case.runs]
    stacked = {of: zip(*(figures[of] for figures in runs), strict=True) for of in runs[0]}
    return {figure: Overlaps(*map(np.stack, parts)) for figure, parts in stacked.items()}


def _of_run(run: Run, title: str) -> _OfRun:
    """What was counted for a score; of localization maps at the run's own threshold, so that all are label masks, and
    without boundaries."""
    score, output = run.scores[title], run.outputs["evaluate"]
    image_ids, truth_crc, counts, images = read_counts(output, score)
    if score.what == "localization_maps":
        thresholds, _ = read_json(output / CURVES)[score.name]
        above = counts.part >= thresholds.index(score.threshold)
        counts = counts._replace(predicted=np.where(above, counts.predicted, 0).astype(np.uint8))
    of, sides = (counts, images, len(image_ids), len(score.iou) - 1), (False, True) if score.boundary_iou else (False,)
    return _OfRun(image_ids, truth_crc, {FIGURES[boundary]: overlaps(*of, boundary=boundary) for boundary in sides})


def _why_incomparable(first: Run, second: Run, title: str, counted: Mapping[str, _OfRun]) -> str | None:
    """Why a run's score cannot be compared with that of the first one: it has none, or of other images. UserError where
    an image that both were scored on has another truth in one of them."""
    if title not in second.scores:
        return f"{second.name} has none"
    scores, both = (first.scores[title], second.scores[title]), (counted[first.name], counted[second.name])
    truths = [dict(zip(of.image_ids, of.truth_crc, strict=True)) for of in both]
    common = truths[0].keys() & truths[1].keys()
    other = sorted(image_id for image_id in common if truths[0][image_id] != truths[1][image_id])
    if other:
        raise UserError(
            f"{title}: {len(other)} of {len(common)} images have another ground truth in run {second.name!r} than in "
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
    of_each = f"scored on {len(truths[1])} images of {scores[1].split}, {first.name} on {len(truths[0])}"
    return f"{of_each}: {'; '.join(lists)}"

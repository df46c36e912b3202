"""Scores of the cases of a study by column and seed: what they mean, and paired differences with intervals."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from pydantic_core import to_jsonable_python

from mcis.datasets.errors import UserError
from mcis.platform.reporting.compared_runs import open_run_groups
from mcis.platform.reporting.comparison import BootstrapSettings, ComparedScore, compare
from mcis.platform.runs.progress import console
from mcis.platform.runs.scores import ORIGIN, VARIANTS, Score, headings_of
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.definition import StudyCase

COLUMNS = tuple(variant.study_column for variant in VARIANTS)
"""Columns of a study: the scores of a run, in the order of the pipeline."""
INTERVAL_NOTE = (
    "in brackets",
    "95 % interval over 2000 resamples of the images, and over the seeds by Student's t; no difference = the "
    "interval contains 0. With one seed, it does not include the variation between seeds. Outputs of another program "
    "are one run of that program, whatever the number of seeds: neither ± nor the interval includes how it varies. On "
    "average, 5 % of such intervals do not contain the true difference.",
)
"""A term of the tables and its explanation."""
_CASE_HEADINGS = {"threshold", "mIoU at the threshold of other images", "related images", "ignored share", "seed"}
"""Headings of a score's meaning that differ between cases and therefore do not describe a column."""
_BEST_THRESHOLD = "of each run the one with the highest mIoU on these images"


@dataclass(frozen=True, kw_only=True)
class CaseScores:
    """Scores of a case, for each seed whose run has finished.

    Attributes:
        case: The case.
        seeds: Seeds of the finished runs.
        miou: mIoU in percent by column, one value per seed.
        shares: Further percentages by heading, one value per seed; without those that not every seed has. `recall` and
            `precision`: those of the foreground of the maps at their best threshold, regardless of the class. `mAP`:
            mean average precision of the tags on val.
    """

    case: StudyCase
    seeds: list[int]
    miou: dict[str, list[float]]
    shares: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Differences of mIoU between a case and its baseline.

    Attributes:
        case: The case.
        seeds: Seeds that both cases have.
        miou: Differences in percentage points by column, one value per seed.
        intervals: Lower and upper end of the interval of the mean difference by column, see `with_intervals`.
        left_out: Why there is no difference, by column, for scores of the two cases that cannot be compared.
    """

    case: StudyCase
    seeds: list[int]
    miou: dict[str, list[float]]
    intervals: dict[str, list[float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The difference in study.json."""
        return {
            "case": to_jsonable_python(self.case, by_alias=False),
            "seeds": self.seeds,
            "miou": self.miou,
            "intervals": self.intervals,
            "left_out": self.left_out,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """The difference that `as_json` returned."""
        case = StudyCase(**entry["case"])
        return cls(
            case=case,
            seeds=entry["seeds"],
            miou=entry["miou"],
            intervals=entry["intervals"],
            left_out=entry["left_out"],
        )


def scores_by_column(scores: Sequence[Score], related: int | None) -> dict[str, Score]:
    """Selects the scores of a trial that a study shows.

    Args:
        scores: Scores of the trial's run.
        related: Number of related images of the trial, None for maps of another program. Maps with another number are
            not shown.

    Returns:
        The scores by column.
    """
    selected: dict[str, Score] = {}
    for score in scores:
        column = column_of(score)
        has_other_maps = score.output == "localization_maps" and score.related != related
        if column is not None and not has_other_maps:
            selected[column] = score

    return selected


def column_of(score: Score) -> str | None:
    """The column of a score; None if studies do not show it."""
    return score.variant.study_column if score.variant else None


def score_case(
    case: StudyCase, scores: Mapping[int, Mapping[str, Score]], val_map: Mapping[int, float | None]
) -> CaseScores:
    """Collects the scores of a case.

    Args:
        case: The case.
        scores: Scores by seed and column.
        val_map: Mean average precision of the classifier on val, in percent, by seed.
    """
    trials = list(scores.values())
    common_columns = [column for column in COLUMNS if all(column in trial for trial in trials)]
    miou = {column: [trial[column].miou for trial in trials] for column in common_columns}

    maps = COLUMNS[0]
    confusions = [np.array(trial[maps].confusion) for trial in trials if maps in trial]
    average_precisions = [val_map.get(seed) for seed in scores]
    shares = {
        "recall": [_foreground_recall(confusion) for confusion in confusions],
        "precision": [_foreground_precision(confusion) for confusion in confusions],
        "mAP": [precision for precision in average_precisions if precision is not None],
    }
    common_shares = {name: values for name, values in shares.items() if values and len(values) == len(trials)}
    return CaseScores(case=case, seeds=list(scores), miou=miou, shares=common_shares)


def _foreground_recall(confusion: np.ndarray) -> float:
    """Percentage of the object pixels that maps cover, from a confusion matrix (K + 1, K + 1) of truth by map."""
    return 100 * float(confusion[1:, 1:].sum() / max(confusion[1:].sum(), 1))


def _foreground_precision(confusion: np.ndarray) -> float:
    """Percentage of the pixels of maps that are on objects, from a confusion matrix (K + 1, K + 1) of truth by map."""
    return 100 * float(confusion[1:, 1:].sum() / max(confusion[:, 1:].sum(), 1))


def paired_differences(case_scores: Sequence[CaseScores]) -> Iterator[PairedDifference]:
    """Yields the differences between each case and its baseline.

    Differences are computed seed by seed, so that variation that the seeds share cancels out. Cases without a common
    seed and column are left out.
    """
    by_name = {scores.case.name: scores for scores in case_scores}
    for scores in case_scores:
        baseline = by_name.get(scores.case.baseline or "")
        if baseline is None:
            continue

        seeds = [seed for seed in scores.seeds if seed in baseline.seeds]
        miou = {
            column: _differences(scores, baseline, column, seeds)
            for column in COLUMNS
            if column in scores.miou and column in baseline.miou
        }
        if seeds and miou:
            yield PairedDifference(case=scores.case, seeds=seeds, miou=miou)


def _differences(scores: CaseScores, baseline: CaseScores, column: str, seeds: Sequence[int]) -> list[float]:
    """The differences of one column for each of the seeds."""
    differences = []
    for seed in seeds:
        value = scores.miou[column][scores.seeds.index(seed)]
        baseline_value = baseline.miou[column][baseline.seeds.index(seed)]
        differences.append(value - baseline_value)

    return differences


def with_intervals(
    difference: PairedDifference, trial_name: Callable[[str, int], str], workspace: Workspace
) -> PairedDifference:
    """Adds the intervals that `mcis compare` computes for the same runs.

    Columns whose scores cannot be compared, for example because they are of different images, are left out, and a note
    states the reason.

    Args:
        difference: The difference.
        trial_name: Returns the name of the run of a case and a seed.
        workspace: Workspace of the runs.
    """
    baseline = str(difference.case.baseline)
    name = difference.case.name

    runs = [",".join(trial_name(case, seed) for seed in difference.seeds) for case in (baseline, name)]
    try:
        groups = open_run_groups(workspace.root, runs)
        compared_scores = compare(groups, BootstrapSettings()).scores
    except UserError as error:
        console.print(f"note: {name} and {baseline} are not compared: {error.found}")
        return replace(difference, miou={}, left_out=dict.fromkeys(difference.miou, error.found))

    intervals: dict[str, list[float]] = {}
    left_out: dict[str, str] = {}
    for compared in compared_scores:
        column = column_of(groups[0].scores(compared.title)[0])
        if column not in difference.miou:
            continue
        interval = _miou_interval(compared)
        if interval:
            intervals[column] = interval
        for reason in compared.left_out.values():
            left_out[column] = reason
            console.print(f"note: {name} and {baseline} are not compared by {column}: {reason}")

    miou = {column: values for column, values in difference.miou.items() if column not in left_out}
    return replace(difference, miou=miou, intervals=intervals, left_out=left_out)


def _miou_interval(compared: ComparedScore) -> list[float] | None:
    """Lower and upper end of the interval of the difference of mIoU; None if there is none."""
    intervals = [[found.low, found.high] for found in compared.differences if found.measure == "miou"]
    return intervals[-1] if intervals and all(map(math.isfinite, intervals[-1])) else None


def used_columns(rows: Sequence[CaseScores] | Sequence[PairedDifference]) -> list[str]:
    """The columns in which any of the rows has a value."""
    return [column for column in COLUMNS if any(column in row.miou for row in rows)]


def meaning_of_columns(trials: Sequence[Mapping[str, Score]]) -> dict[str, dict[str, str]]:
    """Describes what the scores of each column are.

    Args:
        trials: Scores by column of each trial.

    Returns:
        Texts by column and heading. Where trials differ, all their texts, joined by `or`, with `-` for trials to which
        the heading does not apply.
    """
    columns: dict[str, dict[str, str]] = {}
    for column in COLUMNS:
        meanings = [trial[column].settings() for trial in trials if column in trial]
        texts: dict[str, str] = {}
        for heading in headings_of(meanings, without=_CASE_HEADINGS):
            different_texts = dict.fromkeys(meaning.get(heading, "-") for meaning in meanings)
            texts[heading] = " or ".join(different_texts)
        if any("threshold" in meaning for meaning in meanings):
            texts["threshold"] = _BEST_THRESHOLD
        if texts:
            columns[column] = texts

    return columns


def column_descriptions(meanings: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Describes each column, without the origin of the scores and without methods that differ by row.

    Args:
        meanings: Texts by column and heading, see `meaning_of_columns`.
    """
    descriptions = {}
    for column, meaning in meanings.items():
        texts = []
        for heading, text in meaning.items():
            differs_by_row = heading == "method" and " or " in text
            if heading not in ORIGIN and not differs_by_row:
                texts.append(f"{heading} {text}")
        descriptions[column] = ", ".join(texts)

    return descriptions

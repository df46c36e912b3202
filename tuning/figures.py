"""The figures of a study: scores of its cases by column and seed, what they mean, paired differences and intervals."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mcis.datasets.errors import UserError
from mcis.platform.reporting.compared_runs import open_run_groups
from mcis.platform.reporting.comparison import BootstrapSettings, compare
from mcis.platform.runs.progress import console
from mcis.platform.runs.scores import ORIGIN, VARIANTS, Score, headings_of
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.definition import Case

COLUMNS = tuple(variant.study_column for variant in VARIANTS)
INTERVALS = (
    "in brackets: the 95 % interval over 2000 resamples of the images, and over seeds by Student's t; none = it "
    "contains 0. Of one seed it does not tell what another would change; of many, 5 in 100 leave out 0 by chance."
)
"""What the intervals are, in words."""
_OF_A_CASE = {"threshold", "related images", "ignored share", "seed"}
"""Headings of a score's meaning that differ from case to case, so that they do not describe a column."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a case, for each of the seeds whose run came to its end.

    Attributes:
        miou: in percent, by column.
        shares: what else is told of a case, in percent, by heading: of the maps at their best threshold how much of the
            objects they find and how much of them is on an object, which class it is aside; and the mean average
            precision of the tags of val.
    """

    case: Case
    seeds: list[int]
    miou: dict[str, list[float]]
    shares: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """How much higher a case is than its control, in points of mIoU by column, for each seed that both have.

    Attributes:
        intervals: low and high end of the mean difference by column, over other images and seeds (`with_intervals`).
    """

    of: Case
    seeds: list[int]
    miou: dict[str, list[float]]
    intervals: dict[str, list[float]] = field(default_factory=dict)


def scores_by_column(scores: Sequence[Score], related: int) -> dict[str, Score]:
    """The scores of a trial that a study shows, by column; `related` is the trial's number of related images."""
    shown = [score for score in scores if score.what != "localization_maps" or score.related == related]
    return {column: score for score in shown if (column := column_of(score)) is not None}


def column_of(score: Score) -> str | None:
    """The column that a score stands in; None for one that studies do not show."""
    return score.variant.study_column if score.variant else None


def figures_of(case: Case, scores: Mapping[int, Mapping[str, Score]], val_map: Mapping[int, float | None]) -> Figures:
    """A case's figures, from its scores by seed and column, and by seed its classifier's mean average precision."""
    reached = [column for column in COLUMNS if all(column in of for of in scores.values())]
    miou = {column: [of[column].miou for of in scores.values()] for column in reached}
    pixels = [np.array(of[COLUMNS[0]].confusion) for of in scores.values() if COLUMNS[0] in of]
    shares = {
        "found": [100 * float(of[1:, 1:].sum() / max(of[1:].sum(), 1)) for of in pixels],
        "exact": [100 * float(of[1:, 1:].sum() / max(of[:, 1:].sum(), 1)) for of in pixels],
        "mAP": [of for seed in scores if (of := val_map.get(seed)) is not None],
    }
    return Figures(case=case, seeds=list(scores), miou=miou, shares={name: of for name, of in shares.items() if of})


def paired_differences(figures: Sequence[Figures]) -> Iterator[PairedDifference]:
    """The differences of cases to those that they are `against`, seed by seed: what seeds share cancels out."""
    by_name = {of.case.name: of for of in figures}
    for case in figures:
        control = by_name.get(case.case.against or "")
        if control is None:
            continue
        seeds = [seed for seed in case.seeds if seed in control.seeds]
        of_case, of_control = ([of.seeds.index(seed) for seed in seeds] for of in (case, control))
        miou = {
            column: [case.miou[column][i] - control.miou[column][j] for i, j in zip(of_case, of_control, strict=True)]
            for column in COLUMNS
            if column in case.miou and column in control.miou
        }
        if seeds and miou:
            yield PairedDifference(of=case.case, seeds=seeds, miou=miou)


def with_intervals(of: PairedDifference, trial: Callable[[str, int], str], workspace: Workspace) -> PairedDifference:
    """A difference with the interval of each column, as `mcis compare` has it of the same runs.

    A column whose scores are of other images in the two cases, such as those of training images from other sources,
    has none; nor have runs that cannot be compared, which is said. `trial` names the run of a case and a seed.
    """
    pair = str(of.of.against), of.of.name
    runs = [",".join(trial(name, seed) for seed in of.seeds) for name in pair]
    try:
        groups = open_run_groups(workspace.root, runs)
        compared = compare(groups, BootstrapSettings()).scores
    except UserError as error:
        console.print(f"note: no intervals of {' and '.join(pair)}: {error.found}")
        return of
    intervals = {
        column: [found.low, found.high]
        for score in compared
        for found in score.differences
        if found.measure == "miou" and (column := column_of(groups[0].scores(score.title)[0])) in of.miou
    }
    return replace(of, intervals=intervals)


def reached(rows: Sequence[Figures] | Sequence[PairedDifference]) -> list[str]:
    """The columns that any of the rows has a figure in."""
    return [column for column in COLUMNS if any(column in row.miou for row in rows)]


def meaning_of_columns(trials: Sequence[Mapping[str, Score]]) -> dict[str, dict[str, str]]:
    """What each column means, from the trials' scores by column: heading -> text, or all texts where they differ."""
    columns = {}
    for column in COLUMNS:
        meanings = [trial[column].meaning() for trial in trials if column in trial]
        headings = headings_of(meanings, without=_OF_A_CASE)
        columns[column] = {h: " or ".join(dict.fromkeys(of[h] for of in meanings if h in of)) for h in headings}
    return {column: meaning for column, meaning in columns.items() if meaning}


def caption(means: Mapping[str, Mapping[str, str]]) -> str:
    """One line on what the columns mean, but for where their scores come from and for methods that rows name."""
    parts = []
    for column, meaning in means.items():
        told = [h for h in meaning if h not in ORIGIN and not (h == "method" and " or " in meaning[h])]
        parts.append(f"{column}: {', '.join(f'{heading} {meaning[heading]}' for heading in told)}")
    return "; ".join(parts)

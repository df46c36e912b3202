"""The scores of a run's page: a tile per stage, the table of all scores, IoU per class."""

from collections.abc import Mapping, Sequence
from math import isfinite
from operator import attrgetter
from typing import NamedTuple

from mcis.platform.reporting.plots import STAGE_TITLES
from mcis.platform.runs.scores import Score, Scored, headings_of, same_origin

_TITLES: dict[Scored, str] = {**STAGE_TITLES, "baseline": "Baselines, without a classifier"}
NUMBERS = {"images", "threshold", "related images", "ignored share", "seed"}
"""Headings of columns of numbers, which are aligned on the right."""


class Tile(NamedTuple):
    """What the page's head says of a stage.

    Attributes:
        score: the best of the stage's, None where the stage has no score.
        how: how that score was made, in words; where there is none, why.
        of: number of scores that `score` is the best of.
        baselines: of the same images, beside pseudo masks.
    """

    what: Scored
    title: str
    score: Score | None
    how: str
    of: int
    baselines: list[Score]


class ScoreTable(NamedTuple):
    """Scores by what was scored, with a column for every heading that any of them has.

    Attributes:
        headings: of the columns.
        groups: what is scored, its title, and its scores with the texts of what they mean by heading.
        same: heading and text of what all scores have in common of their origin; said once, under the table.
    """

    headings: list[str]
    groups: list[tuple[Scored, str, list[tuple[Score, dict[str, str]]]]]
    same: dict[str, str]


class IouTable(NamedTuple):
    """IoU per class: names in falling order of the last stage's IoU, and the score that stands for each stage."""

    order: list[str]
    scores: dict[Scored, Score]


def is_number(value: float | None) -> bool:
    """Whether a figure was computed: neither None nor NaN."""
    return value is not None and isfinite(value)


def _candidates(scores: Sequence[Score], what: Scored) -> list[Score]:
    """Scores with a mIoU that may stand for a stage: of segmentation, where possible, not on training images."""
    computed = [score for score in scores if score.what == what and is_number(score.miou)]
    if what == "segmentation":
        return [score for score in computed if not score.split.startswith("train")] or computed
    return computed


def tile(scores: Sequence[Score], what: Scored) -> Tile:
    """A stage's tile of the page's head; beside pseudo masks, the baselines of the same split."""
    candidates = _candidates(scores, what)
    best = max(candidates, key=attrgetter("miou"), default=None)
    how = "scored without truth: no mIoU" if any(s.what == what for s in scores) else "no score in this run"
    if best:
        how = " · ".join(f"{heading} {text}" for heading, text in best.made().items())
    baselines = _candidates(scores, "baseline") if best and what == "pseudo_masks" else []
    baselines = [baseline for baseline in baselines if best and baseline.split == best.split]
    return Tile(what, STAGE_TITLES[what], best, how, len(candidates), baselines)


def score_table(scores: Sequence[Score]) -> ScoreTable:
    """The table of all scores."""
    meanings = [score.meaning() for score in scores]
    same = same_origin(meanings)
    rows = list(zip(scores, meanings, strict=True))
    groups = [(what, title, [row for row in rows if row[0].what == what]) for what, title in _TITLES.items()]
    return ScoreTable(headings_of(meanings, but=same), [group for group in groups if group[2]], same)


def iou_table(scores: Sequence[Score]) -> IouTable:
    """IoU per class of the best score of each stage that has any."""
    best: Mapping[Scored, Score | None] = {what: tile(scores, what).score for what in STAGE_TITLES}
    columns = {what: score for what, score in best.items() if score and score.iou}
    names = dict.fromkeys(name for score in columns.values() for name in score.iou)

    def rank(name: str) -> list[float]:
        values = [score.iou.get(name) for score in reversed(columns.values())]
        return [-1.0 if value is None else value for value in values]

    return IouTable(sorted(names, key=rank, reverse=True), columns)

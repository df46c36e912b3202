"""The scores of a run's page: a tile per stage, the table of all scores, IoU per class."""

from collections.abc import Mapping, Sequence
from math import isfinite
from operator import attrgetter
from typing import NamedTuple

from mcis.platform.reporting.plots import STAGE_TITLES
from mcis.platform.runs.scores import HEADINGS, Score, Scored

_TITLES: dict[Scored, str] = {**STAGE_TITLES, "baseline": "Baselines, without a classifier"}
_NUMBERS = {"images", "threshold", "related images", "ignored share", "seed"}
"""Headings of columns of numbers, which are aligned on the right."""


class Tile(NamedTuple):
    """What the page's head says of a stage.

    Attributes:
        score: the best of the stage's, None where the stage has no score.
        how: how that score was made, in words.
        why: why there is no score.
        of: number of scores that `score` is the best of.
        aside: whether scores on training images are left out of these.
        baselines: of the same images, beside pseudo masks.
    """

    what: Scored
    title: str
    score: Score | None
    how: str
    why: str
    of: int
    aside: bool
    baselines: list[Score]


class Row(NamedTuple):
    """A score of the table, with a text for each of the table's headings."""

    name: str
    miou: float
    boundary_miou: float | None
    texts: list[str]


class ScoreTable(NamedTuple):
    """Scores by what was scored, with a column for every heading that any of them has.

    Attributes:
        headings: heading, and whether its column holds numbers.
        groups: what is scored, its title, and its scores.
        same: heading and text of what all scores have in common of their origin; said once, under the table.
    """

    headings: list[tuple[str, bool]]
    groups: list[tuple[Scored, str, list[Row]]]
    same: list[tuple[str, str]]


class IouTable(NamedTuple):
    """IoU per class: names in falling order of the last stage's IoU, and the score that stands for each stage."""

    order: list[str]
    scores: dict[Scored, Score]

    def describe(self) -> str:
        """The chart in words, for those who cannot see it."""
        stages, last = ", ".join(STAGE_TITLES[what].lower() for what in self.scores), [*self.scores.values()][-1].iou
        values = [f"{name} {value:.1f}" for name in self.order if is_number(value := last.get(name))]
        ends = f", from {values[0]} to {values[-1]}" if values else ""
        return f"Bars: IoU of {len(self.order)} labels, {stages}{ends}; the table beside has all figures"


def is_number(value: float | None) -> bool:
    """Whether a figure was computed: neither None nor NaN."""
    return value is not None and isfinite(value)


def candidates(scores: Sequence[Score], what: Scored) -> list[Score]:
    """Scores with a mIoU that may stand for a stage: of segmentation, where possible, not on training images."""
    computed = [score for score in scores if score.what == what and is_number(score.miou)]
    if what == "segmentation":
        return [score for score in computed if not score.split.startswith("train")] or computed
    return computed


def best_of(scores: Sequence[Score], what: Scored) -> Score | None:
    """The score that stands for a stage."""
    return max(candidates(scores, what), key=attrgetter("miou"), default=None)


def tile(scores: Sequence[Score], what: Scored) -> Tile:
    """A stage's tile of the page's head; beside pseudo masks, the baselines of the same split."""
    score, of = best_of(scores, what), len(candidates(scores, what))
    mious = [other.miou for other in scores if other.what == what]
    baselines = candidates(scores, "baseline") if what == "pseudo_masks" else []
    return Tile(
        what=what,
        title=STAGE_TITLES[what],
        score=score,
        how=" · ".join(f"{heading} {text}" for heading, text in score.made().items()) if score else "",
        why="scored without truth: no mIoU" if mious else "no score in this run",
        of=of,
        aside=sum(map(is_number, mious)) > of,
        baselines=[baseline for baseline in baselines if score and baseline.split == score.split],
    )


def score_table(scores: Sequence[Score]) -> ScoreTable:
    """The table of all scores."""
    meanings = [score.meaning() for score in scores]
    of_all = [score.origin() for score in scores]
    same = [(h, text) for h, text in (of_all[0] if scores else {}).items() if all(o.get(h) == text for o in of_all)]
    headings = [heading for heading in HEADINGS if any(heading in meaning for meaning in meanings)]
    headings = [heading for heading in headings if heading not in dict(same)]
    groups: dict[Scored, list[Row]] = {what: [] for what in _TITLES}
    for score, meaning in zip(scores, meanings, strict=True):
        texts = [meaning.get(heading, "–") for heading in headings]
        groups[score.what].append(Row(score.name, score.miou, score.boundary_miou, texts))
    return ScoreTable(
        headings=[(heading, heading in _NUMBERS) for heading in headings],
        groups=[(what, _TITLES[what], rows) for what, rows in groups.items() if rows],
        same=same,
    )


def iou_table(scores: Sequence[Score]) -> IouTable:
    """IoU per class of the best score of each stage that has any."""
    best: Mapping[Scored, Score | None] = {what: best_of(scores, what) for what in STAGE_TITLES}
    columns = {what: score for what, score in best.items() if score and score.iou}
    names = dict.fromkeys(name for score in columns.values() for name in score.iou)

    def rank(name: str) -> list[float]:
        values = (score.iou.get(name) for score in reversed(columns.values()))
        return [value if value is not None and isfinite(value) else -1.0 for value in values]

    return IouTable(sorted(names, key=rank, reverse=True), columns)

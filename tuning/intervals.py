"""How far a study's differences would move with other images and other seeds: a paired bootstrap over both."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mcis.platform.reporting.compared_runs import open_cases
from mcis.platform.reporting.comparison import Settings, compared_scores
from mcis.platform.runs.scores import Scored
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.figures import PairedDifference, column_of

INTERVALS = (
    "below each difference: 95 % interval over 2000 resamples of the images and of the seeds; none = it contains 0. Of "
    "one seed it does not tell what another would change; of many intervals, 5 in 100 leave out 0 by chance."
)
"""What the intervals are, in words."""
_WHAT: tuple[Scored, ...] = ("localization_maps", "pseudo_masks", "segmentation")


def with_intervals(
    differences: Sequence[PairedDifference], trials: Mapping[str, Mapping[int, str]], workspace: Workspace
) -> list[PairedDifference]:
    """Differences with the interval of each column, as `mcis compare` has it of the same runs.

    A column whose scores are of other images in the two cases, such as those of training images in another setting,
    has none.

    Args:
        trials: the runs of each case in the workspace, by name of the case and by seed.
    """
    return [replace(each, intervals=_intervals(each, trials, workspace)) for each in differences]


def _intervals(
    difference: PairedDifference, trials: Mapping[str, Mapping[int, str]], workspace: Workspace
) -> dict[str, list[float]]:
    """Low and high end by column, points."""
    pair = difference.of.control, difference.of.case
    runs = [",".join(trials[name][seed] for seed in difference.seeds) for name in pair]
    cases = open_cases(workspace.root, runs, what=_WHAT)
    return {
        column: [found.low, found.high]
        for score in compared_scores(cases, Settings())
        for found in score.differences
        if found.figure == "mIoU" and (column := column_of(cases[0].scores(score.title)[0])) in difference.miou
    }

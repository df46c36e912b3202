"""The paper's ablations as studies: `references` (table 7) and `effect` (tables 5 and 6)."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import Resolved
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.cases import TRAININGS, Case, effect_cases, effect_differences, reference_cases, trial_values
from mcis.tuning.figures import Figures
from mcis.tuning.pictures import effect_picture, related_images_picture
from mcis.tuning.search import Trial
from mcis.tuning.study import Planned, Study, check_study, run_study
from mcis.tuning.tables import effect_table, related_images_table

EFFECT_RELATED = (3,)


def references(
    resolved: Resolved, workspace: Path, name: str, *, until: str, parallel: int, verbose: bool = False
) -> list[Figures]:
    """Related images R = 0..5 over one trained classifier (table 7): mIoU in percent by R and column.

    Writes runs/NAME/study.json and study.png; the trials are the runs NAME-r0 .. NAME-r5.

    Raises:
        UserError: what cannot be studied (see `study.check_study`); or a trial failed, after the table of the others.
    """
    study = Study(
        kind="references",
        name=name,
        resolved=resolved,
        workspace=Workspace(workspace),
        swept=("localize.related", "localize.also_related"),
        until=until,
        parallel=parallel,
        verbose=verbose,
        table=related_images_table,
        picture=related_images_picture,
        title=f"mIoU % by number of related images, {name}",
        log=_log_references,
    )
    check_study(study)
    seed = resolved.config.seed
    return run_study(
        study,
        [
            Planned(case, {seed: Trial(f"{name}-{case.name}", trial_values(resolved, case.values), until)})
            for case in reference_cases(resolved, until)
        ],
    )


def _log_references(tracker: Tracker, figures: Sequence[Figures]) -> None:
    """A curve over R per column."""
    for of in figures:
        for column, values in of.miou.items():
            tracker.metric_at(f"miou.{column.replace(',', '')}", mean(values), of.case.related)


def effect(
    resolved: Resolved,
    workspace: Path,
    name: str,
    *,
    trainings: Sequence[str] = TRAININGS,
    related: Sequence[int] = EFFECT_RELATED,
    seeds: int,
    until: str,
    parallel: int,
    verbose: bool = False,
) -> list[Figures]:
    """What co-attention and related images bring (tables 5 and 6), each beside its controls, over seeds.

    Up to the pseudo masks all cases are computed; `until=evaluate` takes those of the paper's two tables, and the
    control of both, on to the segmenter. Writes runs/NAME/study.json and study.png; the trials are the runs
    NAME-<case>-s<seed>.

    Args:
        trainings: values of `classifier.attention`.
        related: numbers R of related images; controls have the largest.
        seeds: how many, counted from the configuration's.

    Raises:
        UserError: what cannot be studied (see `study.check_study`); or a trial failed, after the table of the others.
    """
    unknown = sorted(set(trainings) - set(TRAININGS))
    if unknown or not trainings or not related:
        raise UserError(f"--training {', '.join(unknown)}", f"some of {', '.join(TRAININGS)}", "choose of them")
    first = resolved.config.seed
    numbers = range(first, first + seeds)
    study = Study(
        kind="effect",
        name=name,
        resolved=resolved,
        workspace=Workspace(workspace),
        swept=(
            "classifier.attention",
            "classifier.attended",
            "localize.related",
            "localize.related_by",
            "localize.method.affinity",
        ),
        unlike=("localize.method.name", "seed"),
        until=until,
        parallel=parallel,
        verbose=verbose,
        table=effect_table,
        picture=effect_picture,
        title=f"mIoU %, mean and deviation over the seeds {', '.join(map(str, numbers))}, {name}",
        log=_log_effect,
    )
    check_study(study)
    cases = effect_cases(resolved, trainings, related, until)
    return run_study(
        study,
        [Planned(case, _trials(study, case, numbers)) for case in cases],
        effect_differences(cases, related),
    )


def _trials(study: Study, case: Case, seeds: Sequence[int]) -> dict[int, Trial]:
    """A case's trials by seed."""
    values = trial_values(study.resolved, case.values)
    return {seed: Trial(f"{study.name}-{case.name}-s{seed}", {**values, "seed": seed}, case.until) for seed in seeds}


def _log_effect(tracker: Tracker, figures: Sequence[Figures]) -> None:
    """A metric per column and case."""
    tracker.metrics(
        {
            f"miou.{column.replace(',', '')}.{of.case.name}": mean(values)
            for of in figures
            for column, values in of.miou.items()
        }
    )

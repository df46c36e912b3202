"""The paper's tables as studies: `references` (table 7), `effect` (tables 5 and 6), and those that files define."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from mcis.datasets.errors import UserError
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.cases import (
    TRAININGS,
    Case,
    configured,
    effect_cases,
    effect_differences,
    reference_cases,
    reference_differences,
    trial_values,
)
from mcis.tuning.definition import Definition, cases_of, differences_of
from mcis.tuning.figures import Figures
from mcis.tuning.pictures import cases_picture, related_images_picture
from mcis.tuning.study import Planned, Study, check_study, run_study
from mcis.tuning.tables import cases_table, related_images_table
from mcis.tuning.trials import Trial

EFFECT_RELATED = (3,)


def references(
    resolved: Resolved, workspace: Path, name: str, *, seeds: int, until: str, parallel: int, verbose: bool = False
) -> list[Figures]:
    """Related images R = 0..5 over one trained classifier a seed (table 7): mIoU in percent by R and column.

    Writes runs/NAME/study.json and study.png; the trials are the runs NAME-r0-s<seed> .. NAME-r5-s<seed>.

    Args:
        seeds: how many, counted from the configuration's.

    Raises:
        UserError: what cannot be studied (see `study.check_study`); or a trial failed, after the table of the others.
    """
    study = Study(
        kind="references",
        name=name,
        resolved=resolved,
        workspace=Workspace(workspace),
        varied_keys=("localize.related", "localize.keep_features"),
        extra_keys=("seed",),
        until=until,
        parallel=parallel,
        verbose=verbose,
        table=related_images_table,
        picture=related_images_picture,
        title=f"mIoU % by number of related images, {name}",
        log=_log_references,
    )
    check_study(study)
    first = resolved.config.seed
    numbers = range(first, first + seeds)
    cases = reference_cases(resolved, until)
    planned = [Planned(case, _trials(study, case, numbers)) for case in cases]
    return run_study(study, planned, reference_differences(cases))


def _log_references(tracker: Tracker, figures: Sequence[Figures]) -> None:
    """A curve over R per column."""
    for of in figures:
        for column, values in of.miou.items():
            tracker.metrics({f"miou.{column.replace(',', '')}": mean(values)}, of.case.related)


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
        varied_keys=(
            "classifier.attention",
            "classifier.attended",
            "localize.related",
            "localize.related_by",
            "localize.method.affinity",
        ),
        extra_keys=("localize.method.name", "seed"),
        until=until,
        parallel=parallel,
        verbose=verbose,
        table=cases_table,
        picture=cases_picture,
        title=f"mIoU %, mean and deviation over the seeds {', '.join(map(str, numbers))}, {name}",
        log=_log_cases,
    )
    check_study(study)
    cases = effect_cases(resolved, trainings, related, until)
    return run_study(
        study,
        [Planned(case, _trials(study, case, numbers)) for case in cases],
        effect_differences(cases, related),
    )


def defined(
    resolved: Resolved,
    workspace: Path,
    name: str,
    definition: Definition,
    *,
    kind: str,
    seeds: int,
    until: str,
    parallel: int,
    verbose: bool = False,
) -> list[Figures]:
    """The cases of a definition over seeds, and their differences.

    Writes runs/NAME/study.json and study.png; the trials are the runs NAME-<case>-s<seed>.

    Args:
        kind: name of the definition.
        seeds: how many, counted from the configuration's.

    Raises:
        UserError: what cannot be studied (see `study.check_study`); or a trial failed, after the table of the others.
    """
    first = resolved.config.seed
    numbers = range(first, first + seeds)
    cases = cases_of(definition, resolved, until)
    study = Study(
        kind=kind,
        name=name,
        resolved=resolved,
        workspace=Workspace(workspace),
        varied_keys=tuple(sorted({key for case in cases for key in case.values})),
        extra_keys=("setting", "seed", *_of_sources(resolved, cases)),
        until=until,
        parallel=parallel,
        verbose=verbose,
        table=cases_table,
        picture=cases_picture,
        title=f"{definition.about}: mIoU %, mean and deviation over the seeds {', '.join(map(str, numbers))}, {name}",
        log=_log_cases,
    )
    check_study(study)
    planned = [Planned(case, _trials(study, case, numbers)) for case in cases]
    return run_study(study, planned, differences_of(definition))


def _of_sources(resolved: Resolved, cases: Sequence[Case]) -> list[str]:
    """Keys of the configuration that a setting of fewer sources does not have as the study's."""
    others = [configured(resolved, case.values, case.setting) for case in cases]
    own = dict(leaves(resolved.config))
    return sorted({key for other in others for key, value in leaves(other) if own.get(key, value) != value})


def _trials(study: Study, case: Case, seeds: Sequence[int]) -> dict[int, Trial]:
    """A case's trials by seed."""
    return {seed: _trial(study, case, f"{study.name}-{case.name}-s{seed}", {"seed": seed}) for seed in seeds}


def _trial(study: Study, case: Case, name: str, values: Values) -> Trial:
    changed = trial_values(study.resolved, case.values, case.setting)
    # Paths are this process's: a trial's has a folder of its own.
    changed = resolve(case.setting, study.resolved.config.recipe, {**changed, **values}).changed()
    return Trial(name, case.setting, changed, case.until, {})  # `run_study` knows the other trials


def _log_cases(tracker: Tracker, figures: Sequence[Figures]) -> None:
    """A metric per column and case."""
    tracker.metrics(
        {
            f"miou.{column.replace(',', '')}.{of.case.name}": mean(values)
            for of in figures
            for column, values in of.miou.items()
        }
    )

"""The paper's ablations as studies: `references` (table 7) and `effect` (tables 5 and 6)."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.config.keys import Values
from mcis.platform.config.resolve import Resolved
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.search import Trial
from mcis.tuning.study import Plan, Study, run_study
from mcis.tuning.tables import (
    PAPER_EFFECT,
    Cell,
    effect_picture,
    effect_table,
    related_images_picture,
    related_images_table,
)

RELATED = tuple(range(6))
TRAININGS = ("none", "co", "co+contrastive")
EFFECT_RELATED = (0, 1, 3, 5)


def references(
    resolved: Resolved, workspace: Path, name: str, *, until: str, parallel: int, verbose: bool = False
) -> list[Cell]:
    """Related images R = 0..5 over one trained classifier (table 7): mIoU in percent by R and column.

    Writes runs/NAME/study.json and study.png; the trials are the runs NAME-r0 .. NAME-r5. Contrastive features need
    related images, so that R = 0 is without.

    Raises:
        UserError: what cannot be studied (see `study.run_study`); or a trial failed, after the table of the others.
    """
    config, changed = resolved.config, resolved.changed()
    alone: Values = {"localize.method.contrastive": False} if config.localize.method.contrastive else {}
    plan: dict[tuple[str, int], Sequence[Trial]] = {}
    for related in RELATED:
        values: Values = {**changed, "localize.related": related, **(alone if not related else {})}
        plan[config.classifier.attention, related] = [Trial(f"{name}-r{related}", values, until)]

    study = Study(
        kind="references",
        name=name,
        resolved=resolved,
        workspace=Workspace(workspace),
        swept=("localize.related",),
        until=until,
        parallel=parallel,
        verbose=verbose,
        table=related_images_table,
        picture=related_images_picture,
        title=f"mIoU % by number of related images, {name}",
        log=_log_references,
    )
    return run_study(study, plan)


def _log_references(tracker: Tracker, cells: Sequence[Cell]) -> None:
    """A curve over R per column."""
    for cell in cells:
        for column, values in cell.miou.items():
            tracker.metric_at(f"miou.{column.replace(',', '')}", mean(values), cell.related)


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
) -> list[Cell]:
    """What co-attention brings (tables 5 and 6): training with neither, one or both, times related images R.

    Each cell is the mean over seeds of whole runs. Up to the pseudo masks all cells are computed; `until=evaluate`
    takes those of the paper's two tables, and the control, on to the segmenter. Writes runs/NAME/study.json and
    study.png; the trials are the runs NAME-<training>-r<R>-s<seed>.

    Args:
        trainings: values of `classifier.attention`. Without co-attention, related images are for evidence alone; such
            cells are the control for what they bring without its training.
        related: numbers R of related images.
        seeds: how many, counted from the configuration's.

    Raises:
        UserError: what cannot be studied (see `study.run_study`); or a trial failed, after the table of the others.
    """
    unknown = sorted(set(trainings) - set(TRAININGS))
    if unknown or not trainings or not related:
        raise UserError(f"--training {', '.join(unknown)}", f"some of {', '.join(TRAININGS)}", "choose of them")

    study = Study(
        kind="effect",
        name=name,
        resolved=resolved,
        workspace=Workspace(workspace),
        swept=("classifier.attention", "localize.related"),
        unlike=("seed",),
        until=until,
        parallel=parallel,
        verbose=verbose,
        table=effect_table,
        picture=effect_picture,
        title=f"mIoU %, mean and deviation over {seeds} seeds, {name}",
        log=_log_effect,
    )
    return run_study(study, _effect_plan(study, trainings, related, seeds))


def _effect_plan(study: Study, trainings: Sequence[str], related: Sequence[int], seeds: int) -> Plan:
    """Every training with every number of related images that it can use, over seeds."""
    config, changed = study.resolved.config, study.resolved.changed()
    plan: dict[tuple[str, int], Sequence[Trial]] = {}
    for attention, r in itertools.product(trainings, sorted(set(related))):
        if attention == "none" and r and config.localize.method.name != "evidence":
            continue
        in_paper = (attention, r) in {*PAPER_EFFECT, ("none", 3)}
        last = study.until if in_paper else earlier(study.until, "pseudo_masks")
        plan[attention, r] = [
            Trial(
                f"{study.name}-{attention.replace('+', '-')}-r{r}-s{seed}",
                {**changed, "classifier.attention": attention, "localize.related": r, "seed": config.seed + seed},
                last,
            )
            for seed in range(seeds)
        ]
    return plan


def earlier(stage: str, other: str) -> str:
    """The stage of the two that comes first in the pipeline."""
    return min(stage, other, key=pipeline.STAGE_NAMES.index)


def _log_effect(tracker: Tracker, cells: Sequence[Cell]) -> None:
    """A metric per column and cell."""
    metrics = {}
    for cell in cells:
        for column, values in cell.miou.items():
            training = cell.attention.replace("+", "-")
            metrics[f"miou.{column.replace(',', '')}.{training}.r{cell.related}"] = mean(values)
    tracker.metrics(metrics)

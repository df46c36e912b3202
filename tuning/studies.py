"""The paper's ablations as studies: one MLflow run each, its trials the children, a table at the end.

A study is a table of cells; a cell is made of trials, one per seed; a trial is a run of the pipeline.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from rich.table import Table

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.listing import listing
from mcis.platform.runs.progress import console
from mcis.platform.runs.scores import Score
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace, fingerprint, write_json, written_aside
from mcis.tuning.search import Outcome, Trial, run_trials
from mcis.tuning.tables import (
    COLUMNS,
    PAPER_EFFECT,
    Cell,
    Meaning,
    caption,
    effect_picture,
    effect_table,
    meaning_of_columns,
    related_images_picture,
    related_images_table,
    scores_by_column,
)

RELATED = tuple(range(6))
TRAININGS = ("none", "co", "co+contrastive")
EFFECT_RELATED = (0, 1, 3, 5)

Plan = Mapping[tuple[str, int], Sequence[Trial]]
"""The trials of each cell, by its training and its number of related images."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study before it runs.

    Attributes:
        kind: which study it is: references or effect.
        name: of the study's run; the names of its trials begin with it.
        resolved: the configuration that all trials share.
        swept: the keys that the study sets itself.
        unlike: further keys whose values differ between trials.
        until: the last stage of its longest trials.
        parallel: trials at a time.
        table, picture: show the cells; arguments as in `related_images_table` and `related_images_picture`.
        title: of the table.
        log: hands the cells' figures to MLflow.
    """

    kind: str
    name: str
    resolved: Resolved
    workspace: Workspace
    swept: tuple[str, ...]
    unlike: tuple[str, ...] = ()
    until: str
    parallel: int
    verbose: bool
    table: Callable[[Sequence[Cell], str], Table]
    picture: Callable[[Sequence[Cell], Path, str, str], None]
    title: str
    log: Callable[[Tracker, Sequence[Cell]], None]


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """The content of study.json: what was studied, what its columns mean, and its figures."""

    study: str
    setting: str
    recipe: str
    changed: Values
    means: dict[str, Meaning]
    cells: list[Cell]


def references(
    resolved: Resolved, workspace: Path, name: str, *, until: str, parallel: int, verbose: bool = False
) -> list[Cell]:
    """Related images R = 0..5 over one trained classifier (table 7): mIoU in percent by R and column.

    Writes runs/NAME/study.json and study.png; the trials are the runs NAME-r0 .. NAME-r5. Contrastive features need
    related images, so that R = 0 is without.

    Raises:
        UserError: what cannot be studied (see `_check`); or a trial failed, after the table of the others.
    """
    config, changed = resolved.config, resolved.changed()
    alone: Values = {"localize.method.contrastive": False} if config.localize.method.contrastive else {}
    plan: dict[tuple[str, int], Sequence[Trial]] = {}
    for related in RELATED:
        values: Values = {**changed, "localize.related": related, **(alone if not related else {})}
        plan[config.classifier.attention, related] = [Trial(f"{name}-r{related}", values, until)]

    def log(tracker: Tracker, cells: Sequence[Cell]) -> None:
        for cell in cells:
            for column, values in cell.miou.items():
                tracker.metric_at(f"miou.{column.replace(',', '')}", mean(values), cell.related)

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
        log=log,
    )
    return _run(study, plan)


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
        UserError: what cannot be studied (see `_check`); or a trial failed, after the table of the others.
    """
    unknown = sorted(set(trainings) - set(TRAININGS))
    if unknown or not trainings or not related:
        raise UserError(f"--training {', '.join(unknown)}", f"some of {', '.join(TRAININGS)}", "choose of them")

    def log(tracker: Tracker, cells: Sequence[Cell]) -> None:
        metrics = {}
        for cell in cells:
            for column, values in cell.miou.items():
                training = cell.attention.replace("+", "-")
                metrics[f"miou.{column.replace(',', '')}.{training}.r{cell.related}"] = mean(values)
        tracker.metrics(metrics)

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
        log=log,
    )
    return _run(study, _effect_plan(study, trainings, related, seeds))


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


def _run(study: Study, plan: Plan) -> list[Cell]:
    """Runs a study's trials, seed by seed, keeps its figures as files and in MLflow, and prints its table.

    Raises:
        UserError: what cannot be studied (see `_check`); or a trial failed, after the table of the others.
    """
    trials = [trial for of_seed in itertools.zip_longest(*plan.values()) for trial in of_seed if trial]
    _check(study, trials)
    with _tracked(study) as tracker:
        outcome = run_trials(
            study.resolved.config,
            trials,
            workspace=study.workspace,
            study=study.name,
            parent=tracker.run_id,
            parallel=study.parallel,
        )
        record = _record(study, plan, outcome)
        folder = study.workspace.run(study.name)
        write_json(folder.study, asdict(record))
        with written_aside(folder.study_picture) as aside:
            study.picture(record.cells, aside, study.name, caption(record.means))
        study.log(tracker, record.cells)
        tracker.artifact(folder.study)
        tracker.artifact(folder.study_picture)
        console.print(study.table(record.cells, study.title))
        console.print(caption(record.means), markup=False)
        console.print(f"table and picture: {folder.study}, {folder.study_picture.name} beside it", markup=False)
        if outcome.failure:
            raise outcome.failure
    return record.cells


def _check(study: Study, trials: Sequence[Trial]) -> None:
    """Finds what cannot be studied before the first trial has trained.

    Raises:
        UserError: an unknown stage, or one without scores; a value that the study itself sets; no ground truth; or
            what would end one of the trials.
    """
    config = study.resolved.config
    stages = pipeline.STAGE_NAMES[pipeline.STAGE_NAMES.index("localize") : -1]
    if study.until not in stages:
        raise UserError(f"--until {study.until}", f"a stage with scores: {', '.join(stages)}", "choose one of them")
    told = sorted(key for key in study.swept if study.resolved.origins[key] in ("command line", "--set"))
    if told:
        raise UserError(
            f"{' and '.join(told)} by --set", "values that the study does not set itself", "leave them out of --set"
        )
    masks = listing(config).table["mask_uri"]
    if masks.null_count == len(masks):
        raise UserError(
            "no image has a ground-truth mask", "masks of some training or val images, for scores", "name their folder"
        )
    for trial in trials:
        resolve(config.setting, config.recipe, trial.values)
    # Related images and seeds ask for nothing that another trial of the same training does not.
    for trial in {trial.values.get("classifier.attention"): trial for trial in trials}.values():
        changed = resolve(config.setting, config.recipe, trial.values).config
        pipeline.check(changed, study.workspace, trial.name, until=study.until)


@contextlib.contextmanager
def _tracked(study: Study) -> Iterator[Tracker]:
    """A connected Ray, and the study's MLflow run, which the trials' runs become children of.

    The MLflow run is made first, since it creates MLflow's store before several trials touch it at once.
    """
    config = study.resolved.config
    with ray_session(config.compute, verbose=study.verbose):
        identity = fingerprint(study.name, study.kind, study.resolved.changed(), config.recipe, config.setting)
        tracker = Tracker(study.workspace, study.name, identity=identity)
        status = "FAILED"
        try:
            tracker.tags({"setting": config.setting, "recipe": config.recipe, "study": study.kind})
            different = {*study.swept, *study.unlike}
            tracker.parameters({key: value for key, value in leaves(config) if key not in different})
            yield tracker
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            tracker.finish(status)


def _record(study: Study, plan: Plan, outcome: Outcome) -> StudyRecord:
    """The figures of the trials that ran to their end; a cell without any is left out."""
    cells: list[Cell] = []
    finished: list[dict[str, Score]] = []
    for (attention, related), trials in plan.items():
        scores = [
            scores_by_column(outcome.scores[trial.name], related) for trial in trials if trial.name in outcome.scores
        ]
        if scores:
            miou = {column: [of[column].miou for of in scores] for column in COLUMNS if column in scores[0]}
            cells.append(Cell(attention, related, miou))
        finished += scores
    config = study.resolved.config
    return StudyRecord(
        study=study.kind,
        setting=config.setting,
        recipe=config.recipe,
        changed=study.resolved.changed(),
        means=meaning_of_columns(finished),
        cells=cells,
    )

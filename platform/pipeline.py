"""The whole pipeline on one screen: its stages, what each needs, and the loop that runs them."""

from pathlib import Path
from typing import NamedTuple

from mcis.datasets.errors import UserError
from mcis.datasets.registry import Registry
from mcis.platform.config.resolve import Resolved
from mcis.platform.config.sections import Config
from mcis.platform.engine.nodes import check_gpus
from mcis.platform.engine.step_log import STEPS
from mcis.platform.networks.mlflow_model import log_segmenter
from mcis.platform.reporting.sizing import check_sizes
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.lifecycle import ParentStudy, record_index, run_lifecycle
from mcis.platform.runs.listing import Sources
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.progress import read_records
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.scores import Score, read_scores
from mcis.platform.runs.stage import Stage, find_remaining_stages, run_stage
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages import (
    evaluation,
    index,
    localization,
    predict,
    pseudo_masks,
    report,
    train_affinity,
    train_classifier,
    train_segmenter,
)

_PROJECT_STAGES = (
    Stage(name="index", module=index, sections=("data", "sources"), uses_networks=False),
    Stage(
        name="train_classifier",
        module=train_classifier,
        needs=("index",),
        sections=("seed", "classifier"),
        takes_part=lambda config: config.trains_classifier,
    ),
    Stage(
        name="localize",
        module=localization,
        needs=("index", "train_classifier"),
        sections=("seed", "classifier", "localize"),
        takes_part=lambda config: config.has_maps,
        is_imported=lambda config: config.localize.is_imported,
    ),
    Stage(
        name="train_affinity",
        module=train_affinity,
        needs=("index", "localize"),
        sections=("seed", "maps", "affinity_net"),
        takes_part=lambda config: config.uses_random_walk,
    ),
    Stage(
        name="pseudo_masks",
        module=pseudo_masks,
        needs=("index", "localize", "train_affinity"),
        sections=("supervision", "maps", "pseudo_masks"),
        takes_part=lambda config: config.makes_masks,
    ),
    Stage(
        name="train_segmenter",
        module=train_segmenter,
        needs=("index", "train_classifier", "pseudo_masks"),
        sections=("seed", "classifier", "segmenter"),
        takes_part=lambda config: config.trains_segmenter,
    ),
    Stage(
        name="predict",
        module=predict,
        needs=("index", "train_segmenter"),
        sections=("segmenter", "predict"),
        is_imported=lambda config: config.predict.is_imported,
    ),
    Stage(
        name="evaluate",
        module=evaluation,
        needs=("index", "localize", "pseudo_masks", "predict"),
        sections=("seed", "recipe", "supervision", "weights", "maps", "evaluate"),
        runs_once_reached=("localize", "pseudo_masks", "predict"),
        uses_networks=False,
    ),
    Stage(name="report", module=report, runs_once_reached=("index",), is_stored=False),
)


def _insert_extensions(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Inserts the stages of installed packages (entry points of `mcis.stages`), each after the last stage it needs.

    Raises:
        UserError: A package uses the name of another stage, or needs a stage that does not exist.
    """
    ordered = list(stages)
    project_stages = {stage.name: stage for stage in stages}
    registry: Registry[Stage] = Registry("stages", project_stages)
    extension_names = [name for name in registry if name not in project_stages]
    for name in extension_names:
        extension = registry[name]
        names = [stage.name for stage in ordered]
        unknown = [need for need in extension.needs if need not in names]
        if unknown or not extension.needs or extension.name != name:
            raise UserError(
                f"the stage {name!r} of an installed package has the name {extension.name!r} and needs "
                f"{', '.join(extension.needs) or 'nothing'}",
                f"the name of its entry point, and in `needs` at least one stage, all of them from {', '.join(names)}",
                "correct the package, or remove it",
            )
        last_need = max(names.index(need) for need in extension.needs)
        ordered.insert(last_need + 1, extension)
    return tuple(ordered)


STAGES = _insert_extensions(_PROJECT_STAGES)
STAGE_NAMES = tuple(stage.name for stage in STAGES)


class RunResult(NamedTuple):
    """Result of a run: its context after the last stage, and its scores."""

    context: RunContext
    scores: list[Score]


def check(config: Config, workspace: Workspace, name: str, *, until: str | None = None) -> Sources:
    """Finds problems that would stop a run later, before Ray is started.

    Examples are unknown names, unreadable lists, missing folders, images that a stage needs and the sources lack, and
    pretrained weights that cannot be loaded.

    Args:
        until: Last stage of the run; later stages are not checked.

    Returns:
        The listing of the image sources.

    Raises:
        UserError: The first problem found, or another process is running under this name.
    """
    workspace.run(name, create=False)
    refuse_if_running(workspace, name)
    sources = Sources(config)
    reached = set(STAGE_NAMES[: _last_position(until) + 1])
    for stage in STAGES:
        runs = stage.name in reached or reached.intersection(stage.runs_once_reached)
        if runs and stage.takes_part(config) and hasattr(stage.module, "check"):
            stage.module.check(config, sources.listing(), workspace)
    return sources


def run(
    resolved: Resolved,
    workspace: Workspace,
    name: str,
    *,
    until: str | None = None,
    start: str | None = None,
    study: ParentStudy | None = None,
    sources: Sources | None = None,
) -> RunResult:
    """Runs the pipeline. Ray must be initialized. Stages whose outputs exist and are current are not computed again.

    Args:
        until: Last stage; the stages `evaluate` and `report` still run on the outputs. None runs all stages.
        start: First stage to compute again even if its output exists; so are all stages after it. A later stage than
            `until` must be one that still runs.
        study: Study of which this run is a trial.
        sources: Result of `check`, so that the sources are not listed twice.

    Raises:
        UserError: Another process is running under this name; GPUs are requested but missing; or a stage reports that
            later stages of the run cannot learn from its output. In the last case, outputs so far are scored and
            reported first.
    """
    last = _last_position(until)
    recompute = _stages_to_recompute(start, last)
    with run_lifecycle(
        resolved,
        workspace,
        name,
        runs_all_stages=last >= STAGE_NAMES.index("evaluate"),
        recompute=bool(recompute),
        study=study,
        log_model=log_segmenter,
    ) as tracker:
        context = RunContext(
            workspace=workspace,
            name=name,
            output=workspace.run(name, create=False).path,
            tracker=tracker,
            origins=resolved.origins,
            sources=sources or Sources(resolved.config),
        )
        context = _run_stages(resolved, context, last, recompute)
    return RunResult(context, read_scores(context.stage_outputs))


def _stages_to_recompute(start: str | None, last: int) -> tuple[str, ...]:
    """Names of the stages that are computed even if their outputs exist: `start` and all stages after it.

    Args:
        start: First of these stages; None if there are none.
        last: Position of the last stage of the run.

    Raises:
        UserError: The run does not include `start`.
    """
    if not start:
        return ()
    first = STAGE_NAMES.index(start)
    if first > last and not set(STAGES[first].runs_once_reached).intersection(STAGE_NAMES[: last + 1]):
        raise UserError(
            f"--from {start} --until {STAGE_NAMES[last]}",
            "a first stage that is not after the last",
            "change one of them",
        )
    return STAGE_NAMES[first:]


def _run_stages(resolved: Resolved, context: RunContext, last: int, recompute: tuple[str, ...]) -> RunContext:
    """Runs the stages up to position `last`, and later ones that run once earlier stages are reached.

    Returns:
        The context after the last of them.

    Raises:
        UserError: See `run`.
    """
    config = resolved.config
    folders = _check_machine(config, context, last, recompute)
    problem: UserError | None = None
    is_stopped = False
    for position, stage in enumerate(STAGES):
        if not stage.takes_part(config):
            continue
        is_included = position <= last and problem is None
        if not is_included and not set(stage.runs_once_reached).intersection(context.stage_outputs):
            is_stopped = is_stopped or position <= last
            continue

        folder = folders.get(stage.name)
        context = run_stage(stage, config, context, recompute=stage.name in recompute, folder=folder)
        if stage.name == "index":
            record_index(resolved, context)
        if stage.name == "train_classifier":  # also if an earlier call trained it
            context.tracker.follow("classifier", read_records(context.stage_outputs[stage.name] / STEPS))
        problem = problem or _learning_problem(stage, config, context)

    if problem and is_stopped:
        raise problem
    return context


def _check_machine(config: Config, context: RunContext, last: int, recompute: tuple[str, ...]) -> dict[str, Path]:
    """Checks that the disk has enough space and that requested GPUs exist.

    Returns:
        The folders of outputs that are known before the run, see `RemainingStages`.

    Raises:
        UserError: The disk is too small, or a GPU is missing.
    """
    if last == 0:  # the index needs neither much disk nor networks
        return {}
    remaining = find_remaining_stages(STAGES[: last + 1], config, context, recompute)
    check_sizes([stage.name for stage in remaining.stages], config, context, remaining.written)
    if any(stage.uses_networks for stage in remaining.stages):
        check_gpus(config.compute)
    return remaining.folders


def _learning_problem(stage: Stage, config: Config, context: RunContext) -> UserError | None:
    """The error that ends a run if later stages cannot learn from the output of a stage; None if they can."""
    if not stage.is_stored or not config.compute.stop_if_not_learning:
        return None
    problem = context.result(stage.name, StageResult).problem
    if problem is None:
        return None
    return UserError(
        f"{problem.found}; the run stops here, and {context.folder.report} shows its results so far",
        problem.expected,
        f"{problem.remedy}; or continue anyway with compute.stop_if_not_learning=false",
    )


def _last_position(until: str | None) -> int:
    """Position in `STAGES` of the last stage to run: `until`, or the last of all stages for None."""
    return len(STAGES) - 1 if until is None else STAGE_NAMES.index(until)

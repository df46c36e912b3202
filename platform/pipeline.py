"""The whole pipeline on one screen: the table of its stages, what each needs, and the loop that runs them."""

from typing import NamedTuple

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import Resolved
from mcis.platform.config.sections import Config
from mcis.platform.engine.nodes import check_gpus
from mcis.platform.engine.step_log import STEPS
from mcis.platform.networks.mlflow_model import log_segmenter
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.lifecycle import ParentStudy, record_index, run_lifecycle
from mcis.platform.runs.listing import Sources
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.progress import read_records
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.scores import Score, read_scores
from mcis.platform.runs.stage import Stage, run_stage
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

STAGES = (
    Stage(name="index", module=index, sections=("data", "sources"), networks=False),
    Stage(
        name="train_classifier",
        module=train_classifier,
        needs=("index",),
        sections=("seed", "classifier"),
        takes_part=lambda config: config.supervision == "tags",
    ),
    Stage(
        name="localize",
        module=localization,
        needs=("index", "train_classifier"),
        sections=("seed", "classifier", "localize"),
        takes_part=lambda config: config.supervision == "tags",
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
    ),
    Stage(
        name="train_segmenter",
        module=train_segmenter,
        needs=("index", "train_classifier", "pseudo_masks"),
        sections=("seed", "classifier", "segmenter"),
    ),
    Stage(name="predict", module=predict, needs=("index", "train_segmenter"), sections=("segmenter", "predict")),
    Stage(
        name="evaluate",
        module=evaluation,
        needs=("index", "localize", "pseudo_masks", "predict"),
        sections=("seed", "recipe", "supervision", "weights", "maps", "evaluate"),
        runs_once_reached=("localize", "predict"),
        networks=False,
    ),
    Stage(name="report", module=report, runs_once_reached=("index",), kept=False),
)
STAGE_NAMES = tuple(stage.name for stage in STAGES)


class RunResult(NamedTuple):
    """What a run came to: its context after the last stage, and its scores."""

    context: RunContext
    scores: list[Score]


def check(config: Config, workspace: Workspace, name: str, *, until: str | None = None) -> Sources:
    """Finds what would end the run later, up to its last stage: unknown names, unreadable lists, absent folders,
    images that a stage asks for and the sources do not have, weights that cannot be had.

    Returns:
        What the sources hold.

    Raises:
        UserError: the first such problem, before a Ray is started for it; another process under the name is one too.
    """
    workspace.run(name, create=False)
    refuse_if_running(workspace, name)
    sources = Sources(config)
    reached = STAGE_NAMES[: _number(until) + 1]
    for stage in STAGES:
        runs = stage.name in reached or set(stage.runs_once_reached) & set(reached)
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
    """Runs the pipeline in a Ray that is connected, and computes what is missing or changed.

    Args:
        until: last stage; what was reached by then is scored and reported all the same.
        start: this stage and all after it are computed again.
        study: that this run belongs to.
        sources: what `check` returned, which is then not listed again.

    Raises:
        UserError: another process runs under this name in the workspace; GPUs are asked for and absent; or a stage
            found that its output teaches nothing: what was reached by then is scored and reported.
    """
    config, last, problem = resolved.config, _number(until), None
    if start and _number(start) > last:
        raise UserError(f"--from {start} --until {until}", "a first stage that is not behind the last", "correct one")
    recompute = STAGE_NAMES[_number(start) :] if start else ()
    if last:  # no network has a part in the index
        check_gpus(config.compute)
    whole = last >= STAGE_NAMES.index("evaluate")
    with run_lifecycle(
        resolved, workspace, name, whole=whole, recompute=bool(recompute), study=study, log_model=log_segmenter
    ) as tracker:
        context = RunContext(
            workspace=workspace,
            name=name,
            part=workspace.run(name, create=False).path,
            tracker=tracker,
            origins=resolved.origins,
            sources=sources or Sources(config),
        )
        for number, stage in enumerate(STAGES):
            reached = number <= last and not problem
            if stage.takes_part(config) and (reached or set(stage.runs_once_reached) & set(context.inputs)):
                context = run_stage(stage, config, context, recompute=stage.name in recompute)
                if stage.name == "index":
                    record_index(resolved, context)
                if stage.name == "train_classifier":  # also one that an earlier call has trained
                    tracker.follow("classifier", read_records(context.inputs[stage.name] / STEPS))
                problem = problem or _teaches_nothing(stage, config, context)
        if problem:
            raise problem
    return RunResult(context, read_scores(context.inputs))


def _teaches_nothing(stage: Stage, config: Config, context: RunContext) -> UserError | None:
    """Why the output of a stage teaches nothing, where a run is to end for that."""
    problem = context.result(stage.name, StageResult).problem if stage.kept else None
    if problem is None or not config.compute.stop_if_not_learning:
        return None
    found, expected, remedy = problem
    return UserError(
        f"{found}; the run ends here, and {context.folder.report} shows what it came to",
        expected,
        f"{remedy}; or go on all the same with compute.stop_if_not_learning=false",
    )


def _number(stage: str | None) -> int:
    return len(STAGES) if stage is None else STAGE_NAMES.index(stage)

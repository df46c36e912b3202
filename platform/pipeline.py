"""The whole pipeline on one screen: the table of its stages, what each needs, and the loop that runs them."""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.datasets.storage.copies import place_of
from mcis.datasets.tables.large_tables import give_back
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import leaves
from mcis.platform.config.resolve import Resolved
from mcis.platform.config.sections import Config
from mcis.platform.engine.runtime import check_gpus
from mcis.platform.networks.needs import COUNTED, counts_of, needs
from mcis.platform.networks.served import trained_segmenter
from mcis.platform.runs.context import Pauses, RunContext
from mcis.platform.runs.data_sets import data_sets
from mcis.platform.runs.listing import listing
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.record import begun_afresh, point_to, recorded
from mcis.platform.runs.results import IndexResult, StageResult
from mcis.platform.runs.scores import Score
from mcis.platform.runs.stage import Stage, Together, run_stage, unfinished
from mcis.platform.runs.tracking import Tracker, Watch
from mcis.platform.runs.workspace import (
    RunFolder,
    Workspace,
    fingerprint,
    free_bytes,
    read_json,
    read_table,
    write_text,
)
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


def learns_from_tags(config: Config) -> bool:
    """Whether there is a classifier; where supervision is full, the truth takes the place of pseudo masks."""
    return config.supervision == "tags"


def walks(config: Config) -> bool:
    """Whether pseudo masks need affinities."""
    return config.walks


STAGES = (
    Stage(name="index", module=index, sections=("data", "setting"), networks=False),
    Stage(
        name="train_classifier",
        module=train_classifier,
        needs=("index",),
        sections=("seed", "classifier"),
        takes_part=learns_from_tags,
    ),
    Stage(
        name="localize",
        module=localization,
        needs=("index", "train_classifier"),
        sections=("seed", "classifier", "localize"),
        takes_part=learns_from_tags,
        together=Together(localization.for_each_number, localization.run_together),
    ),
    Stage(
        name="train_affinity",
        module=train_affinity,
        needs=("index", "train_classifier", "localize"),
        sections=("seed", "classifier", "maps", "affinity_net"),
        takes_part=walks,
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
    Stage(
        name="predict",
        module=predict,
        needs=("index", "train_segmenter"),
        sections=("segmenter", "predict"),
    ),
    Stage(
        name="evaluate",
        module=evaluation,
        needs=("index", "localize", "pseudo_masks", "predict"),
        sections=("seed", "recipe", "supervision", "weights", "maps", "evaluate"),
        runs_once_reached="localize",
        networks=False,
    ),
    Stage(name="report", module=report, runs_once_reached="index", kept=False),
)
STAGE_NAMES = tuple(stage.name for stage in STAGES)


class RunResult(NamedTuple):
    """What a run came to: its context after the last stage, and its scores."""

    context: RunContext
    scores: list[Score]


def check(
    config: Config, workspace: Workspace, name: str, *, until: str | None = None, start: str | None = None
) -> Listing:
    """Finds what would end the run later, up to its last stage: unknown names, unreadable lists, absent folders,
    images that a stage asks for and the sources do not have, weights that cannot be had.

    Returns:
        What the sources hold.

    Raises:
        UserError: the first such problem, before a Ray is started for it; another process that runs under the name is
            one too.
    """
    for option, stage_name in (("--until", until), ("--from", start)):
        if stage_name is not None and stage_name not in STAGE_NAMES:
            raise UserError(
                f"{option} {stage_name}", f"one of {', '.join(STAGE_NAMES)}", f"choose one of them for {option}"
            )
    workspace.run(name, create=False)
    refuse_if_running(workspace, name)
    listed = listing(config)
    for stage in STAGES[: _number(until) + 1]:
        if stage.takes_part(config):
            stage.module.check(config, listed, workspace)
    return listed


def run(
    resolved: Resolved,
    workspace: Workspace,
    name: str,
    *,
    until: str | None = None,
    start: str | None = None,
    parent: str | None = None,
    study: str | None = None,
    varied: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    pauses: Pauses | None = None,
    listed: list[Listing] | None = None,
) -> RunResult:
    """Runs the pipeline in a Ray that is connected, and computes what is missing or changed.

    Args:
        until: last stage; what was reached by then is scored and reported all the same.
        start: this stage and all after it are computed again; repeated, a call that did not finish goes on.
        parent: MLflow run of a study that this run belongs to.
        study: name of that study.
        varied: what tells the run from the others of its study, by short names; further parameters of the MLflow run.
        watch: is told what trainings log, beside MLflow.
        pauses: of the classifier's training.
        listed: the listing that `check` returned, which is then not made again; the run empties this list behind its
            index, so that it frees the memory where nobody else has it.

    Raises:
        UserError: another process runs under this name in the workspace; GPUs are asked for and absent; or a stage
            found that its output teaches nothing: what was reached by then is scored and reported.
    """
    config, folder, last = resolved.config, workspace.run(name, create=False), _number(until)
    if last:  # no network has a part in the index
        check_gpus(config.compute)
    problem = None
    values = dict(leaves(config))
    with contextlib.ExitStack() as blocks:
        whole = all(number <= last for number, stage in enumerate(STAGES) if stage.kept)
        blocks.enter_context(recorded(workspace, name, whole=whole, study=study))
        if not folder.stages.exists():
            write_text(folder.config, experiment_text(config, resolved.origins))
        _point_to_weights(config, workspace, name)
        tracker = Tracker(
            workspace,
            name,
            identity=fingerprint(values, parent),
            parent=parent,
            # What is computed again has curves of its own, those of a call that goes on with it included.
            afresh=start is not None and not begun_afresh(workspace, name),
            watch=watch,
            trained=trained_segmenter,
        )
        blocks.enter_context(tracker.running(system_metrics=config.tracking.system_metrics))
        tracker.parameters({**values, **(varied or {})})
        tracker.tags({"setting": config.setting, "recipe": config.recipe, "seed": str(config.seed)})
        if study:
            tracker.tags({"study": study})
        context = RunContext(
            workspace=workspace,
            name=name,
            part=folder.path,
            tracker=tracker,
            origins=resolved.origins,
            pauses=pauses,
            listed=[] if listed is None else listed,
        )
        for number, stage in enumerate(STAGES):
            if number == 1:
                context.listed.clear()
                give_back()
                # Until then the outputs that the run's folder names are those of an earlier call.
                write_text(folder.config, experiment_text(config, resolved.origins))
                _track_data_sets(config, context)
            if number == 1 <= last:
                _check_disk(config, context, until, start)
            if stage.takes_part(config) and (number <= last or stage.runs_once_reached in context.inputs):
                context = run_stage(stage, config, context, afresh=start is not None and number >= _number(start))
                if stage.kept and config.compute.stop_if_nothing_is_learnt and problem is None:
                    problem = context.result(stage.name, StageResult).problem
                    last = last if problem is None else number
        if problem:
            _raise_problem(*problem, folder)
    scores = read_json(folder.scores)["scores"]
    return RunResult(context, [Score.from_json(score, folder.scores) for score in scores])


def _point_to_weights(config: Config, workspace: Workspace, name: str) -> None:
    """Writes down that a run points to outputs of other runs by the files of weights that it names."""
    for key, value in leaves(config.weights):
        folder = place_of(value or "").parent
        if folder.parent == workspace.store.resolve():
            point_to(workspace, name, f"weights.{key}", folder)


def _track_data_sets(config: Config, context: RunContext) -> None:
    index = read_table(context.inputs["index"] / "index.parquet", ["domain", "split"])
    digest = context.result("index", IndexResult).identity
    assert digest is not None  # written with the result
    context.tracker.data_sets(data_sets(config, index, digest))


def _check_disk(config: Config, context: RunContext, until: str | None, start: str | None) -> None:
    """Ends a run behind its index, before any training, where the disk has less free than the stages still take.

    Raises:
        UserError: see `Needs.check_disk`.
    """
    images = read_table(context.inputs["index"] / "index.parquet", COUNTED)
    plan = needs(config, counts_of(config, images, len(context.classes)), context.workspace)
    reached = STAGE_NAMES[: _number(until) + 1]
    ahead = [
        stage
        for stage in STAGES[1:]
        if stage.kept and stage.takes_part(config) and (stage.name in reached or stage.runs_once_reached in reached)
    ]
    if plan.disk([stage.name for stage in ahead]) > free_bytes(context.workspace.root):
        left = unfinished(ahead, config, context, STAGE_NAMES[_number(start) :])
        plan.check_disk(context.workspace, left.stages, begun=left.begun)


def _raise_problem(found: str, expected: str, remedy: str, folder: RunFolder) -> NoReturn:
    raise UserError(
        f"{found}; the run ends here, and {folder.report} shows what it came to",
        expected,
        f"{remedy}; or go on all the same with --set compute.stop_if_nothing_is_learnt=false",
    )


def _number(stage: str | None) -> int:
    return len(STAGES) if stage is None else STAGE_NAMES.index(stage)

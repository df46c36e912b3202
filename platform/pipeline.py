"""The whole pipeline on one screen: its stages, what each needs, and the loop that runs them.

A stage's output is kept under a key: the fingerprint of its part of the configuration, of its outer inputs and of the
identities of the stages it needs. Outputs with the same key are the same and are computed once, in this run or another.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.platform.config.keys import leaves
from mcis.platform.config.resolve import Resolved
from mcis.platform.config.sections import Config, Section
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.listing import listing
from mcis.platform.runs.progress import console
from mcis.platform.runs.results import StageResult, write_result
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import SUMMARY, Workspace, disk_errors, fingerprint, read_json, write_json
from mcis.platform.stages import (
    evaluate,
    index,
    localization,
    predict,
    pseudo_masks,
    report,
    train_classifier,
    train_segmenter,
)


class StageModule(Protocol):
    """What every module of `mcis.platform.stages` offers."""

    def check(self, config: Config, listing: Listing, workspace: Workspace) -> None:
        """Raises UserError for what would end the stage later, seen from the listing and the files of weights alone."""

    def inputs(self, config: Config, context: RunContext) -> Any:
        """What the output depends on beside configuration and earlier stages: a value that JSON can hold."""

    def run(self, config: Config, context: RunContext) -> StageResult:
        """Computes the output into `context.part`; what an interrupted call left there is continued."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the pipeline.

    Attributes:
        name: in keys, file names and `--until`.
        module: does the work.
        needs: stages whose output it reads; those that the run did not reach are left out.
        sections: parts of the configuration that its output depends on.
        version: raised when the meaning of its output changes, so that older outputs are not taken for new ones.
        closes: a stage; once that has run, this one runs too, on all that was reached, even where the run ends earlier.
        kept: whether its output is kept under a key. If not, it writes into the run's folder, in every call.
    """

    name: str
    module: StageModule
    needs: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    version: int = 1
    closes: str | None = None
    kept: bool = True


STAGES = (
    Stage(name="index", module=index, sections=("data", "setting"), version=2),
    Stage(name="train_classifier", module=train_classifier, needs=("index",), sections=("seed", "classifier")),
    Stage(
        name="localize",
        module=localization,
        needs=("index", "train_classifier"),
        sections=("seed", "classifier", "localize"),
        version=2,
    ),
    Stage(name="pseudo_masks", module=pseudo_masks, needs=("index", "localize"), sections=("maps", "pseudo_masks")),
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
        version=2,
    ),
    Stage(
        name="evaluate",
        module=evaluate,
        needs=("index", "localize", "pseudo_masks", "predict"),
        sections=("seed", "recipe", "weights", "maps", "evaluate"),
        version=4,
        closes="localize",
    ),
    Stage(name="report", module=report, closes="index", kept=False),
)
STAGE_NAMES = tuple(stage.name for stage in STAGES)


class RunResult(NamedTuple):
    """What a run came to: its context after the last stage, and the entries of scores.json."""

    context: RunContext
    scores: list[dict[str, Any]]


def check(
    config: Config, workspace: Workspace, name: str, *, until: str | None = None, start: str | None = None
) -> None:
    """Finds what would end the run later, up to its last stage: unknown names, unreadable lists, absent folders,
    images that a stage asks for and the sources do not have, weights that cannot be had.

    Raises:
        UserError: the first such problem, before a Ray is started for it.
    """
    for option, stage_name in (("--until", until), ("--from", start)):
        if stage_name is not None and stage_name not in STAGE_NAMES:
            raise UserError(
                f"{option} {stage_name}", f"one of {', '.join(STAGE_NAMES)}", f"choose one of them for {option}"
            )
    workspace.run(name, create=False)
    listed = listing(config)
    for stage in STAGES[: _number(until) + 1]:
        stage.module.check(config, listed, workspace)


def run(
    resolved: Resolved,
    workspace: Workspace,
    name: str,
    *,
    until: str | None = None,
    start: str | None = None,
    parent: str | None = None,
    tags: dict[str, str] | None = None,
) -> RunResult:
    """Runs the pipeline in a Ray that is connected, and computes what is missing or changed.

    Args:
        until: last stage; what was reached by then is scored and reported all the same.
        start: this stage and all after it are computed again.
        parent: MLflow run of a study that this run belongs to.
        tags: further tags of the MLflow run.
    """
    config, folder = resolved.config, workspace.run(name)
    values = {key: _plain(value) for key, value in leaves(config)}
    write_json(folder.config, {key: {"value": v, "from": resolved.origins[key]} for key, v in values.items()})
    if start:
        folder.tracking.unlink(missing_ok=True)  # what is computed again has curves of its own
    tracker = Tracker(workspace, name, identity=fingerprint(values, parent), parent=parent)
    with _tracked(tracker):
        tracker.parameters(dict(leaves(config)))
        tracker.tags({"setting": config.setting, "recipe": config.recipe, "seed": str(config.seed), **(tags or {})})
        context = RunContext(
            workspace=workspace,
            name=name,
            folder=folder,
            part=folder.path,
            tracker=tracker,
            origins=resolved.origins,
        )
        for number, stage in enumerate(STAGES):
            if number <= _number(until) or stage.closes in context.inputs:
                context = _run_stage(stage, config, context, afresh=start is not None and number >= _number(start))
    return RunResult(context, read_json(folder.scores)["scores"])


def _number(stage: str | None) -> int:
    return len(STAGES) if stage is None else STAGE_NAMES.index(stage)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | type(None) | tuple) else str(value)


@contextlib.contextmanager
def _tracked(tracker: Tracker) -> Iterator[None]:
    """Ends the MLflow run with the status that the block ends with."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(UserError):  # the error that ended the run is the one to tell
            tracker.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    tracker.finish("FINISHED")


def _run_stage(stage: Stage, config: Config, context: RunContext, *, afresh: bool) -> RunContext:
    """Runs a stage, unless its output is kept and not to be computed `afresh`; returns the next stage's context."""
    began, workspace = time.monotonic(), context.workspace
    if not stage.kept:
        stage.module.run(config, dataclasses.replace(context, part=context.folder.path))
        return context.after(stage.name, context.folder.path, seconds=time.monotonic() - began, computed=True)
    key = _key(stage, config, context)
    computed = _compute(stage, key, config, context, afresh=afresh)
    seconds = time.monotonic() - began
    context = context.after(stage.name, workspace.finished(stage.name, key), seconds=seconds, computed=computed)
    outputs = {name: str(folder.relative_to(workspace.root)) for name, folder in context.inputs.items()}
    write_json(context.folder.stages, outputs)
    console.print(f"[bold]{stage.name}[/bold]: {f'{seconds:.1f} s' if computed else 'is there already'}")
    return context


def _key(stage: Stage, config: Config, context: RunContext) -> str:
    """The fingerprint of all that the stage's output depends on."""
    values = {name: getattr(config, name) for name in stage.sections}
    reached = [name for name in stage.needs if name in context.inputs]
    return fingerprint(
        {
            "stage": stage.name,
            "version": stage.version,
            "configuration": {n: v.model_dump(mode="json") if isinstance(v, Section) else v for n, v in values.items()},
            "inputs": stage.module.inputs(config, context),
            "needs": {name: context.result(name, StageResult).identity for name in reached},
        }
    )


def _compute(stage: Stage, key: str, config: Config, context: RunContext, *, afresh: bool) -> bool:
    """Computes the stage if its output is absent or `afresh` asks for it; True if it did."""
    workspace = context.workspace
    with workspace.lock(stage.name, key):
        if (workspace.finished(stage.name, key) / SUMMARY).exists() and not afresh:
            return False
        if afresh:
            workspace.forget(stage.name, key)
        part, began = workspace.part(stage.name, key), time.monotonic()
        with disk_errors(part):
            part.mkdir(parents=True, exist_ok=True)
            result = stage.module.run(config, dataclasses.replace(context, part=part, afresh=afresh))
        write_result(part, result, stage=stage.name, key=key, seconds=time.monotonic() - began)
        workspace.finish(stage.name, key)
        return True

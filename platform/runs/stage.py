"""A stage of the pipeline: what its module offers, and how its output is computed once and kept under a key.

The key is the fingerprint of the stage's part of the configuration, of its outer inputs, of the identities of the
stages it needs, and of code, torch and class of device that it is computed with. Outputs with the same key are the
same: they are computed once, in one run or another.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mcis.datasets.index import Listing
from mcis.datasets.section import Section
from mcis.datasets.storage.copies import in_bucket, is_there
from mcis.platform.config.sections import Config
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.locks import hold_stage
from mcis.platform.runs.progress import console
from mcis.platform.runs.record import begin_afresh, begun_afresh, point_to
from mcis.platform.runs.results import StageResult, flaw, write_result
from mcis.platform.runs.version import made_with
from mcis.platform.runs.workspace import SUMMARY, Workspace, bytes_in, discard, disk_errors, fingerprint


class StageModule(Protocol):
    """What every module of `mcis.platform.stages` offers."""

    def check(self, config: Config, listing: Listing, workspace: Workspace) -> None:
        """Raises UserError for what would end the stage later, seen from the listing and the files of weights alone."""

    def inputs(self, config: Config, context: RunContext) -> Any:
        """What the output depends on beside configuration and earlier stages: a value that JSON can hold."""

    def run(self, config: Config, context: RunContext) -> StageResult:
        """Computes the output into `context.part`; what an interrupted call left there is continued."""


class Together(NamedTuple):
    """How a stage computes the outputs of several configurations in one pass.

    Attributes:
        configurations: those whose outputs are computed with that of a configuration, which is the first of them; what
            it says of the others has no place in them.
        run: as `StageModule.run`, for some of them, each with a context of its own; returns their results.
    """

    configurations: Callable[[Config], Sequence[Config]]
    run: Callable[[Sequence[Config], Sequence[RunContext]], Sequence[StageResult]]


def _always(config: Config) -> bool:
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the pipeline.

    Attributes:
        name: in keys, file names and `--until`.
        module: does the work.
        needs: stages whose output it reads; those that the run did not reach are left out.
        sections: parts of the configuration that its output depends on.
        runs_once_reached: a stage; once that has run, this one runs too, on all that was reached, even where the run
            ends earlier.
        kept: whether its output is kept under a key. If not, it writes into the run's folder, in every call.
        networks: whether networks run in it, so that the class of device is in its key.
        takes_part: whether a run of a configuration has this stage.
        together: computes the outputs of several configurations in one pass; None for a stage that cannot.
    """

    name: str
    module: StageModule
    needs: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    runs_once_reached: str | None = None
    kept: bool = True
    networks: bool = True
    takes_part: Callable[[Config], bool] = _always
    together: Together | None = None


def run_stage(stage: Stage, config: Config, context: RunContext, *, afresh: bool) -> RunContext:
    """Runs a stage, unless its output is kept and not to be computed `afresh`; returns the next stage's context.

    What a call before has begun to compute afresh, and did not finish, goes on from there.
    """
    began, workspace = time.monotonic(), context.workspace
    if not stage.kept:
        stage.module.run(config, context)
        return context.after(stage.name, context.folder.path, seconds=time.monotonic() - began, computed=True)
    outputs = _outputs(stage, config, context)
    key = next(iter(outputs))
    point_to(workspace, context.name, stage.name, *(workspace.finished(stage.name, each) for each in outputs))
    computed = _compute(stage, outputs, context, afresh=afresh)
    seconds = time.monotonic() - began
    context = context.after(stage.name, workspace.finished(stage.name, key), seconds=seconds, computed=computed)
    workspace.record_outputs(context.name, context.inputs)
    console.print(f"[bold]{stage.name}[/bold]: {f'{seconds:.1f} s' if computed else 'is there already'}")
    return context


class Unfinished(NamedTuple):
    """The stages that a run has still to compute, and how many bytes of what the first of them writes are there."""

    stages: tuple[str, ...]
    begun: int


def unfinished(stages: Sequence[Stage], config: Config, context: RunContext, afresh: Collection[str]) -> Unfinished:
    """The stages from the first one without a finished output on, as those behind it depend on it.

    Args:
        stages: whose output is kept.
        context: as the first of them gets it.
        afresh: stages whose output is removed and computed again.
    """
    workspace = context.workspace
    for number, stage in enumerate(stages):
        names = tuple(stage.name for stage in stages[number:])
        outputs = _outputs(stage, config, context)
        folder = workspace.finished(stage.name, next(iter(outputs)))
        begun = sum(bytes_in(workspace.part(stage.name, key)) for key in outputs)
        begun += sum(bytes_in(workspace.finished(stage.name, key)) for key in list(outputs)[1:])
        if stage.name in afresh and folder.name not in begun_afresh(workspace, context.name):
            return Unfinished(names, begun + bytes_in(folder))
        if not _is_whole(folder):
            return Unfinished(names, begun)
        context = context.after(stage.name, folder, seconds=0.0, computed=False)
    return Unfinished((), 0)


def _outputs(stage: Stage, config: Config, context: RunContext) -> dict[str, Config]:
    """The configurations whose outputs a stage computes in one pass, by their keys; that of `config` is the first."""
    configs = stage.together.configurations(config) if stage.together else [config]
    return {_key(stage, each, context): each for each in configs}


def _key(stage: Stage, config: Config, context: RunContext) -> str:
    """The fingerprint of all that the stage's output depends on."""
    values = {name: getattr(config, name) for name in stage.sections}
    reached = [name for name in stage.needs if name in context.inputs]
    return fingerprint(
        {
            "stage": stage.name,
            "made with": made_with(config.compute.device if stage.networks else None),
            "configuration": {n: v.model_dump(mode="json") if isinstance(v, Section) else v for n, v in values.items()},
            "inputs": stage.module.inputs(config, context),
            "needs": {name: context.result(name, StageResult).identity for name in reached},
        }
    )


def _compute(stage: Stage, outputs: dict[str, Config], context: RunContext, *, afresh: bool) -> bool:
    """Computes a stage if its output is absent or not whole, or `afresh` asks for it; True if it did.

    Args:
        outputs: as of `_outputs`. What is absent of them is computed in the same pass.
    """
    workspace, wanted = context.workspace, next(iter(outputs))
    if not afresh and _is_whole(workspace.finished(stage.name, wanted)):
        return False  # whoever holds a lock may be computing another output for hours
    with contextlib.ExitStack() as locks:
        for key in sorted(outputs):  # in the same order everywhere, or two runs might wait for each other
            locks.enter_context(hold_stage(workspace, stage.name, key, run=context.name))
        absent = [key for key in outputs if not _is_whole(workspace.finished(stage.name, key))]
        output = workspace.finished(stage.name, wanted)
        goes_on = afresh and output.name in begun_afresh(workspace, context.name)
        if goes_on:
            console.print(f"note: {stage.name} goes on with what the call before has computed again")
        elif afresh:
            absent = list(dict.fromkeys([wanted, *absent]))
            for key in absent:
                workspace.forget(stage.name, key)
            begin_afresh(workspace, context.name, output)
        if wanted not in absent:
            return False
        for folder in (workspace.finished(stage.name, key) for key in absent):
            # In a bucket an output and its part are one place.
            if is_there(folder / SUMMARY if in_bucket(folder) else folder):
                console.print(f"note: {folder.name} is computed again: {flaw(folder)}", markup=False)
                if in_bucket(folder):
                    discard(folder)
        parts, began = [workspace.part(stage.name, key) for key in absent], time.monotonic()
        caches: list[str] = []
        anew = afresh and not goes_on  # what the call before has kept is of images that were read again
        contexts = [dataclasses.replace(context, part=part, afresh=anew, caches=caches) for part in parts]
        with disk_errors(parts[0]):
            for part in parts:
                part.mkdir(parents=True, exist_ok=True)
            if stage.together:
                results = stage.together.run([outputs[key] for key in absent], contexts)
            else:
                results = [stage.module.run(outputs[wanted], contexts[0])]
        seconds = time.monotonic() - began
        for key, part, result in zip(absent, parts, results, strict=True):
            write_result(part, result, stage=stage.name, key=key, seconds=seconds, caches=caches)
            workspace.finish(stage.name, key)
        return True


def _is_whole(folder: Path) -> bool:
    """Whether a finished output is there with all its files."""
    return flaw(folder) is None

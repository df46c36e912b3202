"""A stage of the pipeline: what its module offers, and how its output is computed once and kept under a key.

The key is the fingerprint of the stage's part of the configuration, of its outer inputs and of the identities of the
stages it needs. Outputs with the same key are the same: they are computed once, in one run or another.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from mcis.datasets.index import Listing
from mcis.platform.config.section import Section
from mcis.platform.config.sections import Config
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.locks import hold_stage
from mcis.platform.runs.progress import console
from mcis.platform.runs.record import point_to
from mcis.platform.runs.results import StageResult, write_result
from mcis.platform.runs.workspace import SUMMARY, Workspace, bytes_in, disk_errors, fingerprint


class StageModule(Protocol):
    """What every module of `mcis.platform.stages` offers."""

    def check(self, config: Config, listing: Listing, workspace: Workspace) -> None:
        """Raises UserError for what would end the stage later, seen from the listing and the files of weights alone."""

    def inputs(self, config: Config, context: RunContext) -> Any:
        """What the output depends on beside configuration and earlier stages: a value that JSON can hold."""

    def run(self, config: Config, context: RunContext) -> StageResult:
        """Computes the output into `context.part`; what an interrupted call left there is continued."""


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
        version: raised when the meaning of its output changes, so that older outputs are not taken for new ones.
        closes: a stage; once that has run, this one runs too, on all that was reached, even where the run ends earlier.
        kept: whether its output is kept under a key. If not, it writes into the run's folder, in every call.
        takes_part: whether a run of a configuration has this stage.
    """

    name: str
    module: StageModule
    needs: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    version: int = 1
    closes: str | None = None
    kept: bool = True
    takes_part: Callable[[Config], bool] = _always


def run_stage(stage: Stage, config: Config, context: RunContext, *, afresh: bool) -> RunContext:
    """Runs a stage, unless its output is kept and not to be computed `afresh`; returns the next stage's context."""
    began, workspace = time.monotonic(), context.workspace
    if not stage.kept:
        stage.module.run(config, context)
        return context.after(stage.name, context.folder.path, seconds=time.monotonic() - began, computed=True)
    key = _key(stage, config, context)
    point_to(workspace, context.name, stage.name, workspace.finished(stage.name, key))
    computed = _compute(stage, key, config, context, afresh=afresh)
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
        key = _key(stage, config, context)
        part, folder = workspace.part(stage.name, key), workspace.finished(stage.name, key)
        if stage.name in afresh:
            return Unfinished(names, bytes_in(part) + bytes_in(folder))
        if not (folder / SUMMARY).exists():
            return Unfinished(names, bytes_in(part))
        context = context.after(stage.name, folder, seconds=0.0, computed=False)
    return Unfinished((), 0)


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
    with hold_stage(workspace, stage.name, key, run=context.name):
        if (workspace.finished(stage.name, key) / SUMMARY).exists() and not afresh:
            return False
        if afresh:
            workspace.forget(stage.name, key)
        part, began = workspace.part(stage.name, key), time.monotonic()
        with disk_errors(part):
            part.mkdir(parents=True, exist_ok=True)
            context = dataclasses.replace(context, part=part, afresh=afresh, caches=[])
            result = stage.module.run(config, context)
        seconds = time.monotonic() - began
        write_result(part, result, stage=stage.name, key=key, seconds=seconds, caches=context.caches)
        workspace.finish(stage.name, key)
        return True

"""A stage of the pipeline: what its module offers, and how its output is computed once and kept under a key.

The key is the fingerprint of the stage's part of the configuration, of its outer inputs, of the identities of the
stages it needs, and of code, torch and class of device that it is computed with. Outputs with the same key are the
same: they are computed once, in one run or another.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mcis.datasets.section import Section
from mcis.datasets.storage.folders import is_there, remove
from mcis.platform.config.sections import Config
from mcis.platform.runs.bookkeeping import point_to
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import disk_errors, fingerprint
from mcis.platform.runs.locks import hold_stage
from mcis.platform.runs.progress import console
from mcis.platform.runs.results import StageResult, find_missing_files, write_result
from mcis.platform.runs.version import made_with
from mcis.platform.runs.workspace import SUMMARY


class StageModule(Protocol):
    """What every module of `mcis.platform.stages` offers. It may have two more functions:

    - `check(config, listing, workspace)` raises UserError for what would end the stage later, seen from the listing and
      the files of weights alone.
    - `inputs(config, context)` is what the output depends on beside configuration and earlier stages: a value that JSON
      can hold.
    """

    __name__: str

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
        runs_once_reached: stages; once one has run, this one runs too, on all that was reached, if a run ends earlier.
        kept: whether its output is kept under a key. If not, it writes into the run's folder, in every call.
        networks: whether networks run in it, so that the class of device is in its key.
        takes_part: whether a run of a configuration has this stage.
    """

    name: str
    module: StageModule
    needs: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    runs_once_reached: tuple[str, ...] = ()
    kept: bool = True
    networks: bool = True
    takes_part: Callable[[Config], bool] = lambda _: True


def run_stage(stage: Stage, config: Config, context: RunContext, *, recompute: bool = False) -> RunContext:
    """Runs a stage, unless its output is kept and not to be recomputed; returns the next stage's context."""
    began, workspace = time.monotonic(), context.workspace
    if not stage.kept:
        stage.module.run(config, context)
        return context.after(stage.name, context.folder.path, seconds=time.monotonic() - began, computed=True)
    folder = workspace.output(stage.name, fingerprint(key_parts(stage, config, context)))
    point_to(workspace, context.name, stage.name, folder)
    computed = _compute(stage, config, context, folder, again=recompute)
    seconds = time.monotonic() - began
    context = context.after(stage.name, folder, seconds=seconds, computed=computed)
    workspace.record_outputs(context.name, context.inputs)
    console.print(f"[bold]{stage.name}[/bold]: {f'{seconds:.1f} s' if computed else 'is there already'}", markup=True)
    for remark in context.result(stage.name, StageResult).remarks() if computed else ():
        console.print(f"note: {remark}")
    return context


def key_parts(stage: Stage, config: Config, context: RunContext) -> dict[str, Any]:
    """All that the stage's output depends on, which its key is the fingerprint of."""
    values = {name: getattr(config, name) for name in stage.sections}
    reached = [name for name in stage.needs if name in context.inputs]
    return {
        "stage": stage.name,
        "made with": made_with(stage.module.__name__, config.compute.device if stage.networks else None),
        "configuration": {n: v.model_dump(mode="json") if isinstance(v, Section) else v for n, v in values.items()},
        "inputs": stage.module.inputs(config, context) if hasattr(stage.module, "inputs") else None,
        "needs": {name: context.result(name, StageResult).identity for name in reached},
    }


def _compute(stage: Stage, config: Config, context: RunContext, folder: Path, *, again: bool) -> bool:
    """Computes a stage if its output is absent or not whole, or is to be made `again`; True if it did."""
    if not again and find_missing_files(folder) is None:
        return False
    workspace, key = context.workspace, folder.name.removeprefix(f"{stage.name}-")
    with hold_stage(workspace, stage.name, key, run=context.name):
        if again:
            remove(folder)
        if (lacks := find_missing_files(folder)) is None:
            return False
        if is_there(folder / SUMMARY):
            console.print(f"note: {folder.name} is computed again: {lacks}")
            remove(folder)
        caches = list[str]()
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            result = stage.module.run(config, dataclasses.replace(context, part=folder, recompute=again, caches=caches))
        write_result(folder, result, key=key, caches=caches)
        return True

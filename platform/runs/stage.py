"""A stage of the pipeline: the interface of its module, and how its output is computed once and stored under a key.

The key is the fingerprint of the stage's sections of the configuration, its external inputs, the identities of the
stages it needs, its code, the versions of libraries, and the type of device. Outputs with the same key are the same, so
runs share them.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mcis.datasets.errors import UserError
from mcis.datasets.section import Section
from mcis.datasets.storage.folders import TEMPORARY_NAME, names_in, path_exists, remove
from mcis.platform.config.sections import Config
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import bytes_in, disk_errors, fingerprint
from mcis.platform.runs.lifecycle import reference_output
from mcis.platform.runs.locks import hold_stage, run_holder
from mcis.platform.runs.progress import console
from mcis.platform.runs.results import StageResult, find_missing_files, write_result
from mcis.platform.runs.version import made_with
from mcis.platform.runs.workspace import SUMMARY


class StageModule(Protocol):
    """Interface of the module of a stage. Two further functions are optional:

    - `check(config, listing, workspace)` raises UserError for problems that would stop the stage later, as far as the
      listing and the weight files show them.
    - `inputs(config, context)` returns what the output depends on in addition to configuration and earlier stages, as a
      JSON value.
    """

    __name__: str

    def run(self, config: Config, context: RunContext) -> StageResult:
        """Writes the output to the folder `context.output`. Continues the work of an interrupted call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the pipeline.

    Attributes:
        name: Used in keys, file names and `--until`.
        module: Implementation.
        needs: Stages whose outputs it reads if the run includes them; their outputs are part of its key.
        sections: Parts of the configuration that its output depends on.
        runs_once_reached: Once a run has reached one of these stages, it also runs this stage, even after the stage at
            which it stops (`--until`).
        is_stored: Whether its output is stored under a key; otherwise the stage runs in every call and writes to the
            folder of the run.
        uses_networks: Whether it runs networks, so that its key includes the type of device.
        takes_part: Returns whether a run with a given configuration includes this stage.
        is_imported: Returns whether its output is that of another program. It then depends on files alone, and
            `sections` are not part of its key.
    """

    name: str
    module: StageModule
    needs: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    runs_once_reached: tuple[str, ...] = ()
    is_stored: bool = True
    uses_networks: bool = True
    takes_part: Callable[[Config], bool] = lambda _: True
    is_imported: Callable[[Config], bool] = lambda _: False


def run_stage(
    stage: Stage, config: Config, context: RunContext, *, recompute: bool = False, folder: Path | None = None
) -> RunContext:
    """Runs a stage if its output is missing, or in any case with `recompute`; returns the context of the next stage.

    Args:
        folder: The folder of its output, if the caller has computed it.
    """
    start_time = time.monotonic()
    workspace = context.workspace
    if not stage.is_stored:
        stage.module.run(config, context)
        return context.after(stage.name, context.folder.path, seconds=time.monotonic() - start_time, computed=True)

    folder = folder or output_folder(stage, config, context)
    reference_output(workspace, context.name, stage.name, folder)
    computed = _compute(stage, config, context, folder, recompute=recompute)
    seconds = time.monotonic() - start_time

    context = context.after(stage.name, folder, seconds=seconds, computed=computed)
    workspace.record_outputs(context.name, context.stage_outputs)
    status = f"{seconds:.1f} s" if computed else "already computed"
    console.print(f"[bold]{stage.name}[/bold]: {status}", markup=True)
    if computed:
        for remark in context.result(stage.name, StageResult).remarks():
            console.print(f"note: {remark}")
    return context


class RemainingStages(NamedTuple):
    """The stages that a run has to compute, and what is known of their outputs before it starts.

    Attributes:
        stages: The stages, in order.
        folders: Folders of the finished outputs and of the first unfinished one, by stage.
        written: Bytes that an earlier call has written to the first unfinished output.
    """

    stages: list[Stage]
    folders: dict[str, Path]
    written: int


def find_remaining_stages(
    stages: Sequence[Stage], config: Config, context: RunContext, recompute: Collection[str] = ()
) -> RemainingStages:
    """Finds the stages whose outputs are not finished: the first of these and all that follow it.

    Args:
        stages: The stages, from the first one. Those that store no output are left out.
        config: The configuration.
        context: The context of the run before its first stage.
        recompute: Names of the stages that are computed even if their outputs are finished.
    """
    stored_stages = [stage for stage in stages if stage.is_stored and stage.takes_part(config)]
    folders: dict[str, Path] = {}
    for position, stage in enumerate(stored_stages):
        folder = output_folder(stage, config, context)
        folders[stage.name] = folder
        if stage.name in recompute or find_missing_files(folder):
            return RemainingStages(stored_stages[position:], folders, written=bytes_in(folder))
        context = context.after(stage.name, folder, seconds=0.0, computed=False)
    return RemainingStages([], folders, written=0)


def output_folder(stage: Stage, config: Config, context: RunContext) -> Path:
    """Folder of the output of a stage, whether it exists or not."""
    return context.workspace.output(stage.name, fingerprint(key_parts(stage, config, context)))


def key_parts(stage: Stage, config: Config, context: RunContext) -> dict[str, Any]:
    """Everything that the output of a stage depends on; the stage key is its fingerprint."""
    configuration: dict[str, Any] = {}
    for name in () if stage.is_imported(config) else stage.sections:
        value = getattr(config, name)
        configuration[name] = value.model_dump(mode="json") if isinstance(value, Section) else value

    device = config.compute.device if stage.uses_networks else None
    inputs = stage.module.inputs(config, context) if hasattr(stage.module, "inputs") else None
    needs = [name for name in stage.needs if name in context.stage_outputs]
    return {
        "stage": stage.name,
        "made with": made_with(stage.module.__name__, device),
        "configuration": configuration,
        "inputs": inputs,
        "needs": {name: context.result(name, StageResult).identity for name in needs},
    }


def _refuse_if_used(context: RunContext, output: str) -> None:
    """Raises UserError if another run that is in progress uses an output, which must not be removed then."""
    for name in names_in(context.workspace.runs):
        if name == context.name or not run_holder(context.workspace, name):
            continue
        record = context.workspace.record(name)
        if record and output in record.current.values():
            raise UserError(
                f"run {name}, which is in progress, uses {output}",
                "an output that no other run reads while it is computed again",
                "wait until that run has ended, and repeat the command",
            )


def _remove_leftovers(folder: Path) -> None:
    """Removes files and folders of an output that a call was writing or removing when it was killed."""
    for path in list(folder.glob(".*")):
        if TEMPORARY_NAME.fullmatch(path.name):
            remove(path)


def _compute(stage: Stage, config: Config, context: RunContext, folder: Path, *, recompute: bool) -> bool:
    """Computes a stage if its output is missing or incomplete, or with `recompute`; returns whether it did."""
    if not recompute and find_missing_files(folder) is None:
        return False

    key = folder.name.removeprefix(f"{stage.name}-")
    with hold_stage(context.workspace, stage.name, key, run=context.name):
        if recompute:
            _refuse_if_used(context, folder.name)
            remove(folder)
        missing = find_missing_files(folder)
        if missing is None:  # another run has computed it meanwhile
            return False
        if path_exists(folder / SUMMARY):
            console.print(f"note: {folder.name} is computed again: {missing}")
            remove(folder)

        caches: list[str] = []
        stage_context = dataclasses.replace(context, output=folder, recompute=recompute, caches=caches)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder)
            result = stage.module.run(config, stage_context)
        write_result(folder, result, key=key, caches=caches)
        return True

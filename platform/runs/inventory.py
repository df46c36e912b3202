"""Lists the content of a workspace: its runs and studies, the disk space they use, and outputs that no run uses.

Every folder in runs/ has an entry, even if it is damaged or was not written by mcis. Nothing is removed while a run is
in progress. A folder is renamed before it is removed, and runs are removed before the outputs that they use, so that
the next call can finish an interrupted removal.
"""

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from mcis.datasets.errors import BadFile, UserError, join_shortened
from mcis.datasets.storage.folders import TEMPORARY_NAME, host_name, names_in, path_exists, remove
from mcis.platform.config.experiment import read_experiment
from mcis.platform.config.renamed import current_values
from mcis.platform.runs.files import bytes_in, disk_errors, read_json
from mcis.platform.runs.locks import Holder, run_holder
from mcis.platform.runs.scores import read_scores
from mcis.platform.runs.workspace import (
    CACHE,
    IMAGE_CHECKS,
    OUTPUT,
    SUMMARY,
    RunFolder,
    RunRecord,
    Workspace,
    read_record,
)

State = Literal["running", "finished", "failed", "interrupted", "killed", "damaged", "foreign"]
"""State of a run after its last call. killed: the process ended without recording how. foreign: not written by mcis."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder in runs/.

    Attributes:
        name: name of the folder.
        kind: None if the folder is damaged or foreign.
        study: the study that a run is a trial of.
        sources: image sources of the configuration.
        recipe: recipe of the configuration.
        began: start of the last call, UTC, ISO 8601.
        ended: end of the last call, UTC, ISO 8601.
        state: see `State`.
        holder: the process that runs it now; None if there is none.
        reached: the last stage that the last call finished.
        scores: mIoU in percent by `Variant.key`, for the scores that the last call reached. The score of maps with
            related images replaces the score of single-round maps.
        outputs: names of the folders in store/ that it uses.
        bytes: size of its own folder and of its outputs; for a study, including its trials. An output that several runs
            use counts for each of them.
        trials: number of trials of a study.
        problem: why it failed, or what is damaged.
        tags: tags that the user gave it.
    """

    name: str
    kind: Literal["run", "study"] | None = None
    study: str | None = None
    sources: str | None = None
    recipe: str | None = None
    began: str | None = None
    ended: str | None = None
    state: State
    holder: Holder | None = None
    reached: str | None = None
    scores: dict[str, float] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    bytes: int = 0
    trials: int = 0
    problem: str | None = None
    tags: dict[str, str] = field(default_factory=dict)

    def matches(self, tags: Mapping[str, str], recipe: str | None) -> bool:
        """Whether it has all of these tags, and the recipe if one is given."""
        has_tags = all(self.tags.get(key) == value for key, value in tags.items())
        return has_tags and recipe in (None, self.recipe)

    def as_json(self) -> dict[str, Any]:
        """The entry as JSON values; a score that is not a number becomes null."""
        values = {name: value for name, value in vars(self).items() if name not in ("outputs", "holder")}
        values["scores"] = {name: value if math.isfinite(value) else None for name, value in self.scores.items()}
        values["holder"] = self.holder._asdict() if self.holder else None
        values["outputs"] = sorted(self.outputs)
        return values


def records(workspace: Workspace) -> dict[str, RunRecord | UserError | None]:
    """Reads the record of every folder in runs/, by name: None if mcis did not write it, or the error if damaged."""
    read: dict[str, RunRecord | UserError | None] = {}
    for path in workspace.run_folders():
        try:
            if path.is_symlink():
                path.stat()  # raises if the link leads to a disk that is not mounted; a run may be there
            read[path.name] = read_record(RunFolder(path).record)
            if read[path.name]:
                workspace.run(path.name, create=False)  # checks that the name is valid for a run
        except OSError as error:
            read[path.name] = UserError(
                f"{path} cannot be read ({error.strerror})", "a readable folder of a run", "make it readable"
            )
        except UserError as error:
            read[path.name] = error
    return read


def entries(workspace: Workspace) -> list[Entry]:
    """Lists everything in runs/ by name; trials follow their study."""
    folders = [_read_entry(workspace, name, record) for name, record in records(workspace).items()]
    studies = {entry.name for entry in folders if entry.kind == "study"}

    @functools.cache
    def output_bytes(output: str) -> int:
        return bytes_in(workspace.store / output)

    def with_outputs(entry: Entry, trials: Sequence[Entry] = ()) -> Entry:
        outputs = entry.outputs.union(*(trial.outputs for trial in trials))
        own_bytes = sum(folder.bytes for folder in (entry, *trials))
        total_bytes = own_bytes + sum(output_bytes(output) for output in outputs)
        return replace(entry, outputs=outputs, bytes=total_bytes, trials=len(trials))

    listed: list[Entry] = []
    for entry in folders:
        if entry.kind == "study":
            trials = [folder for folder in folders if folder.kind == "run" and folder.study == entry.name]
            listed.append(with_outputs(entry, trials))
            listed += [with_outputs(trial) for trial in trials]
        elif entry.kind != "run" or entry.study not in studies:
            listed.append(with_outputs(entry))
    return listed


def _read_entry(workspace: Workspace, name: str, record: RunRecord | UserError | None) -> Entry:
    """Makes the entry of a folder; its size excludes outputs and trials."""
    folder = RunFolder(workspace.runs / name)
    if record is None:
        return Entry(name=name, state="foreign", problem="not written by mcis")
    if isinstance(record, UserError):
        return Entry(name=name, state="damaged", problem=record.found, bytes=bytes_in(folder.path))

    try:
        sources, recipe = _configured_names(folder.config)
        holder = run_holder(workspace, name)
        return Entry(
            name=name,
            kind=record.kind,
            study=record.study,
            sources=sources,
            recipe=recipe,
            began=record.began,
            ended=record.ended,
            state="running" if holder else record.outcome or "killed",
            holder=holder,
            reached=next(reversed(record.reached), None),
            scores=_scores(workspace, record),
            outputs=record.used_outputs,
            bytes=bytes_in(folder.path),
            problem=None if holder else record.reason,
            tags=record.tags,
        )
    except (UserError, OSError) as error:
        problem = error.found if isinstance(error, UserError) else f"cannot be read ({error.strerror})"
        return Entry(name=name, state="damaged", problem=problem, bytes=bytes_in(folder.path))


def _configured_names(config: Path) -> tuple[str | None, str | None]:
    """Image sources and recipe of a run, which an earlier version may have written; None if they are unknown."""
    if not config.exists():
        return None, None
    experiment = read_experiment(config)
    values = current_values(experiment.values | experiment.names)
    sources = values.get("sources")
    return sources if isinstance(sources, str) else None, values.get("recipe")


def _scores(workspace: Workspace, record: RunRecord) -> dict[str, float]:
    """Reads the mIoU of the scores that the last call reached, by `Variant.key`."""
    outputs = {stage: workspace.store / name for stage, name in record.current.items() if stage in record.reached}
    mious: dict[str, float] = {}
    for score in read_scores(outputs):
        if score.variant:
            mious[score.variant.key] = score.miou  # maps with related images come last and replace single-round maps
    return mious


# --- files that no run uses

_ABANDONED = 24 * 3600.0
"""Seconds after which a temporary file of a process on another machine counts as abandoned."""


class Garbage(NamedTuple):
    """A file or folder to remove.

    Attributes:
        path: the file or folder.
        reason: why it is removed.
        size: bytes.
    """

    path: Path
    reason: str
    size: int


class Plan(NamedTuple):
    """Files and folders to remove.

    Attributes:
        garbage: files and folders, in the order of their removal.
        notes: sentences on what is kept although no run is known to use it.
    """

    garbage: list[Garbage]
    notes: list[str]


def plan_removal(workspace: Workspace, names: Sequence[str] = ()) -> Plan:
    """Finds what can be removed.

    Args:
        workspace: the workspace.
        names: runs and studies to remove first; studies are removed with their trials.

    Raises:
        UserError: there is no such run, or the record of another run is damaged.
    """
    run_records = records(workspace)
    present = [name for name, record in run_records.items() if record]
    for name in names:
        if name not in present:
            folder = workspace.run(name, create=False).path
            raise UserError(
                f"--run {name}: {folder} {'was not written by mcis' if folder.exists() else 'does not exist'}",
                f"a run or study of {workspace.root}: {join_shortened(present)}",
                "list them with `mcis runs`",
            )

    trials = [name for name, record in run_records.items() if isinstance(record, RunRecord) and record.study in names]
    removed = list(dict.fromkeys([*trials, *names]))
    garbage = [_garbage(workspace.runs / name, "named by --run") for name in removed]
    notes = [f"runs/{name} is kept: not written by mcis" for name, record in run_records.items() if record is None]

    used = _used_outputs({name: record for name, record in run_records.items() if name not in removed})
    garbage += _unused_outputs(workspace, used, notes)
    garbage += _unused_caches(workspace, used, notes)

    planned = {item.path for item in garbage}
    for path in _abandoned_files(workspace, planned):
        garbage.append(_garbage(path, "temporary, of a process that has ended"))
    return Plan(garbage, notes)


def remove_garbage(workspace: Workspace, plan: Plan) -> list[str]:
    """Removes the garbage of a plan; the caller holds `hold_workspace`.

    Returns:
        A message for each path that could not be removed.
    """
    with disk_errors(workspace.root):
        failed = [item.path for item in plan.garbage if not remove(item.path)]
    return [f"{path.relative_to(workspace.root)} cannot be removed completely" for path in failed]


def _garbage(path: Path, reason: str) -> Garbage:
    try:
        is_folder = path.is_dir() and not path.is_symlink()
        size = bytes_in(path) if is_folder else path.lstat().st_size
    except FileNotFoundError:  # a run in progress may have renamed it
        size = 0
    return Garbage(path, reason, size)


def _used_outputs(run_records: Mapping[str, RunRecord | UserError | None]) -> set[str]:
    """Names of the folders in store/ that runs use. Raises UserError if a record is damaged."""
    used: set[str] = set()
    for name, record in run_records.items():
        if isinstance(record, UserError):
            raise UserError(
                f"the outputs of run {name} are unknown: {record.found}",
                "readable records of all runs, because any output may belong to this run",
                f"remove that file and repeat the run's command, or remove the run too with --run {name}",
            )
        if record:
            used.update(record.used_outputs)
    return used


def _unused_outputs(workspace: Workspace, used: set[str], notes: list[str]) -> list[Garbage]:
    """Outputs of stages, finished or not, that no run uses. Appends a note for each name that is not an output."""
    unused = [name for name in names_in(workspace.store) if name not in used and not TEMPORARY_NAME.fullmatch(name)]
    outputs = [name for name in unused if OUTPUT.fullmatch(name)]
    for name in unused:
        if name not in outputs and not name.endswith(".lock"):
            notes.append(f"store/{name} is kept: not the output of a stage")
    return [_garbage(workspace.store / name, "no run uses it") for name in outputs]


def _unused_caches(workspace: Workspace, used_outputs: set[str], notes: list[str]) -> list[Garbage]:
    """Caches that no used output was computed from; none, with a note appended, if that is unknown for an output."""
    used: set[str] = set()
    unknown = []
    for name in sorted(used_outputs):
        folder = workspace.store / name
        try:
            used.update(read_json(folder / SUMMARY)["caches"])
        except (FileNotFoundError, BadFile, KeyError, TypeError):
            if path_exists(folder):
                unknown.append(name)
    if unknown:
        notes.append(
            "cache/ is kept: it is unknown which caches these unfinished or older outputs use: "
            f"{join_shortened(unknown)}"
        )
        return []

    garbage = []
    for name in names_in(workspace.cache):
        match = CACHE.fullmatch(name)
        if match and match["name"] not in used:
            garbage.append(_garbage(workspace.cache / name, "no remaining output was computed from it"))
        elif name.startswith(IMAGE_CHECKS) and name != workspace.image_checks.name:
            garbage.append(_garbage(workspace.cache / name, "image checks of another version"))
    return garbage


def _abandoned_files(workspace: Workspace, planned: set[Path]) -> Iterator[Path]:
    """Yields temporary files and folders of processes that have ended, without their content.

    Args:
        planned: paths to skip with their content; the yielded paths are added.
    """
    for top in (workspace.store, workspace.runs, workspace.cache, workspace.weights):
        for path in sorted(top.rglob(".*")):
            if _is_abandoned(path) and planned.isdisjoint((path, *path.parents)):
                planned.add(path)
                yield path


def _is_abandoned(path: Path) -> bool:
    match = TEMPORARY_NAME.fullmatch(path.name)
    if match is None:
        return False

    if match["host"] == host_name():
        process = int(match["pid"])
        return process == os.getpid() or not psutil.pid_exists(process)

    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime > _ABANDONED
    return False

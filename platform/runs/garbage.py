"""Finds and removes the files of a workspace that no run uses.

Nothing is removed while a run is in progress. A folder is renamed before it is removed, and runs are removed before the
outputs that they use, so that the next call can finish an interrupted removal.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from mcis.datasets.errors import BadFile, UserError, join_shortened
from mcis.datasets.storage.folders import TEMPORARY_NAME, host_name, names_in, path_exists, remove
from mcis.platform.runs.files import bytes_in, disk_errors
from mcis.platform.runs.inventory import records
from mcis.platform.runs.results import read_cache_names
from mcis.platform.runs.workspace import CACHE, IMAGE_CHECKS, OUTPUT, RunRecord, Workspace

_ABANDONED = 24 * 3600.0
"""Seconds after which a temporary file of a process on another machine counts as abandoned."""


class Garbage(NamedTuple):
    """A file or folder to remove.

    Attributes:
        path: The file or folder.
        reason: Why it is removed.
        size: Bytes.
    """

    path: Path
    reason: str
    size: int


class Plan(NamedTuple):
    """Files and folders to remove.

    Attributes:
        garbage: Files and folders, in the order of their removal.
        notes: Sentences on what is kept although no run is known to use it.
    """

    garbage: list[Garbage]
    notes: list[str]


def plan_removal(workspace: Workspace, names: Sequence[str] = ()) -> Plan:
    """Finds what can be removed.

    Args:
        workspace: The workspace.
        names: Runs and studies to remove first; studies are removed with their trials.

    Raises:
        UserError: There is no such run, or the record of another run is damaged.
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
    for unused in (_unused_outputs(workspace, used), _unused_caches(workspace, used)):
        garbage += unused.garbage
        notes += unused.notes

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


def _unused_outputs(workspace: Workspace, used: set[str]) -> Plan:
    """Outputs of stages, finished or not, that no run uses, and a note for each name that is not an output."""
    unused = [name for name in names_in(workspace.store) if name not in used and not TEMPORARY_NAME.fullmatch(name)]
    outputs = [name for name in unused if OUTPUT.fullmatch(name)]
    notes = []
    for name in unused:
        if name not in outputs and not name.endswith(".lock"):
            notes.append(f"store/{name} is kept: not the output of a stage")
    return Plan([_garbage(workspace.store / name, "no run uses it") for name in outputs], notes)


def _unused_caches(workspace: Workspace, used_outputs: set[str]) -> Plan:
    """Caches that no used output was computed from; none, but a note, if that is unknown for an output."""
    used: set[str] = set()
    unknown = []
    for name in sorted(used_outputs):
        folder = workspace.store / name
        try:
            used.update(read_cache_names(folder))
        except (FileNotFoundError, BadFile):
            if path_exists(folder):
                unknown.append(name)
    if unknown:
        note = f"cache/ is kept: it is unknown which caches these unfinished outputs use: {join_shortened(unknown)}"
        return Plan([], [note])

    garbage = []
    for name in names_in(workspace.cache):
        match = CACHE.fullmatch(name)
        if match and match["name"] not in used:
            garbage.append(_garbage(workspace.cache / name, "no remaining output was computed from it"))
        elif name.startswith(IMAGE_CHECKS) and name != workspace.image_checks.name:
            garbage.append(_garbage(workspace.cache / name, "image checks of another version"))
    return Plan(garbage, [])


def _abandoned_files(workspace: Workspace, planned: set[Path]) -> Iterator[Path]:
    """Yields temporary files and folders of processes that have ended, without their content.

    Args:
        planned: Paths to skip with their content; the yielded paths are added.
    """
    for top in (workspace.store, workspace.runs, workspace.cache, workspace.weights):
        for path in sorted(top.rglob(".*")):
            if is_abandoned(path) and planned.isdisjoint((path, *path.parents)):
                planned.add(path)
                yield path


def is_abandoned(path: Path) -> bool:
    """Returns whether a path has the temporary name of a process that has ended.

    A process on another machine counts as ended if the file was not changed for a day. One with the number of this
    process was an earlier one: call this only for paths that this process is not writing.
    """
    match = TEMPORARY_NAME.fullmatch(path.name)
    if match is None:
        return False

    if match["host"] == host_name():
        process = int(match["pid"])
        return process == os.getpid() or not psutil.pid_exists(process)

    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime > _ABANDONED
    return False

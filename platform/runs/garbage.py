"""What no run of a workspace points to, and its removal.

Nothing is removed beside a run in progress. A folder is renamed before it is removed, runs before the outputs that they
point to, so that after a kill the next call finds the rest.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from filelock import Timeout

from mcis.datasets.errors import BadFile, UserError
from mcis.datasets.index import shown
from mcis.datasets.storage.copies import in_bucket, is_there, names_in
from mcis.platform.runs.inventory import ended, is_run, studies
from mcis.platform.runs.record import pointers, read_record
from mcis.platform.runs.workspace import (
    ASIDE,
    CACHE,
    OUTPUT,
    SUMMARY,
    RunFolder,
    Workspace,
    bytes_in,
    discard,
    host_name,
    read_json,
)

_ABANDONED = 24 * 3600.0
"""Seconds after which a file that a process of another machine was writing counts as left over."""


class Garbage(NamedTuple):
    """A file or folder to remove: why, its bytes, and the name of the lock of who would be computing it, if any."""

    path: Path
    why: str
    size: int
    lock: tuple[str, str] | None = None


class Plan(NamedTuple):
    """What is to be removed, in this order, and notes on what stays although no run is known to need it."""

    garbage: list[Garbage]
    notes: list[str]

    @property
    def size(self) -> int:
        """Bytes of it all."""
        return sum(each.size for each in self.garbage)


def plan_removal(workspace: Workspace, names: Sequence[str] = ()) -> Plan:
    """What could be removed, if these runs, and studies with their trials, went first.

    Raises:
        UserError: there is no such run; or what another run points to cannot be read.
    """
    runs = _with_trials(workspace, names)
    garbage = [_garbage(workspace.run(name, create=False).path, "asked for by --run") for name in runs]
    notes: list[str] = []
    pointed = _pointed(workspace, set(runs), notes)
    garbage += _outputs(workspace, pointed, notes)
    garbage += _caches(workspace, pointed, notes)
    inside = {each.path for each in garbage}
    garbage += (_garbage(path, "left over by a process that is gone") for path in _leftovers(workspace, inside))
    return Plan(garbage, notes)


def remove(workspace: Workspace, plan: Plan) -> list[str]:
    """Removes what a plan holds, while `hold_workspace` does; returns what could not be removed, with the reason."""
    failed = []
    for path, _, _, lock in plan.garbage:
        try:
            with workspace.lock(*lock).acquire(timeout=1) if lock else contextlib.nullcontext():
                if not discard(path):
                    failed.append(f"{path.relative_to(workspace.root)}: a part of it cannot be removed")
        except Timeout:
            failed.append(f"{path.relative_to(workspace.root)}: a process of an earlier version is computing it")
    return failed


def _garbage(path: Path, why: str, lock: tuple[str, str] | None = None) -> Garbage:
    with contextlib.suppress(FileNotFoundError):  # beside a run in progress, which may finish a stage meanwhile
        whole = in_bucket(path) or (path.is_dir() and not path.is_symlink())
        size = bytes_in(path) if whole else path.lstat().st_size
        return Garbage(path, why, size, lock)
    return Garbage(path, why, 0, lock)


def _with_trials(workspace: Workspace, names: Sequence[str]) -> list[str]:
    """The runs of these names, and the trials of the studies among them, before these."""
    present = _names(workspace)
    for name in names:
        folder = workspace.run(name, create=False)
        if name not in present:
            raise UserError(
                f"--run {name}: {folder.path} is {'nothing that mcis wrote' if folder.path.exists() else 'absent'}",
                f"a run or study of {workspace.root}: {shown(present)}",
                "see `mcis runs`",
            )
    study = studies(workspace)
    trials = [name for name in present if study.get(name) in names]
    return list(dict.fromkeys([*trials, *names]))


def _names(workspace: Workspace) -> list[str]:
    """The names of all runs and studies."""
    names = []
    for path in workspace.in_runs():
        try:
            if not in_bucket(path):
                path.stat()  # a link to a disk that is not there now may be to a run
            if is_run(RunFolder(path)):
                names.append(workspace.run(path.name, create=False).path.name)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror})",
                "runs that say what they point to, or any output might be theirs",
                "make it readable, or remove it",
            ) from None
        except UserError as error:
            raise UserError(f"{path}: {error.found}", error.expected, "rename the folder, or remove it") from None
    return names


def _pointed(workspace: Workspace, removed: set[str], notes: list[str]) -> set[str]:
    """The names of the folders below store/ that the remaining runs point to."""
    names = _names(workspace)
    notes += (
        f"{path.relative_to(workspace.root)} stays: nothing that mcis wrote"
        for path in workspace.in_runs()
        if path.name not in names
    )
    pointed: set[str] = set()
    for name in names:
        if name in removed:
            continue
        try:
            pointed.update(output for outputs in pointers(workspace, name).values() for output in outputs)
            folder = workspace.run(name, create=False)
            if ended(read_record(folder), folder) == "unfinished":
                notes.append(f"run {name}, of an earlier version, does not say what it was computing: repeat it first")
        except UserError as error:
            raise UserError(
                f"what run {name} points to cannot be told: {error.found}",
                "runs that say what they point to, or any output might be theirs",
                f"repeat the run's command once the file is removed, or remove the run too (--run {name})",
            ) from None
    return pointed


def _outputs(workspace: Workspace, pointed: set[str], notes: list[str]) -> list[Garbage]:
    """Outputs of stages, finished or not, that nobody points to."""
    found = []
    for path in _inside(workspace.store):
        match = OUTPUT.fullmatch(path.name)
        if match is None:
            if path.suffix != ".lock" and not ASIDE.fullmatch(path.name) and path.name not in pointed:
                notes.append(f"{path.relative_to(workspace.root)} stays: not the output of a stage")
        elif path.name not in pointed:
            found.append(_garbage(path, "no run points to it", (match["stage"], match["key"])))
    return found


def _caches(workspace: Workspace, pointed: set[str], notes: list[str]) -> list[Garbage]:
    """Caches that none of these outputs was computed from; none where an output does not say what it was."""
    used: set[str] = set()
    silent = []
    for name in sorted(pointed):
        folder = workspace.store / name
        try:
            used.update(read_json(folder / SUMMARY)["caches"])
        except (FileNotFoundError, BadFile, KeyError, TypeError):
            if is_there(folder):
                silent.append(name)
    found = []
    for path in _inside(workspace.cache):
        match = CACHE.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue  # the table of verdicts, which every run uses, and what is being written
        if not silent and match["name"] not in used:
            found.append(_garbage(path, "no output that remains was computed from it", ("cache", match["name"])))
    if silent:
        notes.append(f"cache/ stays: {shown(silent)} does not say what it was computed from, or is unfinished")
    return found


def _leftovers(workspace: Workspace, inside: set[Path]) -> Iterator[Path]:
    """Files and folders under the temporary name of a process that is gone, but not those inside of others."""
    for top in (workspace.store, workspace.runs, workspace.cache, workspace.weights):
        for parent, folders, files in os.walk(top):
            folder = Path(parent)
            left = [name for name in (*folders, *files) if _is_left_over(folder / name)]
            yield from (folder / name for name in sorted(left) if folder / name not in inside)
            folders[:] = [name for name in folders if name not in left and folder / name not in inside]


def _is_left_over(path: Path) -> bool:
    match = ASIDE.fullmatch(path.name)
    if match is None:
        return False
    if match["host"] == host_name():
        return int(match["pid"]) == os.getpid() or not _is_alive(int(match["pid"]))
    try:
        return time.time() - path.lstat().st_mtime > _ABANDONED
    except FileNotFoundError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid or 2**40, 0)  # 0 would be the processes of this group
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _inside(folder: Path) -> list[Path]:
    return [folder / name for name in names_in(folder)]

"""What no run of a workspace points to, and its removal.

Nothing is removed beside a run in progress. A folder is renamed before it is removed, runs before the outputs that they
point to, so that after a kill the next call finds the rest.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from mcis.datasets.errors import BadFile, UserError
from mcis.datasets.index import shown
from mcis.datasets.storage.folders import ASIDE, host_name, is_there, names_in, remove
from mcis.platform.runs.files import bytes_in, disk_errors, read_json
from mcis.platform.runs.inventory import records
from mcis.platform.runs.record import RunRecord
from mcis.platform.runs.workspace import CACHE, OUTPUT, SUMMARY, Workspace

_ABANDONED = 24 * 3600.0
"""Seconds after which a file that a process of another machine was writing counts as left over."""


class Garbage(NamedTuple):
    """A file or folder to remove: why, and its bytes."""

    path: Path
    why: str
    size: int


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
    found = records(workspace)
    present = [name for name, record in found.items() if record]
    for name in names:
        if name not in present:
            folder = workspace.run(name, create=False).path
            raise UserError(
                f"--run {name}: {folder} is {'nothing that mcis wrote' if folder.exists() else 'absent'}",
                f"a run or study of {workspace.root}: {shown(present)}",
                "see `mcis runs`",
            )
    trials = [name for name, record in found.items() if isinstance(record, RunRecord) and record.study in names]
    removed = list(dict.fromkeys([*trials, *names]))
    garbage = [_garbage(workspace.runs / name, "asked for by --run") for name in removed]
    notes = [f"runs/{name} stays: nothing that mcis wrote" for name, record in found.items() if record is None]
    pointed = _pointed({name: record for name, record in found.items() if name not in removed})
    garbage += _outputs(workspace, pointed, notes)
    garbage += _caches(workspace, pointed, notes)
    inside = {each.path for each in garbage}
    garbage += (_garbage(path, "left over by a process that is gone") for path in _leftovers(workspace, inside))
    return Plan(garbage, notes)


def remove_garbage(workspace: Workspace, plan: Plan) -> list[str]:
    """Removes what a plan holds, while `hold_workspace` does; returns what could not be removed, with the reason."""
    with disk_errors(workspace.root):
        left = [each.path for each in plan.garbage if not remove(each.path)]
    return [f"{path.relative_to(workspace.root)}: a part of it cannot be removed" for path in left]


def _garbage(path: Path, why: str) -> Garbage:
    try:
        return Garbage(path, why, path.lstat().st_size if path.is_symlink() or path.is_file() else bytes_in(path))
    except FileNotFoundError:  # beside a run in progress, which may rename a file meanwhile
        return Garbage(path, why, 0)


def _pointed(found: Mapping[str, RunRecord | UserError | None]) -> set[str]:
    """The names of the folders below store/ that runs point to."""
    pointed: set[str] = set()
    for name, record in found.items():
        if isinstance(record, UserError):
            raise UserError(
                f"what run {name} points to cannot be told: {record.found}",
                "runs that say what they point to, or any output might be theirs",
                f"repeat the run's command once the file is removed, or remove the run too (--run {name})",
            )
        pointed.update(record.pointed if record else ())
    return pointed


def _outputs(workspace: Workspace, pointed: set[str], notes: list[str]) -> list[Garbage]:
    """Outputs of stages, finished or not, that nobody points to."""
    lonely = [name for name in names_in(workspace.store) if name not in pointed and not ASIDE.fullmatch(name)]
    outputs = [name for name in lonely if OUTPUT.fullmatch(name)]
    others = [name for name in lonely if name not in outputs and not name.endswith(".lock")]
    notes += (f"store/{name} stays: not the output of a stage" for name in others)
    return [_garbage(workspace.store / name, "no run points to it") for name in outputs]


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
    if silent:
        notes.append(f"cache/ stays: {shown(silent)} does not say what it was computed from, or is unfinished")
        return []
    caches = [match for match in map(CACHE.fullmatch, names_in(workspace.cache)) if match and match["name"] not in used]
    return [_garbage(workspace.cache / match[0], "no output that remains was computed from it") for match in caches]


def _leftovers(workspace: Workspace, inside: set[Path]) -> Iterator[Path]:
    """Files and folders under the temporary name of a process that is gone, but not those inside of others."""
    for top in (workspace.store, workspace.runs, workspace.cache, workspace.weights):
        for path in sorted(top.rglob(".*")):
            if _is_left_over(path) and inside.isdisjoint((path, *path.parents)):
                inside.add(path)
                yield path


def _is_left_over(path: Path) -> bool:
    match = ASIDE.fullmatch(path.name)
    if match is None:
        return False
    if match["host"] == host_name():
        return int(match["pid"]) == os.getpid() or not psutil.pid_exists(int(match["pid"]))
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime > _ABANDONED
    return False

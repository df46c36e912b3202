"""Locks of a workspace: one process at a time under a run's name, at a stage, and beside `mcis gc`.

They are the operating system's: a process that has ended, however it ended, holds none any more. The file of a lock
stays where it is and names its last holder.

A run holds its name for as long as it takes, and looks at its beginning whether `mcis gc` holds the workspace. That
takes the workspace first and looks for names that are held then, so that one of the two always finds the other.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import host_name
from mcis.platform.runs.files import disk_errors
from mcis.platform.runs.progress import console
from mcis.platform.runs.workspace import Workspace, now

_LOOK = 1.0
"""Seconds after which a lock counts as held. Those who only look whether one is held share it for a moment."""


class Holder(NamedTuple):
    """Who holds a lock: a run or command, the host and number of its process, and since when (UTC, ISO 8601)."""

    who: str
    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"{self.who} (host {self.host}, process {self.pid}, since {self.since})"


@contextlib.contextmanager
def hold_run(workspace: Workspace, name: str) -> Iterator[None]:
    """Holds the name of a run or study while the block runs; where `mcis gc` is removing, that is waited for. UserError
    where another process holds the name; others as of `disk_errors`."""
    if workspace.uri:
        console.print(f"note: locks of {workspace.uri} hold on this machine alone: start its runs on one machine")
    with _held(workspace.lock_file("run", name), f"run {name}"):
        with _held(workspace.lock_file("workspace", "all"), f"run {name}", waits="the run begins when this has ended"):
            pass
        yield


@contextlib.contextmanager
def hold_stage(workspace: Workspace, stage: str, key: str, *, run: str) -> Iterator[None]:
    """Holds a stage's key while the block runs, or `cache` and its name, so that runs that share it compute it once.

    Where another run holds it, that is waited for, and the console says once which one it is.

    Raises:
        UserError: the file system has no locks.
    """
    with _held(workspace.lock_file(stage, key), f"run {run}", waits=f"it is computing {stage}-{key}"):
        yield


@contextlib.contextmanager
def hold_workspace(workspace: Workspace, who: str) -> Iterator[None]:
    """Holds a workspace while the block runs: no run is in progress, and none begins; UserError where a run is in
    progress, the workspace is held already, or the file system has no locks."""
    with _held(workspace.lock_file("workspace", "all"), who):
        for holder in runs_in_progress(workspace):
            raise _refusal(holder)
        yield


def runs_in_progress(workspace: Workspace) -> list[Holder]:
    """The holders of the names of runs and studies, in the order of these names."""
    return [holder for holder in map(_holder, sorted(workspace.store.glob(".run-*.lock"))) if holder]


def run_holder(workspace: Workspace, name: str) -> Holder | None:
    """Who holds the name of a run or study; None where nobody does. UserError where that cannot be told, since this
    user may not read the lock or the file system has none."""
    return _holder(workspace.lock_file("run", name))


def refuse_if_running(workspace: Workspace, name: str) -> None:
    """Raises the UserError of `hold_run` where another process holds a run's name."""
    if holder := run_holder(workspace, name):
        raise _refusal(holder)


def _refusal(holder: Holder) -> UserError:
    return UserError(
        f"{holder} is in progress",
        "one process at a time under a name, and no run beside `mcis gc --delete`",
        f"wait until it has ended, or end process {holder.pid} on {holder.host}; a run may take another --name: stages "
        "that two runs share are computed once",
    )


@contextlib.contextmanager
def _held(file: Path, who: str, *, waits: str | None = None) -> Iterator[None]:
    """Holds a lock while the block runs.

    Args:
        waits: why another one that holds it is waited for; None = it is not.
    """

    def sign(descriptor: int) -> None:  # at once, as other machines may read it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(Holder(who, host_name(), os.getpid(), now())).encode(), 0)
        os.fsync(descriptor)

    lock = FileLock(file, fallback_to_soft=False, on_acquired=sign)
    with disk_errors(file.parent):
        try:
            lock.acquire(timeout=_LOOK)
        except Timeout:
            if waits is None:
                raise _refusal(_last_holder(file)) from None
            console.print(f"waiting for {_last_holder(file)}: {waits}")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _holder(file: Path) -> Holder | None:
    """Who holds a lock, or None; changes nothing, so that a workspace may be another user's."""
    with disk_errors(file.parent):
        try:
            with file.open("rb") as opened:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)  # who else looks may share it
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return _last_holder(file)
        return None


def _last_holder(file: Path) -> Holder:
    """Who wrote last that it holds a lock. One that has just taken it may be about to write."""
    until = time.monotonic() + _LOOK
    while time.monotonic() < until:
        with contextlib.suppress(ValueError, TypeError):
            who, host, pid, since = json.loads(file.read_bytes())
            return Holder(str(who), str(host), int(pid), str(since))
        time.sleep(0.01)
    return Holder("a process that has not said which", "unknown", 0, "unknown")

"""Locks of a workspace: one process at a time per run name, per stage output, and for `mcis gc`.

The operating system releases the locks of a process that ends. The file of a lock remains and names its last holder.

A run first locks its name, until it ends, and then waits while `mcis gc` holds the workspace. `mcis gc` first locks the
workspace and then checks whether any name is held. So at least one of the two notices the other.
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

_ACQUIRE_SECONDS = 1.0
"""Seconds to wait for a lock before it counts as held. Processes that only test it also hold it for a moment."""


class Holder(NamedTuple):
    """Holder of a lock.

    Attributes:
        who: The run or the command.
        host: Host of the process.
        pid: id of the process.
        since: When it acquired the lock, UTC, ISO 8601.
    """

    who: str
    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"{self.who} (host {self.host}, process {self.pid}, since {self.since})"


@contextlib.contextmanager
def hold_run(workspace: Workspace, name: str) -> Iterator[None]:
    """Holds the name of a run or study during the block; waits for `mcis gc` if it is removing files.

    Raises:
        UserError: Another process holds the name; see also `disk_errors`.
    """
    if workspace.uri:
        console.print(
            f"note: locks of {workspace.uri} work on this machine only: start all runs of this workspace here"
        )
    who = f"run {name}"
    with _held(workspace.lock_file("run", name), who):
        with _held(workspace.lock_file("workspace", "all"), who, wait_reason="the run starts after it ends"):
            pass
        yield


@contextlib.contextmanager
def hold_stage(workspace: Workspace, stage: str, key: str, *, run: str) -> Iterator[None]:
    """Holds the key of a stage during the block, so that runs that share the output compute it once.

    If another run holds the key, prints which one and waits. Caches use the stage `cache` and their name as the key.

    Raises:
        UserError: The file system has no locks.
    """
    with _held(workspace.lock_file(stage, key), f"run {run}", wait_reason=f"it is computing {stage}-{key}"):
        yield


@contextlib.contextmanager
def hold_workspace(workspace: Workspace, who: str) -> Iterator[None]:
    """Holds a whole workspace during the block, so that no run is in progress and none starts.

    Raises:
        UserError: A run is in progress, the workspace is held already, or the file system has no locks.
    """
    with _held(workspace.lock_file("workspace", "all"), who):
        for holder in runs_in_progress(workspace):
            raise _refusal(holder)
        yield


def runs_in_progress(workspace: Workspace) -> list[Holder]:
    """Holders of the names of runs and studies, sorted by name."""
    holders = [_holder(file) for file in sorted(workspace.store.glob(".run-*.lock"))]
    return [holder for holder in holders if holder]


def run_holder(workspace: Workspace, name: str) -> Holder | None:
    """Holder of the name of a run or study, or None.

    Raises:
        UserError: The lock is not readable for this user, or the file system has no locks.
    """
    return _holder(workspace.lock_file("run", name))


def refuse_if_running(workspace: Workspace, name: str) -> None:
    """Raises the UserError of `hold_run` if another process holds the name of a run."""
    holder = run_holder(workspace, name)
    if holder:
        raise _refusal(holder)


def _refusal(holder: Holder) -> UserError:
    return UserError(
        f"{holder} is in progress",
        "one process at a time per name, and no run during `mcis gc --delete`",
        f"wait until it ends, or end process {holder.pid} on {holder.host}; or choose another --name: stages that two "
        "runs share are computed once",
    )


@contextlib.contextmanager
def _held(file: Path, who: str, *, wait_reason: str | None = None) -> Iterator[None]:
    """Holds a lock during the block.

    Args:
        wait_reason: If the lock is held, wait for it and print this reason; None: raise a UserError instead.
    """

    def write_holder(descriptor: int) -> None:  # synced immediately, because other machines may read it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(Holder(who, host_name(), os.getpid(), now())).encode(), 0)
        os.fsync(descriptor)

    lock = FileLock(file, fallback_to_soft=False, on_acquired=write_holder)
    with disk_errors(file.parent):
        try:
            lock.acquire(timeout=_ACQUIRE_SECONDS)
        except Timeout:
            if wait_reason is None:
                raise _refusal(_last_holder(file)) from None
            console.print(f"waiting for {_last_holder(file)}: {wait_reason}")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _holder(file: Path) -> Holder | None:
    """Holder of a lock, or None. It writes nothing, so it works on workspaces of other users."""
    with disk_errors(file.parent):
        try:
            with file.open("rb") as opened:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared with other processes that test it
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return _last_holder(file)
        return None


def _last_holder(file: Path) -> Holder:
    """The last holder written to the file of a lock; waits a moment for a new holder to write it."""
    deadline = time.monotonic() + _ACQUIRE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError, TypeError):
            who, host, pid, since = json.loads(file.read_bytes())
            return Holder(str(who), str(host), int(pid), str(since))
        time.sleep(0.01)
    return Holder("an unknown process", "unknown", 0, "unknown")

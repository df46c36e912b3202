"""Locks of a workspace: one process at a time under a run's name, at a stage, and beside `mcis gc`.

They are the operating system's: a process that has ended, however it ended, holds none any more. The file of a lock
stays where it is and names its last holder.

A run holds its name for as long as it takes, and looks at its beginning whether `mcis gc` holds the workspace. That
takes the workspace first and looks for names that are held then, so that one of the two always finds the other.
"""

import contextlib
import datetime
import errno
import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from filelock import FileLock, Timeout, lock_descriptor

from mcis.datasets.errors import UserError
from mcis.datasets.storage.copies import uri_of
from mcis.platform.runs.progress import console
from mcis.platform.runs.workspace import Workspace, aside_of, disk_errors, host_name

_LOOK = 1.0
"""Seconds after which a lock counts as held. Those who only look whether one is held hold it for less themselves."""


_LOOKS = 5


class Holder(NamedTuple):
    """Who holds a lock: a run or command, the host and number of its process, and since when (UTC, ISO 8601)."""

    who: str
    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"{self.who} (host {self.host}, process {self.pid}, since {self.since})"


def now() -> str:
    """The time, UTC, to the second: 2020-08-23T12:00:00+00:00."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def hold_run(workspace: Workspace, name: str) -> Iterator[None]:
    """Holds the name of a run or study while the block runs; where `mcis gc` is removing, that is waited for.

    Raises:
        UserError: another process holds the name, or the file system has no locks.
    """
    who = f"run {name}"
    check_locks(workspace.store)
    with _held(workspace.lock_file("run", name), who, _refuse_second):
        with _held(_of_all(workspace), who, _announce("the run begins when this has ended")):
            pass
        yield


@contextlib.contextmanager
def hold_stage(workspace: Workspace, stage: str, key: str, *, run: str) -> Iterator[None]:
    """Holds a stage's key while the block runs, or `cache` and its name, so that runs that share it compute it once.

    Where another run holds it, that is waited for, and the console says once which one it is.

    Raises:
        UserError: the file system has no locks.
    """
    with _held(workspace.lock_file(stage, key), f"run {run}", _announce(f"it is computing {stage}-{key}")):
        yield


@contextlib.contextmanager
def hold_workspace(workspace: Workspace, who: str) -> Iterator[None]:
    """Holds a workspace while the block runs: no run is in progress, and none begins.

    Raises:
        UserError: a run is in progress, the workspace is held already, or the file system has no locks.
    """
    check_locks(workspace.store)
    with _held(_of_all(workspace), who, functools.partial(_refuse, expected="one such command at a time")):
        for holder in runs_in_progress(workspace):
            _refuse(holder, expected="a workspace in which no run is in progress")
        yield


def runs_in_progress(workspace: Workspace) -> list[Holder]:
    """The holders of the names of runs and studies, in the order of these names."""
    return [holder for holder in map(_holder, workspace.lock_files("run")) if holder]


def run_holder(workspace: Workspace, name: str) -> Holder | None:
    """Who holds the name of a run or study; None where nobody does.

    Raises:
        UserError: that cannot be told, since this user may not read the lock or the file system has none.
    """
    return _holder(workspace.lock_file("run", name))


def refuse_if_running(workspace: Workspace, name: str) -> None:
    """Raises the UserError of `hold_run` where another process holds a run's name."""
    if holder := run_holder(workspace, name):
        _refuse_second(holder)


_MOUNTS = Path("/proc/mounts")
_LOCAL = {
    "nfs": ("nolock", "local_lock=all", "local_lock=flock"),
    "nfs4": ("nolock", "local_lock=all", "local_lock=flock"),
    "lustre": ("localflock",),
}
"""By kind of file system, the options with which its locks hold on one machine alone (nfs(5), mount.lustre(8))."""


@functools.cache
def check_locks(folder: Path) -> None:
    """Tries once whether locks of a folder's file system exclude, and says so where they hold on this machine alone.

    Raises:
        UserError: two hold the same lock at a time, or the file system has no locks.
    """
    file = aside_of(folder / f"locks-{threading.get_ident()}")
    with _lock_errors(file), contextlib.ExitStack() as open_files:
        open_files.callback(file.unlink, missing_ok=True)
        first, second = (open_files.enter_context(file.open("a+b")).fileno() for _ in range(2))
        if not lock_descriptor(first, blocking=False) or lock_descriptor(second, blocking=False):
            raise UserError(
                f"locks of the file system of {folder} do not exclude: two had the same one at a time",
                "locks (flock), by which runs that share a workspace notice each other",
                "choose a --workspace on another file system",
            )
    if uri := uri_of(folder.parent):
        console.print(f"note: locks of {uri} hold on this machine alone: start its runs on one machine", markup=False)
    elif _MOUNTS.exists() and (option := local_locks(folder, _MOUNTS.read_text())):
        console.print(
            f"note: the file system of {folder} is mounted with {option}: its locks hold on this machine alone, so run "
            "mcis on no other one in this workspace at the same time",
            markup=False,
        )


def local_locks(folder: Path, mounts: str) -> str | None:
    """The option by which the locks of a folder's file system hold on one machine alone; None where there is none.

    Args:
        mounts: the content of /proc/mounts, where the last of those that hold the folder counts.
    """
    found = None
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split(" ")
        above = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place))
        if folder.is_relative_to(above) and (found is None or above.is_relative_to(found[0])):
            found = above, [option for option in options.split(",") if option in _LOCAL.get(kind, ())]
    return found[1][0] if found and found[1] else None


def _of_all(workspace: Workspace) -> Path:
    return workspace.lock_file("workspace", "all")


@contextlib.contextmanager
def _held(file: Path, who: str, when_held: Callable[[Holder], None]) -> Iterator[None]:
    """Holds a lock while the block runs; `when_held` is told who else holds it, and raises unless it is to wait."""
    lock = FileLock(file, fallback_to_soft=False, on_acquired=functools.partial(_sign, who=who))
    with _lock_errors(file):
        try:
            lock.acquire(timeout=_LOOK)
        except Timeout:
            when_held(_last_holder(file))
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sign(descriptor: int, *, who: str) -> None:
    """Writes into a lock's file who holds it; at once, as other machines may read it."""
    holder = Holder(who, host_name(), os.getpid(), now())
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    os.fsync(descriptor)


def _holder(file: Path) -> Holder | None:
    """Who holds a lock, or None; changes nothing, so that a workspace may be another user's.

    Who else looks at the same time holds it for a moment, so that a holder is one who is seen twice.
    """
    with _lock_errors(file):
        try:
            descriptor = os.open(file, os.O_RDWR)
        except FileNotFoundError:
            return None
        except OSError:
            descriptor = os.open(file, os.O_RDONLY)
        try:
            for attempt in range(_LOOKS):
                if attempt:
                    time.sleep(0.01)
                if lock_descriptor(descriptor, blocking=False):
                    return None
            return _last_holder(file)
        finally:
            os.close(descriptor)


def _last_holder(file: Path) -> Holder:
    """Who wrote last that it holds a lock. One that has just taken it may be about to write."""
    until = time.monotonic() + _LOOK
    while True:
        try:
            who, host, pid, since = json.loads(file.read_bytes())
            return Holder(str(who), str(host), int(pid), str(since))
        except (ValueError, TypeError):
            if time.monotonic() > until:
                return Holder("a process that has not said which", "unknown", 0, "unknown")
            time.sleep(0.01)


@contextlib.contextmanager
def _lock_errors(file: Path) -> Iterator[None]:
    """Turns errors of locks and of their files into a UserError."""
    try:
        with disk_errors(file.parent):
            yield
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise UserError(
                f"the file system of {file.parent} gives no locks ({error.strerror})",
                "locks (flock), by which runs that share a workspace notice each other",
                "choose a --workspace on another file system, or have it mounted with locks: NFS without `nolock`, "
                "Lustre with `flock`",
            ) from None
        raise


def _announce(why: str) -> Callable[[Holder], None]:
    return lambda holder: console.print(f"waiting for {holder}: {why}", markup=False)


def _refuse(holder: Holder, *, expected: str, otherwise: str = "") -> NoReturn:
    raise UserError(
        f"{holder} is in progress",
        expected,
        f"wait until it has ended, or end process {holder.pid} on {holder.host}{otherwise}",
    )


_refuse_second = functools.partial(
    _refuse,
    expected="one process at a time under a name",
    otherwise=", or choose another --name: stages that two runs share are computed once",
)

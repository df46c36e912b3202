"""Locks of runs, stages and the workspace: a lock names its holder, and a process that has ended holds none."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import host_name
from mcis.platform.runs import locks
from mcis.platform.runs.locks import hold_run, hold_stage, hold_workspace, refuse_if_running, run_holder
from mcis.platform.runs.workspace import Workspace

PROCESS = """
import sys
from pathlib import Path
from mcis.platform.runs import locks
from mcis.platform.runs.workspace import Workspace
workspace = Workspace(Path(sys.argv[1]))
blocks = {
    "run": lambda: locks.hold_run(workspace, "first"),
    "stage": lambda: locks.hold_stage(workspace, "localize", "k1", run="first"),
    "gc": lambda: locks.hold_workspace(workspace, "mcis gc"),
}
with blocks[sys.argv[2]]():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(workspace: Workspace, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the lock that the test's parameter names."""
    command = [sys.executable, "-c", PROCESS, str(workspace.root), request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("other", ["run"], indirect=True)
def test_a_second_process_with_the_name_of_a_run_is_refused(workspace: Workspace, other: subprocess.Popen[str]) -> None:
    with pytest.raises(UserError) as caught, hold_run(workspace, "first"):
        pytest.fail("two processes under one name")
    for part in ("run first", f"host {host_name()}", f"process {other.pid}", "since 20"):
        assert part in caught.value.found
    assert "another --name" in caught.value.remedy
    with pytest.raises(UserError, match="run first"):
        refuse_if_running(workspace, "first")


@pytest.mark.parametrize("other", ["run"], indirect=True)
def test_holders_of_runs_are_listed(workspace: Workspace, other: subprocess.Popen[str]) -> None:
    holder = run_holder(workspace, "first")
    assert holder is not None
    assert holder.pid == other.pid
    with hold_run(workspace, "second"):
        assert [holder.who for holder in locks.runs_in_progress(workspace)] == ["run first", "run second"]


@pytest.mark.parametrize("other", ["run"], indirect=True)
def test_a_killed_process_holds_no_run(workspace: Workspace, other: subprocess.Popen[str]) -> None:
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    refuse_if_running(workspace, "first")
    assert run_holder(workspace, "first") is None

    with hold_run(workspace, "first"):
        holder = run_holder(workspace, "first")
        assert holder is not None
        assert holder.pid == os.getpid()


@pytest.mark.parametrize("other", ["stage"], indirect=True)
def test_waiting_for_a_stage_is_reported_once(
    workspace: Workspace, other: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert other.stdin is not None
    threading.Timer(1.5, other.stdin.close).start()
    with hold_stage(workspace, "localize", "k1", run="second"):
        pass
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"waiting for run first (host {host_name()}, process {other.pid}, since 20")
    assert line.endswith("it is computing localize-k1")
    with hold_stage(workspace, "localize", "k1", run="second"):
        pass
    assert capsys.readouterr().out == "", "nobody is waited for"


@pytest.mark.parametrize("other", ["gc"], indirect=True)
def test_a_run_waits_for_gc(
    workspace: Workspace, other: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert other.stdin is not None
    with pytest.raises(UserError, match=r"mcis gc .* is in progress"), hold_workspace(workspace, "mcis gc"):
        pytest.fail("both at once")
    threading.Timer(1.5, other.stdin.close).start()
    began = time.monotonic()
    with hold_run(workspace, "second"):
        assert time.monotonic() - began > 1
    assert f"waiting for mcis gc (host {host_name()}, process {other.pid}" in capsys.readouterr().out


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("block", ["run", "gc"])
def test_a_disk_without_locks_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, number: int, block: str
) -> None:
    def without_locks(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    blocks = {"run": hold_run(workspace, "first"), "gc": hold_workspace(workspace, "mcis gc")}
    with pytest.raises(UserError, match="cannot be written") as caught, blocks[block]:
        pytest.fail("went on without a lock")
    assert "mount the file system with locks" in caught.value.remedy


def test_a_lock_without_a_readable_holder_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_ACQUIRE_SECONDS", 0.05)
    with hold_run(workspace, "first"):
        for content in (b"", b"[1]", b'["run first", "here", "x", 1]', b"\xff"):
            workspace.lock_file("run", "first").write_bytes(content)
            with pytest.raises(UserError, match="an unknown process"):
                refuse_if_running(workspace, "first")


def test_asking_for_the_holder_creates_no_file(workspace: Workspace) -> None:
    refuse_if_running(workspace, "first")
    assert run_holder(workspace, "first") is None
    assert list(workspace.store.iterdir()) == []

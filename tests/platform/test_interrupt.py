"""Interruptions, kills and full disks leave finished outputs intact, and the same command ends with the same scores."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.runs.results import find_missing_files

SMALL = (
    "classifier.channels=24",
    "segmenter.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "compute.threads=1",
)


def command(root: Path, workspace: Path, *overrides: str) -> list[str]:
    out = [sys.executable, "-m", "mcis.platform.cli", "run", "voc", "--name", "run", "--recipe", "scratch"]
    out += ["--voc", str(root), "--workspace", str(workspace), "--set", f"data.classes={root / 'classes.txt'}"]
    return [*out, *(f"--set={value}" for value in (*SMALL, *overrides))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    synthetic.draw(tmp_path / "VOC2012", train=16, val=4, size=64, classes=2)
    return tmp_path / "VOC2012"


QUICK = (
    "classifier.epochs=200",
    "segmenter.min_steps=60",
    "segmenter.batch=4",
    "segmenter.width=16",
    "segmenter.crop=64",
    "pseudo_masks.min_foreground_fraction=0",
    "report.panels=2",
    "compute.shard_rows=4",
    "compute.stop_if_not_learning=false",
    "tracking.model=false",
)
"""A complete run that takes seconds; its classifier is trained for 400 steps."""


@pytest.fixture
def workspace(tmp_path: Path, mlflow_store: Path) -> Path:
    """An empty workspace with an MLflow store."""
    return prepared(tmp_path / "workspace", mlflow_store)


def prepared(workspace: Path, mlflow_store: Path) -> Path:
    workspace.mkdir()
    shutil.copy(mlflow_store, workspace / "mlflow.db")
    return workspace


def run_to_the_end(call: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def scores(workspace: Path) -> Any:
    return json.loads((workspace / "runs" / "run" / "scores.json").read_text())["scores"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Any:
    """The scores of an undisturbed run on the same images as those of `root`."""
    folder = tmp_path_factory.mktemp("undisturbed")
    synthetic.draw(folder / "VOC2012", train=16, val=4, size=64, classes=2)
    workspace = prepared(folder / "workspace", mlflow_store)
    run_to_the_end(command(folder / "VOC2012", workspace, *QUICK))
    return scores(workspace)


@contextlib.contextmanager
def running(call: list[str], until: Callable[[], Any], environment: dict[str, str] | None = None) -> Any:
    """Starts a command, waits until a condition holds, and yields its process; kills it at the end of the block."""
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(call, env=environment, **output) as process:
        try:
            deadline = time.monotonic() + 300
            while not until():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.005)
            yield process
        finally:
            process.kill()


def steps_logged(workspace: Path) -> int:
    """Returns the number of lines in the log of the classifier's training."""
    logs = list((workspace / "store").glob("train_classifier-*/steps.jsonl"))
    return len(logs[0].read_text().splitlines()) if logs else 0


def half_written(workspace: Path) -> list[str]:
    """Returns the files with temporary names and the unfinished outputs of a workspace."""
    unfinished = [path for path in workspace.glob("store/[a-z]*") if find_missing_files(path)]
    found = [*unfinished, *(path for path in workspace.glob("**/.*.*") if path.suffix != ".lock")]
    return sorted(str(path.relative_to(workspace)) for path in found)


STAGES = ("index", "train_classifier", "localize", "pseudo_masks", "train_segmenter", "predict", "evaluate")


@pytest.mark.slow
def test_a_run_that_is_interrupted_and_killed_continues_and_ends_the_same(
    root: Path, workspace: Path, undisturbed: Any
) -> None:
    """By Ctrl-C and by SIGTERM, which schedulers send first, in a training; by SIGKILL in a mapping and in the report.

    Those are stages of each kind. The same command is repeated each time.
    """
    call = command(root, workspace, *QUICK, "compute.checkpoint_steps=50")
    done = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        done = interrupted_at(call, workspace, number, last=done)

    listing = [*call[:3], "runs", "--json", "--workspace", str(workspace)]
    (listed,) = json.loads(subprocess.run(listing, capture_output=True, check=True).stdout)
    assert listed["state"] == "interrupted"

    kill_when(call, lambda: list((workspace / "store").glob("localize-*/**/*.parquet")))
    (fitted,) = (workspace / "store").glob("train_classifier-*/fit.json")
    assert json.loads(fitted.read_text())["steps_since_restart"] == 400 - done

    kill_when(call, lambda: list((workspace / "store").glob("evaluate-*/summary.json")))
    assert not (workspace / "runs" / "run" / "report.html").exists()
    finished = [path for path in (workspace / "store").iterdir() if (path / "summary.json").exists()]
    assert [find_missing_files(path) for path in finished] == [None] * len(STAGES)

    last = run_to_the_end(call)
    assert last.stdout.count("already computed") == len(STAGES)
    assert scores(workspace) == undisturbed
    subprocess.run([*call[:3], "gc", "--delete", "--workspace", str(workspace)], check=True, capture_output=True)
    assert half_written(workspace) == []


def interrupted_at(call: list[str], workspace: Path, number: signal.Signals, *, last: int) -> int:
    """Interrupts a run while its classifier is trained, and returns the steps of the checkpoint, more than `last`.

    Each epoch of two steps has a line in the log, so there is a new checkpoint after 30 lines.
    """
    logged = steps_logged(workspace)
    with running(call, lambda: steps_logged(workspace) > logged + 30) as run:
        began = time.monotonic()
        run.send_signal(number)
        shown, _ = run.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert run.returncode == 128 + number, shown
    assert "interrupted: finished work is kept" in shown
    assert "Traceback" not in shown

    (part,) = (workspace / "store").glob("train_classifier-*")
    done = int(torch.load(part / "checkpoint.pt", weights_only=True)["step"])
    assert last < done < 400
    return done


def kill_when(call: list[str], condition: Callable[[], Any]) -> None:
    """Starts a command and kills it when a condition holds."""
    with running(call, condition) as run:
        run.kill()
        assert run.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_ends_soon_when_its_cluster_restarts_and_repeated_ends_the_same(
    root: Path, workspace: Path, tmp_path: Path, undisturbed: Any, ray_head: Callable[..., Any]
) -> None:
    """Ray's own calls would wait forever: the new head answers, but does not know the tasks that they wait for."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    call = command(root, workspace, *QUICK, "compute.checkpoint_steps=50")
    options = (port, "--include-dashboard=false", "--num-cpus=4")
    with contextlib.ExitStack() as first:
        environment = first.enter_context(ray_head(tmp_path / "head.log", *options))
        with running(call, lambda: steps_logged(workspace) > 15, environment) as run:
            first.close()
            with ray_head(tmp_path / "again.log", *options):
                shown, _ = run.communicate(timeout=120)
                assert run.returncode == 1, shown
                assert "no longer answers" in shown
                assert "repeat the command" in shown
                assert "Traceback" not in shown
                repeated = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=600)
    assert repeated.returncode == 0, repeated.stdout + repeated.stderr
    (fitted,) = (workspace / "store").glob("train_classifier-*/fit.json")
    assert json.loads(fitted.read_text())["steps_since_restart"] < 400, "it continued from a checkpoint"
    assert scores(workspace) == undisturbed
    assert half_written(workspace) == []


@pytest.mark.slow
def test_a_full_disk_is_reported_and_after_freeing_space_the_run_ends_the_same(
    root: Path, small_disk: Callable[..., Path], mlflow_store: Path, undisturbed: Any
) -> None:
    """It fills up during the training of the classifier: a checkpoint, a log line or a call of MLflow fails."""
    disk = small_disk("64m")
    workspace = prepared(disk / "workspace", mlflow_store)
    call = command(root, workspace, *QUICK, "compute.checkpoint_steps=10")
    with running(call, lambda: list((workspace / "store").glob("train_classifier-*/checkpoint.pt"))) as run:
        with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        shown, _ = run.communicate(timeout=120)
    assert run.returncode == 1, shown
    assert "Traceback" not in shown
    assert "error: no space left on" in shown
    assert "remedy:" in shown
    (part,) = (workspace / "store").glob("train_classifier-*")
    assert torch.load(part / "checkpoint.pt", weights_only=True)["step"] >= 10
    (disk / "ballast").unlink()
    run_to_the_end(call)
    assert scores(workspace) == undisturbed
    assert half_written(workspace) == []


@pytest.mark.slow
def test_a_second_process_and_gc_are_refused_until_the_first_is_killed(root: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    long = command(root, workspace, "classifier.epochs=100000")
    mcis = [sys.executable, "-m", "mcis.platform.cli"]
    here = ["--workspace", str(workspace)]

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*mcis, *words, *here], capture_output=True, text=True)

    with running(long, lambda: steps_logged(workspace)) as run:
        second = subprocess.run(long, capture_output=True, text=True)
        removal = call("gc", "--delete")
        (listed,) = json.loads(call("runs", "--json").stdout)
    for refused in (second, removal):
        assert refused.returncode == 1
        assert f"process {run.pid}, since" in refused.stderr
    assert (listed["state"], listed["reached"], listed["holder"]["pid"]) == ("running", "index", run.pid)

    (listed,) = json.loads(call("runs", "--json").stdout)
    assert (listed["state"], listed["reached"], listed["holder"]) == ("killed", "index", None)
    shown = call("gc", "--delete")
    assert shown.returncode == 0, shown.stderr
    assert steps_logged(workspace), "the training can be continued"
    again = subprocess.run([*long, "--until", "index"], capture_output=True, text=True)
    assert "already computed" in again.stdout, again.stderr
    shown = call("gc", "--run", "run", "--delete")
    assert shown.returncode == 0, shown.stderr
    assert [path.name for path in (workspace / "store").iterdir() if path.is_dir()] == []
    assert list((workspace / "runs").iterdir()) == []

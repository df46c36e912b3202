"""A search by the command line that is interrupted, then killed, then left alone ends as one that nothing disturbed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.synthetic import devkit as synthetic

SMALL = (
    "classifier.epochs=40",
    "classifier.channels=24",
    "segmenter.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "report.panels=2",
    "compute.threads=1",
    "compute.stop_if_not_learning=false",
)
AXES = ("classifier.optimizer.learning_rate=loguniform(1e-4,1e-2)", "localize.related=integer(0,2)")


def command(root: Path, workspace: Path) -> list[str]:
    out = [sys.executable, "-m", "mcis.platform.cli", "study", "search", "voc", "--name", "wide", "--recipe", "scratch"]
    out += ["--voc", str(root), "--workspace", str(workspace), "--trials", "4"]
    values = (*SMALL, f"data.classes={root / 'classes.txt'}")
    return [*out, *(f"--set={value}" for value in values), *(f"--axis={axis}" for axis in AXES)]


def trains(workspace: Path, trial: str) -> bool:
    """Whether a trial's classifier has begun to train."""
    record = workspace / "runs" / trial / "record.json"
    if not record.exists():
        return False
    output = json.loads(record.read_text())["current"].get("train_classifier", "")
    log = workspace / "store" / output / "steps.jsonl"
    return log.exists() and log.stat().st_size > 0


def disturbed(call: list[str], workspace: Path, trial: str, how: signal.Signals) -> subprocess.CompletedProcess[str]:
    """Gives a command and sends its process a signal while the classifier of a trial is trained."""
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(call, start_new_session=True, **output) as run:
        for _ in range(3000):
            if trains(workspace, trial):
                break
            assert run.poll() is None, run.communicate()
            time.sleep(0.1)
        else:
            pytest.fail(f"{trial} did not begin")
        run.send_signal(how)
        out, errors = run.communicate(timeout=90)
    return subprocess.CompletedProcess(call, run.returncode, out, errors)


def trials(workspace: Path) -> list[dict[str, Any]]:
    """Number, values, state and objective of each trial."""
    tried = json.loads((workspace / "runs" / "wide" / "study.json").read_text())["tried"]
    return [{key: each[key] for key in ("number", "values", "state", "objective")} for each in tried]


@pytest.mark.slow
def test_a_search_that_is_interrupted_and_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=32, val=16, size=64, classes=4)
    whole = subprocess.run(command(root, tmp_path / "whole"), capture_output=True, text=True)
    assert whole.returncode == 0, whole.stdout + whole.stderr

    workspace = tmp_path / "disturbed"
    call = command(root, workspace)
    stopped = disturbed(call, workspace, "wide-t001", signal.SIGINT)
    assert stopped.returncode == 130, stopped.stdout + stopped.stderr
    assert "interrupted: what is finished is kept" in stopped.stderr
    assert "Traceback" not in stopped.stdout + stopped.stderr
    killed = disturbed(call, workspace, "wide-t002", signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert trials(workspace) == trials(tmp_path / "whole")
    assert len(trials(workspace)) == 4

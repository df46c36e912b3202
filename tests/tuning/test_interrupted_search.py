"""Searches and studies on the command line that are interrupted or killed end as if they had not been disturbed."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.runs.locks import run_holder
from mcis.platform.runs.workspace import Workspace

VALUES = (
    "classifier.epochs=40",
    "classifier.channels=24",
    "segmenter.channels=24",
    "segmenter.width=16",
    "segmenter.crop=64",
    "segmenter.batch=4",
    "segmenter.min_steps=20",
    "classifier.input_size=64",
    "classifier.batch=8",
    "report.panels=2",
    "compute.threads=1",
    "compute.stop_if_not_learning=false",
)
AXES = ("classifier.optimizer.learning_rate=loguniform(1e-4,1e-2)", "localize.related=integer(0,2)")


def search_command(root: Path, workspace: Path) -> list[str]:
    """The command of a search with two trials."""
    command = [sys.executable, "-m", "mcis.platform.cli", "study", "search", "voc", "--name", "wide"]
    command += ["--recipe", "scratch", "--voc", str(root), "--workspace", str(workspace), "--trials", "2"]
    command += [f"--set={value}" for value in (*VALUES, f"data.classes={root / 'classes.txt'}")]
    command += [f"--axis={axis}" for axis in AXES]
    return command


def study_command(root: Path, workspace: Path) -> list[str]:
    """The command of a study with two trials at a time that have a classifier each."""
    command = [sys.executable, "-m", "mcis.platform.cli", "study", "run", "effect", "voc", "--name", "wide", "--csv"]
    command += ["--recipe", "scratch", "--voc", str(root), "--workspace", str(workspace), "--parallel", "2"]
    command += ["--case", "none-single", "--case", "co-single", "--until", "localize"]
    return [*command, *(f"--set={value}" for value in (*VALUES, f"data.classes={root / 'classes.txt'}"))]


def is_training(workspace: Path, trial: str) -> bool:
    """Whether the training of a trial's classifier has started."""
    record = workspace / "runs" / trial / "record.json"
    if not record.exists():
        return False
    output = json.loads(record.read_text())["current"].get("train_classifier", "")
    log = workspace / "store" / output / "steps.jsonl"
    return log.exists() and log.stat().st_size > 0


def send_signal_during(
    command: list[str], workspace: Path, trial: str, signal_number: signal.Signals
) -> subprocess.CompletedProcess[str]:
    """Runs a command and sends its process a signal while the classifier of a trial is trained."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        for _ in range(3000):
            if is_training(workspace, trial):
                break
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        else:
            pytest.fail(f"{trial} did not start")
        process.send_signal(signal_number)
        out, errors = process.communicate(timeout=90)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def run_to_the_end(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def ended_trials(workspace: Path) -> list[dict[str, Any]]:
    """Number, values, state and objective of each trial."""
    trials = json.loads((workspace / "runs" / "wide" / "study.json").read_text())["tried"]
    return [{key: trial[key] for key in ("number", "values", "state", "objective")} for trial in trials]


def tracked_runs(workspace: Path) -> dict[str, Any]:
    """The MLflow runs of a workspace by name."""
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert len({run.info.run_name for run in runs}) == len(runs)
    return {str(run.info.run_name): run for run in runs}


@pytest.mark.slow(minutes=3)
def test_a_search_that_is_interrupted_and_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=32, val=16, size=64, classes=4)
    run_to_the_end(search_command(root, tmp_path / "undisturbed"))

    workspace = tmp_path / "disturbed"
    command = search_command(root, workspace)
    interrupted = send_signal_during(command, workspace, "wide-t000", signal.SIGINT)
    assert interrupted.returncode == 130, interrupted.stdout + interrupted.stderr
    assert "interrupted: finished work is kept" in interrupted.stderr
    assert "Traceback" not in interrupted.stdout + interrupted.stderr
    killed = send_signal_during(command, workspace, "wide-t001", signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    before = tracked_runs(workspace)
    assert set(before) == {"wide", "wide-t000", "wide-t001"}

    run_to_the_end(command)
    assert ended_trials(workspace) == ended_trials(tmp_path / "undisturbed")
    assert len(ended_trials(workspace)) == 2
    after = tracked_runs(workspace)
    assert {name: run.info.run_id for name, run in after.items()} == {
        name: run.info.run_id for name, run in before.items()
    }
    assert {run.info.status for run in after.values()} == {"FINISHED"}
    parents = {name: run.data.tags.get("mlflow.parentRunId") for name, run in after.items()}
    study = after["wide"].info.run_id
    assert parents == {"wide": None, "wide-t000": study, "wide-t001": study}


@pytest.mark.slow(minutes=3)
def test_a_killed_trial_is_repeated_and_continues(tmp_path: Path) -> None:
    """The process of one of two trials is killed while its classifier is trained."""
    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=32, val=16, size=64, classes=4)
    expected = subprocess.run(study_command(root, tmp_path / "undisturbed"), capture_output=True, text=True)
    assert expected.returncode == 0, expected.stdout + expected.stderr

    workspace = tmp_path / "disturbed"
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(study_command(root, workspace), start_new_session=True, **pipes) as process:
        for _ in range(3000):
            if is_training(workspace, "wide-co-single-s0"):
                break
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        trial = run_holder(Workspace(workspace, create=False), "wide-co-single-s0")
        assert trial is not None
        os.kill(trial.pid, signal.SIGKILL)
        out, errors = process.communicate(timeout=400)
    assert process.returncode == 0, out + errors
    assert list(csv.DictReader(io.StringIO(out))) == list(csv.DictReader(io.StringIO(expected.stdout)))
    record = json.loads((workspace / "runs" / "wide-co-single-s0" / "record.json").read_text())
    assert record["outcome"] == "finished"

"""A run that is interrupted, or whose disk is full, ends in one message and leaves what was finished intact."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.synthetic import devkit as synthetic

SMALL = (
    "classifier.channels=24",
    "segmenter.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "compute.threads=1",
)


def command(root: Path, workspace: Path, *assignments: str) -> list[str]:
    out = [sys.executable, "-m", "mcis.platform.cli", "run", "voc", "--name", "run", "--recipe", "small"]
    out += ["--voc", str(root), "--workspace", str(workspace), "--set", f"data.classes={root / 'classes.txt'}"]
    for assignment in (*SMALL, *assignments):
        out += ["--set", assignment]
    return out


@pytest.fixture
def root(tmp_path: Path) -> Path:
    synthetic.draw(tmp_path / "VOC2012", train=16, val=4, size=64, classes=2)
    return tmp_path / "VOC2012"


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_training_keeps_what_is_finished(root: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    long = command(root, workspace, "classifier.epochs=100000")
    with subprocess.Popen(
        long, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        for _ in range(600):
            logs = list((workspace / "store").glob("train_classifier-*.part/steps.jsonl"))
            if logs and logs[0].stat().st_size:
                break
            assert run.poll() is None, run.communicate()
            time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        out, errors = run.communicate(timeout=60)
    assert run.returncode == 130, out + errors
    assert "interrupted: what is finished is kept" in errors
    assert "Traceback" not in out + errors
    finished = [p for p in (workspace / "store").glob("index-*") if not p.name.endswith(".part")]
    assert len(finished) == 1
    assert (finished[0] / "index.parquet").is_file()

    done = subprocess.run([*long, "--until", "index"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is there already" in done.stdout


def kill_in_training(call: list[str], workspace: Path) -> None:
    """Gives a command and ends it by SIGKILL, with nothing of its own to end in order, while a network is trained."""
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as run:
        for _ in range(900):
            logs = list((workspace / "store").glob("train_classifier-*.part/steps.jsonl"))
            if logs and logs[0].stat().st_size:
                break
            assert run.poll() is None, run.communicate()
            time.sleep(0.2)
        run.kill()
        run.communicate()


def tracked(workspace: Path) -> list[Any]:
    """The MLflow runs of a workspace, by their names."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    return sorted(client.search_runs([experiment.experiment_id]), key=lambda run: str(run.info.run_name))


@pytest.mark.slow
def test_a_killed_run_that_is_repeated_is_one_run_of_mlflow(root: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    call = [*command(root, workspace, "classifier.epochs=150"), "--until", "train_classifier"]
    kill_in_training(call, workspace)
    (killed,) = tracked(workspace)
    assert killed.info.status == "RUNNING"
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = tracked(workspace)
    assert (run.info.run_id, run.info.status) == (killed.info.run_id, "FINISHED")
    again = subprocess.run(call, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    (run,) = tracked(workspace)
    assert (run.info.run_id, run.info.status) == (killed.info.run_id, "FINISHED")


@pytest.mark.slow
def test_a_killed_study_that_is_repeated_is_one_parent_with_its_trials(root: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    call = command(root, workspace, "classifier.epochs=150", "compute.stop_if_nothing_is_learnt=false")
    call[3:5] = ["study", "effect"]
    call += ["--training", "none", "--related", "1", "--seeds", "1", "--until", "pseudo_masks"]
    kill_in_training(call, workspace)
    killed = {run.info.run_name: run.info.run_id for run in tracked(workspace)}
    assert set(killed) == {"run", "run-none-single-s0"}
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = tracked(workspace)
    assert [run.info.run_name for run in runs] == ["run", "run-none-identity-r1-s0", "run-none-single-s0"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert killed.items() <= {run.info.run_name: run.info.run_id for run in runs}.items()
    assert {run.data.tags.get("mlflow.parentRunId") for run in runs[1:]} == {runs[0].info.run_id}


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 3 MiB."""
    place = tmp_path / "small-disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_named_with_a_remedy(root: Path, full_disk: Path) -> None:
    (full_disk / "ballast").write_bytes(os.urandom(1_500_000))
    done = subprocess.run(command(root, full_disk / "workspace"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "no space left" in done.stderr or "disk" in done.stderr
    assert "remedy:" in done.stderr


@pytest.mark.slow
def test_a_second_process_and_gc_are_refused_until_the_first_is_killed_and_what_it_left_stays(
    root: Path, tmp_path: Path
) -> None:
    workspace = tmp_path / "workspace"
    long = command(root, workspace, "classifier.epochs=100000")
    mcis = [sys.executable, "-m", "mcis.platform.cli"]
    here = ["--workspace", str(workspace)]

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*mcis, *words, *here], capture_output=True, text=True)

    with subprocess.Popen(
        long, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        for _ in range(1200):
            logs = list((workspace / "store").glob("train_classifier-*.part/steps.jsonl"))
            if logs and logs[0].stat().st_size:
                break
            assert run.poll() is None, run.communicate()
            time.sleep(0.2)
        second, removal = subprocess.run(long, capture_output=True, text=True), call("gc", "--delete")
        (listed,) = json.loads(call("runs", "--json").stdout)
        run.kill()
    for refused in (second, removal):
        assert refused.returncode == 1
        assert f"process {run.pid}, since" in refused.stderr
    assert (listed["state"], listed["reached"], listed["holder"]["pid"]) == ("running", "index", run.pid)

    (listed,) = json.loads(call("runs", "--json").stdout)
    assert (listed["state"], listed["reached"], listed["holder"]) == ("killed", "index", None)
    shown = call("gc", "--delete")
    assert shown.returncode == 0, shown.stderr
    assert logs[0].exists(), "the training can be continued"
    again = subprocess.run([*long, "--until", "index"], capture_output=True, text=True)
    assert "is there already" in again.stdout, again.stderr
    shown = call("gc", "--run", "run", "--delete")
    assert shown.returncode == 0, shown.stderr
    assert [path.name for path in (workspace / "store").iterdir() if path.is_dir()] == []
    assert list((workspace / "runs").iterdir()) == []

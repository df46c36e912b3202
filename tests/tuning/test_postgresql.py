"""A run and a study with an MLflow server on PostgreSQL. No password or token is written anywhere."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from mcis.platform import pipeline
from mcis.platform.config.resolve import Resolved
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.definition import CaseDefinition, StudyDefinition
from mcis.tuning.studies import Study, run_study

TOKEN = "token-that-nobody-may-read"


@pytest.fixture
def command_lines() -> Iterator[set[bytes]]:
    """The command lines of all processes of this machine while the test runs."""
    lines: set[bytes] = set()
    stop = threading.Event()

    def collect() -> None:
        while not stop.wait(0.2):
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    lines.add(process.read_bytes())
                except OSError:  # the process has ended
                    continue

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    yield lines
    stop.set()
    thread.join()


@pytest.mark.slow
def test_a_run_and_a_study_on_a_server_with_postgresql(
    ray_local: None,
    postgresql: tuple[str, dict[str, str]],
    tracking_server: Callable[..., Any],
    command_lines: set[bytes],
    tmp_path: Path,
    small_voc: Callable[..., Resolved],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, password = postgresql
    server = tracking_server(store, password)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
    workspace = Workspace(tmp_path / "workspace")
    resolved = small_voc("segmenter.min_steps=4", "segmenter.batch=4", "segmenter.width=16", "segmenter.crop=64")
    for _ in range(2):
        pipeline.run(resolved, workspace, "run")
    for _ in range(2):
        run_study(make_study(resolved, workspace), DEFINITION)

    client = MlflowClient(server.uri)
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    runs = {str(run.info.run_name): run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["run", "study", "study-r1-s0", "study-single-s0"]
    assert all(run.info.status == "FINISHED" for run in runs.values())
    check_run(client, runs["run"])
    children = [runs["study-single-s0"], runs["study-r1-s0"]]
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {runs["study"].info.run_id}
    assert not any(child.outputs and child.outputs.model_outputs for child in children)

    secrets = [TOKEN.encode(), password["PGPASSWORD"].encode()]
    check_files_hold_no_secret([workspace.root, tmp_path / "server-0"], secrets)
    parameters_and_tags = json.dumps([[run.data.params, run.data.tags] for run in runs.values()])
    shown = capsys.readouterr()
    texts = [parameters_and_tags.encode(), shown.out.encode(), shown.err.encode(), *command_lines]
    assert any(b"mlflow" in line for line in command_lines)
    assert not [text for text in texts if any(secret in text for secret in secrets)]
    assert os.environ["MLFLOW_TRACKING_TOKEN"] == TOKEN


DEFINITION = StudyDefinition(
    about="two cases",
    case=(
        CaseDefinition(name="single", set={"localize.related": 0}),
        CaseDefinition(name="r1", set={"localize.related": 1}),
    ),
)


def make_study(resolved: Resolved, workspace: Workspace) -> Study:
    return Study(kind="effect", name="study", resolved=resolved, workspace=workspace, until="pseudo_masks")


def check_run(client: MlflowClient, run: Any) -> None:
    """Checks the metrics, files and the logged network of a run."""
    assert {key.split(".")[0] for key in run.data.metrics} >= {"segmentation", "pseudo_masks", "classifier"}
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"report.html", "scores.json", "pictures"} <= files
    (output,) = run.outputs.model_outputs
    assert "MLmodel" in [Path(file.path).name for file in client.list_logged_model_artifacts(output.model_id)]


def check_files_hold_no_secret(folders: list[Path], secrets: list[bytes]) -> None:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 50
    assert not [path for path in files if any(secret in path.read_bytes() for secret in secrets)]

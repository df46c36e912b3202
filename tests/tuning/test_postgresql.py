"""A run and a study on MLflow's server with PostgreSQL behind it; passwords and tokens are written nowhere."""

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
from mcis.tuning.definition import CaseDefinition, Definition
from mcis.tuning.studies import Study, defined

TOKEN = "token-that-nobody-may-read"


@pytest.fixture
def command_lines() -> Iterator[set[bytes]]:
    """The command lines of all processes of this machine, while the test runs."""
    seen: set[bytes] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.2):
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(process.read_bytes())
                except OSError:  # it has ended
                    continue

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield seen
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
    small = [f"segmenter.{key}" for key in ("steps=4", "batch=4", "width=16", "crop=64")]
    registered = small_voc(*small)
    for _ in range(2):
        pipeline.run(registered, workspace, "run")
    study = Study(kind="effect", name="study", resolved=small_voc(*small), workspace=workspace, until="pseudo_masks")
    single = CaseDefinition(name="single", set={"localize.related": 0})
    definition = Definition(about="two", case=(single, CaseDefinition(name="r1", set={"localize.related": 1})))
    for _ in range(2):
        defined(study, definition)

    client = MlflowClient(server.uri)
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    runs = {run.info.run_name: run for run in found}
    assert sorted(map(str, runs)) == ["run", "study", "study-r1-s0", "study-single-s0"]
    assert all(run.info.status == "FINISHED" for run in found)
    of_run: Any = runs["run"]
    assert {key.split(".")[0] for key in of_run.data.metrics} >= {"segmentation", "pseudo_masks", "classifier"}
    files = {file.path for file in client.list_artifacts(of_run.info.run_id)}
    assert {"report.html", "scores.json", "pictures"} <= files
    (output,) = of_run.outputs.model_outputs
    assert "MLmodel" in [Path(f.path).name for f in client.list_logged_model_artifacts(output.model_id)]

    children = [runs["study-single-s0"], runs["study-r1-s0"]]
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {runs["study"].info.run_id}
    assert not any(child.outputs and child.outputs.model_outputs for child in children)

    secrets = [TOKEN.encode(), password["PGPASSWORD"].encode()]
    written = [path for path in workspace.root.rglob("*") if path.is_file()]
    written += [path for path in (tmp_path / "server-0").rglob("*") if path.is_file()]
    assert len(written) > 50
    assert not [path for path in written if any(secret in path.read_bytes() for secret in secrets)]
    logged = json.dumps([[run.data.params, run.data.tags] for run in found]).encode()
    shown = capsys.readouterr()
    said = [logged, shown.out.encode(), shown.err.encode(), *command_lines]
    assert any(b"mlflow" in line for line in command_lines)
    assert not [text for text in said if any(secret in text for secret in secrets)]
    assert os.environ["MLFLOW_TRACKING_TOKEN"] == TOKEN

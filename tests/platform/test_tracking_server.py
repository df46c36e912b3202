"""MLflow's server, away and back: a run goes on meanwhile, and MLflow has everything in the end."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcis.platform.networks.mlflow_model import log_segmenter
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace


@pytest.mark.slow(minutes=3)
def test_a_server_that_is_away_costs_no_time_and_nothing_that_was_logged(
    tracking_server: Callable[..., Any],
    trained: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is there at the start, comes back, and is away when the run ends; the next call then sends the rest."""
    server = tracking_server()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    folder = trained(2)
    workspace = Workspace(folder.parent.parent)
    tracker = Tracker(workspace, "drawn", identity="same", log_model=log_segmenter)
    steps = workspace.store / "steps.jsonl"
    tracker.log("classifier", steps)

    def train(first: int, last: int) -> None:
        with steps.open("a") as file:
            for step in range(first, last + 1):
                print(json.dumps({"step": step, "time": time.time(), "epoch": 1.0, "loss": 1 / step}), file=file)
                file.flush()
                tracker.follow("classifier", [])

    train(1, 5)
    server.stop()
    began = time.monotonic()
    train(6, 30)
    assert time.monotonic() - began < 1, "who logs does not wait"
    server.start()
    client = tracker.client
    while [m.step for m in client.get_metric_history(tracker.run_id, "classifier.loss")] != [*range(1, 31)]:
        tracker.follow("classifier", [])
        time.sleep(0.2)
    server.stop()
    tracker.metrics({"miou": 50.0})
    tracker.artifact(folder / "config.toml")
    tracker.model()
    tracker.finish("FINISHED")
    assert "repeat the command to upload the rest" in " ".join(capsys.readouterr().out.split())
    server.start()
    Tracker(workspace, "drawn", identity="same", log_model=log_segmenter).finish("FINISHED")
    run: Any = client.get_run(tracker.run_id)
    assert (run.info.status, run.data.metrics["miou"]) == ("FINISHED", 50.0)
    assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["config.toml"]
    assert [client.get_logged_model(of.model_id).name for of in run.outputs.model_outputs] == ["segmenter"]


@pytest.mark.slow
def test_a_server_that_is_not_there_at_the_start_stops_no_run(
    tracking_server: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = tracking_server()
    server.stop()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    began = time.monotonic()
    tracker = Tracker(Workspace(tmp_path / "workspace"), "run", identity="")
    assert time.monotonic() - began < 60
    assert f"note: MLflow's store {server.uri} cannot be used: no server answers there" in capsys.readouterr().out
    tracker.metrics({"miou": 50.0})
    server.start()
    tracker.finish("FINISHED")
    run: Any = tracker.client.get_run(tracker.run_id)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"miou": 50.0})

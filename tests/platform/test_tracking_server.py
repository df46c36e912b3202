"""MLflow's server, away and back: a run goes on meanwhile, and MLflow has everything in the end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.runs import tracking
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace


def records(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": step, "time": time.time(), "epoch": 1.0, "loss": 1 / step} for step in range(first, last + 1)]


@pytest.mark.slow
def test_a_server_that_is_away_costs_no_time_and_nothing_that_was_logged(
    tracking_server: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = tracking_server()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    workspace = Workspace(tmp_path / "workspace")
    tracker = Tracker(workspace, "run", identity="")
    tracker.steps("classifier", records(1, 5))
    tracker.flush()
    server.stop()
    (tmp_path / "page.html").write_text("a page")
    began = time.monotonic()
    tracker.parameters({"seed": 3})
    for step in range(6, 31):
        tracker.steps("classifier", records(step, step))
    tracker.metrics({"miou": 50.0})
    tracker.artifact(tmp_path / "page.html")
    assert time.monotonic() - began < 1, "who logs does not wait"
    began = time.monotonic()
    tracker.finish("FINISHED", patience=2)
    assert time.monotonic() - began < 60
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("the run goes on; what is logged is kept and sent later") == 1
    assert "repeating the command sends what is missing" in shown

    server.start()
    tracker.flush()
    run = tracker.client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert (run.data.params, run.data.metrics["miou"]) == ({"seed": "3"}, 50.0)
    assert [m.step for m in tracker.client.get_metric_history(tracker.run_id, "classifier.loss")] == [*range(1, 31)]
    assert [file.path for file in tracker.client.list_artifacts(tracker.run_id)] == ["page.html"]

    repeated = Tracker(workspace, "run", identity="")  # as when the command had ended before the server was back
    repeated.steps("classifier", records(1, 40))
    repeated.finish("FINISHED")
    assert repeated.run_id == tracker.run_id
    assert [m.step for m in tracker.client.get_metric_history(tracker.run_id, "classifier.loss")] == [*range(1, 41)]


@pytest.mark.slow
def test_a_server_that_is_not_there_at_the_start_ends_the_run_soon(
    tracking_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tracking_server()
    server.stop()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    began = time.monotonic()
    with pytest.raises(UserError, match=f"MLflow's store {server.uri} cannot be used"):
        Tracker(Workspace(tmp_path / "workspace"), "run", identity="")
    assert time.monotonic() - began < tracking.PATIENCE

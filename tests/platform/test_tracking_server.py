"""MLflow's server, away and back: a run goes on meanwhile, and MLflow has everything in the end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from mcis.datasets.errors import UserError
from mcis.platform.cli import app
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.served import trained_segmenter
from mcis.platform.runs import tracking
from mcis.platform.runs.data_sets import data_sets
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
    assert "`mcis sync run` or repeating the command sends what is missing" in shown

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


def sync(workspace: Workspace, *names: str) -> Result:
    return CliRunner().invoke(app, ["sync", *names, "--workspace", str(workspace.root)])


@pytest.mark.slow
def test_what_a_server_missed_is_sent_once_it_is_back(
    tracking_server: Callable[..., Any], trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ended without its server, in a process that is gone: all that a tracker hands over waits in a file."""
    server = tracking_server()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    folder = trained(2)
    workspace = Workspace(folder.parent.parent)
    tracker = Tracker(workspace, "drawn", identity="same")
    tracker.flush()
    server.stop()
    tracker.parameters({"seed": 3})
    tracker.tags({"setting": "voc"})
    config, index = resolve("voc", "small", {"data.voc": "/data"}).config, {"domain": ["target"], "split": ["train"]}
    tracker.data_sets(data_sets(config, pa.table(index), "0123456789abcdef"))
    tracker.steps("classifier", records(1, 30))
    tracker.metrics({"miou": 50.0, "nothing": float("nan")})
    tracker.metric_at("curve", 1.5, 7)
    tracker.system_metrics({"cpu": 50.0}, at=time.time())
    tracker.artifact(folder / "config.toml")
    tracker.artifact(folder / "gone.html")
    tracker.model(trained_segmenter(workspace.run("drawn"), register=None))
    tracker.finish("FINISHED", patience=0.5)
    assert len(workspace.run("drawn").unsent()) == 1
    tracker._outbox._calls.clear()  # as a process that ends loses them
    away = sync(workspace)
    assert away.exit_code == 1
    assert f"MLflow's store {server.uri} cannot be used" in away.output
    assert len(workspace.run("drawn").unsent()) == 1
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    elsewhere = sync(workspace)
    assert f"run drawn was logged in {server.uri}" in elsewhere.output
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    assert "no run other" in sync(workspace, "other").output

    server.start()
    sent = sync(workspace, "drawn")
    assert sent.exit_code == 0, sent.output
    assert "sent: drawn" in sent.output
    assert workspace.run("drawn").unsent() == []
    client = tracker.client
    run: Any = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "3"}
    assert run.data.tags["setting"] == "voc"
    assert run.data.metrics["miou"] == 50.0
    assert [m.step for m in client.get_metric_history(tracker.run_id, "classifier.loss")] == [*range(1, 31)]
    assert [(m.step, m.value) for m in client.get_metric_history(tracker.run_id, "curve")] == [(7, 1.5)]
    assert [m.value for m in client.get_metric_history(tracker.run_id, "system/cpu")] == [50.0]
    assert [each.dataset.name for each in run.inputs.dataset_inputs] == ["voc train"]
    assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["config.toml"]
    assert [client.get_logged_model(of.model_id).name for of in run.outputs.model_outputs] == ["segmenter"]
    again = sync(workspace)
    assert again.exit_code == 0
    assert "MLflow lacks nothing that was kept for it" in again.output


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
    server.start()
    tracker = Tracker(Workspace(tmp_path / "workspace"), "run", identity="")
    tracker.finish("FINISHED")
    assert tracker.client.get_run(tracker.run_id).info.status == "FINISHED"

"""The MLflow run of a run: continued by a restart, whatever was cut off, with everything in it once."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from mcis.datasets.errors import UserError
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.version import git_commit, project_version
from mcis.platform.runs.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("workspace"))
    shutil.copy(mlflow_store, workspace.tracking_store)
    return workspace


def runs(tracker: Tracker, name: str) -> list[Any]:
    found = tracker.client.search_runs([tracker.experiment_id], filter_string=f"attributes.run_name = '{name}'")
    return list(found)


def write_log(workspace: Workspace, name: str, last: int) -> Path:
    """Writes the step log of a training of `last` steps.

    A restart logs the steps after a checkpoint with another speed.
    """
    path = workspace.store / f"train_classifier-{name}" / "steps.jsonl"
    path.parent.mkdir(exist_ok=True)
    records = [
        {"step": step, "time": last + step, "epoch": step / 2, "loss": 1 / step, "speed": last}
        for step in range(1, last + 1)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def history(tracker: Tracker, key: str) -> list[tuple[int, str]]:
    """Steps and values of a metric as text, by which NaN can be compared."""
    return [(m.step, str(m.value)) for m in tracker.client.get_metric_history(tracker.run_id, key)]


def test_a_restart_continues_the_run_and_logs_nothing_twice(workspace: Workspace) -> None:
    for last in (700, 1000):  # the first call is killed, so that the run is left RUNNING
        tracker = Tracker(workspace, "again", identity="same")
        tracker.describe({"seed": 0, "scales": (0.5, 1.0), "long": "x" * 7000, "none": None}, {})
        tracker.log("classifier", write_log(workspace, "again", last))
        tracker.metrics({"miou": 50.0, "seconds": last, "nothing": float("nan")})
        tracker.metrics({"curve": 1.0}, 3)
        tracker.follow("classifier", [])
        while len(history(tracker, "classifier.epoch")) < last:
            time.sleep(0.1)
    tracker.finish("FINISHED")
    (run,) = runs(tracker, "again")
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "0", "scales": "0.5, 1.0", "long": "x" * 6000, "none": "None"}
    assert history(tracker, "classifier.loss") == [(step, str(1 / step)) for step in range(1, 1001)]
    assert [value for _, value in history(tracker, "classifier.speed")] == ["700.0"] * 700 + ["1000.0"] * 300
    assert history(tracker, "miou") == [(0, "50.0")]
    assert history(tracker, "seconds") == [(0, "700.0"), (0, "1000.0")]
    assert history(tracker, "nothing") == [(0, "nan")]
    assert history(tracker, "curve") == [(3, "1.0")]


def test_uploaded_records_are_not_read_again(workspace: Workspace) -> None:
    """A long training would otherwise read its whole log at each upload."""
    tracker = Tracker(workspace, "long", identity="")
    log = write_log(workspace, "long", 10)
    tracker.log("classifier", log)
    tracker.follow("classifier", [])
    while len(history(tracker, "classifier.epoch")) < 10:
        time.sleep(0.1)

    content = log.read_text()
    write_log(workspace, "long", 11)
    added = log.read_text().splitlines(keepends=True)[-1]
    log.write_text(f"not JSON{content[len('not JSON') :]}{added}")
    while len(history(tracker, "classifier.epoch")) < 11:
        tracker.follow("classifier", [])
        time.sleep(0.1)
    log.write_text(content + added)
    tracker.finish("FINISHED")
    assert [step for step, _ in history(tracker, "classifier.loss")] == list(range(1, 12))


def test_another_configuration_starts_another_run_and_leaves_none_running(workspace: Workspace) -> None:
    first = Tracker(workspace, "changed", identity="one")
    first.metrics({"miou": 50.0})
    second = Tracker(workspace, "changed", identity="two")
    third = Tracker(workspace, "changed", identity="two", new_run=True)
    third.finish("FINISHED")
    statuses = {run.info.run_id: run.info.status for run in runs(third, "changed")}
    assert statuses == {first.run_id: "KILLED", second.run_id: "KILLED", third.run_id: "FINISHED"}
    third.client.delete_run(third.run_id)
    fourth = Tracker(workspace, "changed", identity="two")
    fourth.finish("FINISHED")
    assert fourth.run_id not in statuses
    assert first.client.get_run(first.run_id).data.metrics == {"miou": 50.0}
    assert third.client.get_run(third.run_id).data.metrics == {}


def test_another_training_starts_another_run(workspace: Workspace) -> None:
    """A training in another folder, for example after photographs were added, with the same configuration."""
    name = "trained"

    def track(classifier: Path, segmenter: Path, miou: float) -> Tracker:
        tracker = Tracker(workspace, name, identity="same")
        tracker.describe({"seed": 0}, {"recipe": "photos"})
        tracker.metrics({"paper": 66.2})
        tracker.log("classifier", classifier)
        tracker.log("segmenter", segmenter)
        tracker.metrics({"miou": miou})
        tracker.finish("FINISHED")
        return tracker

    first = track(write_log(workspace, "trained-1", 30), write_log(workspace, "trained-2", 9), 50.0)
    logs = (write_log(workspace, "trained-3", 20), write_log(workspace, "trained-4", 5))
    second = track(*logs, 60.0)
    again = track(*logs, 60.0)
    assert second.run_id != first.run_id
    assert again.run_id == second.run_id, "a restart of the same trainings continues their run"
    assert len(runs(second, name)) == 2

    for tracker, classifier, segmenter, miou in ((first, 30, 9, 50.0), (second, 20, 5, 60.0)):
        run = tracker.client.get_run(tracker.run_id)
        assert run.info.status == "FINISHED"
        assert (run.data.params, run.data.tags["recipe"]) == ({"seed": "0"}, "photos")
        assert history(tracker, "classifier.speed") == [(step, f"{classifier}.0") for step in range(1, classifier + 1)]
        assert history(tracker, "segmenter.speed") == [(step, f"{segmenter}.0") for step in range(1, segmenter + 1)]
        assert history(tracker, "miou") == [(0, str(miou))]
        assert history(tracker, "paper") == [(0, "66.2")]


def test_other_images_start_another_run(workspace: Workspace) -> None:
    """Photographs were added, and the repeated call was interrupted before its training."""

    def track(index: str, train: int, status: str) -> Tracker:
        tracker = Tracker(workspace, "photographs", identity="same")
        tracker.images(index, {"train": train, "val": 0})
        tracker.finish(status)
        return tracker

    first = track("a1", 20, "FINISHED")
    second = track("b2", 24, "KILLED")
    third = track("b2", 24, "FINISHED")
    assert second.run_id != first.run_id
    assert third.run_id == second.run_id, "a restart on the same images continues their run"
    for tracker, index, images in ((first, "a1", "train 20"), (third, "b2", "train 24")):
        run = tracker.client.get_run(tracker.run_id)
        assert run.info.status == "FINISHED"
        assert (run.data.tags["mcis.index"], run.data.tags["mcis.images"]) == (index, images)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes the store unreachable (True) or reachable again (False)."""
    back = MlflowClient.log_batch

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("refused")

    return lambda gone: monkeypatch.setattr(MlflowClient, "log_batch", refuse if gone else back)


def missed(workspace: Workspace, name: str, away: Callable[[bool], None]) -> Tracker:
    """The tracker of a run whose store was unreachable until its end."""
    tracker = Tracker(workspace, name, identity="one")
    away(True)
    workspace.run(name).report.write_text(name)
    tracker.log("classifier", write_log(workspace, name, 30))
    tracker.metrics({"miou": 50.0, "nothing": float("nan")})
    tracker.metrics({"curve": 1.5}, 7)
    tracker.artifact(workspace.run(name).report)
    tracker.finish("FINISHED")
    away(False)
    return tracker


def content(tracker: Tracker) -> tuple[Any, ...]:
    """What MLflow recorded of a run."""
    run = tracker.client.get_run(tracker.run_id)
    curves = [history(tracker, key) for key in ("classifier.loss", "curve", "miou", "nothing")]
    files = [file.path for file in tracker.client.list_artifacts(tracker.run_id)]
    return run.info.status, run.info.end_time, curves, files


def test_the_next_call_uploads_missing_metrics_once(
    workspace: Workspace, away: Callable[[bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = missed(workspace, "missed", away)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("The run continues; its end, or the next call, uploads its results.") == 1
    assert "repeat the command to upload the rest" in shown
    Tracker(workspace, "missed", identity="one").finish("FINISHED")
    status, _, (loss, *others), files = content(tracker)
    assert (status, files) == ("FINISHED", ["report.html"])
    assert loss == [(step, str(1 / step)) for step in range(1, 31)]
    assert others == [[(7, "1.5")], [(0, "50.0")], [(0, "nan")]]
    before = content(tracker)
    Tracker(workspace, "missed", identity="one").finish("FINISHED")
    assert (content(tracker)[0], content(tracker)[2:]) == (before[0], before[2:]), "all but the time of its end"


@pytest.mark.parametrize("change", [{}, {"new_run": True}, {"identity": "two"}])
def test_missing_metrics_are_uploaded(
    workspace: Workspace, away: Callable[[bool], None], change: dict[str, Any]
) -> None:
    name = "-".join(["next", *change])
    tracker = missed(workspace, name, away)
    again = Tracker(workspace, name, **({"identity": "one"} | change))
    again.finish("FINISHED")
    assert (again.run_id == tracker.run_id) == (not change)
    status, _, (loss, *_), files = content(tracker)
    assert (status, len(loss), files) == ("FINISHED", 30, ["report.html"])


def test_missing_metrics_are_uploaded_before_another_training(
    workspace: Workspace, away: Callable[[bool], None]
) -> None:
    earlier = missed(workspace, "other-training", away)
    tracker = Tracker(workspace, "other-training", identity="one")
    tracker.log("classifier", write_log(workspace, "another-training", 20))
    tracker.finish("FINISHED")
    assert tracker.run_id != earlier.run_id
    assert len(history(tracker, "classifier.loss")) == 20
    status, _, (loss, *_), files = content(earlier)
    assert (status, len(loss), files) == ("FINISHED", 30, ["report.html"])


def test_the_earlier_run_of_another_training_ends_without_its_network(workspace: Workspace) -> None:
    def refuse(*_: Any) -> None:
        raise UserError("the run has no trained segmentation network", "a finished training", "repeat the command")

    name = "with-network"
    killed = Tracker(workspace, name, identity="same", log_model=refuse)
    killed.log("segmenter", write_log(workspace, "with-network-1", 30))
    killed.model()
    tracker = Tracker(workspace, name, identity="same", log_model=refuse)
    tracker.log("segmenter", write_log(workspace, "with-network-2", 20))
    tracker.finish("FINISHED")
    assert tracker.run_id != killed.run_id
    assert content(killed)[0] == "KILLED"
    assert len(history(killed, "segmenter.loss")) == 30
    assert content(tracker)[0] == "FINISHED"


def test_the_earlier_run_of_another_training_ends_although_no_run_can_be_created(
    workspace: Workspace, away: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("refused")

    earlier = missed(workspace, "refused", away)
    tracker = Tracker(workspace, "refused", identity="one")
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "create_run", refuse)
        tracker.log("classifier", write_log(workspace, "refused-again", 20))
    status, _, (loss, *_), files = content(earlier)
    assert (status, len(loss), files) == ("FINISHED", 30, ["report.html"])
    tracker.finish("FINISHED")
    assert tracker.run_id not in ("", earlier.run_id)
    assert len(history(tracker, "classifier.loss")) == 20


def test_a_store_without_the_run_is_reported_and_stops_no_call(
    workspace: Workspace,
    away: Callable[[bool], None],
    tmp_path: Path,
    mlflow_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = missed(workspace, "gone", away)
    gone.client.delete_run(gone.run_id)
    missed(workspace, "moved", away)
    shutil.copy(mlflow_store, tmp_path / "other.db")
    for name, store in (("gone", None), ("moved", f"sqlite:///{tmp_path}/other.db")):
        if store:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
        capsys.readouterr()
        Tracker(workspace, name, identity="one").finish("FINISHED")
        assert "results of an earlier run of this name were not uploaded" in capsys.readouterr().out


def test_tags_name_parent_version_and_commit(workspace: Workspace) -> None:
    parent = Tracker(workspace, "study", identity="")
    child = Tracker(workspace, "study-trial", identity="", parent=parent.run_id)
    tags = child.client.get_run(child.run_id).data.tags
    for tracker in (child, parent):
        tracker.finish("FINISHED")
    assert tags["mlflow.parentRunId"] == parent.run_id
    assert tags["mcis.version"] == project_version()
    commit = git_commit()
    assert tags.get("mlflow.source.git.commit") == (commit and commit.name)
    assert "mlflow.parentRunId" not in parent.client.get_run(parent.run_id).data.tags


def test_system_metrics_are_logged_during_a_run(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    tracker = Tracker(workspace, "sampled", identity="")
    key = "system/cpu_utilization_percentage"
    with tracker.running():
        while not tracker.client.get_metric_history(tracker.run_id, key):
            pass
    assert 0 <= tracker.client.get_metric_history(tracker.run_id, key)[0].value <= 100

"""The MLflow run of a run: continued by a restart, whatever was cut off, with everything in it once."""

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow.data
import pyarrow as pa
import pytest
from mlflow.entities import ViewType

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import resolve
from mcis.platform.runs.data_sets import data_sets
from mcis.platform.runs.tracking import Tracker, send_earlier, send_unsent
from mcis.platform.runs.version import git_commit, project_version
from mcis.platform.runs.workspace import Workspace, read_json, write_json


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("workspace"))
    shutil.copy(mlflow_store, workspace.tracking_store)
    return workspace


def runs(tracker: Tracker, name: str) -> list[Any]:
    found = tracker.client.search_runs([tracker.experiment_id], filter_string=f"attributes.run_name = '{name}'")
    return list(found)


def test_a_restart_continues_the_run_and_logs_nothing_twice(workspace: Workspace) -> None:
    records = [{"step": step, "time": 1.0 * step, "epoch": step / 2, "loss": 1 / step} for step in range(1, 1001)]
    for upto in (700, 1000):  # the first call is killed, so that the run is left RUNNING
        tracker = Tracker(workspace, "again", identity="same")
        tracker.parameters({"seed": 0, "scales": (0.5, 1.0), "long": "x" * 7000, "none": None})
        tracker.steps("classifier", [record | {"time": 7.0} for record in records[:upto]])
        tracker.metrics({"miou": 50.0, "seconds": upto})
        tracker.metric_at("curve", 1.0, 3)
        tracker.flush()
    tracker.finish("FINISHED")
    (run,) = runs(tracker, "again")
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "0", "scales": "0.5, 1.0", "long": "x" * 5999 + "…", "none": "None"}
    history = tracker.client.get_metric_history(run.info.run_id, "classifier.loss")
    assert [(m.step, m.value) for m in history] == [(r["step"], r["loss"]) for r in records]
    assert [m.value for m in tracker.client.get_metric_history(run.info.run_id, "miou")] == [50.0]
    assert [m.value for m in tracker.client.get_metric_history(run.info.run_id, "seconds")] == [700, 1000]
    assert [m.step for m in tracker.client.get_metric_history(run.info.run_id, "curve")] == [3]


def test_a_kill_before_the_id_is_written_down_makes_no_second_run(workspace: Workspace) -> None:
    first = Tracker(workspace, "early", identity="same")
    record = read_json(workspace.run("early").tracking)
    del record["run_id"]
    write_json(workspace.run("early").tracking, record)  # as it was while MLflow made the run
    again = Tracker(workspace, "early", identity="same")
    assert again.run_id == first.run_id
    again.finish("FINISHED")
    assert [run.info.status for run in runs(again, "early")] == ["FINISHED"]


def test_another_configuration_starts_another_run_and_leaves_none_running(workspace: Workspace) -> None:
    first = Tracker(workspace, "changed", identity="one")
    second = Tracker(workspace, "changed", identity="two")
    third = Tracker(workspace, "changed", identity="two", afresh=True)
    third.finish("FINISHED")
    statuses = {run.info.run_id: run.info.status for run in runs(third, "changed")}
    assert statuses == {first.run_id: "KILLED", second.run_id: "KILLED", third.run_id: "FINISHED"}


@contextlib.contextmanager
def locked(store: Path) -> Iterator[None]:
    """A store that is away, as far as a file can be: somebody else writes to it without an end."""
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


NEXT_CALLS: dict[str, dict[str, Any]] = {
    "the same": {"identity": "one"},
    "afresh": {"identity": "one", "afresh": True},
    "another": {"identity": "two"},
}


@pytest.fixture(scope="module")
def missed(workspace: Workspace) -> dict[str, Tracker]:
    """By name, trackers of calls that ended while the store was away, in processes that are gone."""
    names = [*(call.replace(" ", "-") for call in NEXT_CALLS), "left", "moved", "gone"]
    trackers = {name: Tracker(workspace, name, identity="one") for name in names}
    with locked(workspace.tracking_store):  # MLflow waits for it for 20 s
        for name, tracker in trackers.items():
            workspace.run(name).report.write_text(name)
            tracker.metrics({"miou": 50.0})
            tracker.artifact(workspace.run(name).report)
        for tracker in trackers.values():
            tracker.finish("FINISHED", patience=0)
            tracker._outbox._calls.clear()
    return trackers


def no_model(*_: object, **__: object) -> Any:
    raise AssertionError("no network was logged")


@pytest.mark.slow
@pytest.mark.parametrize("call", NEXT_CALLS)
def test_what_mlflow_missed_is_sent_whatever_the_next_call_is(
    workspace: Workspace, missed: dict[str, Tracker], call: str
) -> None:
    name = call.replace(" ", "-")
    client, run_id = missed[name].client, missed[name].run_id
    send_earlier(workspace, name, no_model)
    assert workspace.run(name).unsent() == []
    again = Tracker(workspace, name, **NEXT_CALLS[call])
    again.finish("FINISHED")
    assert (again.run_id == run_id) == (call == "the same")
    run = client.get_run(run_id)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"miou": 50.0})
    assert [file.path for file in client.list_artifacts(run_id)] == ["report.html"]


@pytest.mark.slow
def test_who_does_not_send_what_mlflow_missed_leaves_it_where_it_is(
    workspace: Workspace, missed: dict[str, Tracker]
) -> None:
    (kept,) = workspace.run("left").unsent()
    for call in NEXT_CALLS.values():
        Tracker(workspace, "left", **call).finish("FINISHED")
        assert workspace.run("left").unsent() == [kept]
    client, run_id = missed["left"].client, missed["left"].run_id
    assert client.get_run(run_id).info.status == "FINISHED", "it was continued once"
    send_unsent(workspace, "left", no_model)
    assert client.get_run(run_id).data.metrics == {"miou": 50.0}


@pytest.mark.slow
def test_what_mlflow_missed_is_sent_though_another_run_has_the_folder_by_now(
    workspace: Workspace,
    missed: dict[str, Tracker],
    tmp_path: Path,
    mlflow_store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second call has another store, so that it can send nothing; the files of the run are its own from then on."""
    shutil.copy(mlflow_store, tmp_path / "other.db")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
        with pytest.raises(UserError, match=r"run moved was logged in sqlite:.* and MLflow's store is"):
            send_unsent(workspace, "moved", no_model)
        other = Tracker(workspace, "moved", identity="one")
        other.finish("FINISHED")
    assert len(workspace.run("moved").unsent()) == 1
    send_unsent(workspace, "moved", no_model)
    assert workspace.run("moved").unsent() == []
    client, run_id = missed["moved"].client, missed["moved"].run_id
    run = client.get_run(run_id)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"miou": 50.0})
    assert client.list_artifacts(run_id) == [], "what lies there is of the other"
    assert read_json(workspace.run("moved").tracking)["run_id"] == other.run_id


@pytest.mark.slow
def test_what_a_removed_run_lacks_hinders_no_other_call(
    workspace: Workspace, missed: dict[str, Tracker], capsys: pytest.CaptureFixture[str]
) -> None:
    client, run_id = missed["gone"].client, missed["gone"].run_id
    client.delete_run(run_id)
    send_earlier(workspace, "gone", no_model)
    assert f"MLflow has no run {run_id} any more" in " ".join(capsys.readouterr().out.split())
    assert len(workspace.run("gone").unsent()) == 1
    client.restore_run(run_id)
    send_earlier(workspace, "gone", no_model)
    assert workspace.run("gone").unsent() == []


def test_a_run_that_was_removed_is_made_again(workspace: Workspace, tmp_path: Path) -> None:
    first = Tracker(workspace, "removed", identity="same")
    first.client.delete_run(first.run_id)
    second = Tracker(workspace, "removed", identity="same")
    assert second.run_id != first.run_id
    record = workspace.run("removed").tracking
    write_json(record, read_json(record) | {"run_id": "0" * 32})
    third = Tracker(workspace, "removed", identity="same")
    third.finish("FINISHED")
    assert third.client.get_run(third.run_id).info.status == "FINISHED"
    active = first.client.search_runs([first.experiment_id], run_view_type=ViewType.ACTIVE_ONLY)
    assert first.run_id not in [run.info.run_id for run in active]


def test_a_run_says_where_it_comes_from(workspace: Workspace) -> None:
    parent = Tracker(workspace, "study", identity="")
    child = Tracker(workspace, "study-trial", identity="", parent=parent.run_id)
    tags = child.client.get_run(child.run_id).data.tags
    for tracker in (child, parent):
        tracker.finish("FINISHED")
    assert tags["mlflow.parentRunId"] == parent.run_id
    assert tags["mcis.version"] == project_version()
    commit = git_commit()
    assert tags.get("mlflow.source.git.commit") == (commit and commit.name)
    assert commit is None or len(commit.name) == 40
    assert "mlflow.parentRunId" not in parent.client.get_run(parent.run_id).data.tags


def test_samples_of_the_machine_lie_at_the_seconds_of_the_run(workspace: Workspace) -> None:
    tracker = Tracker(workspace, "sampled", identity="")
    tracker.system_metrics({"cpu_utilization_percentage": 12.5})
    tracker.finish("FINISHED")
    (sample,) = tracker.client.get_metric_history(tracker.run_id, "system/cpu_utilization_percentage")
    assert sample.value == 12.5
    assert 0 <= sample.step <= 60


def test_what_mlflow_will_never_take_ends_the_run_with_an_error(workspace: Workspace) -> None:
    tracker = Tracker(workspace, "refused", identity="")
    tracker.tags({"": "a tag without a name"})
    with pytest.raises(UserError, match="cannot be used"):
        tracker.flush()
    again = Tracker(workspace, "refused", identity="")
    assert again.run_id == tracker.run_id
    again.tags({"setting": "voc"})
    again.finish("FINISHED")
    run: Any = again.client.get_run(again.run_id)
    assert (run.data.tags["setting"], run.info.status) == ("voc", "FINISHED")


def test_images_are_logged_as_data_sets_by_source_and_split(workspace: Workspace) -> None:
    config = resolve("voc+web", "small", {"data.voc": "/data/VOC2012", "data.web.root": "/data/crawled"}).config
    rows = [("target", "train")] * 3 + [("web", "train")] * 2 + [("target", "val")]
    index = pa.table({"domain": [domain for domain, _ in rows], "split": [split for _, split in rows]})
    tracker = Tracker(workspace, "data", identity="")
    for _ in range(2):
        tracker.data_sets(data_sets(config, index, "0123456789abcdef"))
    tracker.finish("FINISHED")
    run: Any = tracker.client.get_run(tracker.run_id)
    inputs = run.inputs.dataset_inputs
    logged = {
        of.dataset.name: (of.tags[0].value, of.dataset.digest, json.loads(of.dataset.profile)["num_rows"])
        for of in inputs
    }
    assert logged == {
        "voc train": ("training", "0123456789abcdef", 3),
        "voc val": ("validation", "0123456789abcdef", 1),
        "web train": ("training", "0123456789abcdef", 2),
    }
    sources: Any = {of.dataset.name: mlflow.data.get_source(of.dataset) for of in inputs}
    places = {name: source.uri for name, source in sources.items()}
    assert places["web train"] == "/data/crawled"
    assert places["voc val"] == "/data/VOC2012"


def test_the_source_of_a_data_set_is_without_credentials() -> None:
    index = pa.table({"domain": ["target"], "split": ["train"]})
    for given, logged in (
        ("s3://key@bucket/a.csv?region=x", "s3://bucket/a.csv"),
        ("s3://bucket/a.csv", "s3://bucket/a.csv"),
        ("/data/a@b/tags.csv", "/data/a@b/tags.csv"),
    ):
        config = resolve("tags", "small", {"data.tags.table": given}).config
        (of,) = data_sets(config, index, "0")
        assert json.loads(of.source) == {"uri": logged}

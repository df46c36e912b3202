"""Tags that users give to runs: in the record, in MLflow, and as a filter of `mcis runs`."""

import json

import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from mcis.platform.cli import app
from mcis.platform.runs.lifecycle import run_record
from mcis.platform.runs.locks import hold_run
from mcis.platform.runs.tracking import Tracker, TrackingRecord
from mcis.platform.runs.workspace import Workspace

runner = CliRunner()


def call(workspace: Workspace, *words: str) -> tuple[int, str]:
    done = runner.invoke(app, [*words, "--workspace", str(workspace.root)], env={"COLUMNS": "300"})
    return done.exit_code, done.output


@pytest.fixture
def workspace_of_two(workspace: Workspace) -> Workspace:
    for name in ("first", "second"):
        with run_record(workspace, name, runs_all_stages=True):
            workspace.run(name).config.write_text('sources = "voc"\nrecipe = "scratch"\n')
    return workspace


def names(workspace: Workspace, *words: str) -> list[str]:
    code, printed = call(workspace, "runs", "--json", *words)
    assert code == 0, printed
    return [entry["name"] for entry in json.loads(printed)]


def test_runs_are_listed_by_their_tags(workspace_of_two: Workspace) -> None:
    assert call(workspace_of_two, "tag", "first", "note=a = b", "paper=yes") == (0, "note=a = b\npaper=yes\n")
    assert call(workspace_of_two, "tag", "second", "paper=yes")[0] == 0
    assert names(workspace_of_two, "--tag", "paper=yes") == ["first", "second"]
    assert names(workspace_of_two, "--tag", "paper=yes", "--tag", "note=a = b") == ["first"]
    assert names(workspace_of_two, "--recipe", "photos") == []
    assert "note=a = b, paper=yes" in call(workspace_of_two, "runs")[1]

    assert call(workspace_of_two, "tag", "first", "paper=", "note=") == (0, "")
    assert names(workspace_of_two, "--tag", "paper=yes") == ["second"]


def test_tags_stay_when_the_run_is_repeated(workspace_of_two: Workspace) -> None:
    call(workspace_of_two, "tag", "first", "paper=yes")
    with run_record(workspace_of_two, "first", runs_all_stages=True):
        pass
    assert call(workspace_of_two, "tag", "first") == (0, "paper=yes\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("first", "paper"), "the tag paper"),
        (("first", "recipe=x"), "the tag recipe=x"),
        (("first", "mlflow.user=x"), "the tag mlflow.user=x"),
        (("third", "paper=yes"), "no run third"),
        (("first", "paper=yes", "paper=no"), "two values of the tag paper: yes and no"),
    ],
)
def test_other_tags_and_runs_are_refused(workspace_of_two: Workspace, words: tuple[str, ...], found: str) -> None:
    code, printed = call(workspace_of_two, "tag", *words)
    assert code == 1
    assert found in printed


def test_a_run_in_progress_is_not_tagged(workspace_of_two: Workspace) -> None:
    with hold_run(workspace_of_two, "first"):
        code, printed = call(workspace_of_two, "tag", "first", "paper=yes")
    assert code == 1
    assert "in progress" in printed


def test_mlflow_has_the_tags(workspace_of_two: Workspace) -> None:
    with Tracker(workspace_of_two, "first", identity="any").running():
        pass
    record = TrackingRecord.read(workspace_of_two.run("first"))
    assert record is not None
    client = MlflowClient(record.uri)

    call(workspace_of_two, "tag", "first", "paper=yes", "note=good")
    call(workspace_of_two, "tag", "first", "note=", "absent=")
    tags = client.get_run(record.run_id).data.tags
    assert tags["paper"] == "yes"
    assert not {"note", "absent"} & set(tags)

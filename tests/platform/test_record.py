"""The record of a run: how its last call ended, and what it points to whatever becomes of later calls."""

import contextlib
import datetime

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.runs.lifecycle import record_interruption, reference_output, run_record
from mcis.platform.runs.workspace import RunRecord, Workspace


def call(workspace: Workspace, *, whole: bool = True, error: BaseException | None = None, **keys: str) -> None:
    """A call of a run that reaches these stages, with these keys, and then ends, with an error if one is given."""
    outputs = {stage: workspace.output(stage, key) for stage, key in keys.items()}
    with contextlib.suppress(*([type(error)] if error else [])), run_record(workspace, "run", whole=whole):
        for number, (stage, output) in enumerate(outputs.items(), 1):
            reference_output(workspace, "run", stage, output)
            if error and number == len(outputs):
                raise error
            workspace.record_outputs("run", dict(list(outputs.items())[:number]))


def record(workspace: Workspace) -> RunRecord:
    found = workspace.record("run")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (None, "finished", None),
        (KeyboardInterrupt(), "interrupted", None),
        (UserError("no images", "some", "add some"), "failed", "no images"),
        (ValueError("x"), "failed", "ValueError"),
    ],
)
def test_how_a_call_ended_is_written_down(
    workspace: Workspace, error: BaseException | None, outcome: str, reason: str | None
) -> None:
    call(workspace, error=error, index="a")
    found = record(workspace)
    assert (found.outcome, found.reason, found.study, found.kind) == (outcome, reason, None, "run")
    began, ended = (datetime.datetime.fromisoformat(time or "") for time in (found.began, found.ended))
    assert began <= ended <= datetime.datetime.now(datetime.UTC)


def test_a_study_does_not_take_the_name_of_a_run(workspace: Workspace) -> None:
    call(workspace, index="a")
    with pytest.raises(UserError, match="run is a run"), run_record(workspace, "run", whole=True, kind="study"):
        pass


def test_what_is_being_computed_is_pointed_to_and_stays_so_when_the_call_is_killed(workspace: Workspace) -> None:
    call(workspace, error=KeyboardInterrupt(), index="a", localize="b")
    assert list(workspace.outputs("run")) == ["index"]
    assert record(workspace).outputs == {"index": ["index-a"], "localize": ["localize-b"]}


def test_a_call_that_ends_early_takes_nothing_back(workspace: Workspace) -> None:
    call(workspace, index="a", localize="b", predict="c")
    call(workspace, error=ValueError(), index="new")
    assert record(workspace).outputs == {
        "index": ["index-a", "index-new"],
        "localize": ["localize-b"],
        "predict": ["predict-c"],
    }
    call(workspace, index="new", localize="b")
    assert record(workspace).outputs == {"index": ["index-new"], "localize": ["localize-b"]}


def test_a_call_up_to_a_stage_keeps_what_lies_behind_it(workspace: Workspace) -> None:
    call(workspace, index="a", localize="b")
    call(workspace, whole=False, index="new")
    assert record(workspace).outputs == {"index": ["index-new"], "localize": ["localize-b"]}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"began": 1}',
        '{"began": "yesterday"}',
        '{"began": "2026-01-01", "outputs": {"index": "a"}}',
        '{"began": "2026-01-01", "outputs": {"index": ["../.."]}}',
        '{"began": "2026-01-01", "current": {"index": "/"}}',
        '{"began": "2026-01-01", "reached": {"index": ".."}}',
        '{"began": "2026-01-01", "reached": {"index": 1}}',
    ],
)
def test_a_damaged_record_is_the_users_error(workspace: Workspace, content: str) -> None:
    workspace.run("run").record.write_text(content)
    with pytest.raises(UserError, match=r"record\.json is damaged"):
        workspace.record("run")


def test_a_run_that_another_process_stopped_says_why(workspace: Workspace) -> None:
    call(workspace, index="a")
    record_interruption(workspace, "run", "too late")
    assert record(workspace).outcome == "finished"
    with run_record(workspace, "other", whole=True):
        record_interruption(workspace, "other", "lagged behind")
        found = workspace.record("other")
        assert found
        assert (found.outcome, found.reason) == ("interrupted", "lagged behind")
    record_interruption(workspace, "absent", "never ran")
    assert not (workspace.runs / "absent").exists()

"""The record of a run: how its last call ended, and which outputs the run uses."""

import contextlib
import datetime

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.runs.lifecycle import (
    caches_in_use,
    record_interruption,
    reference_cache,
    reference_output,
    run_record,
)
from mcis.platform.runs.workspace import RunRecord, Workspace


def call(
    workspace: Workspace, *, runs_all_stages: bool = True, error: BaseException | None = None, **keys: str
) -> None:
    """Records a call of a run that reaches stages, given with their keys, and ends, with `error` if it is given."""
    outputs = {stage: workspace.output(stage, key) for stage, key in keys.items()}
    with (
        contextlib.suppress(*([type(error)] if error else [])),
        run_record(workspace, "run", runs_all_stages=runs_all_stages),
    ):
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
def test_the_end_of_a_call_is_recorded(
    workspace: Workspace, error: BaseException | None, outcome: str, reason: str | None
) -> None:
    call(workspace, error=error, index="a")
    ended_call = record(workspace)
    assert (ended_call.outcome, ended_call.reason, ended_call.study, ended_call.kind) == (outcome, reason, None, "run")

    began = datetime.datetime.fromisoformat(ended_call.began)
    ended = datetime.datetime.fromisoformat(ended_call.ended or "")
    assert began <= ended <= datetime.datetime.now(datetime.UTC)


def test_a_study_cannot_have_the_name_of_a_run(workspace: Workspace) -> None:
    call(workspace, index="a")
    with (
        pytest.raises(UserError, match="run is the name of a run"),
        run_record(workspace, "run", runs_all_stages=True, kind="study"),
    ):
        pass


def test_an_output_is_recorded_before_it_is_computed(workspace: Workspace) -> None:
    call(workspace, error=KeyboardInterrupt(), index="a", localize="b")
    assert list(workspace.outputs("run")) == ["index"]
    assert record(workspace).outputs == {"index": ["index-a"], "localize": ["localize-b"]}


def test_a_cache_is_in_use_until_its_stage_or_the_run_ends(workspace: Workspace) -> None:
    with run_record(workspace, "run", runs_all_stages=True):
        reference_cache(workspace, "run", "squash64-a")
        reference_cache(workspace, "run", "squash64-b")
        assert caches_in_use(workspace, except_run="other") == {"squash64-a", "squash64-b"}
        assert caches_in_use(workspace, except_run="run") == set()

        workspace.record_outputs("run", {"train_classifier": workspace.output("train_classifier", "a")})
        assert caches_in_use(workspace, except_run="other") == set()
        reference_cache(workspace, "run", "squash64-a")
    assert record(workspace).caches == ["squash64-a"]
    assert caches_in_use(workspace, except_run="other") == set()


def test_a_failed_call_removes_no_outputs_from_the_record(workspace: Workspace) -> None:
    call(workspace, index="a", localize="b", predict="c")
    call(workspace, error=ValueError(), index="new")
    assert record(workspace).outputs == {
        "index": ["index-a", "index-new"],
        "localize": ["localize-b"],
        "predict": ["predict-c"],
    }
    call(workspace, index="new", localize="b")
    assert record(workspace).outputs == {"index": ["index-new"], "localize": ["localize-b"]}


def test_a_call_until_a_stage_keeps_the_outputs_of_later_stages(workspace: Workspace) -> None:
    call(workspace, index="a", localize="b")
    call(workspace, runs_all_stages=False, index="new")
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
def test_a_damaged_record_raises_a_user_error(workspace: Workspace, content: str) -> None:
    workspace.run("run").record.write_text(content)
    with pytest.raises(UserError, match=r"record\.json is damaged"):
        workspace.record("run")


def test_a_run_stopped_by_another_process_records_the_reason(workspace: Workspace) -> None:
    call(workspace, index="a")
    record_interruption(workspace, "run", "too late")
    assert record(workspace).outcome == "finished"
    with run_record(workspace, "other", runs_all_stages=True):
        record_interruption(workspace, "other", "lagged behind")
        found = workspace.record("other")
        assert found
        assert (found.outcome, found.reason) == ("interrupted", "lagged behind")
    record_interruption(workspace, "absent", "never ran")
    assert not (workspace.runs / "absent").exists()

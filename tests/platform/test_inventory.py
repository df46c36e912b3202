"""`mcis runs`: every folder in runs/ has a row, whatever it contains, and the row says which stage the run reached."""

import json
import os
from dataclasses import asdict
from typing import Any

import pytest
from typer.testing import CliRunner

from mcis.datasets.storage.folders import temporary_path
from mcis.platform.cli import app
from mcis.platform.runs.files import write_json
from mcis.platform.runs.inventory import Entry, entries
from mcis.platform.runs.lifecycle import reference_output, run_record
from mcis.platform.runs.locks import hold_run
from mcis.platform.runs.scores import SCORES, Score
from mcis.platform.runs.workspace import Workspace

runner = CliRunner()


def finished(workspace: Workspace, name: str, evaluate: int = 500, **sizes: int) -> None:
    """Makes a finished run with scores, and with outputs of these stages and sizes in bytes."""
    with run_record(workspace, name, runs_all_stages=True):
        reach(workspace, name, **sizes, evaluate=evaluate)
        score(workspace, name)


def reach(workspace: Workspace, name: str, **sizes: int) -> None:
    outputs = {stage: workspace.output(stage, f"{size:016x}") for stage, size in sizes.items()}
    for stage, size in sizes.items():
        reference_output(workspace, name, stage, outputs[stage])
        outputs[stage].mkdir(exist_ok=True)
        (outputs[stage] / "file").write_bytes(bytes(size))
    workspace.record_outputs(name, outputs)
    workspace.run(name).config.write_text('sources = "voc+web"\nrecipe = "scratch"\n')


def score(workspace: Workspace, name: str) -> None:
    values: list[tuple[str, float, bool | None]] = [
        ("localization_maps", 40.0, None),
        ("localization_maps", 45.5, None),
        ("pseudo_masks", 50.0, None),
        ("baseline", 99.0, None),
        ("segmentation", 51.25, False),
        ("segmentation", float("nan"), True),
    ]
    same: Any = {"name": "any", "split": "val", "images": 6, "iou": {}, "label_scores": {}, "confusion": ()}
    same |= {"seed": 0, "recipe": "scratch", "weights": "none", "git": None}
    scores = [asdict(Score(output=output, miou=miou, crf=crf, **same)) for output, miou, crf in values]
    write_json(workspace.outputs(name)["evaluate"] / SCORES, scores)


def entry(workspace: Workspace, name: str) -> Entry:
    return next(row for row in entries(workspace) if row.name == name)


def shown(workspace: Workspace, *arguments: str) -> Any:
    done = runner.invoke(app, ["runs", "--workspace", str(workspace.root), *arguments], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    return json.loads(done.output) if "--json" in arguments else done.output


def test_a_finished_run_has_its_configuration_scores_and_size(workspace: Workspace) -> None:
    finished(workspace, "first", index=1000, evaluate=500)
    run = entry(workspace, "first")

    assert (run.kind, run.state, run.reached) == ("run", "finished", "evaluate")
    assert (run.sources, run.recipe) == ("voc+web", "scratch")
    assert {name: value for name, value in run.scores.items() if name != "with CRF"} == {
        "maps": 45.5,
        "masks": 50.0,
        "segmentation": 51.25,
    }
    own = sum(path.stat().st_size for path in (workspace.runs / "first").iterdir())
    assert run.bytes == 1500 + own + (workspace.outputs("first")["evaluate"] / SCORES).stat().st_size


def test_the_json_and_the_table_have_the_scores(workspace: Workspace) -> None:
    finished(workspace, "first", index=1000, evaluate=500)
    (row,) = shown(workspace, "--json")
    assert row["scores"] == {"maps": 45.5, "masks": 50.0, "segmentation": 51.25, "with CRF": None}
    assert (row["name"], row["bytes"], row["holder"]) == ("first", entry(workspace, "first").bytes, None)
    line = next(line for line in shown(workspace).splitlines() if "first" in line)
    for text in ("voc+web", "scratch", "finished", "evaluate", "45.50", "50.00", "51.25", "nan"):
        assert text in line


def test_a_run_in_progress_differs_from_one_that_was_killed(workspace: Workspace) -> None:
    with run_record(workspace, "first", runs_all_stages=True):
        reach(workspace, "first", index=10)
        record = workspace.run("first").record.read_text()
        run = entry(workspace, "first")
        assert (run.state, run.reached, run.ended) == ("running", "index", None)
        assert run.holder is not None
        assert run.holder.pid == os.getpid()
        assert shown(workspace, "--json")[0]["holder"]["pid"] == os.getpid()

    workspace.run("first").record.write_text(record)  # as a killed process leaves it
    run = entry(workspace, "first")
    assert (run.state, run.holder) == ("killed", None)


def test_scores_of_an_earlier_call_are_not_shown(workspace: Workspace) -> None:
    finished(workspace, "first", index=10)
    with run_record(workspace, "first", runs_all_stages=True):
        assert entry(workspace, "first").scores == {}


def test_the_reason_of_a_failure_is_shown_without_markup_or_controls(workspace: Workspace) -> None:
    with pytest.raises(ValueError), run_record(workspace, "first", runs_all_stages=True):  # noqa: PT011
        raise ValueError
    record = workspace.run("first").record
    record.write_text(record.read_text().replace("ValueError", "photos[/x]\\u001b[2J"))
    assert ": photos[/x]?[2J" in shown(workspace)


def test_trials_follow_their_study_and_share_outputs(workspace: Workspace) -> None:
    finished(workspace, "table", index=5000)
    for name in ("table7-r0", "table7-r1"):
        with run_record(workspace, name, runs_all_stages=True, study="table7"):
            reach(workspace, name, index=5000)
    with run_record(workspace, "table7", runs_all_stages=True, kind="study"):
        assert entry(workspace, "table7").state == "running"

    rows = entries(workspace)
    assert [row.name for row in rows] == ["table", "table7", "table7-r0", "table7-r1"]
    assert rows[1].trials == 2
    assert 5000 < rows[1].bytes < 10000, "the index that they share counts once"
    output = shown(workspace)
    assert "2 trials" in output
    assert any(line.startswith("  table7-r0 ") for line in output.splitlines())


DAMAGED = {
    "record.json": ["", "[]", '{"began": "x"}', '{"began": "2026-01-01", "outputs": 3}'],
    "scores.json": ["{", "{}", "[3]", '[{"output": []}]'],
    "config.toml": ["[", "sources = ["],
}


@pytest.mark.parametrize(("file", "content"), [(file, text) for file, texts in DAMAGED.items() for text in texts])
def test_a_damaged_run_has_a_row_with_the_damaged_file(workspace: Workspace, file: str, content: str) -> None:
    finished(workspace, "good", evaluate=20, index=10)
    finished(workspace, "first", index=10)
    folder = workspace.outputs("first")["evaluate"] if file == SCORES else workspace.runs / "first"
    (folder / file).write_text(content)
    run = entry(workspace, "first")
    assert run.state == "damaged"
    assert file in (run.problem or "")
    assert entry(workspace, "good").state == "finished"
    assert file in shown(workspace)


def test_foreign_folders_and_files_have_rows(workspace: Workspace) -> None:
    for name in ("notes", "a b", ".hidden", "x\x1b[2J", "[red]"):
        (workspace.runs / name).mkdir()
    (workspace.runs / "file").touch()
    (workspace.runs / "link").symlink_to(workspace.root / "nowhere")
    (workspace.runs / "loop").symlink_to(workspace.runs / "loop")
    temporary_path(workspace.runs / "removed").mkdir()

    rows = {row.name: row.state for row in entries(workspace)}
    assert set(rows) == {"notes", "a b", ".hidden", "x\x1b[2J", "[red]", "file", "link", "loop"}
    assert set(rows.values()) <= {"foreign", "damaged"}
    output = shown(workspace)
    assert "not written by mcis" in output
    assert "\x1b[2J" not in output
    assert "[red]" in output


def test_listing_changes_nothing(workspace: Workspace) -> None:
    finished(workspace, "first", index=10)
    with hold_run(workspace, "second"):
        before = {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*")}
        shown(workspace)
        assert {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*")} == before

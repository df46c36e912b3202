"""The commands of `mcis study`: errors that they share with `mcis run`, and output for programs."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mcis.platform.cli import app
from mcis.platform.config.resolve import resolve
from mcis.platform.runs.progress import console
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.search import search_csv, search_json
from mcis.tuning.search_space import Search, parse_axes
from mcis.tuning.search_trials import EndedTrial, SearchResult
from mcis.tuning.studies import StudyResult

AXIS = "localize.related=integer(0,3)"


def error_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1, result.output
    return result.stderr


@pytest.mark.parametrize("command", [["study", "run", "table5"], ["study", "search", "--axis", AXIS]])
def test_a_missing_source_is_the_same_error_as_in_run(command: list[str]) -> None:
    assert error_of(*command, "--name", "x") == error_of("run", "--name", "x")


@pytest.mark.parametrize("command", [["study", "run", "table5"], ["study", "search", "--axis", AXIS]])
def test_two_formats_at_once_are_refused(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "stderr", False)
    assert "--json and --csv" in error_of(*command, "--name", "x", "--json", "--csv")


def test_a_table_names_all_sources_whose_images_are_missing(tmp_path: Path) -> None:
    words = ["study", "run", "table1", "voc", "--voc", str(tmp_path), "--name", "x", "--workspace", str(tmp_path / "w")]
    message = error_of(*words)
    assert "no images of single and web are given" in message
    assert "voc+single+web and --single PATH, --web PATH" in message
    assert "--case a-vgg --case a-resnet" in message
    assert "one of a-vgg" in error_of(*words, "--case", "d-vgg")
    assert not (tmp_path / "w" / "runs" / "x").exists()


def ended_trial(number: int, **fields: Any) -> EndedTrial:
    values: dict[str, Any] = {
        "values": {"localize.related": number},
        "state": "done",
        "objective": None,
        "val_map": None,
        "epoch": None,
        "minutes": 1.5,
        "cause": None,
    }
    return EndedTrial(number=number, **(values | fields))


@pytest.fixture
def search(tmp_path: Path) -> Search:
    axes = parse_axes([AXIS])
    return Search(name="s", resolved=resolve("voc", "scratch"), workspace=Workspace(tmp_path), axes=axes)


RESULT = SearchResult(
    trials=[ended_trial(0, objective=51.5, val_map=80.0), ended_trial(1, state="failed", cause="no memory")],
    best=ended_trial(0, objective=51.5, val_map=80.0),
    default=None,
)


def test_a_search_as_csv_has_a_row_per_trial(search: Search) -> None:
    rows = list(csv.DictReader(io.StringIO(search_csv(search, RESULT))))
    assert [row["trial"] for row in rows] == ["s-t000", "s-t001"]
    assert (rows[0]["objective"], rows[0]["val_map"], rows[0]["localize.related"]) == ("51.5", "80.0", "0")
    assert (rows[1]["state"], rows[1]["objective"], rows[1]["cause"]) == ("failed", "", "no memory")


def test_a_search_as_json_has_its_axes_trials_and_best_trial(search: Search) -> None:
    content = json.loads(json.dumps(search_json(search, RESULT)))
    assert list(content["axes"]) == ["localize.related"]
    assert [trial["number"] for trial in content["tried"]] == [0, 1]
    assert content["best"] == content["tried"][0]
    assert content["default"] is None


CASE: dict[str, Any] = {"name": "a", "group": "", "sources": "tags", "values": {}, "until": "localize", "paper": None}
CASE |= {"recipe": "photos", "method": "", "data_set": ""}
CASE |= {"paper_test": None, "baseline": None, "description": "", "inference": "single round", "related": 0}
RESULT_FILE: dict[str, Any] = {
    "study": "mine.toml",
    "sources": "tags",
    "recipe": "photos",
    "changed": {},
    "meanings": {},
    "paper_column": None,
    "cases": [{"case": CASE, "seeds": [0, 1], "miou": {"localization maps": [50.0, 52.0]}, "shares": {}}],
    "differences": [],
    "test_archives": [],
}


@pytest.fixture
def finished_study(tmp_path: Path) -> Path:
    """The workspace of a study `mine` with one case."""
    folder = Workspace(tmp_path / "w").run("mine")
    folder.study.write_text(json.dumps(RESULT_FILE))
    return tmp_path / "w"


@pytest.mark.parametrize(
    ("form", "found"),
    [("markdown", "| a | 51.00 ± 1.41 |"), ("latex", r"a & 51.00 $\pm$ 1.41 &"), ("csv", "a,2,single round,51.0,")],
)
def test_the_table_of_a_study_is_printed(finished_study: Path, form: str, found: str) -> None:
    result = CliRunner().invoke(app, ["study", "table", "mine", "--format", form, "--workspace", str(finished_study)])
    assert result.exit_code == 0, result.output
    assert found in result.stdout
    assert StudyResult.read(Workspace(finished_study).run("mine")).as_json() == RESULT_FILE


@pytest.mark.parametrize(
    ("change", "found"), [({"study": "search"}, "is a search"), ({"cases": [{"case": {}}]}, "of another version")]
)
def test_the_table_of_something_else_is_refused(finished_study: Path, change: dict[str, Any], found: str) -> None:
    file = Workspace(finished_study).run("mine").study
    file.write_text(json.dumps(RESULT_FILE | change))
    assert found in error_of("study", "table", "mine", "--workspace", str(finished_study))
    file.unlink()
    assert "has no study.json" in error_of("study", "table", "mine", "--workspace", str(finished_study))

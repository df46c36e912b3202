"""What can be compared: runs by name or path, seeds of one configuration; and what ends in a clear error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.reporting.compared_runs import differing_keys, open_run_groups
from mcis.platform.runs.scores import SCORES
from mcis.platform.runs.workspace import Workspace


@pytest.fixture(scope="module")
def root(scored: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of runs over seeds 0 to 2, and another one beside it that has a run of the same name."""
    folder = tmp_path_factory.mktemp("compared")
    root, data = folder / "workspace", folder / "data"
    for seed in range(3):
        scored(root, f"a-s{seed}", f"seed={seed}", data=data)
    scored(root, "b", "segmenter.min_steps=7", "compute.threads=2", data=data)
    scored(folder / "other", "b", "segmenter.min_steps=9", data=data)
    return root


def test_a_run_is_its_name_or_its_folder(root: Path) -> None:
    first, second = open_run_groups(root, ["a-s0", str(root / "runs" / "a-s1")])
    assert (first.label, second.label) == ("a-s0", "a-s1")
    assert list(first.runs[0].scores) == ["pseudo masks", "segmentation", "segmentation + CRF"]


def test_runs_of_one_name_are_called_by_their_workspace(root: Path) -> None:
    other = root.parent / "other"
    cases = open_run_groups(root, ["b", str(other / "runs" / "b")])
    assert [case.label for case in cases] == [f"b in {root}", f"b in {other}"]


def test_keys_that_differ_are_told_with_their_values(root: Path) -> None:
    cases = open_run_groups(root, ["a-s0", "b", "a-s1"])
    rows = differing_keys(cases)
    assert rows.keys() == {"seed", "segmenter.min_steps", "compute.threads"}
    assert rows["seed"] == ["0", "0", "1"]
    assert rows["segmenter.min_steps"][1] == "7"
    assert rows["segmenter.min_steps"][0] == rows["segmenter.min_steps"][2]
    assert rows["compute.threads"][1] == "2"
    assert differing_keys(cases[:1]) == {}


def test_seeds_of_one_configuration_are_one_case(root: Path) -> None:
    case, single = open_run_groups(root, ["a-s2, a-s0,a-s1", "b"])
    assert case.label == "a-s{0,1,2}"
    assert [run.name for run in case.runs] == ["a-s0", "a-s1", "a-s2"]
    assert case.seeds == ["0", "1", "2"]
    assert single.label == "b"
    assert differing_keys([case, single])["seed"] == ["0, 1, 2", "0"]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["a-s0"], "1 run to compare"),
        (["a-s0", "absent"], "no run 'absent' in "),
        (["a-s0", ""], "run name ''"),
        (["a-s0", "a-s1,"], "run name ''"),
        (["a-s0", "./absent"], "./absent is not the folder of a run"),
        (["a-s0", "a-s1", "a-s0"], "run 'a-s0' is given twice"),
        (["a-s0,a-s1", "a-s1,b"], "run 'a-s1' is given twice"),
        (["a-s0", "a-s1,b"], "a-s1, b differ in segmenter.min_steps"),
    ],
)
def test_what_is_no_choice_of_runs_is_refused(root: Path, arguments: list[str], found: str) -> None:
    with pytest.raises(UserError) as caught:
        open_run_groups(root, arguments)
    assert caught.value.found.startswith(found)


def test_an_absent_workspace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a workspace"):
        open_run_groups(tmp_path / "none", ["a", "b"])
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "y").mkdir()
    with pytest.raises(UserError, match=r"run 'x' has no scores in .*; it has reached no stage"):
        open_run_groups(tmp_path, ["x", "y"])


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Workspace:
    """A copy of the workspace, to change."""
    shutil.copytree(root, tmp_path / "workspace")
    return Workspace(tmp_path / "workspace")


def test_unfinished_runs_and_studies_are_refused(copied: Workspace) -> None:
    copied.record_outputs("b", {stage: f for stage, f in copied.outputs("b").items() if stage != "evaluate"})
    with pytest.raises(UserError, match=r"run 'b' has no scores in .*; it has reached predict"):
        open_run_groups(copied.root, ["a-s0", "b"])
    copied.run("study").study.write_text("{}")
    with pytest.raises(UserError, match="'study' is a study") as caught:
        open_run_groups(copied.root, ["a-s0", "study"])
    assert caught.value.remedy == "compare its trials, whose names begin with study-"


def test_other_classes_and_runs_of_one_seed_are_refused(copied: Workspace) -> None:
    file = copied.output("evaluate", "b") / SCORES
    file.write_text(file.read_text().replace('"cat"', '"lynx"'))
    with pytest.raises(UserError, match="run 'a-s0' has the classes cat, dog, run 'b' lynx, dog"):
        open_run_groups(copied.root, ["a-s0", "b"])
    index = copied.output("index", "a-s1") / "summary.json"
    before = index.read_text()
    index.write_text(before.replace('"val"', '"other"'))
    with pytest.raises(UserError, match="a-s0, a-s1 have different images or tags"):
        open_run_groups(copied.root, ["a-s2", "a-s0,a-s1"])
    index.write_text(before)
    config = copied.run("a-s1").config
    config.write_text(config.read_text().replace("seed = 1 ", "seed = 0 "))
    with pytest.raises(UserError, match="two runs of a group have the same seed: 'a-s0' has seed 0, 'a-s1' has seed 0"):
        open_run_groups(copied.root, ["a-s2", "a-s0,a-s1"])


def test_damaged_files_are_named(copied: Workspace) -> None:
    copied.run("b").config.write_text("= no TOML")
    with pytest.raises(UserError, match=r"config\.toml is not TOML"):
        open_run_groups(copied.root, ["a-s0", "b"])
    file = copied.output("evaluate", "a-s1") / SCORES
    file.write_text(json.dumps([{"what": "?"}]))
    with pytest.raises(UserError, match=r"scores\.json is damaged"):
        open_run_groups(copied.root, ["a-s0", "a-s1"])

"""Runs to compare: given by name or path, grouped as seeds of one configuration; and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.pipeline import STAGES
from mcis.platform.reporting.compared_runs import STAGES_OF_SECTION, differing_keys, differing_settings, open_run_groups
from mcis.platform.runs.scores import SCORES
from mcis.platform.runs.workspace import Workspace


@pytest.fixture(scope="module")
def root(scored: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with runs of seeds 0 to 2, and another workspace next to it with a run of the same name."""
    folder = tmp_path_factory.mktemp("compared")
    root = folder / "workspace"
    data = folder / "data"
    for seed in range(3):
        scored(root, f"a-s{seed}", f"seed={seed}", data=data)
    scored(root, "b", "segmenter.min_steps=7", "compute.threads=2", data=data)
    scored(folder / "other", "b", "segmenter.min_steps=9", data=data)
    return root


def test_a_run_is_given_by_its_name_or_its_folder(root: Path) -> None:
    first, second = open_run_groups(root, ["a-s0", str(root / "runs" / "a-s1")])
    assert (first.label, second.label) == ("a-s0", "a-s1")
    assert list(first.runs[0].scores) == ["pseudo masks", "segmentation", "segmentation + CRF"]


def test_runs_with_the_same_name_are_labeled_with_their_workspace(root: Path) -> None:
    other = root.parent / "other"
    groups = open_run_groups(root, ["b", str(other / "runs" / "b")])
    assert [group.label for group in groups] == [f"b in {root}", f"b in {other}"]


def test_differing_keys_have_their_values(root: Path) -> None:
    groups = open_run_groups(root, ["a-s0", "b", "a-s1"])
    rows = differing_keys(groups)
    assert rows.keys() == {"seed", "segmenter.min_steps", "compute.threads"}
    assert rows["seed"] == ["0", "0", "1"]
    assert rows["segmenter.min_steps"][1] == "7"
    assert rows["segmenter.min_steps"][0] == rows["segmenter.min_steps"][2]
    assert rows["compute.threads"][1] == "2"
    assert differing_keys(groups[:1]) == {}


def test_settings_without_effect_on_the_outputs_of_a_run_are_left_out(
    root: Path, scored: Callable[..., Path], tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path / "workspace")
    settings = ["pseudo_masks.threshold=0.7", "predict.crf.iterations=3", "segmenter.min_steps=9"]
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        changed = settings if name == "y" else []
        scored(workspace.root, name, f"predict.masks={tmp_path / name}", *changed, data=tmp_path / "data")
        only_imported = {stage: folder for stage, folder in workspace.outputs(name).items() if stage != "pseudo_masks"}
        workspace.record_outputs(name, only_imported)
    scored(workspace.root, "z", *settings, data=tmp_path / "data", recipe="paper")

    imported = open_run_groups(workspace.root, ["x", "y"])
    assert differing_settings(imported) == {"predict.masks": [str(tmp_path / "x"), str(tmp_path / "y")]}
    first_run = str(root / "runs" / "a-s0")
    rows = differing_settings(open_run_groups(workspace.root, ["x", "z", first_run]))
    assert rows["predict.masks"] == [str(tmp_path / "x"), "-", "-"]
    assert rows["recipe"] == ["-", "paper", "scratch"]
    assert rows["segmenter.min_steps"][:2] == ["-", "9"]


@pytest.mark.parametrize("section", STAGES_OF_SECTION)
def test_sections_belong_to_stages_that_depend_on_them(section: str) -> None:
    """Or to stages whose outputs `evaluate` scores with them."""
    dependent_stages = {stage.name for stage in STAGES if section in stage.sections}
    assert "evaluate" in dependent_stages or dependent_stages.issuperset(STAGES_OF_SECTION[section])


def test_seeds_of_one_configuration_are_one_group(root: Path) -> None:
    group, single = open_run_groups(root, ["a-s2, a-s0,a-s1", "b"])
    assert group.label == "a-s{0,1,2}"
    assert [run.name for run in group.runs] == ["a-s0", "a-s1", "a-s2"]
    assert group.seeds("segmentation") == ["0", "1", "2"]
    assert single.label == "b"
    assert differing_keys([group, single])["seed"] == ["0, 1, 2", "0"]


def test_trainings_of_another_program_are_one_group(scored: Callable[..., Path], tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    data = tmp_path / "data"
    for seed in range(2):
        theirs = tmp_path / f"theirs{seed}"
        theirs.mkdir()
        scored(workspace, f"t-s{seed}", f"seed={seed}", f"predict.masks={theirs}", data=data)
    scored(workspace, "a-s0", data=data)
    group, _ = open_run_groups(workspace, ["t-s0,t-s1", "a-s0"])
    assert group.label == "t-s{0,1}"
    with pytest.raises(UserError, match=r"a-s0, t-s1 differ in predict\.masks"):
        open_run_groups(workspace, ["a-s0,t-s1", "t-s0"])


def test_maps_of_different_formats_are_no_group(scored: Callable[..., Path], tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    for seed, map_format in enumerate(("irn", "psa")):
        overrides = (f"seed={seed}", f"localize.maps_format={map_format}")
        scored(workspace, f"m-s{seed}", *overrides, data=tmp_path / "data")
    with pytest.raises(UserError, match=r"m-s0, m-s1 differ in localize\.maps_format"):
        open_run_groups(workspace, ["m-s0,m-s1"], min_groups=1)


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
def test_invalid_choices_of_runs_are_refused(root: Path, arguments: list[str], found: str) -> None:
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


def test_runs_with_other_classes_are_refused(copied: Workspace) -> None:
    file = copied.output("evaluate", "b") / SCORES
    file.write_text(file.read_text().replace('"cat"', '"lynx"'))
    with pytest.raises(UserError, match="run 'a-s0' has the classes cat, dog, run 'b' lynx, dog"):
        open_run_groups(copied.root, ["a-s0", "b"])


def test_seeds_with_other_images_are_refused(copied: Workspace) -> None:
    index = copied.output("index", "a-s1") / "summary.json"
    index.write_text(index.read_text().replace('"val, ', '"other, '))
    with pytest.raises(UserError, match="a-s0, a-s1 have different images or tags"):
        open_run_groups(copied.root, ["a-s2", "a-s0,a-s1"])


def test_two_runs_with_the_same_seed_are_refused(copied: Workspace) -> None:
    config = copied.run("a-s1").config
    config.write_text(config.read_text().replace("seed = 1 ", "seed = 0 "))
    with pytest.raises(UserError, match="two runs of a group have the same seed: 'a-s0' has seed 0, 'a-s1' has seed 0"):
        open_run_groups(copied.root, ["a-s2", "a-s0,a-s1"])


def test_damaged_files_are_named(copied: Workspace) -> None:
    copied.run("b").config.write_text("= no TOML")
    with pytest.raises(UserError, match=r"config\.toml is not TOML"):
        open_run_groups(copied.root, ["a-s0", "b"])
    file = copied.output("evaluate", "a-s1") / SCORES
    file.write_text(json.dumps([{"output": "?"}]))
    with pytest.raises(UserError, match=r"scores\.json is damaged"):
        open_run_groups(copied.root, ["a-s0", "a-s1"])

"""A run that an earlier version wrote, with its names of keys: commands read it, or say what to do."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.platform.cli import app
from mcis.platform.config.renamed import RENAMED_KEYS, current_values
from mcis.platform.networks.trained_segmenter import open_trained_segmenter
from mcis.platform.runs.garbage import plan_removal
from mcis.platform.runs.inventory import entries
from mcis.platform.runs.scores import read_scores
from mcis.platform.runs.workspace import RunFolder, Workspace


@pytest.fixture(scope="module")
def earlier(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with the run `new` as this version writes it and the same run as `old` with the earlier names."""
    workspace = Workspace(tmp_path_factory.mktemp("earlier"))
    first: RunFolder = small.first.context.folder
    for name in ("new", "old"):
        shutil.copytree(first.path, workspace.run(name).path, dirs_exist_ok=True)
    for output in small.workspace.record("first").used_outputs:
        shutil.copytree(small.workspace.store / output, workspace.store / output)

    outputs = workspace.outputs("old")
    evaluated = outputs["evaluate"].with_name("evaluate-0123456789abcdef")
    shutil.copytree(outputs["evaluate"], evaluated)
    workspace.update_record("old", outputs={stage: [path.name] for stage, path in outputs.items()})
    record = workspace.run("old").record
    record.write_text(record.read_text().replace(outputs["evaluate"].name, evaluated.name))

    for file in (evaluated / "scores.json", workspace.run("old").scores):
        replace(file, '"hflip"', '"mirror"')
    config = workspace.run("old").config
    replace(config, "\nsources = ", "\nsetting = ")
    replace(config, "\nhflip = ", "\nflip = ", count=1)  # of the section `classifier`, the first one with that key
    replace(config, "\nhflip = ", "\nmirror = ")
    replace(config, "\nscore_floor = ", "\nfloor = ")
    return workspace


def replace(file: Path, text: str, earlier_text: str, count: int = -1) -> None:
    content = file.read_text(encoding="utf-8")
    assert text in content
    file.write_text(content.replace(text, earlier_text, count), encoding="utf-8")


def command(workspace: Workspace, *words: str) -> Any:
    return CliRunner().invoke(app, [*words, "--workspace", str(workspace.root)])


def test_scores_of_an_earlier_version_are_read_with_their_current_names(earlier: Workspace) -> None:
    scores = read_scores(earlier.outputs("old"))
    assert scores == read_scores(earlier.outputs("new"))
    assert {score.hflip for score in scores if score.what == "segmentation"} == {True}


def test_runs_lists_a_run_of_an_earlier_version_like_a_new_one(earlier: Workspace) -> None:
    new, old = entries(earlier)
    assert old.state == "finished"
    assert (old.sources, old.recipe) == ("voc", "scratch")
    assert old.scores == new.scores
    assert command(earlier, "runs").exit_code == 0


def test_compare_reads_a_run_of_an_earlier_version(earlier: Workspace) -> None:
    """The same configuration under its earlier names does not differ."""
    result = command(earlier, "compare", "new", "old")
    assert result.exit_code == 0, result.output
    assert "Settings that differ" not in result.output


def test_predict_refuses_a_run_of_an_earlier_version_and_says_what_to_write(earlier: Workspace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="written by an earlier version of mcis") as caught:
        open_trained_segmenter(earlier.run("old").path)
    assert "sources = 'voc'" in caught.value.remedy
    assert "mcis run --config" in caught.value.remedy

    result = command(earlier, "predict", "photo.jpg", "--name", "old", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "expected:" in result.output
    assert "Traceback" not in result.output


def test_gc_keeps_the_outputs_of_a_run_of_an_earlier_version(earlier: Workspace) -> None:
    used = {path.name for path in earlier.outputs("old").values()}
    removed = {item.path.name for item in plan_removal(earlier).garbage}
    assert used.isdisjoint(removed)
    assert command(earlier, "gc").exit_code == 0


def test_a_damaged_file_of_scores_gives_an_error_with_a_remedy(earlier: Workspace, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text('[{"measured": 1}]')
    with pytest.raises(UserError, match=r"scores\.json is damaged") as caught:
        read_scores({"evaluate": tmp_path})
    assert "--from evaluate" in caught.value.remedy


def test_current_values_renames_keys_and_values_and_keeps_the_others() -> None:
    values = {"setting": "voc", "classifier.trained": "neck", "seed": 3}
    assert current_values(values) == {"sources": "voc", "classifier.trainable_stages": 0, "seed": 3}
    unchanged = dict.fromkeys(RENAMED_KEYS.values(), 1)
    assert current_values(unchanged) == unchanged

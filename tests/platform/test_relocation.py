"""Runs whose files were moved, and tables that spell or order the same data otherwise: nothing is computed again."""

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.platform import api, pipeline
from mcis.platform.cli import app
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.outputs.read_index import open_index
from mcis.platform.runs.results import IndexResult
from mcis.platform.runs.workspace import Workspace


def computed(result: pipeline.RunResult) -> list[str]:
    """Stages that a call of a run computed."""
    return [stage for stage, is_computed in result.context.computed.items() if is_computed]


class Moved:
    """A run `mine` on a devkit that was then moved from `old` to `new`.

    Attributes:
        old, new: Folders of the devkit before and after.
        workspace: Of the run.
        first: The run before the move.
    """

    def __init__(self, small: Any, folder: Path) -> None:
        self.old = small.draw(folder / "old").parent
        self.new = folder / "new"
        self.workspace = Workspace(folder / "workspace")
        resolved = small.settings(root=self.old / "VOC2012")
        self.first = pipeline.run(resolved, self.workspace, "mine", until="pseudo_masks")
        shutil.move(self.old, self.new)

    def relocate(self) -> pipeline.RunResult:
        """Relocates the run from `old` to `new`."""
        return api.relocate("mine", self.old, self.new, workspace=self.workspace.root)


@pytest.fixture
def moved(small: Any, tmp_path: Path) -> Moved:
    return Moved(small, tmp_path)


def test_a_run_on_moved_photographs_is_relocated(moved: Moved, small: Any) -> None:
    before = moved.first.context
    after = moved.relocate().context

    assert after.result("index", IndexResult).counts["opened"] == 0
    stages = ("train_classifier", "localize", "pseudo_masks", "evaluate")
    assert [after.stage_outputs[stage] for stage in stages] == [before.stage_outputs[stage] for stage in stages]
    uris = open_index(moved.workspace, "mine").index["uri"].to_pylist()
    assert len(uris) == 30
    assert all(os.path.isfile(uri) and uri.startswith(str(moved.new)) for uri in uris)

    again = pipeline.run(small.settings(root=moved.new / "VOC2012"), moved.workspace, "mine", until="pseudo_masks")
    assert computed(again) == ["report"]


def test_the_export_of_moved_photographs_names_the_command(moved: Moved, tmp_path: Path) -> None:
    options = ["--name", "mine", "--workspace", str(moved.workspace.root)]
    export = ["export", "masks", *options, "--out", str(tmp_path / "voc")]
    failed = CliRunner().invoke(app, export, env={"COLUMNS": "300"})
    assert failed.exit_code == 1
    assert "mcis relocate --name RUN OLD NEW" in failed.output

    relocated = CliRunner().invoke(app, ["relocate", str(moved.old), str(moved.new), *options])
    assert relocated.exit_code == 0, relocated.output
    assert CliRunner().invoke(app, export).exit_code == 0


def test_other_photographs_are_refused(moved: Moved) -> None:
    photographs = sorted((moved.new / "VOC2012" / "JPEGImages").iterdir())
    content = photographs[3].read_bytes()
    photographs[3].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=f"1 of 30 files are other than those of the run: .*{photographs[3].name}"):
        moved.relocate()

    photographs[3].write_bytes(content + b"0")
    with pytest.raises(UserError, match="1 of 30 files are other"):
        moved.relocate()


def test_a_photograph_that_may_not_be_read_is_named(moved: Moved, monkeypatch: pytest.MonkeyPatch) -> None:
    photograph = min((moved.new / "VOC2012" / "JPEGImages").iterdir())
    open_file = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == str(photograph):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=rf"access to .*{photograph.name} is refused: Permission denied"):
        moved.relocate()


def test_a_folder_instead_of_a_photograph_is_refused(moved: Moved) -> None:
    photograph = min((moved.new / "VOC2012" / "JPEGImages").iterdir())
    photograph.unlink()
    photograph.mkdir()
    with pytest.raises(UserError, match=f"1 of 30 files are other than those of the run: .*{photograph.name}"):
        moved.relocate()


def test_a_photograph_that_was_left_behind_is_named(ray_local: None, moved: Moved, tmp_path: Path) -> None:
    """Of a table, whose images are not looked for when it is listed."""
    folder = moved.new / "VOC2012" / "JPEGImages"
    names = sorted(path.name for path in folder.iterdir())
    (folder / "photos.csv").write_text("image,tags\n" + "".join(f"{name},cat\n" for name in names))
    api.run(folder / "photos.csv", name="table", workspace=moved.workspace.root, until="index")
    shutil.copytree(folder, tmp_path / "copied")
    (tmp_path / "copied" / names[3]).unlink()
    with pytest.raises(UserError, match=f"1 of 30 files are missing: .*{names[3]}"):
        api.relocate("table", folder, tmp_path / "copied", workspace=moved.workspace.root)


def test_a_place_that_the_run_does_not_read_is_an_error(moved: Moved) -> None:
    with pytest.raises(UserError, match="the run reads nothing below /elsewhere") as caught:
        api.relocate("mine", "/elsewhere", moved.new, workspace=moved.workspace.root)
    assert str(moved.old) in caught.value.expected


def test_a_run_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    Workspace(tmp_path)
    with pytest.raises(UserError, match="no run 'absent' with an index"):
        api.relocate("absent", tmp_path, tmp_path, workspace=tmp_path)


def test_a_moved_workspace_continues(small: Any, tmp_path: Path) -> None:
    root = small.draw(tmp_path / "data")
    resolved = small.settings(root=root)
    before = pipeline.run(resolved, Workspace(tmp_path / "workspace"), "mine", until="pseudo_masks")
    shutil.move(tmp_path / "workspace", tmp_path / "elsewhere")

    after = pipeline.run(resolved, Workspace(tmp_path / "elsewhere"), "mine", until="pseudo_masks")

    assert computed(after) == ["report"]
    assert [score.miou for score in after.scores] == [score.miou for score in before.scores]


def test_the_order_and_spelling_of_rows_change_nothing(small: Any, tmp_path: Path) -> None:
    root = small.draw(tmp_path)
    names = sorted(path.name for path in (root / "JPEGImages").iterdir())
    workspace = Workspace(tmp_path / "workspace")

    def settings(rows: list[str]) -> Resolved:
        table = root / "photos.csv"
        table.write_text("\n".join(["image,tags", *rows]))
        options = {"data.tags.table": str(table)}
        return resolve("tags", "scratch", options, {"data.tags.allow_absolute": True})

    rows = [f"JPEGImages/{name},{'cat' if number % 2 else 'dog'}" for number, name in enumerate(names)]
    first = pipeline.run(settings(rows), workspace, "first", until="index")
    others = [f"{root}/{row}" for row in rows]
    random.Random(0).shuffle(others)
    second = pipeline.run(settings(others), workspace, "second", until="index")

    assert second.context.stage_outputs["index"] == first.context.stage_outputs["index"]
    assert open_index(workspace, "second").index["image_id"].to_pylist() == [f"JPEGImages/{name}" for name in names]

"""`mcis gc` shows what no run uses, removes it with --delete, and removes nothing else."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.filesize import decimal
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import TEMPORARY_NAME, remove, temporary_path
from mcis.platform.cli import app
from mcis.platform.config.resolve import resolve
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import bytes_in, write_json
from mcis.platform.runs.garbage import plan_removal
from mcis.platform.runs.inventory import entries
from mcis.platform.runs.lifecycle import run_record
from mcis.platform.runs.locks import hold_run
from mcis.platform.runs.results import StageResult, find_missing_files
from mcis.platform.runs.stage import Stage, run_stage
from mcis.platform.runs.workspace import Workspace

runner = CliRunner()
CONFIG = resolve("voc", "scratch").config
SCORE = {"miou": 50.0, "crf": None}


class Toy:
    """A stage that writes a value to a file, without computing anything."""

    def __init__(self, value: str, error: BaseException | None = None):
        self.value = value
        self.error = error

    def check(self, *_: Any) -> None:
        """Reports no problem."""

    __name__ = "toy"

    def inputs(self, *_: Any) -> str:
        return self.value

    def run(self, _: Any, context: RunContext) -> StageResult:
        (context.output / "output").write_text(self.value * 1000)
        (context.workspace.cache / f"squash64-{self.value * 16}").mkdir(exist_ok=True)
        context.caches.append(f"squash64-{self.value * 16}")
        if self.error:
            raise self.error
        return StageResult()


def run(
    workspace: Workspace, name: str, *values: str, error: BaseException | None = None, study: str = ""
) -> list[str]:
    """Runs up to two stages, one for each value; returns the names of those that were computed."""
    names = ("index", "localize")[: len(values)]
    with run_record(workspace, name, runs_all_stages=True, study=study):
        context = RunContext(workspace=workspace, name=name, output=Path(), tracker=None, origins={})  # type: ignore[arg-type]
        write_config(workspace, name)
        for stage, value in zip(names, values, strict=True):
            toy = Toy(value, error if stage == names[-1] else None)
            context = run_stage(Stage(name=stage, module=toy), CONFIG, context)
        write_json(workspace.run(name).scores, {"scores": [{"output": "pseudo_masks", **SCORE}]})
    return [stage for stage, computed in context.computed.items() if computed]


def write_config(workspace: Workspace, name: str) -> None:
    workspace.run(name).config.write_text('sources = "voc"\nrecipe = "scratch"\n')


def gc(workspace: Workspace, *arguments: str) -> Any:
    return runner.invoke(app, ["gc", "--workspace", str(workspace.root), *arguments], env={"COLUMNS": "300"})


def files(workspace: Workspace) -> dict[str, int]:
    """The inode of every file by relative path, without locks, because holders write to them."""
    paths = [path for path in workspace.root.rglob("*") if path.suffix != ".lock"]
    return {str(path.relative_to(workspace.root)): path.lstat().st_ino for path in paths}


def folders(path: Path) -> list[str]:
    return sorted(inside.name for inside in path.iterdir() if inside.suffix != ".lock")


def planned(workspace: Workspace, *names: str) -> list[str]:
    return [str(item.path.relative_to(workspace.root)) for item in plan_removal(workspace, names).garbage]


def outputs(workspace: Workspace, name: str) -> list[str]:
    return [str(path.relative_to(workspace.root)) for path in workspace.outputs(name).values()]


@pytest.fixture
def unused(workspace: Workspace) -> str:
    """An output that no run uses any more. Run `second` uses the output of `index` that the removed run used too."""
    run(workspace, "first", "a", "b")
    run(workspace, "second", "a", "c")
    _, localize = outputs(workspace, "first")
    assert planned(workspace) == []
    remove(workspace.runs / "first")
    return localize


def test_gc_without_delete_shows_unused_outputs_and_changes_nothing(workspace: Workspace, unused: str) -> None:
    index, _ = outputs(workspace, "second")
    before = files(workspace)
    shown = gc(workspace)
    assert shown.exit_code == 0, shown.output
    assert files(workspace) == before
    assert unused in shown.output
    assert index not in shown.output
    assert "repeat the command with --delete" in shown.output
    assert planned(workspace) == [unused, f"cache/squash64-{'b' * 16}"]
    assert decimal(bytes_in(workspace.root / unused)) in shown.output


def test_gc_with_delete_removes_only_unused_outputs(workspace: Workspace, unused: str) -> None:
    before = files(workspace)
    done = gc(workspace, "--delete")
    assert done.exit_code == 0, done.output
    after = files(workspace)
    assert after == {path: before[path] for path in after}, "files that stay are not rewritten"
    gone = set(before) - set(after)
    assert {path.split("/")[1] for path in gone} == {Path(unused).name, f"squash64-{'b' * 16}"}
    assert run(workspace, "second", "a", "c") == []
    assert "nothing to remove" in gc(workspace, "--delete").output


def test_named_runs_are_removed_without_the_outputs_that_others_share(workspace: Workspace) -> None:
    run(workspace, "first", "a", "b")
    run(workspace, "second", "a", "c")
    own = outputs(workspace, "first")[1]
    assert planned(workspace, "first") == ["runs/first", own, f"cache/squash64-{'b' * 16}"]
    shown = gc(workspace, "--run", "first")
    assert "repeat the command with --delete" in shown.output

    (workspace.root / "mlflow.db").write_text("untouched")
    assert gc(workspace, "--run", "first", "--run", "second", "--delete").exit_code == 0
    assert folders(workspace.runs) == folders(workspace.store) == folders(workspace.cache) == []
    assert (workspace.root / "mlflow.db").read_text() == "untouched"


def test_a_study_is_removed_with_its_trials_and_not_with_runs_of_similar_names(workspace: Workspace) -> None:
    for name in ("table7-r0", "table7-r1"):
        run(workspace, name, "a", name[-1], study="table7")
    run(workspace, "table7-mine", "a", "c")
    with run_record(workspace, "table7", runs_all_stages=True, kind="study"):
        pass

    listed = {entry.name: entry for entry in entries(workspace)}
    assert list(listed) == ["table7", "table7-r0", "table7-r1", "table7-mine"]
    assert (listed["table7"].trials, listed["table7"].kind) == (2, "study")
    assert len(listed["table7"].outputs) == 3

    assert planned(workspace, "table7")[:3] == ["runs/table7-r0", "runs/table7-r1", "runs/table7"]
    assert gc(workspace, "--run", "table7", "--delete").exit_code == 0
    assert folders(workspace.runs) == ["table7-mine"]
    assert run(workspace, "table7-mine", "a", "c") == []


def test_unfinished_outputs_of_failed_runs_are_kept(workspace: Workspace) -> None:
    """Both of a run that failed, and of a failed call of a run whose earlier call had finished."""
    run(workspace, "first", "a", "b")
    for name, values in (("first", ("c",)), ("second", ("a", "d"))):
        with pytest.raises(ValueError, match="half way"):
            run(workspace, name, *values, error=ValueError("half way"))
    parts = [path for path in workspace.store.glob("[a-z]*") if find_missing_files(path)]
    assert len(parts) == 2
    assert planned(workspace) == []
    assert gc(workspace, "--delete").exit_code == 0
    assert all((path / "output").exists() for path in parts)
    assert run(workspace, "first", "a", "b") == [], "the failed call had reached fewer stages"
    (half,) = planned(workspace)
    assert workspace.root / half in parts
    cached = [f"cache/squash64-{letter * 16}" for letter in "cd"]
    assert planned(workspace, "second")[-2:] == cached, "no remaining output was computed from these"


@pytest.mark.parametrize("content", [None, "{", "{}", "[]"], ids=["none", "cut", "without caches", "a list"])
def test_caches_are_kept_if_an_output_does_not_name_its_caches(workspace: Workspace, content: str | None) -> None:
    run(workspace, "first", "a")
    (workspace.cache / f"middle64-{'d' * 16}").mkdir()
    (workspace.cache / f"features-{'d' * 16}-{'e' * 16}.part").mkdir()
    assert planned(workspace) == [f"cache/features-{'d' * 16}-{'e' * 16}.part", f"cache/middle64-{'d' * 16}"]
    summary = workspace.outputs("first")["index"] / "summary.json"
    if content is None:
        summary.unlink()
    else:
        summary.write_text(content)
    assert planned(workspace) == []
    note = "cache/ is kept: it is unknown which caches these unfinished outputs use: index-"
    assert note in gc(workspace).output


@pytest.mark.parametrize("name", ["../x", "..", "/etc", "a/b", "absent", ".hidden", "", "folder"])
def test_invalid_and_unknown_names_are_refused(workspace: Workspace, name: str, tmp_path: Path) -> None:
    run(workspace, "first", "a")
    (tmp_path / "x").mkdir()
    (workspace.runs / "folder").mkdir()
    before = files(workspace)
    done = gc(workspace, "--run", name, "--delete")
    assert done.exit_code == 1
    assert "remedy:" in done.output
    assert files(workspace) == before
    assert (tmp_path / "x").is_dir()


def test_files_that_mcis_did_not_write_are_kept_and_named(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    for path in ("store/mine", "store/index-k1", "runs/notes[red]", "cache/mine"):
        (workspace.root / path).mkdir()
    (workspace.store / f"index-{'f' * 16}").symlink_to(tmp_path / "elsewhere")
    done = gc(workspace, "--delete")
    assert done.exit_code == 0, done.output
    for path in ("store/mine", "store/index-k1", "runs/notes[red]"):
        assert f"{path} is kept" in done.output
    assert folders(workspace.store) == ["index-k1", "mine"]
    assert (tmp_path / "elsewhere" / "file").exists(), "only the link is removed"


def test_nothing_is_removed_if_the_record_of_a_run_is_damaged(workspace: Workspace) -> None:
    run(workspace, "first", "a", "b")
    run(workspace, "second", "c")
    workspace.run("first").record.write_text("{")
    before = files(workspace)
    done = gc(workspace, "--delete")
    assert done.exit_code == 1
    assert "the outputs of run first are unknown" in done.output
    assert files(workspace) == before
    assert gc(workspace, "--run", "first", "--delete").exit_code == 0
    assert run(workspace, "second", "c") == []


def test_a_link_to_an_unmounted_run_stops_gc(workspace: Workspace, tmp_path: Path) -> None:
    (workspace.runs / "far").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=r"the outputs of run far are unknown: .*far cannot be read"):
        plan_removal(workspace)


def test_temporary_files_are_removed_if_their_process_has_ended(workspace: Workspace) -> None:
    run(workspace, "first", "a")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    written = temporary_path(workspace.runs / "first" / "report.html")
    host = TEMPORARY_NAME.fullmatch(written.name)
    assert host is not None
    left = [
        written.with_name(f".report.html.{host['host']}.{dead.pid}"),
        temporary_path(workspace.store / f"index-{'a' * 16}"),  # of an earlier process with the number of this one
        workspace.weights / ".resnet.pth.node-7.12",
        temporary_path(workspace.cache / f"squash64-{'a' * 16}"),
    ]
    stays = [
        written.with_name(f".scores.json.{host['host']}.{os.getppid()}"),
        workspace.weights / ".vgg.pth.node-7.12",
        workspace.runs / "first" / ".hidden",
    ]
    for path in (*left, *stays):
        path.mkdir() if path.parent in (workspace.store, workspace.cache) else path.write_text("half")
    os.utime(workspace.weights / ".resnet.pth.node-7.12", (0, 0))
    assert sorted(planned(workspace)) == sorted(str(path.relative_to(workspace.root)) for path in left)
    assert gc(workspace, "--delete").exit_code == 0
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in stays)


def test_a_killed_removal_is_finished_by_the_next_call(workspace: Workspace) -> None:
    run(workspace, "first", "a", "b")
    kill = "import os, shutil; shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), 9)\n"
    kill += "from mcis.platform.cli import main; main()"
    command = [sys.executable, "-c", kill, "gc", "--run", "first", "--delete", "--workspace", str(workspace.root)]
    assert subprocess.run(command, capture_output=True).returncode == -9
    assert "first" not in folders(workspace.runs)
    names = [path.name for path in (*workspace.runs.iterdir(), *workspace.store.iterdir()) if path.is_dir()]
    assert any(TEMPORARY_NAME.fullmatch(name) for name in names)
    assert [entry.name for entry in entries(workspace)] == []
    assert gc(workspace, "--delete").exit_code == 0
    assert folders(workspace.runs) == folders(workspace.store) == folders(workspace.cache) == []
    assert run(workspace, "first", "a", "b") == ["index", "localize"]


def test_gc_is_refused_while_a_run_is_in_progress(workspace: Workspace) -> None:
    run(workspace, "first", "a", "b")
    remove(workspace.runs / "first")
    before = files(workspace)
    with hold_run(workspace, "second"):
        shown = gc(workspace)
        done = gc(workspace, "--delete")
    assert shown.exit_code == 0, shown.output
    assert "run second (host" in shown.output
    assert "--delete is refused until it has ended" in shown.output
    assert done.exit_code == 1
    assert "run second (host" in done.output
    assert files(workspace) == before

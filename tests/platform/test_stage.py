"""Stages: outputs that lost a file, outputs of other code, and kills at every moment."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import temporary_path
from mcis.platform.config.sections import Config
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_table, write_json, write_table, write_text
from mcis.platform.runs.locks import hold_run
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.stage import Stage, find_remaining_stages, run_stage
from mcis.platform.runs.workspace import SUMMARY, Workspace


def a_run(workspace: Workspace, name: str = "a") -> RunContext:
    workspace.run(name)
    return RunContext(workspace=workspace, name=name, output=workspace.root, tracker=cast(Any, None), origins={})


# --- files that are lost


class Tables:
    """A stage that writes a table of two shards and a text."""

    def __init__(self) -> None:
        self.calls = 0
        module = cast(Any, SimpleNamespace(__name__="work", inputs=lambda config, context: None, run=self.run))
        self.stage = Stage(name="work", module=module, sections=("seed",))

    def run(self, config: Config, context: RunContext) -> StageResult:
        self.calls += 1
        for first in (0, 2):
            shard = context.output / "maps" / f"part-{first:08d}-{first + 2:08d}.parquet"
            if not shard.exists():
                write_table(shard, pa.table({"n": [first, first + 1]}))
        write_text(context.output / "weights.pt", "weights")
        return StageResult(counts={"seed": config.seed})

    def go(self, workspace: Workspace, *, recompute: bool = False) -> Path:
        """Runs it; returns the folder of its output, which is whole."""
        context = run_stage(self.stage, Config(seed=1), a_run(workspace), recompute=recompute)
        folder = context.stage_outputs["work"]
        assert read_table(folder / "maps")["n"].to_pylist() == [0, 1, 2, 3]
        assert (folder / "weights.pt").read_text() == "weights"
        return folder


SHARD = "maps/part-00000002-00000004.parquet"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda folder: (folder / SHARD).unlink(), f"{SHARD} is missing"),
        (lambda folder: cut(folder / SHARD), f"{SHARD} has "),
        (lambda folder: (folder / "weights.pt").write_bytes(b""), "weights.pt has 0 of 7 bytes"),
        (lambda folder: shutil.rmtree(folder / "maps"), f"{SHARD} is missing"),
        (lambda folder: cut(folder / SUMMARY), f"{SUMMARY} is damaged"),
        (lambda folder: write_json(folder / SUMMARY, {"stage": "work"}), f"{SUMMARY} is damaged"),
    ],
    ids=["no shard", "half a shard", "an empty file", "no table", "half a summary", "no list of files"],
)
def test_an_output_that_lost_a_file_is_computed_again_and_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, found: str
) -> None:
    work, workspace = Tables(), Workspace(tmp_path)
    folder = work.go(workspace)
    (folder / "notes.txt").write_text("of a user")
    work.go(workspace)
    assert work.calls == 1, "a file more is no flaw"
    capsys.readouterr()
    damage(folder)
    assert work.go(workspace) == folder
    shown = capsys.readouterr().out
    assert f"note: {folder.name} is computed again: " in shown
    assert found in shown
    work.go(workspace)
    assert work.calls == 2


def test_the_remaining_stages_start_with_the_first_incomplete_output(tmp_path: Path) -> None:
    work = Tables()
    workspace = Workspace(tmp_path)
    folder = work.go(workspace)
    later = dataclasses.replace(work.stage, name="later", needs=("work",))
    other = dataclasses.replace(work.stage, name="other", takes_part=lambda config: False)
    report = dataclasses.replace(work.stage, name="report", is_stored=False)
    stages = [work.stage, other, later, report]

    remaining = find_remaining_stages(stages, Config(seed=1), a_run(workspace))
    assert remaining.stages == [later]
    assert remaining.folders["work"] == folder
    assert list(remaining.folders) == ["work", "later"]
    assert remaining.written == 0

    again = find_remaining_stages(stages, Config(seed=1), a_run(workspace), recompute=("work", "later"))
    (folder / SHARD).unlink()
    damaged = find_remaining_stages(stages, Config(seed=1), a_run(workspace))
    assert again.stages == damaged.stages == [work.stage, later]
    assert again.folders == damaged.folders == {"work": folder}
    assert damaged.written == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_an_output_that_another_run_uses_is_not_computed_again(tmp_path: Path) -> None:
    work = Tables()
    workspace = Workspace(tmp_path)
    folder = work.go(workspace)
    with hold_run(workspace, "other"):
        workspace.update_record("other", current={"work": folder.name})
        with pytest.raises(UserError, match=f"run other, which is in progress, uses {folder.name}"):
            work.go(workspace, recompute=True)
    assert work.go(workspace, recompute=True) == folder
    assert work.calls == 2


def test_what_a_killed_call_was_removing_is_removed_by_the_next_call(tmp_path: Path) -> None:
    work = Tables()
    workspace = Workspace(tmp_path)
    folder = work.go(workspace)
    (folder / SUMMARY).unlink()
    half_removed = temporary_path(folder / "embedded") / "features"
    half_removed.mkdir(parents=True)
    assert work.go(workspace) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["maps", SUMMARY, "weights.pt"]


def test_what_has_its_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file before its rename, and every folder of a stage before the stage's."""
    synced, fsync, replace = set[int](), os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def watched_replace(source: Any, target: Any) -> None:
        for path in (Path(source), *Path(source).rglob("*")):
            assert path.stat().st_ino in synced, f"{path} is renamed to {target} before it is on the disk"
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    folder = Tables().go(Workspace(tmp_path))
    assert {path.stat().st_ino for path in (folder.parent, folder, *folder.rglob("*"))} <= synced


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_stage
from mcis.platform.runs.workspace import Workspace

root, recompute = Path(sys.argv[2]), sys.argv[3] == "recompute"
CHANGES = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")

def killed_at(workspace, number):
    # Computes in a process that is killed before it changes the disk for the n-th time; returns whether it came so far.
    if process := os.fork():
        return os.WIFSIGNALED(os.waitpid(process, 0)[1])
    left = number
    def on_event(event, arguments):
        nonlocal left
        reads = event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if event in CHANGES and not reads:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(on_event)
    sys.stdout = open(os.devnull, "w")
    test_stage.Tables().go(workspace, recompute=recompute)
    os._exit(0)

for number in range(500):
    workspace = Workspace(root / str(number))
    if recompute:
        before = test_stage.Tables()
        folder = before.go(workspace)
    killed = killed_at(workspace, number)
    again = test_stage.Tables()
    folder = again.go(workspace)
    again.go(workspace)
    assert again.calls <= 1, "what is whole is computed twice"
    outputs = [path.name for path in workspace.store.iterdir() if not path.name.startswith(".")]
    assert outputs == [folder.name], outputs
    if not killed:
        break
print(number)
"""


@pytest.mark.parametrize("how", ["first", pytest.param("recompute", marks=pytest.mark.slow)])
def test_a_kill_at_any_change_of_the_disk_leaves_nothing_that_is_half(tmp_path: Path, how: str) -> None:
    """A stage is computed for the first time, or again as by --from, in as many processes as it changes the disk."""
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1]) > 20, "number of changes of the disk"

"""Stages: outputs of several configurations in one pass, outputs that lost a file, and kills at every moment."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.storage.copies import AGAIN
from mcis.platform.config.sections import Config
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.garbage import plan_removal
from mcis.platform.runs.record import recorded
from mcis.platform.runs.results import StageResult, read_result
from mcis.platform.runs.stage import Stage, Together, run_stage, unfinished
from mcis.platform.runs.workspace import SUMMARY, Workspace, read_json, read_table, write_json, write_table, write_text


class Work:
    """A stage that writes the seed of each of its configurations, for the seeds of a range together."""

    def __init__(self, seeds: Sequence[int]):
        self.seeds, self.passes, self.at_once = seeds, list[list[int]](), 0
        module = cast(Any, SimpleNamespace(inputs=lambda config, context: None))
        together = Together(self.configurations, self.run)
        self.stage = Stage(name="work", module=module, sections=("seed",), together=together)

    def configurations(self, config: Config) -> list[Config]:
        others = [seed for seed in self.seeds if seed != config.seed]
        return [config, *(config.model_copy(update={"seed": seed}) for seed in others)]

    def run(self, configs: Sequence[Config], contexts: Sequence[RunContext]) -> list[StageResult]:
        self.at_once += 1
        assert self.at_once == 1, "another pass holds none of these locks"
        self.passes.append([config.seed for config in configs])
        for config, context in zip(configs, contexts, strict=True):
            (context.part / f"pass-{len(self.passes)}").write_text(str(config.seed))
            time.sleep(0.02)
        self.at_once -= 1
        return [StageResult(counts={"seed": config.seed}) for config in configs]


def a_run(workspace: Workspace, name: str = "a") -> RunContext:
    workspace.run(name)
    return RunContext(workspace=workspace, name=name, part=workspace.root, tracker=cast(Any, None), origins={})


def go(work: Work, context: RunContext, seed: int, *, afresh: bool = False) -> RunContext:
    after = run_stage(work.stage, Config(seed=seed), context, afresh=afresh)
    assert read_result(after.inputs["work"], StageResult).counts == {"seed": seed}
    return after


def test_outputs_of_several_configurations_are_computed_in_one_pass(tmp_path: Path) -> None:
    context, alone, work = a_run(Workspace(tmp_path)), Work([]), Work([1, 2, 3])
    assert go(alone, context, 2).computed == {"work": True}
    assert go(work, context, 3).computed == {"work": True}
    assert work.passes == [[3, 1]], "what is there already is not computed again"
    for seed in (1, 2, 3):
        assert go(work, context, seed).computed == go(alone, context, seed).computed == {"work": False}
    assert not list((tmp_path / "store").glob("*.part"))


def test_to_compute_one_again_leaves_the_others(tmp_path: Path) -> None:
    context, work = a_run(Workspace(tmp_path)), Work([1, 2, 3])
    before = go(work, context, 1).inputs["work"]
    assert go(work, context, 1, afresh=True).computed == {"work": True}
    assert work.passes == [[1, 2, 3], [1]]
    assert [path.name for path in before.glob("pass-*")] == ["pass-2"]
    assert go(work, context, 2).computed == {"work": False}


def test_runs_at_a_time_that_share_a_pass_compute_it_once(tmp_path: Path) -> None:
    """In threads that begin with different ones of them, and with another pass that shares some."""
    workspace, work, other = Workspace(tmp_path), Work([1, 2, 3, 4]), Work([3, 5, 2])
    calls = [(work, 4), (other, 5), (work, 2), (other, 2), (work, 1), (work, 3)]
    runs = [a_run(workspace, f"run-{number}") for number in range(len(calls))]
    threads = [threading.Thread(target=go, args=(of, run, seed)) for (of, seed), run in zip(calls, runs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    computed = [seed for seeds in (*work.passes, *other.passes) for seed in seeds]
    assert sorted(computed) == [1, 2, 3, 4, 5]
    assert len(work.passes) == len(other.passes) == 1


def test_what_is_begun_of_all_of_a_pass_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, work = Workspace(tmp_path), Work([1, 2])
    context = a_run(workspace)

    def killed(configs: Sequence[Config], contexts: Sequence[RunContext]) -> list[StageResult]:
        for each in contexts:
            (each.part / "begun").write_bytes(bytes(100))
        raise KeyboardInterrupt

    stage = Stage(
        name="work", module=work.stage.module, sections=("seed",), together=Together(work.configurations, killed)
    )
    with pytest.raises(KeyboardInterrupt):
        run_stage(stage, Config(seed=1), context, afresh=False)
    assert unfinished([work.stage], Config(seed=2), context, ()).begun == 200
    go(work, context, 2)
    assert unfinished([work.stage], Config(seed=1), context, ()).stages == ()


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_pass_made_for_others_is_kept_for_them_behind_its_run(tmp_path: Path, whole: bool) -> None:
    workspace, work = Workspace(tmp_path), Work([1, 2, 3])
    with recorded(workspace, "a", whole=whole):
        go(work, a_run(workspace), 2)
    assert plan_removal(workspace, []).garbage == []
    with recorded(workspace, "a", whole=True):
        go(Work([]), a_run(workspace), 2)  # a call that asks for its own alone points to no others
    assert len(plan_removal(workspace, []).garbage) == 2


def test_a_run_whose_output_is_there_waits_for_no_other_of_the_pass(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    go(Work([1]), a_run(workspace), 1)
    both = Work([1, 2])
    begun, end = threading.Event(), threading.Event()

    def long(configs: Sequence[Config], contexts: Sequence[RunContext]) -> list[StageResult]:
        begun.set()
        assert end.wait(30)
        return [StageResult(counts={"seed": config.seed}) for config in configs]

    slow = Stage(
        name="work", module=both.stage.module, sections=("seed",), together=Together(both.configurations, long)
    )
    other = threading.Thread(
        target=run_stage, args=(slow, Config(seed=2), a_run(workspace, "b")), kwargs={"afresh": False}
    )
    other.start()
    assert begun.wait(30)
    assert go(both, a_run(workspace, "c"), 1).computed == {"work": False}
    assert other.is_alive()
    end.set()
    other.join(30)


# --- files that are lost


class Tables:
    """A stage that writes a table of two shards and a text."""

    def __init__(self) -> None:
        self.calls, self.afresh = 0, False
        module = cast(Any, SimpleNamespace(inputs=lambda config, context: None, run=self.run))
        self.stage = Stage(name="work", module=module, sections=("seed",))

    def run(self, config: Config, context: RunContext) -> StageResult:
        self.calls, self.afresh = self.calls + 1, context.afresh
        for first in (0, 2):
            shard = context.part / "maps" / f"part-{first:08d}-{first + 2:08d}.parquet"
            if not shard.exists():
                write_table(shard, pa.table({"n": [first, first + 1]}))
        write_text(context.part / "weights.pt", "weights")
        return StageResult(counts={"seed": config.seed})

    def go(self, workspace: Workspace, *, afresh: bool = False) -> Path:
        """Runs it; returns the folder of its output, which is whole."""
        context = run_stage(self.stage, Config(seed=1), a_run(workspace), afresh=afresh)
        folder = context.inputs["work"]
        assert read_table(folder / "maps")["n"].to_pylist() == [0, 1, 2, 3]
        assert (folder / "weights.pt").read_text() == "weights"
        return folder


def test_a_summary_lists_the_files_their_bytes_and_the_rows_of_tables(tmp_path: Path) -> None:
    folder = Tables().go(Workspace(tmp_path))
    (folder / ".maps.elsewhere.7").write_text("left by a kill")
    summary = read_json(folder / SUMMARY)
    shards = {f"maps/part-0000000{first}-0000000{first + 2}.parquet": first for first in (0, 2)}
    assert summary["rows"] == dict.fromkeys(shards, 2)
    assert summary["files"] == {name: (folder / name).stat().st_size for name in (*shards, "weights.pt")}


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
        (lambda folder: (folder / SUMMARY).unlink(), f"{SUMMARY} is missing"),
        (lambda folder: cut(folder / SUMMARY), f"{SUMMARY} is damaged"),
        (lambda folder: write_json(folder / SUMMARY, {"stage": "work"}), f"{SUMMARY} is damaged"),
    ],
    ids=["no shard", "half a shard", "an empty file", "no table", "no summary", "half a summary", "no list of files"],
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
    assert unfinished([work.stage], Config(seed=1), a_run(workspace), ()).stages == ("work",)
    assert work.go(workspace) == folder
    shown = capsys.readouterr().out
    assert f"note: {folder.name} is computed again: " in shown
    assert found in shown
    work.go(workspace)
    assert work.calls == 2


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


class Cut(Tables):
    """It is ended, by an error, behind so many shards."""

    def __init__(self, error: BaseException, *, shards: int) -> None:
        super().__init__()
        self.error, self.shards = error, shards

    def run(self, config: Config, context: RunContext) -> StageResult:
        if self.shards:
            write_table(context.part / "maps" / "part-00000000-00000002.parquet", pa.table({"n": [0, 1]}))
        raise self.error


@pytest.mark.parametrize("begun", [False, True], ids=["in its first shard", "with a shard"])
def test_what_is_computed_again_and_interrupted_goes_on_when_the_call_is_repeated(tmp_path: Path, begun: bool) -> None:
    workspace = Workspace(tmp_path)

    def call(work: Tables) -> Path:
        with recorded(workspace, "a", whole=True):
            return work.go(workspace, afresh=True)

    folder = call(Tables())
    first = (folder / "maps" / "part-00000000-00000002.parquet").stat().st_mtime_ns
    with pytest.raises(KeyboardInterrupt):
        call(Cut(KeyboardInterrupt(), shards=begun))
    assert not folder.exists()
    shard = workspace.part("work", folder.name.removeprefix("work-")) / "maps" / "part-00000000-00000002.parquet"
    left = shard.stat().st_mtime_ns if begun else None
    work = Tables()
    assert call(work) == folder
    assert (work.calls, work.afresh) == (1, False), "what the call before kept counts"
    now = (folder / "maps" / "part-00000000-00000002.parquet").stat().st_mtime_ns
    assert now == left if begun else now != first
    assert call(work) == folder
    assert (work.calls, work.afresh) == (2, True), "the call before finished"


def test_what_an_error_wants_computed_again_is_not_gone_on_with(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)

    def call(work: Tables, remedy: str | None) -> None:
        with recorded(workspace, "a", whole=True):
            work.go(workspace, afresh=True)
            if remedy:
                raise UserError("found", "expected", remedy)

    remedies = {"free some space and repeat the command": 1, "repeat the command with --from work": 2, AGAIN: 2}
    for remedy, calls in remedies.items():
        work = Tables()
        with pytest.raises(UserError):
            call(work, remedy)
        call(work, None)
        assert work.calls == calls, remedy


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_stage
from mcis.platform.runs.workspace import Workspace

root, afresh = Path(sys.argv[2]), sys.argv[3] == "afresh"
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
    test_stage.Tables().go(workspace, afresh=afresh)
    os._exit(0)

for number in range(500):
    workspace = Workspace(root / str(number))
    if afresh:
        before = test_stage.Tables()
        folder = before.go(workspace)
    killed = killed_at(workspace, number)
    again = test_stage.Tables()
    folder = again.go(workspace, afresh=afresh)
    again.go(workspace, afresh=afresh)
    assert again.calls <= 1, "what is whole is computed twice"
    outputs = [path.name for path in workspace.store.iterdir() if not path.name.startswith(".")]
    assert outputs == [folder.name], outputs
    if not killed:
        break
print(number)
"""


@pytest.mark.parametrize("how", ["first", "afresh"])
def test_a_kill_at_any_change_of_the_disk_leaves_nothing_that_is_half(tmp_path: Path, how: str) -> None:
    """A stage is computed for the first time, or again as by --from, in as many processes as it changes the disk."""
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1]) > 20, "so many changes of the disk"

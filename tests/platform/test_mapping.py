"""Mapping tables on Ray: every shard once, only what is missing again, and a worker's error as the user's own."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ray.exceptions import WorkerCrashedError

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import host_name
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.shard_mapper import MappingWork, death_error
from mcis.platform.runs.files import read_table, write_table

TABLE = pa.table({"id": [f"i{n}" for n in range(23)], "value": range(23), "list": [[n] * (n % 3) for n in range(23)]})
CUT = ["part-00000000-00000005.parquet", "part-00000005-00000010.parquet", "part-00000010-00000015.parquet"]
CUT += ["part-00000015-00000020.parquet", "part-00000020-00000023.parquet"]
COMPUTE = ComputeConfig()


def squares(diary: Path) -> Callable[[int], Callable[[pa.Table], pa.Table]]:
    """Makes a maker of workers that write down, in files of `diary`, when they are made and which rows they get."""

    # Here within, since Ray's workers cannot import a test module.
    def make(power: int) -> Callable[[pa.Table], pa.Table]:
        with (diary / f"made by {os.getpid()}").open("a") as file:
            file.write("once ")

        def work(rows: pa.Table) -> pa.Table:
            values = rows["value"].to_pylist()
            assert rows.column_names == ["id", "value", "list"]
            with (diary / f"rows from {values[0]}").open("a") as file:
                file.write("".join(f"{value}\n" for value in values))
            return pa.table({"id": rows["id"], "power": [value**power for value in values], "list": rows["list"]})

        return work

    return make


def mapped(folder: Path, diary: Path, shard_rows: int = 5) -> int:
    diary.mkdir(exist_ok=True)
    make_worker = functools.partial(squares(diary), 2)
    out = folder / "out"
    return map_table(TABLE, out, make_worker=make_worker, label="rows", compute=COMPUTE, shard_rows=shard_rows)


def worked(diary: Path) -> list[int]:
    return sorted(int(line) for path in diary.glob("rows from *") for line in path.read_text().split())


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out").iterdir())


def check(folder: Path) -> None:
    """The shards in order are the whole table, mapped row by row."""
    mapped_rows = read_table(folder / "out")
    assert mapped_rows["id"].to_pylist() == TABLE["id"].to_pylist()
    assert mapped_rows["power"].to_pylist() == [n**2 for n in range(23)]
    assert mapped_rows["list"].to_pylist() == TABLE["list"].to_pylist()


def short_of_memory(error: str, repaired: Path) -> Callable[[], Callable[[pa.Table], pa.Table]]:
    """Makes a maker of workers that take more memory than there is, until a file is there."""

    def make() -> Callable[[pa.Table], pa.Table]:
        import torch

        def work(rows: pa.Table) -> pa.Table:
            if 12 in rows["value"].to_pylist() and not repaired.exists():
                if error == "machine":
                    torch.zeros(2**58)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return rows

        return work

    return make


@pytest.mark.parametrize("error", ["machine", "gpu"])
def test_a_worker_whose_memory_runs_out_says_what_to_lower(tmp_path: Path, ray_local: None, error: str) -> None:
    def run() -> int:
        make = short_of_memory(error, tmp_path / "repaired")
        how: dict[str, Any] = {"compute": COMPUTE, "shard_rows": 23, "memory_hint": "lower localize.batch"}
        return map_table(TABLE, tmp_path / "out", make_worker=make, label="embed", **how)

    with pytest.raises(UserError, match=r"embed: memory ran out \(.*(allocate|out of) memory") as caught:
        run()
    assert "lower localize.batch" in caught.value.remedy
    (tmp_path / "repaired").touch()
    run()
    assert read_table(tmp_path / "out")["id"].to_pylist() == TABLE["id"].to_pylist()


@pytest.mark.parametrize(
    ("address", "setting"), [("", "lower compute.cpus"), ("10.0.0.1:6379", "raise compute.memory_gb")]
)
def test_the_remedy_for_a_death_is_a_setting_that_has_an_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, setting: str
) -> None:
    """`compute.cpus` is that of a local Ray."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    work = MappingWork(None, None, None, tmp_path, "masks", "lower data.max_side")
    error = death_error(work, "part", WorkerCrashedError())
    assert error.remedy.startswith(f"free some memory or {setting}, and repeat the command")


def test_every_shard_is_written_and_only_missing_ones_again(tmp_path: Path, ray_local: None) -> None:
    assert mapped(tmp_path, tmp_path / "first") == 23
    assert worked(tmp_path / "first") == list(range(23))
    assert shards(tmp_path) == CUT
    check(tmp_path)
    makings = [path.read_text() for path in (tmp_path / "first").glob("made by *")]
    assert set(makings) == {"once "}, "a process makes its worker once"

    # A kill: two shards are not there, a third is half written aside.
    for name in (CUT[1], CUT[4]):
        (tmp_path / "out" / name).unlink()
    stamps = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in shards(tmp_path)}
    assert mapped(tmp_path, tmp_path / "second") == 8
    assert worked(tmp_path / "second") == [5, 6, 7, 8, 9, 20, 21, 22]
    check(tmp_path)
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in stamps} == stamps

    assert mapped(tmp_path, tmp_path / "third") == 0
    assert worked(tmp_path / "third") == []


def test_files_of_processes_that_were_killed_are_removed(tmp_path: Path, ray_local: None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = [out / f".{CUT[0]}-0.{host_name()}.{os.getppid()}", out / f".{CUT[0]}-0.another-node.7", out / "notes"]
    for path in (*kept, out / f".{CUT[0]}-0.{host_name()}.{ended.pid}"):
        path.write_text("half")

    assert mapped(tmp_path, tmp_path / "diary") == 23
    assert shards(tmp_path) == sorted([*CUT, *(path.name for path in kept)])


@pytest.mark.parametrize("shard_rows", [3, 100])
def test_shards_of_another_cut_are_replaced(tmp_path: Path, ray_local: None, shard_rows: int) -> None:
    """Three shards of 5 are there, and the rest is cut by others: no row is missing and none comes twice."""
    for name, start in zip(CUT[:3], (0, 5, 10), strict=True):
        rows = TABLE.slice(start, 5)
        power = pa.array([n**2 for n in range(start, start + 5)])
        write_table(tmp_path / "out" / name, pa.table({"id": rows["id"], "power": power, "list": rows["list"]}))
    assert mapped(tmp_path, tmp_path / "diary", shard_rows) == 23
    assert len(shards(tmp_path)) == -(-23 // shard_rows)
    check(tmp_path)


def test_memory_that_no_node_has_is_an_error(tmp_path: Path, ray_local: None) -> None:
    compute = ComputeConfig(memory_gb=10_000)
    needs = r"1 x \(1 CPU, 10000 GiB memory\)"
    with pytest.raises(UserError, match=f"the mapping `rows` needs {needs}; the cluster lacks {needs}") as caught:
        map_table(TABLE, tmp_path / "out", worker=killing(set(), tmp_path)(), label="rows", compute=compute)
    assert "compute.memory_gb" in caught.value.remedy


def failing(when: str, repaired: Path) -> Callable[[], Callable[[pa.Table], pa.Table]]:
    """Makes a maker of workers that raise the user's error, made or at work, until a file is there."""

    def give_up(moment: str, row: int) -> None:
        if moment == when and row == 12 and not repaired.exists():
            raise UserError("no map of i12", "a map", "draw one")

    def make() -> Callable[[pa.Table], pa.Table]:
        give_up("made", 12)

        def work(rows: pa.Table) -> pa.Table:
            for row in rows["value"].to_pylist():
                give_up("at work", row)
            return rows

        return work

    return make


@pytest.mark.parametrize("when", ["at work", "made"])
def test_a_workers_user_error_arrives_as_it_was_raised(tmp_path: Path, ray_local: None, when: str) -> None:
    def run() -> int:
        make = failing(when, tmp_path / "repaired")
        return map_table(TABLE, tmp_path / "out", make_worker=make, label="failing", compute=COMPUTE, shard_rows=5)

    with pytest.raises(UserError) as caught:
        run()
    assert type(caught.value) is UserError
    assert str(caught.value) == str(UserError("no map of i12", "a map", "draw one"))
    assert CUT[2] not in shards(tmp_path)
    # Once it is repaired, the same call goes on from what was finished.
    (tmp_path / "repaired").touch()
    assert run() >= 5
    assert read_table(tmp_path / "out")["value"].to_pylist() == list(range(23))


def test_an_error_in_a_shard_interrupts_no_other(tmp_path: Path, ray_local: None) -> None:
    """A process that is interrupted while it imports pandas cannot import it again, and Ray gives it more work."""

    def wait_for(path: Path) -> None:
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def make() -> Callable[[pa.Table], pa.Table]:
        def work(rows: pa.Table) -> pa.Table:
            if 0 in rows["value"].to_pylist():
                wait_for(tmp_path / "the other is in work")
                raise UserError("no map of i0", "a map", "draw one")
            (tmp_path / "the other is in work").touch()
            time.sleep(1)
            return rows

        return work

    with pytest.raises(UserError, match="no map of i0"):
        map_table(TABLE.slice(0, 4), tmp_path / "out", make_worker=make, label="two", compute=COMPUTE, shard_rows=2)
    wait_for(tmp_path / "out" / "part-00000002-00000004.parquet")
    assert shards(tmp_path) == ["part-00000002-00000004.parquet"]


def killing(rows_that_kill: set[int], diary: Path) -> Callable[[], Callable[[pa.Table], pa.Table]]:
    """Makes a maker of workers that end their process, as a decoder's fault or the system does, at some rows."""

    def make() -> Callable[[pa.Table], pa.Table]:
        def work(rows: pa.Table) -> pa.Table:
            for row in rows["value"].to_pylist():
                if row in rows_that_kill:
                    with (diary / f"died of {row}").open("a") as file:
                        file.write(f"{len(rows)}\n")
                    os.kill(os.getpid(), signal.SIGKILL)
            return rows.select(["value"])

        return work

    return make


def deaths(diary: Path, row: int) -> list[int]:
    """Of each death by a row, the number of rows that were mapped together."""
    return [int(line) for line in (diary / f"died of {row}").read_text().split()]


def test_a_shard_that_ends_its_process_is_named_and_repaired_the_call_goes_on(tmp_path: Path, ray_local: None) -> None:
    def run(*rows_that_kill: int) -> int:
        make = killing(set(rows_that_kill), tmp_path)
        return map_table(TABLE, tmp_path / "out", make_worker=make, label="squares", compute=COMPUTE, shard_rows=5)

    with pytest.raises(UserError, match=f"squares: shard {CUT[2]} cannot be mapped: its process was ended") as caught:
        run(12)
    assert "--from index" in caught.value.remedy
    assert deaths(tmp_path, 12) == [5, 5, 5]
    assert CUT[2] not in shards(tmp_path)
    run()
    assert read_table(tmp_path / "out")["value"].to_pylist() == list(range(23))


@pytest.mark.slow
def test_images_that_end_their_processes_are_rejected_where_that_is_asked_for(tmp_path: Path, ray_local: None) -> None:
    def reject(row: pa.Table, what: str) -> pa.Table:
        assert what == "its process was ended by a signal, 3 times"
        return pa.table({"value": [-value for value in row["value"].to_pylist()]})

    for rows in (23, 0):
        make = killing({13, 14}, tmp_path)
        how: dict[str, Any] = {"compute": COMPUTE, "shard_rows": 5, "reject": reject}
        assert map_table(TABLE, tmp_path / "out", make_worker=make, label="some", **how) == rows
    values = [-n if n in (13, 14) else n for n in range(23)]
    assert read_table(tmp_path / "out")["value"].to_pylist() == values
    assert deaths(tmp_path, 13) == [5, 5, 5, 1, 1, 1]
    assert deaths(tmp_path, 14) == [1, 1, 1]


@pytest.mark.slow
def test_other_shards_continue_while_a_dead_one_is_mapped_row_by_row(tmp_path: Path, ray_local: None) -> None:
    """Row 1, whose shard row 0 kills, waits until all other shards are written."""

    def make() -> Callable[[pa.Table], pa.Table]:
        def work(rows: pa.Table) -> pa.Table:
            values = rows["value"].to_pylist()
            if 0 in values:
                os.kill(os.getpid(), signal.SIGKILL)
            deadline = time.monotonic() + 60
            while values == [1] and len(list((tmp_path / "out").glob("part-*"))) < 11:
                assert time.monotonic() < deadline, "nothing was submitted while the rows were mapped"
                time.sleep(0.05)
            return rows.select(["value"])

        return work

    def reject(row: pa.Table, cause: str) -> pa.Table:
        return row.select(["value"])

    how: dict[str, Any] = {"compute": COMPUTE, "shard_rows": 2, "reject": reject}
    assert map_table(TABLE, tmp_path / "out", make_worker=make, label="some", **how) == 23
    assert read_table(tmp_path / "out")["value"].to_pylist() == list(range(23))


def test_a_process_that_dies_by_chance_costs_nothing(tmp_path: Path, ray_local: None) -> None:
    """Twice, as where another program took the memory for a while."""

    def make() -> Callable[[pa.Table], pa.Table]:
        def work(rows: pa.Table) -> pa.Table:
            died = len(list(tmp_path.glob("died *")))
            if 12 in rows["value"].to_pylist() and died < 2:
                (tmp_path / f"died {died}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return rows.select(["value"])

        return work

    assert map_table(TABLE, tmp_path / "out", make_worker=make, label="some", compute=COMPUTE, shard_rows=5) == 23
    assert read_table(tmp_path / "out")["value"].to_pylist() == list(range(23))


def test_a_full_disk_ends_a_mapping_and_the_next_call_goes_on(small_disk: Callable[..., Path], ray_local: None) -> None:
    disk = small_disk("128k")
    (disk / "ballast").write_bytes(bytes(112 * 1024))

    def make() -> Callable[[pa.Table], pa.Table]:
        return lambda rows: rows.append_column("noise", pa.array([os.urandom(1000) for _ in range(len(rows))]))

    def run() -> int:
        return map_table(TABLE, disk / "out", make_worker=make, label="noise", compute=COMPUTE, shard_rows=5)

    with pytest.raises(UserError, match=f"no space left on the disk of {disk / 'out'}"):
        run()
    deadline = time.monotonic() + 30
    while any(file.name.startswith(".") for file in (disk / "out").iterdir()):
        assert time.monotonic() < deadline, "half a file would keep the disk full"
    (disk / "ballast").unlink()
    run()
    assert read_table(disk / "out")["value"].to_pylist() == list(range(23))

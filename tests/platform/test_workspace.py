"""The workspace: a file is written completely or not at all, also on a disk that is really full."""

import contextlib
import errno
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mcis.datasets.errors import BadFile, UserError
from mcis.datasets.storage.folders import files_below
from mcis.datasets.tables.memory_mapped import CachedRows, cache_table
from mcis.datasets.tables.shards import Shards
from mcis.platform.engine.checkpoint import CHECKPOINT, remove_damaged
from mcis.platform.networks.weights_files import WEIGHTS, load_weights, save, save_weights
from mcis.platform.runs.files import (
    atomic_write,
    disk_errors,
    fingerprint,
    read_json,
    read_table,
    write_json,
    write_table,
)
from mcis.platform.runs.results import find_missing_files
from mcis.platform.runs.workspace import DEFAULT_WORKSPACE, SUMMARY, Workspace, open_workspace

OF_IMAGES = pa.table({"image_id": ["a", "a", "b"]})
TABLE = pa.table({"a": [1, 2, 3]})
NOISE = [str(i * 2654435761 % 2**32) for i in range(40_000)]  # 400 KB, little less when compressed


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_half_way(path: Path, error: type[BaseException]) -> None:
    with atomic_write(path) as aside:
        aside.write_text("half")
        raise error("half way")


# --- fingerprints


def test_fingerprints_stay_as_they_are() -> None:
    """Keys of stores that exist: SHA-256 of the canonical JSON, here of `["a",{"k":[1,null,true]}]`."""
    assert fingerprint("a", {"k": [1, None, True]}) == "22cae23d4157833c"


# --- writing


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_file_and_no_debris(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error, match="half way"):
        fail_half_way(path, error)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


# --- disks


@pytest.fixture
def full_disk(small_disk: Callable[..., Path]) -> Path:
    """A file system in memory with space for 64 KiB and for eight files and folders."""
    return small_disk("64k", nr_inodes=9)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder, data: write_json(folder / "a", data),
        lambda folder, data: write_table(folder / "a", pa.table({"a": data})),
    ],
    ids=["json", "table"],
)
def test_a_full_disk_raises_a_user_error(full_disk: Path, write: Callable[[Path, list[str]], None]) -> None:
    write(full_disk, ["old"])
    before = (full_disk / "a").read_bytes()
    with pytest.raises(UserError, match=rf"no space left on the disk of {full_disk} \(.*No space left") as caught:
        write(full_disk, NOISE)
    assert "--workspace" in caught.value.remedy
    assert (full_disk / "a").read_bytes() == before
    assert names(full_disk) == ["a"], "a partial file would keep the disk full"


def into_sqlite(folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / "a.db")) as store, store:
        store.execute("CREATE TABLE noise (text)")
        store.executemany("INSERT INTO noise VALUES (?)", ((text,) for text in NOISE))


@pytest.mark.parametrize(
    "write",
    [
        into_sqlite,
        lambda folder: torch.save(torch.zeros(100_000), folder / "a.pt"),
        lambda folder: pq.write_table(pa.table({"a": NOISE}), folder / "a"),
    ],
    ids=["sqlite", "torch", "pyarrow"],
)
def test_a_full_disk_is_recognized_in_errors_of_libraries(full_disk: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(UserError, match=rf"no space left on the disk of {full_disk}"), disk_errors(full_disk):
        write(full_disk)
    with pytest.raises(ValueError, match="no disk"), disk_errors(full_disk):
        raise ValueError("no disk")


@pytest.mark.parametrize(
    ("number", "expected", "remedy"),
    [
        (errno.EACCES, "to which this user may write", "permissions"),
        (errno.EROFS, "to which this user may write", "permissions"),
        (errno.ENOTDIR, "no other file or folder has", "move the other one away"),
        (errno.ENAMETOOLONG, "a shorter path", "shorten"),
        (errno.ENOLCK, "with locks", "mount the file system with locks"),
    ],
)
def test_an_error_of_the_disk_blames_nothing_else(number: int, expected: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="x cannot be written") as caught, disk_errors(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path / "x"))
    assert os.strerror(number) in caught.value.found
    assert expected in caught.value.expected
    assert remedy in caught.value.remedy
    assert ("locks" in caught.value.remedy) == (number == errno.ENOLCK)
    assert not re.search(r"\bspace\b", str(caught.value))


def test_a_file_that_is_too_large_is_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a file is too large for the disk") as caught, disk_errors(tmp_path):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(tmp_path / "x"))
    assert "ulimit -f" in caught.value.expected


def test_a_name_that_is_too_long_is_measured(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    with pytest.raises(UserError, match="the longest name in it has 300 bytes") as caught, disk_errors(tmp_path):
        path.mkdir()
    assert "accept 255 and 4095" in caught.value.found


def test_a_run_name_that_is_too_long_is_refused_with_the_limit(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.run("é" * 122)
    with pytest.raises(UserError, match="a run name of 246 bytes") as caught:
        workspace.run("é" * 123)
    assert "at most 245 bytes" in caught.value.expected
    assert caught.value.remedy == "choose a shorter --name"


# --- reading


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe\x00", b"{'a': 1}"])
def test_damaged_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"summary\.json is damaged") as caught:
        read_json(path)
    assert "remove it" in caught.value.remedy


def _write_cache(folder: Path) -> None:
    write_table(folder / "part-00000000-00000002.arrow", cache_table(np.ones((2, 3), np.uint8)))


NAME = "part-00000000-00000002.parquet"
KINDS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "JSON": (lambda folder: write_json(folder / SUMMARY, {"files": {}}), lambda folder: read_json(folder / SUMMARY)),
    "names": (lambda folder: write_json(folder / SUMMARY, {}), files_below),
    "a summary": (lambda folder: write_json(folder / SUMMARY, {"files": {}}), find_missing_files),
    "a table": (lambda folder: write_table(folder / NAME, TABLE), read_table),
    "rows": (lambda folder: write_table(folder / NAME, OF_IMAGES), lambda folder: Shards(folder).rows("a")),
    "weights": (
        lambda folder: save_weights(torch.nn.Linear(2, 2), folder / WEIGHTS, {}),
        lambda folder: load_weights(torch.nn.Linear(2, 2), folder / WEIGHTS),
    ),
    "a checkpoint": (lambda folder: save({"step": 1}, folder / CHECKPOINT), remove_damaged),
    "a cache": (_write_cache, lambda folder: CachedRows(folder, (3,)).row(1)),
}
"""Kinds of files in a workspace -> functions that write and read one in a folder."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_temporary_fault_is_not_reported_as_damage(
    tmp_path: Path, no_pauses: None, no_more_files: Callable[[], contextlib.AbstractContextManager[None]], kind: str
) -> None:
    write, read = KINDS[kind]
    write(tmp_path)
    read(tmp_path)  # so that nothing has to be imported
    with no_more_files(), pytest.raises(UserError, match=r"cannot be read, after several .*Too many open") as caught:
        read(tmp_path)
    assert not isinstance(caught.value, BadFile)
    assert "repeat the command" in caught.value.remedy
    assert "--from" not in caught.value.remedy
    assert not isinstance(read(tmp_path), str), "no file is reported as missing"


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"names", "a summary", "a checkpoint"}))
def test_a_truncated_file_is_reported_as_damaged(tmp_path: Path, kind: str) -> None:
    write, read = KINDS[kind]
    write(tmp_path)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadFile):
        read(tmp_path)


def test_a_folder_is_read_in_the_order_of_its_shards_and_named_if_it_has_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no table in"):
        read_table(tmp_path)
    for start in (64, 0, 128):
        write_table(tmp_path / f"part-{start:08d}-{start + 64:08d}.parquet", pa.table({"a": [start], "b": ["x"]}))
    (tmp_path / ".part-00000192-00000256.parquet.1").write_bytes(b"left by a kill")
    (tmp_path / "summary.json").touch()
    assert read_table(tmp_path)["a"].to_pylist() == [0, 64, 128]
    assert read_table(tmp_path, ["b"]).column_names == ["b"]


# --- the workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "deep" / "workspace")


def test_a_workspace_opened_for_reading_creates_nothing(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="typo is not a workspace"):
        Workspace(tmp_path / "typo", create=False)
    assert not (tmp_path / "typo").exists()
    opened = Workspace(workspace.root, create=False)
    assert opened.run("absent", create=False).path == workspace.runs / "absent"
    assert names(workspace.runs) == []


def test_the_environment_names_the_workspace_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MCIS_WORKSPACE", raising=False)
    assert open_workspace(None).root == tmp_path / DEFAULT_WORKSPACE

    monkeypatch.setenv("MCIS_WORKSPACE", str(tmp_path / "other"))
    assert open_workspace(None).root == tmp_path / "other"
    assert open_workspace("given").root == tmp_path / "given"


@pytest.mark.parametrize("name", ["a", "first-run_2.0+seed", "größe", "2024"])
def test_plain_names_of_runs(workspace: Workspace, name: str) -> None:
    assert workspace.run(name).path == workspace.runs / name
    assert names(workspace.runs) == [name]


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../out", "/tmp", "a b", "a\\b", "a\0b", "a\n", "~"])
def test_other_names_of_runs_are_refused(workspace: Workspace, name: str) -> None:
    with pytest.raises(UserError, match="run name") as caught:
        workspace.run(name)
    assert repr(name) in caught.value.found
    assert names(workspace.runs) == []


def test_outputs_of_a_run_are_found_after_the_workspace_moves(workspace: Workspace) -> None:
    assert workspace.outputs("run") == {}
    folder = workspace.output("index", "k1")
    workspace.record_outputs("run", {"index": folder})
    moved = Workspace(workspace.root.rename(workspace.root.with_name("moved")))
    assert moved.outputs("run") == {"index": moved.output("index", "k1")}
    assert moved.output("index", "k1") != folder

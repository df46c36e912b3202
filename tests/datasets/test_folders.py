"""Tests of folders in buckets and their copies: upload, download, listing and removal."""

import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.storage import faults, folders
from mcis.datasets.tables.memory_mapped import CachedRows, cache_table
from mcis.datasets.tables.shards import Shards
from mcis.platform.runs.files import read_shards, write_table


def folder_of(system: pafs.FileSystem) -> Path:
    return folders.local_path(f"s3://{system.base_path.strip('/')}/work")


def test_the_path_of_a_copy_gives_its_uri(place: Path) -> None:
    folder = folders.local_path("s3://bucket/some/work/")
    assert folder == place / "s3/bucket/some/work"
    assert folders.uri_of(folder / "store/maps-1/part-0.parquet") == "s3://bucket/some/work/store/maps-1/part-0.parquet"

    for name in ("cache/a", "mlflow.db", "data/VOC2012/a.jpg", "mlflow/1/a"):
        assert folders.uri_of(folder / name) is None, "local to each machine"
    assert folders.uri_of(place) is None
    assert folders.uri_of(place.with_name("copies-of-others") / "s3/bucket/a") is None


def test_local_paths_are_used_directly(place: Path, tmp_path: Path) -> None:
    assert folders.local_path("work") == Path("work")
    assert folders.local_path("file:///photos/a") == Path("/photos/a")

    file = tmp_path / "a.txt"
    file.write_text("a")
    folders.upload_file(file, file)
    assert folders.fetch_file(file) == file
    assert folders.fetch_file(tmp_path / "absent") == tmp_path / "absent"
    assert folders.names_in(tmp_path) == ["a.txt"]
    assert folders.names_in(tmp_path / "absent") == []
    assert folders.files_below(tmp_path)["a.txt"].size == 1

    folders.copy_folder(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copy"))
    assert (tmp_path.with_name(f"{tmp_path.name}-copy") / "a.txt").read_text() == "a"

    folders.remove(file)
    assert not folders.path_exists(file)


def test_a_folder_that_refuses_access_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(UserError, match=rf"access to {tmp_path} is refused: Permission denied"):
        folders.names_in(tmp_path)


NO_FOLDERS = [
    "s3://me:hunter2@bucket/a",
    "s3://bucket/a?endpoint_override=example.org",
    "http://example.org/a",
    "s3://bucket/../a",
    "s3://",
    "s3:///a",
]


@pytest.mark.parametrize("uri", NO_FOLDERS)
def test_invalid_uris_of_folders_are_refused(place: Path, uri: str) -> None:
    with pytest.raises(UserError) as caught:
        folders.local_path(uri)
    assert "hunter2" not in str(caught.value)


def test_a_folder_that_others_can_write_to_is_refused(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(UserError, match="others may write to it"):
        folders.local_path("s3://bucket/a")


@pytest.mark.slow
def test_an_uploaded_file_is_downloaded_on_another_machine(
    bucket: pafs.FileSystem, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(bucket)
    file = folder / "store/a/b.bin"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"1" * 100)
    folders.upload_file(file, file)

    assert folders.fetch_file(file).stat().st_mtime_ns == folders.files_below(folder)["store/a/b.bin"].changed

    monkeypatch.setenv(folders.COPIES_VARIABLE, str(tmp_path / "other"))
    other = folder_of(bucket) / "store/a/b.bin"
    assert folders.path_exists(other)
    assert folders.path_exists(other.parent)
    assert not other.exists()
    assert folders.fetch_file(other).read_bytes() == b"1" * 100

    before = other.stat().st_ino
    assert folders.fetch_file(other).stat().st_ino == before, "it is downloaded once"

    other.write_bytes(b"2" * 99)
    folders.upload_file(other, other)

    monkeypatch.setenv(folders.COPIES_VARIABLE, str(place))

    assert folders.fetch_file(file).read_bytes() == b"2" * 99, "an outdated copy is downloaded again"
    assert folders.names_in(folder / "store/a") == ["b.bin"]

    folders.copy_folder(folder / "store/a", folder / "store/c")
    assert folders.fetch_file(folder / "store/c/b.bin").read_bytes() == b"2" * 99

    folders.remove(folder / "store/a")
    assert not folders.path_exists(file)
    assert not file.exists()
    assert list(folders.files_below(folder)) == ["store/c/b.bin"]

    monkeypatch.setenv(folders.COPIES_VARIABLE, str(tmp_path / "other"))
    with pytest.raises(FileNotFoundError):
        folders.fetch_file(other)
    assert not other.exists(), "a file that the bucket no longer has is removed"


@pytest.mark.slow
def test_wanted_files_are_downloaded_together(
    bucket: pafs.FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(bucket)
    for name, size in (("runs/a/run.json", 10), ("runs/b/run.json", 10), ("runs/a/report.html", 1000)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(size))
        folders.upload_file(folder / name, folder / name)
    monkeypatch.setenv(folders.COPIES_VARIABLE, str(tmp_path / "other"))
    other = folder_of(bucket)
    folders.fetch_below(other / "runs", lambda _, at: at.size <= 100)

    assert sorted(str(path.relative_to(other)) for path in other.rglob("*.*")) == ["runs/a/run.json", "runs/b/run.json"]


@pytest.mark.slow
def test_rows_are_read_from_a_bucket(bucket: pafs.FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(bucket) / "store/maps"
    for number in range(3):
        ids = [f"{number}-{n}" for n in range(2)]
        rows = pa.table({"image_id": ids, "noise": [os.urandom(2**20) for _ in ids]})
        write_table(folder / f"part-{2 * number:08d}-{2 * number + 2:08d}.parquet", rows)
    monkeypatch.setenv(folders.COPIES_VARIABLE, str(tmp_path / "other"))
    folder = folder_of(bucket) / "store/maps"
    rows = Shards(folder).rows("2-1")

    assert rows["image_id"].to_pylist() == ["2-1"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_copies_that_a_listing_shows_to_be_current_are_read_without_requests(
    bucket: pafs.FileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    suffix: str,
) -> None:
    """A shard that another machine has replaced is downloaded again."""
    folder = folder_of(bucket) / "store/maps"

    def write(number: int, value: int) -> None:
        rows = pa.table({"image_id": [str(number)], "value": [value], "noise": [os.urandom(100 * value)]})
        if suffix == "arrow":
            rows = cache_table(np.full((1, 3 + value), value))
        write_table(folder / f"part-{number:08d}-{number + 1:08d}.{suffix}", rows)

    def read(number: int, length: int = 3) -> int:
        if suffix == "arrow":
            row = CachedRows(folder, (length,)).row(number)
            assert row is not None
            return int(row[0])
        return int(Shards(folder).rows(str(number), number)["value"][0].as_py())

    def count_requests() -> int:
        messages = [record.getMessage() for record in caplog.records if record.name == "werkzeug"]
        caplog.clear()
        return sum("list-type" not in message for message in messages)

    caplog.set_level(logging.INFO, "werkzeug")
    for number in range(3):
        write(number, 0)
    count_requests()
    assert [read(number) for number in range(3)] == [0, 0, 0]
    assert count_requests() == 0

    copies = os.environ[folders.COPIES_VARIABLE]
    monkeypatch.setenv(folders.COPIES_VARIABLE, str(tmp_path / "other"))
    folder = folder_of(bucket) / "store/maps"
    assert read(1) == 0
    assert count_requests() > 0, "this machine has no copy"
    assert read(1) == 0
    assert count_requests() == 0
    write(1, 7)
    monkeypatch.setenv(folders.COPIES_VARIABLE, copies)
    folder = folder_of(bucket) / "store/maps"
    assert read(1, 10) == 7


def test_shards_are_fetched_several_at_a_time_and_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fetch waits for another one. At most 10 shards are read ahead of the reader."""
    for number in range(20):
        write_table(tmp_path / f"part-{number:08d}-{number + 1:08d}.parquet", pa.table({"number": [number]}))
    other_fetch = threading.Barrier(2, timeout=60)
    fetched: list[Path] = []

    def fetch(path: Path) -> Path:
        fetched.append(path)
        other_fetch.wait()
        return path

    monkeypatch.setattr(folders, "fetch_file", fetch)
    shards = read_shards(tmp_path)
    numbers = next(shards)["number"].to_pylist()
    assert len(fetched) <= 10
    for shard in shards:
        numbers += shard["number"].to_pylist()
    assert numbers == list(range(20))


def test_a_bucket_without_responses_times_out(place: Path, monkeypatch: pytest.MonkeyPatch, no_pauses: None) -> None:
    """The server accepts connections and never responds; pyarrow would wait for minutes, eight times."""
    operations: list[Callable[[Path], object]] = [
        folders.names_in,
        folders.files_below,
        folders.path_exists,
        folders.remove,
        lambda folder: folders.copy_folder(folder, folder.with_name("copy")),
    ]
    monkeypatch.setattr(faults, "REMOTE_TIMEOUT", 0.01)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for operation in operations:
            with pytest.raises(UserError, match=r"cannot be read, after several attempts: no result after 0"):
                operation(folders.local_path(f"s3://silent-{port}/work"))


@pytest.mark.slow
def test_a_read_only_bucket_is_an_error(
    bucket: pafs.FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a"
    file.write_text("a")

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "AWS Error ACCESS_DENIED during PutObject operation")

    monkeypatch.setattr(folders, "_upload", refuse)

    with pytest.raises(UserError, match=r"s3://bucket.*/a cannot be written"):
        folders.upload_file(file, folder_of(bucket) / "a")

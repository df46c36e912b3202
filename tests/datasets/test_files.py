"""Tests of reading files by path and URI, of credentials in URIs, and of transient errors."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import tenacity

from mcis.datasets.errors import UserError
from mcis.datasets.storage import faults
from mcis.datasets.storage.files import read_bytes, stamps, stamps_of_column
from mcis.datasets.storage.uris import holds_credentials, is_remote, without_credentials

if TYPE_CHECKING:
    from tests.conftest import FaultyS3

BROKEN = Path("/proc/self/mem")
"""A file whose first byte cannot be read: EIO, as from a failing disk."""


def test_a_path_and_a_file_uri_read_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "with space.bin"
    path.write_bytes(b"abc")
    uri = "file://" + str(path).replace(" ", "%20")
    assert read_bytes(str(path)) == read_bytes(uri) == b"abc"
    assert stamps([str(path), uri]) == [(3, path.stat().st_mtime_ns)] * 2
    assert (is_remote(uri), is_remote(str(path))) == (True, False)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"12345")
    assert read_bytes(str(path), max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(str(path), max_bytes=4)


@pytest.mark.parametrize(
    ("uri", "holds", "without"),
    [
        ("s3://key:word@bucket/a/b.csv?region=x", True, "s3://bucket/a/b.csv"),
        ("s3://bucket/a.csv?secret_key=word", True, "s3://bucket/a.csv"),
        ("s3://bucket/a.csv?AWSAccessKeyId=a&access_key=word", True, "s3://bucket/a.csv"),
        ("hdfs://me@host:8020/a", False, "hdfs://host:8020/a"),
        ("s3://bucket/a:b@c.csv?region=x", False, "s3://bucket/a:b@c.csv"),
        ("s3://[bad:word@bucket", True, "s3://bucket"),
        ("s3://key:wo/rd@bucket/a.csv", True, "s3://bucket/a.csv"),
        ("s3://host:9000/a@b.csv", False, "s3://host:9000/a@b.csv"),
        ("abfs://c@acct.dfs.core.windows.net/x.csv", False, "abfs://acct.dfs.core.windows.net/x.csv"),
        ("abfs://c@acct.dfs.core.windows.net/x.csv?sv=1&sig=word&se=2", True, "abfs://acct.dfs.core.windows.net/x.csv"),
        ("https://bucket/a.csv?X-Amz-Signature=word", True, "https://bucket/a.csv"),
        ("https://bucket/a.csv?X-Amz-Credential=word", True, "https://bucket/a.csv"),
        ("gs://bucket/a.csv?X-Goog-Signature=word", True, "gs://bucket/a.csv"),
        ("abfs://c@acct/a.csv?account_key=word", True, "abfs://acct/a.csv"),
        ("s3://bucket/a.csv?design=x&scheme=http", False, "s3://bucket/a.csv"),
        ("/data/a:b@c?password=x", False, "/data/a:b@c?password=x"),
    ],
)
def test_credentials_in_a_uri_are_detected_and_removed(uri: str, holds: bool, without: str) -> None:
    assert (holds_credentials(uri), without_credentials(uri)) == (holds, without)


@pytest.mark.parametrize(
    "uri",
    ["s3://", "s3:///key.jpg", "s3://b ad/x.jpg", "nosuch://a/b.jpg", "abfs://x/y.jpg", "a\0b", "absent.jpg", "://"],
)
def test_an_invalid_name_does_not_affect_other_files(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_bytes(b"x")
    first, second = stamps([uri, str(path)])

    assert first is None
    assert second is not None
    with pytest.raises((OSError, ValueError)):
        read_bytes(uri)


# --- transient errors


@pytest.mark.skipif(not BROKEN.exists(), reason="needs Linux")
def test_a_transient_disk_error_is_retried(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.symlink_to(BROKEN)

    def repair() -> None:
        (tmp_path / "whole").write_bytes(b"abc")
        (tmp_path / "whole").rename(path)

    timer = threading.Timer(0.3, repair)
    timer.start()

    assert read_bytes(str(path)) == b"abc"
    timer.join()


@pytest.mark.skipif(not BROKEN.exists(), reason="needs Linux")
def test_a_persistent_disk_error_raises_and_the_call_can_be_repeated(tmp_path: Path, no_pauses: None) -> None:
    path = tmp_path / "a"
    path.symlink_to(BROKEN)

    with pytest.raises(UserError) as caught:
        read_bytes(str(path))
    assert f"{path} cannot be read, after several attempts: Input/output error" in caught.value.found
    assert "repeat the command" in caught.value.remedy

    path.unlink()
    path.write_bytes(b"abc")
    assert read_bytes(str(path)) == b"abc"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE])
def test_a_transient_error_does_not_make_a_file_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pauses: None, number: int
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    look = os.stat
    failed_calls = []

    def stat(at: Any, **options: Any) -> os.stat_result:
        if str(at) == str(path):
            failed_calls.append(at)
            raise OSError(number, os.strerror(number))
        return look(at, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        with pytest.raises(UserError, match=os.strerror(number)):
            stamps([str(path), str(tmp_path / "absent")])

    assert len(failed_calls) == 8
    assert stamps([str(path), str(tmp_path / "absent")]) == [(3, path.stat().st_mtime_ns), None]


def test_stamps_keep_the_order_of_many_files(tmp_path: Path) -> None:
    paths = [str(tmp_path / str(number)) for number in range(1000)]
    for path in paths[::2]:
        Path(path).write_text(path)
    expected = [(len(path), os.stat(path).st_mtime_ns) if os.path.exists(path) else None for path in paths]

    assert stamps(paths) == expected
    assert stamps_of_column(pa.chunked_array([paths[:700], paths[700:]])).to_pylist() == [
        dict(zip(("size", "changed"), at or (-1, -1), strict=True)) for at in expected
    ]


@pytest.mark.parametrize("name", ["absent", ".", "pipe", "a\0b", "loop", "x" * 300])
def test_permanent_errors_are_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def never(act: Callable[[], object]) -> None:
        raise AssertionError("retried")

    os.mkfifo(tmp_path / "pipe")  # without a writer, opening it would block
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setattr(faults, "RETRY_POLICY", never)

    with pytest.raises((OSError, ValueError)):
        read_bytes(str(tmp_path / name))

    stamps([str(tmp_path / name)])


@pytest.mark.slow
def test_a_busy_server_is_retried(faulty_s3: "FaultyS3") -> None:
    faulty_s3.files["/bucket/a"] = b"abc"
    faulty_s3.faults["/bucket/a"] = [503] * 33  # pyarrow gives up after 31
    assert read_bytes(faulty_s3.uri("/bucket/a")) == b"abc"
    assert faulty_s3.num_requests["/bucket/a"] == 35, "33 failures, one request for the size and one for the content"


@pytest.mark.slow
def test_an_unreachable_server_does_not_make_a_file_absent(
    faulty_s3: "FaultyS3", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "RETRY_POLICY", faults.RETRY_POLICY.copy(stop=tenacity.stop_after_attempt(1)))
    faulty_s3.files["/bucket/a"] = b"abc"
    uri = faulty_s3.uri("/bucket/a")
    absent = faulty_s3.uri("/bucket/absent")
    faulty_s3.stop()

    with pytest.raises(UserError, match="s3://bucket/a cannot be read") as caught:
        read_bytes(uri)
    assert "endpoint" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        stamps([uri, absent])

    faulty_s3.start()
    assert read_bytes(uri) == b"abc"

    first, second = stamps([uri, absent])
    assert first is not None
    assert (first.size, second) == (3, None)


def test_a_slow_transfer_is_retried_and_then_reported(
    faulty_s3: "FaultyS3", monkeypatch: pytest.MonkeyPatch, no_pauses: None
) -> None:
    monkeypatch.setattr(faults, "REMOTE_TIMEOUT", 0.2)
    faulty_s3.files |= {"/bucket/a": b"abc" * 10, "/bucket/b": b"abc" * 10}
    faulty_s3.slow = {"/bucket/a": 2, "/bucket/b": 8}
    began = time.monotonic()

    assert read_bytes(faulty_s3.uri("/bucket/a")) == b"abc" * 10, "the third attempt is fast"
    with pytest.raises(UserError, match=r"s3://bucket/b cannot be read, after several .* after 0.2 s"):
        read_bytes(faulty_s3.uri("/bucket/b"))
    assert time.monotonic() - began < 10
    assert read_bytes(faulty_s3.uri("/bucket/b")) == b"abc" * 10


def test_a_server_without_responses_times_out(
    faulty_s3: "FaultyS3", monkeypatch: pytest.MonkeyPatch, no_pauses: None
) -> None:
    """The server accepts connections and never responds; pyarrow would wait for 100 s, eight times."""
    monkeypatch.setattr(faults, "REMOTE_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"s3://bucket/a?endpoint_override=127.0.0.1:{silent.getsockname()[1]}&scheme=http"
        for ask in (read_bytes, lambda uri: stamps([uri])):
            with pytest.raises(UserError, match=r"s3://bucket/a cannot be read, after several .* after 0.1 s"):
                ask(uri)


@pytest.mark.slow
def test_refused_access_is_not_retried(faulty_s3: "FaultyS3") -> None:
    faulty_s3.files["/bucket/a"] = b"abc"
    uri = faulty_s3.uri("/bucket/a")
    faulty_s3.faults["/bucket/a"] = [403, 403]

    with pytest.raises(PermissionError):
        read_bytes(uri)
    with pytest.raises(UserError, match="access to s3://bucket/a is refused"):
        stamps([uri])
    assert faulty_s3.num_requests["/bucket/a"] == 2
    assert read_bytes(uri) == b"abc"


def test_a_lack_of_memory_is_transient(tmp_path: Path) -> None:
    """Limits the memory of a separate process, and then lifts the limit."""
    script = """
import io, resource
import numpy as np
from PIL import Image
import tenacity
from mcis.datasets.storage import faults, files
from mcis.datasets.images.decode import decode_picture
from mcis.datasets.errors import UserError

faults.RETRY_POLICY = faults.RETRY_POLICY.copy(wait=tenacity.wait_none())
stream = io.BytesIO()
Image.new("RGB", (6000, 6000), "red").save(stream, "PNG")  # 108 MB as RGB, 144 MB as Pillow holds it
open("a.png", "wb").write(stream.getvalue())
used = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1])
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, unlimited[1]))
try:
    files.read_decoded("a.png", decode_picture)
except UserError as error:
    print(error)
else:
    raise SystemExit("there was memory enough")
resource.setrlimit(resource.RLIMIT_AS, unlimited)
print(files.read_decoded("a.png", decode_picture).rgb.shape)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "a.png cannot be read, after several attempts: not enough memory" in done.stdout
    assert done.stdout.endswith("(6000, 6000, 3)\n")

"""Fetching archives from a local server: interrupted transfers continue, and no wrong archive is unpacked."""

import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.sources.download import Archive, fetch

NOISE = np.random.default_rng(0).integers(0, 256, 1_500_000, np.uint8).tobytes()


class Server(ThreadingHTTPServer):
    """Serves `files`; cuts the next answer after `cut` bytes; `ranges` says whether it knows ranges."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.cut: int | None = None
        self.ranges = True

    def archive(self, name: str, members: dict[str, bytes], holds: str) -> Archive:
        self.files[name] = tar(members)
        return Archive(f"http://127.0.0.1:{self.server_port}/{name}", hashlib.md5(self.files[name]).hexdigest(), holds)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.asked.append((self.path[1:], asked))
        content = self.server.files.get(self.path[1:])
        if content is None:
            self.send_error(404)
            return
        start = 0
        if asked and self.server.ranges:
            match = re.fullmatch(r"bytes=(\d+)-", asked)
            assert match
            start = int(match[1])
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        cut, self.server.cut = self.server.cut, None
        self.wfile.write(content[start:][:cut])

    def log_message(self, *arguments: object) -> None:
        """Keeps the tests' output clean."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def left(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_an_archive_ends_in_its_folder_and_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    archive = server.archive("voc.tar", {"VOCdevkit/VOC2012/JPEGImages/a.jpg": NOISE}, "VOCdevkit/VOC2012")
    told: list[tuple[str, int, int]] = []
    folder = fetch(archive, tmp_path / "data", lambda *now: told.append(now))
    assert folder == tmp_path / "data/VOCdevkit/VOC2012"
    assert (folder / "JPEGImages/a.jpg").read_bytes() == NOISE
    assert left(tmp_path / "data") == ["VOCdevkit/VOC2012/JPEGImages/a.jpg"]
    size = len(server.files["voc.tar"])
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1] == ("voc.tar", size, size)
    server.asked.clear()
    assert fetch(archive, tmp_path / "data") == folder
    assert not server.asked


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_transfer_continues_where_the_server_knows_ranges(
    server: Server, tmp_path: Path, ranges: bool
) -> None:
    archive = server.archive("voc.tar", {"VOC2012/a": NOISE}, "VOC2012")
    server.ranges, server.cut = ranges, 1_000_000
    with pytest.raises(UserError, match="did not arrive") as caught:
        fetch(archive, tmp_path)
    assert "continues" in caught.value.remedy
    (part,) = tmp_path.iterdir()
    received = part.stat().st_size
    assert 0 < received <= 1_000_000
    told: list[tuple[str, int, int]] = []
    fetch(archive, tmp_path, lambda *now: told.append(now))
    assert server.asked == [("voc.tar", None), ("voc.tar", f"bytes={received}-")]
    assert (tmp_path / "VOC2012/a").read_bytes() == NOISE
    assert (received if ranges else 0) < told[0][1] <= told[-1][1] == told[-1][2] == len(server.files["voc.tar"])
    assert left(tmp_path) == ["VOC2012/a"]


def test_a_transfer_that_ended_before_its_file_was_renamed(server: Server, tmp_path: Path) -> None:
    archive = server.archive("voc.tar", {"VOC2012/a": b"1"}, "VOC2012")
    (tmp_path / "voc.tar.part").write_bytes(server.files["voc.tar"])
    fetch(archive, tmp_path)
    assert left(tmp_path) == ["VOC2012/a"]


def test_an_archive_with_a_wrong_sum_is_deleted_and_fetched_again(server: Server, tmp_path: Path) -> None:
    archive = server.archive("voc.tar", {"VOC2012/a": b"1"}, "VOC2012")
    right = server.files["voc.tar"]
    server.files["voc.tar"] = right + b"\0"
    with pytest.raises(UserError) as caught:
        fetch(archive, tmp_path)
    assert hashlib.md5(right + b"\0").hexdigest() in caught.value.found
    assert archive.md5 in caught.value.expected
    assert not left(tmp_path)
    server.files["voc.tar"] = right
    fetch(archive, tmp_path)
    assert left(tmp_path) == ["VOC2012/a"]


def test_an_archive_that_the_server_lacks_is_an_error(server: Server, tmp_path: Path) -> None:
    archive = server.archive("voc.tar", {"VOC2012/a": b"1"}, "VOC2012")
    server.files.clear()
    with pytest.raises(UserError, match=r"voc\.tar did not arrive: 404") as caught:
        fetch(archive, tmp_path)
    assert str(tmp_path / "voc.tar") in caught.value.remedy
    assert not left(tmp_path)


def linked(target: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as links:
        member = tarfile.TarInfo("VOC2012/etc")
        member.type, member.linkname = tarfile.SYMTYPE, target
        links.addfile(member)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (tar({"VOC2012/a": b"1", "../outside": b"2"}), "outside"),
        (tar({"VOC2012/a": b"1", "VOC2012/../../outside": b"2"}), "outside"),
        (linked("/etc"), "absolute path"),
        (b"<html>", ""),
        (tar({"other/a": b"1"}), ""),
        (tar({"VOC2012/a": NOISE})[:900_000], ""),
    ],
)
def test_an_archive_that_leads_out_of_its_folder_or_lacks_it_is_refused(
    server: Server, tmp_path: Path, content: bytes, found: str
) -> None:
    archive = server.archive("voc.tar", {}, "VOC2012")
    server.files["voc.tar"] = content
    with pytest.raises(UserError, match=f"cannot be unpacked: .*{found}") as caught:
        fetch(archive._replace(md5=hashlib.md5(content).hexdigest()), tmp_path / "data")
    assert "VOC2012" in caught.value.expected
    assert left(tmp_path) == ["data/voc.tar"], "neither outside nor half unpacked"

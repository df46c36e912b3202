"""PASCAL VOC 2012 and SBD from their homes -> unpacked folders, as `voc.list_voc` takes them.

A transfer that was cut goes on where it ended, an archive is unpacked only with the right checksum, and a folder that
is there is whole. Downloads by torchvision or pooch would begin anew, hence requests and a Range header.
"""

import hashlib
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import requests

from mcis.datasets.errors import UserError

TIMEOUT = 60.0
"""Seconds without a byte after which a transfer counts as cut."""

_PIECE = 2**18

Progress = Callable[[str, int, int], object]
"""Is told an archive's name, the bytes that are there, and those of the whole, 0 where the server does not say."""


class Archive(NamedTuple):
    """A tar archive: where it is from, its MD5, and the folder in it that is wanted."""

    url: str
    md5: str
    holds: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class Fetched(NamedTuple):
    """The folders that `list_voc` takes as root and sbd."""

    voc: Path
    sbd: Path


VOC = Archive(
    "https://thor.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar",
    "6cd6e144f989b92b3379bac3b3de84fd",
    "VOCdevkit/VOC2012",
)
"""2.0 GB; address and sum as in torchvision.datasets.voc."""

SBD = Archive(
    "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours/benchmark.tgz",
    "82b4d87ceb2ed10f6038a1cba92111cb",
    "benchmark_RELEASE",
)
"""1.4 GB; address and sum as in torchvision.datasets.sbd."""


def fetch_voc(
    folder: Path,
    *,
    voc: Archive = VOC,
    sbd: Archive = SBD,
    on_progress: Progress | None = None,
    timeout: float = TIMEOUT,
) -> Fetched:
    """Both data sets in a folder; what is there already is not fetched again.

    Raises:
        UserError: as `fetch` does.
    """
    return Fetched(*(fetch(a, folder, on_progress=on_progress, timeout=timeout) for a in (voc, sbd)))


def fetch(archive: Archive, folder: Path, *, on_progress: Progress | None = None, timeout: float = TIMEOUT) -> Path:
    """The unpacked folder of an archive. An archive that lies in the folder is taken instead of a transfer.

    Raises:
        UserError: the server cannot be reached, refuses or cuts the transfer; the checksum is wrong, and the archive
            has been deleted; it is no tar archive, leads out of the folder, or lacks what is wanted.
    """
    target, whole = folder / archive.holds, folder / archive.name
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    if not whole.is_file():
        part = folder / f"{archive.name}.part"
        try:
            _transfer(archive, part, on_progress, timeout)
        except OSError as error:  # requests' errors are OSErrors, as is a full disk
            raise UserError(
                f"{archive.url} did not arrive: {error}",
                "the whole archive",
                f"repeat the command, which goes on where this one ended, or put the archive at {whole}",
            ) from None
        part.rename(whole)
    _check(archive, whole)
    _unpack(archive, whole, target)
    whole.unlink()
    return target


def _transfer(archive: Archive, part: Path, on_progress: Progress | None, timeout: float) -> None:
    done = part.stat().st_size if part.is_file() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with requests.get(archive.url, headers=headers, stream=True, timeout=timeout) as answer:
        if done and answer.status_code == requests.codes.requested_range_not_satisfiable:
            return  # everything has come already; if too much has, the checksum tells
        answer.raise_for_status()
        if answer.status_code != requests.codes.partial_content:
            done = 0  # the server knows no ranges and begins anew
        total = done + int(answer.headers.get("Content-Length", -done))
        with part.open("ab" if done else "wb") as file:
            for piece in answer.iter_content(_PIECE):
                file.write(piece)
                done += len(piece)
                if on_progress:
                    on_progress(archive.name, done, total)


def _check(archive: Archive, whole: Path) -> None:
    with whole.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != archive.md5:
        whole.unlink()
        raise UserError(
            f"{whole.name} has the MD5 sum {found}",
            f"{archive.md5}, as {archive.url} had",
            "repeat the command: the file has been deleted and is fetched anew",
        )


def _unpack(archive: Archive, whole: Path, target: Path) -> None:
    """Unpacks aside, then renames; refused is all that tarfile's filter `data` refuses, such as paths out of it."""
    aside = whole.with_name(f"{whole.name}.unpacked")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with tarfile.open(whole) as tar:
            tar.extractall(aside, filter="data")
        target.parent.mkdir(parents=True, exist_ok=True)
        (aside / archive.holds).rename(target)
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise UserError(
            f"{whole} cannot be unpacked: {error}",
            f"an archive with a folder {archive.holds}",
            f"free some space, and if there is enough, delete or replace {whole}",
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)

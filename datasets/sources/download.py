"""Downloads PASCAL VOC 2012 and SBD -> unpacked folders, as `voc.list_voc` takes them.

An interrupted transfer continues where it ended, an archive is unpacked only with the right checksum, and a folder that
exists is complete. Downloads by torchvision or pooch would begin again, hence requests and a Range header.
"""

import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import requests

from mcis.datasets.errors import UserError

_TIMEOUT = 60.0  # seconds without a byte after which a transfer counts as interrupted
_CHUNK = 2**18

Progress = Callable[[str, int, int], object]
"""Called with an archive's name, the bytes so far, and those of the complete archive (0: the server does not say)."""


class Archive(NamedTuple):
    """A tar archive: its address, its MD5 sum, and the path of the folder in it that is wanted."""

    url: str
    md5: str
    folder: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


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


def fetch(archive: Archive, folder: Path, on_progress: Progress | None = None) -> Path:
    """Fetches and unpacks an archive; returns the unpacked folder. An archive that lies in `folder` is not transferred.

    Raises:
        UserError: the server cannot be reached, refuses or interrupts the transfer; the checksum is wrong, and the
            archive has been deleted; it is no tar archive, leads out of the folder, or lacks the wanted folder.
    """
    target, file = folder / archive.folder, folder / archive.name
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        part = folder / f"{archive.name}.part"
        try:
            _transfer(archive, part, on_progress)
        except OSError as error:  # requests' errors are OSErrors, as is a full disk
            raise UserError(
                f"{archive.url} did not arrive: {error}",
                "the complete archive",
                f"repeat the command, which continues where this one ended, or put the archive at {file}",
            ) from None
        part.rename(file)
    with file.open("rb") as content:
        md5 = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if md5 != archive.md5:
        file.unlink()
        raise UserError(
            f"{file.name} has the MD5 sum {md5}",
            f"{archive.md5}, the sum of {archive.url}",
            "repeat the command: the file has been deleted and is fetched again",
        )
    _unpack(archive, file, target)
    file.unlink()
    return target


def _transfer(archive: Archive, part: Path, on_progress: Progress | None) -> None:
    done = part.stat().st_size if part.is_file() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with requests.get(archive.url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
        if done and response.status_code == requests.codes.requested_range_not_satisfiable:
            return  # every byte has arrived; the checksum tells if there are too many
        response.raise_for_status()
        if response.status_code != requests.codes.partial_content:
            done = 0  # the server does not support ranges and sends the archive from its start
        total = done + int(response.headers.get("Content-Length", -done))
        with part.open("ab" if done else "wb") as output:
            for chunk in response.iter_content(_CHUNK):
                output.write(chunk)
                done += len(chunk)
                if on_progress:
                    on_progress(archive.name, done, total)


def _unpack(archive: Archive, file: Path, target: Path) -> None:
    """Unpacks aside, then renames. tarfile's filter `data` refuses paths that lead out of the folder."""
    aside = file.with_name(f"{file.name}.unpacked")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with tarfile.open(file) as tar:
            tar.extractall(aside, filter="data")
        os.sync()  # what has its name is on the disk: the archive is deleted then
        target.parent.mkdir(parents=True, exist_ok=True)
        (aside / archive.folder).rename(target)
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise UserError(
            f"{file} cannot be unpacked: {error}",
            f"an archive with a folder {archive.folder}",
            f"free some space, and if there is enough, delete or replace {file}",
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)

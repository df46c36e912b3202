"""URIs of single files: paths of this machine, or s3://, gs:// and what else pyarrow's file systems open.

Everything that a data set names is read through here, so a table of s3:// images needs no module of its own.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pyarrow.fs as pafs

MAX_BYTES = 2**28
"""Largest file that is read whole, 256 MiB: a picture above it is no training image."""


class Stamp(NamedTuple):
    """Size in bytes and time of the last change in nanoseconds: what tells a changed file from an unchanged one."""

    size: int
    changed: int


def is_remote(uri: str) -> bool:
    """Whether a URI names a file system other than this machine's."""
    return "://" in uri


def read_bytes(uri: str) -> bytes:
    """The content of one file.

    Raises:
        OSError: it is absent, unreadable or larger than MAX_BYTES, or no file system knows its scheme.
    """
    if is_remote(uri):
        system, path = _place(uri)
        with system.open_input_stream(path, compression=None) as stream:
            data = stream.read(MAX_BYTES + 1)
    else:
        with Path(uri).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(f"more than {MAX_BYTES} bytes")
    return data


def stamps(uris: Sequence[str]) -> list[Stamp | None]:
    """The stamp of each file, None for one that is not there.

    Raises:
        OSError: a remote file system cannot be asked.
    """
    out: list[Stamp | None] = [None if is_remote(uri) else _local_stamp(uri) for uri in uris]
    remote: dict[int, tuple[pafs.FileSystem, dict[int, str]]] = {}
    for place, uri in enumerate(uris):
        if is_remote(uri):
            system, path = _place(uri)
            remote.setdefault(id(system), (system, {}))[1][place] = path
    for system, paths in remote.values():
        for place, info in zip(paths, system.get_file_info(list(paths.values())), strict=True):
            if info.type == pafs.FileType.File:
                out[place] = Stamp(info.size or 0, info.mtime_ns or 0)
    return out


def _local_stamp(uri: str) -> Stamp | None:
    try:
        state = Path(uri).stat()
    except (OSError, ValueError):  # ValueError: no path, as it holds a null byte
        return None
    return Stamp(state.st_size, state.st_mtime_ns)


def _place(uri: str) -> tuple[pafs.FileSystem, str]:
    parts = urlsplit(uri, allow_fragments=False)
    query = f"?{parts.query}" if parts.query else ""
    system, root = _system(f"{parts.scheme}://{parts.netloc}{query}")
    return system, f"{root.rstrip('/')}{parts.path}"


@functools.lru_cache(maxsize=64)
def _system(root: str) -> tuple[pafs.FileSystem, str]:
    try:
        system, path = pafs.FileSystem.from_uri(root)
    except (ValueError, NotImplementedError) as error:
        raise OSError(f"{root}: no such file system ({error})") from None
    return system, path

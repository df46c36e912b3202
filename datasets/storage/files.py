"""Single files by their URIs: paths of this machine, or URIs of s3://, gs:// and the other file systems of pyarrow.

Everything that a data set names is read through here, so a table of s3:// images needs no further code, and faults that
pass are met here for all (`storage.faults`).
"""

import contextlib
import errno
import functools
import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from mcis.datasets.storage.faults import access_refused, call_remote, error_text, parser_errors, retry_io
from mcis.datasets.storage.threads import map_in_threads
from mcis.datasets.storage.uris import is_remote, without_credentials
from mcis.datasets.tables.large_tables import pieces

MAX_BYTES = 2**28
"""Largest file that is read, 256 MiB: a larger picture is no training image."""
_PARALLEL = 32
_T = TypeVar("_T")


class Stamp(NamedTuple):
    """Size in bytes and time of the last change in nanoseconds: they tell a changed file from an unchanged one."""

    size: int
    changed: int


def read_bytes(uri: str, most: int = MAX_BYTES) -> bytes:
    """The content of one file, read with `retry_io`.

    Raises:
        UserError: its file system does not answer, or memory is short, for half a minute.
        PermissionError: access is refused.
        OSError: it is absent, no plain file or larger than `most` bytes.
        ValueError: it is no path or URI at all, or no file system knows its scheme.
    """
    data = retry_io(uri, functools.partial(_read, uri, most + 1))
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes")
    return data


def read_opened(uri: str, read: Callable[[BinaryIO], _T], most: int = MAX_BYTES) -> _T:
    """What `read` makes of a file that is open; of a file of this machine it holds what it reads of it alone. Errors as
    of `read_bytes`, and what `read` raises."""
    path = path_on_disk(uri)
    if path is None:
        return read(io.BytesIO(read_bytes(uri, most)))

    def opened() -> _T:
        with _opened(path) as file:
            if os.fstat(file.fileno()).st_size > most:
                raise OSError(errno.EFBIG, f"more than {most} bytes")
            with parser_errors():
                return read(file)

    return retry_io(uri, opened)


def read_decoded(uri: str, decode: Callable[[bytes], _T]) -> _T:
    """What a decoder makes of a file; reading and a decoder's lack of memory are met with `retry_io`. Errors as of
    `read_bytes`, and what `decode` raises."""
    return retry_io(uri, functools.partial(decode, read_bytes(uri)))


def _read(uri: str, most: int) -> bytes:
    if path := path_on_disk(uri):
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(min(most, size + 1))  # Python reserves as many bytes as it is asked for
    system, place = locate(uri)
    remote = call_remote(functools.partial(system.open_input_file, place))
    size = min(remote.size(), most)
    return call_remote(functools.partial(_read_all, remote, size), size=size)


def _read_all(file: pa.NativeFile, size: int) -> bytes:
    with file:
        return bytes(file.read(size))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A plain file of this machine, open. A pipe that nobody writes to is not waited for."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no plain file")
        yield file


def stamp(uri: str) -> Stamp | None:
    """The stamp of a file, None of one that does not exist, asked for with `retry_io`; UserError where its file system
    does not answer for half a minute, or refuses access."""

    def ask() -> Stamp | None:
        path = path_on_disk(uri) if is_remote(uri) else uri
        if path is not None:
            state = os.stat(path)
            return Stamp(state.st_size, state.st_mtime_ns)
        system, place = locate(uri)
        info = call_remote(functools.partial(system.get_file_info, place))
        return Stamp(info.size or 0, info.mtime_ns or 0) if info.type == pafs.FileType.File else None

    try:
        return retry_io(uri, ask)
    except PermissionError as error:
        raise access_refused(uri, error) from None
    except (OSError, ValueError):  # ValueError: no path, as it holds a null byte, or no such URI; reading it says which
        return None


def stamps(uris: Sequence[str]) -> list[Stamp | None]:
    """As `stamp` of each file, in many threads, each of which asks for some hundred one after the other."""
    count = min(2**9, -(-len(uris) // _PARALLEL) or 1)
    parts = (uris[first : first + count] for first in range(0, len(uris), count))
    found = map_in_threads(lambda part: list(map(stamp, part)), parts, threads=_PARALLEL)
    return [each for part in found for each in part]


def stamps_of_column(uris: pa.ChunkedArray) -> pa.Table:
    """As `stamps`, in the columns `size`, bytes, and `changed`, ns, both -1 for a file that does not exist, int64."""
    found, done = np.empty((len(uris), 2), np.int64), 0
    for piece in pieces(uris):
        found[done : done + len(piece)] = [each or (-1, -1) for each in stamps(piece.to_pylist())]
        done += len(piece)
    return pa.table({"size": found[:, 0], "changed": found[:, 1]})


def sync(path: Path) -> None:
    """Returns once a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def path_on_disk(uri: str) -> Path | None:
    """The path of a file of this machine, None for a URI of another file system."""
    if uri.startswith("file://"):
        return Path(unquote(urlsplit(uri, allow_fragments=False).path))
    return None if is_remote(uri) else Path(uri)


def locate(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a URI, and the path in it; ValueError where it is no URI, or none knows its scheme."""
    parts = urlsplit(uri, allow_fragments=False)
    query = f"?{parts.query}" if parts.query else ""
    system, root = _system(f"{parts.scheme}://{parts.netloc}{query}")
    return system, f"{root.rstrip('/')}{parts.path}"


@functools.lru_cache(maxsize=64)
def _system(root: str) -> tuple[pafs.FileSystem, str]:
    try:
        system, path = pafs.FileSystem.from_uri(root)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"{without_credentials(root)}: no such file system ({error_text(error)})") from None
    return system, path

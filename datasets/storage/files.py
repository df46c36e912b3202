"""Single files by URI: paths of this machine, or URIs of s3://, gs:// and the other file systems of pyarrow.

All files that a data set names are read here, so a table of s3:// images needs no further code and transient errors are
handled in one place (`storage.faults`).
"""

import contextlib
import errno
import functools
import io
import math
import os
import stat
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from mcis.datasets.storage.faults import access_refused, call_remote, error_text, parser_errors, retry_io
from mcis.datasets.storage.object_lists import Stamp, list_objects
from mcis.datasets.storage.threads import map_in_threads
from mcis.datasets.storage.uris import is_remote, without_credentials
from mcis.datasets.tables.large_tables import in_shards

MAX_BYTES = 2**28
"""Maximum size of a file, 256 MiB. Larger files are not training images."""
RELOCATE = "if the files of a run were moved, name their new place by mcis relocate --name RUN OLD NEW"
"""Remedy for files that a run had and that are absent."""
_PARALLEL = 32
"""Number of threads that read stamps."""
_T = TypeVar("_T")


def existing_spelling(path: str) -> str:
    """Returns the path of an existing file that another system writes as `path`; the path itself if there is none.

    Windows separates folders by `\\`, and web tools write a space as `%20`. The letter `ö` is one character (Unicode
    form NFC), as keyboards write it, or an o and a mark (NFD), as some file systems of macOS do.
    """
    if os.path.lexists(path):
        return path
    slashes = path.replace("\\", "/")
    for spelling in dict.fromkeys((path, slashes, unquote(slashes))):
        leaves_folder = ".." in spelling.split("/") and spelling != path
        found = None if leaves_folder else _existing_unicode_form(spelling)
        if found is not None:
            return found
    return path


def _existing_unicode_form(path: str) -> str | None:
    """Returns the Unicode form, of each part of a path, in which the file exists; None if there is no file."""
    if path.isascii():
        return path if os.path.lexists(path) else None

    found = ""
    for position, part in enumerate(path.split("/")):
        forms = (part, unicodedata.normalize("NFC", part), unicodedata.normalize("NFD", part))
        candidates = [f"{found}/{form}" if position else form for form in forms]
        # The first part of an absolute path is empty.
        existing = [candidate for candidate in candidates if not candidate or os.path.lexists(candidate)]
        if not existing:
            return None
        found = existing[0]
    return found


def read_bytes(uri: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the content of a file, read with `retry_io`.

    Raises:
        UserError: The file system does not respond, or memory is insufficient, for half a minute.
        PermissionError: Access is refused.
        OSError: The file does not exist, is not a regular file, or is larger than `max_bytes` bytes.
        ValueError: `uri` is neither a path nor a URI, or its scheme is unknown.
    """
    data = retry_io(uri, functools.partial(_read, uri, max_bytes + 1))
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes")
    return data


def read_opened(uri: str, read: Callable[[BinaryIO], _T], max_bytes: int = MAX_BYTES) -> _T:
    """Opens a file and returns the result of `read`. Files of this machine are not loaded as a whole.

    Raises:
        The errors of `read_bytes`, and those of `read`.
    """
    path = path_on_disk(uri)
    if path is None:
        return read(io.BytesIO(read_bytes(uri, max_bytes)))

    def read_from_disk() -> _T:
        with _open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > max_bytes:
                raise OSError(errno.EFBIG, f"more than {max_bytes} bytes")
            with parser_errors():
                return read(file)

    return retry_io(uri, read_from_disk)


def read_decoded(uri: str, decode: Callable[[bytes], _T]) -> _T:
    """Returns the result of `decode` for the content of a file. A MemoryError of the decoder is retried too.

    Raises:
        The errors of `read_bytes`, and those of `decode`.
    """
    return retry_io(uri, functools.partial(decode, read_bytes(uri)))


def _read(uri: str, max_bytes: int) -> bytes:
    """Returns the first bytes of a file, at most `max_bytes`."""
    path = path_on_disk(uri)
    if path is not None:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(min(max_bytes, size + 1))  # Python allocates the requested number of bytes

    system, remote_path = locate(uri)
    file = call_remote(functools.partial(system.open_input_file, remote_path))
    size = min(file.size(), max_bytes)
    return call_remote(functools.partial(_read_all, file, size), size=size)


def _read_all(file: pa.NativeFile, size: int) -> bytes:
    with file:
        return bytes(file.read(size))


@contextlib.contextmanager
def _open_regular(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file of this machine. O_NONBLOCK keeps it from waiting for a pipe without a writer."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield file


def stamp(uri: str) -> Stamp | None:
    """Returns the stamp of a file, read with `retry_io`; None if there is no such file or `uri` is invalid.

    Raises:
        UserError: The file system does not respond for half a minute, or refuses access.
    """

    def read_stamp() -> Stamp | None:
        path = path_on_disk(uri) if is_remote(uri) else uri
        if path is not None:
            state = os.stat(path)
            return Stamp(state.st_size, state.st_mtime_ns)

        system, remote_path = locate(uri)
        info = call_remote(functools.partial(system.get_file_info, remote_path))
        if info.type != pafs.FileType.File:
            return None
        return Stamp(info.size or 0, info.mtime_ns or 0)

    try:
        return retry_io(uri, read_stamp)
    except PermissionError as error:
        raise access_refused(uri, error) from None
    except (OSError, ValueError):  # ValueError: an invalid path or URI; reading the file reports which
        return None


def is_file(path: str) -> bool:
    """Returns whether a path of this machine is a regular file, read with `retry_io`.

    Raises:
        UserError: The file system does not respond for half a minute, or refuses access.
    """
    try:
        return stat.S_ISREG(retry_io(path, functools.partial(os.stat, path)).st_mode)
    except PermissionError as error:
        raise access_refused(path, error) from None
    except (OSError, ValueError):
        return False


def stamps(uris: Sequence[str]) -> list[Stamp | None]:
    """Returns `stamp` of each file, in order. Objects of S3 are listed, where that takes fewer requests."""
    listed = list_objects(uris)
    if not listed:
        return _stamp_in_threads(uris)
    other_stamps = iter(_stamp_in_threads([uri for uri in uris if uri not in listed]))
    return [listed[uri] if uri in listed else next(other_stamps) for uri in uris]


def _stamp_in_threads(uris: Sequence[str]) -> list[Stamp | None]:
    """Returns `stamp` of each file, in order. Threads process parts of at most 512 files in parallel."""
    files_per_thread = math.ceil(len(uris) / _PARALLEL)
    part_size = min(512, max(1, files_per_thread))
    parts = (uris[first : first + part_size] for first in range(0, len(uris), part_size))

    found_stamps = []
    for part_stamps in map_in_threads(_stamp_all, parts, threads=_PARALLEL):
        found_stamps.extend(part_stamps)
    return found_stamps


def _stamp_all(uris: Sequence[str]) -> list[Stamp | None]:
    return [stamp(uri) for uri in uris]


def stamps_of_column(uris: pa.ChunkedArray) -> pa.Table:
    """Returns the stamps of files as int64 columns `size`, bytes, and `changed`, ns; -1 for files that do not exist."""
    values = np.empty((len(uris), 2), np.int64)
    first = 0
    for shard in in_shards([pa.table([uris], ["uri"])]):
        shard_stamps = stamps(shard["uri"].to_pylist())
        values[first : first + len(shard)] = [file_stamp or (-1, -1) for file_stamp in shard_stamps]
        first += len(shard)
    return pa.table({"size": values[:, 0], "changed": values[:, 1]})


def sync(path: Path) -> None:
    """Flushes a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def path_on_disk(uri: str) -> Path | None:
    """Returns the path of a file of this machine; None for a URI of another file system."""
    if uri.startswith("file://"):
        return Path(unquote(urlsplit(uri, allow_fragments=False).path))
    return None if is_remote(uri) else Path(uri)


def locate(uri: str) -> tuple[pafs.FileSystem, str]:
    """Returns the file system of a URI and the path in it.

    Raises:
        ValueError: `uri` is not a valid URI, or its scheme is unknown.
    """
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

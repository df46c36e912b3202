"""URIs of single files: paths of this machine, or or URIs of s3://, gs:// and the other file systems of pyarrow.

Everything that a data set names is read through here, so a table of s3:// images needs no further code.
"""

import functools
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow.fs as pafs

MAX_BYTES = 2**28
"""Largest file that is read, 256 MiB: a larger picture is no training image."""

SECRET = re.compile(r"pass(?!file)|pwd|token|secret|api_?key|access_key|credential", re.IGNORECASE)
"""What is found in the names of parameters and variables that hold passwords, keys and tokens."""
_PARALLEL = 32


class Stamp(NamedTuple):
    """Size in bytes and time of the last change in nanoseconds: they tell a changed file from an unchanged one."""

    size: int
    changed: int


def is_remote(uri: str) -> bool:
    """Whether it is a URI rather than a path."""
    return "://" in uri


def holds_credentials(uri: str) -> bool:
    """Whether a URI has a password before its host, or a parameter that is called like a password, key or token."""
    if not is_remote(uri):
        return False
    _, user, _, _, query = _parts(uri)
    return ":" in user or any(SECRET.search(name) for name, _ in parse_qsl(query))


def without_credentials(uri: str) -> str:
    """A URI without user, password and query, which may hold them; a path as it is."""
    if not is_remote(uri):
        return uri
    scheme, _, host, path, _ = _parts(uri)
    return f"{scheme}://{host}{path}"


def _parts(uri: str) -> tuple[str, str, str, str, str]:
    """Scheme, user with password, host, path and query of a URI, however malformed."""
    scheme, _, rest = uri.partition("://")
    rest, _, query = rest.partition("?")
    place, slash, path = rest.partition("/")
    user, _, host = place.rpartition("@")
    return scheme, user, host, slash + path, query


def read_bytes(uri: str, most: int = MAX_BYTES) -> bytes:
    """The content of one file.

    Raises:
        OSError: it is absent, unreadable or larger than `most` bytes, or no file system knows its scheme.
        ValueError: it is no path or URI at all.
    """
    local = _local(uri)
    if local:
        with local.open("rb") as file:
            data = file.read(most + 1)
    else:
        system, path = _locate(uri)
        with system.open_input_stream(path, compression=None) as stream:
            data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(f"more than {most} bytes")
    return data


def stamps(uris: Sequence[str]) -> list[Stamp | None]:
    """The stamp of each file, None for a file that does not exist or whose file system does not answer.

    Remote file systems are asked for many at a time: each question waits for the network.
    """
    locals_ = [_local(uri) for uri in uris]
    out = [_local_stamp(path) if path else None for path in locals_]
    remote = [position for position, path in enumerate(locals_) if path is None]
    if remote:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            remote_stamps = pool.map(_remote_stamp, (uris[position] for position in remote))
            for position, stamp in zip(remote, remote_stamps, strict=True):
                out[position] = stamp
    return out


def _local(uri: str) -> Path | None:
    """The path of a file of this machine, None for a URI of another file system."""
    if uri.startswith("file://"):
        return Path(unquote(urlsplit(uri, allow_fragments=False).path))
    return None if is_remote(uri) else Path(uri)


def _local_stamp(path: Path) -> Stamp | None:
    try:
        state = path.stat()
    except (OSError, ValueError):  # ValueError: no path, as it holds a null byte
        return None
    return Stamp(state.st_size, state.st_mtime_ns)


def _remote_stamp(uri: str) -> Stamp | None:
    try:
        system, path = _locate(uri)
        info = system.get_file_info(path)
    except (OSError, ValueError):  # access refused, or no such URI: reading it will say which
        return None
    return Stamp(info.size or 0, info.mtime_ns or 0) if info.type == pafs.FileType.File else None


def _locate(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a URI, and the path in it."""
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

"""URIs of single files: paths of this machine, or URIs of s3://, gs:// and the other file systems of pyarrow.

Everything that a data set names is read through here, so a table of s3:// images needs no further code, and faults that
pass (a disk's error, a server that is busy or away, a lack of memory) are met here for all, by trying again.
"""

import array
import contextlib
import errno
import functools
import io
import itertools
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import tenacity
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.storage.threads import in_threads
from mcis.datasets.tables.large_tables import pieces

MAX_BYTES = 2**28
"""Largest file that is read, 256 MiB: a larger picture is no training image."""

SECRET = re.compile(
    r"pass(?!file)|pwd|token|secret|(api|access|account|shared)_?key|credential|signature|^sig$", re.IGNORECASE
)
"""What is found in the names of parameters and variables that hold passwords, keys and tokens."""
_PARALLEL = 32
_AT_ONCE = 2e-5
"""Seconds in which a file system that has the answer in memory gives it, many times over."""
PATIENCE = 30.0
"""Seconds in which a remote file system has to answer; its content may take as long beside what its size allows."""
SLOWEST = 100_000
"""Bytes per second at which content has to arrive."""
_T = TypeVar("_T")

_LASTING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}
_LASTING |= {errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.EFBIG}
"""Errors that say something of a file. Others say something of the machine or of the way to the file."""
_REMOTE_ERRORS: dict[type[OSError], re.Pattern[str]] = {
    IsADirectoryError: re.compile("Not a regular file"),
    FileNotFoundError: re.compile(r"NO_SUCH_(KEY|BUCKET)|RESOURCE_NOT_FOUND|Bucket .* not found"),
    PermissionError: re.compile(r"ACCESS_DENIED|INVALID_\w+_ID|SIGNATURE_DOES_NOT_MATCH|EXPIRED_TOKEN|status 40[13]"),
}
"""What the texts of pyarrow's errors say, which have no number."""


class Stamp(NamedTuple):
    """Size in bytes and time of the last change in nanoseconds: they tell a changed file from an unchanged one."""

    size: int
    changed: int


def is_remote(uri: str) -> bool:
    """Whether it is a URI rather than a path."""
    return "://" in uri


def holds_credentials(uri: str) -> bool:
    """Whether a URI has a password before its host, or a parameter that is called like a password, key or signature."""
    if not is_remote(uri):
        return False
    _, user, _, _, query = _parts(uri)
    return ":" in user or any(SECRET.search(name) for name, _ in parse_qsl(query))


def credentials_refused(found: str) -> UserError:
    """The error that says where credentials were found, and does not repeat them."""
    return UserError(
        f"a password, key, token or signature in {found}",
        "URIs without them, as they are written into files, tables and messages",
        "leave them out: file systems find them in the environment, such as AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY",
    )


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
    if not user and "@" in path and re.search(r":(?!\d*$)", place):  # a password that holds a slash as it is
        user, _, behind = path.rpartition("@")
        user, (host, slash, path) = f"{place}/{user}", behind.partition("/")
    return scheme, user, host, slash + path, query


def retry_io(uri: str, act: Callable[[], _T]) -> _T:
    """What `act` returns, which reads or decodes a file; a fault that may pass is met with further tries (`_AGAIN`).

    Raises:
        UserError: the fault did not pass in half a minute, or longer where each try takes long.
        OSError: one that says something of the file: it is absent, a folder, its name is none, access is refused.
    """
    try:
        try:
            return act()
        except (OSError, MemoryError) as error:
            if not may_pass(error):
                raise
            return _AGAIN(act)
    except (OSError, MemoryError) as error:
        if not may_pass(error):
            raise
        what = "not enough memory" if isinstance(error, MemoryError) else error_text(error)
        raise UserError(
            f"{without_credentials(uri)} could not be read, however often that was tried: {what}",
            "a file system that answers, and memory for the file",
            "see to that and repeat the command: what is finished is kept, and nothing is concluded about this file",
        ) from None


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    lasting = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
    if isinstance(error, OSError):
        return not isinstance(error, lasting) and error.errno not in _LASTING
    return isinstance(error, MemoryError)


_AGAIN = tenacity.Retrying(
    retry=tenacity.retry_if_exception(may_pass),
    stop=tenacity.stop_after_attempt(7),
    wait=tenacity.wait_exponential(0.5, max=16) + tenacity.wait_random(0, 0.5),
    reraise=True,
)
"""The second try follows at once, others after pauses of 0.5, 1, 2, 4, 8 and 16 seconds and up to half a second more,
so that many processes do not ask again all at once. In each of them pyarrow's S3 client tries 31 times in 6 seconds."""


def error_text(error: BaseException) -> str:
    """What an error of a file system says."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


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
    """What `read` makes of a file that is open; of a file of this machine it holds what it reads of it alone.

    Raises:
        UserError, OSError, ValueError: as `read_bytes` does, and what `read` raises.
    """
    if local_path(uri) is None:
        return read(io.BytesIO(read_bytes(uri, most)))

    def opened() -> _T:
        with _opened(uri) as file:
            if os.fstat(file.fileno()).st_size > most:
                raise OSError(errno.EFBIG, f"more than {most} bytes")
            with parser_errors():
                return read(file)

    return retry_io(uri, opened)


@contextlib.contextmanager
def parser_errors() -> Iterator[None]:
    """Makes a ValueError of an OSError without a number: it is a parser's, which says so of what it read."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise ValueError(str(error)) from None
        raise


def read_decoded(uri: str, decode: Callable[[bytes], _T]) -> _T:
    """What a decoder makes of a file; both reading and a decoder's lack of memory are met with `retry_io`.

    Raises:
        UserError, OSError, ValueError: as `read_bytes` does, and what `decode` raises.
    """
    return retry_io(uri, functools.partial(decode, read_bytes(uri)))


def _read(uri: str, most: int) -> bytes:
    if local_path(uri):
        with _opened(uri) as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(min(most, size + 1))  # Python reserves as many bytes as it is asked for
    with remote_errors():
        system, path = locate(uri)
        remote = with_timeout(PATIENCE, functools.partial(system.open_input_file, path))
        size = min(remote.size(), most)
        return with_timeout(PATIENCE + size / SLOWEST, functools.partial(_read_all, remote, size))


def _read_all(file: pa.NativeFile, size: int) -> bytes:
    with file:
        return bytes(file.read(size))


def with_timeout(seconds: float, act: Callable[[], _T]) -> _T:
    """What `act` returns, which waits for a remote file system.

    pyarrow's S3 client gives up where nothing at all arrives for 3 seconds, 31 times, and never where a byte a second
    does. The thread that waits for it is left to itself.

    Raises:
        TimeoutError: it takes longer than so many seconds.
    """
    answer: Future[_T] = Future()

    def wait() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:  # handed on to the caller's thread
            answer.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # its own
            raise
        raise TimeoutError(errno.ETIMEDOUT, f"it takes longer than {seconds:.3g} s") from None


@contextlib.contextmanager
def _opened(uri: str) -> Iterator[BinaryIO]:
    """A plain file of this machine, open."""
    path = local_path(uri)
    assert path is not None
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no plain file")
        yield file


def _open_at_once(path: str, flags: int) -> int:
    """A pipe that nobody writes to would be waited for without end."""
    return os.open(path, flags | os.O_NONBLOCK)


def sync(path: Path) -> None:
    """Returns once a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def remote_errors() -> Iterator[None]:
    """An error that says only by its text that a file is absent or refused becomes one that says it by its type."""
    try:
        yield
    except OSError as error:
        for kind, text in _REMOTE_ERRORS.items():
            if text.search(str(error)):
                raise kind(str(error)) from None
        raise


def stamps(uris: Sequence[str]) -> list[Stamp | None]:
    """The stamp of each file, None for a file that does not exist, asked for with `retry_io`.

    Many are asked for at a time where a question waits for the disk or the network.

    Raises:
        UserError: a file system does not answer for half a minute, or refuses access.
    """
    n = _at_once(len(uris))
    found = _asked((uris[first : first + n] for first in range(0, len(uris), n)), len(uris))
    return [Stamp(*stamp) if stamp[0] >= 0 else None for stamp in found.tolist()]


def stamps_of_column(uris: pa.ChunkedArray) -> pa.Table:
    """As `stamps`, in the columns `size`, bytes, and `changed`, ns, both -1 for a file that does not exist, int64."""
    found = _asked((piece.to_pylist() for piece in pieces(uris, _at_once(len(uris)))), len(uris))
    return pa.table({"size": found[:, 0], "changed": found[:, 1]})


def _at_once(count: int) -> int:
    """How many of so many files are asked for one after the other: some hundred, and of few files few."""
    return min(2**9, -(-count // _PARALLEL) or 1)


def _asked(parts: Iterable[Sequence[str]], count: int) -> NDArray[np.int64]:
    """The stamps of the files of all parts, (N, 2), -1 for those that do not exist."""
    out, done = np.empty((count, 2), np.int64), 0
    with contextlib.closing(_in_turn_or_threads(iter(parts))) as found:
        for some in found:
            out[done : done + len(some)] = some
            done += len(some)
    return out


def _in_turn_or_threads(parts: Iterator[Sequence[str]]) -> Generator[NDArray[np.int64], None, None]:
    """The stamps of each part. Behind a part whose answers took their time, some are asked for in threads.

    What the kernel has in memory it answers at once: threads would do no more than wait for each other.
    """
    for part in parts:
        began = time.perf_counter()
        found = _stamps(part)
        slow = time.perf_counter() - began > _AT_ONCE * len(part)
        yield found
        if slow:
            some = itertools.islice(parts, 8 * _PARALLEL)
            yield from in_threads(_stamps, some, threads=_PARALLEL, name="stamps")


def _stamps(uris: Sequence[str]) -> NDArray[np.int64]:
    """The stamps of some files, one after the other, (n, 2)."""
    look, flat = os.stat, array.array("q")
    for uri in uris:
        try:
            state = None if "://" in uri else look(uri)
        except (OSError, ValueError):
            state = None  # `_stamp` asks again, and knows what the error says
        if state is not None:
            flat.append(state.st_size)
            flat.append(state.st_mtime_ns)
        else:
            flat.extend(_stamp(uri, local_path(uri)) or (-1, -1))
    return np.frombuffer(flat, np.int64).reshape(-1, 2)


def _stamp(uri: str, path: Path | None = None) -> Stamp | None:
    """The stamp of a file of this machine, at a path, or of another file system."""
    try:
        return retry_io(uri, functools.partial(_local_stamp, path) if path else functools.partial(_remote_stamp, uri))
    except PermissionError as error:
        raise access_refused(uri, error) from None
    except (OSError, ValueError):  # ValueError: no path, as it holds a null byte, or no such URI; reading it says which
        return None


def access_refused(uri: str, error: PermissionError) -> UserError:
    """The error that says whose file its owner has to open to the user."""
    return UserError(
        f"access to {without_credentials(uri)} is refused: {error_text(error)}",
        "a file that may be read",
        "correct its permissions or your credentials, or leave the file out, and repeat the command",
    )


def local_path(uri: str) -> Path | None:
    """The path of a file of this machine, None for a URI of another file system."""
    if uri.startswith("file://"):
        return Path(unquote(urlsplit(uri, allow_fragments=False).path))
    return None if is_remote(uri) else Path(uri)


def _local_stamp(path: Path) -> Stamp:
    state = path.stat()
    return Stamp(state.st_size, state.st_mtime_ns)


def _remote_stamp(uri: str) -> Stamp | None:
    with remote_errors():
        system, path = locate(uri)
        info = with_timeout(PATIENCE, functools.partial(system.get_file_info, path))
    return Stamp(info.size or 0, info.mtime_ns or 0) if info.type == pafs.FileType.File else None


def locate(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a URI, and the path in it.

    Raises:
        ValueError: it is no URI, or no file system knows its scheme.
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

"""Errors of file systems: transient errors are retried, errors that describe the file itself are raised.

Errors of a disk, a server that is busy or unreachable, and a lack of memory are transient. A server that does not
respond is given up after a timeout and counts as unreachable.
"""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

import tenacity

from mcis.datasets.errors import UnreachableFile, UserError
from mcis.datasets.storage.threads import run_in_background
from mcis.datasets.storage.uris import without_credentials

REMOTE_TIMEOUT = 30.0
"""Timeout of a call to a remote file system, seconds. A transfer gets size / MIN_BYTES_PER_SECOND in addition."""
MIN_BYTES_PER_SECOND = 100_000
"""Minimum transfer rate, bytes per second. Slower transfers time out."""
_T = TypeVar("_T")

_PERMANENT = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.ENXIO,
    errno.ENODEV,
    errno.EFBIG,
}
"""Errors that describe the file itself. Others describe the machine or the connection to the file system."""
_REMOTE_ERRORS: dict[type[OSError], re.Pattern[str]] = {
    IsADirectoryError: re.compile("Not a regular file"),
    FileNotFoundError: re.compile(r"NO_SUCH_(KEY|BUCKET)|RESOURCE_NOT_FOUND|Bucket .* not found"),
    PermissionError: re.compile(r"ACCESS_DENIED|INVALID_\w+_ID|SIGNATURE_DOES_NOT_MATCH|EXPIRED_TOKEN|status 40[13]"),
}
"""Types of pyarrow's errors by their texts, since they have no error number."""


def retry_io(uri: str, act: Callable[[], _T]) -> _T:
    """Calls `act`, which reads or decodes a file, and retries it after transient errors (`RETRY_POLICY`).

    Args:
        uri: File, for messages.

    Raises:
        UnreachableFile: A transient error persists for half a minute, or longer if each attempt is slow.
        OSError: An error that describes the file: it does not exist, is a folder, has an invalid name, or access to it
            is refused.
    """
    try:
        return _call_repeatedly(act)
    except (OSError, MemoryError) as error:
        if not is_transient(error):
            raise
        reason = "not enough memory" if isinstance(error, MemoryError) else error_text(error)
        raise UnreachableFile(
            f"{without_credentials(uri)} cannot be read, after several attempts: {reason}",
            "a file system that responds, and enough memory for the file",
            "correct this and repeat the command; finished work is kept, and the file is not rejected",
            reason,
        ) from None


def _call_repeatedly(act: Callable[[], _T]) -> _T:
    """Calls `act`, and only after a transient error again by `RETRY_POLICY`."""
    try:
        return act()
    except (OSError, MemoryError) as error:
        if not is_transient(error):
            raise
        return RETRY_POLICY(act)


def is_transient(error: BaseException) -> bool:
    """Returns whether the same call may succeed later."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, OSError):
        return False
    permanent_types = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
    is_permanent = isinstance(error, permanent_types) or error.errno in _PERMANENT
    return not is_permanent


RETRY_POLICY = tenacity.Retrying(
    retry=tenacity.retry_if_exception(is_transient),
    stop=tenacity.stop_after_attempt(7),
    wait=tenacity.wait_exponential(0.5, max=16) + tenacity.wait_random(0, 0.5),
    reraise=True,
)
"""Seven further attempts: the first at once, the others after 0.5, 1, 2, 4, 8 and 16 seconds plus up to 0.5 (random),
so that processes do not retry in lockstep. Within each attempt, pyarrow's S3 client tries 31 times in 6 seconds."""


def with_timeout(seconds: float, act: Callable[[], _T]) -> _T:
    """Calls `act`, which waits for a server, with a timeout.

    pyarrow's S3 client gives up if nothing arrives for 3 seconds, 31 times, but never if a byte per second arrives.
    After the timeout, the waiting thread is abandoned.

    Raises:
        TimeoutError: The call takes longer than `seconds`.
    """
    future = run_in_background(act)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # raised by `act`
            raise
        raise TimeoutError(errno.ETIMEDOUT, f"no result after {seconds:.3g} s") from None


def call_remote(act: Callable[[], _T], *, size: int = 0, many: bool = False) -> _T:
    """Calls `act`, which uses a remote file system, with a timeout.

    Args:
        size: Requested content, bytes.
        many: Whether it lists or deletes the content of a folder, which may take ten times as long.

    Raises:
        TimeoutError: The call exceeds the time given by REMOTE_TIMEOUT and MIN_BYTES_PER_SECOND.
        OSError: Pyarrow's error, converted to FileNotFoundError, IsADirectoryError or PermissionError by its text.
    """
    base_timeout = 10 * REMOTE_TIMEOUT if many else REMOTE_TIMEOUT
    transfer_timeout = size / MIN_BYTES_PER_SECOND
    try:
        return with_timeout(base_timeout + transfer_timeout, act)
    except OSError as error:
        for error_type, pattern in _REMOTE_ERRORS.items():
            if pattern.search(str(error)):
                raise error_type(str(error)) from None
        raise


@contextlib.contextmanager
def parser_errors() -> Iterator[None]:
    """Converts an OSError without error number to a ValueError: a parser raised it for the content that it read."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise ValueError(str(error)) from None
        raise


def error_text(error: BaseException) -> str:
    """Returns the message of a file system's error."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def access_refused(uri: str, error: PermissionError) -> UserError:
    """Returns the error for a file or folder whose permissions refuse access."""
    return UserError(
        f"access to {without_credentials(uri)} is refused: {error_text(error)}",
        "a readable file or folder",
        "correct its permissions or your credentials, or leave it out, and repeat the command",
    )

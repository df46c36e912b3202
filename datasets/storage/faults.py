"""Faults of file systems: those that pass are met by trying again, those that say something of a file are raised.

A disk's error, a server that is busy or away, and a lack of memory pass. A server that says nothing is given up after
some time, and counts as one that is away.
"""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

import tenacity

from mcis.datasets.errors import UserError
from mcis.datasets.storage.threads import run_in_background
from mcis.datasets.storage.uris import without_credentials

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
            if not is_transient(error):
                raise
            return _AGAIN(act)
    except (OSError, MemoryError) as error:
        if not is_transient(error):
            raise
        what = "not enough memory" if isinstance(error, MemoryError) else error_text(error)
        raise UserError(
            f"{without_credentials(uri)} could not be read, however often that was tried: {what}",
            "a file system that answers, and memory for the file",
            "see to that and repeat the command: what is finished is kept, and nothing is concluded about this file",
        ) from None


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    lasting = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
    if isinstance(error, OSError):
        return not isinstance(error, lasting) and error.errno not in _LASTING
    return isinstance(error, MemoryError)


_AGAIN = tenacity.Retrying(
    retry=tenacity.retry_if_exception(is_transient),
    stop=tenacity.stop_after_attempt(7),
    wait=tenacity.wait_exponential(0.5, max=16) + tenacity.wait_random(0, 0.5),
    reraise=True,
)
"""The second try follows at once, others after pauses of 0.5, 1, 2, 4, 8 and 16 seconds and up to half a second more,
so that many processes do not ask again all at once. In each of them pyarrow's S3 client tries 31 times in 6 seconds."""


def with_timeout(seconds: float, act: Callable[[], _T]) -> _T:
    """What `act` returns, which waits for a server.

    pyarrow's S3 client gives up where nothing at all arrives for 3 seconds, 31 times, and never where a byte a second
    does. The thread that waits for it is left to itself.

    Raises:
        TimeoutError: it takes longer than so many seconds.
    """
    answer = run_in_background(act)
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # its own
            raise
        raise TimeoutError(errno.ETIMEDOUT, f"it takes longer than {seconds:.3g} s") from None


def call_remote(act: Callable[[], _T], *, size: int = 0, many: bool = False) -> _T:
    """What `act` returns, which asks a remote file system.

    Args:
        size: bytes of content that it asks for.
        many: whether it lists or removes whatever lies in a folder, which may take ten times as long.

    Raises:
        TimeoutError: it takes longer than PATIENCE and SLOWEST allow.
        OSError: pyarrow's, of the type that its text says where a file is absent, no file, or refused.
    """
    try:
        return with_timeout(PATIENCE * (10 if many else 1) + size / SLOWEST, act)
    except OSError as error:
        for kind, text in _REMOTE_ERRORS.items():
            if text.search(str(error)):
                raise kind(str(error)) from None
        raise


@contextlib.contextmanager
def parser_errors() -> Iterator[None]:
    """Makes a ValueError of an OSError without a number: it is a parser's, which says so of what it read."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise ValueError(str(error)) from None
        raise


def error_text(error: BaseException) -> str:
    """What an error of a file system says."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def access_refused(uri: str, error: PermissionError) -> UserError:
    """The error that says whose file its owner has to open to the user."""
    return UserError(
        f"access to {without_credentials(uri)} is refused: {error_text(error)}",
        "a file that may be read",
        "correct its permissions or your credentials, or leave the file out, and repeat the command",
    )

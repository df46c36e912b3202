"""Folders on a disk or in a bucket, behind one interface: their files are written aside, read, listed and removed.

A folder at a URI (`s3://bucket/path`) is worked on under a path of this machine, `COPIES/s3/bucket/path`, which says
what it is a copy of: every process that is given the path finds the bucket by it, on any machine whose environment
names the same COPIES (the variable MCIS_COPIES). The bucket holds the truth. What a process writes it sends there at
once, what it reads is fetched before unless the copy is of the same size and time, and names are those that the bucket
lists. For any other path the functions are those of the operating system. What lies in LOCAL is a machine's own.
"""

import contextlib
import errno
import functools
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeVar

import pyarrow.fs as pafs

from mcis.datasets.errors import BadFile, UserError
from mcis.datasets.storage.faults import access_refused, call_remote, is_transient, parser_errors, retry_io
from mcis.datasets.storage.files import Stamp, locate, stamp, stamps, sync
from mcis.datasets.storage.uris import holds_credentials, is_remote

COPIES_VARIABLE = "MCIS_COPIES"
"""The variable that names the folder of all copies, the same on all machines of a cluster."""
LOCAL_NAMES = {"cache", "data", "mlflow", "mlflow.db"}
"""Names, in a folder at a URI, of what never goes to the bucket."""
TEMPORARY_NAME = re.compile(r"\..+\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d{1,9})")
"""Names as `temporary_path` makes them."""
REPEAT_STAGE = "repeat the stage that wrote it"
"""What to do about an output's file that is damaged."""
_T = TypeVar("_T")
_PIECE = 2**23
_PARALLEL = 16


# --- paths


def local_path(folder: str) -> Path:
    """The path under which a folder is worked on: its copy's for a URI, and a path as it is.

    Raises:
        UserError: the URI has a password or a query, or no scheme of a bucket; or the folder of all copies is another
            user's, who could put files into it.
    """
    if not is_remote(folder):
        return Path(folder)
    scheme, _, rest = folder.partition("://")
    if scheme == "file":
        return Path("/", rest.lstrip("/"))
    parts = PurePosixPath(rest).parts
    if "?" in rest or "@" in rest.partition("/")[0] or holds_credentials(folder):
        raise UserError(
            "a URI of a folder with a user, a password or a query",
            "SCHEME://BUCKET/PATH alone, such as s3://bucket/work",
            "give credentials by the environment (AWS_ACCESS_KEY_ID, ~/.aws), and a server by AWS_ENDPOINT_URL",
        )
    if scheme not in ("s3", "gs", "gcs", "abfs", "abfss") or not parts or ".." in parts or rest.startswith("/"):
        raise UserError(f"folder {folder}", "SCHEME://BUCKET/PATH of s3, gs or abfs", "name such a folder, or a path")
    return _checked(_copies()).joinpath(scheme, *parts)


def uri_of(path: Path) -> str | None:
    """The URI of which a path is the copy; None of another path."""
    text = str(path)
    for top in _tops(_copies()):
        if text.startswith(top):
            scheme, *parts = text.removeprefix(top).split("/")
            return f"{scheme}://{'/'.join(parts)}" if parts and not LOCAL_NAMES.intersection(parts[1:]) else None
    return None


def _copies() -> str:
    """The folder of all copies."""
    return os.environ.get(COPIES_VARIABLE) or f"/tmp/mcis-copies-{os.geteuid()}"


@functools.cache
def _checked(copies: str) -> Path:
    place = Path(copies)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = place.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise UserError(
            f"{place} belongs to another user, or others may write into it",
            "a folder of your own for copies of what lies in a bucket",
            f"name one by the variable {COPIES_VARIABLE}",
        )
    return place.resolve()


@functools.cache
def _tops(copies: str) -> tuple[str, ...]:
    """How the paths of copies begin."""
    return (f"{copies.rstrip('/')}/", f"{Path(copies).resolve()}/")


def file_system(path: Path) -> tuple[pafs.FileSystem, str]:
    """The file system where a path's file lies, and the path in it, for readers that take no more than they need."""
    uri = uri_of(path)
    return locate(uri) if uri else (pafs.LocalFileSystem(), str(path))


# --- reading


def fetch_file(path: Path) -> Path:
    """The path itself, once the file there is the bucket's.

    Raises:
        FileNotFoundError: the bucket has none; nor has this machine then.
        UserError: the bucket does not answer for half a minute, or refuses access.
    """
    if uri := uri_of(path):
        there = stamp(uri)
        if there is None:
            path.unlink(missing_ok=True)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)
        if stamp(str(path)) != there:
            retry_io(uri, functools.partial(_download, uri, path, there))
    return path


def read_file(
    path: Path, read: Callable[[Path], _T], expected: str, remedy: str = REPEAT_STAGE, *, fetch: bool = True
) -> _T:
    """What `read` makes of a file, once it is the bucket's; faults that pass are met with `retry_io`.

    Args:
        expected, remedy: what the file should be, and what to do where it is not.
        fetch: False = the copy is taken as it is.

    Raises:
        FileNotFoundError: there is none.
        BadFile: `read` raises a ValueError, or an error of the system that says something of the file.
        UserError: the disk or the bucket does not answer for half a minute, memory is short, or access is refused.
    """

    def act() -> _T:
        with parser_errors():
            return read(path)

    try:
        return retry_io(str(fetch_file(path) if fetch else path), act)
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise access_refused(str(path), error) from None
    except (OSError, ValueError) as error:
        raise BadFile(f"{path} is damaged ({str(error)[:200]})", expected, remedy) from None


def fetch_below(folder: Path, wanted: Callable[[str, Stamp], bool]) -> None:
    """Fetches, of the files below a folder in a bucket, those that are wanted, some at a time.

    Args:
        wanted: told a file's path from there, and its stamp.
    """
    if uri_of(folder):
        paths = [folder / name for name, at in files_below(folder).items() if wanted(name, at)]
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(fetch_file, paths))


def _download(uri: str, path: Path, there: Stamp) -> None:
    system, place = locate(uri)
    with _aside(path) as aside:
        _copy(system, place, pafs.LocalFileSystem(), str(aside), there.size)
        if (size := aside.stat().st_size) != there.size:  # another one has taken its place, or the connection broke
            raise OSError(errno.EIO, f"{size} of {there.size} bytes came")
        os.utime(aside, ns=(there.changed, there.changed))


# --- writing


def host_name() -> str:
    """The name of this machine, of letters, digits and hyphens alone."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "localhost"


def temporary_path(path: Path) -> Path:
    """A new name beside a path under which this process writes or removes it; `TEMPORARY_NAME` matches such names."""
    return path.with_name(f".{path.name}-{os.urandom(4).hex()}.{host_name()}.{os.getpid()}")


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary name to write to, which is then renamed to `path`, or removed if writing failed.

    Args:
        durable: whether the content is on the disk before it has the name; otherwise a machine that loses power may
            leave an empty file under it. False for files that are easily written again.

    Raises:
        UserError: the bucket does not answer for half a minute, or refuses access.
    """
    with _aside(path) as aside:
        yield aside
        if durable:
            sync(aside)
        upload_file(aside, path)


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = temporary_path(path)
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def upload_file(file: Path, path: Path) -> None:
    """Sends a file of this machine to where `path` belongs in the bucket, if that is a copy.

    The file gets the time that the bucket says, so that it can be the copy.

    Raises:
        UserError: the bucket does not answer for half a minute, or refuses access.
    """
    if uri := uri_of(path):
        try:
            retry_io(uri, functools.partial(_upload, file, uri))
        except PermissionError as error:
            raise UserError(
                f"{uri} cannot be written ({str(error)[:300]})",
                "credentials that may write into the bucket",
                "correct them, or choose another folder",
            ) from None


def _upload(path: Path, uri: str) -> None:
    system, place = locate(uri)
    size = path.stat().st_size
    _copy(pafs.LocalFileSystem(), str(path), system, place, size)
    info = call_remote(functools.partial(system.get_file_info, place))
    if info.size != size:
        raise OSError(errno.EIO, f"{info.size} of {size} bytes arrived")
    os.utime(path, ns=(info.mtime_ns, info.mtime_ns))


def _copy(system: pafs.FileSystem, place: str, other: pafs.FileSystem, copy: str, size: int) -> None:
    call_remote(functools.partial(pafs.copy_files, place, copy, system, other, chunk_size=_PIECE), size=size)


def copy_folder(folder: Path, copy: Path) -> None:
    """Copies a folder's files; what `copy` held before is removed."""
    remove(copy)
    for name in files_below(folder):
        with atomic_write(copy / name) as aside:
            shutil.copyfile(fetch_file(folder / name), aside)


# --- listing and removing


def path_exists(path: Path) -> bool:
    """Whether there is a file, or a folder with a file in it."""
    uri = uri_of(path)
    return bool(stamp(uri or str(path))) or (uri is not None and bool(files_below(path)))


def files_below(folder: Path) -> dict[str, Stamp]:
    """Each file below a folder, by its path from there; what is renamed or removed meanwhile is left out."""
    uri = uri_of(folder)
    if uri is None:
        files = retry_io(str(folder), functools.partial(_walked, folder))
        return {os.path.relpath(f, folder): at for f, at in zip(files, stamps(files), strict=True) if at}
    place, infos = _listed(uri, recursive=True)
    files_there = [info for info in infos if info.type == pafs.FileType.File and not info.path.endswith("/")]
    return {os.path.relpath(each.path, place): Stamp(each.size or 0, each.mtime_ns or 0) for each in files_there}


def _walked(folder: Path) -> list[str]:
    """The paths of all files below a folder of this machine; what may not be listed is left out."""

    def on_error(error: OSError) -> None:
        if is_transient(error):
            raise error

    return [os.path.join(parent, name) for parent, _, names in os.walk(folder, onerror=on_error) for name in names]


def names_in(folder: Path) -> list[str]:
    """Names of what lies in a folder, in order; none of an absent one."""
    if uri := uri_of(folder):
        return sorted(info.base_name for info in _listed(uri, recursive=False)[1])
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(retry_io(str(folder), functools.partial(os.listdir, folder)))
    return []


def _listed(uri: str, *, recursive: bool) -> tuple[str, list[pafs.FileInfo]]:
    """The path of a folder in its bucket, and what lies in it."""
    system, place = locate(uri)
    selector = pafs.FileSelector(place, recursive=recursive, allow_not_found=True)
    asked = functools.partial(system.get_file_info, selector)
    return place, retry_io(uri, lambda: call_remote(asked, many=True))


def remove(path: Path) -> bool:
    """Removes a file, a link, or a folder with all that is in it, and its copy; nothing where there is none.

    A folder is renamed before, so that what has its own name is whole.

    Returns:
        Whether nothing is left of it. What could not be removed keeps the other name, and `mcis gc` removes it.
    """
    if uri := uri_of(path):
        retry_io(uri, functools.partial(_delete, uri))
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return True
    aside = temporary_path(path)
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    shutil.rmtree(aside, ignore_errors=True)
    return not aside.exists()


def _delete(uri: str) -> None:
    system, place = locate(uri)
    kind = call_remote(functools.partial(system.get_file_info, place)).type
    if kind == pafs.FileType.File:
        call_remote(functools.partial(system.delete_file, place))
    elif kind == pafs.FileType.Directory:
        call_remote(functools.partial(system.delete_dir, place), many=True)

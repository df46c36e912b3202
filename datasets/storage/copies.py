"""Folders in a bucket, and the copies that each machine has of their files.

A folder at a URI (`s3://bucket/path`) is worked on under a path of this machine, `COPIES/s3/bucket/path`, which says
what it is a copy of: every process that is given the path finds the bucket by it, on any machine whose environment
names the same COPIES (the variable MCIS_COPIES). The bucket holds the truth. What a process writes it sends there at
once, what it reads is fetched before unless the copy is of the same size and time, and names are those that the bucket
lists. For any other path the functions here are those of the operating system.

What lies in a folder of LOCAL is a machine's own.
"""

import errno
import functools
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeVar

import pyarrow.fs as pafs

from mcis.datasets.errors import BadFile, UserError
from mcis.datasets.storage.files import (
    PATIENCE,
    SLOWEST,
    Stamp,
    access_refused,
    holds_credentials,
    is_remote,
    locate,
    may_pass,
    parser_errors,
    remote_errors,
    retry_io,
    stamps,
    sync,
    with_timeout,
)

PLACE = "MCIS_COPIES"
"""The variable that names the folder of all copies, the same on all machines of a cluster."""
LOCAL = ("cache", "data", "mlflow", "mlflow.db")
"""Names, in a folder at a URI, of what never goes to the bucket."""
AGAIN = "repeat the stage that wrote it"
"""What to do about an output's file that is damaged."""
_T = TypeVar("_T")
_PIECE = 2**23
_PARALLEL = 16
_MANY = 10 * PATIENCE
"""Seconds in which a bucket has to list or remove whatever lies in a folder."""


def copies() -> Path:
    """The folder of all copies of this machine.

    Raises:
        UserError: it is another user's, who could put files into it.
    """
    return _checked(Path(os.environ.get(PLACE) or f"/tmp/mcis-copies-{os.geteuid()}"))


@functools.cache
def _checked(place: Path) -> Path:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = place.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise UserError(
            f"{place} belongs to another user, or others may write into it",
            "a folder of your own for copies of what lies in a bucket",
            f"name one by the variable {PLACE}",
        )
    return place.resolve()


def place_of(folder: str) -> Path:
    """The path under which a folder is worked on: its copy's for a URI, and a path as it is.

    Raises:
        UserError: the URI has a password or a query, or no scheme of a bucket.
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
    return copies().joinpath(scheme, *parts)


def uri_of(path: Path) -> str | None:
    """The URI of which a path is the copy; None of another path."""
    text = str(path)
    for top in _tops(os.environ.get(PLACE) or f"/tmp/mcis-copies-{os.geteuid()}"):
        if text.startswith(top):
            parts = text.removeprefix(top).split("/")
            if len(parts) < 2 or any(part in LOCAL for part in parts[2:]):
                return None
            return f"{parts[0]}://{'/'.join(parts[1:])}"
    return None


@functools.cache
def _tops(place: str) -> tuple[str, ...]:
    """How the paths of copies begin."""
    return (f"{place.rstrip('/')}/", f"{Path(place).resolve()}/")


def in_bucket(path: Path) -> bool:
    """Whether a path is the copy of what lies in a bucket."""
    return uri_of(path) is not None


def fetched(path: Path) -> Path:
    """The path itself, once the file there is the bucket's.

    Raises:
        FileNotFoundError: the bucket has none; nor has this machine then.
        UserError: the bucket does not answer for half a minute, or refuses access.
    """
    uri = uri_of(path)
    if uri is None:
        return path
    [there] = stamps([uri])
    if there is None:
        path.unlink(missing_ok=True)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)
    if stamps([str(path)]) != [there]:
        retry_io(uri, functools.partial(_download, uri, path, there))
    return path


def read_file(path: Path, read: Callable[[Path], _T], expected: str, remedy: str = AGAIN, *, fetch: bool = True) -> _T:
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
        if fetch:
            fetched(path)
        return retry_io(str(path), act)
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise access_refused(str(path), error) from None
    except (OSError, ValueError) as error:
        raise BadFile(f"{path} is damaged ({str(error)[:200]})", expected, remedy) from None


def fetch_all(paths: Iterable[Path]) -> None:
    """Fetches many files, some at a time; see `fetched`."""
    with ThreadPoolExecutor(_PARALLEL) as pool:
        list(pool.map(fetched, paths))


def send(file: Path, path: Path) -> None:
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


def is_there(path: Path) -> bool:
    """Whether there is a file, or a folder with a file in it."""
    uri = uri_of(path)
    return bool(stamps([uri or str(path)])[0]) or (uri is not None and bool(files_below(path)))


def files_below(folder: Path) -> dict[str, Stamp]:
    """Each file below a folder, by its path from there; what is renamed or removed meanwhile is left out."""
    uri = uri_of(folder)
    if uri is None:
        files = retry_io(str(folder), functools.partial(_walked, folder))
        return {os.path.relpath(f, folder): at for f, at in zip(files, stamps(files), strict=True) if at}
    system, place = locate(uri)
    infos = retry_io(uri, functools.partial(_listed, system, place, recursive=True))
    files_there = (info for info in infos if info.type == pafs.FileType.File)
    return {
        os.path.relpath(info.path, place): Stamp(info.size or 0, info.mtime_ns or 0)
        for info in files_there
        if not info.path.endswith("/")
    }


def names_in(folder: Path) -> list[str]:
    """Names of what lies in a folder, in order; none of an absent one."""
    uri = uri_of(folder)
    if uri is None:
        return retry_io(str(folder), functools.partial(_names, folder))
    system, place = locate(uri)
    return sorted(info.base_name for info in retry_io(uri, functools.partial(_listed, system, place, recursive=False)))


def _walked(folder: Path) -> list[str]:
    """The paths of all files below a folder of this machine; what may not be listed is left out."""

    def on_error(error: OSError) -> None:
        if may_pass(error):
            raise error

    return [os.path.join(parent, name) for parent, _, names in os.walk(folder, onerror=on_error) for name in names]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove(path: Path) -> None:
    """Removes a file or a folder with all that is in it, and its copy; nothing where there is none."""
    if uri := uri_of(path):
        system, place = locate(uri)
        retry_io(uri, functools.partial(_delete, system, place))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def copy_folder(folder: Path, copy: Path) -> None:
    """Copies a folder's files, within a bucket by the bucket itself; what `copy` held before is removed."""
    uri, target = uri_of(folder), uri_of(copy)
    remove(copy)
    if uri is None or target is None:
        shutil.copytree(folder, copy, copy_function=_copy_durably)
        return
    (system, place), (_, there) = locate(uri), locate(target)

    def copied(name: str, size: int) -> None:
        with remote_errors():
            with_timeout(PATIENCE + size / SLOWEST, lambda: system.copy_file(f"{place}/{name}", f"{there}/{name}"))

    with ThreadPoolExecutor(_PARALLEL) as pool:
        files = files_below(folder).items()
        list(pool.map(lambda file: retry_io(f"{uri}/{file[0]}", lambda: copied(file[0], file[1].size)), files))


def _copy_durably(file: str, copy: str) -> None:
    """Copies a file, whose content is on the disk when this returns: the folder has its final name by a renaming."""
    shutil.copy2(file, copy)
    sync(Path(copy))


def fetch_below(folder: Path, wanted: Callable[[str, Stamp], bool]) -> dict[str, Stamp]:
    """Fetches, of the files below a folder, those that are wanted, some at a time.

    Args:
        wanted: told a file's path from there, and its stamp.

    Returns:
        The stamps of all these files, in the order of their paths.
    """
    there = {name: at for name, at in sorted(files_below(folder).items()) if wanted(name, at)}
    if in_bucket(folder):
        fetch_all(folder / name for name, at in there.items() if stamps([str(folder / name)]) != [at])
    return there


def read_end(path: Path, most: int) -> bytes:
    """The last bytes of a file, so many or all; of a bucket's file the rest does not arrive.

    Raises:
        OSError: it cannot be read here.
        FileNotFoundError, UserError: as `fetched` does.
    """
    uri = uri_of(path)
    if uri is not None:
        return retry_io(uri, functools.partial(_read_remote_end, uri, most))
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read()


def _read_remote_end(uri: str, most: int) -> bytes:
    system, place = locate(uri)

    def read() -> bytes:
        with system.open_input_file(place) as file:
            file.seek(max(0, file.size() - most))
            return bytes(file.read())

    with remote_errors():
        return with_timeout(PATIENCE + most / SLOWEST, read)


def _listed(system: pafs.FileSystem, place: str, *, recursive: bool) -> list[pafs.FileInfo]:
    selector = pafs.FileSelector(place, recursive=recursive, allow_not_found=True)
    with remote_errors():
        infos: list[pafs.FileInfo] = with_timeout(_MANY, functools.partial(system.get_file_info, selector))
        return infos


def _delete(system: pafs.FileSystem, place: str) -> None:
    with remote_errors():
        kind = with_timeout(PATIENCE, functools.partial(system.get_file_info, place)).type
        if kind == pafs.FileType.File:
            with_timeout(PATIENCE, functools.partial(system.delete_file, place))
        elif kind == pafs.FileType.Directory:
            with_timeout(_MANY, functools.partial(system.delete_dir, place))


def _download(uri: str, path: Path, there: Stamp) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    system, place = locate(uri)
    try:
        with remote_errors():
            size = with_timeout(PATIENCE + there.size / SLOWEST, functools.partial(_copy_to, system, place, aside))
        if size != there.size:  # another one has taken its place meanwhile, or the connection broke
            raise OSError(errno.EIO, f"{size} of {there.size} bytes came")
        os.utime(aside, ns=(there.changed, there.changed))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _copy_to(system: pafs.FileSystem, place: str, aside: Path) -> int:
    """Copies a file of the bucket; returns the bytes that came."""
    with system.open_input_stream(place, compression=None) as stream, aside.open("wb") as file:
        while piece := stream.read(_PIECE):
            file.write(piece)
        return file.tell()


def _upload(path: Path, uri: str) -> None:
    system, place = locate(uri)
    size = path.stat().st_size
    with remote_errors():
        with_timeout(PATIENCE + size / SLOWEST, functools.partial(_copy_from, path, system, place))
        info = with_timeout(PATIENCE, functools.partial(system.get_file_info, place))
    if info.size != size:
        raise OSError(errno.EIO, f"{info.size} of {size} bytes arrived")
    os.utime(path, ns=(info.mtime_ns, info.mtime_ns))


def _copy_from(path: Path, system: pafs.FileSystem, place: str) -> None:
    with path.open("rb") as file, system.open_output_stream(place, compression=None) as stream:
        while piece := file.read(_PIECE):
            stream.write(piece)

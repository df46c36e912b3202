"""Folders on a disk or in a bucket behind one interface: atomic writes, reading, listing and removing.

A folder at a URI (`s3://bucket/path`) is used through a local copy at `COPIES/s3/bucket/path`, where COPIES is set by
the environment variable MCIS_COPIES. The path identifies the bucket, so any process that is given the path can access
the bucket, on any machine with the same COPIES. The bucket is authoritative: written files are uploaded at once, files
are downloaded before they are read unless the copy has the same size and time, and listings come from the bucket. For
other paths, the functions are those of the operating system. LOCAL_NAMES stay on each machine.
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
from mcis.datasets.storage.files import locate, stamp, stamps, sync
from mcis.datasets.storage.object_lists import Stamp
from mcis.datasets.storage.uris import holds_credentials, is_remote

COPIES_VARIABLE = "MCIS_COPIES"
"""Environment variable for the folder of all copies. It must be the same on all machines of a cluster."""
LOCAL_NAMES = {"cache", "data", "mlflow", "mlflow.db"}
"""Names in a folder at a URI that are never uploaded to the bucket."""
MAX_NAME_BYTES = 255
"""Maximum length of a file name in bytes, on all common file systems."""
_MAX_PATH_BYTES = 4095
"""Maximum length of a path in bytes, on Linux."""
TEMPORARY_NAME = re.compile(r"\..+\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d{1,9})")
"""Matches the names that `temporary_path` returns."""
REPEAT_STAGE = "repeat the stage that wrote it"
"""Remedy for a damaged file of a stage output."""
_T = TypeVar("_T")
_CHUNK_BYTES = 2**23
_PARALLEL = 16


# --- paths


def local_path(folder: str) -> Path:
    """Returns the local path of a folder: the path of the copy for a URI of a bucket, otherwise the path itself.

    Raises:
        UserError: The URI has a password or a query, or its scheme is not that of a bucket; or the folder of all copies
            belongs to another user, who could plant files in it.
    """
    if not is_remote(folder):
        return Path(folder)
    scheme, _, rest = folder.partition("://")
    if scheme == "file":
        return Path("/", rest.lstrip("/"))

    bucket = rest.partition("/")[0]
    if "?" in rest or "@" in bucket or holds_credentials(folder):
        raise UserError(
            "the URI of a folder contains a user, a password or a query",
            "SCHEME://BUCKET/PATH, for example s3://bucket/work",
            "set credentials in the environment (AWS_ACCESS_KEY_ID, ~/.aws) and a server by AWS_ENDPOINT_URL",
        )
    parts = PurePosixPath(rest).parts
    has_bucket = bool(parts) and not rest.startswith("/")
    if scheme not in ("s3", "gs", "gcs", "abfs", "abfss") or not has_bucket or ".." in parts:
        raise UserError(
            f"folder {folder}", "SCHEME://BUCKET/PATH of s3, gs or abfs", "use such a folder, or a local path"
        )
    return _private_folder(_copies()).joinpath(scheme, *parts)


def uri_of(path: Path) -> str | None:
    """Returns the URI that a path is a copy of; None if it is not a copy."""
    text = str(path)
    for prefix in _copy_prefixes(_copies()):
        if text.startswith(prefix):
            scheme, *parts = text.removeprefix(prefix).split("/")
            if not parts or LOCAL_NAMES.intersection(parts[1:]):
                return None
            return f"{scheme}://{'/'.join(parts)}"
    return None


def _copies() -> str:
    """Returns the folder of all copies."""
    return os.environ.get(COPIES_VARIABLE) or f"/tmp/mcis-copies-{os.geteuid()}"


@functools.cache
def _private_folder(copies: str) -> Path:
    """Creates the folder of all copies, and returns it if nobody else can write to it."""
    folder = Path(copies)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    is_own_folder = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
    is_writable_by_others = bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if not is_own_folder or is_writable_by_others:
        raise UserError(
            f"{folder} belongs to another user, or others may write to it",
            "a folder of your own for copies of the files in a bucket",
            f"set the environment variable {COPIES_VARIABLE} to such a folder",
        )
    return folder.resolve()


@functools.cache
def _copy_prefixes(copies: str) -> tuple[str, ...]:
    """Returns the prefixes of the paths of copies."""
    return (f"{copies.rstrip('/')}/", f"{Path(copies).resolve()}/")


def file_system(path: Path) -> tuple[pafs.FileSystem, str]:
    """Returns the file system of a path and the path in it, for readers that read only parts of a file."""
    uri = uri_of(path)
    if uri:
        return locate(uri)
    return pafs.LocalFileSystem(), str(path)


# --- reading


def fetch_file(path: Path) -> Path:
    """Returns the path itself, after downloading the file if the bucket has a different version.

    Raises:
        FileNotFoundError: The bucket does not have the file. A local copy is removed.
        UserError: The bucket does not respond for half a minute, or refuses access.
    """
    uri = uri_of(path)
    if uri is None:
        return path

    remote_stamp = stamp(uri)
    if remote_stamp is None:
        path.unlink(missing_ok=True)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)
    if stamp(str(path)) != remote_stamp:
        retry_io(uri, functools.partial(_download, uri, path, remote_stamp))
    return path


def read_file(
    path: Path, read: Callable[[Path], _T], expected: str, remedy: str = REPEAT_STAGE, *, fetch: bool = True
) -> _T:
    """Returns the result of `read` for the current version of a file. Transient errors are retried with `retry_io`.

    Args:
        expected: What the file should be, for the error.
        remedy: What to do if it is not, for the error.
        fetch: Whether to download the bucket's version first.

    Raises:
        FileNotFoundError: The file does not exist.
        BadFile: `read` raises a ValueError, or an error of the file system that describes the file.
        UserError: The disk or the bucket does not respond or memory is insufficient for half a minute, or access is
            refused.
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
    """Downloads some of the files below a folder in a bucket, in parallel. Does nothing for other folders.

    Args:
        wanted: Returns whether to download a file, given its path relative to the folder, and its stamp.
    """
    if uri_of(folder):
        paths = [folder / name for name, file_stamp in files_below(folder).items() if wanted(name, file_stamp)]
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(fetch_file, paths))


def _download(uri: str, path: Path, expected: Stamp) -> None:
    system, remote_path = locate(uri)
    with _replacing(path) as temporary:
        _copy(system, remote_path, pafs.LocalFileSystem(), str(temporary), expected.size)
        size = temporary.stat().st_size
        if size != expected.size:  # the file was replaced meanwhile, or the connection broke
            raise OSError(errno.EIO, f"{size} of {expected.size} bytes received")
        os.utime(temporary, ns=(expected.changed, expected.changed))


# --- writing


def host_name() -> str:
    """Returns the name of this machine, restricted to letters, digits and hyphens."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "localhost"


def describe_length(path: str) -> str:
    """Returns the lengths of a path that a file system refused as too long, and the usual limits, for a message."""
    longest_name = max(len(os.fsencode(part)) for part in path.split("/"))
    return (
        f"the longest name in it has {longest_name} bytes and the whole path {len(os.fsencode(path))}; "
        f"most file systems accept {MAX_NAME_BYTES} and {_MAX_PATH_BYTES}"
    )


def temporary_path(path: Path) -> Path:
    """Returns a new name in the folder of `path`, for writing or removing it. `TEMPORARY_NAME` matches such names.

    A long name is shortened, so that a file may have any name that the file system accepts.
    """
    suffix = f"-{os.urandom(4).hex()}.{host_name()}.{os.getpid()}"
    max_start_bytes = MAX_NAME_BYTES - len(os.fsencode(f".{suffix}"))
    start = os.fsencode(path.name)[:max_start_bytes].decode(errors="ignore")
    return path.with_name(f".{start}{suffix}")


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path to write to, which is then renamed to `path`, or removed if writing failed.

    Args:
        durable: Whether to flush the content to the disk before renaming. Otherwise a power failure may leave an empty
            file. Use False for files that are cheap to write again.

    Raises:
        UserError: The bucket does not respond for half a minute, or refuses access.
    """
    with _replacing(path) as temporary:
        yield temporary
        if durable:
            sync(temporary)
        upload_file(temporary, path)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which then replaces `path`, or is removed after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def upload_file(file: Path, path: Path) -> None:
    """Uploads a local file to the place in the bucket that `path` is a copy of, if it is one.

    The file gets the modification time of the bucket's version, so that it can serve as the copy.

    Raises:
        UserError: The bucket does not respond for half a minute, or refuses access.
    """
    uri = uri_of(path)
    if uri is None:
        return

    try:
        retry_io(uri, functools.partial(_upload, file, uri))
    except PermissionError as error:
        raise UserError(
            f"{uri} cannot be written ({str(error)[:300]})",
            "credentials with write access to the bucket",
            "correct the credentials, or use another folder",
        ) from None


def _upload(path: Path, uri: str) -> None:
    system, remote_path = locate(uri)
    size = path.stat().st_size
    _copy(pafs.LocalFileSystem(), str(path), system, remote_path, size)

    info = call_remote(functools.partial(system.get_file_info, remote_path))
    if info.size != size:
        raise OSError(errno.EIO, f"{info.size} of {size} bytes arrived")
    os.utime(path, ns=(info.mtime_ns, info.mtime_ns))


def _copy(source_system: pafs.FileSystem, source: str, target_system: pafs.FileSystem, target: str, size: int) -> None:
    copy = functools.partial(pafs.copy_files, source, target, source_system, target_system, chunk_size=_CHUNK_BYTES)
    call_remote(copy, size=size)


def copy_folder(folder: Path, copy: Path) -> None:
    """Copies the files of a folder. Earlier content of `copy` is removed."""
    remove(copy)
    for name in files_below(folder):
        with atomic_write(copy / name) as temporary:
            shutil.copyfile(fetch_file(folder / name), temporary)


# --- listing and removing


def path_exists(path: Path) -> bool:
    """Returns whether a file or folder exists. In a bucket, a folder exists if it has files."""
    uri = uri_of(path)
    if stamp(uri or str(path)):
        return True
    return uri is not None and bool(files_below(path))


def files_below(folder: Path) -> dict[str, Stamp]:
    """Returns the stamps of all files below a folder, by path relative to the folder.

    Files that are renamed or removed during the call are left out.
    """
    uri = uri_of(folder)
    if uri is None:
        paths = retry_io(str(folder), functools.partial(_walk, folder))
        local_files = zip(paths, stamps(paths), strict=True)
        return {os.path.relpath(path, folder): file_stamp for path, file_stamp in local_files if file_stamp}

    remote_folder, infos = _list_remote(uri, recursive=True)
    files = {}
    for info in infos:
        stands_for_folder = info.path.endswith("/")
        if info.type == pafs.FileType.File and not stands_for_folder:
            files[os.path.relpath(info.path, remote_folder)] = Stamp(info.size or 0, info.mtime_ns or 0)
    return files


def _walk(folder: Path) -> list[str]:
    """Returns the paths of all files below a local folder. Folders that cannot be listed are left out."""

    def on_error(error: OSError) -> None:
        if is_transient(error):
            raise error

    paths = []
    for parent, _, names in os.walk(folder, onerror=on_error):
        paths += [os.path.join(parent, name) for name in names]
    return paths


def names_in(folder: Path) -> list[str]:
    """Returns the sorted names of the entries of a folder; none if the folder does not exist.

    Raises:
        UserError: The disk or the bucket does not respond for half a minute, or refuses access.
    """
    uri = uri_of(folder)
    if uri:
        _, infos = _list_remote(uri, recursive=False)
        return sorted(info.base_name for info in infos)

    try:
        return sorted(retry_io(str(folder), functools.partial(os.listdir, folder)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise access_refused(str(folder), error) from None


def _list_remote(uri: str, *, recursive: bool) -> tuple[str, list[pafs.FileInfo]]:
    """Returns the path of a folder in its bucket, and its entries."""
    system, remote_folder = locate(uri)
    selector = pafs.FileSelector(remote_folder, recursive=recursive, allow_not_found=True)
    get_infos = functools.partial(system.get_file_info, selector)
    try:
        return remote_folder, retry_io(uri, lambda: call_remote(get_infos, many=True))
    except PermissionError as error:
        raise access_refused(uri, error) from None


def remove(path: Path) -> bool:
    """Removes a file, a link, or a folder with its content, and its copy. Does nothing if it does not exist.

    A folder is renamed first, so that no half-removed folder has the original name.

    Returns:
        Whether nothing is left. What could not be removed keeps the temporary name; `mcis gc` removes it.
    """
    uri = uri_of(path)
    if uri:
        retry_io(uri, functools.partial(_delete, uri))
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return True

    temporary = temporary_path(path)
    try:
        path.rename(temporary)
    except FileNotFoundError:
        return True
    shutil.rmtree(temporary, ignore_errors=True)
    return not temporary.exists()


def _delete(uri: str) -> None:
    system, remote_path = locate(uri)
    kind = call_remote(functools.partial(system.get_file_info, remote_path)).type
    if kind == pafs.FileType.File:
        call_remote(functools.partial(system.delete_file, remote_path))
    elif kind == pafs.FileType.Directory:
        call_remote(functools.partial(system.delete_dir, remote_path), many=True)

"""Atomic reading and writing of a workspace's files: text, JSON, tables, and fingerprints of their content."""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from mcis.datasets.errors import UserError, recompute_command
from mcis.datasets.storage import folders
from mcis.datasets.storage.files import read_opened, stamp, stamps_of_column, sync
from mcis.datasets.storage.folders import describe_length, fetch_file, files_below, names_in, read_file
from mcis.datasets.storage.object_lists import Stamp
from mcis.datasets.storage.threads import map_in_threads
from mcis.datasets.tables.large_tables import in_shards, table_digest
from mcis.datasets.tables.shards import read_parquet

_Record = TypeVar("_Record")
_NUM_THREADS = 8
"""Number of threads that read files for `contents_digest` and `read_shards`."""
_MAX_DIGESTED = 2**30
"""Maximum size in bytes of a file of another program. No reader accepts a larger one."""


def fingerprint(*parts: Any) -> str:
    """The first sixteen hexadecimal digits of the SHA-256 of the canonical JSON of all parts."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_stamps(uris: pa.ChunkedArray) -> str:
    """Digest of the sizes and modification times of files and of their positions in the column.

    It does not depend on where the files are, so a folder that was moved is the same data.

    Args:
        uris: Paths or URIs; null for no file.
    """
    named = uris.drop_null()
    rows = pa.array(np.flatnonzero(uris.is_valid().to_numpy()))
    return table_digest([stamps_of_column(named).append_column("row", rows)])


def content_digest(file: Path) -> str:
    """The first sixteen hexadecimal digits of the SHA-256 of a local or remote file."""
    file = fetch_file(file)
    return _content_digest(file, stamp(str(file)))


@functools.lru_cache
def _content_digest(file: Path, _: Stamp | None) -> str:
    """Digest of a file, cached until its stamp changes."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def contents_digest(files: Sequence[str | None]) -> str:
    """Digest of the contents of files and of their positions.

    It does not depend on where the files are. Use it for files of other programs: archives often give all files one
    modification time, so files with different contents may have the same stamp.

    Args:
        files: Paths; None for no file.
    """
    return fingerprint(list(map_in_threads(_digest_of_file, files, threads=_NUM_THREADS)))


def _digest_of_file(file: str | None) -> str | None:
    """SHA-256 of a file; None for a file that cannot be read, which its reader reports."""
    if file is None:
        return None
    try:
        return read_opened(file, _sha256, _MAX_DIGESTED)
    except OSError:
        return None


def _sha256(content: BinaryIO) -> str:
    """SHA-256 of an open file, which is read in parts."""
    digest = hashlib.sha256()
    for part in iter(functools.partial(content.read, 2**20), b""):
        digest.update(part)
    return digest.hexdigest()


def files_in(folder: Path) -> dict[str, int]:
    """Size in bytes of each file below a folder, by relative path. Files that are removed meanwhile are left out."""
    return {name: found.size for name, found in files_below(folder).items()}


def bytes_in(folder: Path) -> int:
    """Total size in bytes of the files below a folder; 0 if it does not exist."""
    return sum(files_in(folder).values())


def existing_parent(path: Path) -> Path:
    """The path if it exists, or else the nearest folder above it that exists."""
    return next(parent for parent in (path, *path.resolve().parents) if parent.exists())


_FULL_DISK_MESSAGE = re.compile(
    "No space left on device|Disk quota exceeded|File too large"  # the system
    "|database or disk is full|Local disk is full"  # SQLite, Ray
    r"|PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. unexpected pos|basic_ios::clear"  # torch
)


def full_disk(error: BaseException, disk: str) -> UserError | None:
    """Converts an error of a full disk, or of a file that is too large for it, to a UserError; None for any other.

    Libraries often pass the system's error on as text, so error numbers and messages are both checked.

    Args:
        disk: Description of the disk, used in the message.
    """
    if isinstance(error, UserError):
        return None

    reason = None
    message = _FULL_DISK_MESSAGE.search(str(error))
    if message:
        reason = message[0]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason = error.strerror
    if reason is None:
        return None
    if reason == os.strerror(errno.EFBIG):
        return UserError(
            f"a file is too large for {disk} ({reason})",
            "a file system, and a limit of `ulimit -f`, that accept larger files",
            "raise the limit or move the workspace (--workspace DIR), then repeat the command: finished work is kept",
        )
    return UserError(
        f"no space left on {disk} ({reason})",
        "free space for the next file",
        "free some space or move the workspace (--workspace DIR), then repeat the command: finished work is kept",
    )


class _Refusal(NamedTuple):
    """The second and third part of a UserError about a file that cannot be written."""

    expected: str
    remedy: str


_NOT_PERMITTED = _Refusal(
    "a folder to which this user may write", "correct its permissions, or choose another --out or --workspace"
)
_NAME_TAKEN = _Refusal(
    "a name that no other file or folder has", "move the other one away, or choose another --out or --workspace"
)
_TOO_LONG = _Refusal("a shorter path", "shorten the names of files, --name, --out or --workspace")
_NO_LOCKS = _Refusal(
    "a file system with locks (flock), which a workspace needs",
    "choose another --workspace, or mount the file system with locks (NFS without nolock, Lustre with flock)",
)
_REFUSALS = {
    errno.EACCES: _NOT_PERMITTED,
    errno.EPERM: _NOT_PERMITTED,
    errno.EROFS: _NOT_PERMITTED,
    errno.EEXIST: _NAME_TAKEN,
    errno.EISDIR: _NAME_TAKEN,
    errno.ENOTDIR: _NAME_TAKEN,
    errno.ENAMETOOLONG: _TOO_LONG,
    errno.ENOLCK: _NO_LOCKS,
    errno.ENOSYS: _NO_LOCKS,
    errno.ENOTSUP: _NO_LOCKS,
    errno.EOPNOTSUPP: _NO_LOCKS,
}
"""Texts for the errors of a file system that the user can correct, by error number."""


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Converts errors of full or read-only disks, file systems without locks, and invalid file names to UserError."""
    try:
        yield
    except Exception as error:
        full = full_disk(error, f"the disk of {folder}")
        if full:
            raise full from None
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            raise _write_error(error, folder) from None
        raise


def _write_error(error: OSError, folder: Path) -> UserError:
    path = str(error.filename2 or error.filename or folder)
    reason = error.strerror
    if error.errno == errno.ENAMETOOLONG:
        reason = f"{reason}: {describe_length(path)}"
    expected, remedy = _REFUSALS[error.errno or 0]
    return UserError(f"{path} cannot be written ({reason})", expected, remedy)


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Like `folders.atomic_write`, but converts errors of the disk to UserError (`disk_errors`)."""
    with disk_errors(path.parent), folders.atomic_write(path, durable=durable) as temporary:
        yield temporary


def rename_folder(folder: Path, final: Path) -> None:
    """Renames a folder after syncing its content to disk, and syncs the new name."""
    with disk_errors(folder):
        for parent, _, _ in os.walk(folder):
            sync(Path(parent))
        os.replace(folder, final)
        sync(final.parent)


_LIST_OF_NUMBERS = re.compile(r"\[\n([-+\d.eE,\s]+?)\n\s*\]")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON atomically, with each list of numbers on one line."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # JSON strings contain no line breaks, so the pattern matches only lists.
    write_text(path, _LIST_OF_NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text))


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Reads a JSON file of the workspace.

    Raises:
        FileNotFoundError: The file does not exist.
        UserError: The file cannot be read at present, or is damaged (`BadFile`).
    """
    return read_record_of(path, object, "JSON written by mcis", "remove it and repeat the command")


def read_record_of(path: Path, kind: type[_Record], expected: str, remedy: str) -> _Record:
    """Reads and validates a JSON file of the workspace as a dataclass or pydantic model.

    Raises:
        FileNotFoundError: The file does not exist.
        UserError: The file cannot be read at present, or its content does not match `kind` (`BadFile`).
    """

    def parse(file: Path) -> _Record:
        try:
            return TypeAdapter(kind).validate_json(file.read_bytes(), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            location = ".".join(map(str, first["loc"])) or "its content"
            raise ValueError(f"{location}: {first['msg']}") from None

    return read_file(path, parse, expected, remedy)


def write_table(path: Path, table: pa.Table) -> None:
    """Writes a table atomically: as Parquet, or as uncompressed Arrow for memory mapping if the name ends in .arrow."""
    with atomic_write(path) as temporary:
        if path.suffix == ".arrow":
            pa.feather.write_feather(
                table.combine_chunks(), temporary, compression="uncompressed", chunksize=len(table)
            )
        else:
            pq.write_table(table, temporary, compression="zstd")


def write_batches(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Writes a sequence of tables, one at a time, to a single Parquet file atomically."""
    with atomic_write(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for table in in_shards(tables):
            writer.write_table(table)


def read_parts(path: Path, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Yields the row groups of a Parquet file in order. For errors see `read_parquet`."""
    file: pq.ParquetFile = read_parquet(path, pq.ParquetFile)

    def read(group: int, _: Path) -> pa.Table:
        return file.read_row_group(group, columns)

    for group in range(file.num_row_groups):
        yield read_parquet(path, functools.partial(read, group), fetch=False)


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Reads a Parquet file, or all shards of a folder in the order of their names. For errors see `read_shards`."""
    return _read_parquet_file(columns, path) if path.suffix else pa.concat_tables(read_shards(path, columns))


def read_shards(folder: Path, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Yields the shards of a folder, in the order of their names. Threads read up to _NUM_THREADS of them ahead.

    Raises:
        UserError: The folder has no shard, or a file is damaged.
    """
    files = shards_in(folder)
    if not files:
        raise UserError(
            f"no table in {folder}", "shards part-*.parquet", f"compute its stage again: {recompute_command()}"
        )
    read = functools.partial(_read_parquet_file, columns)
    yield from map_in_threads(read, files, threads=_NUM_THREADS, ahead=1)


def _read_parquet_file(columns: list[str] | None, file: Path) -> pa.Table:
    return read_parquet(file, functools.partial(pq.read_table, columns=columns))


def shards_in(folder: Path) -> list[Path]:
    """Paths of the Parquet shards of a folder, sorted by name. They may be remote: fetch a shard before opening it."""
    return [folder / name for name in names_in(folder) if name.startswith("part-") and name.endswith(".parquet")]

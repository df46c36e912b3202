"""Every file name of a workspace, and atomic writing: a file is written aside and then renamed.

WORKSPACE/
  store/<stage>-<key>/       outputs of a stage, shared by all runs with the same key; finished once the summary is
                             there, which is written last, until then work in progress, which a restart continues
  store/.<what>-<name>.lock  locks, whose files stay; see `runs.locks`
  runs/<name>/               files of one run or study, see `RunFolder`
  cache/                     verdicts on image files and decoded images, shared by all runs; may be removed between runs
  data/                      data sets that were drawn or downloaded
  mlflow.db, mlflow/         MLflow's store and artifacts, unless MLFLOW_TRACKING_URI says otherwise
  weights/                   pretrained weights that were downloaded
  comparisons/               pages of runs that were compared

`.<name>.<host>.<process>` is a file or folder that this process is writing or removing.

A workspace at a URI is worked on through copies of its files (`datasets.copies`): what is written is sent to the bucket
once it is whole, what is read is fetched. Caches, data that was drawn and MLflow's own store stay on the machine.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
from filelock import FileLock

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import RULES
from mcis.datasets.storage.copies import (
    fetch_below,
    fetched,
    files_below,
    in_bucket,
    is_there,
    names_in,
    read_end,
    read_file,
    remove,
    send,
    uri_of,
)
from mcis.datasets.storage.files import Stamp, stamps, stamps_of_column, sync
from mcis.datasets.tables.large_tables import digest, in_shards
from mcis.datasets.tables.shards import read_parquet

_FOOTER = 2**20
"""Bytes at the end of a Parquet file that hold its footer; shards have one of some thousand."""
SUMMARY = "summary.json"
"""The file in a stage's output that holds its result, and says that it is finished: it is written last."""


def fingerprint(*parts: Any) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of the parts' canonical JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_stamps(uris: pa.ChunkedArray) -> str:
    """Fingerprint of names, sizes and modification times of files; null is no file."""
    named = uris.drop_null()
    return digest([stamps_of_column(named).append_column("uri", named)])


def content_digest(file: Path) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of a file's content, wherever it lies."""
    file = fetched(file)
    return _content_digest(file, *stamps([str(file)]))


@functools.lru_cache
def _content_digest(file: Path, stamp: Stamp | None) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def files_in(folder: Path) -> dict[str, int]:
    """Bytes of each file below a folder by its path from there; what is renamed or removed meanwhile is left out."""
    return {name: at.size for name, at in files_below(folder).items()}


def bytes_in(folder: Path) -> int:
    """Bytes of the files below a folder, 0 if it is absent."""
    return sum(files_in(folder).values())


def free_bytes(folder: Path) -> int:
    """Bytes free on the disk of a folder, or of the folder that it will be made in."""
    return shutil.disk_usage(next(path for path in (folder, *folder.resolve().parents) if path.exists())).free


def in_words(count: float) -> str:
    """Bytes as a person reads them."""
    unit, size = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if count >= s / 10), ("KiB", 2**10))
    return f"{count / size:.1f} {unit}"


_FULL = re.compile(
    "No space left on device|Disk quota exceeded|File too large"  # the system
    "|database or disk is full|Local disk is full"  # SQLite, Ray
    r"|PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. unexpected pos|basic_ios::clear"  # torch
)


def full_disk(error: BaseException, disk: str) -> UserError | None:
    """The UserError of a disk without space where an error says so, in a number or, as libraries hand it on, in words.

    Args:
        disk: which disk it is, in words.
    """
    said = _FULL.search(str(error))
    why = said[0] if said else None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        why = error.strerror
    if isinstance(error, UserError) or why is None:
        return None
    return UserError(
        f"no space left on {disk} ({why})",
        "space for the next file",
        "free some space or move the workspace (--workspace DIR) and repeat the command: finished work is kept",
    )


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns errors of a full or read-only disk, or of an impossible file name, into a UserError with a remedy."""
    try:
        yield
    except Exception as error:
        if full := full_disk(error, f"the disk of {folder}"):
            raise full from None
        if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise UserError(
                f"{folder} cannot be written ({error.strerror})",
                "a writable workspace",
                "choose another --workspace DIR",
            ) from None
        raise


def host_name() -> str:
    """The name of this machine, of letters, digits and hyphens alone."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "localhost"


def aside_of(path: Path) -> Path:
    """The name beside a path under which this process writes or removes it; `ASIDE` matches such names."""
    return path.with_name(f".{path.name}.{host_name()}.{os.getpid()}")


ASIDE = re.compile(r"\..+\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d+)")
"""Names as `aside_of` makes them."""
OUTPUT = re.compile(r"(?P<stage>[a-z_]+)-(?P<key>[0-9a-f]{16})")
"""Names in store/ of outputs, whose keys are fingerprints."""
CACHE = re.compile(r"(?P<name>[a-z]+\d*(-[0-9a-f]{16}){1,2})(\.part)?")
"""Names in cache/ of caches: whole and in the making."""


@contextlib.contextmanager
def written_aside(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary name to write to, which is then renamed to `path`, or removed if writing failed.

    Args:
        durable: whether the content is on the disk before it has the name; otherwise a machine that loses power may
            leave an empty file under it. False for files that are easily written again.
    """
    aside = aside_of(path)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            if durable:
                sync(aside)
            send(aside, path)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def rename_folder(folder: Path, final: Path) -> None:
    """Renames a folder of files that were written aside, once all names in it are on the disk, and has the new name
    there too."""
    with disk_errors(folder):
        for parent, _, _ in os.walk(folder):
            sync(Path(parent))
        os.replace(folder, final)
        sync(final.parent)


def discard(path: Path) -> bool:
    """Removes a file, a link or a folder, under another name, so that what has its own name is always whole.

    Returns:
        Whether nothing is left of it. What could not be removed keeps the other name, and `mcis gc` removes it.
    """
    if in_bucket(path):
        remove(path / SUMMARY)  # what is without is not finished
        remove(path)
        return True
    aside = aside_of(path)
    with disk_errors(path.parent):
        remove(aside)  # of an earlier process with the same number
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return True
        remove(aside)
    return not os.path.lexists(aside)


_LIST_OF_NUMBERS = re.compile(r"\[\n([-+\d.eE,\s]+?)\n\s*\]")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON, lists of numbers on a line each, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # No string of JSON holds a line break, so that only lists are matched.
    write_text(path, _LIST_OF_NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text))


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Reads a JSON file of the workspace.

    Raises:
        FileNotFoundError: there is none.
        UserError: it cannot be read at present, or is damaged (`BadFile`).
    """
    return read_file(path, _parse_json, "JSON written by mcis", "remove it and repeat the command")


def _parse_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_table(path: Path, table: pa.Table) -> None:
    """Writes a table atomically: as Parquet, or uncompressed for memory-mapping where the name ends in .arrow."""
    with written_aside(path) as aside:
        if path.suffix == ".arrow":
            pa.feather.write_feather(table.combine_chunks(), aside, compression="uncompressed", chunksize=len(table))
        else:
            pq.write_table(table, aside, compression="zstd")


def write_batches(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Writes a Parquet table atomically of tables that need not be in memory together."""
    with written_aside(path) as aside, pq.ParquetWriter(aside, schema, compression="zstd") as writer:
        for table in in_shards(tables):
            writer.write_table(table)


class OpenedTable:
    """A Parquet file that stays open: it has the same rows whatever takes its name meanwhile.

    Raises:
        UserError: it is damaged, here or in `batches`.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: pq.ParquetFile = read_parquet(path, pq.ParquetFile)

    @property
    def groups(self) -> int:
        """How many groups of rows the file has; one for each shard that was written."""
        return int(self._file.num_row_groups)

    def batches(self, columns: list[str] | None = None, group: int | None = None) -> Iterator[pa.Table]:
        """The rows of all groups, or of one, in order, some at a time."""
        for each in range(self.groups) if group is None else [group]:
            yield read_parquet(self._path, functools.partial(self._read, each, columns), fetch=False)

    def _read(self, group: int, columns: list[str] | None, _: Path) -> pa.Table:
        return self._file.read_row_group(group, columns)


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Reads a Parquet file, or all shards of a folder in the order of their names.

    Raises:
        UserError: the folder has no shard, or a file is damaged.
    """
    return pa.concat_tables(_read_files([path], columns) if path.suffix else read_shards(path, columns))


def read_shards(folder: Path, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The shards of a folder, one at a time, in the order of their names.

    Raises:
        UserError: the folder has no shard, or a file is damaged.
    """
    files = shards_in(folder)
    if not files:
        raise UserError(
            f"no table in {folder}", "Parquet shards part-*.parquet", "repeat the command with --from its stage"
        )
    yield from _read_files(files, columns)


def _read_files(files: Iterable[Path], columns: list[str] | None) -> Iterator[pa.Table]:
    return (read_parquet(file, functools.partial(pq.read_table, columns=columns)) for file in files)


def shards_in(folder: Path) -> list[Path]:
    """The Parquet shards of a folder, in the order of their names; whoever opens one fetches it first."""
    return [folder / name for name in names_in(folder) if name.startswith("part-") and name.endswith(".parquet")]


def table_rows(file: Path) -> int:
    """The number of rows of a Parquet file, by its footer alone.

    Raises:
        UserError: it is damaged, or cannot be read at present.
    """
    return int(read_parquet(file, _read_footer, fetch=False).num_rows)


def _read_footer(file: Path) -> pq.FileMetaData:
    return pq.read_metadata(pa.BufferReader(read_end(file, _FOOTER)))


@dataclass(frozen=True)
class RunFolder:
    """The files of one run or study.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def stages(self) -> Path:
        """Where the output of each finished stage lies; see `Workspace.outputs`."""
        return self.path / "run.json"

    @property
    def record(self) -> Path:
        """When the run began, how it ended and what it points to; see `runs.record`."""
        return self.path / "record.json"

    @property
    def config(self) -> Path:
        """Every value of the configuration and where it comes from; `mcis run --config` takes this file."""
        return self.path / "config.toml"

    @property
    def scores(self) -> Path:
        """Scores, counts and seconds of the run."""
        return self.path / "scores.json"

    @property
    def score_table(self) -> Path:
        """The scores as a table, a line each."""
        return self.path / "scores.csv"

    @property
    def environment(self) -> Path:
        """Versions of Python and of the packages that results depend on."""
        return self.path / "environment.json"

    @property
    def report(self) -> Path:
        """The page of the run."""
        return self.path / "report.html"

    @property
    def pictures(self) -> Path:
        """The folder of the report's pictures."""
        return self.path / "pictures"

    @property
    def index_page(self) -> Path:
        """The page of the run's index."""
        return self.path / "index.html"

    @property
    def tracking(self) -> Path:
        """Which MLflow run continues this one."""
        return self.path / "mlflow.json"

    @property
    def study(self) -> Path:
        """The figures of a study."""
        return self.path / "study.json"

    @property
    def study_table(self) -> Path:
        """The figures of a study as a table, a line per case, seed and column."""
        return self.path / "study.csv"

    @property
    def study_picture(self) -> Path:
        """The picture of a study."""
        return self.path / "study.png"

    @property
    def search(self) -> Path:
        """The trials of a search, in Optuna's store."""
        return self.path / "search.db"

    @property
    def best(self) -> Path:
        """The best configuration of a search."""
        return self.path / "best.toml"


_SMALL = 2**20
"""Bytes of the files of runs that each machine has, where a workspace lies in a bucket."""


class Workspace:
    """A folder with runs and their shared store.

    Args:
        root: its path; `copies.place_of` says that of a URI.
        create: whether an absent folder is created. Commands that only read pass False.

    Raises:
        UserError: the folder cannot be written, or is absent and is not to be created.
    """

    def __init__(self, root: Path, *, create: bool = True):
        self.root = root.expanduser().resolve()
        if not create and not is_there(self.runs):
            raise UserError(
                f"{uri_of(self.root) or self.root} is no workspace",
                "a folder that `mcis run` has written",
                "name it by --workspace DIR",
            )
        if create or in_bucket(self.root):
            with disk_errors(self.root):
                for folder in (self.store, self.runs, self.cache, self.data, self.weights):
                    folder.mkdir(parents=True, exist_ok=True)
        if in_bucket(self.root):
            fetch_below(self.runs, lambda _, at: at.size <= _SMALL)

    @property
    def store(self) -> Path:
        """Outputs of stages by key."""
        return self.root / "store"

    @property
    def runs(self) -> Path:
        """One folder per run."""
        return self.root / "runs"

    @property
    def cache(self) -> Path:
        """Decoded images."""
        return self.root / "cache"

    @property
    def verdicts(self) -> Path:
        """Table of the result of verifying each image file."""
        return self.cache / f"verdicts-{RULES}.parquet"

    @property
    def data(self) -> Path:
        """Data sets that were drawn or downloaded."""
        return self.root / "data"

    @property
    def weights(self) -> Path:
        """Pretrained weights that were downloaded."""
        return self.root / "weights"

    @property
    def comparisons(self) -> Path:
        """Pages of runs that were compared; absent before the first."""
        return self.root / "comparisons"

    @property
    def tracking_store(self) -> Path:
        """MLflow's database, unless MLFLOW_TRACKING_URI names another store."""
        return self.root / "mlflow.db"

    @property
    def tracking_artifacts(self) -> Path:
        """Artifacts of MLflow runs in that database."""
        return self.root / "mlflow"

    def run(self, name: str, *, create: bool = True) -> RunFolder:
        """The folder of a run or study; an absent one is created if `create`.

        Raises:
            UserError: the name is no plain file name.
        """
        plain = name and all(c.isalnum() or c in "._-+" for c in name) and not name.startswith(".")
        if not plain:
            raise UserError(f"run name {name!r}", "letters, digits, '.', '_', '-', '+'", "choose such a --name")
        folder = self.runs / name
        if create:
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
        return RunFolder(folder)

    def in_runs(self) -> list[Path]:
        """What lies in runs/, by name, but for what is being written or removed."""
        return [self.runs / name for name in names_in(self.runs) if not ASIDE.fullmatch(name)]

    def outputs(self, name: str) -> dict[str, Path]:
        """The folder of the finished output of each stage that a run has reached, by stage; none of an absent run.

        Raises:
            UserError: the file that says so is damaged.
        """
        file = self.run(name, create=False).stages
        folders = read_json(file) if file.exists() else {}
        if not isinstance(folders, dict) or not all(map(is_output, folders.values())):
            raise UserError(f"{file} is damaged", "stages and folders of store/", "remove it and repeat the command")
        return {stage: self.root / folder for stage, folder in folders.items()}

    def outputs_of(self, stage: str) -> list[Path]:
        """The folders of all outputs of a stage, finished or not."""
        return [self.store / name for name in names_in(self.store) if name.startswith(f"{stage}-")]

    def record_outputs(self, name: str, outputs: Mapping[str, Path]) -> None:
        """Writes down what `outputs` reads."""
        folders = {stage: str(folder.relative_to(self.root)) for stage, folder in outputs.items()}
        write_json(self.run(name).stages, folders)

    def output(self, stage: str, key: str) -> Path:
        """The folder of a stage's output; it is finished once SUMMARY is there."""
        return self.store / f"{stage}-{key}"

    def lock_file(self, what: str, name: str) -> Path:
        """The file of the lock of a stage and its key, of `run` and its name, or of another part of the workspace."""
        return self.store / f".{what}-{name}.lock"

    def lock_files(self, what: str) -> list[Path]:
        """The files of the locks of all stages of a name, or of all runs, in the order of their names."""
        return sorted(self.store.glob(f".{what}-*.lock"))

    def lock(self, what: str, name: str) -> FileLock:
        """A lock for what takes a moment; `runs.locks` has those whose holder says who it is."""
        return FileLock(self.lock_file(what, name), fallback_to_soft=False)


def is_output(folder: Any) -> bool:
    """Whether a text names a folder of store/ itself, and nothing below or outside of it."""
    first, _, name = folder.partition("/") if isinstance(folder, str) else ("", "", "")
    return first == "store" and name not in ("", ".", "..") and "/" not in name and "\0" not in name

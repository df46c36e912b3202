"""File names of a workspace, and the records of its runs.

WORKSPACE/
  store/<stage>-<key>/       output of a stage, shared by all runs with the same key. It is finished once it contains
                             its summary, which is written last; until then, a restart continues it
  store/.<kind>-<name>.lock  files of locks, which are never removed; see `runs.locks`
  runs/<name>/               files of a run or study, see `RunFolder`
  cache/                     results of image checks and decoded images, shared by all runs; removable between runs
  data/                      generated and downloaded data sets
  mlflow.db, mlflow/         MLflow's store and artifacts, unless MLFLOW_TRACKING_URI is set
  weights/                   downloaded pretrained weights
  comparisons/               pages that compare runs

A process writes or removes files and folders under the temporary name `.<name>.<host>.<process>`.

A workspace at a URI is used through local copies of its files (`datasets.storage.folders`): finished files are
uploaded, and files are downloaded before they are read. Caches, generated data and MLflow's SQLite store stay local.
"""

import dataclasses
import datetime
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock
from pydantic import AfterValidator, Field

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import CHECKS_VERSION
from mcis.datasets.storage.folders import (
    MAX_NAME_BYTES,
    TEMPORARY_NAME,
    fetch_below,
    local_path,
    names_in,
    path_exists,
    uri_of,
)
from mcis.platform.runs.files import disk_errors, read_record_of, write_json

DEFAULT_WORKSPACE = Path("mcis-workspace")
"""The folder of a workspace unless another one is given."""
SUMMARY = "summary.json"
"""File with the result of a stage, in its output. It is written last, so it also marks the output as finished."""
_MAX_RUN_NAME = MAX_NAME_BYTES - len(".run-.lock")
"""Maximum length of a run's name in bytes, see `Workspace.lock_file`."""
OUTPUT = re.compile(r"[a-z_]+-[0-9a-f]{16}")
"""Names of outputs in store/: <stage>-<key>."""
CACHE = re.compile(r"(?P<name>[a-z]+\d*(-[0-9a-f]{16}){1,2})(\.part)?")
"""Names of finished and unfinished caches in cache/."""
IMAGE_CHECKS = "checks-"
"""Beginning of the names of folders in cache/ with the results of image checks."""


class _FileName:
    """Descriptor for the path of a file in the folder of a run."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, folder: "RunFolder", _: type) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """Files of a run or study.

    Attributes:
        path: The folder.
    """

    path: Path
    record = _FileName("record.json")
    """Start, end and outputs of the run: a `RunRecord`."""
    config = _FileName("config.toml")
    """All configuration values with their origins; input for `mcis run --config`."""
    scores = _FileName("scores.json")
    """Scores, counts and seconds of the run."""
    environment = _FileName("environment.json")
    """Versions of Python and of the packages that affect results."""
    report = _FileName("report.html")
    """Report of the run."""
    pictures = _FileName("pictures")
    """Folder of the report's pictures."""
    index_page = _FileName("index.html")
    """Page of the run's index."""
    tracking = _FileName("mlflow.json")
    """State of the MLflow run, see `runs.tracking`."""
    study = _FileName("study.json")
    """Scores of a study."""
    study_picture = _FileName("study.png")
    """Plot of a study."""
    study_page = _FileName("study.html")
    """Page that compares the cases of a study."""
    test_archives = _FileName("test")
    """Folder of a study's predictions of test images, for VOC's evaluation server."""
    search = _FileName("search.db")
    """Optuna's store with the trials of a search."""
    importances = _FileName("importances.png")
    """Plot of how much the axes of a search matter."""
    best = _FileName("best.toml")
    """Best configuration of a search."""


_Time = Annotated[str, AfterValidator(lambda text: datetime.datetime.fromisoformat(text).isoformat())]
_Output = Annotated[str, Field(pattern=r"^[^/\x00]*[^./\x00][^/\x00]*$")]  # a name that cannot leave store/


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of record.json. Outputs are given by the names of their folders in store/.

    `mcis gc` keeps all outputs that a run uses. An interrupted call removes nothing from the record: outputs of earlier
    calls stay in it until a later call finishes.

    Attributes:
        kind: A run, or a study, whose trials are runs.
        study: Name of the study of which the run is a trial, or None.
        began: Start of the latest call, UTC, ISO 8601.
        ended: End of the latest call; None while it runs, or if it was killed.
        outcome: How the call ended. `interrupted`: by Ctrl-C, or by the search of which it is a trial.
        reason: Why it failed or was interrupted.
        reached: Outputs that the latest call has finished, by stage. Until it has finished one, they are the outputs of
            the previous call.
        current: Outputs that the latest call has finished or is computing, by stage, and outputs of other runs that it
            uses as weights, by configuration key.
        outputs: All outputs that the run uses: `current` of this call and of earlier calls.
        caches: Names of the folders in cache/ that the stage in progress reads, which no other run removes meanwhile.
        tags: Tags that the user gave the run, see `run_tags`.
    """

    kind: Literal["run", "study"] = "run"
    study: str | None = None
    began: _Time
    ended: _Time | None = None
    outcome: Literal["finished", "failed", "interrupted"] | None = None
    reason: str | None = None
    reached: dict[str, _Output] = field(default_factory=dict)
    current: dict[str, _Output] = field(default_factory=dict)
    outputs: dict[str, list[_Output]] = field(default_factory=dict)
    caches: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def used_outputs(self) -> frozenset[str]:
        """Names of all outputs that the run uses."""
        return frozenset(itertools.chain.from_iterable(self.outputs.values()))


def now() -> str:
    """Current time, UTC, in seconds: 2020-08-23T12:00:00+00:00."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read_record(file: Path) -> RunRecord | None:
    """Reads a record; None if the file does not exist.

    Raises:
        UserError: The file is damaged.
    """
    if not file.exists():
        return None
    return read_record_of(file, RunRecord, "a record written by mcis", "remove it and repeat the command")


_MAX_COPIED_BYTES = 2**20
"""Maximum size in bytes of the files in runs/ that are copied from a remote workspace when it is opened."""


class Workspace:
    """A folder with runs and their shared store. Its attributes are the paths listed at the top of this module.

    Args:
        root: Path of the folder; for a URI, the local path returned by `folders.local_path`.
        create: Whether to create a missing folder. Commands that only read pass False.
        may_be_missing: Whether the folder may be missing if `create` is False.

    Attributes:
        uri: URI of a remote workspace, or None.

    Raises:
        UserError: The folder cannot be written, or is missing although it is neither created nor may be missing.
    """

    def __init__(self, root: Path, *, create: bool = True, may_be_missing: bool = False):
        self.root = root.expanduser().resolve()
        self.uri = uri_of(self.root)
        self.store = self.root / "store"
        self.runs = self.root / "runs"
        self.data = self.root / "data"
        self.weights = self.root / "weights"
        self.comparisons = self.root / "comparisons"
        self.cache = self.root / "cache"
        self.image_checks = self.cache / f"{IMAGE_CHECKS}{CHECKS_VERSION}"
        self.tracking_store = self.root / "mlflow.db"
        self.tracking_artifacts = self.root / "mlflow"

        if not create and not may_be_missing and not path_exists(self.runs):
            raise UserError(
                f"{self.uri or self.root} is not a workspace",
                "a folder that `mcis run` has written",
                "name it with --workspace DIR",
            )
        if create:
            with disk_errors(self.root):
                for folder in (self.store, self.runs, self.cache, self.data, self.weights):
                    folder.mkdir(parents=True, exist_ok=True)
        fetch_below(self.runs, lambda _, file: file.size <= _MAX_COPIED_BYTES)

    def run(self, name: str, *, create: bool = True) -> RunFolder:
        """The folder of a run or study; with `create`, it is created if it does not exist.

        Raises:
            UserError: The name is empty, starts with a dot, is too long, or has characters that are not allowed.
        """
        has_valid_characters = all(character.isalnum() or character in "._-+" for character in name)
        if not name or not has_valid_characters or name.startswith("."):
            raise UserError(
                f"run name {name!r}",
                "letters, digits, '.', '_', '-' and '+', with no '.' at the start",
                "choose another --name",
            )
        if len(name.encode()) > _MAX_RUN_NAME:
            raise UserError(
                f"a run name of {len(name.encode())} bytes: {name[:60]}...",
                f"at most {_MAX_RUN_NAME} bytes, because the file of the run's lock is named after it",
                "choose a shorter --name",
            )

        folder = self.runs / name
        if create:
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
        return RunFolder(folder)

    def run_folders(self) -> list[Path]:
        """Folders in runs/, sorted by name, without those that are being written or removed."""
        return [self.runs / name for name in names_in(self.runs) if not TEMPORARY_NAME.fullmatch(name)]

    def record(self, name: str) -> RunRecord | None:
        """The record of a run; None if the run does not exist. For errors see `read_record`."""
        return read_record(self.run(name, create=False).record)

    def outputs(self, name: str) -> dict[str, Path]:
        """Folders of the finished outputs of a run, by stage; empty if the run does not exist. For errors see
        `read_record`."""
        record = self.record(name)
        if record is None:
            return {}
        return {stage: self.store / output for stage, output in record.reached.items()}

    def record_outputs(self, name: str, outputs: Mapping[str, Path]) -> None:
        """Records the finished outputs of a run by stage, and that no stage is in progress. `outputs` returns them."""
        self.update_record(name, reached={stage: path.name for stage, path in outputs.items()}, caches=[])

    def update_record(self, name: str, **changes: Any) -> None:
        """Updates fields of the record of a run."""
        record = self.record(name) or RunRecord(began=now())
        write_json(self.run(name).record, dataclasses.asdict(dataclasses.replace(record, **changes)))

    def output(self, stage: str, key: str) -> Path:
        """Folder of the output of a stage; it is finished once it contains SUMMARY."""
        return self.store / f"{stage}-{key}"

    def lock_file(self, kind: str, name: str) -> Path:
        """File of a lock: for a stage and its key, for `run` and its name, or for another part of the workspace."""
        return self.store / f".{kind}-{name}.lock"

    def lock(self, kind: str, name: str) -> FileLock:
        """A lock for short operations; for long ones, whose holder is recorded, see `runs.locks`."""
        return FileLock(self.lock_file(kind, name), fallback_to_soft=False)


def open_workspace(folder: Path | str | None, *, create: bool = True) -> Workspace:
    """Opens a workspace.

    Args:
        folder: Path or URI. None: the environment variable MCIS_WORKSPACE, or else DEFAULT_WORKSPACE.
        create: Whether to create a missing folder.

    Raises:
        UserError: See `Workspace` and `folders.local_path`.
    """
    folder = folder or os.environ.get("MCIS_WORKSPACE", DEFAULT_WORKSPACE)
    return Workspace(local_path(str(folder)), create=create)

"""Every file name of a workspace, and the records of its runs.

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

A workspace at a URI is worked on through copies of its files (`datasets.storage.folders`): what is written is sent to
the bucket once it is whole, what is read is fetched. Caches, drawn data and MLflow's own store stay on the machine.
"""

import dataclasses
import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock
from pydantic import AfterValidator, Field

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import DECODER_VERSION
from mcis.datasets.storage.folders import ASIDE, fetch_below, is_there, names_in, uri_of
from mcis.platform.runs.files import disk_errors, read_record_of, write_json

SUMMARY = "summary.json"
"""The file in a stage's output that holds its result, and says that it is finished: it is written last."""
OUTPUT = re.compile(r"[a-z_]+-[0-9a-f]{16}")
"""Names in store/ of outputs, whose keys are fingerprints."""
CACHE = re.compile(r"(?P<name>[a-z]+\d*(-[0-9a-f]{16}){1,2})(\.part)?")
"""Names in cache/ of caches: whole and in the making."""


class _Named:
    """The path of a name in a run's folder."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, folder: "RunFolder", _: type) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The files of one run or study.

    Attributes:
        path: the folder.
    """

    path: Path
    record = _Named("record.json")
    """When the run began, how it ended and what it points to: a `RunRecord`."""
    config = _Named("config.toml")
    """Every value of the configuration and where it comes from; `mcis run --config` takes this file."""
    scores = _Named("scores.json")
    """Scores, counts and seconds of the run."""
    environment = _Named("environment.json")
    """Versions of Python and of the packages that results depend on."""
    report = _Named("report.html")
    """The page of the run."""
    pictures = _Named("pictures")
    """The folder of the report's pictures."""
    index_page = _Named("index.html")
    """The page of the run's index."""
    tracking = _Named("mlflow.json")
    """Which MLflow run continues this one."""
    study = _Named("study.json")
    """The figures of a study."""
    study_picture = _Named("study.png")
    """The picture of a study."""
    study_page = _Named("study.html")
    """The page of a study's cases, compared."""
    search = _Named("search.db")
    """The trials of a search, in Optuna's store."""
    best = _Named("best.toml")
    """The best configuration of a search."""


_Time = Annotated[str, AfterValidator(lambda text: datetime.datetime.fromisoformat(text).isoformat())]
_Output = Annotated[str, Field(pattern=r"^[^/\x00]*[^./\x00][^/\x00]*$")]  # a name that does not lead out of store/


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of record.json, what is known of a run or study. Outputs are named by their folders below store/.

    A run points to the outputs that it has reached or is computing; `mcis gc` keeps those. A call that ends early takes
    nothing back: outputs of earlier calls count until a call has finished that put others in their place.

    Attributes:
        kind: a run, or a study of which other runs are the trials.
        study: name of the study that the run is a trial of.
        began, ended: of the last call, UTC, ISO 8601; `ended` is None while it runs and where it was killed.
        outcome: how the call ended; interrupted = by Ctrl-C, or by the search that it is a trial of.
        reason: why it failed or was stopped, in words.
        reached: by stage the finished outputs of the last call; until its first one, those of the call before.
        current: by stage, or by the key of weights that are of another run, what the last call has reached or computes.
        outputs: the same with those of earlier calls: all that the run points to.
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

    @property
    def pointed(self) -> frozenset[str]:
        """All outputs that the run points to."""
        return frozenset(output for outputs in self.outputs.values() for output in outputs)


def now() -> str:
    """The time, UTC, to the second: 2020-08-23T12:00:00+00:00."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read_record(file: Path) -> RunRecord | None:
    """The record in a file; None where there is none, UserError where it is damaged."""
    expected, remedy = "a record as mcis wrote it", "remove it and repeat the command"
    return read_record_of(file, RunRecord, expected, remedy) if file.exists() else None


_SMALL = 2**20
"""Bytes of the files of runs that each machine has, where a workspace lies in a bucket."""


class Workspace:
    """A folder with runs and their shared store; its attributes are the paths of what this module's head lists.

    `uri` is that of a workspace in a bucket, None of another.

    Args:
        root: its path; `folders.local_path` says that of a URI.
        create: whether an absent folder is created. Commands that only read pass False.

    Raises:
        UserError: the folder cannot be written, or is absent and is not to be created.
    """

    def __init__(self, root: Path, *, create: bool = True):
        self.root = root.expanduser().resolve()
        self.uri = uri_of(self.root)
        self.store, self.runs, self.data = self.root / "store", self.root / "runs", self.root / "data"
        self.weights, self.comparisons = self.root / "weights", self.root / "comparisons"
        self.cache = self.root / "cache"
        self.verdicts = self.cache / f"verdicts-{DECODER_VERSION}"
        self.tracking_store, self.tracking_artifacts = self.root / "mlflow.db", self.root / "mlflow"
        if not create and not is_there(self.runs):
            found = f"{self.uri or self.root} is no workspace"
            raise UserError(found, "a folder that `mcis run` has written", "name it by --workspace DIR")
        if create:
            with disk_errors(self.root):
                for folder in (self.store, self.runs, self.cache, self.data, self.weights):
                    folder.mkdir(parents=True, exist_ok=True)
        fetch_below(self.runs, lambda _, at: at.size <= _SMALL)

    def run(self, name: str, *, create: bool = True) -> RunFolder:
        """The folder of a run or study, made if absent and `create`. UserError where the name is no plain file name."""
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

    def record(self, name: str) -> RunRecord | None:
        """The record of a run; None of an absent one. Errors as of `read_record`."""
        return read_record(self.run(name, create=False).record)

    def outputs(self, name: str) -> dict[str, Path]:
        """The folder of the finished output of each stage that a run has reached, by stage; none of an absent run.
        Errors as of `read_record`."""
        record = self.record(name)
        return {stage: self.store / output for stage, output in record.reached.items()} if record else {}

    def record_outputs(self, name: str, outputs: Mapping[str, Path]) -> None:
        """Writes down what `outputs` reads."""
        self.update_record(name, reached={stage: path.name for stage, path in outputs.items()})

    def update_record(self, name: str, **changes: Any) -> None:
        """Writes a run's record with other values of these fields."""
        record = self.record(name) or RunRecord(began=now())
        write_json(self.run(name).record, dataclasses.asdict(dataclasses.replace(record, **changes)))

    def output(self, stage: str, key: str) -> Path:
        """The folder of a stage's output; it is finished once SUMMARY is there."""
        return self.store / f"{stage}-{key}"

    def lock_file(self, what: str, name: str) -> Path:
        """The file of the lock of a stage and its key, of `run` and its name, or of another part of the workspace."""
        return self.store / f".{what}-{name}.lock"

    def lock(self, what: str, name: str) -> FileLock:
        """A lock for what takes a moment; `runs.locks` has those whose holder says who it is."""
        return FileLock(self.lock_file(what, name), fallback_to_soft=False)

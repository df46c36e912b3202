"""What a workspace holds: its runs and studies, the disk that they point to, and what none of them does, to be removed.

Whatever lies in runs/ is listed; what is damaged, or nothing that mcis wrote, says so in its row. Nothing is removed
beside a run in progress. A folder is renamed before it is removed, runs before the outputs that they point to, so that
after a kill the next call finds the rest.
"""

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from mcis.datasets.errors import BadFile, UserError
from mcis.datasets.index import shown
from mcis.datasets.storage.folders import TEMPORARY_NAME, host_name, names_in, path_exists, remove
from mcis.platform.config.experiment import read_experiment
from mcis.platform.runs.files import bytes_in, disk_errors, read_json
from mcis.platform.runs.locks import Holder, run_holder
from mcis.platform.runs.scores import read_scores
from mcis.platform.runs.workspace import CACHE, OUTPUT, SUMMARY, RunFolder, RunRecord, Workspace, read_record

State = Literal["running", "finished", "failed", "interrupted", "killed", "damaged", "foreign"]
"""How a run's last call ended: killed = its process is gone and wrote of no end; foreign = nothing that mcis wrote."""

MAIN_SCORES = {"maps": "maps", "masks": "masks", "segmentation": "segm.", "with CRF": "+CRF"}
"""The main scores of a run, and their headings."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of what a workspace holds.

    Attributes:
        name: of the folder below runs/.
        kind: None of what is damaged or foreign.
        study: the study that a run is a trial of.
        sources, recipe: of the configuration.
        began, ended: of the last call, UTC, ISO 8601.
        holder: the process that runs it.
        reached: the last finished stage of the last call.
        scores: mIoU in percent by MAIN_SCORES, as far as the last call came to them; maps with the most related images.
        outputs: names of the folders below store/ that it points to.
        bytes: of its own folder and of those; a study's with its trials'. Folders that several point to count for each.
        trials: of a study.
        problem: why it failed, or what is damaged.
    """

    name: str
    kind: Literal["run", "study"] | None = None
    study: str | None = None
    sources: str | None = None
    recipe: str | None = None
    began: str | None = None
    ended: str | None = None
    state: State
    holder: Holder | None = None
    reached: str | None = None
    scores: dict[str, float] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    bytes: int = 0
    trials: int = 0
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The row as values of JSON; a score that is not a number is null."""
        values = {name: value for name, value in vars(self).items() if name not in ("outputs", "holder")}
        scores = {name: value if math.isfinite(value) else None for name, value in self.scores.items()}
        holder = self.holder._asdict() if self.holder else None
        return values | {"scores": scores, "holder": holder, "outputs": sorted(self.outputs)}


def records(workspace: Workspace) -> dict[str, RunRecord | UserError | None]:
    """The record of whatever lies in runs/, by name: None of what mcis did not write, an error where it is damaged."""
    found: dict[str, RunRecord | UserError | None] = {}
    for path in workspace.run_folders():
        try:
            if path.is_symlink():
                path.stat()  # one to a disk that is not there now may be to a run
            found[path.name] = read_record(RunFolder(path).record)
            if found[path.name]:
                workspace.run(path.name, create=False)  # its name may be none of a run
        except OSError as error:
            found[path.name] = UserError(f"{path} cannot be read ({error.strerror})", "a run", "make it readable")
        except UserError as error:
            found[path.name] = error
    return found


def entries(workspace: Workspace) -> list[Entry]:
    """All that lies in runs/, by name; the trials of a study behind it."""
    found = [_entry(workspace, name, record) for name, record in records(workspace).items()]
    studies = {entry.name for entry in found if entry.kind == "study"}
    size_of = functools.cache(lambda output: bytes_in(workspace.store / output))

    def whole(entry: Entry, trials: Sequence[Entry] = ()) -> Entry:
        outputs = entry.outputs.union(*(trial.outputs for trial in trials))
        size = sum(each.bytes for each in (entry, *trials)) + sum(map(size_of, outputs))
        return replace(entry, outputs=outputs, bytes=size, trials=len(trials))

    rows: list[Entry] = []
    for entry in found:
        if entry.kind == "study":
            trials = [each for each in found if each.kind == "run" and each.study == entry.name]
            rows += [whole(entry, trials), *map(whole, trials)]
        elif entry.kind != "run" or entry.study not in studies:
            rows.append(whole(entry))
    return rows


def _entry(workspace: Workspace, name: str, record: RunRecord | UserError | None) -> Entry:
    """The row of one folder, with the bytes of this folder alone."""
    folder = RunFolder(workspace.runs / name)
    if record is None:
        return Entry(name=name, state="foreign", problem="nothing that mcis wrote")
    if isinstance(record, UserError):
        return Entry(name=name, state="damaged", problem=record.found, bytes=bytes_in(folder.path))
    try:
        names = read_experiment(folder.config).names if folder.config.exists() else {}
        holder = run_holder(workspace, name)
        return Entry(
            name=name,
            kind=record.kind,
            study=record.study,
            sources=names.get("sources"),
            recipe=names.get("recipe"),
            began=record.began,
            ended=record.ended,
            state="running" if holder else record.outcome or "killed",
            holder=holder,
            reached=next(reversed(record.reached), None),
            scores=_scores(workspace, record),
            outputs=record.used_outputs,
            bytes=bytes_in(folder.path),
            problem=None if holder else record.reason,
        )
    except (UserError, OSError) as error:
        problem = error.found if isinstance(error, UserError) else f"it cannot be read ({error.strerror})"
        return Entry(name=name, state="damaged", problem=problem, bytes=bytes_in(folder.path))


def _scores(workspace: Workspace, record: RunRecord) -> dict[str, float]:
    """The main scores by MAIN_SCORES, as far as the last call has come to them."""
    outputs = {stage: workspace.store / name for stage, name in record.current.items() if stage in record.reached}
    found: dict[str, float] = {}
    for score in read_scores(outputs):
        of_segmentation = "with CRF" if score.crf else "segmentation"
        names = {"localization_maps": "maps", "pseudo_masks": "masks", "segmentation": of_segmentation}
        if score.what in names:
            found[names[score.what]] = score.miou  # maps with related images come last
    return found


# --- what nobody needs

_ABANDONED = 24 * 3600.0
"""Seconds after which a file that a process of another machine was writing counts as left over."""


class Garbage(NamedTuple):
    """A file or folder to remove: why, and its bytes."""

    path: Path
    why: str
    size: int


class Plan(NamedTuple):
    """What is to be removed, in this order, and notes on what stays although no run is known to need it."""

    garbage: list[Garbage]
    notes: list[str]


def plan_removal(workspace: Workspace, names: Sequence[str] = ()) -> Plan:
    """What could be removed, if these runs, and studies with their trials, went first; UserError where there is no such
    run; or what another run points to cannot be read."""
    found = records(workspace)
    present = [name for name, record in found.items() if record]
    for name in names:
        if name not in present:
            folder = workspace.run(name, create=False).path
            raise UserError(
                f"--run {name}: {folder} is {'nothing that mcis wrote' if folder.exists() else 'absent'}",
                f"a run or study of {workspace.root}: {shown(present)}",
                "see `mcis runs`",
            )
    trials = [name for name, record in found.items() if isinstance(record, RunRecord) and record.study in names]
    removed = list(dict.fromkeys([*trials, *names]))
    garbage = [_garbage(workspace.runs / name, "asked for by --run") for name in removed]
    notes = [f"runs/{name} stays: nothing that mcis wrote" for name, record in found.items() if record is None]
    pointed = _pointed({name: record for name, record in found.items() if name not in removed})
    garbage += _outputs(workspace, pointed, notes)
    garbage += _caches(workspace, pointed, notes)
    inside = {each.path for each in garbage}
    garbage += (_garbage(path, "left over by a process that is gone") for path in _leftovers(workspace, inside))
    return Plan(garbage, notes)


def remove_garbage(workspace: Workspace, plan: Plan) -> list[str]:
    """Removes what a plan holds, while `hold_workspace` does; returns what could not be removed, with the reason."""
    with disk_errors(workspace.root):
        left = [each.path for each in plan.garbage if not remove(each.path)]
    return [f"{path.relative_to(workspace.root)}: a part of it cannot be removed" for path in left]


def _garbage(path: Path, why: str) -> Garbage:
    try:
        return Garbage(path, why, path.lstat().st_size if path.is_symlink() or path.is_file() else bytes_in(path))
    except FileNotFoundError:  # beside a run in progress, which may rename a file meanwhile
        return Garbage(path, why, 0)


def _pointed(found: Mapping[str, RunRecord | UserError | None]) -> set[str]:
    """The names of the folders below store/ that runs point to."""
    pointed: set[str] = set()
    for name, record in found.items():
        if isinstance(record, UserError):
            raise UserError(
                f"what run {name} points to cannot be told: {record.found}",
                "runs that say what they point to, or any output might be theirs",
                f"repeat the run's command once the file is removed, or remove the run too (--run {name})",
            )
        pointed.update(record.used_outputs if record else ())
    return pointed


def _outputs(workspace: Workspace, pointed: set[str], notes: list[str]) -> list[Garbage]:
    """Outputs of stages, finished or not, that nobody points to."""
    lonely = [name for name in names_in(workspace.store) if name not in pointed and not TEMPORARY_NAME.fullmatch(name)]
    outputs = [name for name in lonely if OUTPUT.fullmatch(name)]
    others = [name for name in lonely if name not in outputs and not name.endswith(".lock")]
    notes += (f"store/{name} stays: not the output of a stage" for name in others)
    return [_garbage(workspace.store / name, "no run points to it") for name in outputs]


def _caches(workspace: Workspace, pointed: set[str], notes: list[str]) -> list[Garbage]:
    """Caches that none of these outputs was computed from; none where an output does not say what it was."""
    used: set[str] = set()
    silent = []
    for name in sorted(pointed):
        folder = workspace.store / name
        try:
            used.update(read_json(folder / SUMMARY)["caches"])
        except (FileNotFoundError, BadFile, KeyError, TypeError):
            if path_exists(folder):
                silent.append(name)
    if silent:
        notes.append(f"cache/ stays: {shown(silent)} does not say what it was computed from, or is unfinished")
        return []
    caches = [match for match in map(CACHE.fullmatch, names_in(workspace.cache)) if match and match["name"] not in used]
    return [_garbage(workspace.cache / match[0], "no output that remains was computed from it") for match in caches]


def _leftovers(workspace: Workspace, inside: set[Path]) -> Iterator[Path]:
    """Files and folders under the temporary name of a process that is gone, but not those inside of others."""
    for top in (workspace.store, workspace.runs, workspace.cache, workspace.weights):
        for path in sorted(top.rglob(".*")):
            if _is_left_over(path) and inside.isdisjoint((path, *path.parents)):
                inside.add(path)
                yield path


def _is_left_over(path: Path) -> bool:
    match = TEMPORARY_NAME.fullmatch(path.name)
    if match is None:
        return False
    if match["host"] == host_name():
        return int(match["pid"]) == os.getpid() or not psutil.pid_exists(int(match["pid"]))
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime > _ABANDONED
    return False

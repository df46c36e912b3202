"""The record of a run or study, record.json: when its last call began, how it ended, and what it points to.

A run points to the outputs, below store/, that it has reached or is computing; `mcis gc` keeps those. A call that ends
early takes nothing back: outputs of earlier calls count until a call has finished that put others in their place.
"""

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from mcis.datasets.errors import UserError
from mcis.datasets.storage.copies import AGAIN
from mcis.platform.runs.locks import hold_run, now
from mcis.platform.runs.workspace import RunFolder, Workspace, is_output, read_json, write_json


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of record.json.

    Attributes:
        kind: a run, or a study of which other runs are the trials.
        study: name of the study that the run is a trial of.
        began, ended: of the last call, UTC, ISO 8601; `ended` is None while it runs and where it was killed.
        outcome: how the call ended; interrupted = by Ctrl-C, or by the search that it is a trial of.
        reason: why it failed or was stopped, in words.
        outputs: by stage, or by the key of weights that are of another run, the names of the folders below store/ that
            the run points to.
        current: those of them that the last call points to.
        recomputed: names of the folders below store/ that calls with `--from` have begun to compute again since a call
            last finished. Such a call that is repeated goes on with them.
    """

    kind: Literal["run", "study"] = "run"
    study: str | None = None
    began: str
    ended: str | None = None
    outcome: Literal["finished", "failed", "interrupted"] | None = None
    reason: str | None = None
    outputs: dict[str, list[str]] = field(default_factory=dict)
    current: dict[str, list[str]] = field(default_factory=dict)
    recomputed: list[str] = field(default_factory=list)


_ADAPTER = TypeAdapter(RunRecord)


def read_record(folder: RunFolder) -> RunRecord | None:
    """The record of a run; None of one that an earlier version wrote.

    Raises:
        UserError: it is damaged.
    """
    if not folder.record.exists():
        return None
    try:
        record = _ADAPTER.validate_json(json.dumps(read_json(folder.record)), strict=True)
        for time in filter(None, (record.began, record.ended)):
            datetime.datetime.fromisoformat(time)
        outputs = [name for of in (record.outputs, record.current) for names in of.values() for name in names]
        if strange := [name for name in outputs if not is_output(f"store/{name}")]:
            raise ValueError(f"{strange[0]!r} is no folder of store/")
        return record
    except ValueError as error:  # pydantic's ValidationError is one too
        raise UserError(
            f"{folder.record} is damaged ({str(error).splitlines()[0]})",
            "a record as mcis wrote it",
            "remove it and repeat the command",
        ) from None


def pointers(workspace: Workspace, name: str) -> dict[str, list[str]]:
    """By stage the names of the folders below store/ that a run points to, of its last call and of earlier ones.

    Raises:
        UserError: a file that says so is damaged.
    """
    folder = workspace.run(name, create=False)
    record = read_record(folder)
    found = {stage: list(names) for stage, names in record.outputs.items()} if record else {}
    for stage, path in workspace.outputs(name).items():
        found.setdefault(stage, []).append(path.name)
    return {stage: list(dict.fromkeys(names)) for stage, names in found.items()}


def point_to(workspace: Workspace, name: str, stage: str, output: Path) -> None:
    """Writes down that a run points to the output of a stage, before it is computed."""
    folder, names = workspace.run(name), [output.name]
    record = read_record(folder) or RunRecord(began=now())
    every = list(dict.fromkeys([*record.outputs.get(stage, []), *names]))
    _write(
        folder,
        dataclasses.replace(record, outputs=record.outputs | {stage: every}, current=record.current | {stage: names}),
    )


def recomputed(workspace: Workspace, name: str) -> list[str]:
    """See `RunRecord.recomputed`."""
    record = read_record(workspace.run(name))
    return record.recomputed if record else []


def begin_recompute(workspace: Workspace, name: str, output: Path) -> None:
    """Writes down that an output is computed again, once the former one is gone."""
    folder = workspace.run(name)
    record = read_record(folder) or RunRecord(began=now())
    _write(folder, dataclasses.replace(record, recomputed=[*record.recomputed, output.name]))


@contextlib.contextmanager
def recorded(
    workspace: Workspace, name: str, *, whole: bool, study: str | None = None, kind: Literal["run", "study"] = "run"
) -> Iterator[None]:
    """Holds a run's name while the block runs, and writes down when that began and how it ended.

    Args:
        whole: whether the block goes to the last stage, so that a stage that it does not reach is none of the run's.

    Raises:
        UserError: another process holds the name.
    """
    with hold_run(workspace, name):
        began, folder = now(), workspace.run(name)
        earlier, outputs = read_record(folder), pointers(workspace, name)
        begun = earlier.recomputed if earlier and earlier.outcome != "finished" else []
        _write(folder, RunRecord(kind=kind, study=study, began=began, outputs=outputs, recomputed=begun))
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(UserError, OSError):  # the error that ended the block is the one to report
                _write(folder, _ended_by(error, read_record(folder) or RunRecord(kind=kind, study=study, began=began)))
            raise
        record = read_record(folder) or RunRecord(began=began)
        reached = {stage: [path.name] for stage, path in workspace.outputs(name).items()} | record.current
        outputs = reached if whole else pointers(workspace, name) | reached
        _write(
            folder,
            RunRecord(
                kind=kind, study=study, began=began, ended=now(), outcome="finished", outputs=outputs, current=reached
            ),
        )


def stopped(workspace: Workspace, name: str, reason: str) -> None:
    """Writes down that somebody else ended the process of a run, and why."""
    folder = workspace.run(name, create=False)
    record = read_record(folder)
    if record and record.outcome is None:
        _write(folder, dataclasses.replace(record, ended=now(), outcome="interrupted", reason=reason))


def _ended_by(error: BaseException, record: RunRecord) -> RunRecord:
    if isinstance(error, KeyboardInterrupt):
        return dataclasses.replace(record, ended=now(), outcome="interrupted")
    record = dataclasses.replace(record, ended=now(), outcome="failed")
    if not isinstance(error, UserError):
        return dataclasses.replace(record, reason=type(error).__name__)
    once_more = "--from" in error.remedy or AGAIN in error.remedy  # what was computed again is to be so once more
    return dataclasses.replace(record, reason=error.found, recomputed=[] if once_more else record.recomputed)


def _write(folder: RunFolder, record: RunRecord) -> None:
    write_json(folder.record, dataclasses.asdict(record))

"""The record of a run or study, record.json: when its last call began, how it ended, and what it points to.

A run points to the outputs, below store/, that it has reached or is computing; `mcis gc` keeps those. A call that ends
early takes nothing back: outputs of earlier calls count until a call has finished that put others in their place.
"""

import dataclasses
import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from mcis.platform.runs.files import read_record_of, write_json


def _time(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


def _folder(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is no folder of store/")
    return name


_Time = Annotated[str, AfterValidator(_time)]
_Output = Annotated[str, AfterValidator(_folder)]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of record.json. Outputs are named by their folders below store/.

    Attributes:
        kind: a run, or a study of which other runs are the trials.
        study: name of the study that the run is a trial of.
        began, ended: of the last call, UTC, ISO 8601; `ended` is None while it runs and where it was killed.
        outcome: how the call ended; interrupted = by Ctrl-C, or by the search that it is a trial of.
        reason: why it failed or was stopped, in words.
        reached: by stage the finished outputs of the last call; until its first one, those of the call before.
        current: by stage, or by the key of weights that are of another run, what the last call has reached or computes.
        outputs: the same with those of earlier calls: all that the run points to.
        recomputed: the outputs that calls with `--from` have begun to compute again since a call last finished. Such a
            call that is repeated goes on with them.
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
    recomputed: list[str] = field(default_factory=list)

    @property
    def pointed(self) -> frozenset[str]:
        """All outputs that the run points to."""
        return frozenset(output for outputs in self.outputs.values() for output in outputs)


def now() -> str:
    """The time, UTC, to the second: 2020-08-23T12:00:00+00:00."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read_record(file: Path) -> RunRecord | None:
    """The record in a file; None where there is none.

    Raises:
        UserError: it is damaged.
    """
    expected, remedy = "a record as mcis wrote it", "remove it and repeat the command"
    return read_record_of(file, RunRecord, expected, remedy) if file.exists() else None


def write_record(file: Path, record: RunRecord) -> None:
    """Writes a run's record."""
    write_json(file, dataclasses.asdict(record))

"""Lists the runs and studies of a workspace, with the disk space that they use.

Every folder in runs/ has an entry, even if it is damaged or was not written by mcis.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mcis.datasets.errors import UserError
from mcis.platform.config.experiment import read_experiment
from mcis.platform.runs.files import bytes_in
from mcis.platform.runs.locks import Holder, run_holder
from mcis.platform.runs.scores import read_scores
from mcis.platform.runs.workspace import RunFolder, RunRecord, Workspace, read_record

State = Literal["running", "finished", "failed", "interrupted", "killed", "damaged", "foreign"]
"""State of a run after its last call. killed: the process ended without recording how. foreign: not written by mcis."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder in runs/.

    Attributes:
        name: Name of the folder.
        kind: None if the folder is damaged or foreign.
        study: The study that a run is a trial of.
        sources: Image sources of the configuration.
        recipe: Recipe of the configuration.
        began: Start of the last call, UTC, ISO 8601.
        ended: End of the last call, UTC, ISO 8601.
        state: See `State`.
        holder: The process that runs it now; None if there is none.
        reached: The last stage that the last call finished.
        scores: mIoU in percent by `Variant.key`, for the scores that the last call reached. The score of maps with
            related images replaces the score of single-round maps.
        outputs: Names of the folders in store/ that it uses.
        bytes: Size of its own folder and of its outputs; for a study, including its trials. An output that several runs
            use counts for each of them.
        trials: Number of trials of a study.
        problem: Why it failed, or what is damaged.
        tags: Tags that the user gave it.
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
    tags: dict[str, str] = field(default_factory=dict)

    def matches(self, tags: Mapping[str, str], recipe: str | None) -> bool:
        """Whether it has all of these tags, and the recipe if one is given."""
        has_tags = all(self.tags.get(key) == value for key, value in tags.items())
        return has_tags and recipe in (None, self.recipe)

    def as_json(self) -> dict[str, Any]:
        """The entry as JSON values; a score that is not a number becomes null."""
        values = {name: value for name, value in vars(self).items() if name not in ("outputs", "holder")}
        values["scores"] = {name: value if math.isfinite(value) else None for name, value in self.scores.items()}
        values["holder"] = self.holder._asdict() if self.holder else None
        values["outputs"] = sorted(self.outputs)
        return values


def records(workspace: Workspace) -> dict[str, RunRecord | UserError | None]:
    """Reads the record of every folder in runs/, by name: None if mcis did not write it, or the error if damaged."""
    read: dict[str, RunRecord | UserError | None] = {}
    for path in workspace.run_folders():
        try:
            if path.is_symlink():
                path.stat()  # raises if the link leads to a disk that is not mounted; a run may be there
            read[path.name] = read_record(RunFolder(path).record)
            if read[path.name]:
                workspace.run(path.name, create=False)  # checks that the name is valid for a run
        except OSError as error:
            read[path.name] = UserError(
                f"{path} cannot be read ({error.strerror})", "a readable folder of a run", "make it readable"
            )
        except UserError as error:
            read[path.name] = error
    return read


def entries(workspace: Workspace) -> list[Entry]:
    """Lists everything in runs/ by name; trials follow their study."""
    folders = [_read_entry(workspace, name, record) for name, record in records(workspace).items()]
    studies = {entry.name for entry in folders if entry.kind == "study"}

    @functools.cache
    def output_bytes(output: str) -> int:
        return bytes_in(workspace.store / output)

    def with_outputs(entry: Entry, trials: Sequence[Entry] = ()) -> Entry:
        outputs = entry.outputs.union(*(trial.outputs for trial in trials))
        own_bytes = sum(folder.bytes for folder in (entry, *trials))
        total_bytes = own_bytes + sum(output_bytes(output) for output in outputs)
        return replace(entry, outputs=outputs, bytes=total_bytes, trials=len(trials))

    listed: list[Entry] = []
    for entry in folders:
        if entry.kind == "study":
            trials = [folder for folder in folders if folder.kind == "run" and folder.study == entry.name]
            listed.append(with_outputs(entry, trials))
            listed += [with_outputs(trial) for trial in trials]
        elif entry.kind != "run" or entry.study not in studies:
            listed.append(with_outputs(entry))
    return listed


def _read_entry(workspace: Workspace, name: str, record: RunRecord | UserError | None) -> Entry:
    """Makes the entry of a folder; its size excludes outputs and trials."""
    folder = RunFolder(workspace.runs / name)
    if record is None:
        return Entry(name=name, state="foreign", problem="not written by mcis")
    if isinstance(record, UserError):
        return Entry(name=name, state="damaged", problem=record.found, bytes=bytes_in(folder.path))

    try:
        sources, recipe = _configured_names(folder.config)
        holder = run_holder(workspace, name)
        return Entry(
            name=name,
            kind=record.kind,
            study=record.study,
            sources=sources,
            recipe=recipe,
            began=record.began,
            ended=record.ended,
            state="running" if holder else record.outcome or "killed",
            holder=holder,
            reached=next(reversed(record.reached), None),
            scores=_scores(workspace, record),
            outputs=record.used_outputs,
            bytes=bytes_in(folder.path),
            problem=None if holder else record.reason,
            tags=record.tags,
        )
    except (UserError, OSError) as error:
        problem = error.found if isinstance(error, UserError) else f"cannot be read ({error.strerror})"
        return Entry(name=name, state="damaged", problem=problem, bytes=bytes_in(folder.path))


def _configured_names(config: Path) -> tuple[str | None, str | None]:
    """Returns the image sources and the recipe of a run; None if they are unknown."""
    if not config.exists():
        return None, None
    names = read_experiment(config).names
    return names.get("sources"), names.get("recipe")


def _scores(workspace: Workspace, record: RunRecord) -> dict[str, float]:
    """Reads the mIoU of the scores that the last call reached, by `Variant.key`."""
    outputs = {stage: workspace.store / name for stage, name in record.current.items() if stage in record.reached}
    mious: dict[str, float] = {}
    for score in read_scores(outputs):
        if score.variant:
            mious[score.variant.key] = score.miou  # maps with related images come last and replace single-round maps
    return mious

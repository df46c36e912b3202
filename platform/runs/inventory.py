"""What a workspace holds: its runs and studies, how far each came, its main scores, and the disk that it points to.

Whatever lies in runs/ is listed; what is damaged, or nothing that mcis wrote, says so in its row.
"""

import datetime
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mcis.datasets.errors import UserError
from mcis.platform.config.experiment import read_experiment
from mcis.platform.runs.files import bytes_in, read_json
from mcis.platform.runs.locks import Holder, run_holder
from mcis.platform.runs.record import RunRecord, read_record
from mcis.platform.runs.workspace import RunFolder, Workspace

State = Literal["running", "finished", "failed", "interrupted", "killed", "damaged", "foreign"]
"""How a run's last call ended: killed = the process is gone and has written nothing of an end; foreign = nothing that
mcis wrote."""

MAIN_SCORES = ("maps", "masks", "segmentation", "with CRF")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of what a workspace holds.

    Attributes:
        name: of the folder below runs/.
        kind: None of what is damaged or foreign.
        study: the study that a run is a trial of.
        setting, recipe: of the configuration.
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
    setting: str | None = None
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
    for path in workspace.in_runs():
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
            setting=names.get("setting"),
            recipe=names.get("recipe"),
            began=record.began,
            ended=record.ended,
            state="running" if holder else record.outcome or "killed",
            holder=holder,
            reached=next(reversed(record.reached), None),
            scores=_scores(folder, record),
            outputs=record.pointed,
            bytes=bytes_in(folder.path),
            problem=None if holder else record.reason,
        )
    except (UserError, OSError) as error:
        problem = error.found if isinstance(error, UserError) else f"it cannot be read ({error.strerror})"
        return Entry(name=name, state="damaged", problem=problem, bytes=bytes_in(folder.path))


def _scores(folder: RunFolder, record: RunRecord) -> dict[str, float]:
    """The main scores by MAIN_SCORES; none where an earlier call wrote them."""
    began = datetime.datetime.fromisoformat(record.began).timestamp()
    if not folder.scores.exists() or folder.scores.stat().st_mtime < began:
        return {}
    found: dict[str, float] = {}
    try:
        for score in read_json(folder.scores)["scores"]:
            of_segmentation = "with CRF" if score.get("crf") else "segmentation"
            names = {"localization_maps": "maps", "pseudo_masks": "masks", "segmentation": of_segmentation}
            if score["what"] in names:
                found[names[score["what"]]] = float(score["miou"])  # maps with related images come last
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"{folder.scores} is damaged", "scores as mcis wrote them", "repeat the command of the run"
        ) from None
    return found

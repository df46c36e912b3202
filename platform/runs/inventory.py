"""What a workspace holds: its runs and studies, how far each came, its main scores, and the disk that it points to.

Whatever lies in runs/ is listed; what is damaged, or nothing that mcis wrote, says so in its row.
"""

import datetime
import math
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
    sizes: dict[str, int] = {}
    found = [_entry(workspace, name, record, sizes) for name, record in records(workspace).items()]
    studies = {entry.name for entry in found if entry.kind == "study"}
    rows: list[Entry] = []
    for entry in found:
        if entry.name in studies:
            trials = [trial for trial in found if trial.kind == "run" and trial.study == entry.name]
            outputs = entry.outputs.union(*(trial.outputs for trial in trials))
            own = sum(each.bytes - _bytes_of(workspace, each.outputs, sizes) for each in (entry, *trials))
            size = own + _bytes_of(workspace, outputs, sizes)
            rows += [replace(entry, outputs=outputs, bytes=size, trials=len(trials)), *trials]
        elif entry.kind != "run" or entry.study not in studies:
            rows.append(entry)
    return rows


def _entry(workspace: Workspace, name: str, record: RunRecord | UserError | None, sizes: dict[str, int]) -> Entry:
    folder = RunFolder(workspace.runs / name)
    if record is None:
        return Entry(name=name, state="foreign", problem="nothing that mcis wrote")
    if isinstance(record, UserError):
        return Entry(name=name, state="damaged", problem=record.found, bytes=bytes_in(folder.path))
    try:
        names = read_experiment(folder.config).names if folder.config.exists() else {}
        holder = run_holder(workspace, name)
        outputs = frozenset(output for names in record.outputs.values() for output in names)
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
            outputs=outputs,
            bytes=bytes_in(folder.path) + _bytes_of(workspace, outputs, sizes),
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


def _bytes_of(workspace: Workspace, outputs: frozenset[str], sizes: dict[str, int]) -> int:
    """Bytes of folders below store/, finished or not, which `sizes` keeps."""
    for name in outputs - sizes.keys():
        sizes[name] = bytes_in(workspace.store / name)
    return sum(sizes[name] for name in outputs)

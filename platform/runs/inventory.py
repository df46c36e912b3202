"""What a workspace holds: its runs and studies, how far each came, its main scores, and the disk that it points to.

Whatever lies in runs/ is listed; what is damaged, or nothing that mcis wrote, says so in its row.
"""

import contextlib
import datetime
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mcis.datasets.errors import UserError
from mcis.platform.config.experiment import read_experiment
from mcis.platform.runs.locks import Holder, run_holder
from mcis.platform.runs.record import RunRecord, pointers, read_record
from mcis.platform.runs.workspace import RunFolder, Workspace, bytes_in, read_json

State = Literal["running", "finished", "failed", "interrupted", "killed", "unfinished", "damaged", "foreign"]
"""How a run's last call ended: killed = the process is gone and has written nothing of an end; unfinished = an earlier
version of mcis ran it, and it did not come to its report; foreign = nothing that mcis wrote."""

MAIN_SCORES = ("maps", "masks", "segmentation", "with CRF")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of what a workspace holds.

    Attributes:
        name: of the folder below runs/.
        kind: None where that cannot be told.
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


def is_run(folder: RunFolder) -> bool:
    """Whether mcis wrote a folder below runs/."""
    return any(file.exists() for file in (folder.record, folder.stages, folder.config, folder.study, folder.scores))


def entries(workspace: Workspace) -> list[Entry]:
    """All that lies in runs/, by name; the trials of a study behind it."""
    sizes: dict[str, int] = {}
    study = studies(workspace)
    found = [replace(_entry(workspace, path.name, sizes), study=study.get(path.name)) for path in workspace.in_runs()]
    names = {entry.name for entry in found if entry.kind == "study"}
    rows: list[Entry] = []
    for entry in found:
        if entry.kind == "run" and entry.study in names:
            continue
        trials = [trial for trial in found if trial.kind == "run" and trial.study == entry.name]
        if entry.kind == "study":
            outputs = entry.outputs.union(*(trial.outputs for trial in trials))
            own = sum(each.bytes - _bytes_of(workspace, each.outputs, sizes) for each in (entry, *trials))
            size = own + _bytes_of(workspace, outputs, sizes)
            entry = replace(entry, outputs=outputs, bytes=size, trials=len(trials))
        rows += [entry, *(trials if entry.kind == "study" else ())]
    return rows


def studies(workspace: Workspace) -> dict[str, str]:
    """The study of each trial, by the trial's name: a trial says it, but for those that an earlier version ran, whose
    names follow from the study's figures.
    """
    said: dict[str, str | None] = {}
    earlier: dict[str, str] = {}
    for path in workspace.in_runs():
        with contextlib.suppress(UserError, OSError):  # a damaged run is no study's as far as it says
            folder = workspace.run(path.name, create=False)
            if record := read_record(folder):
                said[path.name] = record.study
            if folder.study.exists():
                earlier |= dict.fromkeys(_trials_in(read_json(folder.study), path.name), path.name)
    return {trial: study for trial, study in (earlier | said).items() if study and trial != study}


def _trials_in(figures: Any, study: str) -> list[str]:
    """The names that the trials of a study have by its figures."""
    try:
        cases = [(f"{study}-{each['case']['name']}", each["seeds"]) for each in figures["cases"]]
        return [name for case, seeds in cases for name in (case, *(f"{case}-s{seed}" for seed in seeds))]
    except (KeyError, TypeError):
        return []


def _entry(workspace: Workspace, name: str, sizes: dict[str, int]) -> Entry:
    try:
        folder = workspace.run(name, create=False)
        if not folder.path.is_dir() or not is_run(folder):
            return Entry(name=name, state="foreign", problem="nothing that mcis wrote")
    except UserError as error:
        return Entry(name=name, state="foreign", problem=f"{error.found}: no name of a run")
    except OSError as error:
        return Entry(name=name, state="damaged", problem=f"it cannot be read ({error.strerror})")
    try:
        return _read(workspace, name, folder, sizes)
    except UserError as error:
        return Entry(name=name, state="damaged", problem=error.found, bytes=bytes_in(folder.path))
    except OSError as error:
        return Entry(name=name, state="damaged", problem=f"it cannot be read ({error.strerror})")


def _read(workspace: Workspace, name: str, folder: RunFolder, sizes: dict[str, int]) -> Entry:
    record, holder = read_record(folder), run_holder(workspace, name)
    outputs = frozenset(output for names in pointers(workspace, name).values() for output in names)
    setting, recipe = _configuration(folder)
    state: State = "running" if holder else ended(record, folder)
    reached = list(workspace.outputs(name))
    return Entry(
        name=name,
        kind=record.kind if record else "study" if folder.study.exists() else "run",
        setting=setting,
        recipe=recipe,
        began=record.began if record else None,
        ended=record.ended if record else _last_change(folder),
        state=state,
        holder=holder,
        reached=reached[-1] if reached else None,
        scores={} if state == "unfinished" else _scores(folder, record),
        outputs=outputs,
        bytes=bytes_in(folder.path) + _bytes_of(workspace, outputs, sizes),
        problem=None if record is None or holder else record.reason,
    )


def _configuration(folder: RunFolder) -> tuple[str | None, str | None]:
    """Setting and recipe; an earlier version's study has them beside its figures alone."""
    if folder.config.exists():
        experiment = read_experiment(folder.config)
        return experiment.setting, experiment.recipe
    if folder.study.exists():
        of_study = read_json(folder.study)
        found = [of_study.get(key) if isinstance(of_study, dict) else None for key in ("setting", "recipe")]
        setting, recipe = (value if isinstance(value, str) else None for value in found)
        return setting, recipe
    return None, None


def ended(record: RunRecord | None, folder: RunFolder) -> State:
    """The state of a run that nobody holds."""
    if record:
        return record.outcome or "killed"
    if folder.study.exists():
        return "finished"
    reported = folder.scores.exists() and folder.stages.exists()
    return "finished" if reported and _changed(folder.scores) >= _changed(folder.stages) else "unfinished"


def _scores(folder: RunFolder, record: RunRecord | None) -> dict[str, float]:
    """The main scores by MAIN_SCORES; none where an earlier call wrote them."""
    if not folder.scores.exists():
        return {}
    if record and _changed(folder.scores) < datetime.datetime.fromisoformat(record.began).timestamp():
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


def _last_change(folder: RunFolder) -> str | None:
    """When an earlier version wrote the run's outcome."""
    files = [file for file in (folder.scores, folder.stages, folder.study) if file.exists()]
    if not files:
        return None
    return datetime.datetime.fromtimestamp(max(map(_changed, files)), datetime.UTC).isoformat(timespec="seconds")


def _changed(file: Path) -> float:
    return file.stat().st_mtime

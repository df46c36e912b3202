"""The trials of a search: drawn by Ray Tune's `OptunaSearch`, stopped by its `ASHAScheduler`, kept in Optuna's store.

What is drawn for a trial depends on the seed, the trial's number and the trials that ended before it, and on nothing
that a process remembers: with one trial at a time, a search that was killed ends as it would have.
"""

import contextlib
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.samplers import TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from ray.tune.search.optuna import OptunaSearch
from sqlalchemy.exc import SQLAlchemyError

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import fetch_file
from mcis.platform.config.keys import Values
from mcis.platform.runs.files import fingerprint, written_aside
from mcis.platform.runs.progress import console
from mcis.tuning.search_space import Search

_STATES = {TrialState.COMPLETE: "done", TrialState.PRUNED: "stopped", TrialState.FAIL: "failed"}
_MOST_VALIDATIONS = 10**6


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A trial that has ended.

    Attributes:
        number: from 0; the name of its run ends in it.
        values: of the axes, by dotted key.
        state: `done`, `stopped` as it lagged behind, or `failed`.
        val_map: the classifier's mean average precision when it was last validated, percent.
        epoch: at which it was stopped.
        minutes: that it took in the call in which it ended.
        cause: why it failed.
    """

    number: int
    values: Values
    state: str
    objective: float | None
    val_map: float | None
    epoch: float | None
    minutes: float
    cause: str | None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to.

    Attributes:
        tried: in the order of their numbers.
        best: of those that are done, or None.
        default: the trial of the configuration as it is, where that lies on the axes and is done.
    """

    tried: list[Tried]
    best: Tried | None
    default: Tried | None

    def counts(self) -> str:
        """Trials by state, in words."""
        states = [tried.state for tried in self.tried]
        return ", ".join(f"{states.count(state)} {state}" for state in _STATES.values())


class SearchTrials(OptunaSearch):
    """The trials of a search, as Ray Tune asks for them and tells how they ended.

    They lie in Optuna's SQLite file, runs/NAME/search.db: Optuna works on a copy, which takes the file's place whenever
    a trial begins or ends. Trial 0 is the configuration as it is, where that lies on the
    axes. Those that a killed command left come first, under their numbers and with their values.

    Raises:
        UserError: the file is of another search, or cannot be used.
    """

    def __init__(self, search: Search):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.search, self.path = search, search.folder.search
        self.folder = tempfile.TemporaryDirectory(prefix="mcis-search-")
        self.file = Path(self.folder.name) / self.path.name
        self.numbers: list[int] = []
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(fetch_file(self.path), self.file)
            storage = optuna.storages.RDBStorage(f"sqlite:///{self.file}")
            sampler = SamplerByNumber(search.resolved.config.seed)
            self.study = _open_study(storage, search)
            first = not self.study.trials and _lies_on_axes(search)
            if not self.study.trials and not first:
                console.print("note: no trial is the configuration as it is, as it does not lie on the axes")
            super().__init__(
                dict(search.axes), "objective", "max", [search.default] if first else [], sampler,
                study_name=search.name, storage=storage
            )  # fmt: skip
            for trial in self.study.get_trials(states=[TrialState.RUNNING]):
                storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
            self.keep()
        except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
            raise UserError(
                f"{self.path} cannot be used ({str(error).splitlines()[0]})",
                "a search's store, as this version of Optuna writes it, and space on its disk",
                "free some space and repeat the command, or choose another --name",
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles it into a file; the store has it all

    def save(self, checkpoint_path: str) -> None:
        """The store has it all."""

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """What the process of the next trial is told."""
        super().suggest(trial_id)
        trial = self._ot_trials[trial_id]
        self.numbers.append(trial.number)
        self.keep()
        return {"trial": self.search.trial(trial.number, trial.params)._asdict()}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Keeps the figure of a validation, by which halving compares in later calls, too."""
        if "validation" in result:
            with warnings.catch_warnings(action="ignore"):  # of a trial that goes on, earlier ones are known
                self._ot_trials[trial_id].report(result["val_map"], result["validation"])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Ends a trial: with its objective, or without one, as stopped. Why it failed is told to `failed`."""
        if result is None or error:
            return
        self.on_trial_result(trial_id, result)
        for name in {"val_map", "epoch"} & result.keys():
            self._ot_trials[trial_id].set_user_attr(name, result[name])
        super().on_trial_complete(trial_id, result)
        self.keep()

    def failed(self, number: int, cause: str) -> None:
        """Ends a trial that failed."""
        [trial] = [trial for trial in self._ot_trials.values() if trial.number == number]
        trial.set_user_attr("cause", cause)
        self.study.tell(number, state=TrialState.FAIL)
        self.keep()

    def found(self) -> Found:
        """All trials that ended; those that were interrupted have not."""
        tried = [_tried(trial) for trial in self.study.trials if trial.state in _STATES]
        done = [each for each in tried if each.objective is not None]
        best = max(done, key=lambda each: each.objective or 0.0, default=None)
        default = next((each for each in done if each.number == 0 and each.values == self.search.default), None)
        return Found(tried=tried, best=best, default=default)

    def scheduler(self) -> FIFOScheduler:
        """Stops trials that lag behind those of this call and of earlier ones (ASHA, Li et al., MLSys 2020)."""
        if not self.search.halving:
            return FIFOScheduler()
        halving = ASHAScheduler(
            "validation", "val_map", "max", max_t=_MOST_VALIDATIONS, reduction_factor=self.search.halving,
            stop_last_trials=False
        )  # fmt: skip
        for trial in self.study.get_trials(states=list(_STATES)):
            earlier: Any = SimpleNamespace(trial_id=f"trial {trial.number} of an earlier call")
            controller: Any = None
            halving.on_trial_add(controller, earlier)
            for validation, val_map in trial.intermediate_values.items():
                halving.on_trial_result(controller, earlier, {"validation": validation, "val_map": val_map})
        return halving

    def keep(self) -> None:
        """Has the workspace's file hold the trials as they are."""
        with written_aside(self.path) as aside:
            shutil.copyfile(self.file, aside)


class SamplerByNumber(TPESampler):
    """Optuna's TPE, with a seed of its own for each trial."""

    def __init__(self, seed: int):
        super().__init__(seed=seed)
        self.seed = seed

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        super().__init__(seed=int(fingerprint(self.seed, trial.number)[:8], 16))


def _open_study(storage: optuna.storages.BaseStorage, search: Search) -> Study:
    study = optuna.create_study(storage=storage, study_name=search.name, direction="maximize", load_if_exists=True)
    if study.user_attrs.setdefault("identity", search.identity()) != search.identity():
        raise UserError(
            f"{search.folder.search} is of a search with other images, axes, objective, --halving or configuration",
            "the command that began it, with other --trials or --minutes if you like",
            "repeat that command, or choose another --name",
        )
    study.set_user_attr("identity", search.identity())
    return study


def _lies_on_axes(search: Search) -> bool:
    """Whether every axis has the value that the configuration itself has."""
    try:
        optuna.trial.create_trial(value=0.0, params=search.default, distributions=dict(search.axes))
    except (ValueError, TypeError):
        return False
    return True


def _tried(trial: FrozenTrial) -> Tried:
    seconds = trial.duration.total_seconds() if trial.duration else 0.0
    return Tried(
        number=trial.number,
        values=dict(trial.params),
        state=_STATES[trial.state],
        objective=trial.value if trial.state == TrialState.COMPLETE else None,
        val_map=trial.user_attrs.get("val_map"),
        epoch=trial.user_attrs.get("epoch"),
        minutes=round(seconds / 60, 2),
        cause=trial.user_attrs.get("cause"),
    )

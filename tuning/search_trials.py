"""The trials of a search: proposed by Optuna, stopped by successive halving, and kept in a file of the workspace.

The values of a trial depend on the seed, its number and the trials that ended before it. With one trial at a time, an
interrupted search therefore continues exactly as it would have without the interruption.
"""

import contextlib
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState
from ray.tune.result import TRAINING_ITERATION
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from ray.tune.search.optuna import OptunaSearch
from sqlalchemy.exc import SQLAlchemyError

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import fetch_file
from mcis.platform.config.keys import Values
from mcis.platform.runs.files import atomic_write, fingerprint
from mcis.platform.runs.progress import console
from mcis.tuning.search_space import Search

METRIC = "objective"
"""Metric that a search maximizes, in the reports of its trials."""
_STATES = {TrialState.COMPLETE: "done", TrialState.PRUNED: "stopped", TrialState.FAIL: "failed"}
_MAX_VALIDATIONS = 10**6


@dataclass(frozen=True, kw_only=True)
class EndedTrial:
    """A trial of a search that has ended.

    Attributes:
        number: Number from 0, at the end of the name of its run.
        values: Values of the axes, by dotted key.
        state: `done`, `stopped` by successive halving, or `failed`.
        objective: Value that the search maximizes; None unless it is done.
        val_map: Mean average precision of the classifier at its last validation, in percent.
        epoch: Epoch of the last validation of a stopped trial.
        minutes: Duration in the call in which it ended.
        cause: Error of a failed trial.
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
class SearchResult:
    """Result of a search.

    Attributes:
        trials: Trials that have ended, by number.
        best: Trial with the highest objective, or None.
        default: Trial with the values of the configuration itself; None if it is not done or not on the axes.
        importances: Share of the variance of the objective that each axis explains, the largest first.
    """

    trials: list[EndedTrial]
    best: EndedTrial | None
    default: EndedTrial | None
    importances: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Number of trials by state: `4 done, 2 stopped, 0 failed`."""
        states = [trial.state for trial in self.trials]
        return ", ".join(f"{states.count(state)} {state}" for state in _STATES.values())


class StoredSearch(OptunaSearch):
    """Ray Tune's `OptunaSearch` with its trials in the workspace, which continues the trials of an interrupted call.

    Optuna works on a local copy of the SQLite file runs/NAME/search.db. The copy replaces the file whenever a trial
    starts or ends, so the file is complete at any time, also in a bucket. The first trial has the values of the
    configuration itself if they are on the axes. Trials that an earlier call left unfinished come first, with their
    numbers and values.

    Args:
        search: The search.
        folder: Local folder for the copy.

    Attributes:
        study: Optuna's study.
        numbers: Numbers of the trials of this call, by Tune's id of the trial.

    Raises:
        UserError: The file belongs to another search, or cannot be read or written.
    """

    def __init__(self, search: Search, folder: Path):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.search = search
        self.numbers: dict[str, int] = {}
        self.local_file = folder / search.folder.search.name

        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(fetch_file(search.folder.search), self.local_file)

            self.storage = optuna.storages.RDBStorage(f"sqlite:///{self.local_file}")
            self.study = optuna.create_study(
                storage=self.storage, study_name=search.name, direction="maximize", load_if_exists=True
            )
            self._check_identity()

            first_values = self._first_values()
            super().__init__(
                space=dict(search.axes),
                metric=METRIC,
                mode="max",
                points_to_evaluate=first_values,
                sampler=SamplerByNumber(search.resolved.config.seed),
                study_name=search.name,
                storage=self.storage,
            )

            for trial in self.study.get_trials(states=[TrialState.RUNNING]):
                self.storage.set_trial_state_values(self._storage_id(trial.number), TrialState.WAITING)
            self.save_to_workspace()
        except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
            raise UserError(
                f"{search.folder.search} cannot be used ({str(error).splitlines()[0]})",
                "the trials of a search, written by this version of Optuna, and free space on the disk",
                "free some space and repeat the command, or choose another --name",
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its search algorithm, whose state is in the workspace already

    def save(self, checkpoint_path: str) -> None:
        """Writes nothing: the state is in the workspace already."""

    def _check_identity(self) -> None:
        """Raises a `UserError` if the file belongs to another search."""
        identity = self.search.identity()
        if self.study.user_attrs.get("identity", identity) != identity:
            raise UserError(
                f"{self.search.folder.search} is of a search with other images, axes, objective, --halving or "
                "configuration",
                "the command that began the search; --trials and --minutes may differ",
                "repeat that command, or choose another --name",
            )
        self.study.set_user_attr("identity", identity)

    def _first_values(self) -> list[Values]:
        """The values of the first trial of a new search; empty if it has trials, or if they are not on the axes."""
        if self.study.trials:
            return []
        if not _is_on_axes(self.search):
            console.print("note: no trial has the values of the configuration itself, which are not on the axes")
            return []
        return [self.search.default]

    def _storage_id(self, number: int) -> int:
        """Optuna's id of a trial, for methods of the storage."""
        study_id = self.storage.get_study_id_from_name(self.search.name)
        return self.storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """Returns the parameters of the next trial: the fields of its `Trial`."""
        super().suggest(trial_id)
        running = self.study.get_trials(states=[TrialState.RUNNING])
        (trial,) = (trial for trial in running if trial.number not in self.numbers.values())
        self.numbers[trial_id] = trial.number

        self.save_to_workspace()
        return {"trial": self.search.trial(trial.number, trial.params)._asdict()}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Stores the mean average precision of a validation, which successive halving compares, also in later calls."""
        if "validation" not in result:
            return
        with warnings.catch_warnings(action="ignore"):  # a trial that continues reports its first validations again
            super().on_trial_result(trial_id, {METRIC: result["val_map"], TRAINING_ITERATION: result["validation"]})

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Stores the end of a trial: it is done if its last result is the objective, stopped if it is a validation.

        A trial without a result was interrupted. It stays unfinished and continues in a later call.
        """
        result = result or {}
        if not error and not {METRIC, "validation"} & result.keys():
            return

        self.on_trial_result(trial_id, result)
        storage_id = self._storage_id(self.numbers[trial_id])
        for name in ("val_map", "epoch"):
            if name in result:
                self.storage.set_trial_user_attr(storage_id, name, result[name])

        super().on_trial_complete(trial_id, result, error)
        self.save_to_workspace()

    def save_to_workspace(self) -> None:
        """Replaces the file in the workspace by the local copy."""
        with atomic_write(self.search.folder.search) as aside:
            shutil.copyfile(self.local_file, aside)

    def result(self) -> SearchResult:
        """The trials that have ended."""
        trials = [self._ended_trial(trial) for trial in self.study.get_trials(states=list(_STATES))]
        done = [trial for trial in trials if trial.objective is not None]

        best = max(done, key=_objective, default=None)
        default = next((trial for trial in done if trial.number == 0 and trial.values == self.search.default), None)
        return SearchResult(trials=trials, best=best, default=default)

    def _ended_trial(self, trial: FrozenTrial) -> EndedTrial:
        state = _STATES[trial.state]
        record = None
        if state == "failed":
            record = self.search.workspace.record(self.search.trial_name(trial.number))

        return EndedTrial(
            number=trial.number,
            values=dict(trial.params),
            state=state,
            objective=trial.value if state == "done" else None,
            val_map=trial.user_attrs.get("val_map"),
            epoch=trial.user_attrs.get("epoch"),
            minutes=round(trial.duration.total_seconds() / 60, 2) if trial.duration else 0.0,
            cause=record.reason if record else None,
        )


class SamplerByNumber(TPESampler):
    """Optuna's tree-structured Parzen estimator with a seed for each trial, independent of the process."""

    def __init__(self, seed: int):
        super().__init__(seed=seed)
        self.seed = seed

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        super().__init__(seed=int(fingerprint(self.seed, trial.number)[:8], 16))


def make_scheduler(search: Search, study: optuna.Study) -> FIFOScheduler:
    """Makes Tune's scheduler, which stops trials that are worse than others at the same validation.

    Successive halving (ASHA, Li et al., MLSys 2020) also compares with the trials of earlier calls.
    """
    if not search.halving:
        return FIFOScheduler()

    scheduler = ASHAScheduler(
        time_attr="validation",
        metric="val_map",
        mode="max",
        max_t=_MAX_VALIDATIONS,
        reduction_factor=search.halving,
        stop_last_trials=False,
    )

    controller: Any = None
    for trial in study.get_trials(states=list(_STATES)):
        earlier_trial: Any = SimpleNamespace(trial_id=f"earlier trial {trial.number}")
        scheduler.on_trial_add(controller, earlier_trial)
        for validation, val_map in trial.intermediate_values.items():
            scheduler.on_trial_result(controller, earlier_trial, {"validation": validation, "val_map": val_map})

    return scheduler


def _is_on_axes(search: Search) -> bool:
    """Whether the value that the configuration itself has is on each axis."""
    try:
        optuna.trial.create_trial(value=0.0, params=search.default, distributions=dict(search.axes))
    except (ValueError, TypeError):
        return False
    return True


def _objective(trial: EndedTrial) -> float:
    assert trial.objective is not None  # only trials that are done are compared
    return trial.objective

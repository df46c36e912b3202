"""The trials of a search in Optuna's own store: what was drawn, how each ended, and what is drawn next.

What is drawn for a trial depends on the seed, the trial's number and the trials that ended before it, and on nothing
that a process remembers: with one trial at a time, a search that was killed ends as it would have.
"""

import contextlib
import shutil
import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from mcis.datasets.errors import UserError
from mcis.datasets.storage.copies import fetched, in_bucket
from mcis.platform.config.keys import Values
from mcis.platform.runs.files import fingerprint, written_aside
from mcis.tuning.axes import lies_on
from mcis.tuning.found import Found, Tried

_STARTUP = 10
"""Trials that are drawn at random before the sampler models what it has seen."""
_STUDY = "search"
_STATES = {TrialState.COMPLETE: "done", TrialState.PRUNED: "stopped", TrialState.FAIL: "failed"}


class Store:
    """The trials of a search.

    Args:
        path: of Optuna's SQLite file; made where there is none. In a bucket it is what the last change left: it is
            fetched first, and sent whenever a trial is asked for or has ended.
        identity: of the search; the file of another one is refused.
        axes: Optuna's distributions by dotted key.
        first: values of the first trial, by dotted key; they are left out where they do not lie on the axes.
        halving: of the trials that reach a validation, one in so many goes on (ASHA, Li et al., MLSys 2020, at the
            validations 1, 3, 9, ... for 3); 0 = all.
        parallel: trials at a time.

    Raises:
        UserError: the file is of another search, or cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        identity: str,
        axes: Mapping[str, BaseDistribution],
        first: Values,
        seed: int,
        halving: int,
        parallel: int,
    ):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.path, self.file = path, _worked_on(path)
        self.axes, self.halving = dict(axes), halving
        self.asked: dict[int, tuple[optuna.trial.Trial, float]] = {}
        with self.errors(path):
            self._open(identity, first, seed, parallel)
            self._keep()

    def _open(self, identity: str, first: Values, seed: int, parallel: int) -> None:
        with warnings.catch_warnings(action="ignore"):
            self.storage = optuna.storages.RDBStorage(f"sqlite:///{self.file}")
            self.study: Study = optuna.create_study(
                storage=self.storage,
                sampler=_ByNumber(seed, parallel),
                pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=max(2, self.halving)),
                study_name=_STUDY,
                direction="maximize",
                load_if_exists=True,
            )
        earlier = self.study.user_attrs.get("identity")
        if earlier is None:
            self.study.set_user_attr("identity", identity)
            if lies_on(self.axes, first):
                self.study.enqueue_trial({key: first[key] for key in self.axes}, {"default": True})
        elif earlier != identity:
            raise UserError(
                f"{self.path} is of a search with other axes, another objective, --halving or configuration",
                "the command that began it, with other --trials or --minutes if you like",
                "repeat that command, or choose another --name",
            )
        running = self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        self.interrupted = [trial.number for trial in running if set(trial.params) == set(self.axes)]
        for trial in running:
            if trial.number not in self.interrupted:  # it was killed before all of its values were drawn
                self.study.tell(trial.number, state=TrialState.FAIL)

    @staticmethod
    @contextlib.contextmanager
    def errors(path: Path) -> Iterator[None]:
        """Turns errors of the store into a UserError that names its file."""
        try:
            yield
        except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
            raise UserError(
                f"{path} cannot be used ({str(error).splitlines()[0]})",
                "a search's store, as this version of Optuna writes it, and space on its disk",
                "free some space and repeat the command, or choose another --name",
            ) from None

    def ask(self) -> tuple[int, Values]:
        """The number and the values of the next trial; those that a killed command left come first, as they were."""
        if self.interrupted:
            study = self.storage.get_study_id_from_name(_STUDY)
            number = self.storage.get_trial_id_from_study_id_trial_number(study, self.interrupted.pop(0))
            trial = optuna.trial.Trial(self.study, number)
        else:
            trial = self.study.ask(self.axes)
        self._keep()
        self.asked[trial.number] = trial, time.monotonic()
        return trial.number, dict(trial.params)

    def validated(self, number: int, validation: int, figure: float) -> bool:
        """Keeps the figure of a trial's validation; whether the trial lags behind and is to be stopped."""
        trial, _ = self.asked[number]
        with warnings.catch_warnings(action="ignore"):  # of a trial that goes on, earlier ones are known
            trial.report(figure, validation)
        return bool(self.halving) and trial.should_prune()

    def done(self, number: int, objective: float, val_map: float | None) -> None:
        """Ends a trial with its objective."""
        self._tell(number, TrialState.COMPLETE, {"val_map": val_map}, objective)

    def stopped(self, number: int, epoch: float, val_map: float | None) -> None:
        """Ends a trial that lagged behind."""
        self._tell(number, TrialState.PRUNED, {"epoch": epoch, "val_map": val_map})

    def failed(self, number: int, cause: str) -> None:
        """Ends a trial that failed."""
        self._tell(number, TrialState.FAIL, {"cause": cause})

    def found(self) -> Found:
        """All trials that ended; those that were interrupted have not."""
        trials = self.study.get_trials(deepcopy=False)
        tried = [each for trial in trials if (each := _tried(trial)) is not None]
        done = [each for each in tried if each.objective is not None]
        best = max(done, key=lambda each: each.objective or 0.0, default=None)
        defaults = {trial.number for trial in trials if trial.user_attrs.get("default")}
        return Found(tried=tried, best=best, default=next((each for each in done if each.number in defaults), None))

    def _tell(self, number: int, state: TrialState, attributes: Values, value: float | None = None) -> None:
        if number in self.asked:
            trial, began = self.asked.pop(number)
            for name, attribute in {**attributes, "minutes": (time.monotonic() - began) / 60}.items():
                if attribute is not None:
                    trial.set_user_attr(name, attribute)
        self.study.tell(number, value, state=state)
        self._keep()

    def _keep(self) -> None:
        """Sends the trials to the bucket, if the workspace lies in one: a copy that no change is halfway into."""
        if self.file == self.path:
            return
        with (
            written_aside(self.path) as aside,
            contextlib.closing(sqlite3.connect(self.file)) as trials,
            contextlib.closing(sqlite3.connect(aside)) as copy,
        ):
            trials.backup(copy)


def _worked_on(path: Path) -> Path:
    """The file that Optuna works on: for a bucket's a copy of its own, as other commands fetch the bucket's anew."""
    if not in_bucket(path):
        return path
    file = path.with_name(f".{path.name}.open")
    for left in path.parent.glob(f"{file.name}*"):  # by a killed process, SQLite's journal among it
        left.unlink()
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(fetched(path), file)
    return file


def _tried(trial: FrozenTrial) -> Tried | None:
    """A trial that ended; None for one that goes on, or had no values yet."""
    attributes, state = trial.user_attrs, _STATES.get(trial.state)
    if state is None or (state == "failed" and "cause" not in attributes):
        return None
    return Tried(
        number=trial.number,
        values=dict(trial.params),
        state=state,
        objective=trial.value if state == "done" else None,
        val_map=attributes.get("val_map"),
        epoch=attributes.get("epoch"),
        minutes=round(attributes.get("minutes", 0.0), 2),
        cause=attributes.get("cause"),
    )


class _ByNumber(BaseSampler):
    """Optuna's TPE, with a seed of its own for each trial."""

    def __init__(self, seed: int, parallel: int):
        self.seed, self.parallel = seed, parallel
        self.number, self.sampler = -1, TPESampler()

    def _of(self, trial: FrozenTrial) -> TPESampler:
        if trial.number != self.number:
            own = int(fingerprint(self.seed, trial.number)[:8], 16)
            self.sampler = TPESampler(seed=own, n_startup_trials=_STARTUP, constant_liar=self.parallel > 1)
            self.number = trial.number
        return self.sampler

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)

"""A search of configuration values: Optuna draws them and stops what lags behind, trials run under Ray Tune.

The search is kept in Optuna's own store, runs/NAME/search.db, so that a repeated command goes on with the trials that
are missing.
"""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mcis.datasets.errors import UserError
from mcis.platform.config.keys import Values
from mcis.platform.runs.bookkeeping import stopped
from mcis.platform.runs.files import write_json, written_aside
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.progress import console
from mcis.platform.runs.scores import Score
from mcis.platform.runs.sync import end_run
from mcis.platform.runs.tracking import Tracker
from mcis.tuning.found import Found, trial_name
from mcis.tuning.pictures import search_picture
from mcis.tuning.search_space import SearchSpace, check_space, running, write_best
from mcis.tuning.tables import search_table
from mcis.tuning.trials import Notes, failed, fit, task_of

if TYPE_CHECKING:
    from mcis.tuning.search_store import Store


@dataclass(frozen=True, kw_only=True)
class Search(SearchSpace):
    """A search before it runs; its trials are the runs NAME-t000, NAME-t001 ...

    Attributes:
        trials: how many end, at most.
        minutes: after which no trial goes on; None = without end.
        halving: see `search_store.Store`.
    """

    trials: int = 30
    minutes: float | None = None
    halving: int = 3

    def identity(self) -> str:
        """Fingerprint of what may not change when the search goes on."""
        return self.identity_with(self.halving)


def run_search(search: Search) -> Found:
    """Searches the values that maximize a score, by Optuna's TPE sampler.

    The first trial is the configuration as it is, where that lies on the axes. Writes best.toml, which `mcis run
    --config` takes, study.json and study.png into the folder of its run.

    Raises:
        UserError: another process runs under the search's name in the workspace; what cannot be searched
            (`check_space`); or no trial came to its end, after the table.
    """
    refuse_if_running(search.workspace, search.name)
    check_space(search)
    began = time.monotonic()
    with running(search, kind="search", identity=search.identity()) as tracker:
        found = _run_trials(search, tracker.run_id)
        _keep(search, found, tracker)
    console.print(search_table(found, search.goal.about, list(search.axes)))
    counts = ", ".join(f"{count} {state}" for state, count in found.counts().items())
    minutes = (time.monotonic() - began) / 60
    console.print(f"{len(found.tried)} trials: {counts}; {minutes:.1f} min of this command", markup=False)
    for tried in found.tried:
        if tried.cause:
            console.print(f"  {trial_name(search.name, tried.number)} failed: {tried.cause}", markup=False)
    if found.best is None:
        raise UserError(
            f"no trial of {search.name} came to its end", "at least one", "see why, and repeat the command with more"
        )
    console.print(
        f"best: {trial_name(search.name, found.best.number)}; mcis run --config {search.folder.best} --name NAME",
        markup=False,
    )
    return found


def _run_trials(search: Search, parent: str) -> Found:
    """Runs the trials that are missing, or as many as the minutes allow."""
    from ray import tune

    from mcis.tuning.search_store import Store
    from mcis.tuning.tune_search import FromStore, Halving

    store = Store(
        search.folder.search,
        identity=search.identity(),
        axes=search.axes,
        first=search.default,
        seed=search.resolved.config.seed,
        halving=search.halving,
        parallel=search.parallel,
    )
    missing = search.trials - len(store.found().tried)
    if missing <= 0:
        return store.found()
    common = search.common(parent)

    def task(number: int, values: Values) -> dict[str, Any]:
        return task_of(search.trial(trial_name(search.name, number), values), common)

    def objective(report: dict[str, Any]) -> float:
        file = search.folder.search
        return search.goal.value(report["val_map"], [Score.from_json(score, file) for score in report["scores"]])

    searcher = FromStore(store, task, objective)
    began = time.monotonic()
    how = tune.TuneConfig(
        search_alg=searcher,
        scheduler=Halving(searcher),
        num_samples=missing,
        max_concurrent_trials=search.parallel,
        time_budget_s=None if search.minutes is None else 60 * search.minutes,
    )
    with store.errors(search.folder.search):
        results = fit(common, how, {}, trials=missing, notes=_Standing(search, store))
        for number in sorted(store.asked):
            if (result := results.get(trial_name(search.name, number))) and result.error:
                store.failed(number, failed(result.error).found)
        found = store.found()
    ended = {tried.number: tried for tried in found.tried}
    for number in sorted(searcher.numbers.values()):
        if number not in ended:
            _close(search, number, "the search ended before")
        elif ended[number].state == "stopped":
            _close(search, number, f"lagged behind, after epoch {ended[number].epoch:.1f}")
    late = search.minutes is not None and time.monotonic() - began >= 60 * search.minutes
    if len(found.tried) < search.trials and not late:  # Tune takes Ctrl-C for itself
        raise KeyboardInterrupt
    return found


def _close(search: Search, number: int, why: str) -> None:
    """Writes down why a trial's process was ended, which could not do so itself."""
    name = trial_name(search.name, number)
    stopped(search.workspace, name, why)
    try:
        end_run(search.workspace, name, "KILLED", {"stopped": why})
    except UserError as error:
        console.print(f"note: the MLflow run of {name} stays open: {error.found}", markup=False)


def _keep(search: Search, found: Found, tracker: Tracker) -> None:
    """Writes what was found into the folder of the search's run, and hands it to MLflow."""
    folder = search.folder
    write_json(
        folder.study,
        {
            "study": "search",
            **search.about(),
            "halving": search.halving,
            **asdict(found),
        },
    )
    with written_aside(folder.study_picture) as aside:
        search_picture(found, list(search.axes), aside, search.name, search.goal.about)
    kept = [folder.study, folder.study_picture]
    if found.best:
        write_best(search, found.best.values)
        kept.append(folder.best)
        tracker.metrics({"best": found.best.objective or 0.0})
    for tried in found.tried:
        if tried.objective is not None:
            tracker.metrics({"objective": tried.objective}, tried.number)
    for path in kept:
        tracker.artifact(path)


class _Standing(Notes):
    """How a search stands, beside its bar: the best so far, and the trials by state."""

    def __init__(self, search: Search, store: "Store"):
        super().__init__()
        self.search, self.store = search, store

    def failure(self, name: str, error: Exception) -> None:
        """See `Notes`."""
        number = next((n for n in self.store.asked if trial_name(self.search.name, n) == name), None)
        if number is not None:
            self.store.failed(number, failed(error).found)

    def ended(self, name: str, *, failed: bool) -> str:
        """See `Notes`."""
        found = self.store.found()
        best = f"best {found.best.objective:.2f} (trial {found.best.number}), " if found.best else ""
        return best + ", ".join(f"{count} {state}" for state, count in found.counts().items())

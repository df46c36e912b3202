"""Ray Tune's side of a search: trials come from its store, which hears how they go on and end."""

from collections.abc import Callable
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from mcis.datasets.errors import UserError
from mcis.platform.config.keys import Values
from mcis.tuning.search_store import Store


class FromStore(Searcher):
    """Draws trials from a store and tells it how they ended.

    Args:
        task: the number and the values of a trial -> what its process is told.
        objective: a trial's last report -> what is maximized; raises UserError where it has no such score.
    """

    def __init__(
        self, store: Store, task: Callable[[int, Values], dict[str, Any]], objective: Callable[[dict[str, Any]], float]
    ):
        super().__init__(metric="val_map", mode="max")
        self.store, self.task, self.objective = store, task, objective
        self.numbers: dict[str, int] = {}
        self.lagging: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles it into a file; the store has it all

    def suggest(self, trial_id: str) -> dict[str, Any]:
        number, values = self.store.ask()
        self.numbers[trial_id] = number
        return {"trial": self.task(number, values)}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Halving hears of it."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if error:
            return  # Tune's results say why: `search` tells the store
        number = self.numbers[trial_id]
        if result and result.get("scores") is not None:
            try:
                self.store.done(number, self.objective(result), result["val_map"])
            except UserError as problem:
                self.store.failed(number, problem.found)
        elif result and trial_id in self.lagging:
            self.store.stopped(number, result["epoch"], result["val_map"])
        # Else it was interrupted, and goes on with the search.

    def save(self, checkpoint_path: str) -> None:
        """The store has it all."""

    def restore(self, checkpoint_path: str) -> None:
        """The store has it all."""


class Halving(FIFOScheduler):
    """Stops the trials that the store says lag behind."""

    def __init__(self, searcher: FromStore):
        super().__init__()
        self.searcher = searcher

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        if not result.get("validation") or result.get("val_map") is None:
            return str(TrialScheduler.CONTINUE)
        number = self.searcher.numbers[trial.trial_id]
        if not self.searcher.store.validated(number, result["validation"], result["val_map"]):
            return str(TrialScheduler.CONTINUE)
        self.searcher.lagging.add(trial.trial_id)
        return str(TrialScheduler.STOP)

"""A search of configuration values: Optuna draws them and stops what lags behind, trials run under Ray Tune.

The search is kept in Optuna's own store, runs/NAME/search.db, so that a repeated command goes on with the trials that
are missing.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.engine.runtime import check_trials, ray_session
from mcis.platform.runs.listing import listing
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.progress import console
from mcis.platform.runs.record import recorded, stopped
from mcis.platform.runs.scores import Score
from mcis.platform.runs.tracking import Tracker, end_run
from mcis.platform.runs.workspace import RunFolder, Workspace, fingerprint, write_json, write_text, written_aside
from mcis.tuning.axes import ends
from mcis.tuning.cases import trial_values
from mcis.tuning.found import Found, trial_name
from mcis.tuning.pictures import search_picture
from mcis.tuning.tables import search_table
from mcis.tuning.trials import Common, Notes, Trial, failed, fit, short_names, task_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from mcis.tuning.search_store import Store


class Objective(NamedTuple):
    """What a search maximizes.

    Attributes:
        about: in words.
        until: the stage that ends a trial.
        what, crf: of the score (`Score`); None = the classifier's mean average precision.
    """

    about: str
    until: str
    what: str | None = None
    crf: bool | None = None


OBJECTIVES: Mapping[str, Objective] = {
    "val_map": Objective("mAP % of the classifier, val", "train_classifier"),
    "maps": Objective("mIoU % of the localization maps", "localize", "localization_maps"),
    "masks": Objective("mIoU % of the pseudo masks", "pseudo_masks", "pseudo_masks"),
    "segmentation": Objective("mIoU % of the segmentation", "evaluate", "segmentation", False),
    "segmentation-crf": Objective("mIoU % of the segmentation after the CRF", "evaluate", "segmentation", True),
}
_NAMES_DATA = ("setting", "recipe", "data.")
"""Keys of what trials of one search have in common begin so."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search before it runs.

    Attributes:
        name: of its run; its trials are the runs NAME-t000, NAME-t001 ...
        resolved: the configuration that all trials share.
        axes: Optuna's distributions by dotted key (`axes.parse_axes`).
        objective: one of OBJECTIVES.
        trials: how many end, at most.
        minutes: after which no trial goes on; None = without end.
        halving: see `search_store.Store`.
        parallel: trials at a time.
    """

    name: str
    resolved: Resolved
    workspace: Workspace
    axes: "Mapping[str, BaseDistribution]"
    objective: str = "maps"
    trials: int = 30
    minutes: float | None = None
    halving: int = 3
    parallel: int = 1
    verbose: bool = False

    @property
    def folder(self) -> RunFolder:
        """Of its run."""
        return self.workspace.run(self.name)

    @property
    def goal(self) -> Objective:
        """What is maximized."""
        return OBJECTIVES[self.objective]

    def identity(self) -> str:
        """Fingerprint of what may not change when the search goes on."""
        axes = {key: repr(axis) for key, axis in self.axes.items()}
        config = self.resolved.config
        return fingerprint(
            self.name, axes, self.objective, self.halving, self.resolved.changed(), config.recipe, config.setting
        )

    def trial(self, number: int, values: Values) -> Trial:
        """One of its trials."""
        config, changed = self.resolved.config, trial_values(self.resolved, values)
        with contextlib.suppress(UserError):  # of values that contradict each other, which the trial says
            changed = resolve(config.setting, config.recipe, changed).changed()  # paths are this process's
        names = short_names(list(values))
        varied = {names[key]: value for key, value in values.items()}
        return Trial(trial_name(self.name, number), self.resolved.config.setting, changed, self.goal.until, varied)


def run_search(search: Search) -> Found:
    """Searches the values that maximize a score, by Optuna's TPE sampler.

    The first trial is the configuration as it is, where that lies on the axes. Writes best.toml, which `mcis run
    --config` takes, study.json and study.png into the folder of its run.

    Raises:
        UserError: another process runs under the search's name in the workspace; what cannot be searched
            (`check_search`); or no trial came to its end, after the table.
    """
    refuse_if_running(search.workspace, search.name)
    check_search(search)
    began = time.monotonic()
    with recorded(search.workspace, search.name, whole=True, kind="study"), _tracked(search) as tracker:
        write_text(search.folder.config, experiment_text(search.resolved.config, search.resolved.origins))
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


def check_search(search: Search) -> None:
    """Finds what cannot be searched, before the first trial.

    Raises:
        UserError: an unknown objective, or one that the data have no score of, or of the images that are reported; keys
            or ends of an axis that the configuration does not take; what would end every trial.
    """
    if search.objective not in OBJECTIVES:
        raise UserError(f"--objective {search.objective}", f"one of {', '.join(OBJECTIVES)}", "choose one of them")
    config, goal = search.resolved.config, search.goal
    if goal.what == "segmentation" and config.predict.split != "train":
        raise UserError(
            f"--objective {search.objective} with predict.split={config.predict.split}: what is chosen by the images "
            "whose score is reported makes that score too high",
            "an objective of other images: val_map, maps or masks; or the segmentation of the split train",
            "choose another objective, or --set predict.split=train",
        )
    told = sorted(key for key in search.axes if search.resolved.origins.get(key) == "--set")
    if told:
        raise UserError(f"{' and '.join(told)} by --set and by --axis", "one of the two", "leave it out of --set")
    shared = sorted(key for key in search.axes if key.startswith(_NAMES_DATA))
    if shared:
        raise UserError(
            f"--axis {' and '.join(shared)}", "keys that trials of the same data may differ in", "run several searches"
        )
    for key, axis in search.axes.items():
        for value in ends(axis):
            resolve(config.setting, config.recipe, trial_values(search.resolved, {key: value}))
    if config.supervision == "full" and goal.until != "evaluate":
        raise UserError(
            f"--objective {search.objective} with supervision=full, which trains no classifier",
            "supervision=tags, or the objective segmentation",
            "choose another objective",
        )
    images = listing(config).table.select(["split", "mask_uri", "tags"]).to_pylist()
    if goal.what is not None and not any(row["mask_uri"] and row["split"] == "train" for row in images):
        raise UserError(
            "no training image has a ground-truth mask",
            "masks of some training images, for the objective",
            "name their folder, or search by --objective val_map",
        )
    untaught = not config.classifier.val_every or config.weights.classifier is not None
    if goal.what is None and (untaught or not any(row["tags"] and row["split"] == "val" for row in images)):
        raise UserError(
            "--objective val_map without a classifier that is trained and validated on tagged images of the split val",
            "val images with tags, classifier.val_every of at least 1, and no weights.classifier",
            "choose another objective",
        )
    pipeline.check(config, search.workspace, search.name, until=goal.until)


@contextlib.contextmanager
def _tracked(search: Search) -> Iterator[Tracker]:
    """A connected Ray, and the search's MLflow run, which the trials' runs become children of."""
    config = search.resolved.config
    with ray_session(config.compute, shared=search.parallel > 1, verbose=search.verbose):
        check_trials(config.compute, search.parallel)
        tracker = Tracker(search.workspace, search.name, identity=search.identity())
        with tracker.running():
            tracker.tags(
                {"setting": config.setting, "recipe": config.recipe, "study": search.name, "study.kind": "search"}
            )
            tracker.parameters({key: value for key, value in leaves(config) if key not in search.axes})
            yield tracker


def _run_trials(search: Search, parent: str) -> Found:
    """Runs the trials that are missing, or as many as the minutes allow."""
    from ray import tune

    from mcis.tuning.search_store import Store
    from mcis.tuning.tune_search import FromStore, Halving

    config = search.resolved.config
    store = Store(
        search.folder.search,
        identity=search.identity(),
        axes=search.axes,
        first=dict(leaves(config)),
        seed=config.seed,
        halving=search.halving,
        parallel=search.parallel,
    )
    missing = search.trials - len(store.found().tried)
    if missing <= 0:
        return store.found()
    common = Common(recipe=config.recipe, workspace=str(search.workspace.root), study=search.name, parent=parent)
    searcher = FromStore(
        store,
        lambda number, values: task_of(search.trial(number, values), common),
        lambda report: _objective(search, report),
    )
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


def _objective(search: Search, report: Mapping[str, Any]) -> float:
    """What is maximized, from a trial's last report.

    Raises:
        UserError: the trial has no such score.
    """
    goal = search.goal
    if goal.what is None:
        value = report["val_map"]
    else:
        scores = [Score.from_json(score, search.folder.search) for score in report["scores"]]
        # Maps of a single round are scored beside those of related images, which come last.
        values = [s.miou for s in scores if s.what == goal.what and goal.crf in (None, s.crf)]
        value = values[-1] if values else None
    if value is None or value != value:
        raise UserError(f"no figure of: {goal.about}", "one", "see the trial's report")
    return float(value)


def _keep(search: Search, found: Found, tracker: Tracker) -> None:
    """Writes what was found into the folder of the search's run, and hands it to MLflow."""
    folder = search.folder
    write_json(
        folder.study,
        {
            "study": "search",
            "setting": search.resolved.config.setting,
            "recipe": search.resolved.config.recipe,
            "changed": search.resolved.changed(),
            "objective": search.goal.about,
            "axes": {key: repr(axis) for key, axis in search.axes.items()},
            "halving": search.halving,
            **asdict(found),
        },
    )
    with written_aside(folder.study_picture) as aside:
        search_picture(found, list(search.axes), aside, search.name, search.goal.about)
    kept = [folder.study, folder.study_picture]
    if found.best:
        config = search.resolved.config
        best = resolve(config.setting, config.recipe, search.trial(found.best.number, found.best.values).values)
        own = {key: f"search {search.name}" for key in found.best.values}
        write_text(folder.best, experiment_text(best.config, search.resolved.origins | own))
        kept.append(folder.best)
        tracker.metrics({"best": found.best.objective or 0.0})
    for tried in found.tried:
        if tried.objective is not None:
            tracker.metric_at("objective", tried.objective, tried.number)
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

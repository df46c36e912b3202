"""Trials of a study on Ray Tune: each is a whole run of the pipeline in a process of its own."""

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import tune

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.engine.errors import user_error_in
from mcis.platform.engine.nodes import ask_for_no_nodes, wait_for_nodes
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.files import write_text
from mcis.platform.runs.lifecycle import ParentStudy, run_record
from mcis.platform.runs.progress import Bar, bar
from mcis.platform.runs.results import VAL_MAP, StageResult
from mcis.platform.runs.scores import Score, read_scores
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.tracking_store import store_environment
from mcis.platform.runs.workspace import RunFolder, Workspace

_QUIET = {"TUNE_DISABLE_STRICT_METRIC_CHECKING": "1", "RAY_AIR_NEW_OUTPUT": "0"}
"""What is reported while the classifier trains has no scores yet."""
_TUNE = "tune"
"""Folder of Tune's own files, in that of a study."""
Measure = Callable[[float | None, Sequence[Score]], float]
"""The classifier's mean average precision on val images, percent or None, and a run's scores -> what is maximized."""


class Trial(NamedTuple):
    """A run of the pipeline.

    Attributes:
        name: of the run.
        sources: the data sources.
        values: what its configuration changes of the recipe, by dotted key.
        until: its last stage.
        varied: what tells it from the study's other trials, by short names.
    """

    name: str
    sources: str
    values: Values
    until: str
    varied: Values


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """For MLflow's columns the last parts of dotted keys, without `name`; the whole key where two would be alike."""
    short = {key: key.removesuffix(".name").rpartition(".")[2] for key in keys}
    return {key: name if list(short.values()).count(name) == 1 else key for key, name in short.items()}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A study or a search as it is asked for: runs of one configuration with other values.

    Attributes:
        kind: which study it is, such as references or search.
        name: of its run; the names of its trials begin with it.
        resolved: the configuration that all trials share.
        parallel: trials at a time.
    """

    kind: str
    name: str
    resolved: Resolved
    workspace: Workspace
    parallel: int = 1
    verbose: bool = False

    @property
    def folder(self) -> RunFolder:
        """Of its run."""
        return self.workspace.run(self.name)


class Outcome(NamedTuple):
    """The scores of each trial that ran to its end, the mean average precision of its classifier where that was
    validated, percent, and why each of the others did not end, by the trial's name."""

    scores: dict[str, list[Score]]
    val_map: dict[str, float | None]
    failures: dict[str, UserError]

    def failure(self) -> UserError | None:
        """The first of the failures, with their number."""
        if not self.failures:
            return None
        name, first = next(iter(self.failures.items()))
        return UserError(
            f"{len(self.failures)} of {len(self.scores) + len(self.failures)} trials failed; the first, {name}: "
            f"{first.found}",
            first.expected,
            f"{first.remedy}; then repeat the command: finished trials and stages are kept",
        )


@contextmanager
def tracked(sweep: Sweep, *, identity: str, varied: Collection[str]) -> Iterator[Tracker]:
    """Holds a sweep's name (`hold_run`), connects Ray, and begins the MLflow run that has the trials' runs as children.

    The MLflow run is made first, since it creates MLflow's store before several trials touch it at once.

    Args:
        identity: of the sweep; another one has another MLflow run.
        varied: keys of the configuration in which its trials differ.
    """
    config, compute = sweep.resolved.config, sweep.resolved.config.compute
    with (
        run_record(sweep.workspace, sweep.name, whole=True, kind="study"),
        ray_session(compute, shared=sweep.parallel > 1, verbose=sweep.verbose),
    ):
        if sweep.parallel > 1:
            workers = [{"CPU": compute.worker_cpus}] * (sweep.parallel * compute.workers)
            wait_for_nodes([*workers, {"CPU": 1.0}], compute.wait_minutes, f"{sweep.parallel} trials at a time")
        tracker = Tracker(sweep.workspace, sweep.name, identity=identity)
        with tracker.running():
            tags = {"sources": config.sources, "recipe": config.recipe, "study": sweep.name, "study.kind": sweep.kind}
            tracker.describe({key: value for key, value in leaves(config) if key not in varied}, tags)
            write_text(sweep.folder.config, experiment_text(config, sweep.resolved.origins))
            yield tracker


def run_trials(sweep: Sweep, trials: Sequence[Trial], parent: str) -> Outcome:
    """Runs all trials, also where some of them fail, as children of the MLflow run `parent`.

    A trial that was finished before costs no more than looking its stages up.
    """
    # A process that has run a trial runs the next one too: to start another takes seconds of a core.
    how = tune.TuneConfig(max_concurrent_trials=sweep.parallel, reuse_actors=True)
    space = {"trial": tune.grid_search([trial._asdict() for trial in trials])}

    def ended(name: str, error: Exception | None) -> str:
        return f"{name} failed" if error else name

    results = fit(sweep, parent, how, space, trials=len(trials), ended=ended)
    failures = {name: failed(result.error) for name, result in results.items() if result.error}
    reports = {name: result.metrics or {} for name, result in results.items() if not result.error}
    val_map = {name: report.get("val_map") for name, report in reports.items() if report.get("ended")}
    scores = {name: read_scores(sweep.workspace.outputs(name)) for name in val_map}
    if len(scores) + len(failures) < len(trials):  # Tune takes Ctrl-C for itself and hands back what it has
        raise KeyboardInterrupt
    return Outcome(scores, val_map, failures)


def fit(
    sweep: Sweep,
    parent: str,
    how: Any,
    space: dict[str, Any],
    *,
    trials: int,
    ended: Callable[[str, Exception | None], str],
    objective: Measure | None = None,
) -> dict[str, Any]:
    """Runs trials under Tune, with a bar over them; their `Result` by name.

    Drivers of trials reserve next to no CPU, or they would keep it from the training workers that they wait for.

    Args:
        parent: MLflow run that the trials' runs become children of.
        how: Tune's `TuneConfig`.
        space: Tune's parameters, whose `trial` is a `Trial` in plain values.
        trials: how many the bar is over.
        ended: is told each trial that ended, and what made it fail; says what stands beside the bar.
        objective: what is maximized.
    """
    os.environ.update(_QUIET)
    run = tune.with_parameters(  # in memory: a trial's parameters are written into files
        _run_trial, recipe=sweep.resolved.config.recipe, workspace=str(sweep.workspace.root), study=sweep.name,
        parent=parent, environment=store_environment(), objective=objective,
    )  # fmt: skip
    with bar(f"study {sweep.name}", trials, "trials") as progress:
        callbacks: list[tune.Callback] = [_Ended(progress, ended)]
        tuner = tune.Tuner(
            tune.with_resources(run, reserved_here()),
            param_space=space,
            tune_config=how,
            run_config=tune.RunConfig(name=_TUNE, storage_path=str(sweep.folder.path), verbose=0, callbacks=callbacks),
        )
        try:
            grid = tuner.fit()
        finally:
            ask_for_no_nodes()  # Tune ends a trial that waits for nodes without a word
        results = [grid[number] for number in range(len(grid))]
    return {result.config["trial"]["name"]: result for result in results if result.config}


def failed(error: Exception) -> UserError:
    """What ended a trial, as an error that says what to do."""
    return user_error_in(error) or UserError(
        str(error)[-600:], "trials that run to their end", "correct the cause, which the trial's log in Ray tells"
    )


def reserved_here() -> Any:
    """What a trial's driver reserves: a place on this node, next to nothing of it.

    What is known to this process alone holds there too: MLflow's server at a loopback address, a bucket's locks. And
    the node may have no CPU for Ray.
    """
    place = {f"node:{ray.util.get_node_ip_address()}": 0.0001}
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}  # several nodes of a test have one address
    return tune.PlacementGroupFactory([place], bundle_label_selector=[here])


def _run_trial(
    parameters: dict[str, Any],
    *,
    recipe: str,
    workspace: str,
    study: str,
    parent: str,
    environment: dict[str, str],
    objective: Measure | None,
) -> None:
    """One run of the pipeline, in a trial's process on the cluster that Tune runs on."""
    trial = Trial(**parameters["trial"])
    os.environ.update(environment)
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "60")  # a slow machine may take long to hand over
    result = pipeline.run(
        resolve(trial.sources, recipe, trial.values),
        Workspace(Path(workspace)),
        trial.name,
        until=trial.until,
        study=ParentStudy(study, parent, trial.varied, _validations()),
    )
    # Tune writes what is reported into files of JSON.
    report: dict[str, Any] = {"ended": True}
    if "train_classifier" in result.context.inputs:
        report["val_map"] = result.context.result("train_classifier", StageResult).counts.get(VAL_MAP)
    if objective:
        report["objective"] = objective(report.get("val_map"), result.scores)
    tune.report(report)


def _validations() -> Callable[[str, Sequence[Mapping[str, Any]]], None]:
    """Reports each validation of the classifier to Tune, which may end the trial's process at one of them."""
    numbers = itertools.count(1)

    def report(network: str, records: Sequence[Mapping[str, Any]]) -> None:
        for of in records:
            if network == "classifier" and "val_map" in of:
                tune.report({"validation": next(numbers), "epoch": of["epoch"], "val_map": of["val_map"]})

    return report


class _Ended(tune.Callback):
    """Moves a bar as trials end, well or not."""

    def __init__(self, progress: Bar, ended: Callable[[str, Exception | None], str]):
        self.progress, self.ended, self.done = progress, ended, 0

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks into a file, which a terminal cannot be part of

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.done += 1
        self.progress.update(self.done, self.ended(trial.config["trial"]["name"], trial.get_pickled_error()))

    on_trial_error = on_trial_complete

"""Trials of a study or search on Ray Tune. Each trial is a whole run of the pipeline in a process of its own."""

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
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.engine.errors import user_error_in
from mcis.platform.engine.nodes import (
    Bundle,
    alive_nodes,
    ask_for_no_nodes,
    mapping_task,
    task_capacity,
    wait_for_nodes,
)
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.files import write_text
from mcis.platform.runs.lifecycle import ParentStudy, run_record
from mcis.platform.runs.progress import Bar, bar
from mcis.platform.runs.results import VAL_MAP, StageResult
from mcis.platform.runs.scores import Score, read_scores
from mcis.platform.runs.tracking import OnRecords, Tracker
from mcis.platform.runs.tracking_store import store_environment
from mcis.platform.runs.workspace import RunFolder, Workspace

_TUNE_ENVIRONMENT = {"TUNE_DISABLE_STRICT_METRIC_CHECKING": "1", "RAY_AIR_NEW_OUTPUT": "0"}
"""Variables that Tune reads. Reports from the training of the classifier do not have the metric of the search yet."""
_TUNE_FOLDER = "tune"
"""Name of the folder, in the folder of a study, with Tune's own files."""
_MAX_RETRIES = 2
"""How often Tune repeats a trial that failed. Its finished stages are kept, so it continues where it failed."""
_MAX_ERROR_LENGTH = 600
_RESERVING_VALUES = ("gpu", "gpu_share", "workers", "worker_cpus", "memory_gb", "decode")
"""Values of the section `compute` that decide what a trial reserves, see `stage_bundles`."""

ObjectiveFunction = Callable[[float | None, Sequence[Score]], float]
"""Maps the classifier's mean average precision on val, in percent or None, and a run's scores to the objective."""
DescribeProgress = Callable[[str, bool], str]
"""Maps the name of a trial that ended, and whether it failed, to a note for the progress bar."""


class Trial(NamedTuple):
    """One run of the pipeline.

    Attributes:
        name: Name of the run.
        sources: Image sources.
        recipe: Recipe.
        values: Values that differ from the recipe, by dotted key.
        until: Last stage.
        varied: Values that differ between the trials of the study or search, by short name.
        metrics: Metrics of the trial's MLflow run that do not depend on its outputs.
    """

    name: str
    sources: str
    recipe: str
    values: Values
    until: str
    varied: Values
    metrics: dict[str, float]


def short_names(keys: Sequence[str], taken: Sequence[str] = ()) -> dict[str, str]:
    """Shortens dotted keys for column headings.

    Args:
        keys: Dotted keys.
        taken: Names that stand for something else.

    Returns:
        The last part of each key, without a final `.name`; the whole key if its last part is ambiguous or taken.
    """
    last_parts = {key: key.removesuffix(".name").rpartition(".")[2] for key in keys}
    counted_parts = [*last_parts.values(), *taken]
    return {key: part if counted_parts.count(part) == 1 else key for key, part in last_parts.items()}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A study or a search before it runs: trials that share one configuration except for some values.

    Attributes:
        kind: Name of the study in the library, or `search`.
        name: Name of its run. The names of its trials start with it.
        resolved: Configuration that all trials share.
        workspace: Workspace of the trials.
        parallel: Maximum number of trials that run at a time.
        verbose: Whether the output of Ray's workers is shown.
    """

    kind: str
    name: str
    resolved: Resolved
    workspace: Workspace
    parallel: int = 1
    verbose: bool = False

    @property
    def folder(self) -> RunFolder:
        """Files of the run of the study or search."""
        return self.workspace.run(self.name)


class Outcome(NamedTuple):
    """Results of the trials of a study.

    Attributes:
        scores: Scores of each finished trial, by the name of the trial.
        val_map: Mean average precision of the classifier on val, in percent, of each finished trial; None if the
            classifier was not validated.
        failures: Error of each other trial.
    """

    scores: dict[str, list[Score]]
    val_map: dict[str, float | None]
    failures: dict[str, UserError]

    def failure(self) -> UserError | None:
        """The first failure, with the number of trials that failed; None if all trials finished."""
        if not self.failures:
            return None
        name, first = next(iter(self.failures.items()))
        total = len(self.scores) + len(self.failures)
        return UserError(
            f"{len(self.failures)} of {total} trials failed; the first, {name}: {first.found}",
            first.expected,
            f"{first.remedy}; then repeat the command: finished trials and stages are kept",
        )


def common_compute(sections: Mapping[str, ComputeConfig], parallel: int) -> ComputeConfig:
    """Returns the section `compute` that decides what each trial reserves: that of the first trial.

    Args:
        sections: Section `compute` of each trial, by the name of the trial.
        parallel: Maximum number of trials that run at a time.

    Raises:
        UserError: Trials run at the same time, but would have to reserve different resources.
    """
    (first_name, first), *others = sections.items()
    if parallel == 1:  # a trial that runs alone reserves nothing
        return first
    for name, section in others:
        for key in _RESERVING_VALUES:
            if getattr(section, key) != getattr(first, key):
                raise UserError(
                    f"--parallel {parallel}, but compute.{key} is {getattr(first, key)} in {first_name} and "
                    f"{getattr(section, key)} in {name}",
                    "the same resources for all trials that run at a time",
                    f"leave out --parallel, or set the same compute.{key} for all trials",
                )
    return first


@contextmanager
def study_session(sweep: Sweep, compute: ComputeConfig, *, identity: str, varied: Collection[str]) -> Iterator[Tracker]:
    """Holds the name of a study or search, connects to Ray, and opens the parent MLflow run of the trials' runs.

    The parent run is created before any trial starts, because several processes must not create MLflow's store at once.

    Args:
        sweep: The study or search.
        compute: Section `compute` of its trials.
        identity: Its fingerprint. A study or search with another identity gets a new MLflow run.
        varied: Configuration keys whose values differ between the trials.
    """
    config = sweep.resolved.config
    with (
        run_record(sweep.workspace, sweep.name, runs_all_stages=True, kind="study"),
        ray_session(compute, shared=sweep.parallel > 1, verbose=sweep.verbose),
    ):
        if sweep.parallel > 1:
            _wait_for_trials(compute, sweep.parallel)

        tracker = Tracker(sweep.workspace, sweep.name, identity=identity)
        with tracker.running():
            parameters = {key: value for key, value in leaves(config) if key not in varied}
            tags = {"sources": config.sources, "recipe": config.recipe, "study": sweep.name, "study.kind": sweep.kind}
            record = sweep.workspace.record(sweep.name)
            tags |= record.tags if record else {}
            tracker.describe(parameters, tags)
            write_text(sweep.folder.config, experiment_text(config, sweep.resolved.origins))
            yield tracker


def _wait_for_trials(compute: ComputeConfig, parallel: int) -> None:
    """Waits until the cluster has the resources that a trial reserves, or those that all trials need at the same time.

    Ray Tune starts further trials when their resources are free.
    """
    bundles = stage_bundles(compute, parallel)
    task = "a trial of the study"
    if not bundles:
        training_workers = [{"CPU": compute.worker_cpus}] * (parallel * compute.workers)
        bundles = [*training_workers, mapping_task(compute)]
        task = f"{parallel} trials at a time"
    wait_for_nodes(bundles, compute.wait_minutes, task)


def run_trials(sweep: Sweep, compute: ComputeConfig, trials: Sequence[Trial], parent: str) -> Outcome:
    """Runs trials to their end, including the trials that come after one that failed.

    A trial that an earlier call has finished only looks up its stages.

    Args:
        sweep: The study or search.
        compute: Section `compute` of its trials.
        trials: Its trials.
        parent: id of its MLflow run.

    Raises:
        KeyboardInterrupt: The user interrupted the trials. Tune handles the signal itself and returns early.
    """
    tune_config = tune.TuneConfig(
        max_concurrent_trials=sweep.parallel,
        reuse_actors=True,  # starting a process for each trial takes several seconds of a core
    )
    param_space = {"trial": tune.grid_search([trial._asdict() for trial in trials])}

    def describe_progress(name: str, has_failed: bool) -> str:
        return f"{name} failed" if has_failed else name

    results = run_with_tune(
        sweep, compute, parent, tune_config, param_space, total=len(trials), describe_progress=describe_progress
    )

    scores: dict[str, list[Score]] = {}
    val_map: dict[str, float | None] = {}
    failures: dict[str, UserError] = {}
    for name, result in results.items():
        if result.error:
            failures[name] = _trial_error(result.error)
        elif result.metrics and result.metrics.get("ended"):
            scores[name] = read_scores(sweep.workspace.outputs(name))
            val_map[name] = result.metrics.get("val_map")

    if len(scores) + len(failures) < len(trials):
        raise KeyboardInterrupt
    return Outcome(scores, val_map, failures)


def _trial_error(error: Exception) -> UserError:
    """Converts the error that ended a trial to an error with a remedy."""
    user_error = user_error_in(error)
    if user_error:
        return user_error
    return UserError(
        str(error)[-_MAX_ERROR_LENGTH:],
        "a trial that runs to its end",
        "find the cause in Ray's log of the trial (--verbose shows it) and correct it",
    )


def run_with_tune(
    sweep: Sweep,
    compute: ComputeConfig,
    parent: str,
    tune_config: tune.TuneConfig,
    param_space: dict[str, Any],
    *,
    total: int,
    describe_progress: DescribeProgress,
    objective: ObjectiveFunction | None = None,
) -> dict[str, tune.Result]:
    """Runs trials with a Ray Tune `Tuner` and shows a progress bar.

    Args:
        sweep: The study or search.
        compute: Section `compute` of its trials.
        parent: id of its MLflow run.
        tune_config: Tune's search algorithm, scheduler and budget.
        param_space: Tune's parameters. Their entry `trial` has the fields of a `Trial`; a search algorithm may add it.
        total: Number of trials, for the progress bar.
        describe_progress: Called when a trial ends; returns the note next to the progress bar.
        objective: Computes the value that a search maximizes.

    Returns:
        The result of each trial, by the name of the trial.
    """
    os.environ.update(_TUNE_ENVIRONMENT)
    # `with_parameters` passes these values in memory. Tune writes `param_space` to files, which must hold no passwords.
    trainable = tune.with_parameters(
        _run_trial,
        workspace=str(sweep.workspace.root),
        study=sweep.name,
        parent=parent,
        environment=store_environment(),
        objective=objective,
    )
    with bar(f"study {sweep.name}", total, "trials") as progress:
        tuner = tune.Tuner(
            tune.with_resources(trainable, trial_resources(compute, sweep.parallel)),
            param_space=param_space,
            tune_config=tune_config,
            run_config=tune.RunConfig(
                name=_TUNE_FOLDER,
                storage_path=str(sweep.folder.path),
                failure_config=tune.FailureConfig(max_failures=_MAX_RETRIES),
                callbacks=[_ProgressCallback(progress, describe_progress)],
                verbose=0,
            ),
        )
        try:
            grid = tuner.fit()
        finally:
            ask_for_no_nodes()  # a trial that Tune ends while it waits for nodes does not withdraw its request

    results = [grid[position] for position in range(len(grid))]
    return {result.config["trial"]["name"]: result for result in results if result.config}


def trial_resources(compute: ComputeConfig, parallel: int) -> tune.PlacementGroupFactory:
    """The resources that Ray Tune reserves for a trial, from its start to its end.

    The first bundle is that of the driver: almost nothing, on the node of this process, because MLflow's server at a
    loopback address and the locks of a remote workspace are only available here. The others are `stage_bundles`.

    Args:
        compute: Section `compute` of the configuration.
        parallel: Maximum number of trials that run at a time.
    """
    driver = {f"node:{ray.util.get_node_ip_address()}": 0.0001}
    this_node = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}  # nodes of a test share their address
    bundles = stage_bundles(compute, parallel)
    anywhere: list[dict[str, str]] = [{}] * len(bundles)
    return tune.PlacementGroupFactory([driver, *map(dict, bundles)], bundle_label_selector=[this_node, *anywhere])


def stage_bundles(compute: ComputeConfig, parallel: int) -> list[Bundle]:
    """The resources that one of several trials reserves for the tasks of its stages, which run nowhere else.

    They are those of the training worker, and a share of the CPUs for other tasks, each with `compute.memory_gb`. If
    the nodes have less memory than that for all CPUs, it is a share of the tasks that they can run. With GPUs, the
    share is at most what belongs to the trial's part of a GPU.

    Empty if the trials reserve nothing and take what is free: a trial that runs alone may use the whole cluster; Ray
    Train reserves groups of several workers itself; and tasks of Ray Data do not run in reserved resources.

    Args:
        compute: Section `compute` of the configuration.
        parallel: Maximum number of trials that run at a time.
    """
    if parallel == 1 or compute.workers > 1 or compute.decode == "tasks":
        return []

    resources = ray.cluster_resources()
    cpus = resources.get("CPU", 1.0)
    worker = {"CPU": compute.worker_cpus}
    num_shares = float(parallel)
    if compute.gpu:
        worker["GPU"] = compute.gpu_share
        num_shares = max(num_shares, max(1.0, resources.get("GPU", 0.0)) / compute.gpu_share)

    task = mapping_task(compute)
    num_tasks = min(cpus / num_shares - compute.worker_cpus, task_capacity(alive_nodes(), task) / num_shares)
    return [worker, *[task] * max(1, int(num_tasks))]


def _run_trial(
    parameters: dict[str, Any],
    *,
    workspace: str,
    study: str,
    parent: str,
    environment: dict[str, str],
    objective: ObjectiveFunction | None,
) -> None:
    """Runs the pipeline once, in the process of a trial; Tune's trainable."""
    trial = Trial(**parameters["trial"])
    os.environ.update(environment)
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "60")  # for slow machines

    result = pipeline.run(
        resolve(trial.sources, trial.recipe, trial.values),
        Workspace(Path(workspace)),
        trial.name,
        until=trial.until,
        study=ParentStudy(study, parent, trial.varied, trial.metrics, _report_validations()),
    )

    metrics: dict[str, Any] = {"ended": True}  # Tune writes metrics to JSON files
    if "train_classifier" in result.context.stage_outputs:
        metrics["val_map"] = result.context.result("train_classifier", StageResult).counts.get(VAL_MAP)
    if objective:
        metrics["objective"] = objective(metrics.get("val_map"), result.scores)
    tune.report(metrics)


def _report_validations() -> OnRecords:
    """Returns a function that reports each validation of the classifier to Tune, which may then stop the trial."""
    numbers = itertools.count(1)

    def report(network: str, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            if network == "classifier" and "val_map" in record:
                tune.report({"validation": next(numbers), "epoch": record["epoch"], "val_map": record["val_map"]})

    return report


class _ProgressCallback(tune.Callback):
    """Advances a progress bar when a trial ends."""

    def __init__(self, progress: Bar, describe_progress: DescribeProgress):
        self.progress = progress
        self.describe_progress = describe_progress
        self.ended = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks, and a terminal cannot be pickled

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._advance(trial, has_failed=False)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._advance(trial, has_failed=True)

    def _advance(self, trial: Any, *, has_failed: bool) -> None:
        self.ended += 1
        self.progress.update(self.ended, self.describe_progress(trial.config["trial"]["name"], has_failed))

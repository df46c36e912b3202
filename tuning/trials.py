"""Trials of a study on Ray Tune: each is a whole run of the pipeline in a process of its own."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mcis.datasets.errors import UserError
from mcis.platform.config.keys import Values
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.errors import user_error_in
from mcis.platform.engine.nodes import ask_for_no_nodes
from mcis.platform.runs.progress import Bar, bar
from mcis.platform.runs.scores import Score
from mcis.platform.runs.tracking_store import store_environment
from mcis.platform.runs.workspace import Workspace

_QUIET = {"TUNE_DISABLE_STRICT_METRIC_CHECKING": "1", "RAY_AIR_NEW_OUTPUT": "0"}
"""What is reported while the classifier trains has no scores yet."""
TUNE = "tune"
"""Folder of Tune's own files, in that of a study."""


class Trial(NamedTuple):
    """A run of the pipeline.

    Attributes:
        name: of the run.
        setting: the data setting.
        values: what its configuration changes of the recipe, by dotted key.
        until: its last stage.
        varied: what tells it from the study's other trials, by short names.
    """

    name: str
    setting: str
    values: Values
    until: str
    varied: Values


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """For MLflow's columns the last parts of dotted keys, without `name`; the whole key where two would be alike."""
    short = {key: key.removesuffix(".name").rpartition(".")[2] for key in keys}
    return {key: name if list(short.values()).count(name) == 1 else key for key, name in short.items()}


def miou_of(scores: Sequence[Score], what: str, *, crf: bool | None = None) -> float | None:
    """Mean IoU, percent, of a run's scores of one kind; None where it has none.

    Maps of a single round are scored beside those of related images, which come last and count.

    Args:
        what, crf: of the score (`Score`); crf=None takes any.
    """
    values = [score.miou for score in scores if score.what == what and crf in (None, score.crf)]
    return values[-1] if values else None


@dataclass(frozen=True, kw_only=True)
class Common:
    """What all trials of a study share.

    Attributes:
        recipe: of their configurations.
        workspace: its folder.
        study: name of the study's run.
        parent: MLflow run that the trials' runs become children of.
    """

    recipe: str
    workspace: str
    study: str
    parent: str


class Report(NamedTuple):
    """What a trial tells Tune: while its classifier trains, and at its end.

    Attributes:
        name: of the trial.
        validation: number of the validation, from 1; 0 at the end.
        epoch: at which the classifier was validated.
        val_map: the classifier's mean average precision on val images, percent; None where no val image has a tag.
        scores: as JSON; None before the end.
    """

    name: str
    validation: int
    epoch: float
    val_map: float | None
    scores: list[dict[str, Any]] | None = None


class Outcome(NamedTuple):
    """The scores of each trial that ran to its end, and why each of the others did not, by the trial's name.

    `val_map` is the classifier's mean average precision on val images, percent or None, of those that did.
    """

    scores: dict[str, list[Score]]
    failures: dict[str, UserError]
    val_map: dict[str, float | None]

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


def run_trials(trials: Sequence[Trial], common: Common, *, parallel: int) -> Outcome:
    """Runs all trials, also where some of them fail.

    A trial that was finished before costs no more than looking its stages up.

    Args:
        parallel: trials at a time.
    """
    from ray import tune

    tasks = [task_of(trial, common) for trial in trials]
    results = fit(
        common,
        # A process that has run a trial runs the next one too: to start another takes seconds of a core.
        tune.TuneConfig(max_concurrent_trials=parallel, reuse_actors=True),
        {"trial": tune.grid_search(tasks)},
        trials=len(tasks),
    )
    folder = _folder(common) / TUNE
    last = {name: metrics for name, (metrics, _) in results.items() if metrics and metrics.get("scores") is not None}
    finished = {name: [Score.from_json(score, folder) for score in each["scores"]] for name, each in last.items()}
    failures = {name: failed(error) for name, (_, error) in results.items() if error}
    if len(finished) + len(failures) < len(tasks):  # Tune takes Ctrl-C for itself and hands back what it has
        raise KeyboardInterrupt
    return Outcome(finished, failures, {name: each["val_map"] for name, each in last.items()})


class Result(NamedTuple):
    """The last report of a trial, and what ended it too early."""

    metrics: dict[str, Any] | None
    error: Exception | None


def task_of(trial: Trial, common: Common) -> dict[str, Any]:
    """What a trial's process is told, in plain values, as Tune writes them into a file."""
    return {**trial._asdict(), **asdict(common)}


def fit(
    common: Common, how: Any, space: dict[str, Any], *, trials: int, notes: "Notes | None" = None
) -> dict[str, Result]:
    """Runs trials under Tune, with a bar over them; those that ended, by name.

    Drivers of trials reserve next to no CPU, or they would keep it from the training workers that they wait for.

    Args:
        how: Tune's `TuneConfig`.
        space: Tune's parameters, whose `trial` is a task (`task_of`).
        trials: how many the bar is over.
        notes: says what stands beside the bar.
    """
    from ray import tune

    os.environ.update(_QUIET)
    environment = store_environment()  # in memory: a trial's parameters are written into files
    with bar(f"study {common.study}", trials, "trials") as progress:
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(_run_trial, environment=environment), reserved_here()),
            param_space=space,
            tune_config=how,
            run_config=tune.RunConfig(
                name=TUNE,
                storage_path=str(_folder(common)),
                verbose=0,
                callbacks=[_progress_callback(progress, notes or Notes())],
            ),
        )
        try:
            grid = tuner.fit()
        finally:
            ask_for_no_nodes()  # Tune ends a trial that waits for nodes without a word
        results = [grid[number] for number in range(len(grid))]
    return {
        result.config["trial"]["name"]: Result(result.metrics, result.error)
        for result in results
        if result.config and (result.error or (result.metrics and "name" in result.metrics))
    }


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
    import ray
    from ray import tune

    place = {f"node:{ray.util.get_node_ip_address()}": 0.0001}
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}  # several nodes of a test have one address
    return tune.PlacementGroupFactory([place], bundle_label_selector=[here])


def _folder(common: Common) -> Path:
    return Workspace(Path(common.workspace)).run(common.study).path


def _run_trial(parameters: dict[str, Any], environment: dict[str, str]) -> None:
    """One run of the pipeline, in a trial's process on the cluster that Tune runs on."""
    from ray import tune

    from mcis.platform import pipeline
    from mcis.platform.runs.results import TrainingResult

    task = dict(parameters["trial"])
    trial = Trial(**{field: task.pop(field) for field in Trial._fields})
    common = Common(**task)
    os.environ.update(environment)
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "60")  # a slow machine may take long to hand over
    resolved = resolve(trial.setting, common.recipe, trial.values)
    result = pipeline.run(
        resolved,
        Workspace(Path(common.workspace)),
        trial.name,
        until=trial.until,
        parent=common.parent,
        study=common.study,
        varied=trial.varied,
        watch=_Validations(trial.name),
    )
    counts: Mapping[str, Any] = {}
    if "train_classifier" in result.context.inputs:
        counts = result.context.result("train_classifier", TrainingResult).counts
    # Tune writes what is reported into files of JSON.
    scores = [score.as_json() for score in result.scores]
    tune.report(Report(trial.name, 0, 0.0, counts.get("val mAP"), scores)._asdict())


class _Validations:
    """Reports each validation of the classifier to Tune, which may end the trial's process at one of them."""

    def __init__(self, name: str) -> None:
        self.name, self.number = name, 0

    def __call__(self, network: str, records: Sequence[Mapping[str, Any]]) -> None:
        from ray import tune

        for record in records:
            if network == "classifier" and "val_map" in record:
                self.number += 1
                tune.report(Report(self.name, self.number, record["epoch"], record["val_map"])._asdict())


class Notes:
    """What stands beside a study's bar: the name of the trial that ended last, and how many failed."""

    def __init__(self) -> None:
        self.failures = 0

    def ended(self, name: str, *, failed: bool) -> str:
        """The text, when a trial has ended."""
        self.failures += failed
        return name + (f", {self.failures} failed" if self.failures else "")

    def failure(self, name: str, error: Exception) -> None:
        """What ended a trial, as soon as it has."""


def _progress_callback(progress: Bar, notes: Notes) -> Any:
    """A callback of Tune that moves a bar as trials end."""
    from ray import tune

    class Ended(tune.Callback):
        """Counts the trials that ended, well or not."""

        def __init__(self) -> None:
            super().__init__()
            self.progress, self.notes, self.done = progress, notes, 0

        def __getstate__(self) -> dict[str, Any]:
            return {}  # Tune pickles its callbacks into a file, which a terminal cannot be part of

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self._ended(trial, failed=False)

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            if (error := trial.get_pickled_error()) is not None:
                self.notes.failure(trial.config["trial"]["name"], error)
            self._ended(trial, failed=True)

        def _ended(self, trial: Any, *, failed: bool) -> None:
            self.done += 1
            self.progress.update(self.done, self.notes.ended(trial.config["trial"]["name"], failed=failed))

    return Ended()

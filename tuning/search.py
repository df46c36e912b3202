"""Ray Tune: trials that are whole runs of the pipeline, over values of one or more configuration keys."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mcis.datasets.errors import UserError
from mcis.platform.config.keys import Values
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.engine.runtime import user_error_in
from mcis.platform.runs.progress import Bar, bar
from mcis.platform.runs.scores import Score
from mcis.platform.runs.tracking_store import store_environment
from mcis.platform.runs.workspace import Workspace


class Trial(NamedTuple):
    """A run of the pipeline: its name, what its configuration changes, its last stage, and the case that it is of."""

    name: str
    values: Values
    until: str
    case: str


class Outcome(NamedTuple):
    """The scores of each trial that ran to its end, by the trial's name; the first failure of the others."""

    scores: dict[str, list[Score]]
    failure: UserError | None


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What a trial's process is told; `parent` is the study's MLflow run, `varied` as in `pipeline.run`."""

    name: str
    values: Values
    until: str
    case: str
    varied: Values
    setting: str
    recipe: str
    workspace: str
    study: str
    parent: str


def run_trials(
    config: Config,
    trials: Sequence[Trial],
    varied: Mapping[str, Values],
    *,
    workspace: Workspace,
    study: str,
    parent: str,
    parallel: int,
) -> Outcome:
    """Runs all trials of the pipeline, also where some of them fail.

    A trial that was finished before costs no more than looking its stages up. Drivers reserve next to no CPU, or they
    would keep it from the training workers that they wait for.

    Args:
        config: whose setting and recipe all trials share.
        varied: by name of a trial, what tells it from the others, by short names.
        parent: MLflow run that the trials' runs become children of.
        parallel: trials at a time.
    """
    from ray import tune

    common: dict[str, Any] = {
        "setting": config.setting,
        "recipe": config.recipe,
        "workspace": str(workspace.root),
        "study": study,
        "parent": parent,
    }
    environment = store_environment()  # in memory: a trial's parameters are written into files
    tasks = [asdict(_Task(**common, **trial._asdict(), varied=varied[trial.name])) for trial in trials]
    folder = workspace.run(study).path
    with bar(f"study {study}", len(tasks), "trials") as progress:
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(_run_trial, environment=environment), {"cpu": 0.01}),
            param_space={"trial": tune.grid_search(tasks)},
            tune_config=tune.TuneConfig(max_concurrent_trials=parallel),
            run_config=tune.RunConfig(
                name="tune", storage_path=str(folder), verbose=0, callbacks=[_progress_callback(progress)]
            ),
        )
        grid = tuner.fit()
        results = [grid[number] for number in range(len(grid))]
    errors = [result.error for result in results if result.error]
    finished = [result.metrics for result in results if result.metrics and "scores" in result.metrics]
    if len(finished) + len(errors) < len(tasks):  # Tune takes Ctrl-C for itself and hands back what has finished
        raise KeyboardInterrupt
    scores = {m["name"]: [Score.from_json(score, folder / "tune") for score in m["scores"]] for m in finished}
    return Outcome(scores, _failure(errors, len(tasks)) if errors else None)


def _failure(errors: Sequence[Exception], trials: int) -> UserError:
    """The first of the trials' errors, as one that says what to do."""
    first = user_error_in(errors[0])
    if first is None:
        first = UserError(str(errors[0])[-600:], "trials that run to their end", "correct the cause")
    return UserError(
        f"{len(errors)} of {trials} trials failed; the first: {first.found}",
        first.expected,
        f"{first.remedy}; then repeat the command: finished trials and stages are kept",
    )


def _run_trial(parameters: dict[str, Any], environment: dict[str, str]) -> None:
    """One run of the pipeline, in a trial's process on the cluster that Tune runs on."""
    from ray import tune

    from mcis.platform import pipeline

    task = _Task(**parameters["trial"])
    os.environ.update(environment)
    result = pipeline.run(
        resolve(task.setting, task.recipe, task.values),
        Workspace(Path(task.workspace)),
        task.name,
        until=task.until,
        parent=task.parent,
        tags={"study": task.study, "case": task.case},
        varied={"case": task.case, **task.varied},
    )
    # Tune writes what is reported into files of JSON.
    tune.report({"name": task.name, "scores": [score.as_json() for score in result.scores]})


def _progress_callback(progress: Bar) -> Any:
    """A callback of Tune that moves a bar as trials end."""
    from ray import tune

    class Ended(tune.Callback):
        """Counts the trials that ended, well or not, and names the last."""

        def __init__(self, progress: Bar) -> None:
            self.progress, self.done = progress, 0

        def __getstate__(self) -> dict[str, Any]:
            return {}  # Tune pickles its callbacks into a file, which a terminal cannot be part of

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self.done += 1
            self.progress.update(self.done, trial.config["trial"]["name"])

        on_trial_error = on_trial_complete

    return Ended(progress)

"""Ray Tune: trials that are whole runs of the pipeline, over values of one or more configuration keys."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mcis.datasets.errors import UserError
from mcis.platform.config.keys import Values
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.engine.runtime import user_error_in
from mcis.platform.runs.progress import Bar, bar
from mcis.platform.runs.scores import Score
from mcis.platform.runs.workspace import Workspace


def _trial(parameters: dict[str, Any]) -> None:
    """One run of the pipeline, in a trial's process on the cluster that Tune runs on."""
    from ray import tune

    from mcis.platform import pipeline

    settings = parameters["trial"]
    os.environ.update(settings["environment"])
    resolved = resolve(settings["setting"], settings["recipe"], settings["values"])
    result = pipeline.run(
        resolved,
        Workspace(Path(settings["workspace"])),
        settings["name"],
        until=settings["until"],
        parent=settings["parent"],
        tags={"study": settings["study"]},
    )
    # Tune keeps what is reported in files of JSON.
    tune.report({"name": settings["name"], "scores": [score.as_json() for score in result.scores]})


def _shown(progress: Bar) -> Any:
    """Tells a bar how many trials have ended, as Tune hears of them."""
    from ray import tune

    class Ended(tune.Callback):
        """Counts the trials that ended, well or not, and names the last."""

        def __init__(self, progress: Bar) -> None:
            self.progress, self.done = progress, 0

        def __getstate__(self) -> dict[str, Any]:
            return {}  # Tune keeps its callbacks in a file, and a terminal is not for that

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self.done += 1
            self.progress.update(self.done, trial.config["trial"]["name"])

        on_trial_error = on_trial_complete

    return Ended(progress)


class Trial(NamedTuple):
    """A run of the pipeline: its name, what its configuration changes, and its last stage."""

    name: str
    values: Values
    until: str


class Outcome(NamedTuple):
    """The scores of each trial that ran to its end, by the trial's name; the first failure of the others."""

    scores: dict[str, list[Score]]
    failure: UserError | None


def run_trials(
    config: Config, trials: Sequence[Trial], *, workspace: Workspace, study: str, parent: str, parallel: int
) -> Outcome:
    """Runs trials of the pipeline to their end, each of them whatever becomes of the others.

    A trial that was finished before costs no more than looking its stages up. Drivers reserve next to no CPU, or they
    would keep it from the training workers that they wait for.

    Args:
        config: whose setting and recipe all trials share.
        parent: MLflow run that the trials' runs become children of.
        parallel: trials at a time.
    """
    from ray import tune

    keep = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    common = {
        "setting": config.setting,
        "recipe": config.recipe,
        "workspace": str(workspace.root),
        "study": study,
        "parent": parent,
        "environment": {name: os.environ[name] for name in keep if name in os.environ},
    }
    space = [{**common, **trial._asdict()} for trial in trials]
    with bar(f"study {study}", len(space), "trials") as progress:
        tuner = tune.Tuner(
            tune.with_resources(_trial, {"cpu": 0.01}),
            param_space={"trial": tune.grid_search(space)},
            tune_config=tune.TuneConfig(max_concurrent_trials=parallel),
            run_config=tune.RunConfig(
                name="tune", storage_path=str(workspace.run(study).path), verbose=0, callbacks=[_shown(progress)]
            ),
        )
        grid = tuner.fit()
        results = [grid[place] for place in range(len(grid))]
    errors = [result.error for result in results if result.error]
    failure = None
    if errors:
        known = user_error_in(errors[0])
        first = known or UserError(str(errors[0])[-600:], "trials that run to their end", "fix the cause")
        failure = UserError(
            f"{len(errors)} of {len(space)} trials failed; the first: {first.found}",
            first.expected,
            f"{first.remedy}; then repeat the command: finished trials and stages are kept",
        )
    finished = [result.metrics for result in results if result.metrics and "scores" in result.metrics]
    if len(finished) + len(errors) < len(space):  # Tune takes Ctrl-C for itself and hands back what there is
        raise KeyboardInterrupt
    reported = workspace.run(study).path / "tune"
    scores = {m["name"]: [Score.from_json(score, reported) for score in m["scores"]] for m in finished}
    return Outcome(scores, failure)

"""Hyperparameter search: Optuna proposes values, successive halving stops bad trials, Ray Tune runs them."""

import dataclasses
import shlex
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import optuna
from matplotlib.figure import Figure
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.visualization.matplotlib import plot_slice
from ray import tune

from mcis.datasets.errors import UserError
from mcis.datasets.tables.large_tables import table_digest
from mcis.platform.config.experiment import experiment_text
from mcis.platform.reporting.files import csv_table
from mcis.platform.reporting.terminal import print_table
from mcis.platform.runs.files import atomic_write, write_json, write_text
from mcis.platform.runs.lifecycle import record_interruption
from mcis.platform.runs.listing import list_images
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.progress import console
from mcis.platform.runs.tracking import Tracker, end_run
from mcis.tuning.definition import configured
from mcis.tuning.search_space import Search, check_search
from mcis.tuning.search_trials import EndedTrial, SearchResult, StoredSearch, make_scheduler
from mcis.tuning.trials import run_with_tune, short_names, study_session

_SHOWN_TRIALS = 10
"""Number of best trials in the printed table."""


def run_search(search: Search) -> SearchResult:
    """Searches the values that maximize a score. A repeated call continues with the missing trials.

    Writes study.json, study.png and best.toml, the best configuration for `mcis run --config`, to the folder of the
    search's run.

    Raises:
        UserError: Another process runs a run of this name in the workspace; the search is not possible (see
            `check_search`); or no trial finished, after the table has been printed.
    """
    refuse_if_running(search.workspace, search.name)
    check_search(search)
    search = dataclasses.replace(search, images=table_digest([list_images(search.resolved.config).table]))
    start = time.monotonic()

    with (
        tempfile.TemporaryDirectory(prefix="mcis-search-") as folder,
        study_session(
            search, search.resolved.config.compute, identity=search.identity(), varied=search.axes.keys()
        ) as tracker,
    ):
        trials = StoredSearch(search, Path(folder))
        _run_missing_trials(search, trials, tracker.run_id)
        result = dataclasses.replace(trials.result(), importances=axis_importances(trials.study))
        _write_files(search, trials.study, result, tracker)

    _print_result(search, result, minutes=(time.monotonic() - start) / 60)
    if result.best is None:
        raise UserError(
            f"no trial of {search.name} finished",
            "at least one finished trial",
            "correct the cause, then repeat the command with more --trials",
        )
    command = f"mcis run --config {shlex.quote(str(search.folder.best))} --name NAME"
    console.print(f"best: {search.trial_name(result.best.number)}; {command}")
    return result


def _run_missing_trials(search: Search, trials: StoredSearch, parent: str) -> None:
    """Runs the trials that earlier calls have not finished, until the time limit.

    Raises:
        KeyboardInterrupt: The user interrupted the search. Tune handles the signal itself and returns early.
    """
    missing = search.trials - len(trials.result().trials)
    if missing <= 0:
        return

    def describe_progress(name: str, has_failed: bool) -> str:
        result = trials.result()
        if result.best is None:
            return result.summary()
        return f"best {result.best.objective:.2f} (trial {result.best.number}), {result.summary()}"

    seconds = None if search.minutes is None else 60 * search.minutes
    tune_config = tune.TuneConfig(
        search_alg=trials,
        scheduler=make_scheduler(search, trials.study),
        num_samples=missing,
        max_concurrent_trials=search.parallel,
        time_budget_s=seconds,
    )
    start = time.monotonic()
    run_with_tune(
        search,
        search.resolved.config.compute,
        parent,
        tune_config,
        {},
        total=missing,
        describe_progress=describe_progress,
        objective=search.goal.value,
    )
    is_late = seconds is not None and time.monotonic() - start >= seconds

    ended_trials = {trial.number: trial for trial in trials.result().trials}
    for number in trials.numbers.values():
        _record_stop(search, number, ended_trials.get(number))
    if len(ended_trials) < search.trials and not is_late:
        raise KeyboardInterrupt


def _record_stop(search: Search, number: int, trial: EndedTrial | None) -> None:
    """Records in the run of a trial, and in MLflow, why Tune ended its process, if it did.

    Args:
        search: The search.
        number: Number of the trial.
        trial: The trial; None if it was interrupted.
    """
    if trial is None:
        reason = "the search ended before the trial"
    elif trial.state == "stopped":
        reason = f"worse than other trials, after epoch {trial.epoch:.1f}"
    else:
        return

    name = search.trial_name(number)
    record_interruption(search.workspace, name, reason)
    try:
        end_run(search.workspace, name, "KILLED", {"stopped": reason})
    except UserError as error:
        console.print(f"note: the MLflow run of {name} stays open: {error.found}")


def _write_files(search: Search, study: optuna.Study, result: SearchResult, tracker: Tracker) -> None:
    """Writes the result to the folder of the search's run and logs it to MLflow."""
    folder = search.folder
    write_json(folder.study, search_json(search, result))
    tracker.artifact(folder.study)
    with atomic_write(folder.study_picture) as aside:
        _plot_study(study, aside, search.goal.about)
    tracker.artifact(folder.study_picture)
    if result.importances:
        with atomic_write(folder.importances) as aside:
            _plot_importances(result.importances, aside, search.goal.about)
        tracker.artifact(folder.importances)

    if result.best:
        values = result.best.values
        origins = search.resolved.origins | dict.fromkeys(values, f"search {search.name}")
        write_text(folder.best, experiment_text(configured(search.resolved, values).config, origins))
        tracker.artifact(folder.best)
        tracker.metrics({"best": result.best.objective or 0.0})

    for trial in result.trials:
        if trial.objective is not None:
            tracker.metrics({"objective": trial.objective}, trial.number)


def axis_importances(study: optuna.Study) -> dict[str, float]:
    """How much of the variance of the objective each axis explains, by functional ANOVA (Hutter et al., ICML 2014).

    Returns:
        Shares by axis, the largest first; their sum is 1. Empty if fewer than two different objectives were found.
    """
    if len({trial.value for trial in study.get_trials(states=[optuna.trial.TrialState.COMPLETE])}) < 2:
        return {}
    evaluator = FanovaImportanceEvaluator(seed=0)
    return {key: float(share) for key, share in get_param_importances(study, evaluator=evaluator).items()}


def search_json(search: Search, result: SearchResult) -> dict[str, Any]:
    """The content of study.json."""
    return {
        "study": "search",
        **search.about(),
        "tried": [asdict(trial) for trial in result.trials],
        "best": asdict(result.best) if result.best else None,
        "default": asdict(result.default) if result.default else None,
        "importances": result.importances,
    }


def search_csv(search: Search, result: SearchResult) -> str:
    """All trials as CSV: a row per trial, a column per axis; cells without a value are empty."""
    axes = list(search.axes)
    columns = ["trial", "number", "state", "objective", "val_map", "epoch", "minutes", "cause", *axes]
    rows = []
    for trial in result.trials:
        values = [trial.values[key] for key in axes]
        name = search.trial_name(trial.number)
        row = [name, trial.number, trial.state, trial.objective, trial.val_map, trial.epoch, trial.minutes]
        rows.append([*row, trial.cause, *values])
    return csv_table(columns, rows).decode()


def _print_result(search: Search, result: SearchResult, minutes: float) -> None:
    """Prints the best trials, the trial of the configuration itself, which axes matter, and the failed trials."""
    done = [trial for trial in result.trials if trial.objective is not None]
    best_first = sorted(done, key=lambda trial: trial.objective or 0.0, reverse=True)
    shown = best_first[:_SHOWN_TRIALS]
    if result.default and result.default not in shown:
        shown.append(result.default)

    axes = list(search.axes)
    axis_columns = [name.replace("_", " ") for name in short_names(axes).values()]
    columns = ("trial", "score", *axis_columns, "val mAP", "min")
    rows = [_table_row(trial, axes, is_default=trial == result.default) for trial in shown]
    print_table(
        f"{search.goal.about}: the best of {len(done)} finished trials",
        columns,
        rows,
        numbers=columns[1:],
        optional=("min", "val mAP"),
    )

    if result.importances:
        shares = ", ".join(f"{key} {share:.2f}" for key, share in result.importances.items())
        console.print(f"share of the variance of the score: {shares}")
    console.print(f"{len(result.trials)} trials: {result.summary()}; {minutes:.1f} min in this call")
    for trial in result.trials:
        if trial.state == "failed":
            name = search.trial_name(trial.number)
            console.print(f"  {name} failed: {trial.cause or 'its process ended without an error message'}")


def _table_row(trial: EndedTrial, axes: list[str], *, is_default: bool) -> tuple[str, ...]:
    name = f"{trial.number} default" if is_default else str(trial.number)
    values = [_value_text(trial.values[key]) for key in axes]
    val_map = "-" if trial.val_map is None else f"{trial.val_map:.2f}"
    return (name, f"{trial.objective:.2f}", *values, val_map, f"{trial.minutes:.1f}")


def _value_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plot_study(study: optuna.Study, path: Path, objective: str) -> None:
    """Plots the objective over the values of each axis; later trials are darker."""
    plt.switch_backend("agg")
    # Optuna's function is experimental, which causes a warning, and changes matplotlib's global style.
    with warnings.catch_warnings(action="ignore"), plt.rc_context():
        axes: Any = plot_slice(study, target_name=objective)
    figure = np.ravel(axes)[0].figure
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def _plot_importances(importances: Mapping[str, float], path: Path, objective: str) -> None:
    """Plots a bar for each axis, the most important one at the top."""
    keys = list(importances)[::-1]
    figure = Figure(figsize=(7, 1.2 + 0.4 * len(keys)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(keys, [importances[key] for key in keys])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_xlim(0, 1.1)
    axes.set_xlabel(f"share of the variance of {objective}")
    figure.savefig(path, dpi=150, format="png")

"""A search of configuration values: Optuna draws them, successive halving stops what lags, trials run on Ray Tune."""

import dataclasses
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from optuna.study import Study
from optuna.visualization.matplotlib import plot_slice
from ray import tune
from rich.table import Table

from mcis.datasets.errors import UserError
from mcis.datasets.tables.large_tables import table_digest
from mcis.platform.config.experiment import experiment_text
from mcis.platform.reporting.terminal import make_table
from mcis.platform.runs.files import write_json, write_text, written_aside
from mcis.platform.runs.lifecycle import record_interruption
from mcis.platform.runs.listing import listing
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.progress import console
from mcis.platform.runs.tracking import Tracker, end_run
from mcis.tuning.definition import configured
from mcis.tuning.search_space import Search, check_search
from mcis.tuning.search_trials import Found, SearchTrials
from mcis.tuning.trials import failed, fit, short_names, tracked

_BEST = 10
"""Trials that are shown."""


def run_search(search: Search) -> Found:
    """Searches the values that maximize a score; a repeated call goes on with the trials that are missing.

    Writes best.toml, which `mcis run --config` takes, study.json and study.png into the folder of its run.

    Raises:
        UserError: another process runs under the search's name in the workspace; what cannot be searched
            (`check_search`); or no trial came to its end, after the table.
    """
    refuse_if_running(search.workspace, search.name)
    check_search(search)
    search = dataclasses.replace(search, images=table_digest([listing(search.resolved.config).table]))
    began = time.monotonic()
    with tracked(search, identity=search.identity(), varied=search.axes.keys()) as tracker:
        trials = SearchTrials(search)
        _run_trials(search, trials, tracker.run_id)
        found = trials.found()
        _keep(search, trials, tracker)
    console.print(_table(found, search.goal.about, list(search.axes)))
    minutes = (time.monotonic() - began) / 60
    console.print(f"{len(found.tried)} trials: {found.counts()}; {minutes:.1f} min of this command")
    for tried in found.tried:
        if tried.cause:
            console.print(f"  {search.trial_name(tried.number)} failed: {tried.cause}")
    if found.best is None:
        raise UserError(f"no trial of {search.name} came to its end", "at least one", "see why; repeat it with more")
    best = search.trial_name(found.best.number)
    console.print(f"best: {best}; mcis run --config {search.folder.best} --name NAME")
    return found


def _run_trials(search: Search, trials: SearchTrials, parent: str) -> None:
    """Runs the trials that are missing, or as many as the minutes allow."""
    missing = search.trials - len(trials.found().tried)
    if missing <= 0:
        return

    def ended(name: str, error: Exception | None) -> str:
        """How the search stands when a trial has ended, for the bar."""
        if error:
            trials.failed(int(name.rpartition("-t")[2]), failed(error).found)
        found = trials.found()
        best = f"best {found.best.objective:.2f} (trial {found.best.number}), " if found.best else ""
        return best + found.counts()

    began = time.monotonic()
    how = tune.TuneConfig(
        search_alg=trials,
        scheduler=trials.scheduler(),
        num_samples=missing,
        max_concurrent_trials=search.parallel,
        time_budget_s=None if search.minutes is None else 60 * search.minutes,
    )
    results = fit(search, parent, how, {}, trials=missing, ended=ended, objective=search.goal.value)
    ended_ones = {tried.number for tried in trials.found().tried}
    for number in set(trials.numbers) - ended_ones:  # Tune may not have had the error yet when it told of the trial
        if (result := results.get(search.trial_name(number))) and result.error:
            trials.failed(number, failed(result.error).found)
    found = trials.found()
    of_numbers = {tried.number: tried for tried in found.tried}
    for number in trials.numbers:
        if number not in of_numbers:
            _close(search, number, "the search ended before")
        elif of_numbers[number].state == "stopped":
            _close(search, number, f"lagged behind, after epoch {of_numbers[number].epoch:.1f}")
    late = search.minutes is not None and time.monotonic() - began >= 60 * search.minutes
    if len(found.tried) < search.trials and not late:  # Tune takes Ctrl-C for itself
        raise KeyboardInterrupt


def _close(search: Search, number: int, why: str) -> None:
    """Writes down why a trial's process was ended, which could not do so itself."""
    name = search.trial_name(number)
    record_interruption(search.workspace, name, why)
    try:
        end_run(search.workspace, name, "KILLED", {"stopped": why})
    except UserError as error:
        console.print(f"note: the MLflow run of {name} stays open: {error.found}")


def _keep(search: Search, trials: SearchTrials, tracker: Tracker) -> None:
    """Writes what was found into the folder of the search's run, and hands it to MLflow."""
    folder, found = search.folder, trials.found()
    write_json(folder.study, {"study": "search", **search.about(), **asdict(found)})
    with written_aside(folder.study_picture) as aside:
        _picture(trials.study, aside, search.goal.about)
    tracker.artifact(folder.study)
    tracker.artifact(folder.study_picture)
    if found.best:
        values = found.best.values
        origins = search.resolved.origins | dict.fromkeys(values, f"search {search.name}")
        write_text(folder.best, experiment_text(configured(search.resolved, values).config, origins))
        tracker.artifact(folder.best)
        tracker.metrics({"best": found.best.objective or 0.0})
    for tried in found.tried:
        if tried.objective is not None:
            tracker.metrics({"objective": tried.objective}, tried.number)


def _table(found: Found, objective: str, axes: Sequence[str]) -> Table:
    """The best trials of a search, the configuration that it began from among them, and the values of their axes."""
    done = sorted((each for each in found.tried if each.objective is not None), key=lambda each: -(each.objective or 0))
    shown = done[:_BEST] + ([found.default] if found.default and found.default not in done[:_BEST] else [])
    rows = []
    for each in shown:
        name = f"{each.number}{' default' if each == found.default else ''}"
        values = (each.values[key] for key in axes)
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        precision = "-" if each.val_map is None else f"{each.val_map:.2f}"
        rows.append((name, *texts, f"{each.objective:.2f}", precision, f"{each.minutes:.1f}"))
    names, numbers = (name.replace("_", " ") for name in short_names(axes).values()), ("score", "val mAP", "min")
    title = f"{objective}: the best of {len(done)} trials that were done"
    return make_table(title, ("trial", *names, *numbers), rows, numbers=numbers)


def _picture(study: Study, path: Path, objective: str) -> None:
    """Optuna's picture of a search: the objective over the value of each axis, the later the trial the darker."""
    plt.switch_backend("agg")
    with warnings.catch_warnings(action="ignore"), plt.rc_context():  # it is experimental, and sets a style for all
        plots: Any = plot_slice(study, target_name=objective)
    figure = np.ravel(plots)[0].figure
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)

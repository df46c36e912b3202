"""A study: its trials run under one MLflow run, its figures kept as files and printed as a table.

A study is a table of cases; a case is made of trials, one per seed; a trial is a run of the pipeline.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.config.sections import Config
from mcis.platform.engine.runtime import check_cpus, ray_session
from mcis.platform.runs.bookkeeping import recorded
from mcis.platform.runs.files import fingerprint, write_json, write_text, written_aside
from mcis.platform.runs.listing import listing
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.progress import console
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.cases import Case, Difference
from mcis.tuning.figures import (
    Figures,
    Meaning,
    PairedDifference,
    caption,
    figures_as_csv,
    figures_of,
    meaning_of_columns,
    paired_differences,
    scores_by_column,
)
from mcis.tuning.intervals import INTERVALS, with_intervals
from mcis.tuning.tables import differences_table
from mcis.tuning.trials import Common, Outcome, Trial, run_trials, short_names


class Planned(NamedTuple):
    """A case and its trials by seed."""

    case: Case
    trials: dict[int, Trial]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study before it runs.

    Attributes:
        kind: which study it is, such as references or effect.
        name: of the study's run; the names of its trials begin with it.
        resolved: the configuration that all trials share.
        varied_keys: the keys that the study sets itself.
        extra_keys: further keys whose values differ between trials.
        until: the last stage of its longest trials.
        parallel: trials at a time.
        table, picture: show the figures; arguments as in `related_images_table` and `related_images_picture`.
        title: of the table.
        log: hands the figures to MLflow.
    """

    kind: str
    name: str
    resolved: Resolved
    workspace: Workspace
    varied_keys: tuple[str, ...]
    extra_keys: tuple[str, ...] = ()
    until: str
    parallel: int
    verbose: bool
    table: Callable[[Sequence[Figures], str], Table]
    picture: Callable[[Sequence[Figures], Path, str, str], None]
    title: str
    log: Callable[[Tracker, Sequence[Figures]], None]


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """The content of study.json: what was studied, what its columns mean, and its figures."""

    study: str
    setting: str
    recipe: str
    changed: Values
    means: dict[str, Meaning]
    cases: list[Figures]
    differences: list[PairedDifference]


def run_study(study: Study, plan: Sequence[Planned], differences: Sequence[Difference] = ()) -> list[Figures]:
    """Runs a study's trials, seed by seed, keeps its figures as files and in MLflow, and prints its tables.

    Args:
        differences: the cases that are compared with one another.

    Raises:
        UserError: another process runs under the study's name in the workspace; what would end one of the trials; or a
            trial failed, after the table of the others.
    """
    refuse_if_running(study.workspace, study.name)
    of_seeds = zip(*([(of.case, trial) for trial in of.trials.values()] for of in plan), strict=True)
    planned = [each for of_seed in of_seeds for each in of_seed]
    configs = _check_trials(study, [trial for _, trial in planned])
    varied = _varied(study, configs)
    trials = [trial._replace(varied={"case": case.name, **varied[trial.name]}) for case, trial in planned]
    with recorded(study.workspace, study.name, whole=True, kind="study"), _tracked(study) as tracker:
        folder = study.workspace.run(study.name)
        write_text(folder.config, experiment_text(study.resolved.config, study.resolved.origins))
        common = Common(
            recipe=study.resolved.config.recipe,
            workspace=str(study.workspace.root),
            study=study.name,
            parent=tracker.run_id,
        )
        outcome = run_trials(trials, common, parallel=study.parallel)
        record = _record(study, plan, differences, outcome)
        write_json(folder.study, asdict(record))
        write_text(folder.study_table, figures_as_csv(record.cases))
        with written_aside(folder.study_picture) as aside:
            study.picture(record.cases, aside, study.name, caption(record.means))
        study.log(tracker, record.cases)
        for path in (folder.study, folder.study_table, folder.study_picture):
            tracker.artifact(path)
        console.print(study.table(record.cases, study.title))
        if record.differences:
            console.print(differences_table(record.differences, "differences of mIoU % over the same seeds"))
            console.print(INTERVALS, markup=False)
        console.print(caption(record.means), markup=False)
        console.print(f"table and picture: {folder.study}, {folder.study_picture.name} beside it", markup=False)
        if failure := outcome.failure():
            raise failure
    return record.cases


def check_study(study: Study) -> None:
    """Finds what cannot be studied, before its cases are known.

    Raises:
        UserError: an unknown stage, or one without scores; a value that the study itself sets; or no ground truth.
    """
    config = study.resolved.config
    stages = pipeline.STAGE_NAMES[pipeline.STAGE_NAMES.index("localize") : -1]
    if study.until not in stages:
        raise UserError(f"--until {study.until}", f"a stage with scores: {', '.join(stages)}", "choose one of them")
    told = sorted(key for key in study.varied_keys if study.resolved.origins.get(key) in ("command line", "--set"))
    if told:
        raise UserError(
            f"{' and '.join(told)} by --set", "values that the study does not set itself", "leave them out of --set"
        )
    if config.tracking.register_as and not config.tracking.model:
        raise UserError(
            f"tracking.register_as is {config.tracking.register_as} in a study, whose trials log no model",
            "a run, or trials that log their networks",
            "leave tracking.register_as out, or set tracking.model=true",
        )
    masks = listing(config).table["mask_uri"]
    if masks.null_count == len(masks):
        raise UserError(
            "no image has a ground-truth mask", "masks of some training or val images, for scores", "name their folder"
        )


def _check_trials(study: Study, trials: Sequence[Trial]) -> dict[str, Config]:
    """Finds what would end a trial before the first one has trained; returns their configurations by their names.

    Raises:
        UserError: the first such problem.
    """
    config = study.resolved.config
    configs = {trial.name: resolve(trial.setting, config.recipe, trial.values).config for trial in trials}
    # How maps are inferred, and seeds, ask for nothing that another trial of the same training does not.
    of_a_kind = {str([trial.setting, trial.until, *_of_stages(trial.values)]): trial for trial in trials}
    for trial in of_a_kind.values():
        pipeline.check(configs[trial.name], study.workspace, trial.name, until=trial.until)
    return configs


def _of_stages(values: Values) -> list[tuple[str, Any]]:
    """The values that decide what a trial asks for."""
    return sorted((key, value) for key, value in values.items() if key != "seed" and not key.startswith("localize."))


def _varied(study: Study, configs: Mapping[str, Config]) -> dict[str, Values]:
    """By name of a trial, the values that differ between trials, by the last part of their keys."""
    of_trials = {name: dict(leaves(config)) for name, config in configs.items()}
    keys = (*study.varied_keys, *study.extra_keys)
    texts = {key: {str(values.get(key)) for values in of_trials.values()} for key in keys}
    names = short_names([key for key in keys if len(texts[key]) > 1])
    return {
        trial: {short: values[key] for key, short in names.items() if key in values}
        for trial, values in of_trials.items()
    }


@contextlib.contextmanager
def _tracked(study: Study) -> Iterator[Tracker]:
    """A connected Ray, and the study's MLflow run, which the trials' runs become children of.

    The MLflow run is made first, since it creates MLflow's store before several trials touch it at once.
    """
    config = study.resolved.config
    with ray_session(config.compute, shared=study.parallel > 1, verbose=study.verbose):
        if study.parallel > 1:
            check_cpus(config.compute, config.compute.workers, study.parallel)
        identity = fingerprint(study.name, study.kind, study.resolved.changed(), config.recipe, config.setting)
        tracker = Tracker(study.workspace, study.name, identity=identity)
        with tracker.running():
            tags = {"setting": config.setting, "recipe": config.recipe, "study": study.name, "study.kind": study.kind}
            tracker.tags(tags)
            different = {*study.varied_keys, *study.extra_keys}
            tracker.parameters({key: value for key, value in leaves(config) if key not in different})
            yield tracker


def _record(study: Study, plan: Sequence[Planned], differences: Sequence[Difference], outcome: Outcome) -> StudyRecord:
    """The figures of the trials that ran to their end; a case without any is left out."""
    of_cases = [
        {
            seed: scores_by_column(outcome.scores[trial.name], case.related)
            for seed, trial in trials.items()
            if trial.name in outcome.scores
        }
        for case, trials in plan
    ]
    cases = [figures_of(planned.case, scores) for planned, scores in zip(plan, of_cases, strict=True) if scores]
    config = study.resolved.config
    names = {case.name: {seed: trial.name for seed, trial in trials.items()} for case, trials in plan}
    return StudyRecord(
        study=study.kind,
        setting=config.setting,
        recipe=config.recipe,
        changed=study.resolved.changed(),
        means=meaning_of_columns([scores for of_case in of_cases for scores in of_case.values()]),
        cases=cases,
        differences=with_intervals(list(paired_differences(differences, cases)), names, study.workspace),
    )

"""A study as it runs: a table of cases; a case is made of trials, one per seed; a trial is a run of the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from pydantic_core import to_jsonable_python

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import remove
from mcis.platform import pipeline
from mcis.platform.config.keys import leaves
from mcis.platform.config.resolve import COMMAND_LINE, OVERRIDE, resolve
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import rows_in_split
from mcis.platform.reporting.compared_runs import open_run_groups
from mcis.platform.reporting.comparison import BootstrapSettings, compare
from mcis.platform.reporting.comparison_page import compared_images, write_page
from mcis.platform.reporting.terminal import print_table
from mcis.platform.runs.files import fingerprint, write_json, written_aside
from mcis.platform.runs.listing import listing
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.progress import console
from mcis.tuning.definition import Case, Definition, cases_of, configured
from mcis.tuning.figures import (
    INTERVALS,
    Figures,
    caption,
    figures_of,
    meaning_of_columns,
    paired_differences,
    scores_by_column,
    with_intervals,
)
from mcis.tuning.tables import cases_picture, cases_table, differences_table
from mcis.tuning.trials import Sweep, Trial, run_trials, short_names, study_session


@dataclass(frozen=True, kw_only=True)
class Study(Sweep):
    """A study as it is asked for; its trials are the runs NAME-CASE-sSEED.

    Attributes:
        seeds: how many runs of each case, with seeds counted from the configuration's.
        until: the last stage of its longest trials.
    """

    seeds: int = 1
    until: str = "evaluate"

    @property
    def each_seed(self) -> range:
        """The seeds."""
        first = self.resolved.config.seed
        return range(first, first + self.seeds)

    def trial_name(self, case: str, seed: int) -> str:
        """The name of a case's run."""
        return f"{self.name}-{case}-s{seed}"


def defined(study: Study, definition: Definition) -> list[Figures]:
    """The cases of a definition over seeds, and their differences. UserError for what cannot be studied; or where a
    trial failed, after the table of the others."""
    cases = cases_of(definition, study.resolved, study.until)
    _check_study(study, sorted(set.intersection(*(set(case.values) for case in cases))))
    seeds = ", ".join(map(str, study.each_seed))
    title = f"{definition.about}: mIoU %, mean and deviation over the seeds {seeds}, {study.name}"
    return _run(study, cases, title)


def _check_study(study: Study, own_keys: Sequence[str]) -> None:
    """UserError for what cannot be studied, before the first trial: a stage without scores, a value of `own_keys`,
    which each case sets itself, or no ground truth."""
    config, origins = study.resolved.config, study.resolved.origins
    stages = pipeline.STAGE_NAMES[pipeline.STAGE_NAMES.index("localize") : -1]
    if study.until not in stages:
        raise UserError(f"--until {study.until}", f"a stage with scores: {', '.join(stages)}", "choose one of them")
    told = sorted(key for key in own_keys if origins.get(key) in (COMMAND_LINE, OVERRIDE))
    if told:
        raise UserError(
            f"{' and '.join(told)} on the command line", "values that the study does not set", "leave them out"
        )
    predicts = stages.index(study.until) >= stages.index("predict")
    rows = listing(config).table.select(["split", "mask_uri", "tags"])
    masks = (rows if predicts else rows_in_split(rows, "train", tagged=True))["mask_uri"]
    if masks.null_count == len(masks):
        what = f"no {'' if predicts else 'training '}image has a ground-truth mask"
        raise UserError(what, "some masks, for scores", "name their folder")


def _run(study: Study, cases: Sequence[Case], title: str) -> list[Figures]:
    """Runs a study's trials, seed by seed, keeps its figures as files and in MLflow, and prints its tables."""
    refuse_if_running(study.workspace, study.name)
    trials, varied = _plan(study, cases)
    config, changed = study.resolved.config, study.resolved.changed()
    identity = fingerprint(study.name, study.kind, changed, config.recipe, config.sources)
    with study_session(study, identity=identity, varied=varied) as tracker:
        outcome = run_trials(study, trials, tracker.run_id)
        scores = {
            case.name: {
                seed: scores_by_column(of_trial, case.related)
                for seed in study.each_seed
                if (of_trial := outcome.scores.get(study.trial_name(case.name, seed)))
            }
            for case in cases
        }
        figures = [
            figures_of(case, own, {seed: outcome.val_map.get(study.trial_name(case.name, seed)) for seed in own})
            for case in cases
            if (own := scores[case.name])
        ]
        paired = paired_differences(figures)
        compared = [with_intervals(each, study.trial_name, study.workspace) for each in paired]
        tables = {title: cases_table(figures)}
        if compared:
            tables["differences of mIoU % over the same seeds"] = differences_table(compared)
        means = meaning_of_columns([of_seed for of_case in scores.values() for of_seed in of_case.values()])
        folder, below = study.folder, caption(means)
        about = {"study": study.kind, "sources": config.sources, "recipe": config.recipe, "changed": changed}
        of_cases = to_jsonable_python({"cases": figures, "differences": compared}, by_alias=False)
        write_json(folder.study, {**about, "means": means, **of_cases})
        with written_aside(folder.study_picture) as aside:
            cases_picture(figures, aside, study.name, below)
        for of in figures:
            values = {f"miou.{column.replace(',', '')}.{of.case.name}": mean(own) for column, own in of.miou.items()}
            tracker.metrics(values)
        for path in (folder.study, folder.study_picture):
            tracker.artifact(path)
        for of_table, (heads, rows) in tables.items():
            print_table(of_table, heads, rows, numbers=heads[2:])
        if compared:
            console.print(INTERVALS)
        console.print(below)
        console.print(f"figures: {folder.study}, {folder.study_picture.name} beside it")
        remove(folder.study_page)  # an earlier call's, of other trials
        if failure := outcome.failure():
            raise failure
        if len(figures) > 1 and _write_page(study, figures):
            tracker.artifact(folder.study_page)
            console.print(f"page:    {folder.study_page}")
    return figures


def _write_page(study: Study, figures: Sequence[Figures]) -> bool:
    """Writes the page of `mcis compare` of the cases, the first as the baseline; or says why there is none."""
    runs = [",".join(study.trial_name(of.case.name, seed) for seed in of.seeds) for of in figures]
    try:
        opened = open_run_groups(study.workspace.root, runs)
        named = [case._replace(label=of.case.name) for case, of in zip(opened, figures, strict=True)]
        comparison = compare(named, BootstrapSettings())
        write_page(comparison, compared_images(comparison, count=8), study.folder.study_page)
    except UserError as error:
        console.print(f"note: no page of the cases: {error.found}")
        return False
    return True


def _plan(study: Study, cases: Sequence[Case]) -> tuple[list[Trial], list[str]]:
    """The trials, seed by seed, and the keys whose values differ between them."""
    trials = [_trial(study, case, seed) for seed in study.each_seed for case in cases]
    configs = _check_trials(study, trials)
    console.print(f"study:   {len(trials)} trials; a stage that several agree in is computed once")
    of_trials = [dict(leaves(config)) for config in configs]
    keys = dict.fromkeys(key for values in of_trials for key in values)
    varied = [key for key in keys if len({str(values.get(key)) for values in of_trials}) > 1]
    short = short_names(varied)
    return [
        trial._replace(varied=trial.varied | {short[key]: values[key] for key in varied if key in values})
        for trial, values in zip(trials, of_trials, strict=True)
    ], varied


def _trial(study: Study, case: Case, seed: int) -> Trial:
    # Paths are this process's: a trial's has a folder of its own.
    changed = configured(study.resolved, {**case.values, "seed": seed}, case.sources).changed()
    return Trial(study.trial_name(case.name, seed), case.sources, changed, case.until, {"case": case.name})


def _check_trials(study: Study, trials: Sequence[Trial]) -> list[Config]:
    """Finds what would end a trial before the first one has trained; returns their configurations."""
    configs = [resolve(trial.sources, study.resolved.config.recipe, trial.values).config for trial in trials]
    checked = set()
    for trial, config in zip(trials, configs, strict=True):
        # How maps are inferred, and seeds, ask for nothing that another trial of the same training does not.
        asked = {k: v for k, v in trial.values.items() if k != "seed" and not k.startswith("localize.")}
        kind = str([trial.sources, trial.until, sorted(asked.items())])
        if kind not in checked:
            pipeline.check(config, study.workspace, trial.name, until=trial.until)
        checked.add(kind)
    return configs

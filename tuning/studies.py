"""Runs a study: each case is run with several seeds, and each of these trials is a run of the pipeline."""

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, Self

import pyarrow as pa
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.resolve import COMMAND_LINE, OVERRIDE, resolve, with_table
from mcis.platform.config.sections import Config, sources_of
from mcis.platform.outputs.read_index import predicted_split, rows_in_split
from mcis.platform.reporting.compared_runs import open_run_groups
from mcis.platform.reporting.comparison import BootstrapSettings, compare
from mcis.platform.reporting.comparison_page import compared_images, write_page
from mcis.platform.reporting.comparison_tables import Table
from mcis.platform.reporting.terminal import print_descriptions, print_table
from mcis.platform.reporting.voc_archive import write_voc_archive
from mcis.platform.runs.files import atomic_write, fingerprint, read_json, write_json
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.progress import console
from mcis.platform.runs.scores import Score, metric_name
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import RunFolder
from mcis.tuning.case_scores import (
    INTERVAL_NOTE,
    CaseScores,
    PairedDifference,
    column_descriptions,
    meaning_of_columns,
    paired_differences,
    score_case,
    scores_by_column,
    with_intervals,
)
from mcis.tuning.definition import (
    LAST_STAGES,
    StudyCase,
    StudyDefinition,
    adapted_to_sources,
    cases_of,
    check_sources,
    configured,
)
from mcis.tuning.tables import cases_table, differences_table, plot_cases, seeds_table
from mcis.tuning.trials import Outcome, Sweep, Trial, common_compute, run_trials, short_names, study_session

_MAP_FILE_KEYS = ("localize.maps", "localize.maps_format")
"""Keys of map files of other programs, which are looked for before a trial starts."""
_PAGE_IMAGES = 8
"""Number of images of each kind on the page of a study."""
_CASE_LABELS = ("case", "method", "data")
"""Parameters of a trial's MLflow run that name its case, the method and the data set."""
_TEST_LIST = "test"
"""Name of VOC's list of test images."""


@dataclass(frozen=True, kw_only=True)
class Study(Sweep):
    """A study before it runs. Its trials are the runs NAME-CASE-sSEED.

    Attributes:
        num_seeds: Number of runs of each case. Their seeds start with the seed of the configuration.
        until: Last stage of its longest trials.
        predicts_test: Whether each case and seed has a second trial, which predicts VOC's test images.
    """

    num_seeds: int = 1
    until: str = "evaluate"
    predicts_test: bool = False

    @property
    def seeds(self) -> range:
        """The seeds of each case."""
        first = self.resolved.config.seed
        return range(first, first + self.num_seeds)

    def trial_name(self, case: str, seed: int) -> str:
        """Name of the run of a case with a seed."""
        return f"{self.name}-{case}-s{seed}"

    def test_trial_name(self, case: str, seed: int) -> str:
        """Name of the run that predicts the test images for a case and a seed."""
        return f"{self.trial_name(case, seed)}-test"


class ServerArchive(NamedTuple):
    """Predictions of the test images, for VOC's evaluation server.

    Attributes:
        case: Name of the case.
        seed: Seed of the trial.
        file: The archive.
        paper: The paper's mIoU on test, in percent.
    """

    case: str
    seed: int
    file: str
    paper: float | None


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """Result of a study.

    Attributes:
        about: Description of the study in study.json.
        cases: Scores of each case with a finished trial.
        differences: Differences between cases.
        meanings: What the scores of each column are, by column and heading.
        paper_column: Heading of the column with the paper's results; None if the study has none.
        archives: Archives for VOC's evaluation server.
    """

    about: Values
    cases: list[CaseScores]
    differences: list[PairedDifference]
    meanings: dict[str, dict[str, str]]
    paper_column: str | None
    archives: list[ServerArchive]

    def table(self) -> pa.Table:
        """All scores in percent, a row per case and seed. Its method `to_pandas` returns a data frame."""
        return seeds_table(self.cases, self.paper_column)

    @classmethod
    def read(cls, folder: RunFolder) -> Self:
        """Reads the result of a study.

        Args:
            folder: Files of the study's run.

        Raises:
            UserError: There is no study.json of a study.
        """
        expected = "the files of a study that `mcis study run` has written"
        try:
            content = read_json(folder.study)
        except FileNotFoundError:
            raise UserError(f"{folder.path} has no study.json", expected, "name a study (mcis runs)") from None
        if content.get("study") == "search":
            raise UserError(
                f"{folder.path} is a search", expected, "repeat `mcis study search` with --csv or --json for its trials"
            )

        try:
            cases = [_read_case_scores(entry) for entry in content["cases"]]
            differences = [PairedDifference.from_json(entry) for entry in content["differences"]]
            archives = [ServerArchive(**archive) for archive in content["test_archives"]]
            about = {key: content[key] for key in ("study", "sources", "recipe", "changed")}
            return cls(
                about=about,
                cases=cases,
                differences=differences,
                meanings=content["meanings"],
                paper_column=content["paper_column"],
                archives=archives,
            )
        except (KeyError, TypeError, ValidationError) as error:
            raise UserError(
                f"{folder.study} is of another version ({type(error).__name__})", expected, "repeat `mcis study run`"
            ) from None

    def as_json(self) -> dict[str, Any]:
        """The content of study.json."""
        return {
            **self.about,
            "meanings": self.meanings,
            "paper_column": self.paper_column,
            "cases": to_jsonable_python(self.cases, by_alias=False),
            "differences": [difference.as_json() for difference in self.differences],
            "test_archives": [archive._asdict() for archive in self.archives],
        }


def _read_case_scores(entry: Mapping[str, Any]) -> CaseScores:
    """The scores of a case in study.json."""
    case = StudyCase(**entry["case"])
    return CaseScores(case=case, seeds=entry["seeds"], miou=entry["miou"], shares=entry["shares"])


class _Plan(NamedTuple):
    """The trials of a study, the configuration keys whose values differ between them, and their section `compute`."""

    trials: list[Trial]
    varied_keys: list[str]
    compute: ComputeConfig


def run_study(study: Study, definition: StudyDefinition) -> StudyResult:
    """Runs the trials of a study, writes its files, logs them to MLflow, and prints its tables.

    Raises:
        UserError: The study is not possible; another process runs a run of its name in the workspace; or a trial
            failed, after the tables of the other trials have been printed.
    """
    definition = adapted_to_sources(definition, study.resolved.config)
    cases = _checked_cases(study, definition)
    refuse_if_running(study.workspace, study.name)
    plan = _make_plan(study, cases, definition.paper_column)

    with study_session(study, plan.compute, identity=_identity(study), varied=plan.varied_keys) as tracker:
        outcome = run_trials(study, plan.compute, plan.trials, tracker.run_id)
        archives = list(_write_archives(study, cases, outcome))
        result = _collect_result(study, cases, outcome, archives, definition.paper_column)
        _write_files(study, result, tracker)
        _print_result(study, definition, result)
        _remove_pages(study)

        failure = outcome.failure()
        if failure:
            raise failure
        _write_pages(study, result, tracker)
    return result


def _checked_cases(study: Study, definition: StudyDefinition) -> list[StudyCase]:
    """Returns the cases of a study. For errors see `check_sources`, `cases_of` and `_check_study`."""
    check_sources(definition, study.resolved.config)
    cases = cases_of(definition, study.resolved, study.until)
    keys_of_all_cases = set.intersection(*(set(case.values) for case in cases))
    location_of_first = with_table(definition.first_source, {})[1]
    _check_study(study, (keys_of_all_cases | definition.data_keys) - set(location_of_first))
    return cases


def _identity(study: Study) -> str:
    """Fingerprint of what distinguishes the MLflow run of a study from those of other studies."""
    config = study.resolved.config
    return fingerprint(study.name, study.kind, study.resolved.changed(), config.recipe, config.sources)


def _check_study(study: Study, case_keys: set[str]) -> None:
    """Checks a study before its first trial.

    Args:
        study: The study.
        case_keys: Keys that every case or a data set sets.

    Raises:
        UserError: The last stage has no score, or the user sets one of the keys.
    """
    if study.until not in LAST_STAGES:
        raise UserError(
            f"--until {study.until}", f"a stage with scores: {', '.join(LAST_STAGES)}", "choose one of them"
        )
    if study.predicts_test:
        _check_test(study)
    origins = study.resolved.origins
    overridden = sorted(key for key in case_keys if origins.get(key) in (COMMAND_LINE, OVERRIDE))
    if overridden:
        raise UserError(
            f"{' and '.join(overridden)} on the command line", "keys that the cases do not set", "leave them out"
        )


def _check_test(study: Study) -> None:
    """Raises a `UserError` if the study has no predictions of VOC's test images."""
    sources = study.resolved.config.sources
    if sources_of(sources)[0] != "voc":
        raise UserError(
            f"--test with sources {sources}",
            "the source voc, whose test images are scored by VOC's evaluation server",
            "leave out --test; `mcis export predictions` writes the predictions of other images",
        )
    if LAST_STAGES.index(study.until) < LAST_STAGES.index("predict"):
        raise UserError(
            f"--test with --until {study.until}", "a study that trains segmentation networks", "leave out --until"
        )


def _make_plan(study: Study, cases: Sequence[StudyCase], paper_column: str | None) -> _Plan:
    """Makes the trials of a study, all cases with the first seed first."""
    trials: list[Trial] = []
    scored_names: set[str] = set()
    for seed in study.seeds:
        scored_trials = [_make_trial(study, case, seed, paper_column) for case in cases]
        scored_names.update(trial.name for trial in scored_trials)
        trials += scored_trials
        if study.predicts_test:
            trials += [_make_test_trial(study, case, seed) for case in cases if _has_predictions(case.until)]
    configs = _check_trials(study, trials, scored_names)
    sections = {trial.name: config.compute for trial, config in zip(trials, configs, strict=True)}
    compute = common_compute(sections, study.parallel)
    console.print(f"study:   {len(trials)} trials; a stage with the same settings in several trials is computed once")

    trial_values = [dict(leaves(config)) for config in configs]
    varied_keys = _varied_keys(trial_values)
    short = short_names(varied_keys, taken=_CASE_LABELS)
    named_trials = []
    for trial, values in zip(trials, trial_values, strict=True):
        varied = {short[key]: values[key] for key in varied_keys if key in values}
        named_trials.append(trial._replace(varied=trial.varied | varied))
    return _Plan(named_trials, varied_keys, compute)


def _make_trial(study: Study, case: StudyCase, seed: int, paper_column: str | None) -> Trial:
    metrics = {}
    if paper_column and case.paper is not None:
        metrics[metric_name(paper_column)] = case.paper
    return _trial_of_case(study, case, study.trial_name(case.name, seed), case.until, {"seed": seed}, metrics)


def _make_test_trial(study: Study, case: StudyCase, seed: int) -> Trial:
    """The trial that predicts the test images. It shares all earlier stages with the trial that predicts val images."""
    values = {"seed": seed, "predict.split": "test"}
    return _trial_of_case(study, case, study.test_trial_name(case.name, seed), "predict", values, {})


def _trial_of_case(
    study: Study, case: StudyCase, name: str, until: str, values: Values, metrics: dict[str, float]
) -> Trial:
    labels = dict(zip(_CASE_LABELS, (case.name, case.method, case.data_set), strict=True))
    varied = {label: text for label, text in labels.items() if text}
    return Trial(name, case.sources, case.recipe, _changed_values(study, case, values), until, varied, metrics)


def _changed_values(study: Study, case: StudyCase, values: Values) -> Values:
    """The values in which a trial differs from its recipe, with absolute paths."""
    if study.predicts_test:  # for all trials, because the index, on which all stages depend, lists the test images
        values = values | {"data.test_list": study.resolved.config.data.test_list or _TEST_LIST}
    return configured(study.resolved, case.values | values, case.sources, case.recipe).changed()


def _has_predictions(until: str) -> bool:
    """Whether trials with this last stage make predictions."""
    return LAST_STAGES.index(until) >= LAST_STAGES.index("predict")


def _varied_keys(trial_values: Sequence[Values]) -> list[str]:
    """The keys whose values differ between trials."""
    varied_keys = []
    for key in dict.fromkeys(itertools.chain.from_iterable(trial_values)):
        different_values = {str(values.get(key)) for values in trial_values}
        if len(different_values) > 1:
            varied_keys.append(key)
    return varied_keys


def _check_trials(study: Study, trials: Sequence[Trial], scored_names: Set[str]) -> list[Config]:
    """Checks all trials before the first one is trained, and returns their configurations.

    Trials that differ only in their seed and in how maps are inferred have the same requirements and are checked once.

    Args:
        study: The study.
        trials: Its trials.
        scored_names: Names of the trials with scores, which need ground truth.

    Raises:
        UserError: A trial is not possible, or has no ground truth.
    """
    configs = [resolve(trial.sources, trial.recipe, trial.values).config for trial in trials]
    checked = set()
    for trial, config in zip(trials, configs, strict=True):
        requirements = _requirements(trial)
        if requirements not in checked:
            sources = pipeline.check(config, study.workspace, trial.name, until=trial.until)
            if trial.name in scored_names:
                _check_truth(trial, config, sources.listing().table.select(["split", "tags", "mask_uri"]))
        checked.add(requirements)
    return configs


def _requirements(trial: Trial) -> str:
    """What `_check_trials` checks a trial for, as text: without its seed and without how its maps are inferred."""
    values = {}
    for key, value in trial.values.items():
        decides_inference = key.startswith("localize.") and key not in _MAP_FILE_KEYS
        if key != "seed" and not decides_inference:
            values[key] = value
    return str([trial.sources, trial.recipe, trial.until, sorted(values.items())])


def _check_truth(trial: Trial, config: Config, images: pa.Table) -> None:
    """Raises UserError if a trial has no output that is scored, or no image that it scores has a ground-truth mask.

    Args:
        trial: The trial.
        config: Its configuration.
        images: Table of the listing of its sources.
    """
    reaches_masks = LAST_STAGES.index(trial.until) >= LAST_STAGES.index("pseudo_masks")
    scored = []
    if config.supervision == "tags" and (config.has_maps or (config.makes_masks and reaches_masks)):
        scored.append(rows_in_split(images, "train", tagged=True))
    if _has_predictions(trial.until):
        split = predicted_split(config, has_val=len(rows_in_split(images, "val")) > 0)
        scored.append(rows_in_split(images, split))

    if not scored:
        raise UserError(
            f"the trial {trial.name} ends at {trial.until}, where it has no output that is scored",
            "localization maps, pseudo masks or predictions of each trial",
            "choose a later --until, or name the other cases by --case",
        )
    if all(rows["mask_uri"].null_count == len(rows) for rows in scored):
        raise UserError(
            f"the trial {trial.name} has no score: no image that it scores has a ground-truth mask",
            "masks of some images of each trial",
            "name the masks: data.truth_masks, or the column mask of the table; or leave the case out",
        )


def _collect_result(
    study: Study, cases: Sequence[StudyCase], outcome: Outcome, archives: list[ServerArchive], paper_column: str | None
) -> StudyResult:
    """Collects the scores of finished trials by case, and compares the cases."""
    scored_cases: list[CaseScores] = []
    scored_trials: list[Mapping[str, Score]] = []
    for case in cases:
        names = {seed: study.trial_name(case.name, seed) for seed in study.seeds}
        scores = {
            seed: scores_by_column(outcome.scores[name], case.related)
            for seed, name in names.items()
            if outcome.scores.get(name)
        }
        if scores:
            val_map = {seed: outcome.val_map.get(names[seed]) for seed in scores}
            scored_cases.append(score_case(case, scores, val_map))
            scored_trials.extend(scores.values())

    differences = [
        with_intervals(difference, study.trial_name, study.workspace) for difference in paired_differences(scored_cases)
    ]
    config = study.resolved.config
    about = {
        "study": study.kind,
        "sources": config.sources,
        "recipe": config.recipe,
        "changed": study.resolved.changed(),
    }
    return StudyResult(
        about=about,
        cases=scored_cases,
        differences=differences,
        meanings=meaning_of_columns(scored_trials),
        paper_column=paper_column,
        archives=archives,
    )


def _write_archives(study: Study, cases: Sequence[StudyCase], outcome: Outcome) -> Iterator[ServerArchive]:
    """Writes an archive for VOC's evaluation server for each finished trial that predicted the test images."""
    for case in cases:
        for seed in study.seeds:
            name = study.test_trial_name(case.name, seed)
            if name in outcome.scores:
                file = study.folder.test_archives / f"{case.name}-s{seed}.tar.gz"
                write_voc_archive(study.workspace, name, file)
                yield ServerArchive(case.name, seed, str(file), case.paper_test)


def _result_tables(study: Study, definition: StudyDefinition, result: StudyResult) -> list[Table]:
    """The tables of the cases, and of the differences and archives if there are any."""
    seeds = ", ".join(map(str, study.seeds))
    title = f"{definition.about}: mIoU %, seeds {seeds}, {study.name}"
    tables = [cases_table(result.cases, title, result.paper_column, result.differences)]
    if result.differences:
        tables.append(differences_table(result.differences))
    if result.archives:
        tables.append(_archives_table(result.archives, definition.paper_test_column))
    return tables


def _archives_table(archives: Sequence[ServerArchive], paper_column: str) -> Table:
    rows = []
    for archive in archives:
        paper = "" if archive.paper is None else f"{archive.paper:.1f}"
        rows.append((archive.case, str(archive.seed), paper, Path(archive.file).name))
    columns = ("case", "seed", paper_column, "archive")
    return Table("archives for VOC's evaluation server", columns, rows)


def _write_files(study: Study, result: StudyResult, tracker: Tracker) -> None:
    """Writes study.json and study.png, and logs them and the mean scores to MLflow."""
    folder = study.folder
    write_json(folder.study, result.as_json())
    with atomic_write(folder.study_picture) as aside:
        descriptions = column_descriptions(result.meanings)
        plot_cases(result.cases, aside, study.name, descriptions, result.paper_column)

    for scores in result.cases:
        metrics = {}
        for column, values in scores.miou.items():
            metrics[metric_name(f"miou.{column}.{scores.case.name}")] = mean(values)
        tracker.metrics(metrics)
    tracker.artifact(folder.study)
    tracker.artifact(folder.study_picture)


def _print_result(study: Study, definition: StudyDefinition, result: StudyResult) -> None:
    """Prints the tables of a study, what they mean, and where its files are."""
    for table in _result_tables(study, definition, result):
        print_table(table.title, table.columns, table.rows, numbers=table.numbers, optional=table.optional)
    if result.differences:
        print_descriptions([INTERVAL_NOTE])
    print_descriptions(column_descriptions(result.meanings).items())
    console.print(f"numbers: {study.folder.study}")
    console.print(f"plot:    {study.folder.study_picture}")
    if result.archives:
        console.print(f"archives: {study.folder.test_archives}")


def _remove_pages(study: Study) -> None:
    """Removes the pages of an earlier call."""
    for page in study.folder.path.glob(f"{study.folder.study_page.stem}*.html"):
        page.unlink()


def _write_pages(study: Study, result: StudyResult, tracker: Tracker) -> None:
    """Writes the pages of a study, one or one for each data set, logs them to MLflow, and prints where they are."""
    data_sets = list(dict.fromkeys(scores.case.data_set for scores in result.cases))
    for data_set in data_sets:
        cases = [scores for scores in result.cases if scores.case.data_set == data_set]
        differences = [difference for difference in result.differences if difference.case.data_set == data_set]
        page = study.folder.study_page
        if len(data_sets) > 1:
            page = page.with_stem(f"{page.stem}-{data_set}")
        if _write_page(study, replace(result, cases=cases, differences=differences), page):
            tracker.artifact(page)
            console.print(f"page:    {page}")


def _write_page(study: Study, result: StudyResult, page: Path) -> bool:
    """Writes the page of `mcis compare` for the cases, the first as the baseline, with the tables of the study.

    Returns:
        Whether there is a page. If the cases cannot be compared, a note is printed.
    """
    tables = [cases_table(result.cases, "Cases of the study, mIoU %", result.paper_column, result.differences)]
    if result.differences:
        differences = differences_table(result.differences)
        title = "Baselines and differences of mIoU % to them, over the same seeds"
        tables.append(differences._replace(title=title))

    runs = list(_runs_of_cases(study, result.cases))
    try:
        opened = open_run_groups(study.workspace.root, runs, min_groups=1)
        groups = [group._replace(label=scores.case.name) for group, scores in zip(opened, result.cases, strict=True)]
        comparison = compare(groups, BootstrapSettings())
        galleries = compared_images(comparison, count=_PAGE_IMAGES)
        write_page(comparison, galleries, page, first_tables=tables)
    except UserError as error:
        console.print(f"note: no page of the cases: {error.found}")
        return False
    return True


def _runs_of_cases(study: Study, case_scores: Sequence[CaseScores]) -> Iterator[str]:
    """Yields the runs of each case as `mcis compare` takes them, separated by commas."""
    for scores in case_scores:
        yield ",".join(study.trial_name(scores.case.name, seed) for seed in scores.seeds)

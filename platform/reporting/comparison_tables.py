"""Makes the tables and notes of a comparison for its page and the terminal, and its values as CSV and JSON."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from mcis.datasets.errors import join_shortened
from mcis.platform.reporting.compared_runs import RunGroup, differing_settings, joined_once
from mcis.platform.reporting.comparison import Comparison, Interval
from mcis.platform.runs.results import VAL_MAP, StageResult, read_result
from mcis.platform.runs.scores import (
    MEASURES,
    SCORED_OUTPUTS,
    format_count,
    headings_of,
    measure_heading,
    measure_names,
    shared_origin,
)


class Table(NamedTuple):
    """Rows of text below headings.

    Attributes:
        title: Shown above the table.
        columns: Headings.
        rows: One cell per column each.
        numbers: Headings of the columns of numbers.
        optional: Headings of the columns that are left out on a narrow terminal, the least important first.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()
    optional: Sequence[str] = ()


_NO_INTERVAL = Interval(math.nan, math.nan)


class ComparedMeasure(NamedTuple):
    """One measure of one score, of the baseline and of a group of runs, in percent; a row of the CSV and JSON output.

    Attributes:
        scored: What is scored, a `Variant.title`.
        measure: Name of the measure.
        compared_runs: Label of the compared group.
        split: The split of the images.
        images: Number of images.
        baseline: Value of the baseline, mean over its seeds.
        baseline_deviation: Standard deviation over its seeds; None for one seed.
        compared: Value of the compared group, mean over its seeds.
        compared_deviation: Standard deviation over its seeds; None for one seed.
        difference: `compared - baseline`, in percentage points.
        low: Lower end of the interval of the difference; None if the measure has no interval.
        high: Upper end of the interval; None if the measure has no interval.
        verdict: See `Difference.verdict`.
    """

    scored: str
    measure: str
    compared_runs: str
    split: str
    images: int
    baseline: float
    baseline_deviation: float | None
    compared: float
    compared_deviation: float | None
    difference: float
    low: float | None
    high: float | None
    verdict: str


def page_tables(comparison: Comparison) -> list[Table]:
    """The tables of the page: settings, scores, trained classifiers, differences. A single group has no differences."""
    tables = [_scores_table(comparison)]
    classifiers = classifiers_table(comparison)
    if classifiers:
        tables.append(classifiers)
    if len(comparison.groups) > 1:
        tables = [settings_table(comparison), *tables, _differences_table(comparison)]
    return tables


def terminal_tables(comparison: Comparison) -> list[Table]:
    """The tables of the terminal: the settings in which the runs differ, the trained classifiers, and a table of
    differences for each group.

    Without their optional columns, tables of differences fit 80 characters.
    """
    tables = []
    settings = settings_table(comparison)
    if settings.rows:
        tables.append(settings)
    classifiers = classifiers_table(comparison)
    if classifiers:
        tables.append(classifiers)
    for group in comparison.groups[1:]:
        if any(row.group == group.label for row in comparison.differences):
            tables.append(_group_table(comparison, group))
    return tables


def settings_table(comparison: Comparison) -> Table:
    """Returns a table of the settings in which the groups differ, without those that have no effect on them."""
    labels = [group.label for group in comparison.groups]
    rows = [(key, *values) for key, values in differing_settings(comparison.groups).items()]
    return Table("Settings that differ", ("setting", *labels), rows)


def classifiers_table(comparison: Comparison) -> Table | None:
    """The mean average precision of the classifiers on val tags; None if no group has it for all of its runs."""
    heading = f"{VAL_MAP} %"
    rows = [(group.label, _classifier_precision(group)) for group in comparison.groups]
    if all(precision == "-" for _, precision in rows):
        return None
    return Table("Classifiers", ("run", heading), rows, (heading,))


def _classifier_precision(group: RunGroup) -> str:
    precisions = []
    for run in group.runs:
        if "train_classifier" in run.outputs:
            precision = read_result(run.outputs["train_classifier"], StageResult).counts.get(VAL_MAP)
            if precision is not None:
                precisions.append(precision)
    return mean_text(precisions) if len(precisions) == len(group.runs) else "-"


def _scores_table(comparison: Comparison) -> Table:
    """Every score of every group with its measures and the settings that the scores do not share."""
    shared = _shared_origin(comparison)
    measures = _measures(comparison)
    rows = []
    for score in comparison.scores:
        for group in score.groups:
            scores = group.scores(score.title)
            all_settings = [run_score.settings() for run_score in scores]
            texts = []
            for heading in headings_of(all_settings, without=("split", *shared)):
                values = joined_once(settings[heading] for settings in all_settings if heading in settings)
                texts.append(f"{heading} {values}")
            variants = joined_once(run_score.name for run_score in scores)
            means = [mean_text(_values(group, score.title, measure)) for measure in measures]
            rows.append((score.title, group.label, variants, scores[0].split, ", ".join(texts), *means))

    headings = tuple(f"{measure_heading(measure)} %" for measure in measures)
    return Table("Scores", ("score", "run", "variant", "split", "settings", *headings), rows, headings)


def _differences_table(comparison: Comparison) -> Table:
    """Every difference to the baseline with its interval."""
    rows = []
    for row in compared_measures(comparison):
        interval = "-" if row.low is None or row.high is None else f"{row.low:+.2f} to {row.high:+.2f}"
        values = (f"{row.baseline:.2f}", f"{row.compared:.2f}", f"{row.difference:+.2f}", interval)
        measure = measure_heading(row.measure)
        rows.append((row.scored, measure, row.compared_runs, row.verdict, row.split, format_count(row.images), *values))
    numbers = ("images", "baseline", "compared", "difference", "interval")
    columns = ("score", "measure", "run", "verdict", "split", *numbers)
    return Table(f"Differences to {comparison.groups[0].label}", columns, rows, numbers)


def _group_table(comparison: Comparison, group: RunGroup) -> Table:
    """The differences of one group to the baseline, with a row for mIoU and a row for boundary mIoU of each score."""
    baseline = comparison.groups[0]
    further = [measure for measure in _measures(comparison) if measure not in MEASURES]
    intervals = {score.title: score.label_score_intervals for score in comparison.scores}
    rows = []
    for row in comparison.differences:
        if row.group != group.label:
            continue
        is_first_row = row.measure == "miou"
        name = row.title if is_first_row else f"  {measure_heading(row.measure)}"
        difference = f"{row.difference:+.2f}"
        if row.verdict != "unknown":
            difference += f" [{_short(row.low)}, {_short(row.high)}]"

        further_values = []
        for measure in further:
            before = mean_text(_values(baseline, row.title, measure))
            after = mean_text(_values(group, row.title, measure))
            text = f"{before} → {after}"
            interval = intervals[row.title].get((group.label, measure))
            if interval is not None and interval.verdict != "unknown":
                text += f" [{_short(interval.low)}, {_short(interval.high)}]"
            further_values.append(text if is_first_row else "")
        deviations = [_deviation_text(_values(runs, row.title, row.measure)) for runs in (baseline, group)]
        values = (f"{row.baseline:.2f}", f"{row.compared:.2f}", difference)
        rows.append((name, *values, row.verdict, row.split, format_count(row.images), *deviations, *further_values))

    confidence = f"{100 * comparison.bootstrap.confidence:g}"
    difference_heading = f"difference [{confidence} %]"
    deviation_headings = ("± baseline", "± compared")
    further_headings = tuple(f"{measure_heading(measure)} [{confidence} %]" for measure in further)
    columns = ("mIoU %", "baseline", "compared", difference_heading, "verdict", "split", "images")
    numbers = ("baseline", "compared", "images", *deviation_headings, *further_headings)
    optional = (*further_headings[::-1], *deviation_headings, "images", "split")
    title = f"{group.label} compared with {baseline.label}"
    return Table(title, (*columns, *deviation_headings, *further_headings), rows, numbers, optional)


def mean_text(values: Sequence[float], sign: str = "") -> str:
    """Mean and, if there are several values, their standard deviation: `61.20 ± 0.35`; `-` without values.

    Args:
        values: The values, for example of several seeds.
        sign: `+` to print the sign of positive means, too.
    """
    if not values:
        return "-"
    deviation = f" ± {_deviation_text(values)}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.2f}{deviation}"


def score_settings(comparison: Comparison) -> list[tuple[str, str]]:
    """The settings of each compared score, without those shared by all scores; different values are joined by ` / `."""
    shared = _shared_origin(comparison)
    described = []
    for score in comparison.scores:
        all_settings = []
        for group in score.groups:
            all_settings += [run_score.settings() for run_score in group.scores(score.title)]

        texts = []
        for heading in headings_of(all_settings, without=shared):
            values = dict.fromkeys(settings.get(heading, "-") for settings in all_settings)
            texts.append(f"{heading} {' / '.join(values)}")
        described.append((score.title, ", ".join(texts)))
    return described


def footnotes(comparison: Comparison) -> list[tuple[str, str]]:
    """Notes on the comparison, as terms and texts: settings of all scores, what is not compared, and the intervals."""
    notes = []
    shared = ", ".join(f"{heading} {text}" for heading, text in _shared_origin(comparison).items())
    if shared:
        notes.append(("all scores", shared))

    titles_left_out: dict[str, list[str]] = {}
    for score in comparison.scores:
        for label, reason in score.left_out.items():
            titles_left_out.setdefault(f"{label}: {reason}", []).append(score.title)
    for group_and_reason, titles in titles_left_out.items():
        notes.append(("not compared", f"{', '.join(titles)} of {group_and_reason}"))
    notes += _notes_on_missing_scores(comparison)

    if len(comparison.groups) == 1:
        return notes

    notes += _notes_on_tags(comparison)
    resamples, seed, confidence = comparison.bootstrap
    notes += _notes_on_shared_outputs(comparison)
    num_trainings = _numbers_of_trainings(comparison)
    over_seeds = ", and over seeds by Student's t" if max(num_trainings) > 1 else ""
    method = f"paired bootstrap over the images, {resamples} resamples, the same for all runs (seed {seed}){over_seeds}"
    notes.append((f"{100 * confidence:g} % interval", method))

    by_chance = f"{100 * (1 - confidence):.3g} %"
    notes.append(("no difference", "the interval contains 0"))
    notes.append(("many intervals", f"if nothing differs, about {by_chance} of them still exclude 0"))
    if min(num_trainings) == 1:
        notes.append(("single runs", "the interval does not include what another seed would change"))
    return notes


def _notes_on_missing_scores(comparison: Comparison) -> list[tuple[str, str]]:
    """Notes on the scores that several groups have, but not the baseline."""
    baseline, *others = comparison.groups
    labels: dict[str, list[str]] = {}
    for group in others:
        for title in group.titles():
            if title not in baseline.titles():
                labels.setdefault(title, []).append(group.label)

    titles: dict[str, list[str]] = {}
    for title, group_labels in labels.items():
        if len(group_labels) > 1:
            titles.setdefault(", ".join(group_labels), []).append(title)
    notes = []
    for group_text, group_titles in titles.items():
        notes.append(("not compared", f"{', '.join(group_titles)} of {group_text}: {baseline.label} has none"))
    return notes


def _notes_on_tags(comparison: Comparison) -> list[tuple[str, str]]:
    """A note on each group with other tags than the baseline whose predictions are compared all the same."""
    baseline = comparison.groups[0].label
    compared_labels = set()
    for score in comparison.scores:
        if not SCORED_OUTPUTS[score.output].is_made_from_tags:
            compared_labels |= {group.label for group in score.groups}

    notes = []
    for label, number in comparison.other_tags.items():
        if label in compared_labels:
            difference = f"{format_count(number)} images have other tags in {label} than in {baseline}"
            notes.append(("other tags", f"{difference}; networks may be trained with them"))
    return notes


def _notes_on_shared_outputs(comparison: Comparison) -> list[tuple[str, str]]:
    """A note on runs of a group that are one training, because they share an output."""
    titles: dict[str, list[str]] = {}
    for score in comparison.scores:
        for group in score.groups:
            for runs in group.runs_by_output(score.title):
                if len(runs) > 1:
                    names = join_shortened([run.name for run in runs])
                    text = f"of {group.label}: {len(runs)} runs share one output and count as one ({names})"
                    titles.setdefault(text, []).append(score.title)
    return [("one training", f"{', '.join(score_titles)} {text}") for text, score_titles in titles.items()]


def _numbers_of_trainings(comparison: Comparison) -> list[int]:
    """The number of trainings of each group in each score."""
    numbers = []
    for score in comparison.scores:
        numbers += [len(group.trainings(score.title)) for group in score.groups]
    return numbers


def compared_measures(comparison: Comparison) -> Iterator[ComparedMeasure]:
    """Every measure of every compared score: `MEASURES`, then the means of `LABEL_SCORES`."""
    baseline = comparison.groups[0]
    for score in comparison.scores:
        differences = {(row.group, row.measure): row for row in score.differences}
        for group in score.groups[1:]:
            first = group.scores(score.title)[0]
            for measure in _measures(comparison):
                before = _values(baseline, score.title, measure)
                after = _values(group, score.title, measure)
                if not before or not after:
                    continue
                row = differences.get((group.label, measure))
                baseline_value = row.baseline if row else fmean(before)
                compared_value = row.compared if row else fmean(after)
                interval = score.label_score_intervals.get((group.label, measure), _NO_INTERVAL)
                if row:
                    interval = Interval(row.low, row.high)
                yield ComparedMeasure(
                    scored=score.title,
                    measure=measure,
                    compared_runs=group.label,
                    split=first.split,
                    images=first.images,
                    baseline=baseline_value,
                    baseline_deviation=stdev(before) if len(before) > 1 else None,
                    compared=compared_value,
                    compared_deviation=stdev(after) if len(after) > 1 else None,
                    difference=compared_value - baseline_value,
                    low=_finite(interval.low),
                    high=_finite(interval.high),
                    verdict=interval.verdict,
                )


def comparison_csv(comparison: Comparison) -> str:
    """Every measure of every compared score as CSV, a column per field of `ComparedMeasure`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(ComparedMeasure._fields)
    writer.writerows(compared_measures(comparison))
    return text.getvalue()


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """All values of the tables and the notes, as JSON values."""
    groups = []
    for group in comparison.groups:
        runs = [{"name": run.name, "folder": str(run.folder.path), "seed": run.seed} for run in group.runs]
        groups.append({"label": group.label, "runs": runs})

    scores = []
    for score in comparison.scores:
        by_run = {}
        for group in score.groups:
            for run in group.runs:
                run_score = run.scores[score.title]
                by_run[run.name] = {"measures": _finite_values(run_score.measures()), "settings": run_score.settings()}
        scores.append({"scored": score.title, "runs": by_run, "not_compared": dict(score.left_out)})

    settings = {}
    for key, *values in settings_table(comparison).rows:
        settings[key] = dict(zip((group.label for group in comparison.groups), values, strict=True))
    return {
        "baseline": comparison.groups[0].label,
        "groups": groups,
        "settings": settings,
        "scores": scores,
        "differences": [_finite_values(row._asdict()) for row in compared_measures(comparison)],
        "bootstrap": comparison.bootstrap._asdict(),
        "notes": [f"{term}: {text}" for term, text in footnotes(comparison)],
    }


def _measures(comparison: Comparison) -> list[str]:
    """Names of the measures that any compared score has; names in `MEASURES` come first."""
    scores = []
    for score in comparison.scores:
        for group in score.groups:
            scores += group.scores(score.title)
    return measure_names(scores)


def _values(group: RunGroup, title: str, measure: str) -> list[float]:
    """A measure of a score for the runs of a group that have it, in percent."""
    by_run = [score.measures() for score in group.scores(title)]
    return [measures[measure] for measures in by_run if measure in measures]


def _deviation_text(values: Sequence[float]) -> str:
    return f"{stdev(values):.2f}" if len(values) > 1 else ""


def _short(points: float) -> str:
    """Formats an end of an interval with three digits, so that the table fits 80 characters."""
    return f"{points:+.2f}" if abs(points) < 9.995 else f"{points:+.1f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _finite_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces numbers that JSON cannot represent by None."""
    return {key: _finite(value) if isinstance(value, float) else value for key, value in values.items()}


def _shared_origin(comparison: Comparison) -> dict[str, str]:
    """The settings of `ORIGIN` that all compared scores share, as heading -> text."""
    all_settings = []
    for score in comparison.scores:
        for group in score.groups:
            all_settings += [run_score.settings() for run_score in group.scores(score.title)]
    return shared_origin(all_settings)

"""What commands print: the scores of a run, a configuration, the runs of a workspace, an index in numbers."""

import datetime
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from mcis.datasets.errors import one_line
from mcis.platform.config.keys import leaves, meanings
from mcis.platform.reporting.index_facts import index_facts
from mcis.platform.reporting.terminal import make_table, print_descriptions, print_table
from mcis.platform.runs.progress import console
from mcis.platform.runs.scores import MEASURES, VARIANTS, Score, format_count, measure_heading, measure_names

if TYPE_CHECKING:
    from mcis.datasets.index import Listing
    from mcis.platform.config.sections import Config
    from mcis.platform.pipeline import RunResult  # imports all stages, which `mcis index show` does not need
    from mcis.platform.reporting.comparison import Comparison
    from mcis.platform.runs.garbage import Plan
    from mcis.platform.runs.inventory import Entry
    from mcis.platform.runs.workspace import Workspace

_INDENT = "    "
"""Indentation of the meaning of a configuration key."""


def show_result(result: "RunResult") -> None:
    """Prints the scores of a run, the settings that they depend on, and where its files are."""
    context = result.context
    if result.scores:
        _show_scores(f"Scores of {context.name}, percent", result.scores)

    computed = sum(seconds for stage, seconds in context.seconds.items() if context.computed[stage])
    console.print(f"{computed:.0f} s in stages that were computed")
    console.print(f"report:  {context.folder.report}")
    console.print(f"scores:  {context.folder.scores}")
    console.print(f"MLflow:  mcis ui --workspace {shlex.quote(str(context.workspace.root))}")


def _show_scores(title: str, scores: Sequence[Score]) -> None:
    """Prints a table of scores, and below it how the masks of each were made."""
    measures = measure_names(scores)
    rows = []
    for score in scores:
        values = score.measures()
        cells = [f"{values[name]:.2f}" if name in values else "-" for name in measures]
        rows.append((score.title, score.name, score.split, format_count(score.images), *cells))

    headings = [measure_heading(name) for name in measures]
    further_headings = [measure_heading(name) for name in measures if name not in MEASURES]
    columns = ("scored", "variant", "split", "images", *headings)
    print_table(title, columns, rows, numbers=("images", *headings), optional=further_headings[::-1])

    descriptions = []
    for score in scores:
        settings = ", ".join(f"{heading} {text}" for heading, text in score.output_settings().items())
        descriptions.append((f"{score.title}, {score.name}", settings))
    print_descriptions(descriptions)


def show_comparison(comparison: "Comparison") -> None:
    """Prints the differences between runs: settings that differ, a table per compared group, then notes."""
    from mcis.platform.reporting.comparison_tables import footnotes, score_settings, terminal_tables

    for table in terminal_tables(comparison):
        print_table(table.title, table.columns, table.rows, numbers=table.numbers, optional=table.optional)
    print_descriptions(score_settings(comparison))
    print_descriptions(footnotes(comparison))


def show_configuration(config: "Config", origins: Mapping[str, str]) -> None:
    """Prints every key with its value and the origin of the value, followed by its meaning.

    A key and its value are on one line, whatever the width of the terminal, so that the output can be searched.
    """
    descriptions = meanings(config)
    for key, value in leaves(config):
        line = Text.assemble((key, "bold"), one_line(f" = {value}  ({origins[key]})"))
        console.print(line, soft_wrap=True)
        meaning = textwrap.fill(
            one_line(descriptions[key]), console.width, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
        console.print(Text(meaning), soft_wrap=True)


def show_outlook(config: "Config", listing: "Listing") -> None:
    """Prints what a run can expect of its images."""
    from mcis.platform.reporting.expectations import expectations

    for line in expectations(config, listing):
        console.print(line)


def show_runs(entries: Sequence["Entry"], workspace: "Workspace") -> None:
    """Prints the runs and studies of a workspace; trials are indented below their study."""
    if not entries:
        console.print(f"no runs in {workspace.root}")
        return

    studies = {entry.name for entry in entries if entry.kind == "study"}
    rows = []
    for entry in entries:
        is_trial = entry.kind == "run" and entry.study in studies
        name = f"  {entry.name}" if is_trial else entry.name
        reached = f"{entry.trials} trials" if entry.kind == "study" else entry.reached or ""
        scores = [f"{entry.scores[variant.key]:.2f}" if variant.key in entry.scores else "" for variant in VARIANTS]
        size = decimal(entry.bytes) if entry.bytes else ""
        configuration = (entry.sources or "", entry.recipe or "")
        tags = ", ".join(one_line(f"{key}={value}") for key, value in entry.tags.items())
        rows.append((name, *configuration, _last_call(entry), entry.state, reached, *scores, size, tags))

    headings = [variant.heading for variant in VARIANTS]
    columns: tuple[str, ...] = ("name", "sources", "recipe", "last call", "state", "reached", *headings, "disk", "tags")
    if not any(entry.tags for entry in entries):
        columns = columns[:-1]
        rows = [row[:-1] for row in rows]
    optional = ("recipe", "sources", "last call", "reached", "tags")
    print_table(f"Runs of {workspace.root}", columns, rows, numbers=(*headings, "disk"), optional=optional)

    for entry in entries:
        if entry.holder:
            process = f"running on host {entry.holder.host}, process {entry.holder.pid}"
            console.print(f"{one_line(entry.name)}: {process}")
        elif entry.problem:
            console.print(f"{one_line(entry.name)}: {one_line(entry.problem)}")

    descriptions = [(variant.heading, f"mIoU in percent of {variant.title}") for variant in VARIANTS]
    descriptions.append(("disk", "the run and the outputs that it uses, some of which several runs may share"))
    print_descriptions(descriptions)


def _last_call(entry: "Entry") -> str:
    """Local time at which the last call of a run ended, or began."""
    time = entry.ended or entry.began
    return f"{datetime.datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}" if time else ""


def show_removal(plan: "Plan", workspace: "Workspace") -> None:
    """Prints what is to be removed, its total size, and notes on what is kept."""
    if plan.garbage:
        rows = []
        for item in plan.garbage:
            rows.append((str(item.path.relative_to(workspace.root)), item.reason, decimal(item.size)))
        rows.append((f"total of {len(rows)}", "", decimal(sum(item.size for item in plan.garbage))))
        title = f"To be removed from {workspace.root}"
        console.print(make_table(title, ("path", "reason", "size"), rows, numbers=("size",)))
    _show_notes(plan.notes, console)


def show_index(
    index: pa.Table, rejects: pa.Table, classes: tuple[str, ...], notes: Sequence[str], console: Console = console
) -> None:
    """Prints an index in numbers: images by class, domain and split, rejects by kind of reason, copies, notes."""
    facts = index_facts(index, rejects, classes)
    groups = facts.groups if len(facts.groups) > 1 else ()
    named_counts = [("all images", facts.images), *zip(classes, facts.per_class, strict=True)]
    if facts.negatives.any():
        named_counts.append(("none of the classes", facts.negatives))
    named_counts.append(("without a tag", facts.unlabelled))
    rows = []
    for name, by_group in named_counts:
        group_counts = by_group if groups else ()
        rows.append((name, *group_counts, by_group.sum()))
    columns = (*groups, "all")
    console.print(make_table("Images", ("class", *columns), rows, numbers=columns))

    if facts.reject_kinds:
        columns = ("kind of reason", "images")
        console.print(make_table("Rejects", columns, facts.reject_kinds.items(), numbers=["images"]))
    console.print(f"rejected: {len(rejects)}")
    console.print(f"copies of an earlier image: {facts.repeats}")
    _show_notes(notes, console)


def _show_notes(notes: Sequence[str], console: Console) -> None:
    for note in notes:
        console.print(Text.assemble(("note", "yellow"), f"  {one_line(note)}"))

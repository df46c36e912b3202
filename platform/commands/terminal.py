"""What commands print: the table of scores, an index in figures."""

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from mcis.datasets.errors import one_line
from mcis.platform.reporting.index_facts import index_facts
from mcis.platform.reporting.terminal import make_table, print_table
from mcis.platform.runs.progress import console

if TYPE_CHECKING:
    from mcis.datasets.index import Listing
    from mcis.platform.config.sections import Config
    from mcis.platform.pipeline import RunResult  # brings all stages, which `mcis index show` does not need
    from mcis.platform.runs.inventory import Entry, Plan
    from mcis.platform.runs.workspace import Workspace


def show_result(result: "RunResult") -> None:
    """The final table of a run, a line each on 80 columns, what the scores mean, and where to look."""
    context = result.context
    columns, rows, meanings = ("what", "which", "images of", "mIoU %", "boundary"), [], list[str]()
    for score in result.scores:
        boundary = "-" if score.boundary_miou is None else f"{score.boundary_miou:.2f}"
        rows.append((score.title, score.name, f"{score.split}, {score.images}", f"{score.miou:.2f}", boundary))
        made = ", ".join(f"{heading} {text}" for heading, text in score.made().items())
        meanings.append(f"{score.title}, {score.name}: {made}")
    if rows:
        console.print(make_table(f"Scores of {context.name}", columns, rows, numbers=columns[3:]))
        console.print("\n".join(meanings))
    computed = sum(s for stage, s in context.seconds.items() if context.computed[stage])
    console.print(f"{computed:.0f} s in stages that were computed")
    console.print(f"report:  {context.folder.report}")
    console.print(f"scores:  {context.folder.scores}")
    console.print(f"MLflow:  mcis ui --workspace {context.workspace.root}")


def show_outlook(config: "Config", listing: "Listing") -> None:
    """What a run can expect of its images."""
    from mcis.platform.reporting.expectations import expectations

    for line in expectations(config, listing):
        console.print(line)


def show_runs(entries: Sequence["Entry"], workspace: "Workspace") -> None:
    """What a workspace holds; trials are indented below their study."""
    from mcis.platform.runs.inventory import MAIN_SCORES

    if not entries:
        console.print(f"no runs in {workspace.root}")
        return
    studies = {entry.name for entry in entries if entry.kind == "study"}
    rows = []
    for entry in entries:
        name = f"  {entry.name}" if entry.study in studies and entry.kind == "run" else entry.name
        configuration = ", ".join(filter(None, (entry.sources, entry.recipe)))
        scores = [f"{entry.scores[name]:.2f}" if name in entry.scores else "" for name in MAIN_SCORES]
        time = entry.ended or entry.began  # of ISO 8601; shown as this place has it
        called = f"{datetime.datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}" if time else ""
        size = decimal(entry.bytes) if entry.bytes else ""
        rows.append((name, configuration, called, _state(entry), *scores, size))
    numbers = (*MAIN_SCORES.values(), "points to")
    columns = ("name", "of", "last call", "state", *numbers)
    print_table(f"Runs of {workspace.root}", columns, rows, numbers=numbers)
    for entry in (each for each in entries if each.problem and not each.holder):
        console.print(f"{one_line(entry.name)}: {one_line(entry.problem or '')}")
    words = ", ".join(f"{short} = {name}" for name, short in MAIN_SCORES.items() if name != short)
    console.print(f"mIoU % ({words}), and the disk that each points to, which runs may share")


def _state(entry: "Entry") -> str:
    """The state of a run: how far it came, who runs it."""
    reached = f"{entry.trials} trials" if entry.kind == "study" else entry.reached
    holder = entry.holder and f"host {entry.holder.host}, process {entry.holder.pid}"
    return ", ".join(filter(None, (entry.state, reached, holder)))


def show_removal(plan: "Plan", workspace: "Workspace") -> None:
    """What is to be removed, its sum, and notes on what stays."""
    if plan.garbage:
        rows = [(str(each.path.relative_to(workspace.root)), each.why, decimal(each.size)) for each in plan.garbage]
        rows.append((f"sum of {len(rows)}", "", decimal(sum(each.size for each in plan.garbage))))
        title = f"To be removed from {workspace.root}"
        console.print(make_table(title, ("what", "why", "size"), rows, numbers=("size",)))
    for note in plan.notes:
        console.print(Text.assemble(("note", "yellow"), f"  {one_line(note)}"))


def show_index(
    index: pa.Table, rejects: pa.Table, classes: tuple[str, ...], notes: Sequence[str], console: Console = console
) -> None:
    """An index in figures: images by class, domain and split, rejects by kind of reason, copies; notes last."""
    facts = index_facts(index, rejects, classes)
    columns = (*(facts.groups if len(facts.groups) > 1 else []), "all")
    names = ("every image", *classes, "without a tag")
    counts = (facts.images, *facts.per_class, facts.untagged)
    rows = [(name, *(n if len(n) > 1 else []), n.sum()) for name, n in zip(names, counts, strict=True)]
    console.print(make_table("Images", ("class", *columns), rows, numbers=columns))
    if facts.reject_kinds:
        columns = ("kind of reason", "images")
        console.print(make_table("Rejects", columns, facts.reject_kinds.items(), numbers=["images"]))
    console.print(f"rejected: {len(rejects)}")
    console.print(f"copies of an earlier image: {facts.repeats}")
    for note in notes:
        console.print(Text.assemble(("note", "yellow"), f"  {one_line(note)}"))

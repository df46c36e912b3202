"""What commands print: the table of scores, an index in figures, the doctor's screen.

Paths, names and values come from outside: all of them are escaped, or `[/x]` in a path would end in an error of rich.
"""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mcis.platform.commands.doctor import Check
from mcis.platform.reporting.index_facts import IndexFacts, concerns, index_facts
from mcis.platform.runs.files import free_bytes, in_words
from mcis.platform.runs.progress import console
from mcis.platform.runs.scores import Score

if TYPE_CHECKING:
    from mcis.datasets.index import Listing
    from mcis.platform.config.sections import Config
    from mcis.platform.pipeline import RunResult  # brings all stages, which `mcis index show` does not need
    from mcis.platform.runs.garbage import Plan
    from mcis.platform.runs.inventory import Entry
    from mcis.platform.runs.workspace import Workspace

_STATES = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad[/red]"}
_SHORT = {"maps": "maps", "masks": "masks", "segmentation": "segm.", "with CRF": "+CRF"}
"""Headings of the main scores of a run."""
_MOST_DISAGREEMENTS = 50
"""Images that are listed with tags that disagree with their mask."""


def score_table(scores: Sequence[Score], title: str) -> Table:
    """The scores of a run as a table."""
    table = Table(title=plain(title), title_justify="left")
    for column in ("what", "which", "split", "mIoU %", "boundary mIoU %", "images", "meaning"):
        table.add_column(column, justify="left" if column in ("what", "which", "split", "meaning") else "right")
    for score in scores:
        made = ", ".join(f"{heading} {text}" for heading, text in score.made().items())
        boundary = "-" if score.boundary_miou is None else f"{score.boundary_miou:.2f}"
        row = (score.title, score.name, score.split, f"{score.miou:.2f}", boundary, str(score.images), made)
        table.add_row(*map(plain, row))
    return table


def show_result(result: "RunResult") -> None:
    """The final table of a run, and where to look."""
    context = result.context
    if result.scores:
        console.print(score_table(result.scores, f"Scores of {context.name}"))
    computed = sum(s for stage, s in context.seconds.items() if context.computed[stage])
    console.print(f"{computed:.0f} s in stages that were computed")
    console.print(f"report:  {context.folder.report}", markup=False)
    console.print(f"scores:  {context.folder.scores}", markup=False)
    console.print(f"MLflow:  mcis ui --workspace {context.workspace.root}", markup=False)


def show_outlook(config: "Config", listing: "Listing", root: Path) -> None:
    """What a run can expect of its images, and what it takes of the disk of a workspace where nothing is finished."""
    from mcis.platform.networks.disk import COLUMNS, disk_use, in_parts, uncached
    from mcis.platform.reporting.expectations import expectations

    images = listing.table.select(COLUMNS)
    uses = disk_use(config, images, len(listing.classes))
    most, free = in_words(sum(use.size for use in uses)), in_words(free_bytes(root))
    disk = f"disk:    at most {most} where nothing is finished, {free} free; {in_parts(uses)}"
    for line in (disk, *expectations(config, listing), *(f"expect:  {line}" for line in uncached(config, images))):
        console.print(line, markup=False)


def show_runs(entries: Sequence["Entry"], workspace: "Workspace") -> None:
    """What a workspace holds; trials are indented below their study."""
    from mcis.platform.runs.inventory import MAIN_SCORES

    if not entries:
        console.print(f"no runs in {workspace.root}", markup=False)
        return
    table = Table(
        title=plain(f"Runs of {workspace.root}"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in ("name", "of", "last call", "state"):
        table.add_column(column, overflow="fold")
    for column in (*(_SHORT[name] for name in MAIN_SCORES), "points to"):
        table.add_column(column, justify="right", no_wrap=True)
    studies = {entry.name for entry in entries if entry.kind == "study"}
    for entry in entries:
        name = f"  {entry.name}" if entry.study in studies and entry.kind == "run" else entry.name
        configuration = ", ".join(filter(None, (entry.setting, entry.recipe)))
        scores = [f"{entry.scores[name]:.2f}" if name in entry.scores else "" for name in MAIN_SCORES]
        texts = (name, configuration, _local(entry.ended or entry.began), _state(entry), *scores)
        table.add_row(*map(plain, texts), in_words(entry.bytes) if entry.bytes else "")
    console.print(table)
    words = ", ".join(f"{short} = {name}" for name, short in _SHORT.items() if name != short)
    console.print(f"mIoU % ({words}), and the disk that each points to, which runs may share", markup=False)


def _state(entry: "Entry") -> str:
    """The state of a run: how far it came, who runs it, why it failed."""
    reached = f"{entry.trials} trials" if entry.kind == "study" else entry.reached
    more = f"host {entry.holder.host}, process {entry.holder.pid}" if entry.holder else entry.problem
    return ", ".join(filter(None, (entry.state, reached, more)))


def _local(time: str | None) -> str:
    """A time of ISO 8601 as this place has it, to the minute."""
    try:
        return f"{datetime.datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}" if time else ""
    except ValueError:
        return str(time)


def show_removal(plan: "Plan", workspace: "Workspace") -> None:
    """What is to be removed, its sum, and notes on what stays."""
    if plan.garbage:
        table = Table(title=plain(f"To be removed from {workspace.root}"), title_justify="left", show_footer=True)
        table.add_column("what", f"sum of {len(plan.garbage)}", overflow="fold")
        table.add_column("why", overflow="fold")
        table.add_column("size", in_words(plan.size), justify="right")
        for each in plan.garbage:
            table.add_row(plain(str(each.path.relative_to(workspace.root))), plain(each.why), in_words(each.size))
        console.print(table)
    for note in plan.notes:
        console.print(f"[yellow]note[/yellow]  {plain(note)}")


def show_checks(checks: list[Check]) -> None:
    """The doctor's screen."""
    table = Table(title="Is this machine fit for mcis?", title_justify="left")
    for column in ("part", "state", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(plain(check.part), _STATES[check.state], plain(check.finding), plain(check.remedy))
    console.print(table)


def show_index(
    index: pa.Table, rejects: pa.Table, classes: tuple[str, ...], notes: Sequence[str], console: Console = console
) -> None:
    """An index in figures: images by domain and split, by class, rejects by kind of reason, copies; notes last."""
    facts = index_facts(index, rejects, classes)
    console.print(_images_table(facts))
    console.print(_classes_table(facts, classes))
    if facts.reject_kinds:
        table = _counts("Rejects", "kind of reason", ["images"])
        for reason, images in facts.reject_kinds.items():
            table.add_row(plain(reason), str(images))
        console.print(table)
    console.print(f"rejected: {len(rejects)}")
    console.print(f"copies of an earlier image: {facts.repeats}")
    console.print(f"contents in more than one split: {facts.across}")
    console.print(f"contents whose copies have different tags: {facts.disagreeing}")
    for note in (*notes, *concerns(facts, classes)):
        console.print(f"[yellow]note[/yellow]  {plain(note)}")


def _images_table(facts: IndexFacts) -> Table:
    domains = list(dict.fromkeys(group.domain for group in facts.groups))
    splits = list(dict.fromkeys(group.split for group in facts.groups))
    table = _counts("Images", "domain", [*splits, "all"])
    for domain in domains:
        by_split = [int(facts.images[facts.columns(domain=domain, split=split)].sum()) for split in splits]
        table.add_row(plain(domain), *map(str, (*by_split, sum(by_split))))
    by_split = [int(facts.images[facts.columns(split=split)].sum()) for split in splits]
    table.add_row("all", *map(str, (*by_split, sum(by_split))), style="bold")
    return table


def _classes_table(facts: IndexFacts, classes: tuple[str, ...]) -> Table:
    several = len(facts.groups) > 1
    table = _counts("Images per class", "class", [*(facts.names() if several else []), "all"])
    for name, images in zip((*classes, "without a tag"), (*facts.per_class, facts.untagged), strict=True):
        table.add_row(plain(name), *map(str, (*(images if several else []), images.sum())))
    return table


def show_disagreements(index: pa.Table, classes: tuple[str, ...], console: Console = console) -> None:
    """Images whose tags are not the classes in their ground-truth masks."""
    from mcis.datasets.images.masks import compare_tags

    masked = index.filter(index["mask_uri"].is_valid())
    disagreements = compare_tags(masked, len(classes))
    console.print(f"tags that disagree with the mask: {len(disagreements)} of {len(masked)} images with a mask")
    if disagreements:
        table = Table(title="Tags against masks", title_justify="left")
        for column in ("image", "tags", "in the mask"):
            table.add_column(column, overflow="fold")
        for image in disagreements[:_MOST_DISAGREEMENTS]:
            table.add_row(plain(image.image_id), *(plain(", ".join(classes[k] for k in t)) for t in image[1:]))
        console.print(table)
        if len(disagreements) > _MOST_DISAGREEMENTS:
            console.print(f"and {len(disagreements) - _MOST_DISAGREEMENTS} more")


def _counts(title: str, what: str, columns: Sequence[str]) -> Table:
    """An empty table of numbers with a name per row."""
    table = Table(title=title, title_justify="left")
    table.add_column(what, overflow="fold")
    for column in columns:
        table.add_column(plain(column), justify="right")
    return table


def plain(text: str) -> str:
    """Text from outside as one line: no markup, no control characters that would move the cursor."""
    return escape("".join(c if c.isprintable() else " " for c in text))

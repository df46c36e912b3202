"""What all exports write with: tables of a run, names that stay below a folder, CSV, pictures some at once."""

import contextlib
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from mcis.datasets.classes import palette
from mcis.datasets.errors import UserError
from mcis.datasets.index import shown
from mcis.datasets.sources.lists import relative_name
from mcis.datasets.storage.threads import map_in_threads
from mcis.platform.runs.files import read_table, shards_in, written_aside
from mcis.platform.runs.progress import counted
from mcis.platform.runs.workspace import Workspace

_AT_ONCE = 4
"""Threads that write pictures."""


def table_of(workspace: Workspace, name: str, stage: str, table: str) -> Path:
    """The folder of a table that a stage of a run has left; UserError where the run has not come so far."""
    reached = workspace.outputs(name)
    if stage not in reached:
        raise UserError(
            f"run {name!r} has no {table}: it has come to {shown(list(reached))}",
            f"a run that has passed the stage {stage}",
            f"repeat the run's command with --until {stage}, or without --until",
        )
    return reached[stage] / table


def rows_of(table: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a table, of which a shard at a time is in memory."""
    for file in shards_in(table):
        yield from read_table(file, columns).to_pylist()


def names_of(image_ids: Iterable[str], out: Path, what: str = "image id(s)") -> dict[str, str]:
    """A relative path for each image id, which may be an absolute path or a URI, to name files below a folder.

    Args:
        what: they are, where they are no image ids, for messages.

    Raises:
        UserError: an id would lead out of `out`, two lead to the same file, one leads below another's file, or one
            cannot stand in a list of lines.
    """
    names = {image_id: relative_name(image_id) for image_id in image_ids}
    inside = {image_id: name for image_id, name in names.items() if name is not None}
    first: dict[str, str] = {}
    same = [image_id for image_id, name in inside.items() if first.setdefault(name.casefold(), image_id) != image_id]
    pictures = {f"{name.casefold()}{suffix}" for name in inside.values() for suffix in (".png", ".jpg")}
    below = [i for i, name in inside.items() if any(str(p) in pictures for p in PurePosixPath(name.casefold()).parents)]
    for problem, ids in (
        (f"lead out of {out}", [image_id for image_id, name in names.items() if name is None]),
        ("lead to the file of another", same),
        ("lead below the file of another", below),
        ("end in spaces or hold line breaks", [i for i, n in inside.items() if n != n.strip() or not n.isprintable()]),
    ):
        if ids:
            found = f"{what} that {problem}: {', '.join(map(repr, ids[:5]))}"
            raise UserError(found, "a file of its own for each", "correct the names in the data set")
    return inside


def write_all(rows: Iterable[Any], write: Callable[[Any], int], *, label: str, total: int) -> int:
    """Writes the pictures of all rows, some at once; returns how many `write` says it wrote.

    Rows are taken as they are written, so that few of them are in memory.
    """
    with contextlib.closing(map_in_threads(write, rows, threads=_AT_ONCE)) as counts:
        return sum(counted(counts, label, total))


def labels_table(classes: Sequence[str]) -> bytes:
    """label,class,red,green,blue: background is 0, class index k is k + 1, 255 is ignored."""
    colors, names = palette(), [(0, "background"), *enumerate(classes, 1), (255, "ignore")]
    rows = ([label, name, *colors[label].tolist()] for label, name in names)
    return csv_table(["label", "class", "red", "green", "blue"], rows)


def csv_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """A table as CSV in UTF-8."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    lines.writerows(rows)
    return text.getvalue().encode()


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    with written_aside(path, durable=False) as aside:
        aside.write_bytes(content)

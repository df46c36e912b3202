"""What all exports write with: tables of a run, names that stay below a folder, CSV, pictures some at once."""

import contextlib
import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from mcis.datasets.classes import palette
from mcis.datasets.errors import UserError
from mcis.datasets.index import shown
from mcis.datasets.sources.lists import name_below
from mcis.datasets.storage.threads import in_threads
from mcis.platform.runs.files import written_aside
from mcis.platform.runs.progress import bar
from mcis.platform.runs.workspace import Workspace

_AT_ONCE = 4
"""Threads that write pictures."""


def table_of(workspace: Workspace, name: str, stage: str, table: str) -> Path:
    """The folder of a table that a stage of a run has left.

    Raises:
        UserError: the run has not come so far.
    """
    reached = workspace.outputs(name)
    if stage not in reached:
        raise UserError(
            f"run {name!r} has no {table}: it has come to {shown(list(reached))}",
            f"a run that has passed the stage {stage}",
            f"repeat the run's command with --until {stage}, or without --until",
        )
    return reached[stage] / table


def names_of(image_ids: Iterable[str], out: Path) -> dict[str, str]:
    """A relative path for each image id, which may be an absolute path or a URI, to name files below a folder.

    Raises:
        UserError: an id would lead out of `out`, two lead to the same file, one leads below another's file, or one
            cannot stand in a list of lines.
    """
    names = {image_id: name_below(image_id) for image_id in image_ids}
    inside = {image_id: name for image_id, name in names.items() if name is not None}
    if len(inside) < len(names):
        outside = shown([image_id for image_id, name in names.items() if name is None])
        raise UserError(f"image id(s) that lead out of {out}: {outside}", "relative names", _REMEDY)
    first: dict[str, str] = {}
    same = [image_id for image_id, name in inside.items() if first.setdefault(name.casefold(), image_id) != image_id]
    if same:
        raise UserError(f"image id(s) that lead to the file of another: {shown(same)}", "ids apart", _REMEDY)
    pictures = {f"{name.casefold()}{suffix}": image_id for image_id, name in inside.items() for suffix in _SUFFIXES}
    below = [i for i, name in inside.items() if any(str(p) in pictures for p in PurePosixPath(name.casefold()).parents)]
    if below:
        raise UserError(f"image id(s) that lead below the file of another: {shown(below)}", "ids apart", _REMEDY)
    broken = [image_id for image_id, name in inside.items() if name != name.strip() or not name.isprintable()]
    if broken:
        raise UserError(
            f"image id(s) that end in spaces or hold line breaks: {', '.join(map(repr, broken[:5]))}", "lines", _REMEDY
        )
    return inside


_REMEDY = "correct the ids of the data set"
_SUFFIXES = (".png", ".jpg")
"""Of the files that exports name after an image."""


def write_all(rows: Iterable[Any], write: Callable[[Any], int], *, label: str, total: int) -> int:
    """Writes the pictures of all rows, some at once; returns how many `write` says it wrote.

    Rows are taken as they are written, so that few of them are in memory.
    """
    written = 0
    with (
        bar(label, total, "images") as progress,
        contextlib.closing(in_threads(write, rows, threads=_AT_ONCE)) as counts,
    ):
        for done, count in enumerate(counts, 1):
            written += count
            progress.update(done)
    return written


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

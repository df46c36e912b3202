"""A finished index, as later stages and commands read it: its rows by split, its rejects, its classes."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.images.masks import read_truth
from mcis.datasets.index import INDEX_SCHEMA
from mcis.datasets.storage.folders import path_exists
from mcis.datasets.tables.large_tables import take_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_parts, read_table
from mcis.platform.runs.results import IndexResult, read_result
from mcis.platform.runs.workspace import SUMMARY, Workspace


class OpenedIndex(NamedTuple):
    """A finished index: its tables, K class names, and notes for the user."""

    index: pa.Table
    rejects: pa.Table
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def open_index(workspace: Workspace, name: str, columns: list[str] | None = None) -> OpenedIndex:
    """Opens the index of a run.

    Args:
        columns: of its rows that are wanted; None = all.

    Raises:
        UserError: the run has none.
    """
    folder = workspace.outputs(name).get("index")
    if folder is None or not path_exists(folder / SUMMARY):
        raise UserError(f"no run {name!r} with an index in {workspace.root}", "a run with one", "see `mcis runs`")
    result = read_result(folder, IndexResult)
    index = read_table(folder / "index.parquet", columns)
    return OpenedIndex(index, read_table(folder / "rejects.parquet"), result.classes, result.notes)


def split_rows(
    of: RunContext | Path,
    split: str,
    *,
    tagged: bool = False,
    columns: list[str] | None = None,
    only: NDArray[np.int64] | None = None,
) -> pa.Table:
    """Rows of an index of one split, in order; with `tagged`, those with at least one tag.

    Args:
        of: a run that has the index, or the index's file.
        columns: that are wanted; None = all. Of millions of images they take most of a stage's memory.
        only: which of these rows are wanted, counted from 0, and in which order; None = all.
    """
    file = of if isinstance(of, Path) else of.inputs["index"] / "index.parquet"
    wanted = INDEX_SCHEMA.names if columns is None else columns
    read = list(dict.fromkeys([*wanted, "split", "tags"]))
    parts, first = [pa.schema([INDEX_SCHEMA.field(name) for name in wanted]).empty_table()], 0
    for part in read_parts(file, read):
        rows = of_split(part, split, tagged=tagged).select(wanted).cast(parts[0].schema)
        inside = None if only is None else np.sort(only[(only >= first) & (only < first + len(rows))]) - first
        parts.append(rows if inside is None else take_rows(rows, inside))
        first += len(rows)
    found = pa.concat_tables(parts)
    return found if only is None else found.take(pa.array(np.argsort(np.argsort(only))))


def of_source(rows: pa.Table) -> NDArray[np.bool_]:
    """Which rows of an index are of the domain source, (N,)."""
    return np.asarray(pc.equal(rows["domain"], "source").to_numpy(), bool)


def of_split(images: pa.Table, split: str, *, tagged: bool = False) -> pa.Table:
    """Rows of an index or a listing of one split, in order; with `tagged`, those with at least one tag."""
    rows = images.filter(pc.equal(images["split"], split))
    return rows.filter(pc.greater(pc.list_value_length(rows["tags"]), 0)) if tagged else rows


def truth_of_row(row: dict[str, Any], classes: int) -> NDArray[np.uint8]:
    """The ground-truth mask of a row of the index, (H, W), labels 0..K and 255, or of a listing, whose sizes are not
    known; errors as of `read_truth`."""
    return read_truth(row["mask_uri"], (row["height"], row["width"]) if "height" in row else None, classes)

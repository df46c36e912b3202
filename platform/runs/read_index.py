"""A finished index, as later stages and commands read it: its rows by split, its rejects, its classes."""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.copies import is_there
from mcis.datasets.errors import UserError
from mcis.datasets.masks import read_truth
from mcis.datasets.pairs import KINDS, PairSampler
from mcis.datasets.tags import Tags
from mcis.platform.runs.arguments import errors_name_keys
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.results import IndexResult, read_result
from mcis.platform.runs.workspace import SUMMARY, Workspace, read_table


class OpenedIndex(NamedTuple):
    """A finished index: its tables, K class names, and notes for the user."""

    index: pa.Table
    rejects: pa.Table
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def open_index(workspace: Workspace, name: str) -> OpenedIndex:
    """Opens the index of a run.

    Raises:
        UserError: the run has none.
    """
    folder = workspace.outputs(name).get("index")
    if folder is None or not is_there(folder / SUMMARY):
        raise UserError(
            f"run {name!r} has no index in {workspace.root}", "a run whose index is finished", "see `mcis index --help`"
        )
    result = read_result(folder, IndexResult)
    index, rejects = (read_table(folder / f"{table}.parquet") for table in ("index", "rejects"))
    return OpenedIndex(index, rejects, result.classes, result.notes)


def split_rows(context: RunContext, split: str, *, tagged: bool = False) -> pa.Table:
    """Rows of the index of one split, in order; with `tagged`, those with at least one tag."""
    index = read_table(context.inputs["index"] / "index.parquet")
    return of_split(index, split, tagged=tagged)


def of_split(images: pa.Table, split: str, *, tagged: bool = False) -> pa.Table:
    """Rows of an index or a listing of one split, in order; with `tagged`, those with at least one tag."""
    rows = images.filter(pc.equal(images["split"], split))
    return rows.filter(pc.greater(pc.list_value_length(rows["tags"]), 0)) if tagged else rows


def truth_of_row(row: dict[str, Any], classes: int) -> NDArray[np.uint8]:
    """The ground-truth mask of a row of the index, (H, W), labels 0..K and 255.

    Raises:
        UserError: it is missing, unreadable, of another size than its image, or has a label above K = `classes`.
    """
    with errors_name_keys({"classes": "data.classes"}):
        return read_truth(row["mask_uri"], (row["height"], row["width"]), classes)


def pair_kind_shares(opened: OpenedIndex) -> dict[str, float] | None:
    """Fraction of each kind of pair in the first epoch, in the natural mix; None without single-label images."""
    rows = of_split(opened.index, "train")
    source = np.array(rows["domain"].to_pylist()) == "source"
    tags = Tags.of_index(rows["tags"], len(opened.classes))
    if not source.any() or not tags.tagged:
        return None
    drawn = PairSampler(tags, seed=0, source=source).kind_counts(0).drawn
    return dict(zip(KINDS, (drawn / drawn.sum()).tolist(), strict=True))

"""Reads a finished index for later stages and commands: its rows by split, its rejects and its classes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.images.masks import read_truth
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.index import INDEX_SCHEMA
from mcis.datasets.storage.folders import path_exists
from mcis.datasets.tables.large_tables import take_rows
from mcis.datasets.tags import has_other_tags
from mcis.platform.config.sections import Config
from mcis.platform.outputs.provenance import read_provenance
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_parts, read_table
from mcis.platform.runs.results import IndexResult, read_result
from mcis.platform.runs.workspace import SUMMARY, Workspace


class OpenedIndex(NamedTuple):
    """A finished index.

    Attributes:
        index: Rows of the images (`INDEX_SCHEMA`).
        rejects: Rows of the rejected images (`REJECTS_SCHEMA`).
        classes: The K class names.
        notes: Sentences that the user should read.
        value_range: `data.value_range`, with which its images are read.
        provenance: Where images come from (`PROVENANCE_SCHEMA`), as far as it is known.
    """

    index: pa.Table
    rejects: pa.Table
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    value_range: ValueRange | None
    provenance: pa.Table


def open_index(workspace: Workspace, name: str, columns: list[str] | None = None) -> OpenedIndex:
    """Opens the index of a run.

    Args:
        name: The run.
        columns: The columns of `index` to read. None: all.

    Raises:
        UserError: The run has no index.
    """
    folder = workspace.outputs(name).get("index")
    if folder is None or not path_exists(folder / SUMMARY):
        raise UserError(
            f"no run {name!r} with an index in {workspace.root}", "a run with an index", "list the runs by `mcis runs`"
        )
    result = read_result(folder, IndexResult)
    index = pa.concat_tables(read_parts(folder / "index.parquet", columns or INDEX_SCHEMA.names))
    rejects = read_table(folder / "rejects.parquet")
    provenance = read_provenance(folder)
    return OpenedIndex(index, rejects, result.classes, result.notes, result.value_range, provenance)


def split_rows(
    source: RunContext | Path,
    split: str,
    *,
    tagged: bool = False,
    negatives: bool = False,
    columns: list[str] | None = None,
    only: NDArray[np.int64] | None = None,
) -> pa.Table:
    """Reads the rows of one split from an index.

    Args:
        source: The context of a run that has the index, or the file of the index.
        split: The split.
        tagged, negatives: See `rows_in_split`.
        columns: The columns to return. None: all. With millions of images, they are most of a stage's memory.
        only: Positions, among the rows of the split, of the rows to return, in this order. None: all rows, in the order
            of the index.
    """
    file = source if isinstance(source, Path) else source.stage_outputs["index"] / "index.parquet"
    columns = INDEX_SCHEMA.names if columns is None else columns
    schema = pa.schema([INDEX_SCHEMA.field(name) for name in columns])
    columns_to_read = list(dict.fromkeys([*columns, "split", "tags", "is_negative"]))

    parts = [schema.empty_table()]
    first = 0
    for part in read_parts(file, columns_to_read):
        rows = rows_in_split(part, split, tagged=tagged, negatives=negatives).select(columns).cast(schema)
        last = first + len(rows)
        if only is None:
            parts.append(rows)
        else:
            positions = np.sort(only[(only >= first) & (only < last)]) - first
            parts.append(take_rows(rows, positions))
        first = last

    rows = pa.concat_tables(parts)
    if only is None:
        return rows

    # The rows are sorted by position; restore the order of `only`.
    order = np.argsort(only)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return rows.take(pa.array(ranks))


def read_image_ids(source: RunContext | Path) -> Iterator[str]:
    """Yields the ids of all listed images, of any split: those of the index, then those that it rejected.

    Args:
        source: The context of a run that has the index, or the file of the index.
    """
    file = source if isinstance(source, Path) else source.stage_outputs["index"] / "index.parquet"
    for part in read_parts(file, ["image_id"]):
        yield from part["image_id"].to_pylist()
    yield from read_table(file.with_name("rejects.parquet"), ["image_id"])["image_id"].to_pylist()


def ids_with_other_tags(first: Path, second: Path) -> pa.ChunkedArray:
    """Returns the ids of the images that are in two indexes with different tags.

    Columns are compared as a whole, because there may be millions of images.

    Args:
        first, second: The files of the indexes, whose rows are in the order of their ids.
    """
    columns = ["image_id", "tags"]
    first_rows = pa.concat_tables(read_parts(first, columns))
    second_rows = pa.concat_tables(read_parts(second, columns))

    first_ids = first_rows["image_id"]
    first_rows = first_rows.filter(pc.is_in(first_ids, second_rows["image_id"]))
    second_rows = second_rows.filter(pc.is_in(second_rows["image_id"], first_ids))
    return first_rows["image_id"].filter(pa.array(has_other_tags(first_rows["tags"], second_rows["tags"])))


def tagged_among_negatives(source: RunContext | Path) -> NDArray[np.bool_]:
    """Returns which images, among the tagged training images and the negatives of an index, are tagged, (N,)."""
    rows = split_rows(source, "train", tagged=True, negatives=True, columns=["is_negative"])
    return np.asarray(pc.invert(rows["is_negative"]).to_numpy(), bool)


def from_source_domain(rows: pa.Table) -> NDArray[np.bool_]:
    """Returns which rows of an index are images of the source domain, (N,)."""
    return np.asarray(pc.equal(rows["domain"], "source").to_numpy(), bool)


def from_other_domains(rows: pa.Table) -> NDArray[np.bool_]:
    """Returns which rows of an index are single-label or web images, (N,)."""
    return np.asarray(pc.not_equal(rows["domain"], "target").to_numpy(), bool)


def rows_in_split(images: pa.Table, split: str, *, tagged: bool = False, negatives: bool = False) -> pa.Table:
    """Returns the rows of one split of an index or a listing, in their order.

    Args:
        tagged: Whether to return only images with at least one tag.
        negatives: With `tagged`: whether to return negatives too, which show none of the classes.
    """
    rows = images.filter(pc.equal(images["split"], split))
    if not tagged:
        return rows
    is_returned = pc.greater(pc.list_value_length(rows["tags"]), 0)
    if negatives:
        is_returned = pc.or_(is_returned, rows["is_negative"])
    return rows.filter(is_returned)


def predicted_split(config: Config, *, has_val: bool) -> str:
    """Returns `predict.split`; for `auto`, val if it has images, else train.

    Args:
        has_val: Whether split val has images.
    """
    if config.predict.split != "auto":
        return config.predict.split
    return "val" if has_val else "train"


def truth_of_row(row: dict[str, Any], classes: int) -> NDArray[np.uint8]:
    """Reads the ground-truth mask of an image, (H, W), labels 0..K and 255. Without a mask, all is background.

    Args:
        row: A row of the index, with a mask unless the image is a negative; or a row of a listing, with a mask. A
            listing lacks the size of the image, so that it is not checked.
        classes: K.

    Raises:
        UserError: See `read_truth`.
    """
    if row["mask_uri"] is None:
        return np.zeros((row["height"], row["width"]), np.uint8)
    shape = (row["height"], row["width"]) if "height" in row else None
    return read_truth(row["mask_uri"], shape, classes)

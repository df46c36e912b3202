"""Verdicts on image files, kept by all runs of a workspace: an unchanged file is opened and hashed once.

A file counts as unchanged while its size and the time of its last change stay the same. Verdicts do not depend on the
least side and the most pixels that a run asks for.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import BadFile
from mcis.datasets.index import VERDICT_FIELDS
from mcis.datasets.storage.files import stamps_of_column
from mcis.datasets.storage.folders import is_there
from mcis.datasets.tables.large_tables import hashes, in_shards, take
from mcis.platform.runs.files import OpenedTable, write_batches
from mcis.platform.runs.progress import console
from mcis.platform.runs.workspace import Workspace

VERDICT_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False, metadata={"about": "bytes"}),
        pa.field("changed", pa.int64(), nullable=False, metadata={"about": "time of the last change, ns"}),
        *VERDICT_FIELDS,
    ]
)
FILE_COLUMNS = ["uri", "size", "changed"]
"""What a file is known by."""


def image_files(uris: pa.ChunkedArray) -> pa.Table:
    """The files at some URIs, as they are now: FILE_COLUMNS; size and time are -1 where a file does not exist."""
    return stamps_of_column(uris).add_column(0, VERDICT_SCHEMA.field("uri"), uris)


class KeptVerdicts:
    """The verdicts that all runs of a workspace have kept; none where the table is damaged (`BadFile`).

    Of the files themselves it holds 32 bytes each, whatever their URIs, and reads the verdicts on some of them when it
    is asked for these.
    """

    def __init__(self, workspace: Workspace):
        self._table: OpenedTable | None = None
        prints = [np.empty((0, 3), np.int64)]
        with contextlib.suppress(BadFile):
            if is_there(workspace.verdicts):
                self._table = OpenedTable(workspace.verdicts)
                prints = [*prints, *map(_prints, self._table.batches(FILE_COLUMNS))]
        of_rows = np.concatenate(prints)
        self._row = np.argsort(of_rows[:, 0])
        self._prints = of_rows[self._row]
        self._uris = np.ascontiguousarray(self._prints[:, 0])

    def __len__(self) -> int:
        return len(self._row)

    def find(self, files: pa.Table) -> NDArray[np.int64]:
        """The row of the verdict on each file, (N,); -1 for a file that has none, or had another size or time then."""
        found = [self._find(_prints(part)) for part in in_shards([files])]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _find(self, prints: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(self):
            return np.full(len(prints), -1)
        at = np.minimum(np.searchsorted(self._uris, prints[:, 0]), len(self) - 1)
        return np.where((self._prints[at] == prints).all(axis=1), self._row[at], -1)

    def verdicts(self) -> pa.Table:
        """All of them, in the order of their rows: VERDICT_FIELDS."""
        parts = self._table.batches(VERDICT_FIELDS.names) if self._table and len(self) else ()
        return pa.concat_tables([VERDICT_FIELDS.empty_table(), *(part.cast(VERDICT_FIELDS) for part in parts)])


def _prints(files: pa.Table) -> NDArray[np.int64]:
    """What tells files apart, in this process alone: 64 bits of the URI's hash, size and time, (N, 3)."""
    return np.stack([hashes(files["uri"]), files["size"].to_numpy(), files["changed"].to_numpy()], axis=1)


def keep_verdicts(workspace: Workspace, verdicts: pa.Table) -> None:
    """Adds verdicts (VERDICT_SCHEMA) to those of the workspace; they replace what is kept of the same files.

    Kept is what follows from a file's content alone. Files that could not even be read are not kept, and neither are
    those above a limit, as another index may have another one. A file that is there several times is kept once.

    Raises:
        UserError: the disk is full or does not answer; what was kept stays.
    """
    replaced, first = np.unique(hashes(verdicts["uri"]), return_index=True)
    lasting = take(verdicts, np.sort(first)).cast(VERDICT_SCHEMA)
    lasting = lasting.filter(
        pc.and_(
            pc.not_equal(lasting["content_hash"], ""),
            pc.invert(pc.starts_with(lasting["reason"], "too large: ").fill_null(False)),
        )
    )

    def all_parts() -> Iterator[pa.Table]:
        if is_there(workspace.verdicts):
            for part in OpenedTable(workspace.verdicts).batches(VERDICT_SCHEMA.names):
                yield part.filter(pa.array(~np.isin(hashes(part["uri"]), replaced))).cast(VERDICT_SCHEMA)
        yield lasting

    with workspace.lock("cache", "verdicts"):
        try:
            write_batches(workspace.verdicts, VERDICT_SCHEMA, all_parts())
        except BadFile as error:
            console.print(f"note: {error.found}: what it held is dropped, its images are opened again", markup=False)
            write_batches(workspace.verdicts, VERDICT_SCHEMA, [lasting])

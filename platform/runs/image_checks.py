"""Verdicts on image files, kept by all runs of a workspace: an unchanged file is opened and hashed once.

A file counts as unchanged while its size and the time of its last change stay the same. Verdicts do not depend on the
least side and the most pixels that a run asks for.
"""

import contextlib
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import BadFile
from mcis.datasets.index import VERDICT_FIELDS
from mcis.datasets.storage.files import stamps_of_column
from mcis.datasets.tables.large_tables import hashes, in_shards
from mcis.platform.runs.files import read_parts, shards_in, write_batches
from mcis.platform.runs.workspace import Workspace

VERDICT_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False, metadata={"about": "bytes"}),
        pa.field("changed", pa.int64(), nullable=False, metadata={"about": "time of the last change, ns"}),
        *VERDICT_FIELDS,
    ]
)


def image_files(uris: pa.ChunkedArray) -> pa.Table:
    """The files at some URIs, as they are now: uri, size, changed; the last two are -1 where a file does not exist."""
    return stamps_of_column(uris).add_column(0, VERDICT_SCHEMA.field("uri"), uris)


class KeptVerdicts:
    """The verdicts that all runs of a workspace have kept, but for those of damaged tables (`BadFile`).

    Of the files themselves it holds 32 bytes each, whatever their URIs.

    Attributes:
        verdicts: VERDICT_FIELDS, by the rows that `find` says.
    """

    def __init__(self, workspace: Workspace):
        prints, verdicts = [np.empty((0, 3), np.int64)], [VERDICT_FIELDS.empty_table()]
        for table in shards_in(workspace.verdicts):
            with contextlib.suppress(BadFile):
                for part in read_parts(table, VERDICT_SCHEMA.names):
                    prints.append(_prints(part))
                    verdicts.append(part.select(VERDICT_FIELDS.names).cast(VERDICT_FIELDS))
        of_rows, self.verdicts = np.concatenate(prints), pa.concat_tables(verdicts)
        self._row = np.argsort(of_rows[:, 0], kind="stable")  # of a file that has several, the last one comes last
        self._prints = of_rows[self._row]
        self._uris = np.ascontiguousarray(self._prints[:, 0])

    def find(self, files: pa.Table) -> NDArray[np.int64]:
        """The row of the verdict on each file, (N,); -1 for a file that has none, or had another size or time then."""
        found = [self._find(_prints(part)) for part in in_shards([files])]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _find(self, prints: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(self._row):
            return np.full(len(prints), -1)
        at = np.maximum(np.searchsorted(self._uris, prints[:, 0], side="right") - 1, 0)
        return np.where((self._prints[at] == prints).all(axis=1), self._row[at], -1)


def _prints(files: pa.Table) -> NDArray[np.int64]:
    """What tells files apart, in this process alone: 64 bits of the URI's hash, size and time, (N, 3)."""
    return np.stack([hashes(files["uri"]), files["size"].to_numpy(), files["changed"].to_numpy()], axis=1)


def keep_verdicts(workspace: Workspace, verdicts: pa.Table) -> None:
    """Adds verdicts (VERDICT_SCHEMA) to those of the workspace, in a table of their own.

    Kept is what follows from a file's content alone. Files that could not even be read are not kept, and neither are
    those above a limit, as another index may have another one.

    Raises:
        UserError: the disk is full or does not answer; what was kept stays.
    """
    too_large = pc.starts_with(verdicts["reason"], "too large: ").fill_null(False)
    lasting = verdicts.filter(pc.and_(pc.not_equal(verdicts["content_hash"], ""), pc.invert(too_large)))
    write_batches(workspace.verdicts / f"part-{time.time_ns()}.parquet", VERDICT_SCHEMA, [lasting.cast(VERDICT_SCHEMA)])

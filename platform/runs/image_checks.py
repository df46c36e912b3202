"""Results of image checks, shared by all runs of a workspace, so that an unchanged file is opened and hashed once.

A file counts as unchanged while its size and modification time stay the same. The stored results (verdicts) do not
depend on a run's limits for side lengths and pixels.
"""

import contextlib
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import BadFile
from mcis.datasets.index import CHECK_SCHEMA
from mcis.datasets.storage.files import stamps_of_column
from mcis.datasets.tables.large_tables import in_shards, text_hashes
from mcis.platform.runs.files import read_parts, shards_in, write_batches
from mcis.platform.runs.workspace import Workspace

VERDICT_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False, metadata={"about": "bytes"}),
        pa.field("changed", pa.int64(), nullable=False, metadata={"about": "time of the last change, ns"}),
        *CHECK_SCHEMA,
    ]
)


def image_files(uris: pa.ChunkedArray) -> pa.Table:
    """Current size and modification time of files: columns uri, size, changed; -1 for files that do not exist."""
    return stamps_of_column(uris).add_column(0, VERDICT_SCHEMA.field("uri"), uris)


class StoredVerdicts:
    """All verdicts stored in a workspace. Damaged tables (`BadFile`) are left out.

    The lookup takes 32 bytes per file, independent of the length of its URI.

    Attributes:
        verdicts: table of CHECK_SCHEMA; `find` returns its row numbers.
    """

    def __init__(self, workspace: Workspace):
        prints = [np.empty((0, 3), np.int64)]
        verdicts = [CHECK_SCHEMA.empty_table()]
        for table in shards_in(workspace.image_checks):
            with contextlib.suppress(BadFile):
                for part in read_parts(table, VERDICT_SCHEMA.names):
                    prints.append(_prints(part))
                    verdicts.append(part.select(CHECK_SCHEMA.names).cast(CHECK_SCHEMA))
        self.verdicts = pa.concat_tables(verdicts)
        all_prints = np.concatenate(prints)
        self._row = np.argsort(all_prints[:, 0], kind="stable")  # stable: the latest verdict on a file comes last
        self._prints = all_prints[self._row]
        self._uris = np.ascontiguousarray(self._prints[:, 0])

    def find(self, files: pa.Table) -> NDArray[np.int64]:
        """Row of the verdict on each file, (N,); -1 for a file that is new or has changed."""
        found = [self._find(_prints(part)) for part in in_shards([files])]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _find(self, prints: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(self._row):
            return np.full(len(prints), -1)
        at = np.maximum(np.searchsorted(self._uris, prints[:, 0], side="right") - 1, 0)
        return np.where((self._prints[at] == prints).all(axis=1), self._row[at], -1)


def _prints(files: pa.Table) -> NDArray[np.int64]:
    """Hash of the URI (64 bits), size and modification time of each file, (N, 3); valid in this process only."""
    return np.stack([text_hashes(files["uri"]), files["size"].to_numpy(), files["changed"].to_numpy()], axis=1)


def store_verdicts(workspace: Workspace, verdicts: pa.Table) -> None:
    """Stores verdicts (VERDICT_SCHEMA) in the workspace, in a new table.

    Only verdicts that follow from the content of a file are stored: not those on files that could not be read, and not
    those on files above a size limit, because another index may use another limit.

    Raises:
        UserError: the disk is full or does not respond; verdicts stored before remain.
    """
    too_large = pc.starts_with(verdicts["reason"], "too large: ").fill_null(False)
    lasting = verdicts.filter(pc.and_(pc.not_equal(verdicts["content_hash"], ""), pc.invert(too_large)))
    file = workspace.image_checks / f"part-{time.time_ns()}.parquet"
    write_batches(file, VERDICT_SCHEMA, [lasting.cast(VERDICT_SCHEMA)])

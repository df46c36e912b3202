"""Stores the results of image checks for all runs of a workspace, so that an unchanged file is opened only once.

A file counts as unchanged while its size and modification time stay the same. Stored results do not depend on the
limits of a run for side lengths and pixels.
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

STORED_CHECK_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False, metadata={"about": "bytes"}),
        pa.field("changed", pa.int64(), nullable=False, metadata={"about": "time of the last change, ns"}),
        *CHECK_SCHEMA,
    ]
)


def image_files(uris: pa.ChunkedArray) -> pa.Table:
    """Current size and modification time of files: columns uri, size, changed; -1 for files that do not exist."""
    return stamps_of_column(uris).add_column(0, STORED_CHECK_SCHEMA.field("uri"), uris)


class StoredChecks:
    """The results of all image checks stored in a workspace. Damaged tables (`BadFile`) are ignored.

    The lookup needs 40 bytes of memory per file, regardless of the length of its URI.

    Attributes:
        checks: Table of CHECK_SCHEMA; `find` returns its row numbers.
    """

    def __init__(self, workspace: Workspace):
        stamps = [np.empty((0, 3), np.int64)]
        checks = [CHECK_SCHEMA.empty_table()]
        for table in shards_in(workspace.image_checks):
            with contextlib.suppress(BadFile):
                for part in read_parts(table, STORED_CHECK_SCHEMA.names):
                    stamps.append(_hashed_stamps(part))
                    checks.append(part.select(CHECK_SCHEMA.names).cast(CHECK_SCHEMA))
        self.checks = pa.concat_tables(checks)
        all_stamps = np.concatenate(stamps)
        self._rows = np.argsort(all_stamps[:, 0], kind="stable")  # stable: the latest check of a file comes last
        self._stamps = all_stamps[self._rows]
        self._uri_hashes = np.ascontiguousarray(self._stamps[:, 0])

    def find(self, files: pa.Table) -> NDArray[np.int64]:
        """Row number of the check of each file, (N,); -1 for a file that is new or has changed.

        Args:
            files: Result of `image_files` for N files.
        """
        found = [self._find(_hashed_stamps(part)) for part in in_shards([files])]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _find(self, stamps: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(self._rows):
            return np.full(len(stamps), -1)
        positions = np.maximum(np.searchsorted(self._uri_hashes, stamps[:, 0], side="right") - 1, 0)
        is_same = (self._stamps[positions] == stamps).all(axis=1)
        return np.where(is_same, self._rows[positions], -1)


def _hashed_stamps(files: pa.Table) -> NDArray[np.int64]:
    """Hash of the URI (64 bits), size and modification time of each file, (N, 3); valid in this process only."""
    return np.stack([text_hashes(files["uri"]), files["size"].to_numpy(), files["changed"].to_numpy()], axis=1)


def store_checks(workspace: Workspace, checks: pa.Table) -> None:
    """Stores the results of image checks (STORED_CHECK_SCHEMA) in the workspace, in a new table.

    Only results that follow from the content of a file are stored. Those of files that could not be read are left out,
    and so are those of files above a limit of pixels, because another run may have another limit.

    Raises:
        UserError: The disk is full or does not respond; results stored before remain.
    """
    too_large = pc.starts_with(checks["reason"], "too large: ").fill_null(False)
    lasting = checks.filter(pc.and_(pc.not_equal(checks["content_hash"], ""), pc.invert(too_large)))
    file = workspace.image_checks / f"part-{time.time_ns()}.parquet"
    write_batches(file, STORED_CHECK_SCHEMA, [lasting.cast(STORED_CHECK_SCHEMA)])

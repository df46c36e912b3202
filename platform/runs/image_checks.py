"""Stores the results of image checks, the verdicts, for all runs of a workspace: an unchanged file is opened only once.

A file counts as unchanged while its size and modification time stay the same. Verdicts do not depend on the limits of a
run for side lengths and pixels.
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
    """All verdicts stored in a workspace. Damaged tables (`BadFile`) are ignored.

    The lookup needs 40 bytes of memory per file, regardless of the length of its URI.

    Attributes:
        verdicts: table of CHECK_SCHEMA; `find` returns its row numbers.
    """

    def __init__(self, workspace: Workspace):
        stamps = [np.empty((0, 3), np.int64)]
        verdicts = [CHECK_SCHEMA.empty_table()]
        for table in shards_in(workspace.image_checks):
            with contextlib.suppress(BadFile):
                for part in read_parts(table, VERDICT_SCHEMA.names):
                    stamps.append(_hashed_stamps(part))
                    verdicts.append(part.select(CHECK_SCHEMA.names).cast(CHECK_SCHEMA))
        self.verdicts = pa.concat_tables(verdicts)
        all_stamps = np.concatenate(stamps)
        self._rows = np.argsort(all_stamps[:, 0], kind="stable")  # stable: the latest verdict on a file comes last
        self._stamps = all_stamps[self._rows]
        self._uri_hashes = np.ascontiguousarray(self._stamps[:, 0])

    def find(self, files: pa.Table) -> NDArray[np.int64]:
        """Row number of the verdict on each file, (N,); -1 for a file that is new or has changed.

        Args:
            files: result of `image_files` for N files.
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


def store_verdicts(workspace: Workspace, verdicts: pa.Table) -> None:
    """Stores verdicts (VERDICT_SCHEMA) in the workspace, in a new table.

    Only verdicts that follow from the content of a file are stored. Verdicts on files that could not be read are not
    stored, and neither are verdicts on files above a limit of pixels, because another run may have another limit.

    Raises:
        UserError: the disk is full or does not respond; verdicts stored before remain.
    """
    too_large = pc.starts_with(verdicts["reason"], "too large: ").fill_null(False)
    lasting = verdicts.filter(pc.and_(pc.not_equal(verdicts["content_hash"], ""), pc.invert(too_large)))
    file = workspace.image_checks / f"part-{time.time_ns()}.parquet"
    write_batches(file, VERDICT_SCHEMA, [lasting.cast(VERDICT_SCHEMA)])

"""The processes of a mapping: they compute shards of a table and write them."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from mcis.datasets.errors import UserError
from mcis.platform.engine.errors import IMAGE_AT_FAULT, death_text, fewer_processes, memory_errors
from mcis.platform.engine.runtime import give_memory_back
from mcis.platform.runs.files import write_table

Worker = Callable[[pa.Table], pa.Table]
"""Maps rows to output rows."""
Reject = Callable[[pa.Table, str], pa.Table]
"""Makes the output row of an image that cannot be mapped, from its row and the cause."""
RETRIES = 2
"""How often Ray repeats the work of a process that died."""
RESUBMISSIONS = 3
"""How often a shard is submitted again after Ray gave it up because nodes were lost. A task may thus lose 12 nodes."""


class RowRange(NamedTuple):
    """Consecutive rows of a table, such as those of a shard.

    Attributes:
        first: The first row.
        num_rows: Number of rows.
    """

    first: int
    num_rows: int


class MappingWork(NamedTuple):
    """What is sent to each process of a mapping; see `map_table`."""

    worker: Worker | None
    make_worker: Callable[[], Worker] | None
    read: Worker | None
    folder: Path
    label: str
    memory_hint: str


class _ShardMapper:
    """Computes shards of a table in this process. It makes its worker with the first of them.

    Args:
        reference: See `map_shard`.
    """

    def __init__(self, reference: tuple[Any]):
        import ray

        work, self.table = ray.get(reference[0])
        self.work: MappingWork = work
        self.worker: Worker | None = None

    def rows(self, row_range: RowRange) -> pa.Table:
        """Returns some rows of the table."""
        import ray

        return ray.get(self.table).slice(row_range.first, row_range.num_rows).combine_chunks()

    def map_rows(self, rows: pa.Table) -> pa.Table:
        """Returns the output of some rows."""
        try:
            with memory_errors(self.work.label, self.work.memory_hint):
                if self.worker is None:
                    self.worker = self._make_worker()
                return self.worker(rows)
        finally:
            give_memory_back()

    def _make_worker(self) -> Worker:
        worker = self.work.make_worker() if self.work.make_worker else self.work.worker
        assert worker is not None
        if "torch" in sys.modules:  # there is a process for each core
            sys.modules["torch"].set_num_threads(1)
        return worker


_mapper = functools.lru_cache(maxsize=1)(_ShardMapper)
"""Returns the mapper of this process. It is cached, so that a network is loaded once, not for every shard."""


def map_shard(reference: tuple[Any], name: str, row_range: RowRange, rows: pa.Table | None = None) -> int:
    """Maps and writes a shard. Returns the number of its rows.

    Args:
        reference: A tuple of a reference to the work and to the reference of the table. Ray resolves references among
            arguments, but not in a tuple, so the processes of a node share the table.
        name: File of the shard.
        row_range: Its rows.
        rows: What `read_rows` returned for them, if it was called.
    """
    mapper = _mapper(reference)
    output = mapper.map_rows(mapper.rows(row_range) if rows is None else rows)
    write_table(mapper.work.folder / name, output)
    return row_range.num_rows


def map_rows(reference: tuple[Any], row_range: RowRange) -> pa.Table:
    """Maps some rows. Returns the output."""
    mapper = _mapper(reference)
    return mapper.map_rows(mapper.rows(row_range))


def read_rows(reference: tuple[Any], row_range: RowRange) -> pa.Table:
    """Reads what the worker needs for some rows, in a process without a worker. Returns the rows with it."""
    mapper = _mapper(reference)
    assert mapper.work.read is not None
    return mapper.work.read(mapper.rows(row_range))


class GpuProcess:
    """An actor, which keeps a share of a GPU and its worker."""

    def wait_until_started(self) -> None:
        """Returns as soon as the actor has its share of a GPU and runs."""

    def map_shard(self, reference: tuple[Any], name: str, row_range: RowRange, rows: pa.Table | None) -> int:
        """Maps and writes a shard. Returns the number of its rows."""
        return map_shard(reference, name, row_range, rows)


def death_error(work: MappingWork, name: str | None, death: Exception) -> UserError:
    """Returns the error of a process that died.

    Args:
        work: The mapping.
        name: The shard that it mapped. None: it did not start.
        death: An error of `death_types`.
    """
    subject = f"shard {name} cannot" if name else "no image can"
    return UserError(
        f"{work.label}: {subject} be mapped: {death_text(death)}, {1 + RETRIES} times or more",
        "processes that are not ended, and enough memory for all that run on a node",
        f"free some memory or {fewer_processes()}, and repeat the command, which continues with the missing shards; "
        f"{IMAGE_AT_FAULT}",
    )

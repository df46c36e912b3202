"""A mapping on CPUs: a Ray task for each shard, on all nodes of a cluster that grows and shrinks."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.errors import death_text, death_types, is_node_loss
from mcis.platform.engine.nodes import Bundle, mapping_task, tasks_to_submit
from mcis.platform.engine.runtime import placement
from mcis.platform.engine.shard_mapper import (
    RESUBMISSIONS,
    RETRIES,
    MappingWork,
    Reject,
    RowRange,
    death_error,
    map_rows,
    map_shard,
)
from mcis.platform.runs.files import write_table


class _Piece(NamedTuple):
    """What one task maps: a shard, or a row of a shard whose process died.

    Attributes:
        shard: Name of the shard.
        row_range: The rows.
        is_retried_row: Whether it is a row of a shard whose process died.
    """

    shard: str
    row_range: RowRange
    is_retried_row: bool = False


class CpuMapping:
    """The tasks of a mapping on CPUs, and the state of its shards.

    A shard whose processes died is mapped row by row, if `reject` is given, while other shards continue. One whose
    nodes were lost is submitted again, `RESUBMISSIONS` times.

    If the caller stops early, submitted tasks still finish. Ray would cancel a task by an interrupt, and a process that
    is interrupted while it imports pandas can never import it again, whatever task it gets next.

    Args:
        table: The table.
        reference: See `map_shard`.
        work: The mapping.
        shards: The missing shards by name.
        compute: The section `compute` of the configuration.
        reject: See `map_table`.

    Attributes:
        task: What a task reserves.
        waiting: What is not submitted yet.
        running: Future of a submitted task -> what it maps.
        unfinished: Number of shards that are not written.
        resubmissions: How often each piece was submitted again because its nodes were lost.
        row_outputs: Output of the rows of each shard whose process died, by row number.
    """

    def __init__(
        self,
        table: pa.Table,
        reference: tuple[Any],
        work: MappingWork,
        shards: dict[str, RowRange],
        compute: ComputeConfig,
        reject: Reject | None,
    ):
        import ray

        self.table = table
        self.reference = reference
        self.work = work
        self.shards = shards
        self.reject = reject
        self.task = mapping_task(compute)
        self.waiting = deque(_Piece(name, row_range) for name, row_range in shards.items())
        self.running: dict[Any, _Piece] = {}
        self.unfinished = len(shards)
        self.resubmissions: Counter[_Piece] = Counter()
        self.row_outputs: dict[str, dict[int, pa.Table]] = {}

        reserved = {"num_cpus": self.task["CPU"], "memory": self.task.get("memory")}
        options: Any = {**reserved, "max_retries": RETRIES, **placement()}
        self.shard_task: Any = ray.remote(**options)(map_shard)
        self.row_task: Any = ray.remote(**options)(map_rows)

    def submit(self, nodes: Sequence[Bundle]) -> None:
        """Submits as many tasks as the cluster, which has these nodes now, needs to be busy and to grow."""
        free = max(1, tasks_to_submit(nodes, self.task)) - len(self.running)
        for _ in range(min(free, len(self.waiting))):
            piece = self.waiting.popleft()
            if piece.is_retried_row:
                result = self.row_task.remote(self.reference, piece.row_range)
            else:
                result = self.shard_task.remote(self.reference, piece.shard, piece.row_range)
            self.running[result] = piece

    def collect(self, result: Any) -> int:
        """Handles the end of a task.

        Returns:
            The number of rows of the shard that is now written, or 0.

        Raises:
            UserError: A shard ended its processes, and its rows are not to be rejected; or it lost too many nodes.
        """
        import ray

        piece = self.running.pop(result)
        try:
            output = ray.get(result)
        except death_types() as death:
            if is_node_loss(death) and self.resubmissions[piece] < RESUBMISSIONS:
                self.resubmissions[piece] += 1
                self.waiting.appendleft(piece)
                return 0
            if self.reject is None or not isinstance(death, ray.exceptions.WorkerCrashedError):
                raise death_error(self.work, piece.shard, death) from None
            if not piece.is_retried_row:
                self._map_by_row(piece.shard)
                return 0
            row = self.table.slice(piece.row_range.first, 1)
            output = self.reject(row, f"{death_text(death)}, {1 + RETRIES} times")

        if piece.is_retried_row:
            return self._add_row(piece, output)
        self.unfinished -= 1
        return piece.row_range.num_rows

    def _map_by_row(self, name: str) -> None:
        """Divides a shard whose processes died into its rows, which are submitted next."""
        shard = self.shards[name]
        self.row_outputs[name] = {}
        for row in reversed(range(shard.first, shard.first + shard.num_rows)):
            self.waiting.appendleft(_Piece(name, RowRange(row, 1), is_retried_row=True))

    def _add_row(self, piece: _Piece, output: pa.Table) -> int:
        """Keeps the output of a row, and writes the shard if it was the last one. Returns what `collect` returns."""
        outputs = self.row_outputs[piece.shard]
        outputs[piece.row_range.first] = output
        if len(outputs) < self.shards[piece.shard].num_rows:
            return 0

        del self.row_outputs[piece.shard]
        write_table(self.work.folder / piece.shard, pa.concat_tables(outputs[row] for row in sorted(outputs)))
        self.unfinished -= 1
        return len(outputs)

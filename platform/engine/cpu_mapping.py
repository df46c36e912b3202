"""A mapping on CPUs: a Ray task for each shard, on all nodes of a cluster that grows and shrinks."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from mcis.platform.engine.errors import death_text, death_types
from mcis.platform.engine.nodes import Bundle, tasks_to_submit
from mcis.platform.engine.runtime import placement
from mcis.platform.engine.shard_mapper import RETRIES, MappingWork, Reject, ShardRows, death_error, map_rows, map_shard
from mcis.platform.runs.files import write_table


class _Piece(NamedTuple):
    """What one task maps: a shard, or a row of a shard whose process died.

    Attributes:
        shard: Name of the shard.
        rows: The rows.
        of_dead_shard: Whether it is a row of a shard whose process died.
    """

    shard: str
    rows: ShardRows
    of_dead_shard: bool = False


class CpuMapping:
    """The tasks of a mapping on CPUs, and the state of its shards.

    A shard whose processes died is mapped row by row, if `reject` is given, while other shards continue.

    If the caller stops early, submitted tasks still finish. Ray would cancel a task by an interrupt, and a process that
    is interrupted while it imports pandas can never import it again, whatever task it gets next.

    Args:
        table: The table.
        reference: See `map_shard`.
        work: The mapping.
        shards: The missing shards by name.
        reject: See `map_table`.

    Attributes:
        waiting: What is not submitted yet.
        running: Future of a submitted task -> what it maps.
        unfinished: Number of shards that are not written.
        rows: Output of the rows of each shard whose process died, by row number.
    """

    def __init__(
        self,
        table: pa.Table,
        reference: tuple[Any],
        work: MappingWork,
        shards: dict[str, ShardRows],
        reject: Reject | None,
    ):
        import ray

        self.table = table
        self.reference = reference
        self.work = work
        self.shards = shards
        self.reject = reject
        self.waiting = deque(_Piece(name, rows) for name, rows in shards.items())
        self.running: dict[Any, _Piece] = {}
        self.unfinished = len(shards)
        self.rows: dict[str, dict[int, pa.Table]] = {}

        options: Any = {"num_cpus": 1, "max_retries": RETRIES, **placement()}
        self.shard_task: Any = ray.remote(**options)(map_shard)
        self.row_task: Any = ray.remote(**options)(map_rows)

    def submit(self, nodes: Sequence[Bundle]) -> None:
        """Submits as many tasks as the cluster, which has these nodes now, needs to be busy and to grow."""
        free = max(1, tasks_to_submit(nodes)) - len(self.running)
        for _ in range(min(free, len(self.waiting))):
            piece = self.waiting.popleft()
            if piece.of_dead_shard:
                result = self.row_task.remote(self.reference, piece.rows)
            else:
                result = self.shard_task.remote(self.reference, piece.shard, piece.rows)
            self.running[result] = piece

    def collect(self, result: Any) -> int:
        """Handles the end of a task.

        Returns:
            The number of rows of the shard that is now written, or 0.

        Raises:
            UserError: A shard ended its processes, and its rows are not to be rejected.
        """
        import ray

        piece = self.running.pop(result)
        try:
            output = ray.get(result)
        except death_types() as death:
            if self.reject is None or not isinstance(death, ray.exceptions.WorkerCrashedError):
                raise death_error(self.work, piece.shard, death) from None
            if not piece.of_dead_shard:
                self._map_by_row(piece.shard)
                return 0
            row = self.table.slice(piece.rows.first, 1)
            output = self.reject(row, f"{death_text(death)}, {1 + RETRIES} times")

        if piece.of_dead_shard:
            return self._add_row(piece, output)
        self.unfinished -= 1
        return piece.rows.rows

    def _map_by_row(self, name: str) -> None:
        """Divides a shard whose processes died into its rows, which are submitted next."""
        shard = self.shards[name]
        self.rows[name] = {}
        for row in reversed(range(shard.first, shard.first + shard.rows)):
            self.waiting.appendleft(_Piece(name, ShardRows(row, 1), of_dead_shard=True))

    def _add_row(self, piece: _Piece, output: pa.Table) -> int:
        """Keeps the output of a row, and writes the shard if it was the last one. Returns what `collect` returns."""
        outputs = self.rows[piece.shard]
        outputs[piece.rows.first] = output
        if len(outputs) < self.shards[piece.shard].rows:
            return 0

        del self.rows[piece.shard]
        write_table(self.work.folder / piece.shard, pa.concat_tables(outputs[row] for row in sorted(outputs)))
        self.unfinished -= 1
        return len(outputs)

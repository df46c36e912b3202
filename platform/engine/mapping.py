"""The Ray Data edge: a table, cut into shards, through tasks or actors into a folder of Parquet shards.

Each shard is written aside and renamed by the task that computed it. After a kill only the missing shards are
computed, and the result is the same, since a shard's rows depend on its place in the table alone.
"""

import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from mcis.datasets.errors import UserError
from mcis.platform.engine.runtime import cpus
from mcis.platform.runs.progress import bar
from mcis.platform.runs.workspace import write_table

Worker = Callable[[pa.Table], pa.Table]
_ACCOUNT = pa.schema([("rows", pa.int64()), ("seconds", pa.float64()), ("problem", pa.list_(pa.string()))])


class MapResult(NamedTuple):
    """What a mapping did: rows of this call, and the seconds its tasks computed, added up."""

    rows: int
    busy: float


def shards_of(rows: int, shard_rows: int, suffix: str = "parquet") -> dict[str, tuple[int, int]]:
    """The shards of a table: name -> first row, number of rows."""
    counts = {first: min(shard_rows, rows - first) for first in range(0, rows, shard_rows)}
    return {f"part-{first:08d}-{first + count:08d}.{suffix}": (first, count) for first, count in counts.items()}


class _Shards:
    """Computes and writes shards of a table; what travels back is a line of account for each.

    A user's error travels as the line's `problem`, its three parts: Ray would hand on its text alone, in a traceback.

    Args:
        table: a reference to the whole table, which the processes of a node share.
    """

    def __init__(self, make: Callable[..., Worker], arguments: tuple[Any, ...], folder: Path, table: Any):
        self.make, self.arguments, self.folder, self.table = make, arguments, folder, table
        self.worker: Worker | None = None

    def __call__(self, plan: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([self._one(**row) for row in plan.to_pylist()], schema=_ACCOUNT)

    def _one(self, shard: str, first: int, rows: int) -> dict[str, Any]:
        import ray

        began, problem = time.monotonic(), None
        try:
            if self.worker is None:
                self.worker = self.make(*self.arguments)
                if "torch" in sys.modules:  # each process has a core
                    sys.modules["torch"].set_num_threads(1)
            part = ray.get(self.table).slice(first, rows).combine_chunks()
            write_table(self.folder / shard, self.worker(part))
        except UserError as error:
            problem = [error.found, error.expected, error.remedy]
        return {"rows": rows, "seconds": time.monotonic() - began, "problem": problem}


def map_table(
    table: pa.Table,
    make: Callable[..., Worker],
    arguments: tuple[Any, ...],
    folder: Path,
    *,
    label: str,
    shard_rows: int,
    gpu: bool = False,
    suffix: str = "parquet",
) -> MapResult:
    """Maps every shard of `table` and writes `folder/part-<first row>-<behind the last row>.<suffix>`.

    Finished shards are left as they are; shards of an earlier call that was cut by other `shard_rows` are removed.

    Args:
        make: makes the worker, a function from rows to output rows, from `arguments` (which travel by pickle).
            A process makes it once for all shards that it is given.
        gpu: on the cluster's GPUs, an actor each, as Ray ends a process after a task with one; those that another run
            holds join when they are free. Else in tasks on all CPUs.
        suffix: format of the shards, see `workspace.write_table`.

    Raises:
        UserError: what a worker raised as such.
    """
    import ray
    import ray.data
    from ray.data import ActorPoolStrategy, TaskPoolStrategy

    folder.mkdir(parents=True, exist_ok=True)
    wanted = shards_of(len(table), shard_rows, suffix)
    there = {file.name for file in folder.glob("part-*")}
    for name in there - wanted.keys():
        (folder / name).unlink()
    plan: list[dict[str, Any]] = [
        {"shard": name, "first": f, "rows": r} for name, (f, r) in wanted.items() if name not in there
    ]
    finished = len(table) - sum(row["rows"] for row in plan)
    done, busy = 0, 0.0
    with bar(label, len(table), "images") as progress:
        progress.update(finished)
        if plan:
            parts = (make, arguments, folder, ray.put(table))
            # A row of the plan is a shard, and each row a block: so a batch is a shard, whoever maps it.
            blocks = ray.data.from_arrow([pa.Table.from_pylist([row]) for row in plan])
            if gpu:
                most = max(1, min(len(plan), int(ray.cluster_resources().get("GPU", 0))))
                mapped = blocks.map_batches(
                    _Shards,
                    fn_constructor_args=parts,
                    batch_size=1,
                    batch_format="pyarrow",
                    compute=ActorPoolStrategy(min_size=1, max_size=most, initial_size=most),
                    num_gpus=1,
                )
            else:
                mapped = blocks.map_batches(
                    _run_task,  # type: ignore[arg-type]  # Ray's stubs know no fn_args
                    fn_args=(uuid.uuid4().hex, ray.put(parts)),
                    batch_size=1,
                    batch_format="pyarrow",
                    compute=TaskPoolStrategy(min(cpus(), len(plan))),
                )
            accounts: Iterable[Any] = mapped.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
            for account in accounts:
                for line in account.to_pylist():
                    if line["problem"]:
                        raise UserError(*line["problem"])
                    done += line["rows"]
                    busy += line["seconds"]
                progress.update(finished + done)
    return MapResult(done, busy)


_made: dict[str, _Shards] = {}
"""What this process computes the mapping's shards with: a network is loaded once, not for every shard."""


def _run_task(plan: pa.Table, mapping: str, parts: Any) -> pa.Table:
    import ray

    if mapping not in _made:
        _made.clear()
        _made[mapping] = _Shards(*(ray.get(parts) if isinstance(parts, ray.ObjectRef) else parts))
    return _made[mapping](plan)

"""The Ray Data edge: maps a table, shard by shard, in tasks or actors, into a folder of Parquet shards.

Each shard is written aside and renamed by the task that computed it. After a kill only the missing shards are
computed, and the result is the same, since a shard's rows depend on its position in the table alone.
"""

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from mcis.datasets.errors import UserError
from mcis.platform.engine.runtime import cpus, give_memory_back
from mcis.platform.runs.progress import bar
from mcis.platform.runs.workspace import write_table

Worker = Callable[[pa.Table], pa.Table]
_ACCOUNT = pa.schema([("rows", pa.int64()), ("seconds", pa.float64()), ("problem", pa.list_(pa.string()))])


class MapResult(NamedTuple):
    """What a mapping did.

    Attributes:
        rows: that this call mapped.
        busy: seconds that its tasks computed, added up.
    """

    rows: int
    busy: float


class ShardRows(NamedTuple):
    """The rows of a table that a shard holds: so many `rows` from `first` on."""

    first: int
    rows: int


def shards_of(rows: int, shard_rows: int, suffix: str = "parquet") -> dict[str, ShardRows]:
    """The shards of a table of so many rows, by the names of their files."""
    parts = [ShardRows(first, min(shard_rows, rows - first)) for first in range(0, rows, shard_rows)]
    return {f"part-{part.first:08d}-{part.first + part.rows:08d}.{suffix}": part for part in parts}


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

    Finished shards are left as they are; shards of an earlier call with other `shard_rows` are removed.

    Args:
        make: makes the worker, a function from rows to output rows, from `arguments` (which travel by pickle).
            A process makes it once for all shards that it is given.
        gpu: on the cluster's GPUs, an actor each, as Ray ends a process after a task with one; those that another run
            holds join when they are free. Else in tasks on all CPUs.
        suffix: format of the shards, see `workspace.write_table`.

    Raises:
        UserError: a worker raised it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = _missing_shards(folder, shards_of(len(table), shard_rows, suffix))
    finished = len(table) - sum(part.rows for part in missing.values())
    mapped, busy = 0, 0.0
    with bar(label, len(table), "images") as progress:
        progress.update(finished)
        for account in _mapped(table, make, arguments, folder, missing, gpu=gpu) if missing else ():
            if account["problem"]:
                raise UserError(*account["problem"])
            mapped += account["rows"]
            busy += account["seconds"]
            progress.update(finished + mapped)
    return MapResult(mapped, busy)


def _missing_shards(folder: Path, wanted: dict[str, ShardRows]) -> dict[str, ShardRows]:
    """The shards that `folder` lacks; files of another division of the table are removed."""
    present = {file.name for file in folder.glob("part-*")}
    for name in present - wanted.keys():
        (folder / name).unlink()
    return {name: part for name, part in wanted.items() if name not in present}


def _mapped(
    table: pa.Table,
    make: Callable[..., Worker],
    arguments: tuple[Any, ...],
    folder: Path,
    shards: dict[str, ShardRows],
    *,
    gpu: bool,
) -> Iterator[dict[str, Any]]:
    """Maps shards; yields the account of each as soon as it is written, a row of `_ACCOUNT`."""
    import ray
    import ray.data
    from ray.data import ActorPoolStrategy, TaskPoolStrategy

    parts = (make, arguments, folder, ray.put(table))
    # A row of the plan is a shard, and each row a block: so a batch is a shard, whoever maps it.
    plan = [{"shard": name, "first": part.first, "rows": part.rows} for name, part in shards.items()]
    blocks = ray.data.from_arrow([pa.Table.from_pylist([row]) for row in plan])
    if gpu:
        most = max(1, min(len(plan), int(ray.cluster_resources().get("GPU", 0))))
        mapped = blocks.map_batches(
            _ShardMapper,
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
        yield from account.to_pylist()


class _ShardMapper:
    """Computes and writes shards of a table; returns an account of each.

    A user's error travels as the account's `problem`, its three parts: Ray would hand on its text alone, in a
    traceback.

    Args:
        table: a reference to the whole table, which the processes of a node share.
    """

    def __init__(self, make: Callable[..., Worker], arguments: tuple[Any, ...], folder: Path, table: Any):
        self.make, self.arguments, self.folder, self.table = make, arguments, folder, table
        self.worker: Worker | None = None

    def __call__(self, plan: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([self._map_shard(**row) for row in plan.to_pylist()], schema=_ACCOUNT)

    def _map_shard(self, shard: str, first: int, rows: int) -> dict[str, Any]:
        import ray

        began, problem = time.monotonic(), None
        try:
            if self.worker is None:
                self.worker = self.make(*self.arguments)
                if "torch" in sys.modules:  # each process has a core
                    sys.modules["torch"].set_num_threads(1)
            part = ray.get(self.table).slice(first, rows).combine_chunks()
            write_table(self.folder / shard, self.worker(part))
            give_memory_back()
        except UserError as error:
            problem = [error.found, error.expected, error.remedy]
        return {"rows": rows, "seconds": time.monotonic() - began, "problem": problem}


_mappers: dict[str, _ShardMapper] = {}
"""This process's mapper, by the id of its mapping: a network is loaded once, not for every shard."""


def _run_task(plan: pa.Table, mapping: str, parts: Any) -> pa.Table:
    import ray

    if mapping not in _mappers:
        _mappers.clear()
        _mappers[mapping] = _ShardMapper(*(ray.get(parts) if isinstance(parts, ray.ObjectRef) else parts))
    return _mappers[mapping](plan)

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
from mcis.platform.progress import bar
from mcis.platform.runtime import cpus
from mcis.platform.workspace import write_table

Worker = Callable[[pa.Table], pa.Table]


class MapResult(NamedTuple):
    """What a mapping did: rows of this call, and the seconds its tasks computed, added up."""

    rows: int
    busy: float


class _Shard:
    """Runs the worker on one block of rows and writes its output; what travels back is a line of account.

    A user's error travels as the line's `problem`, its three parts: Ray would hand on its text alone, in a traceback.
    """

    def __init__(self, make: Callable[..., Worker], arguments: tuple[Any, ...], folder: Path):
        self.make, self.arguments, self.folder = make, arguments, folder
        self.worker: Worker | None = None

    def __call__(self, rows: pa.Table) -> pa.Table:
        began, problem = time.monotonic(), None
        try:
            if self.worker is None:
                self.worker = self.make(*self.arguments)
                if "torch" in sys.modules:  # each process has a core
                    sys.modules["torch"].set_num_threads(1)
            write_table(self.folder / rows["_shard"][0].as_py(), self.worker(rows.drop_columns(["_shard"])))
        except UserError as error:
            problem = [error.found, error.expected, error.remedy]
        problems = pa.array([problem], pa.list_(pa.string()))
        return pa.table({"rows": [len(rows)], "seconds": [time.monotonic() - began], "problem": problems})


class _PlannedShard(_Shard):
    """The same for rows that are a shard's number."""

    def __init__(self, make: Callable[..., Worker], arguments: tuple[Any, ...], folder: Path, shards: list[Any]):
        super().__init__(make, arguments, folder)
        self.shards = shards

    def __call__(self, rows: pa.Table) -> pa.Table:
        import ray

        return super().__call__(ray.get(self.shards[rows["shard"][0].as_py()]))


def map_table(
    table: pa.Table,
    make: Callable[..., Worker],
    arguments: tuple[Any, ...],
    folder: Path,
    *,
    label: str,
    shard_rows: int,
    gpus: int = 0,
    suffix: str = "parquet",
) -> MapResult:
    """Maps every shard of `table` and writes `folder/part-<first row>-<behind the last row>.<suffix>`.

    Finished shards are left as they are; shards of an earlier call that was cut by other `shard_rows` are removed.

    Args:
        make: makes the worker, a function from rows to output rows, from `arguments` (which travel by pickle).
            A process makes it once for all shards that it is given.
        gpus: workers that take a GPU each; 0 = tasks on all CPUs. Those with a GPU are actors, as Ray ends a process
            after a task with one.
        suffix: format of the shards, see `workspace.write_table`.

    Raises:
        UserError: what a worker raised as such.
    """
    import ray.data
    from ray.data import ActorPoolStrategy, TaskPoolStrategy

    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(table), shard_rows)
    names = {f"part-{start:08d}-{min(start + shard_rows, len(table)):08d}.{suffix}": start for start in starts}
    there = {file.name for file in folder.glob("part-*")}
    for name in there - names.keys():
        (folder / name).unlink()
    shards = []
    for name, start in names.items():
        if name not in there:
            rows = table.slice(start, shard_rows).combine_chunks()
            shards.append(rows.append_column("_shard", pa.array([name] * len(rows))))
    finished = len(table) - sum(len(s) for s in shards)
    done, busy = 0, 0.0
    with bar(label, len(table), "images") as progress:
        progress.update(finished)
        if shards:
            blocks = ray.data.from_arrow(shards)
            if gpus:
                # With GPUs Ray Data asks for a batch size, which might join shards: a row of the plan is a shard.
                plan = pa.table({"shard": range(len(shards))})
                mapped = ray.data.from_arrow([plan.slice(row, 1) for row in range(len(plan))]).map_batches(
                    _PlannedShard,
                    fn_constructor_args=(make, arguments, folder, [ray.put(shard) for shard in shards]),
                    batch_size=1,
                    batch_format="pyarrow",
                    compute=ActorPoolStrategy(size=min(gpus, len(shards))),
                    num_gpus=1,
                )
            else:
                mapped = blocks.map_batches(
                    _run_task,  # type: ignore[arg-type]  # Ray's stubs know no fn_args
                    fn_args=(uuid.uuid4().hex, ray.put((make, arguments, folder))),
                    batch_size=None,
                    batch_format="pyarrow",
                    compute=TaskPoolStrategy(min(cpus(), len(shards))),
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


_made: dict[str, _Shard] = {}
"""The shard runner of the mapping that this process works for: a network is loaded once, not for every shard."""


def _run_task(rows: pa.Table, mapping: str, parts: Any) -> pa.Table:
    import ray

    if mapping not in _made:
        _made.clear()
        _made[mapping] = _Shard(*(ray.get(parts) if isinstance(parts, ray.ObjectRef) else parts))
    return _made[mapping](rows)

"""Maps a table, shard by shard, in Ray's tasks or actors, into a folder of Parquet shards.

Each shard is written aside and renamed by the task that computed it. After a kill only the missing shards are
computed, and the result is the same, since a shard's rows depend on its position in the table alone.
"""

import functools
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from mcis.datasets.errors import UserError
from mcis.platform.engine.runtime import ANYWHERE, cpus, give_memory_back
from mcis.platform.runs.progress import bar
from mcis.platform.runs.workspace import write_table

Worker = Callable[[pa.Table], pa.Table]
_RETRIES = 3
"""How often Ray maps a shard again whose process or node died."""


class MapResult(NamedTuple):
    """What a mapping did.

    Attributes:
        rows: that this call mapped.
        busy: seconds that its tasks computed, added up.
    """

    rows: int
    busy: float


class Account(NamedTuple):
    """What the mapping of a shard was: its rows, the seconds of it, and the user's error that ended it, or None.

    The error travels as its three parts: Ray would hand on its text alone, in a traceback.
    """

    rows: int
    seconds: float
    problem: tuple[str, str, str] | None


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
    gpu: float = 0,
    suffix: str = "parquet",
) -> MapResult:
    """Maps every shard of `table` and writes `folder/part-<first row>-<behind the last row>.<suffix>`.

    Finished shards are left as they are; shards of an earlier call with other `shard_rows` are removed.

    Args:
        make: makes the worker, a function from rows to output rows, from `arguments` (which travel by pickle).
            A process makes it once for all shards that it is given.
        gpu: GPUs that each worker holds, a share of one or all of it. Such workers are actors, as Ray ends a process
            after a task with a GPU, as many as the cluster's GPUs hold; those that another run holds join when they are
            free. 0 = tasks, one per core or CPU.
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
            if account.problem:
                raise UserError(*account.problem)
            mapped += account.rows
            busy += account.seconds
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
    gpu: float,
) -> Iterator[Account]:
    """Maps shards, as many at a time as there are GPUs or CPUs; yields the account of each as soon as it is written.

    Where the caller takes no more of them, tasks that run are canceled.
    """
    import ray

    parts = (ray.put((make, arguments, folder, ray.put(table))),)  # within a tuple Ray hands it on as a reference
    waiting, unfinished = deque(shards.items()), len(shards)
    start_next: dict[Any, Callable[..., Any]] = {}  # what runs -> how the same actor, or a task, is given a shard
    if gpu:
        actors: Any = ray.remote(num_gpus=gpu, max_restarts=_RETRIES, max_task_retries=_RETRIES, **ANYWHERE)(
            _ShardMapper
        )
        for _ in range(min(unfinished, max(1, int(ray.cluster_resources().get("GPU", 0) / gpu)))):
            actor = actors.remote(parts)
            start_next[actor.__ray_ready__.remote()] = actor.map_shard.remote  # some may have no GPU before the end
    else:
        task: Any = ray.remote(num_cpus=1, max_retries=_RETRIES, **ANYWHERE)(_run_task)
        in_task = functools.partial(task.remote, parts, uuid.uuid4().hex)
        for _ in range(min(unfinished, cpus())):
            start_next[in_task(*waiting.popleft())] = in_task
    try:
        while unfinished:
            [ended], _ = ray.wait(list(start_next))
            start, account = start_next.pop(ended), ray.get(ended)
            if waiting:
                start_next[start(*waiting.popleft())] = start
            if isinstance(account, Account):
                unfinished -= 1
                yield account
    finally:
        for reference in () if gpu else start_next:
            ray.cancel(reference)


class _ShardMapper:
    """Computes and writes shards of a table; makes its worker with the first of them.

    Args:
        parts: a reference to make, arguments and folder of `map_table`, and to its table, which the processes of a node
            share.
    """

    def __init__(self, parts: tuple[Any]):
        import ray

        make, arguments, self.folder, self.table = ray.get(parts[0])
        self.make: Callable[[], Worker] = functools.partial(make, *arguments)
        self.worker: Worker | None = None

    def map_shard(self, name: str, shard: ShardRows) -> Account:
        import ray

        began, problem = time.monotonic(), None
        try:
            if self.worker is None:
                self.worker = self.make()
                if "torch" in sys.modules:  # each process has a core
                    sys.modules["torch"].set_num_threads(1)
            part = ray.get(self.table).slice(*shard).combine_chunks()
            write_table(self.folder / name, self.worker(part))
            give_memory_back()
        except UserError as error:
            problem = (error.found, error.expected, error.remedy)
        return Account(shard.rows, time.monotonic() - began, problem)


_mappers: dict[str, _ShardMapper] = {}
"""This process's mapper, by the id of its mapping: a network is loaded once, not for every shard."""


def _run_task(parts: Any, mapping: str, name: str, shard: ShardRows) -> Account:
    if mapping not in _mappers:
        _mappers.clear()
        _mappers[mapping] = _ShardMapper(parts)
    return _mappers[mapping].map_shard(name, shard)

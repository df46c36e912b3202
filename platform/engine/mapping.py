"""Maps a table, shard by shard, in Ray's tasks or actors, into a folder of Parquet shards.

Each shard is written aside and renamed by the process that computed it. After a kill only the missing shards are
computed, and the result is the same, since a shard's rows depend on its position in the table alone.
"""

import functools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import names_in, remove
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.errors import IMAGE_AT_FAULT, MemoryRanOut, death_text, deaths, memory_errors, user_errors
from mcis.platform.engine.nodes import wait_for_nodes
from mcis.platform.engine.runtime import ANYWHERE, cpus, give_memory_back
from mcis.platform.runs.files import write_table
from mcis.platform.runs.progress import bar, console

Worker = Callable[[pa.Table], pa.Table]
Reject = Callable[[pa.Table, str], pa.Table]
_PAUSE = 1.0
"""Seconds until an actor that does not answer is asked again."""
_RETRIES = 2
"""How often Ray maps a shard, or an image, again whose process or node died."""
_MOST_PER_GPU = 16
"""Processes that share a GPU, each with a copy of the network and some 0.5 GiB of CUDA's own."""
_LOOK_EVERY = 3.0
"""Seconds between two looks at the nodes, at most: for GPUs that have joined, and for what is missing."""


class ShardRows(NamedTuple):
    """The rows of a table that a shard holds: so many `rows` from `first` on."""

    first: int
    rows: int


class _Work(NamedTuple):
    """What travels to each process of a mapping, see `map_table`."""

    worker: Worker | None
    make_worker: Callable[[], Worker] | None
    folder: Path
    label: str
    memory_hint: str


def shards_of(rows: int, shard_rows: int, suffix: str = "parquet") -> dict[str, ShardRows]:
    """The shards of a table of so many rows, by the names of their files."""
    parts = [ShardRows(first, min(shard_rows, rows - first)) for first in range(0, rows, shard_rows)]
    return {f"part-{part.first:08d}-{part.first + part.rows:08d}.{suffix}": part for part in parts}


def map_table(
    table: pa.Table,
    folder: Path,
    *,
    worker: Worker | None = None,
    make_worker: Callable[[], Worker] | None = None,
    label: str,
    compute: ComputeConfig,
    network: bool = False,
    shard_rows: int | None = None,
    suffix: str = "parquet",
    reject: Reject | None = None,
    memory_hint: str = "compute.cpus",
) -> int:
    """Maps every shard of `table` and writes `folder/part-<first row>-<last row + 1>.<suffix>`.

    Finished shards are left as they are; shards of an earlier call with other `shard_rows` are removed.

        map_table(rows, folder, worker=partial(make_labels, config), label="labels", compute=compute)
        map_table(rows, folder, make_worker=partial(PredictRows, config), label="predict", compute=compute)

    Args:
        worker: a function from rows to output rows.
        make_worker: makes such a worker; for one that is expensive to make or cannot be pickled, such as one with a
            network. Each process calls it once. Give either `worker` or `make_worker`; both travel by pickle.
        network: whether each worker has a network, which runs on a GPU where `compute.gpu` says so.
        shard_rows: rows of a shard; None = `compute.shard_rows`.
        suffix: format of the shards, see `workspace.write_table`.
        reject: makes the output row of an image, a table of one row, that ends its process by a signal, and of what
            happened in words. A shard whose process dies is then mapped row by row; else it ends the mapping.
        memory_hint: keys of the configuration, in words, by which a worker takes less memory.

    Returns:
        How many rows it mapped.

    Raises:
        UserError: a worker raised it, memory ran out in one, a shard ends each process that maps it, or the cluster
            has no node for it and starts none in time.
    """
    import ray

    folder.mkdir(parents=True, exist_ok=True)
    missing = _missing_shards(folder, shards_of(len(table), shard_rows or compute.shard_rows, suffix))
    if (worker is None) == (make_worker is None):
        raise TypeError("map_table takes either worker or make_worker")
    work = _Work(worker, make_worker, folder, label, memory_hint)
    finished = mapped = len(table) - sum(part.rows for part in missing.values())
    with bar(label, len(table), "images") as progress, user_errors():
        progress.update(finished)
        if not missing:
            return 0
        needed = {"GPU": compute.gpu_share} if network and compute.gpu else {"CPU": 1.0}
        watch = wait_for_nodes([needed], compute.wait_minutes, f"the mapping `{label}`")
        parts = (ray.put((work, ray.put(table))),)  # a node's processes share it; within a tuple Ray leaves it one
        if "GPU" in needed:
            results = _map_on_gpus(parts, work, missing, compute, watch)
        else:
            results = _map_on_cpus(table, parts, work, missing, reject, watch)
        for rows in results:
            mapped += rows
            progress.update(mapped)
    return mapped - finished


def _missing_shards(folder: Path, wanted: dict[str, ShardRows]) -> dict[str, ShardRows]:
    """The shards that `folder` lacks; files of another division of the table are removed."""
    present = {name for name in names_in(folder) if name.startswith("part-")}
    for name in present - wanted.keys():
        remove(folder / name)
    return {name: part for name, part in wanted.items() if name not in present}


def _map_on_cpus(
    table: pa.Table,
    parts: tuple[Any],
    work: _Work,
    shards: dict[str, ShardRows],
    reject: Reject | None,
    watch: Iterator[object],
) -> Iterator[int]:
    """Maps shards in tasks, one per core or CPU; yields the number of rows of each as soon as it is written.

    Where the caller takes no more of them, what is in work is still written. Ray would cancel a task by an interrupt,
    and a process that is interrupted while it imports pandas can never import it again, whatever task it has next.
    """
    import ray

    task: Any = ray.remote(num_cpus=1, max_retries=_RETRIES, **ANYWHERE)(_map_shard)
    waiting, running, at_a_time = deque(shards), dict[Any, str](), cpus()
    while waiting or running:
        while waiting and len(running) < at_a_time:
            name = waiting.popleft()
            running[task.remote(parts, name, shards[name])] = name
        ready, _ = ray.wait(list(running), timeout=_LOOK_EVERY)
        next(watch)
        for reference in ready:
            name = running.pop(reference)
            try:
                yield ray.get(reference)
            except deaths() as death:
                if reject is None or not isinstance(death, ray.exceptions.WorkerCrashedError):
                    raise _killed(work, name, death) from None
                yield _map_by_row(table, parts, work, name, shards[name], reject)


def _map_by_row(table: pa.Table, parts: tuple[Any], work: _Work, name: str, shard: ShardRows, reject: Reject) -> int:
    """Maps and writes a shard whose processes died, each image in a task, with rejections of those that kill theirs."""
    import ray

    task: Any = ray.remote(num_cpus=1, max_retries=_RETRIES, **ANYWHERE)(_map_rows)
    rows: list[pa.Table] = []
    for first in range(shard.first, shard.first + shard.rows):
        try:
            rows.append(ray.get(task.remote(parts, ShardRows(first, 1))))
        except deaths() as death:
            if not isinstance(death, ray.exceptions.WorkerCrashedError):
                raise _killed(work, name, death) from None
            rows.append(reject(table.slice(first, 1), f"{death_text(death)}, {1 + _RETRIES} times"))
    write_table(work.folder / name, pa.concat_tables(rows))
    return shard.rows


def _map_on_gpus(
    parts: tuple[Any], work: _Work, shards: dict[str, ShardRows], compute: ComputeConfig, watch: Iterator[object]
) -> Iterator[int]:
    """Maps shards in actors, as Ray ends a process after a task with a GPU; yields the rows of each once written.

    There are as many as the cluster's GPUs hold, and enough for `compute.workers`, which have a cluster start nodes.
    An actor has its first shard once it has a GPU, so those that another run holds join when they are free, and those
    of nodes that come later when they are up. Where a GPU's memory runs out, the actor ends, and the others go on.
    """
    import ray

    sharing = _processes_per_gpu(compute.gpu_share, len(shards))
    part = math.floor(1e4 * compute.gpu_share / sharing) / 1e4  # of which Ray keeps four digits
    options: Any = {"num_cpus": 0, "num_gpus": part, **ANYWHERE}  # else a share of a GPU would take a CPU
    actors: Any = ray.remote(max_restarts=_RETRIES, max_task_retries=_RETRIES, **options)(_GpuProcess)
    waiting, unfinished, started, dropped = deque(shards), len(shards), 0, 0
    running: dict[Any, tuple[Any, str | None]] = {}  # the actor, and its shard, None while it starts
    failed: set[str] = set()
    while unfinished:
        gpus = max(compute.workers, int(ray.cluster_resources().get("GPU", 0) / compute.gpu_share))
        for _ in range(min(len(waiting), gpus * sharing - dropped - started)):
            actor = actors.remote()
            running[actor.wait_until_started.remote()] = actor, None
            started += 1
        ready, _ = ray.wait(list(running), timeout=_LOOK_EVERY)
        next(watch)
        for reference in ready:
            actor, name = running.pop(reference)
            try:
                rows = ray.get(reference)
                if name:
                    unfinished -= 1
                    yield rows
            except MemoryRanOut:
                if started == 1:
                    raise
                if not dropped:
                    console.print(f"note: {work.label}: a GPU's memory ran out; fewer processes share it")
                waiting.appendleft(str(name))
                started, dropped = started - 1, dropped + 1
                continue
            except ray.exceptions.ActorUnavailableError:  # its node may be lost: Ray starts another or gives it up
                waiting.extendleft([name] if name else [])
                time.sleep(_PAUSE)
            except deaths() as death:
                if name is None or name in failed:
                    raise _killed(work, name, death) from None
                failed.add(name)  # its actor may have lost its nodes one by one: another one gets the shard
                waiting.appendleft(name)
                started -= 1
                continue
            if waiting:
                name = waiting.popleft()
                running[actor.map_shard.remote(parts, name, shards[name])] = actor, name
            else:
                started -= 1
        actor = None  # one that nothing refers to gives its GPU to one whose node was lost


def _processes_per_gpu(share: float, shards: int) -> int:
    """How many processes share the part of a GPU that `compute.gpu_share` is: one for each core that belongs to it, as
    decoding and the dense CRF take a core each, and most networks but a little of the GPU."""
    import ray

    resources = ray.cluster_resources()
    gpus = max(1.0, resources.get("GPU", 0))
    return max(1, min(int(resources.get("CPU", 1) * share / gpus), math.ceil(shards * share / gpus), _MOST_PER_GPU))


def _killed(work: _Work, name: str | None, death: Exception) -> UserError:
    cannot = f"shard {name} cannot" if name else "no image can"
    return UserError(
        f"{work.label}: {cannot} be mapped: {death_text(death)}, {1 + _RETRIES} times or more",
        "processes that live, and enough memory for what maps images on each core",
        "free some memory or lower compute.cpus, and repeat the command, which goes on with what is missing; "
        f"{IMAGE_AT_FAULT}",
    )


class _GpuProcess:
    """An actor, which keeps a part of a GPU, and its worker."""

    def wait_until_started(self) -> None:
        """Returns as soon as the actor has its share of a GPU and runs."""

    def map_shard(self, parts: tuple[Any], name: str, shard: ShardRows) -> int:
        return _map_shard(parts, name, shard)


class _ShardMapper:
    """Computes shards of a table; makes its worker with the first of them.

    Args:
        parts: a reference to the work and to that of the table.
    """

    def __init__(self, parts: tuple[Any]):
        import ray

        work, self.table = ray.get(parts[0])
        self.work: _Work = work
        self.worker: Worker | None = None

    def map_rows(self, part: ShardRows) -> pa.Table:
        """The output of some rows."""
        import ray

        try:
            with memory_errors(self.work.label, self.work.memory_hint):
                if self.worker is None:
                    self.worker = self.work.make_worker() if self.work.make_worker else self.work.worker
                    assert self.worker is not None
                    if "torch" in sys.modules:  # each process has a core
                        sys.modules["torch"].set_num_threads(1)
                return self.worker(ray.get(self.table).slice(*part).combine_chunks())
        finally:
            give_memory_back()


_mapper = functools.lru_cache(maxsize=1)(_ShardMapper)
"""This process's mapper, by its parts: a network is loaded once, not for every shard."""


def _map_shard(parts: tuple[Any], name: str, shard: ShardRows) -> int:
    """Maps and writes a shard; returns how many rows it has."""
    mapper = _mapper(parts)
    write_table(mapper.work.folder / name, mapper.map_rows(shard))
    return shard.rows


def _map_rows(parts: tuple[Any], part: ShardRows) -> pa.Table:
    return _mapper(parts).map_rows(part)

"""Maps a table, shard by shard, in Ray tasks or actors, to a folder of shards.

Each shard is written aside and renamed by the process that computed it. After a kill, only missing shards are computed.
The result is the same, because the rows of a shard depend on its position in the table only.
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
from mcis.platform.engine.errors import (
    IMAGE_AT_FAULT,
    MemoryRanOut,
    death_text,
    death_types,
    memory_errors,
    user_errors,
)
from mcis.platform.engine.nodes import NodeWatch
from mcis.platform.engine.runtime import cpus, give_memory_back, gpus, placement
from mcis.platform.runs.files import write_table
from mcis.platform.runs.progress import bar, console

Worker = Callable[[pa.Table], pa.Table]
"""Maps rows to output rows."""
Reject = Callable[[pa.Table, str], pa.Table]
"""Makes the output row of an image that cannot be mapped, from its row and the cause."""
_UNAVAILABLE_SECONDS = 1.0
"""Seconds until an actor that does not answer is asked again."""
_RETRIES = 2
"""How often Ray repeats the work of a process that died."""
_MAX_PER_GPU = 16
"""Maximum number of processes that share a GPU. Each has a copy of the network, and about 0.5 GiB of CUDA's own."""
_CHECK_INTERVAL = 3.0
"""Maximum seconds between two checks of the nodes, for GPUs that have joined and for nodes that are missing."""


class ShardRows(NamedTuple):
    """The rows of a table that a shard holds.

    Attributes:
        first: The first row.
        rows: Number of rows.
    """

    first: int
    rows: int


class _Work(NamedTuple):
    """What is sent to each process of a mapping; see `map_table`."""

    worker: Worker | None
    make_worker: Callable[[], Worker] | None
    folder: Path
    label: str
    memory_hint: str


def shards_of(rows: int, shard_rows: int, suffix: str = "parquet") -> dict[str, ShardRows]:
    """Returns the shards of a table of `rows` rows by the names of their files.

    Args:
        rows: Number of rows of the table.
        shard_rows: Number of rows of each shard but the last.
        suffix: Suffix of the files.
    """
    shards = [ShardRows(first, min(shard_rows, rows - first)) for first in range(0, rows, shard_rows)]
    return {f"part-{shard.first:08d}-{shard.first + shard.rows:08d}.{suffix}": shard for shard in shards}


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

    Finished shards are kept. Shards of an earlier call with other `shard_rows` are removed.

        map_table(rows, folder, worker=partial(make_labels, config), label="labels", compute=compute)
        map_table(rows, folder, make_worker=partial(PredictRows, config), label="predict", compute=compute)

    Args:
        table: The table.
        folder: Where the shards are written.
        worker: A function from rows to output rows.
        make_worker: Makes such a worker; for one that is expensive to make or cannot be pickled, such as one with a
            network. Each process calls it once. Give either `worker` or `make_worker`; both are sent by pickle.
        label: Name of the mapping, for messages and the progress bar.
        compute: The section `compute` of the configuration.
        network: Whether each worker has a network, which runs on a GPU if `compute.gpu` is set.
        shard_rows: Number of rows of a shard. None: `compute.shard_rows`.
        suffix: Format of the shards: `parquet` or `arrow` (`write_table`).
        reject: Makes the output row of an image that ends its process by a signal. A shard whose process dies is then
            mapped row by row. None: such a shard ends the mapping.
        memory_hint: The configuration keys that reduce the memory of a worker, used in messages.

    Returns:
        The number of rows that were mapped by this call.

    Raises:
        UserError: A worker raised it, memory ran out, a shard ended every process that mapped it, or the cluster lacks
            nodes and starts none in time.
    """
    import ray

    if (worker is None) == (make_worker is None):
        raise TypeError("map_table takes either worker or make_worker")
    work = _Work(worker, make_worker, folder, label, memory_hint)
    folder.mkdir(parents=True, exist_ok=True)
    missing = _missing_shards(folder, shards_of(len(table), shard_rows or compute.shard_rows, suffix))
    finished = len(table) - sum(shard.rows for shard in missing.values())

    with bar(label, len(table), "images") as progress, user_errors():
        progress.update(finished)
        if not missing:
            return 0

        on_gpus = network and compute.gpu
        needed = {"GPU": compute.gpu_share} if on_gpus else {"CPU": 1.0}
        with NodeWatch([needed], compute.wait_minutes, f"the mapping `{label}`") as watch:
            # The processes of a node share the table. Ray resolves references among arguments, but not in a tuple.
            reference = (ray.put((work, ray.put(table))),)
            if on_gpus:
                counts = _map_on_gpus(reference, work, missing, compute, watch)
            else:
                counts = _map_on_cpus(table, reference, work, missing, reject, watch)

            mapped = 0
            for rows in counts:
                mapped += rows
                progress.update(finished + mapped)
    return mapped


def _missing_shards(folder: Path, shards: dict[str, ShardRows]) -> dict[str, ShardRows]:
    """Returns the shards that `folder` lacks. Removes files of other divisions of the table."""
    present = {name for name in names_in(folder) if name.startswith("part-")}
    for name in present - shards.keys():
        remove(folder / name)
    return {name: shard for name, shard in shards.items() if name not in present}


def _map_on_cpus(
    table: pa.Table,
    reference: tuple[Any],
    work: _Work,
    shards: dict[str, ShardRows],
    reject: Reject | None,
    watch: NodeWatch,
) -> Iterator[int]:
    """Maps shards in tasks, one per core or CPU. Yields the number of rows of each as soon as it is written.

    If the caller stops early, running tasks still finish. Ray would cancel a task by an interrupt, and a process that
    is interrupted while it imports pandas can never import it again, whatever task it gets next.
    """
    import ray

    task: Any = ray.remote(num_cpus=1, max_retries=_RETRIES, **placement())(_map_shard)
    max_running = cpus()
    waiting = deque(shards)
    running: dict[Any, str] = {}
    while waiting or running:
        while waiting and len(running) < max_running:
            name = waiting.popleft()
            running[task.remote(reference, name, shards[name])] = name

        ready, _ = ray.wait(list(running), timeout=_CHECK_INTERVAL)
        watch.check()
        for result in ready:
            name = running.pop(result)
            try:
                yield ray.get(result)
            except death_types() as death:
                if reject is None or not isinstance(death, ray.exceptions.WorkerCrashedError):
                    raise _death_error(work, name, death) from None
                yield _map_by_row(table, reference, work, name, shards[name], reject)


def _map_by_row(
    table: pa.Table, reference: tuple[Any], work: _Work, name: str, shard: ShardRows, reject: Reject
) -> int:
    """Maps a shard whose processes died, each row in a task of its own, and writes it.

    Rows that end their processes are rejected. Returns the number of rows.
    """
    import ray

    task: Any = ray.remote(num_cpus=1, max_retries=_RETRIES, **placement())(_map_rows)
    rows: list[pa.Table] = []
    for first in range(shard.first, shard.first + shard.rows):
        try:
            rows.append(ray.get(task.remote(reference, ShardRows(first, 1))))
        except death_types() as death:
            if not isinstance(death, ray.exceptions.WorkerCrashedError):
                raise _death_error(work, name, death) from None
            rows.append(reject(table.slice(first, 1), f"{death_text(death)}, {1 + _RETRIES} times"))
    write_table(work.folder / name, pa.concat_tables(rows))
    return shard.rows


def _map_on_gpus(
    reference: tuple[Any], work: _Work, shards: dict[str, ShardRows], compute: ComputeConfig, watch: NodeWatch
) -> Iterator[int]:
    """Maps shards in actors that share the GPUs. Yields the number of rows of each as soon as it is written."""
    import ray

    mapping = _GpuMapping(reference, work, shards, compute)
    while mapping.unfinished:
        mapping.start_actors()
        ready, _ = ray.wait(list(mapping.running), timeout=_CHECK_INTERVAL)
        watch.check()
        for result in ready:
            rows = mapping.collect(result)
            if rows is not None:
                yield rows


class _GpuMapping:
    """The actors of a mapping on GPUs, and the state of its shards.

    They are actors, because Ray ends a process after a task with a GPU. There are as many as the GPUs of the cluster
    hold, and enough for `compute.workers`, so that a cluster starts nodes. An actor gets its first shard when it has a
    GPU, so GPUs are used as soon as another run frees them or new nodes are up. If the memory of a GPU runs out, one
    actor ends and the others continue.

    Attributes:
        waiting: The shards that no actor has.
        running: Future of the current call -> its actor and its shard; the shard is None while the actor starts.
        unfinished: Number of shards that are not written.
        actors: Number of actors that are starting or working.
        dropped: Number of actors that ended because memory ran out, and are not replaced.
        failed: The shards whose actor died once.
    """

    def __init__(self, reference: tuple[Any], work: _Work, shards: dict[str, ShardRows], compute: ComputeConfig):
        import ray

        self.reference = reference
        self.work = work
        self.shards = shards
        self.compute = compute
        self.waiting = deque(shards)
        self.running: dict[Any, tuple[Any, str | None]] = {}
        self.unfinished = len(shards)
        self.actors = 0
        self.dropped = 0
        self.failed: set[str] = set()

        self.actors_per_gpu = _actors_per_gpu(compute.gpu_share, len(shards))
        share = math.floor(1e4 * compute.gpu_share / self.actors_per_gpu) / 1e4  # Ray keeps four digits
        options: Any = {"num_cpus": 0, "num_gpus": share, **placement()}  # by default, a share of a GPU takes a CPU
        self.actor_class: Any = ray.remote(max_restarts=_RETRIES, max_task_retries=_RETRIES, **options)(_GpuProcess)

    def start_actors(self) -> None:
        """Starts actors for waiting shards, as many as the GPUs of the cluster hold now."""
        parts = max(self.compute.workers, int(gpus() / self.compute.gpu_share))
        free = parts * self.actors_per_gpu - self.dropped - self.actors
        for _ in range(min(len(self.waiting), free)):
            actor = self.actor_class.remote()
            self.running[actor.wait_until_started.remote()] = actor, None
            self.actors += 1

    def collect(self, result: Any) -> int | None:
        """Handles the end of an actor's call, and gives the actor its next shard.

        Returns:
            The number of rows of the shard that it wrote, or None.

        Raises:
            MemoryRanOut: Memory ran out in the last actor.
            UserError: A shard ended two actors, or an actor cannot start.
        """
        import ray

        actor, name = self.running.pop(result)
        rows = None
        try:
            value = ray.get(result)
            if name is not None:
                rows = value
                self.unfinished -= 1
        except MemoryRanOut:
            if self.actors == 1:
                raise
            if not self.dropped:
                console.print(f"note: {self.work.label}: a GPU's memory ran out; fewer processes share it")
            self.dropped += 1
            self._end_actor(name)
            return None
        except ray.exceptions.ActorUnavailableError:
            # Its node may be lost. Ray then starts another actor, or gives it up.
            if name is not None:
                self.waiting.appendleft(name)
            time.sleep(_UNAVAILABLE_SECONDS)
        except death_types() as death:
            # The actor may have lost one node after the other, so another actor gets the shard.
            if name is None or name in self.failed:
                raise _death_error(self.work, name, death) from None
            self.failed.add(name)
            self._end_actor(name)
            return None

        if self.waiting:
            name = self.waiting.popleft()
            self.running[actor.map_shard.remote(self.reference, name, self.shards[name])] = actor, name
        else:
            self._end_actor(None)
        return rows

    def _end_actor(self, name: str | None) -> None:
        """Counts an actor as ended and puts its shard back. Without references to it, Ray frees its GPU."""
        self.actors -= 1
        if name is not None:
            self.waiting.appendleft(name)


def _actors_per_gpu(share: float, shards: int) -> int:
    """Returns how many actors share the part `compute.gpu_share` of a GPU.

    It is one for each core that belongs to the part, because decoding and the dense CRF take a core each, and most
    networks take little of a GPU.
    """
    import ray

    resources = ray.cluster_resources()
    gpus = max(1.0, resources.get("GPU", 0))
    cores = int(resources.get("CPU", 1) * share / gpus)
    return max(1, min(cores, math.ceil(shards * share / gpus), _MAX_PER_GPU))


def _death_error(work: _Work, name: str | None, death: Exception) -> UserError:
    """Returns the error of a process that died.

    Args:
        name: The shard that it mapped. None: it did not start.
    """
    subject = f"shard {name} cannot" if name else "no image can"
    return UserError(
        f"{work.label}: {subject} be mapped: {death_text(death)}, {1 + _RETRIES} times or more",
        "processes that are not ended, and enough memory for one on each core",
        "free some memory or lower compute.cpus, and repeat the command, which continues with the missing shards; "
        f"{IMAGE_AT_FAULT}",
    )


class _GpuProcess:
    """An actor, which keeps a share of a GPU and its worker."""

    def wait_until_started(self) -> None:
        """Returns as soon as the actor has its share of a GPU and runs."""

    def map_shard(self, reference: tuple[Any], name: str, shard: ShardRows) -> int:
        """Maps and writes a shard. Returns the number of its rows."""
        return _map_shard(reference, name, shard)


class _ShardMapper:
    """Computes shards of a table in this process. It makes its worker with the first of them.

    Args:
        reference: A tuple of a reference to the work and the reference to the table.
    """

    def __init__(self, reference: tuple[Any]):
        import ray

        work, self.table = ray.get(reference[0])
        self.work: _Work = work
        self.worker: Worker | None = None

    def map_rows(self, shard: ShardRows) -> pa.Table:
        """Returns the output of some rows."""
        import ray

        try:
            with memory_errors(self.work.label, self.work.memory_hint):
                if self.worker is None:
                    self.worker = self._make_worker()
                rows = ray.get(self.table).slice(shard.first, shard.rows).combine_chunks()
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


def _map_shard(reference: tuple[Any], name: str, shard: ShardRows) -> int:
    """Maps and writes a shard. Returns the number of its rows."""
    mapper = _mapper(reference)
    write_table(mapper.work.folder / name, mapper.map_rows(shard))
    return shard.rows


def _map_rows(reference: tuple[Any], shard: ShardRows) -> pa.Table:
    """Maps some rows. Returns the output."""
    return _mapper(reference).map_rows(shard)

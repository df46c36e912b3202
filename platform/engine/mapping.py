"""Maps a table, shard by shard, in Ray's tasks or actors, into a folder of Parquet shards.

Each shard is written aside and renamed by the task that computed it. After a kill only the missing shards are
computed, and the result is the same, since a shard's rows depend on its position in the table alone.

A process that dies, by a decoder's fault or for lack of memory, is replaced and its shard mapped again. Where that
happens again and again the rows are mapped apart, until the image that ends its process is known.
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
from mcis.datasets.storage.copies import names_in, remove
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.nodes import wait_for_nodes, watched_nodes
from mcis.platform.engine.runtime import ANYWHERE, cpus, deaths, give_memory_back, memory_errors
from mcis.platform.runs.files import write_table
from mcis.platform.runs.progress import bar

Worker = Callable[[pa.Table], pa.Table]
Instead = Callable[[pa.Table, str], pa.Table]
_PAUSE = 1.0
"""Seconds until an actor that does not answer is asked again."""
_RETRIES = 2
"""How often Ray maps a shard, or an image, again whose process or node died."""
_LOOK_EVERY = 5.0
"""Seconds between two looks at the nodes, at most: for GPUs that have joined, and for what is missing."""


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


class _Work(NamedTuple):
    """What travels to each process of a mapping, see `map_table`."""

    make: Callable[..., Worker]
    arguments: tuple[Any, ...]
    folder: Path
    label: str
    lower: str


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
    compute: ComputeConfig,
    network: bool = False,
    shard_rows: int | None = None,
    suffix: str = "parquet",
    instead: Instead | None = None,
    lower: str = "compute.cpus",
) -> MapResult:
    """Maps every shard of `table` and writes `folder/part-<first row>-<behind the last row>.<suffix>`.

    Finished shards are left as they are; shards of an earlier call with other `shard_rows` are removed.

    Args:
        make: makes the worker, a function from rows to output rows, from `arguments` (which travel by pickle).
            A process makes it once for all shards that it is given.
        network: whether each worker has a network, which runs on a GPU where `compute.gpu` says so. Such workers are
            actors, as Ray ends a process after a task with a GPU: as many as the cluster's GPUs hold, and no fewer than
            `compute.workers`, which have a cluster start nodes. Those that another run holds join when they are free,
            and those of nodes that come later when they are up. All others are tasks, one per core or CPU.
        shard_rows: rows of a shard; None = `compute.shard_rows`.
        suffix: format of the shards, see `workspace.write_table`.
        instead: the output row of an image, a table of one row, that ends its process by a signal, and of what happened
            in words; None = such an image is an error, as one is for which the machine's memory does not do.
        lower: keys of the configuration, in words, by which a worker takes less memory.

    Raises:
        UserError: a worker raised it, memory ran out in one, an image ends every process that maps it, or the cluster
            has no node for it and starts none in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = _missing_shards(folder, shards_of(len(table), shard_rows or compute.shard_rows, suffix))
    finished = len(table) - sum(part.rows for part in missing.values())
    mapped, busy = 0, 0.0
    work = _Work(make, arguments, folder, label, lower)
    mapping = _mapped(table, work, missing, compute, network=network, instead=instead)
    with bar(label, len(table), "images") as progress:
        progress.update(finished)
        for account in mapping if missing else ():
            if account.problem:
                raise UserError(*account.problem)
            mapped += account.rows
            busy += account.seconds
            progress.update(finished + mapped)
    return MapResult(mapped, busy)


def _missing_shards(folder: Path, wanted: dict[str, ShardRows]) -> dict[str, ShardRows]:
    """The shards that `folder` lacks; files of another division of the table are removed."""
    present = {name for name in names_in(folder) if name.startswith("part-")}
    for name in present - wanted.keys():
        remove(folder / name)
    return {name: part for name, part in wanted.items() if name not in present}


def _mapped(
    table: pa.Table,
    work: _Work,
    shards: dict[str, ShardRows],
    compute: ComputeConfig,
    *,
    network: bool,
    instead: Instead | None,
) -> Iterator[Account]:
    """Maps shards, as many at a time as there are GPUs or CPUs; yields the account of each as soon as it is written.

    Where the caller takes no more of them, what is in work is still written. Ray would cancel a task by an interrupt,
    and a process that is interrupted while it imports pandas can never import it again, whatever task it has next.
    """
    import ray

    gpu = compute.gpu_share if network and compute.gpu else 0.0
    least, what = [{"GPU": gpu} if gpu else {"CPU": 1.0}], f"the mapping `{work.label}`"
    wait_for_nodes(least, compute.wait_minutes, what)
    watch = watched_nodes(least, compute.wait_minutes, what)
    parts = (ray.put((work, ray.put(table))),)  # within a tuple Ray hands it on as a reference
    waiting, unfinished, started = deque(shards), len(shards), 0
    running: dict[Any, _Running] = {}
    if gpu:
        options: Any = {"num_cpus": 0, "num_gpus": gpu, **ANYWHERE}  # else a share of a GPU would take a CPU
        actors: Any = ray.remote(max_restarts=_RETRIES, max_task_retries=_RETRIES, **options)(_ShardMapper)

        def start_actor() -> None:
            actor = actors.remote(parts)
            running[actor.__ray_ready__.remote()] = _Running(actor.map_shard.remote, None)

        def start_actors() -> None:
            """One for each GPU that is up and has none; those that wait for one have a cluster start it."""
            nonlocal started
            wanted = max(compute.workers, int(ray.cluster_resources().get("GPU", 0) / gpu))
            for _ in range(min(len(waiting), wanted - started)):
                start_actor()  # it may have no GPU before the end
                started += 1

        start_actors()
    else:
        task: Any = ray.remote(num_cpus=1, max_retries=_RETRIES, **ANYWHERE)(_run_task)
        in_task = functools.partial(task.remote, parts, uuid.uuid4().hex)
        for _ in range(min(unfinished, cpus())):
            name = waiting.popleft()
            running[in_task(name, shards[name])] = _Running(in_task, name)
    while unfinished:
        ready, _ = ray.wait(list(running), timeout=_LOOK_EVERY)
        next(watch)
        if gpu:
            start_actors()
        if not ready:
            continue
        [ended] = ready
        start, shard = running.pop(ended)
        died = False
        try:
            account = ray.get(ended)
        except ray.exceptions.ActorUnavailableError:
            account = None  # its node may be lost: Ray starts it on another, or gives it up
            waiting.extendleft([shard] if shard else [])
            time.sleep(_PAUSE)
        except deaths():
            if shard is None:
                raise
            account = _map_apart(
                table, parts, work.folder / shard, shards[shard], label=work.label, gpu=gpu, instead=instead
            )
            died = True
        if waiting and died and gpu:
            start_actor()
        elif waiting:
            name = waiting.popleft()
            running[start(name, shards[name])] = _Running(start, name)
        del start  # an actor that nothing refers to gives its GPU to one whose node was lost
        if isinstance(account, Account):
            unfinished -= 1
            yield account


class _Running(NamedTuple):
    """What runs: how the same actor, or a task, is given the next shard, and the shard's name, None while it starts."""

    start: Callable[..., Any]
    shard: str | None


def _map_apart(
    table: pa.Table, parts: tuple[Any], path: Path, shard: ShardRows, *, label: str, gpu: float, instead: Instead | None
) -> Account:
    """Maps and writes a shard whose processes died: its halves, theirs, and so on down to the image that is at fault.

    Raises:
        UserError: no worker can be made, or an image ends its process each time, and there is no `instead`.
    """
    import ray

    task: Any = ray.remote(num_cpus=0 if gpu else 1, num_gpus=gpu, **ANYWHERE)(_run_part)
    mapping, waiting = uuid.uuid4().hex, [ShardRows(shard.first, 0), *_halves(shard)]
    done: list[pa.Table] = []
    seconds = 0.0
    while waiting:
        part = waiting.pop(0)
        try:
            retries = _RETRIES if part.rows < 2 else 0
            account, out = ray.get(task.options(max_retries=retries).remote(parts, mapping, part))
        except deaths() as death:
            if part.rows > 1:
                waiting[:0] = _halves(part)
                continue
            short = isinstance(death, ray.exceptions.OutOfMemoryError)  # Ray ends any task where memory is short
            lost = isinstance(death, ray.exceptions.NodeDiedError)
            what = f"its {'node was lost' if lost else 'process was ended by a signal'}, {1 + _RETRIES} times"
            if short:
                what = "the machine's memory did not do for its process, several times"
            if not part.rows or instead is None or short or lost:
                raise _poison(table.slice(part.first, part.rows), path, label, what) from None
            done.append(instead(table.slice(*part), what))
            continue
        if account.problem:
            return account
        seconds += account.seconds
        done += out
    write_table(path, pa.concat_tables(done))
    return Account(shard.rows, seconds, None)


def _halves(shard: ShardRows) -> list[ShardRows]:
    """The halves of several rows, or the one row."""
    half = shard.rows // 2
    halves = [ShardRows(shard.first, half), ShardRows(shard.first + half, shard.rows - half)]
    return [part for part in halves if part.rows]


def _poison(row: pa.Table, path: Path, label: str, what: str) -> UserError:
    """The error that names the image, the only row of a table, that ends its process; or that it ends without any."""
    if not len(row):
        return UserError(
            f"{label}: no image can be mapped: {what}",
            "enough memory for what maps images, on each core of the machine",
            "free some memory or lower compute.cpus, and repeat the command, which goes on with what is missing",
        )
    names = [str(row[column][0]) for column in ("image_id", "uri") if column in row.column_names]
    return UserError(
        f"{label}: image {', '.join(names) or 'in the only row'} of shard {path.name} cannot be mapped: {what}",
        "an image that can be decoded, and enough memory for it",
        "replace the image or take it out of its list, or free some memory or lower compute.cpus; then repeat the "
        "command, which goes on with what is missing",
    )


class _ShardMapper:
    """Computes and writes shards of a table; makes its worker with the first of them.

    Args:
        parts: a reference to the work, and to the table of `map_table`, which the processes of a node share.
    """

    def __init__(self, parts: tuple[Any]):
        import ray

        work, self.table = ray.get(parts[0])
        self.work: _Work = work
        self.worker: Worker | None = None

    def map_shard(self, name: str, shard: ShardRows) -> Account:
        return self.map_part(shard, functools.partial(write_table, self.work.folder / name))

    def map_part(self, part: ShardRows, keep: Callable[[pa.Table], None]) -> Account:
        """Maps some rows, where there are any, and hands the output on."""
        import ray

        began, problem = time.monotonic(), None
        try:
            with memory_errors(self.work.label, self.work.lower):
                if self.worker is None:
                    self.worker = self.work.make(*self.work.arguments)
                    if "torch" in sys.modules:  # each process has a core
                        sys.modules["torch"].set_num_threads(1)
                if part.rows:
                    keep(self.worker(ray.get(self.table).slice(*part).combine_chunks()))
            give_memory_back()
        except UserError as error:
            problem = (error.found, error.expected, error.remedy)
        return Account(part.rows, time.monotonic() - began, problem)


_mappers: dict[str, _ShardMapper] = {}
"""This process's mapper, by the id of its mapping: a network is loaded once, not for every shard."""


def _mapper(parts: Any, mapping: str) -> _ShardMapper:
    if mapping not in _mappers:
        _mappers.clear()
        _mappers[mapping] = _ShardMapper(parts)
    return _mappers[mapping]


def _run_task(parts: Any, mapping: str, name: str, shard: ShardRows) -> Account:
    return _mapper(parts, mapping).map_shard(name, shard)


def _run_part(parts: Any, mapping: str, part: ShardRows) -> tuple[Account, list[pa.Table]]:
    """The account of some rows, and their output, which the caller joins with that of others."""
    out: list[pa.Table] = []
    return _mapper(parts, mapping).map_part(part, out.append), out

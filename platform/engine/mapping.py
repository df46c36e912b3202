"""Maps a table, shard by shard, in Ray tasks or actors, to a folder of shards.

Each shard is written aside and renamed by the process that computed it. After a kill, only missing shards are computed.
The result is the same, because the rows of a shard depend on its position in the table only.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from mcis.datasets.storage.folders import names_in, remove
from mcis.platform.config.compute import ComputeConfig, uses_cluster
from mcis.platform.engine.cpu_mapping import CpuMapping
from mcis.platform.engine.errors import fewer_processes, user_errors
from mcis.platform.engine.gpu_mapping import GpuMapping
from mcis.platform.engine.nodes import Bundle, NodeWatch, mapping_task
from mcis.platform.engine.runtime import reserved_resources
from mcis.platform.engine.shard_mapper import MappingWork, Reject, RowRange, Worker
from mcis.platform.runs.garbage import is_abandoned
from mcis.platform.runs.progress import Bar, bar

_CHECK_INTERVAL = 3.0
"""Maximum seconds between two looks at the nodes, for CPUs and GPUs that have joined and for nodes that are missing."""


def shards_of(rows: int, shard_rows: int, suffix: str = "parquet") -> dict[str, RowRange]:
    """Returns the shards of a table of `rows` rows by the names of their files.

    Args:
        rows: Number of rows of the table.
        shard_rows: Number of rows of each shard but the last.
        suffix: Suffix of the files.
    """
    shards = [RowRange(first, min(shard_rows, rows - first)) for first in range(0, rows, shard_rows)]
    return {f"part-{shard.first:08d}-{shard.first + shard.num_rows:08d}.{suffix}": shard for shard in shards}


def map_table(
    table: pa.Table,
    folder: Path,
    *,
    worker: Worker | None = None,
    make_worker: Callable[[], Worker] | None = None,
    read: Worker | None = None,
    label: str,
    compute: ComputeConfig,
    network: bool = False,
    shard_rows: int | None = None,
    suffix: str = "parquet",
    reject: Reject | None = None,
    memory_hint: str | None = None,
) -> int:
    """Maps every shard of `table` and writes `folder/part-<first row>-<last row + 1>.<suffix>`.

    Finished shards are kept. Shards of an earlier call with other `shard_rows`, and temporary files of processes that
    were killed, are removed.

        map_table(rows, folder, worker=partial(make_labels, config), label="labels", compute=compute)
        map_table(rows, folder, make_worker=partial(PredictRows, config), label="predict", compute=compute)

    Args:
        table: The table.
        folder: Where the shards are written.
        worker: A function from rows to output rows.
        make_worker: Makes such a worker; for one that is expensive to make or cannot be pickled, such as one with a
            network. Each process calls it once. Give either `worker` or `make_worker`; both are sent by pickle.
        read: Reads files for rows, and returns the rows with columns of what it read. On a cluster, a mapping on GPUs
            calls it on any CPU while the GPUs compute; its worker gets the result instead of the rows. In all other
            cases it is not called, and the worker must read the files itself.
        label: Name of the mapping, for messages and the progress bar.
        compute: The section `compute` of the configuration.
        network: Whether each worker has a network, which runs on a GPU if `compute.gpu` is set.
        shard_rows: Number of rows of a shard. None: `compute.shard_rows`.
        suffix: Format of the shards: `parquet` or `arrow` (`write_table`).
        reject: Makes the output row of an image that ends its process by a signal. A shard whose process dies is then
            mapped row by row. None: such a shard ends the mapping.
        memory_hint: What reduces the memory of workers, used in messages, such as `lower localize.batch`. None:
            `fewer_processes`.

    Returns:
        The number of rows that were mapped by this call.

    Raises:
        UserError: A worker raised it, memory ran out, a shard ended every process that mapped it, or the cluster lacks
            nodes and starts none in time.
    """
    if (worker is None) == (make_worker is None):
        raise TypeError("map_table takes either worker or make_worker")
    work = MappingWork(worker, make_worker, read, folder, label, memory_hint or fewer_processes())
    folder.mkdir(parents=True, exist_ok=True)
    missing = _missing_shards(folder, shards_of(len(table), shard_rows or compute.shard_rows, suffix))
    num_finished = len(table) - sum(shard.num_rows for shard in missing.values())

    with bar(label, len(table), "images") as progress, user_errors():
        progress.update(num_finished)
        if not missing:
            return 0

        on_gpus = network and compute.gpu
        needed = _required_bundles(compute, on_gpus=on_gpus, reads=read is not None)
        reserved = reserved_resources()
        with NodeWatch(needed, compute.wait_minutes, f"the mapping `{label}`") as watch:
            reference = _put(table, work)
            mapping: CpuMapping | GpuMapping
            if on_gpus:
                mapping = GpuMapping(reference, work, missing, compute, _usable_nodes(watch, reserved))
            else:
                mapping = CpuMapping(table, reference, work, missing, compute, reject)
            return _run(mapping, watch, reserved, progress, num_finished)


def _required_bundles(compute: ComputeConfig, *, on_gpus: bool, reads: bool) -> list[Bundle]:
    """Returns the resources that a mapping needs at least.

    Args:
        compute: The section `compute` of the configuration.
        on_gpus: Whether its workers run on GPUs.
        reads: Whether tasks read files for them if the cluster has several nodes.
    """
    if not on_gpus:
        return [mapping_task(compute)]
    gpu = {"GPU": compute.gpu_share}
    if reads and uses_cluster():
        return [gpu, mapping_task(compute)]
    return [gpu]


def _put(table: pa.Table, work: MappingWork) -> tuple[Any]:
    """Stores what the processes of a mapping need. Returns the reference for `map_shard`."""
    import ray

    return (ray.put((work, ray.put(table))),)


def _run(
    mapping: CpuMapping | GpuMapping, watch: NodeWatch, reserved: Bundle | None, progress: Bar, num_finished: int
) -> int:
    """Runs a mapping until all its shards are written.

    Args:
        mapping: The mapping, of which nothing is submitted yet.
        watch: The nodes of the cluster.
        reserved: See `reserved_resources`.
        progress: The progress bar, in rows.
        num_finished: Number of rows that earlier calls mapped.

    Returns:
        The number of rows that were mapped.
    """
    import ray

    num_mapped = 0
    while mapping.unfinished:
        mapping.submit(_usable_nodes(watch, reserved))
        ready, _ = ray.wait(list(mapping.running), timeout=_CHECK_INTERVAL)
        watch.check()
        for result in ready:
            num_mapped += mapping.collect(result)
        progress.update(num_finished + num_mapped)
    return num_mapped


def _usable_nodes(watch: NodeWatch, reserved: Bundle | None) -> Sequence[Bundle]:
    """Returns what a mapping may use: the resources that its trial has reserved, as one node, or all nodes."""
    return [reserved] if reserved else watch.nodes


def _missing_shards(folder: Path, shards: dict[str, RowRange]) -> dict[str, RowRange]:
    """Returns the shards that `folder` lacks.

    Removes files of other divisions of the table, and those that a process was writing when it was killed.
    """
    present = set()
    for name in names_in(folder):
        if name in shards:
            present.add(name)
        elif name.startswith("part-") or is_abandoned(folder / name):
            remove(folder / name)
    return {name: shard for name, shard in shards.items() if name not in present}

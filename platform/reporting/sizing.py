"""Compares the disk space and memory that a run needs with what is free, before its first stage.

Times are not estimated here: each stage shows its own rate and the time left as soon as its first shard is done
(`runs/progress.py`).
"""

import collections
import functools
import math
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from rich.filesize import decimal
from torch import Tensor, nn

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.platform.config.compute import uses_cluster
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.engine.cache import cache_limit
from mcis.platform.engine.nodes import mapping_task, task_capacity
from mcis.platform.networks.build import build_backbone
from mcis.platform.networks.features import BATCH_ON_CPU
from mcis.platform.reporting.terminal import print_table
from mcis.platform.reporting.written_files import PARTS_OF_STAGE, Part, count_images, parts_of_run
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import bytes_in, existing_parent
from mcis.platform.runs.progress import console
from mcis.platform.runs.workspace import Workspace

_PROCESS_BYTES = 600 * 2**20
"""Memory in bytes of a process that maps images, with its network and libraries, before its first batch."""
_TABLE_FROM = 2**30
"""Needed disk space in bytes from which a table of its parts is printed."""


class Disk(NamedTuple):
    """What a run writes to one file system.

    Attributes:
        folder: A folder on it.
        parts: What is written there.
        needed: Bytes that the run takes there at one time, at the most.
        free: Free bytes. Caches count as free, because the run reads or replaces them.
    """

    folder: Path
    parts: list[Part]
    needed: int
    free: int


class Sizing(NamedTuple):
    """What a run needs, and what is free.

    Attributes:
        images: Number of images.
        disks: The file systems to which it writes.
        processes: Number of processes on this machine that map images at the same time.
        process_bytes: About how much memory each of them takes.
        free_memory: Free memory of this machine, bytes.
    """

    images: int
    disks: list[Disk]
    processes: int
    process_bytes: int
    free_memory: int


def size_run(
    config: Config, workspace: Workspace, listing: Listing, stages: Collection[str], *, written: int = 0
) -> Sizing:
    """Computes what a run needs. Opens a few images, and no other file.

    Args:
        config: The configuration.
        workspace: The workspace, which may be missing. For one in a bucket, the copies on this machine are counted.
        listing: The listing of the image sources.
        stages: Names of the stages that the run computes.
        written: Bytes that an interrupted call has written for these stages.
    """
    images = count_images(config, listing)
    parts = parts_of_run(config, images, stages)
    cores = os.cpu_count() or 1
    free_memory = psutil.virtual_memory().available
    machine = {"CPU": min(config.compute.cpus or cores, cores), "memory": free_memory}
    return Sizing(
        images=images.listed,
        disks=_disks(config, workspace, parts, written, listing.table.nbytes),
        processes=max(1, task_capacity([machine], mapping_task(config.compute))),
        process_bytes=_process_bytes(config),
        free_memory=free_memory,
    )


def _process_bytes(config: Config) -> int:
    """Returns about how much memory a process takes that maps images with the classifier on a CPU."""
    if not config.trains_classifier or config.compute.gpu:
        return _PROCESS_BYTES
    batch = BATCH_ON_CPU if config.classifier.trains_on_features else config.localize.batch
    batch = min(batch, config.compute.shard_rows)
    return _PROCESS_BYTES + batch * _forward_bytes(config.classifier)


@functools.cache
def _forward_bytes(config: ClassifierConfig) -> int:
    """Returns about how much memory a forward pass of the backbone takes per image without gradients, bytes.

    It is twice the input and output of the largest convolution, which may copy its input.
    """
    largest = 0

    def compare(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal largest
        largest = max(largest, inputs[0].nbytes + output.nbytes)

    with torch.device("meta"):
        backbone = build_backbone(config).eval()
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(compare)
    with torch.inference_mode():
        backbone(torch.zeros(1, 3, config.input_size, config.input_size, device="meta"))
    return 2 * largest


def _disks(config: Config, workspace: Workspace, parts: list[Part], written: int, table_bytes: int) -> list[Disk]:
    """Returns what is written to each file system: that of the workspace, of its cache, and of temporary files.

    On a cluster, temporary files are on each node. So are the copies of a workspace in a bucket, which has no limit.
    """
    compute = config.compute
    on_cluster = uses_cluster()
    places = []
    if not (on_cluster and workspace.uri):
        stored = [part for part in parts if part.place != "cache"]
        limit = cache_limit(compute, workspace)
        cached = [_cached_part(part, limit) for part in parts if part.place == "cache"]
        output_size = sum(part.size for part in stored if part.place == "output")
        needed = max(0, output_size + _largest_temporary(stored) - written)
        places.append(Disk(workspace.store, stored, needed, 0))
        needed = sum(part.size for part in cached)
        replaced = bytes_in(workspace.cache) if needed else 0
        places.append(Disk(workspace.cache, cached, needed, replaced))
    if not on_cluster:
        spilled = max(0, table_bytes - int(compute.object_store_gb * 2**30))
        part = Part("index", "rows of images, spilled by Ray", spilled, "temporary", "compute.object_store_gb")
        folder = Path("/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir())
        places.append(Disk(folder, [part], spilled, 0))

    disks: dict[int, Disk] = {}
    for place in places:
        folder = existing_parent(place.folder)
        device = folder.stat().st_dev
        disk = disks.get(device) or Disk(place.folder, [], 0, shutil.disk_usage(folder).free)
        disks[device] = Disk(disk.folder, disk.parts + place.parts, disk.needed + place.needed, disk.free + place.free)
    return [disk for disk in disks.values() if disk.needed]


def _cached_part(part: Part, limit: int) -> Part:
    """Returns the part of what could be cached that fits the cache."""
    if part.size <= limit:
        return part
    return part._replace(name=f"{part.name} ({limit / part.size:.0%} of them)", size=limit)


def _largest_temporary(parts: list[Part]) -> int:
    """Returns the largest size that the temporary files of one stage have, bytes."""
    sizes: collections.Counter[str] = collections.Counter()
    for part in parts:
        if part.place == "temporary":
            sizes[part.stage] += part.size
    return max(sizes.values(), default=0)


def check_sizes(stages: Collection[str], config: Config, context: RunContext, written: int) -> None:
    """Prints what a run needs for the stages that it has to compute, and checks that the disks have enough space.

    Args:
        stages: Names of these stages.
        config: The configuration.
        context: The context of the run before its first stage.
        written: Bytes that an interrupted call has written for these stages.

    Raises:
        UserError: A disk is too small for the run, unless `compute.check_disk` is false.
    """
    assert context.sources is not None
    names = [name for name in stages if name in PARTS_OF_STAGE]
    if not names:
        return

    sizing = size_run(config, context.workspace, context.sources.listing(), names, written=written)
    console.print(f"needs:   {needs_text(sizing)}")
    if sum(disk.needed for disk in sizing.disks) >= _TABLE_FROM:
        print_parts(sizing)
    note = memory_note(sizing)
    if note:
        console.print(f"note: {note}")
    if config.compute.check_disk:
        check_disks(sizing)


def check_disks(sizing: Sizing) -> None:
    """Raises UserError if a run does not fit a disk."""
    for disk in sizing.disks:
        if disk.needed > disk.free:
            raise _disk_error(disk)


def _disk_error(disk: Disk) -> UserError:
    large = [part for part in disk.parts if part.size > disk.needed / 20]
    large.sort(key=lambda part: part.size, reverse=True)
    sizes = ", ".join(f"{part.name} {decimal(part.size)}" for part in large)
    cached = sum(part.size for part in disk.parts if part.place == "cache")
    fitting = (disk.free - (disk.needed - cached)) // 2**30
    keys = []
    for part in large:
        is_cache = part.place == "cache" and fitting > 0
        keys.append(f"compute.cache_gb={fitting}" if is_cache else part.keys)
    return UserError(
        f"the run writes {decimal(disk.needed)} to the disk of {disk.folder}, where {decimal(disk.free)} are free: "
        f"{sizes}",
        "free disk space for all files of the run",
        "free some space (`mcis gc` shows what no run uses), choose another --workspace DIR, or write less: "
        f"{'; '.join(dict.fromkeys(keys))}; compute.check_disk=false starts the run anyway",
    )


def memory_note(sizing: Sizing) -> str:
    """Returns advice if the processes may take more memory than is free; else an empty text."""
    fitting = sizing.free_memory // sizing.process_bytes
    if fitting >= sizing.processes:
        return ""
    setting = f"compute.cpus={max(1, fitting)}"
    if uses_cluster():  # compute.cpus is that of a local Ray
        setting = f"compute.memory_gb={math.ceil(10 * sizing.process_bytes / 2**30) / 10:g}"
    return f"the free memory is enough for {fitting} processes; set {setting}, or free some"


def needs_text(sizing: Sizing) -> str:
    """Returns what a run needs and what is free, as text. The disks are named if there are several."""
    texts = []
    for disk in sizing.disks:
        folder = f" in {disk.folder}" if len(sizing.disks) > 1 else ""
        texts.append(f"{decimal(disk.needed)} of {decimal(disk.free)} free disk{folder}")
    free_memory = decimal(sizing.free_memory)
    texts.append(f"{sizing.processes} processes of {decimal(sizing.process_bytes)} each in {free_memory} free memory")
    return "; ".join(texts)


def print_parts(sizing: Sizing) -> None:
    """Prints a table of what a run writes."""
    rows = []
    for disk in sizing.disks:
        for part in disk.parts:
            if part.size >= disk.needed / 1000:
                rows.append((part.name, part.stage, decimal(part.size), part.place, part.keys))
    columns = ("files", "stage", "disk", "place", "fewer by")
    print_table(f"Files of {sizing.images:,} images", columns, rows, numbers=("disk",), optional=("stage", "place"))

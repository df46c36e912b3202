"""Maps a table on two GPUs that Ray only counts. `test_mapping_alone.py` runs this script in a process of its own.

Arguments:
    FOLDER: Receives the shards, and a file for each process that notes its GPU.
    RAY_FOLDER: The folder of Ray's own files.
"""

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import ray
import torch

from mcis.datasets.errors import UserError
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.nodes import check_gpus
from mcis.platform.engine.shard_mapper import Worker
from mcis.platform.runs.files import read_table

TABLE = pa.table({"n": range(20)})
WHOLE = ComputeConfig(gpu=True, shard_rows=2)
HALF = ComputeConfig(gpu=True, gpu_share=0.5, shard_rows=2)


def map_on_gpus(folder: Path, make_worker: Callable[[], Worker], compute: ComputeConfig = WHOLE) -> int:
    return map_table(TABLE, folder, make_worker=make_worker, label="gpus", compute=compute, network=True)


def wait_for_four(folder: Path) -> Worker:
    """Notes the GPUs of this process. Its worker waits for all processes that share the GPUs, one for each CPU."""
    gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    (folder / f"made by {os.getpid()} with {','.join(gpus)}").touch()

    def wait(rows: pa.Table) -> pa.Table:
        while len(list(folder.glob("made by *"))) < 4:
            time.sleep(0.05)
        return rows

    return wait


def wait_for_two(folder: Path) -> Worker:
    """Notes the share of a GPU. The worker waits for a process on each GPU, and then for others that could start."""
    share = ray.get_runtime_context().get_assigned_resources()["GPU"]
    (folder / f"shared by {os.getpid()} with {share}").touch()

    def wait(rows: pa.Table) -> pa.Table:
        while len(list(folder.glob("shared by *"))) < 2:
            time.sleep(0.05)
        time.sleep(0.5)
        return rows

    return wait


def run_out(folder: Path, times: int) -> Worker:
    """Makes a worker whose memory runs out, as often as `times` in all processes together."""

    def work(rows: pa.Table) -> pa.Table:
        for number in range(times):
            with contextlib.suppress(FileExistsError):
                (folder / f"{times} ran out {number}").touch(exist_ok=False)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return rows

    return work


def run_out_in_the_last_shard() -> Worker:
    """Makes a worker whose memory runs out in the last shard, when other processes have ended, each time."""

    def work(rows: pa.Table) -> pa.Table:
        if 19 in rows["n"].to_pylist():
            time.sleep(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        return rows

    return work


def die_until_repaired(folder: Path) -> Worker:
    """Makes a worker that ends its process at row 7 while the file `repaired` is missing."""

    def work(rows: pa.Table) -> pa.Table:
        if 7 in rows["n"].to_pylist() and not (folder / "repaired").exists():
            os.kill(os.getpid(), 9)
        return rows

    return work


def check_processes_share_gpus(folder: Path) -> None:
    assert map_on_gpus(folder / "shards", functools.partial(wait_for_four, folder)) == 20
    map_on_gpus(folder / "shared", functools.partial(wait_for_two, folder), HALF)


def check_memory_runs_out(folder: Path) -> None:
    """There are four processes. The last one is started once more, unless it is the first whose memory runs out."""
    with pytest.raises(UserError, match="gpus: memory ran out"):
        map_on_gpus(folder / "last shard", run_out_in_the_last_shard)
    map_on_gpus(folder / "four times", functools.partial(run_out, folder, 4))
    with pytest.raises(UserError, match="gpus: memory ran out"):
        map_on_gpus(folder / "five times", functools.partial(run_out, folder, 5))
    map_on_gpus(folder / "five times", functools.partial(run_out, folder, 5))


def check_a_shard_kills_its_process(folder: Path) -> None:
    make_worker = functools.partial(die_until_repaired, folder)
    with pytest.raises(UserError, match=r"shard part-00000006-00000008\.parquet cannot be mapped"):
        map_on_gpus(folder / "poisoned", make_worker)
    (folder / "repaired").touch()
    map_on_gpus(folder / "poisoned", make_worker)
    assert read_table(folder / "poisoned")["n"].to_pylist() == list(range(20))


def check_too_few_gpus() -> None:
    check_gpus(ComputeConfig(workers=2, gpu=True))
    check_gpus(ComputeConfig(workers=4))
    message = "compute.gpu=true needs 4 x (1 GPU); the cluster lacks 2 x (1 GPU)"
    with pytest.raises(UserError, match=re.escape(message)):
        check_gpus(ComputeConfig(workers=4, gpu=True))


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, _temp_dir=sys.argv[2])
    output = Path(sys.argv[1])
    check_processes_share_gpus(output)
    check_memory_runs_out(output)
    check_a_shard_kills_its_process(output)
    check_too_few_gpus()
    ray.shutdown()

"""Mapping tables in a Ray of its own: one that has little memory, and one that counts GPUs."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mcis.platform.runs.files import read_table


@pytest.mark.slow
def test_a_machine_without_memory_ends_the_mapping_and_rejects_no_image(tmp_path: Path) -> None:
    """Starts a separate Ray with a memory threshold of 2 %, then one with the default threshold."""
    script = tmp_path / "memory.py"
    script.write_text("""
import sys, time
from pathlib import Path
import pyarrow as pa
from mcis.datasets.errors import UserError
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.runtime import ray_session

def make():
    def work(rows):
        time.sleep(1 if sys.argv[2] == "enough" else 60)
        return rows
    return work

def reject(row, what):
    raise AssertionError("an image was rejected")

with ray_session(ComputeConfig()):
    try:
        table, out = pa.table({"n": range(4)}), Path(sys.argv[1])
        options = {"compute": ComputeConfig(), "shard_rows": 4, "reject": reject}
        mapped = map_table(table, out, make_worker=make, label="all", **options)
    except UserError as error:
        print(error.found)
    else:
        print(mapped)
""")
    for memory, message in (("short", "its process was ended because the machine ran out of memory"), ("enough", "4")):
        environment = {"RAY_memory_usage_threshold": "0.02", "RAY_memory_monitor_refresh_ms": "200"}
        environment = dict(os.environ) | (environment if memory == "short" else {})
        command = [sys.executable, str(script), str(tmp_path / "out"), memory]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert message in done.stdout, done.stdout


@pytest.mark.slow
def test_workers_with_a_gpu_are_actors_that_keep_it(tmp_path: Path) -> None:
    """In a Ray of its own, which counts two GPUs whether or not there are any: nothing here computes on one."""
    script = tmp_path / "gpus.py"
    script.write_text("""
import contextlib, functools, os, sys, time
from pathlib import Path
import pyarrow as pa, pyarrow.parquet, ray, torch
from mcis.datasets.errors import UserError
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.nodes import check_gpus

whole = ComputeConfig(gpu=True, shard_rows=2)
half = ComputeConfig(gpu=True, gpu_share=0.5, shard_rows=2)
ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, _temp_dir=sys.argv[2])
out, table = Path(sys.argv[1]), pa.table({"n": range(20)})

def make():
    gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    (out / f"made by {os.getpid()} with {','.join(gpus)}").touch()
    def wait(rows):  # until all that share the GPUs, one for each CPU, are at work
        while len(list(out.glob("made by *"))) < 4:
            time.sleep(0.05)
        return rows
    return wait

assert map_table(table, out / "shards", make_worker=make, label="gpus", compute=whole, network=True) == 20

def share():
    gpu = ray.get_runtime_context().get_assigned_resources()["GPU"]
    (out / f"shared by {os.getpid()} with {gpu}").touch()
    def wait(rows):  # until one process for each GPU is at work, and then for any others that could start
        while len(list(out.glob("shared by *"))) < 2:
            time.sleep(0.05)
        time.sleep(0.5)
        return rows
    return wait

map_table(table, out / "shared", make_worker=share, label="gpus", compute=half, network=True)

def make_large(most):
    def work(rows):
        if most < 0 and 19 in rows["n"].to_pylist():  # of the last shard, when others have ended
            time.sleep(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        for number in range(most):
            with contextlib.suppress(FileExistsError):
                (out / f"{most} ran out {number}").touch(exist_ok=False)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return rows
    return work

for most, ends in ((-1, False), (4, True), (5, False), (5, True)):  # of four processes, the last one starts again
    try:
        make_worker = functools.partial(make_large, most)
        folder = out / f"large {most}"
        map_table(table, folder, make_worker=make_worker, label="gpus", compute=whole, network=True)
        assert ends
    except UserError as error:
        assert not ends and "gpus: memory ran out" in error.found, error

def make_poisoned():
    def work(rows):
        if 7 in rows["n"].to_pylist() and not (out / "repaired").exists():
            os.kill(os.getpid(), 9)
        return rows
    return work

try:
    map_table(table, out / "poisoned", make_worker=make_poisoned, label="gpus", compute=whole, network=True)
except UserError as error:
    assert "shard part-00000006-00000008.parquet cannot be mapped" in error.found, error
else:
    raise AssertionError("it should have died")
(out / "repaired").touch()
map_table(table, out / "poisoned", make_worker=make_poisoned, label="gpus", compute=whole, network=True)
found = [n for path in sorted((out / "poisoned").iterdir()) for n in pa.parquet.read_table(path)["n"].to_pylist()]
assert found == list(range(20)), found

check_gpus(ComputeConfig(workers=2, gpu=True))
check_gpus(ComputeConfig(workers=4))
try:
    check_gpus(ComputeConfig(workers=4, gpu=True))
except UserError as error:
    assert "compute.gpu=true needs 4 x (1 GPU); the cluster lacks 2 x (1 GPU)" in error.found, error
else:
    raise AssertionError("four workers on two GPUs")
ray.shutdown()
""")
    with tempfile.TemporaryDirectory(prefix="mcis-", dir="/tmp") as folder:
        done = subprocess.run([sys.executable, str(script), str(tmp_path), folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    worker_files = [path.name for path in tmp_path.glob("made by *")]
    assert sorted(name.rpartition(" ")[2] for name in worker_files) == ["0", "0", "1", "1"]
    shared = [path.name for path in tmp_path.glob("shared by *")]
    assert [name.rpartition(" ")[2] for name in shared] == ["0.5", "0.5"], "half of the GPUs are left to another run"
    assert read_table(tmp_path / "shards")["n"].to_pylist() == list(range(20))

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
    script = Path(__file__).with_name("gpu_workers.py")
    with tempfile.TemporaryDirectory(prefix="mcis-", dir="/tmp") as folder:
        done = subprocess.run([sys.executable, str(script), str(tmp_path), folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    worker_files = [path.name for path in tmp_path.glob("made by *")]
    assert sorted(name.rpartition(" ")[2] for name in worker_files) == ["0", "0", "1", "1"]
    shared = [path.name for path in tmp_path.glob("shared by *")]
    assert [name.rpartition(" ")[2] for name in shared] == ["0.5", "0.5"], "half of the GPUs are left to another run"
    assert read_table(tmp_path / "shards")["n"].to_pylist() == list(range(20))

"""The Ray that a command starts: memory allocation in its processes, errors at its start, and its CPUs."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.engine.nodes import wait_for_nodes
from mcis.platform.engine.runtime import ALLOCATOR, allocator_variables

IN_A_TASK = """
import json, os, ray
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session

with ray_session(ComputeConfig(cpus=1, object_store_gb=0.1)):
    task = ray.remote(lambda: {n: v for n, v in os.environ.items() if n.startswith("MALLOC_")})
    print(json.dumps(ray.get(task.remote())))
"""


def test_an_allocator_that_the_user_sets_is_kept() -> None:
    assert allocator_variables({"HOME": "/"}) == ALLOCATOR
    assert allocator_variables({"HOME": "/", **ALLOCATOR}) == ALLOCATOR, "a second session of the process"
    assert allocator_variables({"MALLOC_ARENA_MAX": "2"}) == {}
    assert allocator_variables({"LD_PRELOAD": "libjemalloc.so"}) == {}


@pytest.mark.slow
def test_a_ray_that_cannot_start_is_an_error() -> None:
    code = """
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session

with ray_session(ComputeConfig(object_store_gb=1e6)):
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"UserError: Ray did not start: .*memory", done.stderr)


@pytest.mark.slow
def test_every_process_that_ray_starts_keeps_freed_memory() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_TASK], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == ALLOCATOR


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator is glibc's")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    code = """
import resource, numpy as np
from mcis.platform.engine.runtime import give_memory_back

def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 2**20

before = megabytes()
block = np.ones(2**25)  # 256 MiB
del block
kept = megabytes()
give_memory_back()
print(kept - before, megabytes() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | ALLOCATOR
    )
    kept, left = map(int, done.stdout.split())
    assert kept > 200
    assert left < 100


@pytest.mark.parametrize(("workers", "fit"), [(6, True), (7, False)])
def test_trainings_whose_workers_would_take_every_cpu_are_refused(ray_local: None, workers: int, fit: bool) -> None:
    """Ray has four logical CPUs here, and a training worker reserves half of one."""
    bundles = [*[{"CPU": 0.5}] * workers, {"CPU": 1.0}]
    with contextlib.nullcontext() if fit else pytest.raises(UserError, match=r"lacks 1 x \(0.5 CPU\)"):
        wait_for_nodes(bundles, 15, "a training")

"""What a process frees stays in it within the block, and goes back behind it; a user's own settings are left."""

import resource
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from mcis.platform.engine.allocator import freed_memory_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(32):
        torch.ones(10**7)  # 38 MiB, more than glibc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

empty = resident()
with freed_memory_kept():
    kept = faults()
    held = resident() - empty
print(kept, held, resident() - empty)
"""
PAGES = 32 * 4 * 10**7 // resource.getpagesize()


def run(environment: dict[str, str]) -> list[int]:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator is glibc's")
def test_what_is_freed_is_kept_in_the_block_and_given_back_behind_it() -> None:
    faults, held, left = run({})
    assert faults < PAGES / 2, "most of the tensors lie in pages of those before"
    assert held > 2**25
    assert left < 2**25


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator is glibc's")
def test_a_users_own_settings_are_left() -> None:
    faults, held, _ = run({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert faults > PAGES / 2
    assert held < 2**25

"""What a benchmark prints of the machine it ran on, and reads of a finished run."""

import contextlib
import multiprocessing
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcis.platform.runs.files import read_json
from mcis.platform.runs.workspace import RunFolder


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def processes() -> Iterator[Any]:
    """A multiprocessing pool of one process per core, all of which have started."""
    context = multiprocessing.get_context("spawn")
    meeting = context.Barrier(cores() + 1)
    with context.Pool(cores(), initializer=meeting.wait) as pool:
        meeting.wait()
        yield pool


def describe() -> str:
    """One line: processor, cores, memory, and versions that figures depend on."""
    import ray
    import torch

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return (
        f"machine: {model}, {cores()} cores, {memory:.0f} GiB, {gpu}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, ray {ray.__version__}"
    )


def stage_seconds(run: Path) -> dict[str, float]:
    """Wall seconds of each stage of a finished run, given its folder."""
    seconds: dict[str, float] = read_json(RunFolder(run).scores)["seconds"]
    return seconds

"""What benchmarks share: their options, sides measured in turn, processes apart, and the machine that they ran on."""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mcis.platform.runs.files import read_json
from mcis.platform.runs.workspace import RunFolder


def arguments(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """A parser of options that are numbers, with their defaults."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def in_turn(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each side measured in each of some rounds, the sides one after the other in each."""
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, measure in sides.items():
            measured[side].append(measure())
    return measured


def medians(measured: Mapping[str, list[float]], unit: str, *, images: int = 0) -> dict[str, float]:
    """The median of each side, which is printed with its range and, of seconds, as so many images a second."""
    found = {side: statistics.median(values) for side, values in measured.items()}
    for side, median in found.items():
        rate = f" {images / median:10.2f} images/s" if images else ""
        print(f"{side:10}{median:10.2f} {unit} ({min(measured[side]):.2f}..{max(measured[side]):.2f}){rate}")
    return found


def alone(script: str, *words: str, environment: Mapping[str, str] | None = None) -> Any:
    """The JSON that a script prints, run in a process of its own."""
    done = subprocess.run([sys.executable, script, *words], check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout)


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

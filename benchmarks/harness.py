"""Shared parts of the benchmarks: options, measurements in turn, separate processes, description of the machine."""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcis.platform.runs.files import read_json
from mcis.platform.runs.workspace import RunFolder


def option_parser(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """Returns a parser of integer options with these defaults."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--set KEY=VALUE`, whose values are in the attribute `overrides`."""
    help_text = "a value to set, as in `mcis run --set`"
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help=help_text)


def add_devkit(parser: argparse.ArgumentParser) -> None:
    """Adds the options `--voc`, `--classes` and `--train-list`."""
    parser.add_argument("--voc", type=Path, help="VOC devkit [synthetic scenes]")
    parser.add_argument("--classes", type=Path, help="file of class names [classes.txt of the devkit]")
    parser.add_argument("--train-list", default="train", help="list of training images of the devkit [train]")


@contextlib.contextmanager
def working_folder(folder: Path | None) -> Iterator[Path]:
    """Yields the absolute path of a folder, which is made if it is missing. None: a temporary folder."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()
    else:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)


def measure_in_turn(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measures all sides one after the other in each round, and returns the measurements of each side."""
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, measure in sides.items():
            measured[side].append(measure())
    return measured


def print_medians(measured: Mapping[str, list[float]], unit: str, *, images: int = 0) -> dict[str, float]:
    """Prints and returns the median of each side.

    Args:
        measured: Measurements of each side.
        unit: Unit of the measurements.
        images: Number of images that a measurement in seconds is for. 0: print no images per second.
    """
    medians = {side: statistics.median(values) for side, values in measured.items()}
    for side, median in medians.items():
        rate = f" {images / median:10.2f} images/s" if images else ""
        print(f"{side:10}{median:10.2f} {unit} ({min(measured[side]):.2f}..{max(measured[side]):.2f}){rate}")
    return medians


def mean_text(values: Sequence[float], width: int = 6) -> str:
    """Returns the mean and the standard deviation of values as text. The deviation of a single value is 0.

    Args:
        width: Number of characters of the mean.
    """
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{width}.2f} +-{deviation:5.2f}"


def run_script(script: str, *words: str, environment: Mapping[str, str] | None = None) -> Any:
    """Runs a script in a separate process and returns the JSON value that it prints."""
    completed = subprocess.run([sys.executable, script, *words], check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(completed.stdout)


def run_mcis(*words: str) -> None:
    """Runs a command of mcis without showing its output, and ends this process with that output if it fails."""
    completed = subprocess.run([sys.executable, "-m", "mcis.platform.cli", *words], capture_output=True, text=True)
    if completed.returncode:
        sys.exit(completed.stdout + completed.stderr)


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def process_pool() -> Iterator[Any]:
    """Yields a multiprocessing pool of one process per core, after all processes have started."""
    context = multiprocessing.get_context("spawn")
    started = context.Barrier(available_cores() + 1)
    with context.Pool(available_cores(), initializer=started.wait) as pool:
        started.wait()
        yield pool


def describe_machine() -> str:
    """Returns one line with the processor, cores, memory, GPU and versions that measurements depend on."""
    import ray
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return (
        f"machine: {_processor_name()}, {available_cores()} cores, {memory:.0f} GiB, {gpu}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, ray {ray.__version__}"
    )


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def stage_seconds(run: Path) -> dict[str, float]:
    """Returns the wall seconds of each stage of a finished run, given the run's folder."""
    seconds: dict[str, float] = read_json(RunFolder(run).scores)["seconds"]
    return seconds

"""Use of this machine's processors, memory, disk, network and GPUs while a run computes, as MLflow measures it."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mcis.datasets.errors import UserError

INTERVAL = 10.0
"""Seconds between two samples."""


@contextlib.contextmanager
def sampled(report: Callable[[Mapping[str, float]], None], *, interval: float = INTERVAL) -> Iterator[None]:
    """Hands a sample to `report` every `interval` seconds, from one thread, while the block runs.

    A share of processor time is that of the time since the sample before. GPUs are sampled where MLflow finds
    nvidia-ml-py or pyrsmi.
    """
    stop = threading.Event()

    def loop() -> None:
        monitors = _monitors()
        _sample(monitors)  # shares and transferred bytes are counted from here on
        while not stop.wait(interval):
            try:
                report(_sample(monitors))
            except UserError:  # MLflow's store; whoever logs next in the main thread has the same error
                return

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=interval)


def _sample(monitors: list[Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for monitor in monitors:
        monitor.collect_metrics()
        values |= monitor.aggregate_metrics()
        monitor.clear_metrics()
    return values


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    for gpus in (GPUMonitor, ROCMMonitor):
        with contextlib.suppress(ImportError, RuntimeError):  # no such GPUs, or no library that reads them
            monitors.append(gpus())
    return monitors

"""A Ray to work on: the cluster of RAY_ADDRESS, or a local one; and whether it has what the work needs."""

import contextlib
import ctypes
import importlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import Any

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import COPIES_VARIABLE
from mcis.platform.config.compute import ComputeConfig

_ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_oom_retries": "4",  # else a task that takes too much memory is started again without end
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how late a training's end is noticed
}
"""Variables that Ray reads when it is imported; those that the user set are left."""
_SHARED = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Torch's threads wait for each other at the end of each operator. Where another process takes a core from one of them,
the others had better sleep than spin: with a competitor on two cores, a spinning training takes 1.7 times as long.
Where none does, a sleeping one takes 1.2 times as long."""
ANYWHERE: Any = {"scheduling_strategy": "DEFAULT"}
"""Options of tasks and actors: Ray would put them into what a trial of Ray Tune reserves for its driver."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**26)}
"""glibc gives large tensors back to the system and faults them in again, layer by layer; these make a process keep what
it frees (`benchmarks/allocation.py`). They are read when a process starts, so every process that Ray starts has them,
unless the user sets the allocator."""


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """ALLOCATOR, or nothing where the environment sets the allocator or takes another one's place for glibc's."""
    return {} if any(name.startswith(("MALLOC_", "LD_PRELOAD")) for name in environment) else dict(ALLOCATOR)


@contextlib.contextmanager
def ray_session(compute: ComputeConfig, *, shared: bool = False, verbose: bool = False) -> Iterator[None]:
    """Connects to the cluster of RAY_ADDRESS (also inside a submitted job), else starts a local Ray for the block.

    A Ray that is already connected is used as it is. Otherwise SIGTERM raises KeyboardInterrupt in the block.

    Args:
        shared: whether trainings share their cores with other work, as they do on a cluster.
    """
    shared = shared or bool(os.environ.get("RAY_ADDRESS"))
    of_workers = allocator_variables(os.environ) | (_SHARED if shared else {})
    for name, value in {**_ENVIRONMENT, **of_workers}.items():
        os.environ.setdefault(name, value)
    # What the driver needs next takes seconds to load, as Ray takes to start. Two threads may not load it at once:
    # Python ends one of them where their imports wait for each other.
    modules = ("torch", "mlflow.tracking")
    loading = threading.Thread(target=lambda: [importlib.import_module(name) for name in modules], daemon=True)
    loading.start()
    import ray

    if ray.is_initialized():
        loading.join()
        yield
        return
    logs: Any = {"log_to_driver": verbose, "logging_level": logging.INFO if verbose else logging.ERROR}
    with contextlib.ExitStack() as blocks:
        if os.environ.get("RAY_ADDRESS"):
            of_all = [name for name in (*of_workers, "RAY_ADDRESS", COPIES_VARIABLE) if name in os.environ]
            blocks.callback(ray.shutdown)
            # Trials of a study have to know, too, that they are on a cluster, which may grow.
            ray.init(address="auto", runtime_env={"env_vars": {name: os.environ[name] for name in of_all}}, **logs)
        else:
            # Unix sockets allow about 100 characters, so the folder's name is short.
            place = "/tmp" if os.path.isdir("/tmp") else None
            folder = blocks.enter_context(TemporaryDirectory(prefix="mcis-", dir=place, ignore_cleanup_errors=True))
            blocks.callback(ray.shutdown)
            # A token of this process and its children; else Ray writes one into the home directory, readable by all.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            try:
                ray.init(
                    address="local",
                    # Trainers, decoders and drivers share the cores, of which there may be but two.
                    num_cpus=compute.cpus or max(4, os.cpu_count() or 1),
                    object_store_memory=int(compute.object_store_gb * 2**30),
                    include_dashboard=False,
                    _temp_dir=folder,
                    **logs,
                )
            except Exception as error:  # of no narrower type
                needed = "memory for compute.object_store_gb, and a core to spare: its processes have half a minute"
                remedy = "lower compute.object_store_gb, or repeat the command when less runs"
                raise UserError(f"Ray did not start: {error}", needed, remedy) from error
        _quiet_libraries(verbose=verbose)
        blocks.enter_context(_termination_interrupts())
        loading.join()
        yield


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Makes SIGTERM end the block as Ctrl-C does, in the main thread, and but once: the end is not to be interrupted.

    Ray, when it starts, has put a handler of its own in its place, which ends the process where it stands.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(*received) from error  # Ray's calls raise one of their own
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _quiet_libraries(*, verbose: bool) -> None:
    """Turns off Ray Data's progress bars and, unless `verbose`, the logs of Ray's libraries."""
    import ray.data

    if not verbose:
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a study says which trials failed, and why
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        logging.getLogger("ray.train").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False


def give_memory_back() -> None:
    """Gives the system what this process freed and keeps: Ray's idle processes would hold it while others work."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def is_one_node() -> bool:
    """Whether the cluster is a single machine, for now."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1


def cpus() -> int:
    """How many tasks run at a time: one per CPU of a cluster, on a single machine one per core."""
    import ray

    logical = max(1, int(ray.cluster_resources().get("CPU", 1)))
    return min(logical, os.cpu_count() or 1) if is_one_node() else logical

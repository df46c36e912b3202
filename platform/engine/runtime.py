"""Connects to the Ray cluster of RAY_ADDRESS or starts a local Ray, and reports its size."""

import collections
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
from mcis.platform.config.compute import ComputeConfig, uses_cluster
from mcis.platform.engine.cluster_probe import check_cluster

_ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_oom_retries": "4",  # by default, a task that takes too much memory is retried forever
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how late Ray Train notices the end of a training
}
"""Environment variables that Ray reads when it is imported. Variables that the user set are kept."""
_SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Makes torch's threads sleep instead of spin while they wait for each other at the end of an operator.

If another process takes one of two cores, a training with spinning threads takes 1.7 times as long. If none does, a
training with sleeping threads takes 1.2 times as long."""
ANYWHERE: Any = {"scheduling_strategy": "DEFAULT"}
"""Options of tasks and actors. By default, Ray would place them in the resources of a Ray Tune trial's driver."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**26)}
"""Environment variables that make a process keep the memory that it frees (`benchmarks/allocator.py`).

By default, glibc returns large tensors to the system and maps them again, layer by layer. The variables are read when a
process starts. Every process that Ray starts has them, unless the user configures the allocator."""


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns ALLOCATOR, or nothing if the environment configures or replaces glibc's allocator in another way."""
    configured = {name: value for name, value in environment.items() if name.startswith(("MALLOC_", "LD_PRELOAD"))}
    return dict(ALLOCATOR) if configured in ({}, ALLOCATOR) else {}


@contextlib.contextmanager
def ray_session(compute: ComputeConfig, *, shared: bool = False, verbose: bool = False) -> Iterator[None]:
    """Connects to the cluster of RAY_ADDRESS, also inside a submitted job, or starts a local Ray for the block.

    If Ray is already connected, the block uses that. Otherwise SIGTERM raises KeyboardInterrupt in the block.

    Args:
        compute: The section `compute` of the configuration.
        shared: Whether trainings share their cores with other work, as they always do on a cluster.
        verbose: Whether to print the logs of workers and of Ray's libraries.

    Raises:
        UserError: The local Ray did not start, or the cluster does not answer.
    """
    on_cluster = uses_cluster()
    worker_variables = allocator_variables(os.environ)
    if shared or on_cluster:
        worker_variables |= _SHARED_CORES
    for name, value in {**_ENVIRONMENT, **worker_variables}.items():
        os.environ.setdefault(name, value)

    loading = _load_modules()
    import ray

    if ray.is_initialized():
        loading.join()
        yield
        return

    logs: Any = {"log_to_driver": verbose, "logging_level": logging.INFO if verbose else logging.ERROR}
    with contextlib.ExitStack() as blocks:
        blocks.enter_context(_sigterm_handler_restored())
        blocks.callback(loading.join)  # an error must not end the process during an import
        if on_cluster:
            check_cluster()
            blocks.callback(ray.shutdown)
            _connect(list(worker_variables), logs)
        else:
            # Paths of Unix sockets have at most about 100 characters, so the name of the folder is short.
            parent = "/tmp" if os.path.isdir("/tmp") else None
            folder = blocks.enter_context(TemporaryDirectory(prefix="mcis-", dir=parent, ignore_cleanup_errors=True))
            blocks.callback(ray.shutdown)
            _start_local(compute, folder, logs)
        _quiet_libraries(verbose=verbose)
        blocks.enter_context(_termination_interrupts())
        loading.join()
        yield


def _load_modules() -> threading.Thread:
    """Imports in a thread what the driver needs next, because that takes seconds, as the start of Ray does.

    It is a single thread: Python ends one of two threads whose imports wait for each other.
    """

    def load() -> None:
        for name in ("torch", "mlflow.tracking"):
            importlib.import_module(name)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    return thread


def _connect(worker_variables: list[str], logs: Mapping[str, Any]) -> None:
    """Connects to the cluster of RAY_ADDRESS.

    Args:
        worker_variables: Names of environment variables that all processes get.
        logs: Options of `ray.init`.

    Raises:
        UserError: Ray finds no cluster.
    """
    import ray

    # Trials of a study need RAY_ADDRESS to know that they run on a cluster, which may grow.
    names = [*worker_variables, "RAY_ADDRESS", COPIES_VARIABLE]
    variables = {name: os.environ[name] for name in names if name in os.environ}
    try:
        ray.init(address="auto", runtime_env={"env_vars": variables}, **logs)
    except ConnectionError as error:
        raise UserError(
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {error}",
            "a running cluster",
            "start it (`ray start --head`), or unset RAY_ADDRESS, so that each run starts a Ray of its own",
        ) from error


def _start_local(compute: ComputeConfig, folder: str, logs: Mapping[str, Any]) -> None:
    """Starts a local Ray.

    Args:
        compute: The section `compute` of the configuration.
        folder: Folder for its files.
        logs: Options of `ray.init`.

    Raises:
        UserError: It did not start.
    """
    import ray

    # A token of this process and its children. By default, Ray writes one to the home directory, readable by all.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        ray.init(
            address="local",
            # Trainers, decoders and drivers share the cores; there may be only two.
            num_cpus=compute.cpus or max(4, os.cpu_count() or 1),
            object_store_memory=int(compute.object_store_gb * 2**30),
            include_dashboard=False,
            _temp_dir=folder,
            **logs,
        )
    except Exception as error:  # Ray raises errors of many types
        raise UserError(
            f"Ray did not start: {error}",
            "enough shared memory for compute.object_store_gb, and CPU time for Ray's processes to start within 30 s",
            "lower compute.object_store_gb, or repeat the command when the machine is less busy",
        ) from error


@contextlib.contextmanager
def _sigterm_handler_restored() -> Iterator[None]:
    """Restores the handler of SIGTERM after the block. In other threads than the main thread, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Makes the first SIGTERM raise KeyboardInterrupt in the main thread. Later ones are ignored.

    Enter it after `ray.init`, which installs a handler that calls `sys.exit`. The handler stays after the block, so
    that the shutdown of Ray is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(*received) from error  # Ray's functions raise a KeyboardInterrupt without the number


def _quiet_libraries(*, verbose: bool) -> None:
    """Disables Ray Data's progress bars and, unless `verbose`, the logs of Ray's libraries."""
    import ray.data

    if not verbose:
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a study reports failed trials itself
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        logging.getLogger("ray.train").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False


def give_memory_back() -> None:
    """Returns the memory that this process freed to the system. Ray's idle processes would keep it."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # a function of glibc
    if malloc_trim is not None:
        malloc_trim(0)


def is_one_node() -> bool:
    """Returns whether the cluster has a single node now."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1


def reserved_resources() -> dict[str, float] | None:
    """Returns the resources that the trial of this process has reserved for its tasks. None: it reserved none.

    The first bundle of a trial's placement group is that of its driver.
    """
    import ray

    group = ray.util.get_current_placement_group()
    if group is None or group.bundle_count == 1:
        return None
    total: collections.Counter[str] = collections.Counter()
    for bundle in group.bundle_specs[1:]:
        total.update(bundle)
    return dict(total)


def placement() -> dict[str, Any]:
    """Returns options of tasks and actors: they run in the resources that their trial has reserved, or anywhere."""
    return ANYWHERE if reserved_resources() is None else {}

"""Waits for the nodes of a cluster that grows on demand, asks its autoscaler for them, and counts what they run."""

import functools
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from mcis.datasets.errors import UserError
from mcis.platform.config.compute import ComputeConfig, uses_cluster
from mcis.platform.runs.progress import console

Bundle = Mapping[str, float]
"""Resources of one node, or resources that are needed together on one node: CPU, GPU, memory in bytes."""
_WAIT_INTERVAL = 1.0
"""Seconds between two checks of the nodes while some are missing."""
_CHECK_INTERVAL = 3.0
"""Seconds between two checks of the nodes while none are missing."""


def check_gpus(compute: ComputeConfig) -> None:
    """Checks that the GPUs of a run are there if it runs on this machine; a cluster may start some later.

    Prints a note if there are GPUs that the run does not use.

    Raises:
        UserError: `compute.gpu` is set and GPUs are missing.
    """
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus and not compute.gpu:
        console.print(f"note: {gpus} GPU(s) are not used; compute.gpu=true uses them")
    if compute.gpu and not uses_cluster():
        wait_for_nodes([{"GPU": compute.gpu_share}] * compute.effective_min_workers, 0, "compute.gpu=true")


def wait_for_nodes(bundles: Sequence[Bundle], minutes: float, task: str) -> None:
    """Waits until the nodes have the resources of all bundles. For arguments and errors see `NodeWatch`."""
    with NodeWatch(bundles, minutes, task):
        pass


class NodeWatch:
    """Watches whether the nodes of a cluster have the resources of some bundles.

    As a context manager it waits for them first, and asks the autoscaler of the cluster of RAY_ADDRESS. In the block,
    call `check` every few seconds: if nodes are lost, work would otherwise wait in silence for others, and forever if
    Ray itself is gone. A local Ray cannot grow, so what it lacks is an error at once.

    Resources count even if other work uses them now, because work takes its turn.

    Args:
        bundles: The resources, each on one node.
        minutes: Minutes after which missing nodes are an error.
        task: Description of what needs the nodes, used in messages.

    Attributes:
        nodes: The resources of each node at the last check.
        missing: The bundles that did not fit on the nodes at the last check.
    """

    def __init__(self, bundles: Sequence[Bundle], minutes: float, task: str):
        self.bundles = bundles
        self.minutes = minutes if uses_cluster() else 0
        self.task = task
        self.nodes: list[Bundle] = []
        self.missing: list[Bundle] = []
        self._last_check_time = -math.inf
        self._missing_since = math.inf

    def __enter__(self) -> Self:
        try:
            self.check()
            while self.missing:
                time.sleep(_WAIT_INTERVAL)
                self.check()
        except BaseException:
            self._withdraw_request()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._withdraw_request()

    def check(self) -> None:
        """Checks the nodes, unless that was done a moment ago.

        Raises:
            UserError: Nodes have been missing for too long, or Ray itself is gone.
        """
        now = time.monotonic()
        if now <= self._last_check_time + (_WAIT_INTERVAL if self.missing else _CHECK_INTERVAL):
            return
        was_missing = bool(self.missing)
        self._last_check_time = now
        self.nodes = alive_nodes()
        self.missing = missing_bundles(self.bundles, self.nodes)

        if self.missing:
            self._missing_since = min(self._missing_since, now)
            if now >= self._missing_since + 60 * self.minutes:
                raise self._missing_error()
            if not was_missing:
                missing = _bundle_text(self.missing)
                console.print(f"waiting for nodes of the cluster: {self.task} needs {missing} more")
            self._request()
        else:
            self._missing_since = math.inf
            if was_missing:
                console.print(f"the cluster has the nodes that {self.task} needs")
                ask_for_no_nodes()

    def _request(self) -> None:
        """Asks the autoscaler for the nodes, at every check: it keeps the last request of all programs only."""
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[dict(bundle) for bundle in self.bundles])

    def _withdraw_request(self) -> None:
        if self.missing:
            self.missing = []
            ask_for_no_nodes()

    def _missing_error(self) -> UserError:
        after = f"after {self.minutes:g} minutes " if self.minutes else ""
        return UserError(
            f"{self.task} needs {_bundle_text(self.bundles)}; {after}the cluster lacks {_bundle_text(self.missing)}",
            "nodes with these resources, running or startable by the autoscaler; a training whose images are decoded "
            "by tasks needs one more CPU",
            "lower compute.workers, compute.worker_cpus, compute.memory_gb or --parallel of the study, or set "
            "compute.gpu=false; on one machine, raise compute.cpus; on a cluster, run `ray status` on the head to see "
            "why nodes do not start (quota, max_workers, no such node type), or raise compute.wait_minutes",
        )


def ask_for_no_nodes() -> None:
    """Withdraws the request to the autoscaler, also that of a process that was killed while it waited.

    The autoscaler would keep the nodes forever. Work that runs on nodes keeps them up by itself, and another program
    that waits repeats its request.
    """
    from ray.autoscaler.sdk import request_resources

    if uses_cluster() and _ray_answers():
        request_resources(bundles=[])


def mapping_task(compute: ComputeConfig) -> Bundle:
    """Returns what a CPU task of a mapping reserves: a CPU, and memory if `compute.memory_gb` is set."""
    memory = int(compute.memory_gb * 2**30)
    return {"CPU": 1.0, "memory": memory} if memory else {"CPU": 1.0}


def task_capacity(nodes: Iterable[Bundle], task: Bundle) -> int:
    """Returns how many tasks that reserve the resources `task` the nodes run at a time."""
    capacity = 0
    for node in nodes:
        capacity += min(int(node.get(name, 0) // count) for name, count in task.items())
    return capacity


def tasks_to_submit(nodes: Sequence[Bundle], task: Bundle) -> int:
    """Returns how many tasks to submit at a time: as many as a single machine runs, twice as many as a cluster runs.

    Tasks that wait for resources make the autoscaler of a cluster start nodes.

    Args:
        nodes: The resources of each node.
        task: What a task reserves, see `mapping_task`.
    """
    capacity = task_capacity(nodes, task)
    if uses_cluster() or len(nodes) > 1:
        return 2 * capacity
    return min(capacity, os.cpu_count() or 1)


def missing_bundles(bundles: Sequence[Bundle], nodes: Iterable[Bundle]) -> list[Bundle]:
    """Returns the bundles that do not fit on nodes with some resources. The largest bundles are placed first.

    Fractions of CPUs and GPUs are compared with the resolution at which Ray counts them.
    """
    free = [dict(node) for node in nodes]
    missing = []
    for bundle in sorted(bundles, key=_size, reverse=True):
        node = next((node for node in free if _fits(bundle, node)), None)
        if node is None:
            missing.append(bundle)
            continue
        for name, count in bundle.items():
            node[name] -= count
    return missing


def _size(bundle: Bundle) -> tuple[float, float, float]:
    return bundle.get("GPU", 0), bundle.get("CPU", 0), bundle.get("memory", 0)


def _fits(bundle: Bundle, node: Bundle) -> bool:
    return all(node.get(name, 0) > count - 1e-4 for name, count in bundle.items())


def alive_nodes() -> list[Bundle]:
    """Returns the resources of each node that is up, used or not.

    Raises:
        UserError: The raylet of this node has not answered for some seconds. If only the head is gone, Ray ends the
            process itself after a minute.
    """
    import ray

    for _ in range(3):
        if _ray_answers():
            return [node["Resources"] for node in ray.nodes() if node["Alive"]]
        time.sleep(_WAIT_INTERVAL)
    raise UserError(
        "the Ray of this machine no longer answers",
        "a Ray that runs as long as the command",
        "start it again if it belongs to a cluster, and repeat the command: finished work is kept",
    )


def _ray_answers() -> bool:
    """Returns whether this node's raylet accepts connections.

    Once the raylet is gone, Ray ends a process that asks for the nodes of the cluster.
    """
    import ray

    if not ray.is_initialized():
        return True
    path = _raylet_socket(ray.get_runtime_context().get_node_id())
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_CHECK_INTERVAL)
            connection.connect(path)
    except OSError:
        return False
    return True


@functools.cache
def _raylet_socket(node_id: str) -> str:
    """Returns the path of the Unix socket of a node's raylet. It is cached, because a lost cluster cannot be asked."""
    import ray

    (node,) = (node for node in ray.nodes() if node["NodeID"] == node_id)
    return str(node["RayletSocketName"])


def _bundle_text(bundles: Sequence[Bundle]) -> str:
    """Returns the bundles in words, for example `2 x (1 GPU, 0.5 CPU)` or `1 x (1 CPU, 2 GiB memory)`."""
    texts = [", ".join(_resource_text(name, count) for name, count in bundle.items() if count) for bundle in bundles]
    return " and ".join(f"{texts.count(text)} x ({text})" for text in dict.fromkeys(texts))


def _resource_text(name: str, count: float) -> str:
    if name == "memory":
        return f"{count / 2**30:g} GiB memory"
    return f"{count:g} {name}"

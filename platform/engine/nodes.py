"""Nodes of a cluster that grows on demand: what is asked of its autoscaler, and the wait for it."""

import functools
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mcis.datasets.errors import UserError
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.runs.progress import console

Bundle = Mapping[str, float]
"""Resources that are needed together on one node: CPU, GPU."""
_PAUSE = 1.0
"""Seconds between two looks at the cluster while nodes are missing."""
_EVERY = 3.0
"""The same while none are."""


def check_gpus(compute: ComputeConfig) -> None:
    """Stops a run on this machine whose GPUs are not there, as a cluster may yet start some; says which would be idle.
    Errors as of `wait_for_nodes`."""
    import ray

    _raylet_socket(ray.get_runtime_context().get_node_id())
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus and not compute.gpu:
        console.print(f"note: {gpus} GPU(s) are not used; compute.gpu=true uses them")
    if compute.gpu and not os.environ.get("RAY_ADDRESS"):
        wait_for_nodes([{"GPU": compute.gpu_share}] * compute.least_workers, 0, "compute.gpu=true")


def wait_for_nodes(bundles: Sequence[Bundle], minutes: float, what: str) -> Iterator[object]:
    """Waits until the cluster of RAY_ADDRESS has space for all bundles, for which its autoscaler is asked.

    A Ray that the command started itself has what it has: what it lacks is an error at once. Nor is there a wait where
    nodes have the space, whoever uses it now: work takes its turn on them.

    Args:
        minutes: after which what is missing is an error.
        what: needs them, in words.

    Returns:
        Each step of it looks at the nodes again, every few seconds: where some are lost, work would wait in silence for
        others to come, and without end where Ray is gone.

    Raises:
        UserError: the nodes did not come in time, or Ray itself is gone, here or in a step of what is returned.
    """
    watched = _missing(bundles, minutes, what)
    while next(watched):
        time.sleep(_PAUSE)
    return watched


def _missing(bundles: Sequence[Bundle], minutes: float, what: str) -> Iterator[list[Bundle]]:
    """What `wait_for_nodes` waits for, as it was at the last look."""
    from ray.autoscaler.sdk import request_resources

    minutes, looked, since = minutes if os.environ.get("RAY_ADDRESS") else 0, -math.inf, math.inf
    missing: list[Bundle] = []
    try:
        while True:
            now = time.monotonic()
            if now > looked + (_PAUSE if missing else _EVERY):
                before, looked, missing = missing, now, missing_bundles(bundles, _nodes())
                since = min(since, now) if missing else math.inf
                if missing and now >= since + 60 * minutes:
                    raise _lacking(bundles, missing, minutes, what)
                if missing and not before:
                    console.print(f"waiting for nodes of the cluster: {what} needs {_bundle_text(missing)} more")
                if missing:  # asked again each time, as the autoscaler keeps the last wish of all programs alone
                    request_resources(bundles=[dict(bundle) for bundle in bundles])
                elif before:
                    console.print(f"the cluster has the nodes that {what} needs")
                    ask_for_no_nodes()
            yield missing
    finally:
        if missing:
            ask_for_no_nodes()


def ask_for_no_nodes() -> None:
    """Takes back what the autoscaler was asked for, by a process that was killed while it waited, too.

    It would hold nodes for ever; work on them does so itself. Another program that waits asks again.
    """
    from ray.autoscaler.sdk import request_resources

    if os.environ.get("RAY_ADDRESS") and _ray_answers():
        request_resources(bundles=[])


def _lacking(bundles: Sequence[Bundle], missing: Sequence[Bundle], minutes: float, what: str) -> UserError:
    after = f"after {minutes:g} minutes " if minutes else ""
    return UserError(
        f"{what} needs {_bundle_text(bundles)}; {after}the cluster lacks {_bundle_text(missing)}",
        "nodes that have it, or that its autoscaler can start; training workers leave a CPU to decoding",
        "ask for less (compute.workers, compute.worker_cpus, compute.gpu=false, --parallel of a study), or have more "
        "(compute.cpus of a Ray of this machine); `ray status` on a cluster's head says why nodes do not start (quota, "
        "max_workers, no such node type); compute.wait_minutes waits longer for them",
    )


def missing_bundles(bundles: Sequence[Bundle], nodes: Iterable[Bundle]) -> list[Bundle]:
    """The bundles for which nodes of these resources have no space, the largest placed first.

    Sums of shares of a CPU or GPU are compared as finely as Ray counts them.
    """
    free = [dict(node) for node in nodes]
    missing = []
    for bundle in sorted(bundles, key=lambda each: (each.get("GPU", 0), each.get("CPU", 0)), reverse=True):
        fitting = (node for node in free if all(node.get(name, 0) > count - 1e-4 for name, count in bundle.items()))
        node = next(fitting, None)
        if node is None:
            missing.append(bundle)
            continue
        for name, count in bundle.items():
            node[name] -= count
    return missing


def _nodes() -> list[Bundle]:
    """The resources of each node that is up, used or not; UserError where this machine's part of Ray has not answered
    for some seconds. Where the head alone is gone, Ray ends the process itself after a minute."""
    import ray

    for _ in range(3):
        if _ray_answers():
            return [node["Resources"] for node in ray.nodes() if node["Alive"]]
        time.sleep(_PAUSE)
    raise UserError(
        "this machine's part of Ray no longer answers",
        "a Ray that is there as long as the command",
        "start it again where it is a cluster's, and repeat the command: what is finished is kept",
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
            connection.settimeout(_EVERY)
            connection.connect(path)
    except OSError:
        return False
    return True


@functools.cache
def _raylet_socket(node_id: str) -> str:
    """Returns the path of the Unix socket of a node's raylet; kept, since a lost cluster can no longer be asked."""
    import ray

    (node,) = (node for node in ray.nodes() if node["NodeID"] == node_id)
    return str(node["RayletSocketName"])


def _bundle_text(bundles: Sequence[Bundle]) -> str:
    """`2 x (1 GPU, 0.5 CPU)`."""
    texts = [", ".join(f"{count:g} {name}" for name, count in bundle.items() if count) for bundle in bundles]
    return " and ".join(f"{texts.count(text)} x ({text})" for text in dict.fromkeys(texts))

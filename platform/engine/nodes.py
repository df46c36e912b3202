"""Nodes of a cluster that grows on demand: what is asked of its autoscaler, and the wait for it."""

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mcis.datasets.errors import UserError
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_answers
from mcis.platform.runs.progress import console

Bundle = Mapping[str, float]
"""Resources that are needed together on one node: CPU, GPU."""
_EVERY = 1.0
"""Seconds between two looks at the cluster while nothing but nodes is waited for."""
_WATCHED_EVERY = 5.0
"""The same while work is done."""
_GONE = 120.0
"""Seconds to wait where this machine's part of Ray does not answer, before Ray itself ends the process."""
_ASKED_EVERY = 10.0
"""Seconds until the autoscaler is asked again: it keeps one wish alone, the last of all programs'."""


def check_gpus(compute: ComputeConfig) -> None:
    """Stops a run on this machine whose GPUs are not there, as a cluster may yet start some; says which would be idle.

    Raises:
        UserError: there is no GPU for each training worker.
    """
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus and not compute.gpu:
        console.print(f"note: {gpus} GPU(s) are not used; compute.gpu=true uses them", markup=False)
    if compute.gpu and not os.environ.get("RAY_ADDRESS"):
        wait_for_nodes([{"GPU": compute.gpu_share}] * compute.least_workers, 0, "compute.gpu=true")


def wait_for_nodes(bundles: Sequence[Bundle], minutes: float, what: str) -> None:
    """Waits until the cluster of RAY_ADDRESS has space for all bundles, for which its autoscaler is asked.

    A Ray that the command started itself has what it has: what it lacks is an error at once. Nor is there a wait where
    nodes have the space, whoever uses it now: work takes its turn on them.

    Args:
        minutes: after which what is missing is an error.
        what: needs them, in words.

    Raises:
        UserError: the nodes did not come in time.
    """
    from ray.autoscaler.sdk import request_resources

    missing, asked = missing_bundles(bundles, _nodes()), -math.inf
    if not os.environ.get("RAY_ADDRESS"):
        minutes = 0
    elif missing:
        console.print(f"waiting for nodes of the cluster: {what} needs {_bundle_text(missing)} more", markup=False)
    end = time.monotonic() + 60 * minutes
    try:
        while missing and time.monotonic() < end:
            if time.monotonic() > asked + _ASKED_EVERY:
                asked = time.monotonic()
                request_resources(bundles=[dict(bundle) for bundle in bundles])
            time.sleep(_EVERY)
            missing = missing_bundles(bundles, _nodes())
    finally:
        ask_for_no_nodes()
    if missing:
        raise _lacking(bundles, missing, minutes, what)


def ask_for_no_nodes() -> None:
    """Takes back what the autoscaler was asked for, by a process that was killed while it waited, too.

    It would hold nodes for ever; work on them does so itself. Another program that waits asks again.
    """
    from ray.autoscaler.sdk import request_resources

    if os.environ.get("RAY_ADDRESS") and ray_answers():
        request_resources(bundles=[])


def watched_nodes(bundles: Sequence[Bundle], minutes: float, what: str) -> Iterator[None]:
    """Yields for ever, and looks at the nodes of the cluster of RAY_ADDRESS meanwhile, each few seconds.

    Where nodes are lost, work waits in silence for others to come. This says so, and when they have come.

    Args:
        minutes, what: as of `wait_for_nodes`; what has begun to wait asks the autoscaler itself.

    Raises:
        UserError: nodes that are needed have been missing for that long.
    """
    looked, lost = -math.inf, math.inf
    while True:
        now = time.monotonic()
        if os.environ.get("RAY_ADDRESS") and now > looked + _WATCHED_EVERY:
            looked, missing = now, missing_bundles(bundles, _nodes())
            if missing and lost == math.inf:
                lost = now
                console.print(f"note: nodes were lost; {what} waits for {_bundle_text(missing)}", markup=False)
            elif lost < math.inf and not missing:
                lost = math.inf
                console.print(f"note: the cluster has the nodes again that {what} needs", markup=False)
            if now > lost + 60 * minutes:
                raise _lacking(bundles, missing, minutes, what)
        yield


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
    """The resources of each node that is up, used or not."""
    import ray

    until = time.monotonic() + _GONE
    while not ray_answers() and time.monotonic() < until:
        time.sleep(_EVERY)  # `ray_session` ends the command meanwhile
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _bundle_text(bundles: Sequence[Bundle]) -> str:
    """`2 x (1 GPU, 0.5 CPU)`."""
    texts = [", ".join(f"{count:g} {name}" for name, count in bundle.items() if count) for bundle in bundles]
    return " and ".join(f"{texts.count(text)} x ({text})" for text in dict.fromkeys(texts))

"""A mapping on GPUs: actors that share the GPUs of the cluster, and tasks on its CPUs that read files for them."""

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.errors import MemoryRanOut, death_in, is_node_loss
from mcis.platform.engine.nodes import Bundle, mapping_task, tasks_to_submit
from mcis.platform.engine.runtime import placement
from mcis.platform.engine.shard_mapper import (
    RESUBMISSIONS,
    RETRIES,
    GpuProcess,
    MappingWork,
    RowRange,
    death_error,
    read_rows,
)
from mcis.platform.runs.progress import console

_UNAVAILABLE_SECONDS = 1.0
"""Seconds until an actor that does not answer is asked again."""
_MAX_PER_GPU = 16
"""Maximum number of processes that share a GPU. Each has a copy of the network, and about 0.5 GiB of CUDA's own."""


class GpuMapping:
    """The actors of a mapping on GPUs, and the state of its shards.

    They are actors, because Ray ends a process after a task with a GPU. Their number is at most `actors_per_gpu` times
    the number of GPUs of the cluster, or times `compute.workers` if that is larger, so that an autoscaler starts nodes.
    Together they use the fraction `compute.gpu_share` of each GPU; other runs can use the rest. An actor gets its first
    shard when it has a GPU, so GPUs are used as soon as another run frees them or new nodes are up. If the memory of a
    GPU runs out, one actor ends and the others continue. The last one is started once more, because others may have
    held the memory.

    If the cluster has several nodes, tasks on any CPUs read the files of the next shards meanwhile (`read` of
    `map_table`). The actors of a single machine read them: there is one for each core.

    Attributes:
        waiting: The shards that no actor has.
        running: Future of the current call -> its actor and its shard; the shard is None while the actor starts.
        unfinished: Number of shards that are not written.
        actors: Number of actors that are starting or working.
        dropped: Number of actors that ended because memory ran out, and are not replaced.
        last_was_restarted: Whether the last actor was started again after memory had run out.
        resubmissions: How often another actor got each shard because its actor died.
        task: What a task that reads reserves.
        read_rows: Name of a waiting shard -> future of its rows with what was read for them.
    """

    def __init__(
        self,
        reference: tuple[Any],
        work: MappingWork,
        shards: dict[str, RowRange],
        compute: ComputeConfig,
        nodes: Sequence[Bundle],
    ):
        import ray

        self.reference = reference
        self.work = work
        self.shards = shards
        self.compute = compute
        self.waiting = deque(shards)
        self.running: dict[Any, tuple[Any, str | None]] = {}
        self.unfinished = len(shards)
        self.actors = 0
        self.dropped = 0
        self.last_was_restarted = False
        self.resubmissions: Counter[str] = Counter()
        self.task = mapping_task(compute)
        self.read_rows: dict[str, Any] = {}

        self.actors_per_gpu = actors_per_gpu(nodes, compute.gpu_share, len(shards))
        share = math.floor(1e4 * compute.gpu_share / self.actors_per_gpu) / 1e4  # Ray keeps four digits
        options: Any = {"num_cpus": 0, "num_gpus": share, **placement()}  # by default, a share of a GPU takes a CPU
        self.actor_class: Any = ray.remote(max_restarts=RETRIES, max_task_retries=RETRIES, **options)(GpuProcess)
        reserved: Any = {"num_cpus": self.task["CPU"], "memory": self.task.get("memory")}
        self.read_task: Any = ray.remote(max_retries=RETRIES, **reserved, **placement())(read_rows)

    def submit(self, nodes: Sequence[Bundle]) -> None:
        """Starts actors and reading for waiting shards, as much as the cluster, which has these nodes now, holds."""
        self._start_actors(nodes)
        if self.work.read is not None and len(nodes) > 1:
            self._read_ahead(nodes)

    def _start_actors(self, nodes: Sequence[Bundle]) -> None:
        gpus = max(self.compute.workers, math.ceil(sum(node.get("GPU", 0) for node in nodes)))
        capacity = max(1, gpus * self.actors_per_gpu - self.dropped)
        for _ in range(min(len(self.waiting), capacity - self.actors)):
            actor = self.actor_class.remote()
            self.running[actor.wait_until_started.remote()] = actor, None
            self.actors += 1

    def _read_ahead(self, nodes: Sequence[Bundle]) -> None:
        """Submits tasks that read the files of the next shards."""
        for name in itertools.islice(self.waiting, tasks_to_submit(nodes, self.task)):
            if name not in self.read_rows:
                self.read_rows[name] = self.read_task.remote(self.reference, self.shards[name])

    def collect(self, result: Any) -> int:
        """Handles the end of an actor's call, and gives the actor its next shard.

        Returns:
            The number of rows of the shard that it wrote, or 0.

        Raises:
            MemoryRanOut: Memory ran out in an actor that had no others next to it.
            UserError: A shard ended two actors or lost too many nodes, or an actor cannot start.
        """
        import ray

        actor, name = self.running.pop(result)
        try:
            num_rows = ray.get(result)
        except MemoryRanOut:
            if not self._continues_with_fewer_actors():
                raise
            self._end_actor(name)
            return 0
        except ray.exceptions.ActorUnavailableError:
            # Its node may be lost. Ray then starts another actor, or gives it up.
            if name is not None:
                self.waiting.appendleft(name)
            time.sleep(_UNAVAILABLE_SECONDS)
            self._give_next_shard(actor)
            return 0
        except ray.exceptions.RayError as error:
            death = death_in(error)
            if death is None:
                raise
            # Another actor gets the shard, because this one may have lost nodes with other shards before.
            allowed = RESUBMISSIONS if is_node_loss(death) else 1
            if name is None or self.resubmissions[name] >= allowed:
                raise death_error(self.work, name, death) from None
            self.resubmissions[name] += 1
            self._end_actor(name)
            return 0

        self._give_next_shard(actor)
        if name is None:  # the actor has started
            return 0
        self.unfinished -= 1
        return int(num_rows)

    def _continues_with_fewer_actors(self) -> bool:
        """Returns whether the mapping continues without an actor whose memory ran out, and records the decision."""
        if self.actors > 1:
            if not self.dropped:
                console.print(f"note: {self.work.label}: a GPU's memory ran out; fewer processes share it")
            self.dropped += 1
            return True
        if self.dropped and not self.last_was_restarted:
            self.last_was_restarted = True
            return True
        return False

    def _give_next_shard(self, actor: Any) -> None:
        """Calls an actor with the next shard, or ends the actor if none is waiting."""
        if not self.waiting:
            self._end_actor(None)
            return
        name = self.waiting.popleft()
        rows = self.read_rows.pop(name, None)
        self.running[actor.map_shard.remote(self.reference, name, self.shards[name], rows)] = actor, name

    def _end_actor(self, name: str | None) -> None:
        """Counts an actor as ended and puts its shard back. Without references to it, Ray frees its GPU."""
        self.actors -= 1
        if name is not None:
            self.waiting.appendleft(name)


def actors_per_gpu(nodes: Sequence[Bundle], share: float, shards: int) -> int:
    """Returns the number of actors on each GPU, at most `_MAX_PER_GPU` and the number of shards per GPU.

    There is one for each CPU core in the fraction `share` (`compute.gpu_share`) of the nodes with GPUs, because
    decoding and the dense CRF need a core each and most networks leave a GPU idle.
    """
    with_gpus = [node for node in nodes if node.get("GPU")]
    gpus = max(1.0, sum(node["GPU"] for node in with_gpus))
    cores = int(sum(node.get("CPU", 0) for node in with_gpus) * share / gpus)
    return max(1, min(cores, math.ceil(shards / gpus), _MAX_PER_GPU))

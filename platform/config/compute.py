"""Section of how the work is spread over machines, and of when it ends; but for rounding it changes no result."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from mcis.datasets.section import NonNegative, Positive, Rate, Section


class ComputeConfig(Section):
    """How the work is spread; nothing here changes a result, but for rounding."""

    workers: Positive = 1
    """Ray Train workers, with `gpu` each on one."""
    min_workers: int | None = Field(default=None, gt=0)
    """With it a training is elastic: it starts, and goes on, with as many of the `workers` as fit on the cluster, and
    no fewer than this; it goes on from its last checkpoint when nodes are lost or join. None = always `workers`."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Samples that a training worker puts through the network at a time; gradients are added up over the batch. Less
    takes less memory. None = all of its part of a batch, and half as many from the last checkpoint on wherever memory
    runs out."""
    gpu: bool = False
    """Run networks on GPUs. It is said, and never found out from the nodes that are up, since outputs of GPUs and of
    CPUs have keys of their own."""
    gpu_share: float = Field(default=1.0, gt=0, le=1)
    """Part of a GPU that one training worker reserves, or the processes of a mapping together: one for each core that
    belongs to that part. Less lets trials of a study that run side by side, or other runs, share a GPU, whose memory
    they have to divide among themselves."""
    worker_cpus: Rate = 0.5
    """Logical CPUs that a training worker reserves; the rest decodes."""
    threads: int | None = Field(default=None, gt=0)
    """Torch threads of a training worker; None = its part of the node's cores."""
    decode: Literal["auto", "threads", "tasks"] = "auto"
    """Where training images are decoded: in threads of each worker, or in Ray Data tasks on any CPU of the cluster;
    auto = tasks on several nodes, unless the workers are elastic."""
    cache_gb: NonNegative = 8.0
    """Bound of the workspace's cache of decoded images, GiB; what does not fit is decoded every epoch. 0 = no cache."""
    wait_minutes: NonNegative = 15.0
    """How long work waits for nodes that a cluster has yet to start for it; what then is missing ends the run."""
    cpus: int | None = Field(default=None, gt=0)
    """Logical CPUs of a Ray that the command starts; None = the machine's cores, at least 4."""
    object_store_gb: Rate = 1.0
    """Size of the object store of a Ray that the command starts, GiB; it spills to disk."""
    shard_rows: Positive = 64
    """Images per shard of a stage's table: what is computed again after a kill is at most the shards in work."""
    checkpoint_steps: Positive = 500
    """Updates between checkpoints at most; one each minute, too, or as often as takes a twentieth of the time."""
    max_failures: int = Field(default=3, ge=0)
    """Failures of a training, such as nodes that are lost, after which it goes on from its last checkpoint, between one
    checkpoint and the next. A training that gets on survives any number of them; one that fails again and again before
    it has written another checkpoint ends."""
    stop_if_not_learning: bool = True
    """End a run, with its report, behind a training that learnt nothing or pseudo masks that teach nothing; else a note
    says so and the run goes on. Tags that are no better ranked than by chance are judged from 20 tags of val images on,
    a loss that does not fall from 20 records of its log on."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The class of device that networks run on."""
        return "cuda" if self.gpu else "cpu"

    @property
    def least_workers(self) -> int:
        """Training workers without which nothing starts."""
        return self.min_workers or self.workers

    def problems(self) -> Iterator[str]:
        """More workers that must be there than there are; workers that would have to share a GPU."""
        if self.least_workers > self.workers:
            yield f"compute.min_workers {self.min_workers} is more than workers {self.workers}"
        if self.gpu_share < 1 and self.workers > 1:
            yield f"compute.gpu_share is {self.gpu_share:g} for {self.workers} workers, each of which needs a whole GPU"

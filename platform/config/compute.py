"""Configuration of workers, memory and failures. It changes results only by rounding."""

import os
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from mcis.datasets.section import NonNegative, Positive, Rate, Section


def uses_cluster() -> bool:
    """Returns whether `RAY_ADDRESS` names a cluster, which may have several nodes and grow."""
    return bool(os.environ.get("RAY_ADDRESS"))


class ComputeConfig(Section):
    """Workers, memory and failures. They change results only by rounding, which a training may amplify
    (docs/howto/cluster.md, "Limitations")."""

    workers: Positive = 1
    """Training workers (Ray Train). With `gpu`, each uses one GPU."""
    min_workers: int | None = Field(default=None, gt=0)
    """Minimum number of workers of an elastic training: it runs with as many of `workers` as the cluster can place, and
    continues from its last checkpoint when nodes are lost or added. None: always `workers`."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Samples per forward and backward pass of a worker; gradients are accumulated over the batch. Smaller values need
    less memory. None: the worker's whole share of the batch; it is halved each time memory runs out, and training
    continues from the last checkpoint."""
    gpu: bool = False
    """Run networks on GPUs. Set explicitly: the device is part of the key of each stage that runs networks."""
    gpu_share: float = Field(default=1.0, gt=0, le=1)
    """Fraction of a GPU that one training worker reserves. In stages without training, such as localize, the processes
    of a run together reserve this fraction of all GPUs. Values below 1 let trials of a study or other runs share a GPU
    and its memory."""
    worker_cpus: Rate = 0.5
    """Logical CPUs that a training worker reserves; the remaining CPUs decode images."""
    threads: int | None = Field(default=None, gt=0)
    """PyTorch threads of a training worker; None: an equal share of the node's cores."""
    decode: Literal["auto", "threads", "tasks"] = "auto"
    """Where training images are decoded: in `threads` of each worker, or in Ray Data `tasks` on any CPU of the cluster.
    `auto` = tasks if there are several nodes, not all images are cached, and training is not elastic; else threads."""
    cache_gb: NonNegative | None = None
    """Size limit in GiB of the workspace's cache of decoded images and features. Images that do not fit are decoded,
    and their features computed, each time they are used. None: half of the free disk space, where the cache counts as
    free. 0 = no cache."""
    check_disk: bool = True
    """Whether a run whose files do not fit the free disk space ends before its first stage."""
    wait_minutes: NonNegative = 15.0
    """How long to wait for nodes that a cluster has to start. If resources are still missing, the run stops."""
    cpus: int | None = Field(default=None, gt=0)
    """Logical CPUs of a local Ray that the command starts. None: the number of cores, but at least 4."""
    memory_gb: NonNegative = 0.0
    """Memory in GiB that each task on a CPU reserves on its node, in stages without training, such as pseudo_masks. A
    node whose memory is too small for a task on each CPU then runs fewer tasks. 0 = none."""
    object_store_gb: Rate = 1.0
    """Size in GiB of the object store of a local Ray that the command starts; larger content spills to disk."""
    shard_rows: Positive = 64
    """Images per shard of a stage's output table. After an interruption, only unfinished shards are computed again."""
    checkpoint_steps: Positive = 500
    """Maximum number of optimizer steps between checkpoints. A checkpoint is also written every minute, or less often
    if writing would take more than a twentieth of the time."""
    max_failures: int = Field(default=3, ge=0)
    """Failures of a training, such as lost nodes, allowed between two checkpoints; after each, training continues from
    its last checkpoint. The count starts again with every checkpoint."""
    stop_if_not_learning: bool = True
    """Stop a run, with its report, after a training that did not learn or pseudo masks without foreground; otherwise
    add a note and continue. The classifier is judged by the ranking of tags if the val images have at least 20 tags,
    else by its loss; the other networks by their loss. A loss is judged if at least 20 values were logged."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Type of device on which networks run."""
        return "cuda" if self.gpu else "cpu"

    @property
    def effective_min_workers(self) -> int:
        """Minimum number of training workers: `min_workers`, or `workers` if it is not set."""
        return self.min_workers or self.workers

    def problems(self) -> Iterator[str]:
        """Contradictions between numbers of workers, and workers that would have to share a GPU."""
        if self.effective_min_workers > self.workers:
            yield (
                f"compute.min_workers {self.min_workers} is more than compute.workers {self.workers}; set "
                f"compute.min_workers={self.workers} or lower, or more compute.workers"
            )
        if self.gpu_share < 1 and self.workers > 1:
            yield (
                f"compute.gpu_share is {self.gpu_share:g} for compute.workers {self.workers}, each of which needs a "
                "whole GPU, because NCCL does not let two workers share one; set compute.gpu_share=1 or "
                "compute.workers=1"
            )

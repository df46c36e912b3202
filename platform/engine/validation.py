"""Scores held-out images while a classifier trains."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mcis.datasets.images.squares import Squares
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.storage.threads import map_in_threads
from mcis.datasets.tables.memory_mapped import Features
from mcis.datasets.tags import Tags
from mcis.models.metrics import average_precision

_MAX_BATCH = 32
"""Maximum number of images that are scored at a time."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Tagged images whose mean average precision is logged at the end of epochs. It does not affect the training.

    Attributes:
        images: The N images, as the network reads them.
        tags: Their tags, at least one each.
        scores: Maps the network and a batch of `images` on its device to class scores (B, K).
        every: Number of epochs between two validations. The last step always has one.
    """

    images: Squares | Features
    tags: Tags
    scores: Callable[[nn.Module, Tensor], Tensor]
    every: int = 1

    def is_due(self, done: int, *, steps: int, steps_per_epoch: float) -> bool:
        """Returns whether to validate after `done` of `steps` steps."""
        interval = self.every * steps_per_epoch
        return done == steps or int(done / interval) > int((done - 1) / interval)

    def average_precisions(
        self,
        model: nn.Module,
        shard: WorkerShard,
        autocast: Callable[[], Any],
        device: torch.device,
        threads: int,
        micro_batch: int | None,
    ) -> NDArray[np.float64]:
        """Computes the average precision of each class. All workers call it, and all get the same result.

        Each worker scores every world_size-th image. Only the scores (N, K) are held in memory.

        Args:
            model: The network, whose weights are the same on all workers.
            shard: The worker's shard of the training.
            autocast: Makes a context manager that sets the precision of the arithmetic.
            device: The device of the network.
            threads: Number of threads that read images.
            micro_batch: Maximum number of samples that the training computes at a time. None: all of a worker's.

        Returns:
            (K,) in percent, NaN for a class that no image has.
        """
        scores = torch.zeros(len(self.tags), self.tags.classes, device=device)
        positions = shard.positions(len(self.tags))
        size = min(_MAX_BATCH, micro_batch or _MAX_BATCH)
        batches = [positions[first : first + size] for first in range(0, len(positions), size)]
        read_images: Callable[[NDArray[np.int64]], NDArray[Any]] = self.images

        model.eval()
        with torch.inference_mode():
            for batch, values in zip(batches, map_in_threads(read_images, batches, threads=threads), strict=True):
                images = torch.from_numpy(values).to(device, non_blocking=True)
                with autocast():
                    scores[torch.from_numpy(batch).to(device)] = self.scores(model, images).float()
        model.train()

        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(scores)  # the row of an image is zero on all workers but one
        tags = self.tags.matrix(np.arange(len(self.tags)))
        return average_precision(scores.cpu().numpy().astype(np.float64), tags)

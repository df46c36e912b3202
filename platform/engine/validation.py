"""Mean average precision on the tags of some images while a classifier trains, over all its workers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mcis.datasets.images.squares import Squares
from mcis.datasets.sampling.batch_stream import WorkerShard, by_threads
from mcis.datasets.tables.backbone_outputs import Features
from mcis.datasets.tags import Tags
from mcis.models.metrics import average_precision

_CHUNK = 32  # images at a time


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Images whose mean average precision is logged at the end of epochs. It changes nothing of the training.

    Attributes:
        images, tags: of the N images, which have a tag each.
        scores: the network and what `images` reads, on its device -> class scores (B, K).
        every: epochs from one validation to the next; the last step always has one.
        name: of the mean average precision in the log.
    """

    images: Squares | Features
    tags: Tags
    scores: Callable[[nn.Module, Tensor], Tensor]
    every: int = 1
    name: str = "val_map"

    def due(self, done: int, *, steps: int, steps_per_epoch: float) -> bool:
        """Whether `done` updates end the training, or epochs after which it is validated."""
        length = self.every * steps_per_epoch
        return done == steps or int(done / length) > int((done - 1) / length)

    def precisions(
        self, model: nn.Module, shard: WorkerShard, autocast: Callable[[], Any], device: torch.device, threads: int
    ) -> NDArray[np.float64]:
        """Average precision of each class in percent, (K,), NaN for a class that no image has; the same on all workers.

        The weights are, too: each worker scores every world_size-th image. Nothing is drawn, and no more than the
        scores (N, K) is held.
        """
        scores = torch.zeros(len(self.tags), self.tags.classes, device=device)
        own = shard.positions(len(self.tags))
        chunks = [own[first : first + _CHUNK] for first in range(0, len(own), _CHUNK)]

        def read(numbers: NDArray[np.int64]) -> NDArray[np.uint8 | np.float16]:
            return self.images(chunks[int(numbers[0])])

        model.eval()
        with torch.inference_mode():
            for chunk, values in zip(chunks, by_threads(read, steps=len(chunks), threads=threads), strict=True):
                images = torch.from_numpy(values).to(device, non_blocking=True)
                with autocast():
                    scores[torch.from_numpy(chunk).to(device)] = self.scores(model, images).float()
        model.train()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(scores)  # an image's row is zero on all workers but the one that scores it
        return average_precision(scores.cpu().numpy().astype(np.float64), self.tags.matrix(np.arange(len(self.tags))))

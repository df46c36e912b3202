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


class Scorer:
    """Validates the network, whose weights are the same on all workers: each scores every world_size-th image."""

    def __init__(self, validation: Validation, shard: WorkerShard, threads: int):
        self.validation, self.threads = validation, threads
        self.images_of_worker = shard.positions(len(validation.tags))

    def due(self, done: int, *, steps: int, steps_per_epoch: float) -> bool:
        """Whether `done` updates end the training, or epochs after which it is validated."""
        length = self.validation.every * steps_per_epoch
        return done == steps or int(done / length) > int((done - 1) / length)

    def __call__(self, model: nn.Module, autocast: Callable[[], Any], device: torch.device) -> NDArray[np.float64]:
        """Average precision of each class in percent, (K,), NaN for a class that no image has; the same on all workers.

        Nothing is drawn, and no more than the scores (N, K) is held.
        """
        tags = self.validation.tags
        scores = torch.zeros(len(tags), tags.classes, device=device)
        chunks = -(-len(self.images_of_worker) // _CHUNK)
        model.eval()
        with torch.inference_mode():
            for number, values in enumerate(by_threads(self._images, steps=chunks, threads=self.threads)):
                positions = torch.from_numpy(self._chunk(number)).to(device)
                images = torch.from_numpy(values).to(device, non_blocking=True)
                with autocast():
                    scores[positions] = self.validation.scores(model, images).float()
        model.train()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(scores)  # an image's row is zero on all workers but the one that scores it
        return average_precision(scores.cpu().numpy().astype(np.float64), tags.matrix(np.arange(len(tags))))

    def _chunk(self, number: int) -> NDArray[np.int64]:
        """Positions of the images of a chunk."""
        return self.images_of_worker[number * _CHUNK : (number + 1) * _CHUNK]

    def _images(self, numbers: NDArray[np.int64]) -> NDArray[np.uint8 | np.float16]:
        return self.validation.images(self._chunk(int(numbers[0])))

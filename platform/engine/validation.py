"""Mean average precision on val tags while a classifier trains, over all its workers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mcis.datasets.images import Squares
from mcis.datasets.stream import Batch, Share, by_threads
from mcis.datasets.tags import Tags
from mcis.models.metrics import average_precision

_CHUNK = 32  # images at a time


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Images whose mean average precision is logged at the end of epochs. It changes nothing of the training.

    Attributes:
        images, tags: of the N images, which have a tag each.
        scores: the network and uint8 images (B, S, S, 3) on its device -> class scores (B, K).
        every: epochs from one to the next; the last step always has one.
    """

    images: Squares
    tags: Tags
    scores: Callable[[nn.Module, Tensor], Tensor]
    every: int = 1


class Scorer:
    """Validates the network, whose weights are the same on all workers: each of them scores every world-th image."""

    def __init__(self, validation: Validation, share: Share, threads: int):
        self.validation, self.threads = validation, threads
        self.mine = np.arange(share.rank, len(validation.tags), share.world)

    def due(self, done: int, *, steps: int, epoch_steps: float) -> bool:
        """Whether `done` updates end the training, or epochs after which it is validated."""
        length = self.validation.every * epoch_steps
        return done == steps or int(done / length) > int((done - 1) / length)

    def _images(self, steps: Batch) -> Batch:
        first = int(steps["id"][0]) * _CHUNK
        return {"images": self.validation.images(self.mine[first : first + _CHUNK])}

    def __call__(self, model: nn.Module, autocast: Callable[[], Any], device: torch.device) -> NDArray[np.float64]:
        """Average precision of each class in percent, (K,), NaN for a class that no image has; the same on all workers.

        Nothing is drawn, and no more than the scores (N, K) is held.
        """
        tags = self.validation.tags
        scores = torch.zeros(len(tags), tags.classes, device=device)
        chunks = Share(0, 1, 0, -(-len(self.mine) // _CHUNK))
        model.eval()
        with torch.inference_mode():
            for number, batch in enumerate(by_threads(self._images, share=chunks, threads=self.threads)):
                here = torch.from_numpy(self.mine[number * _CHUNK : (number + 1) * _CHUNK]).to(device)
                images = torch.from_numpy(batch["images"]).to(device, non_blocking=True)
                with autocast():
                    scores[here] = self.validation.scores(model, images).float()
        model.train()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(scores)  # an image's row is zero on all workers but its own
        return average_precision(scores.cpu().numpy().astype(np.float64), tags.matrix(np.arange(len(tags))))

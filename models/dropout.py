"""Dropout with random numbers per sample, so that neither workers nor micro batches change what is dropped."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SampleDropout(nn.Module):
    """Drops units at random (Srivastava et al., JMLR 2014), for each sample by a generator that its number seeds.

    `seed_dropout` numbers the samples of a batch. A sample may be several images, such as a pair: then the batch is
    that of the samples' first images, behind it that of their second ones, and so on, and each is drawn by itself.

    Args:
        rate: fraction of the units that are dropped, in [0, 1); the others are divided by 1 - rate.
        channels: whether channels are dropped whole (Tompson et al., CVPR 2015) rather than units one by one.
    """

    def __init__(self, rate: float, *, channels: bool = False):
        super().__init__()
        self.rate, self.channels = rate, channels
        self.seeds: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) -> the same shape; unchanged in evaluation. ValueError where the samples of a training batch have
        not been numbered."""
        if not self.training or self.rate == 0:
            return x
        if not self.seeds or len(x) % len(self.seeds):
            raise ValueError(f"{len(self.seeds)} samples are numbered, but the batch has {len(x)}")
        generator = torch.Generator(device=x.device)
        kept = x.new_empty(x.shape[:2] + (1,) * (x.ndim - 2)) if self.channels else torch.empty_like(x)
        for row, image in enumerate(kept):
            part, sample = divmod(row, len(self.seeds))
            generator.manual_seed(self.seeds[sample] + part * _MOST_LAYERS)
            image.copy_(torch.rand(image.shape, generator=generator, device=x.device) >= self.rate)
        return x * kept / (1 - self.rate)


_MOST_LAYERS = 2**16
"""Distance of the seeds of a sample's images, between which those of the layers lie."""


def seed_dropout(model: nn.Module, numbers: Sequence[int]) -> None:
    """Numbers the samples of the next batch in all dropout layers of a network.

    Args:
        numbers: (B,), each in 0..2^62; the i-th layer adds i, so that layers do not drop alike.
    """
    for index, layer in enumerate(layer for layer in model.modules() if isinstance(layer, SampleDropout)):
        layer.seeds = [number + index for number in numbers]

"""Dropout with one random generator per sample: neither workers nor micro-batches change what is dropped."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_SEED_STRIDE = 2**16
"""Difference between the seeds of a sample's images. The seeds of the layers are in between, so a network may have at
most this many dropout layers."""


class SampleDropout(nn.Module):
    """Dropout (Srivastava et al., JMLR 2014) that draws each sample from a generator with the sample's own seed.

    `seed_dropout` sets the seeds. A sample can consist of several images, such as a pair. The batch then holds the
    first images of all samples, followed by the second images of all samples, and so on. Each image gets its own draw.

    Args:
        rate: Fraction of the units that are dropped, in [0, 1). The others are divided by 1 - rate.
        channels: Whether to drop whole channels (Tompson et al., CVPR 2015) instead of single units.
    """

    def __init__(self, rate: float, *, channels: bool = False):
        super().__init__()
        self.rate = rate
        self.channels = channels
        self.seeds: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Applies dropout to (B, C, ...). In evaluation mode it returns `x` itself.

        Raises:
            ValueError: In training mode, B is not a multiple of the number of seeds.
        """
        if not self.training or self.rate == 0:
            return x
        if not self.seeds or len(x) % len(self.seeds):
            raise ValueError(f"dropout has seeds for {len(self.seeds)} samples, but the batch has {len(x)} images")

        generator = torch.Generator(device=x.device)
        if self.channels:
            mask = x.new_empty(x.shape[:2] + (1,) * (x.ndim - 2))
        else:
            mask = torch.empty_like(x)

        for row, image_mask in enumerate(mask):
            image_number, sample = divmod(row, len(self.seeds))
            generator.manual_seed(self.seeds[sample] + image_number * _SEED_STRIDE)
            image_mask.copy_(torch.rand(image_mask.shape, generator=generator, device=x.device) >= self.rate)

        return x * mask / (1 - self.rate)


def seed_dropout(model: nn.Module, seeds: Sequence[int]) -> None:
    """Sets the seeds of the next batch in all dropout layers of a network.

    Args:
        seeds: One integer in [0, 2^62) per sample. The i-th layer adds i, so that layers draw different masks.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, SampleDropout)]
    for index, layer in enumerate(layers):
        layer.seeds = [seed + index for seed in seeds]

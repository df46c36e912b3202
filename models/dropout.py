"""Dropout with random numbers per sample, so that neither workers nor micro batches change what is dropped."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SampleDropout(nn.Module):
    """Drops units at random (Srivastava et al., JMLR 2014), for each sample by a generator that its number seeds.

    `number_samples` numbers the samples of a batch.

    Args:
        rate: fraction of the units that are dropped, in [0, 1); the others are divided by 1 - rate.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.numbers: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> the same shape; unchanged in evaluation.

        Raises:
            ValueError: the samples of a training batch have not been numbered.
        """
        if not self.training or self.rate == 0:
            return x
        if len(self.numbers) != len(x):
            raise ValueError(f"{len(self.numbers)} samples are numbered, but the batch has {len(x)}")
        generator = torch.Generator(device=x.device)
        kept = torch.empty_like(x)
        for sample, number in zip(kept, self.numbers, strict=True):
            generator.manual_seed(number)
            sample.copy_(torch.rand(sample.shape, generator=generator, device=x.device) >= self.rate)
        return x * kept / (1 - self.rate)


def number_samples(model: nn.Module, numbers: Sequence[int]) -> None:
    """Numbers the samples of the next batch in all dropout layers of a network.

    Args:
        numbers: (B,), each in 0..2^62; the i-th layer adds i, so that layers do not drop alike.
    """
    for index, layer in enumerate(layer for layer in model.modules() if isinstance(layer, SampleDropout)):
        layer.numbers = [number + index for number in numbers]

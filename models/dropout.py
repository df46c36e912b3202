"""Dropout that draws for each sample apart, so that neither workers nor micro batches change what is dropped."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SampleDropout(nn.Module):
    """Drops units of each sample as its number says (Srivastava et al., JMLR 2014); `number_samples` numbers them.

    Args:
        share: of the units that are dropped, in [0, 1); the others are divided by what is left of 1.
    """

    def __init__(self, share: float):
        super().__init__()
        self.share = share
        self.numbers: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> the same shape; unchanged in evaluation.

        Raises:
            ValueError: in training, a batch whose samples have not been numbered.
        """
        if not self.training or self.share == 0:
            return x
        if len(self.numbers) != len(x):
            raise ValueError(f"{len(self.numbers)} samples are numbered, but the batch has {len(x)}")
        generator = torch.Generator(device=x.device)
        kept = torch.empty_like(x)
        for sample, number in zip(kept, self.numbers, strict=True):
            generator.manual_seed(number)
            sample.copy_(torch.rand(sample.shape, generator=generator, device=x.device) >= self.share)
        return x * kept / (1 - self.share)


def number_samples(model: nn.Module, numbers: Sequence[int]) -> None:
    """Tells a network's dropout layers the numbers of the next batch's samples, (B,), each in 0..2^62."""
    for place, layer in enumerate(layer for layer in model.modules() if isinstance(layer, SampleDropout)):
        layer.numbers = [number + place for number in numbers]

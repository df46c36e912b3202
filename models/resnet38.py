"""Wide ResNet-38 (Wu et al., Pattern Recognition 2019) with stride 8.

Norms come before the convolutions, each followed by a ReLU. Tensor names, dilations and dropout are the same as in the
public code of PSA (Ahn and Kwak, CVPR 2018) and SEAM (Wang et al., CVPR 2020), so their weights files load.
"""

from typing import cast

import torch
from torch import Tensor, nn

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision)

from torchvision.ops import FrozenBatchNorm2d  # isort: skip

from mcis.models.dropout import SampleDropout


class _NormReLU(FrozenBatchNorm2d):
    """Frozen batch norm followed by ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """Builds a convolution without bias, padded so that stride 1 keeps the size."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=padding, dilation=dilation, bias=False)


class _Block(nn.Module):
    """Residual block of two 3x3 convolutions. A 1x1 convolution replaces the identity where the shape changes.

    Args:
        first_dilation: Dilation of the first convolution. None: the same as of the second.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        outputs: int,
        *,
        stride: int = 1,
        first_dilation: int | None = None,
        dilation: int = 1,
    ):
        super().__init__()
        self.bn_branch2a = _NormReLU(inputs)
        self.conv_branch2a = _conv(inputs, width, 3, stride, first_dilation or dilation)
        self.bn_branch2b1 = _NormReLU(width)
        self.conv_branch2b1 = _conv(width, outputs, 3, dilation=dilation)
        self.conv_branch1 = None if inputs == outputs and stride == 1 else _conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        normed = self.bn_branch2a(x)
        shortcut = x if self.conv_branch1 is None else self.conv_branch1(normed)
        residual = self.conv_branch2b1(self.bn_branch2b1(self.conv_branch2a(normed)))
        return cast(Tensor, shortcut + residual)


class _Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions with a 1x1 convolution as shortcut.

    Channels are dropped before the last two convolutions.
    """

    def __init__(self, inputs: int, outputs: int, *, dilation: int, dropout: float):
        super().__init__()
        self.bn_branch2a = _NormReLU(inputs)
        self.conv_branch2a = _conv(inputs, outputs // 4, 1)
        self.bn_branch2b1 = _NormReLU(outputs // 4)
        self.dropout_2b1 = SampleDropout(dropout, channels=True)
        self.conv_branch2b1 = _conv(outputs // 4, outputs // 2, 3, dilation=dilation)
        self.bn_branch2b2 = _NormReLU(outputs // 2)
        self.dropout_2b2 = SampleDropout(dropout, channels=True)
        self.conv_branch2b2 = _conv(outputs // 2, outputs, 1)
        self.conv_branch1 = _conv(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, outputs, H, W)."""
        normed = self.bn_branch2a(x)
        residual = self.conv_branch2b1(self.dropout_2b1(self.bn_branch2b1(self.conv_branch2a(normed))))
        residual = self.conv_branch2b2(self.dropout_2b2(self.bn_branch2b2(residual)))
        return cast(Tensor, self.conv_branch1(normed) + residual)


class ResNet38(nn.Sequential):
    """A 3x3 convolution followed by stages b2 to b7. Maps (B, 3, H, W) to (B, 4096, H / 8, W / 8).

    Training drops half of the feature channels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1a = _conv(3, 64, 3)
        inputs = 64
        for stage, width, blocks in ((2, 128, 3), (3, 256, 3), (4, 512, 6)):
            self.add_module(f"b{stage}", _Block(inputs, width, width, stride=2))
            for block in range(1, blocks):
                self.add_module(f"b{stage}_{block}", _Block(width, width, width))
            inputs = width

        self.b5 = _Block(512, 512, 1024, first_dilation=1, dilation=2)
        self.b5_1 = _Block(1024, 512, 1024, dilation=2)
        self.b5_2 = _Block(1024, 512, 1024, dilation=2)
        self.b6 = _Bottleneck(1024, 2048, dilation=4, dropout=0.3)
        self.b7 = _Bottleneck(2048, 4096, dilation=4, dropout=0.5)
        self.bn7 = _NormReLU(4096)
        self.dropout7 = SampleDropout(0.5, channels=True)

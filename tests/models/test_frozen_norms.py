"""Norms folded into convolutions against the network as it stands, in float64, and by their gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mcis.models.frozen_norms import fold_frozen_norms

from timm.layers import FrozenBatchNormAct2d  # isort: skip
from torchvision.ops import FrozenBatchNorm2d  # isort: skip


class Net(nn.Module):
    """Norms behind a convolution with a bias, with an activation, of a sum, and of an output that is read once more."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, stride=2), FrozenBatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm2 = FrozenBatchNormAct2d(8, act_layer=nn.ReLU6)
        self.norm3 = FrozenBatchNorm2d(8)
        self.conv4, self.norm4 = nn.Conv2d(8, 8, 1), FrozenBatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.norm1(self.conv1(x))
        behind: Tensor = self.norm3(first + self.norm2(self.conv2(first)))
        plain: Tensor = self.conv4(behind)
        summed: Tensor = plain + self.norm4(plain)
        return summed


@pytest.fixture
def nets() -> tuple[Net, Net]:
    torch.manual_seed(0)
    apart = Net().double()
    folded = copy.deepcopy(apart)
    fold_frozen_norms(folded)
    for name, values in apart.named_buffers():  # as weights that are loaded later
        values.uniform_(0.5, 2) if name.endswith("running_var") else values.normal_()
    folded.load_state_dict(apart.state_dict())
    return apart, folded


def test_outputs_and_gradients_are_those_of_the_layers_apart(nets: tuple[Net, Net]) -> None:
    x = torch.randn(2, 3, 17, 19, dtype=torch.float64)
    apart, folded = (net(x) for net in nets)
    torch.testing.assert_close(folded, apart, rtol=1e-12, atol=1e-12)
    for out in (apart, folded):
        out.square().sum().backward()
    for (name, one), (_, other) in zip(*(net.named_parameters() for net in nets), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-10, msg=name)


def test_only_norms_of_convolutions_are_folded_and_a_copy_stands_alone(nets: tuple[Net, Net]) -> None:
    _, folded = nets
    assert type(folded.norm3) is type(folded.norm4) is FrozenBatchNorm2d
    assert not {type(folded.norm1), type(folded.norm2)} & {FrozenBatchNorm2d, FrozenBatchNormAct2d}
    copied = copy.deepcopy(folded)
    x = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    before = folded(x)
    copied.norm1.weight.zero_()
    torch.testing.assert_close(folded(x), before, rtol=0, atol=0)
    assert not torch.allclose(copied(x), before)

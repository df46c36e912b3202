"""Tests of norms folded into convolutions: same outputs and gradients as the separate layers, in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mcis.models.frozen_norms import fold_frozen_norms

from timm.layers import FrozenBatchNormAct2d  # isort: skip
from torchvision.ops import FrozenBatchNorm2d  # isort: skip


class Network(nn.Module):
    """Norms after a convolution with bias, with an activation, after a sum, and after an output that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2)
        self.norm1 = FrozenBatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm2 = FrozenBatchNormAct2d(8, act_layer=nn.ReLU6)
        self.norm3 = FrozenBatchNorm2d(8)
        self.conv4 = nn.Conv2d(8, 8, 1)
        self.norm4 = FrozenBatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.norm1(self.conv1(x))
        summed: Tensor = self.norm3(first + self.norm2(self.conv2(first)))
        read_twice: Tensor = self.conv4(summed)
        output: Tensor = read_twice + self.norm4(read_twice)
        return output


@pytest.fixture
def networks() -> tuple[Network, Network]:
    """Returns a network with separate norms and a folded copy. Weights are loaded after folding."""
    torch.manual_seed(0)
    separate = Network().double()
    folded = copy.deepcopy(separate)
    fold_frozen_norms(folded)
    for name, values in separate.named_buffers():
        if name.endswith("running_var"):
            values.uniform_(0.5, 2)
        else:
            values.normal_()
    folded.load_state_dict(separate.state_dict())
    return separate, folded


def test_folding_keeps_the_outputs(networks: tuple[Network, Network]) -> None:
    separate, folded = networks
    x = torch.randn(2, 3, 17, 19, dtype=torch.float64)
    torch.testing.assert_close(folded(x), separate(x), rtol=1e-12, atol=1e-12)


def test_folding_keeps_the_gradients(networks: tuple[Network, Network]) -> None:
    separate, folded = networks
    x = torch.randn(2, 3, 17, 19, dtype=torch.float64)
    for network in networks:
        network(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in separate.named_parameters()}
    for name, parameter in folded.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10, msg=name)


def test_only_norms_that_alone_read_a_convolution_are_folded(networks: tuple[Network, Network]) -> None:
    _, folded = networks
    assert type(folded.norm1) is not FrozenBatchNorm2d
    assert type(folded.norm2) is not FrozenBatchNormAct2d
    assert type(folded.norm3) is FrozenBatchNorm2d
    assert type(folded.norm4) is FrozenBatchNorm2d


def test_a_convolution_with_other_padding_than_zeros_keeps_its_norm() -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    network = nn.Sequential(conv, FrozenBatchNorm2d(4))
    x = torch.randn(1, 3, 8, 8)
    before = network(x)

    fold_frozen_norms(network)

    assert type(network[1]) is FrozenBatchNorm2d
    torch.testing.assert_close(network(x), before, rtol=0, atol=0)


def test_a_copy_of_a_folded_network_has_norms_of_its_own(networks: tuple[Network, Network]) -> None:
    _, folded = networks
    copied = copy.deepcopy(folded)
    x = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    before = folded(x)
    copied.norm1.weight.zero_()
    torch.testing.assert_close(folded(x), before, rtol=0, atol=0)
    assert not torch.allclose(copied(x), before)

"""Folds frozen batch norms into the convolutions before them.

A frozen norm scales and shifts each channel. Applied to a convolution's output it passes over all positions. Folded
into the convolution's weights it passes over the weights only. On a CPU this halves the time of an EfficientNet's
forward pass.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision, and timm, which imports it)

from timm.layers import FrozenBatchNormAct2d  # isort: skip
from torchvision.ops import FrozenBatchNorm2d  # isort: skip


class _NormedConv2d(nn.Conv2d):
    """Convolution, padded with zeros, that also applies the frozen norm that follows it.

    Its trained weights keep their names.
    """

    norm: tuple[Any]  # in a tuple, because as an attribute the norm would be registered as a submodule a second time

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm[0]
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = norm.bias - norm.running_mean * scale
        if self.bias is not None:
            shift = shift + self.bias * scale
        weight = self.weight * scale[:, None, None, None]
        return functional.conv2d(x, weight, shift, self.stride, self.padding, self.dilation, self.groups)


class _FoldedNorm(FrozenBatchNorm2d):
    """Frozen batch norm that the convolution before it applies."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class _FoldedNormAct(FrozenBatchNormAct2d):
    """Frozen batch norm that the convolution before it applies. The activation stays here."""

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act(self.drop(x))
        return activated


_FOLDED: dict[type[nn.Module], type[nn.Module]] = {FrozenBatchNorm2d: _FoldedNorm, FrozenBatchNormAct2d: _FoldedNormAct}


class _ReadCounter(TorchDispatchMode):
    """Counts how many times operators read each tensor, by the tensor's id."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count.update(id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))


class FoldedPair(NamedTuple):
    """Names of a convolution in a network and of the frozen norm that is the only reader of its output."""

    conv: str
    norm: str


def fold_frozen_norms(network: nn.Module) -> None:
    """Folds, in place, each frozen batch norm that is the only reader of a convolution's output.

    Convolutions that pad with other values than zeros keep their norms.

    The names of tensors stay the same. Weights may be loaded afterwards, because they are folded in each forward pass.

    Args:
        network: Maps images (B, 3, H, W) to any output. Norms that are already folded and other norms stay as they are.
    """
    fold_pairs(network, find_pairs(network))


def fold_pairs(network: nn.Module, pairs: Iterable[FoldedPair]) -> None:
    """Folds, in place, the norms of pairs that `find_pairs` found in a network of the same structure."""
    for names in pairs:
        conv = network.get_submodule(names.conv)
        norm = network.get_submodule(names.norm)
        conv.__class__ = _NormedConv2d
        norm.__class__ = _FOLDED[type(norm)]
        assert isinstance(conv, _NormedConv2d)
        conv.norm = (norm,)


def find_pairs(network: nn.Module) -> tuple[FoldedPair, ...]:
    """Finds the convolutions and frozen norms that can be folded, in a forward pass on the meta device.

    Args:
        network: Maps images (B, 3, H, W) to any output. Its parameters may be on any device.
    """
    if not any(type(layer) in _FOLDED for layer in network.modules()):
        return ()  # other networks, such as transformers, may not accept the size of the image below

    reads = _ReadCounter()
    names = {layer: name for name, layer in network.named_modules()}
    traced = _trace_pairs(network, list(names), reads)
    return tuple(FoldedPair(names[conv], names[norm]) for conv, norm, output in traced if reads.count[output] == 1)


def _can_fold(layer: nn.Module) -> bool:
    """Returns whether a layer is a convolution into which a norm can be folded."""
    return type(layer) is nn.Conv2d and layer.padding_mode == "zeros"


class _TracedPair(NamedTuple):
    """A convolution, the norm that reads its output, and the output's id."""

    conv: nn.Conv2d
    norm: nn.Module
    output_id: int


def _trace_pairs(network: nn.Module, layers: list[nn.Module], reads: _ReadCounter) -> list[_TracedPair]:
    """Runs the network on the meta device and returns each convolution whose output goes to a frozen norm.

    Args:
        layers: All modules of the network.
        reads: Receives the number of reads of each tensor.
    """
    outputs: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # holds the tensors, so that their ids are not reused
    pairs: list[_TracedPair] = []

    def keep_output(conv: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(conv, nn.Conv2d)
        outputs[id(output)] = conv, output
        reads.count[id(output)] = 0  # an earlier tensor may have had this id

    def add_pair(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        input_id = id(inputs[0])
        if input_id in outputs:
            conv, _ = outputs[input_id]
            pairs.append(_TracedPair(conv, norm, input_id))

    handles = [layer.register_forward_hook(keep_output) for layer in layers if _can_fold(layer)]
    handles += [layer.register_forward_pre_hook(add_pair) for layer in layers if type(layer) in _FOLDED]

    named_tensors = [*network.named_parameters(), *network.named_buffers()]
    meta_tensors = {name: tensor.to("meta") for name, tensor in named_tensors}
    image = next(network.parameters()).new_zeros(1, 3, 256, 256, device="meta")
    with reads:
        functional_call(network, meta_tensors, image)

    for handle in handles:
        handle.remove()
    return pairs

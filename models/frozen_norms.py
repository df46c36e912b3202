"""Frozen batch norms folded into the convolutions before them.

A frozen norm is a scale and a shift of each channel. Behind a convolution both pass over all positions, within its
weights over the weights alone: on a CPU a forward pass of EfficientNet then takes about half the time.
"""

from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision, and timm, which imports it)

from timm.layers import FrozenBatchNormAct2d  # isort: skip
from torchvision.ops import FrozenBatchNorm2d  # isort: skip


class _NormedConv2d(nn.Conv2d):
    """A convolution with the norm behind it; its own weights keep their name and are what is trained."""

    norm: tuple[Any]  # a tuple, so that the module has one place in the network

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm[0]
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = norm.bias - norm.running_mean * scale
        if self.bias is not None:
            shift = shift + self.bias * scale
        return self._conv_forward(x, self.weight * scale[:, None, None, None], shift)


class _Applied(FrozenBatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return x


class _AppliedAct(FrozenBatchNormAct2d):
    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act(self.drop(x))
        return activated


_APPLIED: dict[type[nn.Module], type[nn.Module]] = {FrozenBatchNorm2d: _Applied, FrozenBatchNormAct2d: _AppliedAct}


class _Uses(TorchDispatchMode):
    """Counts how often operators read a tensor, by the tensor's id."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count.update(id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))


def fold_frozen_norms(network: nn.Module) -> None:
    """Folds each frozen batch norm that is all that a convolution's output goes to, in place; names of tensors stay.

    Which ones do is read off a forward pass without values. Weights may be loaded later: they count when they are used.

    Args:
        network: takes images (B, 3, H, W). Norms that it already has folded, and of other kinds, stay.
    """
    outputs: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # with the tensor, so that its id is of no other one
    pairs: list[tuple[nn.Conv2d, nn.Module, int]] = []
    uses = _Uses()

    def keep(conv: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(conv, nn.Conv2d)
        outputs[id(output)] = conv, output
        uses.count[id(output)] = 0  # the id may have been an earlier tensor's

    def pair(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if id(inputs[0]) in outputs:
            pairs.append((outputs[id(inputs[0])][0], norm, id(inputs[0])))

    layers = list(network.modules())
    if not any(type(layer) in _APPLIED for layer in layers):
        return  # a network such as a transformer may take no images of that size
    handles = [layer.register_forward_hook(keep) for layer in layers if type(layer) is nn.Conv2d]
    handles += [layer.register_forward_pre_hook(pair) for layer in layers if type(layer) in _APPLIED]
    tensors = {name: value.to("meta") for name, value in [*network.named_parameters(), *network.named_buffers()]}
    image = next(network.parameters()).new_zeros(1, 3, 256, 256, device="meta")
    with uses:
        functional_call(network, tensors, image)
    for handle in handles:
        handle.remove()
    for conv, norm, output in pairs:
        if uses.count[output] > 1:
            continue
        conv.__class__, norm.__class__ = _NormedConv2d, _APPLIED[type(norm)]
        assert isinstance(conv, _NormedConv2d)
        conv.norm = (norm,)

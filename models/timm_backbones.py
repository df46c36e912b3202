"""timm's networks as backbones: convolutional ones at a chosen output stride, and vision transformers.

Channels, strides and the places of positions are asked of the network: of a forward pass without values, on the device
`meta`. Parameters keep timm's names, so that timm's files of weights fit.
"""

import functools
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import mcis.models.torchvision_ops  # noqa: F401  (before timm, which imports torchvision)

import timm  # isort: skip
from timm.layers.pool2d_same import MaxPool2dSame  # isort: skip

from mcis.datasets.errors import UserError
from mcis.models.backbones import Backbone, Layer, Normalization
from mcis.models.frozen_norms import fold_frozen_norms
from mcis.models.grids import Layout

_STRIDE = 16  # of convolutional networks, unless another one is asked for
_SIDE = 256  # of the image without values that a network is measured with, a multiple of all strides
_FINEST = 4  # stride of the finest level
_HEAD = ("conv_head", "bn2")  # timm's names, in EfficientNets, of what makes the classes' features of the last stage


class TimmBackbone(Backbone):
    """A network of timm's as it names its parameters; features are the outputs of some of its stages.

    Attributes:
        indices: of these stages.
        patch: side of a transformer's patches, pixels, which its images are resized to a multiple of; None of a
            convolutional network.
        head: layers between its last stage and its classes, by their names in the body; of EfficientNets a 1x1
            convolution to four times as many channels, and its norm.
    """

    def __init__(
        self, body: nn.Module, *, indices: tuple[int, ...], patch: int | None, head: dict[str, nn.Module], **facts: Any
    ):
        super().__init__(body, **facts)
        self.indices, self.patch, self.head = indices, patch, head

    def forward(self, images: Tensor) -> Tensor:
        if self.patch is not None:
            whole = tuple(self.patch * max(1, round(side / self.patch)) for side in images.shape[2:])
            if images.shape[2:] != whole:
                images = functional.interpolate(images, size=whole, mode="bilinear", align_corners=False)
        return torch.cat(_intermediates(self.body, images, list(self.indices), norm=self.patch is not None), dim=1)

    def keep_pretrained_head(self) -> int:
        if not self.head:
            return super().keep_pretrained_head()
        for name, layer in self.head.items():
            setattr(self.body, name, layer)
        return int(self.head["conv_head"].out_channels)  # type: ignore[arg-type]

    def image_features(self, features: Tensor) -> Tensor:
        last = features[:, -self.stage_channels[-1] :] if self.head else features
        for name in self.head:
            last = self.body.get_submodule(name)(last)
        return super().image_features(last)


def build_timm_backbone(name: str, *, stride: int | None = None) -> Backbone:
    """A network of timm's, without its classification layers and with random weights.

    A convolutional network's features are all stages at the output stride, concatenated, where stages that would reduce
    further are dilated instead; a vision transformer's are the patches of its last block, normed. Batch norms are
    frozen, and nothing is dropped in training, so an image's features depend on the image alone.

    Args:
        name: timm's, as `convnext_atto` or `vit_small_patch14_dinov2.lvd142m`.
        stride: input pixels per position; None = 16, or what the network has.

    Raises:
        UserError: there is no such network, it has no such stride, or its positions cannot be placed.
    """
    facts = _facts(name, stride)
    network, _ = _network(name, stride)
    head = {layer: network.get_submodule(layer) for layer in _HEAD if isinstance(network, timm.models.EfficientNet)}
    network.prune_intermediate_layers(list(facts["indices"]), prune_norm=False, prune_head=True)  # type: ignore[operator]
    return TimmBackbone(network, normalization=timm_normalization(name), head=head, **facts)


def timm_normalization(name: str) -> Normalization:
    """How a network's weights want pixels, by timm's description; it is not built. Errors as of `check_timm_name`."""
    check_timm_name(name)
    described = timm.get_pretrained_cfg(name)
    assert described is not None
    return Normalization(*(tuple(values) for values in (described.mean, described.std)))  # type: ignore[arg-type]


def download_state_dict(name: str) -> dict[str, Tensor]:
    """A network's pretrained weights by timm's names, classification layers included, from timm's cache or hub; OSError
    or RuntimeError where there are none, or they cannot be fetched."""
    return dict(timm.create_model(name, pretrained=True).state_dict())


def check_timm_name(name: str) -> None:
    """Checks that timm has a network, and weights where its name is followed by a dot and their tag; UserError where
    there is none, which suggests the nearest name."""
    try:
        if not timm.is_model(name):
            raise RuntimeError
        timm.get_pretrained_cfg(name)
    except RuntimeError:  # timm's for an unknown tag
        names = [*timm.list_models(), *timm.list_pretrained()]
        near = get_close_matches(name, names, n=3, cutoff=0.5)
        suggested = " or ".join(f"timm/{other}" for other in near) or "timm/resnet50"
        raise UserError(
            f"timm has no network {name}", "a name out of timm.list_models()", f"choose another backbone: {suggested}"
        ) from None


@functools.cache
def _facts(name: str, stride: int | None) -> Mapping[str, Any]:
    """What a network's forward pass on the device `meta` tells; see `Backbone` and `TimmBackbone`."""
    with torch.device("meta"):
        network, patch = _network(name, stride)
    whole = network.state_dict()
    side = _SIDE if patch is None else 16 * patch
    try:
        measured, offsets = _measured(network, side)
    except AssertionError as error:
        found = f"timm/{name} takes no image of {side} x {side} pixels: {error}"
        raise UserError(found, "a network for images of any size", "choose another backbone") from None
    strides = [side // maps.shape[-1] for maps in measured]
    if patch is not None and len(set(strides)) > 1:
        raise UserError(
            f"timm/{name} merges its patches, stage by stage",
            "a convolutional network, or a transformer whose patches stay",
            "choose another backbone, as timm/convnext_tiny or timm/vit_small_patch16_224",
        )
    last = strides[-1]
    if stride not in (None, last):
        raise UserError(
            f"timm/{name} with stride {stride}",
            f"a stride that timm gives its last stage, as {last}",
            f"set stride to {last}, or choose another backbone",
        )
    names = [part["module"] for part in network.feature_info]  # type: ignore[union-attr]
    finer = {reduction: n for n, reduction in enumerate(strides) if _FINEST <= reduction < last}
    indices = tuple(n for n, reduction in enumerate(strides) if reduction == last)
    layout = Layout(last, offsets.get(last))
    if patch is None:
        _check_places(network, name, layout)
    else:
        indices, layout = indices[-1:], Layout(patch, None)
    levels = tuple(Layer(names[n], measured[n].shape[1], Layout(r, offsets[r])) for r, n in finer.items())
    network.prune_intermediate_layers(list(indices), prune_norm=False, prune_head=True)  # type: ignore[operator]
    return {
        "indices": indices,
        "patch": patch,
        "stage_channels": tuple(measured[n].shape[1] for n in indices),
        "layout": layout,
        "stages": _first_parameters(network, names),
        "unused_weights": tuple(sorted(set(whole) - set(network.state_dict()))),
        "levels": levels,
    }


def _network(name: str, stride: int | None) -> tuple[nn.Module, int | None]:
    """timm's whole network, and the side of its patches where it is a transformer of patches.

    Which of the two it is, and whether its stages can be dilated, timm tells by the options that it takes.
    """
    check_timm_name(name)
    options: dict[str, Any]
    for options in ({"output_stride": stride or _STRIDE}, {"dynamic_img_size": True}, {}):
        try:
            network = timm.create_model(name, pretrained=False, **options)
        except (TypeError, AssertionError, NotImplementedError):  # what timm's networks raise for these options
            continue
        break
    else:
        raise UserError(f"timm/{name} cannot be built", "a network without options", "choose another backbone")
    if not hasattr(network, "forward_intermediates") or not hasattr(network, "prune_intermediate_layers"):
        raise UserError(
            f"timm/{name} does not give the features of its stages",
            "a network of timm's with `forward_intermediates`",
            "choose another backbone, as timm/resnet50",
        )
    network = timm.layers.freeze_batch_norm_2d(network)
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, timm.layers.DropPath):
            module.drop_prob = 0.0
    _pad_symmetrically(network)
    fold_frozen_norms(network)
    patch = network.patch_embed.patch_size[0] if "dynamic_img_size" in options else None
    return network, patch


class _CenteredConv2d(nn.Conv2d):
    """A convolution whose kernel has no central element: outputs between positions, averaged onto them."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(super().forward(x), 2, stride=1)


def _pad_symmetrically(network: nn.Module) -> None:
    """Pads by the same number of pixels on both sides where TensorFlow's SAME padding depends on the image's size.

    Position i of a network with odd kernels is then centered at pixel stride * i, whatever the size. In the interior
    its features are those of TensorFlow's padding on an image of whole strides that is shifted by stride - 1 pixels. A
    kernel of 2x2 without a stride, as dilated ConvNeXt has it, is centered between positions; outputs are averaged.
    """
    for name, module in list(network.named_modules()):
        kernel, dilation = (_sides(getattr(module, key, 1)) for key in ("kernel_size", "dilation"))
        padding = (kernel[0] - 1) * dilation[0] // 2, (kernel[1] - 1) * dilation[1] // 2
        if isinstance(module, timm.layers.Conv2dSame):
            between = (kernel[0] - 1) * dilation[0] % 2 == 1 and _sides(module.stride) == (1, 1)
            kind: type[nn.Conv2d] = _CenteredConv2d if between else nn.Conv2d
            padding, stride = (padding[0] + between, padding[1] + between), _sides(module.stride)
            channels, groups = (module.in_channels, module.out_channels), module.groups
            conv = kind(*channels, kernel, stride, padding, dilation, groups, bias=False)
            conv.weight, conv.bias = module.weight, module.bias
            network.set_submodule(name, conv)
        elif isinstance(module, timm.layers.StdConv2dSame | timm.layers.ScaledStdConv2dSame) and module.same_pad:
            module.same_pad, module.padding = False, padding
        elif isinstance(module, MaxPool2dSame):
            network.set_submodule(name, nn.MaxPool2d(kernel, module.stride, padding))


def _measured(network: nn.Module, side: int) -> tuple[list[Tensor], dict[float, float]]:
    """The outputs of all stages for an image of side x side pixels, and where position 0 lies at each stride.

    A layer with a stride moves position 0 by its kernel's center less its padding, in units of the stride before it; of
    layers at the same stride, as in a block and its shortcut, the one with the largest kernel counts.
    """
    offsets: dict[float, float] = {1: 0.0}
    kernels: dict[float, int] = {}

    def place(layer: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        kernel, stride, dilation, padding = (
            _sides(getattr(layer, key, 1))[1] for key in ("kernel_size", "stride", "dilation", "padding")
        )
        before = side / inputs[0].shape[-1]
        after = before * stride
        if stride > 1 and before in offsets and kernel > kernels.get(after, 0):
            kernels[after] = kernel
            offsets[after] = offsets[before] + before * (dilation * (kernel - 1) / 2 - padding)

    kinds = nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d
    handles = [layer.register_forward_hook(place) for layer in network.modules() if isinstance(layer, kinds)]
    measured = _intermediates(network, torch.zeros(1, 3, side, side, device="meta"), None, norm=False)
    for handle in handles:
        handle.remove()
    return measured, offsets


def _check_places(network: nn.Module, name: str, layout: Layout) -> None:
    """Checks that an image of whole positions has as many as follow from the layout."""
    if layout.offset is not None:
        side = layout.padded_side(_SIDE)
        maps = _intermediates(network, torch.zeros(1, 3, side, side, device="meta"), None, norm=False)[-1]
        if layout.offset + (maps.shape[-1] - 1) * layout.stride == side - 1 - layout.offset:
            return
    raise UserError(
        f"the places of the positions of timm/{name} do not follow from its strides and paddings",
        "a network whose positions lie symmetrically in images of whole positions",
        "choose another backbone, as timm/resnet50",
    )


def _intermediates(network: nn.Module, images: Tensor, indices: list[int] | None, *, norm: bool) -> list[Tensor]:
    maps: list[Tensor] = network.forward_intermediates(  # type: ignore[operator]
        images, indices=indices, norm=norm, output_fmt="NCHW", intermediates_only=True
    )
    return maps


def _first_parameters(network: nn.Module, ends: list[str]) -> tuple[str, ...]:
    """The names of the first parameters of the stages that end with the modules named; the first has the stem, too."""
    names = [name for name, _ in network.named_parameters()]
    lasts = [max((n for n, name in enumerate(names) if name.startswith(f"{end}.")), default=-1) for end in ends[:-1]]
    return tuple(names[n] for n in sorted({0, *(last + 1 for last in lasts)}))


def _sides(value: Any) -> tuple[int, int]:
    """A layer's option as height and width; padding in words is that of layers without a stride, and counts nothing."""
    if isinstance(value, str):
        return 0, 0
    height, width = value if isinstance(value, tuple | list) else (value, value)
    return height, width

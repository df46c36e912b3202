"""timm's networks as backbones: convolutional networks with a chosen output stride, and vision transformers.

Channels, strides and layouts are measured in a forward pass on the meta device. Parameters keep timm's names, so timm's
weights files load.
"""

import functools
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import mcis.models.torchvision_ops  # noqa: F401  (before timm, which imports torchvision)

import timm  # isort: skip
from timm.layers.pool2d_same import MaxPool2dSame  # isort: skip

from mcis.datasets.errors import UserError
from mcis.models.backbones import Backbone, Layer, Normalization
from mcis.models.frozen_norms import FoldedPair, find_pairs, fold_pairs
from mcis.models.grids import Layout

_DEFAULT_STRIDE = 16
"""Output stride of convolutional networks."""
_MEASURED_SIDE = 256
"""Side of the image on the meta device that a network is measured with, a multiple of all strides."""
_FINEST_STRIDE = 4
"""Stride of the finest level."""
_EFFICIENTNET_HEAD = ("conv_head", "bn2")
"""timm's names of an EfficientNet's layers between the last stage and the pooled features of the classes."""
_DROPOUT_CLASSES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class TimmBackbone(Backbone):
    """A network of timm whose features are the outputs of some of its stages. Parameters keep timm's names.

    Attributes:
        indices: Indices of these stages.
        patch: Side of a transformer's patches in pixels; its images are resized to multiples of it. None for a
            convolutional network.
        head: Layers between the last stage and the classification layer, by their names in the body. For EfficientNets:
            a 1x1 convolution to four times as many channels, and its norm. Empty for other networks.
    """

    def __init__(
        self,
        body: nn.Module,
        *,
        indices: tuple[int, ...],
        patch: int | None,
        head: dict[str, nn.Module],
        **backbone_options: Any,
    ):
        super().__init__(body, **backbone_options)
        self.indices = indices
        self.patch = patch
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        if self.patch is not None:
            size = tuple(self.patch * max(1, round(side / self.patch)) for side in images.shape[2:])
            if images.shape[2:] != size:
                images = functional.interpolate(images, size=size, mode="bilinear", align_corners=False)
        stages = _stage_outputs(self.body, images, list(self.indices), norm=self.patch is not None)
        return torch.cat(stages, dim=1)

    def keep_pretrained_head(self) -> int:
        if not self.head:
            return super().keep_pretrained_head()
        for name, layer in self.head.items():
            setattr(self.body, name, layer)
        return int(self.head["conv_head"].out_channels)  # type: ignore[arg-type]

    def image_features(self, features: Tensor) -> Tensor:
        last_stage = features[:, -self.stage_channels[-1] :] if self.head else features
        for name in self.head:
            last_stage = self.body.get_submodule(name)(last_stage)
        return super().image_features(last_stage)


def build_timm_backbone(name: str, *, stride: int | None = None) -> Backbone:
    """Builds a network of timm without its classification layers and with random weights.

    The features of a convolutional network are its stages at the output stride, concatenated. Stages that would reduce
    the size further are dilated instead. The features of a vision transformer are the normed patches of its last block.
    Batch norms are frozen and dropout is off, so an image's features depend on the image only.

    Args:
        name: Timm's name, for example `convnext_atto` or `vit_small_patch14_dinov2.lvd142m`.
        stride: Input pixels per position. None: 16, or the network's own stride if it cannot be dilated.

    Raises:
        UserError: Timm has no such network, it does not support the stride, or the locations of its positions are
            unknown.
    """
    structure = _measure_structure(name, stride)
    network, patch = _build_network(name, stride)
    fold_pairs(network, structure.folded_pairs)

    head = {}  # read before the network is pruned
    if isinstance(network, timm.models.EfficientNet):
        head = {layer: network.get_submodule(layer) for layer in _EFFICIENTNET_HEAD}
    _prune(network, structure.indices)

    return TimmBackbone(
        network,
        indices=structure.indices,
        patch=patch,
        head=head,
        stage_channels=structure.stage_channels,
        layout=structure.layout,
        stages=structure.stages,
        normalization=timm_normalization(name),
        unused_weights=structure.unused_weights,
        levels=structure.levels,
    )


def timm_normalization(name: str) -> Normalization:
    """Returns the normalization that a network's weights expect, from timm's metadata. Does not build the network.

    Raises:
        UserError: See `check_timm_name`.
    """
    check_timm_name(name)
    metadata = timm.get_pretrained_cfg(name)
    assert metadata is not None
    return Normalization(tuple(metadata.mean), tuple(metadata.std))  # type: ignore[arg-type]


def download_state_dict(name: str) -> dict[str, Tensor]:
    """Returns a network's pretrained weights under timm's names, including classification layers.

    timm takes them from its cache or downloads them.

    Raises:
        OSError, RuntimeError: There are no weights, or the download failed.
    """
    return dict(timm.create_model(name, pretrained=True).state_dict())


def check_timm_name(name: str) -> None:
    """Checks that timm has a network, and weights for the tag after a dot in its name.

    Raises:
        UserError: Timm has no such name. The message suggests the most similar ones.
    """
    if _is_timm_name(name):
        return

    names = [*timm.list_models(), *timm.list_pretrained()]
    similar = get_close_matches(name, names, n=3, cutoff=0.5) or ["resnet50"]
    suggestions = " or ".join(f"timm/{other}" for other in similar)
    raise UserError(
        f"timm has no network {name}", "a name in timm.list_models()", f"choose another backbone: {suggestions}"
    )


def _is_timm_name(name: str) -> bool:
    if not timm.is_model(name):
        return False
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError:  # there are no weights for the tag
        return False
    return True


class _Structure(NamedTuple):
    """Structure of a network, as `Backbone`, `TimmBackbone` and `fold_pairs` describe it."""

    indices: tuple[int, ...]
    stage_channels: tuple[int, ...]
    layout: Layout
    stages: tuple[str, ...]
    unused_weights: tuple[str, ...]
    levels: tuple[Layer, ...]
    folded_pairs: tuple[FoldedPair, ...]


@functools.cache
def _measure_structure(name: str, stride: int | None) -> _Structure:
    """Measures a network's structure in a forward pass on the meta device. For errors see `build_timm_backbone`."""
    with torch.device("meta"):
        network, patch = _build_network(name, stride)
    folded_pairs = find_pairs(network)
    measured = _measure_stages(network, name, _MEASURED_SIDE if patch is None else 16 * patch)
    strides = measured.strides
    _check_strides(name, stride, strides, patch)

    if patch is None:
        indices = tuple(n for n, stage_stride in enumerate(strides) if stage_stride == strides[-1])
        layout = Layout(strides[-1], measured.offsets.get(strides[-1]))
        _check_positions(network, name, layout)
    else:
        indices = (len(strides) - 1,)
        layout = Layout(patch, None)

    stage_modules = [stage["module"] for stage in network.feature_info]  # type: ignore[union-attr]
    levels = _finer_levels(measured, stage_modules)

    tensors_before = set(network.state_dict())
    _prune(network, indices)
    return _Structure(
        indices=indices,
        stage_channels=tuple(measured.channels[n] for n in indices),
        layout=layout,
        stages=_first_parameters(network, stage_modules),
        unused_weights=tuple(sorted(tensors_before - set(network.state_dict()))),
        levels=levels,
        folded_pairs=folded_pairs,
    )


class _MeasuredStages(NamedTuple):
    """Stages of a network, measured in a forward pass.

    Attributes:
        channels: Number of output channels of each stage.
        strides: Input pixels per position of each stage.
        offsets: Stride -> pixel at which position 0 is centered after the layers with this stride.
    """

    channels: list[int]
    strides: list[int]
    offsets: dict[float, float]


def _measure_stages(network: nn.Module, name: str, side: int) -> _MeasuredStages:
    """Measures the stages of a network on the meta device, for an image of side x side pixels.

    Raises:
        UserError: The network does not accept images of this size.
    """
    try:
        outputs, offsets = _run_and_record_offsets(network, side)
    except AssertionError as error:
        found = f"timm/{name} does not accept images of {side} x {side} pixels: {error}"
        raise UserError(found, "a network for images of any size", "choose another backbone") from None

    channels = [maps.shape[1] for maps in outputs]
    strides = [side // maps.shape[-1] for maps in outputs]
    return _MeasuredStages(channels, strides, offsets)


def _finer_levels(measured: _MeasuredStages, stage_modules: list[str]) -> tuple[Layer, ...]:
    """Returns the last stage of each stride from `_FINEST_STRIDE` on that is smaller than the output stride.

    Args:
        stage_modules: Name of the last module of each stage.
    """
    last_stage_of_stride = {stride: n for n, stride in enumerate(measured.strides)}
    levels: list[Layer] = []
    for stride, n in last_stage_of_stride.items():
        if _FINEST_STRIDE <= stride < measured.strides[-1]:
            layout = Layout(stride, measured.offsets[stride])
            levels.append(Layer(stage_modules[n], measured.channels[n], layout))
    return tuple(levels)


def _prune(network: nn.Module, indices: tuple[int, ...]) -> None:
    """Removes the classification layers and all layers after the stages with these indices."""
    network.prune_intermediate_layers(list(indices), prune_norm=False, prune_head=True)  # type: ignore[operator]


def _check_strides(name: str, stride: int | None, strides: list[int], patch: int | None) -> None:
    """Checks that the last stage has the requested stride, and that all stages of a transformer have the same.

    Args:
        stride: Requested stride. None: any.
        strides: Strides of the stages.
        patch: Side of a transformer's patches.
    """
    if patch is not None and len(set(strides)) > 1:
        raise UserError(
            f"timm/{name} merges patches from stage to stage",
            "a convolutional network, or a transformer that does not merge patches",
            "choose another backbone, for example timm/convnext_tiny or timm/vit_small_patch16_224",
        )
    last_stride = strides[-1]
    if stride not in (None, last_stride):
        raise UserError(
            f"timm/{name} with stride {stride}",
            f"a stride that timm supports for the last stage of this network, for example {last_stride}",
            f"set stride to {last_stride}, or choose another backbone",
        )


def _build_network(name: str, stride: int | None) -> tuple[nn.Module, int | None]:
    """Builds timm's complete network with frozen batch norms, symmetric padding and without dropout.

    Returns:
        The network, and the side of a transformer's patches in pixels (None for a convolutional network).
    """
    check_timm_name(name)
    network, options = _create_network(name, stride)
    if not hasattr(network, "forward_intermediates") or not hasattr(network, "prune_intermediate_layers"):
        raise UserError(
            f"timm/{name} does not return the features of its stages",
            "a network of timm with `forward_intermediates`",
            "choose another backbone, for example timm/resnet50",
        )

    network = timm.layers.freeze_batch_norm_2d(network)
    for module in network.modules():
        if isinstance(module, _DROPOUT_CLASSES):
            module.p = 0.0
        elif isinstance(module, timm.layers.DropPath):
            module.drop_prob = 0.0
    _pad_symmetrically(network)

    patch = network.patch_embed.patch_size[0] if "dynamic_img_size" in options else None
    return network, patch


def _create_network(name: str, stride: int | None) -> tuple[nn.Module, dict[str, Any]]:
    """Creates timm's network with the first options that it accepts.

    Networks whose stages can be dilated accept `output_stride`, transformers accept `dynamic_img_size`.

    Returns:
        The network and its options.
    """
    candidates: tuple[dict[str, Any], ...] = (
        {"output_stride": stride or _DEFAULT_STRIDE},
        {"dynamic_img_size": True},
        {},
    )
    for options in candidates:
        try:
            return timm.create_model(name, pretrained=False, **options), options
        except (TypeError, AssertionError, NotImplementedError):  # the network does not accept these options
            continue
    raise UserError(f"timm/{name} cannot be built", "a network without required options", "choose another backbone")


class _CenteredConv2d(nn.Conv2d):
    """Convolution with an even kernel. Its outputs are between positions and are averaged onto the positions."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(super().forward(x), 2, stride=1)


def _pad_symmetrically(network: nn.Module) -> None:
    """Replaces TensorFlow's SAME padding, which depends on the image's size, with equal padding on both sides.

    Position i of a network with odd kernels is then centered at pixel stride * i for images of any size. In the
    interior, its features are the ones that TensorFlow's padding gives for an image whose size is a multiple of the
    stride and that is shifted by stride - 1 pixels. A 2x2 kernel with stride 1, as in dilated ConvNeXt, is centered
    between positions, so its outputs are averaged.
    """
    for name, module in list(network.named_modules()):
        kernel = _pair(getattr(module, "kernel_size", 1))
        dilation = _pair(getattr(module, "dilation", 1))
        padding = ((kernel[0] - 1) * dilation[0] // 2, (kernel[1] - 1) * dilation[1] // 2)
        if isinstance(module, timm.layers.Conv2dSame):
            network.set_submodule(name, _symmetric_conv(module, kernel, dilation, padding))
        elif isinstance(module, timm.layers.StdConv2dSame | timm.layers.ScaledStdConv2dSame) and module.same_pad:
            module.same_pad = False
            module.padding = padding
        elif isinstance(module, MaxPool2dSame):
            network.set_submodule(name, nn.MaxPool2d(kernel, module.stride, padding))


def _symmetric_conv(
    conv: nn.Conv2d, kernel: tuple[int, int], dilation: tuple[int, int], padding: tuple[int, int]
) -> nn.Conv2d:
    """Returns a convolution with the weights of `conv` and the same padding on both sides."""
    stride = _pair(conv.stride)
    has_no_center = (kernel[0] - 1) * dilation[0] % 2 == 1
    conv_type: type[nn.Conv2d] = nn.Conv2d
    if has_no_center and stride == (1, 1):
        conv_type = _CenteredConv2d
        padding = (padding[0] + 1, padding[1] + 1)

    symmetric = conv_type(
        conv.in_channels, conv.out_channels, kernel, stride, padding, dilation, conv.groups, bias=False
    )
    symmetric.weight = conv.weight
    symmetric.bias = conv.bias
    return symmetric


def _run_and_record_offsets(network: nn.Module, side: int) -> tuple[list[Tensor], dict[float, float]]:
    """Runs a network on an image of side x side pixels on the meta device, and records where its positions are.

    A layer with a stride moves position 0 by the center of its kernel minus its padding, in units of the stride before
    it. If several layers have the same stride, as in a block and its shortcut, the one with the largest kernel counts.

    Returns:
        The outputs of all stages, and the pixel at which position 0 is centered for each stride.
    """
    offsets: dict[float, float] = {1: 0.0}
    kernels: dict[float, int] = {}

    def record_offset(layer: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        kernel = _option_along_width(layer, "kernel_size")
        stride = _option_along_width(layer, "stride")
        dilation = _option_along_width(layer, "dilation")
        padding = _option_along_width(layer, "padding")

        stride_before = side / inputs[0].shape[-1]
        stride_after = stride_before * stride
        has_largest_kernel = kernel > kernels.get(stride_after, 0)
        if stride > 1 and stride_before in offsets and has_largest_kernel:
            kernel_center = dilation * (kernel - 1) / 2
            kernels[stride_after] = kernel
            offsets[stride_after] = offsets[stride_before] + stride_before * (kernel_center - padding)

    strided_types = nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d
    layers = [layer for layer in network.modules() if isinstance(layer, strided_types)]
    handles = [layer.register_forward_hook(record_offset) for layer in layers]
    outputs = _stage_outputs(network, _meta_image(side), None, norm=False)
    for handle in handles:
        handle.remove()
    return outputs, offsets


def _check_positions(network: nn.Module, name: str, layout: Layout) -> None:
    """Raises a UserError if the network's positions differ from those of its layout."""
    if not _has_positions_of(layout, network):
        raise UserError(
            f"the positions of timm/{name} do not follow from its strides and paddings",
            "a network whose positions are symmetric in images of suitable size",
            "choose another backbone, for example timm/resnet50",
        )


def _has_positions_of(layout: Layout, network: nn.Module) -> bool:
    """Returns whether a network has as many positions as its layout, in an image in which they are symmetric."""
    if layout.offset is None:
        return False
    side = layout.padded_side(_MEASURED_SIDE)
    last_output = _stage_outputs(network, _meta_image(side), None, norm=False)[-1]
    last_position = layout.offset + (last_output.shape[-1] - 1) * layout.stride
    return last_position == side - 1 - layout.offset


def _meta_image(side: int) -> Tensor:
    return torch.zeros(1, 3, side, side, device="meta")


def _stage_outputs(network: nn.Module, images: Tensor, indices: list[int] | None, *, norm: bool) -> list[Tensor]:
    """Returns the outputs (B, C, h, w) of a network's stages.

    Args:
        indices: Indices of the stages. None: all.
        norm: Whether to apply the final norm of a transformer.
    """
    maps: list[Tensor] = network.forward_intermediates(  # type: ignore[operator]
        images, indices=indices, norm=norm, output_fmt="NCHW", intermediates_only=True
    )
    return maps


def _first_parameters(network: nn.Module, last_modules: list[str]) -> tuple[str, ...]:
    """Returns the name of each stage's first parameter. The first stage includes the stem.

    Args:
        last_modules: Name of the last module of each stage.
    """
    names = [name for name, _ in network.named_parameters()]
    first_indices = {0}
    for module in last_modules[:-1]:
        indices = [n for n, name in enumerate(names) if name.startswith(f"{module}.")]
        first_indices.add(max(indices, default=-1) + 1)
    return tuple(names[n] for n in sorted(first_indices))


def _option_along_width(layer: nn.Module, name: str) -> int:
    """Returns a layer's option for the width, 1 if the layer does not have the option."""
    return _pair(getattr(layer, name, 1))[1]


def _pair(value: Any) -> tuple[int, int]:
    """Returns a layer's option for height and width. Padding given as a word belongs to layers without stride: 0."""
    if isinstance(value, str):
        return 0, 0
    height, width = value if isinstance(value, tuple | list) else (value, value)
    return height, width

"""Registries of backbones and segmentation networks. Importing this module imports neither torch nor timm."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from mcis.datasets.errors import UserError
from mcis.datasets.registry import Registry

if TYPE_CHECKING:
    from mcis.models.backbones import Backbone, Normalization

TIMM_PREFIX = "timm/"
"""Prefix of a backbone's name. The rest of the name is a network of timm."""

BACKBONES: Registry[Callable[..., Any]] = Registry(
    "backbones",
    {
        "small": "mcis.models.backbones:small",
        "vgg16": "mcis.models.backbones:vgg16",
        "vgg16_largefov": "mcis.models.backbones:vgg16_largefov",
        "resnet50": "mcis.models.backbones:resnet50",
        "resnet101": "mcis.models.backbones:resnet101",
        "resnet38": "mcis.models.backbones:resnet38",
    },
)
"""Functions that build a `Backbone`. Parameters named `stride` and `channels` receive the configured values. Networks
of timm need no entry."""

SEGMENTERS: Registry[Callable[..., Any]] = Registry(
    "segmenters",
    {
        "largefov": "mcis.models.segmenters:LargeFov",
        "deeplabv3": "mcis.models.segmenters:DeepLabV3",
        "pyramid": "mcis.models.segmenters:Pyramid",
    },
)
"""Segmentation networks, called with (backbone, labels, width, dilation, dropout). They map normalized images
(B, 3, H, W) to logits (B, K + 1, H, W)."""


def check_backbone(name: str) -> str:
    """Validates the name of a backbone for pydantic. Imports timm only for names that start with `timm/`."""
    if not name.startswith(TIMM_PREFIX):
        return BACKBONES.choice("timm/NAME with a name of timm's")(name)

    from mcis.models.timm_backbones import check_timm_name

    try:
        check_timm_name(name.removeprefix(TIMM_PREFIX))
    except UserError as error:
        text = f"{error.found}; {error.remedy}"
        raise PydanticCustomError("unknown_name", "{text}", {"text": text}) from None
    return name


def build_backbone(name: str, *, stride: int | None = None, channels: int | None = None) -> "Backbone":
    """Builds a backbone with its initial weights.

    Args:
        name: A name in `BACKBONES`, or `timm/NAME`.
        stride: Input pixels per position of the features. None: the backbone's default.
        channels: Channels of the features. Backbones of a fixed width ignore it. None: the backbone's default.

    Raises:
        UserError: The backbone does not support the stride.
    """
    if name.startswith(TIMM_PREFIX):
        from mcis.models.timm_backbones import build_timm_backbone

        return build_timm_backbone(name.removeprefix(TIMM_PREFIX), stride=stride)

    build = BACKBONES[name]
    options = {"stride": stride, "channels": channels}
    supported = inspect.signature(build).parameters
    arguments = {key: value for key, value in options.items() if key in supported and value is not None}
    backbone: Backbone = build(**arguments)

    if "stride" not in arguments and stride not in (None, backbone.layout.stride):
        raise UserError(
            f"backbone {name} with stride {stride}",
            f"stride {backbone.layout.stride}, the only one that it supports",
            "leave out stride, or choose another backbone",
        )
    return backbone


def backbone_normalization(name: str) -> "Normalization":
    """Returns the normalization of a backbone's input images, without building the backbone."""
    if name.startswith(TIMM_PREFIX):
        from mcis.models.timm_backbones import timm_normalization

        return timm_normalization(name.removeprefix(TIMM_PREFIX))

    from mcis.models.backbones import IMAGENET

    return IMAGENET

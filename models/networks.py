"""What a configuration says of networks, read without torch: names of backbones and segmenters, and the affinity."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import PydanticCustomError

from mcis.datasets.errors import UserError
from mcis.datasets.registry import Registry
from mcis.datasets.section import Rate, Section

if TYPE_CHECKING:
    from mcis.models.backbones import Backbone, Normalization

TIMM = "timm/"
"""What precedes timm's name of a network in the name of a backbone."""

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
"""Builders of a `Backbone`, beside all of timm's networks; `stride` and `channels` go to those that take them."""

SEGMENTERS: Registry[Callable[..., Any]] = Registry(
    "segmenters",
    {
        "largefov": "mcis.models.segmenters:LargeFov",
        "deeplabv3": "mcis.models.segmenters:DeepLabV3",
        "pyramid": "mcis.models.segmenters:Pyramid",
    },
)
"""Networks (backbone, labels, width, dilation, dropout): normalized images (B, 3, H, W) -> logits (B, K + 1, H, W)."""


class Affinity(Section):
    """How positions of two images are compared: P of Eq. 2."""

    form: Literal["bilinear", "cosine", "cosine_by_level"] = "bilinear"
    """Form of P; `cosine` compares vectors of unit length, `cosine_by_level` those of each level of the features."""
    scale: Rate = 1.0
    """Factor of P before the softmax."""
    w_p: Literal["learned", "identity"] = "learned"
    """W_P: trained with the classifier, or the identity, which maps can be made with whatever the training."""
    init: float | None = None
    """W_P at the start as a multiple of the identity; None = uniform in +-1/sqrt(C) (RELEASED_RECIPE, "Classifier")."""


def check_backbone(name: str) -> str:
    """A validator of pydantic for names of backbones; timm is imported for its own alone."""
    if not name.startswith(TIMM):
        return BACKBONES.choice("timm/NAME with a name of timm's")(name)
    from mcis.models.timm_backbones import check_name

    try:
        check_name(name.removeprefix(TIMM))
    except UserError as error:
        text = f"{error.found}; {error.remedy}"
        raise PydanticCustomError("unknown_name", "{text}", {"text": text}) from None
    return name


def build_backbone(name: str, *, stride: int | None = None, channels: int | None = None) -> "Backbone":
    """A backbone with its initial weights.

    Args:
        stride: input pixels per position; None = its own.
        channels: of the features of a backbone whose width may be chosen.

    Raises:
        UserError: it cannot have the stride.
    """
    if name.startswith(TIMM):
        from mcis.models.timm_backbones import timm_backbone

        return timm_backbone(name.removeprefix(TIMM), stride=stride)
    build = BACKBONES[name]
    given = {"stride": stride, "channels": channels}
    taken = {key: given[key] for key in inspect.signature(build).parameters if given.get(key) is not None}
    backbone: Backbone = build(**taken)
    if "stride" not in taken and stride not in (None, backbone.layout.stride):
        raise UserError(
            f"backbone {name} with stride {stride}",
            f"stride {backbone.layout.stride}, the only one that it has",
            "leave out stride, or choose another backbone",
        )
    return backbone


def normalization_of(name: str) -> "Normalization":
    """How the backbone of this name wants its pixels; one of timm's is not built."""
    if name.startswith(TIMM):
        from mcis.models.timm_backbones import timm_normalization

        return timm_normalization(name.removeprefix(TIMM))
    from mcis.models.backbones import IMAGENET

    return IMAGENET

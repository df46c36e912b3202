"""The table of segmentation networks, apart from these: what their names in a configuration stand for."""

from collections.abc import Callable
from typing import Any

from mcis.datasets.registry import Registry

SEGMENTERS: Registry[Callable[..., Any]] = Registry(
    "segmenters",
    {
        "largefov": "mcis.models.segmenters:LargeFov",
        "deeplabv3": "mcis.models.segmenters:DeepLabV3",
        "pyramid": "mcis.models.segmenters:Pyramid",
    },
)
"""Networks (backbone, labels, width, dilation, dropout): normalized images (B, 3, H, W) -> logits (B, K + 1, H, W)."""

"""Moves images to a device, and chooses the precision of its arithmetic."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.models.augment import Augmentation, augment
from mcis.models.backbones import Normalization, to_float_images


def device_images(
    images: NDArray[np.uint8],
    draws: NDArray[np.float64],
    augmentation: Augmentation,
    normalize: Normalization,
    device: torch.device,
) -> Tensor:
    """Moves images to a device, augments and normalizes them there.

    Args:
        images: (B, H, W, 3).
        draws: Random numbers in [0, 1) for the augmentation, (B, Augmentation.DRAWS).
        augmentation: The augmentation.
        normalize: The normalization of the backbone.
        device: The device.

    Returns:
        (B, 3, H, W) float32, channels last, as the weights are.
    """
    unit = to_float_images(torch.from_numpy(np.array(images)).to(device, non_blocking=True))
    augmented = normalize(augment(unit, augmentation, torch.from_numpy(draws).float()))
    return augmented.contiguous(memory_format=torch.channels_last)


def resolve_precision(
    precision: Literal["auto", "float32", "bf16"], device: torch.device
) -> Literal["float32", "bf16"]:
    """Returns the precision of a network's arithmetic. Weights, losses and optimizer steps are float32 in any case.

    Args:
        precision: As configured. `auto` is bfloat16 on a GPU that supports it, else float32.
        device: The device of the network.
    """
    if precision != "auto":
        return precision
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "float32"

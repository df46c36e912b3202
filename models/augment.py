"""Augmentation of training images on the device.

Every function takes random numbers in [0, 1), one row per image. How an image is augmented therefore does not depend on
the other images of its batch.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision)
from mcis.datasets.sampling.keyed_random import FLIP_DRAW

_ORDERS = tuple(itertools.permutations(range(4)))
"""Orders in which brightness, contrast, saturation and hue can change."""
_HUE = 3


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Settings of the augmentation.

    Attributes:
        color_jitter: Strengths of the brightness, contrast, saturation and hue jitter. The first three are factors
            drawn from 1 +- strength. Hue moves by up to that fraction of a full turn.
        hflip: Whether to flip an image horizontally with probability 1/2.
        shift: Maximum shift of an image along each axis, in pixels. The edges are repeated.
        DRAWS: Random numbers per image.
    """

    color_jitter: tuple[float, float, float, float] = (0, 0, 0, 0)
    hflip: bool = False
    shift: int = 0

    DRAWS: ClassVar[int] = 8


def color_jitter(images: Tensor, strength: tuple[float, float, float, float], draws: Tensor) -> Tensor:
    """Applies torchvision's color jitter to RGB images (B, 3, H, W) in [0, 1], with separate draws for each image.

    The order of the four changes is drawn, too. Each change is clipped to [0, 1]. Hue is the H of HSV (paper-vs-code,
    "Classifier").

    Args:
        draws: Numbers (B, 5) in [0, 1] on the CPU: brightness, contrast, saturation, hue, order. The upper end is
            included because float32 rounds the largest numbers to 1.
    """
    from torchvision.transforms.v2 import functional as transforms

    changes = (
        transforms.adjust_brightness,
        transforms.adjust_contrast,
        transforms.adjust_saturation,
        transforms.adjust_hue,
    )
    jittered = []
    for image, (*numbers, order_draw) in zip(images, draws.tolist(), strict=True):
        order_index = min(int(order_draw * len(_ORDERS)), len(_ORDERS) - 1)
        for change in _ORDERS[order_index]:
            if not strength[change]:
                continue
            offset = strength[change] * (2 * numbers[change] - 1)
            amount = offset if change == _HUE else max(0.0, 1 + offset)
            image = changes[change](image, amount)
        jittered.append(image)
    return torch.stack(jittered)


def augment(images: Tensor, augmentation: Augmentation, draws: Tensor) -> Tensor:
    """Augments RGB images (B, 3, H, W) in [0, 1] on any device. Their size stays the same.

    Args:
        draws: Random numbers (B, Augmentation.DRAWS) on the CPU. Reading them one by one would wait for a GPU.
    """
    if any(augmentation.color_jitter):
        images = color_jitter(images, augmentation.color_jitter, draws[:, :5])
    if augmentation.hflip:
        is_flipped = (draws[:, FLIP_DRAW] < 0.5).view(-1, 1, 1, 1).to(images.device, non_blocking=True)
        images = torch.where(is_flipped, images.flip(3), images)
    if augmentation.shift:
        offsets = ((draws[:, 6:8] * 2 - 1) * augmentation.shift).round().long()
        images = _shift(images, offsets)
    return images


def _shift(images: Tensor, offsets: Tensor) -> Tensor:
    """Shifts each image by its vertical and horizontal offset, (B, 2) pixels, and repeats the edges."""
    margin = int(offsets.abs().max()) if len(offsets) else 0
    height, width = images.shape[2:]
    padded = functional.pad(images, (margin, margin, margin, margin), mode="replicate")

    shifted = []
    for image, (dy, dx) in zip(padded, offsets.tolist(), strict=True):
        top = margin + dy
        left = margin + dx
        shifted.append(image[:, top : top + height, left : left + width])
    return torch.stack(shifted)

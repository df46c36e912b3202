"""Augmentation of training images on the device.

Every function takes random numbers in [0, 1), one row per image, so how an image is augmented does not depend on the
other images of its batch.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision)
from mcis.datasets.sampling.keyed_random import FLIP_DRAW

_ORDERS = tuple(itertools.permutations(range(4)))  # of brightness, contrast, saturation and hue


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training images are augmented.

    Attributes:
        color_jitter: strength of brightness, contrast, saturation and hue jitter; the first three are factors
            1 +- strength, hue moves by up to that part of a full turn.
        flip: whether an image is mirrored with probability 1/2.
        shift: most pixels by which an image is shifted in both directions; its edges are repeated.
        DRAWS: numbers that are drawn for each image.
    """

    color_jitter: tuple[float, float, float, float] = (0, 0, 0, 0)
    hflip: bool = False
    shift: int = 0

    DRAWS: ClassVar[int] = 8


def color_jitter(images: Tensor, strength: tuple[float, float, float, float], draws: Tensor) -> Tensor:
    """torchvision's color jitter of RGB images (B, 3, H, W) in [0, 1], each image by its own draws (B, 5).

    The four changes come in an order that is drawn too, each clipped to [0, 1]; hue is that of HSV (RELEASED_RECIPE,
    "Classifier").

    Args:
        draws: brightness, contrast, saturation, hue, and their order, in [0, 1]: float32 rounds the largest to 1. On
            the CPU.
    """
    from torchvision.transforms.v2 import functional as change

    changes = change.adjust_brightness, change.adjust_contrast, change.adjust_saturation, change.adjust_hue
    jittered = []
    for image, (*numbers, order) in zip(images, draws.tolist(), strict=True):
        for which in _ORDERS[min(int(order * len(_ORDERS)), len(_ORDERS) - 1)]:
            if strength[which]:
                offset = strength[which] * (2 * numbers[which] - 1)
                image = changes[which](image, offset if which == 3 else max(0.0, 1 + offset))
        jittered.append(image)
    return torch.stack(jittered)


def augment(images: Tensor, augmentation: Augmentation, draws: Tensor) -> Tensor:
    """Augments RGB images (B, 3, H, W) in [0, 1] of any device, which keep their size.

    Args:
        draws: (B, Augmentation.DRAWS), on the CPU: they are read one by one, which would wait for a GPU.
    """
    if any(augmentation.color_jitter):
        images = color_jitter(images, augmentation.color_jitter, draws[:, :5])
    if augmentation.hflip:
        mirrored = (draws[:, FLIP_DRAW] < 0.5).view(-1, 1, 1, 1).to(images.device, non_blocking=True)
        images = torch.where(mirrored, images.flip(3), images)
    if augmentation.shift:
        images = _shifted(images, ((draws[:, 6:8] * 2 - 1) * augmentation.shift).round().long())
    return images


def _shifted(images: Tensor, offsets: Tensor) -> Tensor:
    most = int(offsets.abs().max()) if len(offsets) else 0
    height, width = images.shape[2:]
    padded = functional.pad(images, (most, most, most, most), mode="replicate")
    return torch.stack(
        [
            image[:, most + dy : most + dy + height, most + dx : most + dx + width]
            for image, (dy, dx) in zip(padded, offsets.tolist(), strict=True)
        ]
    )

"""Augmentation of training images on the device.

Every function takes random numbers in [0, 1), one row per image, so how an image is augmented does not depend on the
other images of its batch.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training images are augmented.

    Attributes:
        color_jitter: strength of brightness, contrast, saturation and hue jitter; the first three are factors
            1 +- strength, hue is a rotation by up to that part of a full turn.
        flip: whether an image is mirrored with probability 1/2.
        shift: most pixels by which an image is shifted in both directions; its edges are repeated.
        DRAWS: numbers that are drawn for each image.
    """

    color_jitter: tuple[float, float, float, float] = (0, 0, 0, 0)
    flip: bool = False
    shift: int = 0

    DRAWS: ClassVar[int] = 7


def color_jitter(images: Tensor, strength: tuple[float, float, float, float], draws: Tensor) -> Tensor:
    """Changes brightness, contrast, saturation, then hue of RGB images (B, 3, H, W) in [0, 1]; draws (B, 4).

    Hue is a rotation in the YIQ plane, which keeps brightness.
    """

    def factor(column: int) -> Tensor:
        return (1 + strength[column] * (2 * draws[:, column] - 1)).view(-1, 1, 1, 1)

    luma = torch.tensor(_LUMA, device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
    if strength[0]:
        images = images * factor(0)
    if strength[1]:
        mean = (images * luma).sum(1, keepdim=True).mean((2, 3), keepdim=True)
        images = (images - mean) * factor(1) + mean
    if strength[2]:
        gray = (images * luma).sum(1, keepdim=True)
        images = (images - gray) * factor(2) + gray
    if strength[3]:
        images = _rotate_hue(images, 2 * torch.pi * strength[3] * (2 * draws[:, 3] - 1))
    return images.clamp(0, 1)


def _rotate_hue(images: Tensor, angle: Tensor) -> Tensor:
    to_yiq = images.new_tensor([_LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])
    cosine, sine, zeros, ones = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    rotation = torch.stack([ones, zeros, zeros, zeros, cosine, -sine, zeros, sine, cosine], dim=1).view(-1, 3, 3)
    matrix = torch.linalg.inv(to_yiq) @ rotation @ to_yiq
    return torch.einsum("bij,bjhw->bihw", matrix, images)


def augment(images: Tensor, augmentation: Augmentation, draws: Tensor) -> Tensor:
    """Augments RGB images (B, 3, H, W) in [0, 1], which keep their size; draws (B, Augmentation.DRAWS)."""
    if any(augmentation.color_jitter):
        images = color_jitter(images, augmentation.color_jitter, draws[:, :4])
    if augmentation.flip:
        images = torch.where((draws[:, 4] < 0.5).view(-1, 1, 1, 1), images.flip(3), images)
    if augmentation.shift:
        images = _shifted(images, ((draws[:, 5:7] * 2 - 1) * augmentation.shift).round().long())
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

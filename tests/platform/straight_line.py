"""Localization maps and pseudo masks of the recipes `paper` and `released`, computed as the sources state them.

Each map runs the classifier's layers on each pair, with plain torch. Nothing of the project is used: the tests give
weights, images and the choice of related images. Features are rounded to float16, as the program stores them.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
"""Numbers of VGG-16's convolutions among its layers."""
POOLINGS = {2: 2, 7: 2, 14: 2, 21: 1}
"""Strides of the poolings, by the number of the convolution before them."""


class Example(NamedTuple):
    """A training image.

    Attributes:
        square: The image resized to the classifier's input size, (S, S, 3) uint8.
        is_source: Whether it is a single-label image, which is of the source domain.
        height, width: Size of the image, pixels.
        saliency: Its saliency map, (height, width) uint8.
    """

    square: NDArray[np.uint8]
    is_source: bool
    height: int
    width: int
    saliency: NDArray[np.uint8]


class Classifier:
    """VGG-16 and the layers on its features.

    Args:
        state: Weights by name.
        released: Whether to follow the released code rather than the text.
    """

    def __init__(self, state: dict[str, Tensor], *, released: bool):
        self.state = state
        self.released = released
        self.head = "common_head" if released else "phi"

    def pixels(self, example: Example) -> Tensor:
        """Normalized pixels, (1, 3, S, S)."""
        image = torch.from_numpy(example.square).permute(2, 0, 1)[None].float() / 255
        return (image - MEAN) / DEVIATION

    def features(self, pixels: Tensor) -> Tensor:
        """Features F of one image, (512, h, w)."""
        x = pixels
        for number in CONVOLUTIONS:
            dilation = 2 if number >= 24 else 1
            x = self._convolution(x, f"backbone.body.features.{number}", dilation)
            if POOLINGS.get(number) == 2:
                x = functional.max_pool2d(x, 2, stride=2)
            elif POOLINGS.get(number) == 1:
                x = functional.max_pool2d(x, 3, stride=1, padding=1)

        for number in (0, 2, 4):
            x = self._convolution(x, f"backbone.body.extra_convs.{number}", 1)
        return x[0]

    def _convolution(self, x: Tensor, name: str, dilation: int) -> Tensor:
        weight = self.state[f"{name}.weight"]
        bias = self.state[f"{name}.bias"]
        return functional.conv2d(x, weight, bias, padding=dilation, dilation=dilation).relu()

    def affinity(self, m: Tensor, n: Tensor, pair_domains: int) -> Tensor:
        """P = F_m^T W_P F_n (Eq. 2), (HW_m, HW_n)."""
        w_p = self.state["w_p"]
        if w_p.ndim == 3:
            w_p = w_p[pair_domains]
        return m.flatten(1).T @ w_p @ n.flatten(1)

    def summary_of_m(self, m: Tensor, n: Tensor, pair_domains: int) -> Tensor:
        """F_m^{m∩n} (Eq. 3, 4), (C, h, w) of m."""
        attention = self.affinity(m, n, pair_domains).T.softmax(dim=0)
        return (n.flatten(1) @ attention).view(len(m), *m.shape[1:])

    def summary_of_n(self, m: Tensor, n: Tensor, pair_domains: int) -> Tensor:
        """F_n^{m∩n} (Eq. 3, 4), (C, h, w) of n."""
        attention = self.affinity(m, n, pair_domains).softmax(dim=0)
        return (m.flatten(1) @ attention).view(len(n), *n.shape[1:])

    def activation(self, features: Tensor, tag: int) -> Tensor:
        """Activations of a class by the layer on attentive features, (h, w)."""
        weight = self.state[f"{self.head}.weight"][tag, :, 0, 0]
        activation = torch.einsum("c,chw->hw", weight, features)
        return activation if self.released else activation + self.state["phi.bias"][tag]

    def related_map(self, target: Example, related: list[Example], tag: int) -> Tensor:
        """Mean of the co-attentive activations with related images (section 3.2), (h, w)."""
        features = self.features(self.pixels(target)).half().float()
        activations = []
        for other in related:
            other_features = self.features(self.pixels(other)).half().float()
            if target.is_source == other.is_source:
                pair_domains = int(target.is_source)
                target_is_n = not self.released
            else:
                pair_domains = 2
                target_is_n = target.is_source  # image n is of the source domain
            if target_is_n:
                summary = self.summary_of_n(other_features, features, pair_domains)
            else:
                summary = self.summary_of_m(features, other_features, pair_domains)
            activations.append(self.activation(summary, tag))
        return torch.stack(activations).mean(dim=0)

    def self_maps(self, target: Example, tag: int) -> Tensor:
        """Sum of the four maps of the pairs of an image and its transformed copies, (h, w)."""
        image = self.pixels(target)
        pair_domains = int(target.is_source)
        m = self.features(image)
        flipped = self.features(image.flip(3))

        total = addend(self.activation(self.summary_of_m(m, flipped, pair_domains), tag), always=True)
        flipped_map = addend(self.activation(self.summary_of_n(m, flipped, pair_domains), tag))
        total = total + flipped_map.flip(1)
        for factor in (0.75, 2):
            size = round(image.shape[2] * factor)
            scaled = self.features(functional.interpolate(image, (size, size), mode="bilinear"))
            scaled_map = addend(self.activation(self.summary_of_n(m, scaled, pair_domains), tag))
            total = total + resized(scaled_map, m.shape[1], m.shape[2]).clamp(0, 1)
        return total

    def map(self, target: Example, related: list[Example], tag: int) -> Tensor:
        """The localization map of a class before it is scaled, (h, w)."""
        mean = self.related_map(target, related, tag)
        if not self.released:
            return mean
        return ((self.self_maps(target, tag) + addend(mean)) / 5 * 255).round() / 255


def addend(activation: Tensor, *, always: bool = False) -> Tensor:
    """A map of the released code: clipped and divided by its maximum, or 0 if its mean activation is low."""
    if not always and activation.mean().sigmoid() <= 0.1:
        return torch.zeros_like(activation)
    positive = activation.clamp(min=0)
    return positive / positive.max().clamp(min=1e-6)


def resized(image: Tensor, height: int, width: int) -> Tensor:
    """An array (h, w), resized bicubically."""
    return functional.interpolate(image[None, None], (height, width), mode="bicubic")[0, 0]


def pseudo_mask(maps: dict[int, Tensor], example: Example) -> dict[str, NDArray[Any]]:
    """Labels, and the same with ignored pixels (docs/explanation/paper-vs-code.md, "Pseudo masks").

    Args:
        maps: The localization maps of the image's tags by class index.
        example: The image.
    """
    tags = sorted(maps)
    scores = []
    for tag in tags:
        positive = resized(maps[tag], example.height, example.width).clamp(min=0)
        positive = positive / positive.max().clamp(min=1e-6)
        scores.append((positive - positive.min()) / (positive.max() - positive.min()).clamp(min=1e-6))
    saliency = torch.from_numpy(example.saliency)
    stacked = torch.stack([1 - saliency.float() / 255, *scores])
    stacked[stacked < 0.3] = 0
    best = stacked.argmax(dim=0)
    labels = torch.tensor([0, *(tag + 1 for tag in tags)])[best]

    is_conflict = (stacked > 0.99).sum(dim=0) >= 2
    is_doubtful = (labels == 0) & ((saliency >= 32) | (stacked[1:] > 0.95).any(dim=0))
    mask = torch.where(is_conflict | is_doubtful, 255, labels)
    if (labels > 0).float().mean() < 0.01:
        mask[:] = 255
    return {"labels": labels.numpy().astype(np.uint8), "mask": mask.numpy().astype(np.uint8)}

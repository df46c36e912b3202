"""Shared evidence: how much better a texture is found again in images of a class than in images without the class.

The softmax of Eq. 3 keeps where a position looks and drops how well it matches; evidence measures the match. What
images of a class share and other images lack is the whole object: its body is found again as well as its head, while
background is found everywhere or nowhere. Evidence goes beyond the paper and needs no co-attention.
"""

import torch
from torch import Tensor
from torch.nn import functional


def texture_vectors(textures: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Textures (..., C', H, W) -> a vector of unit length per position, (..., HW, C'), of standardized channels.

    Args:
        mean, deviation: of the channels, (C',).
    """
    flat = textures.flatten(-2).transpose(-1, -2)
    return functional.normalize((flat - mean) / deviation.clamp(min=1e-6), dim=-1, eps=1e-6)


def texture_match(target: Tensor, others: Tensor, *, closest: int = 5) -> Tensor:
    """How well each position of an image is found again in others: its mean cosine with the closest positions there.

    Args:
        target: `texture_vectors` of the image, (HW, C').
        others: `texture_vectors` of R images, (R, H'W', C').
        closest: number of positions that the mean is taken over.

    Returns:
        (R, HW), in [-1, 1].
    """
    matches = []
    for vectors in others:  # image by image, so that no more than one matrix (HW, H'W') is laid out
        cosines = target @ vectors.T
        matches.append(cosines.topk(min(closest, len(vectors)), dim=1).values.mean(dim=1))
    return torch.stack(matches)


def shared_evidence(related: Tensor, unrelated: Tensor) -> Tensor:
    """How much better a position is found again in images of the class than in images without it, (HW,), in [-2, 2].

    Args:
        related: `texture_match` in images of the class, (R, HW).
        unrelated: `texture_match` in images without it, (U, HW); where there are none, the evidence is 0.
    """
    if not len(unrelated):
        return torch.zeros_like(related[0])
    return related.mean(dim=0) - unrelated.mean(dim=0)


class Bank:
    """A sample of the images, which gives the scale of textures and activations, and the images without a class.

    Args:
        textures: of the B images of the sample, (B, C', H, W).
        lacks: whether an image lacks a class, (B, K).
        activations: of all classes on the images, (B, K, H, W); their deviation is the unit of evidence in a map.
    """

    def __init__(self, textures: Tensor, lacks: Tensor, activations: Tensor):
        channels = textures.transpose(0, 1).flatten(1)
        self.mean, self.deviation = channels.mean(dim=1), channels.std(dim=1)
        self.vectors, self.lacks, self.unit = self.texture_vectors(textures), lacks, float(activations.std())

    def texture_vectors(self, textures: Tensor) -> Tensor:
        """`texture_vectors` of images (..., C', H, W), standardized as those of the bank are."""
        return texture_vectors(textures, self.mean, self.deviation)

    def match(self, target: Tensor) -> Tensor:
        """How well each position of an image, (HW, C'), is found again in the bank's images, (B, HW)."""
        return texture_match(target, self.vectors)

    def evidence(self, target: Tensor, bank_match: Tensor, related: Tensor, tag: int) -> Tensor:
        """What related images add to a map of class `tag`, in units of activations, (HW,).

        Args:
            target: texture vectors of the image, (HW, C').
            bank_match: `match` of the image, (B, HW), which all its maps share.
            related: textures of R >= 1 other images of the class, (R, C', H', W').
        """
        related_match = texture_match(target, self.texture_vectors(related))
        return self.unit * shared_evidence(related_match, bank_match[self.lacks[:, tag]])

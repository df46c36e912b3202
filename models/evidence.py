"""Shared evidence: what of an image is found again in images of a class rather than in images without it.

Softmax keeps where a position looks and forgets how well it matches (Eq. 3); this is the part forgotten. What images of
a class share and others lack is the object, whole: its body is found again as its head is, while background is found
everywhere or nowhere. It goes beyond the paper and needs no co-attention.
"""

import torch
from torch import Tensor
from torch.nn import functional


def texture_vectors(textures: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Textures (..., C', H, W) -> a vector of unit length a position, (..., HW, C'), channels standardised before.

    Args:
        mean, deviation: of the channels, (C',).
    """
    flat = textures.flatten(-2).transpose(-1, -2)
    return functional.normalize((flat - mean) / deviation.clamp(min=1e-6), dim=-1, eps=1e-6)


def texture_match(target: Tensor, others: Tensor, *, closest: int = 5) -> Tensor:
    """How well each position of an image is found again in others: mean cosine of its `closest` positions there.

    Args:
        target: `texture_vectors` of the image, (HW, C'). others: of R images, (R, H'W', C').

    Returns:
        (R, HW), in [-1, 1].
    """
    matches = []
    for other in others:  # one after the other, so that no more than one (HW, H'W') is laid out
        cosines = target @ other.T
        matches.append(cosines.topk(min(closest, len(other)), dim=1).values.mean(dim=1))
    return torch.stack(matches)


def shared_evidence(related: Tensor, unrelated: Tensor) -> Tensor:
    """How much better a position is found again in images of the class than in images without it, (HW,), in [-2, 2].

    Args:
        related: `texture_match` in images of the class, (R, HW). unrelated: in images without it, (U, HW); where there
            are none, the evidence is 0.
    """
    if not len(unrelated):
        return torch.zeros_like(related[0])
    return related.mean(dim=0) - unrelated.mean(dim=0)


class Bank:
    """Images that stand for all: the scale of textures and activations, and what is found in images without a class.

    Args:
        textures: of B images, (B, C', H, W).
        lacks: whether an image lacks a class, (B, K).
        activations: of all classes on the images, (B, K, H, W); their deviation is the unit of evidence in a map.
    """

    def __init__(self, textures: Tensor, lacks: Tensor, activations: Tensor):
        channels = textures.transpose(0, 1).flatten(1)
        self.mean, self.deviation = channels.mean(dim=1), channels.std(dim=1)
        self.vectors, self.lacks, self.unit = self.of(textures), lacks, float(activations.std())

    def of(self, textures: Tensor) -> Tensor:
        """`texture_vectors` of images (..., C', H, W), standardised as the bank's are."""
        return texture_vectors(textures, self.mean, self.deviation)

    def match(self, target: Tensor) -> Tensor:
        """How well each position of an image, (HW, C'), is found again in the bank's images, (B, HW)."""
        return texture_match(target, self.vectors)

    def evidence(self, target: Tensor, elsewhere: Tensor, related: Tensor, tag: int) -> Tensor:
        """What related images add to a map of class `tag`, in activations, (HW,).

        Args:
            target: vectors of the image, (HW, C'); `elsewhere` its `match`, which all its maps share.
            related: textures of R >= 1 other images of the class, (R, C', H', W').
        """
        here = texture_match(target, self.of(related))
        return self.unit * shared_evidence(here, elsewhere[self.lacks[:, tag]])

"""Co-attention between two images: affinity, both normalisations, co-attentive and contrastive features (Eq. 2-4, 7-9).

Plain functions on tensors. m and n may differ in spatial size. Names follow section 3.1: F_m, F_n (B, C, H, W), W_P
(C, C), P (B, HW_m, HW_n).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

AffinityForm = Literal["bilinear", "cosine"]


class CoAttentive(NamedTuple):
    """Co-attentive features F_m^{m∩n} (B, C, H_m, W_m) and F_n^{m∩n} (B, C, H_n, W_n) of Eq. 4."""

    m: Tensor
    n: Tensor


def positions(features: Tensor, form: AffinityForm = "bilinear") -> Tensor:
    """(B, C, H, W) -> one vector a position, (B, HW, C); of unit length for the cosine form."""
    flat = features.flatten(2).transpose(1, 2)
    return functional.normalize(flat, dim=2, eps=1e-6) if form == "cosine" else flat


def affinity(f_m: Tensor, f_n: Tensor, w_p: Tensor, *, form: AffinityForm = "bilinear", scale: float = 1.0) -> Tensor:
    """P = scale * F_m^T W_P F_n (Eq. 2), (B, HW_m, HW_n): similarity of position i of m and position j of n.

    `form="cosine"` takes features of unit length, so that with W_P = I the entries are cosines and `scale` is the
    inverse temperature of the softmax; the paper's form is `bilinear` with scale 1. W_P may differ between the pairs,
    (B, C, C).
    """
    return (positions(f_m, form) @ w_p) @ positions(f_n, form).transpose(1, 2) * scale


def coattend(f_m: Tensor, f_n: Tensor, p: Tensor) -> CoAttentive:
    """Attention summaries of each image in the light of the other (Eq. 3, 4), from one affinity normalised both ways.

    Row i of softmax(P, over n) weighs the positions of n for position i of m: F_m^{m∩n} = F_n A_n; and the transpose.
    """
    flat_m, flat_n = positions(f_m), positions(f_n)
    common_m = torch.softmax(p, dim=2) @ flat_n
    common_n = torch.softmax(p.transpose(1, 2), dim=2) @ flat_m
    return CoAttentive(
        common_m.transpose(1, 2).unflatten(2, f_m.shape[2:]), common_n.transpose(1, 2).unflatten(2, f_n.shape[2:])
    )


def contrastive_features(features: Tensor, common: Tensor, w_b: Tensor, b_b: Tensor | None = None) -> Tensor:
    """F^{m\\n} = F * (1 - sigmoid(W_B F^{m∩n})) (Eq. 7-9): what of an image's features is not shared, (B, C, H, W).

    Args:
        w_b: W_B as a 1x1 convolution's weight, (1, C, 1, 1); `b_b` its bias, (1,), or None.
    """
    return features * (1 - torch.sigmoid(functional.conv2d(common, w_b, b_b)))

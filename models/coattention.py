"""Co-attention between two images: affinity, both normalizations, attention summaries, contrast (Eq. 2-4, 6-8).

Plain functions on tensors. m and n may differ in spatial size. Names follow section 3.1: F_m, F_n (B, C, H, W), W_P
(C, C), P (B, HW_m, HW_n). What attention averages, `values` (B, V, H, W), are the features themselves or anything
linear in them: a linear layer of a co-attentive feature is the attention-weighted mean of that layer, phi(F A) =
phi(F) A, so attention averages K values per position in place of C.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

AffinityForm = Literal["bilinear", "cosine"] | tuple[int, ...]
"""`cosine` compares vectors of unit length; a tuple takes the mean of this over levels of so many channels each."""


class CoAttentive(NamedTuple):
    """Attention summaries of Eq. 4: F_m^{m∩n}, of n for each position of m, (B, V, H_m, W_m), and F_n^{m∩n}."""

    m: Tensor
    n: Tensor


def pair_kinds(source_m: Tensor, source_n: Tensor) -> Tensor:
    """Kinds of pairs, (B,): 0 target-target, 1 source-source, 2 one image of each domain.

    Args:
        source_m, source_n: whether the images are of the domain source, (B,).
    """
    return torch.where(source_m == source_n, source_m.long(), 2)


def target_is_image_n(source: Tensor, of_related: Tensor, target: Literal["m", "n"]) -> Tensor:
    """Whether a target is image n of its pairs, (R,): in pairs of two domains where it is of the domain source.

    Args:
        source: whether the target is of the domain source, ().
        of_related: whether the related images are, (R,).
        target: which image of a pair of one domain the target is.
    """
    return torch.where(source == of_related, target == "n", source)


def positions(features: Tensor, form: AffinityForm = "bilinear") -> Tensor:
    """(B, C, H, W) -> one vector per position, (B, HW, C); of unit length for cosines, its levels alike. Squares of
    features' lengths are beyond float16's range."""
    flat = features.flatten(2)
    if form != "bilinear":
        # Norms over channels as they lie, before the transpose: a quarter of what they take behind it.
        levels = [flat] if form == "cosine" else flat.split(form, dim=1)
        scales = [len(levels) * each.square().sum(dim=1, keepdim=True).clamp(min=1e-12) for each in levels]
        units = [each * of.rsqrt() for each, of in zip(levels, scales, strict=True)]
        flat = torch.cat(units, dim=1) if len(units) > 1 else units[0]
    return flat.transpose(1, 2)


def projected(flat: Tensor, w_p: Tensor | None) -> Tensor:
    """flat W_P, (B, HW, C), of positions (B, HW, C); W_P = None is the identity."""
    return flat if w_p is None else flat @ w_p


def affinity(
    f_m: Tensor, f_n: Tensor, w_p: Tensor | None, *, form: AffinityForm = "bilinear", scale: float = 1.0
) -> Tensor:
    """P = scale * F_m^T W_P F_n (Eq. 2), (B, HW_m, HW_n): similarity of position i of m and position j of n.

    `form="cosine"` takes features of unit length, so that with W_P = I the entries are cosines and `scale` is the
    inverse temperature of the softmax; the paper's form is `bilinear` with scale 1. W_P may differ between the pairs,
    (B, C, C); None is the identity.
    """
    return projected(positions(f_m, form), w_p) @ positions(f_n, form).transpose(1, 2) * scale


def coattend(values_m: Tensor, values_n: Tensor, p: Tensor) -> CoAttentive:
    """Attention summaries of both images (Eq. 3, 4), from one affinity that is normalized in both directions.

    Row i of softmax(P, over n) weighs the positions of n for position i of m: F_m^{m∩n} = F_n A_n; and the transpose.
    """
    flat_m, flat_n = positions(values_m), positions(values_n)
    common_m = torch.softmax(p, dim=2) @ flat_n
    common_n = torch.softmax(p.transpose(1, 2), dim=2) @ flat_m
    return CoAttentive(_spatial(common_m, values_m), _spatial(common_n, values_n))


def coattend_fused(
    f_m: Tensor,
    f_n: Tensor,
    w_p: Tensor | None,
    values_m: Tensor,
    values_n: Tensor,
    *,
    form: AffinityForm = "bilinear",
    scale: float = 1.0,
) -> CoAttentive:
    """`coattend` of `affinity` without P in memory: Eq. 2-4 as scaled dot product attention in both directions.

    For m the queries are F_m^T W_P and the keys F_n; for n they change roles, as its affinity is the transpose.
    """
    query, key = projected(positions(f_m, form), w_p) * scale, positions(f_n, form)
    common_m = _fused(query, key, positions(values_n))
    common_n = _fused(key, query, positions(values_m))
    return CoAttentive(_spatial(common_m, values_m), _spatial(common_n, values_n))


def _fused(query: Tensor, key: Tensor, values: Tensor) -> Tensor:
    """softmax(query key^T) values. The CPU's fused kernel needs all of one width, CUDA's needs multiples of 8."""
    width, common = values.shape[2], max(values.shape[2], key.shape[2])
    # With a dimension of heads and contiguous rows PyTorch takes a fused kernel, else it lays the matrix out.
    query, key, padded = (
        functional.pad(t, (0, -t.shape[2] % 8 if t.is_cuda else common - t.shape[2])).contiguous()[:, None]
        for t in (query, key, values)
    )
    return functional.scaled_dot_product_attention(query, key, padded, scale=1.0)[:, 0, :, :width]


def _spatial(flat: Tensor, like: Tensor) -> Tensor:
    return flat.transpose(1, 2).unflatten(2, like.shape[2:])


def unshared(values: Tensor, gate: Tensor) -> Tensor:
    """values * (1 - sigmoid(gate)), (B, V, H, W): the part of an image that the pair does not share (Eq. 6-8).

    Args:
        values: the image's features F, which give F^{m\\n}, or anything linear in them without a bias.
        gate: W_B F^{m∩n}, (B, 1, H, W).
    """
    return values * (1 - torch.sigmoid(gate))

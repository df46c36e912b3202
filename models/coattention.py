"""Co-attention between two images: affinity, attention in both directions, contrastive features (Eq. 2-4, 6-8).

Plain functions on tensors. The images m and n may differ in spatial size. Names follow section 3.1: features F_m and
F_n (B, C, H, W), W_P (C, C), P (B, HW_m, HW_n). Attention averages `values`, (B, V, H, W), which are the features or
anything linear in them: since phi(F A) = phi(F) A, a linear layer can be applied before attention, which then averages
K values per position instead of C.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

AffinityForm = Literal["bilinear", "cosine"] | tuple[int, ...]
"""How two vectors are compared. `bilinear`: dot product; `cosine`: dot product of vectors of unit length; tuple: mean
of the cosines of several levels with these numbers of channels."""


class CoAttentive(NamedTuple):
    """Attention summaries of a pair (Eq. 4).

    Attributes:
        m: F_m^{m∩n}, for each position of m an average over n, (B, V, H_m, W_m).
        n: F_n^{m∩n}, for each position of n an average over m, (B, V, H_n, W_n).
    """

    m: Tensor
    n: Tensor


def pair_domains(m_is_source: Tensor, n_is_source: Tensor) -> Tensor:
    """Returns the domains of pairs, (B,): 0 = target-target, 1 = source-source, 2 = one image of each domain.

    Args:
        m_is_source, n_is_source: Whether the images belong to the source domain, (B,) bool.
    """
    return torch.where(m_is_source == n_is_source, m_is_source.long(), 2)


def target_is_image_n(is_source: Tensor, related_is_source: Tensor, position: Literal["m", "n"]) -> Tensor:
    """Returns whether the target of a map is image n of its pairs with related images, (R,) bool.

    In pairs of two domains, n is the image of the source domain.

    Args:
        is_source: Whether the target belongs to the source domain, () bool.
        related_is_source: Whether the related images do, (R,) bool.
        position: Which image of a pair of one domain the target is.
    """
    return torch.where(is_source == related_is_source, position == "n", is_source)


def position_vectors(features: Tensor, form: AffinityForm = "bilinear") -> Tensor:
    """Returns one vector per position, (B, C, H, W) -> (B, HW, C), scaled so that dot products are those of `form`.

    For `cosine`, each vector has unit length. For a tuple, each of the L levels of a vector has the length 1 / sqrt(L).
    Use float32 or bfloat16: squared lengths exceed the range of float16.
    """
    flat = features.flatten(2)
    if form == "bilinear":
        return flat.transpose(1, 2)

    # Norms over the channels before the transpose take a quarter of the time that they would take after it.
    levels = [flat] if form == "cosine" else flat.split(form, dim=1)
    scaled_levels = []
    for level in levels:
        squared_length = level.square().sum(dim=1, keepdim=True).clamp(min=1e-12)
        scaled_levels.append(level * (len(levels) * squared_length).rsqrt())
    scaled = torch.cat(scaled_levels, dim=1) if len(scaled_levels) > 1 else scaled_levels[0]
    return scaled.transpose(1, 2)


def projected(flat: Tensor, w_p: Tensor | None) -> Tensor:
    """Multiplies position vectors (B, HW, C) by W_P; None is the identity."""
    return flat if w_p is None else flat @ w_p


def affinity(
    f_m: Tensor, f_n: Tensor, w_p: Tensor | None, *, form: AffinityForm = "bilinear", scale: float = 1.0
) -> Tensor:
    """Computes P = scale * F_m^T W_P F_n (Eq. 2), the similarity of each position of m and each position of n.

    The paper uses the form `bilinear` with scale 1. With `cosine` and W_P = I the entries are cosines, and `scale` is
    the inverse temperature of the softmax.

    Args:
        f_m, f_n: Features, (B, C, H, W).
        w_p: W_P, (C, C), or one per pair, (B, C, C); None: identity.
        form: How vectors are compared.
        scale: Factor of P.

    Returns:
        P, (B, HW_m, HW_n).
    """
    return projected(position_vectors(f_m, form), w_p) @ position_vectors(f_n, form).transpose(1, 2) * scale


def coattend(values_m: Tensor, values_n: Tensor, p: Tensor) -> CoAttentive:
    """Computes the attention summaries of both images (Eq. 3, 4) from one affinity, normalized in both directions.

    Row i of P, normalized over n, weighs the positions of n for position i of m: F_m^{m∩n} = F_n A_n. Column j,
    normalized over m, does so for position j of n.

    Args:
        values_m, values_n: Values to average, (B, V, H, W).
        p: Affinity, (B, HW_m, HW_n).
    """
    flat_m = position_vectors(values_m)
    flat_n = position_vectors(values_n)
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
    """Computes Eq. 2-4 as scaled dot product attention in both directions, without P in memory.

    The result is that of `coattend` for the result of `affinity`. For m, the queries are F_m^T W_P and the keys F_n;
    for n they change roles, because its affinity is the transpose.
    """
    query = projected(position_vectors(f_m, form), w_p) * scale
    key = position_vectors(f_n, form)
    common_m = _fused_attention(query, key, position_vectors(values_n))
    common_n = _fused_attention(key, query, position_vectors(values_m))
    return CoAttentive(_spatial(common_m, values_m), _spatial(common_n, values_n))


def _fused_attention(query: Tensor, key: Tensor, values: Tensor) -> Tensor:
    """Computes softmax(query key^T) values, (B, HW, V).

    Channels are padded with zeros: the CPU's fused kernel requires the same width of all three tensors, CUDA's requires
    multiples of 8.
    """
    values_width = values.shape[2]
    common_width = max(values_width, key.shape[2])

    def padded(tensor: Tensor) -> Tensor:
        width = tensor.shape[2]
        padding = -width % 8 if tensor.is_cuda else common_width - width
        # PyTorch selects a fused kernel only for contiguous tensors with a dimension for heads.
        return functional.pad(tensor, (0, padding)).contiguous()[:, None]

    attended = functional.scaled_dot_product_attention(padded(query), padded(key), padded(values), scale=1.0)
    return attended[:, 0, :, :values_width]


def _spatial(flat: Tensor, like: Tensor) -> Tensor:
    """Reshapes one vector per position, (B, HW, V), to (B, V, H, W) with the spatial size of `like`."""
    return flat.transpose(1, 2).unflatten(2, like.shape[2:])


def unshared(values: Tensor, gate: Tensor) -> Tensor:
    """Computes values * (1 - sigmoid(gate)), the part of an image that the pair does not share (Eq. 6-8).

    Args:
        values: Features F, which yield F^{m\\n}, or anything linear in them without a bias, (B, V, H, W).
        gate: W_B F^{m∩n}, (B, 1, H, W).
    """
    return values * (1 - torch.sigmoid(gate))

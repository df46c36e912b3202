"""Localization maps from features (section 3.2): single-round activations, and multi-round ones with related images.

The class layer is linear and attention weights sum to one, so the activation of a co-attentive feature is the
attention-weighted mean of the related image's activations: phi(F_r A) = phi(F_r) A. Attention averages one value per
position in place of C, and each image is embedded once, whatever the number of maps that use it.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mcis.models.backbones import Backbone
from mcis.models.coattention import AffinityForm, positions, projected, unshared
from mcis.models.grids import Grids, pixel_grids
from mcis.models.resampling import resample


def embed(
    backbone: Backbone,
    head: Callable[[Tensor], Tensor],
    images: Tensor,
    *,
    extra_scales: Sequence[float] = (),
    hflip: bool = False,
    known: Sequence[Tensor] = (),
) -> Tensor:
    """Features of images (B, 3, H, W), averaged over scales and mirror images at the same places, (B, C, h, w).

    The class layer is linear, so the map of the averaged features is the average of the maps.

    Args:
        head: the backbone's output -> features, position by position (`CoAttentionClassifier.standard`).
        extra_scales: factors of the images' size beside 1.
        mirror: whether mirror images are averaged in, mirrored back.
        known: the backbone's outputs of the images, or of these and of their mirror images, where they were computed
            before; of the images' pixels only what else is needed is then read.
    """
    total = head(known[0] if known else backbone(images))
    target = backbone.grids(images, total)
    for scale in (1.0, *extra_scales):
        size = [max(1, round(side * scale)) for side in images.shape[2:]]
        scaled = images if scale == 1 else functional.interpolate(images, size=size, mode="bilinear")
        for flipped in (False, True) if hflip else (False,):
            if scale == 1 and not flipped:
                continue
            if scale == 1 and len(known) > 1:
                features = head(known[1])
            else:
                features = head(backbone(scaled.flip(3) if flipped else scaled))
            grids = backbone.grids(scaled, features)
            if flipped:
                features, grids = features.flip(3), grids.mirrored()
            total = total + resample(features, grids, target)
    return total / ((1 + len(extra_scales)) * (2 if hflip else 1))


def affinity_query(target: Tensor, w_p: Tensor | None, *, form: AffinityForm = "bilinear", scale: float = 1) -> Tensor:
    """The target's side of Eq. 2, scale * F_n^T W_P: (C, H, W) -> (HW, C), or (R, HW, C) for W_P (R, C, C).

    It is the same for all related images with the same W_P, for any class.
    """
    return projected(positions(target[None], form)[0], w_p) * scale


def _attended(query: Tensor, related: Tensor, values: Sequence[Tensor], form: AffinityForm) -> Iterator[Tensor]:
    """Values (H'W',) of each related image r, averaged by the attention of the target's positions, (HW,), in turn.

    Image by image: no more than one affinity (HW, H'W') is laid out, and an image's bits do not depend on the others.
    """
    queries = query.expand(len(related), *query.shape[-2:])
    for of_pair, features, of_image in zip(queries, related, values, strict=True):
        affinity = of_pair @ positions(features[None], form)[0].T
        yield torch.softmax(affinity, dim=1) @ of_image


def multi_round(
    query: Tensor,
    related: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    form: AffinityForm = "bilinear",
    passed: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """The target's co-attentive activations of one class with each related image (section 3.2, second strategy).

    Attention may average maps in place of activations: those that the related images have by their own related images.
    So activations travel over images of images, which the paper does not have.

    Args:
        query: `affinity_query` of the image whose map it is, (HW, C), or one for each related image, (R, HW, C).
        related: F_r of R images that share the class, (R, C, H', W').
        weight, bias: of the class in the layer for co-attentive features, (C,) and ().
        passed: maps of the class in the related images, (H', W') each, None of one that has none.

    Returns:
        Position by position, (R, HW), before clipping and normalizing; L_{n,k} is their mean.
    """
    shift = 0.0 if bias is None else bias
    each = zip(related, passed or [None] * len(related), strict=True)
    values = [weight @ image.flatten(1) + shift if map is None else map.flatten() for image, map in each]
    return torch.stack(list(_attended(query, related, values, form)))


def contrastive_round(
    query: Tensor, others: Tensor, w_b: Tensor, values: Tensor, bias: Tensor | None, *, form: AffinityForm = "bilinear"
) -> Tensor:
    """The target's contrastive activations of one class with each of other images (Eq. 6-8; section 4.5).

    W_B F^{n∩q} is attention over W_B F_q, one value per position, and the class layer on F_n * (1 - B) is the class
    layer on F_n times (1 - B), so neither feature is laid out.

    Args:
        query: as of `multi_round`.
        others: F_q of Q images that lack the class, (Q, C, H', W').
        w_b: W_B, (C,).
        values: the class's activation in F_n by the layer for contrastive features, without its bias, (HW,).
        bias: that bias, ().

    Returns:
        (Q, HW), before clipping and normalizing.
    """
    gates = _attended(query, others, [w_b @ image.flatten(1) for image in others], form)
    each = torch.stack([unshared(values[None, None], gate[None, None])[0, 0] for gate in gates])
    return each if bias is None else each + bias


def normalize_maps(maps: Tensor) -> Tensor:
    """Clips maps (..., H, W) at 0 and divides each by its maximum -> [0, 1]; a map without a positive value is 0."""
    positive = maps.clamp(min=0)
    return positive / positive.amax(dim=(-2, -1), keepdim=True).clamp(min=1e-6)


def _normalize_range(maps: Tensor) -> Tensor:
    low = maps.amin(dim=(-2, -1), keepdim=True)
    return (maps - low) / (maps.amax(dim=(-2, -1), keepdim=True) - low).clamp(min=1e-6)


def _signed_logarithm(maps: Tensor) -> Tensor:
    return ((1 + maps.sign() * maps.abs().log1p() / 7) / 2).clamp(0, 1)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": normalize_maps,
    "range": _normalize_range,
    "logarithm": _signed_logarithm,
}


def scale_maps(maps: Tensor, scale: str) -> Tensor:
    """Activation maps (..., H, W) -> scores in [0, 1], by which the tags of an image compete for its pixels.

    - `maximum`: each map is clipped at 0 and divided by its maximum (RELEASED_RECIPE, "Localization maps").
    - `range`: each map is min-max normalized. Negative activations keep their order: the least unlikely class may win.
    - `logarithm`: (1 + sign(a) log(1 + |a|) / 7) / 2, clipped to [0, 1]. All maps share this scale, so a class of which
      the class layer is surer wins over one that is merely the strongest of its image. Activation 0 becomes 0.5, and
      activations up to +-1,095 stay apart.
    """
    return SCALES[scale](maps)


def score_maps(maps: Tensor, grids: Grids, scale: str, height: int, width: int) -> Tensor:
    """Activation maps (T, h, w) -> scores of the pixels of their image in [0, 1], (T, height, width).

    They are resized first, bicubically, and then scaled (`scale_maps`), so that a map's maximum is that of its pixels.

    Args:
        grids: where the maps' positions lie.
    """
    return scale_maps(resample(maps.float(), grids, pixel_grids(height, width), "bicubic"), scale)


def released_map(activation: Tensor, *, always: bool = False) -> Tensor:
    """One map of the released sum: clipped at 0 and divided by its maximum (RELEASED_RECIPE, "Localization maps").

    Args:
        activation: (..., H, W).
        always: False makes the map zero where the sigmoid of its mean activation is not above 0.1.
    """
    keep = always or bool(torch.sigmoid(activation.mean()) > 0.1)
    return normalize_maps(activation) * keep

"""Localization maps from features (section 3.2): single-round activations, and multi-round ones with related images.

The class layer is linear and attention weights sum to one, so the activation of a co-attentive feature is an average of
the related image's activations: phi(F_r A) = phi(F_r) A. Attention therefore averages one value per position instead of
C, and each image is embedded once, no matter how many maps use it.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mcis.models.backbones import Backbone
from mcis.models.coattention import AffinityForm, position_vectors, projected, unshared
from mcis.models.grids import Grids, pixel_grids
from mcis.models.resampling import resample


def embed(
    backbone: Backbone,
    head: Callable[[Tensor], Tensor],
    images: Tensor,
    *,
    extra_scales: Sequence[float] = (),
    hflip: bool = False,
    outputs: Sequence[Tensor] = (),
) -> Tensor:
    """Computes features of images, averaged over scales and horizontal flips at corresponding positions.

    The class layer is linear, so the map of the averaged features is the average of the maps.

    Args:
        backbone: Network that embeds the images.
        head: Maps the backbone's output to features, position by position (`CoAttentionClassifier.standardize`).
        images: Normalized images, (B, 3, H, W).
        extra_scales: Factors of the images' size in addition to 1.
        hflip: Whether to include horizontally flipped images, whose features are flipped back.
        outputs: Outputs of the backbone that have been computed before: none, those of the images, or those of the
            images and of the flipped images.

    Returns:
        Features, (B, C, h, w).
    """
    total = head(outputs[0] if outputs else backbone(images))
    target_grids = backbone.grids(images, total)
    flips = (False, True) if hflip else (False,)
    scales = (1.0, *extra_scales)

    for scale in scales:
        size = [max(1, round(side * scale)) for side in images.shape[2:]]
        scaled = images if scale == 1 else functional.interpolate(images, size=size, mode="bilinear")
        for is_flipped in flips:
            if scale == 1 and not is_flipped:
                continue  # the images themselves, whose features are in `total`
            if scale == 1 and len(outputs) > 1:
                features = head(outputs[1])
            else:
                features = head(backbone(scaled.flip(3) if is_flipped else scaled))

            grids = backbone.grids(scaled, features)
            if is_flipped:
                features = features.flip(3)
                grids = grids.hflipped()
            total = total + resample(features, grids, target_grids)

    return total / (len(scales) * len(flips))


def affinity_query(target: Tensor, w_p: Tensor | None, *, form: AffinityForm = "bilinear", scale: float = 1) -> Tensor:
    """Computes the target's factor of Eq. 2, scale * F_n^T W_P. It is the same for all related images and classes.

    Args:
        target: Features of the target, (C, H, W).
        w_p: W_P, (C, C), or one for each of R related images, (R, C, C); None: identity.
        form: How vectors are compared.
        scale: Factor of P.

    Returns:
        (HW, C), or (R, HW, C).
    """
    return projected(position_vectors(target[None], form)[0], w_p) * scale


def _attended(query: Tensor, related: Tensor, values: Sequence[Tensor], form: AffinityForm) -> Iterator[Tensor]:
    """Yields, for each related image, the average of its values by the attention of each position of the target, (HW,).

    Images are processed one by one: memory holds one affinity (HW, H'W') at a time, and the bits of a result do not
    depend on the other images.

    Args:
        query: `affinity_query` of the target, (HW, C), or one for each related image, (R, HW, C).
        related: Features of R images, (R, C, H', W').
        values: Value at each position of each image, (H'W',).
        form: How vectors are compared.
    """
    queries = query.expand(len(related), *query.shape[-2:])
    for image_query, features, image_values in zip(queries, related, values, strict=True):
        affinity = image_query @ position_vectors(features[None], form)[0].T
        yield torch.softmax(affinity, dim=1) @ image_values


def multi_round(
    query: Tensor,
    related: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    form: AffinityForm = "bilinear",
    related_maps: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Computes the target's co-attentive activations of a class with each related image (section 3.2, second strategy).

    Attention can average maps instead of activations: maps of the related images that were computed from their own
    related images. Activations then pass through several images. This is an extension of the paper.

    Args:
        query: `affinity_query` of the target, (HW, C), or one for each related image, (R, HW, C).
        related: Features F_r of R images that share the class, (R, C, H', W').
        weight, bias: Weight (C,) and bias () of the class in the layer for co-attentive features.
        form: How vectors are compared.
        related_maps: Maps of the class in the related images, (H', W') each; None for an image without a map.

    Returns:
        Activations before clipping and normalization, (R, HW). L_{n,k} is their mean.
    """
    shift = 0.0 if bias is None else bias
    image_maps = related_maps or [None] * len(related)
    values = []
    for image, image_map in zip(related, image_maps, strict=True):
        if image_map is None:
            values.append(weight @ image.flatten(1) + shift)
        else:
            values.append(image_map.flatten())

    return torch.stack(list(_attended(query, related, values, form)))


def contrastive_round(
    query: Tensor, others: Tensor, w_b: Tensor, values: Tensor, bias: Tensor | None, *, form: AffinityForm = "bilinear"
) -> Tensor:
    """Computes the target's contrastive activations of a class with each of Q images (Eq. 6-8; section 4.5).

    Neither feature is computed: W_B F^{n∩q} is attention over W_B F_q, one value per position, and the class layer on
    F_n * (1 - B) is the class layer on F_n, times (1 - B).

    Args:
        query: See `multi_round`.
        others: Features F_q of Q images that lack the class, (Q, C, H', W').
        w_b: W_B, (C,).
        values: Activation of the class in F_n by the layer for contrastive features, without bias, (HW,).
        bias: Bias of this layer, ().
        form: How vectors are compared.

    Returns:
        Activations before clipping and normalization, (Q, HW).
    """
    gate_values = [w_b @ image.flatten(1) for image in others]

    activations = []
    for gate in _attended(query, others, gate_values, form):
        activations.append(unshared(values[None, None], gate[None, None])[0, 0])

    stacked = torch.stack(activations)
    return stacked if bias is None else stacked + bias


def normalize_maps(maps: Tensor) -> Tensor:
    """Clips maps (..., H, W) at 0 and divides each by its maximum; maps without a positive value become 0."""
    positive = maps.clamp(min=0)
    return positive / positive.amax(dim=(-2, -1), keepdim=True).clamp(min=1e-6)


def _normalize_range(maps: Tensor) -> Tensor:
    low = maps.amin(dim=(-2, -1), keepdim=True)
    high = maps.amax(dim=(-2, -1), keepdim=True)
    return (maps - low) / (high - low).clamp(min=1e-6)


def _signed_logarithm(maps: Tensor) -> Tensor:
    return ((1 + maps.sign() * maps.abs().log1p() / 7) / 2).clamp(0, 1)


def _as_given(maps: Tensor) -> Tensor:
    return maps.clamp(0, 1)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": normalize_maps,
    "range": _normalize_range,
    "logarithm": _signed_logarithm,
    "given": _as_given,
}
"""Scales of maps by name, see `scale_maps`."""


def scale_maps(maps: Tensor, scale: str) -> Tensor:
    """Converts activation maps (..., H, W) to scores in [0, 1], by which the tags of an image compete for its pixels.

    - `maximum`: each map is clipped at 0 and divided by its maximum (paper-vs-code, "Localization maps").
    - `range`: each map is min-max normalized. Negative activations keep their order, so a pixel can be assigned to a
      class although all activations are negative.
    - `logarithm`: (1 + sign(a) log(1 + |a|) / 7) / 2, clipped to [0, 1]. All maps share this scale: a class with a
      higher activation wins, even if another one is closer to its own maximum. Activation 0 becomes 0.5, and
      activations up to +-1,095 remain distinct.
    - `given`: maps of another program, which are scores already, clipped to [0, 1] because resampling overshoots.

    Args:
        maps: Activations.
        scale: Name in SCALES.
    """
    return SCALES[scale](maps)


def score_maps(maps: Tensor, grids: Grids, scale: str, height: int, width: int) -> Tensor:
    """Converts activation maps (T, h, w) to scores of the image's pixels in [0, 1], (T, height, width).

    Maps are resized bicubically before they are scaled (`scale_maps`), so a map's maximum is that of its pixels.

    Args:
        maps: Activations at feature resolution.
        grids: Locations of the maps' positions in the image.
        scale: Name in SCALES.
        height, width: Size of the image, pixels.
    """
    return scale_maps(resample(maps.float(), grids, pixel_grids(height, width), "bicubic"), scale)


def released_map(activation: Tensor, *, always: bool = False) -> Tensor:
    """Computes one addend of the released code's map: clipped at 0 and divided by its maximum.

    See paper-vs-code, "Localization maps".

    Args:
        activation: (..., H, W).
        always: Whether to keep the map even if the sigmoid of its mean activation is at most 0.1; else it becomes 0.
    """
    if not always and torch.sigmoid(activation.mean()) <= 0.1:  # false for NaN, so that the map is NaN, too
        return torch.zeros_like(activation)
    return normalize_maps(activation)

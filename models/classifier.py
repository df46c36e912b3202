"""The co-attention classifier (section 3.1): scores pairs of images for their own, shared and unshared classes."""

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from mcis.models.affinity import Affinity
from mcis.models.backbones import Backbone
from mcis.models.classifier_losses import PairScores
from mcis.models.coattention import AffinityForm, CoAttentive, affinity, coattend, coattend_fused, unshared
from mcis.models.grids import pixel_grids
from mcis.models.localization import affinity_query, contrastive_round, multi_round
from mcis.models.resampling import resample
from mcis.models.seam import Equivariance, EquivariantMaps, PixelCorrelation, RefinedMaps, smaller_copies, tagged_maps

Attention = Literal["none", "co", "co+contrastive"]
"""Which attention a classifier has: none, co-attention, or also contrastive co-attention."""
Head = Literal["shared", "own"]
"""Which layer scores attentive features: the class-aware layer phi, or a layer of its own."""
AttentionPartner = Literal["partner", "itself"]
"""What an image attends to: its partner, or itself as a control."""
SELF_TRANSFORMS = ("hflip", "x0.75", "x2")
"""Transformations tau of an image for self pairs: flip or scaling (paper-vs-code, "Classifier")."""
MAX_AFFINITY_ENTRIES = 2**26
"""Largest number of entries of P, over a batch, for which P is materialized on a CPU: 256 MiB in float32."""


class MissingOutputs(NamedTuple):
    """M of the 2B images of B pairs, whose outputs of the backbone are missing.

    Attributes:
        rows: Their numbers among the 2B images, images m first, (M,).
        images: The normalized images, (M, 3, S, S).
    """

    rows: Tensor
    images: Tensor


class PairInputs(NamedTuple):
    """Inputs of the classifier for a batch of B pairs (m, n).

    Attributes:
        m, n: Normalized images, (B, 3, H, W), or outputs of the backbone, (B, C, H, W).
        is_embedded: Whether `m` and `n` are outputs of the backbone.
        missing: If `is_embedded`, the images whose outputs are missing; None if none is.
        unjittered_m: Images m without color jitter, to which tau is applied for self pairs (paper-vs-code,
            "Classifier"); None: `m`.
    """

    m: Tensor
    n: Tensor
    is_embedded: bool = False
    missing: MissingOutputs | None = None
    unjittered_m: Tensor | None = None


class BatchScores(NamedTuple):
    """Outputs of the classifier for a batch of B pairs.

    Attributes:
        pairs: Class scores of the pairs (m, n).
        selves: Class scores of the self pairs, an image m and its transformed copy tau(m), for each transformation tau.
        features: Features (B, C, H, W) of both images of the pairs, then of the self pairs of each transformation.
        copies: Basic scores of the smaller copies; None without equivariant attention.
        maps: Maps of the 2B images, images m first, and of their copies; None without equivariant attention.
    """

    pairs: PairScores
    selves: list[PairScores]
    features: list[tuple[Tensor, Tensor]]
    copies: PairScores | None = None
    maps: EquivariantMaps | None = None


def pool(activations: Tensor, bias: Tensor | None = None) -> Tensor:
    """Global average pooling (Eq. 1): activation maps (B, K, H, W), to which a bias (K,) is added -> scores (B, K)."""
    if bias is not None:
        activations = activations + bias[:, None, None]
    return activations.flatten(2).mean(dim=2)


def transform(images: Tensor, name: str) -> Tensor:
    """Computes tau(I) for self pairs: `hflip`, or bilinear scaling by `x0.75` or `x2`; images (B, 3, H, W)."""
    if name == "hflip":
        return images.flip(3)
    factor = float(name[1:])
    size = [round(side * factor) for side in images.shape[2:]]
    return nn.functional.interpolate(images, size=size, mode="bilinear", align_corners=False)


class CoAttentionClassifier(nn.Module):
    """Backbone, class-aware layer phi, co-attention and contrastive co-attention.

    The features F of an image, (B, C, H, W), are the backbone's output, optionally standardized. phi, the affinity and
    attention all read F.

    Args:
        backbone: Convolutional embedding or vision transformer.
        classes: Number of classes K.
        standardized: Whether to standardize each channel of the backbone's output, see `set_statistics`.
        attention: Which scores are computed: basic, also co-attention (`co`), or also contrastive (`co+contrastive`).
        head: Layer that scores co-attentive and contrastive features. `shared`: phi (paper); `own`: a separate 1x1
            convolution without bias (paper-vs-code, "Classifier").
        affinity: How positions of two images are compared.
        num_domain_affinities: Number of matrices W_P: 1, or 3 for pairs of two domains (end of section 3.2), in the
            order target-target, source-source, target-source.
        phi_std: Standard deviation of phi's initial weights; None: sqrt(2 / K) (paper-vs-code, "Classifier").
        correlated: Whether to add the layers of pixel correlation, which equivariant attention trains.

    Raises:
        UserError: The backbone has no layers that pixel correlation can compare.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        classes: int,
        standardized: bool = False,
        attention: Attention = "co+contrastive",
        head: Head = "shared",
        affinity: Affinity = Affinity(),
        num_domain_affinities: Literal[1, 3] = 1,
        phi_std: float | None = None,
        correlated: bool = False,
    ):
        super().__init__()
        channels = backbone.channels
        self.backbone = backbone
        self.attention = attention
        self.affinity = affinity
        self.form: AffinityForm = backbone.stage_channels if affinity.form == "cosine_by_level" else affinity.form

        self.phi = nn.Conv2d(channels, classes, 1)
        nn.init.normal_(self.phi.weight, std=(2 / classes) ** 0.5 if phi_std is None else phi_std)
        nn.init.zeros_(self.phi.bias)  # type: ignore[arg-type]

        self.standardized = standardized
        if standardized:
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("deviation", torch.ones(channels))

        self.own_head = head == "own" and attention != "none"
        if attention != "none" and affinity.w_p == "learned":
            self.w_p = nn.Parameter(_initial_w_p(channels, num_domain_affinities, affinity.init))
        if self.own_head:
            self.common_head = nn.Conv2d(channels, classes, 1, bias=False)
        if attention == "co+contrastive":
            self.w_b = nn.Conv2d(channels, 1, 1, bias=False)
        if correlated:
            self.correlation = PixelCorrelation(backbone.correlation_layers)

    def train(self, mode: bool = True) -> Self:
        """Switches to training or evaluation mode. A backbone without trained parameters stays in evaluation mode.

        Its dropout would otherwise distinguish outputs that are computed in training from those that were cached.
        """
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.backbone.parameters()):
            self.backbone.eval()
        return self

    def set_statistics(self, mean: Tensor, deviation: Tensor) -> None:
        """Sets mean and standard deviation of the backbone's channels, (C,) each; they are saved with the weights."""
        self.mean.copy_(mean)
        self.deviation.copy_(deviation.clamp(min=1e-6))

    def standardize(self, outputs: Tensor) -> Tensor:
        """Returns the features F for outputs of the backbone, both (B, C, H, W): standardized, if configured."""
        if not self.standardized:
            return outputs
        return (outputs - self.mean[:, None, None]) / self.deviation[:, None, None]

    def features(self, images: Tensor) -> Tensor:
        """Computes the features F of normalized images (B, 3, H, W)."""
        return self.standardize(self.backbone(images))

    def activations(self, features: Tensor) -> Tensor:
        """Computes class-aware activation maps S = phi(F), (B, K, H, W)."""
        activations: Tensor = self.phi(features)
        return activations

    def scores(self, features: Tensor) -> Tensor:
        """Computes basic scores of images (Eq. 1), (B, K). phi is linear, so it is applied to the pooled features."""
        return nn.functional.linear(pool(features), self.phi.weight.flatten(1), self.phi.bias)

    def refined(self, images: Tensor, maps: Tensor, layer_outputs: list[Tensor]) -> Tensor:
        """Refines maps by pixel correlation.

        Args:
            images: Normalized images, (B, 3, H, W).
            maps: Maps of T classes of these images, (B, T, h, w).
            layer_outputs: Outputs of the layers `Backbone.correlation_layers` for these images.

        Returns:
            Scores of background and the classes, (B, 1 + T, h, w).
        """
        colors = resample(images, pixel_grids(*images.shape[2:]), self.backbone.grids(images, maps))
        scores: Tensor = self.correlation(maps, colors, *layer_outputs)
        return scores

    def attention_layer(self) -> tuple[Tensor, Tensor | None]:
        """Returns weight (K, C, 1, 1) and bias (K,) of the layer that scores co-attentive and contrastive features."""
        layer = self.common_head if self.own_head else self.phi
        return layer.weight, layer.bias

    def affinity_weights(self, pair_domains: Tensor | None) -> Tensor | None:
        """Returns W_P: one for all pairs, (C, C), or one per pair, (B, C, C); None for the identity.

        Args:
            pair_domains: Domains of the pairs, (B,), see `coattention.pair_domains`; only read if there are three W_P.

        Raises:
            ValueError: There are three W_P, but `pair_domains` is None.
        """
        if self.affinity.w_p == "identity":
            return None
        if self.w_p.ndim == 2:
            return self.w_p
        if pair_domains is None:
            raise ValueError("a classifier with three W_P needs the domains of each pair")
        return self.w_p[pair_domains]

    def pair_scores(
        self,
        m: Tensor,
        n: Tensor,
        pair_domains: Tensor | None = None,
        *,
        attend: bool = True,
        attention_partner: AttentionPartner = "partner",
        contrastive: bool = True,
        compared: Sequence[Tensor] | None = None,
    ) -> PairScores:
        """Computes the basic (Eq. 1), co-attention (Eq. 5) and contrastive scores (Eq. 9) of B pairs.

        All layers on the features are linear, so they are applied before attention, which then averages K class
        activations and the output of W_B instead of C channels.

        Args:
            m, n: Features of the images, (B, C, H, W) each.
            pair_domains: Domains of the pairs, (B,), if there are three W_P.
            attend: Whether to compute co-attention scores, if the classifier has co-attention.
            attention_partner: What the images of a pair attend to: each other, or, as a control, themselves.
            contrastive: Whether to compute contrastive scores, too, if the classifier has contrastive co-attention.
            compared: The features that the affinity compares, if autograd is to add up their gradient separately;
                None: m and n.
        """
        basic = PairScores(self.scores(m), self.scores(n))
        if self.attention == "none" or not attend:
            return basic

        weight, bias = self.attention_layer()
        classes = len(weight)
        contrastive = contrastive and self.attention == "co+contrastive"
        weights = torch.cat([weight, self.w_b.weight]) if contrastive else weight
        layers = weights.flatten(1).expand(len(m), -1, -1)
        values_m = torch.bmm(layers, m.flatten(2)).unflatten(2, m.shape[2:])
        values_n = torch.bmm(layers, n.flatten(2)).unflatten(2, n.shape[2:])

        w_p = self.affinity_weights(pair_domains)
        compared_m, compared_n = compared or (m, n)
        if attention_partner == "partner":
            attentive_m, attentive_n = self._coattend(compared_m, compared_n, w_p, values_m, values_n)
        else:
            attentive_m = self._coattend(compared_m, compared_m, w_p, values_m, values_m).m
            attentive_n = self._coattend(compared_n, compared_n, w_p, values_n, values_n).n

        co_scores = basic._replace(
            co_attention_m=pool(attentive_m[:, :classes], bias), co_attention_n=pool(attentive_n[:, :classes], bias)
        )
        if not contrastive:
            return co_scores
        unshared_m = unshared(values_m[:, :classes], attentive_m[:, classes:])
        unshared_n = unshared(values_n[:, :classes], attentive_n[:, classes:])
        return co_scores._replace(contrastive_m=pool(unshared_m, bias), contrastive_n=pool(unshared_n, bias))

    def _coattend(self, m: Tensor, n: Tensor, w_p: Tensor | None, values_m: Tensor, values_n: Tensor) -> CoAttentive:
        """Computes attention in both directions: with P in memory for a small P on a CPU (faster), else fused."""
        entries = len(m) * m.shape[2:].numel() * n.shape[2:].numel()
        form = self.form
        scale = self.affinity.scale
        if m.is_cuda or entries > MAX_AFFINITY_ENTRIES:
            return coattend_fused(m, n, w_p, values_m, values_n, form=form, scale=scale)
        return coattend(values_m, values_n, affinity(m, n, w_p, form=form, scale=scale))

    def query(
        self,
        target: Tensor,
        *,
        pair_domains: Tensor | None = None,
        target_is_n: bool | Tensor = False,
        identity: bool = False,
    ) -> Tensor:
        """Computes the target's factor of the affinity, F_n^T W_P (Eq. 2), which all related images share.

        Args:
            target: Features of the image whose maps are computed, (C, H, W).
            pair_domains: Domains of the R pairs of target and related image, (R,), if there are three W_P.
            target_is_n: Whether the target is image n of a pair, for all pairs or for each, (R,). The factor is then
                F_n^T W_P^T.
            identity: Whether to use the identity instead of the learned W_P.

        Returns:
            (HW, C), or (R, HW, C) if the R pairs have a W_P each.
        """
        w_p = None if identity else self.affinity_weights(pair_domains)
        if w_p is not None:
            if isinstance(target_is_n, Tensor):
                w_p = torch.where(target_is_n[:, None, None], w_p.mT, w_p)
            elif target_is_n:
                w_p = w_p.mT
        return affinity_query(target, w_p, form=self.form, scale=self.affinity.scale)

    def co_maps(
        self,
        query: Tensor,
        target: Tensor,
        related: Tensor,
        tag: int,
        related_maps: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Computes the target's co-attentive activations of a class with each related image; their mean is the map.

        Args:
            query: Result of `query` for the target; the same for all its classes.
            target: Features of the target, (C, H, W).
            related: Features of its related images, (R, C, H', W').
            tag: Index of the class.
            related_maps: Maps of the class in the related images for attention to average, see `multi_round`.

        Returns:
            Activations, (R, H, W).
        """
        weight, bias = self.attention_layer()
        class_weight = weight[tag, :, 0, 0]
        class_bias = None if bias is None else bias[tag]
        activations = multi_round(query, related, class_weight, class_bias, form=self.form, related_maps=related_maps)
        return activations.unflatten(1, target.shape[1:])

    def contrastive_maps(self, query: Tensor, target: Tensor, others: Tensor, tag: int) -> Tensor:
        """Computes the target's contrastive activations of a class with each of Q images that lack it (section 4.5).

        Args:
            query, target, tag: See `co_maps`.
            others: Features of the images that lack the class, (Q, C, H', W').

        Returns:
            Activations, (Q, H, W).
        """
        weight, bias = self.attention_layer()
        w_b = self.w_b.weight[0, :, 0, 0]
        class_values = weight[tag, :, 0, 0] @ target.flatten(1)
        class_bias = None if bias is None else bias[tag]
        activations = contrastive_round(query, others, w_b, class_values, class_bias, form=self.form)
        return activations.unflatten(1, target.shape[1:])

    def forward(
        self,
        inputs: PairInputs,
        self_transforms: tuple[str, ...] = (),
        pair_domains: Tensor | None = None,
        *,
        attend: bool = True,
        attention_partner: AttentionPartner = "partner",
        equivariance: Equivariance | None = None,
    ) -> BatchScores:
        """Scores the pairs (m, n) and the self pairs (m, tau(m)). The backbone embeds m and n in one pass.

        Args:
            inputs: Images of the pairs, or outputs of the backbone.
            self_transforms: Names of transformations tau from SELF_TRANSFORMS. Self pairs require images, reuse the
                features of m and have no contrastive scores.
            pair_domains: Domains of the pairs, (B,), if there are three W_P.
            attend: Whether to compute co-attention and contrastive scores, if the classifier has them.
            attention_partner: See `pair_scores`.
            equivariance: Tags of the 2B images, images m first, for equivariant attention, which requires images.
        """
        images = torch.cat([inputs.m, inputs.n])
        if inputs.missing is not None:
            images = self._fill_missing(images, inputs.missing)
        watched = self.backbone.correlation_layers if equivariance else ()
        with self.backbone.capture_outputs(*watched) as layer_outputs:
            features = self.standardize(images if inputs.is_embedded else self.backbone(images))

        m, n = features.chunk(2)
        # A second split sums the affinity's gradient separately, which fixes the order of summation.
        compared_m, compared_n = features.chunk(2)
        score = functools.partial(self.pair_scores, attend=attend, attention_partner=attention_partner)
        pairs = score(m, n, pair_domains, compared=(compared_m, compared_n))
        pair_features = [(m, n)]

        selves = []
        # Only source-source pairs (1) have m in the source domain. Self pairs are source-source or target-target (0).
        self_pair_domains = None if pair_domains is None else (pair_domains == 1).long()
        unjittered_m = inputs.m if inputs.unjittered_m is None else inputs.unjittered_m
        for name in self_transforms:
            tau = self.features(transform(unjittered_m, name))
            selves.append(score(m, tau, self_pair_domains, contrastive=False, compared=(compared_m, tau)))
            pair_features.append((m, tau))

        if equivariance is None:
            return BatchScores(pairs, selves, pair_features)
        copy_scores, maps = self._equivariant_maps(images, features, layer_outputs, equivariance)
        return BatchScores(pairs, selves, pair_features, copy_scores, maps)

    def _fill_missing(self, outputs: Tensor, missing: MissingOutputs) -> Tensor:
        """Returns outputs of the backbone, (2B, C, H, W), with the missing ones.

        These are computed without a gradient and rounded to float16, as cached outputs are.
        """
        with torch.no_grad(), torch.autocast(outputs.device.type, enabled=False):
            computed = self.backbone(missing.images).half().to(outputs.dtype)
            completed = outputs.index_copy(0, missing.rows, computed)
        return completed

    def _equivariant_maps(
        self, images: Tensor, features: Tensor, layer_outputs: list[Tensor], equivariance: Equivariance
    ) -> tuple[PairScores, EquivariantMaps]:
        """Computes basic scores of the images' smaller copies, and maps of images and copies at the copies' pixels."""
        copies = smaller_copies(images, equivariance.scale)
        with self.backbone.capture_outputs(*self.backbone.correlation_layers) as copies_layer_outputs:
            copies_activations = self.activations(self.features(copies))

        def maps(images: Tensor, activations: Tensor, layer_outputs: list[Tensor]) -> RefinedMaps:
            tagged = tagged_maps(activations, equivariance.tags, equivariance.max_tags)
            refined = self.refined(images, tagged, layer_outputs)
            source = self.backbone.grids(images, tagged)
            target = pixel_grids(*copies.shape[2:])
            return RefinedMaps(resample(tagged, source, target), resample(refined, source, target))

        image_maps = maps(images, self.activations(features), layer_outputs)
        copy_scores = PairScores(*pool(copies_activations).chunk(2))
        return copy_scores, EquivariantMaps(image_maps, maps(copies, copies_activations, copies_layer_outputs))


def _initial_w_p(width: int, count: Literal[1, 3], init: float | None) -> Tensor:
    """Returns one W_P, (C, C), or three, (3, C, C): `init` times the identity, or uniform in +-1/sqrt(C) if None."""
    w_p = torch.empty((width, width) if count == 1 else (count, width, width))
    if init is None:
        return nn.init.uniform_(w_p, -(width**-0.5), width**-0.5)
    return w_p.copy_(torch.eye(width) * init)

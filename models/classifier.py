"""The co-attention classifier (section 3.1): pairs of images -> class scores of own, shared and unshared semantics."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mcis.models.backbones import Backbone
from mcis.models.coattention import AffinityForm, CoAttentive, affinity, coattend, coattend_fused, unshared
from mcis.models.grids import pixel_grids
from mcis.models.localization import affinity_query, contrastive_round, multi_round
from mcis.models.losses import PairScores
from mcis.models.networks import Affinity
from mcis.models.resampling import resample
from mcis.models.seam import Equivariance, EquivariantMaps, PixelCorrelation, RefinedMaps, of_tags, smaller_copies

Attention = Literal["none", "co", "co+contrastive"]
Head = Literal["shared", "own"]
Attended = Literal["partner", "itself"]
SELF_TRANSFORMS = ("hflip", "x0.75", "x2")
MOST_ENTRIES = 2**26
"""Most entries of P, over a batch, for which P is laid out on a CPU: 256 MiB in float32."""


class BatchScores(NamedTuple):
    """Class scores of a batch: of its pairs, and of the self pairs (m, tau m) of each transformation tau.

    With equivariant attention also the basic scores of the smaller copies, and the maps of the 2B images, those of m
    first, and of their copies.
    """

    pairs: PairScores
    selves: list[PairScores]
    copies: PairScores | None = None
    maps: EquivariantMaps | None = None


def pool(activations: Tensor) -> Tensor:
    """Global average pooling (Eq. 1): activation maps (B, K, H, W) -> scores (B, K)."""
    return activations.flatten(2).mean(dim=2)


def transform(images: Tensor, name: str) -> Tensor:
    """tau(I) of the self pairs: `hflip` left-right, `x0.75` or `x2` bilinear scaling; (B, 3, H, W)."""
    if name == "hflip":
        return images.flip(3)
    size = [round(s * float(name[1:])) for s in images.shape[2:]]
    return nn.functional.interpolate(images, size=size, mode="bilinear", align_corners=False)


class CoAttentionClassifier(nn.Module):
    """Backbone, class-aware layer phi, co-attention and contrastive co-attention.

    An image's features F, (B, C, H, W), are the backbone's output, standardized where that is asked for; phi, the
    affinity and attention all read them.

    Args:
        backbone: the convolutional embedding.
        classes: K.
        standardized: whether the backbone's output is standardized, channel by channel (`set_statistics`).
        attention: which terms are computed; `none` is the basic classifier of the ablation.
        head: `shared` applies phi to co-attentive and contrastive features too (paper); `own` applies a second 1x1
            layer without bias to both (RELEASED_RECIPE, "Classifier").
        affinity: how positions are compared.
        kinds: number of W_P: 1, or 3 for pairs of two domains (end of section 3.2), in the order target-target,
            source-source, target-source.
        phi_std: standard deviation of phi's weights at the start; None = sqrt(2 / K) (RELEASED_RECIPE, "Classifier").
        correlated: whether there are the layers of pixel correlation, which equivariant attention trains.

    Raises:
        UserError: the backbone has no layers that pixel correlation compares.
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
        kinds: Literal[1, 3] = 1,
        phi_std: float | None = None,
        correlated: bool = False,
    ):
        super().__init__()
        self.backbone, self.attention, self.affinity = backbone, attention, affinity
        c = backbone.channels
        self.form: AffinityForm = backbone.groups if affinity.form == "cosine_by_level" else affinity.form
        self.phi = nn.Conv2d(c, classes, 1)
        nn.init.normal_(self.phi.weight, std=(2 / classes) ** 0.5 if phi_std is None else phi_std)
        nn.init.zeros_(self.phi.bias)  # type: ignore[arg-type]
        self.standardized = standardized
        if standardized:
            self.register_buffer("mean", torch.zeros(c))
            self.register_buffer("deviation", torch.ones(c))
        if attention != "none":
            if affinity.w_p == "learned":
                self.w_p = nn.Parameter(_initial_w_p(c, kinds, affinity.init))
            if head == "own":
                self.common_head = nn.Conv2d(c, classes, 1, bias=False)
        if attention == "co+contrastive":
            self.w_b = nn.Conv2d(c, 1, 1, bias=False)
        self.own_head = head == "own" and attention != "none"
        if correlated:
            self.correlation = PixelCorrelation(backbone.middle)

    def set_statistics(self, mean: Tensor, deviation: Tensor) -> None:
        """Sets what the backbone's channels are standardized by, (C,) both; kept with the weights."""
        self.mean.copy_(mean)
        self.deviation.copy_(deviation.clamp(min=1e-6))

    def standard(self, outputs: Tensor) -> Tensor:
        """The features F of images from the backbone's outputs, (B, C, H, W) both."""
        return (outputs - self.mean[:, None, None]) / self.deviation[:, None, None] if self.standardized else outputs

    def features(self, images: Tensor) -> Tensor:
        """The features F of normalized images (B, 3, H, W)."""
        return self.standard(self.backbone(images))

    def activations(self, features: Tensor) -> Tensor:
        """Class-aware activations S = phi(F), (B, K, H, W)."""
        activations: Tensor = self.phi(features)
        return activations

    def scores(self, features: Tensor) -> Tensor:
        """Basic scores of images (Eq. 1), (B, K): of the features' mean, as phi is linear."""
        return nn.functional.linear(pool(features), self.phi.weight.flatten(1), self.phi.bias)

    def refined(self, images: Tensor, maps: Tensor, middle: list[Tensor]) -> Tensor:
        """Maps of some classes of normalized images, (B, T, H, W), refined by pixel correlation, (B, 1 + T, H, W).

        Args:
            middle: the outputs of the backbone's `middle` of these images.
        """
        colors = resample(images, pixel_grids(*images.shape[2:]), self.backbone.grids(images, maps))
        scores: Tensor = self.correlation(maps, colors, *middle)
        return scores

    def common_layer(self) -> tuple[Tensor, Tensor | None]:
        """Weight (K, C, 1, 1) and bias (K,) of the layer for co-attentive and contrastive features: `head`."""
        layer = self.common_head if self.own_head else self.phi
        return layer.weight, layer.bias

    def affinity_weights(self, kind: Tensor | None) -> Tensor | None:
        """W_P: the only one, (C, C), or the one for each pair's kind, (B,) -> (B, C, C); None = the identity.
        ValueError where there are three, and no kinds."""
        if self.affinity.w_p == "identity":
            return None
        if self.w_p.ndim == 2:
            return self.w_p
        if kind is None:
            raise ValueError("a classifier with three W_P needs the kind of each pair")
        return self.w_p[kind]

    def pair_scores(
        self,
        m: Tensor,
        n: Tensor,
        kind: Tensor | None = None,
        *,
        attend: bool = True,
        attended: Attended = "partner",
        contrastive: bool = True,
        compared: Sequence[Tensor] | None = None,
    ) -> PairScores:
        """Scores of B pairs from features (B, C, H, W): own (Eq. 1), shared (Eq. 5) and unshared semantics (Eq. 9).

        All layers on the features are linear, so they are applied before attention: the values that attention averages
        are the K class activations and the output of W_B.

        Args:
            kind: of the pairs, (B,), where there are three W_P.
            attend: whether shared semantics are scored, if the classifier has co-attention.
            attended: what an image of a pair attends to: its partner, or, as a control of what partners bring, itself.
            contrastive: whether unshared semantics are scored, too, if it has such a term.
            compared: the features that the affinity compares, if autograd is to add up their gradient separately;
                None = m and n.
        """
        basic = PairScores(self.scores(m), self.scores(n))
        if self.attention == "none" or not attend:
            return basic
        weight, bias = self.common_layer()
        contrastive = contrastive and self.attention == "co+contrastive"
        layers = (torch.cat([weight, self.w_b.weight]) if contrastive else weight).flatten(1).expand(len(m), -1, -1)
        values_m, values_n = (torch.bmm(layers, image.flatten(2)).unflatten(2, image.shape[2:]) for image in (m, n))
        w_p = self.affinity_weights(kind)
        m, n = compared or (m, n)
        if attended == "partner":
            common = self._coattend(m, n, w_p, values_m, values_n)
        else:
            of_m = self._coattend(m, m, w_p, values_m, values_m)
            of_n = self._coattend(n, n, w_p, values_n, values_n)
            common = CoAttentive(of_m.m, of_n.n)
        k = len(weight)

        def scores(activations: Tensor) -> Tensor:
            return pool(activations if bias is None else activations + bias[:, None, None])

        out = basic._replace(common_m=scores(common.m[:, :k]), common_n=scores(common.n[:, :k]))
        if contrastive:
            out = out._replace(
                exclusive_m=scores(unshared(values_m[:, :k], common.m[:, k:])),
                exclusive_n=scores(unshared(values_n[:, :k], common.n[:, k:])),
            )
        return out

    def _coattend(self, m: Tensor, n: Tensor, w_p: Tensor | None, values_m: Tensor, values_n: Tensor) -> CoAttentive:
        """Attention in both directions: with P laid out where that is faster, on a CPU while P is small, else fused."""
        entries = len(m) * m.shape[2:].numel() * n.shape[2:].numel()
        form, scale = self.form, self.affinity.scale
        if m.is_cuda or entries > MOST_ENTRIES:
            return coattend_fused(m, n, w_p, values_m, values_n, form=form, scale=scale)
        return coattend(values_m, values_n, affinity(m, n, w_p, form=form, scale=scale))

    def query(
        self, target: Tensor, *, kind: Tensor | None = None, target_is_n: bool | Tensor = False, identity: bool = False
    ) -> Tensor:
        """The target's side of the affinity, F_n^T W_P (Eq. 2), which does not depend on the related image.

        Args:
            target: features of the image whose maps are made, (C, H, W).
            kind: of the R pairs of the target and a related image, (R,), where there are three W_P.
            target_is_n: whether the target is image n of a pair, for all or (R,). It then meets W_P^T: F_n^T W_P^T F_m.
            identity: takes the identity for W_P, for all pairs; a classifier without a learnt one has no other.

        Returns:
            (HW, C), or (R, HW, C) where R pairs have a W_P each.
        """
        w_p = None if identity else self.affinity_weights(kind)
        if w_p is not None:
            if isinstance(target_is_n, Tensor):
                w_p = torch.where(target_is_n[:, None, None], w_p.mT, w_p)
            elif target_is_n:
                w_p = w_p.mT
        return affinity_query(target, w_p, form=self.form, scale=self.affinity.scale)

    def co_maps(
        self, query: Tensor, target: Tensor, related: Tensor, tag: int, passed: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        """Co-attentive activations of a class in a target with each related image, (R, H, W); a map is their mean.

        Args:
            query: of the target, the same for all its maps.
            target: features of the image whose map it is, (C, H, W).
            related: features of its related images, (R, C, H', W').
            tag: the class.
            passed: maps of the class in the related images for attention to average, see `multi_round`.
        """
        weight, bias = self.common_layer()
        of_tag = weight[tag, :, 0, 0], None if bias is None else bias[tag]
        each = multi_round(query, related, *of_tag, form=self.form, passed=passed)
        return each.unflatten(1, target.shape[1:])

    def contrastive_maps(self, query: Tensor, target: Tensor, others: Tensor, tag: int) -> Tensor:
        """Contrastive activations of a class in a target with each of Q images that lack it (section 4.5), (Q, H, W).

        Args:
            query, target, tag: as of `co_maps`.
            others: features of the images that lack the class, (Q, C, H', W').
        """
        weight, bias = self.common_layer()
        w_b = self.w_b.weight[0, :, 0, 0]
        of_tag = weight[tag, :, 0, 0] @ target.flatten(1), None if bias is None else bias[tag]
        each = contrastive_round(query, others, w_b, *of_tag, form=self.form)
        return each.unflatten(1, target.shape[1:])

    def forward(
        self,
        images_m: Tensor,
        images_n: Tensor,
        self_transforms: tuple[str, ...] = (),
        kind: Tensor | None = None,
        plain_m: Tensor | None = None,
        *,
        embedded: bool = False,
        attend: bool = True,
        attended: Attended = "partner",
        equivariance: Equivariance | None = None,
    ) -> BatchScores:
        """Scores of the pairs and of each self pair (m, tau m); one backbone pass embeds both images of a pair.

        Args:
            images_m, images_n: (B, 3, H, W), normalized.
            self_transforms: names out of SELF_TRANSFORMS. Self pairs take m's features from the pairs and have no
                contrastive term.
            kind: of the pairs, (B,), where there are three W_P.
            plain_m: m without color jitter, of which tau(m) is made (RELEASED_RECIPE, "Classifier"); None: no jitter.
            embedded: whether instead of images the backbone's outputs of them are given, (B, C, H, W).
            attend: False leaves out co-attention and all terms but the basic one.
            attended: as of `pair_scores`.
            equivariance: of the 2B images, those of m first, for equivariant attention, which needs images.
        """
        both = torch.cat([images_m, images_n])
        with self.backbone.watching(*(self.backbone.middle if equivariance else ())) as middle:
            features = self.standard(both if embedded else self.backbone(both))
        m, n = features.chunk(2)
        # A second split sums the affinity's gradient separately, which fixes the order of summation.
        compared = features.chunk(2)
        pairs = self.pair_scores(m, n, kind, attend=attend, attended=attended, compared=compared)
        # m is of the domain source in kind 1 alone; a self pair is of kind 0 or 1, by the domain of m.
        self_kind = None if kind is None else (kind == 1).long()
        selves = []
        for name in self_transforms:
            tau = self.features(transform(images_m if plain_m is None else plain_m, name))
            self_scores = self.pair_scores(
                m, tau, self_kind, attend=attend, attended=attended, contrastive=False, compared=(compared[0], tau)
            )
            selves.append(self_scores)
        if equivariance is None:
            return BatchScores(pairs, selves)
        return BatchScores(pairs, selves, *self._of_copies(both, features, middle, equivariance))

    def _of_copies(
        self, images: Tensor, features: Tensor, middle: list[Tensor], equivariance: Equivariance
    ) -> tuple[PairScores, EquivariantMaps]:
        """Basic scores of the images' smaller copies, and the maps of both at the copies' pixels."""
        copies = smaller_copies(images, equivariance.scale)
        with self.backbone.watching(*self.backbone.middle) as middle_of_copies:
            activations = self.activations(self.features(copies))

        def maps(images: Tensor, activations: Tensor, middle: list[Tensor]) -> RefinedMaps:
            tagged = of_tags(activations, equivariance.tags, equivariance.most)
            source, target = self.backbone.grids(images, tagged), pixel_grids(*copies.shape[2:])
            both = tagged, self.refined(images, tagged, middle)
            return RefinedMaps(*(resample(each, source, target) for each in both))

        of_images = maps(images, self.activations(features), middle)
        scores = PairScores(*pool(activations).chunk(2))
        return scores, EquivariantMaps(of_images, maps(copies, activations, middle_of_copies))


def _initial_w_p(width: int, kinds: Literal[1, 3], init: float | None) -> Tensor:
    w_p = torch.empty((width, width) if kinds == 1 else (kinds, width, width))
    if init is None:
        return nn.init.uniform_(w_p, -(width**-0.5), width**-0.5)
    return w_p.copy_(torch.eye(width) * init)

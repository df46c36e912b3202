"""The co-attention classifier (section 3.1): pairs of images -> class scores of own, shared and unshared semantics."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mcis.models.backbones import Backbone
from mcis.models.coattention import AffinityForm, CoAttentive, affinity, coattend, coattend_fused, unshared
from mcis.models.localization import affinity_query, contrastive_round, multi_round
from mcis.models.losses import PairScores

Attention = Literal["none", "co", "co+contrastive"]
Head = Literal["shared", "own"]
SELF_TRANSFORMS = ("flip", "x0.75", "x2")
MOST_ENTRIES = 2**26
"""Most entries of P, over a batch, for which P is laid out on a CPU: 256 MiB in float32."""


class ClassLayer(NamedTuple):
    """A linear layer from features to classes: weight (K, C, 1, 1), and bias (K,) or None."""

    weight: Tensor
    bias: Tensor | None


class BatchScores(NamedTuple):
    """Class scores of a batch: of its pairs, and of the self pairs (m, tau m) of each transformation tau."""

    pairs: PairScores
    selves: list[PairScores]


def pool(activations: Tensor) -> Tensor:
    """Global average pooling (Eq. 1): activation maps (B, K, H, W) -> scores (B, K)."""
    return activations.flatten(2).mean(dim=2)


def transform(images: Tensor, name: str) -> Tensor:
    """tau(I) of the self pairs: `flip` left-right, `x0.75` or `x2` bilinear scaling; (B, 3, H, W)."""
    if name == "flip":
        return images.flip(3)
    size = [round(s * float(name[1:])) for s in images.shape[2:]]
    return nn.functional.interpolate(images, size=size, mode="bilinear", align_corners=False)


def pair_kinds(source_m: Tensor, source_n: Tensor) -> Tensor:
    """Kinds of pairs, (B,): 0 target-target, 1 source-source, 2 one image of each domain.

    Args:
        source_m, source_n: whether the images are of the domain source, (B,).
    """
    return torch.where(source_m == source_n, source_m.long(), 2)


def seen_from_n(source: Tensor, of_related: Tensor, target: Literal["m", "n"] = "m") -> Tensor:
    """Whether a target is image n of its pairs, (R,): in pairs of two domains where it is of the domain source.

    Args:
        source: whether the target is of the domain source, ().
        of_related: whether the related images are, (R,).
        target: which image of a pair of one domain the target is.
    """
    return torch.where(source == of_related, target == "n", source)


class CoAttentionClassifier(nn.Module):
    """Backbone, class-aware layer phi, co-attention and contrastive co-attention.

    Args:
        backbone: the convolutional embedding, features F (B, C, H, W).
        classes: K.
        attention: which terms are computed; `none` is the basic classifier of the ablation.
        head: `shared` applies phi to co-attentive and contrastive features too (paper); `own` applies a second 1x1
            layer without bias to both (RELEASED_RECIPE, "Classifier").
        affinity, affinity_scale: form and scale of P, see `coattention.affinity`.
        affinity_init: W_P at the start: a multiple of the identity, or None for PyTorch's uniform +-1/sqrt(C).
        kinds: number of W_P: 1, or 3 for pairs of two domains (end of section 3.2), in the order target-target,
            source-source, target-source.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        classes: int,
        attention: Attention = "co+contrastive",
        head: Head = "shared",
        affinity: AffinityForm = "bilinear",
        affinity_scale: float = 1.0,
        affinity_init: float | None = None,
        kinds: Literal[1, 3] = 1,
    ):
        super().__init__()
        self.backbone = backbone
        self.attention, self.affinity, self.affinity_scale = attention, affinity, affinity_scale
        c = backbone.channels
        self.phi = nn.Conv2d(c, classes, 1)
        nn.init.normal_(self.phi.weight, std=(2 / classes) ** 0.5)
        nn.init.zeros_(self.phi.bias)  # type: ignore[arg-type]
        if attention != "none":
            self.w_p = nn.Parameter(torch.empty((c, c) if kinds == 1 else (kinds, c, c)))
            if affinity_init is None:
                nn.init.uniform_(self.w_p, -(c**-0.5), c**-0.5)
            else:
                self.w_p.data.copy_(torch.eye(c) * affinity_init)
            if head == "own":
                self.common_head = nn.Conv2d(c, classes, 1, bias=False)
        if attention == "co+contrastive":
            self.w_b = nn.Conv2d(c, 1, 1, bias=False)
        self.own_head = head == "own" and attention != "none"

    def common_layer(self) -> ClassLayer:
        """The layer for co-attentive and contrastive features: the second one where it was trained, else phi."""
        layer = self.common_head if self.own_head else self.phi
        return ClassLayer(layer.weight, layer.bias)

    def affinity_weights(self, kind: Tensor | None) -> Tensor:
        """W_P: the only one, (C, C), or the one for each pair's kind, (B,) -> (B, C, C).

        Raises:
            ValueError: there are three, and no kinds.
        """
        if self.w_p.ndim == 2:
            return self.w_p
        if kind is None:
            raise ValueError("a classifier with three W_P needs the kind of each pair")
        return self.w_p[kind]

    def pair_scores(
        self, f_m: Tensor, f_n: Tensor, kind: Tensor | None = None, *, contrastive: bool = True
    ) -> PairScores:
        """Scores of B pairs from features (B, C, H, W): own (Eq. 1), shared (Eq. 6) and unshared semantics (Eq. 10).

        All layers on the features are linear, so they are applied before attention: the values that attention averages
        are the K class activations and the output of W_B.

        Args:
            kind: of the pairs, (B,), where there are three W_P.
            contrastive: whether unshared semantics are scored, if the classifier has such a term.
        """
        basic = PairScores(pool(self.phi(f_m)), pool(self.phi(f_n)))
        if self.attention == "none":
            return basic
        weight, bias = self.common_layer()
        contrastive = contrastive and self.attention == "co+contrastive"
        layers = torch.cat([weight, self.w_b.weight]) if contrastive else weight
        values_m, values_n = (nn.functional.conv2d(f, layers) for f in (f_m, f_n))
        common = self._coattend(f_m, f_n, self.affinity_weights(kind), values_m, values_n)
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

    def _coattend(self, f_m: Tensor, f_n: Tensor, w_p: Tensor, values_m: Tensor, values_n: Tensor) -> CoAttentive:
        """Attention in both directions: with P laid out where that is faster, on a CPU while P is small, else fused."""
        entries = len(f_m) * f_m.shape[2:].numel() * f_n.shape[2:].numel()
        form, scale = self.affinity, self.affinity_scale
        if f_m.is_cuda or entries > MOST_ENTRIES:
            return coattend_fused(f_m, f_n, w_p, values_m, values_n, form=form, scale=scale)
        return coattend(values_m, values_n, affinity(f_m, f_n, w_p, form=form, scale=scale))

    def facing_weights(self, kind: Tensor | None, target_is_n: bool | Tensor) -> Tensor:
        """W_P as a target meets it, (C, C) or (R, C, C): transposed where the target is image n of the pair.

        Args:
            kind: of the R pairs of the target and a related image, (R,), where there are three W_P.
            target_is_n: for all pairs, or (R,).
        """
        w_p = self.affinity_weights(kind)
        if isinstance(target_is_n, Tensor):
            return torch.where(target_is_n[:, None, None], w_p.mT, w_p)
        return w_p.mT if target_is_n else w_p

    def query(
        self,
        target: Tensor,
        *,
        kind: Tensor | None = None,
        target_is_n: bool | Tensor = False,
        identity: bool = False,
    ) -> Tensor:
        """The target's side of the affinity, F_n^T W_P (Eq. 2), which does not depend on the related image.

        It may be computed once and handed to `co_map` and `contrastive_map` for all maps of the target (C, H, W).

        Args:
            kind, target_is_n: as of `facing_weights`.
            identity: takes the identity for W_P, for all pairs; a classifier without co-attention has no other.

        Returns:
            (HW, C), or (R, HW, C) where R pairs have a W_P each.
        """
        w_p = torch.eye(len(target)).to(target) if identity else self.facing_weights(kind, target_is_n)
        return affinity_query(target, w_p, form=self.affinity, scale=self.affinity_scale)

    def co_map(
        self,
        target: Tensor,
        related: Tensor,
        tag: int,
        *,
        kind: Tensor | None = None,
        target_is_n: bool | Tensor = False,
        query: Tensor | None = None,
    ) -> Tensor:
        """Mean co-attentive activation of a class in a target over its related images (section 3.2), (H, W).

        Args:
            target: features of the image whose map it is, (C, H, W).
            related: features of its related images, (R, C, H', W').
            tag: the class.
            kind: of the R pairs, (R,), where there are three W_P.
            target_is_n: whether the target is image n of a pair, for all pairs or (R,). Its affinity is then the
                transpose, F_n^T W_P^T F_m. That holds for an image of the domain source and one of the domain target.
            query: `query` of the target, where several maps share it; takes the place of `kind` and `target_is_n`.
        """
        query = self.query(target, kind=kind, target_is_n=target_is_n) if query is None else query
        weight, bias = self.common_layer()
        of_tag = weight[tag, :, 0, 0], None if bias is None else bias[tag]
        return multi_round(query, related, *of_tag, form=self.affinity).view(target.shape[1:])

    def contrastive_map(
        self,
        target: Tensor,
        others: Tensor,
        tag: int,
        *,
        kind: Tensor | None = None,
        target_is_n: bool | Tensor = False,
        query: Tensor | None = None,
    ) -> Tensor:
        """Mean contrastive activation of a class in a target against images that lack the class (section 4.5), (H, W).

        Args:
            target: features of the image whose map it is, (C, H, W).
            others: features of the images that lack the class, (Q, C, H', W').
            tag: the class.
            kind, target_is_n, query: as of `co_map`, for Q pairs.
        """
        query = self.query(target, kind=kind, target_is_n=target_is_n) if query is None else query
        weight, bias = self.common_layer()
        w_b = self.w_b.weight[0, :, 0, 0]
        of_tag = weight[tag, :, 0, 0] @ target.flatten(1), None if bias is None else bias[tag]
        return contrastive_round(query, others, w_b, *of_tag, form=self.affinity).view(target.shape[1:])

    def forward(
        self,
        images_m: Tensor,
        images_n: Tensor,
        self_transforms: tuple[str, ...] = (),
        kind: Tensor | None = None,
        plain_m: Tensor | None = None,
    ) -> BatchScores:
        """Scores of the pairs and of each self pair (m, tau m); one backbone pass embeds both images of a pair.

        Args:
            images_m, images_n: (B, 3, H, W), normalized.
            self_transforms: names out of SELF_TRANSFORMS. Self pairs take m's features from the pairs and have no
                contrastive term.
            kind: of the pairs, (B,), where there are three W_P.
            plain_m: m without color jitter, of which tau(m) is made (RELEASED_RECIPE, "Classifier"); None if there is
                no jitter.
        """
        f_m, f_n = self.backbone(torch.cat([images_m, images_n])).chunk(2)
        pairs = self.pair_scores(f_m, f_n, kind)
        # m is of the domain source in kind 1 alone; a self pair is of kind 0 or 1, by the domain of m.
        self_kind = None if kind is None else (kind == 1).long()
        plain = images_m if plain_m is None else plain_m
        selves = [
            self.pair_scores(f_m, self.backbone(transform(plain, name)), self_kind, contrastive=False)
            for name in self_transforms
        ]
        return BatchScores(pairs, selves)

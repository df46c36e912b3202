"""The classifier and its maps as the equations stand: what the project's forms are measured against.

Each image of a pair is embedded by a backbone pass of its own, P and both of its normalizations are laid out, and
co-attentive and contrastive features have all C channels.
"""

from torch import Tensor
from torch.nn import functional

from mcis.models.classifier import CoAttentionClassifier, pool, transform
from mcis.models.classifier_losses import PairScores
from mcis.models.coattention import CoAttentive, affinity, coattend, unshared


def co_attentive(model: CoAttentionClassifier, f_m: Tensor, f_n: Tensor) -> CoAttentive:
    """F_m^{m∩n} and F_n^{m∩n}, (B, C, H, W) (Eq. 2-4)."""
    return coattend(f_m, f_n, affinity(f_m, f_n, model.w_p, form=model.form, scale=model.affinity.scale))


def pair_scores(
    model: CoAttentionClassifier, images_m: Tensor, images_n: Tensor, *, contrastive: bool = True
) -> PairScores:
    """All scores of pairs of images, (B, K) each (Eq. 1, 5, 9)."""
    f_m, f_n = model.backbone(images_m), model.backbone(images_n)
    weight, bias = model.common_layer()

    def head(features: Tensor) -> Tensor:
        return pool(functional.conv2d(features, weight, bias))

    seen_m, seen_n = co_attentive(model, f_m, f_n)
    scores = PairScores(pool(model.phi(f_m)), pool(model.phi(f_n)), head(seen_m), head(seen_n))
    if not contrastive:
        return scores
    only_m, only_n = (unshared(f, model.w_b(seen)) for f, seen in ((f_m, seen_m), (f_n, seen_n)))
    return scores._replace(exclusive_m=head(only_m), exclusive_n=head(only_n))


def forward(
    model: CoAttentionClassifier, images_m: Tensor, images_n: Tensor, self_transforms: tuple[str, ...]
) -> tuple[PairScores, list[PairScores]]:
    """What `CoAttentionClassifier.forward` returns; every self pair embeds m again."""
    selves = [pair_scores(model, images_m, transform(images_m, t), contrastive=False) for t in self_transforms]
    return pair_scores(model, images_m, images_n), selves


def co_maps(model: CoAttentionClassifier, image: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Activations (K, h, w) of all classes on both images' co-attentive features, from a forward of the pair."""
    seen = co_attentive(model, model.backbone(image[None]), model.backbone(other[None]))
    own, others = (functional.conv2d(each, *model.common_layer())[0] for each in seen)
    return own, others

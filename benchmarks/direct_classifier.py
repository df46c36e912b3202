"""The classifier and its maps computed directly by the paper's equations, as a reference for faster forms.

Each image of a pair has its own backbone pass, P and both normalizations are computed in full, and co-attentive and
contrastive features have all C channels.
"""

from torch import Tensor
from torch.nn import functional

from mcis.models.classifier import CoAttentionClassifier, pool, transform
from mcis.models.classifier_losses import PairScores
from mcis.models.coattention import CoAttentive, affinity, coattend, unshared


def attend(model: CoAttentionClassifier, f_m: Tensor, f_n: Tensor) -> CoAttentive:
    """Computes F_m^{m∩n} and F_n^{m∩n}, (B, C, H, W) each (Eq. 2-4)."""
    return coattend(f_m, f_n, affinity(f_m, f_n, model.w_p, form=model.form, scale=model.affinity.scale))


def pair_scores(
    model: CoAttentionClassifier, images_m: Tensor, images_n: Tensor, *, contrastive: bool = True
) -> PairScores:
    """Computes all scores of pairs of images, (B, K) each (Eq. 1, 5, 9)."""
    f_m = model.backbone(images_m)
    f_n = model.backbone(images_n)
    weight, bias = model.attention_layer()

    def attention_scores(features: Tensor) -> Tensor:
        return pool(functional.conv2d(features, weight, bias))

    attentive_m, attentive_n = attend(model, f_m, f_n)
    scores = PairScores(
        pool(model.phi(f_m)), pool(model.phi(f_n)), attention_scores(attentive_m), attention_scores(attentive_n)
    )
    if not contrastive:
        return scores

    contrastive_m = unshared(f_m, model.w_b(attentive_m))
    contrastive_n = unshared(f_n, model.w_b(attentive_n))
    return scores._replace(contrastive_m=attention_scores(contrastive_m), contrastive_n=attention_scores(contrastive_n))


def forward(
    model: CoAttentionClassifier, images_m: Tensor, images_n: Tensor, self_transforms: tuple[str, ...]
) -> tuple[PairScores, list[PairScores]]:
    """Computes what `CoAttentionClassifier.forward` returns. Every self pair embeds m again."""
    self_scores = [pair_scores(model, images_m, transform(images_m, t), contrastive=False) for t in self_transforms]
    return pair_scores(model, images_m, images_n), self_scores


def co_maps(model: CoAttentionClassifier, image: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the activations (K, h, w) of all classes on both images' co-attentive features."""
    attentive, attentive_other = attend(model, model.backbone(image[None]), model.backbone(other[None]))
    weight, bias = model.attention_layer()
    activations = functional.conv2d(attentive, weight, bias)[0]
    activations_other = functional.conv2d(attentive_other, weight, bias)[0]
    return activations, activations_other

"""Losses of the classifier (Eq. 1, 5, 9) and of the segmenter, per sample or as a sum.

A worker sees a part of the batch. Sums over its samples, divided by the count of the whole batch, add up over workers
to the loss of the whole batch for any number of workers: gradients weigh samples, not workers.
"""

from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn import functional

from mcis.datasets.classes import IGNORE

LossReduction = Literal["paper", "released"]


class PairScores(NamedTuple):
    """Class scores (B, K) of a batch of pairs before the sigmoid; a term that is not computed is None."""

    basic_m: Tensor
    basic_n: Tensor
    common_m: Tensor | None = None
    common_n: Tensor | None = None
    exclusive_m: Tensor | None = None
    exclusive_n: Tensor | None = None


def sigmoid_ce(scores: Tensor, tags: Tensor) -> Tensor:
    """Sigmoid cross entropy L_CE(s, l), mean over the K classes, of each image: (B, K), (B, K) -> (B,)."""
    return functional.binary_cross_entropy_with_logits(scores, tags, reduction="none").mean(dim=1)


def pair_losses(
    scores: PairScores, tags_m: Tensor, tags_n: Tensor, *, loss_reduction: LossReduction
) -> dict[str, Tensor]:
    """The loss terms of each pair of a batch, (B,) per term; their means over the batch are the terms of Eq. 10.

    Args:
        scores: of the pairs.
        tags_m, tags_n: l_m and l_n, (B, K) of 0 and 1, float.
        loss_reduction: `paper` adds the terms of both images; `released` takes the mean over the 2B images for basic
            and common, so the contrastive term, the mean over the images m plus that over the images n, counts twice
            as much per image (RELEASED_RECIPE, "Classifier").

    Returns:
        `basic`: L_CE(s_m, l_m) + L_CE(s_n, l_n) (Eq. 1). `common`: the same of the common scores against l_m ∩ l_n
        (Eq. 5). `contrastive_m` and `contrastive_n`: s^{m\\n} against l_m \\ l_n, and s^{n\\m} against l_n \\ l_m
        (Eq. 9). A term without scores is absent.
    """
    half = 0.5 if loss_reduction == "released" else 1.0
    common = tags_m * tags_n
    terms = {"basic": half * (sigmoid_ce(scores.basic_m, tags_m) + sigmoid_ce(scores.basic_n, tags_n))}
    if scores.common_m is not None and scores.common_n is not None:
        terms["common"] = half * (sigmoid_ce(scores.common_m, common) + sigmoid_ce(scores.common_n, common))
    if scores.exclusive_m is not None and scores.exclusive_n is not None:
        terms["contrastive_m"] = sigmoid_ce(scores.exclusive_m, tags_m - common)
        terms["contrastive_n"] = sigmoid_ce(scores.exclusive_n, tags_n - common)
    return terms


def pixel_ce(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, a sum over labeled pixels: logits (B, K + 1, H, W), labels (B, H, W), 255 where unlabeled."""
    return functional.cross_entropy(logits, labels.long(), ignore_index=IGNORE, reduction="sum")


def presence_ce(in_image: Tensor, labels: Tensor) -> Tensor:
    """Sigmoid cross entropy of which classes a crop's labels hold, mean over the K classes, summed over the crops.

    Args:
        in_image: logits of each class being there, (B, K).
        labels: (B, H, W), 0 = background, k + 1 = class k, 255 where unlabeled.
    """
    there = in_image.new_zeros(len(labels), 256).scatter_(1, labels.flatten(1).long(), 1.0)
    return sigmoid_ce(in_image, there[:, 1 : in_image.shape[1] + 1]).sum()

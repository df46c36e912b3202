"""Losses of the classifier (Eq. 1, 6, 10) and of the segmenter, as sums over samples with the count they are means of.

A worker sees a part of the batch. Sums over its samples, divided by the whole batch's count, add up over workers to
the loss of the whole batch, whatever the split: gradients weigh samples, not workers.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

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
    """Sigmoid cross entropy L_CE(s, l), mean over the K classes, one value an image: (B, K), (B, K) -> (B,)."""
    return functional.binary_cross_entropy_with_logits(scores, tags, reduction="none").mean(dim=1)


def pair_losses(scores: PairScores, tags_m: Tensor, tags_n: Tensor, *, reduction: LossReduction) -> dict[str, Tensor]:
    """Each loss term of a batch of pairs, (B,) a term: its mean over the whole batch's pairs is the term of Eq. 5.

    basic: L_CE(s_m, l_m) + L_CE(s_n, l_n) (Eq. 1); common: against l_m ∩ l_n (Eq. 6); contrastive: s^{m\\n}
    against l_m \\ l_n and s^{n\\m} against l_n \\ l_m (Eq. 10).

    Args:
        tags_m, tags_n: l_m and l_n, (B, K) of 0 and 1, float.
        reduction: `paper` adds both sides; `released` takes the mean over the 2B images for basic and common, so that
            the contrastive term, the mean over m plus the mean over n, counts twice as much per image.
    """
    half = 0.5 if reduction == "released" else 1.0
    common = tags_m * tags_n
    terms = {"basic": half * (sigmoid_ce(scores.basic_m, tags_m) + sigmoid_ce(scores.basic_n, tags_n))}
    if scores.common_m is not None and scores.common_n is not None:
        terms["common"] = half * (sigmoid_ce(scores.common_m, common) + sigmoid_ce(scores.common_n, common))
    if scores.exclusive_m is not None and scores.exclusive_n is not None:
        terms["contrastive_m"] = sigmoid_ce(scores.exclusive_m, tags_m - common)
        terms["contrastive_n"] = sigmoid_ce(scores.exclusive_n, tags_n - common)
    return terms


def pixel_ce(logits: Tensor, labels: Tensor, *, ignore: int = 255) -> tuple[Tensor, Tensor]:
    """Cross entropy over the labeled pixels: logits (B, K + 1, H, W), labels (B, H, W) -> (sum, number of pixels)."""
    total = functional.cross_entropy(logits, labels.long(), ignore_index=ignore, reduction="sum")
    return total, (labels != ignore).sum().to(torch.float32)

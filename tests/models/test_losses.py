"""Losses against Eq. 1, 5 and 9 written as loops in float64, their gradients, and sums that any split adds up to."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcis.datasets.classes import IGNORE
from mcis.models.losses import LossReduction, PairScores, pair_losses, pixel_ce, presence_ce, sigmoid_ce

seeds = st.integers(0, 2**32 - 1)
TERMS = ["basic", "common", "contrastive_m", "contrastive_n"]


def l_ce(scores: Tensor, tags: list[int]) -> float:
    """Sigmoid cross entropy of one image, mean over the classes."""
    losses = []
    for s, tag in zip(scores.tolist(), tags, strict=True):
        probability = 1 / (1 + math.exp(-s))
        losses.append(-math.log(probability if tag else 1 - probability))
    return sum(losses) / len(losses)


def drawn(seed: int, batch: int, classes: int) -> tuple[PairScores, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    scores = PairScores(*torch.from_numpy(rng.normal(scale=2, size=(6, batch, classes))))
    tags_m, tags_n = torch.from_numpy(rng.integers(0, 2, (2, batch, classes)).astype(np.float64))
    return scores, tags_m, tags_n


def test_sigmoid_ce_of_certain_scores_is_finite_and_linear() -> None:
    scores = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], requires_grad=True)
    losses = sigmoid_ce(scores, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert losses.tolist() == [0, 1e4]
    losses.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 0], [-0.5, 0.5]]


@given(seeds, st.integers(1, 4), st.integers(1, 5), st.sampled_from(["paper", "released"]))
def test_the_terms_are_equations_1_6_and_10(seed: int, batch: int, classes: int, reduction: LossReduction) -> None:
    s, tags_m, tags_n = drawn(seed, batch, classes)
    terms = pair_losses(s, tags_m, tags_n, loss_reduction=reduction)
    assert list(terms) == TERMS
    assert s.common_m is not None
    assert s.common_n is not None
    assert s.exclusive_m is not None
    assert s.exclusive_n is not None
    for b in range(batch):
        l_m, l_n = tags_m[b].int().tolist(), tags_n[b].int().tolist()
        both = [m & n for m, n in zip(l_m, l_n, strict=True)]
        only_m = [int(m == 1 and n == 0) for m, n in zip(l_m, l_n, strict=True)]
        only_n = [int(n == 1 and m == 0) for m, n in zip(l_m, l_n, strict=True)]
        expected = {
            "basic": l_ce(s.basic_m[b], l_m) + l_ce(s.basic_n[b], l_n),
            "common": l_ce(s.common_m[b], both) + l_ce(s.common_n[b], both),
            "contrastive_m": l_ce(s.exclusive_m[b], only_m),
            "contrastive_n": l_ce(s.exclusive_n[b], only_n),
        }
        if reduction == "released":  # means over the 2B images, but the contrastive term's over the B of each side
            expected["basic"] /= 2
            expected["common"] /= 2
        assert {name: values[b].item() for name, values in terms.items()} == pytest.approx(expected)


def test_what_is_not_computed_has_no_term() -> None:
    scores, tags_m, tags_n = drawn(1, 2, 3)
    basic = PairScores(scores.basic_m, scores.basic_n)
    assert list(pair_losses(basic, tags_m, tags_n, loss_reduction="paper")) == TERMS[:1]
    common = basic._replace(common_m=scores.common_m, common_n=scores.common_n)
    assert list(pair_losses(common, tags_m, tags_n, loss_reduction="paper")) == TERMS[:2]


@pytest.mark.parametrize(("reduction", "factor"), [("paper", 1.0), ("released", 0.5)])
def test_each_score_is_pulled_by_probability_minus_label(reduction: LossReduction, factor: float) -> None:
    scores, tags_m, tags_n = drawn(7, 3, 4)
    leaves = PairScores(*(None if s is None else s.clone().requires_grad_() for s in scores))  # type: ignore[arg-type]
    torch.stack(list(pair_losses(leaves, tags_m, tags_n, loss_reduction=reduction).values())).sum().backward()
    both = torch.minimum(tags_m, tags_n)
    targets = [tags_m, tags_n, both, both, (tags_m > tags_n).double(), (tags_n > tags_m).double()]
    shares = [factor, factor, factor, factor, 1.0, 1.0]
    for leaf, target, weight in zip(leaves, targets, shares, strict=True):
        assert leaf is not None
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, weight * (torch.sigmoid(leaf.detach()) - target) / 4)


# --- the segmenter's


@given(seeds, st.integers(1, 2), st.integers(2, 4))
def test_pixel_ce_sums_over_the_labeled_pixels(seed: int, batch: int, labels: int) -> None:
    """Its gradient is probability minus label, and zero where there is none."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(scale=3, size=(batch, labels, 3, 2))).requires_grad_()
    truth = torch.from_numpy(rng.choice([*range(labels), IGNORE], (batch, 3, 2)).astype(np.uint8))
    total = pixel_ce(logits, truth)
    total.backward()
    expected, gradient = 0.0, torch.softmax(logits.detach(), dim=1)
    for b, y, x in np.ndindex(batch, 3, 2):
        label = int(truth[b, y, x])
        if label == IGNORE:
            gradient[b, :, y, x] = 0
        else:
            expected -= math.log(gradient[b, label, y, x])
            gradient[b, label, y, x] -= 1
    assert total.item() == pytest.approx(expected)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, gradient)


@given(seeds, st.integers(1, 3), st.integers(1, 4))
def test_presence_ce_is_that_of_the_classes_that_a_crop_holds(seed: int, batch: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.choice([*range(classes + 1), IGNORE], (batch, 2, 3)).astype(np.uint8)
    scores = rng.normal(size=(batch, classes))
    expected = 0.0
    for b, k in np.ndindex(batch, classes):
        chance = 1 / (1 + math.exp(-scores[b, k]))
        expected -= math.log(chance if (labels[b] == k + 1).any() else 1 - chance) / classes
    assert presence_ce(torch.from_numpy(scores), torch.from_numpy(labels)).item() == pytest.approx(expected)

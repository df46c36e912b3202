"""Losses of the classifier against Eq. 1, 5 and 9 written as loops in float64, their gradients and their weights."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.models.classifier_losses import (
    LOSSES,
    ContrastiveLossConfig,
    LossConfig,
    LossInputs,
    PairScores,
    PaperLossConfig,
    classifier_loss,
    weighted_losses,
)

seeds = st.integers(0, 2**32 - 1)
VALUES = {"basic": PaperLossConfig(), "co_attention": PaperLossConfig(), "contrastive": ContrastiveLossConfig()}


def cross_entropy(scores: Tensor, tags: list[int]) -> float:
    """Sigmoid cross entropy of one image, mean over the classes."""
    losses = []
    for score, tag in zip(scores.tolist(), tags, strict=True):
        probability = 1 / (1 + math.exp(-score))
        losses.append(-math.log(probability if tag else 1 - probability))
    return sum(losses) / len(losses)


def drawn(seed: int, batch: int, classes: int) -> LossInputs:
    rng = np.random.default_rng(seed)
    scores = PairScores(*torch.from_numpy(rng.normal(scale=2, size=(6, batch, classes))))
    tags_m, tags_n = torch.from_numpy(rng.integers(0, 2, (2, batch, classes)).astype(np.float64))
    features_m, features_n = torch.from_numpy(rng.normal(size=(2, batch, 3, 2, 2)))
    return LossInputs(scores, tags_m, tags_n, features_m, features_n)


def losses_of_pair(inputs: LossInputs, b: int) -> dict[str, float]:
    """The losses of pair b, computed class by class. Eq. 5 does not count pairs of a negative, which has no label."""
    scores = inputs.scores
    assert scores.co_attention_m is not None
    assert scores.co_attention_n is not None
    assert scores.contrastive_m is not None
    assert scores.contrastive_n is not None

    l_m = inputs.tags_m[b].int().tolist()
    l_n = inputs.tags_n[b].int().tolist()
    shared = [int(m == 1 and n == 1) for m, n in zip(l_m, l_n, strict=True)]
    only_m = [int(m == 1 and n == 0) for m, n in zip(l_m, l_n, strict=True)]
    only_n = [int(m == 0 and n == 1) for m, n in zip(l_m, l_n, strict=True)]
    common = cross_entropy(scores.co_attention_m[b], shared) + cross_entropy(scores.co_attention_n[b], shared)
    return {
        "basic": cross_entropy(scores.basic_m[b], l_m) + cross_entropy(scores.basic_n[b], l_n),
        "co_attention": common if any(l_m) and any(l_n) else 0.0,
        "contrastive": cross_entropy(scores.contrastive_m[b], only_m) + cross_entropy(scores.contrastive_n[b], only_n),
    }


@given(seeds, st.integers(1, 4), st.integers(1, 5))
def test_losses_are_sums_over_the_pairs_of_the_papers_equations(seed: int, batch: int, classes: int) -> None:
    inputs = drawn(seed, batch, classes)
    losses = weighted_losses(inputs, VALUES, epoch=0)
    assert list(losses) == ["basic", "co_attention", "contrastive"]

    pairs = [losses_of_pair(inputs, b) for b in range(batch)]
    for name, total in losses.items():
        assert total.item() == pytest.approx(sum(pair[name] for pair in pairs))


def test_a_negative_searches_no_common_class_and_leaves_its_partner_all_labels() -> None:
    """Its other labels are 0: pairs of the classifier train it by Eq. 1 and 9, whether it is m or n."""
    inputs = drawn(3, 2, 3)
    tags = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    leaves = [scores.clone().requires_grad_() for scores in inputs.scores if scores is not None]
    inputs = inputs._replace(scores=PairScores(*leaves), tags_m=tags, tags_n=tags.flip(0))
    losses = weighted_losses(inputs, VALUES, epoch=0)
    assert losses["co_attention"] == 0
    torch.stack(list(losses.values())).sum().backward()

    none = torch.zeros_like(tags)
    targets = (tags, tags.flip(0), None, None, tags, tags.flip(0))
    for leaf, target in zip(leaves, targets, strict=True):
        expected = none if target is None else (torch.sigmoid(leaf.detach()) - target) / 3
        torch.testing.assert_close(leaf.grad, expected)


def test_a_loss_without_scores_is_absent() -> None:
    inputs = drawn(1, 2, 3)
    basic = PairScores(inputs.scores.basic_m, inputs.scores.basic_n)
    assert list(weighted_losses(inputs._replace(scores=basic), VALUES, epoch=0)) == ["basic"]
    common = inputs.scores._replace(contrastive_m=None, contrastive_n=None)
    assert list(weighted_losses(inputs._replace(scores=common), VALUES, epoch=0)) == ["basic", "co_attention"]


def test_gradients_are_probability_minus_label() -> None:
    inputs = drawn(7, 3, 4)
    leaves = [scores.clone().requires_grad_() for scores in inputs.scores if scores is not None]
    losses = weighted_losses(inputs._replace(scores=PairScores(*leaves)), VALUES, epoch=0)
    torch.stack(list(losses.values())).sum().backward()

    shared = torch.minimum(inputs.tags_m, inputs.tags_n)
    only_m = (inputs.tags_m > inputs.tags_n).double()
    only_n = (inputs.tags_n > inputs.tags_m).double()
    targets = [inputs.tags_m, inputs.tags_n, shared, shared, only_m, only_n]
    for leaf, target in zip(leaves, targets, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, (torch.sigmoid(leaf.detach()) - target) / 4)


def test_a_weight_multiplies_its_loss() -> None:
    inputs = drawn(2, 3, 4)
    plain = weighted_losses(inputs, VALUES, epoch=0)
    halved = weighted_losses(inputs, VALUES | {"basic": PaperLossConfig(weight=0.5)}, epoch=0)
    assert halved["basic"] == plain["basic"] / 2
    assert halved["contrastive"] == plain["contrastive"]


def test_a_loss_counts_from_its_first_epoch() -> None:
    """Before, it is multiplied by 0, so that its layers have gradients."""
    inputs = drawn(2, 3, 4)
    values = VALUES | {"contrastive": ContrastiveLossConfig(from_epoch=2)}
    assert weighted_losses(inputs, values, epoch=1)["contrastive"] == 0
    assert weighted_losses(inputs, values, epoch=2)["contrastive"] > 0


@pytest.mark.parametrize(("unshared_m", "unshared_n"), [(True, False), (False, True), (False, False)])
def test_a_side_without_unshared_tags_is_ignored_if_configured(unshared_m: bool, unshared_n: bool) -> None:
    inputs = drawn(3, 2, 4)._replace(unshared_m=unshared_m, unshared_n=unshared_n)
    shared = inputs.tags_m * inputs.tags_n
    expected = 0.0
    for b in range(2):
        if unshared_m and inputs.scores.contrastive_m is not None:
            expected += cross_entropy(inputs.scores.contrastive_m[b], (inputs.tags_m - shared)[b].int().tolist())
        if unshared_n and inputs.scores.contrastive_n is not None:
            expected += cross_entropy(inputs.scores.contrastive_n[b], (inputs.tags_n - shared)[b].int().tolist())

    values = {"contrastive": ContrastiveLossConfig(needs_unshared=True)}
    assert weighted_losses(inputs, values, epoch=0)["contrastive"].item() == pytest.approx(expected)
    every_side = weighted_losses(inputs, VALUES, epoch=0)["contrastive"]
    assert every_side.item() > expected


def test_a_disabled_loss_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    @classifier_loss()
    def failing(inputs: LossInputs) -> Tensor:
        raise AssertionError

    monkeypatch.setitem(LOSSES.data, "failing", failing)
    assert weighted_losses(drawn(1, 2, 3), {"failing": LossConfig()}, epoch=0) == {}


def test_a_loss_that_is_no_scalar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @classifier_loss()
    def per_pair(inputs: LossInputs) -> Tensor:
        return inputs.tags_m.sum(dim=1)

    monkeypatch.setitem(LOSSES.data, "per_pair", per_pair)
    with pytest.raises(UserError, match=r"per_pair has shape \(2,\)") as raised:
        weighted_losses(drawn(1, 2, 3), {"per_pair": LossConfig(weight=1)}, epoch=0)
    assert raised.value.expected == "a scalar, the sum over the pairs"

"""Cross entropies against loops in float64, and their gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcis.datasets.classes import IGNORE
from mcis.models.losses import pixel_ce, presence_ce, sigmoid_ce

seeds = st.integers(0, 2**32 - 1)


def test_sigmoid_ce_of_large_scores_is_finite_and_linear() -> None:
    scores = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], requires_grad=True)
    losses = sigmoid_ce(scores, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert losses.tolist() == [0, 1e4]

    losses.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 0], [-0.5, 0.5]]


@given(seeds, st.integers(1, 2), st.integers(2, 4))
def test_pixel_ce_is_the_sum_over_labeled_pixels(seed: int, batch: int, labels: int) -> None:
    """Its gradient is probability minus label at labeled pixels, and zero at ignored ones."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(scale=3, size=(batch, labels, 3, 2))).requires_grad_()
    truth = torch.from_numpy(rng.choice([*range(labels), IGNORE], (batch, 3, 2)).astype(np.uint8))
    total = pixel_ce(logits, truth)
    total.backward()

    expected = 0.0
    gradient = torch.softmax(logits.detach(), dim=1)
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
def test_presence_ce_compares_with_the_classes_in_each_crop(seed: int, batch: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.choice([*range(classes + 1), IGNORE], (batch, 2, 3)).astype(np.uint8)
    logits = rng.normal(size=(batch, classes))

    expected = 0.0
    for b, k in np.ndindex(batch, classes):
        probability = 1 / (1 + math.exp(-logits[b, k]))
        is_present = (labels[b] == k + 1).any()
        expected -= math.log(probability if is_present else 1 - probability) / classes
    assert presence_ce(torch.from_numpy(logits), torch.from_numpy(labels)).item() == pytest.approx(expected)

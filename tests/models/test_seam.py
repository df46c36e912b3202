"""Equivariant attention against the formulas of the public code, value by value in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from mcis.models.backbones import Layer
from mcis.models.grids import Layout
from mcis.models.seam import (
    EquivariantMaps,
    PixelCorrelation,
    RefinedMaps,
    cross_equivariant_loss,
    equivariant_loss,
    keep_strongest,
    min_max_normalized,
    propagated,
    smaller_copies,
    tagged_maps,
)

Array = NDArray[np.float64]
E = 1e-5
TAGS = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.float64)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers(*channels: int) -> tuple[Layer, ...]:
    return tuple(Layer("", width, Layout(8)) for width in channels)


def ranged(maps: Array) -> Array:
    """Maps (K, H, W), each clipped at 0 and min-max normalized."""
    maps = np.maximum(maps, 0)
    low = maps.min(axis=(1, 2), keepdims=True)
    high = maps.max(axis=(1, 2), keepdims=True)
    return np.maximum(maps - low - E, 0) / (high - low + E)


def alone(maps: Array) -> Array:
    """Background and K classes, (1 + K, H, W), with 0 for all but the strongest class of a position."""
    top = maps.max(axis=0, keepdims=True)
    return np.concatenate([1 - top, np.where(maps == top, maps, 0)])


def of_all_classes(maps: Tensor, tags: Tensor) -> Array:
    """Maps of tagged classes (T, H, W) as maps of all classes, (K, H, W), with zeros for the others."""
    out = np.zeros((len(tags), *maps.shape[1:]))
    out[tags.bool().numpy()] = maps[: int(tags.sum())]
    return out


def correlated(scores: Array, features: Array) -> Array:
    """Scores (V, N) averaged with the cosines of features (C, N) as weights."""
    unit = features / (np.sqrt((features**2).sum(axis=0)) + E)
    out = np.zeros_like(scores)
    for j in range(scores.shape[1]):
        weights = [max(float(unit[:, i] @ unit[:, j]), 0) for i in range(scores.shape[1])]
        for v in range(len(scores)):
            out[v, j] = sum(w * s for w, s in zip(weights, scores[v], strict=True)) / (sum(weights) + E)
    return out


def test_copies_are_smaller_by_the_factor() -> None:
    assert smaller_copies(drawn(0, 1, 3, 448, 320), 0.3).shape == (1, 3, 134, 96)
    assert smaller_copies(drawn(0, 1, 3, 2, 2), 0.3).shape == (1, 3, 1, 1)


def test_maps_of_tags_are_the_tagged_classes_in_order() -> None:
    activations = drawn(1, 2, 5, 3, 4)
    maps = tagged_maps(activations, TAGS, 2)
    assert torch.equal(maps[0], activations[0, [1, 3]])
    assert torch.equal(maps[1, 0], activations[1, 4])
    assert not maps[1, 1].any()
    assert tagged_maps(activations, torch.zeros(2, 5), 1).shape == (2, 1, 3, 4)


@given(st.integers(0, 999), st.integers(1, 4))
def test_maps_are_normalized_and_the_strongest_is_kept(seed: int, classes: int) -> None:
    maps = drawn(seed, 1, classes, 3, 4) + 0.5
    expected = ranged(maps[0].numpy())
    np.testing.assert_allclose(min_max_normalized(maps)[0], expected, atol=1e-12)
    np.testing.assert_allclose(keep_strongest(min_max_normalized(maps))[0], alone(expected), atol=1e-12)


@given(st.integers(0, 999))
def test_scores_are_averaged_over_similar_positions(seed: int) -> None:
    scores = drawn(seed, 1, 3, 3, 4)
    features = drawn(seed + 1, 1, 5, 3, 4)
    expected = correlated(scores[0].flatten(1).numpy(), features[0].flatten(1).numpy())
    np.testing.assert_allclose(propagated(scores, features)[0].flatten(1), expected, atol=1e-12)


def test_pixel_correlation_is_that_of_the_public_code() -> None:
    """Compared on images that are tagged with all classes. Only the module's own layers receive a gradient."""
    torch.manual_seed(0)
    module = PixelCorrelation(layers(4, 6)).double()
    assert {name: tuple(p.shape) for name, p in PixelCorrelation(layers(512, 1024)).named_parameters()} == {
        "f8_3.weight": (64, 512, 1, 1),
        "f8_4.weight": (128, 1024, 1, 1),
        "f9.weight": (192, 195, 1, 1),
    }
    given_tensors = [drawn(n, 2, channels, 3, 4).requires_grad_() for n, channels in enumerate((5, 3, 4, 6))]
    refined = module(*given_tensors)
    activations, colors, low, high = (tensor.detach().flatten(2).numpy() for tensor in given_tensors)
    weights = {name: p.detach().numpy()[:, :, 0, 0] for name, p in module.named_parameters()}
    for b in range(2):
        positive = np.maximum(activations[b], 0)
        relative = np.maximum(positive - E, 0) / (positive.max(axis=1, keepdims=True) + E)
        reduced = [np.maximum(weights[f"f8_{n}.weight"] @ x[b], 0) for n, x in ((3, low), (4, high))]
        features = weights["f9.weight"] @ np.concatenate([colors[b], *reduced])
        expected = correlated(alone(relative.reshape(5, 3, 4)).reshape(6, 12), features)
        np.testing.assert_allclose(refined[b].detach().flatten(1), expected, atol=1e-10)
    refined.square().sum().backward()
    assert all(tensor.grad is None for tensor in given_tensors[:1] + given_tensors[2:])
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("hard", [0.02, 0.2, 1.0])
def test_losses_are_those_of_the_public_code_over_all_classes(hard: float) -> None:
    """The reference multiplies the maps of all K classes by the tags; the functions get those of the tags only."""
    maps, copies = (tagged_maps(drawn(seed, 2, 5, 3, 4), TAGS, 2) for seed in (1, 2))
    refined, refined_copies = (drawn(seed, 2, 3, 3, 4).abs() for seed in (3, 4))
    for each in (refined, refined_copies):
        each[1, 2] = 0  # the second image has one tag only
    both = EquivariantMaps(RefinedMaps(maps, refined), RefinedMaps(copies, refined_copies))
    equivariant = equivariant_loss(both, classes=5)
    cross = cross_equivariant_loss(both, classes=5, hard=hard)
    for b in range(2):
        image, copy = (ranged(of_all_classes(each[b], TAGS[b])) for each in (maps, copies))
        assert equivariant[b].item() == pytest.approx(np.abs(image - copy).mean(), abs=1e-12)
        total = 0.0
        for target, other in ((copy, refined), (image, refined_copies)):
            background = ranged(other[b, :1].numpy())
            scores = np.concatenate([background, ranged(of_all_classes(other[b, 1:], TAGS[b]))])
            differences = sorted(np.abs(alone(target) - scores).ravel(), reverse=True)
            hardest = differences[: int(6 * 12 * hard)]
            total += sum(hardest) / len(hardest)
        assert cross[b].item() == pytest.approx(total, abs=1e-12)


def test_equal_maps_have_loss_0_and_targets_receive_no_gradient() -> None:
    maps = drawn(1, 2, 2, 3, 4).requires_grad_()
    refined = drawn(2, 2, 3, 3, 4).requires_grad_()
    view = RefinedMaps(maps, refined)
    both = EquivariantMaps(view, view)
    assert equivariant_loss(both, classes=5).tolist() == [0, 0]
    cross_equivariant_loss(both, classes=5, hard=0.2).sum().backward()
    assert maps.grad is None
    assert refined.grad is not None

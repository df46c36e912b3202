"""Affinities between neighboring positions and their losses, against pair-by-pair references in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcis.models.affinity_net import (
    AffinityKind,
    AffinityNet,
    affinity_losses,
    boundary_affinities,
    line,
    nearest_labels,
    semantic_affinities,
)
from mcis.models.backbones import small
from mcis.models.grids import Layout, pixel_grids
from mcis.models.random_walk import directions


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("radius", [2, 4])
def test_semantic_affinities_compare_features_pair_by_pair(radius: int) -> None:
    features = random(2, 3, 5, 6).double()
    actual = semantic_affinities(features, radius)
    for plane, (dy, dx) in enumerate(directions(radius)):
        for image, y, x in np.ndindex(2, 5, 6):
            expected = 0.0
            if 0 <= y + dy < 5 and 0 <= x + dx < 6:
                difference = features[image, :, y, x] - features[image, :, y + dy, x + dx]
                expected = math.exp(-difference.abs().mean())
            assert actual[image, plane, y, x].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("radius", [2, 5])
def test_boundary_affinities_use_the_highest_boundary_on_the_line(radius: int) -> None:
    boundaries = random(1, 1, 7, 6, seed=1).double()
    actual = boundary_affinities(boundaries, radius)
    for plane, direction in enumerate(directions(radius)):
        for y, x in np.ndindex(7, 6):
            points = [(y + dy, x + dx) for dy, dx in line(direction)]
            last_y, last_x = points[-1]
            expected = 0.0
            if 0 <= last_y < 7 and 0 <= last_x < 6:
                expected = 1 - max(boundaries[0, 0, *point].item() for point in points)
            assert actual[0, plane, y, x].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("direction", directions(6))
def test_a_line_is_unbroken(direction: tuple[int, int]) -> None:
    points = line(direction)
    assert points[0] == (0, 0)
    assert points[-1] == direction
    for (y, x), (next_y, next_x) in itertools.pairwise(points):
        assert max(abs(next_y - y), abs(next_x - x)) == 1


@settings(max_examples=20)
@given(seed=st.integers(0, 99), radius=st.integers(2, 4))
def test_losses_are_means_over_the_three_kinds_of_pairs_and_sums_over_images(seed: int, radius: int) -> None:
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.choice([0, 1, 2, 255], size=(2, 5, 4)).astype(np.uint8))
    affinities = random(2, len(directions(radius)), 5, 4, seed=seed).double()
    actual = affinity_losses(affinities, labels, radius)
    expected = dict.fromkeys(actual, 0.0)
    for image in range(2):
        pairs: dict[str, list[float]] = {"background": [], "foreground": [], "different": []}
        for plane, (dy, dx) in enumerate(directions(radius)):
            for y, x in np.ndindex(5, 4):
                if not (0 <= y + dy < 5 and 0 <= x + dx < 4):
                    continue
                first = int(labels[image, y, x])
                second = int(labels[image, y + dy, x + dx])
                if 255 in (first, second):
                    continue

                affinity = affinities[image, plane, y, x].item()
                if first != second:
                    pairs["different"].append(-math.log(max(1e-5, 1 - affinity)))
                elif first == 0:
                    pairs["background"].append(-math.log(max(1e-5, affinity)))
                else:
                    pairs["foreground"].append(-math.log(max(1e-5, affinity)))
        for kind, values in pairs.items():
            weight = 0.5 if kind == "different" else 0.25
            expected[kind] += weight * (sum(values) / len(values) if values else 0.0)
    for kind, value in expected.items():
        assert actual[kind].item() == pytest.approx(value, abs=1e-9), kind


@pytest.mark.parametrize("size", [(32, 32), (33, 47)])
def test_labels_of_positions_are_those_of_the_nearest_pixels(size: tuple[int, int]) -> None:
    labels = torch.arange(size[0] * size[1]).reshape(1, *size)
    shape = (math.ceil(size[0] / 4), math.ceil(size[1] / 4))
    actual = nearest_labels(labels, Layout(4).grids(size, shape))
    torch.testing.assert_close(actual, labels[:, ::4, ::4])
    torch.testing.assert_close(nearest_labels(labels, pixel_grids(*size)), labels)


@pytest.mark.parametrize("finest", [4, 8])
@pytest.mark.parametrize("kind", ["features", "boundaries"])
def test_affinities_have_the_resolution_of_the_finest_level(kind: AffinityKind, finest: int) -> None:
    model = AffinityNet(small(channels=12), kind=kind, width=8, embedding=4, finest=finest, radius=3)
    found = model(random(2, 3, 40, 56))
    shape = 40 // finest, 56 // finest
    assert found.affinities.shape == (2, len(directions(3)), *shape)
    assert found.grids == Layout(finest).grids((40, 56), shape)
    assert found.affinities.min() >= 0
    assert found.affinities.max() <= 1


@pytest.mark.parametrize("kind", ["features", "boundaries"])
def test_a_short_training_separates_two_halves(kind: AffinityKind) -> None:
    """Images of two colors, labeled by color."""
    torch.manual_seed(0)
    model = AffinityNet(small(channels=12), kind=kind, width=8, embedding=8, finest=4, radius=3)
    images = random(4, 3, 32, 32) * 0.1
    labels = torch.zeros(4, 8, 8, dtype=torch.uint8)
    for number, column in enumerate((12, 16, 20, 24)):
        images[number, :, :, column:] += 1
        labels[number, :, column // 4 :] = 1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        torch.stack(list(affinity_losses(model(images).affinities, labels, 3).values())).sum().backward()
        optimizer.step()
    affinities = model(images).affinities.detach()
    along = directions(3).index((0, 1))
    for number, column in enumerate((3, 4, 5, 6)):
        across = affinities[number, along, :, column - 1]
        inside = affinities[number, along, :, : column - 2]
        assert across.mean() < 0.3 < 0.7 < inside.mean(), (number, across.mean(), inside.mean())

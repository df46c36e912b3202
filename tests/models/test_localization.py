"""Localization maps against phi applied to the co-attentive features themselves (section 3.2), and their resizing."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcis.models.backbones import small
from mcis.models.coattention import AffinityForm, affinity, coattend, unshared
from mcis.models.grids import Grid, Grids, pixel_grids
from mcis.models.localization import (
    SCALES,
    affinity_query,
    contrastive_round,
    embed,
    multi_round,
    normalize_maps,
    released_map,
    scale_maps,
    score_maps,
)
from mcis.platform.config.maps import MapsConfig

FORMS: tuple[AffinityForm, ...] = ("bilinear", "cosine")
side = st.integers(1, 3)
seeds = st.integers(0, 2**32 - 1)


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape))


def co_attentive_map(
    target: Tensor, related: Tensor, w_p: Tensor, weight: Tensor, bias: float, form: AffinityForm, scale: float
) -> list[list[float]]:
    """S_k with one related image, position by position: P, the softmax over positions, F_r A, then row k of phi."""

    def vector(f: Tensor, y: int, x: int) -> np.ndarray:
        v = f[:, y, x].numpy()
        return v / math.sqrt(v @ v) if form == "cosine" else v

    grid = list(np.ndindex(*related.shape[1:]))
    out = []
    for y in range(target.shape[1]):
        row = []
        for x in range(target.shape[2]):
            p = [scale * vector(target, y, x) @ w_p.numpy() @ vector(related, *position) for position in grid]
            weights = [math.exp(v - max(p)) for v in p]
            feature = sum(a / sum(weights) * related[:, v, u].numpy() for a, (v, u) in zip(weights, grid, strict=True))
            row.append(float(weight.numpy() @ feature + bias))
        out.append(row)
    return out


class Round(NamedTuple):
    """Features of a target (C, H, W) and of other images (R, C, H, W), W_P, W_B, and a class in the class layer."""

    target: Tensor
    others: Tensor
    w_p: Tensor
    w_b: Tensor
    weight: Tensor
    bias: Tensor | None
    form: AffinityForm
    scale: float


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    rng = np.random.default_rng(draw(seeds))
    c = draw(side)
    return Round(
        target=normal(rng, c, draw(side), draw(side)),
        others=normal(rng, draw(side), c, draw(side), draw(side)),
        w_p=normal(rng, c, c),
        w_b=normal(rng, c),
        weight=normal(rng, c),
        bias=normal(rng, 1)[0] if draw(st.booleans()) else None,
        form=draw(st.sampled_from(FORMS)),
        scale=draw(st.sampled_from([0.5, 1.0, 15.0])),
    )


@given(rounds())
def test_multi_round_is_the_class_layer_on_co_attentive_features(case: Round) -> None:
    target, related, w_p, _, weight, bias, form, scale = case
    query = affinity_query(target, w_p, form=form, scale=scale)
    actual = multi_round(query, related, weight, bias, form=form).unflatten(1, target.shape[1:])
    plain = 0.0 if bias is None else bias.item()
    maps = [co_attentive_map(target, one, w_p, weight, plain, form, scale) for one in related]
    np.testing.assert_allclose(actual, np.array(maps), atol=1e-9)


@given(rounds())
def test_contrastive_round_is_the_class_layer_on_contrastive_features(case: Round) -> None:
    """Eq. 2-4 and 6-8 with the target as image m, one other image at a time."""
    target, others, w_p, w_b, weight, bias, form, scale = case
    query = affinity_query(target, w_p, form=form, scale=scale)
    actual = contrastive_round(query, others, w_b, weight @ target.flatten(1), bias, form=form)
    maps = []
    for image in others:
        common = coattend(target[None], image[None], affinity(target[None], image[None], w_p, form=form, scale=scale)).m
        gate = torch.nn.functional.conv2d(common, w_b[None, :, None, None])
        layer = weight[None, :, None, None], None if bias is None else bias[None]
        maps.append(torch.nn.functional.conv2d(unshared(target[None], gate), *layer)[0, 0])
    torch.testing.assert_close(actual, torch.stack(maps).flatten(1), atol=1e-9, rtol=0)


def test_each_related_image_can_have_its_own_query() -> None:
    rng = np.random.default_rng(7)
    target = normal(rng, 3, 2, 3)
    related = normal(rng, 2, 3, 2, 2)
    w_p = normal(rng, 2, 3, 3)
    weight = normal(rng, 3)
    query = affinity_query(target, w_p, scale=2.0)
    assert query.shape == (2, 6, 3)
    maps: list[Tensor] = []
    for pair_w_p, image in zip(w_p, related.split(1), strict=True):
        maps += multi_round(affinity_query(target, pair_w_p, scale=2.0), image, weight, None)
    torch.testing.assert_close(multi_round(query, related, weight, None), torch.stack(maps))


def test_the_bits_of_an_activation_do_not_depend_on_the_other_related_images() -> None:
    """The number of positions is not a multiple of the width of vector instructions."""
    rng = np.random.default_rng(6)
    target = normal(rng, 13, 5, 7).float()
    w_p = normal(rng, 13, 13).float()
    weight = normal(rng, 13).float()
    w_b = normal(rng, 13).float()
    related = normal(rng, 5, 13, 5, 7).float()
    for form in FORMS:
        query = affinity_query(target, w_p, form=form)
        values = weight @ target.flatten(1)
        together = multi_round(query, related, weight, None, form=form)
        contrasted = contrastive_round(query, related, w_b, values, None, form=form)
        for r in range(5):
            for subset, i in ((related[: r + 1], r), (related[r:], 0), (related[r : r + 1], 0)):
                assert multi_round(query, subset, weight, None, form=form)[i].equal(together[r])
                assert contrastive_round(query, subset, w_b, values, None, form=form)[i].equal(contrasted[r])


# --- normalized, combined and resized


@given(seeds, st.sampled_from([(2, 3), (4, 2, 3), (2, 2, 2, 3)]), st.sampled_from([-3.0, 0.0, 3.0]))
def test_normalized_maps_are_clipped_and_have_the_maximum_one(seed: int, shape: tuple[int, ...], offset: float) -> None:
    raw = normal(np.random.default_rng(seed), *shape) + offset
    actual = normalize_maps(raw)
    for raw_map, out in zip(raw.reshape(-1, 2, 3), actual.reshape(-1, 2, 3), strict=True):
        maximum = raw_map.max().item()
        for y, x in np.ndindex(2, 3):
            expected = max(raw_map[y, x].item(), 0) / maximum if maximum > 0 else 0
            assert out[y, x].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("mean", "kept"), [(math.log(1 / 9) - 1e-3, False), (math.log(1 / 9) + 1e-3, True)])
def test_a_released_map_is_kept_if_the_sigmoid_of_its_mean_is_above_a_tenth(mean: float, kept: bool) -> None:
    raw = torch.tensor([[5.0, -5.0], [1.0, -1.0]], dtype=torch.float64) + mean
    expected = normalize_maps(raw)
    assert expected.max() == 1
    torch.testing.assert_close(released_map(raw), expected if kept else torch.zeros_like(raw))
    torch.testing.assert_close(released_map(raw, always=True), expected)


@given(seeds, side, side, st.integers(1, 7), st.integers(1, 7), st.sampled_from(sorted(SCALES)))
def test_scores_are_maps_at_pixels_then_scaled(seed: int, h: int, w: int, height: int, width: int, scale: str) -> None:
    """For positions that divide the image into equal parts, resizing is PyTorch's bicubic interpolation."""
    maps = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (2, h, w)))
    actual = score_maps(maps, pixel_grids(h, w), scale, height, width)
    resized = torch.nn.functional.interpolate(maps[None], size=(height, width), mode="bicubic", align_corners=False)[0]
    torch.testing.assert_close(actual, scale_maps(resized.float(), scale), atol=1e-4, rtol=0)
    assert 0 <= actual.min() <= actual.max() <= 1


def test_a_map_is_divided_by_the_maximum_of_its_pixels() -> None:
    """Bicubic interpolation overshoots the largest position; the score 1 is at the overshoot."""
    maps = torch.tensor([[[0.0, 0.0, 1.0, 1.0]]], dtype=torch.float16)
    actual = score_maps(maps, pixel_grids(1, 4), "maximum", 1, 16)
    assert actual.dtype == torch.float32
    assert (actual.min(), actual.max()) == (0, 1)
    assert (actual > 0.99).sum() == 1


def test_embedding_averages_over_scales_and_flips_at_corresponding_positions() -> None:
    backbone = small(channels=6).double().eval()
    images = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 32, 48)))

    def at_position(features: Tensor, place: tuple[float, float], grids: Grids) -> Tensor:
        """Bilinear interpolation at fractions of the sides, with repeated edges."""
        value = torch.zeros(features.shape[:2], dtype=torch.float64)
        for weight, y, x in corners(place, grids):
            value += weight * features[:, :, y, x]
        return value

    with torch.no_grad():
        whole = backbone(images)
        half_images = torch.nn.functional.interpolate(images, size=(16, 24), mode="bilinear")
        expected = whole.clone()
        parts = [
            (backbone(images.flip(3)).flip(3), Grids(Grid(0.5 / 32, 8 / 32, 4), Grid(1 - (40.5 / 48), 8 / 48, 6))),
            (backbone(half_images), Grids(Grid(0.5 / 16, 8 / 16, 2), Grid(0.5 / 24, 8 / 24, 3))),
            (backbone(half_images.flip(3)).flip(3), Grids(Grid(0.5 / 16, 0.5, 2), Grid(1 - 16.5 / 24, 8 / 24, 3))),
        ]
        for features, grids in parts:
            for y, x in np.ndindex(4, 6):
                expected[:, :, y, x] += at_position(features, ((8 * y + 0.5) / 32, (8 * x + 0.5) / 48), grids)
        torch.testing.assert_close(embed(backbone, torch.nn.Identity(), images), whole)
        torch.testing.assert_close(
            embed(backbone, torch.nn.Identity(), images, extra_scales=(0.5,), hflip=True), expected / 4
        )


def corners(place: tuple[float, float], grids: Grids) -> Iterator[tuple[float, int, int]]:
    """Weight, row and column of the four positions around a place."""
    around = []
    for at, grid in zip(place, grids, strict=True):
        index = min(max((at - grid.first) / grid.step, 0), grid.num_positions - 1)
        low = min(int(index), grid.num_positions - 1)
        high = min(low + 1, grid.num_positions - 1)
        around.append([(1 - (index - low), low), (index - low, high)])
    for (wy, y), (wx, x) in itertools.product(*around):
        yield wy * wx, y, x


def test_maps_are_scaled_by_their_maximum_or_their_range() -> None:
    maps = torch.tensor([[[-2.0, 0.0], [1.0, 2.0]]])
    torch.testing.assert_close(scale_maps(maps, "maximum"), torch.tensor([[[0.0, 0.0], [0.5, 1.0]]]))
    torch.testing.assert_close(scale_maps(maps, "range"), torch.tensor([[[0.0, 0.5], [0.75, 1.0]]]))
    torch.testing.assert_close(scale_maps(torch.full((1, 2, 2), 3.0), "range"), torch.zeros(1, 2, 2))


@given(
    st.lists(st.floats(-1e5, 1e5) | st.sampled_from([0.0, -1.0, math.e - 1, math.e**7, 20.0]), min_size=4, max_size=4)
)
def test_the_logarithm_is_one_scale_for_all_maps(values: list[float]) -> None:
    def score(a: float) -> float:
        return min(max((1 + math.copysign(math.log(1 + abs(a)), a) / 7) / 2, 0), 1)

    actual = scale_maps(torch.tensor(values, dtype=torch.float64).reshape(2, 1, 2), "logarithm")
    np.testing.assert_allclose(actual.flatten(), [score(a) for a in values], atol=1e-12)


def test_the_configuration_offers_all_scales() -> None:
    assert get_args(MapsConfig.model_fields["scale"].annotation) == tuple(SCALES)

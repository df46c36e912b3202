"""Augmentation: each operation against its definition, and that an image's draws alone decide what becomes of it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcis.models.augment import Augmentation, augment, color_jitter

quick = settings(deadline=None, max_examples=50)
seeds = st.integers(0, 2**32 - 1)
side = st.integers(1, 5)
LUMA = (0.299, 0.587, 0.114)
STRONG = Augmentation(color_jitter=(0.3, 0.3, 0.3, 0.1), flip=True, shift=2)


def drawn(seed: int, batch: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Images and draws."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.random((batch, 3, height, width))), torch.from_numpy(
        rng.random((batch, Augmentation.DRAWS))
    )


def luma(pixel: np.ndarray) -> float:
    return float(sum(w * c for w, c in zip(LUMA, pixel, strict=True)))


def jittered(image: Tensor, strength: tuple[float, ...], draws: list[float]) -> np.ndarray:
    """One image after brightness, contrast, saturation and hue, pixel by pixel."""
    out = image.numpy().copy()
    brightness, contrast, saturation = (1 + strength[i] * (2 * draws[i] - 1) for i in range(3))
    positions = list(np.ndindex(*out.shape[1:]))
    for y, x in positions:
        out[:, y, x] *= brightness
    mean = sum(luma(out[:, y, x]) for y, x in positions) / len(positions)
    angle = 2 * math.pi * strength[3] * (2 * draws[3] - 1)
    yiq = np.array([LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])
    for y, x in positions:
        pixel = mean + contrast * (out[:, y, x] - mean)
        pixel = luma(pixel) + saturation * (pixel - luma(pixel))
        brightness_, i, q = yiq @ pixel
        i, q = i * math.cos(angle) - q * math.sin(angle), i * math.sin(angle) + q * math.cos(angle)
        out[:, y, x] = np.clip(np.linalg.solve(yiq, [brightness_, i, q]), 0, 1)
    return out


@quick
@given(seeds, side, side, st.tuples(*[st.sampled_from([0.0, 0.1, 0.4])] * 3, st.sampled_from([0.0, 0.1, 0.5])))
def test_color_jitter_is_its_definition(
    seed: int, height: int, width: int, strength: tuple[float, float, float, float]
) -> None:
    images, draws = drawn(seed, 2, height, width)
    got = color_jitter(images, strength, draws[:, :4])
    for image, image_draws, out in zip(images, draws.tolist(), got, strict=True):
        np.testing.assert_allclose(out, jittered(image, strength, image_draws), atol=1e-9)


def test_no_strength_and_no_deviation_are_the_identity() -> None:
    images, draws = drawn(1, 3, 4, 5)
    assert augment(images, Augmentation(), draws) is images
    assert torch.equal(color_jitter(images, (0, 0, 0, 0), draws[:, :4]), images)
    middle = torch.full_like(draws, 0.5)
    torch.testing.assert_close(augment(images, STRONG, middle), images)


@quick
@given(seeds, st.sampled_from([0.1, 0.25, 0.5]))
def test_hue_keeps_luma_and_greys(seed: int, strength: float) -> None:
    images, draws = drawn(seed, 2, 3, 3)
    images = 0.4 + 0.1 * images  # far from the borders, where colors would be clipped
    turned = color_jitter(images, (0, 0, 0, strength), draws[:, :4])
    weights = torch.tensor(LUMA, dtype=torch.float64).view(1, 3, 1, 1)
    torch.testing.assert_close((turned * weights).sum(1), (images * weights).sum(1))
    gray = images[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(color_jitter(gray, (0, 0, 0.4, strength), draws[:, :4]), gray, atol=1e-9, rtol=0)


def test_hue_turns_by_its_strength() -> None:
    """Half a turn mirrors a color about gray; strength 1/2 with a draw of 0 is half a turn."""
    color = torch.tensor([0.55, 0.5, 0.45], dtype=torch.float64).view(1, 3, 1, 1)
    gray = sum(w * c for w, c in zip(LUMA, (0.55, 0.5, 0.45), strict=True))
    turned = color_jitter(color, (0, 0, 0, 0.5), torch.zeros(1, 4, dtype=torch.float64))
    torch.testing.assert_close(turned, 2 * gray - color)


def test_colors_stay_between_0_and_1() -> None:
    images, _ = drawn(2, 2, 3, 3)
    got = color_jitter(images, (0.9, 0.9, 0.9, 0.1), torch.full((2, 4), 0.999, dtype=torch.float64))
    assert got.min() >= 0
    assert got.max() == 1


@quick
@given(seeds, side, side)
def test_an_image_is_mirrored_where_its_draw_is_below_one_half(seed: int, height: int, width: int) -> None:
    images, draws = drawn(seed, 4, height, width)
    draws[0, 4], draws[1, 4] = 0.5, np.nextafter(0.5, 0)
    got = augment(images, Augmentation(flip=True), draws)
    for image, image_draws, out in zip(images, draws, got, strict=True):
        assert torch.equal(out, image.flip(2) if image_draws[4] < 0.5 else image)


@quick
@given(seeds, side, side, st.integers(1, 7))
def test_shifting_repeats_the_edges(seed: int, height: int, width: int, most: int) -> None:
    images, draws = drawn(seed, 3, height, width)
    got = augment(images, Augmentation(shift=most), draws)
    for image, image_draws, out in zip(images, draws.tolist(), got, strict=True):
        dy, dx = (round((2 * d - 1) * most) for d in image_draws[5:7])
        for y, x in np.ndindex(height, width):
            from_y, from_x = min(max(y + dy, 0), height - 1), min(max(x + dx, 0), width - 1)
            assert torch.equal(out[:, y, x], image[:, from_y, from_x])


@pytest.mark.parametrize(("draw", "first"), [(0.0, 0), (0.5, 3), (1 - 1e-9, 6)])
def test_shifts_reach_as_far_as_they_may_and_no_further(draw: float, first: int) -> None:
    ramp = torch.arange(9.0).expand(1, 3, 9, 9)
    got = augment(ramp, Augmentation(shift=3), torch.full((1, 7), draw, dtype=torch.float64))
    assert got[0, 0, 0, 3] == first


@quick
@given(seeds, st.integers(2, 4), side, side)
def test_an_image_does_not_depend_on_its_batch(seed: int, batch: int, height: int, width: int) -> None:
    images, draws = drawn(seed, batch, height, width)
    together = augment(images, STRONG, draws)
    again = augment(images.flip(0), STRONG, draws.flip(0)).flip(0)
    torch.testing.assert_close(again, together)
    for b in range(batch):
        torch.testing.assert_close(augment(images[b : b + 1], STRONG, draws[b : b + 1])[0], together[b])


def test_the_draws_alone_decide_and_nothing_given_is_changed() -> None:
    images, draws = drawn(3, 3, 4, 4)
    before = images.clone(), draws.clone()
    torch.manual_seed(0)
    first = augment(images, STRONG, draws)
    torch.manual_seed(1)
    assert torch.equal(augment(images, STRONG, draws), first)
    assert torch.equal(images, before[0])
    assert torch.equal(draws, before[1])


@pytest.mark.parametrize("column", range(Augmentation.DRAWS))
def test_each_draw_has_one_purpose(column: int) -> None:
    """Another value in one column changes the result where its operation is on, and nothing where only others are."""
    images, draws = drawn(4, 1, 6, 6)
    draws = draws * 0.2
    changed = draws.clone()
    changed[:, column] = 0.9
    alone = {
        **{i: Augmentation(color_jitter=tuple(0.3 * (i == j) for j in range(4))) for i in range(4)},  # type: ignore[arg-type]
        4: Augmentation(flip=True),
        5: Augmentation(shift=2),
        6: Augmentation(shift=2),
    }
    for purpose, how in alone.items():
        same = torch.equal(augment(images, how, draws), augment(images, how, changed))
        assert same == (alone[column] != how), purpose

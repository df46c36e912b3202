"""Tests of augmentation: operations compared with their definitions, and dependence on an image's draws only."""

import colorsys
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcis.models.augment import Augmentation, augment, color_jitter

seeds = st.integers(0, 2**32 - 1)
side = st.integers(1, 5)
STRONG = Augmentation(color_jitter=(0.3, 0.3, 0.3, 0.1), hflip=True, shift=2)


def drawn(seed: int, batch: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns random images and draws. A quarter of the draws are at the ends of their range."""
    rng = np.random.default_rng(seed)
    images = rng.random((batch, 3, height, width))
    draws = rng.random((batch, Augmentation.DRAWS))
    choices = rng.integers(0, 8, draws.shape).clip(0, 2)
    draws = np.choose(choices, [np.zeros_like(draws), np.full_like(draws, 1 - 1e-9), draws])
    return torch.from_numpy(images), torch.from_numpy(draws)


def jitter_by_hand(image: Tensor, strength: tuple[float, ...], draws: list[float]) -> np.ndarray:
    """Applies torchvision's four changes to an image in their drawn order, pixel by pixel, each clipped."""
    out = image.double().numpy().copy()
    factors = [1 + strength[i] * (2 * draws[i] - 1) for i in range(3)]
    turn = strength[3] * (2 * draws[3] - 1)
    for change in list(itertools.permutations(range(4)))[int(draws[4] * 24)]:
        gray = np.tensordot((0.2989, 0.587, 0.114), out, 1)
        if change == 0:
            out = out * factors[0]
        elif change == 1:
            out = gray.mean() + factors[1] * (out - gray.mean())
        elif change == 2:
            out = gray + factors[2] * (out - gray)
        else:
            for y, x in np.ndindex(*out.shape[1:]):
                hue, saturation, value = colorsys.rgb_to_hsv(*out[:, y, x])
                out[:, y, x] = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
        out = out.clip(0, 1)
    return out


@given(seeds, side, side, st.tuples(*[st.sampled_from([0.0, 0.1, 0.4])] * 3, st.sampled_from([0.0, 0.1, 0.5])))
def test_jitter_is_torchvisions(
    seed: int, height: int, width: int, strength: tuple[float, float, float, float]
) -> None:
    images, draws = drawn(seed, 2, height, width)
    jittered = color_jitter(images, strength, draws[:, :5])
    for image, image_draws, out in zip(images, draws.tolist(), jittered, strict=True):
        np.testing.assert_allclose(out, jitter_by_hand(image, strength, image_draws), atol=1e-5)  # hue is in float32


def test_a_draw_that_float32_rounds_to_1_selects_the_last_order() -> None:
    draws = torch.full((1, 5), 1 - 2.0**-53, dtype=torch.float64).to(torch.float32)
    assert draws[0, 4] == 1
    image = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    last_order = draws.clone()
    last_order[:, 4] = 23.5 / 24
    strength = (0.3, 0.3, 0.3, 0.1)
    assert torch.equal(color_jitter(image, strength, draws), color_jitter(image, strength, last_order))


def test_no_augmentation_is_the_identity() -> None:
    images, draws = drawn(1, 3, 4, 5)
    assert augment(images, Augmentation(), draws) is images
    assert torch.equal(color_jitter(images, (0, 0, 0, 0), draws[:, :5]), images)


def test_draws_in_the_middle_of_their_range_are_the_identity() -> None:
    images, draws = drawn(1, 3, 4, 5)
    middle = torch.full_like(draws, 0.5)
    torch.testing.assert_close(augment(images, STRONG, middle), images, atol=1e-5, rtol=0)  # hue is in float32


@given(seeds, side, side)
def test_an_image_is_flipped_if_its_draw_is_below_one_half(seed: int, height: int, width: int) -> None:
    images, draws = drawn(seed, 4, height, width)
    draws[0, 5] = 0.5
    draws[1, 5] = np.nextafter(0.5, 0)
    flipped = augment(images, Augmentation(hflip=True), draws)
    for image, image_draws, out in zip(images, draws, flipped, strict=True):
        assert torch.equal(out, image.flip(2) if image_draws[5] < 0.5 else image)


@given(seeds, side, side, st.integers(1, 7))
def test_shifting_repeats_the_edges(seed: int, height: int, width: int, max_shift: int) -> None:
    images, draws = drawn(seed, 3, height, width)
    shifted = augment(images, Augmentation(shift=max_shift), draws)
    for image, image_draws, out in zip(images, draws.tolist(), shifted, strict=True):
        dy, dx = (round((2 * draw - 1) * max_shift) for draw in image_draws[6:8])
        for y, x in np.ndindex(height, width):
            source_y = min(max(y + dy, 0), height - 1)
            source_x = min(max(x + dx, 0), width - 1)
            assert torch.equal(out[:, y, x], image[:, source_y, source_x])


@given(seeds, st.integers(2, 4), side, side)
def test_an_image_does_not_depend_on_its_batch(seed: int, batch: int, height: int, width: int) -> None:
    images, draws = drawn(seed, batch, height, width)
    together = augment(images, STRONG, draws)
    reordered = augment(images.flip(0), STRONG, draws.flip(0)).flip(0)
    torch.testing.assert_close(reordered, together)
    for b in range(batch):
        torch.testing.assert_close(augment(images[b : b + 1], STRONG, draws[b : b + 1])[0], together[b])


def test_results_do_not_depend_on_torchs_generator() -> None:
    images, draws = drawn(3, 3, 4, 4)
    torch.manual_seed(0)
    first = augment(images, STRONG, draws)
    torch.manual_seed(1)
    assert torch.equal(augment(images, STRONG, draws), first)


def test_arguments_are_not_changed() -> None:
    images, draws = drawn(3, 3, 4, 4)
    images_before = images.clone()
    draws_before = draws.clone()
    augment(images, STRONG, draws)
    assert torch.equal(images, images_before)
    assert torch.equal(draws, draws_before)


BY_COLUMN = (
    Augmentation(color_jitter=(0.3, 0, 0, 0)),
    Augmentation(color_jitter=(0, 0.3, 0, 0)),
    Augmentation(color_jitter=(0, 0, 0.3, 0)),
    Augmentation(color_jitter=(0, 0, 0, 0.3)),
    Augmentation(color_jitter=STRONG.color_jitter),  # several changes, which have an order
    Augmentation(hflip=True),
    Augmentation(shift=2),
    Augmentation(shift=2),
)
"""Augmentation that uses each column of the draws."""
ORDER = 4
"""Column of the order of the color changes. Its augmentation uses the columns before it, too."""


@pytest.mark.parametrize("column", range(Augmentation.DRAWS))
@pytest.mark.parametrize("augmentation", BY_COLUMN)
def test_a_draw_changes_only_the_augmentations_that_use_it(column: int, augmentation: Augmentation) -> None:
    images, draws = drawn(4, 1, 6, 6)
    draws = draws * 0.2
    changed_draws = draws.clone()
    changed_draws[:, column] = 0.9
    uses_column = augmentation == BY_COLUMN[column] or (augmentation == BY_COLUMN[ORDER] and column < ORDER)
    is_unchanged = torch.equal(augment(images, augmentation, draws), augment(images, augmentation, changed_draws))
    assert is_unchanged == (not uses_column)

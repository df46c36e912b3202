"""Augmentation: each operation against its definition, and that an image's draws alone decide what becomes of it."""

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
    """Images and draws, of which a quarter lie at the ends of their range."""
    rng = np.random.default_rng(seed)
    images, draws = rng.random((batch, 3, height, width)), rng.random((batch, Augmentation.DRAWS))
    draws = np.choose(rng.integers(0, 8, draws.shape).clip(0, 2), [np.zeros_like(draws), draws * 0 + 1 - 1e-9, draws])
    return torch.from_numpy(images), torch.from_numpy(draws)


def jittered(image: Tensor, strength: tuple[float, ...], draws: list[float]) -> np.ndarray:
    """One image after the four changes in their drawn order, pixel by pixel, each clipped, as torchvision has it."""
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
def test_color_jitter(seed: int, height: int, width: int, strength: tuple[float, float, float, float]) -> None:
    images, draws = drawn(seed, 2, height, width)
    got = color_jitter(images, strength, draws[:, :5])
    for image, image_draws, out in zip(images, draws.tolist(), got, strict=True):
        np.testing.assert_allclose(out, jittered(image, strength, image_draws), atol=1e-5)  # hue is in float32


def test_the_largest_draw_that_float32_rounds_to_1_has_an_order() -> None:
    draws = torch.full((1, 5), 1 - 2.0**-53, dtype=torch.float64).to(torch.float32)
    assert draws[0, 4] == 1
    image = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    last = draws.clone()
    last[:, 4] = 23.5 / 24
    strength = (0.3, 0.3, 0.3, 0.1)
    assert torch.equal(color_jitter(image, strength, draws), color_jitter(image, strength, last))


def test_no_strength_and_no_deviation_are_the_identity() -> None:
    images, draws = drawn(1, 3, 4, 5)
    assert augment(images, Augmentation(), draws) is images
    assert torch.equal(color_jitter(images, (0, 0, 0, 0), draws[:, :5]), images)
    middle = torch.full_like(draws, 0.5)
    torch.testing.assert_close(augment(images, STRONG, middle), images, atol=1e-5, rtol=0)  # hue is in float32


@given(seeds, side, side)
def test_an_image_is_mirrored_where_its_draw_is_below_one_half(seed: int, height: int, width: int) -> None:
    images, draws = drawn(seed, 4, height, width)
    draws[0, 5], draws[1, 5] = 0.5, np.nextafter(0.5, 0)
    got = augment(images, Augmentation(hflip=True), draws)
    for image, image_draws, out in zip(images, draws, got, strict=True):
        assert torch.equal(out, image.flip(2) if image_draws[5] < 0.5 else image)


@given(seeds, side, side, st.integers(1, 7))
def test_shifting_repeats_the_edges(seed: int, height: int, width: int, most: int) -> None:
    images, draws = drawn(seed, 3, height, width)
    got = augment(images, Augmentation(shift=most), draws)
    for image, image_draws, out in zip(images, draws.tolist(), got, strict=True):
        dy, dx = (round((2 * d - 1) * most) for d in image_draws[6:8])
        for y, x in np.ndindex(height, width):
            from_y, from_x = min(max(y + dy, 0), height - 1), min(max(x + dx, 0), width - 1)
            assert torch.equal(out[:, y, x], image[:, from_y, from_x])


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
        4: Augmentation(color_jitter=STRONG.color_jitter),  # the order of the changes, where there are several
        5: Augmentation(hflip=True),
        6: Augmentation(shift=2),
        7: Augmentation(shift=2),
    }
    for purpose, how in alone.items():
        same = torch.equal(augment(images, how, draws), augment(images, how, changed))
        assert same == (purpose != column and alone[column] != how and not (purpose == 4 and column < 4)), purpose

"""Co-attention against Eq. 2-4 and 6-8 on matrices in float64, its symmetries and its gradients."""

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from mcis.models.coattention import (
    AffinityForm,
    affinity,
    coattend,
    coattend_fused,
    pair_domains,
    target_is_image_n,
    unshared,
)

Array = NDArray[np.float64]
FORMS: tuple[AffinityForm, ...] = ("bilinear", "cosine")
side = st.integers(1, 3)
sizes = st.fixed_dictionaries({"batch": side, "c": side, "m": st.tuples(side, side), "n": st.tuples(side, side)})
seeds = st.integers(0, 2**32 - 1)


def features(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape))


def drawn(seed: int, size: dict) -> tuple[Tensor, Tensor, Tensor]:
    """F_m and F_n of different sizes, and a W_P that is not symmetric."""
    rng = np.random.default_rng(seed)
    batch = size["batch"]
    c = size["c"]
    return features(rng, batch, c, *size["m"]), features(rng, batch, c, *size["n"]), features(rng, c, c)


# --- the paper's equations for one pair, F as matrices (C, HW)


def matrix(f: Tensor) -> Array:
    """(C, H, W) -> (C, HW), row by row of the image."""
    return np.stack([f[:, y, x].numpy() for y, x in np.ndindex(*f.shape[1:])], axis=1)


def softmax(p: Array) -> Array:
    """Eq. 3, column by column."""
    weights = np.exp(p - p.max(axis=0))
    return weights / weights.sum(axis=0)


# --- values


@given(seeds, sizes, st.sampled_from([1.0, 0.25, 15.0]))
def test_affinity_is_equation_2(seed: int, size: dict, scale: float) -> None:
    f_m, f_n, w_p = drawn(seed, size)
    p = affinity(f_m, f_n, w_p, scale=scale)
    for actual, one_m, one_n in zip(p, f_m, f_n, strict=True):
        np.testing.assert_allclose(actual, scale * matrix(one_m).T @ w_p.numpy() @ matrix(one_n), atol=1e-12)


@given(seeds, sizes)
def test_the_cosine_form_compares_directions(seed: int, size: dict) -> None:
    f_m, f_n, _ = drawn(seed, size)
    p = affinity(f_m, f_n, torch.eye(size["c"], dtype=torch.float64), form="cosine", scale=2.0)
    unit_m, unit_n = (matrix(f[0]) / np.linalg.norm(matrix(f[0]), axis=0) for f in (f_m, f_n))
    np.testing.assert_allclose(p[0], 2 * unit_m.T @ unit_n, atol=1e-9)


@given(seeds, sizes)
def test_cosines_of_levels_are_averaged(seed: int, size: dict) -> None:
    f_m, f_n, _ = drawn(seed, size)
    first = affinity(f_m[:, :1], f_n[:, :1], None, form="cosine")
    second = affinity(f_m[:, 1:], f_n[:, 1:], None, form="cosine")
    by_level = affinity(f_m, f_n, None, form=(1, size["c"] - 1))
    torch.testing.assert_close(by_level, (first + second) / 2)


def test_a_position_without_features_has_cosine_0_and_a_finite_gradient() -> None:
    f = torch.zeros(1, 3, 1, 2, requires_grad=True)
    p = affinity(f, torch.ones(1, 3, 1, 2), torch.eye(3), form="cosine")
    p.sum().backward()
    assert (p == 0).all()
    assert f.grad is not None
    assert f.grad.isfinite().all()


@given(seeds, sizes)
def test_summaries_are_equations_3_and_4(seed: int, size: dict) -> None:
    f_m, f_n, w_p = drawn(seed, size)
    common = coattend(f_m, f_n, affinity(f_m, f_n, w_p))
    assert common.m.shape == f_m.shape
    assert common.n.shape == f_n.shape
    for b in range(size["batch"]):
        m = matrix(f_m[b])
        n = matrix(f_n[b])
        p = m.T @ w_p.numpy() @ n
        np.testing.assert_allclose(matrix(common.m[b]), n @ softmax(p.T), atol=1e-10)
        np.testing.assert_allclose(matrix(common.n[b]), m @ softmax(p), atol=1e-10)


@given(seeds, sizes, st.booleans())
def test_contrastive_features_are_equations_6_to_8(seed: int, size: dict, with_bias: bool) -> None:
    f, _, _ = drawn(seed, size)
    rng = np.random.default_rng(seed + 1)
    common = features(rng, *f.shape)
    w_b = features(rng, 1, size["c"], 1, 1)
    bias = features(rng, 1) if with_bias else torch.zeros(1, dtype=torch.float64)
    actual = unshared(f, torch.nn.functional.conv2d(common, w_b, bias))
    for b in range(size["batch"]):
        gate = w_b.flatten().numpy() @ matrix(common[b]) + bias.item()
        np.testing.assert_allclose(matrix(actual[b]), matrix(f[b]) * (1 - 1 / (1 + np.exp(-gate))), atol=1e-12)


# --- properties


@given(seeds, sizes, st.sampled_from(FORMS))
def test_swapping_the_images_and_transposing_w_p_swaps_the_outputs(seed: int, size: dict, form: AffinityForm) -> None:
    f_m, f_n, w_p = drawn(seed, size)
    p = affinity(f_m, f_n, w_p, form=form, scale=3.0)
    swapped_p = affinity(f_n, f_m, w_p.T, form=form, scale=3.0)
    torch.testing.assert_close(swapped_p, p.transpose(1, 2))

    common = coattend(f_m, f_n, p)
    swapped = coattend(f_n, f_m, swapped_p)
    torch.testing.assert_close(swapped.m, common.n)
    torch.testing.assert_close(swapped.n, common.m)


def test_large_affinities_select_one_position_and_stay_finite() -> None:
    f_m, f_n, _ = (t.float() for t in drawn(5, {"batch": 1, "c": 3, "m": (2, 2), "n": (2, 3)}))
    p = 1e6 * torch.randperm(24, generator=torch.Generator().manual_seed(0)).view(1, 4, 6).float()
    common = coattend(f_m, f_n, p)
    torch.testing.assert_close(common.m.flatten(2), f_n.flatten(2)[:, :, p[0].argmax(dim=1)])
    torch.testing.assert_close(common.n.flatten(2), f_m.flatten(2)[:, :, p[0].argmax(dim=0)])


# --- the fused form


@given(seeds, sizes, st.integers(1, 5), st.sampled_from(FORMS))
def test_the_fused_form_computes_the_same_attention(seed: int, size: dict, width: int, form: AffinityForm) -> None:
    f_m, f_n, w_p = drawn(seed, size)
    rng = np.random.default_rng(seed + 1)
    values_m = features(rng, size["batch"], width, *size["m"])
    values_n = features(rng, size["batch"], width, *size["n"])
    expected = coattend(values_m, values_n, affinity(f_m, f_n, w_p, form=form, scale=3.0))
    actual = coattend_fused(f_m, f_n, w_p, values_m, values_n, form=form, scale=3.0)
    torch.testing.assert_close(actual, expected)


def test_the_fused_form_has_the_same_gradients() -> None:
    results = []
    for fused in (False, True):
        size = {"batch": 2, "c": 16, "m": (4, 5), "n": (6, 3)}
        f_m, f_n, w_p = ((0.3 * t).float().requires_grad_() for t in drawn(7, size))
        if fused:
            out = coattend_fused(f_m, f_n, w_p, f_m, f_n)
        else:
            out = coattend(f_m, f_n, affinity(f_m, f_n, w_p))
        (out.m.square().sum() + out.n.sin().sum()).backward()
        results.append([f_m.grad, f_n.grad, w_p.grad])
    torch.testing.assert_close(*results, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("width", [3, 48])
def test_the_fused_form_keeps_no_affinity_in_memory(width: int) -> None:
    """PyTorch falls back to the explicit matrix silently, so the test looks at the kernels that ran."""
    f_m, f_n, w_p = (t.float() for t in drawn(8, {"batch": 2, "c": 32, "m": (8, 8), "n": (6, 6)}))
    values = [torch.randn(2, width, *f.shape[2:]) for f in (f_m, f_n)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        coattend_fused(f_m, f_n, w_p, *values)
    names = [event.key for event in profile.key_averages()]
    assert any("flash_attention_for_cpu" in name for name in names)
    assert not any("softmax" in name for name in names)


# --- pairs of two domains


def test_domains_of_pairs() -> None:
    domains = torch.tensor([False, True])
    assert pair_domains(torch.tensor(False), domains).tolist() == [0, 2]
    assert pair_domains(torch.tensor(True), domains).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("is_source", "position", "expected"),
    [(False, "m", [False, False]), (True, "m", [True, False]), (False, "n", [True, False]), (True, "n", [True, True])],
)
def test_the_image_of_the_source_domain_is_image_n(
    is_source: bool, position: Literal["m", "n"], expected: list[bool]
) -> None:
    related_is_source = torch.tensor([False, True])
    assert target_is_image_n(torch.tensor(is_source), related_is_source, position).tolist() == expected

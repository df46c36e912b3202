"""Co-attention against Eq. 2-4 and 6-8 on matrices in float64, its symmetries and its gradients."""

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
    pair_kinds,
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
    """F_m, F_n of different size and a W_P that is not symmetric."""
    rng, (batch, c) = np.random.default_rng(seed), (size["batch"], size["c"])
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
    for got, one_m, one_n in zip(p, f_m, f_n, strict=True):
        np.testing.assert_allclose(got, scale * matrix(one_m).T @ w_p.numpy() @ matrix(one_n), atol=1e-12)


@given(seeds, sizes)
def test_the_cosine_form_compares_directions(seed: int, size: dict) -> None:
    f_m, f_n, _ = drawn(seed, size)
    p = affinity(f_m, f_n, torch.eye(size["c"], dtype=torch.float64), form="cosine", scale=2.0)
    m, n = (matrix(f[0]) / np.linalg.norm(matrix(f[0]), axis=0) for f in (f_m, f_n))
    np.testing.assert_allclose(p[0], 2 * m.T @ n, atol=1e-9)
    parts = [affinity(m, n, None, form="cosine") for m, n in ((f_m[:, :1], f_n[:, :1]), (f_m[:, 1:], f_n[:, 1:]))]
    by_level = affinity(f_m, f_n, None, form=(1, size["c"] - 1))
    torch.testing.assert_close(by_level, sum(parts) / 2)


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
        m, n = matrix(f_m[b]), matrix(f_n[b])
        p = m.T @ w_p.numpy() @ n
        np.testing.assert_allclose(matrix(common.m[b]), n @ softmax(p.T), atol=1e-10)
        np.testing.assert_allclose(matrix(common.n[b]), m @ softmax(p), atol=1e-10)


@given(seeds, sizes, st.booleans())
def test_contrastive_features_are_equations_7_to_9(seed: int, size: dict, with_bias: bool) -> None:
    f, _, _ = drawn(seed, size)
    rng = np.random.default_rng(seed + 1)
    common, w_b = features(rng, *f.shape), features(rng, 1, size["c"], 1, 1)
    b_b = features(rng, 1) if with_bias else None
    got = unshared(f, torch.nn.functional.conv2d(common, w_b, b_b))
    for b in range(size["batch"]):
        gate = w_b.flatten().numpy() @ matrix(common[b]) + (0 if b_b is None else b_b.item())
        np.testing.assert_allclose(matrix(got[b]), matrix(f[b]) * (1 - 1 / (1 + np.exp(-gate))), atol=1e-12)


# --- properties


@given(seeds, sizes, st.sampled_from(FORMS))
def test_swapping_the_images_and_transposing_w_p_swaps_the_outputs(seed: int, size: dict, form: AffinityForm) -> None:
    f_m, f_n, w_p = drawn(seed, size)
    p, swapped = (affinity(*pair, form=form, scale=3.0) for pair in ((f_m, f_n, w_p), (f_n, f_m, w_p.T)))
    torch.testing.assert_close(swapped, p.transpose(1, 2))
    common, exchanged = coattend(f_m, f_n, p), coattend(f_n, f_m, swapped)
    torch.testing.assert_close(exchanged.m, common.n)
    torch.testing.assert_close(exchanged.n, common.m)


def test_large_affinities_pick_one_position_and_stay_finite() -> None:
    f_m, f_n, _ = (t.float() for t in drawn(5, {"batch": 1, "c": 3, "m": (2, 2), "n": (2, 3)}))
    p = 1e6 * torch.randperm(24, generator=torch.Generator().manual_seed(0)).view(1, 4, 6).float()
    common = coattend(f_m, f_n, p)
    torch.testing.assert_close(common.m.flatten(2), f_n.flatten(2)[:, :, p[0].argmax(dim=1)])
    torch.testing.assert_close(common.n.flatten(2), f_m.flatten(2)[:, :, p[0].argmax(dim=0)])


# --- the fused form


@given(seeds, sizes, st.integers(1, 5), st.sampled_from(FORMS))
def test_the_fused_form_is_the_same_attention(seed: int, size: dict, width: int, form: AffinityForm) -> None:
    f_m, f_n, w_p = drawn(seed, size)
    rng = np.random.default_rng(seed + 1)
    values_m, values_n = (features(rng, size["batch"], width, *size[name]) for name in ("m", "n"))
    wanted = coattend(values_m, values_n, affinity(f_m, f_n, w_p, form=form, scale=3.0))
    got = coattend_fused(f_m, f_n, w_p, values_m, values_n, form=form, scale=3.0)
    torch.testing.assert_close(got, wanted)


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
def test_the_fused_form_lays_out_no_affinity(width: int) -> None:
    """PyTorch falls back to the explicit matrix without a word: the kernel it took is what tells."""
    f_m, f_n, w_p = (t.float() for t in drawn(8, {"batch": 2, "c": 32, "m": (8, 8), "n": (6, 6)}))
    values = [torch.randn(2, width, *f.shape[2:]) for f in (f_m, f_n)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        coattend_fused(f_m, f_n, w_p, *values)
    names = [event.key for event in profile.key_averages()]
    assert any("flash_attention_for_cpu" in name for name in names)
    assert not any("softmax" in name for name in names)


# --- pairs of two domains


def test_a_target_is_image_n_as_asked_but_in_pairs_of_two_domains() -> None:
    domains = torch.tensor([False, True])
    assert [pair_kinds(torch.tensor(source), domains).tolist() for source in (False, True)] == [[0, 2], [2, 1]]
    seen = {
        (s, target): target_is_image_n(torch.tensor(s), domains, target) for s in (False, True) for target in ("m", "n")
    }
    assert {key: value.tolist() for key, value in seen.items()} == {
        (False, "m"): [False, False],
        (True, "m"): [True, False],
        (False, "n"): [True, False],
        (True, "n"): [True, True],
    }

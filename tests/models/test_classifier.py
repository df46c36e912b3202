"""The co-attention classifier against section 3.1's equations on matrices in float64, its layers and its gradients."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import mcis.models.classifier
from mcis.models.backbones import Backbone, freeze_except_last, small
from mcis.models.classifier import (
    SELF_TRANSFORMS,
    Affinity,
    CoAttentionClassifier,
    MissingOutputs,
    PairInputs,
    transform,
)
from mcis.models.classifier_losses import LOSSES, LossInputs, PairScores, weighted_losses
from mcis.models.coattention import affinity, coattend, unshared
from mcis.models.dropout import SampleDropout, seed_dropout
from mcis.models.grids import Layout

Array = NDArray[np.float64]
K = 4
C = 6
FORMS: list[dict[str, Any]] = [
    {},
    {"head": "own"},
    {"head": "own", "affinity": Affinity(form="cosine", scale=5.0, init=1.0)},
    {"attention": "co"},
    {"attention": "co", "head": "own"},
    {"attention": "none"},
]


def classifier(**options: Any) -> CoAttentionClassifier:
    """A small classifier in float64 with biases other than 0, so that tests notice a missing bias."""
    torch.manual_seed(0)
    model = CoAttentionClassifier(small(channels=C), classes=K, **options).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def images(seed: int, batch: int, height: int = 24, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, height, width, generator=generator, dtype=torch.float64)


def features(seed: int, batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, C, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def section_3_1(model: CoAttentionClassifier, f_m: Array, f_n: Array) -> dict[str, Array]:
    """All scores of one pair from F_m and F_n as matrices (C, HW), as in the paper."""
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}

    def phi(f: Array) -> Array:
        return weights["phi.weight"][:, :, 0, 0] @ f + weights["phi.bias"][:, None]

    def head(f: Array) -> Array:
        return weights["common_head.weight"][:, :, 0, 0] @ f if model.own_head else phi(f)

    def softmax(p: Array) -> Array:  # column-wise
        return np.exp(p) / np.exp(p).sum(axis=0)

    def unit(f: Array) -> Array:
        return f / np.linalg.norm(f, axis=0) if model.affinity.form == "cosine" else f

    scores = {"basic_m": phi(f_m).mean(axis=1), "basic_n": phi(f_n).mean(axis=1)}
    if model.attention == "none":
        return scores
    p = unit(f_m).T @ weights["w_p"] @ unit(f_n) * model.affinity.scale  # Eq. 2
    a_m = softmax(p)  # Eq. 3
    a_n = softmax(p.T)
    common_m = f_n @ a_n  # Eq. 4
    common_n = f_m @ a_m
    scores["co_attention_m"] = head(common_m).mean(axis=1)
    scores["co_attention_n"] = head(common_n).mean(axis=1)
    if model.attention == "co":
        return scores
    for name, f, common in (("contrastive_m", f_m, common_m), ("contrastive_n", f_n, common_n)):
        gate = weights["w_b.weight"][:, :, 0, 0] @ common + weights.get("w_b.bias", 0.0)
        scores[name] = head(f * (1 - 1 / (1 + np.exp(-gate)))).mean(axis=1)  # Eq. 6-8
    return scores


def present(scores: PairScores) -> dict[str, Tensor]:
    return {name: s for name, s in scores._asdict().items() if s is not None}


# --- scores


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_scores_are_section_3_1(options: dict[str, Any], fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        monkeypatch.setattr(mcis.models.classifier, "MAX_AFFINITY_ENTRIES", 0)
    model = classifier(**options)
    f_m = features(1, 2, 2, 3)
    f_n = features(2, 2, 3, 2)
    actual = present(model.pair_scores(f_m, f_n))
    for b in range(2):
        expected = section_3_1(model, f_m[b].flatten(1).numpy(), f_n[b].flatten(1).numpy())
        assert list(actual) == list(expected)
        for name, scores in expected.items():
            np.testing.assert_allclose(actual[name][b].detach(), scores, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("options", FORMS[:5], ids=str)
def test_images_can_attend_to_themselves(options: dict[str, Any]) -> None:
    model = classifier(**options)
    f_m = features(1, 1, 2, 3)
    f_n = features(2, 1, 3, 2)
    actual = present(model.pair_scores(f_m, f_n, attention_partner="itself"))
    matrix_m = f_m[0].flatten(1).numpy()
    matrix_n = f_n[0].flatten(1).numpy()
    expected_m = section_3_1(model, matrix_m, matrix_m)
    expected_n = section_3_1(model, matrix_n, matrix_n)
    for name, scores in actual.items():
        expected = expected_m if name.endswith("_m") else expected_n
        np.testing.assert_allclose(scores[0].detach(), expected[name], atol=1e-10)
    assert not torch.allclose(actual["co_attention_m"], present(model.pair_scores(f_m, f_n))["co_attention_m"])


def test_pairs_can_be_scored_without_attention() -> None:
    model = classifier()
    m = images(1, 2)
    n = images(2, 2)
    without = model(PairInputs(m, n), ("hflip",), attend=False)
    full = model(PairInputs(m, n), ("hflip",))
    pairs = zip([without.pairs, *without.selves], [full.pairs, *full.selves], strict=True)
    for basic_scores, all_scores in pairs:
        assert list(present(basic_scores)) == ["basic_m", "basic_n"]
        assert torch.equal(basic_scores.basic_m, all_scores.basic_m)
        assert torch.equal(basic_scores.basic_n, all_scores.basic_n)


def domain_classifier(**options: Any) -> CoAttentionClassifier:
    """A classifier with three W_P that differ."""
    model = classifier(num_domain_affinities=3, **options)
    model.w_p.data.copy_(torch.randn(3, C, C, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    return model


def test_pairs_of_other_domains_have_another_affinity() -> None:
    three = domain_classifier()
    one = classifier()
    f_m = features(1, 4, 2, 3)
    f_n = features(2, 4, 3, 2)
    pair_domains = torch.tensor([2, 0, 1, 2])
    actual = present(three.pair_scores(f_m, f_n, pair_domains))
    for b in range(4):
        one.load_state_dict({**three.state_dict(), "w_p": three.w_p[pair_domains[b]]})
        for name, scores in present(one.pair_scores(f_m[b : b + 1], f_n[b : b + 1])).items():
            torch.testing.assert_close(actual[name][b : b + 1], scores)
    others = present(three.pair_scores(f_m, f_n, 2 - pair_domains))
    assert not torch.allclose(actual["co_attention_m"][0], others["co_attention_m"][0])
    with pytest.raises(ValueError, match="domains of each pair"):
        three.pair_scores(f_m, f_n)


@pytest.mark.parametrize("name", ["hflip", "x2"])
def test_a_self_pair_uses_the_affinity_of_its_own_domain(name: str) -> None:
    three = domain_classifier()
    one = classifier()
    m = images(1, 3)
    n = images(2, 3)
    (selves,) = three(PairInputs(m, n), (name,), torch.tensor([0, 1, 2])).selves
    for b, self_pair_domains in enumerate((0, 1, 0)):
        one.load_state_dict({**three.state_dict(), "w_p": three.w_p[self_pair_domains]})
        (expected,) = one(PairInputs(m[b : b + 1], n[b : b + 1]), (name,)).selves
        torch.testing.assert_close(selves.co_attention_n[b : b + 1], expected.co_attention_n)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_forward_scores_pairs_and_self_pairs(options: dict[str, Any]) -> None:
    model = classifier(**options)
    m = images(1, 2)
    n = images(2, 2)
    outputs = model(PairInputs(m, n), SELF_TRANSFORMS)
    for name, scores in present(model.pair_scores(model.backbone(m), model.backbone(n))).items():
        torch.testing.assert_close(present(outputs.pairs)[name], scores)

    assert len(outputs.selves) == 3
    for name, self_scores in zip(SELF_TRANSFORMS, outputs.selves, strict=True):
        transformed = model.backbone(transform(m, name))
        expected = present(model.pair_scores(model.backbone(m), transformed, contrastive=False))
        assert not any(name.startswith("contrastive") for name in expected)
        assert present(self_scores).keys() == expected.keys()
        for key, scores in expected.items():
            torch.testing.assert_close(present(self_scores)[key], scores)


def test_forward_returns_the_features_of_pairs_and_self_pairs() -> None:
    model = classifier()
    m = images(1, 2)
    n = images(2, 2)
    pair_features, self_features = model(PairInputs(m, n), ("x2",)).features
    torch.testing.assert_close(pair_features[0], model.features(m))
    torch.testing.assert_close(pair_features[1], model.features(n))
    torch.testing.assert_close(self_features[0], model.features(m))
    torch.testing.assert_close(self_features[1], model.features(transform(m, "x2")))


# --- layers


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = CoAttentionClassifier(small(channels=96), classes=20, head="own")
    assert model.phi.weight.std().item() == pytest.approx((2 / 20) ** 0.5, rel=0.05)
    assert model.phi.bias is not None
    assert (model.phi.bias == 0).all()

    bound = 96**-0.5
    for weight in (model.w_p, model.common_head.weight, model.w_b.weight):
        assert bound * 0.9 < weight.abs().max().item() <= bound
        assert weight.mean().abs().item() < bound / 4
    assert model.w_p.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    scaled = classifier(affinity=Affinity(init=2.5)).w_p.detach()
    torch.testing.assert_close(scaled, 2.5 * torch.eye(C, dtype=torch.float64))


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_every_weight_has_a_gradient_in_every_form(options: dict[str, Any]) -> None:
    """DistributedDataParallel hangs or raises if a parameter has no gradient."""
    model = classifier(**options)
    tags = torch.eye(K, dtype=torch.float64)
    outputs = model(PairInputs(images(1, 4), images(2, 4)), ("hflip",))
    pairs = LossInputs(outputs.pairs, tags, tags.flip(0), *outputs.features[0])
    selves = LossInputs(outputs.selves[0], tags, tags, *outputs.features[1])
    values = {name: loss.record() for name, loss in LOSSES.items() if loss.record}
    terms = [*weighted_losses(pairs, values, epoch=0).values(), *weighted_losses(selves, values, epoch=0).values()]
    torch.stack(terms).sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


# --- what the affinity compares


def standardized(**options: Any) -> CoAttentionClassifier:
    """A classifier with 6 channels, standardized by random statistics."""
    torch.manual_seed(0)
    backbone = Backbone(nn.Conv2d(3, 6, 1), stage_channels=(6,), layout=Layout(1))
    model = CoAttentionClassifier(backbone, classes=K, standardized=True, **options).double()
    generator = torch.Generator().manual_seed(1)
    model.set_statistics(torch.randn(6, generator=generator), torch.rand(6, generator=generator) + 0.5)
    return model


@pytest.mark.parametrize("w_p", ["learned", "identity"])
def test_positions_are_compared_by_standardized_channels_of_the_backbone(w_p: Literal["learned", "identity"]) -> None:
    model = standardized(affinity=Affinity(form="cosine", scale=7.0, w_p=w_p))
    outputs = features(8, 2, 2, 3)
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(6, generator=generator)
    deviation = torch.rand(6, generator=generator) + 0.5
    standard = (outputs - mean[:, None, None]) / deviation[:, None, None]
    actual = model.standardize(outputs)
    torch.testing.assert_close(actual, standard)
    f_m, f_n = standard.split(1)
    p = affinity(f_m, f_n, model.w_p if w_p == "learned" else None, form="cosine", scale=7.0)
    common = coattend(f_m, f_n, p)
    scores = model.pair_scores(*actual.split(1))
    torch.testing.assert_close(scores.basic_m, model.phi(f_m).mean(dim=(2, 3)))
    torch.testing.assert_close(scores.co_attention_m, model.phi(common.m).mean(dim=(2, 3)))
    torch.testing.assert_close(scores.co_attention_n, model.phi(common.n).mean(dim=(2, 3)))
    torch.testing.assert_close(
        model.co_maps(model.query(actual[0]), actual[0], actual[1:], 1), model.phi(common.m)[:, 1]
    )
    assert ("w_p" in model.state_dict()) is (w_p == "learned")
    assert {"mean", "deviation"} <= set(model.state_dict())


def test_outputs_of_the_backbone_have_the_scores_of_their_images() -> None:
    model = standardized()
    m = images(1, 2, 4, 4)
    n = images(2, 2, 4, 4)
    scores = model(PairInputs(m, n)).pairs
    again = model(PairInputs(model.backbone(m), model.backbone(n), is_embedded=True)).pairs
    for name, value in present(scores).items():
        torch.testing.assert_close(getattr(again, name), value)


def test_a_frozen_backbone_drops_nothing_in_training() -> None:
    """Otherwise, scores would depend on which outputs of the backbone were cached."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, C, 1), SampleDropout(0.5))
    model = CoAttentionClassifier(Backbone(body, stage_channels=(C,), layout=Layout(1)), classes=K)
    m, n = images(1, 2).float(), images(2, 2).float()
    with torch.no_grad():
        expected = present(model.eval()(PairInputs(m, n)).pairs)

        seed_dropout(model, [0, 1])
        dropped = present(model.train()(PairInputs(m, n)).pairs)
        assert not any(torch.equal(dropped[name], scores) for name, scores in expected.items())

        freeze_except_last(model.backbone, 0)
        frozen = present(model.train()(PairInputs(m, n)).pairs)
        cached_m, cached_n = model.backbone(torch.cat([m, n])).half().float().chunk(2)
        missing = MissingOutputs(torch.tensor([2]), n[:1])
        partly = present(model(PairInputs(cached_m, cached_n, is_embedded=True, missing=missing)).pairs)
    assert model.training
    for name, scores in expected.items():
        torch.testing.assert_close(frozen[name], scores)
        torch.testing.assert_close(partly[name], scores, atol=1e-2, rtol=1e-2)


# --- the transformations of self pairs


def test_the_transformations_of_self_pairs() -> None:
    ramp = torch.arange(8.0).view(1, 1, 1, 8).expand(1, 3, 4, 8)
    assert transform(ramp, "hflip")[0, 0, 0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    double = transform(ramp, "x2")
    assert double.shape == (1, 3, 8, 16)
    assert double[0, 0, 0, :4].tolist() == [0, 0.25, 0.75, 1.25]  # half-pixel centers
    smaller = transform(ramp, "x0.75")
    assert smaller.shape == (1, 3, 3, 6)
    expected = [(i + 0.5) / 0.75 - 0.5 for i in range(6)]
    assert smaller[0, 0, 0].tolist() == pytest.approx(expected, abs=1e-5)


# --- maps


@pytest.mark.parametrize("options", FORMS[:3], ids=str)
@pytest.mark.parametrize("tag", [0, K - 1])
def test_maps_are_activations_of_co_attentive_and_contrastive_features(options: dict[str, Any], tag: int) -> None:
    """Eq. 2-4 and 6-8 with the target as image m or n of a pair and a W_P for each pair, one pair at a time."""
    model = domain_classifier(**options)
    target = features(5, 1, 2, 3)
    others = features(6, 3, 3, 2)
    pair_domains = torch.tensor([1, 2, 1])
    target_is_n = torch.tensor([False, True, False])
    with torch.inference_mode():
        head = model.common_head if model.own_head else model.phi
        co = []
        contrastive = []
        for other, domains, is_n in zip(others, pair_domains, target_is_n, strict=True):
            w_p = model.w_p[domains].T if is_n else model.w_p[domains]
            p = affinity(target, other[None], w_p, form=model.form, scale=model.affinity.scale)
            common = coattend(target, other[None], p).m
            co.append(head(common)[0, tag])
            contrastive.append(head(unshared(target, model.w_b(common)))[0, tag])
        query = model.query(target[0], pair_domains=pair_domains, target_is_n=target_is_n)
        torch.testing.assert_close(model.co_maps(query, target[0], others, tag), torch.stack(co))
        torch.testing.assert_close(model.contrastive_maps(query, target[0], others, tag), torch.stack(contrastive))

        one = classifier(**options)
        query = one.query(target[0], target_is_n=True)
        torch.testing.assert_close(query, one.query(target[0], target_is_n=torch.tensor([True]))[0])


@pytest.mark.parametrize("form", [{}, {"affinity": Affinity(form="cosine", scale=5.0)}], ids=str)
@pytest.mark.parametrize("head", ["shared", "own"])
@pytest.mark.parametrize("attention", ["none", "co"])
def test_maps_with_the_identity_need_no_trained_affinity(attention: str, head: str, form: dict[str, Any]) -> None:
    """P = F_m^T F_n; activations are of the separate layer if there is one, else of phi."""
    model = classifier(attention=attention, head=head, num_domain_affinities=3, **form)
    weights = {name: p.detach().numpy()[..., 0, 0] for name, p in model.named_parameters() if p.ndim == 4}
    if attention == "co" and head == "own":
        weight = weights["common_head.weight"]
        bias = 0.0
    else:
        assert model.phi.bias is not None
        weight = weights["phi.weight"]
        bias = model.phi.bias[1].item()

    def unit(f: Array) -> Array:
        return f / np.linalg.norm(f, axis=0) if form else f

    target = features(5, 1, 2, 3)[0]
    related = features(6, 3, 3, 2)
    f_n = target.flatten(1).numpy()
    maps = []
    for f_r in related.flatten(2).numpy():
        p = np.exp(unit(f_n).T @ unit(f_r) * model.affinity.scale)
        maps.append(weight[1] @ f_r @ (p / p.sum(axis=1, keepdims=True)).T + bias)
    query = model.query(target, identity=True)
    assert query.shape == (6, C)
    with torch.inference_mode():
        actual = model.co_maps(query, target, related, 1)
    np.testing.assert_allclose(actual.flatten(1), np.stack(maps), atol=1e-10)

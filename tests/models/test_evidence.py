"""Shared evidence against means of sorted cosines, position by position."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.models.evidence import Bank, shared_evidence, texture_match, texture_vectors

quick = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**32 - 1)


@quick
@given(seeds, st.integers(1, 4), st.integers(1, 3), st.integers(1, 6))
def test_evidence_is_the_mean_match_in_related_images_less_that_in_others(
    seed: int, channels: int, related: int, closest: int
) -> None:
    rng = np.random.default_rng(seed)
    textures = rng.normal(2, 3, (1 + related + 2, channels, 2, 3))
    mean, deviation = textures.mean((0, 2, 3)), textures.std((0, 2, 3))

    def vector(image: int, at: int) -> NDArray[np.float64]:
        v = (textures[image].reshape(channels, 6)[:, at] - mean) / deviation
        return np.asarray(v / np.sqrt((v * v).sum()))

    def match(at: int, image: int) -> float:
        cosines = sorted((float(vector(0, at) @ vector(image, j)) for j in range(6)), reverse=True)
        return sum(cosines[:closest]) / min(closest, 6)

    with_class, without_class = range(1, 1 + related), range(1 + related, 3 + related)
    expected = [
        sum(match(at, i) for i in with_class) / related - sum(match(at, i) for i in without_class) / 2
        for at in range(6)
    ]
    vectors = texture_vectors(*(torch.from_numpy(a) for a in (textures, mean, deviation)))
    matches = texture_match(vectors[0], vectors[1:], closest=closest)
    got = shared_evidence(matches[:related], matches[related:])
    np.testing.assert_allclose(got, expected, atol=1e-9)
    assert (shared_evidence(matches, matches[:0]) == 0).all()


def test_a_bank_weighs_evidence_by_its_images_without_the_class_in_deviations_of_its_activations() -> None:
    generator = torch.Generator().manual_seed(0)
    textures, related = (torch.randn(n, 3, 2, 4, generator=generator, dtype=torch.float64) for n in (5, 2))
    activations = 7 * torch.randn(5, 2, 2, 4, generator=generator, dtype=torch.float64)
    lacks = torch.tensor([[True, False], [False, False], [True, True], [False, True], [True, False]])
    bank = Bank(textures, lacks, activations)
    channels = textures.transpose(0, 1).flatten(1)
    torch.testing.assert_close(bank.mean, channels.mean(dim=1))
    target = bank.texture_vectors(related[0])
    torch.testing.assert_close(target, texture_vectors(related[0], channels.mean(dim=1), channels.std(dim=1)))
    for tag, without in ((0, [0, 2, 4]), (1, [2, 3])):
        got = bank.evidence(target, bank.match(target), related[1:], tag)
        in_related, without_class = (
            texture_match(target, bank.texture_vectors(images)).mean(dim=0)
            for images in (related[1:], textures[without])
        )
        torch.testing.assert_close(got, activations.std() * (in_related - without_class))

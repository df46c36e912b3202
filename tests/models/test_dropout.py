"""Tests of dropout with one random generator per sample."""

import pytest
import torch
from torch import nn

from mcis.models.dropout import SampleDropout, seed_dropout


# The standard deviation of the dropped fraction is 0.0015 for 80,000 units and 0.01 for 2,000 channels.
@pytest.mark.parametrize(("shape", "channels", "atol"), [((50, 40, 40), False, 0.005), ((2000, 2, 3), True, 0.04)])
def test_the_rate_is_dropped_and_the_mean_stays(shape: tuple[int, int, int], channels: bool, atol: float) -> None:
    layer = SampleDropout(0.25, channels=channels)
    layer.seeds = [3, 4]
    dropped = layer(torch.ones(2, *shape))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    for sample in dropped:
        assert (sample == 0).float().mean().item() == pytest.approx(0.25, abs=atol)
    assert not torch.equal(dropped[0], dropped[1])


@pytest.mark.parametrize("channels", [False, True])
def test_whole_channels_are_dropped_on_request(channels: bool) -> None:
    layer = SampleDropout(0.25, channels=channels)
    layer.seeds = [3, 4]
    dropped = layer(torch.ones(2, 50, 4, 4))
    assert bool((dropped == dropped[:, :, :1, :1]).all()) == channels


def test_the_mask_depends_on_the_samples_seed_only() -> None:
    layer = SampleDropout(0.5)
    x = torch.randn(3, 8, 5, 5)
    seeds = [11, 12, 13]
    layer.seeds = seeds
    together = layer(x)
    torch.manual_seed(99)
    for sample, seed in enumerate(seeds):
        layer.seeds = [seed]
        assert torch.equal(layer(x[sample : sample + 1])[0], together[sample])


def test_nothing_is_dropped_in_evaluation_mode() -> None:
    x = torch.randn(2, 3)
    assert SampleDropout(0.5).eval()(x) is x


def test_nothing_is_dropped_with_rate_zero() -> None:
    x = torch.randn(2, 3)
    assert SampleDropout(0.0).train()(x) is x


def test_each_image_of_a_sample_has_its_own_mask() -> None:
    """The batch holds the first images of two pairs, followed by the second images."""
    layer = SampleDropout(0.5)
    x = torch.ones(4, 8, 5, 5)
    layer.seeds = [3, 4]
    dropped = layer(x)
    masks = {tuple(image.flatten().tolist()) for image in dropped}
    assert len(masks) == 4
    layer.seeds = [4]
    assert torch.equal(layer(x[:2]), dropped[1::2]), "the masks of a pair depend on its seed only"


def test_gradients_pass_through_kept_units_only() -> None:
    layer = SampleDropout(0.5)
    layer.seeds = [7]
    x = torch.ones(1, 100, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize(("seeds", "images"), [([], 2), ([1, 2], 3)])
def test_a_batch_without_matching_seeds_is_an_error(seeds: list[int], images: int) -> None:
    layer = SampleDropout(0.5)
    layer.seeds = seeds
    with pytest.raises(ValueError, match=f"for {len(seeds)} samples, but the batch has {images} images"):
        layer(torch.ones(images, 3))


def test_layers_of_a_network_draw_different_masks() -> None:
    network = nn.Sequential(SampleDropout(0.5), nn.Identity(), SampleDropout(0.5))
    ones = torch.ones(2, 1000)
    seed_dropout(network, [5, 2**62])
    assert not torch.equal(network[0](ones), network[2](ones))


def test_the_same_seeds_give_the_same_masks() -> None:
    network = nn.Sequential(SampleDropout(0.5), nn.Identity(), SampleDropout(0.5))
    ones = torch.ones(2, 1000)
    seed_dropout(network, [5, 2**62])
    first = network[0](ones)
    seed_dropout(network, [5, 2**62])
    assert torch.equal(network[0](ones), first)

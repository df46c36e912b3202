"""Dropout with random numbers per sample."""

import pytest
import torch
from torch import nn

from mcis.models.dropout import SampleDropout, seed_dropout


# 80,000 draws of values have a deviation of 0.0015 in their share, 2,000 of channels one of 0.01.
@pytest.mark.parametrize(("shape", "channels", "atol"), [((50, 40, 40), False, 0.005), ((2000, 2, 3), True, 0.04)])
def test_a_share_is_dropped_and_the_mean_stays(shape: tuple[int, int, int], channels: bool, atol: float) -> None:
    layer = SampleDropout(0.25, channels=channels)
    layer.seeds = [3, 4]
    dropped = layer(torch.ones(2, *shape))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert bool((dropped == dropped[:, :, :1, :1]).all()) == channels, "channels are dropped whole"
    for sample in dropped:
        assert (sample == 0).float().mean().item() == pytest.approx(0.25, abs=atol)
    assert not torch.equal(dropped[0], dropped[1])


def test_what_is_dropped_depends_on_the_samples_number_alone() -> None:
    layer = SampleDropout(0.5)
    x = torch.randn(3, 8, 5, 5)
    layer.seeds = [11, 12, 13]
    together = layer(x)
    torch.manual_seed(99)
    for sample, number in enumerate((11, 12, 13)):
        layer.seeds = [number]
        assert torch.equal(layer(x[sample : sample + 1])[0], together[sample])


def test_nothing_is_dropped_in_evaluation_or_without_a_share() -> None:
    x = torch.randn(2, 3)
    assert SampleDropout(0.5).eval()(x) is x
    assert SampleDropout(0.0).train()(x) is x


def test_a_samples_images_are_drawn_apart_and_by_its_number() -> None:
    """Pairs: the first images of the samples and, behind them, the second ones."""
    layer, x = SampleDropout(0.5), torch.ones(4, 8, 5, 5)
    layer.seeds = [3, 4]
    dropped = layer(x)
    assert len({tuple(image.flatten().tolist()) for image in dropped}) == 4
    layer.seeds = [4]
    assert torch.equal(layer(x[:2]), dropped[1::2])


def test_gradients_go_through_what_is_kept() -> None:
    layer = SampleDropout(0.5)
    layer.seeds = [7]
    x = torch.ones(1, 100, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


def test_samples_that_are_not_numbered_are_an_error() -> None:
    layer = SampleDropout(0.5)
    for numbers, count in (([], 2), ([1, 2], 3)):
        layer.seeds = numbers
        with pytest.raises(ValueError, match=f"for {len(numbers)} samples, but the batch has {count} images"):
            layer(torch.ones(count, 3))


def test_layers_of_a_network_draw_apart() -> None:
    network = nn.Sequential(SampleDropout(0.5), nn.Identity(), SampleDropout(0.5))
    seed_dropout(network, [5, 2**62])
    ones = torch.ones(2, 1000)
    first, last = network[0](ones), network[2](ones)
    assert not torch.equal(first, last)
    seed_dropout(network, [5, 2**62])
    assert torch.equal(network[0](ones), first)

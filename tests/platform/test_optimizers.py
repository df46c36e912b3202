"""Update rules: schedules by hand, rates per layer."""

from typing import Any

import pytest
import torch
from torch import nn

from mcis.models.backbones import Backbone
from mcis.models.grids import Layout
from mcis.platform.config.training import Optimizer
from mcis.platform.engine.optimizers import build_optimizer, learning_rate_factor


def factors(optimizer: Optimizer, steps: int, epoch_steps: int = 1) -> list[float]:
    return [learning_rate_factor(optimizer, step, steps=steps, epoch=step // epoch_steps) for step in range(steps)]


def test_the_step_schedule_falls_at_the_start_of_its_epochs() -> None:
    schedule = Optimizer(schedule="step", step_epochs=(2, 3))
    assert factors(schedule, 10, epoch_steps=2) == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01])
    assert factors(Optimizer(schedule="step"), 3) == [1, 1, 1]


def test_smooth_schedules() -> None:
    assert factors(Optimizer(schedule="poly"), 4) == pytest.approx([1, 0.75**0.9, 0.5**0.9, 0.25**0.9])
    assert factors(Optimizer(schedule="cosine"), 4) == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    assert factors(Optimizer(schedule="cosine", warm_up=1.0), 4) == pytest.approx([0.25, 0.5, 0.75, 1])


@pytest.mark.parametrize("schedule", ["step", "poly", "cosine"])
def test_a_warm_up_rises_in_a_line_to_the_whole_rate(schedule: Any) -> None:
    actual = factors(Optimizer(schedule=schedule, warm_up=0.2), 20)
    assert actual[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    # The rest is the schedule over what is left.
    assert actual[4:] == pytest.approx(factors(Optimizer(schedule=schedule), 16))


def test_no_warm_up_goes_beyond_the_rate() -> None:
    for steps in range(1, 60):
        assert max(factors(Optimizer(schedule="cosine", warm_up=0.05), steps)) <= 1


class _Network(nn.Module):
    """A backbone with one pretrained and one new layer, a head, and a free matrix."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
        self.backbone = Backbone(body, stage_channels=(4,), layout=Layout(1), new_layers=("body.1",))
        self.head = nn.Conv2d(4, 2, 1)
        self.w_p = nn.Parameter(torch.eye(4))


FACTORS = {
    "backbone.body.0.weight": 1.0,
    "backbone.body.0.bias": 2.0,
    "backbone.body.1.weight": 10.0,
    "backbone.body.1.bias": 20.0,
    "head.weight": 10.0,
    "head.bias": 20.0,
    "w_p": 10.0,
}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_each_parameter_has_the_recipes_rate(name: Any) -> None:
    """Backbone weights 1, their biases 2, new weights 10, new biases 20 (paper-vs-code, "Classifier")."""
    network = _Network()
    optimizer = build_optimizer(network, Optimizer(name=name, new_layer_rate=10, bias_rate=2, weight_decay=0.125))
    names = {id(parameter): key for key, parameter in network.named_parameters()}
    actual = {names[id(p)]: group["factor"] for group in optimizer.param_groups for p in group["params"]}
    assert actual == FACTORS
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(FACTORS)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.125}
    assert type(optimizer) is {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]


def test_a_backbone_without_new_layers_is_pretrained_whole() -> None:
    network = _Network()
    network.backbone.new_layers = ()
    optimizer = build_optimizer(network, Optimizer(new_layer_rate=10))
    assert {len(group["params"]): group["factor"] for group in optimizer.param_groups} == {4: 1.0, 3: 10.0}


def test_sgd_has_its_momentum() -> None:
    groups = build_optimizer(_Network(), Optimizer(momentum=0.5, nesterov=True, learning_rate=0.25)).param_groups
    assert [(g["momentum"], g["nesterov"], g["lr"]) for g in groups] == [(0.5, True, 0.25)]


def test_what_is_frozen_is_not_updated() -> None:
    network = _Network()
    network.backbone.body.requires_grad_(False)
    optimizer = build_optimizer(network, Optimizer())
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert updated == {id(parameter) for parameter in (*network.head.parameters(), network.w_p)}

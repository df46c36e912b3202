"""Builds the optimizer of a network, and computes its learning rate."""

import math

import torch
from torch import nn

from mcis.models.backbones import Backbone
from mcis.platform.config.training import Optimizer


def learning_rate_factor(optimizer: Optimizer, step: int, *, steps: int, epoch: int) -> float:
    """Returns the factor by which the schedule multiplies the learning rate.

    Args:
        step: The step, from 0.
        steps: Number of steps that the schedule spans.
        epoch: The epoch of the step, from 0, for step schedules.
    """
    progress = step / max(steps, 1)
    if optimizer.warm_up and progress < optimizer.warm_up:
        return min(1.0, (step + 1) / max(1.0, optimizer.warm_up * steps))

    if optimizer.schedule == "step":
        epochs_passed = sum(1 for step_epoch in optimizer.step_epochs if epoch >= step_epoch)
        return float(0.1**epochs_passed)

    progress_after_warm_up = 1.0
    if optimizer.warm_up < 1:
        progress_after_warm_up = (progress - optimizer.warm_up) / (1 - optimizer.warm_up)
    if optimizer.schedule == "poly":
        return float((1 - progress_after_warm_up) ** 0.9)
    return 0.5 * (1 + math.cos(math.pi * progress_after_warm_up))


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Builds the optimizer of all parameters that are not frozen.

    There is a parameter group for each factor of the learning rate, with the factor under the key `factor`. It is
    `new_layer_rate` for layers without pretrained weights, times `bias_rate` for biases (paper-vs-code,
    "Classifier").
    """
    pretrained = _pretrained_parameters(model)
    parameters_by_factor: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        factor = 1.0 if name in pretrained else settings.new_layer_rate
        if name.endswith("bias"):
            factor *= settings.bias_rate
        parameters_by_factor.setdefault(factor, []).append(parameter)
    groups = [{"params": parameters, "factor": factor} for factor, parameters in parameters_by_factor.items()]

    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    return torch.optim.SGD(
        groups,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
    )


def _pretrained_parameters(model: nn.Module) -> set[str]:
    """Returns the names of all backbone parameters but those of layers without pretrained weights (`new_layers`)."""
    names = set()
    for module_name, module in model.named_modules():
        if not isinstance(module, Backbone):
            continue
        for name, _ in module.named_parameters():
            if not name.startswith(module.new_layers):
                names.add(f"{module_name}.{name}")
    return names

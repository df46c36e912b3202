"""The update rule of a training: precision, the learning rate of each step, a group of parameters for each factor."""

import math
from typing import Literal

import torch
from torch import nn

from mcis.models.backbones import Backbone
from mcis.platform.config.training import Optimizer


def learning_rate_factor(optimizer: Optimizer, step: int, *, steps: int, epoch: int) -> float:
    """The schedule's factor of the learning rate, at update `step` of `steps`, in `epoch`."""
    done = step / max(steps, 1)
    if optimizer.warm_up and done < optimizer.warm_up:
        return min(1.0, (step + 1) / max(1.0, optimizer.warm_up * steps))
    if optimizer.schedule == "step":
        return float(0.1 ** sum(epoch >= e for e in optimizer.step_epochs))
    rest = (done - optimizer.warm_up) / (1 - optimizer.warm_up) if optimizer.warm_up < 1 else 1.0
    if optimizer.schedule == "poly":
        return float((1 - rest) ** 0.9)
    return 0.5 * (1 + math.cos(math.pi * rest))


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """The optimizer of what is not frozen, with a group of parameters for each factor of the learning rate.

    The factor is that of new or pretrained layers, times that of biases (RELEASED_RECIPE, "Classifier"). The key
    `factor` of a group holds it.
    """
    pretrained = _pretrained_parameters(model)
    groups: dict[float, list[nn.Parameter]] = {}
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        factor = 1.0 if key in pretrained else settings.new_layer_rate
        factor *= settings.bias_rate if key.endswith("bias") else 1.0
        groups.setdefault(factor, []).append(parameter)
    parameters = [{"params": p, "factor": factor} for factor, p in groups.items()]
    if settings.name == "adamw":
        return torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    return torch.optim.SGD(
        parameters,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
    )


def _pretrained_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters for which there are pretrained weights."""
    return {
        f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, Backbone)
        for key, _ in module.named_parameters()
        if not key.startswith(module.new_layers or ("\0",))
    }


def resolve_precision(wanted: Literal["auto", "float32", "bf16"], device: torch.device) -> Literal["float32", "bf16"]:
    """The precision of a network's arithmetic on a device; `auto` is bfloat16 on a GPU that has it, else float32.

    Weights, losses and updates are float32 in any case.
    """
    if wanted != "auto":
        return wanted
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"

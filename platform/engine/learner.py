"""What a training is told of: the learner, which knows network, data and losses; the schedule and rule of updates."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mcis.datasets.sampling.batch_stream import AnyBatch, Decode, WorkerShard
from mcis.models.augment import Augmentation, augment
from mcis.models.backbones import Backbone, Normalization, to_unit
from mcis.platform.config.training import Optimizer

Network = Callable[..., Any]
"""The network that a learner calls: over all workers, in the precision of the training."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long a training is and how its updates change.

    Attributes:
        batch: samples per step, over all workers.
        images_per_sample: 2 for pairs of images.
        steps: updates of the training.
        schedule_steps: updates that the learning rate's schedule spans; a training may end before.
        steps_per_epoch: updates per epoch, for step schedules and the log.
        seed: of the initial weights and of dropout.
        optimizer: update rule, rates, schedule and precision.
    """

    batch: int
    images_per_sample: int
    steps: int
    schedule_steps: int
    steps_per_epoch: float
    seed: int
    optimizer: Optimizer

    @property
    def images_per_step(self) -> int:
        """Images that a step sees, over all workers."""
        return self.batch * self.images_per_sample

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that update `step` belongs to."""
        return int(step / self.steps_per_epoch)

    def learning_rate(self, step: int) -> float:
        """The learning rate of update `step`, before the factor of a group of parameters."""
        factor = learning_rate_factor(self.optimizer, step, steps=self.schedule_steps, epoch=self.epoch(step))
        return self.optimizer.learning_rate * factor


class Learner(Protocol[AnyBatch]):
    """What is trained. An instance travels to the workers by pickle, so it holds plain values alone."""

    @property
    def schedule(self) -> Schedule:
        """The updates of the training."""

    @property
    def has_unused_parameters(self) -> bool:
        """Whether some updates make no use of some parameters, which DDP has to be told."""

    def model(self) -> nn.Module:
        """The network with its initial weights."""

    def decoder(self, shard: WorkerShard) -> Decode[AnyBatch]:
        """Decodes the worker's rows."""

    def losses(self, model: Network, batch: AnyBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        """Loss terms, float32, as sums over the samples of a batch, or of any part of it.

        The whole batch's loss is the sum of these over its parts and the workers, divided by that of `count`.
        """

    def count(self, batch: AnyBatch) -> int:
        """How many terms a batch's losses are sums of: pairs, labeled pixels."""

    def image_uris(self, batch: AnyBatch) -> list[str]:
        """The images of a batch, for messages."""


def device_images(
    images: NDArray[np.uint8],
    draws: NDArray[np.float64],
    augmentation: Augmentation,
    normalize: Normalization,
    device: torch.device,
) -> Tensor:
    """uint8 images (B, H, W, 3) -> augmented and normalized on the device, (B, 3, H, W), channels last.

    Args:
        draws: random numbers in [0, 1), (B, Augmentation.DRAWS).
        normalize: of the backbone.
    """
    unit = to_unit(torch.from_numpy(np.array(images)).to(device, non_blocking=True))
    augmented = normalize(augment(unit, augmentation, torch.from_numpy(draws).float()))
    return augmented.contiguous(memory_format=torch.channels_last)  # as the weights are


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
        return torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
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

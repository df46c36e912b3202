"""Defines what the training loop asks of a learner, and the schedule of a training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mcis.datasets.sampling.batch_stream import AnyBatch, Decode, WorkerShard
from mcis.platform.config.training import Optimizer
from mcis.platform.engine.optimizers import learning_rate_factor

Network = Callable[..., Any]
"""The network that a learner calls. It includes DDP over all workers and the precision of the training."""


@dataclass(frozen=True, kw_only=True)
class TrainingSchedule:
    """The length of a training, its batches and its learning rate.

    Attributes:
        batch: Samples per step, over all workers.
        images_per_sample: 1, or 2 for pairs of images.
        steps: Number of optimizer steps.
        schedule_steps: Number of steps that the learning-rate schedule spans. The training may end earlier.
        steps_per_epoch: Steps per epoch, for step schedules and the log.
        seed: Seed of the initial weights and of dropout.
        optimizer: Update rule, learning rates, learning-rate schedule and precision.
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
        """Number of images in a step, over all workers."""
        return self.batch * self.images_per_sample

    def epoch(self, step: int) -> int:
        """Returns the epoch of a step, both counted from 0."""
        return int(step / self.steps_per_epoch)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step, before the factor of a parameter group."""
        factor = learning_rate_factor(self.optimizer, step, steps=self.schedule_steps, epoch=self.epoch(step))
        return self.optimizer.learning_rate * factor


class Learner(Protocol[AnyBatch]):
    """A network with its data and its losses, as the training loop uses them.

    An instance is pickled and sent to the workers, so it holds no network, device or open file.
    """

    @property
    def schedule(self) -> TrainingSchedule:
        """The schedule of the training."""

    @property
    def has_unused_parameters(self) -> bool:
        """Whether DDP needs `find_unused_parameters`, because some steps do not use all parameters."""

    @property
    def decodes_images(self) -> bool:
        """Whether batches are decoded from image files, instead of read from a cache that holds all of them."""

    def model(self) -> nn.Module:
        """Builds the network with its initial weights."""

    def decoder(self, shard: WorkerShard) -> Decode[AnyBatch]:
        """Returns a function that decodes the worker's rows of some steps: a dataclass with a field `shard`."""

    def loss_sums(self, model: Network, batch: AnyBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        """Computes the terms of the loss, float32, each a sum over the samples of a batch or of a part of it.

        The loss of the whole batch is the sum of all terms over its parts and workers, divided by the sum of `count`.
        """

    def count(self, batch: AnyBatch) -> int:
        """Returns the number of items that a batch's loss is averaged over: pairs, crops, or labeled pixels."""

    def image_uris(self, batch: AnyBatch) -> list[str]:
        """Returns the images of a batch, for messages."""

"""The training loop of one worker: any network of the project with DDP, checkpoints, and a log of its steps.

A learner says what is trained; this module says how: which worker sees which samples, how many of them at a time and
in which precision, when a checkpoint is kept, what is logged. Gradients are those of the whole batch whatever the
number of workers and micro batches, and everything random is drawn from (seed, row), so a restart from a checkpoint
continues as if nothing had happened.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import Squares
from mcis.datasets.index import shown
from mcis.datasets.sampling.batch_stream import AnyBatch, DecodeIn, WorkerShard, batches
from mcis.datasets.sampling.keyed_random import DrawPurpose, generator_seeds
from mcis.datasets.storage.threads import map_in_threads
from mcis.datasets.tables.memory_mapped import Features
from mcis.datasets.tags import Tags
from mcis.models.dropout import seed_dropout
from mcis.models.metrics import average_precision
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.devices import resolve_precision
from mcis.platform.engine.errors import memory_errors
from mcis.platform.engine.learner import Learner
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.engine.resuming import resume, write_checkpoint
from mcis.platform.engine.step_log import STEPS, StepLog, Throughput
from mcis.platform.networks.build import move_channels_last
from mcis.platform.networks.checkpoints import WEIGHTS, save_weights
from mcis.platform.runs.files import disk_errors, write_json

FIT = "fit.json"
_LOG_EVERY = 10
_PAUSE = 60.0
_CHUNK = 32  # images at a time


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Images whose mean average precision is logged at the end of epochs. It changes nothing of the training.

    Attributes:
        images, tags: of the N images, which have a tag each.
        scores: the network and what `images` reads, on its device -> class scores (B, K).
        every: epochs from one validation to the next; the last step always has one.
    """

    images: Squares | Features
    tags: Tags
    scores: Callable[[nn.Module, Tensor], Tensor]
    every: int = 1

    def due(self, done: int, *, steps: int, steps_per_epoch: float) -> bool:
        """Whether `done` updates end the training, or epochs after which it is validated."""
        length = self.every * steps_per_epoch
        return done == steps or int(done / length) > int((done - 1) / length)

    def precisions(
        self, model: nn.Module, shard: WorkerShard, autocast: Callable[[], Any], device: torch.device, threads: int
    ) -> NDArray[np.float64]:
        """Average precision of each class in percent, (K,), NaN for a class that no image has; the same on all workers.

        The weights are, too: each worker scores every world_size-th image. No more than the scores (N, K) is held.
        """
        scores = torch.zeros(len(self.tags), self.tags.classes, device=device)
        own = shard.positions(len(self.tags))
        chunks = [own[first : first + _CHUNK] for first in range(0, len(own), _CHUNK)]

        read: Callable[[NDArray[np.int64]], NDArray[Any]] = self.images
        model.eval()
        with torch.inference_mode():
            for chunk, values in zip(chunks, map_in_threads(read, chunks, threads=threads), strict=True):
                images = torch.from_numpy(values).to(device, non_blocking=True)
                with autocast():
                    scores[torch.from_numpy(chunk).to(device)] = self.scores(model, images).float()
        model.train()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(scores)  # an image's row is zero on all workers but the one that scores it
        return average_precision(scores.cpu().numpy().astype(np.float64), self.tags.matrix(np.arange(len(self.tags))))


@dataclass(frozen=True, kw_only=True)
class TrainingJob(Generic[AnyBatch]):
    """What travels to each worker of a training.

    Attributes:
        learner: what is trained.
        folder: where log, checkpoint and weights are written.
        label: name of the network in messages, and section of its configuration.
        about: what a reader of the weights has to know, in plain values; kept in their file.
        validation: what is scored while the network trains, or None.
        decode_in: where images are decoded.
        oom_micro_batch: micro-batch size after memory ran out with a larger one; None if it did not.
    """

    learner: Learner[AnyBatch]
    compute: ComputeConfig
    folder: Path
    label: str
    about: Mapping[str, Any]
    validation: Validation | None
    decode_in: DecodeIn
    oom_micro_batch: int | None = None


class FitResult(NamedTuple):
    """What a training left behind.

    Attributes:
        steps: updates of this call.
        samples: how many memory did for at a time, where it ran out with more; else None.
        precision: of the network's arithmetic.
        val_ap: average precision of each class on the validation's images at the end, percent, (K,), None for a class
            that no image has; None without a validation.
    """

    steps: int
    samples: int | None
    precision: str
    val_ap: list[float | None] | None

    def notes(self, label: str) -> tuple[str, ...]:
        """What a user should read of it: a precision other than float32, and memory that ran out."""
        precision = [f"the {label} was trained in {self.precision}"] if self.precision != "float32" else []
        memory = [f"memory did for {self.samples} samples of the {label} at a time"] if self.samples else []
        return (*precision, *memory)


def train_worker(settings: dict[str, Any]) -> None:
    """Trains as one worker of Ray Train; `settings["job"]` is the `TrainingJob`."""
    job: TrainingJob[Any] = settings["job"]
    size = "input_size" if job.label == "classifier" else "crop"
    memory_hint = f"compute.micro_batch, which changes no result, or {job.label}.batch or {job.label}.{size}"
    memory = memory_errors(f"training the {job.label}", memory_hint)
    with disk_errors(job.folder), memory:
        Trainer(job).train()


class Trainer(Generic[AnyBatch]):
    """One worker's part of a training; rank 0 writes the log, the checkpoints, and the weights at the end.

    Attributes:
        network: the network itself, without the wrapper of DDP.
        model: the network over all workers.
        shard: the worker's rows of the stream that are left.
        val_ap: average precision of each class at the last validation, (K,).
        micro_batch: samples at a time; None = all of a step's.
        kept, took: when the last checkpoint was written, and the seconds that it took.
        unchecked: of the updates whose losses have not been read yet, number, losses and images.
    """

    def __init__(self, job: TrainingJob[AnyBatch]):
        import ray.train
        import ray.train.torch

        self.job, self.learner, self.schedule = job, job.learner, job.learner.schedule
        context = ray.train.get_context()
        cores = max(1, (os.cpu_count() or 1) // context.get_local_world_size())
        torch.set_num_threads(job.compute.threads or cores)
        self.device = ray.train.torch.get_device()
        self.threads = cores if self.device.type == "cuda" else max(1, cores // 2)
        self.precision = resolve_precision(self.schedule.optimizer.precision, self.device)

        torch.manual_seed(self.schedule.seed)
        self.network = self.learner.model()
        move_channels_last(self.network, self.device)
        self.optimizer = build_optimizer(self.network, self.schedule.optimizer)
        start = resume(job.folder, self.network, self.optimizer, self.device)
        self.model: Any = ray.train.torch.prepare_model(
            self.network, parallel_strategy_kwargs={"find_unused_parameters": self.learner.has_unused_parameters}
        )
        self.model.train()

        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.shard = WorkerShard(self.rank, self.world_size, start, self.schedule.steps)
        self.log = StepLog(job.folder / STEPS, start) if self.rank == 0 else None
        self.kept, self.took = time.monotonic(), 0.0
        decoder, how = self.learner.decoder(self.shard), job.decode_in
        self.stream: Iterator[AnyBatch] = batches(
            decoder, batch=self.schedule.batch, shard=self.shard, decode_in=how, threads=self.threads
        )
        self.val_ap: NDArray[np.float64] | None = None
        self.micro_batch = job.oom_micro_batch or job.compute.micro_batch
        self.unchecked: list[tuple[int, dict[str, Tensor], list[str]]] = []
        self.throughput = Throughput(start, self.schedule.images_per_step)

    def train(self) -> None:
        """Trains from the last checkpoint to the last step."""
        for step in range(self.shard.start, self.shard.stop):
            with self.throughput.waiting():
                batch = next(self.stream)
            losses = self.train_step(batch, step)
            self.finish_step(batch, step, losses)
        if self.rank == 0:
            self._write_result()
        if self.world_size > 1:
            torch.distributed.barrier()

    def train_step(self, batch: AnyBatch, step: int) -> dict[str, Tensor]:
        """Updates the network once.

        Returns:
            What this worker's samples contribute to the loss of the whole batch: `loss`, and each of its terms.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate(step) * group["factor"]
        count = self._count_over_workers(batch)
        self.optimizer.zero_grad(set_to_none=True)
        terms = self.forward_backward_step(batch, step, count)
        self.optimizer.step()
        return {"loss": _sum(terms), **terms}

    def forward_backward_step(self, batch: AnyBatch, step: int, count: Tensor) -> dict[str, Tensor]:
        """Adds up the gradients of the batch's micro batches; returns the loss terms, divided by `count`."""
        rows, size = len(batch), self.micro_batch or len(batch)
        sample_numbers = step * self.schedule.batch + self.shard.positions(self.schedule.batch)
        sample_seeds = generator_seeds(DrawPurpose.DROPOUT, self.schedule.seed, sample_numbers)
        terms: dict[str, Tensor] = {}
        for first in range(0, rows, size):
            # Workers may have another number of micro batches: they meet in the last one's backward pass alone.
            is_last = first + size >= rows
            with contextlib.nullcontext() if self.world_size == 1 or is_last else self.model.no_sync():
                seed_dropout(self.network, sample_seeds[first : first + size])
                sums = self.learner.loss_sums(self._forward, batch.rows(first, first + size), step, self.device)
                for name, value in sums.items():
                    terms[name] = terms.get(name, 0) + value.detach() / count
                # DDP takes the mean over workers; the batch's loss is their sum.
                (_sum(sums) / count * self.world_size).backward()
        return terms

    def finish_step(self, batch: AnyBatch, step: int, losses: dict[str, Tensor]) -> None:
        """Validates, logs and keeps a checkpoint, each where it is due after update `step`.

        Nothing is read from the device where none of them is: a GPU would have no work while it waits for the answer.

        Raises:
            UserError: losses since the last check, or the weights, are not finite; nothing of them is kept.
        """
        self.unchecked.append((step, losses, self.learner.image_uris(batch)))
        done, schedule = step + 1, self.schedule
        is_last = done == schedule.steps
        keep = is_last or done % self.job.compute.checkpoint_steps == 0
        keep = keep or (self.rank == 0 and time.monotonic() - self.kept > max(_PAUSE, 20 * self.took))
        validation, steps, per_epoch = self.job.validation, schedule.steps, schedule.steps_per_epoch
        validate = validation is not None and validation.due(done, steps=steps, steps_per_epoch=per_epoch)
        log = done % _LOG_EVERY == 0 or is_last or validate
        if log or keep:
            self._check_finite()
        if log:
            self._log_step(step, losses, validate=validate)
        if keep and self.log:
            self.log.flush()
        if keep and not is_last and self.rank == 0:
            began = time.monotonic()
            write_checkpoint(self.job.folder, self.network, self.optimizer, done)
            self.kept = time.monotonic()
            self.took = self.kept - began

    def _log_step(self, step: int, losses: Mapping[str, Tensor], *, validate: bool) -> None:
        """Writes a record of update `step`; `losses` are added up over the workers."""
        done = step + 1
        values = torch.stack(list(losses.values()))
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        record = {
            "step": done,
            "epoch": round(done / self.schedule.steps_per_epoch, 4),
            **dict(zip(losses, values.tolist(), strict=True)),
            "learning_rate": self.schedule.learning_rate(step),
            **self.throughput.record(done),
        }
        if validate and (validation := self.job.validation):
            self.val_ap = validation.precisions(self.network, self.shard, self._autocast, self.device, self.threads)
            record["val_map"] = float(np.nanmean(self.val_ap))
        if self.log:
            self.log.write(record)
        self.throughput.restart(done)

    def _write_result(self) -> None:
        save_weights(self.network, self.job.folder / WEIGHTS, self.job.about)
        val_ap = None if self.val_ap is None else [None if np.isnan(v) else round(float(v), 2) for v in self.val_ap]
        result = FitResult(self.shard.steps, self.job.oom_micro_batch, self.precision, val_ap)
        write_json(self.job.folder / FIT, result._asdict())

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        """The network over all workers, in the precision of the training."""
        with self._autocast():
            return self.model(*arguments, **options)

    def _count_over_workers(self, batch: AnyBatch) -> Tensor:
        """How many terms the whole batch's losses are sums of, at least 1."""
        count = torch.tensor(float(self.learner.count(batch)), device=self.device)
        if self.world_size > 1:
            torch.distributed.all_reduce(count)
        return count.clamp_(min=1)

    def _check_finite(self) -> None:
        """Stops before anything is kept, so that the last checkpoint and the weights stay sound."""
        losses = torch.stack([losses["loss"] for _, losses, _ in self.unchecked]).isfinite()
        weights = torch.stack([p.isfinite().all() for p in self.network.parameters()]).all()
        *finite, sound = torch.cat([losses, weights[None]]).tolist()
        step, values, uris = self.unchecked[-1 if all(finite) else finite.index(False)]
        self.unchecked.clear()
        if all(finite) and sound:
            return
        label, what = self.job.label, {name: float(value) for name, value in values.items()}
        whose = f" of worker {self.rank} (or with another's, a step before)" if self.world_size > 1 else ""
        raise UserError(
            f"training the {label} is not finite at step {step}: {'gradients' if all(finite) else f'loss {what}'}, "
            f"with the images{whose} {shown(uris, most=64)}",
            "a finite loss and finite gradients",
            f"look at these images; lower {label}.optimizer.learning_rate, or raise {label}.optimizer.warm_up",
        )


def _sum(terms: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(terms.values())).sum()

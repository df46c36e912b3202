"""The training loop of one worker: DDP, micro-batches, precision, checkpoints, and the log of steps.

A learner says what is trained, the trainer says how: which worker handles which samples, how many at a time and in
which precision, when a checkpoint is written and what is logged. Gradients are those of the whole batch for any number
of workers and micro-batches. Random numbers are functions of (seed, row). So a training that restarts from a checkpoint
continues as if it had not been interrupted.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.sampling.batch_stream import AnyBatch, WorkerShard, decode_in_threads
from mcis.datasets.sampling.keyed_random import DrawPurpose, generator_seeds
from mcis.models.dropout import seed_dropout
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.checkpoint import load_checkpoint, write_checkpoint
from mcis.platform.engine.decode_tasks import decode_in_tasks
from mcis.platform.engine.devices import resolve_precision
from mcis.platform.engine.errors import memory_errors
from mcis.platform.engine.learner import Learner
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.engine.step_log import STEPS, StepLog, Throughput
from mcis.platform.engine.validation import Validation
from mcis.platform.networks.build import move_channels_last
from mcis.platform.networks.weights_files import WEIGHTS, save_weights
from mcis.platform.runs.files import disk_errors, write_json

FIT = "fit.json"
"""The file of the `FitResult` in the folder of a training."""
_LOG_INTERVAL = 10
"""Steps between two records of the log."""
_MIN_CHECKPOINT_INTERVAL = 60.0
"""Minimum seconds between two checkpoints, apart from those that `compute.checkpoint_steps` asks for."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob(Generic[AnyBatch]):
    """What is sent to each worker of a training.

    Attributes:
        learner: The network with its data and its losses.
        compute: The section `compute` of the configuration.
        folder: Where log, checkpoint and weights are written.
        label: Name of the network in messages, and section of its configuration.
        about: Description of the network in plain values, written to the file of its weights.
        validation: Images that are scored while the network trains, or None.
        decoder: Reference to the decoder in Ray's object store, if tasks decode. None: threads of the workers decode.
        oom_micro_batch: Micro-batch size after memory ran out with a larger one. None: it did not.
    """

    learner: Learner[AnyBatch]
    compute: ComputeConfig
    folder: Path
    label: str
    about: Mapping[str, Any]
    validation: Validation | None
    decoder: Any | None
    oom_micro_batch: int | None = None


class FitResult(NamedTuple):
    """The result of a training.

    Attributes:
        steps_since_restart: Number of steps since the last restart.
        oom_micro_batch: Micro-batch size after memory ran out with a larger one. None: it did not.
        precision: Precision of the network's arithmetic.
        val_ap: Average precision of each class at the last validation, percent, (K,), None for a class that no image
            has. None: there was no validation.
    """

    steps_since_restart: int
    oom_micro_batch: int | None
    precision: str
    val_ap: list[float | None] | None

    def notes(self, label: str) -> tuple[str, ...]:
        """Returns notes for the user: on a precision other than float32, and on memory that ran out."""
        notes = []
        if self.precision != "float32":
            notes.append(f"the {label} was trained in {self.precision}")
        if self.oom_micro_batch:
            notes.append(
                f"out of memory while training the {label}: continued with micro-batches of {self.oom_micro_batch}"
            )
        return tuple(notes)


def train_worker(settings: dict[str, Any]) -> None:
    """Trains as one worker of Ray Train. `settings["job"]` is the reference to the `TrainingJob`."""
    import ray

    job: TrainingJob[Any] = ray.get(settings["job"])
    size_key = "input_size" if job.label == "classifier" else "crop"
    memory_hint = f"lower compute.micro_batch, which changes no result, or {job.label}.batch or {job.label}.{size_key}"
    with disk_errors(job.folder), memory_errors(f"training the {job.label}", memory_hint):
        Trainer(job).train()


class _UncheckedStep(NamedTuple):
    """A step whose losses have not been read from the device yet.

    Attributes:
        step: The step, from 0.
        losses: The losses that `Trainer.train_step` returned.
        image_uris: The images of this worker's samples.
    """

    step: int
    losses: dict[str, Tensor]
    image_uris: list[str]


class Trainer(Generic[AnyBatch]):
    """One worker of a training. Rank 0 writes the log, the checkpoints, and the weights at the end.

    Attributes:
        network: The network itself.
        model: The network, wrapped in DDP if there are several workers.
        device: The device of the network.
        threads: Number of threads that decode images.
        precision: Precision of the network's arithmetic.
        shard: The remaining rows of this worker in the stream.
        val_ap: Average precision of each class at the last validation, (K,). None: there was none yet.
        micro_batch: Samples at a time. None: all samples of a step.
        last_checkpoint_time: When the last checkpoint was written, or the training started; see `time.monotonic`.
        checkpoint_seconds: How long it took to write the last checkpoint.
        unchecked: The steps whose losses have not been read from the device yet.
    """

    def __init__(self, job: TrainingJob[AnyBatch]):
        import ray.train
        import ray.train.torch

        self.job = job
        self.learner = job.learner
        self.schedule = job.learner.schedule

        context = ray.train.get_context()
        self.rank = context.get_world_rank()
        self.world_size = context.get_world_size()
        cores_per_worker = max(1, (os.cpu_count() or 1) // context.get_local_world_size())
        torch.set_num_threads(job.compute.threads or cores_per_worker)
        # With a single worker, `get_device` returns a visible GPU even if `compute.gpu` is not set.
        self.device = ray.train.torch.get_device() if job.compute.gpu else torch.device("cpu")
        # On a CPU, decoding shares the cores with the network.
        self.threads = cores_per_worker if self.device.type == "cuda" else max(1, cores_per_worker // 2)
        self.precision = resolve_precision(self.schedule.optimizer.precision, self.device)

        torch.manual_seed(self.schedule.seed)
        self.network = self.learner.model()
        move_channels_last(self.network, self.device)
        self.optimizer = build_optimizer(self.network, self.schedule.optimizer)
        start = load_checkpoint(job.folder, self.network, self.optimizer, self.device)
        self.model: Any = ray.train.torch.prepare_model(
            self.network,
            move_to_device=self.device,
            parallel_strategy_kwargs={"find_unused_parameters": self.learner.has_unused_parameters},
        )
        self.model.train()

        self.shard = WorkerShard(self.rank, self.world_size, start, self.schedule.steps)
        self.stream = self._decoded_batches()
        self.micro_batch = job.oom_micro_batch or job.compute.micro_batch

        self.log = StepLog(job.folder / STEPS, start) if self.rank == 0 else None
        self.throughput = Throughput(start, self.schedule.images_per_step)
        self.val_ap: NDArray[np.float64] | None = None
        self.last_checkpoint_time = time.monotonic()
        self.checkpoint_seconds = 0.0
        self.unchecked: list[_UncheckedStep] = []

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

    def _decoded_batches(self) -> Iterator[AnyBatch]:
        """Returns the batches of this worker's shard."""
        if self.job.decoder is None:
            return decode_in_threads(self.learner.decoder(self.shard), shard=self.shard, threads=self.threads)
        return decode_in_tasks(self.job.decoder, shard=self.shard)

    def train_step(self, batch: AnyBatch, step: int) -> dict[str, Tensor]:
        """Takes one optimizer step.

        Returns:
            The contribution of this worker's samples to the loss of the whole batch, `loss`, and to each of its terms.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate(step) * group["factor"]
        count = self._count_over_workers(batch)
        self.optimizer.zero_grad(set_to_none=True)
        terms = self.forward_backward_step(batch, step, count)
        self.optimizer.step()
        return {"loss": _sum(terms), **terms}

    def forward_backward_step(self, batch: AnyBatch, step: int, count: Tensor) -> dict[str, Tensor]:
        """Accumulates the gradients of the micro-batches. Returns the terms of the loss, divided by `count`."""
        num_samples = len(batch)
        micro_batch = self.micro_batch or num_samples
        sample_numbers = step * self.schedule.batch + self.shard.positions(self.schedule.batch)
        sample_seeds = generator_seeds(DrawPurpose.DROPOUT, self.schedule.seed, sample_numbers)

        terms: dict[str, Tensor] = {}
        for first in range(0, num_samples, micro_batch):
            last = first + micro_batch
            with self._synchronized(is_last=last >= num_samples):
                seed_dropout(self.network, sample_seeds[first:last])
                sums = self.learner.loss_sums(self._forward, batch.rows(first, last), step, self.device)
                for name, value in sums.items():
                    terms[name] = terms.get(name, 0) + value.detach() / count
                # DDP averages gradients over workers, but the batch's loss is the sum over workers.
                (_sum(sums) / count * self.world_size).backward()
        return terms

    def finish_step(self, batch: AnyBatch, step: int, losses: dict[str, Tensor]) -> None:
        """Validates, logs and writes a checkpoint after a step, as far as each is due.

        If none is due, nothing is read from the device: a GPU would idle until the answer has arrived.

        Raises:
            UserError: Losses since the last check, or the weights, are not finite. Nothing of them is written.
        """
        self.unchecked.append(_UncheckedStep(step, losses, self.learner.image_uris(batch)))
        num_done = step + 1
        is_last = num_done == self.schedule.steps
        must_validate = self._is_validation_due(num_done)
        must_log = is_last or must_validate or num_done % _LOG_INTERVAL == 0
        must_save = is_last or self._is_checkpoint_due(num_done)

        if must_log or must_save:
            self._check_finite()
        if must_log:
            self._log_step(step, losses, must_validate=must_validate)
        if must_save and self.log:
            self.log.flush()
        if must_save and not is_last and self.rank == 0:  # after the last step, `train` writes the weights instead
            self._write_checkpoint(num_done)

    @contextlib.contextmanager
    def _synchronized(self, *, is_last: bool) -> Iterator[None]:
        """Lets DDP exchange gradients in the last micro-batch only.

        Workers may have different numbers of micro-batches, so they synchronize in the last backward pass.
        """
        if self.world_size == 1 or is_last:
            yield
        else:
            with self.model.no_sync():
                yield

    def _is_validation_due(self, num_done: int) -> bool:
        """Returns whether to validate after `num_done` steps."""
        validation = self.job.validation
        if validation is None:
            return False
        return validation.is_due(num_done, steps=self.schedule.steps, steps_per_epoch=self.schedule.steps_per_epoch)

    def _is_checkpoint_due(self, num_done: int) -> bool:
        """Returns whether to write a checkpoint after `num_done` steps.

        One is due every `compute.checkpoint_steps`, and on rank 0 also after some time. These further ones take at most
        5 % of the time to write.
        """
        if num_done % self.job.compute.checkpoint_steps == 0:
            return True
        if self.rank != 0:
            return False
        interval = max(_MIN_CHECKPOINT_INTERVAL, 20 * self.checkpoint_seconds)
        return time.monotonic() - self.last_checkpoint_time > interval

    def _write_checkpoint(self, num_done: int) -> None:
        start_time = time.monotonic()
        write_checkpoint(self.job.folder, self.network, self.optimizer, num_done)
        self.last_checkpoint_time = time.monotonic()
        self.checkpoint_seconds = self.last_checkpoint_time - start_time

    def _log_step(self, step: int, losses: Mapping[str, Tensor], *, must_validate: bool) -> None:
        """Writes a record of a step, with its losses summed over the workers."""
        num_done = step + 1
        values = torch.stack(list(losses.values()))
        if self.world_size > 1:
            torch.distributed.all_reduce(values)

        record = {
            "step": num_done,
            "epoch": round(num_done / self.schedule.steps_per_epoch, 4),
            **dict(zip(losses, values.tolist(), strict=True)),
            "learning_rate": self.schedule.learning_rate(step),
            **self.throughput.record(num_done),
        }
        if must_validate and self.job.validation:
            self.val_ap = self.job.validation.average_precisions(
                self.network, self.shard, self._autocast, self.device, self.threads, self.micro_batch
            )
            record["val_map"] = float(np.nanmean(self.val_ap))

        if self.log:
            self.log.write(record)
        self.throughput.restart(num_done)

    def _write_result(self) -> None:
        save_weights(self.network, self.job.folder / WEIGHTS, self.job.about)
        val_ap = None
        if self.val_ap is not None:
            val_ap = [None if np.isnan(value) else round(float(value), 2) for value in self.val_ap]
        result = FitResult(self.shard.steps, self.job.oom_micro_batch, self.precision, val_ap)
        write_json(self.job.folder / FIT, result._asdict())

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        """Calls the model in the precision of the training."""
        with self._autocast():
            return self.model(*arguments, **options)

    def _count_over_workers(self, batch: AnyBatch) -> Tensor:
        """Returns the number of items that the whole batch's loss is averaged over, at least 1."""
        count = torch.tensor(float(self.learner.count(batch)), device=self.device)
        if self.world_size > 1:
            torch.distributed.all_reduce(count)
        return count.clamp_(min=1)

    def _check_finite(self) -> None:
        """Raises UserError before anything is written if a loss or a weight is not finite.

        So the last checkpoint and the weights stay sound.
        """
        losses_are_finite = torch.stack([unchecked.losses["loss"] for unchecked in self.unchecked]).isfinite()
        weights_are_finite = torch.stack([parameter.isfinite().all() for parameter in self.network.parameters()]).all()
        # All flags are read from the device at once: one for each unchecked step, and that of the weights.
        *step_flags, weights_flag = torch.cat([losses_are_finite, weights_are_finite[None]]).tolist()
        checked = self.unchecked
        self.unchecked = []

        for checked_step, is_finite in zip(checked, step_flags, strict=True):
            if not is_finite:
                values = {name: float(value) for name, value in checked_step.losses.items()}
                self._raise_not_finite(checked_step, f"loss {values}")
        if not weights_flag:
            self._raise_not_finite(checked[-1], "gradients")

    def _raise_not_finite(self, failed: _UncheckedStep, cause: str) -> NoReturn:
        label = self.job.label
        owner = f" of worker {self.rank} (or of another worker, a step before)" if self.world_size > 1 else ""
        raise UserError(
            f"training the {label} is not finite at step {failed.step}: {cause}, "
            f"with the images{owner} {join_shortened(failed.image_uris, max_names=64)}",
            "a finite loss and finite gradients",
            f"look at these images; lower {label}.optimizer.learning_rate, or raise {label}.optimizer.warm_up",
        )


def _sum(terms: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(terms.values())).sum()

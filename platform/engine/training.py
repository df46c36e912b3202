"""The Ray Train edge: one loop that trains any network of the project with DDP, checkpoints, and a log of its steps.

A learner says what is trained; this module says how: which worker sees which samples, how many of them at a time and
in which precision, when a checkpoint is kept, what is logged. Gradients are those of the whole batch whatever the
number of workers and micro batches, and everything random is drawn from (seed, row), so a restart from a checkpoint
continues as if nothing had happened.
"""

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mcis.datasets.draws import Draw, generator_seeds
from mcis.datasets.errors import UserError
from mcis.datasets.index import shown
from mcis.datasets.stream import Batch, Decoder, Place, Share, batches
from mcis.models.dropout import number_samples
from mcis.platform.config.sections import ComputeConfig, Optimizer
from mcis.platform.engine.optimizers import build_optimizer, learning_rate
from mcis.platform.engine.runtime import check_cpus, user_error_in, uses_gpu
from mcis.platform.engine.validation import Scorer, Validation
from mcis.platform.networks.checkpoints import WEIGHTS, save, save_weights
from mcis.platform.runs.progress import bar, follow
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import disk_errors, read_json, write_json, written_aside

STEPS = "steps.jsonl"
FIT = "fit.json"
_CHECKPOINTS = "checkpoints"
_LOG_EVERY = 10


Network = Callable[..., Any]
"""The network that a learner calls: over all workers, in the precision of the training."""


class Learner(Protocol):
    """What is trained. An instance travels to the workers by pickle, so it holds plain values alone."""

    @property
    def batch(self) -> int:
        """Samples a step, over all workers."""

    @property
    def images(self) -> int:
        """Images a sample: 2 for a pair."""

    @property
    def steps(self) -> int:
        """Updates."""

    @property
    def schedule_steps(self) -> int:
        """Updates that the learning rate's schedule spans."""

    @property
    def epoch_steps(self) -> float:
        """Updates an epoch, for step schedules and the log."""

    @property
    def seed(self) -> int:
        """Of the initial weights and of dropout."""

    @property
    def optimizer(self) -> Optimizer:
        """Update rule, rates, schedule and precision."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What a reader of the weights has to know, in plain values; kept in their file."""

    @property
    def validation(self) -> Validation | None:
        """What is validated on, or nothing."""

    def model(self) -> nn.Module:
        """The network with its initial weights."""

    def decoder(self, share: Share) -> Decoder:
        """Decodes the worker's rows."""

    def image_uris(self, batch: Batch) -> list[str]:
        """The images of a batch, for messages."""

    def count(self, batch: Batch) -> int:
        """How many a batch's losses are sums of: pairs, labeled pixels."""

    def losses(self, model: Network, batch: Batch, step: int, device: torch.device) -> dict[str, Tensor]:
        """Loss terms, float32, as sums over the samples of a batch, or of any part of it.

        The whole batch's loss is the sum of these over its parts and the workers, divided by that of `count`.
        """


class FitResult(NamedTuple):
    """What a training left behind.

    Attributes:
        seconds: in the loop.
        steps: updates of this call.
        waiting: share of the time spent waiting for data.
        precision: of the network's arithmetic.
        val_ap: average precision of each class on the validation's images at the end, percent, (K,), None for a class
            that no image has; None without a validation.
    """

    seconds: float
    steps: int
    waiting: float
    precision: str
    val_ap: list[float | None] | None


class _StepLog:
    """Rank 0's log: one JSON line every few steps, cut back to the checkpoint after a restart."""

    def __init__(self, path: Path, start: int):
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    break  # the line that a kill cut
                if record["step"] <= start:
                    kept.append(line + "\n")
        with written_aside(path) as aside:
            aside.write_text("".join(kept))
        self.file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")


def _place(model: Any, device: torch.device) -> None:
    """Moves a network to its device, channels last, the order in which convolutions are fastest."""
    model.to(device, memory_format=torch.channels_last)


def _checkpoint(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes all of a training's state: weights, the optimizer's buffers, and the number of updates done.

    The rest is a function of that number: the learning rate (`learning_rate`), the position in the stream (batch
    `step` comes next, whatever the number of workers), and what is random (drawn from seed and row).
    """
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    save(state, Path(folder) / "checkpoint.pt")


def _resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Loads the last checkpoint, if there is one, into the network and its optimizer; the updates that it has done.

    Raises:
        UserError: the checkpoint is damaged, or of another configuration.
    """
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if not checkpoint:
        return 0
    try:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "checkpoint.pt"), map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except OSError:
        raise
    except Exception as error:  # whatever a damaged file makes the unpickler raise
        raise UserError(
            f"the last checkpoint in {folder} does not fit this configuration: {str(error)[:300]}",
            "a checkpoint of the same network and optimizer",
            f"remove {folder} and repeat the command",
        ) from None


def precision_key(optimizer: Optimizer, compute: ComputeConfig) -> str:
    """What a training's result depends on of its precision: `auto` means another one on GPUs than on CPUs."""
    return "auto on GPUs" if optimizer.precision == "auto" and uses_gpu(compute) else optimizer.precision


def _precision(wanted: Literal["auto", "float32", "bf16"], device: torch.device) -> Literal["float32", "bf16"]:
    if wanted != "auto":
        return wanted
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def _worker(settings: dict[str, Any]) -> None:
    """The training loop of one worker, with its disk's errors in words."""
    with disk_errors(Path(settings["folder"])):
        _train(settings)


def _train(settings: dict[str, Any]) -> None:
    """The loop itself; rank 0 logs, and writes the weights at the end."""
    import ray.train
    import ray.train.torch

    learner: Learner = settings["learner"]
    compute: ComputeConfig = settings["compute"]
    folder = Path(settings["folder"])
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    cores = max(1, (os.cpu_count() or 1) // context.get_local_world_size())
    torch.set_num_threads(compute.threads or cores)
    device = ray.train.torch.get_device()
    torch.manual_seed(learner.seed)
    plain = learner.model()
    _place(plain, device)
    optimizer = build_optimizer(plain, learner.optimizer)
    start = _resume(folder, plain, optimizer, device)
    model: Any = ray.train.torch.prepare_model(plain)
    model.train()
    precision = _precision(learner.optimizer.precision, device)

    def autocast() -> Any:
        return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")

    def network(*arguments: Any) -> Any:
        with autocast():
            return model(*arguments)

    log = _StepLog(folder / STEPS, start) if rank == 0 else None
    share = Share(rank, world, start, learner.steps)
    rows = share.rows(learner.batch)
    micro = compute.micro_batch or rows
    threads = compute.decode_threads or (cores if device.type == "cuda" else max(1, cores // 2))
    stream = batches(learner.decoder(share), batch=learner.batch, share=share, place=settings["place"], threads=threads)
    scorer = None if learner.validation is None else Scorer(learner.validation, share, threads)
    val_ap: NDArray[np.float64] | None = None
    began = last = time.monotonic()
    waited = waited_all = 0.0
    logged = start
    for step in range(start, learner.steps):
        before = time.monotonic()
        batch = next(stream)
        waited += time.monotonic() - before
        epoch = int(step / learner.epoch_steps)
        factor = learning_rate(learner.optimizer, step, steps=learner.schedule_steps, epoch=epoch)
        for group in optimizer.param_groups:
            group["lr"] = learner.optimizer.learning_rate * factor * group["factor"]
        sample_rows = step * learner.batch + np.arange(rank, learner.batch, world)
        samples = generator_seeds(Draw.DROPOUT, learner.seed, sample_rows)
        count = torch.tensor(float(learner.count(batch)), device=device)
        if world > 1:
            torch.distributed.all_reduce(count)
        count.clamp_(min=1)
        optimizer.zero_grad(set_to_none=True)
        terms: dict[str, Tensor] = {}
        for first in range(0, rows, micro):
            # Workers may have another number of micro batches: they meet in the last one's backward pass alone.
            last_one = first + micro >= rows
            with contextlib.nullcontext() if world == 1 or last_one else model.no_sync():
                number_samples(plain, samples[first : first + micro])
                part = learner.losses(network, {k: v[first : first + micro] for k, v in batch.items()}, step, device)
                for name, value in part.items():
                    terms[name] = terms.get(name, 0) + value.detach() / count
                if last_one:
                    loss = torch.stack(list(terms.values())).sum()
                    if not torch.isfinite(loss):
                        named = {name: float(value) for name, value in terms.items()}
                        _not_finite(settings["label"], step, f"loss {named}", learner.image_uris(batch))
                # DDP takes the mean over workers; the batch's loss is their sum.
                (torch.stack(list(part.values())).sum() / count * world).backward()
        optimizer.step()
        done = step + 1
        validated = scorer is not None and scorer.due(done, steps=learner.steps, epoch_steps=learner.epoch_steps)
        kept = done == learner.steps or done % compute.checkpoint_steps == 0
        if (kept or validated) and not all(bool(p.isfinite().all()) for p in plain.parameters()):
            _not_finite(settings["label"], step, "gradients", learner.image_uris(batch))
        if done % _LOG_EVERY == 0 or done == learner.steps or validated:
            values = torch.stack([loss, *terms.values()])
            if world > 1:
                torch.distributed.all_reduce(values)
            numbers = [float(v) for v in values]
            now = time.monotonic()
            record = {
                "step": done,
                "epoch": round(done / learner.epoch_steps, 4),
                **dict(zip(["loss", *terms], numbers, strict=True)),
                "learning_rate": learner.optimizer.learning_rate * factor,
                "images_per_second": (done - logged) * learner.batch * learner.images / (now - last),
                "waiting": waited / max(now - last, 1e-9),
                "time": time.time(),
            }
            if scorer is not None and validated:
                val_ap = scorer(plain, autocast, device)
                record["val_map"] = float(np.nanmean(val_ap))
            if log:
                log.write(record)
            last, logged = time.monotonic(), done  # a validation is no part of the rate
            waited_all, waited = waited_all + waited, 0.0
        if kept and done < learner.steps:
            with tempfile.TemporaryDirectory() as directory:
                if rank == 0:
                    _checkpoint(directory, plain, optimizer, done)
                checkpoint = ray.train.Checkpoint.from_directory(directory) if rank == 0 else None
                ray.train.report({"step": done}, checkpoint=checkpoint)
    if rank == 0:
        save_weights(plain, folder / WEIGHTS, learner.about)
        seconds = time.monotonic() - began
        result = FitResult(
            seconds=seconds,
            steps=learner.steps - start,
            waiting=waited_all / max(seconds, 1e-9),
            precision=precision,
            val_ap=None if val_ap is None else [None if np.isnan(v) else round(float(v), 2) for v in val_ap],
        )
        write_json(folder / FIT, result._asdict())
    if world > 1:
        torch.distributed.barrier()


def _not_finite(label: str, step: int, what: str, uris: list[str]) -> NoReturn:
    """Stops before anything is kept, so that the last checkpoint and the weights stay sound."""
    raise UserError(
        f"training the {label} is not finite at step {step}: {what}, with the images {shown(uris, most=64)}",
        "a finite loss and finite gradients",
        f"look at these images; lower {label}.optimizer.learning_rate, or raise {label}.optimizer.warm_up",
    )


def _interruptible(call: Callable[[], Any]) -> None:
    """Runs `call` in a thread, so that Ctrl-C ends this process as it does elsewhere.

    In the main thread Ray Train would put a handler of its own in Ctrl-C's place, and leave it there.
    """
    failure: list[BaseException] = []

    def target() -> None:
        try:
            call()
        except BaseException as error:  # handed on to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=0.2)
    if failure:
        raise failure[0]


def fit(learner: Learner, folder: Path, compute: ComputeConfig, tracker: Tracker, *, label: str) -> FitResult:
    """Trains a learner with Ray Train and writes `weights.pt` and `steps.jsonl` into `folder`.

    A second call on the same folder continues from the last checkpoint in it, and does nothing if the training had
    ended. Meanwhile the log of the steps moves a progress bar and goes to MLflow.

    Raises:
        UserError: the cluster is too small, or what a worker raised as such.
    """
    import ray
    import ray.train
    import ray.train.torch

    class StopAtUserErrors(ray.train.UserCallback):
        """Restarts are for lost workers: what its owner has to mend would only fail again."""

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            for error in worker_exceptions.values():
                known = user_error_in(error)
                if known:
                    raise known

    if (folder / FIT).exists():
        return _left_behind(folder)
    gpu = uses_gpu(compute)
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    alone = nodes == 1 or compute.min_workers is not None  # elastic workers may leave no CPU to tasks
    place: Place = ("threads" if alone else "tasks") if compute.decode == "auto" else compute.decode
    check_cpus(compute, place)
    resources = {"CPU": compute.worker_cpus} | ({"GPU": 1.0} if gpu else {})

    # Two numbers make it elastic, which Ray's stubs do not know.
    workers: Any = (compute.min_workers, compute.workers) if compute.min_workers else compute.workers
    # The folder of a stage in work carries the stage's key, so a checkpoint found in it is this configuration's.
    trainer = ray.train.torch.TorchTrainer(
        _worker,
        train_loop_config={
            "learner": learner,
            "compute": compute,
            "folder": str(folder),
            "place": place,
            "label": label,
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers,
            use_gpu=gpu,
            resources_per_worker=resources,
        ),
        run_config=ray.train.RunConfig(
            name=_CHECKPOINTS,
            storage_path=str(folder),
            failure_config=ray.train.FailureConfig(max_failures=compute.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            callbacks=[StopAtUserErrors()],  # type: ignore[list-item]  # no Callback to the stubs
        ),
    )
    each = learner.batch * learner.images
    with bar(label, learner.steps * each, "images") as progress:

        def on_records(records: list[dict[str, Any]]) -> None:
            newest = records[-1]
            progress.update(newest["step"] * each, f"epoch {newest['epoch']:.1f} loss {newest['loss']:.3f}")
            tracker.steps(label, records)

        with follow(folder / STEPS, on_records):
            _interruptible(trainer.fit)
    return _left_behind(folder)


def _left_behind(folder: Path) -> FitResult:
    """Of a training that has ended: its checkpoints go, several times the size of the weights."""
    shutil.rmtree(folder / _CHECKPOINTS, ignore_errors=True)
    return FitResult(**read_json(folder / FIT))

"""The Ray Train edge: one loop that trains any network of the project with DDP, checkpoints, and a log of its steps.

A learner says what is trained; this module says how: which worker sees which samples, when a checkpoint is kept, what
is logged. Gradients are those of the whole batch whatever the number of workers, and everything random is drawn from
(seed, step) or (seed, epoch, image), so a restart from a checkpoint continues as if nothing had happened.
"""

import io
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

from mcis.datasets.errors import UserError
from mcis.datasets.index import shown
from mcis.datasets.stream import Batch, Decoder, Share, batches
from mcis.models.backbones import Backbone
from mcis.platform.config import ComputeConfig, Optimiser
from mcis.platform.progress import bar, follow
from mcis.platform.runtime import check_cpus, user_error_in, uses_gpu
from mcis.platform.tracking import Tracker
from mcis.platform.workspace import disk_errors, written_aside

WEIGHTS = "weights.pt"
STEPS = "steps.jsonl"
_LOG_EVERY = 10


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
    def optimiser(self) -> Optimiser:
        """Update rule, rates and schedule."""

    def model(self) -> nn.Module:
        """The network with its initial weights."""

    def decoder(self, share: Share) -> Decoder:
        """Decodes the worker's rows."""

    def image_uris(self, batch: Batch) -> list[str]:
        """The images of a batch, for messages."""

    def losses(self, model: nn.Module, batch: Batch, step: int, device: torch.device) -> dict[str, Tensor]:
        """Loss terms of the worker's samples; their sum over all workers is the whole batch's loss."""


class FitResult(NamedTuple):
    """What a training left behind: seconds in the loop, updates of this call, and the share of waiting for data."""

    seconds: float
    steps: int
    waiting: float


def learning_rate(optimiser: Optimiser, step: int, *, steps: int, epoch: int) -> float:
    """Factor of the learning rate at update `step` of `steps`, in `epoch`."""
    done = step / max(steps, 1)
    if optimiser.warm_up and done < optimiser.warm_up:
        return min(1.0, (step + 1) / max(1.0, optimiser.warm_up * steps))
    if optimiser.schedule == "step":
        return float(optimiser.step_factor ** sum(epoch >= e for e in optimiser.step_epochs))
    rest = (done - optimiser.warm_up) / (1 - optimiser.warm_up) if optimiser.warm_up < 1 else 1.0
    if optimiser.schedule == "poly":
        return float((1 - rest) ** optimiser.poly_power)
    return 0.5 * (1 + math.cos(math.pi * rest))


def build_optimiser(model: nn.Module, settings: Optimiser) -> torch.optim.Optimizer:
    """The optimiser with a group for each learning rate factor: new or pretrained layer, weight or bias (RECIPE)."""
    pretrained: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, Backbone):
            for key, _ in module.named_parameters():
                if not key.startswith(module.new_layers or ("\0",)):
                    pretrained.add(f"{name}.{key}")
    groups: dict[float, list[nn.Parameter]] = {}
    for key, parameter in model.named_parameters():
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


def load_weights(model: nn.Module, path: Path) -> None:
    """Loads weights that a training here wrote.

    Raises:
        UserError: the file is damaged or of another configuration.
    """
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # whatever a damaged file makes the unpickler raise
        raise UserError(
            f"{path} does not fit this configuration: {str(error)[:300]}",
            "weights of the same networks",
            "repeat the command with --from the training stage",
        ) from None


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


def save(state: Any, path: Path) -> None:
    """Writes tensors, aside and renamed."""
    content = io.BytesIO()  # torch reports a full disk in its own way, a file as the operating system does
    torch.save(state, content)
    with written_aside(path) as aside:
        aside.write_bytes(content.getbuffer())


def _checkpoint(folder: str, model: nn.Module, optimiser: torch.optim.Optimizer, step: int) -> None:
    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}
    save(state, Path(folder) / "checkpoint.pt")


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
    optimiser = build_optimiser(plain, learner.optimiser)
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "checkpoint.pt"), map_location=device, weights_only=True)
        plain.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        start = state["step"]
    model = ray.train.torch.prepare_model(plain)
    model.train()
    log = _StepLog(folder / STEPS, start) if rank == 0 else None
    share = Share(rank, world, start, learner.steps)
    stream = batches(
        learner.decoder(share),
        batch=learner.batch,
        share=share,
        place=settings["place"],
        threads=compute.decode_threads or (cores if device.type == "cuda" else max(1, cores // 2)),
    )
    began = last = time.monotonic()
    waited = waited_all = 0.0
    logged = start
    for step in range(start, learner.steps):
        before = time.monotonic()
        batch = next(stream)
        waited += time.monotonic() - before
        epoch = int(step / learner.epoch_steps)
        factor = learning_rate(learner.optimiser, step, steps=learner.schedule_steps, epoch=epoch)
        for group in optimiser.param_groups:
            group["lr"] = learner.optimiser.learning_rate * factor * group["factor"]
        torch.manual_seed(learner.seed * 1_000_003 + step * world + rank)
        terms = learner.losses(model, batch, step, device)
        loss = torch.stack(list(terms.values())).sum()
        if not torch.isfinite(loss):
            _not_finite(step, {name: float(value) for name, value in terms.items()}, learner.image_uris(batch))
        optimiser.zero_grad(set_to_none=True)
        (loss * world).backward()  # DDP takes the mean over workers; the batch's loss is their sum
        optimiser.step()
        done = step + 1
        if done % _LOG_EVERY == 0 or done == learner.steps:
            values = torch.stack([loss.detach(), *(t.detach() for t in terms.values())])
            if world > 1:
                torch.distributed.all_reduce(values)
            numbers = [float(v) for v in values]
            if log:
                now = time.monotonic()
                log.write(
                    {
                        "step": done,
                        "epoch": round(done / learner.epoch_steps, 4),
                        **dict(zip(["loss", *terms], numbers, strict=True)),
                        "learning_rate": learner.optimiser.learning_rate * factor,
                        "images_per_second": (done - logged) * learner.batch * learner.images / (now - last),
                        "waiting": waited / max(now - last, 1e-9),
                        "time": time.time(),
                    }
                )
                last, logged = now, done
            waited_all, waited = waited_all + waited, 0.0
        if done % compute.checkpoint_steps == 0 and done < learner.steps:
            with tempfile.TemporaryDirectory() as directory:
                if rank == 0:
                    _checkpoint(directory, plain, optimiser, done)
                kept = ray.train.Checkpoint.from_directory(directory) if rank == 0 else None
                ray.train.report({"step": done}, checkpoint=kept)
    if rank == 0:
        save(plain.state_dict(), folder / WEIGHTS)
        seconds = time.monotonic() - began
        (folder / "fit.json").write_text(
            json.dumps({"seconds": seconds, "steps": learner.steps - start, "waiting": waited_all / max(seconds, 1e-9)})
        )
    if world > 1:
        torch.distributed.barrier()


def _not_finite(step: int, terms: dict[str, float], uris: list[str]) -> NoReturn:
    """Stops before the update, so that the last checkpoint and the weights stay sound."""
    raise UserError(
        f"the loss is not finite at step {step} ({terms}), with the images {shown(uris, most=16)}",
        "a finite loss",
        "look at these images; lower the learning rate (optimiser.learning_rate) or raise optimiser.warm_up",
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

    A second call on the same folder continues from the last checkpoint in it. Meanwhile the log of the steps moves a
    progress bar and goes to MLflow.

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

    check_cpus(compute)
    gpu = uses_gpu(compute)
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    place = ("threads" if nodes == 1 else "tasks") if compute.decode == "auto" else compute.decode
    resources = {"CPU": compute.worker_cpus} | ({"GPU": 1.0} if gpu else {})

    # The folder of a stage in work carries the stage's key, so a checkpoint found in it is this configuration's.
    trainer = ray.train.torch.TorchTrainer(
        _worker,
        train_loop_config={"learner": learner, "compute": compute, "folder": str(folder), "place": place},
        scaling_config=ray.train.ScalingConfig(
            num_workers=compute.workers, use_gpu=gpu, resources_per_worker=resources
        ),
        run_config=ray.train.RunConfig(
            name="checkpoints",
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
    return FitResult(**json.loads((folder / "fit.json").read_text()))

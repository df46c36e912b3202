"""The Ray Train edge: `fit` trains a learner over workers, follows its log, and resumes what an earlier call began."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcis.datasets.copies import is_there, remove, uri_of
from mcis.datasets.errors import UserError
from mcis.datasets.files import locate
from mcis.datasets.stream import DecodeIn
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.learner import Learner, Schedule
from mcis.platform.engine.loop import FIT, FitResult, TrainingJob, train_worker
from mcis.platform.engine.nodes import Bundle, wait_for_nodes
from mcis.platform.engine.resuming import CHECKPOINT, ask_for_checkpoint, drop_damaged
from mcis.platform.engine.runtime import ANYWHERE, check_cpus, give_memory_back, is_one_node, user_error_in
from mcis.platform.engine.step_log import STEPS
from mcis.platform.engine.validation import Validation
from mcis.platform.runs.progress import bar, console, follow
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import read_json

_RAY_TRAIN = "ray-train"
"""Ray Train's own folder within a training's, of workers that are a group."""


def fit(
    learner: Learner[Any],
    folder: Path,
    compute: ComputeConfig,
    tracker: Tracker,
    *,
    label: str,
    about: Mapping[str, Any] | None = None,
    validation: Validation | None = None,
) -> FitResult:
    """Trains a learner with Ray Train and writes `weights.pt` and `steps.jsonl` into `folder`.

    A second call on the same folder continues from the last checkpoint in it, where that is damaged from the beginning,
    and does nothing if the training had ended. Meanwhile the log of the steps moves a progress bar and goes to MLflow.

    Args:
        label: name of the network in messages, and section of its configuration.
        about: what a reader of the weights has to know, in plain values; kept in their file.
        validation: what is scored while the network trains.

    Raises:
        UserError: the cluster is too small, or a worker raised it.
    """
    if is_there(folder / FIT):
        return _finished(folder)
    gpu = compute.gpu
    wait_for_nodes(_reserved(compute), compute.wait_minutes, f"the {label}'s training")
    decode_in = _choose_decoding(compute)
    check_cpus(compute, decode_in)
    if drop_damaged(folder):
        console.print(f"note: the checkpoint of the {label} was damaged: its training begins again", markup=False)
    job = TrainingJob(
        learner=learner,
        compute=compute,
        folder=folder,
        label=label,
        about=about or {},
        validation=validation,
        decode_in=decode_in,
    )
    train = _train_alone if compute.workers == 1 else _train_together
    _follow_log(lambda: train(job, gpu=gpu), learner.schedule, folder, tracker, label)
    return _finished(folder)


def _reserved(compute: ComputeConfig) -> list[Bundle]:
    """What the least workers of a training reserve, and one task that decodes for them."""
    worker = {"CPU": compute.worker_cpus} | ({"GPU": compute.gpu_share} if compute.gpu else {})
    return [*[worker] * compute.least_workers, {"CPU": 1.0}]


def _finished(folder: Path) -> FitResult:
    """The result of a training that has ended; removes its checkpoint, several times the size of the weights."""
    remove(folder / CHECKPOINT)
    remove(folder / _RAY_TRAIN)
    return FitResult(**read_json(folder / FIT))


def _choose_decoding(compute: ComputeConfig) -> DecodeIn:
    """Where images are decoded: as configured, or in tasks only where other nodes have CPUs for them."""
    if compute.decode != "auto":
        return compute.decode
    elastic = compute.min_workers is not None  # elastic workers may leave no CPU to tasks
    return "threads" if is_one_node() or elastic else "tasks"


def _train_alone(job: TrainingJob[Any], *, gpu: bool) -> None:
    """Trains in one task, which Ray runs again where its process or node dies.

    One worker is no group, and the six processes that Ray Train starts to manage a group take ten seconds of two cores.
    """
    import ray

    options: Any = {"num_cpus": job.compute.worker_cpus, "num_gpus": gpu * job.compute.gpu_share, **ANYWHERE}
    task = ray.remote(max_retries=job.compute.max_failures, retry_exceptions=True, **options)(_train_here)
    problem = ray.get(task.remote(job))
    if problem:
        raise UserError(*problem)


def _train_here(job: TrainingJob[Any]) -> tuple[str, str, str] | None:
    """Trains in this process; returns the parts of a user's error, for which Ray is not to run the task again."""
    import ray.train
    import ray.train.torch

    try:
        in_process = ray.train.ScalingConfig(num_workers=0)
        ray.train.torch.TorchTrainer(train_worker, train_loop_config={"job": job}, scaling_config=in_process).fit()
    except UserError as error:
        return error.found, error.expected, error.remedy
    finally:
        give_memory_back()
    return None


def _train_together(job: TrainingJob[Any], *, gpu: bool) -> None:
    """Trains in a group of workers, which Ray Train starts again where one of them is lost."""
    import ray.train
    import ray.train.torch

    compute = job.compute
    uri = uri_of(job.folder)
    system, place = locate(uri) if uri else (None, str(job.folder))
    # Two numbers make it elastic, which Ray's stubs do not know.
    workers: Any = (compute.min_workers, compute.workers) if compute.min_workers else compute.workers
    ray.train.torch.TorchTrainer(
        train_worker,
        train_loop_config={"job": job},
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers,
            use_gpu=gpu,
            resources_per_worker={"CPU": compute.worker_cpus} | ({"GPU": 1.0} if gpu else {}),
        ),
        run_config=ray.train.RunConfig(
            name=_RAY_TRAIN,
            storage_path=place,
            storage_filesystem=system,
            failure_config=ray.train.FailureConfig(max_failures=compute.max_failures),
            callbacks=[_stop_at_user_errors()],
        ),
    ).fit()


def _stop_at_user_errors() -> Any:
    """A callback that ends a training at a user's error: restarts are for lost workers, this would only fail again."""
    import ray.train

    class StopAtUserErrors(ray.train.UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            for error in worker_exceptions.values():
                user_error = user_error_in(error)
                if user_error:
                    raise user_error

    return StopAtUserErrors()


def _follow_log(train: Callable[[], Any], schedule: Schedule, folder: Path, tracker: Tracker, label: str) -> None:
    """Runs `train` in a folder while the records of its log move a progress bar and go to MLflow."""
    images = schedule.images_per_step
    with bar(label, schedule.steps * images, "images") as progress:

        def on_records(records: list[dict[str, Any]]) -> None:
            newest = records[-1]
            progress.update(newest["step"] * images, f"epoch {newest['epoch']:.1f} loss {newest['loss']:.3f}")
            tracker.follow(label, records)

        with follow(folder / STEPS, on_records):
            _run_interruptibly(train, folder)


def _run_interruptibly(call: Callable[[], Any], folder: Path) -> None:
    """Runs `call` in a thread, so that Ctrl-C ends this process as it does elsewhere, once a checkpoint is kept.

    In the main thread Ray Train would put a handler of its own in Ctrl-C's place, and leave it there.
    """
    failure: list[BaseException] = []
    ended = threading.Event()  # a thread whose `join` was interrupted counts as ended in Python 3.11

    def target() -> None:
        try:
            call()
        except BaseException as error:  # handed on to the caller's thread
            failure.append(error)
        finally:
            ended.set()

    threading.Thread(target=target, daemon=True).start()
    try:
        while not ended.wait(timeout=0.2):
            pass
    except KeyboardInterrupt:
        ask_for_checkpoint(folder, ended)
        raise
    if failure:
        raise failure[0]

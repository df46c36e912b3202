"""Trains a learner with Ray Train: `fit` starts the workers, follows their log, and continues after failures."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from mcis.datasets.errors import UserError, one_line
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.storage.folders import file_system, files_below, path_exists, remove
from mcis.datasets.storage.threads import run_in_background
from mcis.platform.config.compute import ComputeConfig, uses_cluster
from mcis.platform.engine.checkpoint import CHECKPOINT, remove_damaged
from mcis.platform.engine.errors import IMAGE_AT_FAULT, MemoryRanOut, death_in, death_text, user_error_in
from mcis.platform.engine.learner import Learner, TrainingSchedule
from mcis.platform.engine.nodes import Bundle, NodeWatch, wait_for_nodes
from mcis.platform.engine.runtime import give_memory_back, is_one_node, placement, reserved_resources
from mcis.platform.engine.step_log import STEPS
from mcis.platform.engine.trainer import FIT, FitResult, TrainingJob, train_worker
from mcis.platform.engine.validation import Validation
from mcis.platform.runs.files import read_json
from mcis.platform.runs.progress import bar, console, follow
from mcis.platform.runs.tracking import Tracker

_RAY_TRAIN = "ray-train"
"""Ray Train's own folder in the folder of a training with several workers."""


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

    A second call with the same folder continues from its last checkpoint, or starts again if that is damaged. It does
    nothing if the training has ended. The log of steps is shown as a progress bar and sent to MLflow meanwhile.

    Args:
        learner: The network with its data and its losses.
        folder: The folder of the training.
        compute: The section `compute` of the configuration.
        tracker: The MLflow run.
        label: See `TrainingJob`.
        about: See `TrainingJob`.
        validation: See `TrainingJob`.

    Raises:
        UserError: The cluster is too small, a worker raised it, or the training failed too often at the same place.
    """
    if path_exists(folder / FIT):
        return _finish(folder)

    bundles = _required_bundles(compute, decodes_images=learner.decodes_images)
    wait_for_nodes(bundles, compute.wait_minutes, _task(label))
    if remove_damaged(folder):
        console.print(f"note: the checkpoint of the {label} was damaged: its training starts again")
    job = TrainingJob(
        learner=learner,
        compute=compute,
        folder=folder,
        label=label,
        about=about or {},
        validation=validation,
        decoder=_put_decoder(learner) if _decodes_in_tasks(compute, learner) else None,
    )
    _train(job, tracker, bundles)
    return _finish(folder)


def _train(job: TrainingJob[Any], tracker: Tracker, bundles: Sequence[Bundle]) -> None:
    """Trains, and continues from the last checkpoint after failures (`_Failures`).

    If memory runs out, the training continues with micro-batches of half the size.

    Args:
        bundles: The resources that the training needs.

    Raises:
        UserError: A worker raised it, lost nodes do not come back in time, or the processes died too often at the same
            place.
    """
    failures = _Failures(job)
    with _followed(job.learner.schedule, job.folder, tracker, job.label):
        while True:
            try:
                _train_once(job, bundles)
                return
            except Exception as error:
                user_error = user_error_in(error)
                smaller_micro_batch = _smaller_micro_batch(job) if isinstance(user_error, MemoryRanOut) else None
                if smaller_micro_batch:
                    job = dataclasses.replace(job, oom_micro_batch=smaller_micro_batch)
                    console.print(
                        f"note: {_task(job.label)}: out of memory; it continues with micro-batches of "
                        f"{smaller_micro_batch} in each of its workers"
                    )
                elif user_error:
                    raise user_error from None
                else:
                    failures.add(error)


def _train_once(job: TrainingJob[Any], bundles: Sequence[Bundle]) -> None:
    """Trains from the last checkpoint until the training has ended or fails."""
    train = _train_alone if job.compute.workers == 1 else _train_together
    with NodeWatch(bundles, job.compute.wait_minutes, _task(job.label)) as watch:
        _run_interruptibly(functools.partial(train, job), watch)


def _task(label: str) -> str:
    """Returns the description of a training, used in messages."""
    return f"the {label}'s training"


def _smaller_micro_batch(job: TrainingJob[Any]) -> int | None:
    """Returns half the current micro-batch size. None: it is 1, or the configuration sets it."""
    if job.compute.micro_batch:
        return None
    micro_batch = job.oom_micro_batch or math.ceil(job.learner.schedule.batch / job.compute.workers)
    return None if micro_batch == 1 else math.ceil(micro_batch / 2)


class _Failures:
    """Counts the failures of a training since its last new checkpoint.

    So a cluster may lose any number of nodes over days, but a training that fails again and again at the same place
    ends.

    Attributes:
        job: The training.
        count: Number of failures since the last new checkpoint.
        checkpoint: Stamp of the checkpoint at the last failure, or at the start. None: there was none.
    """

    def __init__(self, job: TrainingJob[Any]):
        self.job = job
        self.count = 0
        self.checkpoint = files_below(job.folder).get(CHECKPOINT)

    def add(self, error: Exception) -> None:
        """Counts a failure and prints a note.

        Raises:
            UserError: There are too many failures, and a process died.
            Exception: There are too many failures for another reason: `error` itself.
        """
        checkpoint = files_below(self.job.folder).get(CHECKPOINT)
        has_new_checkpoint = checkpoint != self.checkpoint
        self.checkpoint = checkpoint
        self.count = 1 if has_new_checkpoint else self.count + 1

        max_failures = self.job.compute.max_failures
        if self.count > max_failures:
            raise _death_error(self.job, error) or error from None
        start = "from its last checkpoint" if checkpoint else "from its beginning"
        console.print(
            f"note: {_task(self.job.label)} was interrupted ({_cause(error)}) and continues {start}; failure "
            f"{self.count} of at most {max_failures} without a new checkpoint"
        )


def _cause(error: Exception) -> str:
    """Returns the type of an error of Ray and the last line of its text, which has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(f"{type(error).__name__}: {lines[-1] if lines else ''}", 200)


def _required_bundles(compute: ComputeConfig, *, decodes_images: bool) -> list[Bundle]:
    """Returns the resources that a training needs at least: those of its workers, and a CPU for a task that decodes.

    On a cluster, a task decodes unless the configuration says otherwise or there is nothing to decode; on a single
    node, threads do. Elastic workers take every free CPU, so if tasks decode, there must be a CPU next to all of them.
    """
    worker = {"CPU": compute.worker_cpus}
    if compute.gpu:
        worker["GPU"] = compute.gpu_share

    num_workers = compute.workers if compute.decode == "tasks" else compute.effective_min_workers
    bundles: list[Bundle] = [worker] * num_workers

    is_elastic = compute.min_workers is not None
    may_decode = compute.decode == "auto" and decodes_images and uses_cluster() and not is_elastic
    if compute.decode == "tasks" or may_decode:
        decoder = {"CPU": 1.0}
        bundles.append(decoder)
    return bundles


def _finish(folder: Path) -> FitResult:
    """Returns the result of a finished training, and removes its checkpoint, which is larger than the weights."""
    for name in (CHECKPOINT, _RAY_TRAIN):
        remove(folder / name)
    return FitResult(**read_json(folder / FIT))


def _decodes_in_tasks(compute: ComputeConfig, learner: Learner[Any]) -> bool:
    """Returns whether tasks decode the images: as configured, or if other nodes have CPUs for them."""
    if compute.decode != "auto":
        return compute.decode == "tasks"
    is_elastic = compute.min_workers is not None  # elastic workers may leave no CPU to tasks
    has_reserved = reserved_resources() is not None  # tasks of Ray Data do not run in reserved resources
    return learner.decodes_images and not is_elastic and not has_reserved and not is_one_node()


def _put_decoder(learner: Learner[Any]) -> Any:
    """Puts the decoder into Ray's object store, for all workers and tasks. Returns the reference to it."""
    import ray

    return ray.put(learner.decoder(WorkerShard(0, 1, 0, learner.schedule.steps)))


def _death_error(job: TrainingJob[Any], error: Exception) -> UserError | None:
    """Returns the error of a training whose processes died. None: `error` has another cause."""
    death = death_in(error)
    if death is None:
        return None
    return UserError(
        f"training the {job.label}: {death_text(death)}, each time that it was started again",
        "processes that are not ended, and enough memory for them",
        f"lower {job.label}.batch or compute.micro_batch, or use a machine with more memory, and repeat the command, "
        f"which continues from the last checkpoint; {IMAGE_AT_FAULT}",
    )


def _train_alone(job: TrainingJob[Any]) -> None:
    """Trains with one worker, in a task.

    A worker group of Ray Train needs six processes, which take ten seconds of two cores to start.
    """
    import ray

    gpus = job.compute.gpu_share if job.compute.gpu else 0
    options: Any = {"num_cpus": job.compute.worker_cpus, "num_gpus": gpus, **placement()}
    task = ray.remote(max_retries=0, **options)(_train_here)
    ray.get(task.remote([ray.put(job)]))


def _train_here(reference: list[Any]) -> None:
    """Trains in this process.

    Args:
        reference: A list of the reference to the job. Ray would replace a reference that is not in a list by its value.
    """
    import ray.train

    try:
        _run_trainer(reference[0], ray.train.ScalingConfig(num_workers=0))
    finally:
        give_memory_back()


def _train_together(job: TrainingJob[Any]) -> None:
    """Trains with a group of workers. If it is elastic, Ray Train restarts it when nodes have joined."""
    import ray.train

    compute = job.compute
    # Two numbers make the group elastic. Ray's stubs do not declare that.
    num_workers: Any = (compute.min_workers, compute.workers) if compute.min_workers else compute.workers
    resources = {"CPU": compute.worker_cpus}
    if compute.gpu:
        resources["GPU"] = 1.0
    scaling = ray.train.ScalingConfig(num_workers=num_workers, use_gpu=compute.gpu, resources_per_worker=resources)

    system, path = file_system(job.folder)
    storage: Any = {"storage_path": path, "storage_filesystem": system}
    failures = ray.train.FailureConfig(max_failures=0)
    _run_trainer(ray.put(job), scaling, ray.train.RunConfig(name=_RAY_TRAIN, failure_config=failures, **storage))


def _run_trainer(job: Any, scaling: Any, run: Any = None) -> None:
    """Runs Ray Train.

    Args:
        job: Reference to the job in Ray's object store. Ray Train sends the settings to each worker separately, and the
            job has all images.
        scaling, run: Configurations of Ray Train.
    """
    import ray.train.torch

    settings = {"job": job}
    ray.train.torch.TorchTrainer(train_worker, train_loop_config=settings, scaling_config=scaling, run_config=run).fit()


@contextlib.contextmanager
def _followed(schedule: TrainingSchedule, folder: Path, tracker: Tracker, label: str) -> Iterator[None]:
    """Shows the records of a training's log as a progress bar, and sends them to MLflow, during the block."""
    images = schedule.images_per_step
    with bar(label, schedule.steps * images, "images") as progress:

        def on_records(records: list[dict[str, Any]]) -> None:
            newest = records[-1]
            progress.update(newest["step"] * images, f"epoch {newest['epoch']:.1f} loss {newest['loss']:.3f}")
            tracker.follow(label, records)

        tracker.log(label, folder / STEPS)
        with follow(folder / STEPS, on_records):
            yield


def _run_interruptibly(call: Callable[[], Any], watch: NodeWatch) -> None:
    """Runs `call` in a thread, so that Ctrl-C ends this process, and checks the nodes meanwhile.

    In the main thread, Ray Train would replace the handler of Ctrl-C and not restore it.

    Raises:
        The errors of `call`, and those of `NodeWatch.check`.
    """
    result = run_in_background(call)
    while not wait([result], timeout=0.2).done:
        watch.check()
    result.result()

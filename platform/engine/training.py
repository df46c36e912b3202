"""The Ray Train edge: `fit` trains a learner over workers, follows its log, and resumes what an earlier call began."""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from mcis.datasets.errors import UserError, one_line
from mcis.datasets.sampling.batch_stream import DecodeIn
from mcis.datasets.storage.folders import file_system, files_below, path_exists, remove
from mcis.datasets.storage.threads import run_in_background
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.errors import IMAGE_AT_FAULT, MemoryRanOut, causes_of, death_text, deaths, user_error_in
from mcis.platform.engine.learner import Learner, TrainingSchedule
from mcis.platform.engine.loop import FIT, FitResult, TrainingJob, Validation, train_worker
from mcis.platform.engine.nodes import Bundle, wait_for_nodes
from mcis.platform.engine.resuming import CHECKPOINT, drop_damaged
from mcis.platform.engine.runtime import ANYWHERE, give_memory_back, is_one_node
from mcis.platform.engine.step_log import STEPS
from mcis.platform.runs.files import read_json
from mcis.platform.runs.progress import bar, console, follow
from mcis.platform.runs.tracking import Tracker

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
        label, about, validation: as of `TrainingJob`.

    Raises:
        UserError: the cluster is too small, or a worker raised it.
    """
    if path_exists(folder / FIT):
        return _finished(folder)
    wait_for_nodes(_reserved(compute), compute.wait_minutes, f"the {label}'s training")
    if drop_damaged(folder):
        console.print(f"note: the checkpoint of the {label} was damaged: its training begins again")
    job = TrainingJob(
        learner=learner,
        compute=compute,
        folder=folder,
        label=label,
        about=about or {},
        validation=validation,
        decode_in=_choose_decoding(compute),
    )
    _train(job, tracker)
    return _finished(folder)


def _train(job: TrainingJob[Any], tracker: Tracker) -> None:
    """Trains, and after a failure again from the last checkpoint, while that leads on.

    A failure behind a new checkpoint counts as the first: a cluster may lose any number of nodes over days, while what
    fails again at the same place ends the training. Where memory runs out, it goes on with half the samples at a time.

    Raises:
        UserError: a worker raised it, nodes that were lost do not come back in time, or its processes die at the same
            place each time that they are started again.
    """
    compute, what = job.compute, f"the {job.label}'s training"
    train = _train_alone if compute.workers == 1 else _train_together
    failures, checkpoint = 0, files_below(job.folder).get(CHECKPOINT)
    with _followed(job.learner.schedule, job.folder, tracker, job.label):
        while True:
            try:
                watch = wait_for_nodes(_reserved(compute), compute.wait_minutes, what)
                _run_interruptibly(functools.partial(train, job), watch)
                return
            except Exception as error:
                user_error = user_error_in(error)
                if isinstance(user_error, MemoryRanOut) and (oom_micro_batch := _oom_micro_batch(job)):
                    job = dataclasses.replace(job, oom_micro_batch=oom_micro_batch)
                    told = f"goes on with {oom_micro_batch} samples of a batch at a time, in each of its workers"
                    console.print(f"note: {what}: memory ran out; it {told}")
                    continue
                if user_error:
                    raise user_error from None
                newest = files_below(job.folder).get(CHECKPOINT)
                failures, checkpoint = failures + 1 if newest == checkpoint else 1, newest
                if failures > compute.max_failures:
                    raise _death(job, error) or error from None
                goes_on = "from its last checkpoint" if newest else "from its beginning"
                console.print(
                    f"note: {what} was cut ({_cause(error)}) and goes on {goes_on}; failure {failures} of at most "
                    f"{compute.max_failures} without a new one"
                )


def _oom_micro_batch(job: TrainingJob[Any]) -> int | None:
    """Half as many samples at a time as a training had; None where it had one, or as many as the configuration says."""
    size = job.oom_micro_batch or math.ceil(job.learner.schedule.batch / job.compute.least_workers)
    return None if job.compute.micro_batch or size == 1 else math.ceil(size / 2)


def _cause(error: Exception) -> str:
    """What a person reads of an error of Ray: its type, and the last line of its text, which has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(f"{type(error).__name__}: {lines[-1] if lines else ''}", 200)


def _reserved(compute: ComputeConfig) -> list[Bundle]:
    """What the workers of a training reserve at least, and one task that decodes for them, where one may.

    Elastic workers take every CPU that is free, so that where tasks decode there has to be one beside all of them.
    """
    several = compute.min_workers is None and "RAY_ADDRESS" in os.environ  # nodes: on one of them threads decode
    tasks = compute.decode == "tasks" or (compute.decode == "auto" and several)
    worker = {"CPU": compute.worker_cpus} | ({"GPU": compute.gpu_share} if compute.gpu else {})
    workers = compute.workers if compute.decode == "tasks" else compute.least_workers
    return [*[worker] * workers, *[{"CPU": 1.0}] * tasks]


def _finished(folder: Path) -> FitResult:
    """The result of a training that has ended; removes its checkpoint, several times the size of the weights."""
    for name in (CHECKPOINT, _RAY_TRAIN):
        remove(folder / name)
    return FitResult(**read_json(folder / FIT))


def _choose_decoding(compute: ComputeConfig) -> DecodeIn:
    """Where images are decoded: as configured, or in tasks only where other nodes have CPUs for them."""
    if compute.decode != "auto":
        return compute.decode
    elastic = compute.min_workers is not None  # elastic workers may leave no CPU to tasks
    return "threads" if is_one_node() or elastic else "tasks"


def _death(job: TrainingJob[Any], error: Exception) -> UserError | None:
    """The error of a training whose processes die; None of another error."""
    death = next((cause for cause in causes_of(error) if isinstance(cause, deaths())), None)
    if death is None:
        return None
    return UserError(
        f"training the {job.label}: {death_text(death)}, each time that it was started again",
        "processes that live, and memory for them",
        f"lower {job.label}.batch or compute.micro_batch, or use a machine with more memory, and repeat the command, "
        f"which goes on from the last checkpoint; {IMAGE_AT_FAULT}",
    )


def _train_alone(job: TrainingJob[Any]) -> None:
    """Trains in one task.

    One worker is no group, and the six processes that Ray Train starts to manage a group take ten seconds of two cores.
    """
    import ray

    gpus = job.compute.gpu * job.compute.gpu_share
    options: Any = {"num_cpus": job.compute.worker_cpus, "num_gpus": gpus, **ANYWHERE}
    ray.get(ray.remote(max_retries=0, **options)(_train_here).remote(job))


def _train_here(job: TrainingJob[Any]) -> None:
    """Trains in this process."""
    import ray.train

    try:
        _run_trainer(job, ray.train.ScalingConfig(num_workers=0))
    finally:
        give_memory_back()


def _train_together(job: TrainingJob[Any]) -> None:
    """Trains in a group of workers; where it is elastic, Ray Train starts it anew when nodes have joined."""
    import ray.train

    compute = job.compute
    system, place = file_system(job.folder)
    # Two numbers make it elastic, which Ray's stubs do not know.
    workers: Any = (compute.min_workers, compute.workers) if compute.min_workers else compute.workers
    resources = {"CPU": compute.worker_cpus} | ({"GPU": 1.0} if compute.gpu else {})
    scaling = ray.train.ScalingConfig(num_workers=workers, use_gpu=compute.gpu, resources_per_worker=resources)
    failures = ray.train.FailureConfig(max_failures=0)
    place_of_own: Any = {"storage_path": place, "storage_filesystem": system}
    _run_trainer(job, scaling, ray.train.RunConfig(name=_RAY_TRAIN, failure_config=failures, **place_of_own))


def _run_trainer(job: TrainingJob[Any], scaling: Any, run: Any = None) -> None:
    import ray.train.torch

    settings = {"job": job}
    ray.train.torch.TorchTrainer(train_worker, train_loop_config=settings, scaling_config=scaling, run_config=run).fit()


@contextlib.contextmanager
def _followed(schedule: TrainingSchedule, folder: Path, tracker: Tracker, label: str) -> Iterator[None]:
    """In the block the records of a training's log move a progress bar and go to MLflow."""
    images = schedule.images_per_step
    with bar(label, schedule.steps * images, "images") as progress:

        def on_records(records: list[dict[str, Any]]) -> None:
            newest = records[-1]
            progress.update(newest["step"] * images, f"epoch {newest['epoch']:.1f} loss {newest['loss']:.3f}")
            tracker.follow(label, records)

        tracker.log(label, folder / STEPS)
        with follow(folder / STEPS, on_records):
            yield


def _run_interruptibly(call: Callable[[], Any], watch: Iterator[object]) -> None:
    """Runs `call` in a thread, so that Ctrl-C ends this process: in the main thread Ray Train would put a handler of
    its own in Ctrl-C's place, and leave it there. Meanwhile it goes through `watch`, whose errors end it, too."""
    ended = run_in_background(call)
    while not wait([ended], timeout=0.2).done:
        next(watch)
    ended.result()

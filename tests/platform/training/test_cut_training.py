"""A training that is interrupted by a kill, a lost node or a full disk ends in the same bits after it continues."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import PairBatch, PairDecoder
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine import trainer
from mcis.platform.engine.checkpoint import CHECKPOINT
from mcis.platform.engine.learner import Network
from mcis.platform.engine.step_log import STEPS
from mcis.platform.engine.training import fit
from mcis.platform.learners.classifier_learner import ClassifierLearner
from mcis.platform.networks.weights_files import WEIGHTS
from mcis.platform.runs.tracking import Tracker

Trackers = Callable[[str], Tracker]


@dataclass(frozen=True, kw_only=True)
class FailingLearner(ClassifierLearner):
    """Fails in some steps, in step 13 after the first checkpoint, and records at which steps its streams start.

    Attributes:
        folder: The folder of the training.
        fail: Makes the training fail.
        failing_steps: The steps in which it fails.
        fails_again: Whether it fails again when a step is repeated.
    """

    folder: Path
    fail: Callable[[], None]
    failing_steps: tuple[int, ...] = (13,)
    fails_again: bool = False

    def decoder(self, shard: WorkerShard) -> PairDecoder:
        with (self.folder / "starts").open("a") as file:
            file.write(f"{shard.start} ")
        return super().decoder(shard)

    def loss_sums(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        failed = self.folder / f"failed-{step}"
        if step in self.failing_steps and (self.fails_again or not failed.exists()):
            deadline = time.monotonic() + 60
            while step == 13 and not (self.folder / CHECKPOINT).exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            failed.touch()
            self.fail()
        return super().loss_sums(model, batch, step, device)


@pytest.fixture(autouse=True)
def by_value() -> None:
    """Pickles this module by value for Ray's processes, because it is not installed."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny: ClassifierLearner, tracker_of: Trackers, ray_local: None
) -> Path:
    """The folder of a training without failures, which `test_training.py` compares with a plain loop."""
    folder = tmp_path_factory.mktemp("undisturbed")
    fit(tiny, folder, ComputeConfig(threads=1), tracker_of("undisturbed"), label="classifier")
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(folder / WEIGHTS, weights_only=True)["state_dict"]
    return weights


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / STEPS).read_text().splitlines()]


def check_continued(folder: Path, undisturbed: Path, starts: str = "0 8 ", *, rounded: bool = False) -> None:
    """Checks that a training started from these steps and ended as the undisturbed one.

    Args:
        starts: The steps at which its streams started.
        rounded: Whether results may differ by rounding errors.
    """
    assert (folder / "starts").read_text() == starts

    rtol, atol = (1e-3, 1e-5) if rounded else (0, 0)
    weights = weights_of(folder)
    for key, value in weights_of(undisturbed).items():
        torch.testing.assert_close(weights[key], value, rtol=rtol, atol=atol)

    records = records_of(folder)
    assert [record["step"] for record in records] == [10, 20], "the record of step 10 is not repeated"
    losses = [record["loss"] for record in records_of(undisturbed)]
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-3 if rounded else 1e-6)


def kill_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_node() -> None:
    raise RuntimeError("a node was lost")


def test_a_training_whose_worker_is_killed_ends_in_the_same_bits(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path
) -> None:
    """The kill is in the middle of an epoch."""
    assert (8 / tiny.schedule.steps_per_epoch) % 1 > 0.1, "a checkpoint at the end of an epoch proves less"
    learner = FailingLearner(**vars(tiny), folder=tmp_path, fail=kill_worker)
    compute = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=1)
    tracker = tracker_of("killed")
    result = fit(learner, tmp_path, compute, tracker, label="classifier")

    assert result.steps_since_restart == 12
    assert not (tmp_path / CHECKPOINT).exists(), "a finished training needs no checkpoint"
    assert fit(learner, tmp_path, compute, tracker, label="classifier") == result, "the training had ended"
    check_continued(tmp_path, undisturbed)
    tracker.finish("FINISHED")
    logged = tracker.client.get_metric_history(tracker.run_id, "classifier.loss")
    assert [metric.step for metric in logged] == [10, 20]


@pytest.mark.slow
def test_a_checkpoint_is_written_every_minute(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path
) -> None:
    """The minute ends in step 5, and the worker is killed in step 9."""

    def fail() -> None:
        if (tmp_path / "failed-9").exists():
            kill_worker()
        trainer._MIN_CHECKPOINT_INTERVAL = 0.0

    learner = FailingLearner(**vars(tiny), folder=tmp_path, fail=fail, failing_steps=(5, 9))
    fit(learner, tmp_path, ComputeConfig(threads=1, max_failures=1), tracker_of("minute"), label="classifier")
    starts = (tmp_path / "starts").read_text()
    assert 6 <= int(starts.split()[1]) <= 9
    check_continued(tmp_path, undisturbed, starts=starts)


@pytest.mark.slow
def test_a_training_whose_worker_is_always_killed_ends_in_an_error(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path
) -> None:
    learner = FailingLearner(**vars(tiny), folder=tmp_path, fail=kill_worker, failing_steps=(9,), fails_again=True)
    compute = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=0)
    tracker = tracker_of("always-killed")
    with pytest.raises(UserError, match="training the classifier: its process was ended by a signal") as caught:
        fit(learner, tmp_path, compute, tracker, label="classifier")
    assert "lower classifier.batch or compute.micro_batch" in caught.value.remedy
    assert "--from index" in caught.value.remedy

    fit(replace(learner, failing_steps=()), tmp_path, compute, tracker, label="classifier")
    check_continued(tmp_path, undisturbed)


def test_failures_after_new_checkpoints_never_end_a_training(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = FailingLearner(**vars(tiny), folder=tmp_path, fail=lose_node, failing_steps=(5, 9, 13, 17))
    compute = ComputeConfig(threads=1, checkpoint_steps=4, max_failures=1)
    fit(learner, tmp_path, compute, tracker_of("stumbling"), label="classifier")
    printed = " ".join(capsys.readouterr().out.split())
    assert "RuntimeError: a node was lost) and continues from its last checkpoint" in printed
    check_continued(tmp_path, undisturbed, starts="0 4 8 12 16 ")


def test_failures_without_a_new_checkpoint_end_a_training(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path
) -> None:
    """Once the cause is gone, a second call continues from the last checkpoint."""
    learner = FailingLearner(**vars(tiny), folder=tmp_path, fail=lose_node, failing_steps=(9,), fails_again=True)
    compute = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=2)
    tracker = tracker_of("falling")
    with pytest.raises(Exception, match="a node was lost"):
        fit(learner, tmp_path, compute, tracker, label="classifier")
    assert (tmp_path / "starts").read_text() == "0 8 8 ", "the first of three failures came after a new checkpoint"

    fit(replace(learner, failing_steps=()), tmp_path, compute, tracker, label="classifier")
    check_continued(tmp_path, undisturbed, starts="0 8 8 8 ")


def run_out_of_gpu_memory() -> None:
    """Raises the error of CUDA's allocator, which is not installed here."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")


class LittleMemoryLearner(FailingLearner):
    """Has memory for two pairs at a time from step 5 on. It fails after the backward pass of the first larger batch."""

    def loss_sums(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        losses = super().loss_sums(model, batch, step, device)
        if step >= 5 and len(batch) > 2:
            torch.stack(list(losses.values())).sum().backward()
            (self.folder / f"failed-{step}-{len(batch)}").touch()
            self.fail()
        return losses


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_training_that_runs_out_of_memory_continues_with_smaller_micro_batches(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path, workers: int
) -> None:
    learner = LittleMemoryLearner(**vars(tiny), folder=tmp_path, fail=run_out_of_gpu_memory, failing_steps=())
    compute = ComputeConfig(threads=1, checkpoint_steps=4, workers=workers)
    result = fit(learner, tmp_path, compute, tracker_of(f"narrow-{workers}"), label="classifier")

    (note,) = result.notes("classifier")
    assert note == "out of memory while training the classifier: continued with micro-batches of 2"
    failed_sizes = {1: [3, 5], 2: [3]}[workers]
    assert sorted(path.name for path in tmp_path.glob("failed-*")) == [f"failed-5-{size}" for size in failed_sizes]
    starts = {1: "0 4 4 ", 2: "0 0 4 4 "}[workers]
    check_continued(tmp_path, undisturbed, starts=starts, rounded=True)


def test_a_training_with_a_configured_micro_batch_ends_when_memory_runs_out(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path
) -> None:
    """The error says what to lower. With a smaller micro-batch, a second call continues."""
    learner = FailingLearner(
        **vars(tiny), folder=tmp_path, fail=run_out_of_gpu_memory, failing_steps=(5,), fails_again=True
    )
    compute = ComputeConfig(threads=1, checkpoint_steps=8, micro_batch=4)
    tracker = tracker_of("memory")
    with pytest.raises(UserError, match=r"training the classifier: memory ran out \(.*out of memory") as caught:
        fit(learner, tmp_path, compute, tracker, label="classifier")
    assert "lower compute.micro_batch" in caught.value.remedy
    assert "classifier.input_size" in caught.value.remedy
    assert (tmp_path / "starts").read_text() == "0 ", "it was not tried again"

    smaller = compute.model_copy(update={"micro_batch": 2})
    fit(replace(learner, failing_steps=()), tmp_path, smaller, tracker, label="classifier")
    check_continued(tmp_path, undisturbed, starts="0 0 ", rounded=True)


def test_a_training_on_a_full_disk_keeps_its_checkpoint_and_continues_when_there_is_space(
    tiny: ClassifierLearner, tracker_of: Trackers, undisturbed: Path, small_disk: Callable[..., Path]
) -> None:
    folder = small_disk("4m")

    def fill_disk() -> None:
        with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    learner = FailingLearner(**vars(tiny), folder=folder, fail=fill_disk)
    compute = ComputeConfig(threads=1, checkpoint_steps=8)
    tracker = tracker_of("full")
    with pytest.raises(UserError, match=rf"no space left on the disk of {folder}") as caught:
        fit(learner, folder, compute, tracker, label="classifier")
    assert "repeat the command" in caught.value.remedy
    assert torch.load(folder / CHECKPOINT, weights_only=True)["step"] == 8
    assert not any(path.name.startswith(".") for path in folder.iterdir()), "half a file would keep the disk full"

    (folder / "ballast").unlink()
    fit(learner, folder, compute, tracker, label="classifier")
    check_continued(folder, undisturbed)


@pytest.mark.parametrize("damage", ["half", "noise"])
def test_a_training_with_a_damaged_checkpoint_starts_again(
    tiny: ClassifierLearner,
    tracker_of: Trackers,
    tmp_path: Path,
    undisturbed: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    learner = FailingLearner(**vars(tiny), folder=tmp_path, fail=lose_node)
    compute = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=0)
    tracker = tracker_of(f"damaged-{damage}")
    with pytest.raises(Exception, match="a node was lost"):
        fit(learner, tmp_path, compute, tracker, label="classifier")

    content = (tmp_path / CHECKPOINT).read_bytes()
    middle = len(content) // 2
    damaged = content[:middle]
    if damage == "noise":
        damaged += os.urandom(500) + content[middle + 500 :]
    (tmp_path / CHECKPOINT).write_bytes(damaged)

    fit(learner, tmp_path, compute, tracker, label="classifier")
    assert "the checkpoint of the classifier was damaged: its training starts again" in capsys.readouterr().out
    check_continued(tmp_path, undisturbed, starts="0 0 ")


@pytest.mark.slow
def test_a_checkpoint_of_another_configuration_is_an_error(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None
) -> None:
    failing = FailingLearner(**vars(tiny), folder=tmp_path, fail=lose_node)
    compute = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=0)
    with pytest.raises(Exception, match="a node was lost"):
        fit(failing, tmp_path, compute, tracker_of("before"), label="classifier")

    wider = replace(tiny, config=tiny.config.model_copy(update={"channels": 24}))
    with pytest.raises(UserError, match=r"does not fit this configuration: (?s:.*)size mismatch") as caught:
        fit(wider, tmp_path, compute, tracker_of("after"), label="classifier")
    assert f"remove {tmp_path}" in caught.value.remedy
    assert not (tmp_path / WEIGHTS).exists()


ELASTIC = """
import pickle, sys, threading, time
import ray
from ray.cluster_utils import Cluster
sys.path.insert(0, sys.argv[1])
import test_cut_training
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.training import fit
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace

ray.cloudpickle.register_pickle_by_value(test_cut_training)

def fail():
    time.sleep(600)  # until the node of this worker or of the other one is removed

with open(sys.argv[2], "rb") as file:
    fields, folder = pickle.load(file)
learner = test_cut_training.FailingLearner(**vars(fields), folder=folder, fail=fail)
quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
node = {"num_cpus": 2, "object_store_memory": 2**27}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False, "_system_config": quick})
lost = cluster.add_node(**node)
ray.init(address=cluster.address, log_to_driver=False)

def remove():
    while not (folder / "failed-13").exists():
        time.sleep(0.1)
    cluster.remove_node(lost, allow_graceful=False)

threading.Thread(target=remove, daemon=True).start()
compute = ComputeConfig(workers=2, min_workers=1, worker_cpus=1.5, threads=1, checkpoint_steps=8)
tracker = Tracker(Workspace(folder.parent / "tracked"), "elastic", identity="elastic")
fit(learner, folder, compute, tracker, label="classifier")
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_an_elastic_training_continues_with_fewer_workers(
    tiny: ClassifierLearner, tmp_path: Path, undisturbed: Path
) -> None:
    """There are two nodes with a worker each. One is lost in step 13; the other continues with the same batches."""
    folder = tmp_path / "stage"
    folder.mkdir()
    script = tmp_path / "elastic.py"
    script.write_text(ELASTIC)
    task = tmp_path / "task.pickle"
    task.write_bytes(pickle.dumps((tiny, folder)))

    command = [sys.executable, str(script), str(Path(__file__).parent), str(task)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    check_continued(folder, undisturbed, starts="0 0 8 ", rounded=True)


@dataclass(frozen=True, kw_only=True)
class OverflowingLearner(ClassifierLearner):
    """The gradients of the last step overflow, though its loss is finite."""

    def loss_sums(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        terms = super().loss_sums(model, batch, step, device)
        if step == self.schedule.steps - 1:
            co_attention = terms["co_attention"]
            zero = (co_attention - co_attention.detach()).sqrt()  # its slope is infinite
            terms["co_attention"] = co_attention + zero
        return terms


@pytest.mark.slow
def test_gradients_that_overflow_in_the_last_step_leave_no_weights(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None
) -> None:
    learner = OverflowingLearner(**vars(tiny))
    with pytest.raises(UserError, match="not finite at step 19: gradients") as caught:
        fit(learner, tmp_path, ComputeConfig(threads=1), tracker_of("over"), label="classifier")
    assert "lower classifier.optimizer.learning_rate" in caught.value.remedy
    assert not (tmp_path / WEIGHTS).exists()


def test_a_loss_that_is_not_finite_is_an_error_with_step_and_images(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None
) -> None:
    optimizer: Any = tiny.config.optimizer.model_copy(update={"learning_rate": 1e30})
    learner = replace(tiny, config=tiny.config.model_copy(update={"optimizer": optimizer}))
    with pytest.raises(UserError, match="not finite at step") as caught:
        fit(learner, tmp_path, ComputeConfig(threads=1), tracker_of("wild"), label="classifier")
    assert sum(caught.value.found.count(uri) for uri in learner.images.uris) == 10, "two images in each of five pairs"
    assert not (tmp_path / WEIGHTS).exists()

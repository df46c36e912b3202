"""A training that is cut, by a kill, a lost node or a full disk, ends in the same bits once it goes on."""

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
class Struck(ClassifierLearner):
    """Writes down where its streams start, and falls to `blow` in some steps, in step 13 behind a checkpoint."""

    folder: Path
    blow: Callable[[], None]
    steps: tuple[int, ...] = (13,)
    again: bool = False

    def decoder(self, shard: WorkerShard) -> PairDecoder:
        with (self.folder / "starts").open("a") as file:
            file.write(f"{shard.start} ")
        return super().decoder(shard)

    def loss_sums(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        struck = self.folder / f"struck-{step}"
        if step in self.steps and (self.again or not struck.exists()):
            deadline = time.monotonic() + 60
            while step == 13 and not (self.folder / CHECKPOINT).exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            struck.touch()
            self.blow()
        return super().loss_sums(model, batch, step, device)


@pytest.fixture(autouse=True)
def by_value() -> None:
    """This module is not installed, so what it defines travels to Ray's processes as it is."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny: ClassifierLearner, tracker_of: Trackers, ray_local: None
) -> Path:
    """The folder of a training that nothing cut; `test_training.py` compares such a one with a plain loop."""
    folder = tmp_path_factory.mktemp("undisturbed")
    fit(tiny, folder, ComputeConfig(threads=1), tracker_of("undisturbed"), label="classifier")
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(folder / WEIGHTS, weights_only=True)["state_dict"]
    return weights


def check_that_it_went_on(folder: Path, undisturbed: Path, starts: str = "0 8 ", *, rounded: bool = False) -> None:
    """It ended in the bits of the undisturbed one, or to rounding, having started from these steps."""
    assert (folder / "starts").read_text() == starts
    weights = weights_of(folder)
    for key, value in weights_of(undisturbed).items():
        torch.testing.assert_close(weights[key], value, rtol=1e-3 * rounded, atol=1e-5 * rounded)
    logs = [[json.loads(line) for line in (each / STEPS).read_text().splitlines()] for each in (folder, undisturbed)]
    steps, losses = ([[record[name] for record in log] for log in logs] for name in ("step", "loss"))
    assert steps == [[10, 20], [10, 20]], "the line of step 10, where it was written before the cut, came once"
    assert losses[0] == pytest.approx(losses[1], rel=1e-3 if rounded else 1e-6)


def lose_a_node() -> None:
    raise RuntimeError("a node was lost")


def test_a_training_whose_worker_is_killed_ends_in_the_same_bits(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path
) -> None:
    """In the middle of an epoch."""
    assert (8 / tiny.schedule.steps_per_epoch) % 1 > 0.1, "a checkpoint at an epoch's end proves less"
    learner = Struck(**vars(tiny), folder=tmp_path, blow=lambda: os.kill(os.getpid(), signal.SIGKILL))
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=1), tracker_of("killed")
    result = fit(learner, tmp_path, compute, tracker, label="classifier")
    assert result.steps == 12
    assert not (tmp_path / CHECKPOINT).exists(), "it is of no more use"
    assert fit(learner, tmp_path, compute, tracker, label="classifier") == result, "it has ended"
    check_that_it_went_on(tmp_path, undisturbed)
    tracker.finish("FINISHED")
    logged = tracker.client.get_metric_history(tracker.run_id, "classifier.loss")
    assert [m.step for m in logged] == [10, 20]


@pytest.mark.slow
def test_checkpoints_a_minute(tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path) -> None:
    """A minute that ends in step 5, of a worker that is killed in step 9."""

    def blow() -> None:
        if (tmp_path / "struck-9").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        trainer._MIN_CHECKPOINT_INTERVAL = 0.0

    learner = Struck(**vars(tiny), folder=tmp_path, blow=blow, steps=(5, 9))
    fit(learner, tmp_path, ComputeConfig(threads=1, max_failures=1), tracker_of("minute"), label="classifier")
    starts = (tmp_path / "starts").read_text()
    assert 6 <= int(starts.split()[1]) <= 9
    check_that_it_went_on(tmp_path, undisturbed, starts=starts)


@pytest.mark.slow
def test_a_training_whose_worker_is_killed_each_time_says_so(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path
) -> None:
    kills: dict[str, Any] = {"blow": lambda: os.kill(os.getpid(), signal.SIGKILL), "steps": (9,), "again": True}
    learner = Struck(**vars(tiny), folder=tmp_path, **kills)
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=0), tracker_of("always-killed")
    with pytest.raises(UserError, match="training the classifier: its process was ended by a signal") as caught:
        fit(learner, tmp_path, compute, tracker, label="classifier")
    assert "lower classifier.batch or compute.micro_batch" in caught.value.remedy
    assert "--from index" in caught.value.remedy
    fit(replace(learner, steps=()), tmp_path, compute, tracker, label="classifier")
    check_that_it_went_on(tmp_path, undisturbed)


def test_failures_that_lie_behind_new_checkpoints_never_end_a_training(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = Struck(**vars(tiny), folder=tmp_path, blow=lose_a_node, steps=(5, 9, 13, 17))
    compute = ComputeConfig(threads=1, checkpoint_steps=4, max_failures=1)
    fit(learner, tmp_path, compute, tracker_of("stumbling"), label="classifier")
    said = " ".join(capsys.readouterr().out.split())
    assert "RuntimeError: a node was lost) and continues from its last checkpoint" in said
    check_that_it_went_on(tmp_path, undisturbed, starts="0 4 8 12 16 ")


def test_failures_without_a_new_checkpoint_end_a_training_after_a_few(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path
) -> None:
    """Which goes on from its checkpoint, once the cause is gone, when the command is repeated."""
    learner = Struck(**vars(tiny), folder=tmp_path, blow=lose_a_node, steps=(9,), again=True)
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=2), tracker_of("falling")
    with pytest.raises(Exception, match="a node was lost"):
        fit(learner, tmp_path, compute, tracker, label="classifier")
    assert (tmp_path / "starts").read_text() == "0 8 8 ", "the first of three failures lies behind a new checkpoint"
    fit(replace(learner, steps=()), tmp_path, compute, tracker, label="classifier")
    check_that_it_went_on(tmp_path, undisturbed, starts="0 8 8 8 ")


def run_out_on_a_gpu() -> None:
    """As CUDA's allocator does, which is not here."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")


class Narrow(Struck):
    """Has memory for two pairs at a time from step 5 on; the first one of those of which it runs out is on its way."""

    def loss_sums(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        losses = super().loss_sums(model, batch, step, device)
        if step >= 5 and len(batch) > 2:
            sum(losses.values()).backward()  # type: ignore[union-attr]
            (self.folder / f"struck-{step}-{len(batch)}").touch()
            self.blow()
        return losses


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_training_whose_memory_runs_out_goes_on_with_fewer_samples_at_a_time(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path, workers: int
) -> None:
    learner = Narrow(**vars(tiny), folder=tmp_path, blow=run_out_on_a_gpu, steps=())
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=4, workers=workers), tracker_of(f"narrow-{workers}")
    result = fit(learner, tmp_path, compute, tracker, label="classifier")
    assert result.notes("classifier") == (
        "out of memory while training the classifier: continued with micro-batches of 2",
    )
    sizes = {1: [3, 5], 2: [3]}[workers]
    assert sorted(path.name for path in tmp_path.glob("struck-*")) == [f"struck-5-{size}" for size in sizes]
    check_that_it_went_on(tmp_path, undisturbed, starts={1: "0 4 4 ", 2: "0 0 4 4 "}[workers], rounded=True)


def test_a_training_whose_memory_runs_out_says_what_to_lower_at_once(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, undisturbed: Path
) -> None:
    """Where the configuration says how many samples it has at a time."""
    learner = Struck(**vars(tiny), folder=tmp_path, blow=run_out_on_a_gpu, steps=(5,), again=True)
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=8, micro_batch=4), tracker_of("memory")
    with pytest.raises(UserError, match=r"training the classifier: memory ran out \(.*out of memory") as caught:
        fit(learner, tmp_path, compute, tracker, label="classifier")
    assert "lower compute.micro_batch" in caught.value.remedy
    assert "classifier.input_size" in caught.value.remedy
    assert (tmp_path / "starts").read_text() == "0 ", "it was not tried again"
    less = compute.model_copy(update={"micro_batch": 2})
    fit(replace(learner, steps=()), tmp_path, less, tracker, label="classifier")
    check_that_it_went_on(tmp_path, undisturbed, starts="0 0 ", rounded=True)


def test_a_training_whose_disk_is_full_keeps_its_checkpoint_and_goes_on_once_there_is_room(
    tiny: ClassifierLearner, tracker_of: Trackers, undisturbed: Path, small_disk: Callable[..., Path]
) -> None:
    folder = small_disk("4m")

    def fill() -> None:
        with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    learner = Struck(**vars(tiny), folder=folder, blow=fill)
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=8), tracker_of("full")
    with pytest.raises(UserError, match=rf"no space left on the disk of {folder}") as caught:
        fit(learner, folder, compute, tracker, label="classifier")
    assert "repeat the command" in caught.value.remedy
    assert torch.load(folder / CHECKPOINT, weights_only=True)["step"] == 8
    assert not any(path.name.startswith(".") for path in folder.iterdir()), "half a file would keep the disk full"
    (folder / "ballast").unlink()
    fit(learner, folder, compute, tracker, label="classifier")
    check_that_it_went_on(folder, undisturbed)


@pytest.mark.parametrize("damage", ["half", "noise"])
def test_a_damaged_checkpoint_is_dropped_and_the_training_begins_again(
    tiny: ClassifierLearner,
    tracker_of: Trackers,
    tmp_path: Path,
    undisturbed: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    learner = Struck(**vars(tiny), folder=tmp_path, blow=lose_a_node)
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=0), tracker_of(f"damaged-{damage}")
    with pytest.raises(Exception, match="a node was lost"):
        fit(learner, tmp_path, compute, tracker, label="classifier")
    content = (tmp_path / CHECKPOINT).read_bytes()
    middle = len(content) // 2
    noise = os.urandom(500) + content[middle + 500 :]
    (tmp_path / CHECKPOINT).write_bytes(content[:middle] + (noise if damage == "noise" else b""))
    fit(learner, tmp_path, compute, tracker, label="classifier")
    assert "the checkpoint of the classifier was damaged: its training starts again" in capsys.readouterr().out
    check_that_it_went_on(tmp_path, undisturbed, starts="0 0 ")


@pytest.mark.slow
def test_a_checkpoint_of_another_configuration_is_named(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None
) -> None:
    struck = Struck(**vars(tiny), folder=tmp_path, blow=lose_a_node)
    compute = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=0)
    with pytest.raises(Exception, match="a node was lost"):
        fit(struck, tmp_path, compute, tracker_of("before"), label="classifier")
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

def blow():
    time.sleep(600)  # until its node is removed, or the other worker's

with open(sys.argv[2], "rb") as file:
    given, folder = pickle.load(file)
learner = test_cut_training.Struck(**vars(given), folder=folder, blow=blow)
quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
node = {"num_cpus": 2, "object_store_memory": 2**27}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False, "_system_config": quick})
lost = cluster.add_node(**node)
ray.init(address=cluster.address, log_to_driver=False)

def remove():
    while not (folder / "struck-13").exists():
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
def test_an_elastic_training_goes_on_with_fewer(tiny: ClassifierLearner, tmp_path: Path, undisturbed: Path) -> None:
    """Two nodes with a worker each, one of which is lost in step 13: the other goes on alone, with the same batches."""
    task, folder = tmp_path / "task.pickle", tmp_path / "stage"
    folder.mkdir()
    (tmp_path / "elastic.py").write_text(ELASTIC)
    task.write_bytes(pickle.dumps((tiny, folder)))
    command = [sys.executable, str(tmp_path / "elastic.py"), str(Path(__file__).parent), str(task)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    check_that_it_went_on(folder, undisturbed, starts="0 0 8 ", rounded=True)


@dataclass(frozen=True, kw_only=True)
class Overflowing(ClassifierLearner):
    """The last update's gradients overflow, though its loss is finite."""

    def loss_sums(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        terms = super().loss_sums(model, batch, step, device)
        if step == self.schedule.steps - 1:
            co_attention = terms["co_attention"]
            zero = (co_attention - co_attention.detach()).sqrt()  # its slope is infinite
            terms["co_attention"] = co_attention + zero
        return terms


@pytest.mark.slow
def test_gradients_that_overflow_in_the_last_update_leave_no_weights(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None
) -> None:
    with pytest.raises(UserError, match="not finite at step 19: gradients") as caught:
        fit(Overflowing(**vars(tiny)), tmp_path, ComputeConfig(threads=1), tracker_of("over"), label="classifier")
    assert "lower classifier.optimizer.learning_rate" in caught.value.remedy
    assert not (tmp_path / WEIGHTS).exists()


def test_a_loss_that_is_not_finite_stops_with_step_and_images(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None
) -> None:
    wild: Any = tiny.config.optimizer.model_copy(update={"learning_rate": 1e30})
    learner = replace(tiny, config=tiny.config.model_copy(update={"optimizer": wild}))
    with pytest.raises(UserError, match="not finite at step") as caught:
        fit(learner, tmp_path, ComputeConfig(threads=1), tracker_of("wild"), label="classifier")
    assert sum(caught.value.found.count(uri) for uri in learner.images.uris) == 10  # both images of five pairs
    assert not (tmp_path / WEIGHTS).exists()

"""Training: on two workers, in micro batches, or through a kill, the loop ends in the same weights."""

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_square, encode_labels
from mcis.datasets.images.squares import Squares, read_rgb
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import PairBatch, PairDecoder
from mcis.datasets.sampling.keyed_random import Draw, generator_seeds
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic.devkit import draw
from mcis.datasets.tables.shards import Shards
from mcis.datasets.tags import Tags
from mcis.models.dropout import number_samples
from mcis.models.metrics import average_precision
from mcis.models.pretrained import BUNDLED, bundled_file
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.training import (
    AffinityConfig,
    AffinityNetConfig,
    ClassifierConfig,
    Optimizer,
    SegmenterConfig,
    SegmenterOptimizer,
)
from mcis.platform.engine.affinity_learner import AffinityLearner
from mcis.platform.engine.classifier_learner import ClassifierLearner, val_scores
from mcis.platform.engine.errors import user_error_in
from mcis.platform.engine.learner import Learner, Network
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.engine.resuming import CHECKPOINT
from mcis.platform.engine.segmenter_learner import SegmenterLearner
from mcis.platform.engine.step_log import STEPS, StepLog
from mcis.platform.engine.training import fit
from mcis.platform.engine.validation import Validation
from mcis.platform.networks.affinities import build_affinity_net
from mcis.platform.networks.checkpoints import WEIGHTS, load_weights
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace

# --- files


class _Head(nn.Module):
    """Weights to save and load: a layer and a free matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(4, 2, 1)
        self.w_p = nn.Parameter(torch.eye(4))


class _Program:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_weights_are_loaded_as_they_were(tmp_path: Path) -> None:
    old, new = _Head(), _Head()
    torch.save(old.state_dict(), tmp_path / WEIGHTS)
    load_weights(new, tmp_path / WEIGHTS)
    for key, value in new.state_dict().items():
        assert torch.equal(value, old.state_dict()[key])


@pytest.mark.parametrize("content", ["none", "garbage", "cut", "other network", "other shape", "program"])
def test_weights_that_do_not_fit_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / WEIGHTS
    if content == "program":
        torch.save({"w_p": _Program(tmp_path / "ran")}, path)
    elif content == "other network":
        torch.save(nn.Linear(2, 2).state_dict(), path)
    elif content == "other shape":
        torch.save({**_Head().state_dict(), "w_p": torch.zeros(5, 5)}, path)
    elif content != "none":
        torch.save(_Head().state_dict(), path)
        path.write_bytes(b"PK garbage" if content == "garbage" else path.read_bytes()[:500])
    with pytest.raises(UserError, match=rf"{WEIGHTS} does not fit this configuration") as caught:
        load_weights(_Head(), path)
    assert "--from" in caught.value.remedy
    assert not (tmp_path / "ran").exists()


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_step_log_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / STEPS
    log = StepLog(path, 0)
    for step in (10, 20, 30):
        log.write({"step": step, "loss": step / 7})
    log.flush()
    before = path.read_text().splitlines()
    again = StepLog(path, 20)
    assert path.read_text().splitlines() == before[:2]
    again.write({"step": 30, "loss": 0.0})
    again.flush()
    assert steps_of(path) == [10, 20, 30]
    StepLog(path, 0)
    assert path.read_text() == ""


# --- the loop


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """A drawn data set of 24 + 8 images and a workspace with its MLflow store."""

    learner: ClassifierLearner
    workspace: Workspace
    validation: Validation | None = None

    def tracker(self, name: str) -> Tracker:
        return Tracker(self.workspace, name, identity=name)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Surroundings:
    root = tmp_path_factory.mktemp("training")
    draw(root / "VOC2012", train=24, val=8, size=48, classes=4)
    table = list_voc(root / "VOC2012", classes=root / "VOC2012/classes.txt").table
    rows, val = table.slice(0, 24), table.slice(24)
    config = ClassifierConfig(
        backbone="small",
        channels=12,
        input_size=32,
        head="own",
        affinity=AffinityConfig(form="cosine", scale=10, init=1.0),
        self_pairs=("flip",),
        attention_epochs=3,
        contrastive_weight=1.5,
        contrastive_from_epoch=2,
        contrastive_needs_unshared=True,
        color_jitter=(0.3, 0.3, 0.3, 0.1),
        flip=True,
        shift=2,
        batch=5,
        epochs=4,
        optimizer=Optimizer(learning_rate=0.1, schedule="step", step_epochs=(3,), bias_rate=2, new_layer_rate=1.5),
    )
    learner = ClassifierLearner(
        config=config,
        seed=3,
        tags=Tags.of_index(rows["tags"], 4),
        source=None,
        images=Squares(rows["uri"].to_pylist(), config.input_size),
        pretrained=None,
    )
    assert learner.schedule.steps == 20
    validation = Validation(
        images=Squares(val["uri"].to_pylist(), config.input_size),
        tags=Tags.of_index(val["tags"], 4),
        scores=val_scores,
    )
    return Surroundings(learner=learner, workspace=Workspace(root / "workspace"), validation=validation)


def plain_loop(learner: Learner[Any], steps: int | None = None) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Weights after a training without Ray, or after so many of its steps, and the loss terms of each step."""
    schedule = learner.schedule
    torch.manual_seed(schedule.seed)
    network: Any = learner.model()
    network.to(memory_format=torch.channels_last)  # another order of sums is another last bit
    optimizer = build_optimizer(network, schedule.optimizer)
    decode = learner.decoder(WorkerShard(0, 1, 0, schedule.steps))
    terms = []
    for step in range(steps or schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = (
                schedule.optimizer.learning_rate * group["factor"] * (0.1 if step * schedule.batch // 24 >= 3 else 1)
            )
        batch = decode(np.array([step]))
        numbers = step * schedule.batch + np.arange(schedule.batch)
        number_samples(network, generator_seeds(Draw.DROPOUT, schedule.seed, numbers))
        losses = learner.losses(network, batch, step, torch.device("cpu"))
        optimizer.zero_grad()
        (torch.stack(list(losses.values())).sum() / learner.count(batch)).backward()
        optimizer.step()
        terms.append({name: float(value.detach()) / learner.count(batch) for name, value in losses.items()})
    return network.state_dict(), terms


def trained(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(folder / WEIGHTS, weights_only=True)["state_dict"]
    return weights


def test_the_plain_loop_does_train(here: Surroundings) -> None:
    """What the others are compared with: its losses fall, and its terms begin and weigh as configured."""
    _, terms = plain_loop(here.learner)
    common, contrastive = (np.array([t[name] for t in terms[5:]]) for name in ("common", "contrastive"))
    assert common[10:].mean() < 0.95 * common[:3].mean()
    assert contrastive[10:].mean() < 0.8 * contrastive[5:10].max()
    assert [sorted(t) for t in terms[:5]] == [["basic", "self_basic"]] * 5, "pairs attend from epoch 1 on"
    assert (contrastive[:5] == 0).all(), "it begins with epoch 2"
    assert (contrastive[5:] > 0).all()


def test_a_side_without_an_unshared_label_in_the_whole_batch_has_no_contrastive_term(here: Surroundings) -> None:
    batch = here.learner.decoder(WorkerShard(0, 1, 0, 1))(np.array([0]))

    def weights(m: bool, n: bool, step: int = 12) -> tuple[float, float]:
        unshared = replace(batch, unshared_m=np.array([m, m]), unshared_n=np.array([n, n]))
        return here.learner._contrastive_weights(unshared, step)

    assert weights(True, True) == (1.5, 1.5)
    assert weights(True, False) == (1.5, 0)
    assert weights(False, True) == (0, 1.5)
    assert weights(False, False) == (0, 0)
    assert weights(True, True, step=9) == (0, 0), "it begins with epoch 2"


@pytest.mark.parametrize(
    ("batch", "workers", "micro"),
    [
        (5, 2, 2),
        pytest.param(5, 2, None, marks=pytest.mark.slow),
        pytest.param(5, 1, 2, marks=pytest.mark.slow),
        pytest.param(4, 2, None, marks=pytest.mark.slow),
    ],
)
def test_workers_and_micro_batches_train_the_same_weights(
    here: Surroundings, tmp_path: Path, ray_local: None, batch: int, workers: int, micro: int | None
) -> None:
    """Five pairs are three and two: gradients weigh pairs, not workers. In twos, one worker has two micro batches."""
    config = here.learner.config.model_copy(update={"batch": batch, "epochs": 2})
    learner = replace(here.learner, config=config)
    weights, terms = plain_loop(learner)
    tracker = here.tracker(f"batch-{batch}-{workers}-{micro}")
    compute = ComputeConfig(workers=workers, micro_batch=micro, threads=1)
    result = fit(learner, tmp_path, compute, tracker, label="classifier")
    assert result.steps == learner.schedule.steps
    assert result.precision == "float32"
    assert result.val_ap is None
    fitted = trained(tmp_path)
    assert fitted.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(fitted[key], value, rtol=1e-3, atol=1e-5)
    # What is logged is the whole batch's loss, not a worker's.
    records = [json.loads(line) for line in (tmp_path / STEPS).read_text().splitlines()]
    assert [r["step"] for r in records] == sorted({10, learner.schedule.steps})
    for record in records:
        expected = terms[record["step"] - 1]
        assert record["loss"] == pytest.approx(sum(expected.values()), rel=1e-4)
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert record["epoch"] == pytest.approx(record["step"] * batch / 24, abs=1e-3)
    tracker.finish("FINISHED")
    logged = tracker.client.get_metric_history(tracker.run_id, "classifier.loss")
    assert [(m.step, m.value) for m in logged] == [(r["step"], r["loss"]) for r in records]
    waiting = tracker.client.get_metric_history(tracker.run_id, "classifier.waiting")
    assert [m.value for m in waiting] == [r["waiting"] for r in records]
    assert all(0 <= m.value <= 1 for m in waiting)


@pytest.mark.slow
def test_workers_train_the_last_stages_of_a_pretrained_network(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    """Two workers end in the weights of a plain loop, and what is frozen stays as the file has it."""
    slow = here.learner.config.optimizer.model_copy(update={"learning_rate": 1e-4})
    values = {"backbone": BUNDLED, "trained": 1, "epochs": 1, "self_pairs": (), "optimizer": slow}
    learner = replace(here.learner, config=here.learner.config.model_copy(update=values), pretrained=bundled_file())
    start, (weights, _) = learner.model().state_dict(), plain_loop(learner)
    fit(learner, tmp_path, ComputeConfig(workers=2, threads=1), here.tracker("last-stages"), label="classifier")
    fitted = trained(tmp_path)
    changed = {key for key in start if key.startswith("backbone.") and not torch.equal(fitted[key], start[key])}
    assert changed
    assert all(key.startswith(("backbone.body.blocks.5.", "backbone.body.blocks.6.")) for key in changed)
    for key, value in weights.items():
        torch.testing.assert_close(fitted[key], value, rtol=1e-3, atol=1e-5)


def drawn_masks(here: Surroundings, folder: Path) -> list[str]:
    """A table of random masks of the 24 images, half of them almost all ignored; returns the images' ids."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    shapes = [read_rgb(uri).shape[:2] for uri in here.learner.images.uris]
    masks = [rng.integers(0, 5, shape).astype(np.uint8) for shape in shapes]
    for mask in masks[::2]:
        mask[4:] = 255
    ids = [str(number) for number in range(24)]
    table = pa.table({"image_id": ids, "mask": [encode_labels(mask) for mask in masks]})
    pq.write_table(table, folder / "part-00000000-00000024.parquet")
    return ids


@pytest.mark.slow
def test_an_affinity_network_weighs_images_whatever_the_workers_and_micro_batches(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    ids = drawn_masks(here, tmp_path / "masks")
    optimizer = SegmenterOptimizer.model_validate(here.learner.config.optimizer.model_dump())
    config = AffinityNetConfig(
        backbone="small",
        channels=12,
        width=8,
        kind="boundaries",
        radius=3,
        trained="all",
        crop=32,
        batch=5,
        steps=10,
        optimizer=optimizer,
    )
    learner = AffinityLearner(
        config=config,
        seed=3,
        layout=build_affinity_net(config).layout,
        image_ids=ids,
        uris=here.learner.images.uris,
        masks=Shards(tmp_path / "masks"),
        pretrained=None,
    )
    weights, terms = plain_loop(learner)
    compute = ComputeConfig(workers=2, micro_batch=2, threads=1)
    fit(learner, tmp_path, compute, here.tracker("affinity"), label="affinity_net")
    for key, value in trained(tmp_path).items():
        torch.testing.assert_close(value, weights[key], rtol=1e-3, atol=1e-5)
    (line,) = (tmp_path / STEPS).read_text().splitlines()
    assert json.loads(line)["loss"] == pytest.approx(sum(terms[9].values()), rel=1e-4)


@pytest.mark.slow
def test_a_segmenter_weighs_pixels_whatever_the_workers_and_micro_batches(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    """Half of the masks are almost all ignored: means of workers or of micro batches would be another loss.

    Dropout drops the same units of an image's features, whichever worker has it.
    """
    ids = drawn_masks(here, tmp_path / "masks")
    optimizer = SegmenterOptimizer.model_validate(here.learner.config.optimizer.model_dump())
    learner = SegmenterLearner(
        config=SegmenterConfig(
            backbone="small",
            channels=12,
            width=8,
            dilation=1,
            dropout=0.5,
            crop=32,
            batch=5,
            steps=10,
            optimizer=optimizer,
        ),
        seed=3,
        classes=4,
        image_ids=ids,
        uris=here.learner.images.uris,
        masks=Shards(tmp_path / "masks"),
        backbone=None,
        pretrained=None,
    )
    weights, terms = plain_loop(learner)
    compute = ComputeConfig(workers=2, micro_batch=2, threads=1)
    fit(learner, tmp_path, compute, here.tracker("segmenter"), label="segmenter")
    for key, value in trained(tmp_path).items():
        torch.testing.assert_close(value, weights[key], rtol=1e-3, atol=1e-5)
    (line,) = (tmp_path / STEPS).read_text().splitlines()
    assert json.loads(line)["loss"] == pytest.approx(terms[9]["pixel"], rel=1e-4)


@pytest.mark.slow
def test_bf16_trains_float32_weights_to_about_the_same_loss(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    half = here.learner.config.optimizer.model_copy(update={"precision": "bf16"})
    learner = replace(here.learner, config=here.learner.config.model_copy(update={"optimizer": half}))
    result = fit(learner, tmp_path, ComputeConfig(threads=1), here.tracker("bf16"), label="classifier")
    assert result.precision == "bf16"
    weights, terms = plain_loop(here.learner)
    fitted = trained(tmp_path)
    assert {value.dtype for value in fitted.values()} == {torch.float32}
    assert not any(torch.equal(value, weights[key]) for key, value in fitted.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in fitted.values())
    last = json.loads((tmp_path / STEPS).read_text().splitlines()[-1])
    assert last["loss"] == pytest.approx(sum(terms[19].values()), rel=0.02)


@pytest.mark.slow
def test_what_is_validated_changes_no_weights_and_is_the_average_precision(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    """At the end of epochs 2 and 4, on two workers and on one, against the scores of a plain loop's weights."""
    assert here.validation is not None
    validation = replace(here.validation, every=2)
    learner = here.learner
    weights, _ = plain_loop(learner)
    val_maps = {}
    for workers in (1, 2):
        folder, tracker = tmp_path / str(workers), here.tracker(f"validated-{workers}")
        folder.mkdir()
        compute = ComputeConfig(workers=workers, threads=1)
        result = fit(learner, folder, compute, tracker, label="classifier", validation=validation)
        records = [json.loads(line) for line in (folder / STEPS).read_text().splitlines()]
        assert [r["step"] for r in records if "val_map" in r] == [10, 20]
        assert result.val_ap is not None
        val_maps[workers] = [r["val_map"] for r in records]
        tracker.finish("FINISHED")
        logged = tracker.client.get_metric_history(tracker.run_id, "classifier.val_map")
        assert [(m.step, m.value) for m in logged] == list(zip([10, 20], val_maps[workers], strict=True))
        if workers == 1:
            assert all(torch.equal(value, weights[key]) for key, value in trained(folder).items())
    assert val_maps[1] == pytest.approx(val_maps[2], abs=1e-6)

    network: Any = learner.model()
    network.load_state_dict(weights)
    network.to(memory_format=torch.channels_last)
    every = np.arange(len(validation.tags))
    with torch.inference_mode():
        scores = torch.cat([val_scores(network, torch.from_numpy(validation.images(every[[i]]))) for i in every])
    expected = average_precision(scores.double().numpy(), validation.tags.matrix(every))
    assert val_maps[1][-1] == pytest.approx(np.nanmean(expected))
    assert result.val_ap == [None if np.isnan(v) else pytest.approx(v, abs=0.006) for v in expected]
    assert 0 < val_maps[1][-1] < 100


@dataclass(frozen=True, kw_only=True)
class Struck(ClassifierLearner):
    """Writes down where its streams start, and in step 13 falls to `blow`, once a checkpoint is on record; but once."""

    folder: Path
    blow: Callable[[], None]

    def decoder(self, shard: WorkerShard) -> PairDecoder:
        with (self.folder / "starts").open("a") as file:
            file.write(f"{shard.start} ")
        return super().decoder(shard)

    def losses(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        if step == 13 and not (self.folder / "struck").exists():
            deadline = time.monotonic() + 60
            while not (self.folder / CHECKPOINT).exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            (self.folder / "struck").write_text(str(os.getpid()))
            self.blow()
        return super().losses(model, batch, step, device)


def by_value() -> None:
    """This module is not installed, so what it defines travels to Ray's processes as it is."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def check_that_it_went_on(folder: Path, learner: ClassifierLearner, starts: str = "0 8 ") -> None:
    """The training was cut in the middle of an epoch, went on from step 8, and ended in the bits of a plain loop.

    Checkpoints lie behind steps 8 and 16. Its log's line of step 10, already written, was cut off and came again.
    """
    assert (8 / learner.schedule.steps_per_epoch) % 1 > 0.1, "a checkpoint at an epoch's end proves less"
    assert (folder / "starts").read_text() == starts
    weights, terms = plain_loop(learner)
    for key, value in trained(folder).items():
        assert torch.equal(value, weights[key]), f"{key} differs by {(value - weights[key]).abs().max():.1e}"
    assert steps_of(folder / STEPS) == [10, 20]
    losses = [json.loads(line)["loss"] for line in (folder / STEPS).read_text().splitlines()]
    assert losses == pytest.approx([sum(terms[9].values()), sum(terms[19].values())], rel=1e-6)


@pytest.mark.parametrize(
    "how",
    [
        "the worker killed",
        pytest.param("an error", marks=pytest.mark.slow),
        pytest.param("a second start", marks=pytest.mark.slow),
    ],
)
def test_a_training_that_was_cut_ends_in_the_same_bits(
    here: Surroundings, tmp_path: Path, ray_local: None, how: str
) -> None:
    def blow() -> None:
        if how == "the worker killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a node was lost")

    by_value()
    learner = Struck(**vars(here.learner), folder=tmp_path, blow=blow)
    again = how == "a second start"
    compute = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=0 if again else 1)
    tracker = here.tracker(how.replace(" ", "-"))
    if again:
        with pytest.raises(Exception, match="a node was lost"):
            fit(learner, tmp_path, compute, tracker, label="classifier")
        assert steps_of(tmp_path / STEPS) == [10]
        assert not (tmp_path / WEIGHTS).exists()
    result = fit(learner, tmp_path, compute, tracker, label="classifier")
    assert result.steps == 12
    assert not (tmp_path / CHECKPOINT).exists(), "it is of no more use"
    assert fit(learner, tmp_path, compute, tracker, label="classifier") == result, "it has ended"
    check_that_it_went_on(tmp_path, here.learner)
    tracker.finish("FINISHED")
    logged = tracker.client.get_metric_history(tracker.run_id, "classifier.loss")
    assert [m.step for m in logged] == [10, 20]


@dataclass(frozen=True, kw_only=True)
class Poisoned(ClassifierLearner):
    """Whatever process decodes its image number 7 is killed, as long as a file is there."""

    poison: Path

    def decoder(self, shard: WorkerShard) -> Any:
        return OfPoison(decoder=super().decoder(shard), poison=self.poison, content=Path(self.images.uris[7]))


@dataclass(frozen=True, kw_only=True)
class OfPoison:
    """Decodes pairs; kills its process where an image has the content of a file."""

    decoder: PairDecoder
    poison: Path
    content: Path
    batch_type = PairBatch

    @property
    def row_bytes(self) -> int:
        return self.decoder.row_bytes

    def __call__(self, steps: np.ndarray) -> PairBatch:
        from mcis.datasets.images import squares as images

        decode, deadly, poison = decode_square, self.content.read_bytes(), self.poison

        def square(data: bytes, *arguments: Any, **options: Any) -> Any:
            if data == deadly and poison.exists():
                os.kill(os.getpid(), signal.SIGSEGV)
                time.sleep(60)
            return decode(data, *arguments, **options)

        images.decode_square = square
        return self.decoder(steps)


@pytest.mark.slow
@pytest.mark.parametrize(("decode", "workers"), [("threads", 1), ("tasks", 1), ("threads", 2)])
def test_an_image_that_ends_the_process_that_trains_is_named_and_repaired_the_training_goes_on(
    here: Surroundings, tmp_path: Path, ray_local: None, decode: Any, workers: int
) -> None:
    by_value()
    (tmp_path / "stage").mkdir()
    poison = tmp_path / "poison"
    poison.touch()
    learner = Poisoned(**vars(here.learner), poison=poison)
    compute = ComputeConfig(
        threads=1, max_failures=1, checkpoint_steps=1, decode=decode, decode_threads=1, workers=workers
    )
    arguments = learner, tmp_path / "stage", compute, here.tracker(f"poisoned-{decode}-{workers}")
    with pytest.raises(UserError, match="ended by a signal") as caught:
        fit(*arguments, label="classifier")
    uris = here.learner.images.uris
    assert [uri for uri in uris if uri in caught.value.found] == [uris[7]]
    assert not (tmp_path / "stage" / WEIGHTS).exists()
    poison.unlink()
    fit(*arguments, label="classifier")
    weights, _ = plain_loop(here.learner)
    for key, value in trained(tmp_path / "stage").items():
        torch.testing.assert_close(
            value, weights[key], rtol=0 if workers == 1 else 1e-3, atol=0 if workers == 1 else 1e-5
        )
    assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == ["fit.json", STEPS, WEIGHTS]


@dataclass(frozen=True, kw_only=True)
class Stumbling(Struck):
    """Fails in some steps, in each of them once, or again and again."""

    steps: tuple[int, ...]
    again: bool = False

    def losses(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        fell = self.folder / f"fell-{step}"
        if step in self.steps and (self.again or not fell.exists()):
            fell.touch()
            self.blow()
        return ClassifierLearner.losses(self, model, batch, step, device)


def lose_a_node() -> None:
    raise RuntimeError("a node was lost")


def test_failures_that_lie_behind_new_checkpoints_never_end_a_training(
    here: Surroundings, tmp_path: Path, ray_local: None, capsys: pytest.CaptureFixture[str]
) -> None:
    by_value()
    learner = Stumbling(**vars(here.learner), folder=tmp_path, blow=lose_a_node, steps=(5, 9, 13, 17))
    compute = ComputeConfig(threads=1, checkpoint_steps=4, max_failures=1)
    fit(learner, tmp_path, compute, here.tracker("stumbling"), label="classifier")
    assert "RuntimeError: a node was lost) and goes on from its last checkpoint" in " ".join(
        capsys.readouterr().out.split()
    )
    check_that_it_went_on(tmp_path, here.learner, starts="0 4 8 12 16 ")


def test_failures_without_a_new_checkpoint_end_a_training_after_a_few(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    """Which goes on from its checkpoint, once the cause is gone, when the command is repeated."""
    by_value()
    learner = Stumbling(**vars(here.learner), folder=tmp_path, blow=lose_a_node, steps=(9,), again=True)
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=2), here.tracker("falling")
    with pytest.raises(Exception, match="a node was lost"):
        fit(learner, tmp_path, compute, tracker, label="classifier")
    assert (tmp_path / "starts").read_text() == "0 8 8 ", "the first of three failures lies behind a new checkpoint"
    fit(replace(learner, steps=()), tmp_path, compute, tracker, label="classifier")
    check_that_it_went_on(tmp_path, here.learner, starts="0 8 8 8 ")


def ask_for_too_much() -> None:
    torch.zeros(2**58)


def run_out_on_a_gpu() -> None:
    """As CUDA's allocator does, which is not here."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")


@pytest.mark.parametrize(
    ("blow", "workers"),
    [
        pytest.param(ask_for_too_much, 1, id="machine"),
        pytest.param(run_out_on_a_gpu, 1, id="gpu"),
        pytest.param(run_out_on_a_gpu, 2, id="group", marks=pytest.mark.slow),
    ],
)
def test_a_training_whose_memory_runs_out_says_what_to_lower_at_once(
    here: Surroundings, tmp_path: Path, ray_local: None, blow: Callable[[], None], workers: int
) -> None:
    by_value()
    learner = Stumbling(**vars(here.learner), folder=tmp_path, blow=blow, steps=(9,), again=True)
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=8, workers=workers), here.tracker(blow.__name__)
    with pytest.raises(
        UserError, match=r"training the classifier: memory ran out \(.*(allocate|out of) memory"
    ) as caught:
        fit(learner, tmp_path, compute, tracker, label="classifier")
    assert "lower compute.micro_batch" in caught.value.remedy
    assert "classifier.input_size" in caught.value.remedy
    assert set((tmp_path / "starts").read_text().split()) == {"0"}, "it was not tried again"
    fit(
        replace(learner, steps=()), tmp_path, compute.model_copy(update={"micro_batch": 2}), tracker, label="classifier"
    )
    weights, _ = plain_loop(here.learner)
    for key, value in trained(tmp_path).items():
        torch.testing.assert_close(value, weights[key], rtol=1e-3, atol=1e-5)


@dataclass(frozen=True, kw_only=True)
class Mortal:
    """Decodes pairs, but kills its process once, as it begins with step 9."""

    decoder: PairDecoder
    killed: Path
    batch_type = PairBatch

    @property
    def row_bytes(self) -> int:
        return self.decoder.row_bytes

    def __call__(self, steps: np.ndarray) -> PairBatch:
        if 9 in steps and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.decoder(steps)


@dataclass(frozen=True, kw_only=True)
class DecodedByMortals(ClassifierLearner):
    """Its batches come from such decoders."""

    folder: Path

    def decoder(self, shard: WorkerShard) -> Any:
        return Mortal(decoder=super().decoder(shard), killed=self.folder / "killed")


@pytest.mark.slow
def test_a_data_task_that_is_killed_changes_nothing_of_a_training(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    by_value()
    learner = DecodedByMortals(**vars(here.learner), folder=tmp_path)
    compute = ComputeConfig(threads=1, decode="tasks", max_failures=0)
    fit(learner, tmp_path, compute, here.tracker("mortal"), label="classifier")
    assert (tmp_path / "killed").exists()
    weights, _ = plain_loop(here.learner)
    for key, value in trained(tmp_path).items():
        assert torch.equal(value, weights[key])
    assert steps_of(tmp_path / STEPS) == [10, 20]


class Cramped(Struck):
    """Has all space for its files, until the blow."""

    def decoder(self, shard: WorkerShard) -> PairDecoder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard := resource.getrlimit(resource.RLIMIT_FSIZE)[1], hard))
        return super().decoder(shard)


@pytest.mark.parametrize("how", ["a small disk", "a bound of files"])
def test_a_training_whose_disk_is_full_keeps_its_checkpoint_and_goes_on_once_there_is_room(
    here: Surroundings, tmp_path: Path, small_disk: Callable[..., Path], ray_local: None, how: str
) -> None:
    """Files of a bounded size are for where no disk can be mounted."""
    folder = small_disk("4m") if how == "a small disk" else tmp_path / "stage"
    folder.mkdir(exist_ok=True)

    def blow() -> None:
        if how == "a small disk":
            fill(folder / "ballast")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    by_value()
    learner = Cramped(**vars(here.learner), folder=folder, blow=blow)
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=8), here.tracker(how.replace(" ", "-"))
    with pytest.raises(UserError, match=rf"no space left on the disk of {folder}") as caught:
        fit(learner, folder, compute, tracker, label="classifier")
    assert "repeat the command" in caught.value.remedy
    assert torch.load(folder / CHECKPOINT, weights_only=True)["step"] == 8
    assert not any(path.name.startswith(".") for path in folder.iterdir()), "half a file would keep the disk full"
    (folder / "ballast").unlink(missing_ok=True)
    fit(learner, folder, compute, tracker, label="classifier")
    check_that_it_went_on(folder, here.learner)


def fill(ballast: Path) -> None:
    """Writes a file until its disk has no space left."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@pytest.mark.slow
def test_a_full_disk_ends_a_group_of_workers_too(
    here: Surroundings, small_disk: Callable[..., Path], ray_local: None
) -> None:
    """Ray Train wraps the error, and keeps files of its own on the disk."""
    folder = small_disk("4m")
    by_value()
    learner = Struck(**vars(here.learner), folder=folder, blow=lambda: fill(folder / "ballast"))
    compute, tracker = ComputeConfig(workers=2, threads=1, checkpoint_steps=8), here.tracker("full-group")
    with pytest.raises(Exception, match=r".") as caught:
        fit(learner, folder, compute, tracker, label="classifier")
    error = user_error_in(caught.value)
    assert error is not None
    assert error.found.startswith("no space left on the disk of")
    assert torch.load(folder / CHECKPOINT, weights_only=True)["step"] == 8
    (folder / "ballast").unlink()
    fit(learner, folder, compute, tracker, label="classifier")
    assert (folder / "starts").read_text() == "0 0 8 8 "
    weights, _ = plain_loop(here.learner)
    for key, value in trained(folder).items():
        torch.testing.assert_close(value, weights[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("damage", ["half", "empty", "noise"])
def test_a_damaged_checkpoint_is_dropped_and_the_training_begins_again(
    here: Surroundings, tmp_path: Path, ray_local: None, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def blow() -> None:
        raise UserError("the disk is taken away", "a disk", "give it back")

    by_value()
    learner = Struck(**vars(here.learner), folder=tmp_path, blow=blow)
    compute, tracker = ComputeConfig(threads=1, checkpoint_steps=8), here.tracker(f"damaged-{damage}")
    with pytest.raises(UserError, match="taken away"):
        fit(learner, tmp_path, compute, tracker, label="classifier")
    content = (tmp_path / CHECKPOINT).read_bytes()
    middle = len(content) // 2
    other = {
        "half": content[:middle],
        "empty": b"",
        "noise": content[:middle] + os.urandom(500) + content[middle + 500 :],
    }
    (tmp_path / CHECKPOINT).write_bytes(other[damage])
    fit(learner, tmp_path, compute, tracker, label="classifier")
    assert "the checkpoint of the classifier was damaged: its training begins again" in capsys.readouterr().out
    check_that_it_went_on(tmp_path, here.learner, starts="0 0 ")


DRIVER = """
import pickle, sys, time
sys.path.insert(0, sys.argv[1])
import test_training
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session
from mcis.platform.engine.training import fit

test_training.by_value()

def blow():
    time.sleep(600)  # until the driver is killed

with open(sys.argv[2], "rb") as file:
    given, workspace, folder = pickle.load(file)
here = test_training.Surroundings(learner=given, workspace=workspace)
learner = test_training.Struck(**vars(given), folder=folder, blow=blow)
compute = ComputeConfig(threads=1, checkpoint_steps=8)
with ray_session(compute):
    fit(learner, folder, compute, here.tracker("driver"), label="classifier")
"""


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_training_whose_driver_was_killed_goes_on_at_the_next_start(here: Surroundings, tmp_path: Path) -> None:
    """The process that called `fit` is killed while its worker is in step 13; the same command then ends the work."""
    task, folder = tmp_path / "task.pickle", tmp_path / "stage"
    folder.mkdir()
    (tmp_path / "driver.py").write_text(DRIVER)
    task.write_bytes(pickle.dumps((here.learner, here.workspace, folder)))
    command = [sys.executable, str(tmp_path / "driver.py"), str(Path(__file__).parent), str(task)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as driver:
        for _ in range(1200):
            if (folder / "struck").exists() and (folder / "struck").read_text():
                break
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.1)
        driver.kill()
        assert driver.wait() == -signal.SIGKILL
    worker = int((folder / "struck").read_text())
    for _ in range(600):
        if not alive(worker):
            break
        time.sleep(0.1)
    assert not alive(worker), "the worker outlives its driver"
    assert (folder / CHECKPOINT).exists()
    assert steps_of(folder / STEPS) == [10]
    assert not (folder / WEIGHTS).exists()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    check_that_it_went_on(folder, here.learner)


SHORT_OF_MEMORY = """
import pickle, sys
from mcis.datasets.errors import UserError
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session
from mcis.platform.engine.training import fit
from mcis.platform.runs.tracking import Tracker

with open(sys.argv[1], "rb") as file:
    learner, workspace, folder = pickle.load(file)
with ray_session(ComputeConfig()):
    try:
        tracker = Tracker(workspace, "memory", identity="memory")
        fit(learner, folder, ComputeConfig(threads=1), tracker, label="classifier")
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_training_that_the_machines_memory_does_not_do_for_says_so_and_with_more_goes_on(
    here: Surroundings, tmp_path: Path
) -> None:
    """In a Ray of its own, which takes a fiftieth of the memory for all of it, and then for what it is."""
    task, script, folder = tmp_path / "task.pickle", tmp_path / "memory.py", tmp_path / "stage"
    folder.mkdir()
    script.write_text(SHORT_OF_MEMORY)
    task.write_bytes(pickle.dumps((here.learner, here.workspace, folder)))
    command = [sys.executable, str(script), str(task)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    short = {"RAY_memory_usage_threshold": "0.02", "RAY_memory_monitor_refresh_ms": "200", "RAY_task_oom_retries": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment | short, timeout=500)
    assert "training the classifier: the machine's memory did not do for its process" in done.stdout, done.stderr
    assert "compute.micro_batch" in done.stdout
    assert not (folder / WEIGHTS).exists()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("did not do") == 0, done.stdout
    weights, _ = plain_loop(here.learner)
    assert all(torch.equal(value, weights[key]) for key, value in trained(folder).items())


ELASTIC = """
import pickle, sys, threading, time
import ray
from ray.cluster_utils import Cluster
sys.path.insert(0, sys.argv[1])
import test_training
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.training import fit

test_training.by_value()

def blow():
    time.sleep(600)  # until its node is removed, or the other worker's

with open(sys.argv[2], "rb") as file:
    given, workspace, folder = pickle.load(file)
here = test_training.Surroundings(learner=given, workspace=workspace)
learner = test_training.Struck(**vars(given), folder=folder, blow=blow)
quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
node = {"num_cpus": 2, "object_store_memory": 2**27}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False, "_system_config": quick})
lost = cluster.add_node(**node)
ray.init(address=cluster.address, log_to_driver=False)

def remove():
    while not (folder / "struck").exists():
        time.sleep(0.1)
    cluster.remove_node(lost, allow_graceful=False)

threading.Thread(target=remove, daemon=True).start()
compute = ComputeConfig(workers=2, min_workers=1, worker_cpus=1.5, threads=1, checkpoint_steps=8)
fit(learner, folder, compute, here.tracker("elastic"), label="classifier")
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_an_elastic_training_goes_on_with_the_workers_that_are_left(here: Surroundings, tmp_path: Path) -> None:
    """Two nodes with a worker each, one of which is lost in step 13: the other goes on alone, with the same batches."""
    task, folder = tmp_path / "task.pickle", tmp_path / "stage"
    folder.mkdir()
    (tmp_path / "elastic.py").write_text(ELASTIC)
    task.write_bytes(pickle.dumps((here.learner, here.workspace, folder)))
    command = [sys.executable, str(tmp_path / "elastic.py"), str(Path(__file__).parent), str(task)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    assert (folder / "starts").read_text() == "0 0 8 ", "two workers from the beginning, then one"
    weights, _ = plain_loop(here.learner)
    for key, value in trained(folder).items():
        torch.testing.assert_close(value, weights[key], rtol=1e-3, atol=1e-5)
    assert steps_of(folder / STEPS) == [10, 20]


@pytest.mark.slow
def test_a_checkpoint_of_another_configuration_is_named(here: Surroundings, tmp_path: Path, ray_local: None) -> None:
    def blow() -> None:
        raise RuntimeError("a node was lost")

    by_value()
    struck = Struck(**vars(here.learner), folder=tmp_path, blow=blow)
    compute = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=0)
    with pytest.raises(Exception, match="a node was lost"):
        fit(struck, tmp_path, compute, here.tracker("before"), label="classifier")
    wider = replace(here.learner, config=here.learner.config.model_copy(update={"channels": 24}))
    with pytest.raises(Exception, match="does not fit this configuration") as caught:
        fit(wider, tmp_path, compute, here.tracker("after"), label="classifier")
    error = user_error_in(caught.value)
    assert error is not None
    assert str(tmp_path) in error.found
    assert "size mismatch" in error.found
    assert f"remove {tmp_path}" in error.remedy
    assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.slow
def test_a_file_that_vanishes_ends_a_training_with_the_users_error(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    images = here.learner.images
    assert isinstance(images, Squares)
    uris = [*images.uris[:-1], str(tmp_path / "gone.jpg")]
    learner = replace(here.learner, images=Squares(uris, images.size))
    with pytest.raises(Exception, match=r"gone\.jpg cannot be read any more") as caught:
        fit(learner, tmp_path, ComputeConfig(max_failures=0), here.tracker("vanished"), label="classifier")
    error = user_error_in(caught.value)
    assert type(error) is UserError
    assert "Traceback" not in str(error)
    assert not (tmp_path / WEIGHTS).exists()


@dataclass(frozen=True, kw_only=True)
class Overflowing(ClassifierLearner):
    """The last update's gradients overflow, though its loss is finite."""

    def losses(self, model: Network, batch: PairBatch, step: int, device: torch.device) -> dict[str, Tensor]:
        terms = super().losses(model, batch, step, device)
        if step == self.schedule.steps - 1:
            common = terms["common"]
            terms["common"] = common + (common - common.detach()).sqrt()  # adds 0, whose slope is infinite
        return terms


@pytest.mark.slow
def test_gradients_that_overflow_in_the_last_update_leave_no_weights(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    by_value()
    learner = Overflowing(**vars(here.learner))
    with pytest.raises(Exception, match="not finite at step 19: gradients") as caught:
        fit(learner, tmp_path, ComputeConfig(threads=1, max_failures=0), here.tracker("overflow"), label="classifier")
    error = user_error_in(caught.value)
    assert error is not None
    assert "lower classifier.optimizer.learning_rate" in error.remedy
    assert not (tmp_path / WEIGHTS).exists()


def test_a_loss_that_is_not_finite_stops_with_step_and_images(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    wild = here.learner.config.optimizer.model_copy(update={"learning_rate": 1e30})
    learner = replace(here.learner, config=here.learner.config.model_copy(update={"optimizer": wild}))
    with pytest.raises(Exception, match="not finite") as caught:
        fit(learner, tmp_path, ComputeConfig(threads=1, max_failures=5), here.tracker("wild"), label="classifier")
    error = user_error_in(caught.value)
    assert error is not None
    assert "not finite at step" in error.found
    assert sum(error.found.count(uri) for uri in learner.images.uris) == 10  # both images of five pairs
    assert not (tmp_path / WEIGHTS).exists()

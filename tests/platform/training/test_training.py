"""Training: on two workers, or in micro batches, the loop ends in the weights of a plain one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from mcis.datasets.images.label_masks import encode_labels
from mcis.datasets.images.squares import Squares, read_rgb
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import MaskedImages
from mcis.datasets.sampling.keyed_random import DrawPurpose, generator_seeds
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.tables.memory_mapped import Features, cache_table
from mcis.datasets.tables.shards import Shards
from mcis.datasets.tags import Tags
from mcis.models.dropout import seed_dropout
from mcis.models.metrics import average_precision
from mcis.models.pretrained import BUNDLED_BACKBONES, bundled_weights
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.training import AffinityNetConfig, SegmenterConfig, SegmenterOptimizer
from mcis.platform.engine.learner import Learner
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.engine.step_log import STEPS
from mcis.platform.engine.training import fit
from mcis.platform.engine.validation import Validation
from mcis.platform.learners.affinity_learner import AffinityLearner
from mcis.platform.learners.classifier_learner import ClassifierLearner, val_scores
from mcis.platform.learners.segmenter_learner import SegmenterLearner
from mcis.platform.networks.weights_files import WEIGHTS
from mcis.platform.runs.files import write_table
from mcis.platform.runs.tracking import Tracker

Trackers = Callable[[str], Tracker]


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / STEPS).read_text().splitlines()]


def plain_loop(learner: Learner[Any]) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Weights after a training without Ray, and the loss terms of each step."""
    schedule = learner.schedule
    torch.manual_seed(schedule.seed)
    network: Any = learner.model()
    network.to(memory_format=torch.channels_last)  # another order of sums is another last bit
    optimizer = build_optimizer(network, schedule.optimizer)
    decode = learner.decoder(WorkerShard(0, 1, 0, schedule.steps))
    terms = []
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = (
                schedule.optimizer.learning_rate * group["factor"] * (0.1 if step * schedule.batch // 24 >= 3 else 1)
            )
        batch = decode(np.array([step]))
        numbers = step * schedule.batch + np.arange(schedule.batch)
        seed_dropout(network, generator_seeds(DrawPurpose.DROPOUT, schedule.seed, numbers))
        losses = learner.loss_sums(network, batch, step, torch.device("cpu"))
        optimizer.zero_grad()
        (torch.stack(list(losses.values())).sum() / learner.count(batch)).backward()
        optimizer.step()
        terms.append({name: float(value.detach()) / learner.count(batch) for name, value in losses.items()})
    return network.state_dict(), terms


def weights_of(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(folder / WEIGHTS, weights_only=True)["state_dict"]
    return weights


def check_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """The weights of a training are these, to rounding."""
    fitted = weights_of(folder)
    assert fitted.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(fitted[key], value, rtol=1e-3, atol=1e-5)


def test_the_plain_loop_does_train(tiny: ClassifierLearner) -> None:
    """What the others are compared with: its losses fall, and its terms begin and weigh as configured."""
    _, terms = plain_loop(tiny)
    co_attention = np.array([t["co_attention"] for t in terms[5:]])
    contrastive = np.array([t["contrastive"] for t in terms[5:]])
    assert co_attention[10:].mean() < 0.95 * co_attention[:3].mean()
    assert contrastive[10:].mean() < 0.8 * contrastive[5:10].max()
    assert [sorted(t) for t in terms[:5]] == [["basic", "self_basic"]] * 5, "pairs attend from epoch 1 on"
    assert (contrastive[:5] == 0).all(), "it begins with epoch 2"
    assert (contrastive[5:] > 0).all()


def test_contrastive_loss_needs_an_unshared_tag_in_the_whole_batch(tiny: ClassifierLearner) -> None:
    batch = tiny.decoder(WorkerShard(0, 1, 0, 1))(np.array([0]))
    torch.manual_seed(0)
    network = tiny.model()

    def contrastive(m: bool, n: bool, step: int = 12) -> float:
        part = replace(batch, unshared_m=np.array([m, m]), unshared_n=np.array([n, n]))
        seed_dropout(network, [0] * len(part))
        return float(tiny.loss_sums(network, part, step, torch.device("cpu"))["contrastive"].detach())

    both_sides = contrastive(True, True)
    only_m = contrastive(True, False)
    only_n = contrastive(False, True)
    assert only_m > 0
    assert only_n > 0
    assert both_sides == pytest.approx(only_m + only_n)
    assert contrastive(False, False) == 0
    assert contrastive(True, True, step=9) == 0, "it starts in epoch 2"


@pytest.mark.slow
def test_decoding_in_tasks_trains_the_same_weights(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None
) -> None:
    learner = replace(tiny, config=tiny.config.model_copy(update={"epochs": 2}))
    weights, _ = plain_loop(learner)
    tracker = tracker_of("tasks")
    fit(learner, tmp_path, ComputeConfig(workers=2, threads=1, decode="tasks"), tracker, label="classifier")
    check_weights(tmp_path, weights)
    tracker.finish("FINISHED")


def test_cached_images_are_not_decoded(tiny: ClassifierLearner, tmp_path: Path) -> None:
    """Only a training that decodes images lets tasks on other nodes decode them."""
    assert isinstance(tiny.images, Squares)
    uris = tiny.images.uris
    assert tiny.decodes_images

    features = replace(tiny, images=Features(uris, tmp_path, (8, 4, 4)))
    assert not features.decodes_images
    assert replace(features, uncached=tiny.images).decodes_images

    squares = cache_table(tiny.images(np.arange(len(uris))))
    write_table(tmp_path / f"part-{0:08d}-{len(uris):08d}.arrow", squares)
    cached = Squares(uris, tiny.images.size, cache=tmp_path)
    assert not replace(tiny, images=cached).decodes_images
    more = Squares([*uris, uris[0]], tiny.images.size, cache=tmp_path)
    assert replace(tiny, images=more).decodes_images


@pytest.mark.parametrize(("batch", "workers", "micro"), [(5, 2, 2), pytest.param(4, 1, 2, marks=pytest.mark.slow)])
def test_workers_and_micro_batches_train_the_same_weights(
    tiny: ClassifierLearner,
    tracker_of: Trackers,
    tmp_path: Path,
    ray_local: None,
    batch: int,
    workers: int,
    micro: int | None,
) -> None:
    """Five pairs are three and two: gradients weigh pairs, not workers. In twos, one worker has two micro batches."""
    config = tiny.config.model_copy(update={"batch": batch, "epochs": 2})
    learner = replace(tiny, config=config)
    weights, terms = plain_loop(learner)
    tracker = tracker_of(f"batch-{batch}-{workers}-{micro}")
    compute = ComputeConfig(workers=workers, micro_batch=micro, threads=1)
    result = fit(learner, tmp_path, compute, tracker, label="classifier")
    assert result.steps_since_restart == learner.schedule.steps
    assert result.precision == "float32"
    assert result.val_ap is None
    check_weights(tmp_path, weights)
    # What is logged is the whole batch's loss, not a worker's.
    records = records_of(tmp_path)
    assert [r["step"] for r in records] == sorted({10, learner.schedule.steps})
    for record in records:
        expected = terms[record["step"] - 1]
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert record["loss"] == pytest.approx(sum(expected.values()), rel=1e-4)
        assert record["epoch"] == pytest.approx(record["step"] * batch / 24, abs=1e-3)
    tracker.finish("FINISHED")
    logged = tracker.client.get_metric_history(tracker.run_id, "classifier.loss")
    assert [(m.step, m.value) for m in logged] == [(r["step"], r["loss"]) for r in records]
    waiting = tracker.client.get_metric_history(tracker.run_id, "classifier.waiting")
    assert [m.value for m in waiting] == [r["waiting"] for r in records]
    assert all(0 <= m.value <= 1 for m in waiting)


@pytest.mark.slow
def test_workers_train_the_last_stages_of_a_pretrained_network(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None
) -> None:
    """Two workers end in the weights of a plain loop, and what is frozen stays as the file has it."""
    slow = tiny.config.optimizer.model_copy(update={"learning_rate": 1e-4})
    values = {"backbone": BUNDLED_BACKBONES[0], "trainable_stages": 1, "epochs": 1, "self_pairs": (), "optimizer": slow}
    learner = replace(tiny, config=tiny.config.model_copy(update=values), pretrained=bundled_weights())
    start, (weights, _) = learner.model().state_dict(), plain_loop(learner)
    fit(learner, tmp_path, ComputeConfig(workers=2, threads=1), tracker_of("last-stages"), label="classifier")
    fitted = weights_of(tmp_path)
    changed = {key for key in start if key.startswith("backbone.") and not torch.equal(fitted[key], start[key])}
    assert changed
    assert all(key.startswith(("backbone.body.blocks.5.", "backbone.body.blocks.6.")) for key in changed)
    for key, value in weights.items():
        torch.testing.assert_close(fitted[key], value, rtol=1e-3, atol=1e-5)


def drawn_masks(tiny: ClassifierLearner, folder: Path) -> list[str]:
    """A table of random masks of the 24 images, half of them almost all ignored; returns the images' ids."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    shapes = [read_rgb(uri).shape[:2] for uri in tiny.images.uris]
    masks = [rng.integers(0, 5, shape).astype(np.uint8) for shape in shapes]
    for mask in masks[::2]:
        mask[4:] = 255
    ids = [str(number) for number in range(24)]
    table = pa.table({"image_id": ids, "mask": [encode_labels(mask) for mask in masks]})
    pq.write_table(table, folder / "part-00000000-00000024.parquet")
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("label", ["affinity_net", "segmenter"])
def test_pixels_weigh_the_same_whatever_the_workers_and_micro_batches(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None, label: str
) -> None:
    """Half of the masks are almost all ignored: means of workers or of micro batches would be another loss."""
    ids = drawn_masks(tiny, tmp_path / "masks")
    optimizer = SegmenterOptimizer.model_validate(tiny.config.optimizer.model_dump())
    common: dict[str, Any] = {"backbone": "small", "channels": 12, "width": 8, "crop": 32, "batch": 5, "min_steps": 10}
    masked = MaskedImages(ids, tiny.images.uris, Shards(tmp_path / "masks"))
    learner: AffinityLearner | SegmenterLearner
    if label == "affinity_net":
        net = AffinityNetConfig(**common, kind="boundaries", radius=3, trainable_stages="all", optimizer=optimizer)
        learner = AffinityLearner(config=net, seed=3, pretrained=None, masked=masked)
    else:
        config = SegmenterConfig(**common, dilation=1, dropout=0.5, optimizer=optimizer)  # each image has its units
        learner = SegmenterLearner(config=config, seed=3, classes=4, pretrained=None, masked=masked)
    weights, terms = plain_loop(learner)
    compute = ComputeConfig(workers=2, micro_batch=2, threads=1)
    fit(learner, tmp_path, compute, tracker_of(label), label=label)
    check_weights(tmp_path, weights)
    (record,) = records_of(tmp_path)
    assert record["loss"] == pytest.approx(sum(terms[9].values()), rel=1e-4)


@pytest.mark.slow
def test_bf16_trains_float32_weights_to_about_the_same_loss(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None
) -> None:
    half = tiny.config.optimizer.model_copy(update={"precision": "bf16"})
    learner = replace(tiny, config=tiny.config.model_copy(update={"optimizer": half}))
    result = fit(learner, tmp_path, ComputeConfig(threads=1), tracker_of("bf16"), label="classifier")
    assert result.precision == "bf16"
    weights, terms = plain_loop(tiny)
    fitted = weights_of(tmp_path)
    assert {value.dtype for value in fitted.values()} == {torch.float32}
    assert not any(torch.equal(value, weights[key]) for key, value in fitted.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in fitted.values())
    assert records_of(tmp_path)[-1]["loss"] == pytest.approx(sum(terms[19].values()), rel=0.02)


@pytest.mark.slow
def test_what_is_validated_changes_no_weights_and_is_the_average_precision(
    tiny: ClassifierLearner, tracker_of: Trackers, tmp_path: Path, ray_local: None
) -> None:
    """At the end of epochs 2 and 4, on two workers and on one, against the scores of a plain loop's weights."""
    root = Path(tiny.images.uris[0]).parents[1]
    val = list_voc(root, classes=root / "classes.txt").table.slice(24)
    images = Squares(val["uri"].to_pylist(), tiny.config.input_size)
    validation = Validation(images=images, tags=Tags.from_index(val["tags"], 4), scores=val_scores, every=2)
    learner = tiny
    weights, _ = plain_loop(learner)
    val_maps = {}
    for workers in (1, 2):
        folder, tracker = tmp_path / str(workers), tracker_of(f"validated-{workers}")
        folder.mkdir()
        compute = ComputeConfig(workers=workers, threads=1)
        result = fit(learner, folder, compute, tracker, label="classifier", validation=validation)
        records = records_of(folder)
        assert [r["step"] for r in records if "val_map" in r] == [10, 20]
        assert result.val_ap is not None
        val_maps[workers] = [r["val_map"] for r in records]
        tracker.finish("FINISHED")
        logged = tracker.client.get_metric_history(tracker.run_id, "classifier.val_map")
        assert [(m.step, m.value) for m in logged] == list(zip([10, 20], val_maps[workers], strict=True))
        if workers == 1:
            assert all(torch.equal(value, weights[key]) for key, value in weights_of(folder).items())
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

"""Runs steps of trainings on a device without values that is not the CPU.

Code that reads a value back, or leaves a tensor on the CPU, raises an error there. A GPU would wait or raise an error
at the same place. On a machine with a GPU, its values are compared with the CPU's.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import CropBatch, PairBatch
from mcis.datasets.tags import Tags
from mcis.models.affinity_net import AffinityNet
from mcis.models.backbones import to_float_images
from mcis.models.dropout import SampleDropout
from mcis.models.localization import embed, scale_maps
from mcis.models.random_walk import random_walk, transition
from mcis.models.segmenters import predict
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.training import ClassifierConfig, EquivariantConfig
from mcis.platform.engine.learner import Learner
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.engine.step_log import Throughput
from mcis.platform.engine.trainer import Trainer, TrainingJob
from mcis.platform.learners.affinity_learner import AffinityLearner
from mcis.platform.learners.classifier_learner import ClassifierLearner, val_scores
from mcis.platform.learners.segmenter_learner import SegmenterLearner
from mcis.platform.networks.build import build_affinity_net, build_classifier, build_segmenter

META = torch.device("meta")
GPU = torch.cuda.is_available()
SIDE = 64
BATCH = 4
CLASSES = 3
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (BATCH, SIDE, SIDE, 3), np.uint8)
INDEX = np.arange(BATCH)
JITTER = {"color_jitter": (0.3, 0.3, 0.3, 0.1)}
NO_IMAGES: Any = {"images": SimpleNamespace(uris=[""] * 8), "pretrained": None}
NO_MASKS: Any = {"masked": SimpleNamespace(uris=[""] * BATCH), "pretrained": None}
TAGS = Tags.from_matrix(RNG.random((8, CLASSES)) < 0.6)


@pytest.fixture(params=["meta", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="there is no GPU"))])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return torch.device(request.param)


def check(device: torch.device, compute: Callable[[torch.device], dict[str, torch.Tensor]]) -> None:
    """Checks that the values are on the device where they were computed, and that a GPU has the CPU's values."""
    found = compute(device)
    assert all(value.device.type == device.type for value in found.values())
    if device.type == "cuda":
        expected = compute(torch.device("cpu"))
        # Gradients with smaller norms are rounding errors.
        min_norm = 1e-3 * max(float(value.norm()) for value in expected.values())
        for name, value in expected.items():
            relative_error = float((found[name].cpu() - value).norm()) / max(float(value.norm()), min_norm)
            assert relative_error < 1e-2, f"{name}: relative error of {relative_error:.2g}"


def step(learner: Learner[Any], batch: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the loss terms of a batch and, after the backward pass of their sum, the gradients, by their names."""
    torch.manual_seed(0)
    model = learner.model().to(device)
    model.train()
    for layer in model.modules():
        if isinstance(layer, SampleDropout):
            layer.rate = 0.0  # `meta` has no generator
    terms = learner.loss_sums(model, batch, 10**6, device)
    torch.stack(list(terms.values())).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach() for name, value in {**terms, **gradients}.items()}


def compute_maps(config: ClassifierConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the maps of the first image, single-round and by related images."""
    torch.manual_seed(0)
    model = build_classifier(config, CLASSES).to(device).eval()
    with torch.inference_mode():
        images = model.backbone.normalize(to_float_images(torch.from_numpy(IMAGES).to(device)))
        with model.backbone.capture_outputs(*model.backbone.correlation_layers) as layer_outputs:
            backbone_outputs = [model.backbone(images)]
            features = embed(
                model.backbone, model.standardize, images, extra_scales=(0.75,), hflip=True, outputs=backbone_outputs
            )
        single = model.activations(features)
        query = model.query(features[0], pair_domains=torch.tensor([1], device=device))
        arguments: Any = query, features[0], features[1:], 1
        maps = {
            "co": model.co_maps(*arguments),
            "contrastive": model.contrastive_maps(*arguments),
            "single": single,
            "scores": scale_maps(single, "logarithm"),
        }
        if config.equivariant.weight:
            maps["refined"] = model.refined(images[:1], single[:1], [output[:1] for output in layer_outputs])
        return maps


def pair_batch() -> PairBatch:
    unshared = np.ones(BATCH, bool)
    return PairBatch(
        images_m=IMAGES,
        images_n=IMAGES[::-1],
        m=INDEX,
        n=INDEX + 4,
        epoch=INDEX * 0,
        row=INDEX,
        pair_domains=(INDEX % 3).astype(np.uint8),
        unshared_m=unshared,
        unshared_n=unshared,
    )


def crop_batch() -> CropBatch:
    labels = RNG.choice([0, 1, CLASSES, 255], (BATCH, SIDE, SIDE)).astype(np.uint8)
    return CropBatch(images=IMAGES, labels=labels, index=INDEX, epoch=INDEX * 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "co"},
        {"head": "own", "self_pairs": ("hflip", "x0.75"), "shift": 4, "hflip": True, **JITTER},
        {"num_domain_affinities": 3, "attention_partner": "itself"},
        {"equivariant": EquivariantConfig(weight=1.0), "attention": "none"},
        {"trainable_stages": 2, "standardize": True},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_a_step_of_the_classifier_stays_on_its_device(changes: dict[str, Any], device: torch.device) -> None:
    config = RECIPES["scratch"]().classifier.model_copy(update={"input_size": SIDE, "channels": 24, **changes})
    learner = ClassifierLearner(config=config, seed=0, tags=TAGS, is_source=np.arange(8) % 2 == 0, **NO_IMAGES)
    check(device, functools.partial(step, learner, pair_batch()))


@pytest.mark.parametrize("recipe", ["scratch", "photos", "lid"])
def test_maps_stay_on_their_device(recipe: str, device: torch.device) -> None:
    check(device, functools.partial(compute_maps, RECIPES[recipe]().classifier.model_copy(update={"input_size": SIDE})))


@pytest.mark.parametrize("recipe", ["scratch", "photos", "lid"])
def test_a_step_of_the_segmenter_stays_on_its_device(recipe: str, device: torch.device) -> None:
    config = RECIPES[recipe]().segmenter.model_copy(update={"crop": SIDE, **JITTER})
    learner = SegmenterLearner(config=config, seed=0, classes=CLASSES, **NO_MASKS)
    check(device, functools.partial(step, learner, crop_batch()))


@pytest.mark.parametrize("recipe", ["photos", "lid"])
def test_a_step_of_the_affinity_network_stays_on_its_device(recipe: str, device: torch.device) -> None:
    config = RECIPES[recipe]().affinity_net.model_copy(update={"crop": SIDE})
    learner = AffinityLearner(config=config, seed=0, **NO_MASKS)
    check(device, functools.partial(step, learner, crop_batch()))


@pytest.mark.parametrize("gpu", [False, True])
def test_a_training_uses_a_visible_gpu_only_on_request(
    gpu: bool, tiny: ClassifierLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Train returns a visible GPU, in whose place `meta` is here, whatever the configuration says."""
    import ray.train.torch

    numbers = {"get_world_rank": 0, "get_local_rank": 0, "get_world_size": 1, "get_local_world_size": 1}
    context = SimpleNamespace(**{name: functools.partial(int, number) for name, number in numbers.items()})
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: META)
    job = TrainingJob(
        learner=tiny,
        compute=ComputeConfig(gpu=gpu, threads=torch.get_num_threads()),
        folder=tmp_path,
        label="classifier",
        about={},
        validation=None,
        decoder=None,
    )
    trainer = Trainer(job)
    expected = "meta" if gpu else "cpu"
    assert trainer.device.type == expected
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {expected}


def test_updates_read_nothing_back_until_the_log_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RECIPES["scratch"]().classifier.model_copy(update={"input_size": SIDE, "channels": 24, "batch": BATCH})
    learner = ClassifierLearner(config=config, seed=0, tags=TAGS, is_source=np.zeros(8, bool), **NO_IMAGES)
    trainer: Trainer[PairBatch] = Trainer.__new__(Trainer)
    network = learner.model().to(META)
    vars(trainer).update(
        job=SimpleNamespace(compute=ComputeConfig(checkpoint_steps=100), validation=None, label="classifier"),
        learner=learner,
        schedule=learner.schedule,
        device=META,
        network=network,
        model=network,
        world_size=1,
        rank=1,
        optimizer=build_optimizer(network, RECIPES["released"]().classifier.optimizer),
        shard=WorkerShard(0, 1, 0, 100),
        micro_batch=2,
        unchecked=[],
        log=None,
        throughput=Throughput(0, BATCH),
    )
    monkeypatch.setattr(Trainer, "_autocast", lambda self: contextlib.nullcontext())
    for step in range(9):
        trainer.finish_step(pair_batch(), step, trainer.train_step(pair_batch(), step))
    losses = trainer.train_step(pair_batch(), 9)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta tensor"):
        trainer.finish_step(pair_batch(), 9, losses)
    assert len(trainer.unchecked) == 10, "the losses that would have been read at once"


@pytest.mark.slow
def test_predictions_and_walks_stay_on_their_device(device: torch.device) -> None:
    recipe = RECIPES["photos"]()
    network = build_segmenter(recipe.segmenter, CLASSES).to(device).eval()
    image = torch.zeros(3, SIDE, 80, device=device)
    for crop in (None, 48):
        assert predict(network, image, scales=(1.0, 1.5), hflip=True, crop=crop).device.type == device.type
    net = build_affinity_net(recipe.affinity_net).to(device).eval()
    assert isinstance(net, AffinityNet)
    affinities = net(image[None]).affinities[0]
    assert transition(affinities, net.radius, 8.0).device.type == device.type
    if device.type == "cuda":  # `meta` multiplies no sparse matrices
        maps = torch.rand(2, *affinities.shape[-2:])
        walked_maps = []
        for place in (device, torch.device("cpu")):
            arguments = maps.to(place), affinities.to(place)
            walked_maps.append(random_walk(*arguments, radius=net.radius, beta=8.0, steps=64).cpu())
        torch.testing.assert_close(*walked_maps, rtol=1e-4, atol=1e-5)


def test_precision_of_tags_in_bfloat16_is_of_scores_that_differ() -> None:
    """Means of bfloat16 would be a few values, whose ties count as the worst order."""
    learner = ClassifierLearner(config=RECIPES["scratch"]().classifier, seed=0, tags=TAGS, is_source=None, **NO_IMAGES)
    network = learner.model().eval()
    images = torch.from_numpy(RNG.integers(0, 256, (64, SIDE, SIDE, 3), np.uint8))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        scores = val_scores(network, images)
    assert min(len(column.unique()) for column in scores.T) > 48

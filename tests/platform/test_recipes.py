"""Recipes `paper` and `released`: schedule, augmentation and losses of the classifier's training."""

from typing import Any

import numpy as np
import pytest
import torch

from mcis.datasets.images.squares import Squares
from mcis.datasets.sampling.batches import PairBatch
from mcis.datasets.tags import Tags
from mcis.models.backbones import IMAGENET, to_float_images
from mcis.models.classifier import BatchScores, PairInputs
from mcis.models.classifier_losses import PairScores
from mcis.platform.config.resolve import resolve
from mcis.platform.config.training import AffinityNetConfig, SegmenterConfig
from mcis.platform.learners.classifier_learner import ClassifierLearner

K = 20


def learner(recipe: str) -> ClassifierLearner:
    """A learner with ten images: an epoch has two steps."""
    tags = Tags.from_matrix(np.eye(10, K, dtype=bool) | np.eye(10, K, k=1, dtype=bool))
    config, images = resolve("voc", recipe).config.classifier, Squares([f"{i}.jpg" for i in range(10)], 256)
    return ClassifierLearner(config=config, seed=0, tags=tags, is_source=None, images=images, pretrained=None)


@pytest.mark.parametrize(
    ("recipe", "steps", "rates"),
    [("paper", 30, [1.0] * 6 + [0.1] * 6 + [0.01] * 3), ("released", 22, [1.0] * 5 + [0.1] * 5 + [0.01])],
)
def test_schedule_and_kept_weights(recipe: str, steps: int, rates: list[float]) -> None:
    """The schedule has 15 epochs; `released` keeps the weights after epoch 10 (counted from 0) and stops there."""
    schedule = learner(recipe).schedule
    assert (schedule.steps_per_epoch, schedule.steps, schedule.schedule_steps, schedule.batch) == (2, steps, 30, 5)
    rate = schedule.optimizer.learning_rate
    actual = [schedule.learning_rate(step) / rate for step in range(0, schedule.steps, 2)]
    assert actual == pytest.approx(rates)


class Recorder:
    """Replaces the network and records its inputs."""

    def __call__(self, inputs: PairInputs, *, self_transforms: tuple[str, ...], **options: Any) -> BatchScores:
        assert options == {"pair_domains": None, "attend": True, "attention_partner": "partner"}
        self.inputs = inputs
        self.transforms = self_transforms
        scores = [torch.full((len(inputs.m), K), 0.1 * i) for i in range(6)]
        selves = [PairScores(*scores[:4]) for _ in self_transforms]
        return BatchScores(PairScores(*scores), selves, [(inputs.m, inputs.n)] * (1 + len(selves)))


def losses(
    recipe: str, step: int, unshared: tuple[bool, bool] = (True, True)
) -> tuple[Recorder, dict[str, float], PairBatch]:
    rng = np.random.default_rng(0)
    batch = PairBatch(
        images_m=rng.integers(0, 256, (5, 256, 256, 3), np.uint8),
        images_n=rng.integers(0, 256, (5, 256, 256, 3), np.uint8),
        m=np.arange(5),
        n=np.arange(1, 6),
        epoch=np.zeros(5, np.int64),
        pair_domains=np.zeros(5, np.uint8),
        row=np.arange(5),
        unshared_m=np.full(5, unshared[0]),
        unshared_n=np.full(5, unshared[1]),
    )
    recorder = Recorder()
    terms = learner(recipe).loss_sums(recorder, batch, step, torch.device("cpu"))
    return recorder, {name: float(value) for name, value in terms.items()}, batch


def test_color_jitter_changes_both_images_of_a_pair_but_not_tau_m() -> None:
    recorder, _, batch = losses("released", 0)
    plain = {side: IMAGENET(to_float_images(torch.from_numpy(getattr(batch, f"images_{side}")))) for side in "mn"}
    assert not torch.allclose(recorder.inputs.m, plain["m"], atol=0.05)
    assert not torch.allclose(recorder.inputs.n, plain["n"], atol=0.05)
    assert recorder.transforms == ("hflip", "x0.75", "x2")
    assert recorder.inputs.unjittered_m is not None
    torch.testing.assert_close(recorder.inputs.unjittered_m, plain["m"])
    paper, _, _ = losses("paper", 0)
    assert (paper.transforms, paper.inputs.unjittered_m) == ((), None)
    torch.testing.assert_close(paper.inputs.m, plain["m"])


def test_weights_and_start_of_the_losses() -> None:
    """The paper adds the basic and co-attention losses of both images; the released code averages them."""
    _, text, _ = losses("paper", 0)
    _, early, _ = losses("released", 3)  # epoch 1
    _, late, _ = losses("released", 4)  # epoch 2
    assert set(text) == {"basic", "co_attention", "contrastive"}
    for name in ("basic", "co_attention"):
        assert late[name] == pytest.approx(text[name] / 2, rel=1e-5)
        assert late[f"self_{name}"] > 0
    assert early["contrastive"] == 0
    assert late["contrastive"] == pytest.approx(text["contrastive"], rel=1e-5)
    _, one_side, _ = losses("released", 4, unshared=(True, False))
    assert 0 < one_side["contrastive"] < late["contrastive"]
    _, ignored, _ = losses("paper", 4, unshared=(False, False))
    assert ignored["contrastive"] == pytest.approx(text["contrastive"])


@pytest.mark.parametrize(("images", "updates"), [(1, 30), (160, 30), (161, 31), (10_000_000, 1_875_000)])
def test_steps_are_min_steps_or_min_epochs_over_the_images(images: int, updates: int) -> None:
    for section in (SegmenterConfig, AffinityNetConfig):
        assert section(batch=16, min_steps=30, min_epochs=3.0).num_steps(images) == updates
        assert section(batch=16, min_steps=30).num_steps(images) == 30


@pytest.mark.parametrize(("images", "updates"), [(1, 3), (24, 60), (80, 200), (160, 200), (1600, 200), (3200, 221)])
def test_small_training_sets_are_seen_at_most_max_epochs(images: int, updates: int) -> None:
    section = SegmenterConfig(batch=16, min_steps=200, min_epochs=1.1, max_epochs=40.0)
    assert section.num_steps(images) == updates

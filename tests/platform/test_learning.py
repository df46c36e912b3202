"""A training is reported to have learned nothing only if the numbers leave no doubt."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcis.datasets.tags import Tags
from mcis.models.metrics import average_precision
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.engine.step_log import STEPS, LossTrend, loss_trend
from mcis.platform.learners.chance import chance_precision
from mcis.platform.stages.train_classifier import _notes


def trend_of(folder: Path, losses: np.ndarray) -> LossTrend | None:
    records = [json.dumps({"step": step, "basic": loss}) for step, loss in enumerate(losses)]
    (folder / STEPS).write_text("".join(f"{record}\n" for record in records))
    return loss_trend(folder, "basic")


@pytest.mark.parametrize("count", [20, 75, 500])
def test_noise_alone_does_not_fall(tmp_path: Path, count: int) -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, count)
    trend = trend_of(tmp_path, 0.7 + noise)
    assert trend is not None
    assert not trend.fell
    assert "no significant decrease" in trend.text


@pytest.mark.parametrize("count", [20, 75, 500])
def test_a_falling_loss_with_noise_falls(tmp_path: Path, count: int) -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, count)
    trend = trend_of(tmp_path, 0.7 + noise - np.linspace(0, 0.5, count))
    assert trend is not None
    assert trend.fell


# A training of 200 steps that reached an mIoU of 60, with a record every tenth step.
VARYING_BATCHES = """
1.106 0.616 0.99 0.466 0.644 0.408 0.489 0.512 0.447 0.437 0.332 0.506 0.584 0.447 0.238 0.306 0.392 0.411 0.643 0.475
"""
# One of one class and negatives: most batches hold few images of the class, and one batch has a high loss.
ONE_HARD_BATCH = """
0.207 0.221 0.115 0.141 0.071 0.101 0.062 0.369 0.020 0.082 0.079 0.046 0.071 0.034 0.056 0.057 0.039 0.069 0.066 0.032
"""
# The same with another seed: the loss falls slowly from the first record on.
SLOW_FALL = """
0.151 0.112 0.048 0.088 0.121 0.027 0.077 0.067 0.064 0.068 0.195 0.052 0.029 0.017 0.063 0.093 0.03 0.063 0.013 0.079
"""


@pytest.mark.parametrize("log", [VARYING_BATCHES, ONE_HARD_BATCH, SLOW_FALL])
def test_a_short_log_of_uneven_batches_falls(tmp_path: Path, log: str) -> None:
    trend = trend_of(tmp_path, np.array(log.split(), float))
    assert trend is not None
    assert trend.fell, trend.text


@pytest.mark.parametrize("count", [20, 75, 500])
def test_noise_rarely_falls(tmp_path: Path, count: int) -> None:
    rng = np.random.default_rng(1)
    trends = [trend_of(tmp_path, 0.7 + rng.normal(0, 0.05, count)) for _ in range(200)]
    assert sum(trend is not None and trend.fell for trend in trends) <= 20


def test_a_rising_loss_does_not_fall(tmp_path: Path) -> None:
    trend = trend_of(tmp_path, np.linspace(0.5, 0.9, 40))
    assert trend is not None
    assert not trend.fell


def test_a_log_of_19_records_is_too_short(tmp_path: Path) -> None:
    assert trend_of(tmp_path, np.full(19, 0.7)) is None


@pytest.mark.parametrize("images", [30, 400])
def test_random_rankings_stay_below_the_bound_of_chance(images: int) -> None:
    rng = np.random.default_rng(images)
    matrix = rng.random((images, 5)) < 0.3
    by_chance = chance_precision(Tags.from_matrix(matrix), seed=0)
    assert by_chance is not None
    mean, bound = by_chance

    reached = [float(np.nanmean(average_precision(rng.random(matrix.shape), matrix))) for _ in range(200)]
    assert mean == pytest.approx(np.mean(reached), abs=3)
    assert 0.85 < np.mean(np.array(reached) < bound) < 1

    informed = average_precision(matrix + rng.normal(0, 0.7, matrix.shape), matrix).mean()
    assert informed > bound


def test_a_dozen_images_are_too_few_for_a_bound_of_chance() -> None:
    matrix = np.eye(4, dtype=bool)[np.arange(12) % 4]
    assert chance_precision(Tags.from_matrix(matrix), seed=0) is None


def notes_of(config: ClassifierConfig, matrix: list[list[int]]) -> tuple[str, ...]:
    """The notes on a training without validation, on images with these tags."""
    tags = Tags.from_matrix(np.array(matrix, bool))
    learner: Any = SimpleNamespace(config=config.scaled_for(len(tags)), tags=tags, images=None)
    return _notes(Config(classifier=config), learner, None)


def test_a_class_in_every_image_gives_a_note() -> None:
    assert notes_of(ClassifierConfig(), [[1, 1], [1, 0]])[-1] == (
        "1 of 2 class(es) are in every tagged training image: add images with other tags, or with none of the classes "
        "(tag none)"
    )
    assert not any("every tagged" in note for note in notes_of(ClassifierConfig(), [[1], [0]]))


def test_epochs_that_are_shortened_give_a_note() -> None:
    config = ClassifierConfig(epochs=4, batch=2, max_steps=40)
    assert notes_of(config, [[1, 0]] * 21)[0] == (
        "an epoch has 20 pairs instead of 21, so that training ends after classifier.max_steps=40 updates"
    )
    assert not any("max_steps" in note for note in notes_of(config, [[1, 0]] * 20))

"""A training is told to have learnt nothing only where the figures leave no doubt."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcis.datasets.tags import Tags
from mcis.models.metrics import average_precision
from mcis.platform.config.sections import Config
from mcis.platform.engine.step_log import STEPS, loss_trend
from mcis.platform.learners.classifier_learner import chance
from mcis.platform.stages.train_classifier import _notes


def trend(folder: Path, losses: np.ndarray) -> tuple[bool, str] | None:
    (folder / STEPS).write_text("".join(json.dumps({"step": n, "basic": v}) + "\n" for n, v in enumerate(losses)))
    return loss_trend(folder, "basic")


@pytest.mark.parametrize("count", [20, 75, 500])
def test_a_loss_falls_or_stands_still(tmp_path: Path, count: int) -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, count)
    still, falling = (trend(tmp_path, 0.7 + noise - fall) for fall in (0.0, np.linspace(0, 0.5, count)))
    assert still is not None
    assert falling is not None
    assert not still[0]
    assert falling[0]
    assert "no fall by more than" in still[1]


def test_a_short_log_of_single_batches_that_vary_falls(tmp_path: Path) -> None:
    """A training of 200 steps that reached an mIoU of 60, a record each tenth step."""
    first = [1.106, 0.616, 0.99, 0.466, 0.644, 0.408, 0.489, 0.512, 0.447, 0.437]
    last = [0.332, 0.506, 0.584, 0.447, 0.238, 0.306, 0.392, 0.411, 0.643, 0.475]
    fell = trend(tmp_path, np.array(first + last))
    assert fell is not None
    assert fell[0], fell[1]


def test_a_rising_loss_does_not_fall_and_a_short_log_tells_nothing(tmp_path: Path) -> None:
    rising = trend(tmp_path, np.linspace(0.5, 0.9, 40))
    assert rising is not None
    assert not rising[0]
    assert trend(tmp_path, np.full(19, 0.7)) is None


@pytest.mark.parametrize("images", [30, 400])
def test_random_rankings_stay_below_what_chance_reaches_at_most(images: int) -> None:
    rng = np.random.default_rng(images)
    matrix = rng.random((images, 5)) < 0.3
    by_chance = chance(Tags.from_matrix(matrix), seed=0)
    assert by_chance is not None
    mean, most = by_chance
    reached = [float(np.nanmean(average_precision(rng.random(matrix.shape), matrix))) for _ in range(200)]
    assert mean == pytest.approx(np.mean(reached), abs=3)
    assert 0.85 < np.mean(np.array(reached) < most) < 1
    knowing = average_precision(matrix + rng.normal(0, 0.7, matrix.shape), matrix).mean()
    assert knowing > most


def test_a_dozen_images_are_too_few_to_tell() -> None:
    matrix = np.eye(4, dtype=bool)[np.arange(12) % 4]
    assert chance(Tags.from_matrix(matrix), seed=0) is None


def test_classes_of_every_image_are_noted() -> None:
    matrix = np.array([[1, 1], [1, 0]], bool)
    learner: Any = SimpleNamespace(tags=Tags.from_matrix(matrix), images=None)
    (note, _) = _notes(Config(), learner, None)[::-1]
    assert note == "1 of 2 class(es) are in every tagged training image: add images with other tags"

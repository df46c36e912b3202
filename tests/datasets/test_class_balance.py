"""Tests of repeated images of rare classes: how often each class is shown."""

import numpy as np
import pytest
from numpy.typing import NDArray

from mcis.datasets.sampling.class_balance import MAX_REPEATS, repeat_rare_classes
from mcis.datasets.tags import Tags

IMAGES = (900, 100, 30, 0)
"""Number of images with only this class. Then follow 7 images with all classes but the last, and one without tags."""


@pytest.fixture(scope="module")
def tags() -> Tags:
    rows = np.repeat(np.eye(4, dtype=bool), IMAGES, axis=0)
    together = np.tile([[True, True, True, False]], (7, 1))
    return Tags.from_matrix(np.concatenate([rows, together, np.zeros((1, 4), bool)]))


def times(tags: Tags, strength: float, seed: int = 0, most: int = 10**6) -> NDArray[np.int64]:
    return np.bincount(repeat_rare_classes(tags, strength, seed, most), minlength=len(tags))


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_rarest_class_of_an_image_sets_its_repeats(tags: Tags, strength: float) -> None:
    shown = times(tags, strength)
    first = np.cumsum([0, *IMAGES])
    counts = np.array(IMAGES[:3]) + 7
    for k, factor in enumerate(np.minimum((counts[0] / counts) ** strength, MAX_REPEATS)):
        of_class = shown[first[k] : first[k + 1]]
        assert set(of_class.tolist()) <= {int(np.floor(factor)), int(np.ceil(factor))}
        assert abs(of_class.mean() - factor) < 0.25, "fractions are rounded at random"
    rarest = min((counts[0] / counts[2]) ** strength, MAX_REPEATS)

    assert set(shown[-8:-1].tolist()) <= {int(np.floor(rarest)), int(np.ceil(rarest))}
    assert shown[-1] == 1, "an image without tags is not repeated"
    assert (shown == 1).all() == (strength == 0)


def test_repeats_are_limited_to_what_a_training_shows(tags: Tags) -> None:
    """The rarest classes lose repeats first, and each image is kept."""
    free, bounded, none = (times(tags, 1.0, most=most) for most in (10**6, 1800, 5))
    assert 1750 < bounded.sum() < 1850 < free.sum()
    assert bounded.max() < free.max()
    np.testing.assert_array_equal(np.minimum(free, bounded), bounded)
    assert (bounded[:900] == 1).all()
    assert (none == 1).all()


def test_repeats_depend_on_the_seed_and_positions_ascend(tags: Tags) -> None:
    once = repeat_rare_classes(tags, 0.5, 3, 10**6)
    np.testing.assert_array_equal(once, repeat_rare_classes(tags, 0.5, 3, 10**6))
    assert (np.diff(once) >= 0).all()
    assert not np.array_equal(once, repeat_rare_classes(tags, 0.5, 4, 10**6))

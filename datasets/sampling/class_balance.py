"""Repeats images of rare classes, so that an epoch shows each class about as often as the most frequent one."""

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.tags import Tags

MAX_REPEATS = 16.0
"""Maximum number of repeats of an image. With more, rare classes would be learned from the pixels of a few images."""


def repeat_rare_classes(tags: Tags, strength: float, seed: int, max_images: int) -> NDArray[np.int64]:
    """Repeats the positions of N images by the repeat factor of their rarest class (Gupta et al., CVPR 2019).

    The factor of an image is (m / c)^strength, where c is the number of images of its rarest class and m is the number
    of images of the most frequent class. Factors are limited to MAX_REPEATS, or to a lower limit if their sum would
    otherwise exceed `max_images`. Fractional factors are rounded up or down at random. Images without tags have
    factor 1.

    Args:
        strength: Exponent in [0, 1]; 0 repeats nothing, 1 shows the classes of single-tag images equally often, unless
            the limits apply.
        seed: Seed of the rounding.
        max_images: Number of images that the training shows. With more, some would never be shown.

    Returns:
        (M,) positions in ascending order, each of 0..N-1 at least once. M is at most about max(N, `max_images`).
    """
    images_per_class = np.bincount(tags.values, minlength=tags.classes)
    class_factors = (images_per_class.max(initial=0) / np.maximum(images_per_class, 1)) ** strength

    factors = np.ones(len(tags))
    start = tags.start.astype(np.int64)
    image_of_tag = np.repeat(np.arange(len(tags)), start[1:] - start[:-1])
    np.maximum.at(factors, image_of_tag, class_factors[tags.values])
    factors = np.minimum(factors, _limit(factors, max_images))

    draws = uniforms(DrawPurpose.CLASS_REPEAT, seed, 0, np.arange(len(tags)), count=1)[:, 0]
    return np.repeat(np.arange(len(tags)), np.floor(factors + draws).astype(np.int64))


def _limit(factors: NDArray[np.float64], max_images: int) -> float:
    """Returns the largest of the limits 1, 1.125, ..., MAX_REPEATS whose factors sum to at most `max_images`, or 1."""
    for limit in np.arange(MAX_REPEATS, 1, -0.125):
        if np.minimum(factors, limit).sum() <= max_images:
            return float(limit)
    return 1.0

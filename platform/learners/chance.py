"""Computes the average precision that rankings by chance reach."""

from typing import NamedTuple

import numpy as np

from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.tags import Tags
from mcis.models.metrics import average_precision

_MIN_TAGS = 20
"""Minimum number of tags. With fewer, chance can reach almost any precision."""
_RANKINGS = 20
"""Number of random rankings."""


class ChancePrecision(NamedTuple):
    """Mean average precision of rankings by chance, in percent.

    Attributes:
        mean: The mean over rankings, about the share of images with a class, averaged over the classes.
        bound: What 95 % of the rankings stay below.
    """

    mean: float
    bound: float


def chance_precision(tags: Tags, seed: int) -> ChancePrecision | None:
    """Returns the mean average precision of random rankings of images with these tags.

    Returns:
        None if there are too few tags to distinguish learning from chance.
    """
    if len(tags.values) < _MIN_TAGS:
        return None

    images = np.arange(len(tags))
    matrix = tags.matrix(images)
    precisions = []
    for ranking in range(_RANKINGS):
        scores = uniforms(DrawPurpose.CHANCE, seed, ranking, images, count=tags.classes)
        precisions.append(float(np.nanmean(average_precision(scores, matrix))))

    mean = float(np.mean(precisions))
    return ChancePrecision(mean, mean + 1.645 * float(np.std(precisions, ddof=1)))

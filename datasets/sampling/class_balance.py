"""Images of rare classes repeated, so that an epoch shows each about as often as the most frequent, up to a bound."""

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.tags import Tags

MOST_TIMES = 16.0
"""Of an image: more repeats teach the pixels of few images."""


def repeat_rare_classes(tags: Tags, strength: float, seed: int, most: int) -> NDArray[np.int64]:
    """Positions of N images, each as often as its rarest class asks for (repeat factors of Gupta et al., CVPR 2019).

    An image stands there (m / c)^strength times, no more than MOST_TIMES, or fewer where there would be more than
    `most` in all; c is the number of images of its rarest class and m that of the most frequent one. The fraction of a
    time that is left over is drawn. Images without a tag stand there once.

    Args:
        strength: in [0, 1]; 0 repeats nothing, 1 shows classes of single-tag images equally often, but for the bounds.
        most: images that a training shows, so that it shows each of them.

    Returns:
        (M,), ascending, each of 0..N-1 at least once; M is about `most` at the highest, or N.
    """
    images = np.bincount(tags.values, minlength=tags.classes)
    of_class = (images.max(initial=0) / np.maximum(images, 1)) ** strength
    times = np.ones(len(tags))
    start = tags.start.astype(np.int64)
    owner = np.repeat(np.arange(len(tags)), start[1:] - start[:-1])
    np.maximum.at(times, owner, of_class[tags.values])
    bounds = np.arange(MOST_TIMES, 1, -0.125)
    times = np.minimum(times, next((bound for bound in bounds if np.minimum(times, bound).sum() <= most), 1))
    draws = uniforms(DrawPurpose.CLASS_REPEAT, seed, 0, np.arange(len(tags)), count=1)[:, 0]
    return np.repeat(np.arange(len(tags)), np.floor(times + draws).astype(np.int64))

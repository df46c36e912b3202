"""Images of rare classes repeated, so that an epoch shows each about as often as the most frequent, up to a bound."""

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.datasets.tags import Tags

MOST_TIMES = 16.0
"""Of an image: more repeats teach the pixels of few images, and make epochs of many classes endless."""


def repeated_by_class(tags: Tags, strength: float, seed: int) -> NDArray[np.int64]:
    """Positions of N images, each as often as its rarest class asks for (repeat factors of Gupta et al., CVPR 2019).

    An image stands there (most / c)^strength times, no more than MOST_TIMES, where c is the number of images of its
    rarest class and `most` that of the most frequent one; the fraction of a time that is left over is drawn. Images
    without a tag stand there once.

    Args:
        strength: in [0, 1]; 0 repeats nothing, 1 shows classes of single-tag images equally often, but for MOST_TIMES.

    Returns:
        (M,), ascending, each of 0..N-1 at least once.
    """
    images = np.bincount(tags.values, minlength=tags.classes)
    of_class = (images.max(initial=0) / np.maximum(images, 1)) ** strength
    of_class = np.minimum(of_class, MOST_TIMES)
    times = np.ones(len(tags))
    start = tags.start.astype(np.int64)
    owner = np.repeat(np.arange(len(tags)), start[1:] - start[:-1])
    np.maximum.at(times, owner, of_class[tags.values])
    draws = uniforms(Draw.CLASS_REPEAT, seed, 0, np.arange(len(tags)), count=1)[:, 0]
    return np.repeat(np.arange(len(tags)), np.floor(times + draws).astype(np.int64))

"""Ranks the tags of images by the scores of a classifier, to find tags that are probably wrong."""

import numpy as np
from numpy.typing import NDArray


def class_ranks(scores: NDArray[np.float32], tags: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Ranks the score of each class in an image among the images without this tag.

    The rank is the fraction of these images whose score is higher. If the classifier separates a class, the images
    that show it have ranks close to 0; for others, the rank is one half on average. Ranks of different classes can be
    compared, because they do not depend on the scale of the scores.

    Args:
        scores: Class scores, (N, K).
        tags: (N, K).

    Returns:
        (N, K), NaN for a class that all images have as a tag. An equal score counts half.
    """
    ranks = np.full(scores.shape, np.nan)
    for k in range(scores.shape[1]):
        others = np.sort(scores[~tags[:, k], k])
        if not len(others):
            continue
        lower = np.searchsorted(others, scores[:, k], "left")
        lower_or_equal = np.searchsorted(others, scores[:, k], "right")
        ranks[:, k] = 1 - (lower + lower_or_equal) / (2 * len(others))
    return ranks

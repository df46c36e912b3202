"""Ranks the tags of images by the scores of a classifier, to find tags that are probably wrong."""

import numpy as np
from numpy.typing import NDArray


def tag_ranks(scores: NDArray[np.float32], tags: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns, for each tag of an image, the fraction of images without this tag whose score for its class is higher.

    If the classifier separates a class, its images have ranks close to 0. An image that does not show the class has
    the rank of any image without the tag: on average one half. Ranks of different classes can be compared, because
    they do not depend on the scale of the scores.

    Args:
        scores: class scores, (N, K).
        tags: (N, K).

    Returns:
        (N, K), NaN without the tag, and for a class that all images have. An equal score counts half.
    """
    ranks = np.full(scores.shape, np.nan)
    for k in range(scores.shape[1]):
        others = np.sort(scores[~tags[:, k], k])
        if not len(others):
            continue
        of_class = scores[tags[:, k], k]
        lower = np.searchsorted(others, of_class, "left")
        lower_or_equal = np.searchsorted(others, of_class, "right")
        ranks[tags[:, k], k] = 1 - (lower + lower_or_equal) / (2 * len(others))
    return ranks

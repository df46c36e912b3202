"""The strongest of the scores that compete for a pixel: labels of maps, of pseudo masks and of what the CRF makes."""

import numpy as np
from numpy.typing import NDArray


def strongest(scores: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The highest of 1 to 256 scores at each pixel, and which it is, the first of equal ones: (L, H, W) -> (H, W) both.

    An image has few tags, and of few scores argmax over the first axis takes two to four times as long.
    """
    highest, number = scores[0], np.zeros(scores.shape[1:], np.uint8)
    for each in range(1, len(scores)):
        number[scores[each] > highest] = each
        highest = np.maximum(highest, scores[each])
    return highest, number

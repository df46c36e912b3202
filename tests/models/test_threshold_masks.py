"""Pseudo masks by thresholds alone, pixel by pixel, and by the name of their rule."""

import numpy as np

from mcis.datasets.classes import IGNORE
from mcis.models.mask_rules import MASK_RULES
from mcis.models.pseudo_masks import TaggedMaps


def test_what_lies_between_the_thresholds_is_ignored() -> None:
    scores = np.array([[[0.5, 0.2, 0.05, 0.3]], [[0.4, 0.1, 0.10, 0.31]]], np.float32)
    maps = TaggedMaps(scores, np.array([4, 9]), read_rgb=lambda: np.zeros((1, 4, 3), np.uint8))
    values = {"threshold": 0.3, "background_threshold": 0.1, "floor": 0.3}
    labels, mask = MASK_RULES["thresholds"](maps, values)
    assert labels.dtype == mask.dtype == np.uint8
    assert labels.tolist() == [[5, 0, 0, 10]]
    assert mask.tolist() == [[5, IGNORE, 0, 10]]

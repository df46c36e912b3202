"""Pseudo masks by two thresholds alone: no CRF and no saliency, the fastest rule and a control of the others."""

import numpy as np

from mcis.datasets.classes import IGNORE
from mcis.models.pseudo_masks import MaskRule, PseudoMask, TaggedMaps


def by_thresholds(maps: TaggedMaps, *, threshold: float, background_threshold: float) -> PseudoMask:
    """The strongest class above `threshold`, background where none is above `background_threshold`, else ignore."""
    best = maps.scores.max(axis=0)
    strongest = (maps.tags[maps.scores.argmax(axis=0)] + 1).astype(np.uint8)
    labels = np.where(best > threshold, strongest, 0).astype(np.uint8)
    mask = labels.copy()
    mask[(labels == 0) & (best > background_threshold)] = IGNORE
    return PseudoMask(labels, mask)


THRESHOLDS = MaskRule(make=by_thresholds)

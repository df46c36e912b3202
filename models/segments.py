"""The mask rule `segments`: labels are decided by majority in segments of the image that know no classes."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mcis.datasets.formats.libraries import require_module
from mcis.datasets.section import LocalPath, Positive, Rate, Section
from mcis.models.crf import CrfParameters
from mcis.models.pseudo_masks import MaskRule, PseudoMask, TaggedMaps, refine_winners, winning_maps


class SegmentsConfig(Section):
    """Rule segments: the class of a segment is that of most of its pixels, before the dense CRF refines the mask.

    With pseudo_masks.crf.iterations=0 the edges of the segments are the edges of the mask.
    """

    folder: LocalPath | None = Field(default=None, exclude=True)  # the output depends on the files in it
    """Folder with the segments of each tagged training image: `<id>.npy`, integers (H, W), negative for pixels of no
    segment; or `<id>.json`, masks in COCO's run lengths as SAM's automatic mask generator writes them, of which smaller
    ones are on top. None: superpixels of each image (SLIC), which need scikit-image (extra `segments`)."""
    superpixels: Positive = 300
    """Number of superpixels of an image, if `folder` is None."""
    compactness: Rate = 10.0
    """Weight of closeness against similar color in superpixels, if `folder` is None; higher values give squarer
    ones."""
    random_walk: bool = True
    """Whether maps are first refined by a random walk over learned affinities, as by the rule affinity."""


def by_segments(
    maps: TaggedMaps,
    *,
    threshold: float,
    background_threshold: float,
    crf: CrfParameters,
    superpixels: int,
    compactness: float,
) -> PseudoMask:
    """Makes a pseudo mask as `by_crf` does, with one winner in each segment of the image.

    Args:
        maps: The image, its maps, and its segments; without segments, superpixels are computed.
        threshold, background_threshold, crf: See `by_crf`.
        superpixels, compactness: See `slic_superpixels`.
    """
    segments = maps.segments
    if segments is None:
        segments = slic_superpixels(maps.read_rgb(), superpixels, compactness)
    labels = len(maps.scores) + 1
    foreground, possible = winning_maps(maps.scores, threshold, background_threshold)
    winners = (majority(foreground, segments, labels), majority(possible, segments, labels))
    return refine_winners(maps, winners, crf)


def majority(labels: NDArray[np.uint8], segments: NDArray[np.int32], count: int) -> NDArray[np.uint8]:
    """Replaces the label of each pixel by the most frequent label in its segment, the lowest of equally frequent ones.

    Args:
        labels: Labels below `count`, (H, W).
        segments: Segment of each pixel, (H, W). Pixels with a negative value are in none and keep their label.
        count: Number of labels.
    """
    inside = segments >= 0
    _, numbers = np.unique(segments[inside], return_inverse=True)
    cells = numbers * count + labels[inside]
    votes = np.bincount(cells, minlength=count * (numbers.max(initial=0) + 1)).reshape(-1, count)

    voted = labels.copy()
    voted[inside] = votes.argmax(axis=1)[numbers]
    return voted


def slic_superpixels(rgb: NDArray[np.uint8], count: int, compactness: float) -> NDArray[np.int32]:
    """Divides an image into superpixels by SLIC (Achanta et al., TPAMI 2012), as scikit-image computes it.

    Args:
        rgb: Image, (H, W, 3).
        count: Approximate number of superpixels.
        compactness: Weight of closeness against similar color.

    Returns:
        Superpixel of each pixel, (H, W).

    Raises:
        UserError: Scikit-image is not installed.
    """
    segmentation = require_module("skimage.segmentation", extra="segments")
    superpixels = segmentation.slic(rgb, n_segments=count, compactness=compactness, start_label=0)
    return np.asarray(superpixels, np.int32)


SEGMENTS = MaskRule(make=by_segments, record=SegmentsConfig, reads="segments")

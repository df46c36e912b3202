"""Pseudo masks: localization maps of the tagged classes and a background cue -> a label for each pixel, or ignore."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.registry import Registry
from mcis.datasets.section import Section
from mcis.models.crf import CrfParameters, dense_crf
from mcis.models.max_with_index import max_with_index


class PseudoMask(NamedTuple):
    """A pseudo mask before and after uncertain pixels are ignored.

    Attributes:
        labels: Most likely label of each pixel, (H, W) uint8; scored by the evaluation.
        mask: Copy of `labels` in which ignored pixels are 255, (H, W) uint8; the segmentation network is trained on it.
    """

    labels: NDArray[np.uint8]
    mask: NDArray[np.uint8]


class DetectedClasses(NamedTuple):
    """Detections of an image, at most one at each pixel: the one with the highest score.

    Attributes:
        labels: Class index + 1 of the detection at each pixel, 0 where there is none, (H, W) uint8.
        scores: Score of this detection in [0, 1], (H, W) float32.
    """

    labels: NDArray[np.uint8]
    scores: NDArray[np.float32]


class TaggedMaps(NamedTuple):
    """Inputs of a rule for pseudo masks: an image and the localization maps of its tags.

    Attributes:
        scores: Scores of the tagged classes, (T, H, W) float32 in [0, 1], T >= 1.
        tags: Indices of these classes, (T,).
        read_rgb: Function that decodes the image, (H, W, 3) uint8.
        saliency: Saliency map, (H, W) uint8; None if the image has none or the rule reads none.
        one_scale: Whether the scores of different maps share a scale, which normalization of each map would destroy.
        segments: Segment of each pixel, negative where there is none, (H, W) int32; None if the rule reads none or
            no files are given.
        detections: Detections of the image; None if the rule reads none.
    """

    scores: NDArray[np.float32]
    tags: NDArray[np.int64]
    read_rgb: Callable[[], NDArray[np.uint8]]
    saliency: NDArray[np.uint8] | None = None
    one_scale: bool = False
    segments: NDArray[np.int32] | None = None
    detections: DetectedClasses | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskRule:
    """A rule that makes pseudo masks, an entry of `MASK_RULES`.

    Attributes:
        make: Function from TaggedMaps to a PseudoMask. Its keyword-only parameters are values of the section
            `pseudo_masks` or of the rule's own section, by name.
        record: Class of the rule's own section `pseudo_masks.<name of the rule>`, or None.
        reads_saliency: Whether each image needs a saliency map.
        uses_random_walk: Whether a random walk over learned affinities is applied to the maps first. If the rule's own
            section has a field `random_walk`, that field decides.
        reads: Files of other programs that the rule reads, which `pseudo_masks.segments.folder` or
            `pseudo_masks.detections.file` names.
    """

    make: Callable[..., PseudoMask]
    record: type[Section] | None = None
    reads_saliency: bool = False
    uses_random_walk: bool = False
    reads: Literal["segments", "detections"] | None = None

    def __call__(self, maps: TaggedMaps, values: Mapping[str, Any]) -> PseudoMask:
        """Makes a pseudo mask.

        Args:
            maps: The image and its maps.
            values: Values by name; those that the rule does not take are ignored.

        Raises:
            UserError: The result is not a valid pseudo mask, which can happen with a rule of another package.
        """
        parameters = inspect.signature(self.make).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY]
        pseudo_mask = self.make(maps, **{name: values[name] for name in names})

        size = maps.scores.shape[1:]
        has_valid_arrays = all(array.dtype == np.uint8 and array.shape == size for array in pseudo_mask)
        if not has_valid_arrays or (pseudo_mask.labels == IGNORE).any():
            arrays = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in pseudo_mask._asdict().items())
            raise UserError(
                f"the rule {self.make.__module__}.{self.make.__qualname__} returned {arrays}",
                f"uint8 arrays of shape {size}, with {IGNORE} only in the mask",
                "correct the package that adds it, or choose another pseudo_masks.rule",
            )
        return pseudo_mask


def _most_likely(scores: NDArray[np.float32], tags: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Returns the label with the highest score at each pixel, (H, W).

    Args:
        scores: Scores of background and T tags, (1 + T, H, W).
        tags: Indices of the tagged classes, (T,).
    """
    _, index = max_with_index(scores)
    labels = np.concatenate([[0], tags + 1]).astype(np.uint8)
    return labels[index]


def by_saliency(
    maps: TaggedMaps,
    *,
    score_floor: float,
    conflict_threshold: float,
    foreground_confidence: float,
    max_background_saliency: int,
    min_foreground_fraction: float,
) -> PseudoMask:
    """Makes a pseudo mask with the background score 1 - saliency (paper-vs-code, "Pseudo masks").

    Each map is min-max normalized first, unless the maps share a scale.

    Args:
        maps: The image and its maps.
        score_floor: Scores below it, including the background score, count as 0.
        conflict_threshold: Pixels where two or more scores, including the background score, exceed it are ignored.
        foreground_confidence: Background pixels where a map exceeds it are ignored.
        max_background_saliency: Background pixels with at least this saliency, of 255, are ignored.
        min_foreground_fraction: Images whose foreground covers a smaller fraction are ignored entirely.
    """
    assert maps.saliency is not None
    classes = maps.scores
    if not maps.one_scale:
        low = classes.min(axis=(1, 2), keepdims=True)
        high = classes.max(axis=(1, 2), keepdims=True)
        classes = (classes - low) / np.maximum(high - low, 1e-6)

    background = 1 - maps.saliency.astype(np.float32) / 255
    scores = np.concatenate([background[None], classes])
    scores[scores < score_floor] = 0
    labels = _most_likely(scores, maps.tags)

    mask = labels.copy()
    mask[(scores > conflict_threshold).sum(axis=0) >= 2] = IGNORE
    is_confident = (classes > foreground_confidence).any(axis=0)
    saliency = np.where(is_confident, 255, maps.saliency)
    mask[(labels == 0) & (saliency >= max_background_saliency)] = IGNORE
    if (labels > 0).mean() < min_foreground_fraction:
        mask[:] = IGNORE
    return PseudoMask(labels, mask)


_CERTAINTY = 0.7
"""Probability of the winning label at a pixel before the CRF."""


def by_crf(maps: TaggedMaps, *, threshold: float, background_threshold: float, crf: CrfParameters) -> PseudoMask:
    """Makes a pseudo mask without saliency: two background thresholds refined by the dense CRF.

    The maps compete with a constant background score. The winning label gets probability 0.7, and the CRF moves label
    boundaries to image edges (after Ahn et al., CVPR 2019, section 4). Pixels that win against `threshold` are
    foreground, pixels that lose against `background_threshold` are background, and all others are ignored.

    Args:
        maps: The image and its maps.
        threshold: Background score that foreground has to exceed.
        background_threshold: Background score that no class may exceed at background pixels; at most `threshold`.
        crf: Parameters of the CRF.
    """
    return refine_winners(maps, winning_maps(maps.scores, threshold, background_threshold), crf)


def winning_maps(scores: NDArray[np.float32], *backgrounds: float) -> tuple[NDArray[np.uint8], ...]:
    """Returns which map has the highest score at each pixel, (H, W) for each background score.

    Args:
        scores: Scores of T maps, (T, H, W).
        backgrounds: Constant scores of the background.

    Returns:
        0 where the background wins, number of the map + 1 elsewhere.
    """
    highest, index = max_with_index(scores)
    return tuple(np.where(highest > background, index + 1, 0) for background in backgrounds)


def refine_winners(maps: TaggedMaps, winners: Sequence[NDArray[np.integer]], crf: CrfParameters) -> PseudoMask:
    """Refines the winners at two background scores by the dense CRF; pixels that differ between them are ignored.

    Args:
        maps: The image and its maps.
        winners: Results of `winning_maps` at a high and at a low background score, (H, W) each.
        crf: Parameters of the CRF.
    """
    count, height, width = maps.scores.shape
    probabilities = np.full((2, count + 1, height, width), (1 - _CERTAINTY) / count, np.float32)
    for planes, winner in zip(probabilities, winners, strict=True):
        np.put_along_axis(planes, winner[None], _CERTAINTY, axis=0)

    refined, refined_low = dense_crf(maps.read_rgb(), probabilities, crf)
    labels = _most_likely(refined, maps.tags)
    labels_low = _most_likely(refined_low, maps.tags)
    mask = np.where((labels == 0) & (labels_low > 0), IGNORE, labels)
    return PseudoMask(labels, mask)


MASK_RULES = Registry[MaskRule](
    "mask_rules",
    {
        "saliency": MaskRule(make=by_saliency, reads_saliency=True),
        "crf": MaskRule(make=by_crf),
        "affinity": MaskRule(make=by_crf, uses_random_walk=True),
        "segments": "mcis.models.segments:SEGMENTS",
        "detections": "mcis.models.detections:DETECTIONS",
    },
)
"""Rules by their names in `pseudo_masks.rule`; packages add to them by entry points of `mcis.mask_rules`."""

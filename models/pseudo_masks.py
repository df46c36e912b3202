"""Pseudo masks: localization maps of the tagged classes and a background cue -> a label for every pixel, or ignore."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.registry import Registry
from mcis.datasets.section import Section
from mcis.models.crf import CrfParameters, dense_crf
from mcis.models.max_with_index import max_with_index


class PseudoMask(NamedTuple):
    """A pseudo mask before and after doubtful pixels are ignored.

    Attributes:
        labels: (H, W) uint8, the most likely label of every pixel; the evaluation scores it.
        mask: (H, W) uint8, the same with 255 at ignored pixels; the segmentation network learns from it.
    """

    labels: NDArray[np.uint8]
    mask: NDArray[np.uint8]


class TaggedMaps(NamedTuple):
    """What a pseudo mask is made of.

    Attributes:
        scores: of the tagged classes, (T, H, W) float32 in [0, 1], T at least 1.
        tags: (T,) class indices.
        read_rgb: decodes the image, (H, W, 3) uint8.
        saliency: (H, W) uint8; None of an image without a saliency map, or where the rule reads none.
        one_scale: whether scores of different maps share a scale, which normalizing each by itself would lose.
    """

    scores: NDArray[np.float32]
    tags: NDArray[np.int64]
    read_rgb: Callable[[], NDArray[np.uint8]]
    saliency: NDArray[np.uint8] | None = None
    one_scale: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskRule:
    """A rule by which pseudo masks are made, an entry of `MASK_RULES`.

    Attributes:
        make: TaggedMaps -> PseudoMask; its keyword-only parameters are values of `pseudo_masks` by their names, or of
            the rule's own record.
        record: class of the section `pseudo_masks.<name of the rule>`; None for a rule without values of its own.
        reads_saliency: whether each image has to have a saliency map.
        uses_random_walk: whether maps walk over learnt affinities first.
    """

    make: Callable[..., PseudoMask]
    record: type[Section] | None = None
    reads_saliency: bool = False
    uses_random_walk: bool = False

    def __call__(self, maps: TaggedMaps, values: Mapping[str, Any]) -> PseudoMask:
        """The pseudo mask by the values that the rule takes, out of more; UserError where it is none, as rules may be
        another package's."""
        taken = [p.name for p in inspect.signature(self.make).parameters.values() if p.kind == p.KEYWORD_ONLY]
        made, size = self.make(maps, **{name: values[name] for name in taken}), maps.scores.shape[1:]
        if not all(part.dtype == np.uint8 and part.shape == size for part in made) or (made.labels == IGNORE).any():
            kinds = ", ".join(f"{name} {part.dtype} {part.shape}" for name, part in made._asdict().items())
            raise UserError(
                f"the rule {self.make.__module__}.{self.make.__qualname__} made {kinds}",
                f"uint8 {size}, and {IGNORE} in the mask alone",
                "correct the package that adds it, or choose another pseudo_masks.rule",
            )
        return made


def _labels(scores: NDArray[np.float32], tags: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The label of the highest score, of the background's and those of T tags (1 + T, H, W), at each pixel."""
    return np.concatenate([[0], tags + 1]).astype(np.uint8)[max_with_index(scores)[1]]


def by_saliency(
    maps: TaggedMaps,
    *,
    score_floor: float,
    conflict_threshold: float,
    foreground_confidence: float,
    max_background_saliency: int,
    min_foreground_fraction: float,
) -> PseudoMask:
    """Pseudo mask in which 1 - saliency is the score of the background (RELEASED_RECIPE, "Pseudo masks").

    Each map is min-max normalized first; maps that share a scale compete as they are.

    Args:
        score_floor: scores below it count as 0.
        conflict_threshold: a pixel where two or more scores exceed it is ignored.
        foreground_confidence: a background pixel where a map exceeds it is ignored.
        max_background_saliency: a background pixel whose saliency is at least this, of 255, is ignored.
        min_foreground_fraction: an image whose foreground covers less than this fraction is ignored as a whole.
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
    labels = _labels(scores, maps.tags)
    mask = labels.copy()
    mask[(scores > conflict_threshold).sum(axis=0) >= 2] = IGNORE
    salient = np.maximum(maps.saliency, np.where((classes > foreground_confidence).any(axis=0), 255, 0))
    mask[(labels == 0) & (salient >= max_background_saliency)] = IGNORE
    if (labels > 0).mean() < min_foreground_fraction:
        mask[:] = IGNORE
    return PseudoMask(labels, mask)


_CERTAINTY = 0.7
"""Probability of the label that wins at a pixel, before the CRF."""


def by_crf(maps: TaggedMaps, *, threshold: float, background_threshold: float, crf: CrfParameters) -> PseudoMask:
    """Pseudo mask without saliency: two background thresholds refined by the dense CRF, ignored where they disagree.

    The maps compete with a constant background score. The label that wins gets a probability of 0.7 at its pixels, and
    the CRF moves its edges to those of the image (after Ahn et al., CVPR 2019, section 4). Pixels that are foreground
    against `threshold` are foreground, pixels that are background against `background_threshold` are background, and
    the others are ignored.

    Args:
        threshold: background score that foreground has to exceed.
        background_threshold: background score, at most `threshold`, that background has to win with.
        crf: parameters of the CRF.
    """

    count, *size = maps.scores.shape
    highest, number = max_with_index(maps.scores)
    both = np.full((2, count + 1, *size), (1 - _CERTAINTY) / count, np.float32)
    for probabilities, background in zip(both, (threshold, background_threshold), strict=True):
        won = np.where(highest > background, number + 1, 0)
        np.put_along_axis(probabilities, won[None], _CERTAINTY, axis=0)
    labels, lower = (_labels(refined, maps.tags) for refined in dense_crf(maps.read_rgb(), both, crf))
    mask = np.where((labels == 0) & (lower > 0), IGNORE, labels)
    return PseudoMask(labels, mask)


MASK_RULES = Registry[MaskRule](
    "mask_rules",
    {
        "saliency": MaskRule(make=by_saliency, reads_saliency=True),
        "crf": MaskRule(make=by_crf),
        "affinity": MaskRule(make=by_crf, uses_random_walk=True),
    },
)
"""What the values of `pseudo_masks.rule` mean; packages add to them by entry points of `mcis.mask_rules`."""

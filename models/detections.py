"""The mask rule `detections`: masks with class and score of another program, fused with localization maps."""

from collections.abc import Iterator

import numpy as np
from pydantic import Field

from mcis.datasets.classes import IGNORE
from mcis.datasets.section import Fraction, LocalPath, Section
from mcis.models.crf import CrfParameters
from mcis.models.pseudo_masks import MaskRule, PseudoMask, TaggedMaps, by_crf


class DetectionsConfig(Section):
    """Rule detections: masks with class and score, of classes that the image is tagged with, fused with the maps."""

    file: LocalPath | None = Field(default=None, exclude=True)  # the output depends on its content
    """JSON file of COCO's results, as SAM 3, Grounded-SAM, YOLOE and autodistill write it: a list of objects with
    `image_id` or `file_name`, `category_id` or `category_name`, `segmentation` (run lengths or polygons) and `score`;
    or a data set with `images`, `categories` and `annotations`. Required."""
    weight: Fraction = 0.5
    """Weight w of detections: the score of a tag is w times the score of its detections plus 1 - w times its map. The
    map of a tag without a detection counts in full. 1 = detections alone; 0 = maps alone."""
    min_score: Fraction = 0.0
    """Detections with a lower score are left out."""
    tagged_only: bool = True
    """Whether detections of classes without a tag are left out. false is a control."""
    random_walk: bool = True
    """Whether maps are first refined by a random walk over learned affinities, as by the rule affinity."""

    def problems(self) -> Iterator[str]:
        """The rule needs its file."""
        if self.file is None:
            yield (
                "pseudo_masks.rule is detections but pseudo_masks.detections.file is not set; set it to the JSON file "
                "of the detections"
            )


def by_detections(
    maps: TaggedMaps, *, threshold: float, background_threshold: float, crf: CrfParameters, weight: float
) -> PseudoMask:
    """Makes a pseudo mask as `by_crf` does, from maps that are fused with detections.

    With detections alone, an image without a detection has nothing to learn from and is ignored entirely.

    Args:
        maps: The image, its maps, and its detections.
        threshold, background_threshold, crf: See `by_crf`.
        weight: See `fuse_detections`.
    """
    assert maps.detections is not None
    pseudo_mask = by_crf(
        fuse_detections(maps, weight), threshold=threshold, background_threshold=background_threshold, crf=crf
    )
    if weight == 1 and not maps.detections.labels.any():
        return pseudo_mask._replace(mask=np.full_like(pseudo_mask.mask, IGNORE))
    return pseudo_mask


def fuse_detections(maps: TaggedMaps, weight: float) -> TaggedMaps:
    """Replaces the scores of tags by a weighted mean of detections and maps.

    Detections of classes without a tag, if there are any, add their classes; these have no map.

    Args:
        maps: The image, its maps, and its detections.
        weight: Weight of the detections, in [0, 1]. Below 1, the map of a tag without a detection keeps its scores.
    """
    assert maps.detections is not None
    labels, detected_scores = maps.detections
    detected = np.setdiff1d(labels, [0]).astype(np.int64) - 1
    others = np.setdiff1d(detected, maps.tags)
    tags = np.concatenate([maps.tags, others])
    no_maps = np.zeros((len(others), *labels.shape), np.float32)
    scores = np.concatenate([maps.scores, no_maps])

    for number, tag in enumerate(tags.tolist()):
        if weight == 1 or tag in detected:
            tag_detections = np.where(labels == tag + 1, detected_scores, np.float32(0))
            scores[number] = weight * tag_detections + (1 - weight) * scores[number]
    return maps._replace(scores=scores, tags=tags)


DETECTIONS = MaskRule(make=by_detections, record=DetectionsConfig, reads="detections")

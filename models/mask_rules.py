"""The rules by which pseudo masks are made of localization maps: what the values of `pseudo_masks.background` mean."""

from mcis.datasets.registry import Registry
from mcis.models.crf import CrfParameters
from mcis.models.pseudo_masks import MaskRule, PseudoMask, TaggedMaps, from_crf, from_saliency


def by_saliency(
    maps: TaggedMaps, *, floor: float, conflict: float, confident: float, doubt: int, smallest: float
) -> PseudoMask:
    """1 - saliency is the score of the background; see `from_saliency`."""
    assert maps.saliency is not None
    return from_saliency(
        maps.scores,
        maps.tags,
        maps.saliency,
        stretch=not maps.one_scale,
        floor=floor,
        conflict=conflict,
        confident=confident,
        doubt=doubt,
        smallest=smallest,
    )


def by_crf(maps: TaggedMaps, *, threshold: float, background_threshold: float, crf: CrfParameters) -> PseudoMask:
    """Two thresholds refined by the dense CRF; see `from_crf`."""
    return from_crf(
        maps.read_rgb(),
        maps.scores,
        maps.tags,
        threshold=threshold,
        background_threshold=background_threshold,
        parameters=crf,
    )


MASK_RULES = Registry[MaskRule](
    "mask_rules",
    {
        "saliency": MaskRule(make=by_saliency, reads_saliency=True),
        "crf": MaskRule(make=by_crf),
        "affinity": MaskRule(make=by_crf, walks=True),
        "thresholds": "mcis.models.threshold_masks:THRESHOLDS",
    },
)
"""One file and one line each; packages add to them by entry points of the group `mcis.mask_rules`."""

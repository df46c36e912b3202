"""Sections of localization maps: the method that makes them, how they are scaled, and the pseudo masks made of them."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from mcis.datasets.sampling.related_images import RELATED
from mcis.datasets.section import Fraction, Positive, Rate, Section, with_records
from mcis.models.crf import CrfParameters
from mcis.models.pseudo_masks import MASK_RULES


class MethodConfig(Section):
    """How a map is made of its related images: as the paper says (section 3.2), or as the released code does."""

    name: Literal["co_attention", "released"] = "co_attention"
    """`co_attention`: mean over the co-attentive activations of the related images (section 3.2); `released`: mean of
    that and four maps of self pairs (RELEASED_RECIPE, "Localization maps")."""
    contrastive: bool = False
    """Average in the contrastive activations against the related images of an image's other tags (section 4.5)."""
    w_p: Literal["learned", "identity"] = "learned"
    """W_P: as the classifier has it, or the identity, a control that needs no training of co-attention."""
    target: Literal["m", "n"] = "m"
    """Which image of its pairs a map is of; W_P of an image n is transposed (Eq. 2). The paper's text takes n, the
    released code m (RELEASED_RECIPE, "Localization maps"). Of pairs of two domains m is always the one of the domain
    target; with w_p=identity both are the same."""

    def description(self) -> str:
        """How a map is made of related images, as scores name it."""
        if self.name == "released":
            form = "released"
        else:
            form = "co-attention" + (
                " (W_P = I)" if self.w_p == "identity" else " (target n)" if self.target == "n" else ""
            )
        return form + (" + contrastive" if self.contrastive else "")

    def problems(self) -> Iterator[str]:
        """What goes with co_attention alone."""
        for key in ("w_p", "target"):
            value, default = getattr(self, key), type(self).model_fields[key].default
            if self.name == "released" and value != default:
                found, only = str(value).lower(), str(default).lower()
                yield (
                    f"localize.method.{key} is {found} but localize.method.name is released, whose {key} is {only}; "
                    f"set localize.method.{key}={only} or localize.method.name=co_attention"
                )


RelatedImages = Annotated[int, Field(ge=0, le=64)]


class LocalizeConfig(Section):
    """Localization maps (section 3.2)."""

    related: RelatedImages = 3
    """Related images R per class; 0 = single round, which uses no method (section 3.2: 3)."""
    method: MethodConfig = MethodConfig()
    """How a map is made of its related images."""
    hops: int = Field(default=1, ge=1, le=16)
    """How far activations travel over related images. 1: a map is made of what their features say (section 3.2); 2: of
    the maps that these have by their own related images; and so on. Maps find more of the object, and their best
    thresholds rise; each hop takes as long as the first. Beyond the paper."""
    related_by: Annotated[str, AfterValidator(RELATED.choice())] = "class"
    """Which images a map is related to. `class`: images with its class, drawn at random (section 3.2); `nearest`: those
    of them that are nearest by the mean of what the affinity compares over an image
    (`datasets/sampling/related_images.py`); or, as controls of what these bring, its own image alone (`itself`) or
    images without its class (`wrong_class`). Where every image has the class, the latter takes images with it."""
    related_may_repeat: bool = False
    """Whether related images are drawn with repetition, the image itself included, as in the released code
    (RELEASED_RECIPE, "Localization maps")."""
    extra_scales: tuple[Rate, ...] = ()
    """Further factors of the input size at which an image is embedded; its features are averaged over all."""
    hflip: bool = False
    """Average the features with those of the mirror image, mirrored back."""
    batch: Positive = 32
    """Images embedded at a time, at most `compute.shard_rows`."""

    def description(self) -> str:
        """How a map is made of related images, and of which, as scores name it."""
        hops = f", {self.hops} hops" if self.hops > 1 else ""
        return self.method.description() + RELATED[self.related_by].words + hops

    def problems(self) -> Iterator[str]:
        """Contrastive co-attention without an image to contrast with, or a control that goes with neither."""
        yield from self.method.problems()
        if self.method.contrastive and not self.related:
            yield (
                "localize.method.contrastive is set but localize.related is 0, so there is no image to contrast with; "
                "set localize.method.contrastive=false or localize.related=3"
            )
        rule = RELATED[self.related_by]
        if rule.vectors and self.related_may_repeat:
            yield (
                f"localize.related_may_repeat is set but localize.related_by is {self.related_by}, which draws "
                "nothing; set localize.related_may_repeat=false or localize.related_by=class"
            )
        if rule.control and self.method.contrastive:
            yield (
                f"localize.method.contrastive is set but localize.related_by is {self.related_by}, and maps are "
                "contrasted with related images of their images' other classes; set localize.method.contrastive=false "
                "or localize.related_by=class"
            )


class PseudoMasksCrf(CrfParameters):
    """The CRF that moves the edges of pseudo masks: maps are coarser than predictions and take more steps."""

    iterations: int = Field(default=10, ge=0)
    """Mean-field steps; 0 = no CRF."""


class MapsConfig(Section):
    """How localization maps are read for pseudo masks and their own scores; pictures show each by its maximum."""

    scale: Literal["maximum", "range", "logarithm"] = "maximum"
    """How activations become scores in [0, 1]. `maximum`: each map is clipped at 0 and divided by its maximum
    (RELEASED_RECIPE, "Localization maps"). `range`: each map is min-max normalized whole. `logarithm`: all maps share
    one scale, (1 + sign(a) log(1 + |a|) / 7) / 2 clipped to [0, 1], so that what a class layer is surer of wins over
    what is merely an image's strongest. The thresholds on scores in `pseudo_masks` are then ones on activations: 0.5 is
    0, 0.55 is 1, 0.66 is 8, 0.95 is 544."""


class WalkConfig(Section):
    """Random walk of the localization maps over learnt affinities (Ahn and Kwak, CVPR 2018)."""

    beta: Rate = 8.0
    """Power of the affinities: the higher, the less the low ones count."""
    steps: int = Field(default=256, ge=1, le=4096)
    """Steps of the walk over an image with `max_side` pixels on its longest side. A walk reaches as far as the root of
    its steps, so images with fewer pixels take fewer, in proportion to the square of their longest side."""
    max_side: Positive = 512
    """Longest side at which images pass the affinity network, pixels: larger ones are made smaller for it, and the
    maps are brought back."""


@with_records(MASK_RULES)
class PseudoMasksConfig(Section):
    """Pseudo masks from localization maps and a background cue."""

    rule: Annotated[str, AfterValidator(MASK_RULES.choice("auto"))] = "auto"
    """The rule by which masks are made, and what tells background from foreground. `saliency`: saliency maps, which
    every tagged training image must have; `crf`: thresholds refined by the dense CRF; `affinity`: the same, of maps
    that have walked over the affinities of `affinity_net`, which is trained for it; `auto`: saliency for images with a
    map, crf for those without; or another rule of `models/pseudo_masks.py`."""
    score_floor: Fraction = 0.3
    """Scores below it count as 0 (RELEASED_RECIPE, "Pseudo masks")."""
    conflict_threshold: Fraction = 0.99
    """A pixel where two or more scores exceed it is ignored (RELEASED_RECIPE, "Pseudo masks")."""
    foreground_confidence: Fraction = 0.95
    """Background is ignored where a map exceeds it (RELEASED_RECIPE, "Pseudo masks")."""
    max_background_saliency: int = Field(default=32, ge=0, le=256)
    """Background is ignored where saliency is at least this, of 255 (RELEASED_RECIPE, "Pseudo masks"); 256 = never."""
    min_foreground_fraction: Fraction = 0.01
    """An image with a smaller fraction of foreground is ignored whole (RELEASED_RECIPE, "Pseudo masks")."""
    threshold: Fraction = 0.3
    """Cues `crf` and `affinity`: background score against which foreground must win. What suits depends on the maps;
    with `maps.scale=logarithm` 0.5 is activation 0 and 0.66 is 8. A surer classifier wants more."""
    background_threshold: Fraction = 0.1
    """The same cues: background score that is background for certain where it wins, at most `threshold`; what lies
    between the two is ignored. With `logarithm` 0.55 is activation 1."""
    crf: PseudoMasksCrf = PseudoMasksCrf()
    """The same cues: the CRF that moves edges."""
    walk: WalkConfig = WalkConfig()
    """Cue `affinity`: the walk; each walked map is divided by its maximum."""

    @property
    def reads_saliency(self) -> bool:
        """Whether saliency maps are a cue, where there are any."""
        return self.rule == "auto" or MASK_RULES[self.rule].reads_saliency

    @property
    def uses_random_walk(self) -> bool:
        """Whether maps walk over learnt affinities first."""
        return self.rule != "auto" and MASK_RULES[self.rule].uses_random_walk

    def problems(self) -> Iterator[str]:
        """A threshold for certain background above the one for background."""
        if self.background_threshold > self.threshold:
            yield (f"pseudo_masks.background_threshold {self.background_threshold} is above threshold {self.threshold}")

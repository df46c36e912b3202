"""Configuration of localization maps: how they are made, how they are scaled, and the pseudo masks made from them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mcis.datasets.formats.map_files import check_map_format
from mcis.datasets.sampling.related_images import RELATED_IMAGE_RULES
from mcis.datasets.section import Fraction, LocalPath, Positive, Rate, Section, with_records
from mcis.models.crf import CrfParameters
from mcis.models.pseudo_masks import MASK_RULES


class MethodConfig(Section):
    """How a map is computed from related images: as in the paper (section 3.2), or as in the released code."""

    name: Literal["co_attention", "released"] = "co_attention"
    """`co_attention`: mean of the co-attentive activations over the related images (section 3.2); `released`: mean of
    that and four maps from self pairs (paper-vs-code, "Localization maps")."""
    contrastive: bool = False
    """Include contrastive activations in the mean. They are computed against the related images of the image's other
    tags (section 4.5)."""
    w_p: Literal["learned", "identity"] = "learned"
    """W_P: `learned` = the classifier's; `identity` = a control that does not depend on trained co-attention."""
    target: Literal["m", "n"] = "m"
    """Whether the map belongs to image m or n of its pairs; W_P is transposed for n (Eq. 2). The paper's text uses n,
    the released code m (paper-vs-code, "Localization maps"). In pairs of two domains m is always the target-domain
    image. With w_p=identity both give the same maps."""

    def description(self) -> str:
        """Short text that names the method in scores."""
        if self.name == "released":
            text = "released"
        elif self.w_p == "identity":
            text = "co-attention (W_P = I)"
        elif self.target == "n":
            text = "co-attention (target n)"
        else:
            text = "co-attention"
        return f"{text} + contrastive" if self.contrastive else text

    def problems(self) -> Iterator[str]:
        """Values that only apply to name=co_attention."""
        if self.name != "released":
            return
        for key in ("w_p", "target"):
            value = getattr(self, key)
            default = type(self).model_fields[key].default
            if value != default:
                yield (
                    f"localize.method.{key} is {value} but localize.method.name is released, which uses {default}; "
                    f"set localize.method.{key}={default} or localize.method.name=co_attention"
                )


RelatedImages = Annotated[int, Field(ge=0, le=64)]


class LocalizeConfig(Section):
    """Localization maps (section 3.2)."""

    related: RelatedImages = 3
    """Number of related images R per class; 0 = single-round maps, for which `method` is not used (section 3.2: 3)."""
    method: MethodConfig = MethodConfig()
    """How a map is computed from related images."""
    hops: int = Field(default=1, ge=1, le=16)
    """How many times activations pass through related images. 1: a map uses the activations of its related images
    (section 3.2); 2: it uses the maps that these get from their own related images; and so on. More hops cover more of
    the object and raise the best threshold; each hop costs as much as the first. More than one requires
    method.name=co_attention without method.contrastive. Not in the paper."""
    related_by: Annotated[str, AfterValidator(RELATED_IMAGE_RULES.choice())] = "class"
    """Which images are related. `class`: images with the class, drawn at random (section 3.2). `nearest`: the images
    with the class that are most similar, by the cosine of their vectors; an image's vector is the mean over its
    positions of the features that the affinity compares. Controls: `itself`: the image alone; `wrong_class`: images
    without the class, or images with it if every image has it."""
    related_may_repeat: bool = False
    """Draw related images with replacement, including the image itself, as in the released code (paper-vs-code,
    "Localization maps")."""
    extra_scales: tuple[Rate, ...] = ()
    """Additional scale factors of the input; features are averaged over all scales."""
    hflip: bool = False
    """Average the features with those of the horizontally flipped image."""
    pixel_correlation: bool = True
    """Refine single-round maps by pixel correlation, if the classifier was trained with equivariant attention
    (`classifier.equivariant`). false: maps are the activations S_n of the classifier (section 4.4), and equivariant
    attention acts in training only."""
    batch: Positive = 32
    """Images per forward pass, at most `compute.shard_rows`."""
    feature_type: Literal["float16", "int8"] = "float16"
    """Type of the features that are kept on disk while maps with related images are made. `int8` halves their size:
    each value is rounded to a multiple of 1/127 of the largest magnitude of its channel in the image, so the maps
    change a little. Not in the paper."""
    maps: LocalPath | None = Field(default=None, exclude=True)  # the output depends on the files in it
    """Folder of localization maps of another program, used instead of maps of a classifier, which is then not trained:
    a file for each tagged training image, with scores in [0, 1] as they compete with one another and with the
    background (`maps.scale` is not used). None: maps are made by the run."""
    maps_format: Annotated[str, AfterValidator(check_map_format)] = Field(default="irn", exclude=True)
    """Format of `localize.maps`, named after programs that write it: irn (also AdvCAM, ReCAM), amn, clip-es, toco,
    excel, psa (also SEAM, MCTformer, L2G, S2C) or png (L2G); docs/howto/compare-methods.md describes them."""

    @property
    def is_imported(self) -> bool:
        """Whether the maps are those of another program."""
        return self.maps is not None

    @property
    def related_of_maps(self) -> int | None:
        """Number of related images of the maps; None for maps of another program."""
        return None if self.is_imported else self.related

    def description(self) -> str:
        """Short text that names the method and the related images in scores."""
        if self.is_imported:
            return "imported maps"
        hops = f", {self.hops} hops" if self.hops > 1 else ""
        return self.method.description() + RELATED_IMAGE_RULES[self.related_by].description_suffix + hops

    def problems(self) -> Iterator[str]:
        """Contrastive maps without images to contrast with, methods of one hop, and rules that exclude each other."""
        yield from self.method.problems()
        if self.hops > 1 and self.related:
            if self.method.name == "released":
                yield (
                    f"localize.hops is {self.hops} but localize.method.name is released, which has one hop; set "
                    "localize.hops=1 or localize.method.name=co_attention"
                )
            if self.method.contrastive:
                yield (
                    f"localize.hops is {self.hops} but localize.method.contrastive is set, which has one hop; set "
                    "localize.hops=1 or localize.method.contrastive=false"
                )
        if self.method.contrastive and not self.related:
            yield (
                "localize.method.contrastive is set but localize.related is 0, so there is no image to contrast with; "
                "set localize.method.contrastive=false or localize.related=3"
            )
        rule = RELATED_IMAGE_RULES[self.related_by]
        if rule.needs_vectors and self.related_may_repeat:
            yield (
                f"localize.related_may_repeat is set but localize.related_by is {self.related_by}, which draws "
                "nothing; set localize.related_may_repeat=false or localize.related_by=class"
            )
        if rule.is_control and self.method.contrastive:
            yield (
                f"localize.method.contrastive is set but localize.related_by is {self.related_by}, and contrastive "
                "maps need related images of the other tags; set localize.method.contrastive=false or "
                "localize.related_by=class"
            )


class PseudoMasksCrf(CrfParameters):
    """Dense CRF that refines pseudo masks; maps are coarser than predictions and need more iterations."""

    iterations: int = Field(default=10, ge=0)
    """Mean-field iterations; 0 = no CRF."""


class MapsConfig(Section):
    """Conversion of localization maps to scores, for pseudo masks and for evaluation."""

    scale: Literal["maximum", "range", "logarithm", "given"] = "maximum"
    """How activations become scores in [0, 1]. `maximum`: clip each map at 0 and divide by its maximum
    (paper-vs-code, "Localization maps"). `range`: min-max normalize each map. `logarithm`: one scale for all maps, (1
    + sign(a) log(1 + |a|) / 7) / 2 clipped to [0, 1], so that classes compete by the size of their activations; a
    threshold of 0.5 then is activation 0, 0.55 is 1, 0.66 is 8, 0.95 is 544. `given`: clip each map to [0, 1]; maps of
    another program (`localize.maps`) always use it. Pictures always use `maximum`."""


class WalkConfig(Section):
    """Random walk of localization maps over learned affinities (Ahn and Kwak, CVPR 2018)."""

    beta: Rate = 8.0
    """Exponent of the affinities; higher values suppress low affinities."""
    steps: int = Field(default=256, ge=1, le=4096)
    """Steps of the walk for an image whose longest side is `max_side`. The reach of a walk grows with the square root
    of its steps, so smaller images use fewer, in proportion to the square of their longest side."""
    max_side: Positive = 512
    """Longest side in pixels at which images pass through the affinity network; larger images are downscaled and their
    maps upscaled again."""


@with_records(MASK_RULES, exclude_defaults=True)
class PseudoMasksConfig(Section):
    """Pseudo masks from localization maps and a background cue.

    The rule auto applies the rule saliency or crf to each image, with the values of that rule.
    """

    rule: Annotated[str, AfterValidator(MASK_RULES.choice("auto", "imported"))] = "auto"
    """How masks are made and background is found. `saliency`: saliency maps, required for every tagged training image;
    `crf`: thresholds refined by the dense CRF; `affinity`: like crf, after a random walk over the affinities of
    `affinity_net`; `auto`: saliency for images with a saliency map, crf for the others; `segments`: like affinity, with
    one class in each segment of the image; `detections`: like affinity, from maps fused with masks of another program;
    `imported`: the masks of another program (`pseudo_masks.masks`); or a rule of an installed package
    (`models/pseudo_masks.py`)."""
    masks: LocalPath | None = Field(default=None, exclude=True)  # the output depends on the files in it
    """Rule imported: folder with a mask <id>.png for each tagged training image: 0 = background, k = the k-th class,
    255 = ignored in training and background in scores. Gray, palette, or RGB in PASCAL's colors."""
    score_floor: Fraction = 0.3
    """Rule saliency: scores below this count as 0 (paper-vs-code, "Pseudo masks")."""
    conflict_threshold: Fraction = 0.99
    """Rule saliency: ignore pixels where two or more scores exceed this (paper-vs-code, "Pseudo masks")."""
    foreground_confidence: Fraction = 0.95
    """Rule saliency: ignore background pixels where a map exceeds this (paper-vs-code, "Pseudo masks")."""
    max_background_saliency: int = Field(default=32, ge=0, le=256)
    """Rule saliency: ignore background pixels with at least this saliency, 0 to 255 (paper-vs-code, "Pseudo masks");
    256 = never."""
    min_foreground_fraction: Fraction = 0.01
    """Rule saliency: ignore images with a smaller fraction of foreground (paper-vs-code, "Pseudo masks")."""
    threshold: Fraction = 0.3
    """All rules but saliency: background score against which foreground has to win. The best value depends on the
    maps: more confident classifiers need a higher one. With `maps.scale=logarithm` 0.5 is activation 0 and 0.66 is
    8."""
    background_threshold: Fraction = 0.1
    """All rules but saliency: background score with which background has to win to be certain, at most `threshold`;
    pixels in between are ignored. With `maps.scale=logarithm` 0.55 is activation 1."""
    crf: PseudoMasksCrf = PseudoMasksCrf()
    """All rules but saliency: dense CRF that refines object boundaries."""
    walk: WalkConfig = WalkConfig()
    """Rules affinity, segments and detections: random walk. After it, each map is divided by its maximum."""

    @property
    def is_imported(self) -> bool:
        """Whether the masks are those of another program."""
        return self.rule == "imported"

    @property
    def may_use_saliency(self) -> bool:
        """Whether the rule uses the saliency map of an image that has one."""
        if self.is_imported:
            return False
        return self.rule == "auto" or MASK_RULES[self.rule].reads_saliency

    @property
    def uses_random_walk(self) -> bool:
        """Whether maps are first refined by a random walk over learned affinities."""
        if self.rule not in MASK_RULES:
            return False
        return bool(self.rule_values(self.rule).get("random_walk", MASK_RULES[self.rule].uses_random_walk))

    @property
    def regions(self) -> Literal["segments", "detections"] | None:
        """What the rule reads from files of other programs; None if it reads none, or computes superpixels."""
        reads = MASK_RULES[self.rule].reads if self.rule in MASK_RULES else None
        if reads == "segments" and self.section_of("segments").folder is None:
            return None
        return reads

    def section_of(self, rule: str) -> Any:
        """The section of a rule, `pseudo_masks.<rule>`."""
        return getattr(self, rule)

    def rule_values(self, rule: str) -> dict[str, Any]:
        """Values that a rule takes by name: those of this section, and those of its own section if it has one."""
        values = dict(self)
        if MASK_RULES[rule].record:
            values.update(self.section_of(rule))
        return values

    def problems(self) -> Iterator[str]:
        """Problems of the rule's own section, files that the rule does not read, and thresholds in the wrong order."""
        if self.is_imported and self.masks is None:
            yield "pseudo_masks.rule is imported but pseudo_masks.masks is not set; set it to the folder of the masks"
        if not self.is_imported and self.masks is not None:
            yield (
                f"pseudo_masks.masks is set but pseudo_masks.rule is {self.rule}, which makes masks; set "
                "pseudo_masks.rule=imported, or leave pseudo_masks.masks out"
            )
        if self.rule in MASK_RULES and MASK_RULES[self.rule].record:
            yield from self.section_of(self.rule).problems()
        for rule, location in (("segments", "folder"), ("detections", "file")):
            if getattr(self.section_of(rule), location) is not None and self.regions != rule:
                key = f"pseudo_masks.{rule}.{location}"
                yield (
                    f"{key} is set but pseudo_masks.rule is {self.rule}, which does not read it; set "
                    f"pseudo_masks.rule={rule}, or leave {key} out"
                )
        if self.background_threshold > self.threshold:
            yield (
                f"pseudo_masks.background_threshold {self.background_threshold} is above threshold {self.threshold}; "
                f"set pseudo_masks.background_threshold={self.threshold} or lower, or a higher pseudo_masks.threshold"
            )

"""The configuration of a run: frozen, validated at the boundary, every problem reported together.

A field's docstring gives meaning, unit and source. `platform/settings.py` fills these sections from recipes, settings,
files and `--set`; the stages take the section that concerns them.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from mcis.datasets.files import is_remote

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


def _absolute(path: Path) -> Path:
    return path.expanduser().resolve()


def _absolute_or_remote(place: str) -> str:
    return place if is_remote(place) else str(_absolute(Path(place)))


def _absolute_or_word(place: str) -> str:
    return place if place in ("none", "download") else str(_absolute(Path(place)))


# Relative to where the command is given; absolute from then on, as trials and workers have folders of their own.
LocalPath = Annotated[Path, AfterValidator(_absolute)]
Place = Annotated[str, AfterValidator(_absolute_or_remote)]
WeightsFile = Annotated[str, AfterValidator(_absolute_or_word)]


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class SingleConfig(Section):
    """Single-label images (source `single`): ImageNet CLS-LOC, Caltech-256 or plain class folders."""

    root: LocalPath | None = None
    """Folder of ImageNet's <wnid>/*.JPEG or Caltech-256's <nnn.name>/*.jpg, or one above it; or of <class>/<image>."""
    layout: Literal["imagenet", "caltech", "folders"] | None = None
    """Which of these the folder holds; None = recognized by the names of the class folders."""
    classes: LocalPath | None = None
    """File of <wnid or folder> -> class name; None = the table that comes with the project, or the folders' names."""
    subset: LocalPath | None = None
    """File with one relative path a line: the images that are used; None = all."""
    saliency: LocalPath | None = None
    """Folder of saliency maps with the images' relative paths; an image may be without."""


class WebConfig(Section):
    """Crawled images (source `web`)."""

    root: LocalPath | None = None
    """Folder of <class>/<file>."""
    saliency: LocalPath | None = None
    """Folder of saliency maps <class>/<stem>.png; an image may be without."""


class LidConfig(Section):
    """The LID challenge (source `lid`), and any data set of list files."""

    root: LocalPath | None = None
    """Folder that the lists' paths are relative to."""
    train_list: Path = Path("train.txt")
    """Lines `<path> <class index> <class index> ...`, inside root or absolute."""
    val_list: Path = Path("val.txt")
    """Likewise; indices may be absent."""
    test_list: Path | None = None
    """Likewise; None = no test split."""
    classes: Path = Path("classes.txt")
    """File with one class name a line, inside root or absolute."""
    masks: Path | None = None
    """Folder of ground-truth masks <path of the image>.png, inside root or absolute."""
    first_index: int = Field(default=0, ge=0, le=1)
    """Number of the first class in the lists."""


class TagsConfig(Section):
    """Your own images and tags (source `tags`), a table."""

    table: Place | None = None
    """Path or URI of a .csv, .jsonl or .parquet table."""
    image: str = "image"
    """Column of image paths (relative to the table's folder, or absolute) or URIs such as s3://."""
    tags: str = "tags"
    """Column of class names: lists, or text with ; between the names."""
    mask: str = "mask"
    """Column of ground-truth masks for scoring, or absent."""
    saliency: str = "saliency"
    """Column of saliency maps, or absent."""
    split: str = "split"
    """Column with train, val or test; absent = all train."""
    id: str = "id"
    """Column of unique image ids; absent = made from the paths."""
    ignore_others: bool = False
    """Leave out tags that are not among `data.classes`, with a count in the report; else they are an error."""


class DataConfig(Section):
    """Where the images and tags are."""

    voc: LocalPath | None = None
    """Folder of a VOC 2012 devkit: JPEGImages, ImageSets/Segmentation/<list>.txt and <list>_cls.txt."""
    sbd: LocalPath | None = None
    """Folder of SBD (benchmark_RELEASE) for masks and the list train_aug, where the devkit is without them."""
    classes: LocalPath | None = None
    """File with one class name a line; None = PASCAL VOC's 20, or the names found in data.tags.table."""
    train_list: str = "train_aug"
    """Name of the list of training images (RECIPE: 10,582 images)."""
    val_list: str = "val"
    """Name of the list of images that are predicted and scored."""
    test_list: str | None = None
    """Name of a list of images without masks, or None."""
    tags_from: Literal["auto", "lists", "xml", "masks"] = "auto"
    """Where VOC's tags come from: <list>_cls.txt, the XML annotations, or, once, the masks; auto = lists, else XML."""
    saliency: str = "SaliencyMaps"
    """Folder of class-agnostic saliency maps <id>.png, inside the devkit or absolute; it may be absent."""
    masks: str = "SegmentationClassAug"
    """Folder of ground-truth masks <id>.png, inside the devkit or absolute; read by `evaluate` alone, or absent."""
    single: SingleConfig = SingleConfig()
    """Source `single`."""
    web: WebConfig = WebConfig()
    """Source `web`."""
    lid: LidConfig = LidConfig()
    """Source `lid`."""
    tags: TagsConfig = TagsConfig()
    """Source `tags`."""
    max_rejected: int | None = Field(default=None, ge=0)
    """How many unreadable images a run goes on without; more end it before any training. None = none of VOC's, which
    are curated, and any number of other sources'."""
    min_side: Positive = 32
    """Images with a shorter side are rejected, pixels."""


class WeightsConfig(Section):
    """Pretrained weights."""

    backbone: WeightsFile = "none"
    """The classifier's: `none` = from scratch; `download` = torchvision's ImageNet weights; else a state_dict file."""
    classifier: WeightsFile | None = None
    """A trained classifier, as `mcis import-weights` or an earlier run wrote it, which is not trained again."""
    segmenter: WeightsFile | None = None
    """The segmenter's, likewise; None = as `backbone`, for `none` and `download`, and for a file that fits both."""


class Optimizer(Section):
    """SGD or AdamW with learning rate groups and a schedule."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Update rule."""
    learning_rate: Rate = 0.001
    """Of pretrained weights, at the start (section 4.1)."""
    momentum: Share = 0.9
    """SGD's."""
    nesterov: bool = False
    """SGD's Nesterov momentum."""
    weight_decay: NonNegative = 5e-4
    """L2 (SGD) or decoupled (AdamW)."""
    new_layer_rate: Rate = 1.0
    """Factor of the learning rate for layers without pretrained weights (RECIPE: 10)."""
    bias_rate: Rate = 1.0
    """Further factor for biases (RECIPE: 2)."""
    schedule: Literal["step", "poly", "cosine"] = "step"
    """`step`: x `step_factor` at each of `step_epochs`; `poly`: (1 - t/T)^poly_power; `cosine`: to zero."""
    step_epochs: tuple[int, ...] = ()
    """Epochs, from 0, at whose start the rate falls."""
    step_factor: Rate = 0.1
    """Factor at each of `step_epochs`."""
    poly_power: Rate = 0.9
    """Exponent of the polynomial schedule."""
    warm_up: Share = 0.0
    """Share of the steps over which the rate rises linearly from 0."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Of the network's arithmetic in training; weights, losses and updates are float32. auto = bf16 on a GPU that has
    it, else float32."""


class ClassifierConfig(Section):
    """The co-attention classifier and its training (section 3.1)."""

    backbone: Literal["small", "vgg16", "resnet50", "resnet101", "vit_b_16"] = "vgg16"
    """Embedding of the images (section 4.1: VGG-16 + three 3x3 convolutions); vit_b_16 has stride 16."""
    channels: int = Field(default=96, gt=0, multiple_of=3)
    """Width C of the backbone `small`; the others have their own."""
    input_size: Positive = 256
    """Images are squashed to this square, pixels (RECIPE)."""
    attention: Literal["none", "co", "co+contrastive"] = "co+contrastive"
    """Loss terms: basic alone, with co-attention, with both (table 6)."""
    head: Literal["shared", "own"] = "shared"
    """Layer for co-attentive and contrastive features: phi (paper), or a second one without bias (released)."""
    affinity: Literal["bilinear", "cosine"] = "bilinear"
    """Form of P (Eq. 2); `cosine` uses features of unit length."""
    affinity_scale: Rate = 1.0
    """Factor of P before the softmax."""
    affinity_init: float | None = None
    """W_P at the start as a multiple of the identity; None = uniform in +-1/sqrt(C) (RECIPE)."""
    common_top: Share = 1.0
    """Share of positions over which co-attentive activations are pooled; 1 = GAP (Eq. 6)."""
    contrastive_from_epoch: int = Field(default=0, ge=0)
    """First epoch, from 0, in which the contrastive term counts (RECIPE: 2)."""
    contrastive_needs_unshared: bool = False
    """A side's contrastive term counts only if some label on that side of the batch is unshared (RECIPE)."""
    loss_reduction: Literal["paper", "released"] = "paper"
    """`paper`: both images' terms are added; `released`: means over the 2B images of basic and common terms."""
    self_pairs: tuple[Literal["flip", "x0.75", "x2"], ...] = ()
    """Transformations tau: every step also runs (m, tau m), basic and common-class terms (RECIPE)."""
    partner_may_be_itself: bool = False
    """Whether an image may be drawn as its own partner (RECIPE: yes). Without, only where its class has no other."""
    sizing: Literal["squash", "short_side", "random_crop"] = "squash"
    """How training images come to input_size: squash (RECIPE) loses the aspect ratio; short_side shows the middle
    square; random_crop a part, or all of it with padding. Localization always sees the whole image, squashed."""
    crop_scales: tuple[Rate, ...] = (1.0,)
    """Of random_crop: factors of the image's size, one drawn for each image."""
    kinds: Literal[1, 3] = 1
    """Number of W_P: 1, or one for each of target-target, source-source and target-source pairs (section 3.2)."""
    pair_mix: tuple[NonNegative, NonNegative, NonNegative] | None = None
    """Weights of target-target, source-source and target-source pairs; None = as the images' turns bring them."""
    epoch_pairs: int | None = Field(default=None, gt=0)
    """Pairs an epoch; None = as many as images with a tag."""
    class_balance: Share = 0.0
    """Share of the pairs in which a class is drawn first, all with the same chance, and then m out of its images."""
    random_pair_rate: Share = 0.0
    """Share of the pairs whose n is any other image, whatever its classes (section 3.2: every pair shares one). Two
    that share nothing teach the affinity where not to look: without them background attends to objects as well."""
    batch: Positive = 5
    """Pairs a step, over all workers (section 4.1)."""
    epochs: Positive = 15
    """Passes over the training images as m; the length of the schedule."""
    keep_epoch: int | None = Field(default=None, ge=0)
    """The weights after this epoch, from 0, are used, and training ends there (RECIPE: 10); None = the last."""
    color_jitter: tuple[NonNegative, NonNegative, NonNegative, Annotated[float, Field(ge=0, le=0.5)]] = (0, 0, 0, 0)
    """Strength of brightness, contrast, saturation and hue jitter (RECIPE: 0.3, 0.3, 0.3, 0.1)."""
    flip: bool = False
    """Mirror each image with probability 1/2."""
    shift: int = Field(default=0, ge=0)
    """Shift each image by up to so many pixels in both directions, edges repeated."""
    val_every: int = Field(default=1, ge=0, exclude=True)
    """Epochs from one mean average precision on the tagged val images to the next, and one at the end; 0 = none. It
    changes no weights, so a classifier that is there already is not trained again for it."""
    optimizer: Optimizer = Optimizer()
    """Update rule, rates and schedule."""


class LocalizeConfig(Section):
    """Localization maps (section 3.2)."""

    related: int = Field(default=3, ge=0, le=8)
    """Related images R a class; 0 = single round (section 3.2: 3)."""
    aggregation: Literal["paper", "released", "evidence"] = "paper"
    """`paper`: mean over the R co-attentive activations; `released`: mean with four self pairs' maps (RECIPE);
    `evidence`: the single-round activation plus shared evidence, without co-attention."""
    evidence: NonNegative = 0.0
    """Weight of shared evidence: how much better a position's texture is found again in the related images than in
    images without the class, times the activations' deviation, added to the map. 0 = none (the paper)."""
    bank: int = Field(default=32, gt=0, le=256)
    """Images, drawn at random, among which those without a class stand for all images without it (evidence)."""
    related_may_repeat: bool = False
    """Related images drawn with repetition, the image itself included (RECIPE: yes)."""
    related_from: Literal["target", "source", "both"] = "both"
    """Domain that related images are drawn from: the setting's own images, the single-label images, or either. A class
    without another image there takes from both."""
    contrastive: bool = False
    """Average in the contrastive activations against the related images of an image's other tags (section 4.5)."""
    extra_scales: tuple[Rate, ...] = ()
    """Further factors of the input size at which an image is embedded; its features are averaged over all."""
    mirror: bool = False
    """Average the features with those of the mirror image, mirrored back."""
    batch: Positive = 32
    """Images embedded at a time, at most `compute.shard_rows`."""
    features_gb: Rate = Field(default=64.0, exclude=True)  # left out of the stage's key, as it changes no result
    """Bound of the features kept at a time, GiB; where an index needs more, its classes are localized in rounds."""


class CrfConfig(Section):
    """Fully connected CRF (RECIPE, "Inference of the segmentation network")."""

    iterations: int = Field(default=1, ge=0)
    """Mean-field steps; 0 = no CRF."""
    position_std: Rate = 3.0
    """Deviation of the smoothness kernel, pixels."""
    position_weight: NonNegative = 1.0
    """Weight of the smoothness kernel."""
    bilateral_std: Rate = 80.0
    """Spatial deviation of the appearance kernel, pixels."""
    color_std: Rate = 4.0
    """Color deviation of the appearance kernel, RGB levels."""
    bilateral_weight: NonNegative = 3.0
    """Weight of the appearance kernel."""
    floor: Rate = 1e-4
    """Smallest probability before the logarithm."""


class MapsConfig(Section):
    """How localization maps are read for pseudo masks and their own scores; pictures show each by its maximum."""

    scale: Literal["maximum", "range", "logarithm"] = "maximum"
    """How activations become scores in [0, 1]. `maximum`: each map is clipped at 0 and divided by its maximum (RECIPE).
    `range`: each map is min-max normalized whole. `logarithm`: all maps share one scale, (1 + sign(a) log(1 + |a|) / 7)
    / 2 clipped to [0, 1], so that what a class layer is surer of wins over what is merely an image's strongest. The
    thresholds on scores in `pseudo_masks` are then ones on activations: 0.5 is 0, 0.55 is 1, 0.66 is 8, 0.95 is 544."""


class PseudoMasksConfig(Section):
    """Pseudo masks from localization maps and a background cue."""

    background: Literal["auto", "saliency", "crf"] = "auto"
    """Saliency maps, or thresholds refined by the dense CRF; `auto` = saliency where its folder exists."""
    saliency_level: int | None = Field(default=None, ge=1, le=255)
    """Saliency, of 255, that decides alone between background and foreground; None = background scores 1 - saliency."""
    floor: Share = 0.3
    """Scores below it count as 0 (RECIPE)."""
    conflict: Share = 0.99
    """A pixel where two or more scores exceed it is ignored (RECIPE)."""
    confident: Share = 0.95
    """Background is ignored where a map exceeds it (RECIPE)."""
    doubt: int = Field(default=32, ge=0, le=256)
    """Background is ignored where saliency is at least this, of 255 (RECIPE); 256 = never."""
    smallest: Share = 0.01
    """An image with less foreground is ignored whole (RECIPE)."""
    threshold: Share = 0.3
    """Cue `crf`: background score against which foreground must win. What suits depends on `maps.scale`: with
    `logarithm` 0.5 is activation 0 and 0.66 is 8; a surer classifier wants more, as the sweep of the scores says."""
    background_threshold: Share = 0.1
    """Cue `crf`: background score that is background for certain where it wins, at most `threshold`; what lies
    between the two is ignored. With `logarithm` 0.55 is activation 1."""
    crf: CrfConfig = CrfConfig(iterations=10)
    """Cue `crf`: the CRF that moves edges."""

    @model_validator(mode="after")
    def _ordered(self) -> "PseudoMasksConfig":
        if self.background_threshold > self.threshold:
            raise ValueError(f"background_threshold {self.background_threshold} is above threshold {self.threshold}")
        return self


class SegmenterConfig(Section):
    """The segmentation network and its training (RECIPE, "Segmentation network")."""

    network: Literal["largefov"] = "largefov"
    """Head on the backbone: DeepLab-LargeFOV."""
    backbone: Literal["small", "vgg16", "resnet50", "resnet101"] = "resnet101"
    """Features of the head."""
    channels: int = Field(default=96, gt=0, multiple_of=3)
    """Width of the backbone `small`."""
    stride: Literal[4, 8] = 8
    """Input pixels a feature position; 4 with the backbone `small` only."""
    init: Literal["pretrained", "classifier"] = "pretrained"
    """Start from `weights.backbone`, or from the trained classifier's backbone (same backbone and width)."""
    width: Positive = 1024
    """Channels of the head."""
    dilation: Positive = 12
    """Of the head's 3x3 convolution."""
    dropout: Share = 0.0
    """After the head's hidden layers (0.5 in the VGG-16 version)."""
    crop: Positive = 321
    """Side of a training crop, pixels."""
    scales: tuple[Rate, ...] = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
    """Factors of the image's size, one drawn for each training image."""
    mirror: bool = True
    """Mirror each training image with probability 1/2."""
    color_jitter: tuple[NonNegative, NonNegative, NonNegative, Annotated[float, Field(ge=0, le=0.5)]] = (0, 0, 0, 0)
    """Strength of brightness, contrast, saturation and hue jitter."""
    batch: Positive = 10
    """Images a step, over all workers."""
    steps: Positive = 16000
    """Updates."""
    optimizer: Optimizer = Optimizer(schedule="poly", new_layer_rate=10, bias_rate=2)
    """Update rule, rates and schedule."""

    @model_validator(mode="after")
    def _possible(self) -> "SegmenterConfig":
        if self.stride == 4 and self.backbone != "small":
            raise ValueError(f"stride 4 exists for the backbone small only, not for {self.backbone}")
        return self


class PredictConfig(Section):
    """Inference of the segmentation network."""

    scales: tuple[Rate, ...] = (0.5, 0.75, 1.0, 1.25, 1.5)
    """Factors of the image's size, probabilities averaged."""
    mirror: bool = True
    """Average with the mirror image."""
    split: Literal["auto", "train", "val", "test"] = "auto"
    """Images that are predicted; auto = val, or train where there is no val."""
    crop: int | None = Field(default=401, gt=0)
    """Side of sliding windows with two thirds' stride, pixels; None = the image whole."""
    crf: CrfConfig = CrfConfig()
    """Refinement of the probabilities; both plain and refined predictions are kept and scored."""


class EvaluateConfig(Section):
    """Scores."""

    thresholds: int = Field(default=128, ge=2, le=1024)
    """Background thresholds i / thresholds tried on the localization maps' scores (`maps.scale`), in one pass."""
    salient: int = Field(default=128, ge=1, le=255)
    """Saliency, of 255, from which a pixel is salient for the marks without a classifier."""


class ReportConfig(Section):
    """The report."""

    panels: int = Field(default=12, ge=0, le=200)
    """Images shown, half of train and half of val."""


class ComputeConfig(Section):
    """How the work is spread; nothing here changes a result, but for rounding."""

    workers: Positive = 1
    """Ray Train workers, each on one GPU where there are any."""
    min_workers: int | None = Field(default=None, gt=0)
    """With it a training is elastic: it starts, and goes on, with as many of the `workers` as the cluster has room for,
    and no fewer than this; it goes on from its last checkpoint when nodes are lost or join. None = always `workers`."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Samples that a training worker puts through the network at a time; gradients are added up over the batch. Less
    takes less memory. None = all of its share of a batch."""
    gpu: bool | None = None
    """Train on GPUs; None = if the cluster has them."""
    worker_cpus: Rate = 0.5
    """Logical CPUs a training worker reserves; the rest decodes."""
    threads: int | None = Field(default=None, gt=0)
    """Torch threads a training worker uses; None = its share of the node's cores."""
    decode: Literal["auto", "threads", "tasks"] = "auto"
    """Where training images are decoded: in threads of each worker, or in Ray Data tasks on any CPU of the cluster;
    auto = threads on one node, tasks on several."""
    decode_threads: int | None = Field(default=None, gt=0)
    """Decoding threads of a training worker; None = its share of the node's cores, half of it without a GPU."""
    cache_gb: NonNegative = 8.0
    """Bound of the workspace's cache of decoded images, GiB; what does not fit is decoded every epoch. 0 = no cache."""
    cpus: int | None = Field(default=None, gt=0)
    """Logical CPUs of a Ray started here; None = the machine's cores, at least 4."""
    object_store_gb: Rate = 1.0
    """Size of the object store of a Ray started here, GiB; it spills to disk."""
    shard_rows: Positive = 64
    """Images a shard of a stage's table: what is computed again after a kill is at most the shards in work."""
    checkpoint_steps: Positive = 500
    """Updates between training checkpoints."""
    max_failures: int = Field(default=2, ge=0)
    """How often a training restarts from its last checkpoint after a worker was lost."""

    @property
    def least_workers(self) -> int:
        """Training workers without which nothing starts."""
        return self.min_workers or self.workers

    @model_validator(mode="after")
    def _ordered(self) -> "ComputeConfig":
        if self.least_workers > self.workers:
            raise ValueError(f"min_workers {self.min_workers} is more than workers {self.workers}")
        return self


class Config(Section):
    """A run from tags to masks."""

    setting: str = "voc"
    """Which image sources are used, joined by +."""
    recipe: Literal["paper", "released", "small"] = "paper"
    """Which preset the values come from."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of every draw: initial weights, pairs, related images, augmentation."""
    data: DataConfig = DataConfig()
    """Images, tags, saliency maps."""
    weights: WeightsConfig = WeightsConfig()
    """Pretrained weights."""
    classifier: ClassifierConfig = ClassifierConfig()
    """Stage train_classifier."""
    localize: LocalizeConfig = LocalizeConfig()
    """Stage localize."""
    maps: MapsConfig = MapsConfig()
    """Stages pseudo_masks and evaluate."""
    pseudo_masks: PseudoMasksConfig = PseudoMasksConfig()
    """Stage pseudo_masks."""
    segmenter: SegmenterConfig = SegmenterConfig()
    """Stage train_segmenter."""
    predict: PredictConfig = PredictConfig()
    """Stage predict."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Stage evaluate."""
    report: ReportConfig = ReportConfig()
    """Stage report."""
    compute: ComputeConfig = ComputeConfig()
    """Workers, memory, threads; changes no result."""

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        c, data, problems = self.classifier, self.data, []
        named = {
            "voc": data.voc, "single": data.single.root, "web": data.web.root, "lid": data.lid.root,
            "tags": data.tags.table,
        }  # fmt: skip
        for source, place in named.items():
            if place is not None and source not in self.setting.split("+"):
                problems.append(
                    f"setting {self.setting} has no source {source}, but {place} is given for it; "
                    f"use setting {self.setting}+{source}, or leave it out"
                )
        if c.attention == "none" and self.localize.related > 0 and self.localize.aggregation != "evidence":
            problems.append(
                f"localize.related is {self.localize.related} but classifier.attention is none, which has no "
                "co-attention to relate images by; set localize.related=0, classifier.attention=co, or "
                "localize.aggregation=evidence, which needs none"
            )
        if self.localize.contrastive and c.attention != "co+contrastive":
            problems.append(
                f"localize.contrastive is set but classifier.attention is {c.attention}, which trains no contrastive "
                "co-attention; set localize.contrastive=false or classifier.attention=co+contrastive"
            )
        if self.localize.contrastive and self.localize.related == 0:
            problems.append(
                "localize.contrastive is set but localize.related is 0, so there is no image to contrast with; set "
                "localize.contrastive=false or localize.related=3"
            )
        local = self.localize
        if local.related and local.aggregation == "evidence" and (local.contrastive or not local.evidence):
            problems.append(
                "localize.aggregation is evidence, whose only use of related images is evidence; set localize.evidence "
                "above 0 and localize.contrastive=false, or localize.related=0"
            )
        if local.evidence and local.aggregation == "released":
            problems.append(
                "localize.evidence is set but localize.aggregation is released, whose maps are no activations to add "
                "it to; set localize.evidence=0 or another aggregation"
            )
        if self.maps.scale == "logarithm" and self.localize.aggregation == "released":
            problems.append(
                "maps.scale is logarithm but localize.aggregation is released, whose maps are no activations: each is "
                "normalized to [0, 1] already; set maps.scale=maximum or localize.aggregation=paper"
            )
        if c.keep_epoch is not None and c.keep_epoch >= c.epochs:
            problems.append(f"classifier.keep_epoch {c.keep_epoch} is not before classifier.epochs {c.epochs}")
        s = self.segmenter
        if s.init == "classifier" and (
            s.backbone != c.backbone or (s.backbone == "small" and s.channels != c.channels)
        ):
            problems.append(
                f"segmenter.init is classifier, but the segmenter's backbone {s.backbone} ({s.channels} channels) is "
                f"not the classifier's {c.backbone} ({c.channels} channels); make them equal or use init=pretrained"
            )
        for what, batch in (("classifier", c.batch), ("segmenter", s.batch)):
            if batch < self.compute.workers:
                problems.append(
                    f"{what}.batch is {batch} for compute.workers {self.compute.workers}; every worker needs a sample"
                )
        if problems:
            raise ValueError("; ".join(problems))
        return self

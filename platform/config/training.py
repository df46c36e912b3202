"""Configuration of the trained networks: classifier, affinity network, segmentation network, and their optimizers."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mcis.datasets.section import ColorJitter, Fraction, NonNegative, Positive, Rate, Section, with_records
from mcis.models.affinity import Affinity
from mcis.models.classifier_losses import LOSSES, LossConfig
from mcis.models.registry import SEGMENTERS, check_backbone
from mcis.platform.config.maps import PseudoMasksCrf

RateSchedule = Literal["step", "poly", "cosine"]
BackboneName = Annotated[str, AfterValidator(check_backbone)]
TrainableStages = Literal["all"] | Annotated[int, Field(ge=0)]


class Optimizer(Section):
    """SGD or AdamW with learning rate groups and a schedule."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimizer."""
    learning_rate: Rate = 0.001
    """Initial learning rate of pretrained weights (section 3.3)."""
    momentum: Fraction = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Whether SGD uses Nesterov momentum."""
    weight_decay: NonNegative = 5e-4
    """L2 penalty (SGD) or decoupled weight decay (AdamW)."""
    new_layer_rate: Rate = 1.0
    """Learning rate factor of newly initialized layers. The released code uses 10 (paper-vs-code, "Classifier")."""
    bias_rate: Rate = 1.0
    """Additional learning rate factor of biases. The released code uses 2 (paper-vs-code, "Classifier")."""
    schedule: RateSchedule = "step"
    """Learning rate schedule over T steps. `step`: multiply by 0.1 at each of `step_epochs`; `poly`: (1 - t/T)^0.9;
    `cosine`: decay to zero."""
    step_epochs: tuple[int, ...] = ()
    """Epochs, counted from 0, at whose start the rate of the schedule `step` drops."""
    warm_up: Fraction = 0.0
    """Fraction of the steps over which the learning rate rises linearly from 0."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Precision of forward and backward passes in training; weights, losses and optimizer steps are float32. `auto`:
    bf16 on GPUs that support it, else float32."""


class SegmenterOptimizer(Optimizer):
    """Optimizer of the segmentation network (paper-vs-code, "Segmentation network")."""

    new_layer_rate: Rate = 10.0
    """Learning rate factor of layers without pretrained weights."""
    bias_rate: Rate = 2.0
    """Additional learning rate factor of biases."""
    schedule: RateSchedule = "poly"
    """Learning rate schedule, see `classifier.optimizer.schedule`."""


class EquivariantConfig(LossConfig):
    """Self-supervised equivariant attention (SEAM, Wang et al., CVPR 2020), used in the LID challenge (section 4.4).

    If it is enabled, single-round maps come from its pixel correlation module and are scores in [0, 1], unless
    `localize.pixel_correlation` is false.
    """

    weight: NonNegative = 0.0
    """Weight of its two losses, which compare the maps of an image with those of a smaller copy; 0 = disabled."""
    scale: float = Field(default=0.3, gt=0, lt=1)
    """Size of the copy relative to the image."""
    hard: float = Field(default=0.2, gt=0, le=1)
    """Fraction of map values, those with the largest differences, over which the loss on refined maps is averaged."""


@with_records(LOSSES)
class LossesConfig(Section):
    """Losses of the classifier, by their names in `models/classifier_losses.py`."""

    def with_scaled_epochs(self, factor: int) -> "LossesConfig":
        """Returns a copy in which each loss starts after `factor` times as many epochs."""
        return self.model_copy(update={name: section.with_scaled_epochs(factor) for name, section in self})


class BackboneSection(Section):
    """Fields shared by all networks with a backbone."""

    channels: int = Field(default=96, gt=0, multiple_of=3)
    """Width of the backbone `small`; other backbones have fixed widths."""
    stride: int | None = Field(default=None, gt=0)
    """Input pixels per feature position. None: the backbone's default: 8; 16 for timm's convolutional networks; the
    patch size for transformers. Alternatives: 4 for `small`, 16 for resnet50 and resnet101, 8 to 32 for timm's
    convolutional networks."""
    color_jitter: ColorJitter = (0.0, 0.0, 0.0, 0.0)
    """Strength of brightness, contrast, saturation and hue jitter. The released code's classifier uses 0.3, 0.3, 0.3,
    0.1 (paper-vs-code, "Classifier")."""


class CropSection(BackboneSection):
    """Fields shared by networks that are trained on crops with a label per pixel."""

    crop: Positive = 321
    """Side length of a training crop in pixels."""
    batch: Positive = 10
    """Images per step, summed over all workers."""
    min_steps: Positive = 16000
    """Minimum number of optimizer steps; `max_epochs` lowers it for a small training set."""
    min_epochs: NonNegative = 0.0
    """Minimum number of passes over the training set; large data sets then take more than `min_steps` steps. Images
    that `segmenter.class_balance_exponent` repeats count once and do not prolong training."""
    max_epochs: float | None = Field(default=None, gt=0)
    """Maximum number of passes over the training set; it lowers `min_steps` for a small training set. None: no
    maximum."""
    hflip: bool = True
    """Flip each training image horizontally with probability 1/2."""
    optimizer: SegmenterOptimizer = SegmenterOptimizer()
    """Optimizer, learning rates and schedule."""

    def num_steps(self, images: int) -> int:
        """Number of optimizer steps for a training set of `images` images."""
        min_steps = self.min_steps
        if self.max_epochs is not None:
            min_steps = min(min_steps, math.ceil(self.max_epochs * images / self.batch))
        return max(min_steps, math.ceil(self.min_epochs * images / self.batch))


class ClassifierConfig(BackboneSection):
    """The co-attention classifier and its training (section 3.1)."""

    backbone: BackboneName = "vgg16"
    """Feature extractor: a name from `models/registry.py`, or timm/NAME for a convolutional network or vision
    transformer of timm. vgg16 is VGG-16 followed by three 3x3 convolutions (section 3.3)."""
    trainable_stages: TrainableStages = "all"
    """Trained part of the backbone: `all`, or its last N stages; 0 = frozen. Layers on top are always trained."""
    standardize: bool = False
    """Standardize the backbone's output channels by their mean and standard deviation over training images. Both are
    computed before training and stored with the weights. Pretrained channels differ by orders of magnitude, so without
    this the largest dominate the affinity."""
    input_size: Positive = 256
    """Side length in pixels of the square to which images are resized (paper-vs-code, "Classifier")."""
    attention: Literal["none", "co", "co+contrastive"] = "co+contrastive"
    """Training losses (table 4). `none`: the basic loss; `co`: the basic and the co-attention loss; `co+contrastive`:
    these and the contrastive loss."""
    attention_partner: Literal["partner", "itself", "wrong_class"] = "partner"
    """What an image attends to in training: its partner; or, as controls, itself or a partner that lacks the class."""
    head: Literal["shared", "own"] = "shared"
    """Layer that scores co-attentive and contrastive features: `shared` = phi, the class layer (paper); `own` = a
    separate layer without bias (paper-vs-code, "Classifier")."""
    phi_std: Rate | None = None
    """Standard deviation of phi's initial weights; None: sqrt(2 / K) for K classes (paper-vs-code, "Classifier").
    Short trainings of phi alone on a frozen backbone need a smaller value."""
    affinity: Affinity = Affinity()
    """How positions of two images are compared (Eq. 2), in training and for maps with related images."""
    attention_epochs: int | None = Field(default=None, gt=0)
    """Number of final epochs with the co-attention and contrastive losses; the epochs before use the basic loss alone.
    None: all epochs."""
    equivariant: EquivariantConfig = Field(
        default=EquivariantConfig(), exclude_if=lambda equivariant: not equivariant.weight
    )  # excluded from the stage key while disabled, because its values then change no result
    """Equivariant attention, in addition to co-attention."""
    losses: LossesConfig = LossesConfig()
    """Weights of the losses."""
    self_pairs: tuple[Literal["hflip", "x0.75", "x2"], ...] = ()
    """Transformations tau; for each, a step also trains on the pair (m, tau m) with the basic and co-attention losses
    (paper-vs-code, "Classifier")."""
    partner_may_be_itself: bool = False
    """Allow an image as its own partner, as in the released code (paper-vs-code, "Classifier"). Otherwise this
    happens only if no other image has its class."""
    sizing: Literal["squash", "random_crop"] = "squash"
    """How training images are brought to input_size. `squash`: resize without keeping the aspect ratio
    (paper-vs-code, "Classifier"); `random_crop`: scale by a factor of `crop_scales`, then crop or pad. Localization
    always uses the whole image, squashed."""
    crop_scales: tuple[Rate, ...] = (1.0,)
    """Scale factors for `random_crop`; one is drawn per image."""
    num_domain_affinities: Literal[1, 3] = 1
    """Number of matrices W_P: 1, or 3 for target-target, source-source and target-source pairs (section 3.2)."""
    epoch_pairs: int | None = Field(default=None, gt=0)
    """Pairs per epoch; None: the number of tagged training images and negatives."""
    class_balanced_fraction: Fraction = 0.0
    """Fraction of pairs whose image m is drawn by class: first a class, uniformly, then one of its images."""
    target_share: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the images of pairs that are of the data set, in runs with single-label or web images, which may be
    many times as many. None: pairs are drawn from all images alike. It does not change the number of pairs per epoch
    (`classifier.epoch_pairs`)."""
    batch: Positive = 5
    """Pairs per step, summed over all workers (section 3.3)."""
    epochs: Positive = 15
    """Passes over the training images as image m; also the length of the learning rate schedule."""
    min_steps: int = Field(default=0, ge=0)
    """Minimum number of optimizer steps. For small data sets, all settings that count epochs are scaled up to reach
    it."""
    max_steps: int | None = Field(default=None, gt=0)
    """Maximum number of optimizer steps of the schedule. For large data sets, `epoch_pairs` is lowered to keep it, so
    that an epoch uses a part of the images. None: no maximum."""
    stop_epoch: int | None = Field(default=None, ge=0)
    """Last trained epoch, counted from 0, if training stops before the schedule ends; None: train all epochs. The
    released code uses 10 (paper-vs-code, "Classifier")."""
    hflip: bool = False
    """Flip each training image horizontally with probability 1/2."""
    shift: int = Field(default=0, ge=0)
    """Shift each training image by up to this many pixels in both directions; edge pixels are repeated."""
    val_every: int = Field(default=1, ge=0, exclude=True)
    """Epochs between two measurements of mean average precision on val images; one more follows training. 0 = never.
    It does not change the weights, so changing it does not retrain the classifier, except to or from 0."""
    optimizer: Optimizer = Optimizer()
    """Optimizer, learning rates and schedule."""

    def scaled_for(self, images: int) -> "ClassifierConfig":
        """A copy for a training set of `images` images: more epochs for `min_steps`, shorter ones for `max_steps`."""
        pairs = self.epoch_pairs or images
        if self.max_steps is not None:
            max_pairs = max(1, self.max_steps * self.batch // self.epochs)
            if pairs > max_pairs:
                return self.model_copy(update={"epoch_pairs": max_pairs})

        factor = math.ceil(self.min_steps * self.batch / (self.epochs * pairs))
        if factor <= 1:
            return self

        changes: dict[str, Any] = {}
        if self.max_steps is not None and self.epochs * factor * pairs > self.max_steps * self.batch:
            changes["epoch_pairs"] = max(1, self.max_steps * self.batch // (self.epochs * factor))
        for name in ("epochs", "attention_epochs", "val_every"):
            value = getattr(self, name)
            if value:
                changes[name] = value * factor
        if self.stop_epoch is not None:
            changes["stop_epoch"] = (self.stop_epoch + 1) * factor - 1

        changes["losses"] = self.losses.with_scaled_epochs(factor)
        changes["equivariant"] = self.equivariant.with_scaled_epochs(factor)
        step_epochs = tuple(epoch * factor for epoch in self.optimizer.step_epochs)
        changes["optimizer"] = self.optimizer.model_copy(update={"step_epochs": step_epochs})
        return self.model_copy(update=changes)

    @property
    def loss_values(self) -> dict[str, LossConfig]:
        """The section with the weight of each loss, by the loss's name."""
        values = {}
        for name, loss in LOSSES.items():
            values[name] = getattr(self, loss.section) if loss.section else getattr(self.losses, name)
        return values

    @property
    def trained_epochs(self) -> int:
        """Number of epochs that are trained, which may be fewer than the schedule has."""
        return self.epochs if self.stop_epoch is None else self.stop_epoch + 1

    @property
    def attention_start_epoch(self) -> int:
        """First epoch, counted from 0, in which pairs attend to each other; `trained_epochs` if they never do."""
        if self.attention == "none":
            return self.trained_epochs
        if self.attention_epochs is None:
            return 0
        return max(0, self.trained_epochs - self.attention_epochs)

    @property
    def trains_on_features(self) -> bool:
        """Whether training reads cached backbone features instead of images."""
        changes_images = self.self_pairs or any(self.color_jitter) or self.shift or self.sizing != "squash"
        return self.trainable_stages == 0 and not changes_images and not self.equivariant.weight

    def problems(self) -> Iterator[str]:
        """Contradictions between the classifier's values."""
        if self.affinity.init is not None and self.affinity.w_p == "identity":
            yield (
                "classifier.affinity.init is set but classifier.affinity.w_p is identity; set "
                "classifier.affinity.w_p=learned or classifier.affinity.init=null"
            )
        if self.max_steps is not None and self.max_steps < self.min_steps:
            yield (
                f"classifier.max_steps {self.max_steps} is less than classifier.min_steps {self.min_steps}; set "
                f"classifier.max_steps={self.min_steps} or higher, or lower classifier.min_steps"
            )
        if self.stop_epoch is not None and self.stop_epoch >= self.epochs:
            yield (
                f"classifier.stop_epoch {self.stop_epoch} is not before classifier.epochs {self.epochs}; set "
                f"classifier.stop_epoch={self.epochs - 1} or lower, or null to train all epochs"
            )
        if self.attention_partner != "partner" and self.attention == "none":
            yield (
                f"classifier.attention_partner is {self.attention_partner} but classifier.attention is none, which "
                "uses no attention; set classifier.attention=co or classifier.attention_partner=partner"
            )


class SegmenterConfig(CropSection):
    """The segmentation network and its training (paper-vs-code, "Segmentation network")."""

    network: Annotated[str, AfterValidator(SEGMENTERS.choice())] = "largefov"
    """Network on the backbone: `largefov` = DeepLab-LargeFOV; `deeplabv3` = torchvision's DeepLab-V3 with group norm;
    `pyramid` = a light decoder over several levels, for small backbones with a coarse stride."""
    backbone: BackboneName = "resnet101"
    """Feature extractor, see `classifier.backbone`; vgg16_largefov is the VGG-16 of DeepLab-LargeFOV."""
    trainable_stages: TrainableStages = "all"
    """Trained part of the backbone: `all`, or its last N stages; 0 = frozen. Layers on top are always trained."""
    init: Literal["pretrained", "classifier"] = "pretrained"
    """Initial weights of the backbone: `weights.segmenter_backbone`, or those of the trained classifier, which then
    needs the same backbone and width. An EfficientNet's classifier lacks layers that the network `pyramid` uses."""
    width: Positive = 1024
    """Channels of the head."""
    dilation: Positive = 12
    """Dilation of the head's 3x3 convolutions. 12 suits a stride of 8. The three convolutions of deeplabv3 use one, two
    and three times this value."""
    dropout: Fraction = 0.0
    """Dropout probability. largefov: after the hidden layers (0.5 in the VGG-16 version); deeplabv3: after the spatial
    pyramid (0.5 in torchvision); pyramid: before the last layer."""
    scales: tuple[Rate, ...] = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
    """Scale factors of training images; one is drawn per image."""
    image_loss_weight: NonNegative = 0.0
    """Weight of the loss of pyramid's image-level head, which predicts the classes in a crop. With weight 1 and six
    classes, the head counts as much as all pixels of the crop."""
    corrected_weight: Positive = 4
    """Repeat factor of images with a corrected mask (`data.corrected_masks`): an epoch shows each of them this many
    times as often as it would without that mask."""
    class_balance_exponent: Fraction = 0.0
    """Repeat images of rare classes (m / c)^class_balance_exponent times per epoch, where c images have the image's
    rarest class and m images have the most frequent class. The limit is 16 times, or lower if the training would
    otherwise be too short to show each image. 0 = no repetition."""


class AffinityNetConfig(CropSection):
    """Affinities between neighboring positions, learned from the confident labels of localization maps.

    Used if `pseudo_masks.rule` is affinity, or another rule with a random walk, and `supervision` is tags.
    """

    kind: Literal["boundaries", "features"] = "features"
    """How two positions are compared: `features` = distance of learned features (AffinityNet); `boundaries` = strength
    of the predicted boundary between them (IRN)."""
    backbone: BackboneName = "resnet50"
    """Feature extractor, see `classifier.backbone`; the network reads several of its levels."""
    trainable_stages: TrainableStages = 0
    """Trained part of the backbone: `all`, or its last N stages; 0 = frozen, as in IRN. Layers on top are always
    trained."""
    width: int = Field(default=32, gt=0, multiple_of=4)
    """Channels to which each level is reduced."""
    embedding: Positive = 64
    """Channels of the compared features (kind=features)."""
    finest: Literal[4, 8] = 4
    """Stride in pixels of the finest level that is read; affinities are defined at its positions (AffinityNet: 8)."""
    radius: int = Field(default=5, ge=2, le=16)
    """Pairs of positions at a distance below this are compared, in positions of the finest level (AffinityNet, IRN:
    5)."""
    threshold: Fraction = 0.3
    """Background score that a class has to exceed for a confident foreground label, before the dense CRF."""
    background_threshold: Fraction = 0.1
    """Background score with which background has to win for a confident background label; pixels in between are not
    trained on."""
    crf: PseudoMasksCrf = PseudoMasksCrf()
    """Dense CRF that refines the confident labels."""
    scales: tuple[Rate, ...] = (0.7, 0.85, 1.0, 1.15, 1.3)
    """Scale factors of training images; one is drawn per image."""
    batch: Positive = 16
    """Images per step, summed over all workers."""
    min_steps: Positive = 2000
    """Minimum number of optimizer steps."""

    def problems(self) -> Iterator[str]:
        """The threshold for confident background must not exceed the one for foreground."""
        if self.background_threshold > self.threshold:
            yield (
                f"affinity_net.background_threshold {self.background_threshold} is above threshold {self.threshold}; "
                f"set affinity_net.background_threshold={self.threshold} or lower, or a higher affinity_net.threshold"
            )


NetworkConfig = ClassifierConfig | SegmenterConfig | AffinityNetConfig
"""Sections of networks with a backbone."""
NETWORKS: dict[type[NetworkConfig], Literal["classifier", "segmenter", "affinity_net"]] = {
    ClassifierConfig: "classifier",
    SegmenterConfig: "segmenter",
    AffinityNetConfig: "affinity_net",
}
"""Section -> its name in the configuration."""

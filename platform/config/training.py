"""Sections of the trainings: co-attention classifier, affinity network, segmentation network, and their optimizers."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mcis.datasets.section import ColorJitter, Fraction, NonNegative, Positive, Rate, Section
from mcis.models.networks import SEGMENTERS, Affinity, check_backbone
from mcis.platform.config.maps import PseudoMasksCrf

Schedule = Literal["step", "poly", "cosine"]
TrainableStages = Literal["all"] | Annotated[int, Field(ge=0)]
"""Stages of the backbone that are trained, counted from its end; 0 = only the layers on top of the backbone."""
BackboneName = Annotated[str, AfterValidator(check_backbone)]


class Optimizer(Section):
    """SGD or AdamW with learning rate groups and a schedule."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Update rule."""
    learning_rate: Rate = 0.001
    """Learning rate of pretrained weights at the start (section 3.3)."""
    momentum: Fraction = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Whether SGD uses Nesterov momentum."""
    weight_decay: NonNegative = 5e-4
    """L2 penalty (SGD) or decoupled weight decay (AdamW)."""
    new_layer_rate: Rate = 1.0
    """Factor of the learning rate for new layers; the released code has 10 (RELEASED_RECIPE, "Classifier")."""
    bias_rate: Rate = 1.0
    """Further factor for biases; the released code has 2 (RELEASED_RECIPE, "Classifier")."""
    schedule: Schedule = "step"
    """`step`: x 0.1 at each of `step_epochs`; `poly`: (1 - t/T)^0.9; `cosine`: to zero."""
    step_epochs: tuple[int, ...] = ()
    """Epochs, from 0, at whose start the rate falls."""
    warm_up: Fraction = 0.0
    """Fraction of the steps over which the rate rises linearly from 0."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Precision of the network's arithmetic in training; weights, losses and updates are float32. auto = bf16 on a GPU
    that has it, else float32."""


class SegmenterOptimizer(Optimizer):
    """The segmenter's optimizer: another schedule, and faster new layers (RELEASED_RECIPE, "Segmentation network")."""

    new_layer_rate: Rate = 10.0
    """Factor of the learning rate for layers without pretrained weights."""
    bias_rate: Rate = 2.0
    """Further factor for biases."""
    schedule: Schedule = "poly"
    """`step`, `poly` or `cosine`, as of `classifier.optimizer`."""


class EquivariantConfig(Section):
    """Equivariant attention in the classifier's training (SEAM, Wang et al., CVPR 2020), as for the challenge LID
    (section 4.4). Single-round maps are then those that its pixel correlation makes, scores in [0, 1]."""

    weight: NonNegative = 0.0
    """Factor of its two loss terms, which compare an image's maps with those of a smaller copy; 0 = it is left out."""
    scale: float = Field(default=0.3, gt=0, lt=1)
    """Sides of the copy, of the image's."""
    hard: float = Field(default=0.2, gt=0, le=1)
    """Share of the maps' values, those that differ most, that the term on refined maps is the mean of."""


class BackboneSection(Section):
    """What all networks on a backbone share."""

    channels: int = Field(default=96, gt=0, multiple_of=3)
    """Width of the backbone `small`; the others have their own."""
    stride: int | None = Field(default=None, gt=0)
    """Input pixels per feature position; None = the backbone's own: 8, of timm's convolutional networks 16, of a
    transformer its patches' side. `small` can have 4, resnet50 and resnet101 16, timm's convolutional ones 8 to 32."""
    color_jitter: ColorJitter = (0.0, 0.0, 0.0, 0.0)
    """Strength of brightness, contrast, saturation and hue jitter; the released code's classifier has 0.3, 0.3, 0.3,
    0.1 (RELEASED_RECIPE, "Classifier")."""


class CropSection(BackboneSection):
    """What networks share that learn from crops of images with a label mask each."""

    crop: Positive = 321
    """Side of a training crop, pixels."""
    batch: Positive = 10
    """Images per step, over all workers."""
    min_steps: Positive = 16000
    """Updates at least."""
    min_epochs: float = Field(default=0.0, ge=0, exclude_if=lambda min_epochs: not min_epochs)
    """Minimum number of passes over the training set; large data sets then take more than `min_steps` steps. Images
    that `segmenter.class_balance_exponent` repeats count once and do not prolong training."""
    hflip: bool = True
    """Mirror each training image with probability 1/2."""
    optimizer: SegmenterOptimizer = SegmenterOptimizer()
    """Update rule, rates and schedule."""

    def updates(self, images: int) -> int:
        """The updates of a training on so many images."""
        return max(self.min_steps, math.ceil(self.min_epochs * images / self.batch))


class ClassifierConfig(BackboneSection):
    """The co-attention classifier and its training (section 3.1)."""

    backbone: BackboneName = "vgg16"
    """Embedding of the images (section 3.3: VGG-16 + three 3x3 convolutions): a name of `models/networks.py`, or
    timm/NAME, a convolutional network or vision transformer by timm's name."""
    trainable_stages: TrainableStages = "all"
    """What is trained: all; `neck` = the layers behind the backbone alone; N = the backbone's last N stages, too."""
    standardize: bool = False
    """Standardize the backbone's channels, by their mean and deviation over training images before training, which are
    kept with the weights. Pretrained channels differ by orders of magnitude; attention would look at the largest."""
    input_size: Positive = 256
    """Images are squashed to this square, pixels (RELEASED_RECIPE, "Classifier")."""
    attention: Literal["none", "co", "co+contrastive"] = "co+contrastive"
    """Loss terms: basic alone, with co-attention, with both (table 4)."""
    attention_partner: Literal["partner", "itself", "wrong_class"] = "partner"
    """What the images of a pair attend to in training: their partners; or, as controls of what these bring, each to
    itself, or to partners that lack the class."""
    head: Literal["shared", "own"] = "shared"
    """Layer of co-attentive, contrastive features: phi (paper), or one without bias (RELEASED_RECIPE, "Classifier")."""
    phi_std: Rate | None = None
    """Standard deviation of phi's weights at the start; None = sqrt(2 / K) (RELEASED_RECIPE, "Classifier"), which a
    short training of a linear layer on pretrained features does not get rid of."""
    affinity: Affinity = Affinity()
    """How positions of two images are compared (Eq. 2), in training and in maps with related images."""
    attention_epochs: int | None = Field(default=None, gt=0)
    """The last epochs, in which pairs attend to each other; before, the basic term alone makes phi a class layer that
    the common and contrastive terms can work on. None = all epochs."""
    equivariant: EquivariantConfig = Field(
        default=EquivariantConfig(), exclude_if=lambda equivariant: not equivariant.weight
    )  # where it is left out, its values change no result and are no part of a stage's key
    """Equivariant attention, beside co-attention."""
    contrastive_weight: Rate = 1.0
    """Factor of the contrastive term in the loss, which in the paper is the plain sum of its terms (Eq. 10). Beside the
    basic term the gradient of the contrastive one is small."""
    contrastive_from_epoch: int = Field(default=0, ge=0)
    """First epoch, from 0, with the contrastive term; the released code has 2 (RELEASED_RECIPE, "Classifier")."""
    contrastive_needs_unshared: bool = False
    """Whether a side's contrastive term counts only if some label on that side of the batch is unshared, as in the
    released code (RELEASED_RECIPE, "Classifier")."""
    loss_reduction: Literal["paper", "released"] = "paper"
    """`paper`: both images' terms are added; `released`: means over the 2B images of basic and common terms
    (RELEASED_RECIPE, "Classifier")."""
    self_pairs: tuple[Literal["hflip", "x0.75", "x2"], ...] = ()
    """Transformations tau: a step also runs (m, tau m), basic and common terms (RELEASED_RECIPE, "Classifier")."""
    partner_may_be_itself: bool = False
    """Whether an image may be drawn as its own partner, as in the released code (RELEASED_RECIPE, "Classifier").
    Otherwise this happens only where its class has no other image."""
    sizing: Literal["squash", "random_crop"] = "squash"
    """How training images come to input_size: squash (RELEASED_RECIPE, "Classifier") loses the aspect ratio;
    random_crop shows a part, or all of it with padding. Localization always sees the whole image, squashed."""
    crop_scales: tuple[Rate, ...] = (1.0,)
    """Factors of the image's size for random_crop, one drawn for each image."""
    num_domain_affinities: Literal[1, 3] = 1
    """Number of W_P: 1, or one for each of target-target, source-source and target-source pairs (section 3.2)."""
    epoch_pairs: int | None = Field(default=None, gt=0)
    """Pairs per epoch; None = as many as images with a tag."""
    class_balanced_fraction: Fraction = 0.0
    """Fraction of the pairs in which a class is drawn first, all with the same chance, and then m out of its images."""
    batch: Positive = 5
    """Pairs per step, over all workers (section 3.3)."""
    epochs: Positive = 15
    """Passes over the training images as m; the length of the schedule."""
    min_steps: int = Field(default=0, ge=0, exclude_if=lambda min_steps: not min_steps)
    """Updates at least: of few images the training has as many times the `epochs` as these take, and so has all that is
    counted in epochs."""
    stop_epoch: int | None = Field(default=None, ge=0)
    """The weights after this epoch, from 0, are used, and training ends there; None = the last. The released code has
    10 (RELEASED_RECIPE, "Classifier")."""
    hflip: bool = False
    """Mirror each image with probability 1/2."""
    shift: int = Field(default=0, ge=0)
    """Shift each image by up to so many pixels in both directions, edges repeated."""
    val_every: int = Field(default=1, ge=0, exclude=True)
    """Epochs from one mean average precision on the tagged val images to the next, and one at the end; 0 = none. It
    changes no weights, so that a trained classifier is not trained again for it, but from or to 0."""
    optimizer: Optimizer = Optimizer()
    """Update rule, rates and schedule."""

    def of_images(self, images: int) -> "ClassifierConfig":
        """With epochs enough for the `min_steps`, of so many training images."""
        times = math.ceil(self.min_steps * self.batch / (self.epochs * (self.epoch_pairs or images)))
        if times <= 1:
            return self
        counted = ("epochs", "attention_epochs", "contrastive_from_epoch", "val_every")
        more: dict[str, Any] = {name: value * times for name in counted if (value := getattr(self, name))}
        if self.stop_epoch is not None:
            more["stop_epoch"] = (self.stop_epoch + 1) * times - 1
        step_epochs = tuple(epoch * times for epoch in self.optimizer.step_epochs)
        optimizer = self.optimizer.model_copy(update={"step_epochs": step_epochs})
        return self.model_copy(update={**more, "optimizer": optimizer})

    @property
    def trained_epochs(self) -> int:
        """Epochs until training ends, which may be before the schedule does."""
        return self.epochs if self.stop_epoch is None else self.stop_epoch + 1

    @property
    def attention_begins(self) -> int:
        """The first epoch, from 0, in which pairs attend to each other."""
        if self.attention == "none":
            return self.trained_epochs
        return 0 if self.attention_epochs is None else max(0, self.trained_epochs - self.attention_epochs)

    @property
    def from_features(self) -> bool:
        """Whether training reads what the backbone makes of images, computed once, rather than the images."""
        changed = self.self_pairs or any(self.color_jitter) or self.shift or self.sizing != "squash"
        return self.trainable_stages == 0 and not changed and not self.equivariant.weight

    def problems(self) -> Iterator[str]:
        """A kept epoch that training never reaches, and contradictions of the affinity."""
        if self.affinity.init is not None and self.affinity.w_p == "identity":
            yield (
                "classifier.affinity.init is set but classifier.affinity.w_p is identity; set w_p=learned or init=null"
            )
        if self.stop_epoch is not None and self.stop_epoch >= self.epochs:
            yield f"classifier.stop_epoch {self.stop_epoch} is not before classifier.epochs {self.epochs}"
        if self.attention_partner != "partner" and self.attention == "none":
            yield (
                f"classifier.attention_partner is {self.attention_partner} but classifier.attention is none, "
                "which uses no attention"
            )


class SegmenterConfig(CropSection):
    """The segmentation network and its training (RELEASED_RECIPE, "Segmentation network")."""

    network: Annotated[str, AfterValidator(SEGMENTERS.choice())] = "largefov"
    """Head on the backbone: DeepLab-LargeFOV; DeepLab-V3, as torchvision has it, with group norm; or `pyramid`, a light
    decoder that goes down a pyramid of the backbone's levels, for small backbones of a coarse stride."""
    backbone: BackboneName = "resnet101"
    """Features that the head reads, named as the classifier's; vgg16_largefov is DeepLab-LargeFOV's VGG-16."""
    trainable_stages: TrainableStages = "all"
    """What is trained: all; `head` = the layers behind the backbone alone; N = the backbone's last N stages, too."""
    init: Literal["pretrained", "classifier"] = "pretrained"
    """Start from `weights.classifier_backbone`, or from the trained classifier's backbone (same backbone and width)."""
    width: Positive = 1024
    """Channels of the head."""
    dilation: Positive = 12
    """Dilation of the head's 3x3 convolutions; 12 fits positions of stride 8. deeplabv3 has three, with once, twice and
    three times as much."""
    dropout: Fraction = 0.0
    """Dropout after the hidden layers of largefov (0.5 in the VGG-16 version), behind the pyramid of deeplabv3 (0.5 in
    torchvision), before the last layer of pyramid."""
    scales: tuple[Rate, ...] = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
    """Factors of the image's size, one drawn for each training image."""
    image_loss_weight: NonNegative = 0.0
    """Factor of the loss of the image-level head of pyramid, which says which classes a crop holds: of an image, six
    classes count as so many labeled pixels as a crop has, times this."""
    corrected_weight: Positive = 4
    """How often an epoch shows an image with a corrected mask (`data.corrected_masks`) for once of another alike."""
    class_balance_exponent: Fraction = 0.0
    """How often an epoch shows images of rare classes: each (m / c)^class_balance_exponent times, for c images of its
    rarest class and m of the most frequent one, at most 16, and so that each image is shown. 0 = all once."""


class AffinityNetConfig(CropSection):
    """Affinities between neighboring positions, learnt from the confident labels of localization maps, for
    `pseudo_masks.rule=affinity`."""

    kind: Literal["boundaries", "features"] = "features"
    """What tells two positions apart: the distance of `features` (AffinityNet), or `boundaries` between them (IRN)."""
    backbone: BackboneName = "resnet50"
    """Its levels and features are read; named as the classifier's."""
    trainable_stages: TrainableStages = 0
    """What is trained: all; `head` = the layers on the backbone alone, as in IRN; N = its last N stages, too."""
    width: int = Field(default=32, gt=0, multiple_of=4)
    """Channels that each level is reduced to."""
    embedding: Positive = 64
    """Channels of the features that are compared (kind=features)."""
    finest: Literal[4, 8] = 4
    """Stride of the backbone's finest level that is read, pixels; affinities lie at its positions (AffinityNet: 8)."""
    radius: int = Field(default=5, ge=2, le=16)
    """Positions that are closer than so many steps are compared (AffinityNet, IRN: 5)."""
    threshold: Fraction = 0.3
    """Of the confident labels: background score against which foreground must win, before the dense CRF."""
    background_threshold: Fraction = 0.1
    """Of the confident labels: background score that background has to win with; pixels between both teach nothing."""
    crf: PseudoMasksCrf = PseudoMasksCrf()
    """The CRF that moves the edges of confident labels."""
    scales: tuple[Rate, ...] = (0.7, 0.85, 1.0, 1.15, 1.3)
    """Factors of the image's size, one drawn for each training image."""
    batch: Positive = 16
    """Images per step, over all workers."""
    min_steps: Positive = 2000
    """Updates at least."""

    def problems(self) -> Iterator[str]:
        """A threshold for certain background above the one for background."""
        if self.background_threshold > self.threshold:
            yield f"affinity_net.background_threshold {self.background_threshold} is above threshold {self.threshold}"


NetworkConfig = ClassifierConfig | SegmenterConfig | AffinityNetConfig
"""The sections of networks on a backbone."""
NETWORKS: dict[type[NetworkConfig], Literal["classifier", "segmenter", "affinity_net"]] = {
    ClassifierConfig: "classifier",
    SegmenterConfig: "segmenter",
    AffinityNetConfig: "affinity_net",
}
"""Their names in the configuration."""

"""Losses of the classifier: one registered function each, weighted and added up (Eq. 10).

Workers see parts of a batch. Each loss is a sum over the pairs of such a part; the trainer divides the sum over all
workers by the number of pairs in the batch. Gradients therefore do not depend on how pairs are spread over workers.

A *negative* is an image that shows none of the classes: its labels are all 0. With the paper's three terms (Eq. 10),
the loss of a pair is

    L = L_basic + [l_m != 0 and l_n != 0] L_co-attention + L_contrastive

The bracket is 0 for a pair with a negative, which has no common class that Eq. 5 could find. In Eq. 1 and 9 the labels
of the negative are 0; if n is a negative, then l_m \\ l_n = l_m.

The configuration reads the table of losses, so torch is imported only when a loss is computed.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

from pydantic import Field

from mcis.datasets.errors import UserError
from mcis.datasets.registry import Registry
from mcis.datasets.section import NonNegative, Rate, Section

if TYPE_CHECKING:
    from torch import Tensor

    from mcis.models.seam import EquivariantMaps


class PairScores(NamedTuple):
    """Class scores (B, K) of B pairs of images before the sigmoid; None for scores that are not computed.

    Attributes:
        basic_m, basic_n: s_m and s_n, from an image's own features.
        co_attention_m, co_attention_n: s_m^{m∩n} and s_n^{m∩n}, from co-attentive features.
        contrastive_m, contrastive_n: s_m^{m\\n} and s_n^{n\\m}, from contrastive co-attentive features.
    """

    basic_m: "Tensor"
    basic_n: "Tensor"
    co_attention_m: "Tensor | None" = None
    co_attention_n: "Tensor | None" = None
    contrastive_m: "Tensor | None" = None
    contrastive_n: "Tensor | None" = None


class LossInputs(NamedTuple):
    """Inputs of a loss: B pairs of images, which are a batch or the part of it that one worker processes.

    Attributes:
        scores: Class scores of the pairs, float32.
        tags_m, tags_n: l_m and l_n, (B, K) of 0 and 1, float32.
        features_m, features_n: F_m and F_n, (B, C, H, W), in the precision of the network.
        unshared_m: Whether any image m of the whole batch, over all workers, has a tag that its partner lacks.
        unshared_n: The same for images n.
        copies: Basic scores of smaller copies of the images; None without equivariant attention and for self pairs.
        maps: Localization maps of images and copies, float32; None without equivariant attention and for self pairs.
    """

    scores: PairScores
    tags_m: "Tensor"
    tags_n: "Tensor"
    features_m: "Tensor"
    features_n: "Tensor"
    unshared_m: bool = True
    unshared_n: bool = True
    copies: PairScores | None = None
    maps: "EquivariantMaps | None" = None


class LossConfig(Section):
    """A loss of the classifier that is disabled by default."""

    weight: NonNegative = 0.0
    """Weight in the sum of the losses; 0 = disabled."""
    from_epoch: int = Field(default=0, ge=0)
    """First epoch, counted from 0, with this loss."""

    def with_scaled_epochs(self, factor: int) -> Self:
        """Returns a copy that starts after `factor` times as many epochs."""
        return self.model_copy(update={"from_epoch": self.from_epoch * factor})


class PaperLossConfig(LossConfig):
    """A loss of the paper. `classifier.attention` selects which of them are computed."""

    weight: Rate = 1.0
    """Weight in the sum of the losses. The paper uses 1 for each (Eq. 10); 0.5 averages over both images of a pair."""


class ContrastiveLossConfig(PaperLossConfig):
    """The contrastive loss (Eq. 9)."""

    needs_unshared: bool = False
    """Count the loss of images m, or n, only if one of them in the batch has a tag that its partner lacks, as in the
    released code (paper-vs-code, "Classifier")."""


LossFunction = Callable[..., "Tensor | None"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierLoss:
    """A loss of the classifier, an entry of `LOSSES`.

    Attributes:
        compute: Function from `LossInputs` to a scalar, the sum (not the mean) over the pairs, or to None if the inputs
            lack what the loss needs. Its keyword-only parameters are values of its section.
        record: Class of its section `classifier.losses.<name>`; None if it uses an existing section.
        section: Name of the existing section of `classifier` that it uses, or None.
    """

    compute: LossFunction
    record: type[LossConfig] | None
    section: str | None

    def __call__(self, inputs: LossInputs, values: LossConfig) -> "Tensor | None":
        """Computes the loss.

        Raises:
            UserError: The function does not return a scalar, which can happen with a function of another package.
        """
        parameters = inspect.signature(self.compute).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY]
        total = self.compute(inputs, **{name: getattr(values, name) for name in names})

        if total is not None and total.ndim > 0:
            raise UserError(
                f"the loss {self.compute.__module__}.{self.compute.__qualname__} has shape {tuple(total.shape)}",
                "a scalar, the sum over the pairs",
                "correct the package that adds it, or set its weight to 0",
            )
        return total


def classifier_loss(
    *, record: type[LossConfig] = LossConfig, section: str | None = None
) -> Callable[[LossFunction], ClassifierLoss]:
    """Decorates a function as a loss of the classifier, see `ClassifierLoss`.

    Args:
        record: Class of the configuration section with its weight.
        section: Name of an existing section of `classifier` to use instead.
    """

    def decorate(compute: LossFunction) -> ClassifierLoss:
        return ClassifierLoss(compute=compute, record=None if section else record, section=section)

    return decorate


@classifier_loss(record=PaperLossConfig)
def basic(inputs: LossInputs) -> "Tensor":
    """L_CE(s_m, l_m) + L_CE(s_n, l_n) (Eq. 1); with equivariant attention, the mean of this over images and copies."""
    total = _cross_entropy(inputs.scores, inputs)
    if inputs.copies is None:
        return total
    return (total + _cross_entropy(inputs.copies, inputs)) / 2


def _cross_entropy(scores: PairScores, inputs: LossInputs) -> "Tensor":
    from mcis.models.losses import sigmoid_ce

    return (sigmoid_ce(scores.basic_m, inputs.tags_m) + sigmoid_ce(scores.basic_n, inputs.tags_n)).sum()


@classifier_loss(record=PaperLossConfig)
def co_attention(inputs: LossInputs) -> "Tensor | None":
    """Cross entropy of the co-attention scores of both images with the shared labels l_m ∩ l_n (Eq. 5).

    It is 0 for pairs with a negative, which can have no common class.
    """
    from mcis.models.losses import sigmoid_ce

    scores = inputs.scores
    if scores.co_attention_m is None or scores.co_attention_n is None:
        return None

    shared = inputs.tags_m * inputs.tags_n
    totals = sigmoid_ce(scores.co_attention_m, shared) + sigmoid_ce(scores.co_attention_n, shared)
    # Multiplied by 0, not left out: the weights then have a gradient, which DDP waits for.
    has_tags = inputs.tags_m.any(dim=1) & inputs.tags_n.any(dim=1)
    return (totals * has_tags).sum()


@classifier_loss(record=ContrastiveLossConfig)
def contrastive(inputs: LossInputs, *, needs_unshared: bool) -> "Tensor | None":
    """Cross entropy of the contrastive scores with the unshared labels l_m \\ l_n and l_n \\ l_m (Eq. 9).

    These are all labels of an image whose partner is a negative.
    """
    from mcis.models.losses import sigmoid_ce

    scores = inputs.scores
    if scores.contrastive_m is None or scores.contrastive_n is None:
        return None

    shared = inputs.tags_m * inputs.tags_n
    total_m = sigmoid_ce(scores.contrastive_m, inputs.tags_m - shared).sum()
    total_n = sigmoid_ce(scores.contrastive_n, inputs.tags_n - shared).sum()

    # An ignored side is multiplied by 0, not left out: its weights then have a gradient, which DDP waits for.
    if needs_unshared and not inputs.unshared_m:
        total_m = 0.0 * total_m
    if needs_unshared and not inputs.unshared_n:
        total_n = 0.0 * total_n
    return total_m + total_n


@classifier_loss(section="equivariant")
def equivariant(inputs: LossInputs) -> "Tensor | None":
    """Equivariant regularization of the images' maps (SEAM)."""
    from mcis.models.seam import equivariant_loss

    if inputs.maps is None:
        return None
    return equivariant_loss(inputs.maps, classes=inputs.tags_m.shape[1]).sum()


@classifier_loss(section="equivariant")
def cross(inputs: LossInputs, *, hard: float) -> "Tensor | None":
    """Equivariant cross regularization of the images' refined maps (SEAM)."""
    from mcis.models.seam import cross_equivariant_loss

    if inputs.maps is None:
        return None
    return cross_equivariant_loss(inputs.maps, classes=inputs.tags_m.shape[1], hard=hard).sum()


LOSSES = Registry[ClassifierLoss](
    "losses",
    {
        "basic": basic,
        "co_attention": co_attention,
        "equivariant": equivariant,
        "cross": cross,
        "contrastive": contrastive,
    },
)
"""Losses of the classifier by name; packages add to them by entry points of `mcis.losses`."""


def weighted_losses(inputs: LossInputs, values: Mapping[str, LossConfig], *, epoch: int) -> "dict[str, Tensor]":
    """Computes the losses of the pairs, each multiplied by its weight.

    Args:
        inputs: Scores, tags and features of the pairs.
        values: Section of each loss by name.
        epoch: Current epoch, counted from 0. A loss that starts later is multiplied by 0.

    Returns:
        Scalars by name, sums over the pairs. A loss is absent if it is disabled or the inputs lack what it needs.
    """
    losses = {}
    for name, section in values.items():
        total = LOSSES[name](inputs, section) if section.weight else None
        if total is not None:
            weight = section.weight if epoch >= section.from_epoch else 0.0
            losses[name] = weight * total
    return losses

"""Cross entropy losses: of class scores and tags, of pixels, and of the classes in a crop.

Each is a value per image or a sum, never a mean over a batch: sums of parts of a batch add up to that of the batch.
"""

from torch import Tensor
from torch.nn import functional

from mcis.datasets.classes import IGNORE


def sigmoid_ce(scores: Tensor, tags: Tensor) -> Tensor:
    """Computes L_CE(s, l), the sigmoid cross entropy of each image averaged over the K classes.

    Args:
        scores: Class scores before the sigmoid, (B, K).
        tags: Labels 0 or 1, (B, K), float.

    Returns:
        Losses, (B,).
    """
    return functional.binary_cross_entropy_with_logits(scores, tags, reduction="none").mean(dim=1)


def pixel_ce(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the cross entropy summed over the labeled pixels.

    Args:
        logits: (B, K + 1, H, W).
        labels: 0 to K, or 255 for ignored pixels, (B, H, W).
    """
    return functional.cross_entropy(logits, labels.long(), ignore_index=IGNORE, reduction="sum")


def presence_ce(class_logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the sigmoid cross entropy of which classes a crop contains: averaged over classes, summed over crops.

    Args:
        class_logits: Logits of the presence of each class, (B, K).
        labels: 0 = background, k + 1 = class k, 255 = ignored, (B, H, W).
    """
    present = class_logits.new_zeros(len(labels), 256).scatter_(1, labels.flatten(1).long(), 1.0)
    return sigmoid_ce(class_logits, present[:, 1 : class_logits.shape[1] + 1]).sum()

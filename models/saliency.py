"""Preprocessing and output of salient object detectors: pixels -> input of the network, its output -> saliency map."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from scipy.special import expit


def detector_input(
    rgb: NDArray[np.uint8], height: int, width: int, mean: ArrayLike, std: ArrayLike
) -> NDArray[np.float32]:
    """Prepares an image as U2-Net does: it is resized, divided by its largest value, and normalized by channel.

    Args:
        rgb: Image, (H, W, 3).
        height: Height h of the network's input, pixels.
        width: Width w of the network's input, pixels.
        mean: Three means, of values in [0, 1].
        std: Three standard deviations.

    Returns:
        A batch of one image, (1, 3, h, w).
    """
    resized = Image.fromarray(rgb).resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(resized, np.float32)
    pixels = pixels / max(float(pixels.max()), 1.0)  # a black image stays black
    normalized = (pixels - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(normalized.transpose(2, 0, 1)[None])


def saliency_map(output: NDArray[np.float32], height: int, width: int, *, sigmoid: bool = False) -> NDArray[np.uint8]:
    """Makes the saliency map of an image from the output of a detector: min-max normalized, then resized bilinearly.

    Args:
        output: Output of the network, (h, w), finite. A constant output becomes a map of zeros.
        height: Height H of the image, pixels.
        width: Width W of the image, pixels.
        sigmoid: Whether the output consists of logits, to which the sigmoid is applied first.

    Returns:
        (H, W): 0 is background, 255 is certainly an object.
    """
    values = output.astype(np.float32)
    if sigmoid:
        values = expit(values)
    low = values.min()
    high = values.max()
    scaled = (values - low) / (high - low) if high > low else np.zeros_like(values)
    resized = Image.fromarray(scaled).resize((width, height), Image.Resampling.BILINEAR)
    return np.clip(np.rint(255 * np.asarray(resized)), 0, 255).astype(np.uint8)

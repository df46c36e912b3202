"""Fully connected CRF (Kraehenbuehl and Koltun, NIPS 2011) over class probabilities, by pydensecrf."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mcis.datasets.images.decode import fitted_size
from mcis.datasets.section import NonNegative, Rate, Section

_Float32 = NDArray[np.float32]


class CrfParameters(Section):
    """Fully connected CRF (RELEASED_RECIPE, "Inference")."""

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
    max_side: int | None = Field(default=None, gt=0)
    """Longest side at which the CRF runs, pixels: larger images are made smaller for it, the result is brought back,
    and the deviations are pixels of that size. None = each image at its own size."""


def dense_crf(rgb: NDArray[np.uint8], probabilities: _Float32, parameters: CrfParameters) -> _Float32:
    """Refines probabilities (L, H, W) of L labels along the edges of the image (H, W, 3); or several guesses of them,
    (N, L, H, W), each by itself, in less time than one after the other.

    An image with a longer side than `max_side` is made smaller first, and the result is brought back to its size: time
    and memory then do not grow with the image.

    Returns:
        As the probabilities, with sum 1 over the labels at every pixel.
    """
    if not parameters.iterations:
        return probabilities
    refined = refine(*shrunk(rgb, probabilities, parameters.max_side), parameters)
    return refined if refined.shape == probabilities.shape else _resized(refined, probabilities.shape[-2:])


def shrunk(rgb: NDArray[np.uint8], probabilities: _Float32, max_side: int | None) -> tuple[NDArray[np.uint8], _Float32]:
    """An image (H, W, 3) and its probabilities (..., H, W), made to fit where the longer side exceeds `max_side`."""
    height, width = probabilities.shape[-2:]
    size = fitted_size(height, width, max_side)
    if size == (height, width):
        return rgb, probabilities
    smaller = _resized(np.ascontiguousarray(rgb.transpose(2, 0, 1), np.float32), size)
    return smaller.round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0), _resized(probabilities, size)


def _resized(planes: NDArray[np.float32], size: tuple[int, ...]) -> NDArray[np.float32]:
    """Planes (..., H, W) bilinearly at another size, smoothed where it shrinks; sums over the planes stay."""
    import torch  # late: a process that refines alone does without
    from torch.nn import functional

    batch = torch.from_numpy(planes.reshape(1, -1, *planes.shape[-2:]))
    resized = functional.interpolate(batch, size=list(size), mode="bilinear", antialias=True)
    return np.asarray(resized.numpy().reshape(*planes.shape[:-2], *size))


def refine(rgb: NDArray[np.uint8], probabilities: _Float32, parameters: CrfParameters) -> _Float32:
    """As `dense_crf`, at the image's own size whatever `max_side` is; pydensecrf keeps Python's lock meanwhile."""
    import pydensecrf.densecrf as pydensecrf

    labels, height, width = probabilities.shape[-3:]
    if labels == 1:
        return np.ones_like(probabilities)
    crf = pydensecrf.DenseCRF2D(width, height, labels)
    crf.addPairwiseGaussian(sxy=parameters.position_std, compat=parameters.position_weight)
    crf.addPairwiseBilateral(
        sxy=parameters.bilateral_std,
        srgb=parameters.color_std,
        rgbim=np.array(rgb, order="C"),  # a copy: pydensecrf refuses read-only arrays
        compat=parameters.bilateral_weight,
    )
    refined = []
    for unary in -np.log(np.maximum(probabilities, parameters.floor)).reshape(-1, labels, height * width):
        crf.setUnaryEnergy(np.ascontiguousarray(unary, np.float32))
        refined.append(np.asarray(crf.inference(parameters.iterations), np.float32))
    return np.stack(refined).reshape(probabilities.shape)

"""Fully connected CRF (Kraehenbuehl and Koltun, NIPS 2011) over class probabilities, computed by pydensecrf."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mcis.datasets.images.decode import fitted_size
from mcis.datasets.section import NonNegative, Rate, Section

_Float32 = NDArray[np.float32]


class CrfParameters(Section):
    """Fully connected CRF (paper-vs-code, "Inference")."""

    iterations: int = Field(default=1, ge=0)
    """Number of mean-field iterations; 0 = no CRF."""
    position_std: Rate = 3.0
    """Standard deviation of the smoothness kernel, pixels."""
    position_weight: NonNegative = 1.0
    """Weight of the smoothness kernel."""
    bilateral_std: Rate = 80.0
    """Spatial standard deviation of the appearance kernel, pixels."""
    color_std: Rate = 4.0
    """Color standard deviation of the appearance kernel, RGB levels."""
    bilateral_weight: NonNegative = 3.0
    """Weight of the appearance kernel."""
    floor: Rate = 1e-4
    """Lower bound of probabilities before the logarithm."""
    max_side: int | None = Field(default=None, gt=0)
    """Longest side at which the CRF runs, pixels. Larger images are downscaled, the result is upscaled again, and the
    standard deviations are pixels of the downscaled image. None: original size."""


def dense_crf(rgb: NDArray[np.uint8], probabilities: _Float32, parameters: CrfParameters) -> _Float32:
    """Refines label probabilities along the edges of an image.

    Images whose longest side exceeds `max_side` are downscaled first, which bounds time and memory.

    Args:
        rgb: Image, (H, W, 3).
        probabilities: Probabilities of L labels, (L, H, W), or N estimates of them, (N, L, H, W). N estimates are
            refined independently, but in less time than by N calls.
        parameters: Parameters of the CRF.

    Returns:
        Refined probabilities with the shape of the input; they sum to 1 over the labels.
    """
    if not parameters.iterations:
        return probabilities
    small_rgb, small_probabilities = shrunk(rgb, probabilities, parameters.max_side)
    refined = refine(small_rgb, small_probabilities, parameters)
    return refined if refined.shape == probabilities.shape else _resized(refined, probabilities.shape[-2:])


def shrunk(rgb: NDArray[np.uint8], probabilities: _Float32, max_side: int | None) -> tuple[NDArray[np.uint8], _Float32]:
    """Downscales an image (H, W, 3) and its probabilities (..., H, W) if the longest side exceeds `max_side`."""
    height, width = probabilities.shape[-2:]
    size = fitted_size(height, width, max_side)
    if size == (height, width):
        return rgb, probabilities

    planes = np.ascontiguousarray(rgb.transpose(2, 0, 1), np.float32)
    small_rgb = _resized(planes, size).round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    return small_rgb, _resized(probabilities, size)


def _resized(planes: NDArray[np.float32], size: tuple[int, ...]) -> NDArray[np.float32]:
    """Resizes planes (..., H, W) bilinearly, with antialiasing; sums over the planes are preserved."""
    import torch  # late: processes that only refine do not need it
    from torch.nn import functional

    batch = torch.from_numpy(planes.reshape(1, -1, *planes.shape[-2:]))
    resized = functional.interpolate(batch, size=list(size), mode="bilinear", antialias=True)
    return np.asarray(resized.numpy().reshape(*planes.shape[:-2], *size))


def refine(rgb: NDArray[np.uint8], probabilities: _Float32, parameters: CrfParameters) -> _Float32:
    """Refines probabilities as `dense_crf` does, but always at full size. pydensecrf holds the GIL while it runs."""
    import pydensecrf.densecrf as pydensecrf

    labels, height, width = probabilities.shape[-3:]
    if labels == 1:
        return np.ones_like(probabilities)

    crf = pydensecrf.DenseCRF2D(width, height, labels)
    crf.addPairwiseGaussian(sxy=parameters.position_std, compat=parameters.position_weight)
    crf.addPairwiseBilateral(
        sxy=parameters.bilateral_std,
        srgb=parameters.color_std,
        rgbim=np.array(rgb, order="C"),  # a copy: pydensecrf rejects read-only arrays
        compat=parameters.bilateral_weight,
    )

    energies = -np.log(np.maximum(probabilities, parameters.floor)).reshape(-1, labels, height * width)
    refined = []
    for unary in energies:
        crf.setUnaryEnergy(np.ascontiguousarray(unary, np.float32))
        refined.append(np.asarray(crf.inference(parameters.iterations), np.float32))
    return np.stack(refined).reshape(probabilities.shape)

"""Fully connected CRF (Kraehenbuehl and Koltun, NIPS 2011) over class probabilities, by pydensecrf."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class CrfParameters(NamedTuple):
    """Parameters of the dense CRF; the defaults are the released ones (RELEASED_RECIPE, "Inference").

    Attributes:
        iterations: mean-field steps.
        position_std: standard deviation of the smoothness kernel, pixels.
        position_weight: compatibility of the smoothness kernel.
        bilateral_std: spatial standard deviation of the appearance kernel, pixels.
        color_std: standard deviation of the appearance kernel in RGB levels, 0..255.
        bilateral_weight: compatibility of the appearance kernel.
        floor: smallest probability before the logarithm.
    """

    iterations: int = 1
    position_std: float = 3.0
    position_weight: float = 1.0
    bilateral_std: float = 80.0
    color_std: float = 4.0
    bilateral_weight: float = 3.0
    floor: float = 1e-4


def dense_crf(
    rgb: NDArray[np.uint8], probabilities: NDArray[np.float32], parameters: CrfParameters
) -> NDArray[np.float32]:
    """Refines probabilities (L, H, W) of L labels along the edges of the image (H, W, 3).

    Returns:
        (L, H, W), with sum 1 at every pixel.
    """
    import pydensecrf.densecrf as pydensecrf

    labels, height, width = probabilities.shape
    if labels == 1:
        return np.ones_like(probabilities)
    crf = pydensecrf.DenseCRF2D(width, height, labels)
    unary = -np.log(np.maximum(probabilities, parameters.floor)).reshape(labels, -1)
    crf.setUnaryEnergy(np.ascontiguousarray(unary, np.float32))
    crf.addPairwiseGaussian(sxy=parameters.position_std, compat=parameters.position_weight)
    crf.addPairwiseBilateral(
        sxy=parameters.bilateral_std,
        srgb=parameters.color_std,
        rgbim=np.array(rgb, order="C"),  # a copy: pydensecrf refuses read-only arrays
        compat=parameters.bilateral_weight,
    )
    return np.asarray(crf.inference(parameters.iterations), np.float32).reshape(labels, height, width)

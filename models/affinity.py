"""Configuration of the affinity between positions of two images (Eq. 2), read without torch."""

from typing import Literal

from mcis.datasets.section import Rate, Section


class Affinity(Section):
    """Affinity P between the positions of two images (Eq. 2)."""

    form: Literal["bilinear", "cosine", "cosine_by_level"] = "bilinear"
    """Form of P. `bilinear`: F_m^T W_P F_n. `cosine`: the same of features scaled to unit length. `cosine_by_level`:
    each level of the features is scaled to unit length on its own."""
    scale: Rate = 1.0
    """Factor that multiplies P before the softmax."""
    w_p: Literal["learned", "identity"] = "learned"
    """Matrix W_P. `learned`: trained with the classifier. `identity`: the identity matrix, which localization can use
    with any trained classifier."""
    init: float | None = None
    """Initial W_P, as a multiple of the identity matrix. None: drawn uniformly from [-1/sqrt(C), 1/sqrt(C)]
    (paper-vs-code, "Classifier")."""

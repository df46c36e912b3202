"""Sections of what follows the trainings: predictions, scores and the report."""

from typing import Literal

from pydantic import Field

from mcis.datasets.section import Rate, Section
from mcis.models.crf import CrfParameters


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
    crf: CrfParameters = CrfParameters()
    """Refinement of the probabilities; both plain and refined predictions are kept and scored."""


class EvaluateConfig(Section):
    """Scores."""

    thresholds: int = Field(default=128, ge=2, le=1024)
    """Background thresholds i / thresholds tried on the localization maps' scores (`maps.scale`), in one pass."""


class ReportConfig(Section):
    """The report."""

    panels: int = Field(default=12, ge=0, le=200)
    """Images shown, half of train and half of val."""

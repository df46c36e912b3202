"""Sections of what follows the trainings: predictions, scores, the report, and what MLflow is given."""

from collections.abc import Iterator
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
    given_tags: bool = False
    """Take the tags of the predicted images as known: an image is given no label of a class that is not among them, and
    one without a tag is all background. `mcis predict --tags` has them of a table."""


class EvaluateConfig(Section):
    """Scores."""

    thresholds: int = Field(default=128, ge=2, le=1024)
    """Background thresholds i / thresholds tried on the localization maps' scores (`maps.scale`), in one pass."""


class ReportConfig(Section):
    """The report."""

    panels: int = Field(default=12, ge=0, le=200)
    """Images shown, half of train and half of val."""


class TrackingConfig(Section):
    """What MLflow is given beside parameters, figures, reports and pictures; nothing here changes a result."""

    model: bool | None = None
    """Log the trained segmentation network as a model, which takes the disk of its weights once more. None = of a run,
    but not of the trials of a study."""
    register_as: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=200)
    """Name of MLflow's registered model that the logged network becomes a version of; None = of none."""
    system_metrics: bool = True
    """Every 10 seconds while a run computes, log the use of processors, memory, disk, network and GPUs of the machine
    that the command runs on."""

    def problems(self) -> Iterator[str]:
        """A version to register of a network that is not logged."""
        if self.register_as and self.model is False:
            yield (
                f"tracking.register_as is {self.register_as} but tracking.model is false, so that there is no model to "
                "register; set tracking.model=true or leave tracking.register_as out"
            )

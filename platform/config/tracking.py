"""Section of what MLflow is given beside parameters, figures, reports and pictures; it changes no result."""

from collections.abc import Iterator

from pydantic import Field

from mcis.datasets.section import Section


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

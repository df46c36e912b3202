"""Whether a training learnt anything: its loss at the end beside the beginning, its average precision beside chance."""

from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.datasets.tags import Tags
from mcis.models.metrics import average_precision
from mcis.platform.engine.step_log import STEPS
from mcis.platform.runs.progress import read_records

_RECORDS = 20
"""Records of a log from which its loss is judged."""
_POSITIVES = 20
"""Tags of the scored images from which their average precision is judged: of a dozen images chance makes anything."""
_REPETITIONS = 20
"""Rankings by chance."""


class LossTrend(NamedTuple):
    """A term of the loss over a training.

    Attributes:
        first, last: means over the first and the last tenth of the log's records.
        error: standard error of their difference. The deviation is taken from successive records, which a trend
            hardly changes.
    """

    first: float
    last: float
    error: float

    @classmethod
    def of_log(cls, folder: Path, term: str) -> Self | None:
        """The trend in the log of a training's folder; None where the log is too short to tell."""
        values = np.array([record[term] for record in read_records(folder / STEPS)])
        if len(values) < _RECORDS:
            return None
        tenth = len(values) // 10
        deviation = np.sqrt(np.square(np.diff(values)).mean() / 2)
        error = float(deviation * np.sqrt(2 / tenth))
        return cls(float(values[:tenth].mean()), float(values[-tenth:].mean()), error)

    @property
    def fell(self) -> bool:
        """Whether the loss fell by more than twice the standard error."""
        return self.first - self.last > 2 * self.error

    def description(self) -> str:
        """The figures, for messages."""
        return (
            f"the loss was {self.first:.4g} in the first tenth of the steps and {self.last:.4g} in the last, "
            f"{'a fall' if self.fell else 'no fall'} by more than twice the standard error of {self.error:.2g}"
        )


class Chance(NamedTuple):
    """Mean average precision, in percent, of rankings that know nothing of the images.

    Attributes:
        mean: about the share of images with a class, averaged over the classes.
        most: what 95 % of such rankings stay below.
    """

    mean: float
    most: float

    @classmethod
    def of_tags(cls, tags: Tags, seed: int) -> Self | None:
        """Chance on the images with these tags; None where these are too few to tell learning from chance."""
        if len(tags.values) < _POSITIVES:
            return None
        images = np.arange(len(tags))
        matrix = tags.matrix(images)
        drawn = [
            float(np.nanmean(average_precision(uniforms(Draw.CHANCE, seed, n, images, count=tags.classes), matrix)))
            for n in range(_REPETITIONS)
        ]
        mean = float(np.mean(drawn))
        return cls(mean, mean + 1.645 * float(np.std(drawn, ddof=1)))

    def description(self) -> str:
        """The figures, for messages."""
        return f"chance has {self.mean:.1f}, and stays below {self.most:.1f} in 95 of 100 cases"

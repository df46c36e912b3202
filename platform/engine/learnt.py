"""Whether a training learnt anything: its loss at the end beside the beginning, its average precision beside chance."""

from pathlib import Path

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


def loss_trend(folder: Path, term: str) -> tuple[bool, str] | None:
    """Whether a term of the loss fell in the log of a training's folder, and the figures, for messages.

    The means over the first and the last tenth of the log's records are compared. It fell where their difference is
    more than twice its standard error, whose deviation is taken from successive records, which a trend hardly changes.

    Returns:
        None where the log is too short to tell.
    """
    values = np.array([record[term] for record in read_records(folder / STEPS)])
    if len(values) < _RECORDS:
        return None
    tenth = len(values) // 10
    first, last = float(values[:tenth].mean()), float(values[-tenth:].mean())
    error = float(np.sqrt(np.square(np.diff(values)).mean() / 2) * np.sqrt(2 / tenth))
    fell = first - last > 2 * error
    return fell, (
        f"the loss was {first:.4g} in the first tenth of the steps and {last:.4g} in the last, "
        f"{'a fall' if fell else 'no fall'} by more than twice the standard error of {error:.2g}"
    )


def chance(tags: Tags, seed: int) -> tuple[float, float] | None:
    """Mean average precision, in percent, of rankings that know nothing of the images with these tags.

    Returns:
        Its mean, which is about the share of images with a class, averaged over the classes; and what 95 % of such
        rankings stay below. None where the tags are too few to tell learning from chance.
    """
    if len(tags.values) < _POSITIVES:
        return None
    images = np.arange(len(tags))
    matrix = tags.matrix(images)
    drawn = [
        float(np.nanmean(average_precision(uniforms(Draw.CHANCE, seed, n, images, count=tags.classes), matrix)))
        for n in range(_REPETITIONS)
    ]
    mean = float(np.mean(drawn))
    return mean, mean + 1.645 * float(np.std(drawn, ddof=1))

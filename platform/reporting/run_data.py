"""What the page of a run shows: `ReportData`, and the records that it is made of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from mcis.platform.reporting.explorer import Explorer
from mcis.platform.reporting.panels import Panel, Steps
from mcis.platform.runs.scores import Curve, Score

Counts: TypeAlias = Mapping[str, Union[float, "Counts"]]
"""Numbers by name, nested as deep as needed: {"images": {"train": 480, "val": 120}, ...}."""

_NO_TERMS = {"step", "epoch", "loss", "val_map", "train_map", "learning_rate", "images_per_second", "waiting", "time"}


class Reject(NamedTuple):
    """An image that is not used, as REJECTS_SCHEMA has it."""

    image_id: str
    uri: str
    split: str
    reason: str


class ConfigValue(NamedTuple):
    """A dotted key of the configuration, its value as text, and where the value comes from."""

    key: str
    value: str
    origin: str


class Bound(NamedTuple):
    """An upper bound: a run that trained the same network on the ground truth, and its scores of segmentation."""

    run: str
    scores: Sequence[Score]


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """The N records of a training's steps.jsonl as columns, (N,) each; NaN where a record lacks a value.

    Attributes:
        step, epoch: updates so far, and passes over the data, which are fractional.
        loss, terms: the loss, and the terms that it is the sum of, by name.
        val_map: mean average precision on val tags in percent.
        learning_rate, images_per_second: of the step; images of this training per second.
        waiting: share of the time, in [0, 1], spent waiting for data.
    """

    step: NDArray[np.float64]
    epoch: NDArray[np.float64]
    loss: NDArray[np.float64]
    terms: Mapping[str, NDArray[np.float64]]
    val_map: NDArray[np.float64]
    learning_rate: NDArray[np.float64]
    images_per_second: NDArray[np.float64]
    waiting: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def of_records(cls, records: Sequence[Mapping[str, Any]]) -> Self:
        """Reads records of a step log; a key that is neither an attribute nor in `_NO_TERMS` is a term of the loss."""
        terms = dict.fromkeys(key for record in records for key in record if key not in _NO_TERMS)
        names = ("step", "epoch", "loss", "val_map", "learning_rate", "images_per_second", "waiting")
        return cls(
            terms={term: _column(records, term) for term in terms}, **{name: _column(records, name) for name in names}
        )


def _column(records: Iterable[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
    return np.array([record.get(key) for record in records], np.float64)


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the page shows. Scores and IoU are in percent, shares in [0, 1], times in seconds.

    Attributes:
        name, setting, recipe, created (ISO 8601), git: what ran, when, and from which commit.
        classes: K names; class index k is label k + 1.
        notes: warnings in plain words.
        counts: by stage.
        seconds, computed: by stage, its wall time and whether it was computed in this call or taken from before.
        training: the logs of the trainings "classifier", "affinity network" and "segmenter", those that took part.
        curves: mIoU of localization maps over thresholds, by label.
        environment: versions and machine, by name.
        attention: how some localization maps were made.
        explorer: images whose maps a reader can set against thresholds; None where there are none.
        bound: what the same network reaches that was trained on the ground truth; None where no run has it.
    """

    name: str
    setting: str
    recipe: str
    created: str
    git: str | None
    classes: tuple[str, ...]
    scores: Sequence[Score]
    counts: Mapping[str, Counts]
    rejects: Sequence[Reject]
    notes: Sequence[str]
    seconds: Mapping[str, float]
    computed: Mapping[str, bool]
    training: Mapping[str, TrainingLog]
    curves: Mapping[str, Curve]
    config: Sequence[ConfigValue]
    environment: Mapping[str, str]
    panels: Sequence[Panel]
    attention: Sequence[Steps] = ()
    explorer: Explorer | None = None
    bound: Bound | None = None

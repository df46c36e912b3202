"""What the evaluators share: sums over images, from workers' rows to arrays, and confusions as `Score`s."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.models.metrics import iou, mean_iou
from mcis.platform.config.sections import Config
from mcis.platform.runs.scores import Curve, Score, Scored
from mcis.platform.runs.version import git_revision
from mcis.platform.runs.workspace import read_table


@dataclass(kw_only=True)
class Sums:
    """Arrays of fixed shapes that are added up over images; between a worker and the stage, a table of one row."""

    def row(self) -> pa.Table:
        """The arrays as a table of one row, a flat list per array."""
        return pa.table({f.name: [np.ravel(getattr(self, f.name))] for f in fields(self)})

    def with_shards(self, folder: Path) -> Self:
        """Adds the rows of all shards in a folder, in place."""
        for file in sorted(folder.glob("part-*.parquet")):  # one at a time: with many classes each is tens of megabytes
            for name, total in vars(self).items():
                for chunk in read_table(file, [name])[name].chunks:
                    total += chunk.flatten().to_numpy().reshape(-1, *total.shape).sum(axis=0)
        return self


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluator found.

    Attributes:
        curves: mIoU of localization maps over thresholds, by the name of their score.
        counts, notes: for the stage's summary.
        busy: seconds that the workers computed, added up.
    """

    scores: list[Score]
    curves: dict[str, Curve] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    busy: float


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Makes the scores of one split, with what all of them have in common."""

    config: Config
    classes: tuple[str, ...]
    split: str
    images: int

    def score(self, what: Scored, name: str, matrix: NDArray[np.int64], **made: Any) -> Score:
        """The score of a confusion matrix (K + 1, K + 1); `made` are further fields of `Score`."""
        values = zip(("background", *self.classes), iou(matrix).tolist(), strict=True)
        return Score(
            what=what,
            name=name,
            split=self.split,
            images=self.images,
            miou=round(mean_iou(matrix), 2),
            iou={label: None if np.isnan(value) else round(value, 2) for label, value in values},
            seed=self.config.seed,
            recipe=self.config.recipe,
            weights=self.config.weights.classifier or self.config.weights.backbone,
            git=git_revision(),
            **made,
        )

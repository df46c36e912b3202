"""What the evaluators share: what they found, and counts of pixels as `Score`s."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcis.models.metrics import boundary_iou, iou, mean, precision, recall
from mcis.platform.config.sections import Config
from mcis.platform.runs.scores import Curve, Score, Scored
from mcis.platform.runs.version import code_digest, git_revision


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
    reused: tuple[str, ...] = ()

    def score(self, what: Scored, name: str, matrix: NDArray[np.int64], **made: Any) -> Score:
        """The score of a confusion matrix (K + 1, K + 1); `made` are further fields of `Score`."""
        weights = self.config.weights
        return Score(
            what=what,
            name=name,
            split=self.split,
            images=self.images,
            miou=round(mean(iou(matrix)), 2),
            iou=self._by_label(iou(matrix)),
            precision=self._by_label(precision(matrix)),
            recall=self._by_label(recall(matrix)),
            confusion=tuple(map(tuple, matrix.tolist())),
            seed=self.config.seed,
            recipe=self.config.recipe,
            weights=weights.classifier or weights.initial or weights.backbone,
            git=git_revision(),
            code=code_digest(),
            reused=", ".join(self.reused) or None,
            **made,
        )

    def mask_score(self, what: Scored, name: str, counts: NDArray[np.int64], **made: Any) -> Score:
        """The score of label masks, from their counts (MASK_PARTS, K + 1, K + 1), with its boundary IoU."""
        values = boundary_iou(counts)
        boundary = {"boundary_miou": round(mean(values), 2), "boundary_iou": self._by_label(values)}
        return self.score(what, name, counts.sum(axis=0), **boundary, **made)

    def _by_label(self, values: NDArray[np.float64]) -> dict[str, float | None]:
        """Values (K + 1,) by the names of their labels, rounded; None for NaN."""
        named = zip(("background", *self.classes), values.tolist(), strict=True)
        return {label: None if np.isnan(value) else round(value, 2) for label, value in named}

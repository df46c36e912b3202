"""The predictions of a split, plain and after the dense CRF, against their ground truth."""

import functools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.decode import decode_labels
from mcis.datasets.maps import Shards
from mcis.models.metrics import confusion
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import truth_of_row
from mcis.platform.stages.evaluation.scoring import Evaluation, Scorer, Sums


@dataclass(kw_only=True)
class PredictionSums(Sums):
    """Confusions (K + 1, K + 1) of predictions, plain and after the CRF."""

    plain: NDArray[np.int64]
    crf: NDArray[np.int64]

    @classmethod
    def zeros(cls, classes: int) -> "PredictionSums":
        """The sums over no image."""
        shape = (classes + 1, classes + 1)
        return cls(plain=np.zeros(shape, np.int64), crf=np.zeros(shape, np.int64))


@dataclass(frozen=True, kw_only=True)
class ScoreVal:
    """Rows of predicted images -> their `PredictionSums` as a row; `classes` is K."""

    classes: int
    predictions: Shards

    def __call__(self, rows: pa.Table) -> pa.Table:
        sums = PredictionSums.zeros(self.classes)
        for row in rows.to_pylist():
            truth = truth_of_row(row, self.classes)
            prediction = self.predictions.rows(row["image_id"])
            assert prediction is not None, f"no prediction of the image {row['image_id']}"
            sums.plain += confusion(truth, decode_labels(prediction["plain"][0].as_py()), self.classes)
            refined = prediction["crf"][0].as_py()
            if refined is not None:
                sums.crf += confusion(truth, decode_labels(refined), self.classes)
        return sums.row()


def evaluate_predictions(config: Config, context: RunContext, rows: pa.Table, split: str) -> Evaluation:
    """Scores the predictions of images with ground truth."""
    classes = len(context.classes)
    worker = functools.partial(ScoreVal, classes=classes, predictions=Shards(context.inputs["predict"] / "predictions"))
    part = context.part / "val"
    mapped = map_table(rows, worker, (), part, label="score val", shard_rows=config.compute.shard_rows)
    sums = PredictionSums.zeros(classes).with_shards(part)
    scorer = Scorer(config=config, classes=context.classes, split=split, images=len(rows))
    trained_on = "ground truth" if config.supervision == "full" else None
    inference = {"scales": config.predict.scales, "mirror": config.predict.mirror, "trained_on": trained_on}
    scores = [scorer.score("segmentation", "plain", sums.plain, crf=False, **inference)]
    if config.predict.crf.iterations:
        scores.append(scorer.score("segmentation", "with CRF", sums.crf, crf=True, **inference))
    return Evaluation(scores=scores, busy=mapped.busy)

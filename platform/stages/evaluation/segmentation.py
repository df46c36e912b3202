"""The predictions of a split, plain and after the dense CRF, against their ground truth."""

import functools
from dataclasses import dataclass

import pyarrow as pa

from mcis.datasets.images.decode import decode_labels
from mcis.datasets.tables.shards import Shards
from mcis.models.counts import MASK_PARTS
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.outputs.counts import PLAIN, PREDICTED_IMAGES, WITH_CRF, CountsTable, sum_counts
from mcis.platform.outputs.read_index import truth_of_row
from mcis.platform.runs.context import RunContext
from mcis.platform.stages.evaluation.scoring import Evaluation, Scorer


@dataclass(frozen=True, kw_only=True)
class ScoreVal:
    """Rows of predicted images -> the counts of their pixels (COUNTS_SCHEMA); `classes` is K."""

    classes: int
    predictions: Shards

    def __call__(self, rows: pa.Table) -> pa.Table:
        out = CountsTable()
        for row in rows.to_pylist():
            truth = truth_of_row(row, self.classes)
            prediction = self.predictions.rows(row["image_id"])
            assert prediction is not None, f"no prediction of the image {row['image_id']}"
            pngs = {PLAIN: prediction["plain"][0].as_py(), WITH_CRF: prediction["crf"][0].as_py()}
            masks = {scored: decode_labels(png) for scored, png in pngs.items() if png is not None}
            out.add_masks(row["image_id"], truth, masks, self.classes)
        return out.table()


def evaluate_predictions(config: Config, context: RunContext, rows: pa.Table, split: str) -> Evaluation:
    """Scores the predictions of images with ground truth."""
    classes = len(context.classes)
    worker = functools.partial(ScoreVal, classes=classes, predictions=Shards(context.inputs["predict"] / "predictions"))
    part, refined = context.part / PREDICTED_IMAGES, bool(config.predict.crf.iterations)
    mapped = map_table(rows, worker, (), part, label="score predictions", compute=config.compute)
    scored = (PLAIN, WITH_CRF) if refined else (PLAIN,)
    counts = sum_counts(part, dict.fromkeys(scored, (MASK_PARTS, classes + 1, classes + 1)))
    scorer = Scorer(config=config, classes=context.classes, split=split, images=len(rows), reused=context.reused)
    trained_on = "ground truth" if config.supervision == "full" else None
    inference = {"scales": config.predict.scales, "mirror": config.predict.mirror, "trained_on": trained_on}
    scores = [
        scorer.mask_score("segmentation", name, of, crf=name == WITH_CRF, **inference) for name, of in counts.items()
    ]
    return Evaluation(scores=scores, busy=mapped.busy)

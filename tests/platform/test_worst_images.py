"""Tests of the gallery "Worst first": ranking with and without ground truth, and the images that it shows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mcis.datasets.images.label_masks import decode_labels, encode_labels
from mcis.datasets.tables.shards import Shards
from mcis.models.counts import confusion
from mcis.models.metrics import iou, mean
from mcis.platform.outputs.tables import MASKS_SCHEMA, PREDICTIONS_SCHEMA
from mcis.platform.reporting.worst_images import (
    RankedImage,
    choose_worst,
    rank_by_absent_tags,
    rank_by_ignored,
    rank_by_miou,
)
from mcis.platform.runs.files import write_table
from mcis.platform.runs.scores import read_scores
from mcis.platform.runs.workspace import Workspace

MASK = encode_labels(np.zeros((2, 2), np.uint8))


def test_scored_images_are_ranked_by_their_miou(scored: Callable[..., Path], tmp_path: Path) -> None:
    scored(tmp_path / "workspace", "a", data=tmp_path / "data")
    outputs = Workspace(tmp_path / "workspace").outputs("a")
    (score,) = [score for score in read_scores(outputs) if score.output == "segmentation" and score.crf]
    ranking = rank_by_miou(outputs["evaluate"], score)

    predictions = Shards(outputs["predict"] / "predictions")
    mious = {}
    for number in range(8):
        truth = np.array(Image.open(tmp_path / "data" / f"0-val{number}.png"))
        mask = decode_labels(predictions.rows(f"val{number}")["crf"][0].as_py())
        mious[f"val{number}"] = mean(iou(confusion(truth, mask, 2)))
    expected = sorted(mious.items(), key=lambda item: item[1])
    assert ranking.images == [(image_id, f"mIoU {miou:.1f}") for image_id, miou in expected]
    assert ranking.criterion == "mIoU of the prediction after the CRF in the image"


def test_without_truth_masks_are_ranked_by_ignored_pixels(tmp_path: Path) -> None:
    row = {"labels": MASK, "mask": MASK, "foreground": 0.5, "cue": "crf"}
    shares = {"a": 0.25, "b": 0.0, "c": 0.75, "d": 0.25}
    rows = [row | {"image_id": image_id, "ignored": share} for image_id, share in shares.items()]
    write_table(tmp_path / "part-0.parquet", pa.Table.from_pylist(rows, schema=MASKS_SCHEMA))
    ranking = rank_by_ignored(tmp_path)
    assert [image.image_id for image in ranking.images] == ["c", "a", "d"]
    assert ranking.images[0].note == "75.0\N{NARROW NO-BREAK SPACE}% ignored"
    assert "there is no truth" in ranking.criterion


def test_without_truth_predictions_are_ranked_by_absent_tags(tmp_path: Path) -> None:
    absent = {"a": [1], "b": [], "c": [0, 1], "d": None}
    rows = [
        {"image_id": image_id, "plain": MASK, "crf": None, "absent_tags": tags} for image_id, tags in absent.items()
    ]
    write_table(tmp_path / "part-0.parquet", pa.Table.from_pylist(rows, schema=PREDICTIONS_SCHEMA))
    ranking = rank_by_absent_tags(tmp_path, ["cat", "dog"])
    assert ranking.images == [RankedImage("c", "lacks cat, dog"), RankedImage("a", "lacks dog")]


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0, 1, 4]), (2, [0, 1, 4]), (3, [0, 1, 2, 4]), (9, [0, 1, 2, 3, 4, 5])]
)
def test_each_class_has_its_worst_image(count: int, expected: list[int]) -> None:
    assert choose_worst([[0], [1, 0], [1], [0], [2], [2]], count) == expected

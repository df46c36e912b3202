"""Tests of the gallery "Worst first": ranking with and without ground truth, and the images that it shows."""

import tracemalloc
from collections.abc import Callable, Sequence
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
    Ranking,
    choose_worst,
    rank_by_absent_tags,
    rank_by_ignored,
    rank_by_miou,
)
from mcis.platform.runs.files import write_table
from mcis.platform.runs.scores import read_scores
from mcis.platform.runs.workspace import Workspace

MASK = encode_labels(np.zeros((2, 2), np.uint8))


def ranked(ranking: Ranking) -> list[tuple[str, str]]:
    """The ids and notes of all ranked images."""
    notes = ranking.notes(np.arange(len(ranking.images)))
    return list(zip(ranking.images["image_id"].to_pylist(), notes, strict=True))


def write_masks(folder: Path, ids: list[str], ignored: list[float]) -> None:
    row = {"labels": MASK, "mask": MASK, "foreground": 0.5, "cue": "crf"}
    rows = [row | {"image_id": image_id, "ignored": share} for image_id, share in zip(ids, ignored, strict=True)]
    write_table(folder / "part-0.parquet", pa.Table.from_pylist(rows, schema=MASKS_SCHEMA))


def write_predictions(folder: Path, ids: list[str], absent: Sequence[list[int] | None]) -> None:
    row = {"plain": MASK, "crf": None}
    rows = [row | {"image_id": image_id, "absent_tags": tags} for image_id, tags in zip(ids, absent, strict=True)]
    write_table(folder / "part-0.parquet", pa.Table.from_pylist(rows, schema=PREDICTIONS_SCHEMA))


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
    assert ranked(ranking) == [(image_id, f"mIoU {miou:.1f}") for image_id, miou in expected]
    assert ranking.criterion == "mIoU of the prediction after the CRF in the image"


def test_without_truth_masks_are_ranked_by_ignored_pixels(tmp_path: Path) -> None:
    write_masks(tmp_path, ["a", "b", "c", "d"], [0.25, 0.0, 0.75, 0.25])
    ranking = rank_by_ignored(tmp_path)
    space = "\N{NARROW NO-BREAK SPACE}"
    expected = [("c", f"75.0{space}% ignored"), ("a", f"25.0{space}% ignored"), ("d", f"25.0{space}% ignored")]
    assert ranked(ranking) == expected
    assert "there is no truth" in ranking.criterion


def test_without_truth_predictions_are_ranked_by_absent_tags(tmp_path: Path) -> None:
    write_predictions(tmp_path, ["a", "b", "c", "d"], [[1], [], [0, 1], None])
    ranking = rank_by_absent_tags(tmp_path, ["cat", "dog"])
    assert ranked(ranking) == [("c", "lacks cat, dog"), ("a", "lacks dog")]


def test_columns_are_ranked_like_single_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = [f"{number:03d}" for number in range(200)]
    shares = (rng.integers(0, 5, 200) / 8).tolist()
    absent = [list(range(count)) for count in rng.integers(0, 4, 200)]
    write_masks(tmp_path / "masks", ids, shares)
    write_predictions(tmp_path / "predictions", ids, absent)

    by_share = sorted((-share, image_id) for image_id, share in zip(ids, shares, strict=True) if share)
    by_tags = sorted((-len(tags), image_id) for image_id, tags in zip(ids, absent, strict=True) if tags)
    ignored = rank_by_ignored(tmp_path / "masks").images
    lacking = rank_by_absent_tags(tmp_path / "predictions", ["cat", "dog", "cow"]).images
    assert ignored["image_id"].to_pylist() == [image_id for _, image_id in by_share]
    assert lacking["image_id"].to_pylist() == [image_id for _, image_id in by_tags]


def choose_slowly(tags: list[list[int]], count: int) -> list[int]:
    """The images that `choose_worst` chooses, one image after the other."""
    chosen = list(range(min(count, len(tags))))
    seen = {tag for position in chosen for tag in tags[position]}
    added_classes = 0
    for position in range(len(chosen), len(tags)):
        new = set(tags[position]) - seen
        if new and added_classes < 24:
            chosen.append(position)
            seen |= new
            added_classes += len(new)
    return chosen


def tags_column(tags: list[list[int]]) -> pa.ListArray:
    return pa.array(tags, pa.list_(pa.uint16()))


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0, 1, 4]), (2, [0, 1, 4]), (3, [0, 1, 2, 4]), (9, [0, 1, 2, 3, 4, 5])]
)
def test_each_class_has_its_worst_image(count: int, expected: list[int]) -> None:
    tags = [[0], [1, 0], [1], [0], [2], [2]]
    assert choose_worst(tags_column(tags), count).tolist() == choose_slowly(tags, count) == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_same_images_are_chosen_as_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes = int(rng.choice([3, 24, 60]))
    tags = []
    for tag_count in rng.integers(0, 4, size=int(rng.integers(0, 150))):
        tags.append(rng.choice(classes, size=min(tag_count, classes), replace=False).tolist())
    for count in (1, 2, 5, 200):
        assert choose_worst(tags_column(tags), count).tolist() == choose_slowly(tags, count)


def test_a_million_images_are_ranked_without_an_object_for_each(tmp_path: Path) -> None:
    """A dictionary with an entry for each image would take more than 100 MB of Python's memory."""
    number = 2**20
    columns = {"image_id": pa.array([f"{n:07d}" for n in range(number)]), "ignored": np.full(number, 0.5, np.float32)}
    write_table(tmp_path / "part-0.parquet", pa.table(columns))
    column = pa.ListArray.from_arrays(np.arange(number + 1, dtype=np.int32), np.zeros(number, np.uint16))
    del columns

    tracemalloc.start()
    try:
        ranking = rank_by_ignored(tmp_path)
        chosen = choose_worst(column, 9)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ranking.images) == number
    assert chosen.tolist() == list(range(9))
    assert peak < 60 * number, f"{peak / number:.0f} bytes per image"

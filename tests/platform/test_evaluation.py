"""The stage `evaluate` on synthetic masks, compared with an independent program."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import encode_labels
from mcis.datasets.index import Listing
from mcis.platform.config.resolve import resolve
from mcis.platform.outputs.counts import crc_of_truth, read_counts
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_json
from mcis.platform.runs.results import StageResult, write_result
from mcis.platform.runs.scores import SCORES, read_scores
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages import evaluation
from mcis.platform.stages.evaluation import counted_as_zero, large_drops
from mcis.platform.stages.predict import unpredicted_tags

ROOT = Path(__file__).resolve().parents[2]
IMAGES = 12


@pytest.fixture(scope="module", autouse=True)
def _benchmarks() -> Iterator[None]:
    """Paths of the independent program and of the module that draws masks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    import mask_files

    return mask_files.find_or_draw(None, IMAGES, tmp_path_factory.mktemp("truth") / "masks")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("workspace"))


def evaluated(workspace: Workspace, paths: list[Path], name: str, seed: int) -> RunContext:
    """A run with scores."""
    import mask_files

    context = mask_files.prepare_evaluation(workspace.root, paths, name=name, seed=seed)
    config = resolve("voc", "scratch", overrides=["compute.shard_rows=5"]).config
    write_result(context.output, evaluation.run(config, context), key=name)
    done = dataclasses.replace(context, stage_outputs={**context.stage_outputs, "evaluate": context.output})
    workspace.record_outputs(name, done.stage_outputs)
    return done


@pytest.fixture(scope="module")
def first(ray_local: None, workspace: Workspace, paths: list[Path]) -> RunContext:
    return evaluated(workspace, paths, "first", 1)


def test_scores_equal_those_of_an_independent_program_to_the_last_digit(first: RunContext, paths: list[Path]) -> None:
    import score_agreement

    scores = read_json(first.stage_outputs["evaluate"] / SCORES)
    expected = score_agreement.independent_scores(paths, first.stage_outputs["predict"] / "predictions")
    assert [score["name"] for score in scores] == ["plain", "with CRF"]
    for score, of_plain in zip(scores, expected, strict=True):
        assert {name: score[name] for name in of_plain} == of_plain
    assert expected[0] != expected[1]
    assert score_agreement.count_agreeing(scores, expected) == (2 * (2 + 4 * 21 + 21 * 21),) * 2
    assert score_agreement.count_agreeing(scores, expected[::-1])[0] < 2 * (2 + 4 * 21 + 21 * 21)


def test_masks_of_images_above_the_default_limit_are_checked(workspace: Workspace, tmp_path: Path) -> None:
    Image.new("L", (7_100, 7_100)).save(tmp_path / "a.jpg")
    (tmp_path / "a.png").write_bytes(encode_labels(np.ones((4, 5), np.uint8)))
    row = {"uri": str(tmp_path / "a.jpg"), "tags": [0], "is_negative": False, "mask_uri": str(tmp_path / "a.png")}
    listing = Listing(pa.Table.from_pylist([row | {"split": "train"}]), ("cat",))
    config = resolve("voc", overrides=["data.max_pixels=60000000"]).config

    with pytest.raises(UserError, match=r"a.png has 4x5 pixels"):
        evaluation.check(config, listing, workspace)


def test_counts_of_images_sum_to_the_confusion_matrix(first: RunContext, paths: list[Path]) -> None:
    for score in read_scores(first.stage_outputs):
        counted = read_counts(first.stage_outputs["evaluate"], score)
        assert counted.image_ids.to_pylist() == [path.stem for path in paths]
        total = np.zeros((21, 21), int)
        for true, label, _, pixels in zip(*counted.counts, strict=True):
            total[true, label] += pixels
        np.testing.assert_array_equal(total, score.confusion)
        for image, path in enumerate(paths):
            truth = np.array(Image.open(path))
            assert counted.counts.pixels[counted.images == image].sum() == (truth != 255).sum()
            assert counted.truth_crc[image] == crc_of_truth(truth)


def test_classes_with_much_worse_predictions_than_masks_are_named(first: RunContext) -> None:
    """A class is named if it is more than 15 points worse after the CRF; classes without a score are not."""
    plain, refined = read_scores(first.stage_outputs)
    at: dict[str, float | None] = dict.fromkeys(plain.iou, 60.0)
    far, near, absent = first.classes[:3]
    masks = dataclasses.replace(plain, output="pseudo_masks", iou=at | {absent: None})
    low = dataclasses.replace(refined, iou=at | {far: 44.9, near: 45.0, absent: 10.0})
    config = resolve("voc", "scratch").config
    balanced = resolve("voc", "scratch", overrides=["segmenter.class_balance_exponent=1"]).config
    (note,) = large_drops([masks, plain, low], config, first)
    tags = split_rows(first, "train", columns=["tags"])["tags"].to_pylist()
    images = sum(0 in of for of in tags)
    assert f"for 1 of 20 classes: {far} ({images} images; masks 60.0, predictions 44.9)" in note
    assert large_drops([masks, dataclasses.replace(low, iou=at)], config, first) == []
    assert "try segmenter.class_balance_exponent=1, more" in note
    assert "class_balance" not in large_drops([masks, low], balanced, first)[0], "what is set is no remedy"
    assert large_drops([low], config, first) == [], "a run on the truth has no pseudo masks"
    there = dataclasses.replace(low, label_scores={"recall": at})
    unseen = dataclasses.replace(low, label_scores={"recall": at | {far: None}})
    assert len(large_drops([masks, there], config, first)) == 1
    assert large_drops([masks, unseen], config, first) == [], "no true mask has the class"
    zero = dataclasses.replace(unseen, miou=57.1, iou=at | {far: 0.0, near: None})
    zero_maps = dataclasses.replace(zero, output="localization_maps", miou=30.5)
    baseline = dataclasses.replace(zero, output="baseline")
    map_note, note = counted_as_zero([zero_maps, dataclasses.replace(zero, miou=1.5), zero, baseline])
    assert map_note.startswith("1 label(s) of localization maps are in no ground-truth mask")
    assert "mIoU of 30.5;" in map_note
    assert note.startswith("1 label(s) of segmentation are in no ground-truth mask")
    assert note.endswith(f"57.1; over the other labels it is 60.0: {far}")
    assert not counted_as_zero([there])
    assert set(counted_as_zero([refined])) < set(first.result("evaluate", StageResult).notes)
    assert counted_as_zero([refined]), "some label of the small run"


def test_a_class_that_most_predictions_miss_is_named() -> None:
    tags = pa.chunked_array([[[0, 1]] * 6, [[2]] * 4, [[]]], pa.list_(pa.uint16()))
    missed = pa.chunked_array([[[1], [0, 1], [1], [0], [1, 0], []], [[2]] * 4, [[]]], tags.type)
    (note,) = unpredicted_tags(tags, missed, ("cat", "cow", "dog"), "val")
    assert ": cow (4 of 6);" in note, "half of the cats are there, and four dogs tell little"
    assert unpredicted_tags(tags, pa.chunked_array([[[]] * 11], tags.type), ("cat", "cow", "dog"), "val") == ()


def test_different_ground_truth_has_a_different_checksum() -> None:
    truth = np.zeros((4, 6), np.uint8)
    truth[1, 2] = 1
    others = [truth.reshape(6, 4), truth[:, ::-1], truth.T, np.where(truth == 1, 2, truth).astype(np.uint8)]
    assert len({crc_of_truth(mask) for mask in (truth, *others)}) == 5

"""Images that show none of the classes, through the whole pipeline: one class, with and without."""

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import decode_labels, encode_labels
from mcis.datasets.synthetic import devkit as synthetic
from mcis.datasets.tables.shards import Shards
from mcis.platform import pipeline
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.networks.weights_files import WEIGHTS
from mcis.platform.outputs.relations import VECTORS, read_vectors
from mcis.platform.reporting.export import export
from mcis.platform.runs.files import read_table, write_table
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages import train_segmenter

TINY = (
    "classifier.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "classifier.epochs=2",
    "localize.related=3",
    "pseudo_masks.min_foreground_fraction=0",
    "segmenter.channels=24",
    "segmenter.width=16",
    "segmenter.min_steps=6",
    "segmenter.batch=4",
    "segmenter.crop=64",
    "report.panels=4",
    "compute.shard_rows=8",
    "compute.threads=1",
    "compute.stop_if_not_learning=false",
)
TINY_PHOTOS = (
    "classifier.epochs=2",
    "classifier.min_steps=0",
    "classifier.attention_epochs=1",
    "classifier.input_size=64",
    "classifier.batch=8",
    "classifier.val_every=0",
    "localize.related=2",
    "affinity_net.min_steps=2",
    "affinity_net.min_epochs=0.1",
    "affinity_net.batch=4",
    "affinity_net.crop=64",
    "compute.shard_rows=8",
    "compute.threads=1",
    "compute.stop_if_not_learning=false",
)
"""A frozen backbone whose features are cached, and an affinity network."""


class WithAndWithout(NamedTuple):
    """A table of images with the only class, `disc`, and of images without it.

    Attributes:
        table: The table.
        tags: Cell of tags by image: `disc`, `none`, or empty for the last training image without a disc.
    """

    table: Path
    tags: dict[str, str]

    def named(self, tag: str, split: str) -> list[str]:
        return [image for image, cell in self.tags.items() if cell == tag and f"/{split}_" in image]

    def settings(self, *overrides: str) -> Resolved:
        return resolve("tags", "scratch", {"data.tags.table": str(self.table)}, [*TINY, *overrides])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> WithAndWithout:
    """Only val images with the class have a mask."""
    root = tmp_path_factory.mktemp("drawn") / "VOC2012"
    synthetic.draw(root, train=20, val=6, size=64, classes=3)
    tags: dict[str, str] = {}
    lines = ["image,tags,split,mask"]
    for path in sorted((root / "SegmentationClassAug").glob("*.png")):
        image = f"JPEGImages/{path.stem}.jpg"
        labels = decode_labels(path.read_bytes())
        tags[image] = "disc" if (labels == 1).any() else "none"
        mask = ""
        if tags[image] == "disc" and path.stem.startswith("val"):
            mask = f"{path.stem}.png"
            (root / mask).write_bytes(encode_labels(np.where((labels > 1) & (labels < 255), 0, labels)))
        lines.append(f"{image},{tags[image]},{path.stem.partition('_')[0]},{mask}")

    *_, unlabelled = (image for image, tag in tags.items() if tag == "none" and "train" in image)
    tags[unlabelled] = ""
    table = root / "t.csv"
    table.write_text("\n".join(lines).replace(f"{unlabelled},none", f"{unlabelled},"))
    return WithAndWithout(table, tags)


@pytest.fixture(scope="module")
def run(ray_local: None, drawn: WithAndWithout, tmp_path_factory: pytest.TempPathFactory) -> pipeline.RunResult:
    return pipeline.run(drawn.settings(), Workspace(tmp_path_factory.mktemp("workspace")), "one")


def test_a_run_with_one_class_trains_on_negatives(run: pipeline.RunResult, drawn: WithAndWithout) -> None:
    positives = drawn.named("disc", "train")
    negatives = drawn.named("none", "train")
    assert len(positives) >= 3
    assert len(negatives) >= 3
    stages = ("index", "train_classifier", "train_segmenter")
    results = {stage: run.context.result(stage, StageResult) for stage in stages}

    assert results["index"].counts["negatives"] == len(negatives)
    assert results["index"].counts["unlabelled"] == 1
    assert "set data.untagged=negative" in results["index"].notes[-1]
    assert not any("every tagged training image" in note for note in results["train_classifier"].notes)
    assert results["train_classifier"].counts["steps"] == (2 * len(positives + negatives) + 7) // 8
    counts = results["train_segmenter"].counts
    assert counts["training images"] + counts["without a useful mask"] == len(positives + negatives)
    assert counts["negatives"] == len(negatives)


def test_masks_of_negatives_alone_train_no_segmenter(
    run: pipeline.RunResult, drawn: WithAndWithout, tmp_path: Path
) -> None:
    masks = read_table(run.context.stage_outputs["pseudo_masks"] / "masks")
    ignored = pc.if_else(pc.equal(masks["cue"], "negative"), 0.0, 1.0).cast(pa.float32())
    masks = masks.set_column(masks.column_names.index("ignored"), "ignored", ignored)
    (tmp_path / "masks").mkdir()
    write_table(tmp_path / "masks" / f"part-{0:08d}-{len(masks):08d}.parquet", masks)
    context = dataclasses.replace(run.context, stage_outputs={**run.context.stage_outputs, "pseudo_masks": tmp_path})
    count = len(drawn.named("disc", "train"))
    with pytest.raises(UserError, match=rf"all {count} pseudo masks of tagged images are ignored entirely"):
        train_segmenter.run(drawn.settings().config, context)


def test_masks_of_negatives_are_background_and_no_map_is_computed(
    run: pipeline.RunResult, drawn: WithAndWithout
) -> None:
    masks = Shards(run.context.stage_outputs["pseudo_masks"] / "masks")
    maps = Shards(run.context.stage_outputs["localize"] / "maps")
    assert set(masks) == {*drawn.named("disc", "train"), *drawn.named("none", "train")}
    assert set(maps) == set(drawn.named("disc", "train"))
    for image in drawn.named("none", "train"):
        (row,) = masks.rows(image).to_pylist()
        width, height = Image.open(drawn.table.parent / image).size
        assert row["cue"] == "negative"
        np.testing.assert_array_equal(decode_labels(row["mask"]), np.zeros((height, width)))


def test_predictions_of_negatives_are_scored(run: pipeline.RunResult, drawn: WithAndWithout) -> None:
    """A negative without a mask is known to be all background."""
    negatives = drawn.named("none", "val")
    assert negatives
    scored = [score.images for score in run.scores if score.output == "segmentation"]
    assert set(scored) == {len(negatives) + len(drawn.named("disc", "val"))}
    notes = run.context.result("evaluate", StageResult).notes
    assert (
        f"{len(negatives)} negative(s) of split val have no ground-truth mask, and are scored as all background"
        in notes
    )


def test_the_report_counts_negatives(run: pipeline.RunResult, drawn: WithAndWithout) -> None:
    report = run.context.folder.report.read_text()
    count = len(drawn.named("none", "train"))
    rows = re.findall(r">(\w+) → negatives</th><td[^>]*>(\d+)<", report)
    assert rows == [("index", str(count)), ("train_segmenter", str(count))]


def test_the_model_card_counts_negatives(run: pipeline.RunResult, drawn: WithAndWithout, tmp_path: Path) -> None:
    export(run.context.workspace, "one", "pretrained", tmp_path / "model")
    count = len(drawn.named("none", "train"))
    assert f"and {count} images that show none of the classes" in (tmp_path / "model/README.md").read_text()


def test_negatives_may_have_corrected_masks(run: pipeline.RunResult, drawn: WithAndWithout, tmp_path: Path) -> None:
    """One of them all background, another with an object, which its tags did not name."""
    first, second, *_ = drawn.named("none", "train")
    width, height = Image.open(drawn.table.parent / first).size
    background = np.zeros((height, width), np.uint8)
    width, height = Image.open(drawn.table.parent / second).size
    objects = np.zeros((height, width), np.uint8)
    objects[:20] = 1
    for image, mask in ((first, background), (second, objects)):
        (tmp_path / f"{Path(image).name}.png").write_bytes(encode_labels(mask))

    corrected = drawn.settings(f"data.corrected_masks={tmp_path}")
    again = pipeline.run(corrected, run.context.workspace, "corrected", until="pseudo_masks")
    masks = Shards(again.context.stage_outputs["pseudo_masks"] / "masks")
    for image, mask in ((first, background), (second, objects)):
        (row,) = masks.rows(image).to_pylist()
        assert row["cue"] == "corrected"
        np.testing.assert_array_equal(decode_labels(row["mask"]), mask)
    notes = again.context.result("pseudo_masks", StageResult).notes
    assert any(f"{second} contains disc" in note for note in notes)

    (tmp_path / f"{Path(*drawn.named('', 'train')).name}.png").write_bytes(encode_labels(background))
    with pytest.raises(UserError, match="match no training image with a tag, nor a negative"):
        pipeline.check(corrected.config, run.context.workspace, "any")


@pytest.mark.slow
def test_features_are_cached_once_and_belong_to_their_images(
    ray_local: None, drawn: WithAndWithout, tmp_path: Path
) -> None:
    """A frozen backbone: the maps read the features that the training cached, in which negatives have rows too."""
    workspace = Workspace(tmp_path / "workspace")
    corrected = tmp_path / "corrected"
    corrected.mkdir()
    negative, *_ = drawn.named("none", "train")
    width, height = Image.open(drawn.table.parent / negative).size
    (corrected / f"{Path(negative).name}.png").write_bytes(encode_labels(np.zeros((height, width), np.uint8)))
    options = {"data.tags.table": str(drawn.table)}
    resolved = resolve("tags", "photos", options, [*TINY_PHOTOS, f"data.corrected_masks={corrected}"])
    first = pipeline.run(resolved, workspace, "first", until="train_affinity")

    assert len(list(workspace.cache.glob("features-*"))) == 1
    positives = drawn.named("disc", "train")
    affinity_counts = first.context.result("train_affinity", StageResult).counts
    num_labels = affinity_counts["training images"] + affinity_counts["without a confident label"]
    assert num_labels == len(positives) + 1, "the negative with a corrected mask has labels without a map"

    table = drawn.table.with_name("positives.csv")
    lines = drawn.table.read_text().splitlines()
    table.write_text("\n".join([lines[0], *(line for line in lines if ",disc,train" in line)]))
    weights = first.context.stage_outputs["train_classifier"] / WEIGHTS
    options = {"data.tags.table": str(table)}
    alone = resolve("tags", "photos", options, [*TINY_PHOTOS, f"weights.classifier={weights}"])
    second = pipeline.run(alone, workspace, "second", until="localize")
    vectors = read_vectors(first.context.stage_outputs["localize"] / VECTORS)
    rounding = 2**-10  # of float16, as the images of a batch differ
    np.testing.assert_allclose(vectors, read_vectors(second.context.stage_outputs["localize"] / VECTORS), atol=rounding)


def test_ground_truth_that_contradicts_negatives_shows_before_the_trainings(
    run: pipeline.RunResult, drawn: WithAndWithout
) -> None:
    table = drawn.table.with_name("wrong.csv")
    table.write_text(drawn.table.read_text().replace("disc,val", ",val"))
    wrong = drawn._replace(table=table)
    pipeline.check(wrong.settings().config, run.context.workspace, "any")
    with pytest.raises(UserError, match="or other classes") as caught:
        pipeline.check(wrong.settings("data.untagged=negative").config, run.context.workspace, "any")
    assert "add the tags of images that show a class" in caught.value.remedy

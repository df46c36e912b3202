"""Maps, masks and predictions of other programs: runs without trainings, with the scores that other tools compute."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import jaccard_score  # type: ignore[import-untyped]
from typer.testing import CliRunner

import mcis
from mcis.datasets.classes import palette
from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import decode_labels, encode_labels
from mcis.datasets.index import INDEX_SCHEMA
from mcis.datasets.tables.shards import Shards
from mcis.platform import api, pipeline
from mcis.platform.cli import app
from mcis.platform.engine.errors import user_error_in
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.export import export
from mcis.platform.runs.files import contents_digest, read_table
from mcis.platform.runs.results import StageResult
from mcis.platform.stages.localization.imported import rows_per_shard

CLASSES = 3
NO_CLASSIFIER = "segmenter.init=pretrained"


class Files(NamedTuple):
    """What another program wrote for the images of the small devkit.

    Attributes:
        truth: Ground-truth masks by image id.
        predictions: Folder of label PNGs of the val images.
        masks: Folder of pseudo masks of the training images; 255 on a band.
        maps: Folder of maps of the training images, in the format irn.
    """

    truth: dict[str, NDArray[np.uint8]]
    predictions: Path
    masks: Path
    maps: Path


@pytest.fixture(scope="module")
def theirs(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Masks are the truth with a fifth of the pixels wrong; maps are 0.9 or 0.2 with noise."""
    folder = tmp_path_factory.mktemp("theirs")
    files = Files({}, folder / "predictions", folder / "masks", folder / "maps")
    for part in files[1:]:
        part.mkdir()
    for path in sorted((small.root / "SegmentationClassAug").glob("*.png")):
        truth = decode_labels(path.read_bytes())
        files.truth[path.stem] = truth
        rng = np.random.default_rng(len(files.truth))
        clean = np.where(truth == 255, 0, truth)
        wrong = rng.random(truth.shape) < 0.2
        labels = np.where(wrong, (clean + 1) % (CLASSES + 1), clean).astype(np.uint8)
        if path.stem.startswith("val"):
            (files.predictions / path.name).write_bytes(encode_labels(labels))
            continue
        labels[:4] = 255
        (files.masks / path.name).write_bytes(encode_labels(labels))
        tags = sorted(set(np.unique(truth).tolist()) - {0, 255})
        maps = np.stack([np.where(labels == tag, 0.9, 0.2) for tag in tags])
        maps = (maps + rng.uniform(-0.1, 0.1, maps.shape)).astype(np.float32)
        record = {"keys": torch.tensor(tags) - 1, "cam": torch.from_numpy(maps[:, ::4, ::4]), "high_res": maps}
        np.save(files.maps / path.stem, record)  # type: ignore[arg-type]
    return files


def computed(run: pipeline.RunResult) -> list[str]:
    return [stage for stage, is_computed in run.context.computed.items() if is_computed]


def notes(run: pipeline.RunResult, stage: str) -> str:
    return "\n".join(run.context.result(stage, StageResult).notes)


def iou_metric(pairs: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> float:
    """mIoU as in mmsegmentation's IoUMetric: areas by histograms without ignored pixels, summed over the images."""
    areas = np.zeros((3, CLASSES + 1))
    for label, prediction in pairs:
        valid = label != 255
        label, prediction = label[valid], prediction[valid]
        for row, values in enumerate((prediction[prediction == label], prediction, label)):
            areas[row] += np.histogram(values, bins=CLASSES + 1, range=(0, CLASSES))[0]
    intersect, predicted, true = areas
    with np.errstate(invalid="ignore"):
        return float(np.nanmean(intersect / (predicted + true - intersect)) * 100)


def prediction_pairs(theirs: Files) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    paths = sorted(theirs.predictions.glob("*.png"))
    return [(theirs.truth[path.stem], decode_labels(path.read_bytes())) for path in paths]


@pytest.fixture(scope="module")
def predicted(small: Any, theirs: Files) -> pipeline.RunResult:
    return small.run("their-predictions", f"predict.masks={theirs.predictions}")


def test_predictions_become_a_run_without_trainings(predicted: pipeline.RunResult) -> None:
    assert list(predicted.context.computed) == ["index", "predict", "evaluate", "report"]
    (score,) = predicted.scores
    assert (score.output, score.name, score.split, score.images) == ("segmentation", "imported", "val", 6)
    assert (score.method, score.crf, score.weights, score.recipe) == ("another program", False, "", "")
    assert score.boundary_miou is not None
    assert predicted.context.folder.report.exists()


def test_scores_of_predictions_are_those_of_other_tools(predicted: pipeline.RunResult, theirs: Files) -> None:
    pairs = prediction_pairs(theirs)
    (score,) = predicted.scores
    assert score.miou == pytest.approx(iou_metric(pairs), abs=0.006)

    truth = np.concatenate([label.ravel() for label, _ in pairs])
    labels = np.concatenate([prediction.ravel() for _, prediction in pairs])
    ious = jaccard_score(truth[truth != 255], labels[truth != 255], average=None, labels=range(CLASSES + 1))
    assert list(score.iou.values()) == pytest.approx((100 * ious).tolist(), abs=0.006)


def test_scores_of_predictions_are_those_of_torchmetrics(predicted: pipeline.RunResult, theirs: Files) -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    metric = classification.MulticlassJaccardIndex(CLASSES + 1, average="none", ignore_index=255)
    for label, prediction in prediction_pairs(theirs):
        metric.update(torch.from_numpy(prediction).long()[None], torch.from_numpy(label).long()[None])
    (score,) = predicted.scores
    assert list(score.iou.values()) == pytest.approx((100 * metric.compute()).tolist(), abs=0.006)


def test_predictions_in_colors_have_the_same_scores(
    small: Any, theirs: Files, predicted: pipeline.RunResult, tmp_path: Path
) -> None:
    for path in theirs.predictions.glob("*.png"):
        Image.fromarray(palette()[decode_labels(path.read_bytes())]).save(tmp_path / path.name)
    run = small.run("their-colors", f"predict.masks={tmp_path}", until="predict")
    assert run.scores == predicted.scores
    assert "palette" not in notes(run, "predict")

    labels = decode_labels((theirs.predictions / path.name).read_bytes())
    reordered = Image.fromarray(CLASSES - labels)
    reordered.putpalette(palette()[CLASSES::-1].tobytes())
    reordered.save(tmp_path / path.name)
    run = small.run("their-colors", f"predict.masks={tmp_path}", until="predict")
    assert run.scores == predicted.scores
    assert "1 of 6 predictions are palette PNGs whose indices differ" in notes(run, "predict")

    Image.new("RGB", Image.open(path).size, (1, 2, 3)).save(tmp_path / path.name)
    with pytest.raises(Exception, match="colors that are not those of PASCAL VOC's labels"):
        small.run("their-colors", f"predict.masks={tmp_path}", until="predict")


def test_predictions_as_logits_have_the_same_scores(
    small: Any, theirs: Files, predicted: pipeline.RunResult, tmp_path: Path
) -> None:
    for path in theirs.predictions.glob("*.png"):
        logits = np.moveaxis(np.eye(CLASSES + 1, dtype=np.float32)[decode_labels(path.read_bytes())], 2, 0)
        np.save(tmp_path / path.stem, {"msc_seg": logits[None]})  # type: ignore[arg-type]
    logits_run = small.run("their-logits", f"predict.masks={tmp_path}")
    assert [score.confusion for score in logits_run.scores] == [score.confusion for score in predicted.scores]


def write_labels(file: Path, labels: NDArray[np.uint8]) -> None:
    Image.fromarray(labels).save(file.with_suffix(".png"), compress_level=0)


def write_maps(file: Path, labels: NDArray[np.uint8]) -> None:
    maps = {index: (labels == index + 1).astype(np.float32) for index in range(CLASSES)}
    np.save(file, maps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "overrides", "until", "write"),
    [
        ("predict.masks", (), "predict", write_labels),
        ("pseudo_masks.masks", ("pseudo_masks.rule=imported", NO_CLASSIFIER), "pseudo_masks", write_labels),
        ("localize.maps", ("localize.maps_format=psa", "pseudo_masks.rule=crf", NO_CLASSIFIER), "localize", write_maps),
    ],
)
def test_files_of_equal_size_and_time_have_their_own_scores(
    small: Any,
    theirs: Files,
    tmp_path: Path,
    key: str,
    overrides: tuple[str, ...],
    until: str,
    write: Callable[[Path, NDArray[np.uint8]], None],
) -> None:
    for image_id, truth in theirs.truth.items():
        right = np.where(truth == 255, 0, truth).astype(np.uint8)
        for name, labels in (("right", right), ("background", np.zeros_like(right))):
            (tmp_path / name).mkdir(exist_ok=True)
            write(tmp_path / name / image_id, labels)
    for file in tmp_path.glob("*/*"):
        os.utime(file, (0, 0))
    sizes = []
    for name in ("right", "background"):
        sizes.append([file.stat().st_size for file in sorted((tmp_path / name).iterdir())])
    assert sizes[0] == sizes[1]

    mious = {}
    for name in ("right", "background"):
        files = f"{key}={tmp_path / name}"
        run = small.run(f"{name}-{until}", files, *overrides, "compute.stop_if_not_learning=false", until=until)
        (score,) = run.scores
        mious[name] = score.miou
    assert mious["right"] == 100
    assert mious["background"] < 50


def test_masks_are_pseudo_masks_with_unsure_pixels_as_background(small: Any, theirs: Files, tmp_path: Path) -> None:
    overrides = ("pseudo_masks.rule=imported", f"pseudo_masks.masks={theirs.masks}", NO_CLASSIFIER)
    run = small.run("their-masks", *overrides, until="pseudo_masks")
    assert list(run.context.computed) == ["index", "pseudo_masks", "evaluate", "report"]
    (score,) = run.scores
    assert (score.output, score.name, score.split, score.images) == ("pseudo_masks", "imported", "train", 24)
    assert score.method == "another program"
    assert "are 255: not trained on, and scored as background" in notes(run, "pseudo_masks")

    pairs = []
    for path in sorted(theirs.masks.glob("*.png")):
        labels = decode_labels(path.read_bytes())
        stored = Shards(run.context.stage_outputs["pseudo_masks"] / "masks").rows(path.stem)
        np.testing.assert_array_equal(decode_labels(stored["mask"][0].as_py()), labels)
        pairs.append((theirs.truth[path.stem], np.where(labels == 255, 0, labels)))
    assert score.miou == pytest.approx(iou_metric(pairs), abs=0.006)

    with pytest.raises(UserError, match="has no maps: it has reached index, pseudo_masks") as caught:
        export(small.workspace, "their-masks", "maps", tmp_path)
    assert caught.value.remedy.startswith("name another run: ")


def test_a_mask_whose_pixels_are_all_ignored_is_noted(small: Any, theirs: Files, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    shutil.copytree(theirs.masks, masks)
    first = min(masks.glob("*.png"))
    labels = decode_labels(first.read_bytes())
    first.write_bytes(encode_labels(np.full_like(labels, 255)))

    overrides = ("pseudo_masks.rule=imported", f"pseudo_masks.masks={masks}", NO_CLASSIFIER)
    run = small.run("their-ignored-mask", *overrides, until="pseudo_masks")
    noted = notes(run, "pseudo_masks")
    assert "1 pseudo mask(s) are ignored entirely, because all their pixels are 255" in noted
    assert "foreground" not in noted


@pytest.fixture(scope="module")
def mapped(small: Any, theirs: Files) -> pipeline.RunResult:
    overrides = (f"localize.maps={theirs.maps}", "pseudo_masks.rule=crf", NO_CLASSIFIER)
    return small.run("their-maps", *overrides, until="localize")


def test_maps_that_are_replaced_are_imported_again_even_with_equal_size_and_time(
    small: Any, theirs: Files, tmp_path: Path
) -> None:
    folder = tmp_path / "maps"
    shutil.copytree(theirs.maps, folder)
    overrides = (f"localize.maps={folder}", "pseudo_masks.rule=crf", NO_CLASSIFIER)
    before = small.run("replaced-maps", *overrides, until="localize")
    for path in folder.iterdir():
        stat = path.stat()
        record = np.load(path, allow_pickle=True).item()
        np.save(path, record | {"high_res": 1 - record["high_res"]})
        assert path.stat().st_size == stat.st_size
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = small.run("replaced-maps", *overrides, until="localize")
    assert after.scores[0].miou < before.scores[0].miou


def test_large_files_are_recognized_by_their_content(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in "ab"]
    for path, last in zip(files, (b"1", b"2"), strict=True):
        with open(path, "wb") as file:
            file.seek(2**28)
            file.write(last)
    digests = {contents_digest([path]) for path in files}
    assert len(digests) == 2
    assert contents_digest([None]) not in digests


def test_maps_are_scored_as_given(mapped: pipeline.RunResult, theirs: Files) -> None:
    assert list(mapped.context.computed) == ["index", "localize", "evaluate", "report"]
    (score,) = mapped.scores
    assert (score.output, score.name, score.map_scale, score.related) == (
        "localization_maps",
        "imported",
        "given",
        None,
    )

    def miou_at(threshold: float) -> float:
        pairs = []
        for path in sorted(theirs.maps.glob("*.npy")):
            record = np.load(path, allow_pickle=True).item()
            labels = np.append(0, record["keys"].numpy() + 1).astype(np.uint8)
            maps = record["high_res"]
            background = np.full((1, *maps.shape[1:]), threshold, np.float32)
            # A score that equals the threshold is foreground.
            winner = np.concatenate([maps, background]).argmax(axis=0)
            pairs.append((theirs.truth[path.stem], np.append(labels[1:], 0).astype(np.uint8)[winner]))
        return iou_metric(pairs)

    assert score.threshold is not None
    assert score.miou == pytest.approx(miou_at(score.threshold), abs=0.006)
    assert score.miou >= max(miou_at(threshold) for threshold in (0.2, 0.4, 0.6)) - 0.006
    assert score.held_out_miou is not None
    assert score.held_out_miou <= score.miou + 0.006
    assert f"{score.held_out_miou:.2f} if each half of the 24 images" in notes(mapped, "evaluate")


def test_equal_maps_in_another_folder_and_format_are_one_output(
    small: Any, theirs: Files, mapped: pipeline.RunResult, tmp_path: Path
) -> None:
    for path in theirs.maps.glob("*.npy"):
        record = np.load(path, allow_pickle=True).item()
        by_class = dict(zip(record["keys"].tolist(), record["high_res"], strict=True))
        np.save(tmp_path / path.stem, by_class)  # type: ignore[arg-type]
    overrides = (f"localize.maps={tmp_path}", "localize.maps_format=psa", "pseudo_masks.rule=crf", NO_CLASSIFIER)
    run = small.run("their-psa-maps", *overrides, until="localize")
    assert computed(run) == ["localize", "report"]
    assert run.scores == mapped.scores


@pytest.mark.parametrize(
    ("height", "width", "tags", "expected"),
    [(375, 500, [0, 5], 16), (2000, 1500, [1], 11), (3000, 4000, [0, 1], 1), (10_000, 10_000, [0], 1)],
)
def test_shards_of_large_maps_have_few_images(height: int, width: int, tags: list[int], expected: int) -> None:
    """A map takes 4 bytes per pixel, and a shard at most 128 MiB or one image."""
    images = sized(*[(height, width, tags)] * 20)
    assert rows_per_shard(images, 16) == expected
    assert rows_per_shard(images, 8) == min(8, expected)


def sized(*images: tuple[int, int, list[int]]) -> pa.Table:
    """Rows of images with these heights, widths and tags."""
    schema = pa.schema([INDEX_SCHEMA.field(name) for name in ("height", "width", "tags")])
    rows = [dict(zip(schema.names, image, strict=True)) for image in images]
    return pa.Table.from_pylist(rows, schema=schema)


def test_one_large_map_does_not_decide_for_all_shards() -> None:
    ordinary = [(375, 500, [0, 5])] * 40
    assert rows_per_shard(sized(*ordinary, (4000, 5000, [0])), 16) == 16
    assert rows_per_shard(sized(*ordinary, (10_000, 10_000, [0])), 16) == 5
    assert rows_per_shard(sized((3000, 4000, [0, 1]), (300, 200, [0])), 16) == 2
    assert rows_per_shard(sized(), 16) == 1


def test_maps_that_are_missing_or_of_other_classes(small: Any, theirs: Files, tmp_path: Path) -> None:
    shutil.copytree(theirs.maps, tmp_path, dirs_exist_ok=True)
    first, second, third, *_ = sorted(tmp_path.glob("*.npy"))
    record = np.load(first, allow_pickle=True).item()
    tags = record["keys"].tolist()
    others = [index for index in range(CLASSES) if index not in tags]
    added = {index: np.zeros(record["high_res"].shape[1:], np.float32) for index in others}
    maps = np.stack([*record["high_res"][1:], *added.values()])
    np.save(first, {"keys": np.array([*tags[1:], *added]), "high_res": maps})  # type: ignore[arg-type]
    shutil.copy(first, tmp_path / "nobody.npy")
    overrides = (f"localize.maps={tmp_path}", "pseudo_masks.rule=crf", NO_CLASSIFIER)
    run = small.run("other-maps", *overrides, until="localize")
    assert f"1 tag(s) have no map in the files, and get one of zeros: {first.stem} (" in notes(run, "localize")
    assert f"the files of 1 image(s) have maps of classes without a tag, left out: {first.stem} (" in notes(
        run, "localize"
    )
    assert f"1 of 25 map files in {tmp_path} belong to no image" in notes(run, "localize")
    stored = image_maps(Shards(run.context.stage_outputs["localize"] / "maps"), first.stem)
    assert stored.classes.tolist() == tags
    assert not stored.maps[0].any()

    broken = np.load(second, allow_pickle=True).item()
    np.save(second, broken | {"high_res": broken["high_res"] * np.nan})
    with pytest.raises(Exception, match="not a finite number") as caught:
        small.run("other-maps", *overrides, until="localize")
    assert user_error_in(caught.value)

    second.unlink()
    third.unlink()
    with pytest.raises(UserError, match=rf"2 of 24 images have no map in .*: {second.stem}, {third.stem}"):
        small.run("other-maps", *overrides, until="localize")


def test_files_of_other_images_are_refused_before_a_run(small: Any, theirs: Files, tmp_path: Path) -> None:
    for key, folder in (("localize.maps", theirs.maps), ("predict.masks", theirs.predictions)):
        other = tmp_path / key
        other.mkdir()
        shutil.copy(next(folder.iterdir()), other / f"other{next(folder.iterdir()).suffix}")
        config = small.settings(f"{key}={other}", NO_CLASSIFIER).config
        with pytest.raises(UserError, match=r"none of the 1 .*s in .* belongs to one of the"):
            pipeline.check(config, small.workspace, "any")


@pytest.fixture(scope="module")
def reimported(small: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[pipeline.RunResult, pipeline.RunResult]:
    """A run with maps of the project, and a run that imports what `mcis export maps --format irn` writes."""
    thresholds = ("pseudo_masks.threshold=0.5", "pseudo_masks.background_threshold=0.3")
    overrides = ("maps.scale=maximum", "localize.related=0", "pseudo_masks.rule=crf", *thresholds)
    own = small.run("own-maps", *overrides, until="pseudo_masks")
    folder = tmp_path_factory.mktemp("exported")
    export(small.workspace, "own-maps", "maps", folder, "irn")
    again = small.run("own-again", *overrides, f"localize.maps={folder}", NO_CLASSIFIER, until="pseudo_masks")
    return own, again


def test_maps_of_the_project_give_the_same_scores_when_imported(
    reimported: tuple[pipeline.RunResult, pipeline.RunResult],
) -> None:
    own, again = reimported
    assert "train_classifier" not in again.context.computed
    assert [score.output for score in again.scores] == ["localization_maps", "pseudo_masks"]
    for before, after in zip(own.scores, again.scores, strict=True):
        assert (after.miou, after.iou, after.confusion) == (before.miou, before.iou, before.confusion)
        assert (after.threshold, after.held_out_miou) == (before.threshold, before.held_out_miou)
    assert own.scores[0].held_out_miou is not None


def test_maps_of_the_project_give_the_same_masks_when_imported(
    reimported: tuple[pipeline.RunResult, pipeline.RunResult],
) -> None:
    own, again = (read_table(run.context.stage_outputs["pseudo_masks"] / "masks") for run in reimported)
    assert own.equals(again)


@pytest.mark.slow
def test_a_network_is_trained_on_imported_masks(small: Any, theirs: Files) -> None:
    overrides = ("pseudo_masks.rule=imported", f"pseudo_masks.masks={theirs.masks}", NO_CLASSIFIER)
    run = small.run("their-masks", *overrides)
    assert "train_segmenter" in computed(run)
    assert run.scores[-1].trained_on == "pseudo masks of another program"


def invoke(small: Any, *arguments: str) -> Any:
    command = [*arguments, "--workspace", str(small.workspace.root)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"})


def test_evaluate_and_compare_are_two_plain_commands(
    small: Any, theirs: Files, predicted: pipeline.RunResult, tmp_path: Path, parsed: Callable[..., Any]
) -> None:
    for path in theirs.predictions.glob("*.png"):
        labels = decode_labels(path.read_bytes())
        labels[:20] = 0
        (tmp_path / path.name).write_bytes(encode_labels(labels))
    source = ["voc", "--voc", str(small.root), f"data.classes={small.root / 'classes.txt'}", "--recipe", "scratch"]
    done = invoke(small, "evaluate", str(tmp_path), *source, "--name", "worse", "data.min_side=16")
    assert done.exit_code == 0, done.output

    page = tmp_path / "page.html"
    done = invoke(small, "compare", "their-predictions", "worse", "--html", str(page))
    assert done.exit_code == 0, done.output
    assert "worse" in done.output
    assert "6 of the 6 images that all runs have" in parsed(page).text


PROGRAMS = Path(__file__).resolve().parents[1] / "other_programs"


def test_tags_of_voc_are_written_for_other_programs(tmp_path: Path) -> None:
    (tmp_path / "ImageSets/Segmentation").mkdir(parents=True)
    (tmp_path / "ImageSets/Segmentation/train.txt").write_text("a\nb\nc\n")
    (tmp_path / "Annotations").mkdir()
    person = "<object><name>person</name><part><name>head</name></part></object>"
    hidden_dog = "<object><name>dog</name><difficult>1</difficult></object>"
    cat = "<object><name>cat</name><difficult>0</difficult></object>"
    for image_id, objects in {"a": person + hidden_dog + cat + cat, "b": hidden_dog, "c": cat}.items():
        (tmp_path / f"Annotations/{image_id}.xml").write_text(f"<annotation>{objects}</annotation>")

    command = [sys.executable, str(PROGRAMS / "write_tags.py"), str(tmp_path), "train", str(tmp_path / "tags.txt")]
    subprocess.run(command, check=True)
    assert (tmp_path / "tags.txt").read_text() == "a 7 14\nc 7\n"


def run_program(name: str, small: Any, *arguments: str | Path) -> None:
    """Runs a program that does not use mcis on the images and tags of the small devkit."""
    tags = small.root / "ImageSets/Segmentation/train_aug_cls.txt"
    command = [sys.executable, str(PROGRAMS / name), str(small.root / "JPEGImages"), str(tags), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_maps_and_masks_of_independent_programs_are_compared_with_a_run(
    small: Any, tmp_path: Path, parsed: Callable[..., Any]
) -> None:
    """Grad-CAM in two formats, and superpixels with tags, next to the recipe; see docs/howto/compare-methods.md."""
    assert small.first.scores
    run_program("grad_cam.py", small, tmp_path / "cams", "256")
    run_program("superpixel_masks.py", small, tmp_path / "masks")
    source = ["voc", "--voc", str(small.root), f"data.classes={small.root / 'classes.txt'}", "--recipe", "scratch"]
    source += ["data.min_side=16", NO_CLASSIFIER, "pseudo_masks.rule=crf"]
    maps = {form: ["--maps", str(tmp_path / "cams" / form), "--maps-format", form] for form in ("irn", "psa")}
    commands = [["run", *source, "--name", name, "--until", "pseudo_masks", *maps[name]] for name in maps]
    commands.append(["evaluate", str(tmp_path / "masks"), *source[:-1], "--name", "superpixels", "--as", "masks"])
    for command in commands:
        done = invoke(small, *command)
        assert done.exit_code == 0, done.output

    page = tmp_path / "page.html"
    done = invoke(small, "compare", "first", "irn", "superpixels", "--html", str(page))
    assert done.exit_code == 0, done.output
    assert "pseudo masks" in done.output
    assert "of the 24 images that all runs have" in parsed(page).text
    of_maps, of_masks = zip(*(api.scores(small.workspace.root / "runs" / name) for name in maps), strict=True)
    assert of_maps[0].miou == of_maps[1].miou
    assert of_masks[0].miou == of_masks[1].miou > 20


@pytest.mark.parametrize(("kind", "scored"), [("masks", "pseudo_masks"), ("maps", "localization_maps")])
def test_files_are_scored_from_python(
    kind: Literal["masks", "maps"], scored: str, small: Any, theirs: Files, tmp_path: Path
) -> None:
    values = {"data.classes": str(small.root / "classes.txt"), "data.min_side": 16}
    options: dict[str, Any] = {"recipe": "scratch", "overrides": values, "workspace": small.workspace.root}
    result = mcis.evaluate(getattr(theirs, kind), "voc", name=f"python-{kind}", kind=kind, voc=small.root, **options)
    assert (scored, 24) in {(score.output, score.images) for score in result.scores}


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("maps", ["--maps", "other"], "an argument and an option for localize.maps"),
        ("predictions", ["predict.masks=other"], "two folders: the one to score, and predict.masks"),
        ("masks", ["--set", "pseudo_masks.masks=other"], "two folders: the one to score, and pseudo_masks.masks"),
    ],
)
def test_two_folders_to_score_are_refused(
    small: Any, tmp_path: Path, kind: str, words: list[str], message: str
) -> None:
    source = ["voc", "--voc", str(small.root), "--recipe", "scratch", "--name", "two"]
    done = invoke(small, "evaluate", str(tmp_path), *source, "--as", kind, *words)
    assert done.exit_code == 1
    assert message in done.output


def test_a_run_with_trainings_is_not_replaced(small: Any, theirs: Files) -> None:
    name = small.first.context.name
    done = invoke(small, "evaluate", str(theirs.predictions), "voc", "--voc", str(small.root), "--name", name)
    assert done.exit_code == 1
    assert f"{name} is a run without predict.masks" in done.output


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pseudo_masks.rule=imported"], "pseudo_masks.masks is not set"),
        (["pseudo_masks.masks=masks"], "pseudo_masks.masks is set but pseudo_masks.rule is auto"),
        (["localize.maps=maps"], "segmenter.init is classifier but maps or masks of another program are given"),
        (["localize.maps=maps", "supervision=full", NO_CLASSIFIER], "localize.maps is set but supervision is full"),
        (["localize.maps=maps", "localize.maps_format=mat", NO_CLASSIFIER], "Input should be one of irn, amn"),
    ],
)
def test_contradictions_are_refused(small: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small.settings(*overrides)


def test_keys_of_stages_do_not_depend_on_the_new_fields(small: Any) -> None:
    config = small.settings().config
    assert {"maps", "maps_format"}.isdisjoint(config.localize.model_dump(mode="json"))
    assert "masks" not in config.predict.model_dump(mode="json")
    assert "masks" not in config.pseudo_masks.model_dump(mode="json")

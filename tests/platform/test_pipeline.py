"""The whole pipeline on a small drawn data set: its output, a second call, and a run without ground truth."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_labels
from mcis.datasets.synthetic import devkit as synthetic
from mcis.datasets.tables.shards import Shards
from mcis.platform import pipeline
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.engine.errors import user_error_in
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.bound import upper_bound
from mcis.platform.reporting.compared_runs import open_cases
from mcis.platform.reporting.comparison import Settings, compare
from mcis.platform.reporting.export import export
from mcis.platform.reporting.run_data import Bound
from mcis.platform.runs import stage as stage_of_runs
from mcis.platform.runs.files import read_json, read_table
from mcis.platform.runs.results import IndexResult, MasksResult, StageResult, TrainingResult
from mcis.platform.runs.version import git_commit
from mcis.platform.runs.workspace import Workspace

TINY = (
    "classifier.epochs=2",
    "classifier.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "localize.related=3",
    "segmenter.channels=24",
    "segmenter.steps=6",
    "segmenter.batch=4",
    "segmenter.width=16",
    "segmenter.crop=64",
    "pseudo_masks.smallest=0",
    "report.panels=4",
    "compute.shard_rows=8",
    "compute.threads=1",
)
SCORE_KEYS = {
    "what", "name", "split", "miou", "iou", "images", "scales", "mirror", "crf", "threshold", "background_cue",
    "precision", "recall", "boundary_miou", "boundary_iou", "confusion",
    "map_scale", "related", "method", "ignored_share", "by_maps", "trained_on", "seed", "recipe", "weights", "git",
    "code", "reused",
}  # fmt: skip


def draw(folder: Path) -> Path:
    root = folder / "VOC2012"
    synthetic.draw(root, train=24, val=6, size=64, classes=3)
    return root


def settings(root: Path, *assignments: str) -> Resolved:
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
    return resolve("voc", "small", options, [*TINY, *assignments])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("workspace"))
    shutil.copy(mlflow_store, workspace.tracking_store)
    return workspace


@pytest.fixture(scope="module")
def first(ray_local: None, root: Path, workspace: Workspace) -> pipeline.RunResult:
    return pipeline.run(settings(root), workspace, "first")


def test_a_score_never_travels_without_what_it_means(first: pipeline.RunResult, workspace: Workspace) -> None:
    written = json.loads((workspace.runs / "first" / "scores.json").read_text())
    assert set(written) == {"scores", "counts", "seconds", "busy"}
    assert written["scores"] == [score.as_json() for score in first.scores]
    assert all(set(score) == SCORE_KEYS for score in written["scores"])
    assert [(s.what, s.split, s.related, s.crf) for s in first.scores] == [
        ("localization_maps", "train", 0, None),
        ("localization_maps", "train", 3, None),
        ("pseudo_masks", "train", 3, None),
        ("baseline", "train", None, None),
        ("baseline", "train", None, None),
        ("segmentation", "val", None, False),
        ("segmentation", "val", None, True),
    ]
    assert [s.map_scale for s in first.scores] == ["logarithm"] * 3 + [None] * 4
    assert [s.method for s in first.scores] == [None, "co-attention", "co-attention"] + [None] * 4
    masks = first.scores[2]
    assert masks.by_maps is not None
    assert 0 < masks.by_maps < 1
    for score in first.scores:
        assert np.sum(score.confusion) == np.sum(first.scores[0 if score.split == "train" else -1].confusion)
        assert (score.boundary_miou is None) == (score.what == "localization_maps")
        values = [v for v in score.iou.values() if v is not None]
        assert score.miou == pytest.approx(sum(values) / len(values), abs=0.02)
        assert set(score.iou) == {"background", *first.context.classes}
    assert written["counts"]["index"]["images"] == {"train": 24, "val": 6}
    scored = {"train": 24, "val": 6}
    assert written["counts"]["evaluate"] == {"scored": scored, "tags that disagree with the mask": 0}
    assert first.context.result("evaluate", StageResult).notes == ()
    assert set(written["seconds"]) == set(pipeline.STAGE_NAMES) - {"report", "train_affinity"}


def test_what_the_gate_brings_stands_beside_what_basic_scores_know(first: pipeline.RunResult) -> None:
    counts = first.context.result("train_classifier", TrainingResult).counts
    assert counts["val pairs"] == 12
    scores = read_table(first.context.inputs["train_classifier"] / "pairs")
    assert len(scores) == 12
    for label in ("val mAP of unshared classes", "the same of basic scores"):
        assert 0 <= counts[label] <= 100


def test_the_best_tag_is_a_bound_that_the_random_tag_is_under(first: pipeline.RunResult) -> None:
    random, best = (s.miou for s in first.scores if s.what == "baseline")
    assert random < best


def test_there_is_a_map_for_each_tag_of_each_training_image(first: pipeline.RunResult) -> None:
    index = read_table(first.context.inputs["index"] / "index.parquet").to_pylist()
    for name in ("single", "maps"):
        shards = Shards(first.context.inputs["localize"] / name)
        for row in index:
            found = image_maps(shards, row["image_id"])
            if row["split"] == "val":
                assert found is None
                continue
            assert found is not None
            assert found.classes.tolist() == row["tags"]
            assert found.maps.shape == (len(row["tags"]), 8, 8)
            assert found.maps.min() < found.maps.max()


def test_maps_masks_and_predictions_are_exported(
    first: pipeline.RunResult, root: Path, workspace: Workspace, tmp_path: Path
) -> None:
    inputs, index = first.context.inputs, read_table(first.context.inputs["index"] / "index.parquet")
    rows = {row["image_id"]: row for row in index.to_pylist()}
    said = [export(workspace, "first", what, tmp_path / what) for what in ("maps", "masks", "predictions")]
    tags = sum(len(r["tags"]) for r in rows.values() if r["split"] == "train")
    assert [text.split(" ")[0] for text in said] == [str(tags), "24", "6"]
    for image_id, found in (
        (i, image_maps(Shards(inputs["localize"] / "maps"), i)) for i in ("train_000000", "train_000023")
    ):
        assert found is not None
        row = rows[image_id]
        for k in found.classes:
            name = first.context.classes[k]
            gray = Image.open(tmp_path / "maps" / image_id / f"{name}.png")
            assert (gray.mode, gray.size) == ("L", (row["width"], row["height"]))
            assert Image.open(tmp_path / "maps" / image_id / f"{name}.overlay.jpg").size == gray.size
        assert len(list((tmp_path / "maps" / image_id).iterdir())) == 2 * len(found.classes)
    mask = Shards(inputs["pseudo_masks"] / "masks").rows("train_000003")
    assert mask is not None
    devkit = tmp_path / "masks" / "VOCdevkit" / "VOC2012"
    assert (devkit / "SegmentationClass" / "train_000003.png").read_bytes() == mask["mask"][0].as_py()
    assert (devkit / "JPEGImages" / "train_000003.jpg").samefile(rows["train_000003"]["uri"])
    for what in ("masks", "predictions"):
        labels = (tmp_path / what / "labels.csv").read_text().splitlines()
        assert labels[:2] == ["label,class,red,green,blue", "0,background,0,0,0"]
        assert labels[2] == f"1,{first.context.classes[0]},128,0,0"
        assert labels[-1] == "255,ignore,224,224,192"
    assert not (tmp_path / "maps" / "labels.csv").exists()
    cues = (tmp_path / "masks" / "cues.csv").read_text().splitlines()
    assert cues == ["image,cue,name", *(f"{i},saliency,{i}" for i, row in rows.items() if row["split"] == "train")]
    assert not (tmp_path / "predictions" / "cues.csv").exists()
    with pytest.raises(UserError, match="export pictures"):
        export(workspace, "first", "pictures", tmp_path)
    other = pipeline.run(settings(root), workspace, "short", until="index")
    with pytest.raises(UserError, match="has no masks: it has come to index"):
        export(workspace, other.context.name, "masks", tmp_path)


def test_a_disk_too_small_ends_a_run_before_any_training_but_not_a_finished_one(
    first: pipeline.RunResult, root: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcis.platform.networks.disk.free_bytes", lambda folder: 100_000)
    again = pipeline.run(settings(root), workspace, "first")
    assert {stage for stage, computed in again.context.computed.items() if computed} == {"report"}
    with pytest.raises(UserError, match=r"the run takes .* more on the disk of .*, which has 97\.7 KiB free") as caught:
        pipeline.run(settings(root, "seed=7"), workspace, "full")
    assert "localize.features_gb" in caught.value.remedy
    assert list(workspace.outputs("full")) == ["index"]
    pipeline.run(settings(root, "evaluate.thresholds=100"), workspace, "less", until="predict")


def test_the_file_that_a_run_wrote_gives_the_same_keys(first: pipeline.RunResult, workspace: Workspace) -> None:
    resolved = resolve(file=workspace.runs / "first" / "config.toml")
    again = pipeline.run(resolved, workspace, "fed-back")
    assert dict(again.context.inputs).keys() == dict(first.context.inputs).keys()
    assert [stage for stage, computed in again.context.computed.items() if computed] == ["report"]


def test_gpus_that_are_absent_end_a_run_of_networks_before_its_index_but_not_an_index(
    ray_local: None, root: Path, workspace: Workspace
) -> None:
    """Whether there are nodes with GPUs now changes no key, so a run that asks for them never falls back to CPUs."""
    with pytest.raises(UserError, match=r"0 GPU\(s\) for compute.workers=1 and compute.gpu=true"):
        pipeline.run(settings(root, "compute.gpu=true"), workspace, "gpu")
    assert workspace.outputs("gpu") == {}
    assert list(pipeline.run(settings(root, "compute.gpu=true"), workspace, "gpu", until="index").context.computed)


def test_a_second_call_computes_nothing(first: pipeline.RunResult, root: Path, workspace: Workspace) -> None:
    again = pipeline.run(settings(root), workspace, "first")
    assert [stage for stage, computed in again.context.computed.items() if computed] == ["report"]
    assert again.scores == first.scores
    assert again.context.tracker.run_id == first.context.tracker.run_id


def test_a_changed_threshold_never_retrains_the_classifier(
    first: pipeline.RunResult, root: Path, workspace: Workspace
) -> None:
    other = pipeline.run(settings(root, "pseudo_masks.floor=0.2"), workspace, "other", until="pseudo_masks")
    assert [s for s, computed in other.context.computed.items() if computed] == ["pseudo_masks", "evaluate", "report"]
    assert other.context.inputs["train_classifier"] == first.context.inputs["train_classifier"]
    assert other.context.tracker.run_id != first.context.tracker.run_id
    kept = [s for s in first.scores if s.what in ("localization_maps", "baseline")]
    assert [s for s in other.scores if s.what != "pseudo_masks"] == kept
    assert [s.what for s in other.scores].count("pseudo_masks") == 1
    assert "predict" not in other.context.inputs


def test_the_segmenters_weights_do_not_change_the_classifiers_key(
    first: pipeline.RunResult, root: Path, workspace: Workspace, tmp_path: Path
) -> None:
    other = pipeline.run(settings(root, f"weights.segmenter={tmp_path / 'any.pth'}"), workspace, "w", until="localize")
    for stage in ("index", "train_classifier", "localize"):
        assert other.context.inputs[stage] == first.context.inputs[stage]


def test_baselines_are_made_again_of_other_saliency_maps(ray_local: None, tmp_path: Path, workspace: Workspace) -> None:
    """Also where nothing before them reads saliency."""
    root = draw(tmp_path)
    before = pipeline.run(settings(root), workspace, "baselines", until="localize")
    for path in (root / "SaliencyMaps").iterdir():
        Image.new("L", Image.open(path).size, 255).save(path)
    after = pipeline.run(settings(root), workspace, "baselines", until="localize")
    assert [s for s, computed in after.context.computed.items() if computed] == ["evaluate", "report"]
    baselines = [[s.miou for s in r.scores if s.what == "baseline"] for r in (before, after)]
    assert all(whole < salient for salient, whole in zip(*baselines, strict=True))


def test_another_scale_of_maps_is_another_score_of_the_same_maps(
    first: pipeline.RunResult, root: Path, workspace: Workspace
) -> None:
    other = pipeline.run(settings(root, "maps.scale=range"), workspace, "range", until="pseudo_masks")
    assert [s for s, computed in other.context.computed.items() if computed] == ["pseudo_masks", "evaluate", "report"]
    assert [s.map_scale for s in other.scores] == ["range"] * 3 + [None] * 2
    masks = [read_table(r.context.inputs["pseudo_masks"] / "masks")["labels"] for r in (first, other)]
    assert masks[0] != masks[1]
    curves = [read_json(r.context.inputs["evaluate"] / "curves.json") for r in (first, other)]
    assert [set(curve) for curve in curves] == [{"single round", "R = 3"}] * 2
    assert all(curves[0][name] != curves[1][name] for name in curves[0])
    cases = open_cases(workspace.root, ["first", "range"], what=("localization_maps", "pseudo_masks"))
    comparison = compare(cases, Settings(resamples=200))
    assert [(row.key, *(value and value.value for value in row.values)) for row in comparison.keys] == [
        ("maps.scale", "logarithm", "range")
    ]
    maps, masks_themselves, edges = comparison.differences
    for compared, score in ((maps, 1), (masks_themselves, 2)):
        for run, miou in ((first, compared.first), (other, compared.second)):
            assert miou == pytest.approx(run.scores[score].miou, abs=0.00501)
    assert maps.what == "localization maps, R = 3"
    assert (edges.what, edges.figure) == ("pseudo masks, R = 3", "boundary mIoU")
    curve = other.context.inputs["evaluate"] / "curves.json"
    written = curve.read_bytes()
    curve.unlink()
    try:
        with pytest.raises(UserError, match=r"curves.json is missing"):
            compare(cases, Settings(resamples=200))
    finally:
        curve.write_bytes(written)


@pytest.mark.slow
def test_from_a_stage_on_all_is_computed_again_and_ends_the_same(
    first: pipeline.RunResult, root: Path, workspace: Workspace
) -> None:
    before = [bytes_of(first.context.inputs[s] / "weights.pt") for s in ("train_classifier", "train_segmenter")]
    again = pipeline.run(settings(root), workspace, "first", start="train_classifier")
    assert [s for s, computed in again.context.computed.items() if not computed] == ["index"]
    after = [bytes_of(again.context.inputs[s] / "weights.pt") for s in ("train_classifier", "train_segmenter")]
    assert before == after
    assert [s.miou for s in again.scores] == [s.miou for s in first.scores]


def bytes_of(path: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in torch.load(path, weights_only=True)["state_dict"].items()}


def test_truth_cannot_reach_training(first: pipeline.RunResult, tmp_path: Path) -> None:
    """Without the folder of masks every stage runs and ends in the same weights and masks, only without scores.

    Once there are masks, the scores are made; with other masks, other scores; nothing else is computed again. A mask
    of another size is named.
    """
    root, workspace = draw(tmp_path), Workspace(tmp_path / "workspace")
    shutil.move(root / "SegmentationClassAug", tmp_path / "truth")
    without = pipeline.run(settings(root), workspace, "run")
    assert without.scores == []
    assert "there are no ground-truth masks" in " ".join(without.context.result("evaluate", StageResult).notes)
    for stage, table in (("localize", "maps"), ("pseudo_masks", "masks"), ("predict", "predictions")):
        ours, theirs = (read_table(r.context.inputs[stage] / table) for r in (without, first))
        assert ours.equals(theirs)
    for stage in ("train_classifier", "train_segmenter"):
        ours, theirs = (bytes_of(r.context.inputs[stage] / "weights.pt") for r in (without, first))
        assert ours == theirs

    shutil.move(tmp_path / "truth", root / "SegmentationClassAug")
    scored = pipeline.run(settings(root), workspace, "run")
    assert [s for s, computed in scored.context.computed.items() if computed] == ["index", "evaluate", "report"]
    assert [s.miou for s in scored.scores] == [s.miou for s in first.scores]

    for path in (root / "SegmentationClassAug").glob("*.png"):
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    other = pipeline.run(settings(root), workspace, "run")
    assert [s for s, computed in other.context.computed.items() if computed] == ["evaluate", "report"]
    assert {stage: folder for stage, folder in other.context.inputs.items() if stage not in ("evaluate", "report")} == {
        stage: folder for stage, folder in scored.context.inputs.items() if stage not in ("evaluate", "report")
    }
    masks = [next(s.miou for s in r.scores if s.what == "pseudo_masks") for r in (scored, other)]
    assert masks[0] != masks[1]

    mask = sorted((root / "SegmentationClassAug").glob("train_*.png"))[0]
    Image.new("P", (7, 5)).save(mask)
    with pytest.raises(Exception, match="5x7 pixels") as caught:
        pipeline.run(settings(root), workspace, "run")
    error = user_error_in(caught.value)
    assert error is not None
    assert str(mask) in error.found


def test_full_supervision_trains_on_the_truth_and_every_score_says_so(
    first: pipeline.RunResult, root: Path, workspace: Workspace
) -> None:
    own = "segmenter.init=pretrained"
    full = pipeline.run(settings(root, "supervision=full", own), workspace, "bound")
    assert not {"train_classifier", "localize"} & set(full.context.inputs)
    assert [(s.what, s.trained_on) for s in full.scores] == [("segmentation", "ground truth")] * 2
    assert "ground truth" in full.scores[0].meaning().values()
    assert all(score.trained_on is None for score in first.scores)
    report = (workspace.runs / "bound" / "report.html").read_text()
    assert "trained on ground-truth masks" in report
    assert upper_bound(workspace, "bound", full.scores) == (None, [])
    shutil.copytree(workspace.runs / "bound", workspace.runs / "another-network")
    file = workspace.runs / "another-network" / "config.toml"
    file.write_text(file.read_text().replace("steps = 6", "steps = 7"))
    assert upper_bound(workspace, "first", first.scores) == (Bound("bound", full.scores), [])
    pipeline.run(settings(root), workspace, "first")
    assert "upper bound, run <b>bound</b> on ground truth" in (workspace.runs / "first" / "report.html").read_text()
    damaged = workspace.outputs("bound")["evaluate"] / "scores.json"
    text = damaged.read_text()
    damaged.write_text(text.replace('"seed"', '"seeds"'))
    found, (note,) = upper_bound(workspace, "first", first.scores)
    assert found is None
    assert "run bound may be an upper bound but is left out" in note
    damaged.write_text(text)
    shutil.rmtree(workspace.runs / "another-network")
    masks = Shards(full.context.inputs["pseudo_masks"] / "masks")
    for row in read_table(full.context.inputs["index"] / "index.parquet").to_pylist():
        if row["split"] == "train":
            (mask,) = masks.rows(row["image_id"])["mask"].to_pylist()  # type: ignore[index]
            truth = np.array(Image.open(root / "SegmentationClassAug" / f"{row['image_id']}.png"))
            np.testing.assert_array_equal(decode_labels(mask), truth)


def test_full_supervision_needs_masks_and_a_backbone_of_its_own(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"segmenter\.init is classifier but supervision is full"):
        settings(root, "supervision=full")
    shutil.copytree(root, tmp_path / "VOC2012")
    first_id = (root / "ImageSets" / "Segmentation" / "train_aug.txt").read_text().split()[0]
    (tmp_path / "VOC2012" / "SegmentationClassAug" / f"{first_id}.png").unlink()
    config = settings(tmp_path / "VOC2012", "supervision=full", "segmenter.init=pretrained").config
    with pytest.raises(UserError, match=r"supervision is full, but 1 of 24 tagged training images"):
        pipeline.check(config, Workspace(tmp_path / "workspace"), "bound")


def test_too_many_unreadable_images_end_the_run_and_fewer_are_listed(
    ray_local: None, tmp_path: Path, workspace: Workspace
) -> None:
    root = draw(tmp_path)
    bad = sorted((root / "JPEGImages").glob("train_*.jpg"))[3]
    bad.write_bytes(bad.read_bytes()[:200])
    with pytest.raises(UserError, match=r"1 of 30 images cannot be read.*truncated"):
        pipeline.run(settings(root), workspace, "bad", until="index")
    result = pipeline.run(settings(root, "data.max_rejected=1"), workspace, "bad", until="index")
    rejects = read_table(result.context.inputs["index"] / "rejects.parquet").to_pylist()
    assert [r["uri"] for r in rejects] == [str(bad)]
    assert result.context.result("index", IndexResult).counts["images"] == {"train": 23, "val": 6}
    assert rejects[0]["reason"] in result.context.folder.report.read_text().replace("&#39;", "'")


def test_mlflow_keeps_parameters_curves_and_artifacts(first: pipeline.RunResult, workspace: Workspace) -> None:
    client, run_id = first.context.tracker.client, first.context.tracker.run_id
    run: Any = client.get_run(run_id)
    assert run.info.run_name == "first"
    assert run.data.params["classifier.epochs"] == "2"
    assert run.data.tags["setting"] == "voc"
    assert run.data.tags["recipe"] == "small"
    commit = git_commit()
    assert run.data.tags.get("mlflow.source.git.commit") == (commit and commit.name)
    assert run.info.status == "FINISHED"
    index = first.context.result("index", IndexResult)
    sets = {of.dataset.name: (of.dataset.digest, json.loads(of.dataset.profile)) for of in run.inputs.dataset_inputs}
    assert sets == {"voc train": (index.identity, {"num_rows": 24}), "voc val": (index.identity, {"num_rows": 6})}
    assert [client.get_logged_model(of.model_id).name for of in run.outputs.model_outputs] == ["segmenter"]
    steps = [m.step for m in client.get_metric_history(run_id, "classifier.loss")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 6  # 2 epochs of 24 pairs in batches of 8
    names = {a.path for a in client.list_artifacts(run_id)}
    assert {"report.html", "scores.json", "scores.csv", "config.toml", "pictures"} <= names
    table = list(csv.reader(first.context.folder.score_table.read_text().splitlines()))
    assert table[0][:5] == ["what", "which", "mIoU %", "boundary mIoU %", "split"]
    assert [line[1] for line in table[1:]] == [score.name for score in first.scores]
    assert (first.context.folder.pictures / "attention-01.png").exists()
    page = first.context.folder.report.read_text()
    assert "attended to" in page
    assert "co-attentive" in page
    scored = {s.what for s in first.scores}
    assert {key.split(".")[0] for key in run.data.metrics if key.endswith(".miou")} == scored


def test_average_precision_on_val_tags_is_logged_every_epoch(first: pipeline.RunResult) -> None:
    trained, tracker = first.context.result("train_classifier", TrainingResult), first.context.tracker
    logged = tracker.client.get_metric_history(tracker.run_id, "classifier.val_map")
    assert [m.step for m in logged] == [3, 6]
    assert trained.counts["val mAP"] == pytest.approx(logged[-1].value, abs=0.02)
    assert trained.val_ap is not None
    assert set(trained.val_ap) == set(first.context.classes)
    assert trained.precision == "float32"
    assert "val mAP" in first.context.folder.report.read_text()


def test_a_trained_classifier_is_taken_over_without_the_weights_it_began_from(
    first: pipeline.RunResult, root: Path, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`weights.backbone` names an absent file: nothing is trained from it, so it is not looked for."""
    weights = first.context.inputs["train_classifier"] / "weights.pt"
    shutil.copy(weights, tmp_path / "mine.pt")
    monkeypatch.setenv("HOME", str(tmp_path))
    values = ("weights.classifier=~/mine.pt", f"weights.backbone={tmp_path / 'absent.pth'}", "weights.segmenter=none")
    resolved = settings(root, *values)
    pipeline.check(resolved.config, workspace, "any")
    result = pipeline.run(resolved, workspace, "taken", until="localize")
    assert result.context.computed["train_classifier"]
    trained = result.context.result("train_classifier", TrainingResult)
    assert trained.counts == {"steps": 0}
    assert "not trained but taken from" in trained.notes[0]
    assert bytes_of(result.context.inputs["train_classifier"] / "weights.pt") == bytes_of(weights)
    for table in ("single", "maps"):
        ours, theirs = (read_table(r.context.inputs["localize"] / table) for r in (result, first))
        assert ours.equals(theirs)


def test_a_training_starts_from_initial_weights_and_reads_no_pretrained_ones(
    first: pipeline.RunResult, root: Path, workspace: Workspace, tmp_path: Path
) -> None:
    """At a rate that changes no float32 it ends in them; where the same weights lie is no other key."""
    weights = first.context.inputs["train_classifier"] / "weights.pt"
    shutil.copy(weights, tmp_path / "mine.pt")
    values = (
        f"weights.initial={tmp_path / 'mine.pt'}",
        f"weights.backbone={tmp_path / 'absent.pth'}",
        "weights.segmenter=none",
        "classifier.optimizer.learning_rate=1e-30",
        "seed=7",  # without them, the start would be another one
    )
    resolved = settings(root, *values)
    pipeline.check(resolved.config, workspace, "any")
    result = pipeline.run(resolved, workspace, "further", until="train_classifier")
    trained = result.context.inputs["train_classifier"] / "weights.pt"
    further = result.context.result("train_classifier", TrainingResult)
    assert further.counts["steps"] == 6
    assert f"the classifier's training began from {tmp_path / 'mine.pt'}" in further.notes
    assert bytes_of(trained) == bytes_of(weights)
    record = workspace.record("further")
    assert record
    assert "weights.initial" not in record.outputs
    other = settings(root, *values[1:], f"weights.initial={trained}")
    again = pipeline.run(other, workspace, "further", until="train_classifier")
    assert not again.context.computed["train_classifier"]
    record = workspace.record("further")
    assert record
    assert record.outputs["weights.initial"] == [trained.parent.name]


@pytest.mark.parametrize("key", ["classifier", "initial"])
@pytest.mark.parametrize(
    ("value", "more", "found"),
    [
        ("absent.pt", (), "absent.pt is no file"),
        ("mine.pt", ("classifier.channels=48", "segmenter.channels=48"), "mine.pt does not fit this configuration"),
        ("mine.pt", ("classifier.head=own",), "mine.pt does not fit this configuration"),
        ("mine.pt", ("classifier.affinity.form=bilinear",), "'form': 'bilinear'"),
        ("mine.pt", ("data.classes=reversed.txt",), r"configuration: classes is \['[a-z]+', .* here \["),
        ("garbage.pt", (), "garbage.pt does not fit this configuration"),
    ],
)
def test_a_trained_classifier_that_is_absent_or_does_not_fit_is_named_before_the_run(
    first: pipeline.RunResult,
    root: Path,
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    value: str,
    more: Any,
    found: str,
) -> None:
    shutil.copy(first.context.inputs["train_classifier"] / "weights.pt", tmp_path / "mine.pt")
    (tmp_path / "garbage.pt").write_bytes(b"PK garbage")
    (tmp_path / "reversed.txt").write_text("\n".join(reversed(first.context.classes)) + "\n")
    monkeypatch.chdir(tmp_path)
    resolved = settings(root, f"weights.{key}={tmp_path / value}", *more)
    with pytest.raises(UserError, match=found):
        pipeline.check(resolved.config, workspace, "any")


@pytest.mark.parametrize(
    ("values", "stage", "found"),
    [
        (("predict.split=test",), "predict", "predict.split is test, which has no image"),
        (("pseudo_masks.background=saliency", "data.saliency=absent"), "pseudo_masks", "24 of 24 training images"),
    ],
)
def test_images_that_a_stage_needs_and_the_data_lack_are_named_before_the_run(
    root: Path, workspace: Workspace, values: tuple[str, ...], stage: str, found: str
) -> None:
    config = settings(root, *values).config
    for until in (None, stage):
        with pytest.raises(UserError, match=found):
            pipeline.check(config, workspace, "any", until=until)
    pipeline.check(config, workspace, "any", until=pipeline.STAGE_NAMES[pipeline.STAGE_NAMES.index(stage) - 1])


@pytest.mark.parametrize("recipe", ["paper", "released"])
def test_images_without_saliency_maps_end_a_preset_before_the_run(
    root: Path, workspace: Workspace, recipe: str
) -> None:
    """The remedy names what to set, and either of its values lets the run begin."""
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt"), "data.saliency": "absent"}
    without = ["weights.backbone=none"]
    with pytest.raises(UserError, match=r"24 of 24 training images .*: train_000000, ") as caught:
        pipeline.check(resolve("voc", recipe, options, without).config, workspace, "any")
    for cue in ("auto", "crf"):
        change = f"pseudo_masks.background={cue}"
        assert f"--set {change}, which" in caught.value.remedy
        pipeline.check(resolve("voc", recipe, options, [*without, change]).config, workspace, "any")


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (("classifier.stride=16",), "backbone small with stride 16"),
        (("segmenter.stride=16",), "backbone small with stride 16"),
        (("segmenter.trained=9",), "the last 9 stages"),
        (
            (
                "segmenter.network=skip",
                "segmenter.backbone=vit_b_16",
                "segmenter.stride=16",
                "segmenter.init=pretrained",
            ),
            "without a layer",
        ),
        (("weights.backbone=bundled",), "no weights of small are bundled"),
    ],
)
def test_what_a_backbone_cannot_do_ends_a_run_before_it_begins(
    root: Path, workspace: Workspace, values: tuple[str, ...], found: str
) -> None:
    with pytest.raises(UserError, match=found):
        pipeline.check(settings(root, *values).config, workspace, "any")


def test_unknown_names_and_stages_are_named_before_the_run(root: Path, workspace: Workspace) -> None:
    config = settings(root).config
    with pytest.raises(UserError, match="--reuse masks"):
        pipeline.check(config, workspace, "any", reuse=["masks"])
    with pytest.raises(UserError, match="run name 'a b'"):
        pipeline.check(config, workspace, "a b")


@pytest.mark.slow
def test_without_tagged_val_images_a_note_says_so(ray_local: None, tmp_path: Path, workspace: Workspace) -> None:
    root = draw(tmp_path)
    lists = root / "ImageSets/Segmentation"
    (lists / "val_cls.txt").write_text((lists / "val.txt").read_text())
    # Six updates teach too little to rank even the training images.
    resolved = settings(root, "compute.stop_if_nothing_is_learnt=false")
    result = pipeline.run(resolved, workspace, "no-val", until="train_classifier")
    trained = result.context.result("train_classifier", TrainingResult)
    assert trained.val_ap is None
    found = "no image of the split val has a tag: the mean average precision of the classifier is that on 24 of its own"
    assert found in " ".join(trained.notes)
    assert 0 < trained.counts["training images' mAP"] <= 100


def test_a_run_whose_classifier_learns_nothing_ends_there_with_a_report(
    ray_local: None, tmp_path: Path, workspace: Workspace
) -> None:
    """Each image has the tags of another one: whatever is learnt of the training images says nothing of val ones."""
    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=24, val=24, size=64, classes=3)
    for split in ("train_aug", "val"):
        path = root / "ImageSets/Segmentation" / f"{split}_cls.txt"
        ids, tags = zip(*(line.split(" ", 1) for line in path.read_text().splitlines()), strict=True)
        path.write_text("".join(f"{i} {other}\n" for i, other in zip(ids, tags[5:] + tags[:5], strict=True)))
    with pytest.raises(
        UserError, match=r"the classifier learnt nothing: .* on 24 val images, where chance has"
    ) as error:
        pipeline.run(settings(root), workspace, "nothing", until="localize")
    assert "stop_if_nothing_is_learnt=false" in error.value.remedy
    assert "learnt nothing" in (workspace.runs / "nothing" / "report.html").read_text()
    assert "localize" not in workspace.outputs("nothing")
    resolved = settings(root, "compute.stop_if_nothing_is_learnt=false")
    result = pipeline.run(resolved, workspace, "nothing", until="localize")
    assert not result.context.computed["train_classifier"]
    assert "learnt nothing" in " ".join(result.context.result("train_classifier", StageResult).remarks())


def test_a_run_whose_masks_are_all_background_ends_behind_them(
    first: pipeline.RunResult, root: Path, workspace: Workspace
) -> None:
    nothing = ("maps.scale=maximum", "pseudo_masks.background=crf", "pseudo_masks.threshold=1", "pseudo_masks.floor=1")
    with pytest.raises(UserError, match=r"the 24 pseudo masks teach nothing: of their pixels 0[.]") as error:
        pipeline.run(settings(root, *nothing), workspace, "empty")
    assert "are foreground" in error.value.found
    assert {"pseudo_masks", "evaluate"} <= set(workspace.outputs("empty"))
    assert "train_segmenter" not in workspace.outputs("empty")
    assert "teach nothing" in (workspace.runs / "empty" / "report.html").read_text()


def test_without_related_images_single_round_maps_are_the_maps(
    first: pipeline.RunResult, root: Path, workspace: Workspace
) -> None:
    result = pipeline.run(settings(root, "localize.related=0"), workspace, "r0", until="localize")
    folder = result.context.inputs["localize"]
    assert read_table(folder / "maps").equals(read_table(folder / "single"))
    assert read_table(folder / "single").equals(read_table(first.context.inputs["localize"] / "single"))
    assert [s.what for s in result.scores] == ["localization_maps", "baseline", "baseline"]


def test_the_released_aggregation_and_crf_cue_run(root: Path, workspace: Workspace, first: pipeline.RunResult) -> None:
    changes = (
        "localize.method.name=released",
        "localize.related_may_repeat=true",
        "pseudo_masks.background=crf",
    )
    scale = ("maps.scale=maximum", "pseudo_masks.background_threshold=0.1", "pseudo_masks.threshold=0.3")
    result = pipeline.run(settings(root, *changes, *scale), workspace, "variants", until="pseudo_masks")
    assert result.context.result("pseudo_masks", MasksResult).background_cue == "crf"
    assert not result.context.computed["train_classifier"]
    values = read_table(result.context.inputs["localize"] / "maps")["map"].combine_chunks().flatten().to_numpy()
    steps = values.astype("float32") * 255
    assert abs(steps - steps.round()).max() < 0.13  # 8 bit levels, as far as float16 holds them


def test_scores_say_which_outputs_other_code_has_made(
    first: pipeline.RunResult, root: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--reuse` takes the localization maps of the first run although, as it seems here, their code has changed."""
    made_with = stage_of_runs.made_with
    other = {"mcis.platform.stages.localization": {"code": "0" * 16}}
    monkeypatch.setattr(
        stage_of_runs, "made_with", lambda module, device: made_with(module, device) | other.get(module, {})
    )
    again = pipeline.run(settings(root), workspace, "reused", reuse=["localize"])
    assert again.context.inputs["localize"] == first.context.inputs["localize"]
    assert [stage for stage, computed in again.context.computed.items() if computed] == ["evaluate", "report"]
    assert {score.reused for score in again.scores} == {"localize"}
    assert all(score.meaning()["reused"] == "localize" for score in again.scores)
    assert [score.miou for score in again.scores] == [score.miou for score in first.scores]
    assert {score.reused for score in first.scores} == {None}

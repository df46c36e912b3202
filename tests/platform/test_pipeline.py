"""The whole pipeline on a small drawn data set: its output, a second call, and a run without ground truth."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_labels
from mcis.datasets.tables.shards import Shards
from mcis.models.localization import score_maps
from mcis.platform import pipeline
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.errors import user_error_in
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.compared_runs import open_run_groups
from mcis.platform.reporting.comparison import BootstrapSettings, compare
from mcis.platform.reporting.comparison_page import compared_images
from mcis.platform.reporting.panels import heat_picture
from mcis.platform.runs.files import read_json, read_table
from mcis.platform.runs.results import IndexResult, PredictResult, StageResult
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages import predict


def computed(run: pipeline.RunResult) -> list[str]:
    return [stage for stage, is_computed in run.context.computed.items() if is_computed]


def test_a_score_never_travels_without_what_it_means(small: Any) -> None:
    written = read_json(small.first.context.folder.scores)
    assert set(written) == {"scores", "counts", "seconds"}
    assert written["scores"] == json.loads(json.dumps([asdict(score) for score in small.first.scores]))
    assert [(s.what, s.split, s.related, s.crf, s.map_scale, s.method) for s in small.first.scores] == [
        ("localization_maps", "train", 0, None, "logarithm", None),
        ("localization_maps", "train", 3, None, "logarithm", "co-attention"),
        ("pseudo_masks", "train", 3, None, "logarithm", "co-attention"),
        ("baseline", "train", None, None, None, None),
        ("baseline", "train", None, None, None, None),
        ("segmentation", "val", None, False, None, None),
        ("segmentation", "val", None, True, None, None),
    ]
    random, best = (s.miou for s in small.first.scores if s.what == "baseline")
    assert random < best, "the tag that is drawn from the one that fits the truth best"
    for score in small.first.scores:
        assert np.sum(score.confusion) == np.sum(small.first.scores[0 if score.split == "train" else -1].confusion)
        assert (score.boundary_miou is None) == (score.what == "localization_maps")
        values = [v for v in score.iou.values() if v is not None]
        assert score.miou == pytest.approx(sum(values) / len(values), abs=0.02)
        assert set(score.iou) == {"background", *small.first.context.classes}
    assert written["counts"]["index"]["images"] == {"train": 24, "val": 6}
    assert written["counts"]["evaluate"]["scored"] == {"train": 24, "val": 6}
    (note,) = small.first.context.result("evaluate", StageResult).notes
    assert note.startswith("predictions are much worse than the pseudo masks for "), "it was trained for a few steps"
    assert set(written["seconds"]) == set(pipeline.STAGE_NAMES) - {"report", "train_affinity"}


def test_gpus_that_are_absent_end_a_run_of_networks_before_its_index_but_not_an_index(small: Any) -> None:
    """Whether there are nodes with GPUs now changes no key, so a run that asks for them never falls back to CPUs."""
    with pytest.raises(UserError, match=r"compute.gpu=true needs 1 x \(1 GPU\)"):
        small.run("gpu", "compute.gpu=true")
    assert small.workspace.outputs("gpu") == {}
    assert small.run("gpu", "compute.gpu=true", until="index").scores == []


def test_a_second_call_computes_nothing(small: Any) -> None:
    """Nor does another run by the file that the first one wrote."""
    scores, again = small.first.scores, small.run("first")
    assert computed(again) == ["report"]
    assert again.scores == scores
    assert again.context.tracker.run_id == small.first.context.tracker.run_id
    fed_back = resolve(file=small.workspace.runs / "first" / "config.toml")
    assert computed(pipeline.run(fed_back, small.workspace, "fed-back")) == ["report"]


def test_a_changed_threshold_never_retrains_the_classifier(small: Any) -> None:
    other = small.run("other", "pseudo_masks.score_floor=0.2", until="pseudo_masks")
    assert computed(other) == ["pseudo_masks", "evaluate", "report"]
    assert other.context.inputs["train_classifier"] == small.first.context.inputs["train_classifier"]
    assert other.context.tracker.run_id != small.first.context.tracker.run_id
    kept = [s for s in small.first.scores if s.what in ("localization_maps", "baseline")]
    assert [s for s in other.scores if s.what != "pseudo_masks"] == kept


@pytest.mark.slow
def test_baselines_are_made_again_of_other_saliency_maps(small: Any, tmp_path: Path) -> None:
    """Also where nothing before them reads saliency; where no mask is made of it they may be anything."""
    root = small.draw(tmp_path)
    before = small.run("baselines", root=root, until="localize")
    for path in (root / "SaliencyMaps").iterdir():
        Image.new("L", Image.open(path).size, 255).save(path)
    after = small.run("baselines", root=root, until="localize")
    assert computed(after) == ["evaluate", "report"]
    baselines = [[s.miou for s in r.scores if s.what == "baseline"] for r in (before, after)]
    assert all(whole < salient for salient, whole in zip(*baselines, strict=True))
    Image.new("RGB", (7, 5)).save(path)
    unread = small.run("unread", "pseudo_masks.rule=crf", root=root, until="localize")
    assert {score.what for score in unread.scores} == {"localization_maps"}


@pytest.mark.slow
def test_another_scale_of_maps_is_another_score_of_the_same_maps(small: Any) -> None:
    other = small.run("range", "maps.scale=range", until="pseudo_masks")
    assert computed(other) == ["pseudo_masks", "evaluate", "report"]
    assert [s.map_scale for s in other.scores] == ["range"] * 3 + [None] * 2
    masks = [read_table(r.context.inputs["pseudo_masks"] / "masks")["labels"] for r in (small.first, other)]
    assert masks[0] != masks[1]
    curves = [read_json(r.context.inputs["evaluate"] / "curves.json") for r in (small.first, other)]
    assert all(curves[0][name] != curves[1][name] for name in curves[0])


@pytest.mark.slow
def test_from_a_stage_on_all_is_computed_again_and_ends_the_same(small: Any) -> None:
    before = [bytes_of(small.first.context.inputs[s] / "weights.pt") for s in ("train_classifier", "train_segmenter")]
    again = small.run("first", start="train_classifier")
    assert computed(again) == [stage for stage in again.context.computed if stage != "index"]
    after = [bytes_of(again.context.inputs[s] / "weights.pt") for s in ("train_classifier", "train_segmenter")]
    assert before == after
    assert [s.miou for s in again.scores] == [s.miou for s in small.first.scores]


def bytes_of(path: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in torch.load(path, weights_only=True)["state_dict"].items()}


def test_what_predictions_lack_of_the_tags_is_counted_and_noted(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_MIN_TAGGED", 1)
    context = small.run("noted", "predict.scales=[0.5]").context
    tags = split_rows(context, "val", columns=["tags"])["tags"]
    predictions = read_table(context.inputs["predict"] / "predictions")
    for row, own in zip(predictions.to_pylist(), tags.to_pylist(), strict=True):
        seen = set(np.unique(decode_labels(row["crf"] or row["plain"])).tolist())
        assert row["absent_tags"] == [tag for tag in own if tag + 1 not in seen]
    notes = context.result("predict", PredictResult).notes
    assert notes == predict.lost_tags(tags, predictions["absent_tags"], context.classes, "val") != ()


def test_truth_cannot_reach_training(small: Any, tmp_path: Path) -> None:
    """Without masks all ends in the same weights and masks; of new or other ones scores are made, and nothing else."""
    root, workspace = small.draw(tmp_path), Workspace(tmp_path / "workspace")
    resolved, truth = small.settings(root=root), root / "SegmentationClassAug"
    shutil.move(truth, tmp_path / "truth")
    without = pipeline.run(resolved, workspace, "run")
    assert without.scores == []
    assert "there are no ground-truth masks" in " ".join(without.context.result("evaluate", StageResult).notes)
    for stage, table in (("localize", "maps"), ("pseudo_masks", "masks"), ("predict", "predictions")):
        ours, theirs = (read_table(r.context.inputs[stage] / table) for r in (without, small.first))
        assert ours.equals(theirs)
    for stage in ("train_classifier", "train_segmenter"):
        ours, theirs = (bytes_of(r.context.inputs[stage] / "weights.pt") for r in (without, small.first))
        assert ours == theirs

    shutil.move(tmp_path / "truth", truth)
    scored = pipeline.run(resolved, workspace, "run")
    assert computed(scored) == ["index", "evaluate", "report"]
    assert [s.miou for s in scored.scores] == [s.miou for s in small.first.scores]

    for path in truth.glob("*.png"):
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    other = pipeline.run(resolved, workspace, "run")
    assert computed(other) == ["evaluate", "report"]
    before, after = ({**r.context.inputs, "evaluate": None, "report": None} for r in (scored, other))
    assert before == after
    masks = [next(s.miou for s in r.scores if s.what == "pseudo_masks") for r in (scored, other)]
    assert masks[0] != masks[1]

    mask = sorted(truth.glob("train_*.png"))[0]
    Image.new("P", (7, 5)).save(mask)
    with pytest.raises(Exception, match="5x7 pixels") as caught:
        pipeline.run(resolved, workspace, "run")
    assert str(mask) in str(user_error_in(caught.value))


@pytest.mark.parametrize(("label", "found"), [(255, "ground-truth masks contain none of the tags"), (4, "label 4")])
def test_masks_of_a_wrong_kind_show_before_the_trainings(small: Any, tmp_path: Path, label: int, found: str) -> None:
    root = small.draw(tmp_path)
    for path in (root / "SegmentationClassAug").iterdir():
        Image.fromarray(np.where(np.array(Image.open(path)) > 0, label, 0).astype(np.uint8)).save(path)
    with pytest.raises(UserError, match=found):
        pipeline.check(small.settings(root=root).config, Workspace(tmp_path / "workspace"), "run")


def test_full_supervision_trains_on_the_truth_and_every_score_says_so(small: Any) -> None:
    full = small.run("bound", "supervision=full", "segmenter.init=pretrained", until="predict")
    assert [(s.what, s.trained_on) for s in full.scores] == [("segmentation", "ground truth")] * 2
    assert "ground truth" in full.scores[0].meaning().values()
    assert all(score.trained_on is None for score in small.first.scores)
    assert "trained on ground-truth masks" in full.context.folder.report.read_text()
    masks = Shards(full.context.inputs["pseudo_masks"] / "masks")
    for row in read_table(full.context.inputs["index"] / "index.parquet").to_pylist():
        if row["split"] == "train":
            (mask,) = masks.rows(row["image_id"])["mask"].to_pylist()
            truth = np.array(Image.open(small.root / "SegmentationClassAug" / f"{row['image_id']}.png"))
            np.testing.assert_array_equal(decode_labels(mask), truth)


def test_full_supervision_needs_masks_and_a_backbone_of_its_own(small: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"segmenter\.init is classifier but supervision is full"):
        small.settings("supervision=full")
    root = small.draw(tmp_path)
    sorted((root / "SegmentationClassAug").glob("train_*.png"))[0].unlink()
    config = small.settings("supervision=full", "segmenter.init=pretrained", root=root).config
    with pytest.raises(UserError, match=r"supervision is full, but 1 of 24 tagged training images"):
        pipeline.check(config, small.workspace, "any")


def test_mlflow_keeps_parameters_curves_and_artifacts(small: Any) -> None:
    client, run_id = small.first.context.tracker.client, small.first.context.tracker.run_id
    run: Any = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["classifier.epochs"] == "2"
    assert (run.data.tags["sources"], run.data.tags["recipe"]) == ("voc", "scratch")
    index = small.first.context.result("index", IndexResult)
    tags = run.data.tags
    assert (tags["mcis.index"], tags["mcis.images"]) == (index.identity, "train 24, val 6")
    assert [client.get_logged_model(of.model_id).name for of in run.outputs.model_outputs] == ["segmenter"]
    steps = [m.step for m in client.get_metric_history(run_id, "classifier.loss")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 6  # 2 epochs of 24 pairs in batches of 8
    names = {a.path for a in client.list_artifacts(run_id)}
    assert {"report.html", "scores.json", "config.toml", "pictures"} <= names
    scored = {s.what for s in small.first.scores}
    assert {key.split(".")[0] for key in run.data.metrics if key.endswith(".miou")} == scored
    trained = small.first.context.result("train_classifier", StageResult)
    logged = client.get_metric_history(run_id, "classifier.val_map")
    assert [m.step for m in logged] == [3, 6], "every epoch"
    assert trained.counts["val mAP"] == pytest.approx(logged[-1].value, abs=0.02)


def test_a_trained_classifier_is_taken_over_without_the_weights_it_began_from(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`weights.classifier_backbone` names an absent file: nothing is trained from it, so it is not looked for."""
    weights = small.first.context.inputs["train_classifier"] / "weights.pt"
    shutil.copy(weights, tmp_path / "mine.pt")
    monkeypatch.setenv("HOME", str(tmp_path))
    values = (
        "weights.classifier=~/mine.pt",
        f"weights.classifier_backbone={tmp_path / 'absent.pth'}",
        "weights.segmenter_backbone=none",
    )
    resolved = small.settings(*values)
    pipeline.check(resolved.config, small.workspace, "any")
    result = pipeline.run(resolved, small.workspace, "taken", until="localize")
    assert result.context.computed["train_classifier"]
    trained = result.context.result("train_classifier", StageResult)
    assert trained.counts == {"steps": 0}
    assert "not trained but taken from" in trained.notes[0]
    assert bytes_of(result.context.inputs["train_classifier"] / "weights.pt") == bytes_of(weights)
    for table in ("single", "maps"):
        ours, theirs = (read_table(r.context.inputs["localize"] / table) for r in (result, small.first))
        assert ours.equals(theirs)


@pytest.mark.parametrize(
    ("weights", "more", "found"),
    [
        ("classifier=absent.pt", (), "absent.pt is no file"),
        ("classifier=mine.pt", ("classifier.channels=48", "segmenter.channels=48"), "mine.pt does not fit this config"),
        ("classifier=mine.pt", ("classifier.affinity.form=bilinear",), "'form': 'bilinear'"),
        ("classifier=mine.pt", ("data.classes=reversed.txt",), r"configuration: classes is \['[a-z]+', .* here \["),
        ("classifier=garbage.pt", (), "garbage.pt does not fit this configuration"),
    ],
)
def test_a_trained_classifier_that_is_absent_or_does_not_fit_is_named_before_the_run(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, more: Any, found: str
) -> None:
    shutil.copy(small.first.context.inputs["train_classifier"] / "weights.pt", tmp_path / "mine.pt")
    (tmp_path / "garbage.pt").write_bytes(b"PK garbage")
    (tmp_path / "reversed.txt").write_text("\n".join(reversed(small.first.context.classes)) + "\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=found):
        pipeline.check(small.settings(f"weights.{weights}", *more).config, small.workspace, "any")


def test_images_that_a_stage_needs_and_the_data_lack_are_named_before_the_run(small: Any) -> None:
    config = small.settings("predict.split=test").config
    for until in (None, "predict"):
        with pytest.raises(UserError, match=r"predict\.split is test, which has no images"):
            pipeline.check(config, small.workspace, "any", until=until)
    pipeline.check(config, small.workspace, "any", until="train_segmenter")


@pytest.mark.parametrize("recipe", ["paper", "released"])
def test_images_without_saliency_maps_end_a_preset_before_the_run(small: Any, recipe: str) -> None:
    """The remedy names what to set, and either of its values lets the run begin."""
    without = ["weights.classifier_backbone=none", "data.saliency=absent"]
    with pytest.raises(UserError, match=r"24 of 24 training images .*: train_000000, ") as caught:
        pipeline.check(small.settings(*without, recipe=recipe).config, small.workspace, "any")
    for cue in ("auto", "crf"):
        change = f"pseudo_masks.rule={cue}"
        assert f"{change}, which" in caught.value.remedy
        pipeline.check(small.settings(*without, change, recipe=recipe).config, small.workspace, "any")


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ("classifier.stride=16", "backbone small with stride 16"),
        ("segmenter.stride=16", "backbone small with stride 16"),
        ("weights.classifier_backbone=bundled", "no weights of small are bundled"),
    ],
)
def test_what_a_backbone_cannot_do_ends_a_run_before_it_begins(small: Any, values: str, found: str) -> None:
    with pytest.raises(UserError, match=found):
        pipeline.check(small.settings(values).config, small.workspace, "any")


@pytest.mark.slow
def test_without_tagged_val_images_a_note_says_so(small: Any, tmp_path: Path) -> None:
    root = small.draw(tmp_path)
    lists = root / "ImageSets/Segmentation"
    (lists / "val_cls.txt").write_text((lists / "val.txt").read_text())
    run = small.run("no-val", root=root, until="train_classifier")
    trained = run.context.result("train_classifier", StageResult)
    assert "val mAP" not in trained.counts
    assert "no image of the split val has a tag" in " ".join(trained.notes)


@pytest.mark.slow
def test_a_run_whose_classifier_learns_nothing_ends_there_with_a_report(small: Any, tmp_path: Path) -> None:
    """Each image has the tags of another one: whatever is learnt of the training images says nothing of val ones."""
    root = small.draw(tmp_path, val=24)
    for split in ("train_aug", "val"):
        path = root / "ImageSets/Segmentation" / f"{split}_cls.txt"
        ids, tags = zip(*(line.split(" ", 1) for line in path.read_text().splitlines()), strict=True)
        path.write_text("".join(f"{i} {other}\n" for i, other in zip(ids, tags[5:] + tags[:5], strict=True)))
    found = r"the classifier did not learn: .* on 24 val images, where chance reaches"
    with pytest.raises(UserError, match=found) as error:
        small.run("nothing", root=root, until="localize")
    assert "stop_if_not_learning=false" in error.value.remedy
    assert "did not learn" in (small.workspace.runs / "nothing" / "report.html").read_text()
    assert "localize" not in small.workspace.outputs("nothing")
    result = small.run("nothing", "compute.stop_if_not_learning=false", root=root, until="localize")
    assert not result.context.computed["train_classifier"]
    assert "did not learn" in " ".join(result.context.result("train_classifier", StageResult).remarks())


@pytest.mark.slow
def test_a_run_whose_masks_are_all_background_ends_behind_them(small: Any) -> None:
    nothing = ("maps.scale=maximum", "pseudo_masks.rule=crf", "pseudo_masks.threshold=1", "pseudo_masks.score_floor=1")
    with pytest.raises(UserError, match=r"a network cannot learn from the 24 pseudo masks: on average 0[.]") as error:
        small.run("empty", *nothing)
    assert "of one is foreground" in error.value.found
    assert "train_segmenter" not in small.workspace.outputs("empty")
    assert "a network cannot learn" in (small.workspace.runs / "empty" / "report.html").read_text()


def test_without_related_images_single_round_maps_are_the_maps_and_are_compared(small: Any) -> None:
    result = small.run("r0", "localize.related=0", until="localize")
    folder = result.context.inputs["localize"]
    assert read_table(folder / "maps").equals(read_table(folder / "single"))
    assert read_table(folder / "single").equals(read_table(small.first.context.inputs["localize"] / "single"))
    assert [s.what for s in result.scores] == ["localization_maps", "baseline", "baseline"]
    # `mcis compare` shows the maps of both.
    compared = compare(open_run_groups(small.workspace.root, ["first", "r0"]), BootstrapSettings(resamples=10))
    *_, gallery = compared_images(compared, 2)
    assert (gallery.title, gallery.common, len(gallery.images)) == ("Localization maps", 24, 2)
    for image in gallery.images:
        (_, photograph, _), _, *of_runs = image.cells
        assert photograph is not None
        size = [64 * side // max(photograph.picture.size) for side in photograph.picture.size[::-1]]
        for run, (name, cell, note) in zip((small.first, result), of_runs, strict=True):
            maps = image_maps(Shards(run.context.inputs["localize"] / "maps"), image.id)
            heat = score_maps(torch.from_numpy(maps.maps), maps.grids, "maximum", *size).numpy()
            expected = heat_picture(photograph.picture, heat, maps.classes + 1)
            assert cell is not None
            np.testing.assert_array_equal(np.asarray(cell.picture), np.asarray(expected))
            assert (name, note[:10]) == (run.context.name, "mIoU here ")


def test_stages_have_the_hooks_that_they_need() -> None:
    """One by another name would be left out in silence."""
    without = {hook: [s.name for s in pipeline.STAGES if not hasattr(s.module, hook)] for hook in ("check", "inputs")}
    assert without == {"check": ["index", "localize", "report"], "inputs": ["localize", "report"]}

"""The whole pipeline on a small synthetic data set: its outputs, a second call, and a run without ground truth."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import decode_labels
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
from mcis.platform.runs.scores import SALIENCY_SUPERVISION
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages import predict


def computed(run: pipeline.RunResult) -> list[str]:
    return [stage for stage, is_computed in run.context.computed.items() if is_computed]


def test_scores_json_holds_all_scores_with_their_settings(small: Any) -> None:
    written = read_json(small.first.context.folder.scores)
    assert set(written) == {"scores", "counts", "seconds"}
    assert written["scores"] == json.loads(json.dumps([asdict(score) for score in small.first.scores]))


def test_a_run_scores_maps_masks_baselines_and_segmentation(small: Any) -> None:
    assert [(s.output, s.split, s.related, s.crf, s.map_scale, s.method) for s in small.first.scores] == [
        ("localization_maps", "train", 0, None, "logarithm", None),
        ("localization_maps", "train", 3, None, "logarithm", "co-attention"),
        ("pseudo_masks", "train", 3, None, "logarithm", "co-attention"),
        ("baseline", "train", None, None, None, None),
        ("baseline", "train", None, None, None, None),
        ("segmentation", "val", None, False, None, None),
        ("segmentation", "val", None, True, None, None),
    ]


def test_the_baseline_with_the_best_tags_beats_the_one_with_random_tags(small: Any) -> None:
    random_tags, best_tags = (score.miou for score in small.first.scores if score.output == "baseline")
    assert random_tags < best_tags


def test_scores_of_a_split_count_the_same_pixels(small: Any) -> None:
    pixels: dict[str, set[int]] = {"train": set(), "val": set()}
    for score in small.first.scores:
        pixels[score.split].add(int(np.sum(score.confusion)))
    assert [len(counts) for counts in pixels.values()] == [1, 1]


def test_miou_is_the_mean_over_background_and_classes(small: Any) -> None:
    for score in small.first.scores:
        assert set(score.iou) == {"background", *small.first.context.classes}
        values = [value for value in score.iou.values() if value is not None]
        assert score.miou == pytest.approx(sum(values) / len(values), abs=0.02)


def test_only_localization_maps_have_no_boundary_miou(small: Any) -> None:
    for score in small.first.scores:
        assert (score.boundary_miou is None) == (score.output == "localization_maps")


def test_scores_json_holds_the_counts_and_seconds_of_stages(small: Any) -> None:
    written = read_json(small.first.context.folder.scores)
    assert written["counts"]["index"]["images"] == {"train": 24, "val": 6}
    assert written["counts"]["evaluate"]["scored"] == {"train": 24, "val": 6}
    assert set(written["seconds"]) == set(pipeline.STAGE_NAMES) - {"report", "train_affinity"}


def test_a_note_names_classes_that_predictions_lost(small: Any) -> None:
    """The segmentation network was trained for a few steps only."""
    notes = small.first.context.result("evaluate", StageResult).notes
    assert sum(note.startswith("predictions are much worse than the pseudo masks for ") for note in notes) == 1


def test_missing_gpus_stop_a_run_before_its_index_but_do_not_stop_an_index(small: Any) -> None:
    """Available GPUs are not part of a key, so a run that asks for GPUs never falls back to CPUs."""
    with pytest.raises(UserError, match=r"compute.gpu=true needs 1 x \(1 GPU\)"):
        small.run("gpu", "compute.gpu=true")
    assert small.workspace.outputs("gpu") == {}
    assert small.run("gpu", "compute.gpu=true", until="index").scores == []


def test_a_second_call_computes_nothing(small: Any) -> None:
    scores = small.first.scores
    again = small.run("first")
    assert computed(again) == ["report"]
    assert again.scores == scores
    assert again.context.tracker.run_id == small.first.context.tracker.run_id


def test_a_run_with_the_configuration_file_of_another_computes_nothing(small: Any) -> None:
    assert small.first.scores
    fed_back = resolve(file=small.workspace.runs / "first" / "config.toml")
    assert computed(pipeline.run(fed_back, small.workspace, "fed-back")) == ["report"]


def test_reserved_memory_changes_no_key(small: Any) -> None:
    assert small.first.scores
    assert computed(small.run("memory", "compute.memory_gb=0.1")) == ["report"]


def test_a_changed_threshold_never_retrains_the_classifier(small: Any) -> None:
    other = small.run("other", "pseudo_masks.score_floor=0.2", until="pseudo_masks")
    assert computed(other) == ["pseudo_masks", "evaluate", "report"]
    assert other.context.stage_outputs["train_classifier"] == small.first.context.stage_outputs["train_classifier"]
    assert other.context.tracker.run_id != small.first.context.tracker.run_id
    kept = [s for s in small.first.scores if s.output in ("localization_maps", "baseline")]
    assert [s for s in other.scores if s.output != "pseudo_masks"] == kept


@pytest.mark.slow
def test_other_saliency_maps_give_other_baselines(small: Any, tmp_path: Path) -> None:
    """Even if no earlier stage reads saliency maps."""
    root = small.draw(tmp_path)
    before = small.run("baselines", root=root, until="localize")
    for path in (root / "SaliencyMaps").iterdir():
        Image.new("L", Image.open(path).size, 255).save(path)

    after = small.run("baselines", root=root, until="localize")
    assert computed(after) == ["evaluate", "report"]
    baselines_before = [score.miou for score in before.scores if score.output == "baseline"]
    baselines_after = [score.miou for score in after.scores if score.output == "baseline"]
    assert all(whole < salient for salient, whole in zip(baselines_before, baselines_after, strict=True))

    without = small.run("baselines", "pseudo_masks.rule=crf", root=root, until="localize")
    assert {score.output for score in without.scores} == {"localization_maps"}


@pytest.mark.slow
def test_invalid_saliency_maps_are_not_read_if_no_mask_needs_them(small: Any, tmp_path: Path) -> None:
    root = small.draw(tmp_path)
    Image.new("RGB", (7, 5)).save(next((root / "SaliencyMaps").iterdir()))
    unread = small.run("unread", "pseudo_masks.rule=crf", root=root, until="localize")
    assert {score.output for score in unread.scores} == {"localization_maps"}


@pytest.mark.slow
def test_another_map_scale_changes_scores_and_masks_but_not_maps(small: Any) -> None:
    first = small.first
    other = small.run("range", "maps.scale=range", until="pseudo_masks")
    assert computed(other) == ["pseudo_masks", "evaluate", "report"]
    assert [s.map_scale for s in other.scores] == ["range"] * 3 + [None] * 2
    masks = [read_table(r.context.stage_outputs["pseudo_masks"] / "masks")["labels"] for r in (first, other)]
    assert masks[0] != masks[1]
    curves = [read_json(r.context.stage_outputs["evaluate"] / "curves.json") for r in (first, other)]
    assert all(curves[0][name] != curves[1][name] for name in curves[0])


@pytest.mark.slow
def test_computing_again_from_a_stage_on_gives_the_same_weights_and_scores(small: Any) -> None:
    before = trained_weights(small.first)
    again = small.run("first", start="train_classifier")
    assert computed(again) == [stage for stage in again.context.computed if stage != "index"]
    assert trained_weights(again) == before
    assert [s.miou for s in again.scores] == [s.miou for s in small.first.scores]


def test_scores_of_a_run_that_ends_earlier_are_computed_again(small: Any) -> None:
    before = small.run("again", until="pseudo_masks")
    again = small.run("again", until="pseudo_masks", start="evaluate")
    assert computed(again) == ["evaluate", "report"]
    assert again.scores == before.scores
    for start, until in (("predict", "pseudo_masks"), ("evaluate", "index")):
        with pytest.raises(UserError, match=f"--from {start} --until {until}"):
            small.run("again", until=until, start=start)


def trained_weights(run: pipeline.RunResult) -> list[dict[str, bytes]]:
    """The weights of both networks of a run."""
    stages = ("train_classifier", "train_segmenter")
    return [bytes_of(run.context.stage_outputs[stage] / "weights.pt") for stage in stages]


def bytes_of(path: Path) -> dict[str, bytes]:
    """The values of a file of weights, as bytes by name."""
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name: value.numpy().tobytes() for name, value in state.items()}


def test_tags_that_predictions_lack_are_counted_and_noted(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_MIN_TAGGED", 1)
    context = small.run("noted", "predict.scales=[0.5]").context
    tags = split_rows(context, "val", columns=["tags"])["tags"]
    predictions = read_table(context.stage_outputs["predict"] / "predictions")
    for row, own in zip(predictions.to_pylist(), tags.to_pylist(), strict=True):
        predicted_labels = set(np.unique(decode_labels(row["crf"] or row["plain"])).tolist())
        assert row["absent_tags"] == [tag for tag in own if tag + 1 not in predicted_labels]
    notes = context.result("predict", PredictResult).notes
    assert notes == predict.unpredicted_tags(tags, predictions["absent_tags"], context.classes, "val") != ()


class TruthRuns(NamedTuple):
    """One run on a copy of the devkit, called three times with different ground truth.

    Attributes:
        root: The devkit, with flipped masks at the end.
        workspace: Of the run.
        without: The first call, without ground-truth masks.
        scored: The second call, with the original masks.
        flipped: The third call, with masks that are flipped vertically.
    """

    root: Path
    workspace: Workspace
    without: pipeline.RunResult
    scored: pipeline.RunResult
    flipped: pipeline.RunResult


@pytest.fixture(scope="module")
def truth_runs(small: Any, tmp_path_factory: pytest.TempPathFactory) -> TruthRuns:
    folder = tmp_path_factory.mktemp("truth")
    root = small.draw(folder)
    workspace = Workspace(folder / "workspace")
    resolved = small.settings(root=root)
    truth = root / "SegmentationClassAug"

    shutil.move(truth, folder / "moved")
    without = pipeline.run(resolved, workspace, "run")
    shutil.move(folder / "moved", truth)
    scored = pipeline.run(resolved, workspace, "run")
    for path in truth.glob("*.png"):
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    flipped = pipeline.run(resolved, workspace, "run")
    return TruthRuns(root, workspace, without, scored, flipped)


def test_a_run_without_truth_has_no_scores_and_a_note(truth_runs: TruthRuns) -> None:
    assert truth_runs.without.scores == []
    notes = truth_runs.without.context.result("evaluate", StageResult).notes
    assert "there are no ground-truth masks" in " ".join(notes)


@pytest.mark.parametrize(
    ("stage", "table"), [("localize", "maps"), ("pseudo_masks", "masks"), ("predict", "predictions")]
)
def test_outputs_without_truth_are_the_same(small: Any, truth_runs: TruthRuns, stage: str, table: str) -> None:
    without = read_table(truth_runs.without.context.stage_outputs[stage] / table)
    with_truth = read_table(small.first.context.stage_outputs[stage] / table)
    assert without.equals(with_truth)


def test_weights_without_truth_are_the_same(small: Any, truth_runs: TruthRuns) -> None:
    assert trained_weights(truth_runs.without) == trained_weights(small.first)


def test_added_truth_is_scored_without_training_again(small: Any, truth_runs: TruthRuns) -> None:
    assert computed(truth_runs.scored) == ["index", "evaluate", "report"]
    assert [score.miou for score in truth_runs.scored.scores] == [score.miou for score in small.first.scores]


def test_changed_truth_changes_scores_and_nothing_else(truth_runs: TruthRuns) -> None:
    assert computed(truth_runs.flipped) == ["evaluate", "report"]
    before = {**truth_runs.scored.context.stage_outputs, "evaluate": None, "report": None}
    after = {**truth_runs.flipped.context.stage_outputs, "evaluate": None, "report": None}
    assert before == after

    mious = []
    for run in (truth_runs.scored, truth_runs.flipped):
        mious.append(next(score.miou for score in run.scores if score.output == "pseudo_masks"))
    assert mious[0] != mious[1]


def test_a_truth_mask_of_another_size_is_named(small: Any, truth_runs: TruthRuns) -> None:
    mask = sorted((truth_runs.root / "SegmentationClassAug").glob("train_*.png"))[0]
    content = mask.read_bytes()
    Image.new("P", (7, 5)).save(mask)
    with pytest.raises(Exception, match="5x7 pixels") as caught:
        pipeline.run(small.settings(root=truth_runs.root), truth_runs.workspace, "run")
    assert str(mask) in str(user_error_in(caught.value))
    mask.write_bytes(content)


@pytest.mark.parametrize(("label", "found"), [(255, "ground-truth masks contain none of the tags"), (4, "label 4")])
def test_ground_truth_masks_with_wrong_labels_are_refused_before_training(
    small: Any, tmp_path: Path, label: int, found: str
) -> None:
    root = small.draw(tmp_path)
    for path in (root / "SegmentationClassAug").iterdir():
        Image.fromarray(np.where(np.array(Image.open(path)) > 0, label, 0).astype(np.uint8)).save(path)
    with pytest.raises(UserError, match=found):
        pipeline.check(small.settings(root=root).config, Workspace(tmp_path / "workspace"), "run")


def test_scores_say_that_saliency_maps_were_used(small: Any) -> None:
    """The synthetic devkit has saliency maps, and its masks use them by the rule auto."""
    for score in small.first.scores:
        settings = score.output_settings()
        text = settings.get("trained on") if score.output == "segmentation" else settings["background cue"]
        assert (SALIENCY_SUPERVISION in (text or "")) == (score.output != "localization_maps")
    assert SALIENCY_SUPERVISION in small.first.context.folder.report.read_text()

    without = small.run(
        "no-saliency", "pseudo_masks.rule=crf", "compute.stop_if_not_learning=false", until="pseudo_masks"
    )
    assert not [text for score in without.scores for text in score.settings().values() if SALIENCY_SUPERVISION in text]


def test_full_supervision_trains_on_ground_truth_masks_and_marks_its_scores(small: Any) -> None:
    full = small.run("bound", "supervision=full", "segmenter.init=pretrained", until="predict")
    assert [(s.output, s.trained_on) for s in full.scores] == [("segmentation", "ground truth")] * 2
    assert "ground truth" in full.scores[0].settings().values()
    assert "ground truth" not in [score.trained_on for score in small.first.scores]
    assert "trained on the masks of the data set" in full.context.folder.report.read_text()
    masks = Shards(full.context.stage_outputs["pseudo_masks"] / "masks")
    for row in read_table(full.context.stage_outputs["index"] / "index.parquet").to_pylist():
        if row["split"] == "train":
            (mask,) = masks.rows(row["image_id"])["mask"].to_pylist()
            truth = np.array(Image.open(small.root / "SegmentationClassAug" / f"{row['image_id']}.png"))
            np.testing.assert_array_equal(decode_labels(mask), truth)


def test_full_supervision_requires_all_masks_and_its_own_initialization(small: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"segmenter\.init is classifier but supervision is full"):
        small.settings("supervision=full")
    root = small.draw(tmp_path)
    sorted((root / "SegmentationClassAug").glob("train_*.png"))[0].unlink()
    config = small.settings("supervision=full", "segmenter.init=pretrained", root=root).config
    with pytest.raises(UserError, match=r"supervision is full, but 1 of 24 tagged training images"):
        pipeline.check(config, small.workspace, "any")


@pytest.fixture(scope="module")
def mlflow_run(small: Any) -> Any:
    """What MLflow recorded of the run `first`."""
    tracker = small.first.context.tracker
    return tracker.client.get_run(tracker.run_id)


def metric_history(small: Any, name: str) -> Any:
    tracker = small.first.context.tracker
    return tracker.client.get_metric_history(tracker.run_id, name)


def test_mlflow_records_name_status_and_parameters(mlflow_run: Any) -> None:
    assert (mlflow_run.info.run_name, mlflow_run.info.status) == ("first", "FINISHED")
    assert mlflow_run.data.params["classifier.epochs"] == "2"


def test_mlflow_tags_name_sources_recipe_and_index(small: Any, mlflow_run: Any) -> None:
    tags = mlflow_run.data.tags
    index = small.first.context.result("index", IndexResult)
    assert (tags["sources"], tags["recipe"]) == ("voc", "scratch")
    assert (tags["mcis.index"], tags["mcis.images"]) == (index.identity, "train 24, val 6")


def test_mlflow_logs_the_segmenter_as_a_model(small: Any, mlflow_run: Any) -> None:
    client = small.first.context.tracker.client
    names = [client.get_logged_model(output.model_id).name for output in mlflow_run.outputs.model_outputs]
    assert names == ["segmenter"]


def test_mlflow_logs_each_step_of_the_loss_once(small: Any, mlflow_run: Any) -> None:
    steps = [metric.step for metric in metric_history(small, "classifier.loss")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 6  # 2 epochs of 24 pairs in batches of 8


def test_mlflow_keeps_the_files_of_the_run(small: Any, mlflow_run: Any) -> None:
    tracker = small.first.context.tracker
    names = {artifact.path for artifact in tracker.client.list_artifacts(tracker.run_id)}
    assert {"report.html", "scores.json", "config.toml", "pictures"} <= names


def test_mlflow_has_a_metric_for_every_scored_output(small: Any, mlflow_run: Any) -> None:
    scored = {score.output for score in small.first.scores}
    assert {key.split(".")[0] for key in mlflow_run.data.metrics if key.endswith(".miou")} == scored


def test_mlflow_logs_val_map_after_every_epoch(small: Any, mlflow_run: Any) -> None:
    logged = metric_history(small, "classifier.val_map")
    trained = small.first.context.result("train_classifier", StageResult)
    assert [metric.step for metric in logged] == [3, 6]
    assert trained.counts["val mAP"] == pytest.approx(logged[-1].value, abs=0.02)


def test_a_given_classifier_is_used_without_its_initial_weights(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`weights.classifier_backbone` names a missing file. It is not needed, because nothing is trained from it."""
    weights = small.first.context.stage_outputs["train_classifier"] / "weights.pt"
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
    assert bytes_of(result.context.stage_outputs["train_classifier"] / "weights.pt") == bytes_of(weights)
    for table in ("single", "maps"):
        ours, theirs = (read_table(r.context.stage_outputs["localize"] / table) for r in (result, small.first))
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
def test_a_given_classifier_that_is_missing_or_does_not_fit_is_refused_before_the_run(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, more: Any, found: str
) -> None:
    shutil.copy(small.first.context.stage_outputs["train_classifier"] / "weights.pt", tmp_path / "mine.pt")
    (tmp_path / "garbage.pt").write_bytes(b"PK garbage")
    (tmp_path / "reversed.txt").write_text("\n".join(reversed(small.first.context.classes)) + "\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=found):
        pipeline.check(small.settings(f"weights.{weights}", *more).config, small.workspace, "any")


def test_a_split_without_images_is_refused_before_the_run(small: Any) -> None:
    config = small.settings("predict.split=test").config
    for until in (None, "predict"):
        with pytest.raises(UserError, match=r"predict\.split is test, which has no images"):
            pipeline.check(config, small.workspace, "any", until=until)
    pipeline.check(config, small.workspace, "any", until="train_segmenter")


@pytest.mark.parametrize("recipe", ["paper", "released"])
def test_recipes_with_saliency_refuse_images_without_saliency_maps(small: Any, recipe: str) -> None:
    """The remedy names the command that makes them, and two values of which either passes the checks."""
    without = ["weights.classifier_backbone=none", "data.saliency=absent"]
    with pytest.raises(UserError, match=r"24 of 24 tagged training images .*: train_000000, ") as caught:
        pipeline.check(small.settings(*without, recipe=recipe).config, small.workspace, "any")
    classes = f"data.classes={small.root / 'classes.txt'}"
    assert f"`mcis saliency voc {small.root} --out {small.root}/absent {classes}`" in caught.value.remedy
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
def test_unsupported_backbone_settings_are_refused_before_the_run(small: Any, values: str, found: str) -> None:
    with pytest.raises(UserError, match=found):
        pipeline.check(small.settings(values).config, small.workspace, "any")


def test_a_segmenter_with_more_layers_than_its_classifier_is_refused_before_the_run(small: Any) -> None:
    """The classifier of an EfficientNet lacks the last convolution, which the network `pyramid` uses."""
    lite0 = "backbone=timm/tf_efficientnet_lite0"
    backbones = [f"classifier.{lite0}", "classifier.stride=16", f"segmenter.{lite0}", "segmenter.stride=16"]
    pyramid = [*backbones, "segmenter.network=pyramid"]
    with pytest.raises(UserError, match=r"that the classifier does not have: body\.bn2\.") as caught:
        pipeline.check(small.settings(*pyramid).config, small.workspace, "any")
    for change in ("segmenter.init=pretrained", "segmenter.network=largefov"):
        assert change in caught.value.remedy
        pipeline.check(small.settings(*pyramid, change).config, small.workspace, "any")


@pytest.mark.slow
def test_a_note_reports_that_no_val_image_has_tags(small: Any, tmp_path: Path) -> None:
    root = small.draw(tmp_path)
    lists = root / "ImageSets/Segmentation"
    (lists / "val_cls.txt").write_text((lists / "val.txt").read_text())
    run = small.run("no-val", root=root, until="train_classifier")
    trained = run.context.result("train_classifier", StageResult)
    assert "val mAP" not in trained.counts
    assert "no image of the split val has a tag" in " ".join(trained.notes)


@pytest.mark.slow
def test_a_run_stops_with_a_report_if_its_classifier_learns_nothing(small: Any, tmp_path: Path) -> None:
    """Each image has the tags of another image, so training says nothing about the val images."""
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
def test_a_run_whose_masks_are_all_background_stops_after_them(small: Any) -> None:
    nothing = ("maps.scale=maximum", "pseudo_masks.rule=crf", "pseudo_masks.threshold=1", "pseudo_masks.score_floor=1")
    with pytest.raises(UserError, match=r"a network cannot learn from the 24 pseudo masks: on average 0[.]") as error:
        small.run("empty", *nothing)
    assert "of the pixels are foreground" in error.value.found
    assert "train_segmenter" not in small.workspace.outputs("empty")
    assert "a network cannot learn" in (small.workspace.runs / "empty" / "report.html").read_text()
    assert small.run("empty", *nothing, until="pseudo_masks").scores  # the masks are the result: there is no error


@pytest.fixture(scope="module")
def without_related(small: Any) -> pipeline.RunResult:
    """A run whose maps use no related images."""
    result: pipeline.RunResult = small.run("r0", "localize.related=0", until="localize")
    return result


def test_without_related_images_the_maps_are_the_single_round_maps(
    small: Any, without_related: pipeline.RunResult
) -> None:
    folder = without_related.context.stage_outputs["localize"]
    single_round = read_table(folder / "single")
    assert read_table(folder / "maps").equals(single_round)
    assert single_round.equals(read_table(small.first.context.stage_outputs["localize"] / "single"))
    assert [score.output for score in without_related.scores] == ["localization_maps", "baseline", "baseline"]


def test_compare_shows_the_maps_of_both_runs(small: Any, without_related: pipeline.RunResult) -> None:
    groups = open_run_groups(small.workspace.root, [small.first.context.name, "r0"])
    *_, gallery = compared_images(compare(groups, BootstrapSettings(resamples=10)), 2)
    assert (gallery.title, gallery.common, len(gallery.images)) == ("Localization maps", 24, 2)

    for image in gallery.images:
        (_, photograph, _), _, *run_cells = image.cells
        assert photograph is not None
        for run, (name, cell, note) in zip((small.first, without_related), run_cells, strict=True):
            assert (name, note[:10]) == (run.context.name, "mIoU here ")
            assert cell is not None
            expected = expected_heat(run, image.id, photograph.picture)
            np.testing.assert_array_equal(np.asarray(cell.picture), np.asarray(expected))


def expected_heat(run: pipeline.RunResult, image_id: str, photograph: Any) -> Any:
    """The picture of an image's maps over its photograph, computed from the output of `localize`."""
    maps = image_maps(Shards(run.context.stage_outputs["localize"] / "maps"), image_id)
    longest = max(photograph.size)
    width, height = photograph.size
    scores = score_maps(
        torch.from_numpy(maps.maps), maps.grids, "maximum", 64 * height // longest, 64 * width // longest
    )
    return heat_picture(photograph, scores.numpy(), maps.classes + 1)


def test_stages_have_the_hooks_that_they_need() -> None:
    """A hook with a misspelled name would be skipped without an error."""
    without = {hook: [s.name for s in pipeline.STAGES if not hasattr(s.module, hook)] for hook in ("check", "inputs")}
    assert without == {"check": ["index", "report"], "inputs": ["report"]}

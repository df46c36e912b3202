"""Studies on Ray Tune: refused studies, cases with baselines, shared stages, failing trials, and printed results."""

import csv
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from PIL import Image

import mcis
from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import decode_labels, encode_labels
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.weights_files import save_weights
from mcis.platform.reporting.compared_runs import open_run_groups
from mcis.platform.reporting.comparison import BootstrapSettings, compare
from mcis.platform.runs import progress
from mcis.platform.runs.files import read_table
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.case_scores import CaseScores
from mcis.tuning.definition import CaseDefinition, StudyDefinition, read_definition, select_cases
from mcis.tuning.studies import Study, StudyResult, run_study
from mcis.tuning.tables import cases_csv, ranks_of_methods

from .conftest import TINY

SmallVoc = Callable[..., Resolved]
PAPER = "paper (VOC 2012 val, network)"
TEST_CASES = (CaseDefinition(name="ours", paper=66.2, paper_test=66.9),)
RELATED = (0, 1, 3)
THREE_OF_TABLE_5 = select_cases(read_definition("table5"), [f"r{related}" for related in RELATED])
TINY_NETWORK = ("segmenter.min_steps=2", "segmenter.batch=2", "segmenter.crop=32", "predict.crf.iterations=1")


def make_study(resolved: Resolved, workspace: Path, kind: str = "table5", **options: Any) -> Study:
    fields: dict[str, Any] = {"until": "pseudo_masks", "parallel": 2, **options}
    return Study(kind=kind, name="study", resolved=resolved, workspace=Workspace(workspace), **fields)


@pytest.mark.parametrize(
    ("study", "values", "until", "found"),
    [
        ("table5", ("localize.related=3",), "pseudo_masks", "localize.related on the command line"),
        ("table5", ("classifier.attention=none",), "pseudo_masks", "none, which trains no W_P"),
        ("table5", (), "train_classifier", "--until train_classifier"),
        (
            "effect",
            ("classifier.attention=co", "localize.related=3"),
            "evaluate",
            "classifier.attention on the command",
        ),
        ("effect", ("weights.classifier=FILE",), "pseudo_masks", "does not fit this configuration"),
        ("effect", ("pseudo_masks.rule=saliency", "data.saliency=absent"), "pseudo_masks", "16 of 16 tagged training"),
        ("effect", ("data.truth_masks=absent",), "pseudo_masks", "the trial study-none-single-s0 has no score"),
        ("table1", (), "evaluate", "no images of single and web are given"),
    ],
)
def test_an_impossible_study_is_refused_before_its_first_trial(
    tmp_path: Path, small_voc: SmallVoc, study: str, values: tuple[str, ...], until: str, found: str
) -> None:
    weights = tmp_path / "mine.pt"
    save_weights(build_classifier(resolve("voc", "scratch").config.classifier, 2), weights, {})  # fits one training
    overrides = [value.replace("FILE", str(weights)) for value in values]
    impossible = make_study(small_voc(*overrides), tmp_path / "w", study, until=until)
    with pytest.raises(UserError, match=found):
        run_study(impossible, read_definition(study))
    assert not list((tmp_path / "w" / "runs").iterdir())


TWO_DATA_SETS = """
about = "two data sets"

[[data]]
name = "a"
source = "voc"
set = { "data.voc" = "FOLDER", "data.classes" = "FOLDER/classes.txt" }

[[data]]
name = "b"
source = "voc"
set = { "data.voc" = "FOLDER", "data.classes" = "FOLDER/classes.txt", "data.truth_masks" = "absent" }

[[method]]
name = "one"
"""
TWO_MAPS = """
about = "maps of two programs"

[[method]]
name = "one"
set = { "localize.maps" = "FOLDER/one", "pseudo_masks.rule" = "crf", "segmenter.init" = "pretrained" }

[[method]]
name = "other"
set = { "localize.maps" = "FOLDER/other", "pseudo_masks.rule" = "crf", "segmenter.init" = "pretrained" }
"""


def test_each_data_set_needs_ground_truth_before_the_first_trial(tmp_path: Path, small_voc: SmallVoc) -> None:
    small_voc()
    file = tmp_path / "two.toml"
    file.write_text(TWO_DATA_SETS.replace("FOLDER", str(tmp_path / "VOC2012")))
    with pytest.raises(UserError, match="the trial study-b-one-s0 has no score: no image"):
        mcis.study(file, name="study", recipe="scratch", overrides=TINY, workspace=tmp_path / "w")
    assert not list((tmp_path / "w" / "runs").iterdir())


def test_the_maps_of_all_methods_are_found_before_the_first_trial(tmp_path: Path, small_voc: SmallVoc) -> None:
    resolved = small_voc()
    file = tmp_path / "maps.toml"
    file.write_text(TWO_MAPS.replace("FOLDER", str(tmp_path)))
    (tmp_path / "one").mkdir()
    for path in (tmp_path / "VOC2012" / "SaliencyMaps").iterdir():
        (tmp_path / "one" / f"{path.stem}.npy").touch()
    with pytest.raises(UserError, match=r"no folder .*/other"):
        run_study(make_study(resolved, tmp_path / "w", str(file)), read_definition(str(file)))
    assert not list((tmp_path / "w" / "runs").iterdir())


OTHER_PROGRAM = """
about = "masks and predictions of another program"

[[method]]
name = "masks"

[method.set]
"segmenter.init" = "pretrained"
"pseudo_masks.rule" = "imported"
"pseudo_masks.masks" = "FOLDER/SegmentationClassAug"

[[method]]
name = "predictions"
set = { "predict.masks" = "FOLDER/SegmentationClassAug" }
"""


@pytest.mark.parametrize(("case", "until"), [("masks", "localize"), ("predictions", "pseudo_masks")])
def test_a_method_that_has_no_score_at_the_last_stage_is_refused(
    tmp_path: Path, small_voc: SmallVoc, case: str, until: str
) -> None:
    """Without an error, the table would lack the method."""
    resolved = small_voc()
    file = tmp_path / "methods.toml"
    file.write_text(OTHER_PROGRAM.replace("FOLDER", str(tmp_path / "VOC2012")))
    definition = select_cases(read_definition(str(file)), [case])
    with pytest.raises(UserError, match=f"the trial study-{case}-s0 ends at {until}, where it has no output"):
        run_study(make_study(resolved, tmp_path / "w", str(file), until=until), definition)
    assert not list((tmp_path / "w" / "runs").iterdir())


TWO_DEVICES = """
about = "a method on CPUs and one on GPUs"

[[method]]
name = "one"
recipe = "scratch"

[[method]]
name = "other"
recipe = "scratch"
set = { "compute.gpu" = true }
"""


def test_methods_on_different_devices_do_not_run_at_a_time(tmp_path: Path, small_voc: SmallVoc) -> None:
    resolved = small_voc()
    file = tmp_path / "devices.toml"
    file.write_text(TWO_DEVICES)
    study = make_study(resolved, tmp_path / "w", str(file), parallel=2)
    with pytest.raises(UserError, match=r"compute\.gpu is False in study-one-s0 and True in study-other-s0"):
        run_study(study, read_definition(str(file)))
    assert not list((tmp_path / "w" / "runs").iterdir())


CASES_WITHOUT_CONTRAST = [
    "none-single",
    "none-related",
    "none-itself",
    "none-wrong-class",
    "co-itself-single",
    "co-itself-related",
    "co-wrong-class-single",
    "co-single",
    "co-related",
]


@pytest.mark.slow
def test_the_study_effect_compares_cases_with_their_baselines(
    ray_local: None, tmp_path: Path, small_voc: SmallVoc
) -> None:
    workspace = tmp_path / "workspace"
    definition = read_definition("effect")
    cases = tuple(case for case in definition.cases if "contrastive" not in case.name)
    study = make_study(small_voc("seed=4", "localize.related=2"), workspace, "effect", num_seeds=2)
    result = run_study(study, definition.model_copy(update={"cases": cases}))

    assert [scores.case.name for scores in result.cases] == CASES_WITHOUT_CONTRAST
    assert all(scores.seeds == [4, 5] for scores in result.cases)
    assert all(set(scores.miou) == {"localization maps", "pseudo masks"} for scores in result.cases)
    check_stages(workspace, num_trainings=4, num_cases=len(result.cases), num_seeds=2)
    check_files(workspace, result.cases)
    check_difference(workspace, result.cases)
    rows = list(csv.DictReader(io.StringIO(cases_csv(result.cases))))
    assert [(row["case"], row["seed"]) for row in rows[:3]] == [
        ("none-single", "4"),
        ("none-single", "5"),
        ("none-related", "4"),
    ]
    assert float(rows[1]["pseudo masks"]) == result.cases[0].miou["pseudo masks"][1]


def check_stages(workspace: Path, *, num_trainings: int, num_cases: int, num_seeds: int) -> None:
    """Checks that each training has one classifier per seed, and that the maps of all trials differ."""
    assert len(list((workspace / "store").glob("train_classifier-*"))) == num_trainings * num_seeds
    # The scores are no test of this: after so short a training, most maps score like an empty map.
    maps = [read_table(folder / "maps")["map"].to_pylist() for folder in (workspace / "store").glob("localize-*")]
    assert len({str(values) for values in maps}) == len(maps) == num_cases * num_seeds


def check_files(workspace: Path, cases: Sequence[CaseScores]) -> None:
    """Checks study.png, study.html and study.json."""
    folder = workspace / "runs" / "study"
    assert (folder / "study.png").read_bytes()[:4] == b"\x89PNG"
    page = (folder / "study.html").read_text()
    assert all(page.count(f">{scores.case.name}<") > 16 for scores in cases), "both kinds of images show every case"

    content = json.loads((folder / "study.json").read_text())
    assert (content["study"], content["recipe"], content["changed"]["compute.threads"]) == ("effect", "scratch", 1)
    assert [case["miou"] for case in content["cases"]] == [scores.miou for scores in cases]
    assert content["cases"][1]["case"]["values"] == cases[1].case.values
    methods = content["meanings"]["localization maps"]["method"].split(" or ")
    with_related = {scores.case.inference.partition(", trained")[0] for scores in cases if scores.case.related}
    assert set(methods) == {*with_related, "-"}, "maps without related images have no method"


def check_difference(workspace: Path, cases: Sequence[CaseScores]) -> None:
    """Checks a difference in study.json against the scores and against `mcis compare`."""
    content = json.loads((workspace / "runs" / "study" / "study.json").read_text())
    differences = {(entry["case"]["name"], entry["case"]["baseline"]): entry for entry in content["differences"]}
    difference = differences["co-related", "co-itself-related"]
    miou = {scores.case.name: scores.miou["pseudo masks"] for scores in cases}
    expected = [value - baseline for value, baseline in zip(miou["co-related"], miou["co-itself-related"], strict=True)]
    assert difference["seeds"] == [4, 5]
    assert difference["miou"]["pseudo masks"] == expected

    runs = [f"study-{case}-s4,study-{case}-s5" for case in ("co-itself-related", "co-related")]
    comparison = compare(open_run_groups(workspace, runs), BootstrapSettings())
    (compared,) = (entry for entry in comparison.scores[1].differences if entry.measure == "miou")
    low, high = difference["intervals"]["pseudo masks"]
    assert (compared.low, compared.high) == (low, high)
    assert low <= compared.difference <= high
    assert compared.difference == pytest.approx(mean(expected), abs=0.01)  # scores have two decimals


@pytest.mark.slow
def test_trials_share_stages_are_tracked_below_the_study_and_may_fail(
    ray_local: None,
    tmp_path: Path,
    small_voc: SmallVoc,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workspace = tmp_path / "workspace"
    study = make_study(small_voc(), workspace)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse battery staple")
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    run_study(study, THREE_OF_TABLE_5)
    shown = capsys.readouterr().out
    assert "study:   3 trials; a stage with the same settings in several trials is computed once" in shown
    assert all(f"study study: {done}/3" in shown for done in range(1, 4)), shown

    check_shared_stages(workspace)
    check_tracking(workspace)
    files = [path for path in workspace.rglob("*") if path.is_file()]
    assert any(path.name == "params.json" for path in files), "Tune wrote the parameters of its trials"
    assert not [path for path in files if b"correct horse" in path.read_bytes()]
    check_failures(study, tmp_path / "VOC2012" / "SaliencyMaps")


@pytest.mark.parametrize(
    ("until", "found"),
    [("pseudo_masks", "--test with --until pseudo_masks"), ("evaluate", "no list test.txt|test.txt")],
)
def test_predictions_of_test_images_that_are_not_possible_are_refused(
    tmp_path: Path, small_voc: SmallVoc, until: str, found: str
) -> None:
    study = make_study(small_voc(), tmp_path / "w", until=until, predicts_test=True)
    with pytest.raises(UserError, match=found):
        run_study(study, read_definition("table5"))


@pytest.mark.slow
def test_test_images_are_predicted_for_the_evaluation_server(
    ray_local: None, tmp_path: Path, small_voc: SmallVoc, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = small_voc(*TINY_NETWORK)
    lists = tmp_path / "VOC2012" / "ImageSets" / "Segmentation"
    train_ids = (lists / "train_aug.txt").read_text().split()
    (lists / "test.txt").write_text("\n".join(train_ids[:2]) + "\n")
    remaining = "".join(f"{image_id}\n" for image_id in train_ids[2:])
    (lists / "train_aug.txt").write_text(remaining)

    workspace = tmp_path / "workspace"
    study = make_study(resolved, workspace, until="evaluate", predicts_test=True)
    result = run_study(study, StudyDefinition(about="test", case=TEST_CASES))
    assert len(list((workspace / "store").glob("train_segmenter-*"))) == 1, "both trials share the network"
    assert [scores.case.name for scores in result.cases] == ["ours"]
    assert (study.folder.path / "study.html").exists()

    (archive,) = result.archives
    assert (archive.case, archive.seed) == ("ours", 0)
    assert archive.paper is None, "the figure is that of other images and classes"
    assert archive.file == str(study.folder.path / "test" / "ours-s0.tar.gz")
    with tarfile.open(archive.file) as file:
        names = file.getnames()
        content = file.extractfile(names[0])
        assert content is not None
        labels = decode_labels(content.read())
    assert names == [f"results/VOC2012/Segmentation/comp6_test_cls/{image_id}.png" for image_id in train_ids[:2]]
    with Image.open(tmp_path / "VOC2012" / "JPEGImages" / f"{train_ids[0]}.jpg") as photograph:
        assert labels.shape == (photograph.height, photograph.width)
    assert "paper (VOC 2012 test, network)" in capsys.readouterr().out
    (written,) = json.loads(study.folder.study.read_text())["test_archives"]
    assert written == {"case": "ours", "seed": 0, "file": archive.file, "paper": None}


@pytest.mark.slow
def test_the_papers_scores_are_in_every_output(
    ray_local: None,
    tmp_path: Path,
    small_voc: SmallVoc,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    workspace = tmp_path / "workspace"
    definition = select_cases(read_definition("table5"), ["r0", "r3"])
    study = make_study(small_voc(*TINY_NETWORK, "data.classes=None", train=18), workspace, until="evaluate")
    tags = tmp_path / "VOC2012" / "ImageSets" / "Segmentation" / "train_aug_cls.txt"
    lines = [f"{line} {2 + number}\n" for number, line in enumerate(tags.read_text().splitlines())]
    tags.write_text("".join(lines))  # the paper's figures are shown next to scores of all 20 classes
    result = run_study(study, definition)

    assert result.paper_column == PAPER
    shown = capsys.readouterr().out
    assert PAPER in shown
    assert " 64.7 " in shown
    rows = list(csv.DictReader(io.StringIO(cases_csv(result.cases, result.paper_column))))
    assert [row[PAPER] for row in rows] == ["64.7", "66.2"]
    page = study.folder.study_page.read_text()
    assert f">{PAPER}<" in page
    assert 'id="cases"' in page
    assert 'id="baselines"' in page
    assert ">64.7<" in page
    assert json.loads(study.folder.study.read_text())["paper_column"] == PAPER
    metrics = {run.data.params["case"]: run.data.metrics for run in tracked_trials(workspace, "study")}
    assert {case: values["paper VOC 2012 val network"] for case, values in metrics.items()} == {"r0": 64.7, "r3": 66.2}

    # From Python, with the same trainings.
    values = (*TINY, "classifier.epochs=1", *TINY_NETWORK)
    options: dict[str, Any] = {"recipe": "scratch", "overrides": values, "workspace": workspace}
    result = mcis.study("fully-supervised", "voc", name="full", parallel=2, voc=tmp_path / "VOC2012", **options)
    (row,) = result.table().to_pylist()
    assert row[PAPER] == 76.3
    folder = replace(study, name="full").folder
    assert StudyResult.read(folder).table() == result.table()
    assert folder.study_page.read_text().count(">76.3<") == 1
    assert folder.study_picture.exists()


GRID = """
about = "methods on two data sets"

[[data]]
name = "a"
source = "voc"
set = { "data.voc" = "FOLDER/a", "data.classes" = "FOLDER/a/classes.txt" }

[[data]]
name = "b"
source = "voc"
set = { "data.voc" = "FOLDER/b", "data.classes" = "FOLDER/b/classes.txt" }

[[method]]
name = "one"
recipe = "scratch"

[[method]]
name = "other"
recipe = "scratch"
set = { "localize.related" = 2 }

[[method]]
name = "theirs"
recipe = "scratch"
set = { "pseudo_masks.rule" = "imported", "segmenter.init" = "pretrained" }
on.b = { "pseudo_masks.masks" = "FOLDER/b/SegmentationClassAug" }
"""


@pytest.mark.slow
def test_methods_are_compared_on_each_data_set(
    ray_local: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, num_classes in (("a", 2), ("b", 3)):
        synthetic.draw(tmp_path / name, train=8, val=2, size=64, classes=num_classes)
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace("FOLDER", str(tmp_path)))
    options: dict[str, Any] = {"overrides": (*TINY, "classifier.epochs=1"), "workspace": tmp_path / "w"}
    result = mcis.study(file, name="study", until="pseudo_masks", parallel=2, **options)  # voc's own recipe needs a GPU

    assert [scores.case.name for scores in result.cases] == ["a-one", "a-other", "b-one", "b-other", "b-theirs"]
    compared = [(difference.case.name, difference.case.baseline) for difference in result.differences]
    assert compared == [("a-other", "a-one"), ("b-other", "b-one"), ("b-theirs", "b-one")]
    assert result.cases[-1].miou["pseudo masks"] == [100.0], "the masks of the other program are the ground truth"
    assert all("pseudo masks" in difference.intervals for difference in result.differences)
    assert " rank " in capsys.readouterr().out

    folder = Workspace(tmp_path / "w").run("study")
    pages = sorted(path.name for path in folder.path.glob("*.html"))
    assert pages == ["study-a.html", "study-b.html"]
    page = (folder.path / "study-b.html").read_text()
    assert "b-other" in page
    assert "a-other" not in page
    labels = [(run.data.params["method"], run.data.params["data"]) for run in tracked_trials(tmp_path / "w", "study")]
    assert sorted(labels) == [("one", "a"), ("one", "b"), ("other", "a"), ("other", "b"), ("theirs", "b")]


OTHER_IMAGES = """
about = "masks of two programs, and of one that lacks an image"

[[method]]
name = "one"

[method.set]
"segmenter.init" = "pretrained"
"pseudo_masks.rule" = "imported"
"pseudo_masks.masks" = "FOLDER/SegmentationClassAug"

[[method]]
name = "other"

[method.set]
"segmenter.init" = "pretrained"
"pseudo_masks.rule" = "imported"
"pseudo_masks.masks" = "FOLDER/other"

[[method]]
name = "fewer"

[method.set]
"segmenter.init" = "pretrained"
"pseudo_masks.rule" = "imported"
"pseudo_masks.masks" = "FOLDER/SegmentationClassAug"
"data.leave_out" = "FOLDER/left_out.txt"
"""


@pytest.mark.slow
def test_scores_of_other_images_are_not_compared(
    ray_local: None, tmp_path: Path, small_voc: SmallVoc, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = small_voc()
    root = tmp_path / "VOC2012"
    (root / "left_out.txt").write_text("train_000003\n")
    (root / "other").mkdir()
    for path in (root / "SegmentationClassAug").glob("train*.png"):
        labels = decode_labels(path.read_bytes())
        labels[: len(labels) // 2] = 0
        (root / "other" / path.name).write_bytes(encode_labels(labels))
    file = tmp_path / "other.toml"
    file.write_text(OTHER_IMAGES.replace("FOLDER", str(root)))
    result = run_study(make_study(resolved, tmp_path / "w", str(file)), read_definition(str(file)))

    other, fewer = result.differences
    assert (other.case.name, list(other.miou), other.left_out) == ("other", ["pseudo masks"], {})
    assert (fewer.case.name, fewer.miou, fewer.intervals) == ("fewer", {}, {})
    reason = "scored on 15 images of train, study-one-s0 on 16: 1 only in study-one-s0 (train_000003)"
    assert fewer.left_out == {"pseudo masks": reason}
    assert ranks_of_methods(result.cases, result.differences) == {"one": "1", "other": "2", "fewer": ""}
    shown = " ".join(capsys.readouterr().out.split())
    assert f"note: fewer and one are not compared by pseudo masks: {reason}" in shown
    assert StudyResult.read(Workspace(tmp_path / "w").run("study")).differences == result.differences


def tracked_trials(workspace: Path, study: str) -> list[Run]:
    """The MLflow runs of the trials of a study."""
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    runs = list(client.search_runs([experiment.experiment_id]))
    (parent,) = (run for run in runs if run.info.run_name == study)
    return [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]


def check_shared_stages(workspace: Path) -> None:
    """Checks that three trials, two at a time, computed each stage as often as it differs."""
    assert len(list((workspace / "store").glob("train_classifier-*"))) == 1
    assert len(list((workspace / "store").glob("localize-*"))) == 3
    reports = [(workspace / f"runs/study-r{related}-s0/report.html").read_text() for related in RELATED]
    times_computed = {"index": 1, "train classifier": 1, "localize": 3, "pseudo masks": 3, "evaluate": 3}
    for stage, times in times_computed.items():
        computed = sum(f"<li><span>{stage}</span>" in report for report in reports)
        reused = sum(f'<li class="reused"><span>{stage}</span>' in report for report in reports)
        assert (computed, reused) == (times, 3 - times), stage

    content = json.loads((workspace / "runs" / "study" / "study.json").read_text())
    assert [case["case"]["related"] for case in content["cases"]] == list(RELATED)
    assert all(set(case["miou"]) == {"localization maps", "pseudo masks"} for case in content["cases"])


def check_tracking(workspace: Path) -> None:
    """Checks the MLflow runs of the study and of its trials."""
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert all(run.info.status == "FINISHED" for run in runs)

    (parent,) = (run for run in runs if run.info.run_name == "study")
    children = tracked_trials(workspace, "study")
    assert not any(metric.startswith("paper") for run in children for metric in run.data.metrics), "maps were scored"
    parameters = [run.data.params for run in children]
    assert sorted((values["case"], values["related"]) for values in parameters) == [(f"r{r}", str(r)) for r in RELATED]
    assert sorted(values["localize.related"] for values in parameters) == [str(related) for related in RELATED]
    artifacts = [file.path for file in client.list_artifacts(parent.info.run_id)]
    assert artifacts == ["study.html", "study.json", "study.png"]


def check_failures(study: Study, saliency: Path) -> None:
    """Damages the saliency maps, and checks that the study then fails and after their repair continues."""
    folder = study.folder
    for path in study.workspace.store.glob("pseudo_masks-*"):
        shutil.rmtree(path)
    contents = {path: path.read_bytes() for path in saliency.iterdir()}
    for path in contents:
        path.write_bytes(b"no picture")
    with pytest.raises(UserError, match="3 of 3 trials failed") as caught:
        run_study(study, THREE_OF_TABLE_5)
    assert "then repeat the command" in caught.value.remedy
    assert not folder.study_page.exists()
    assert json.loads(folder.study.read_text())["cases"] == []

    for path, content in contents.items():
        path.write_bytes(content)
    assert len(run_study(study, THREE_OF_TABLE_5).cases) == 3
    assert folder.study_page.exists()

"""The study of related images as Ray Tune trials that share one classifier, children of one MLflow run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.weights_files import save_weights
from mcis.platform.reporting.compared_runs import open_run_groups
from mcis.platform.reporting.comparison import BootstrapSettings, compare
from mcis.platform.runs import progress
from mcis.platform.runs.files import read_table
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.definition import read_definition
from mcis.tuning.studies import Study, defined

SmallVoc = Callable[..., Resolved]


def asked_for(resolved: Resolved, workspace: Path, kind: str = "references", **more: Any) -> Study:
    what: dict[str, Any] = {"until": "pseudo_masks", "parallel": 2, **more}
    return Study(kind=kind, name="study", resolved=resolved, workspace=Workspace(workspace), **what)


@pytest.mark.parametrize(
    ("study", "values", "until", "found"),
    [
        ("references", ("localize.related=3",), "pseudo_masks", "localize.related on the command line"),
        ("references", ("classifier.attention=none",), "pseudo_masks", "none, which trains no W_P"),
        ("references", (), "train_classifier", "--until train_classifier"),
        (
            "effect",
            ("classifier.attention=co", "localize.related=3"),
            "evaluate",
            "classifier.attention on the command",
        ),
        ("effect", ("weights.classifier=FILE",), "pseudo_masks", "does not fit this configuration"),
        ("effect", ("pseudo_masks.rule=saliency", "data.saliency=absent"), "pseudo_masks", "16 of 16 training"),
        ("effect", ("data.truth_masks=absent",), "pseudo_masks", "no training image has a ground-truth mask"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_its_first_trial(
    tmp_path: Path, small_voc: SmallVoc, study: str, values: tuple[str, ...], until: str, found: str
) -> None:
    model = build_classifier(resolve("voc", "scratch").config.classifier, 2)
    save_weights(model, tmp_path / "mine.pt", {})  # of co+contrastive, which fits one of the trainings
    told = [value.replace("FILE", str(tmp_path / "mine.pt")) for value in values]
    asked = asked_for(small_voc(*told), tmp_path / "w", study, until=until)
    with pytest.raises(UserError, match=found):
        defined(asked, read_definition(study))
    assert not list((tmp_path / "w" / "runs").iterdir())


@pytest.mark.slow
def test_effects_beside_their_controls(ray_local: None, tmp_path: Path, small_voc: SmallVoc) -> None:
    """Every case for every seed; a classifier a training and seed, and maps that differ where the cases do."""
    workspace = tmp_path / "workspace"
    whole = read_definition("effect")
    some = tuple(case for case in whole.cases if "contrastive" not in case.name)
    study = asked_for(small_voc("seed=4", "localize.related=2"), workspace, "effect", seeds=2)
    figures = defined(study, whole.model_copy(update={"cases": some}))
    assert [of.case.name for of in figures] == [
        "none-single",
        "none-related",
        "none-itself",
        "none-wrong-class",
        "co-alone-single",
        "co-alone-related",
        "co-wrong-single",
        "co-single",
        "co-related",
    ]
    assert all(of.seeds == [4, 5] for of in figures)
    assert all(set(of.miou) == {"localization maps", "pseudo masks"} for of in figures)
    assert len(list((workspace / "store").glob("train_classifier-*"))) == 8
    # Of so short a training nearly all maps score as background alone does, so they are compared themselves.
    maps = [read_table(folder / "maps")["map"].to_pylist() for folder in (workspace / "store").glob("localize-*")]
    assert len({str(values) for values in maps}) == len(maps) == 2 * len(figures)
    folder = workspace / "runs" / "study"
    assert (folder / "study.png").read_bytes()[:4] == b"\x89PNG"
    page = (folder / "study.html").read_text()
    assert all(page.count(f">{of.case.name}<") > 16 for of in figures), "both kinds of images, each with every case"
    assert "By the distance from where a map is highest" in page
    written = json.loads((folder / "study.json").read_text())
    assert [of["miou"] for of in written["cases"]] == [of.miou for of in figures]
    assert written["cases"][1]["case"]["values"] == figures[1].case.values
    assert (written["study"], written["recipe"], written["changed"]["compute.threads"]) == ("effect", "scratch", 1)
    methods = written["means"]["localization maps"]["method"]
    with_related = {of.case.inference.partition(", trained")[0] for of in figures if of.case.related}
    assert set(methods.split(" or ")) == with_related
    against = {(d["of"]["name"], d["of"]["against"]): d for d in written["differences"]}
    by_name = {of.case.name: of.miou["pseudo masks"] for of in figures}
    difference = against["co-related", "co-alone-related"]
    expected = [a - b for a, b in zip(by_name["co-related"], by_name["co-alone-related"], strict=True)]
    assert (difference["seeds"], difference["miou"]["pseudo masks"]) == ([4, 5], expected)
    low, high = difference["intervals"]["pseudo masks"]
    both = [f"study-{case}-s4,study-{case}-s5" for case in ("co-alone-related", "co-related")]
    compared = open_run_groups(workspace, both)
    [found] = [of for of in compare(compared, BootstrapSettings()).scores[1].differences if of.measure == "miou"]
    assert (found.low, found.high) == (low, high)
    assert low <= found.difference <= high
    assert found.difference == pytest.approx(mean(expected), abs=0.01)  # scores have two digits


@pytest.mark.slow
def test_trials_share_the_classifier_are_children_of_one_run_and_may_fail(
    ray_local: None,
    tmp_path: Path,
    small_voc: SmallVoc,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow.tracking import MlflowClient

    workspace = tmp_path / "workspace"
    study = asked_for(small_voc(), workspace)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse battery staple")
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    defined(study, read_definition("references"))
    shown = capsys.readouterr().out
    assert "study:   6 trials; a stage that several agree in" in shown
    assert all(f"study study: {done}/6" in shown for done in range(1, 7)), shown

    assert len(list((workspace / "store").glob("train_classifier-*"))) == 1
    assert len(list((workspace / "store").glob("localize-*"))) == 6
    reports = [(workspace / f"runs/study-r{r}-s0/report.html").read_text() for r in range(6)]
    for stage, trials in {"index": 1, "train classifier": 1, "localize": 6, "pseudo masks": 6, "evaluate": 6}.items():
        names = [f"<li><span>{stage}</span>", f'<li class="reused"><span>{stage}</span>']
        computed, reused = (sum(name in report for report in reports) for name in names)
        assert (computed, reused) == (trials, 6 - trials), f"{stage}, of two trials at a time"
    written = json.loads((workspace / "runs" / "study" / "study.json").read_text())
    assert [of["case"]["related"] for of in written["cases"]] == list(range(6))
    assert all(set(of["miou"]) == {"localization maps", "pseudo masks"} for of in written["cases"])
    assert (workspace / "runs" / "study" / "study.png").read_bytes()[:4] == b"\x89PNG"
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parent = next(r for r in runs if r.info.run_name == "study")
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    cases = sorted((r.data.params["case"], r.data.params["related"]) for r in children)
    assert cases == [(f"r{r}", str(r)) for r in range(6)]
    assert [of.path for of in client.list_artifacts(parent.info.run_id)] == ["study.html", "study.json", "study.png"]
    assert sorted(r.data.params["localize.related"] for r in children) == [str(r) for r in range(6)]
    assert all(r.info.status == "FINISHED" for r in runs)
    files = [path for path in workspace.rglob("*") if path.is_file()]
    assert any(path.name == "params.json" for path in files)
    assert not [path for path in files if b"correct horse" in path.read_bytes()]
    # Once more, with masks that none can be made of: the table is that of the trials that ended well.
    for path in (workspace / "store").glob("pseudo_masks-*"):
        shutil.rmtree(path)
    kept = {path: path.read_bytes() for path in (tmp_path / "VOC2012" / "SaliencyMaps").iterdir()}
    for path in kept:
        path.write_bytes(b"no picture")
    with pytest.raises(UserError, match="6 of 6 trials failed") as caught:
        defined(study, read_definition("references"))
    assert not (workspace / "runs" / "study" / "study.html").exists()
    assert "then repeat the command" in caught.value.remedy
    assert json.loads((workspace / "runs" / "study" / "study.json").read_text())["cases"] == []
    for path, content in kept.items():
        path.write_bytes(content)
    assert len(defined(study, read_definition("references"))) == 6
    assert (workspace / "runs" / "study" / "study.html").exists()

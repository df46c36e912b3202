"""The search: axes, what its store draws and keeps, what is refused, and a real one on Ray Tune."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.fs as pafs
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from mcis.datasets.errors import UserError
from mcis.datasets.storage import folders
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.search import run_search
from mcis.tuning.search_space import Search, check_search, parse_axes
from mcis.tuning.search_trials import Found, SearchTrials
from mcis.tuning.trials import Trial

SmallVoc = Callable[..., Resolved]
AXES = {"classifier.optimizer.learning_rate": FloatDistribution(0.0, 1.0), "localize.related": IntDistribution(0, 3)}
RELATED = "localize.related=integer(0,3)"


def test_axes_are_optunas_distributions_by_key() -> None:
    texts = ["a.b=loguniform(1e-4, 1e-2)", "c = choice(co, co+contrastive)", "d=integer(0,5)", "e=choice(0.5,null)"]
    assert parse_axes(texts) == {
        "a.b": FloatDistribution(1e-4, 1e-2, log=True),
        "c": CategoricalDistribution(["co", "co+contrastive"]),
        "d": IntDistribution(0, 5),
        "e": CategoricalDistribution([0.5, None]),
    }


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a=3",
        "a=choice(1)",
        "a=choice(1,1)",
        "a=uniform(2,1)",
        "a=loguniform(0,1)",
        "a=integer(0.5,2)",
        "a=uniform(1,2,3)",
        "a=normal(0,1)",
        "a=uniform(x,2)",
        "a=uniform(1,Infinity)",
        "a=uniform(0,true)",
    ],
)
def test_other_axes_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match="--axis"):
        parse_axes([text])


def search(folder: Path, *, rate: float = 0.5, halving: int = 3, **more: Any) -> Search:
    """A search whose configuration has this learning rate, and no related images."""
    resolved = resolve(
        "voc", "scratch", assignments=[f"classifier.optimizer.learning_rate={rate}", "localize.related=0"]
    )
    return Search(name="s", resolved=resolved, workspace=Workspace(folder), axes=AXES, halving=halving, **more)


def begun(trials: SearchTrials) -> tuple[str, dict[str, Any]]:
    """The name and the values of the next trial, which Ray Tune knows by how many this object was asked for before."""
    asked = Trial(**trials.suggest(str(len(trials.numbers)))["trial"])
    return asked.name, {key: asked.values.get(key, 0) for key in AXES}


def height(values: dict[str, Any]) -> float:
    return float(values["localize.related"] - (values["classifier.optimizer.learning_rate"] - 0.3) ** 2)


def searched(search: Search, trials: int, *, killed: bool = False) -> Found:
    """A search of `height`, which is killed in the middle of each trial, and behind it, where `killed` says so."""
    opened = SearchTrials(search)
    for number in range(trials):
        name, values = begun(opened)
        validation = {"validation": 1, "val_map": height(values)}
        if killed:
            opened.on_trial_result("0", validation)
            opened = SearchTrials(search)
            assert begun(opened) == (name, values)
        opened.on_trial_result("0" if killed else str(number), validation)
        opened.on_trial_complete("0" if killed else str(number), {"objective": height(values), "val_map": 1.0})
        if killed:
            opened = SearchTrials(search)
    return opened.found()


def results(found: Found) -> list[tuple[int, dict[str, Any], float | None]]:
    return [(tried.number, tried.values, tried.objective) for tried in found.tried]


def test_the_first_trial_is_the_configuration_as_it_is_and_the_best_is_better(tmp_path: Path) -> None:
    found = searched(search(tmp_path), 30)
    assert found.default
    assert (found.default.number, found.default.values) == (0, {**dict.fromkeys(AXES, 0.5), "localize.related": 0})
    assert found.best
    assert height(found.best.values) == found.best.objective
    assert found.best.objective > height(found.default.values)
    late = [height(tried.values) for tried in found.tried[20:]]
    early = [height(tried.values) for tried in found.tried[1:10]]
    assert sum(late) / len(late) > sum(early) / len(early)


def test_a_configuration_beside_the_axes_is_no_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = searched(search(tmp_path, rate=2.0), 1)
    assert "no trial is the configuration as it is" in capsys.readouterr().out
    assert found.tried[0].values["classifier.optimizer.learning_rate"] <= 1
    assert found.default is None


@pytest.mark.slow
def test_a_search_that_is_killed_again_and_again_ends_as_it_would_have(tmp_path: Path) -> None:
    whole, killed = (searched(search(tmp_path / name), 12, killed=name == "killed") for name in ("whole", "killed"))
    assert results(whole) == results(killed)
    assert [tried.number for tried in whole.tried] == list(range(12))


@pytest.mark.slow
def test_a_search_whose_workspace_lies_in_a_bucket_goes_on_on_another_machine(
    bucket: pafs.FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose disk is another: each of the machines is lost in the middle of a trial."""
    whole = searched(search(tmp_path / "whole"), 13)
    uri = f"s3://{bucket.base_path.strip('/')}/work"
    for machine in range(3):
        monkeypatch.setenv(folders.COPIES_VARIABLE, str(tmp_path / f"machine{machine}"))
        there = search(folders.local_path(uri))
        searched(there, 4)
        left = begun(SearchTrials(there))
    assert begun(SearchTrials(there)) == left, "on the same machine, too"
    found = searched(there, 1)
    assert results(found) == results(whole)
    assert SearchTrials(search(folders.local_path(uri))).found() == found, "what other commands fetch is the same"


def test_trials_that_were_interrupted_go_on_first_under_their_numbers(tmp_path: Path) -> None:
    searched(search(tmp_path), 1)
    opened = SearchTrials(search(tmp_path))
    names = [begun(opened) for _ in range(2)]
    again = SearchTrials(search(tmp_path))
    assert len(again.found().tried) == 1
    assert [begun(again) for _ in range(2)] == names
    assert begun(again)[0] == "s-t003"


def test_halving_lets_one_in_three_go_on_and_remembers_those_of_earlier_calls(tmp_path: Path) -> None:
    going_on = []
    for precision in (50.0, 60.0, 70.0, 40.0, 80.0, 65.0):
        opened = SearchTrials(search(tmp_path))
        scheduler, trial, controller = opened.scheduler(), SimpleNamespace(trial_id="0"), cast("Any", None)
        begun(opened)
        result = {"validation": 1, "val_map": precision, "epoch": 1.0}
        scheduler.on_trial_add(controller, cast("Any", trial))
        going_on.append(scheduler.on_trial_result(controller, cast("Any", trial), result) == "CONTINUE")
        if going_on[-1]:
            opened.on_trial_result("0", result)
            result = {"objective": precision, "val_map": precision}
        opened.on_trial_complete("0", result)
    assert going_on == [True, True, True, False, True, False]
    found = opened.found()
    assert found.counts() == "4 done, 2 stopped, 0 failed"
    assert [(t.state, t.val_map, t.epoch, t.objective) for t in found.tried][3] == ("stopped", 40.0, 1.0, None)


def test_failures_have_their_cause(tmp_path: Path) -> None:
    opened = SearchTrials(search(tmp_path))
    begun(opened)
    opened.on_trial_complete("0", error=True)
    opened.failed(0, "a loss that is not finite")
    [tried] = SearchTrials(search(tmp_path)).found().tried
    assert (tried.state, tried.cause) == ("failed", "a loss that is not finite")
    assert opened.found().best is None


def test_a_store_of_another_search_is_refused(tmp_path: Path) -> None:
    SearchTrials(search(tmp_path))
    for other in (search(tmp_path, objective="masks"), search(tmp_path, images="others")):
        with pytest.raises(UserError, match="other images, axes"):
            SearchTrials(other)
    search(tmp_path).folder.search.write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match="cannot be used"):
        SearchTrials(search(tmp_path))


@pytest.mark.parametrize(
    ("values", "axis", "objective", "found"),
    [
        ((), RELATED, "miou", "--objective miou"),
        ((), RELATED, "segmentation", "whose score is reported"),
        (("localize.related=2",), RELATED, "maps", "by --set and by --axis"),
        ((), "data.saliency=choice(x,y)", "maps", "trials may differ in"),
        ((), "localize.relatd=integer(0,3)", "maps", "did you mean localize.related"),
        ((), "localize.related=integer(-1,3)", "maps", "localize.related: Input should be greater"),
        ((), "localize.related=uniform(0,8)", "maps", "localize.related: Input should be a valid integer"),
        (("data.truth_masks=absent",), RELATED, "maps", "no training image has a ground-truth"),
        (("classifier.val_every=0",), RELATED, "val_map", "trained and validated"),
        (("supervision=full", "segmenter.init=pretrained"), RELATED, "maps", "no classifier"),
        (("predict.split=train", "predict.crf.iterations=0"), RELATED, "segmentation-crf", "crf.iterations=0"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_the_first_trial(
    tmp_path: Path, small_voc: SmallVoc, values: tuple[str, ...], axis: str, objective: str, found: str
) -> None:
    what: dict[str, Any] = {"name": "s", "resolved": small_voc(*values), "workspace": Workspace(tmp_path / "w")}
    with pytest.raises(UserError, match=found):
        check_search(Search(**what, axes=parse_axes([axis]), objective=objective))
    assert not list((tmp_path / "w" / "runs").iterdir())


@pytest.mark.slow
def test_a_search_stops_what_lags_and_goes_on(ray_local: None, tmp_path: Path, small_voc: SmallVoc) -> None:
    """Classifiers of other rates, of which a third may go on; then more trials by the same command."""
    from mlflow.tracking import MlflowClient

    resolved = small_voc(train=48, val=32, classes=4, epochs=3)
    workspace = Workspace(tmp_path / "workspace")
    axes = parse_axes(["classifier.optimizer.learning_rate=loguniform(1e-5,1e-1)", "localize.related=integer(0,2)"])
    common: dict[str, Any] = {"name": "wide", "resolved": resolved, "workspace": workspace, "axes": axes, "halving": 2}
    first = run_search(Search(**common, trials=4))
    assert len(first.tried) == 4
    assert first.best
    found = run_search(Search(**common, trials=8))
    assert [tried.values for tried in found.tried][:4] == [tried.values for tried in first.tried]
    assert len(found.tried) == 8
    assert {tried.state for tried in found.tried} == {"done", "stopped"}
    folder = workspace.run("wide")
    again = resolve(file=folder.best)
    assert found.best
    assert again.config.localize.related == found.best.values["localize.related"]
    assert again.config.classifier.optimizer.learning_rate == found.best.values["classifier.optimizer.learning_rate"]
    assert folder.study_picture.read_bytes()[:4] == b"\x89PNG"
    assert json.loads(folder.study.read_text())["best"]["objective"] == found.best.objective
    client = MlflowClient(f"sqlite:///{workspace.tracking_store}")
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    for tried in found.tried:
        run, kept = runs[f"wide-t{tried.number:03d}"], workspace.record(f"wide-t{tried.number:03d}")
        assert run.info.status == ("FINISHED" if tried.state == "done" else "KILLED")
        assert kept
        assert kept.outcome == ("finished" if tried.state == "done" else "interrupted")
        assert run.data.tags["mlflow.parentRunId"] == runs["wide"].info.run_id

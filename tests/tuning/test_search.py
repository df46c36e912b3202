"""Hyperparameter search: axes, proposed and stored trials, refused searches, and a search on Ray Tune."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pyarrow.fs as pafs
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from mcis.datasets.errors import UserError
from mcis.datasets.storage import folders
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.search import axis_importances, run_search
from mcis.tuning.search_space import Search, check_search, parse_axes
from mcis.tuning.search_trials import SearchResult, StoredSearch, make_scheduler
from mcis.tuning.trials import Trial

SmallVoc = Callable[..., Resolved]
RATE = "classifier.optimizer.learning_rate"
AXES = {RATE: FloatDistribution(0.0, 1.0), "localize.related": IntDistribution(0, 3)}
RELATED = "localize.related=integer(0,3)"


def test_axes_become_distributions_by_key() -> None:
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
def test_other_axes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--axis"):
        parse_axes([text])


def make_search(folder: Path, *, rate: float = 0.5, halving: int = 3, **options: Any) -> Search:
    """A search whose configuration has this learning rate and no related images."""
    resolved = resolve("voc", "scratch", overrides=[f"{RATE}={rate}", "localize.related=0"])
    return Search(name="s", resolved=resolved, workspace=Workspace(folder), axes=AXES, halving=halving, **options)


def open_trials(search: Search) -> StoredSearch:
    """The stored trials of a search, as a new process opens them."""
    return StoredSearch(search, Path(tempfile.mkdtemp()))


def next_trial(trials: StoredSearch, tune_id: str = "0") -> tuple[str, dict[str, Any]]:
    """Starts the next trial; returns its name and the values of the axes."""
    trial = Trial(**trials.suggest(tune_id)["trial"])
    return trial.name, {key: trial.values.get(key, 0) for key in AXES}


def objective(values: dict[str, Any]) -> float:
    """A function with its maximum at a learning rate of 0.3 and 3 related images."""
    return float(values["localize.related"] - (values[RATE] - 0.3) ** 2)


def run_trials(search: Search, count: int, *, kill: bool = False) -> SearchResult:
    """Runs trials of a search that maximizes `objective`.

    Args:
        kill: Whether the process is killed during and after each trial.
    """
    trials = open_trials(search)
    for number in range(count):
        tune_id = str(number)
        name, values = next_trial(trials, tune_id)
        validation = {"validation": 1, "val_map": objective(values)}
        trials.on_trial_result(tune_id, validation)
        if kill:
            trials = open_trials(search)
            assert next_trial(trials, tune_id) == (name, values)
            trials.on_trial_result(tune_id, validation)
        trials.on_trial_complete(tune_id, {"objective": objective(values), "val_map": 1.0})
        if kill:
            trials = open_trials(search)
    return trials.result()


def summarized(result: SearchResult) -> list[tuple[int, dict[str, Any], float | None]]:
    return [(trial.number, trial.values, trial.objective) for trial in result.trials]


def test_the_first_trial_is_the_configuration_itself(tmp_path: Path) -> None:
    result = run_trials(make_search(tmp_path), 1)
    assert result.default
    assert result.default.number == 0
    assert result.default.values == {RATE: 0.5, "localize.related": 0}


def test_the_best_trial_improves_on_the_configuration_and_late_trials_on_early_ones(tmp_path: Path) -> None:
    result = run_trials(make_search(tmp_path), 30)
    assert result.default
    assert result.best
    assert objective(result.best.values) == result.best.objective
    assert result.best.objective > objective(result.default.values)
    late = [objective(trial.values) for trial in result.trials[20:]]
    early = [objective(trial.values) for trial in result.trials[1:10]]
    assert sum(late) / len(late) > sum(early) / len(early)


def test_a_configuration_that_is_not_on_the_axes_is_no_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_trials(make_search(tmp_path, rate=2.0), 1)
    assert "no trial has the values of the configuration itself" in capsys.readouterr().out
    assert result.trials[0].values[RATE] <= 1
    assert result.default is None


@pytest.mark.slow
def test_a_search_that_is_killed_repeatedly_has_the_same_trials(tmp_path: Path) -> None:
    undisturbed = run_trials(make_search(tmp_path / "undisturbed"), 12)
    killed = run_trials(make_search(tmp_path / "killed"), 12, kill=True)
    assert summarized(undisturbed) == summarized(killed)
    assert [trial.number for trial in undisturbed.trials] == list(range(12))


@pytest.mark.slow
def test_a_search_in_a_bucket_continues_on_another_machine(
    bucket: pafs.FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three machines with disks of their own fail, each during a trial."""
    undisturbed = run_trials(make_search(tmp_path / "undisturbed"), 13)
    uri = f"s3://{bucket.base_path.strip('/')}/work"
    for machine in range(3):
        monkeypatch.setenv(folders.COPIES_VARIABLE, str(tmp_path / f"machine{machine}"))
        search = make_search(folders.local_path(uri))
        run_trials(search, 4)
        unfinished = next_trial(open_trials(search))

    assert next_trial(open_trials(search)) == unfinished, "on the same machine, too"
    result = run_trials(search, 1)
    assert summarized(result) == summarized(undisturbed)
    assert open_trials(make_search(folders.local_path(uri))).result() == result


def test_interrupted_trials_continue_first_under_their_numbers(tmp_path: Path) -> None:
    run_trials(make_search(tmp_path), 1)
    trials = open_trials(make_search(tmp_path))
    interrupted = [next_trial(trials, tune_id) for tune_id in ("0", "1")]

    trials = open_trials(make_search(tmp_path))
    assert len(trials.result().trials) == 1
    assert [next_trial(trials, tune_id) for tune_id in ("0", "1")] == interrupted
    assert next_trial(trials, "2")[0] == "s-t003"


def test_halving_compares_with_trials_of_earlier_calls(tmp_path: Path) -> None:
    """Each trial runs in a call of its own; the best third continues."""
    continues = []
    for val_map in (50.0, 60.0, 70.0, 40.0, 80.0, 65.0):
        trials = open_trials(make_search(tmp_path))
        scheduler = make_scheduler(trials.search, trials.study)
        controller = cast("Any", None)
        tune_trial = cast("Any", SimpleNamespace(trial_id="0"))
        next_trial(trials)

        result = {"validation": 1, "val_map": val_map, "epoch": 1.0}
        scheduler.on_trial_add(controller, tune_trial)
        decision = scheduler.on_trial_result(controller, tune_trial, result)
        continues.append(decision == "CONTINUE")
        if continues[-1]:
            trials.on_trial_result("0", result)
            result = {"objective": val_map, "val_map": val_map}
        trials.on_trial_complete("0", result)

    assert continues == [True, True, True, False, True, False]
    ended = trials.result()
    assert ended.summary() == "4 done, 2 stopped, 0 failed"
    stopped = ended.trials[3]
    assert (stopped.state, stopped.val_map, stopped.epoch, stopped.objective) == ("stopped", 40.0, 1.0, None)


def test_a_failed_trial_has_the_error_of_its_run(tmp_path: Path) -> None:
    search = make_search(tmp_path)
    trials = open_trials(search)
    name, _ = next_trial(trials)
    search.workspace.update_record(name, outcome="failed", reason="a loss that is not finite")
    trials.on_trial_complete("0", error=True)

    result = open_trials(search).result()
    (trial,) = result.trials
    assert (trial.state, trial.cause) == ("failed", "a loss that is not finite")
    assert result.best is None


def test_a_trial_without_a_result_is_no_ended_trial(tmp_path: Path) -> None:
    trials = open_trials(make_search(tmp_path))
    next_trial(trials)
    trials.on_trial_complete("0", {})
    assert trials.result().trials == []


@pytest.mark.parametrize("change", [{"objective": "masks"}, {"images": "others"}])
def test_the_file_of_another_search_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    open_trials(make_search(tmp_path))
    with pytest.raises(UserError, match="other images, axes"):
        open_trials(make_search(tmp_path, **change))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    search = make_search(tmp_path)
    search.folder.search.write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match="cannot be used"):
        open_trials(search)


@pytest.mark.parametrize(
    ("values", "axis", "objective", "found"),
    [
        ((), RELATED, "miou", "--objective miou"),
        ((), RELATED, "segmentation", "whose score is reported"),
        (("localize.related=2",), RELATED, "maps", "override and --axis for localize.related"),
        ((), "data.saliency=choice(x,y)", "maps", "may differ between trials"),
        ((), "compute.gpu=choice(false,true)", "maps", "may differ between trials"),
        ((), "localize.relatd=integer(0,3)", "maps", "did you mean localize.related"),
        ((), "localize.related=integer(-1,3)", "maps", "localize.related: Input should be greater"),
        ((), "localize.related=uniform(0,8)", "maps", "localize.related: Input should be a valid integer"),
        (("data.truth_masks=absent",), RELATED, "maps", "no training image has a ground-truth"),
        (("classifier.val_every=0",), RELATED, "val_map", "trained and validated"),
        (("supervision=full", "segmenter.init=pretrained"), RELATED, "maps", "no classifier"),
        (("predict.split=train", "predict.crf.iterations=0"), RELATED, "segmentation-crf", "crf.iterations=0"),
    ],
)
def test_an_impossible_search_is_refused_before_its_first_trial(
    tmp_path: Path, small_voc: SmallVoc, values: tuple[str, ...], axis: str, objective: str, found: str
) -> None:
    workspace = Workspace(tmp_path / "w")
    axes = parse_axes([axis])
    search = Search(name="s", resolved=small_voc(*values), workspace=workspace, axes=axes, objective=objective)
    with pytest.raises(UserError, match=found):
        check_search(search)
    assert not list((tmp_path / "w" / "runs").iterdir())


@pytest.mark.slow
def test_a_search_stops_bad_trials_and_continues_with_more(
    ray_local: None, tmp_path: Path, small_voc: SmallVoc
) -> None:
    """Classifiers with different learning rates, half of which continue; then more trials by the same command."""
    resolved = small_voc(train=48, val=32, classes=4, epochs=3)
    workspace = Workspace(tmp_path / "workspace")
    axes = parse_axes([f"{RATE}=loguniform(1e-5,1e-1)", "localize.related=integer(0,2)"])
    options: dict[str, Any] = {"name": "wide", "resolved": resolved, "workspace": workspace, "axes": axes}
    first = run_search(Search(**options, halving=2, trials=4))
    assert len(first.trials) == 4
    assert first.best

    result = run_search(Search(**options, halving=2, trials=8))
    assert [trial.values for trial in result.trials][:4] == [trial.values for trial in first.trials]
    assert len(result.trials) == 8
    assert {trial.state for trial in result.trials} == {"done", "stopped"}
    check_files(workspace, result)
    check_records(workspace, result)


def test_the_axis_that_changes_the_objective_is_the_important_one() -> None:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    assert axis_importances(study) == {}

    def objective(trial: optuna.Trial) -> float:
        trial.suggest_float("other", 0, 1)
        return trial.suggest_float("one", 0, 1) ** 2

    study.optimize(objective, n_trials=40)
    importances = axis_importances(study)
    assert list(importances) == ["one", "other"]
    assert importances["one"] > 0.9
    assert axis_importances(study) == importances


def check_files(workspace: Workspace, result: SearchResult) -> None:
    """Checks study.png, importances.png, study.json and best.toml of a search."""
    folder = workspace.run("wide")
    assert folder.study_picture.read_bytes()[:4] == b"\x89PNG"
    assert result.best
    content = json.loads(folder.study.read_text())
    assert content["best"]["objective"] == result.best.objective
    assert content["importances"] == result.importances
    assert sum(result.importances.values()) == pytest.approx(1)
    assert folder.importances.read_bytes()[:4] == b"\x89PNG"
    best = resolve(file=folder.best).config
    assert best.localize.related == result.best.values["localize.related"]
    assert best.classifier.optimizer.learning_rate == result.best.values[RATE]


def check_records(workspace: Workspace, result: SearchResult) -> None:
    """Checks that each trial's run, and its MLflow run below the search's, say how the trial ended."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{workspace.tracking_store}")
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    for trial in result.trials:
        name = f"wide-t{trial.number:03d}"
        record = workspace.record(name)
        assert record
        assert record.outcome == ("finished" if trial.state == "done" else "interrupted")
        assert runs[name].info.status == ("FINISHED" if trial.state == "done" else "KILLED")
        assert runs[name].data.tags["mlflow.parentRunId"] == runs["wide"].info.run_id

"""Population based training: who takes over whom, what becomes of values, what is refused, and a real one."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform import pipeline
from mcis.platform.cli import app
from mcis.platform.config.resolve import resolve
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.workspace import SUMMARY, Workspace
from mcis.tuning import population_search
from mcis.tuning.axes import lies_on, parse_axes, value_at
from mcis.tuning.found import Generation, Member, best_of, control_of, line_of
from mcis.tuning.pictures import population_picture
from mcis.tuning.population import explored, first_generation, next_generation
from mcis.tuning.population_search import Population, check_population, run_population
from mcis.tuning.tables import population_table
from mcis.tuning.trials import Common, Outcome, Trial

AXES = {
    "rate": FloatDistribution(1e-4, 1e-1, log=True),
    "share": FloatDistribution(0.0, 1.0),
    "related": IntDistribution(0, 8),
    "width": IntDistribution(1, 64, log=True),
    "form": CategoricalDistribution(["a", "b", "c"]),
}
DEFAULT = {"rate": 1e-3, "share": 0.5, "related": 2, "width": 8, "form": "b"}
TINY = (
    "classifier.epochs=1",
    "classifier.channels=24",
    "segmenter.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "report.panels=2",
    "compute.threads=1",
    "compute.stop_if_nothing_is_learnt=false",
)


def height(values: dict[str, Any]) -> float:
    """Higher, the nearer a member's values are to others than the default's."""
    return 100 - 50 * abs(values["share"] - 0.8) - abs(values["related"] - 7) - 5 * (values["form"] != "c")


def ran(generation: Generation, *failed: int) -> Generation:
    ended = [replace(member, objective=height(member.values)) for member in generation]
    return [replace(m, objective=None, cause="a cause") if m.number in failed else m for m in ended]


def evolved(generations: int, members: int = 8, seed: int = 3) -> list[Generation]:
    out = [ran(first_generation(AXES, DEFAULT, members=members, seed=seed))]
    while len(out) < generations:
        out.append(ran(next_generation(out[-1], AXES, seed=seed)))
    return out


def test_values_lie_where_their_share_of_an_axis_says() -> None:
    shares = [number / 1000 for number in range(1000)]
    for key, axis in AXES.items():
        assert lies_on(AXES, {**DEFAULT, key: value_at(axis, 0.0)})
        assert lies_on(AXES, {**DEFAULT, key: value_at(axis, 1 - 2**-53)})
    counts = [sum(value_at(AXES["related"], share) == number for share in shares) for number in range(9)]
    assert all(110 <= count <= 112 for count in counts)
    assert {value_at(AXES["form"], share) for share in shares} == {"a", "b", "c"}
    assert value_at(AXES["rate"], 1 / 3) == pytest.approx(1e-3)
    assert value_at(AXES["share"], 0.25) == 0.25


@pytest.mark.parametrize(
    ("key", "value", "down", "up"),
    [
        ("rate", 1e-3, 8e-4, 1.2e-3),
        ("rate", 9e-2, 7.2e-2, 1e-1),
        ("share", 0.0, 0.0, 0.0),
        ("related", 2, 1, 3),
        ("related", 0, 0, 1),
        ("width", 40, 32, 48),
        ("form", "a", "a", "b"),
        ("form", "b", "a", "c"),
    ],
)
def test_values_move_by_a_fifth_or_to_a_neighbor_and_stay_on_the_axis(key: str, value: Any, down: Any, up: Any) -> None:
    moved = [explored(AXES[key], value, 0.25, where) for where in (0.49, 0.5)]
    assert moved == [down, up] if isinstance(value, str) else moved == pytest.approx([down, up])
    assert {type(each) for each in moved} == {type(value)}


def test_a_quarter_of_the_values_and_those_that_the_axis_has_not_are_drawn_anew() -> None:
    assert explored(AXES["related"], 2, 0.24, 0.95) == 8
    assert explored(AXES["related"], None, 0.9, 0.95) == 8
    assert explored(AXES["form"], "z", 0.9, 0.95) == "c"
    assert explored(AXES["related"], 64, 0.9, 0.1) == 8


def test_the_first_generation_is_the_configuration_and_draws_that_do_not_depend_on_the_others() -> None:
    first, more = (first_generation(AXES, DEFAULT, members=count, seed=3) for count in (4, 16))
    assert first == more[:4]
    assert (first[0].values, first[0].control) == (DEFAULT, True)
    assert all(lies_on(AXES, member.values) and not member.control for member in more[1:])
    assert len({str(member.values) for member in more}) == 16
    turned = first_generation(dict(reversed(AXES.items())), DEFAULT, members=4, seed=3)
    assert [member.values for member in turned] == [member.values for member in first]
    assert first_generation(AXES, DEFAULT, members=4, seed=4)[1] != first[1]


def test_the_last_quarter_takes_over_the_best_and_the_others_go_on() -> None:
    before = ran(first_generation(AXES, DEFAULT, members=8, seed=3))
    ranked = sorted(before[1:], key=lambda member: member.objective or 0.0)
    best = sorted(before, key=lambda member: member.objective or 0.0)[-2:]
    after = next_generation(before, AXES, seed=3)
    assert after == next_generation(before, AXES, seed=3)
    for was, member in zip(before, after, strict=True):
        assert (member.number, member.generation, member.objective) == (was.number, 1, None)
        if was in ranked[:2]:
            assert before[member.parent or 0] in best
            assert lies_on(AXES, member.values)
            assert member.values != before[member.parent or 0].values
        else:
            assert (member.parent, member.values, member.control) == (was.number, was.values, was.control)
    assert next_generation(before, AXES, seed=4) != after


def test_the_control_goes_on_where_it_is_the_last_and_ends_where_it_fails() -> None:
    first = first_generation(AXES, DEFAULT, members=4, seed=0)
    before = [replace(member, objective=float(member.number)) for member in first]
    after = next_generation(before, AXES, seed=0)
    assert [member.parent for member in after] == [0, 3, 2, 3]
    assert (after[0].values, after[0].control) == (DEFAULT, True)
    failed = [replace(before[0], objective=None, cause="a cause"), *before[1:]]
    later = next_generation(failed, AXES, seed=0)
    assert (later[0].parent, later[0].control, later[0].cause) == (3, False, None)
    assert control_of(later) is None


def test_those_that_failed_are_replaced_by_the_best_that_did_not() -> None:
    before = ran(first_generation(AXES, DEFAULT, members=8, seed=1), 1, 2, 3, 5)
    after = next_generation(before, AXES, seed=1)
    best = sorted((m for m in before if m.objective is not None), key=lambda m: -(m.objective or 0.0))[:2]
    assert {after[number].parent for number in (1, 2, 3, 5)} <= {member.number for member in best}
    assert [after[number].parent for number in (0, 4, 6, 7)] == [0, 4, 6, 7]
    alone = ran(first_generation(AXES, DEFAULT, members=4, seed=1), 0, 1, 3)
    assert [member.parent for member in next_generation(alone, AXES, seed=1)] == [2, 2, 2, 2]


def test_generations_find_better_values_and_say_where_they_come_from(tmp_path: Path) -> None:
    generations = evolved(12)
    assert all(lies_on(AXES, member.values) for generation in generations for member in generation)
    first, last = ([height(member.values) for member in generations[number]] for number in (0, -1))
    assert sum(last) / 8 > sum(first) / 8 + 3
    assert max(last) >= max(first)
    best = best_of(generations)
    assert best
    line = line_of(generations, best)
    assert [member.generation for member in line] == list(range(best.generation + 1))
    assert all(child.parent == parent.number for parent, child in pairwise(line))
    controls = [control_of(generation) for generation in generations]
    assert {str(control.values) for control in controls if control} == {str(DEFAULT)}
    generations[-1] = [Member(generation=11, number=n, parent=n, values=DEFAULT, cause="a cause") for n in range(8)]
    population_picture(generations, tmp_path / "study.png", "wide", "mIoU %")
    assert (tmp_path / "study.png").read_bytes()[:4] == b"\x89PNG"
    table = population_table(generations, "mIoU %", list(AXES))
    assert list(table.columns[4].cells) == ["0"] * 11 + ["8"]
    assert list(table.columns[3].cells)[:2] == [f"{height(DEFAULT):.2f}"] * 2


def drawn(root: Path, train: int = 16, val: int = 4) -> dict[str, str]:
    """Options that name a data set of so many images, drawn below `root`."""
    synthetic.draw(root, train=train, val=val, size=64, classes=4)
    return {"data.voc": str(root), "data.classes": str(root / "classes.txt")}


@pytest.mark.parametrize(
    ("values", "axis", "found"),
    [
        ((), "classifier.epochs=integer(1,3)", "classifier.epochs with --population"),
        ((), "seed=integer(1,3)", "seed with --population"),
        ((), "classifier.neck=integer(0,16)", "16 is of other networks than 0"),
        ((), "classifier.affinity.form=choice(bilinear,cosine)", "of other networks"),
        (("weights.classifier=FILE",), "localize.related=integer(0,3)", "does not fit|no file"),
        (
            ("supervision=full", "segmenter.init=pretrained", "predict.split=train"),
            "segmenter.width=integer(8,16)",
            "without a classifier that is trained",
        ),
    ],
)
def test_what_no_population_can_search_is_refused(
    tmp_path: Path, values: tuple[str, ...], axis: str, found: str
) -> None:
    resolved = resolve("voc", "small", drawn(tmp_path / "VOC2012"), values)
    objective = "segmentation" if "supervision=full" in values else "maps"
    axes, workspace = parse_axes([axis]), Workspace(tmp_path / "w")
    with pytest.raises(UserError, match=found):
        check_population(Population(name="p", resolved=resolved, workspace=workspace, axes=axes, objective=objective))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--population", "4", "--trials", "9", "--halving", "0"), "--trials and --halving with --population"),
        (("--generations", "4"), "--generations without --population"),
        (("--population", "3"), "equal to 4"),
    ],
)
def test_a_population_has_a_budget_of_its_own(tmp_path: Path, options: tuple[str, ...], found: str) -> None:
    command = ["study", "search", "voc", "--name", "p", "--workspace", str(tmp_path), "--axis", "seed=integer(0,1)"]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code != 0
    assert found in " ".join(result.output.split())


class NoTracker:
    """Takes what is handed to MLflow."""

    run_id = "parent"

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """Lets members run without Ray, to scores by their values; those whose names are put into this set fail."""
    failing: set[str] = set()
    workspace = Workspace(tmp_path / "w")

    @contextlib.contextmanager
    def no_ray(space: Population, *, kind: str, identity: str) -> Iterator[Any]:
        yield NoTracker()

    def run_trials(trials: Sequence[Trial], common: Common, *, parallel: int) -> Outcome:
        val_map: dict[str, float | None] = {}
        for trial in trials:
            config = resolve(trial.setting, common.recipe, trial.values).config
            assert config.weights.initial is None or Path(config.weights.initial).is_file()
            val_map[trial.name] = 100 * config.classifier.random_pair_rate
            output = workspace.finished("train_classifier", trial.name)
            output.mkdir(exist_ok=True)
            (output / "weights.pt").touch()
            workspace.record_outputs(trial.name, {"train_classifier": output})
        failures = {name: UserError("a loss that is not finite", "", "") for name in val_map if name in failing}
        done = {name: value for name, value in val_map.items() if name not in failing}
        return Outcome({name: [] for name in done}, failures, done)

    monkeypatch.setattr(population_search, "running", no_ray)
    monkeypatch.setattr(population_search, "run_trials", run_trials)
    return failing


def rates(tmp_path: Path, generations: int) -> Population:
    """A population whose objective grows with a value."""
    axes, workspace = parse_axes(["classifier.random_pair_rate=uniform(0,1)"]), Workspace(tmp_path / "w")
    resolved = resolve("voc", "small", drawn(tmp_path / "VOC2012"), ["classifier.epochs=2"])
    return Population(
        name="p",
        resolved=resolved,
        workspace=workspace,
        axes=axes,
        objective="val_map",
        members=4,
        generations=generations,
    )


def test_a_search_goes_on_without_the_members_that_failed_and_says_why(
    tmp_path: Path, fails: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fails |= {"p-g00-m01", "p-g01-m00"}
    generations = run_population(rates(tmp_path, 3))
    assert generations[0][1].cause == "a loss that is not finite"
    assert generations[1][1].parent != 1
    assert [control_of(generation) is not None for generation in generations] == [True, False, False]
    best = best_of(generations)
    assert best
    printed = " ".join(capsys.readouterr().out.split())
    assert "p-g01-m00 failed: a loss that is not finite" in printed
    assert "12 members in 3 generations of 2 epochs" in printed
    again = resolve(file=tmp_path / "w/runs/p/best.toml")
    assert again.config.classifier.random_pair_rate == pytest.approx((best.objective or 0.0) / 100)
    assert again.config.seed == best.generation
    assert (again.config.weights.initial is None) == (best.generation == 0)
    assert run_population(rates(tmp_path, 3)) == generations
    assert run_population(rates(tmp_path, 4))[:3] == generations


def test_a_generation_that_fails_as_a_whole_ends_the_search_behind_what_it_found(
    tmp_path: Path, fails: set[str]
) -> None:
    fails |= {f"p-g01-m{number:02d}" for number in range(4)}
    with pytest.raises(UserError, match=r"no member of generation 1 of p .* a loss that is not finite"):
        run_population(rates(tmp_path, 3))
    kept = json.loads((tmp_path / "w/runs/p/study.json").read_text())
    assert [len(generation) for generation in kept["generations"]] == [4, 4]
    assert kept["best"].startswith("p-g00")
    assert (tmp_path / "w/runs/p/best.toml").exists()
    fails |= {f"p-g00-m{number:02d}" for number in range(4)}
    with pytest.raises(UserError, match="no member of generation 0 of p"):
        run_population(rates(tmp_path, 3))


def stages_of(workspace: Workspace) -> dict[str, int]:
    """When each finished stage was computed."""
    return {path.parent.name: path.stat().st_mtime_ns for path in workspace.store.glob(f"*/{SUMMARY}")}


@pytest.mark.slow
def test_a_population_trains_on_from_the_weights_of_the_best_and_computes_nothing_twice(
    ray_local: None, tmp_path: Path
) -> None:
    from mlflow.tracking import MlflowClient

    resolved = resolve("voc", "small", drawn(tmp_path / "VOC2012", train=48, val=32), TINY)
    workspace = Workspace(tmp_path / "workspace")
    axes = parse_axes(["classifier.optimizer.learning_rate=loguniform(1e-4,1e-1)", "localize.related=integer(0,2)"])
    common: dict[str, Any] = {"name": "wide", "resolved": resolved, "workspace": workspace, "axes": axes, "members": 4}
    first = run_population(Population(**common, generations=1))
    before = stages_of(workspace)
    assert before
    generations = run_population(Population(**common, generations=2))
    assert generations[:1] == first
    assert all(member.objective is not None for generation in generations for member in generation)
    assert control_of(generations[1]) == generations[1][0]
    after = stages_of(workspace)
    assert {name: after[name] for name in before} == before

    population = Population(**common, generations=2)
    for member in generations[1]:
        run = workspace.outputs(population.member_name(member))
        began = Path(population.values(member)["weights.initial"])
        parent = workspace.outputs(population.member_name(generations[0][member.parent or 0]))
        assert began.parent == parent["train_classifier"]
        files = began, run["train_classifier"] / "weights.pt"
        states = [torch.load(path, weights_only=True)["state_dict"] for path in files]
        assert any(not torch.equal(value, states[1][name]) for name, value in states[0].items())

    assert run_population(population) == generations
    assert stages_of(workspace) == after
    folder, best = workspace.run("wide"), best_of(generations)
    assert best
    again = pipeline.run(resolve(file=folder.best), workspace, "again", until="localize")
    assert {stage for stage, computed in again.context.computed.items() if computed} == {"report"}
    assert max(score.miou for score in again.scores) >= (best.objective or 0.0)
    assert again.context.result("train_classifier", StageResult).identity is not None

    kept = json.loads(folder.study.read_text())
    assert [[member["objective"] for member in generation] for generation in kept["generations"]] == [
        [member.objective for member in generation] for generation in generations
    ]
    assert kept["best"] == population.member_name(best)
    assert folder.study_picture.read_bytes()[:4] == b"\x89PNG"
    client = MlflowClient(f"sqlite:///{workspace.tracking_store}")
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    names = {population.member_name(member) for generation in generations for member in generation}
    assert set(runs) == {"wide", "again", *names}
    assert runs["wide-g01-m00"].data.tags["mlflow.parentRunId"] == runs["wide"].info.run_id
    assert runs["wide-g01-m00"].data.params["generation"] == "1"
    history = client.get_metric_history(runs["wide"].info.run_id, "objective.control")
    assert [(point.step, point.value) for point in history] == [(n, g[0].objective) for n, g in enumerate(generations)]

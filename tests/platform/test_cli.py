"""The command line: help, configuration, and bad input that ends in one clear message."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform import pipeline
from mcis.platform.cli import app
from mcis.platform.config.keys import StageName, leaves
from mcis.platform.config.resolve import resolve
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace

runner = CliRunner()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "VOC2012"
    synthetic.draw(folder, train=12, val=4, size=64, classes=2)
    return folder


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["--help"], ["demo", "run", "study", "predict", "export", "config", "doctor", "ui", "runs", "gc"]),
        (["config", "show", "voc", "--recipe", "scratch"], ["│ seed "]),
        (["runs", "--workspace"], ["no runs in"]),
        (["gc", "--workspace"], ["nothing to remove"]),
    ],
)
def test_a_look_imports_neither_ray_nor_torch(command: list[str], said: list[str], tmp_path: Path) -> None:
    Workspace(tmp_path)
    arguments = [*command, str(tmp_path)] if command[-1] == "--workspace" else command
    code = f"import sys; sys.argv = {['mcis', *arguments]}\nfrom mcis.platform.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    code += "assert not {'ray', 'torch', 'mlflow'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in said)


def test_an_experiment_is_saved_shown_and_changed(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    given = ["--voc", str(root), "--recipe", "scratch", "--set", "localize.related=5"]
    given += ["--set", "data.train_list=[/red]"]  # no markup
    done = runner.invoke(app, ["config", "show", "voc", *given, "--save", str(path)])
    assert (done.exit_code, done.output) == (0, f"experiment: {path}\n")
    shown = runner.invoke(app, ["config", "show", "--config", str(path), "--set", "seed=7"], env={"COLUMNS": "400"})
    lines = {line.split("│")[1].strip(): line for line in shown.output.splitlines() if line.count("│") > 4}
    assert {key for key, _ in leaves(resolve("voc", "scratch").config)} <= set(lines)
    for key, value, origin in (
        ("seed", "7", "--set"),
        ("localize.related", "5", str(path)),
        ("data.train_list", "[/red]", str(path)),
        ("data.voc", str(root), str(path)),
        ("recipe", "scratch", str(path)),
    ):
        assert value in lines[key]
        assert origin in lines[key]


READING = {
    "export": ["export", "masks", "--name", "x", "--out", "OUT"],
    "predict": ["predict", "photos", "--name", "x", "--out", "OUT"],
    "index show": ["index", "show", "--name", "x"],
    "index browse": ["index", "browse", "--name", "x"],
    "runs": ["runs"],
    "gc": ["gc", "--run", "x", "--delete"],
    "ui": ["ui"],
}


@pytest.mark.parametrize("command", READING)
def test_commands_that_only_read_make_no_workspace(command: str, tmp_path: Path) -> None:
    absent = tmp_path / "typo"
    arguments = [str(tmp_path / "out") if a == "OUT" else a for a in READING[command]]
    done = runner.invoke(app, [*arguments, "--workspace", str(absent)])
    assert done.exit_code == 1
    assert f"{absent} is not a workspace" in done.output
    assert not list(tmp_path.iterdir())


def test_the_ui_names_the_page_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: commands.append(command))
    workspace = Workspace(tmp_path)
    empty = runner.invoke(app, ["ui", "--workspace", str(tmp_path), "--port", "5005"])
    assert "no experiment yet" in empty.output
    assert not workspace.tracking_store.exists()
    Tracker(workspace, "mine", identity="").finish("FINISHED")
    done = runner.invoke(app, ["ui", "--workspace", str(tmp_path), "--port", "5005"])
    assert "runs: http://127.0.0.1:5005/#/experiments/1/runs" in done.output
    assert all(command[1:4] == ["-m", "mlflow", "ui"] for command in commands)
    assert len(commands) == 2


def completions(*words: str) -> list[str]:
    """What the shell offers for the last of some words."""
    environment = {"_MCIS_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words))}
    environment["COMP_WORDS"] = " ".join(["mcis", *words])
    return runner.invoke(app, [], env=environment, prog_name="mcis").output.split()


def test_the_shell_completes_the_pipelines_stages() -> None:
    assert completions("run", "voc", "--until", "train_") == ["train_classifier", "train_affinity", "train_segmenter"]
    assert get_args(StageName) == pipeline.STAGE_NAMES


SMALL = ["run", "voc", "--name", "x", "--recipe", "scratch"]
BAD = {
    "unknown sources": (["run", "vox", "--name", "x"], "did you mean voc"),
    "a data set of another tool": (["run", "coco", "--name", "x"], "mcis import makes a table"),
    "a file that is none": (["run", "--name", "x", "--config", "nowhere.toml"], "nowhere.toml cannot be read"),
    "wrong type": (["run", "voc", "--name", "x", "--set", "classifier.epochs=many"], "classifier.epochs"),
    "no data": (SMALL, "--voc"),
    "missing folder": ([*SMALL, "--voc", "nowhere"], "no folder"),
    "name with a slash": (["run", "voc", "--name", "../x", "--recipe", "scratch", "--voc", "ROOT"], "run name"),
    "weights that are no file": (
        [*SMALL, "--voc", "ROOT", "--set", "weights.classifier_backbone=w.pth"],
        "w.pth is no file",
    ),
    "more workers than CPUs": ([*SMALL, "--voc", "ROOT", "--set", "compute.workers=40"], "compute.workers"),
    "workspace that is a file": ([*SMALL, "--voc", "ROOT", "--workspace", "FILE"], "workspace"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_one_message_without_a_traceback(case: str, root: Path, tmp_path: Path) -> None:
    arguments, expected = BAD[case]
    (tmp_path / "file").write_text("")
    classes = ["--set", f"data.classes={root / 'classes.txt'}"] if "ROOT" in arguments else []
    places = {"ROOT": str(root), "FILE": str(tmp_path / "file")}
    arguments = [places.get(a, a) for a in arguments] + classes
    if "--workspace" not in arguments:
        arguments += ["--workspace", str(tmp_path / "workspace")]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert expected in done.output
    assert "expected:" in done.output
    assert "remedy:" in done.output
    assert "Traceback" not in done.output


def test_a_recipe_offline_says_which_file_it_needs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy that refuses connections is what being offline looks like to the downloader.
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    arguments = ["run", "voc", "--name", "x", "--recipe", "paper", "--voc", str(root), "--workspace", str(tmp_path)]
    done = runner.invoke(app, [*arguments, "--set", f"data.classes={root / 'classes.txt'}"])
    assert done.exit_code == 1
    assert str(tmp_path / "weights" / "vgg16-397923af.pth") in done.output
    assert "weights.classifier_backbone=PATH" in done.output


def test_a_run_says_what_to_expect_at_first(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ray(*given: object, **named: object) -> None:
        raise UserError("here Ray would start", "", "")

    monkeypatch.setattr("mcis.platform.api.ray_session", no_ray)
    arguments = ["run", "voc", "--voc", str(root), "--recipe", "scratch", "--name", "x", "--workspace", str(tmp_path)]
    arguments += ["--set", f"data.classes={root / 'classes.txt'}"]
    done = runner.invoke(app, arguments, env={"COLUMNS": "200"})
    assert "images:  " in done.output[: done.output.index("here Ray would start")]


def test_doctor_finds_a_disk_too_small_and_makes_no_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**10))
    done = runner.invoke(app, ["doctor", "--workspace", str(tmp_path / "none")], env={"COLUMNS": "200"})
    assert done.exit_code == 1, done.output
    assert "of 1.0 kB free" in done.output
    assert not (tmp_path / "none").exists()


def test_doctor_looks_at_every_part_and_is_content_here(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mcis.platform.cli", "doctor", "--workspace", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout
    for part in ("python", "torch", "gpu", "dense CRF", "ray", "mlflow", "disk", "cores"):
        assert part in done.stdout
